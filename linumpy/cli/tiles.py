"""Code of commands that work in tiles: parameters from their options, a progress bar, and the last line."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linumpy.cli.options import choose_device, volume_options
from linumpy.io.paths import is_archive

#: Options that have the same name as the parameter of the library; a command has some of them.
_SAME_NAME = ("level", "levels", "codec", "overwrite", "distributed")


@dataclass(frozen=True)
class TileCommand:
    """A command that works in tiles, from its start to its last line.

    Attributes
    ----------
    parsed : Namespace
        Arguments of the command: ``input``, ``output``, and the options of :func:`add_volume_arguments` and
        :func:`add_tile_arguments`.
    use_gpu : bool
        The result of :func:`choose_device`.
    begin : float
        Time of the start, by :func:`time.perf_counter`.
    """

    parsed: argparse.Namespace
    use_gpu: bool
    begin: float

    @classmethod
    def start(cls, parsed: argparse.Namespace) -> TileCommand:
        """Choose the device, and start the clock."""
        return cls(parsed, choose_device(parsed), time.perf_counter())

    def parameters(self) -> dict[str, Any]:
        """Return the shared options that the command has, and the device, as parameters of the library."""
        options = vars(self.parsed)
        shared = {name: options[name] for name in _SAME_NAME if name in options}
        if "tile_shape" in options:
            shared["tile_shape"] = self.parsed.tile_shape and tuple(self.parsed.tile_shape)
        return shared | volume_options(self.parsed) | {"use_gpu": self.use_gpu}

    def input_nbytes(self) -> int:
        """Return the decoded bytes of the volumes of ``input`` that the options select."""
        from linumpy.mosaic.io.image import open_mosaic

        return open_mosaic(self.parsed.input, getattr(self.parsed, "level", 0), **volume_options(self.parsed)).nbytes

    @contextmanager
    def progress(self, label: str, nbytes: int) -> Iterator[dict[str, Any]]:
        """Show a progress bar of `nbytes` bytes; yield :meth:`parameters` and the parameter ``progress``."""
        from linumpy.progress import bytes_progress

        with bytes_progress(label, nbytes) as progress:
            yield self.parameters() | {"progress": progress}

    def close(self, nbytes: int) -> None:
        """Print the last line; `nbytes` is the number of decoded bytes that were read."""
        seconds = time.perf_counter() - self.begin
        print(closing_line(self.parsed.input, self.parsed.output, self.use_gpu, seconds, nbytes))


def closing_line(
    input: str | Path | Sequence[str | Path], output: str | Path, device: bool | str, seconds: float, nbytes: int
) -> str:
    """Return the last line that a command prints.

    Parameters
    ----------
    input : str or Path, or sequence of them
        The sources; of several sources, the first is printed with the number of the others.
    output : str or Path
        The output; for an OME-Zarr image the line also has its decoded and stored bytes, and their ratio.
    device : bool or str
        The result of :func:`choose_device`, or the name of a device.
    seconds : float
        Duration.
    nbytes : int
        Decoded bytes that were read.
    """
    sources = [input] if isinstance(input, str | Path) else list(input)
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    name = device if isinstance(device, str) else "GPU" if device else "CPU"
    rate = size_text(nbytes / max(seconds, 1e-9))
    line = f"{sources[0]}{more} -> {output} on {name}: {size_text(nbytes)}, {seconds:.2f} s, {rate}/s"
    sizes = _sizes(Path(output))
    if sizes is None or not sizes[1]:
        return line
    return f"{line}; {size_text(sizes[0])} stored in {size_text(sizes[1])}, ratio {sizes[0] / sizes[1]:.3g}"


def _sizes(output: Path) -> tuple[int, int] | None:
    """Return decoded and stored bytes of an OME-Zarr image, in a folder or ``.ozx`` file; None for other outputs."""
    if not is_archive(output) and not any((output / name).is_file() for name in ("zarr.json", ".zgroup")):
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
