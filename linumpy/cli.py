"""Arguments, logging and one-line errors of all commands.

A command parses its arguments and calls one function of the library. Bad input ends it with exit code 2 and one line
that says what to do.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from linumpy import __version__
from linumpy import device as devices
from linumpy.errors import LinumpyError
from linumpy.io.paths import is_archive

log = logging.getLogger(__name__)

#: Errors of the input or the machine, not of the program.
EXPECTED = (LinumpyError, ValueError, TypeError, OSError, MemoryError)

#: A parameter in an error of the library: ``channel=5``, or ``overwrite=True``; ``channel=`` without a value.
_PARAMETER = re.compile(r"(?<![^\s(])([a-z_]+)=(?:True\b)?(?=(\S?))")
#: Parameters of the library whose option has another name.
_OPTION_OF = {"new_spacing": "resolution"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with ``--version``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        version = f"%(prog)s {__version__}"
        self.add_argument("--version", action="version", version=version, help="Print the version, and exit.")

    def in_options(self, message: object) -> str:
        """Replace the parameters in an error of the library by the options: ``--channel 5`` for ``channel=5``."""
        options = {action.dest: action for action in self._actions if action.option_strings}

        def spelled(match: re.Match[str]) -> str:
            action = options.get(_OPTION_OF.get(match[1], match[1]))
            if action is None:
                return match[0]
            if match[2] and match[2] not in ",;.)":
                return f"{action.option_strings[0]} "
            hint = action.metavar or ""
            return " ".join([action.option_strings[0], *([hint] if isinstance(hint, str) else hint)]).rstrip()

        return _PARAMETER.sub(spelled, str(message))

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with 2."""
        self.exit(2, one_line(self.prog, message) + "\n")


def one_line(program: str, message: object) -> str:
    """Return an error as one line."""
    text = " ".join(str(message).split())
    if not text:  # some system errors have no message
        text = "not enough memory" if isinstance(message, MemoryError) else type(message).__name__
    return f"{program}: error: {text}"


def source(text: str) -> str | Path:
    """Parse a source: a path, or a URL, which stays text because ``Path`` would change it."""
    return text if "://" in text else Path(text)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command."""
    parser.add_argument("-v", "--verbose", action="count", default=0, help="Log more; twice, with tracebacks.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing output.")


class _Levels(argparse.Action):
    """Stores the number of resolutions; warns if the option is given by its old name."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option == "--n_levels":
            log.warning("--n_levels is called --levels now")
        setattr(namespace, self.dest, values)


def add_levels_argument(parser: argparse.ArgumentParser, shown: str = "") -> None:
    """Add ``--levels``, the number of resolutions to write; by default 1, or None if `shown` describes the default."""
    parser.add_argument(
        "--levels", "--n_levels", action=_Levels, type=int, default=None if shown else 1, metavar="N",
        help=f"Number of resolutions to write. [{shown or 1}]",
    )  # fmt: skip


def add_codec_argument(parser: argparse.ArgumentParser, shown: str = "as the input's") -> None:
    """Add ``--codec``, how chunks are compressed."""
    parser.add_argument(
        "--codec", metavar="NAME",
        help="How chunks are compressed: zstd, lz4, gzip, none, blosc:lz4 or blosc:zstd with :byte, :bit or :none for "
        f"the shuffle; :small behind it for less bytes and more time, +crc32c for a checksum. [{shown}]",
    )  # fmt: skip


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--use_gpu`` and ``--no-use_gpu``; with neither, the GPU is used if there is one."""
    parser.add_argument(
        "--use_gpu",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Work on the GPU, or on the CPU. [the GPU if there is one; LINUMPY_DEVICE=cpu or cuda chooses too]",
    )


def add_cluster_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``, for a command that works in tiles; :func:`choose_device` then checks the workers' devices."""
    parser.add_argument(
        "--cluster", dest="distributed", metavar="ADDRESS",
        help="Work on the workers of a dask cluster, whose scheduler has this address. [here]",
    )  # fmt: skip


def add_volume_arguments(parser: argparse.ArgumentParser, *, all_of_them: bool) -> None:
    """Add the options that select a channel and a time of an image and replace its voxel spacing.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of a command that reads OME-Zarr.
    all_of_them : bool
        Whether the output holds all times and channels if none is selected.
    """
    default = "all" if all_of_them else "the only one"
    group = parser.add_argument_group("input")
    group.add_argument("--channel", type=int, metavar="C", help=f"Channel to read, counted from 0. [{default}]")
    group.add_argument("--time", type=int, metavar="T", help=f"Time to read, counted from 0. [{default}]")
    group.add_argument(
        "--spacing", type=float, nargs=3, metavar=("Z", "Y", "X"),
        help="Voxel spacing of the finest resolution in µm. [that of the metadata]",
    )  # fmt: skip


