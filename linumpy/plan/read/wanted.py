"""What many regions of one array want of its chunks: each chunk once, whoever wants it.

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
    """Spans of chunks, each read once, ordered by stored object; one row a span in the first four.

    Attributes
    ----------
    chunk : numpy.ndarray of int64, (spans, rank)
        Coordinates of the (inner) chunk.
    offset, nbytes : numpy.ndarray of int64, (spans,)
        Bytes of the decoded chunk that its boxes lie in: what has to be read of a raw chunk.
    object_index : numpy.ndarray of int64, (spans,)
        Stored object that each lies in.
    objects : numpy.ndarray of int64, (objects, rank)
        Coordinates in the grid of stored objects.
    boxes : numpy.ndarray of int64, (boxes,)
        Rows of the boxes, ordered by span.
    first_box : numpy.ndarray of int64, (spans + 1,)
        Where the boxes of each span begin in `boxes`.
    """

    chunk: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    object_index: np.ndarray
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
        begin, count = self.first_box[spans], self.first_box[spans + 1] - self.first_box[spans]
        which = np.repeat(np.arange(len(spans)), count)
        rows = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + begin[which]
        return self.boxes[rows], which


def merge(layout: ArrayLayout, boxes: Boxes, *, by_chunk: bool) -> Wanted:
    """Bring together what lies in the same chunk.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    boxes : Boxes
        Of all regions.
    by_chunk : bool
        Whether a chunk that several boxes lie in is one span; else each box is a span of its own, as where raw chunks
        are too large to be read whole.
    """
    if by_chunk:
        chunk, number = number_rows(boxes.chunk)
        order = np.argsort(number, kind="stable")
        first = np.searchsorted(number[order], np.arange(len(chunk) + 1))
    else:
        order = np.lexsort((boxes.offset, *boxes.chunk.T[::-1]))
        chunk, first = boxes.chunk[order], np.arange(len(order) + 1)
    offset, nbytes = _hull(boxes, order, first)
    objects, index = number_rows(object_grid(layout, chunk))
    if len(index) and (index[1:] < index[:-1]).any():  # chunks of a shard need not follow on each other in C order
        rows = np.argsort(index, kind="stable")
        chunk, offset, nbytes, index = chunk[rows], offset[rows], nbytes[rows], index[rows]
        count = np.diff(first)[rows]
        begin = np.repeat(first[:-1][rows], count)
        order = order[begin + np.arange(len(begin)) - np.repeat(np.cumsum(count) - count, count)]
        first = np.concatenate(([0], np.cumsum(count)))
    return Wanted(chunk, offset, nbytes, index, objects, order, first)


def _hull(boxes: Boxes, order: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes from the first to the last that any box of a span has."""
    offset, nbytes = boxes.offset[order], boxes.nbytes[order]
    if len(order) == len(first) - 1:
        return offset, nbytes
    begin = np.minimum.reduceat(offset, first[:-1])
    return begin, np.maximum.reduceat(offset + nbytes, first[:-1]) - begin
