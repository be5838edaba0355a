"""What many regions want of the chunks of their arrays: each chunk once, whoever wants it.

In: :class:`~linumpy.plan.read.boxes.Boxes`. Out: :class:`Wanted`: stored spans, each with the boxes that it serves. A
single small region is cut here too (:func:`cut_alone`): regions that lie alike in their chunks are cut once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes, cut_boxes
from linumpy.plan.read.scatter import Geometry, geometry
from linumpy.plan.read.spans import number_rows, object_grid

#: Regions that are remembered, and chunks of each at most.
_REMEMBERED, _FEW_CHUNKS = 256, 64


@dataclass(frozen=True, eq=False)
class Wanted:
    """Spans of chunks, each read once, ordered by array, stored object and chunk.

    Attributes
    ----------
    array : numpy.ndarray of int64, (spans,)
        Array that each span belongs to.
    chunk : numpy.ndarray of int64, (spans, rank)
        Coordinates of the (inner) chunk.
    offset, nbytes : numpy.ndarray of int64, (spans,)
        Bytes of the decoded chunk that its boxes lie in: what has to be read of a raw chunk.
    object_index : numpy.ndarray of int64, (spans,)
        Stored object that each lies in, in rising order.
    object_array : numpy.ndarray of int64, (objects,)
        Array that each stored object belongs to.
    objects : numpy.ndarray of int64, (objects, rank)
        Coordinates in the grid of stored objects.
    boxes : numpy.ndarray of int64, (boxes,)
        Rows of the boxes, ordered by span.
    first_box : numpy.ndarray of int64, (spans + 1,)
        Where the boxes of each span begin in `boxes`.
    """

    array: np.ndarray
    chunk: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    object_index: np.ndarray
    object_array: np.ndarray
    objects: np.ndarray
    boxes: np.ndarray
    first_box: np.ndarray

    def __len__(self) -> int:
        return len(self.chunk)

    def boxes_of(self, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """List the boxes of some spans.

        Returns
        -------
        boxes : numpy.ndarray of int64, (n,)
            Rows of boxes.
        which : numpy.ndarray of int64, (n,)
            For each of them the entry of `spans` that it belongs to.
        """
        begin = self.first_box[spans]
        count = self.first_box[spans + 1] - begin
        which = np.arange(len(spans)).repeat(count)
        if len(which) == len(spans) and (count == 1).all():
            return self.boxes[begin], which
        rows = np.arange(len(which)) + (begin - count.cumsum() + count)[which]
        return self.boxes[rows], which


def merge(layout: ArrayLayout, boxes: Boxes, array: np.ndarray, *, by_chunk: bool) -> Wanted:
    """Bring together what lies in the same chunk.

    Parameters
    ----------
    layout : ArrayLayout
        Of the arrays, whose :attr:`~linumpy.plan.layout.ArrayLayout.geometry` is the same.
    boxes : Boxes
        Of all regions.
    array : numpy.ndarray of int64, (boxes,)
        Array that each box belongs to.
    by_chunk : bool
        Whether a chunk that several boxes lie in is one span; else each box is a span of its own, as where raw chunks
        are too large to be read whole.
    """
    where = np.column_stack([array, object_grid(layout, boxes.chunk)])
    number = number_rows(where)
    chunk_number = number if layout.shard is None else number_rows(np.column_stack([number, boxes.chunk]))
    order = _order(chunk_number) if by_chunk else np.lexsort((boxes.offset, chunk_number))
    first = _first_of_runs(chunk_number[order]) if by_chunk else np.arange(len(order) + 1)
    heads = order[first[:-1]]
    offset, nbytes = _hull(boxes, order, first)
    first_span = _first_of_runs(number[heads])
    first_box = heads[first_span[:-1]]
    return Wanted(
        array=array[heads],
        chunk=boxes.chunk[heads],
        offset=offset,
        nbytes=nbytes,
        object_index=np.arange(len(first_span) - 1).repeat(np.diff(first_span)),
        object_array=array[first_box],
        objects=where[first_box, 1:],
        boxes=order,
        first_box=first,
    )


def _order(number: np.ndarray) -> np.ndarray:
    """Sort numbers; equal ones stay in order."""
    if (number[1:] > number[:-1]).all():
        return np.arange(len(number))
    return np.argsort(number, kind="stable")


def _first_of_runs(number: np.ndarray) -> np.ndarray:
    """Find where runs of equal numbers begin, and the end of the last."""
    if not len(number):
        return np.zeros(1, np.int64)
    changes = np.flatnonzero(number[1:] != number[:-1]) + 1
    return np.concatenate(([0], changes, [len(number)]))


def _hull(boxes: Boxes, order: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from the first to the last that any box of a span has."""
    offset, nbytes = boxes.offset[order], boxes.nbytes[order]
    if len(order) == len(first) - 1:
        return offset, nbytes
    begin = np.minimum.reduceat(offset, first[:-1])
    return begin, np.maximum.reduceat(offset + nbytes, first[:-1]) - begin


@dataclass(frozen=True, eq=False)
class Cut:
    """Regions that have been cut; nobody writes to its arrays.

    Attributes
    ----------
    boxes : Boxes
        Of all regions. Chunks of :func:`cut_alone` are counted from the first stored object of the region.
    wanted : Wanted
        What they want of chunks.
    geometry : Geometry
        Of the tables that scatter them.
    """

    boxes: Boxes
    wanted: Wanted
    geometry: Geometry


@dataclass(frozen=True)
class _Like:
    """A region as it lies in its first stored object; equal for regions that are cut alike."""

    layout: ArrayLayout
    start: tuple[int, ...]
    stop: tuple[int, ...]
    strides: tuple[int, ...]

    def _key(self) -> tuple[Any, ...]:
        return (self.layout.geometry, self.start, self.stop, self.strides)

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Like) and self._key() == other._key()


def cut_alone(layout: ArrayLayout, start: np.ndarray, stop: np.ndarray, strides: np.ndarray) -> Cut | None:
    """Cut one region, each chunk that it touches being one box; None where it has many chunks.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    start, stop, strides : numpy.ndarray of int64, (rank,)
        Bounds of the region, and bytes between neighbours in its output.
    """
    count = 1
    first = []
    for low, high, chunk, size in zip(
        start.tolist(), stop.tolist(), layout.chunk_shape, layout.object_shape, strict=True
    ):
        count *= -(-high // chunk) - low // chunk
        first.append(low // size)
    if count > _FEW_CHUNKS:
        return None
    shift = np.array(first, np.int64) * layout.object_shape
    begin, end = ((one - shift).tolist() for one in (start, stop))
    cut = _cut_like(_Like(layout, tuple(begin), tuple(end), tuple(strides.tolist())))
    if not any(first):
        return cut
    wanted = replace(
        cut.wanted, chunk=cut.wanted.chunk + shift // layout.chunk_sizes, objects=cut.wanted.objects + first
    )
    return replace(cut, wanted=wanted)


@functools.lru_cache(_REMEMBERED)
def _cut_like(region: _Like) -> Cut:
    start, stop, strides = (np.array([one], np.int64) for one in (region.start, region.stop, region.strides))
    boxes = cut_boxes(region.layout, start, stop, strides)
    wanted = merge(region.layout, boxes, np.zeros(len(boxes), np.int64), by_chunk=True)
    cut = Cut(boxes, wanted, geometry(region.layout, boxes, strides))
    for record in (cut.boxes, cut.wanted, cut.geometry):
        for one in fields(record):
            getattr(record, one.name).flags.writeable = False
    return cut
