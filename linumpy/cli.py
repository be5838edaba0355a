"""What scripts share: arguments, logging, one-line errors, progress.

A script parses its arguments, calls one function of the library, and saves. Bad input ends it with exit code 2 and
one line that says what to do.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from linumpy.errors import LinumpyError

#: Errors of the input or the machine, not of the program.
EXPECTED = (LinumpyError, ValueError, TypeError, OSError, MemoryError)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and exit with 2."""
        self.exit(2, one_line(self.prog, message) + "\n")


def one_line(program: str, message: object) -> str:
    """Spell an error as one line."""
    return f"{program}: error: {' '.join(str(message).split())}"


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every script takes."""
    parser.add_argument("-v", "--verbose", action="count", default=0, help="Say more; twice, with tracebacks.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an output that is there.")


def run(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None], arguments: Sequence[str] | None
) -> int:
    """Parse the arguments and run the body of a script.

    Returns
    -------
    int
        Exit code: 0, 2 for bad input, 130 after an interrupt.
    """
    parsed = parser.parse_args(arguments)
    verbose = getattr(parsed, "verbose", 0)
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        body(parsed)
    except EXPECTED as error:
        if verbose > 1:
            raise
        print(one_line(parser.prog, error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
    return 0


@contextmanager
def bytes_progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar of bytes on a terminal, and nothing elsewhere."""
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None) as bar:
        yield bar.update
