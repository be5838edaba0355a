"""Cut the chunks that a region touches into pieces: spans of stored bytes, each with its place in the result.

A piece is the smallest thing that is read and placed. It is a box of one chunk whose stored bytes, from its first
element to its last, are read in one go. Chunks larger than a slab become several pieces, and so do chunks of which a
region takes thin slices that lie far apart, so that neither memory nor the bytes read grow with what is not wanted.

In: :class:`~linumpy.plan.layout.ArrayLayout`, :class:`~linumpy.plan.region.Region`. Out: :class:`Pieces`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region

#: Unwanted bytes that are read along with wanted ones rather than skipped by a read of their own. A read costs as
#: much time as about this many bytes out of the page cache.
READ_THROUGH_BYTES = 256 * 1024

#: First chunk and the one behind the last, along each axis.
ChunkBox = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AxisWindow:
    """The chunks that a region touches along one axis; all arrays have one entry for each of them.

    Attributes
    ----------
    chunk : numpy.ndarray of int64
        Chunk coordinates along the axis.
    inside : numpy.ndarray of int64
        First wanted element, counted in the chunk.
    target : numpy.ndarray of int64
        Where that element lands in the result.
    length : numpy.ndarray of int64
        Wanted elements.
    """

    chunk: np.ndarray
    inside: np.ndarray
    target: np.ndarray
    length: np.ndarray


def chunk_box(layout: ArrayLayout, region: Region) -> ChunkBox:
    """Find the box of the grid of (inner) chunks that a region touches."""
    bounds = zip(region.start, region.stop, layout.chunk_shape, strict=True)
    return tuple((start // size, -(-stop // size) if start < stop else start // size) for start, stop, size in bounds)


def axis_windows(layout: ArrayLayout, region: Region, box: ChunkBox | None = None) -> tuple[AxisWindow, ...]:
    """Find the chunks that a region touches, axis by axis; their product is what is read.

    Parameters
    ----------
    layout : ArrayLayout
        How the array is stored.
    region : Region
        What is wanted of the array.
    box : tuple of (int, int), optional
        Part of :func:`chunk_box` to look at; by default all of it.
    """
    axes = zip(region.start, region.stop, layout.chunk_shape, box or chunk_box(layout, region), strict=True)
    return tuple(_axis_window(start, stop, size, first, last) for start, stop, size, (first, last) in axes)


def _axis_window(start: int, stop: int, size: int, first: int, last: int) -> AxisWindow:
    # Counted from the first chunk of the region, so that no product leaves int64 however long the axis is.
    number = np.arange(first - start // size, last - start // size, dtype=np.int64)
    start, stop = start % size, stop - start // size * size
    begin = np.maximum(number * size, start)
    end = np.minimum((number + 1) * size, stop)
    return AxisWindow(
        chunk=np.arange(first, last, dtype=np.int64),
        inside=begin - number * size,
        target=begin - start,
        length=end - begin,
    )


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of chunks, ordered by chunk and by place in the chunk. All arrays have one row a piece.

    Attributes
    ----------
    chunk : numpy.ndarray of int64, (n, rank)
        Coordinates of the chunk in the grid of (inner) chunks.
    offset, nbytes : numpy.ndarray of int64, (n,)
        Bytes to read, counted from the start of the chunk.
    target : numpy.ndarray of int64, (n,)
        First element of the piece in the result, counted in elements of the C-ordered result.
    extent : numpy.ndarray of int64, (n, rank)
        Shape of the piece along the axes of the array.
    """

    chunk: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    target: np.ndarray
    extent: np.ndarray

    def __len__(self) -> int:
        return len(self.offset)

    def take(self, rows: np.ndarray | slice) -> Pieces:
        """Pick some of the pieces."""
        return Pieces(self.chunk[rows], self.offset[rows], self.nbytes[rows], self.target[rows], self.extent[rows])


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each axis of a C-ordered array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def cut_pieces(layout: ArrayLayout, region: Region, max_nbytes: int | None, box: ChunkBox | None = None) -> Pieces:
    """Cut what a region touches into pieces of at most `max_nbytes` bytes.

    Parameters
    ----------
    layout : ArrayLayout
        How the array is stored, sharded or not.
    region : Region
        What is wanted of the array.
    max_nbytes : int or None
        At least the size of one element. None for one piece a chunk, whatever its size, as chunks are that have to be
        decoded.
    box : tuple of (int, int), optional
        Part of :func:`chunk_box` to cut; by default all of it.
    """
    windows = axis_windows(layout, region, box)
    strides = c_strides(region.box_shape)
    # Along an axis there are at most three kinds of chunk: cut at its start, whole, cut at its end. Chunks of the
    # same kind along every axis are cut alike, so the cutting is done once a kind and not once a chunk.
    parts = [_cut_alike(layout, rows, strides, max_nbytes) for rows in itertools.product(*(_kinds(w) for w in windows))]
    if not parts:
        return _no_pieces(layout.rank)
    joined = Pieces(*(np.concatenate(columns) for columns in zip(*(_columns(part) for part in parts), strict=True)))
    order = np.lexsort((joined.offset, *joined.chunk.T[::-1]))
    return joined.take(order)


