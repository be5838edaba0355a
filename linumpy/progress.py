"""A progress bar of bytes, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bytes_progress(label: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, and nothing elsewhere.

    - `total`: bytes of all the work.

    Yields: Call it with the number of bytes that were processed since the last call.
    """
    from tqdm import tqdm

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=None) as bar:
        yield bar.update
