"""Cut many regions of one array into boxes of chunks, all at once.

In: an :class:`~linumpy.plan.layout.ArrayLayout`, regions, and the strides of the arrays that they are read into. Out:
:class:`Boxes`, one row for each chunk that a region touches. A box is what the scatter kernel copies: part of a decoded
chunk, whose bytes span `nbytes` from `offset` on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.pieces import READ_THROUGH_BYTES, cut_pieces
from linumpy.plan.region import Region


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of chunks, ordered by region and chunk; one row a box.

    Attributes
    ----------
    region : numpy.ndarray of int64, (n,)
        Region that the box belongs to.
    chunk : numpy.ndarray of int64, (n, rank)
        Coordinates in the grid of (inner) chunks.
    offset, nbytes : numpy.ndarray of int64, (n,)
        First byte in the decoded chunk, and bytes from there to the last one.
    extent : numpy.ndarray of int64, (n, rank)
        Elements along each axis of the array.
    target_offset : numpy.ndarray of int64, (n,)
        Byte of the region's output where the box begins.
    """

    region: np.ndarray
    chunk: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    extent: np.ndarray
    target_offset: np.ndarray

    def __len__(self) -> int:
        return len(self.region)

    @staticmethod
    def joined(parts: list[Boxes]) -> Boxes:
        """Put boxes of several lists one behind the other; their regions keep their numbers."""
        if len(parts) == 1:
            return parts[0]
        return Boxes(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(Boxes)))


def is_cut_whole(layout: ArrayLayout, max_nbytes: int | None) -> bool:
    """Say whether each chunk that a region touches is one box.

    Encoded chunks are (`max_nbytes` None), and raw ones that fit a read and have no gap in them that is worth a read of
    its own.
    """
    if max_nbytes is None:
        return True
    slowest = layout.chunk_strides[layout.stored_axes[0]] * layout.dtype.itemsize if layout.rank else 0
    return layout.chunk_nbytes <= max_nbytes and slowest <= READ_THROUGH_BYTES


def cut_boxes(
    layout: ArrayLayout,
    start: np.ndarray,
    stop: np.ndarray,
    target_strides: np.ndarray,
    max_nbytes: int | None = None,
) -> Boxes:
    """Cut regions into boxes.

    Parameters
    ----------
    layout : ArrayLayout
        How the array is stored.
    start, stop : numpy.ndarray of int64, (regions, rank)
        Bounds, ``0 <= start <= stop <= shape``.
    target_strides : numpy.ndarray of int64, (regions, rank)
        Bytes between neighbours along each axis of each region's output.
    max_nbytes : int, optional
        Longest span of a box of raw chunks; None for one box a chunk, whatever its size.
    """
    if not is_cut_whole(layout, max_nbytes):
        parts = [
            _cut_one(layout, number, start[number], stop[number], target_strides[number], max_nbytes)
            for number in range(len(start))
        ]
        return Boxes.joined(parts) if parts else _boxes_of_chunks(layout, start, stop, target_strides)
    return _boxes_of_chunks(layout, start, stop, target_strides)


def _boxes_of_chunks(layout: ArrayLayout, start: np.ndarray, stop: np.ndarray, target_strides: np.ndarray) -> Boxes:
    size, strides = layout.chunk_sizes, layout.chunk_byte_strides
    first = start // size
    count = np.where(stop > start, -(-stop // size) - first, 0)
    steps = np.ones_like(count)
    for axis in range(layout.rank - 1, 0, -1):
        steps[:, axis - 1] = steps[:, axis] * count[:, axis]
    total = count.prod(axis=1)
    region = np.arange(len(start)).repeat(total)
    within = np.arange(len(region)) - (total.cumsum() - total)[region]
    one = slice(None) if len(start) == 1 else region  # a single region is broadcast
    chunk = within[:, None] // steps[one] % count[one] + first[one]
    # Counted from the chunk's first element, so that no product leaves int64 however long the axis is.
    origin = chunk * size
    begin = start[one] - origin
    inside = np.maximum(begin, 0)
    extent = np.minimum(stop[one] - origin, size) - inside
    return Boxes(
        region=region,
        chunk=chunk,
        offset=inside @ strides,
        nbytes=(extent - 1) @ strides + layout.dtype.itemsize,
        extent=extent,
        target_offset=((inside - begin) * target_strides[one]).sum(axis=1),
    )


def _cut_one(
    layout: ArrayLayout,
    number: int,
    start: np.ndarray,
    stop: np.ndarray,
    target_strides: np.ndarray,
    max_nbytes: int | None,
) -> Boxes:
    """Cut one region of chunks that are too large, or too full of gaps, for one box each."""
    region = Region(tuple(start.tolist()), tuple(stop.tolist()), (True,) * layout.rank)
    pieces = cut_pieces(layout, region, max_nbytes)
    rest, corner = pieces.target, np.empty((len(pieces), layout.rank), np.int64)
    for axis in reversed(range(layout.rank)):
        rest, corner[:, axis] = np.divmod(rest, max(1, region.box_shape[axis]))
    return Boxes(
        region=np.full(len(pieces), number),
        chunk=pieces.chunk,
        offset=pieces.offset,
        nbytes=pieces.nbytes,
        extent=pieces.extent,
        target_offset=corner @ target_strides,
    )
