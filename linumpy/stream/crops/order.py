"""Orders of crops that fetch few chunks again: blocks of crops, and columns of :func:`linumpy.stream.predict`. Pure.

A cache of decoded chunks is assumed that evicts the least recently used chunk.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.plan.crops import cache_nbytes


def most_chunks(size: int, chunk: int, voxels: int) -> int:
    """Return the maximum number of chunks that a range of `size` voxels of an axis touches."""
    return min(-(-voxels // chunk), (size - 2) // chunk + 2)


@dataclass(frozen=True)
class CropAxis:
    """The crops along one axis of a volume.

    - `starts`, `size`: first voxel of each crop, ascending, and voxels of a crop.
    - `voxels`, `chunk`, `unit`: voxels of the volume, of a chunk that is read, and of a chunk (or shard) of the result.
    """

    starts: Sequence[int]
    size: int
    voxels: int
    chunk: int
    unit: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.voxels // self.chunk)

    def touched(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Return the number of chunks that crops touch, from the crops `first` to the crops `last`."""
        starts = np.asarray(self.starts)
        return (np.minimum(starts[last] + self.size, self.voxels) - 1) // self.chunk - starts[first] // self.chunk + 1

    def cuts(self) -> list[AxisCut]:
        """Cut the axis into 1, 2, … columns of whole units that are as wide as each other."""
        starts, units = np.asarray(self.starts), -(-self.voxels // self.unit)
        cuts = []
        for width in sorted({-(-units // count) * self.unit for count in range(1, units + 1)}, reverse=True):
            begin = np.arange(0, self.voxels, width)
            first = np.searchsorted(starts + self.size, begin, "right")
            last = np.searchsorted(starts, np.minimum(begin + width, self.voxels), "left") - 1
            chunks = self.touched(first, last)
            cuts.append(
                AxisCut(min(width, self.voxels), int(chunks.sum()), int((last - first + 1).sum()), int(chunks.max()))
            )
        return cuts


@dataclass(frozen=True)
class AxisCut:
    """Columns along an axis: their width in voxels, sums of chunks and crops of all columns, the most chunks of one."""

    width: int
    chunks: int
    crops: int
    most_chunks: int


@dataclass(frozen=True)
class Columns:
    """Columns along the first axis of a volume, which are predicted one after another.

    - `widths`: voxels along each other axis.
    - `cache_bytes`: memory for chunks of the source.
    """

    widths: tuple[int, ...]
    cache_bytes: int


def plan_columns(axes: Sequence[CropAxis], line_nbytes: int, chunk_nbytes: int, leading: int, memory: int) -> Columns:
    """Choose the columns for which the fewest crops are predicted again and the fewest chunks are fetched again.

    A crop is predicted for each column that it touches. Within a column crops come in C order: each chunk is fetched
    once for a column if the chunks that the crops at one position along the first axis touch are kept.

    - `line_nbytes`: memory that predictions take for a line of voxels along the first axis.
    - `chunk_nbytes`, `leading`: decoded bytes of a chunk, and number of chunks that hold the channels of a voxel.
    - `memory`: limit in bytes of predictions and chunks together; columns of one unit are made even beyond it.
    """
    depth, *across = axes
    of_crops = depth.touched(*[np.arange(len(depth.starts))] * 2)
    whole_nbytes = cache_nbytes(leading * math.prod(axis.chunks for axis in axes), chunk_nbytes)
    found = []
    for cuts in itertools.product(*(axis.cuts() for axis in across)):
        kept = [cut.most_chunks for cut in cuts]
        if kept:  # chunks of the next position come before the oldest are not needed any more
            kept[0] += -(-across[0].size // across[0].chunk)
        kept_nbytes = cache_nbytes(leading * int(of_crops.max()) * math.prod(kept), chunk_nbytes)
        sums_nbytes = line_nbytes * math.prod(cut.width for cut in cuts)
        fetched = math.prod(cut.chunks / axis.chunks for cut, axis in zip(cuts, across, strict=True))
        predicted = math.prod(cut.crops / len(axis.starts) for cut, axis in zip(cuts, across, strict=True))
        if sums_nbytes + whole_nbytes <= memory:
            fetched = 1.0
        elif sums_nbytes + kept_nbytes > memory:
            fetched *= float(of_crops.sum()) / depth.chunks
        rest = memory - sums_nbytes if sums_nbytes <= memory else memory // 2
        wanted = whole_nbytes if predicted > 1 else kept_nbytes  # further columns may need the same chunks
        cost = (max(sums_nbytes - memory, 0), fetched + predicted)
        found.append((cost, Columns(tuple(cut.width for cut in cuts), min(wanted, rest))))
    return min(found, key=lambda one: one[0])[1]
