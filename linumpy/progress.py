"""Progress bars on a terminal, and lines that inform; neither of a command with ``--quiet``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Whether this process shows no bars, and no lines that only inform.
is_quiet = False


@contextmanager
def progress_bar(
    label: str, total: int, unit: str = "B", *, instead: Callable[[int], object] | None = None
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar with rate and time left on a terminal, and nothing elsewhere.

    - `total`: bytes of all the work or, with a `unit`, the number of those, such as slices.
    - `instead`: the function of a caller who shows progress in another way.

    Yields: Call it with the number of bytes, or of units, that were processed since the last call.
    """
    if instead is not None:
        yield instead
        return
    from tqdm import tqdm

    with tqdm(
        total=total, desc=label, unit=unit, unit_scale=unit == "B", unit_divisor=1024, leave=False,
        disable=is_quiet or None,
    ) as bar:  # fmt: skip
        yield bar.update


def say(*lines: object) -> None:
    """Print lines that inform, above the bars."""
    if not is_quiet:
        from tqdm import tqdm

        with tqdm.external_write_mode():
            print(*lines, sep="\n", flush=True)


class LogHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes lines of the log above the bars."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        from tqdm import tqdm

        with tqdm.external_write_mode():
            super().emit(record)
