"""Ranges of one buffer, given out and taken back in turn.

In: sizes. Out: offsets. Pure: the buffer itself is the caller's.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

#: Every range begins at a multiple of this.
ALIGN = 512


#: The smallest ring; it grows with what is asked for.
_SMALLEST = 2**22


def ring_nbytes(wanted: int, limit: int) -> int:
    """Choose the size of a ring: a power of two, so that it seldom grows again."""
    return min(limit, max(_SMALLEST, 2 ** math.ceil(math.log2(max(1, wanted)))))


def staged_nbytes(wanted: int, limit: int) -> int:
    """Choose the size of a ring of host memory: beyond half of the limit no more than is wanted.

    What lies in the processor's cache is copied faster.
    """
    return ring_nbytes(wanted, min(limit, max(wanted, limit // 2)))


def aligned(nbytes: int) -> int:
    """Round a size up to where the next range may begin."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(eq=False)
class Range:
    """Bytes of a ring.

    Attributes
    ----------
    offset, nbytes : int
        Where they are.
    free : bool
        Whether their user is done with them.
    event : object
        What tells that work which was queued on them is complete; for the ring's owner.
    held : object
        What that work needs, kept until the range is free.
    """

    offset: int
    nbytes: int
    free: bool = False
    event: Any = None
    held: Any = None


class Ring:
    """A buffer whose ranges are reused in the order in which they were given out.

    Parameters
    ----------
    nbytes : int
        Size of the buffer.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.ranges: deque[Range] = deque()
        self._next = 0

    def take(self, nbytes: int) -> Range | None:
        """Give out a range; None where it does not fit beside those that are in use."""
        nbytes = aligned(nbytes)
        self._drop_free()
        if not self.ranges:
            self._next = 0
        offset = self._place(nbytes)
        if offset is None:
            return None
        self.ranges.append(Range(offset, nbytes))
        self._next = offset + nbytes
        return self.ranges[-1]

    def oldest(self) -> Range | None:
        """Return the range that must be free before others can be reused."""
        self._drop_free()
        return self.ranges[0] if self.ranges else None

    def _place(self, nbytes: int) -> int | None:
        if not self.ranges:
            return 0 if nbytes <= self.nbytes else None
        first = self.ranges[0].offset
        if self._next > first:  # in use: from first to next
            if nbytes <= self.nbytes - self._next:
                return self._next
            return 0 if nbytes <= first else None
        return self._next if nbytes <= first - self._next else None

    def _drop_free(self) -> None:
        while self.ranges and self.ranges[0].free:
            self.ranges.popleft()
