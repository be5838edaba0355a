"""What many regions want of the chunks of their arrays: each chunk once, whoever wants it.

In: :class:`~linumpy.plan.read.boxes.Boxes`. Out: :class:`Wanted`: stored spans, each with the boxes that it serves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes
from linumpy.plan.read.spans import number_rows, object_grid


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
