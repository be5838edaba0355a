"""A small region that is read by itself: which bytes of which stored objects, and where each chunk goes.

In: an :class:`~linumpy.plan.layout.ArrayLayout` and the bounds of a region. Out: :class:`AlonePlan`, the same for all
regions that lie alike in their stored objects, so that it is made once and not for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes, cut_boxes
from linumpy.plan.read.scatter import Geometry, geometry
from linumpy.plan.read.wanted import merge

Bounds = tuple[int, ...]


class ChunkSpan(NamedTuple):
    """Bytes of a chunk that are wanted.

    Attributes
    ----------
    inner : int
        Number of the chunk in its shard, in C order; 0 without shards.
    offset, nbytes : int
        Bytes of the decoded chunk that the region needs; of a raw chunk no others are read.
    place : int
        Where they go, or all of the chunk where it has to be decoded, in one buffer.
    """

    inner: int
    offset: int
    nbytes: int
    place: int


@dataclass(frozen=True, eq=False)
class AlonePlan:
    """A region's chunks, counted from the stored object that holds its first voxel.

    Attributes
    ----------
    objects : tuple of (tuple of int, tuple of ChunkSpan)
        Coordinates of each stored object, and what is wanted of it.
    nbytes : int
        Of the buffer.
    source : numpy.ndarray of int64, (chunks,)
        First byte in the buffer of each chunk's box.
    boxes : Boxes
        One for each chunk.
    geometry : Geometry
        Of the table that scatters them.
    """

    objects: tuple[tuple[Bounds, tuple[ChunkSpan, ...]], ...]
    nbytes: int
    source: np.ndarray
    boxes: Boxes
    geometry: Geometry

    def __len__(self) -> int:
        """Count its chunks."""
        return len(self.boxes)


def first_object(layout: ArrayLayout, start: Bounds) -> Bounds:
    """Find the stored object that holds the first voxel of a region."""
    return tuple([first // size for first, size in zip(start, layout.object_shape, strict=True)])


def within_object(layout: ArrayLayout, first: Bounds, bounds: Bounds) -> Bounds:
    """Count bounds from a stored object's first voxel."""
    return tuple([here - n * size for here, n, size in zip(bounds, first, layout.object_shape, strict=True)])


def plan_alone(layout: ArrayLayout, start: Bounds, stop: Bounds, strides: Bounds, align: int) -> AlonePlan:
    """Plan a region of which each chunk that it touches is one box.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    start, stop : tuple of int
        Bounds of the region, as :func:`within_object` gives them.
    strides : tuple of int
        Bytes between neighbours in its output.
    align : int
        Chunks begin at multiples of this in the buffer.
    """
    low, high, steps = (np.array([one], np.int64) for one in (start, stop, strides))
    boxes = cut_boxes(layout, low, high, steps)
    wanted = merge(layout, boxes, np.zeros(len(boxes), np.int64), by_chunk=True)
    per_object = (1,) * layout.rank if layout.shard is None else layout.shard.chunks_per_shard
    inner = np.ravel_multi_index(tuple((wanted.chunk % per_object).T), per_object) if layout.rank else [0] * len(boxes)
    is_raw = layout.chain is None
    held = wanted.nbytes if is_raw else np.full(len(wanted), layout.chunk_nbytes)
    room = -(-held // align) * align
    place = np.cumsum(room) - room
    source = np.empty(len(boxes), np.int64)
    source[wanted.boxes] = place + boxes.offset[wanted.boxes] - (wanted.offset if is_raw else 0)
    columns = (inner, wanted.offset, wanted.nbytes, place)
    spans = [ChunkSpan(*row) for row in zip(*(np.asarray(one).tolist() for one in columns), strict=True)]
    of_object: list[list[ChunkSpan]] = [[] for _ in wanted.objects]
    for number, span in zip(wanted.object_index.tolist(), spans, strict=True):
        of_object[number].append(span)
    objects = tuple((tuple(one), tuple(mine)) for one, mine in zip(wanted.objects.tolist(), of_object, strict=True))
    return AlonePlan(objects, int(room.sum()), source, boxes, geometry(layout, boxes, steps))
