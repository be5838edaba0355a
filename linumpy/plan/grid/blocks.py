"""Plan a resampling block by block: the box of the source that each block of the output needs. Pure, in voxels.

``linumpy.plan.grid.block_shape`` chooses the blocks' shape. Errors: ``ValueError`` for invalid maps, orders and modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from linumpy.checks import is_integer
from linumpy.plan.boundary import MODES, ROUNDING, SPLINE_PAD, fold, gaussian_radius, period
from linumpy.plan.grid.point_map import PointMap

#: Modes that extend a box clipped at the edges of the image exactly as they extend the image.
CLIPPED_MODES = ("constant", "nearest")
#: Margin in voxels around a box, by spline order, in which the effect of cutting the box on the prefilter decays: the
#: largest pole of the filter, to this power, is below 1e-12.
_FILTER_MARGIN = {0: 0, 1: 0, 2: 16, 3: 21, 4: 28, 5: 33}


@dataclass(frozen=True)
class AffineGrid:
    """An output grid mapped into a source: ``coordinates in the source = matrix @ voxel of the output + offset``.

    - `order`: spline order, 0 to 5.
    - `mode`: one of :data:`MODES`.
    - `sigmas`: standard deviations of the Gaussian that smooths the source before it is sampled, in voxels for each
      axis of the source. The Gaussian repeats the outermost voxels beyond the edges. Empty, or all 0: no smoothing.
    - `warp`: fields of vectors, applied to voxels of the output before matrix and offset. The box of the source for a
      block depends on vectors that the plan does not read, so blocks have no box.
    """

    source_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]
    order: int
    mode: str
    sigmas: tuple[float, ...] = ()
    warp: PointMap = ()

    def __post_init__(self) -> None:
        if not is_integer(self.order) or self.order not in range(6):
            raise ValueError(f"order={self.order!r}: a spline order is an integer from 0 to 5")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown: choose one of {', '.join(MODES)}")
        if self.order > 1 and self.mode not in CLIPPED_MODES:
            raise ValueError(
                f"order={self.order} with mode={self.mode!r} cannot be computed block by block: "
                f"choose mode {' or '.join(map(repr, CLIPPED_MODES))}, or order 0 or 1"
            )
        if self.warp and self.mode not in (*CLIPPED_MODES, "grid-constant"):
            raise ValueError(
                f"mode={self.mode!r} through a field of vectors cannot be computed block by block: choose mode "
                "'constant', 'nearest' or 'grid-constant'"
            )
        if 0 in self.source_shape:
            raise ValueError(f"a source of shape {self.source_shape} has no voxels to resample")
        matrix = np.array(self.matrix, np.float64)
        if not (np.isfinite(matrix).all() and np.isfinite(self.offset).all()):
            raise ValueError(f"the transform holds NaN or infinity: {self.matrix}, offset {self.offset}")
        if np.linalg.matrix_rank(matrix) < self.rank:
            raise ValueError(f"the matrix {self.matrix} is singular: it maps the output onto a plane, line or point")

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.source_shape)

    @property
    def smooths(self) -> bool:
        """Whether the source is smoothed."""
        return any(self.sigmas)

    @cached_property
    def separable(self) -> bool:
        """Whether one table of weights for each axis both smooths and interpolates: linearly, from the same edge."""
        if not self.smooths or self.order != 1 or self.mode != "nearest" or self.warp:
            return False
        matrix = np.array(self.matrix, np.float64)
        scales = matrix.diagonal()
        same_edge = np.abs(np.array(self.offset) - (scales - 1) / 2) <= 1e-9 * np.maximum(1, scales)
        return bool((matrix == np.diag(scales)).all() and (scales > 0).all() and same_edge.all())

    @cached_property
    def shift(self) -> tuple[float, ...]:
        """The offset that voxels are sampled with.

        Order 0 takes the upper of two voxels at the same distance: the offset is increased by less than the tolerance,
        so that rounding errors do not choose between them. Not in modes that repeat the image, as in SciPy.
        """
        if self.order or self.mode not in (*CLIPPED_MODES, "grid-constant"):
            return self.offset
        return tuple(shift + ROUNDING / 2 for shift in self.offset)

    @property
    def snaps(self) -> bool:
        """Whether coordinates outside of the source by a rounding error are moved to its edge."""
        return self.mode == "constant"

    @property
    def reach(self) -> tuple[int, ...]:
        """Margin of the box that the smoothing needs, in voxels for each axis of the source."""
        return tuple(map(gaussian_radius, self.sigmas)) or (0,) * self.rank

    def coordinates(self, start: Sequence[int], stop: Sequence[int]) -> tuple[tuple[float, float], ...]:
        """Return the lowest and highest coordinate along each axis of the source for a box of the output."""
        if self.separable:  # bit for bit as gpu/resize/tables.py computes them
            scales = (self.matrix[axis][axis] for axis in range(self.rank))
            voxels = zip(scales, start, stop, strict=True)
            return tuple(((a + 0.5) * f - 0.5, (b - 0.5) * f - 0.5) for f, a, b in voxels)
        bounds = []
        for row, shift in zip(self.matrix, self.shift, strict=True):
            ends = [(m * a, m * (b - 1)) for m, a, b in zip(row, start, stop, strict=True)]
            bounds.append((shift + sum(map(min, ends)), shift + sum(map(max, ends))))
        return tuple(bounds)

    def stays_inside(self, axis: int, low: float, high: float) -> bool:
        """Return whether linear interpolation at coordinates from `low` to `high` needs only voxels of the source."""
        return low >= ROUNDING and high < self.source_shape[axis] - 1 - ROUNDING

    @property
    def support(self) -> tuple[int, int]:
        """Voxels to read before and after voxel ``floor(coordinate)``, including the prefilter's margin."""
        margin = 0 if self.order < 2 else 1 + self.order // 2 + _FILTER_MARGIN[self.order]
        return margin, 1 + margin

    @property
    def pad(self) -> int:
        """Voxels by which a box is padded at either end of each axis before the spline's prefilter."""
        return SPLINE_PAD if self.order > 1 and self.mode == "nearest" else 0