@dataclass(frozen=True)
class PieceCount:
    """What a cut gives, known without cutting.

    Attributes
    ----------
    pieces : int
        All pieces.
    nbytes : int
        Bytes to read for them.
    most : int
        Pieces of the chunk that has the most.
    """

    pieces: int
    nbytes: int
    most: int


def count_pieces(layout: ArrayLayout, region: Region, max_nbytes: int | None) -> PieceCount:
    """Say what :func:`cut_pieces` would give, in the same time for a region of any size."""
    pieces = nbytes = most = 0
    bounds = zip(region.start, region.stop, layout.chunk_shape, strict=True)
    for alike in itertools.product(*(_count_kinds(start, stop, size).items() for start, stop, size in bounds)):
        chunks = math.prod(count for _, count in alike)
        each, span = _count_box(layout, [length for length, _ in alike], max_nbytes)
        pieces, nbytes, most = pieces + chunks * each, nbytes + chunks * span, max(most, each)
    return PieceCount(pieces, nbytes, most)


def _count_kinds(start: int, stop: int, size: int) -> dict[int, int]:
    """Along one axis: wanted elements of a chunk, and how many chunks there are of which so many are wanted."""
    if start >= stop:
        return {}
    first, last = start // size, (stop - 1) // size
    if first == last:
        return {stop - start: 1}
    kinds = {size: last - first - 1} if last - first > 1 else {}
    for length in ((first + 1) * size - start, stop - last * size):
        kinds[length] = kinds.get(length, 0) + 1
    return kinds


