"""Pack pieces into reads and slabs.

A read is one ``pread``: pieces that lie side by side in one stored object. A slab is one staged batch of reads, bounded
in bytes, pieces and open files.

In: spans of bytes, ordered by object and offset. Out: :class:`Slab` records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

#: Placing a slab takes a table row a piece; this bounds the table.
MAX_PIECES = 4096
#: Bytes of the largest element, complex128.
_ELEMENT = 16


@dataclass(frozen=True, eq=False)
class Spans:
    """Stored bytes of pieces, ordered by object and offset; one row a piece.

    Attributes
    ----------
    piece : numpy.ndarray of int64
        Row of the piece in its :class:`~linumpy.plan.read.pieces.Pieces`.
    object : numpy.ndarray of int64
        Number of the stored object (a chunk file or a shard).
    offset, nbytes : numpy.ndarray of int64
        Bytes in the object.
    weight : numpy.ndarray of int64 or None
        Bytes of the buffer that a piece takes beyond those that are read; None for none.
    """

    piece: np.ndarray
    object: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    weight: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.piece)

    def joined(self, other: Spans) -> Spans:
        """Put those of another batch behind them; both have weights, or neither."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return Spans(*(None if a is None else np.concatenate((a, b)) for a, b in pairs))  # type: ignore[arg-type]

    def take(self, rows: np.ndarray | slice) -> Spans:
        """Pick some of them."""
        columns = (self.piece, self.object, self.offset, self.nbytes, self.weight)
        return Spans(*(None if column is None else column[rows] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class SlabLimits:
    """What bounds a slab.

    Attributes
    ----------
    nbytes : int
        Bytes of the buffer.
    objects : int
        Stored objects, and so open files.
    align : int
        Every read begins at a multiple of this in the buffer (a power of two).
    congruent : bool
        Whether a read instead begins at the same remainder of `align` in the buffer as in its file, as direct I/O
        wants it; not where that would misalign its elements.
    pieces : int
        Pieces.
    gap : int
        Bytes between two pieces of an object that are read along with them rather than skipped by a read of their own.
    capacity : int
        Bytes of the buffer and weights of the pieces.
    """

    nbytes: int
    objects: int
    align: int = 16
    congruent: bool = False
    pieces: int = MAX_PIECES
    gap: int = 0
    capacity: int = 2**62

    @property
    def largest_piece(self) -> int:
        """Bytes of the longest piece that fits wherever its alignment puts it."""
        return self.nbytes - self.align


@dataclass(frozen=True, eq=False)
class Slab:
    """What travels through one buffer.

    Attributes
    ----------
    object, offset, nbytes, place : numpy.ndarray of int64
        The reads: stored object, bytes in it, and first byte in the buffer.
    pieces : numpy.ndarray of int64
        Its pieces.
    piece_place, piece_nbytes : numpy.ndarray of int64
        Their bytes in the buffer.
    """

    object: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    place: np.ndarray
    pieces: np.ndarray
    piece_place: np.ndarray
    piece_nbytes: np.ndarray

    @property
    def end(self) -> int:
        """Bytes of the buffer that are used."""
        return int((self.place + self.nbytes).max()) if len(self.place) else 0


def run_starts(values: np.ndarray) -> np.ndarray:
    """Find where runs of equal values begin."""
    if len(values) < 2:
        return np.zeros(len(values), np.int64)
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))


def pack(spans: Spans, limits: SlabLimits) -> Iterator[Slab]:
    """Pack spans into slabs, in order.

    Raises
    ------
    ValueError
        A piece is longer than a slab.
    """
    if not len(spans):
        return
    if int(spans.nbytes.max()) > limits.largest_piece:
        raise ValueError(f"a piece of {int(spans.nbytes.max())} bytes does not fit into a slab of {limits.nbytes}")
    starts = _starts_read(spans, limits.gap)
    place = _places(spans, starts, limits)
    if _is_one_slab(spans, place, limits):
        yield _slab(spans, starts, place, 0, len(spans))
        return
    ordinal = np.zeros(len(spans), np.int64)
    ordinal[run_starts(spans.object)[1:]] = 1
    ordinal = np.cumsum(ordinal)
    ends = np.maximum.accumulate(place + spans.nbytes)
    weight = np.zeros(len(spans), np.int64) if spans.weight is None else np.cumsum(spans.weight)
    first = 0
    while first < len(spans):
        origin = place[first] // limits.align * limits.align
        last = int(np.searchsorted(ends, origin + limits.nbytes, side="right"))
        weighed = origin + limits.capacity + (weight[first - 1] if first else 0)
        last = min(last, max(first + 1, int(np.searchsorted(ends + weight, weighed, side="right"))))
        last = min(last, int(np.searchsorted(ordinal, ordinal[first] + limits.objects)), first + limits.pieces)
        yield _slab(spans, starts, place - origin, first, last)
        first = last


def _is_one_slab(spans: Spans, place: np.ndarray, limits: SlabLimits) -> bool:
    """Say whether spans that have been laid end to end fit one slab, where that is told at once."""
    if len(spans) > min(limits.pieces, limits.objects):
        return False
    end = int((place + spans.nbytes).max())
    weight = 0 if spans.weight is None else int(spans.weight.sum())
    return end <= limits.nbytes and end + weight <= limits.capacity


def _starts_read(spans: Spans, gap: int) -> np.ndarray:
    """Say for each piece whether a new read begins with it: its bytes do not follow on."""
    follows = spans.object[1:] == spans.object[:-1]
    between = np.diff(spans.offset) - spans.nbytes[:-1]
    follows &= (between >= 0) & (between <= gap)
    return np.concatenate(([True], ~follows))


def _places(spans: Spans, starts: np.ndarray, limits: SlabLimits) -> np.ndarray:
    """Lay all reads end to end in one endless buffer, aligned."""
    heads = np.flatnonzero(starts)
    read = np.cumsum(starts) - 1
    shift = spans.offset[heads] % limits.align if limits.congruent else np.zeros(len(heads), np.int64)
    shift[shift % _ELEMENT != 0] = 0  # direct I/O has lost already, and no element may lie across its alignment
    length = _lengths(spans, heads)
    room = -(-(shift + length) // limits.align) * limits.align
    base = np.concatenate(([0], np.cumsum(room)[:-1])) + shift
    return base[read] + spans.offset - spans.offset[heads][read]


def _lengths(spans: Spans, heads: np.ndarray) -> np.ndarray:
    """Bytes of each read, from its first piece to the end of its last, gaps counted in."""
    ends = np.concatenate((heads[1:], [len(spans)])) - 1
    return spans.offset[ends] + spans.nbytes[ends] - spans.offset[heads]


def _slab(spans: Spans, starts: np.ndarray, place: np.ndarray, first: int, last: int) -> Slab:
    rows = slice(first, last)
    begins = starts[rows].copy()
    begins[0] = True  # a read that the slab's end cut goes on as a read of its own
    heads = np.flatnonzero(begins) + first
    return Slab(
        object=spans.object[heads],
        offset=spans.offset[heads],
        nbytes=_lengths(spans.take(rows), heads - first),
        place=place[heads],
        pieces=spans.piece[rows],
        piece_place=place[rows],
        piece_nbytes=spans.nbytes[rows],
    )
