"""Regions of arrays of a rectilinear chunk grid → boxes of regular ones.

Along an axis, a run of chunks of one length `n` is part of a shifted regular grid, in which chunk `i` begins at
``i · n`` and has the same key. Neighbouring chunks of one shape are therefore a box of a regular array whose chunks all
have that shape, and are read like it. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linumpy.plan.layout import ArrayLayout


@dataclass(frozen=True)
class RegularBox:
    """A box of chunks of one shape.

    Attributes
    ----------
    layout : ArrayLayout
        The regular array; all boxes of one chunk shape share the record.
    start, stop : tuple of int
        Bounds of the box in that array.
    offset : tuple of int
        Where the box begins in the region.
    """

    layout: ArrayLayout
    start: tuple[int, ...]
    stop: tuple[int, ...]
    offset: tuple[int, ...]


def cut_by_shape(layout: ArrayLayout, start: Sequence[int], stop: Sequence[int]) -> Iterator[RegularBox]:
    """Cut a region of a rectilinear array into boxes of chunks of one shape.

    Parameters
    ----------
    layout : ArrayLayout
        Of a rectilinear grid, with the lengths of its chunks.
    start, stop : sequence of int, (rank,)
        The region, within the array.
    """
    assert layout.lengths is not None
    axes = [list(_runs(*axis)) for axis in zip(layout.lengths, start, stop, strict=True)]
    for box in itertools.product(*axes):
        lengths, begin, end, offset = zip(*box, strict=True)
        yield RegularBox(_regular(layout, lengths), begin, end, offset)


def chunk_range(lengths: np.ndarray, start: int, stop: int) -> tuple[int, int]:
    """Return the first chunk along an axis that a range of voxels touches, and one past the last."""
    ends = np.cumsum(lengths)
    first = int(np.searchsorted(ends, start, "right"))
    return first, first if stop <= start else int(np.searchsorted(ends, stop, "left")) + 1


def _runs(lengths: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield, for each run of chunks of one length: length, range in the regular grid, offset in the region."""
    chunk, end = chunk_range(lengths, start, stop)
    at = int(lengths[:chunk].sum())
    while chunk < end:
        length = int(lengths[chunk])
        others = np.flatnonzero(lengths[chunk:end] != length)
        count = int(others[0]) if len(others) else end - chunk
        first, last = max(start, at), min(stop, at + count * length)
        shift = chunk * length - at
        yield length, first + shift, last + shift, first - start
        chunk, at = chunk + count, at + count * length


def _regular(layout: ArrayLayout, lengths: tuple[int, ...]) -> ArrayLayout:
    """Describe the array whose stored objects all have one shape. The description is cached on the layout."""
    known: dict[tuple[int, ...], ArrayLayout] = layout.__dict__.setdefault("_of_shapes", {})
    if lengths not in known:
        chunk, shard = lengths, layout.shard
        if shard is not None:
            chunk = layout.chunk_shape
            per_shard = tuple(n // c for n, c in zip(lengths, chunk, strict=True))
            shard = replace(shard, chunks_per_shard=per_shard)
        known[lengths] = replace(layout, grid="regular", lengths=None, chunk_shape=chunk, shard=shard)
    return known[lengths]
