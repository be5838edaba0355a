"""What scripts share: arguments, logging, one-line errors.

A script parses its arguments, calls one function of the library, and saves. Bad input ends it with exit code 2 and
one line that says what to do.
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

from linumpy import device as devices
from linumpy.errors import LinumpyError

#: Errors of the input or the machine, not of the program.
EXPECTED = (LinumpyError, ValueError, TypeError, OSError, MemoryError)


#: A parameter as the library's errors name it: ``channel=5``, or ``overwrite=True``; ``channel=`` where one is wanted.
_PARAMETER = re.compile(r"(?<![^\s(])([a-z_]+)=(?:True\b)?(?=(\S?))")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def in_options(self, message: object) -> str:
        """Spell an error of the library for who typed options: ``--channel 5`` instead of ``channel=5``."""
        options = {action.dest: action for action in self._actions if action.option_strings}

        def spelled(found: re.Match[str]) -> str:
            # levels= of the writer is --n_levels, source_spacing= of the resampling is --spacing
            names = (found[1], f"n_{found[1]}", found[1].removeprefix("source_"))
            action = next((options[name] for name in names if name in options), None)
            if action is None:
                return found[0]
            if found[2] and found[2] not in ",;.)":
                return f"{action.option_strings[0]} "
            hint = action.metavar or ""
            return " ".join([action.option_strings[0], *([hint] if isinstance(hint, str) else hint)]).rstrip()

        return _PARAMETER.sub(spelled, str(message))

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and exit with 2."""
        self.exit(2, one_line(self.prog, message) + "\n")


def one_line(program: str, message: object) -> str:
    """Spell an error as one line."""
    text = " ".join(str(message).split())
    if not text:  # some of the system's errors say nothing but their name
        text = "not enough memory" if isinstance(message, MemoryError) else type(message).__name__
    return f"{program}: error: {text}"


def source(text: str) -> str | Path:
    """Take an argument that names what is read: a path, or a URL as it is spelled, which a ``Path`` would mangle."""
    return text if "://" in text else Path(text)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every script takes."""
    parser.add_argument("-v", "--verbose", action="count", default=0, help="Say more; twice, with tracebacks.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an output that is there.")


def add_gpu_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--use_gpu`` and ``--no-use_gpu``; with neither, the GPU is used if there is one."""
    parser.add_argument(
        "--use_gpu",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Work on the GPU, or on the CPU. [the GPU if there is one; LINUMPY_DEVICE=cpu or cuda chooses too]",
    )


def add_volume_arguments(parser: argparse.ArgumentParser, *, all_of_them: bool) -> None:
    """Add what is read of an image, and how large its voxels are.

    Parameters
    ----------
    parser : ArgumentParser
        Of a script that reads OME-Zarr.
    all_of_them : bool
        Whether the output holds all times and channels, where none is chosen.
    """
    default = "all" if all_of_them else "the only one"
    group = parser.add_argument_group("what is read")
    group.add_argument("--channel", type=int, metavar="C", help=f"Channel to take, counted from 0. [{default}]")
    group.add_argument("--time", type=int, metavar="T", help=f"Time to take, counted from 0. [{default}]")
    group.add_argument(
        "--spacing", type=float, nargs=3, metavar=("Z", "Y", "X"),
        help="Voxel spacing of the finest resolution in µm, instead of the metadata's. [as the metadata says]",
    )  # fmt: skip


def volume_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`add_volume_arguments` as the library's functions take them."""
    return {"channel": parsed.channel, "time": parsed.time, "spacing": parsed.spacing and tuple(parsed.spacing)}


def add_surface_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how the surface of the tissue is looked for."""
    group = parser.add_argument_group("how the surface is found")
    group.add_argument(
        "--s_xy", type=int, default=15, metavar="N", help="Lateral mean over N × N voxels. [%(default)s]"
    )
    group.add_argument(
        "--s_z", type=float, default=2.0, metavar="S", help="Standard deviation of the Gaussian along z, voxels. [2]"
    )
    group.add_argument("--no_log", action="store_true", help="Take intensity itself, not its logarithm.")
    group.add_argument(
        "--detect_cutting_errors",
        action="store_true",
        help="Where the smoothed intensity is largest above the surface, take that for it.",
    )
    group.add_argument(
        "--definition",
        choices=("linumpy", "edge"),
        default="linumpy",
        help="linumpy: s_z / 2 below the voxel of the steepest rise, that is about s_z / 2 + 1 voxels below the edge. "
        "edge: the edge itself, to fractions of a voxel, where one stands out. [%(default)s]",
    )
    group.add_argument(
        "--min_contrast",
        type=float,
        default=5.0,
        metavar="C",
        help="Of an edge: its rise over the noise along its A-line. [%(default)s]",
    )


def surface_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of :func:`add_surface_arguments` as a method of the library takes them."""
    names = ("s_xy", "s_z", "detect_cutting_errors", "definition", "min_contrast")
    return {name: getattr(parsed, name) for name in names} | {"use_log": not parsed.no_log}


def choose_device(parsed: argparse.Namespace) -> bool:
    """Choose the device by the arguments of :func:`add_gpu_arguments`.

    Returns
    -------
    bool
        Whether to work on the GPU.

    Raises
    ------
    GpuUnavailableError
        A GPU is asked for and there is none; the message says why.
    ValueError
        ``LINUMPY_DEVICE`` names no device.
    """
    wish = {None: None, True: "cuda", False: "cpu"}[parsed.use_gpu]
    return devices.resolve(wish).is_cuda


def closing_line(
    input: str | Path | Sequence[str | Path], output: str | Path, device: bool | str, seconds: float, nbytes: int
) -> str:
    """Spell the line that a script prints last.

    Parameters
    ----------
    input : str or Path, or sequence of them
        What was read; of several, the first and how many more.
    output : str or Path
        What was written.
    device : bool or str
        Whether the GPU was used, as :func:`choose_device` says, or the name of a device.
    seconds : float
        How long it took.
    nbytes : int
        Bytes read, decoded.

    Returns
    -------
    str
        Without a line break.
    """
    sources = [input] if isinstance(input, str | Path) else list(input)
    more = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    where = device if isinstance(device, str) else "GPU" if device else "CPU"
    rate = size_text(nbytes / max(seconds, 1e-9))
    return f"{sources[0]}{more} -> {output} on {where}: {size_text(nbytes)}, {seconds:.2f} s, {rate}/s"


def size_text(nbytes: float) -> str:
    """Spell a number of bytes in the unit in which people read it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def run(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None
) -> int:
    """Parse the arguments and run the body of a script.

    Returns
    -------
    int
        Exit code: 0, 2 for bad input, 130 after an interrupt, 143 after a polite end (SIGTERM).
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
        # Of an empty message the kind of the error is told.
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
    """Let a character that a stream cannot encode, as of a file name, be no error; nor a stream that is closed.

    It would come after the work is done.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


class _TerminatedError(BaseException):
    """Somebody, such as a batch system, wants this process to end."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the program, so that half-written outputs are removed; it would end it on the spot."""

    def end(number: int, frame: object) -> NoReturn:
        raise _TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield  # only there can a signal be handled
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
