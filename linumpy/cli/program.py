"""The frame of every command: parser, log, errors in one line, and exit codes.

A command parses its arguments and calls one function of the library. Bad input ends the command with exit code 2 and
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
from typing import Any, NoReturn

from linumpy import kernel_cache, progress
from linumpy.cli.options import Option
from linumpy.errors import LinumpyError
from linumpy.version import __version__

log = logging.getLogger(__name__)

#: Errors that the input or the machine causes, not a fault of the program; they are printed in one line.
EXPECTED = (LinumpyError, ValueError, TypeError, OSError, MemoryError)

#: A parameter in an error of the library: ``channel=5``, ``overwrite=True``, or ``channel=`` without a value. Group 1
#: is the name, and group 2 the character after the ``=`` or ``=True``; it is empty before a space and at the end.
_PARAMETER = re.compile(r"(?<![^\s(])([a-z_]+)=(?:True\b)?(?=(\S?))")
#: Options of parameters of the library that have another name than the option.
_OPTION_OF = {"new_spacing": "resolution"}


class Parser(argparse.ArgumentParser):
    """A parser with ``--version``, whose errors are one line, and whose help keeps the description's line breaks."""

    def __init__(self, program: str, **options: Any) -> None:
        super().__init__(program, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        version = f"%(prog)s {__version__}"
        self.add_argument("--version", action="version", version=version, help="Print the version, and exit.")

    def in_options(self, message: object) -> str:
        """Return an error of the library with options in place of parameters: ``channel=5`` becomes ``--channel 5``."""
        options = {action.dest: action for action in self._actions if action.option_strings}

        def spelled(match: re.Match[str]) -> str:
            action = options.get(_OPTION_OF.get(match[1], match[1]))
            if action is None:
                return match[0]
            if match[2] and match[2] not in ",;.)":
                return f"{action.option_strings[0]} "
            metavar = action.metavar or ""
            return " ".join([action.option_strings[0], *([metavar] if isinstance(metavar, str) else metavar)]).rstrip()

        return _PARAMETER.sub(spelled, str(message))

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, and exit with code 2."""
        self.exit(2, one_line(self.prog, message) + "\n")


class Command:
    """A command: its name, its description, what it does with the parsed arguments, and its options.

    Every command also has ``--verbose`` and ``--quiet``.
    """

    def __init__(
        self, name: str, description: str | None, body: Callable[[argparse.Namespace], int | None], *options: Option
    ) -> None:
        self.name, self.description, self.body, self.options = name, description, body, options

    def parser(self) -> Parser:
        """Return the parser of the command."""
        parser = Parser(self.name, description=self.description)
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for option in self.options:
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            groups[option.group].add_argument(*option.names, **option.settings)
        lines = parser.add_mutually_exclusive_group()
        lines.add_argument("-v", "--verbose", action="count", default=0, help="Log more; twice, with tracebacks.")
        lines.add_argument(
            "-q", "--quiet", action="store_true",
            help="No progress bar and no summary: print only warnings, errors, and results that no file holds.",
        )  # fmt: skip
        return parser

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        """Parse the arguments and run the command.

        Returns
        -------
        int
            Exit code: what the body returns, 0 for None; 2 for bad input, 130 after an interrupt, 141 if the reader of
            the output has ended, 143 after SIGTERM.

        Raises
        ------
        SystemExit
            The arguments cannot be parsed (code 2), or ask for the help or the version (code 0).
        Exception
            Any error that is not one of :data:`EXPECTED`; with ``-vv`` also these.
        """
        _make_printable()
        kernel_cache.for_command()
        parser = self.parser()
        parsed = parser.parse_args(arguments)
        level = logging.INFO if parsed.verbose else logging.WARNING
        handlers = [progress.LogHandler(sys.stderr)]
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", handlers=handlers)
        progress.is_quiet = parsed.quiet
        try:
            with _terminable():
                code = self.body(parsed) or 0
                log.info("kernels: %s", kernel_cache.compiled())
                sys.stdout.flush()
        except BrokenPipeError:  # the reader of the output, such as head, has ended: nothing more is printed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        except EXPECTED as error:
            if parsed.verbose > 1:
                raise
            # For an error without a message, one_line prints the type.
            print(one_line(self.name, parser.in_options(error) if str(error) else error), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{self.name}: interrupted", file=sys.stderr)
            return 130
        except _TerminatedError:
            print(f"{self.name}: terminated", file=sys.stderr)
            return 143
        finally:
            progress.is_quiet = False
        return code


def one_line(program: str, message: object) -> str:
    """Return the line to print for an error: the name of the program and the message."""
    text = " ".join(str(message).split())
    if not text:  # some errors of the system have no message
        text = "not enough memory" if isinstance(message, MemoryError) else type(message).__name__
    return f"{program}: error: {text}"


def _make_printable() -> None:
    """Let stdout and stderr escape characters that they cannot encode, and replace a stream that is closed.

    Otherwise printing the result, such as a file name, could fail after the work is done.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


class _TerminatedError(BaseException):
    """SIGTERM was received: a batch system or a user ends this process."""


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