def _count_box(layout: ArrayLayout, length: list[int], max_nbytes: int | None) -> tuple[int, int]:
    """Pieces of one box of a chunk, and their bytes together."""
    walk = _walk(layout, length, max_nbytes)
    outer = math.prod(walk.count[: walk.split])
    runs = -(-walk.count[walk.split] // walk.run)
    rest = walk.count[walk.split] - (runs - 1) * walk.run
    return outer * runs, outer * ((runs - 1) * walk.nbytes(walk.run) + walk.nbytes(rest))


def _no_pieces(rank: int) -> Pieces:
    none, rows = np.empty(0, np.int64), np.empty((0, rank), np.int64)
    return Pieces(rows, none, none, none, rows)


def _columns(pieces: Pieces) -> tuple[np.ndarray, ...]:
    return pieces.chunk, pieces.offset, pieces.nbytes, pieces.target, pieces.extent


def _kinds(window: AxisWindow) -> list[AxisWindow]:
    """Split the chunks along one axis by the part of them that is wanted."""
    kinds = dict.fromkeys(zip(window.inside.tolist(), window.length.tolist(), strict=True))
    rows = [(window.inside == inside) & (window.length == length) for inside, length in kinds]
    return [AxisWindow(window.chunk[r], window.inside[r], window.target[r], window.length[r]) for r in rows]


def _cut_alike(
    layout: ArrayLayout, windows: tuple[AxisWindow, ...], target_strides: tuple[int, ...], max_nbytes: int | None
) -> Pieces:
    """Cut all chunks of one kind: one template, laid over the coordinates of every chunk."""
    inside = np.array([w.inside[0] for w in windows])
    length = np.array([w.length[0] for w in windows])
    start, extent = cut_box(layout, inside, length, max_nbytes)
    strides = np.array(layout.chunk_strides)
    itemsize = layout.dtype.itemsize
    offset = (inside + start) @ strides * itemsize
    nbytes = ((extent - 1) @ strides + 1) * itemsize
    chunk = _product([w.chunk for w in windows])
    corner = _product([w.target for w in windows]) @ np.array(target_strides)
    within = start @ np.array(target_strides)
    return Pieces(
        chunk=np.repeat(chunk, len(start), axis=0),
        offset=np.tile(offset, len(chunk)),
        nbytes=np.tile(nbytes, len(chunk)),
        target=(corner[:, None] + within[None, :]).reshape(-1),
        extent=np.tile(extent, (len(chunk), 1)),
    )


def _product(columns: list[np.ndarray]) -> np.ndarray:
    """All combinations of one entry a column, last column fastest: (n, columns)."""
    return np.stack([grid.reshape(-1) for grid in np.meshgrid(*columns, indexing="ij")], axis=1)


def cut_box(
    layout: ArrayLayout, inside: np.ndarray, length: np.ndarray, max_nbytes: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut a box of a chunk into boxes whose stored span is short enough and has no long gap in it.

    Parameters
    ----------
    layout : ArrayLayout
        Gives chunk shape, order of the stored axes and element size.
    inside, length : numpy.ndarray of int64, (rank,)
        The box, in elements of the chunk.
    max_nbytes : int or None
        Longest span of a piece; None for one piece.

    Returns
    -------
    start, extent : numpy.ndarray of int64, (n, rank)
        The boxes, `start` counted from the first element of the whole box.
    """
    walk = _walk(layout, length.tolist(), max_nbytes)
    steps = [1] * walk.split + [walk.run] + walk.count[walk.split + 1 :]
    starts = [np.arange(0, n, step, dtype=np.int64) for n, step in zip(walk.count, steps, strict=True)]
    lengths = [np.minimum(step, n - s) for n, step, s in zip(walk.count, steps, starts, strict=True)]
    back = np.argsort(np.array(layout.stored_axes))
    return _product(starts)[:, back], _product(lengths)[:, back]


@dataclass(frozen=True)
class _Walk:
    """How a box of a chunk is cut: axes in stored order, slowest first.

    Attributes
    ----------
    count : list of int
        Elements of the box along each axis.
    split : int
        Axis that is cut into runs. Those before it are walked element by element, those behind it stay whole.
    run : int
        Elements of a run.
    stride, tail : int
        Bytes between neighbours along the split axis, and from first to last element in the axes behind it.
    """

    count: list[int]
    split: int
    run: int
    stride: int
    tail: int

    def nbytes(self, run: int) -> int:
        """Bytes from the first to the last element of a run."""
        return (run - 1) * self.stride + self.tail


def _walk(layout: ArrayLayout, length: list[int], max_nbytes: int | None) -> _Walk:
    axes = layout.stored_axes
    itemsize = layout.dtype.itemsize
    stride = [layout.chunk_strides[axis] * itemsize for axis in axes]
    count = [length[axis] for axis in axes]
    # span[j]: bytes from first to last element of the box in the stored axes from j on.
    span = [itemsize] * (len(axes) + 1)
    for j in reversed(range(len(axes))):
        span[j] = (count[j] - 1) * stride[j] + span[j + 1]
    if max_nbytes is None:
        return _Walk(count, 0, count[0], stride[0], span[1])
    gaps = [j for j in range(len(axes)) if count[j] > 1 and stride[j] - span[j + 1] > READ_THROUGH_BYTES]
    split = gaps[-1] + 1 if gaps else 0
    while span[split + 1] > max_nbytes:  # ends: the span behind the last axis is one element
        split += 1
    longest = 1 + (max_nbytes - span[split + 1]) // stride[split]
    run = -(-count[split] // -(-count[split] // longest))
    return _Walk(count, split, run, stride[split], span[split + 1])
