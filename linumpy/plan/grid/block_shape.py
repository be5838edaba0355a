"""Choose the shape of the blocks of a resampling: large enough to be fast, within memory, reading few voxels twice.

A block grows along the axis that makes all blocks together read the fewest voxels (touched chunks are read whole), and
among equal axes along the shortest. A block and its box of the source grow up to 1/24 of the bytes of all voxels, at
least 32 MiB and at most 1 GiB. They grow further, up to 1/8 of all bytes, if that saves 8 % of the reads. Two blocks,
their boxes and the working memory always fit into the limit; :class:`~linumpy.errors.DeviceMemoryError` if not even
those of the smallest block do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linumpy.errors import DeviceMemoryError
from linumpy.plan.grid.blocks import CLIPPED_MODES, AffineGrid, axis_box

#: A block and its box gain nothing beyond this size: starting a read then takes a small part of the time of the read.
_LARGE_NBYTES = 2**30
#: Minimum number of blocks, since the first read and the last write overlap no other work: _ENOUGH_BLOCKS, or
#: _FEW_BLOCKS if larger blocks save the fraction _MIN_SAVING of all reads. Blocks up to _SMALL_NBYTES may be fewer.
_ENOUGH_BLOCKS, _FEW_BLOCKS = 24, 8
_SMALL_NBYTES, _MIN_SAVING = 32 * 2**20, 0.08


@dataclass(frozen=True)
class BlockBytes:
    """Memory that a block takes, in bytes per voxel.

    - `source`, `output`: bytes of a voxel of the source and of the output.
    - `work`: working memory of the transform, for each voxel of the source's box and its padding.
    - `output_work`: working memory of transform and write, for each voxel of the whole chunks that hold the block.
    """

    source: int
    output: int
    work: int = 0
    output_work: int = 0

    def pair(self, source_voxels: int, output_voxels: int) -> int:
        """Return the bytes of one block and its box of the source."""
        return source_voxels * self.source + output_voxels * self.output

    def peak(
        self,
        source_voxels: int,
        output_voxels: int,
        work_voxels: int | None = None,
        stored_voxels: int | None = None,
    ) -> int:
        """Return the bytes of the peak: two blocks are in memory, one is read or written while the other is computed.

        `work_voxels` counts the box and its padding (by default `source_voxels`), `stored_voxels` the whole chunks that
        hold the block (by default `output_voxels`).
        """
        work = (source_voxels if work_voxels is None else work_voxels) * self.work
        work += (output_voxels if stored_voxels is None else stored_voxels) * self.output_work
        return 2 * self.pair(source_voxels, output_voxels) + work


def source_bound(grid: AffineGrid, block_shape: Sequence[int], pad: int = 0) -> int:
    """Return an upper bound of the voxels in the box of any block of a shape, with `pad` voxels around the box."""
    return math.prod(n + 2 * pad for n in _box_bound(grid, block_shape))


def _box_bound(grid: AffineGrid, block_shape: Sequence[int]) -> list[int]:
    """Return an upper bound of the shape of the box of any block of a shape."""
    before, after = grid.support
    lengths = []
    coordinates = grid.coordinates((0,) * grid.rank, grid.output_shape)
    for axis, n in enumerate(grid.source_shape):
        span = sum(abs(m) * (b - 1) for m, b in zip(grid.matrix[axis], block_shape, strict=True))
        # A block across the seam of a wrapped image needs both ends of the image.
        wraps = grid.mode in ("wrap", "grid-wrap") and not grid.stays_inside(axis, *coordinates[axis])
        lengths.append(n if wraps else min(n, math.ceil(span) + before + after + 6 + 2 * grid.reach[axis]))
    return lengths


def voxels_read(grid: AffineGrid, block_shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Estimate the voxels of the source that all blocks together read; each touched chunk is read whole.

    The estimate is exact if each axis of the source depends on one axis of the output and the mode is one of
    `CLIPPED_MODES`. Otherwise n voxels of a box count as n + chunk - 1 along each axis, the average over all positions.
    """
    rows = [[axis for axis, m in enumerate(row) if m] for row in grid.matrix]
    counts = [-(-n // b) for n, b in zip(grid.output_shape, block_shape, strict=True)]
    if grid.mode in CLIPPED_MODES and sorted(rows) == [[axis] for axis in range(grid.rank)]:
        return math.prod(_axis_read(grid, axis, rows[axis][0], block_shape, chunk_shape) for axis in range(grid.rank))
    lengths = zip(_box_bound(grid, block_shape), chunk_shape, grid.source_shape, strict=True)
    return math.prod(counts) * math.prod(min(n + c - 1, whole) for n, c, whole in lengths)


def _axis_read(grid: AffineGrid, axis: int, along: int, block_shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Sum the voxels that all blocks along axis `along` of the output read along axis `axis` of the source."""
    length, step, chunk, n = grid.output_shape[along], block_shape[along], chunk_shape[axis], grid.source_shape[axis]
    total = 0
    for begin in range(0, length, step):
        m = grid.matrix[axis][along]
        ends = (m * begin, m * (min(begin + step, length) - 1))
        box = axis_box(grid, axis, grid.shift[axis] + min(ends), grid.shift[axis] + max(ends))
        if box is not None:
            total += min(-(-box[1] // chunk) * chunk, n) - box[0] // chunk * chunk
    return total


def choose_block_shape(
    grid: AffineGrid,
    stored_shape: Sequence[int],
    cost: BlockBytes,
    budget: int,
    chunk_shape: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Choose the shape of the blocks, which consist of whole stored objects, as the module's docstring describes.

    - `stored_shape`: shape of a chunk of the output, or of a shard if it has shards.
    - `budget`: limit in bytes of all blocks, boxes and working memory together.
    - `chunk_shape`: shape of a chunk of the source, which is read whole if a box touches it; by default single voxels.
    """
    block = [min(s, n) for s, n in zip(stored_shape, grid.output_shape, strict=True)]
    chunks = (1,) * grid.rank if chunk_shape is None else chunk_shape

    def peak_nbytes(shape: Sequence[int]) -> int:
        stored_voxels = math.prod(-(-b // s) * s for b, s in zip(shape, stored_shape, strict=True))
        work_voxels = source_bound(grid, shape, grid.pad)
        return cost.peak(source_bound(grid, shape), math.prod(shape), work_voxels, stored_voxels)

    if peak_nbytes(block) > budget:
        raise DeviceMemoryError(
            f"blocks of one stored object, {tuple(block)} voxels, need {peak_nbytes(block)} bytes, but {budget} may be "
            f"used: choose smaller chunks= (or shards=), or more memory_bytes="
        )
    all_bytes = cost.pair(source_bound(grid, grid.output_shape), math.prod(grid.output_shape))
    large_nbytes = min(_LARGE_NBYTES, max(_SMALL_NBYTES, all_bytes // _ENOUGH_BLOCKS))

    def is_worthwhile(shape: Sequence[int]) -> bool:
        """Return whether a larger block is faster: it is still small, or it saves enough reads."""
        nbytes = cost.pair(source_bound(grid, shape), math.prod(shape))
        if nbytes <= large_nbytes:
            return True
        saved = _reads_per_voxel(grid, block, chunks) - _reads_per_voxel(grid, shape, chunks)
        return nbytes <= all_bytes // _FEW_BLOCKS and saved >= _MIN_SAVING * _reads_per_voxel(grid, block, chunks)

    while True:
        longer: list[tuple[int, ...]] = [
            (*block[:axis], min(2 * (-(-block[axis] // stored)) * stored, length), *block[axis + 1 :])
            for axis, (stored, length) in enumerate(zip(stored_shape, grid.output_shape, strict=True))
            if block[axis] < length
        ]
        fitting = [shape for shape in longer if peak_nbytes(shape) <= budget and is_worthwhile(shape)]
        if not fitting:
            # Blocks consist of whole stored objects, even if the output's end cuts them.
            return tuple(-(-b // s) * s for b, s in zip(block, stored_shape, strict=True))
        # Of shapes that read equally often, cubes come first, then the longest along the last axes.
        best = min(fitting, key=lambda shape: (_reads_per_voxel(grid, shape, chunks), max(shape), -min(shape), *shape))
        block = list(best)


def _reads_per_voxel(grid: AffineGrid, shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Estimate how often a voxel of the source is read, in hundredths: smaller gains do not justify thin blocks."""
    return round(100 * voxels_read(grid, shape, chunk_shape) / math.prod(grid.source_shape))