def volume_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_volume_arguments` as parameters of the library."""
    return {"channel": parsed.channel, "time": parsed.time, "spacing": parsed.spacing and tuple(parsed.spacing)}


def add_surface_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of surface detection."""
    group = parser.add_argument_group("surface detection")
    group.add_argument(
        "--s_xy", type=int, default=15, metavar="N", help="Lateral mean over N × N voxels. [%(default)s]"
    )
    group.add_argument(
        "--s_z", type=float, default=2.0, metavar="S", help="Standard deviation of the Gaussian along z, voxels. [2]"
    )
    group.add_argument("--no_log", action="store_true", help="Use the intensity, not its logarithm.")
    group.add_argument(
        "--detect_cutting_errors",
        action="store_true",
        help="Where the smoothed intensity has its maximum above the surface, take the maximum as the surface.",
    )
    group.add_argument(
        "--definition",
        choices=("linumpy", "edge"),
        default="linumpy",
        help="linumpy: s_z / 2 below the voxel of the steepest rise, that is about s_z / 2 + 1 voxels below the edge. "
        "edge: the edge itself, to fractions of a voxel, where its contrast suffices. [%(default)s]",
    )
    group.add_argument(
        "--min_contrast",
        type=float,
        default=5.0,
        metavar="C",
        help="Minimum contrast of an edge: its rise over the noise along its A-line. [%(default)s]",
    )


def surface_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_surface_arguments` as parameters of the library."""
    names = ("s_xy", "s_z", "detect_cutting_errors", "definition", "min_contrast")
    return {name: getattr(parsed, name) for name in names} | {"use_log": not parsed.no_log}


def choose_device(parsed: argparse.Namespace) -> bool:
    """Choose the device by the options of :func:`add_gpu_arguments`.

    Returns
    -------
    bool
        Whether to use the GPU; with ``--cluster``, the GPU of each worker: by default if all workers have one.

    Raises
    ------
    GpuUnavailableError
        ``--use_gpu`` without a CUDA device; the message gives the reason.
    ValueError
        ``LINUMPY_DEVICE`` names no device.
    """
    device, cluster = wished_device(parsed), getattr(parsed, "distributed", None)
    if cluster is None:
        return devices.resolve(device).is_cuda
    if device is not None:
        return device == "cuda"
    from linumpy.resample.tile_work import workers_have_gpus

    return workers_have_gpus(cluster)


def device_and_name(parsed: argparse.Namespace) -> tuple[str, str]:
    """Return the `device` for a function that also takes `distributed`, and its name for the closing line."""
    if parsed.distributed is None:
        return ("cuda", "GPU") if choose_device(parsed) else ("cpu", "CPU")
    return wished_device(parsed) or "auto", "the workers"


def wished_device(parsed: argparse.Namespace) -> str | None:
    """Return the device that the options of :func:`add_gpu_arguments` name; None if they name none."""
    return {None: None, True: "cuda", False: "cpu"}[parsed.use_gpu]


def gib(number: float) -> int:
    """Return the bytes of ``--device_memory``."""
    if not 1 <= number * 2**30 < 2**60:
        raise ValueError(f"--device_memory {number:g}: pass a number of GiB above 0")
    return int(number * 2**30)


def closing_line(
    input: str | Path | Sequence[str | Path], output: str | Path, device: bool | str, seconds: float, nbytes: int
) -> str:
    """Return the last line that a command prints.

    Parameters
    ----------
    input : str or Path, or sequence of them
        The sources; only the first is printed, with the number of the others.
    output : str or Path
        The output.
    device : bool or str
        The result of :func:`choose_device`, or the name of a device.
    seconds : float
        Duration.
    nbytes : int
        Bytes read, decoded.

    Returns
    -------
    str
        Without a line break. For an OME-Zarr output it ends with the stored bytes and the compression ratio.
    """
    sources = [input] if isinstance(input, str | Path) else list(input)
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    device_name = device if isinstance(device, str) else "GPU" if device else "CPU"
    rate = size_text(nbytes / max(seconds, 1e-9))
    line = f"{sources[0]}{more} -> {output} on {device_name}: {size_text(nbytes)}, {seconds:.2f} s, {rate}/s"
    sizes = _sizes(Path(output))
    if sizes is None or not sizes[1]:
        return line
    return f"{line}; {size_text(sizes[0])} stored in {size_text(sizes[1])}, ratio {sizes[0] / sizes[1]:.3g}"


def _sizes(output: Path) -> tuple[int, int] | None:
    """Return decoded and stored bytes of a Zarr folder or file; None for anything else."""
    if not is_archive(output) and not any((output / name).is_file() for name in ("zarr.json", ".zgroup")):
        return None
    from linumpy.io.source import sizes_of

    return sizes_of(output)


def size_text(nbytes: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= 0.9995 * 1000 / 1024 * size:  # three digits: from 1000 of a unit on, the next larger unit
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def run(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None
) -> int:
    """Parse the arguments and run the body of a command.

    Returns
    -------
    int
        Exit code: 0, 2 for bad input, 130 after an interrupt, 143 after SIGTERM.
    """
    _make_printable()
    parsed = parser.parse_args(arguments)
    verbose = getattr(parsed, "verbose", 0)
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        with _terminable():
            body(parsed)
    except EXPECTED as error:
        if verbose > 1:
            raise
        # An error without a message stays as it is, so that its type is printed.
        message = parser.in_options(error) if isinstance(parser, Parser) and str(error) else error
        print(one_line(parser.prog, message), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    except _TerminatedError:
        print(f"{parser.prog}: terminated", file=sys.stderr)
        return 143
    return 0


def _make_printable() -> None:
    """Escape characters that stdout or stderr cannot encode, and replace a closed stream.

    Otherwise printing the result, such as a file name, could fail after the work is done.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


class _TerminatedError(BaseException):
    """SIGTERM: a batch system or a user ends this process."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that half-written outputs are removed before the process ends."""

    def end(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