@dataclass(frozen=True)
class Block:
    """A block of the output, with its corners there, and the corners of the box of the source that it is computed from.

    The box is all 0 if the whole block lies outside, so that nothing is read, or if the grid has a warp.

    - `number`: index of the block, from 0, the last axis fastest.
    """

    number: int
    start: tuple[int, ...]
    stop: tuple[int, ...]
    source_start: tuple[int, ...]
    source_stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels of the block along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Voxels of the source's box along each axis."""
        return tuple(b - a for a, b in zip(self.source_start, self.source_stop, strict=True))

    @property
    def box(self) -> tuple[slice, ...]:
        """The block, as an index into the output."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def source_box(self) -> tuple[slice, ...]:
        """The source's box, as an index into the source."""
        return tuple(slice(a, b) for a, b in zip(self.source_start, self.source_stop, strict=True))


def position_in_blocks(index: int, counts: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Return the position of the item with a number, of `counts` items along each axis, in blocks of `block` items.

    Blocks come in C order, and the items of a block in C order; the last block of an axis may have fewer items.
    """
    begin, extent = [0] * len(counts), list(counts)
    for axis, (count, size) in enumerate(zip(counts, block, strict=True)):
        number, index = divmod(index, size * math.prod(extent) // count)
        begin[axis], extent[axis] = number * size, min(size, count - number * size)
    return tuple(a + int(i) for a, i in zip(begin, np.unravel_index(index, extent), strict=True))


@dataclass(frozen=True)
class ResamplePlan:
    """The blocks of an output, and the box of the source that each needs.

    - `block_shape`: shape of a block, a multiple of the shape of a stored object; the output's end cuts blocks.
    - `part_bytes`: if the grid has a warp: maximum bytes of the boxes that a part of a block is computed from
      (:func:`linumpy.resample.blocks.warp.make_warped`).
    - `counts`: number of blocks along each axis.
    """

    grid: AffineGrid
    block_shape: tuple[int, ...]
    part_bytes: int = 2**26
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.grid.output_shape, self.block_shape, strict=True)
        object.__setattr__(self, "counts", tuple(-(-n // b) for n, b in pairs))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[Block]:
        return map(self.block, range(len(self)))

    def in_order(self, kept_voxels: int) -> Iterator[Block]:
        """Yield all blocks, so that a cache of `kept_voxels` voxels of the source has most of what neighbours share.

        Blocks come along the output's shortest axis first, then along the next axis as far as memory allows.
        """
        axes = sorted(range(self.grid.rank), key=lambda axis: -self.grid.output_shape[axis])
        counts = [self.counts[axis] for axis in axes]
        line_voxels = math.prod(self.block(len(self) // 2).source_shape) * math.prod(counts[2:])
        # Chunks at the edges of boxes add about half of the voxels of a line of blocks.
        group = counts[:1] + [max(1, kept_voxels // (line_voxels * 3 // 2 + 1)) for _ in counts[1:2]] + counts[2:]
        for index in range(len(self)):
            corner = position_in_blocks(index, counts, group)
            yield self.block(int(np.ravel_multi_index([corner[axes.index(a)] for a in range(len(axes))], self.counts)))

    def block(self, number: int) -> Block:
        """Return the block of an index."""
        corner = np.unravel_index(number, self.counts)
        start = tuple(int(c) * b for c, b in zip(corner, self.block_shape, strict=True))
        pairs = zip(start, self.block_shape, self.grid.output_shape, strict=True)
        stop = tuple(min(a + b, n) for a, b, n in pairs)
        return Block(number, start, stop, *source_box(self.grid, start, stop))

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Number of voxels of the largest box of the source, and of the largest block."""
        largest_block = math.prod(map(min, self.block_shape, self.grid.output_shape))
        return max(math.prod(block.source_shape) for block in self), largest_block


def source_box(grid: AffineGrid, start: Sequence[int], stop: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the box of the source that a box of the output is computed from; all 0 outside the source, or with a warp.

    The box contains every voxel that contributes to the result, whatever the rounding of coordinates. It has no further
    margin, since a single voxel in another stored chunk causes a read of that whole chunk.
    """
    if grid.warp:
        return (0,) * grid.rank, (0,) * grid.rank
    axes = []
    for axis, (low, high) in enumerate(grid.coordinates(start, stop)):
        bounds = axis_box(grid, axis, low, high)
        if bounds is None:
            return (0,) * grid.rank, (0,) * grid.rank
        axes.append(bounds)
    return tuple(a for a, _ in axes), tuple(b for _, b in axes)


def axis_box(grid: AffineGrid, axis: int, low: float, high: float) -> tuple[int, int] | None:
    """Find the voxels needed along one axis for coordinates from `low` to `high`; None if no voxel is needed."""
    reach, size = grid.reach[axis], grid.source_shape[axis]
    if grid.separable:  # linear interpolation, clamped to the source
        low, high = min(max(low, 0.0), size - 1.0), min(max(high, 0.0), size - 1.0)
        box: tuple[int, int] | None = (math.floor(low), math.ceil(high) + 1)
    else:
        box = _sampled_box(grid, axis, low, high)
    return None if box is None else (max(box[0] - reach, 0), min(box[1] + reach, size))


def _sampled_box(grid: AffineGrid, axis: int, low: float, high: float) -> tuple[int, int] | None:
    """Find the voxels that are sampled at coordinates from `low` to `high`; None if mode "constant" samples none."""
    n, (before, after) = grid.source_shape[axis], grid.support
    if grid.mode == "constant" and (high < -ROUNDING or low > n - 1 + ROUNDING):
        return None
    if grid.mode in ("constant", "nearest", "grid-constant") or grid.stays_inside(axis, low, high):
        # Beyond the edges the value is constant, or the value of the last voxel.
        low, high = min(max(low - ROUNDING, 0.0), n - 1.0), min(max(high + ROUNDING, 0.0), n - 1.0)
        return max(math.floor(low) - before, 0), min(math.floor(high) + after, n - 1) + 1
    if n == 1 or high - low >= 2 * n:
        return 0, n
    # Subtract whole periods, to keep the numbers small.
    two_periods = 2 * int(period(n, grid.mode))
    shift = math.floor(low / two_periods) * two_periods
    voxels = np.arange(math.floor(low - shift) - before - 1, math.floor(high - shift) + after + 2)
    folded = fold(voxels, n, grid.mode)
    return max(int(folded.min()) - 1, 0), min(int(folded.max()) + 2, n)
