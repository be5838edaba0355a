"""Regions of arrays with a rectilinear chunk grid → boxes of regular arrays.

Along an axis, a run of stored objects (chunks, or shards) of one length `n` is part of a shifted regular grid, in which
object `i` begins at ``i · n`` and has the same key. Neighbouring objects of one shape therefore are a box of a regular
array all of whose objects have that shape, and are read as such. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linumpy.plan.layout import ArrayLayout


@dataclass(frozen=True)
class RegularBox:
    """A box of stored objects of one shape.

    - `layout`: the regular array; all boxes of objects of one shape share the record.
    - `start`, `stop`: bounds of the box in the regular array, in voxels.
    - `offset`: offset of the box from the start of the region, in voxels.
    """

    layout: ArrayLayout
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: tuple[int, ...]


def cut_by_shape(layout: ArrayLayout, start: Sequence[int], stop: Sequence[int]) -> Iterator[RegularBox]:
    """Cut a region of a rectilinear array into boxes of stored objects of one shape.

    - `layout`: an array with a rectilinear grid and the lengths of its stored objects.
    - `start`, `stop` (rank,): bounds of the region, within the array.
    """
    assert layout.lengths is not None
    axes = [list(_runs(*axis)) for axis in zip(layout.lengths, start, stop, strict=True)]
    for box in itertools.product(*axes):
        lengths, begin, end, offset = zip(*box, strict=True)
        yield RegularBox(_regular_layout(layout, lengths), begin, end, offset)


def chunk_range(lengths: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Return the first stored object along an axis that a range of voxels touches, and one past the last.

    Equal numbers for an empty range. `lengths` holds the voxels of each object along the axis.
    """
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, start, "right"))
    return first, first if stop <= start else int(np.searchsorted(ends, stop, "left")) + 1


def _runs(lengths: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each run of objects of one length: length, start and stop in the regular grid, offset in the region."""
    index, end = chunk_range(lengths, start, stop)
    run_start = int(lengths[:index].sum())
    while index < end:
        length = int(lengths[index])
        others = np.flatnonzero(lengths[index:end] != length)
        count = int(others[0]) if len(others) else end - index
        first, last = max(start, run_start), min(stop, run_start + count * length)
        shift = index * length - run_start
        yield length, first + shift, last + shift, first - start
        index, run_start = index + count, run_start + count * length


def _regular_layout(layout: ArrayLayout, lengths: tuple[int, ...]) -> ArrayLayout:
    """Return the layout of the regular array whose stored objects have the shape `lengths`; cached in `layout`."""
    cached: dict[tuple[int, ...], ArrayLayout] = layout.__dict__.setdefault("_of_shapes", {})
    if lengths not in cached:
        chunk, shard = lengths, layout.shard
        if shard is not None:
            chunk = layout.chunk_shape
            per_shard = tuple(n // c for n, c in zip(lengths, chunk, strict=True))
            shard = replace(shard, chunks_per_shard=per_shard)
        cached[lengths] = replace(layout, grid="regular", lengths=None, chunk_shape=chunk, shard=shard)
    return cached[lengths]
