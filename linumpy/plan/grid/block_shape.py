"""Choose the blocks of a resampling: as large as is useful and fits, and such that little is read twice.

In: an :class:`~linumpy.plan.grid.blocks.AffineGrid`, how source and output are stored, what a voxel costs, a limit.
Out: a shape. Errors: :class:`~linumpy.errors.DeviceMemoryError` where not even the smallest block fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linumpy.errors import DeviceMemoryError
from linumpy.plan.grid.blocks import CLIPPED_MODES, AffineGrid, axis_box

#: A block and its box larger than this gain nothing: reading one takes far longer than starting to.
_LARGE_NBYTES = 2**30
#: Blocks are not made so large that there are fewer of them: the first read and the last write overlap nothing.
_ENOUGH_BLOCKS = 24
#: But this is never too large, on these grounds.
_SMALL_NBYTES = 32 * 2**20
#: Unless the larger block spares this part of all reads; then they may be as few as these.
_WORTH, _FEW_BLOCKS = 0.08, 8


@dataclass(frozen=True)
class BlockBytes:
    """What a block costs in memory.

    Attributes
    ----------
    source, output : int
        Bytes of a voxel of either.
    work : int
        Bytes that the transform needs besides for each voxel of the source's box, with what it is continued by.
    output_work : int
        Bytes that transform and write need besides for each voxel of the output, with what fills its last chunks up.
    """

    source: int
    output: int
    work: int = 0
    output_work: int = 0

    def one(self, source_voxels: int, output_voxels: int) -> int:
        """Bytes of one box and its block."""
        return source_voxels * self.source + output_voxels * self.output

    def of(
        self,
        source_voxels: int,
        output_voxels: int,
        work_voxels: int | None = None,
        stored_voxels: int | None = None,
    ) -> int:
        """Bytes at the peak: two blocks are under way, one being read or written while the other is made.

        `work_voxels` are those of the box with what it is continued by, `stored_voxels` those of the block's chunks;
        by default they are as many as those of box and block.
        """
        work = (source_voxels if work_voxels is None else work_voxels) * self.work
        work += (output_voxels if stored_voxels is None else stored_voxels) * self.output_work
        return 2 * self.one(source_voxels, output_voxels) + work


def source_bound(grid: AffineGrid, block_shape: Sequence[int], pad: int = 0) -> int:
    """Bound the voxels of the box that any block of a shape needs, wherever it lies; with a pad around it."""
    return math.prod(n + 2 * pad for n in _box_bound(grid, block_shape))


def _box_bound(grid: AffineGrid, block_shape: Sequence[int]) -> list[int]:
    before, after = grid.support
    lengths = []
    whole = grid.coordinates((0,) * grid.rank, grid.output_shape)
    for axis, n in enumerate(grid.source_shape):
        span = sum(abs(m) * (b - 1) for m, b in zip(grid.matrix[axis], block_shape, strict=True))
        # A block across the seam of a wrapped image needs both of its ends.
        wraps = grid.mode in ("wrap", "grid-wrap") and not grid.stays_inside(axis, *whole[axis])
        lengths.append(n if wraps else min(n, math.ceil(span) + before + after + 6 + 2 * grid.reach[axis]))
    return lengths


def voxels_read(grid: AffineGrid, block_shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Estimate the voxels of the source that all blocks together read, whole chunks where they touch one.

    Exact where each axis of the source depends on one of the output and the mode is clipped; else what blocks of that
    shape read on average if they lie anywhere.

    Parameters
    ----------
    grid : AffineGrid
        What is made.
    block_shape : sequence of int
        Of the blocks.
    chunk_shape : sequence of int
        Of the source.
    """
    rows = [[axis for axis, m in enumerate(row) if m] for row in grid.matrix]
    counts = [-(-n // b) for n, b in zip(grid.output_shape, block_shape, strict=True)]
    if grid.mode in CLIPPED_MODES and sorted(rows) == [[axis] for axis in range(grid.rank)]:
        return math.prod(_axis_read(grid, axis, rows[axis][0], block_shape, chunk_shape) for axis in range(grid.rank))
    lengths = zip(_box_bound(grid, block_shape), chunk_shape, grid.source_shape, strict=True)
    return math.prod(counts) * math.prod(min(n + c - 1, whole) for n, c, whole in lengths)


def _axis_read(grid: AffineGrid, axis: int, along: int, block_shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Sum what blocks along an axis of the output read along the axis of the source that depends on it alone."""
    length, step, chunk, n = grid.output_shape[along], block_shape[along], chunk_shape[axis], grid.source_shape[axis]
    total = 0
    for begin in range(0, length, step):
        m = grid.matrix[axis][along]
        ends = (m * begin, m * (min(begin + step, length) - 1))
        box = axis_box(grid, axis, grid.offset[axis] + min(ends), grid.offset[axis] + max(ends))
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
    """Choose blocks of whole stored objects: as large as is useful and fits, and such that little is read twice.

    Parameters
    ----------
    grid : AffineGrid
        What is made.
    stored_shape : sequence of int
        Shape of a chunk of the output, or of a shard where it has them.
    cost : BlockBytes
        Bytes of a voxel.
    budget : int
        Bytes that all blocks under way may take together.
    chunk_shape : sequence of int, optional
        Shape of a chunk of the source, which is read whole wherever it is touched; by default single voxels.

    Raises
    ------
    DeviceMemoryError
        Not even one stored object fits.
    """
    block = [min(s, n) for s, n in zip(stored_shape, grid.output_shape, strict=True)]
    chunks = (1,) * grid.rank if chunk_shape is None else chunk_shape

    def needs(shape: Sequence[int]) -> int:
        whole = math.prod(-(-b // s) * s for b, s in zip(shape, stored_shape, strict=True))
        return cost.of(source_bound(grid, shape), math.prod(shape), source_bound(grid, shape, grid.pad), whole)

    if needs(block) > budget:
        raise DeviceMemoryError(
            f"blocks of one stored object, {tuple(block)} voxels, need {needs(block)} bytes, but {budget} may be used: "
            f"choose smaller chunks= (or shards=), or more device_memory="
        )
    all_bytes = cost.one(source_bound(grid, grid.output_shape), math.prod(grid.output_shape))
    large = min(_LARGE_NBYTES, max(_SMALL_NBYTES, all_bytes // _ENOUGH_BLOCKS))

    def pays(shape: Sequence[int]) -> bool:
        """Say whether a block is not too large to be useful, or spares enough reads all the same."""
        size = cost.one(source_bound(grid, shape), math.prod(shape))
        if size <= large:
            return True
        spared = _read_again(grid, block, chunks) - _read_again(grid, shape, chunks)
        return size <= all_bytes // _FEW_BLOCKS and spared >= _WORTH * _read_again(grid, block, chunks)

    while True:
        longer: list[tuple[int, ...]] = [
            (*block[:axis], min(2 * (-(-block[axis] // stored)) * stored, length), *block[axis + 1 :])
            for axis, (stored, length) in enumerate(zip(stored_shape, grid.output_shape, strict=True))
            if block[axis] < length
        ]
        fitting = [one for one in longer if needs(one) <= budget and pays(one)]
        if not fitting:
            # A block that is cut by the output's end is still one of whole stored objects.
            return tuple(-(-b // s) * s for b, s in zip(block, stored_shape, strict=True))
        best: tuple[int, ...] = min(fitting, key=lambda one: (_read_again(grid, one, chunks), *_most_cubic(one)))
        block = list(best)


def _read_again(grid: AffineGrid, shape: Sequence[int], chunk_shape: Sequence[int]) -> int:
    """Say how often a voxel of the source is read, in hundredths: less is not worth a long thin block."""
    return round(100 * voxels_read(grid, shape, chunk_shape) / math.prod(grid.source_shape))


def _most_cubic(shape: Sequence[int]) -> tuple[int, ...]:
    """Order shapes: the most cubic first, and of those the one that is longest along the last axes."""
    return (max(shape), -min(shape), *shape)
