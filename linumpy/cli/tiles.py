"""Code of commands that work in tiles: parameters from their options, a progress bar, and the last line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from linumpy.cli.options import device_and_name, volume_options
from linumpy.io.paths import is_archive, is_zarr_folder
from linumpy.progress import progress_bar, say

Result = TypeVar("Result")

#: Options that have the same name as the parameter of the library; a command has some of them.
_SAME_NAME = ("level", "levels", "codec", "overwrite", "distributed", "tile_shape", "channel", "time", "spacing")


class TileCommand:
    """A command that works in tiles, from its start to its last line.

    - `parsed`: arguments of the command: ``input``, ``output``, and the options
      :data:`~linumpy.cli.options.VOLUME` and :data:`~linumpy.cli.options.TILES`.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.parsed, self.begin = parsed, time.perf_counter()
        self.device, self.device_name = device_and_name(parsed)

    def parameters(self) -> dict[str, Any]:
        """Return the shared options that the command has, and the device, as parameters of the library."""
        options = vars(self.parsed)
        return {name: options[name] for name in _SAME_NAME if name in options} | {"device": self.device}

    @cached_property
    def nbytes(self) -> int:
        """Decoded bytes of the volumes of ``input`` that the options select."""
        from linumpy.mosaic.io.image import open_mosaic

        return open_mosaic(self.parsed.input, getattr(self.parsed, "level", 0), **volume_options(self.parsed)).nbytes

    def call(
        self, label: str, step: Callable[..., Result], *arguments: object, nbytes: int | None = None, **options: object
    ) -> Result:
        """Call a step with its arguments and :meth:`parameters`, and show a progress bar.

        - `nbytes`: bytes of the whole bar; by default :attr:`nbytes`.
        """
        with progress_bar(label, self.nbytes if nbytes is None else nbytes) as progress:
            return step(*arguments, **options, **self.parameters(), progress=progress)

    def close(self, *lines: str, nbytes: int | None = None, what: str = "") -> None:
        """Print lines about the result, then the last line.

        - `nbytes`: number of decoded bytes that were read; by default :attr:`nbytes`.
        - `what`: what was read, in place of bytes.
        """
        seconds = time.perf_counter() - self.begin
        read = what or (self.nbytes if nbytes is None else nbytes)
        say(*lines, closing_line(self.parsed.input, self.parsed.output, self.device_name, seconds, read))


def closing_line(
    input: str | Path | Sequence[str | Path], output: str | Path, device: str, seconds: float, read: int | str
) -> str:
    """Return the last line that a command prints.

    Parameters
    ----------
    input : str or Path, or sequence of them
        The sources; of several sources, the first is printed with the number of the others.
    output : str or Path
        The output; for an OME-Zarr image the line also has its decoded and stored bytes, and their ratio.
    device : str
        Name of the device.
    seconds : float
        Duration.
    read : int or str
        Decoded bytes that were read, or what else was.
    """
    sources = [input] if isinstance(input, str | Path) else list(input)
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    line = f"{sources[0]}{more} -> {output} on {device}: "
    if isinstance(read, str):
        return f"{line}{read}, {seconds:.2f} s"
    line += f"{size_text(read)}, {seconds:.2f} s, {size_text(read / max(seconds, 1e-9))}/s"
    sizes = _sizes(output)
    if sizes is None or not sizes[1]:
        return line
    return f"{line}; {size_text(sizes[0])} stored in {size_text(sizes[1])}, ratio {sizes[0] / sizes[1]:.3g}"


def _sizes(output: str | Path) -> tuple[int, int] | None:
    """Return decoded and stored bytes of an OME-Zarr image, also at a URL or in a ZIP file; None for other outputs."""
    if "://" not in str(output) and not is_archive(Path(output)) and not is_zarr_folder(Path(output)):
        return None
    from linumpy.io.source import sizes_of

    return sizes_of(output)


def size_text(nbytes: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # Numbers have three digits, so from 1000 of a unit on the next unit is used; 999.5 is rounded to 1000.
        if nbytes >= 0.9995 * 1000 / 1024 * size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
