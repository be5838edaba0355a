"""Add up how long the device copies, decodes and scatters slabs.

In: :class:`~linumpy.gpu.staging.tables.Placed` records with events around what was queued. Out: seconds and bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linumpy.gpu.staging.tables import Placed


@dataclass
class Times:
    """What was added up.

    Attributes
    ----------
    copies, decoded : int
        Slabs that were copied to the device, and that it decoded.
    copy_seconds, decode_seconds, scatter_seconds : float
        Of all of them; slabs that are decoded at the same time count each by itself.
    copied_nbytes, decoded_nbytes : int
        Bytes that were copied, and that were decoded to.
    """

    copies: int = 0
    decoded: int = 0
    copy_seconds: float = 0.0
    decode_seconds: float = 0.0
    scatter_seconds: float = 0.0
    copied_nbytes: int = 0
    decoded_nbytes: int = 0


class Clock:
    """Times of slabs; any thread may ask for them, at any time.

    Parameters
    ----------
    elapsed : callable
        Seconds between two events that are complete.
    """

    def __init__(self, elapsed: Callable[[Any, Any], float]) -> None:
        self._elapsed = elapsed
        self._lock = threading.Lock()
        self._open: deque[tuple[Placed, int]] = deque()
        self._times = Times()

    def add(self, placed: Placed, decoded_nbytes: int) -> None:
        """Note a slab whose copies and kernels have been queued, and the bytes that the device decodes it to."""
        if placed.timing is not None:
            with self._lock:
                self._open.append((placed, decoded_nbytes))
                self._take_in()

    def times(self) -> Times:
        """Add up all slabs that are complete."""
        with self._lock:
            self._take_in()
            return Times(**vars(self._times))

    def _take_in(self) -> None:
        while self._open and self._open[0][0].event.done:
            placed, nbytes = self._open.popleft()
            assert placed.timing is not None
            first, middle, last = placed.timing
            times = self._times
            if placed.copied is not None:
                begin, end, copied = placed.copied
                times.copies += 1
                times.copy_seconds += self._elapsed(begin, end)
                times.copied_nbytes += copied
            if nbytes:
                times.decoded += 1
                times.decode_seconds += self._elapsed(first, middle)
                times.decoded_nbytes += nbytes
            times.scatter_seconds += self._elapsed(middle, last)
