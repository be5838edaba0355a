"""The plan of a resampling, block by block: which box of the source each block of the output needs, and how large.

In: the shapes of source and output, and the affine map between their voxels (:class:`AffineGrid`). Out: a
:class:`ResamplePlan` of :class:`Block` records. Everything is in voxels; a box is a pair of corners, the upper one
excluded. How large blocks are is for ``linumpy.plan.grid.block_shape``. Errors: ``ValueError`` for maps, shapes, orders
and modes that make no sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from linumpy.plan.boundary import MODES, fold, period

#: Of these a box that is cut at the edges of the image is continued as the image is.
CLIPPED_MODES = ("constant", "nearest")
#: Voxels around a box within which the spline's prefilter of each order forgets where the box was cut: the largest
#: pole of the filter, to this power, is below 1e-12.
_FORGET = {0: 0, 1: 0, 2: 16, 3: 21, 4: 28, 5: 33}
#: SciPy continues an image by so many voxels before it filters for a spline that ends in its last voxel.
SPLINE_PAD = 12
#: Rounding of coordinates never moves them by more; voxels within are read, and count as outside where that is safer.
_ROUNDING = 1e-6
_TRUNCATE = 4.0  # standard deviations at which a Gaussian is cut, as SciPy's gaussian_filter


def gaussian_radius(sigma: float) -> int:
    """Count the voxels on either side that a Gaussian of `sigma` voxels is made of, as SciPy does."""
    return int(_TRUNCATE * sigma + 0.5) if sigma > 1e-15 else 0


def anti_aliasing_sigmas(matrix: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Choose the Gaussian that a source is smoothed by before it is sampled through a matrix.

    Along each axis of the source (scale - 1) / 2 voxels, as scikit-image's ``resize``, where scale is the length of the
    matrix's row: how far a step of one voxel of the output goes along that axis. 0 where the output is not coarser.
    """
    lengths = []
    for row in matrix:
        steps = [abs(m) for m in row if m]
        lengths.append(steps[0] if len(steps) == 1 else math.hypot(*steps))
    return tuple(max(0.0, (length - 1) / 2) for length in lengths)


@dataclass(frozen=True)
class AffineGrid:
    """An output grid laid over a source by an affine map.

    Attributes
    ----------
    source_shape, output_shape : tuple of int
        Voxels along each axis.
    matrix : tuple of tuple of float
        ``coordinates in the source = matrix @ voxel of the output + offset``, both counted in voxels from 0.
    offset : tuple of float
        See `matrix`.
    order : int
        Of the spline, 0 to 5.
    mode : str
        One of :data:`MODES`.
    sigmas : tuple of float
        Of the Gaussian that smooths the source before it is sampled, in voxels, for each of its axes; beyond its edges
        the source is continued by its outermost voxels. Empty, or all 0: no smoothing.
    """

    source_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]
    order: int
    mode: str
    sigmas: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rank = len(self.source_shape)
        if len(self.sigmas) not in (0, rank) or not all(math.isfinite(one) and one >= 0 for one in self.sigmas):
            raise ValueError(f"sigmas={self.sigmas}: none, or one number from 0 on for each of {rank} axes")
        if isinstance(self.order, bool) or not isinstance(self.order, (int, np.integer)) or self.order not in range(6):
            raise ValueError(f"order={self.order!r}: a spline order is an integer from 0 to 5")
        if self.order == 0 and self.smooths:
            raise ValueError("order=0 takes voxels as they are: the source is not smoothed for it")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is unknown: choose one of {', '.join(MODES)}")
        if self.order > 1 and self.mode not in CLIPPED_MODES:
            raise ValueError(
                f"order={self.order} with mode={self.mode!r} is not made block by block: "
                f"choose mode {' or '.join(map(repr, CLIPPED_MODES))}, or order 0 or 1"
            )
        for label, shape in (("source", self.source_shape), ("output", self.output_shape)):
            if len(shape) != rank or min(shape, default=0) < 1:
                raise ValueError(f"{label} shape {shape}: {rank} sizes from 1 on are needed")
        matrix = np.array(self.matrix, np.float64)
        if matrix.shape != (rank, rank) or len(self.offset) != rank:
            raise ValueError(f"a matrix of shape {matrix.shape} does not map a grid of {rank} axes")
        if not (np.isfinite(matrix).all() and np.isfinite(self.offset).all()):
            raise ValueError(f"the transform holds NaN or infinity: {self.matrix}, offset {self.offset}")
        if np.linalg.matrix_rank(matrix) < rank:
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
        """Whether smoothing and interpolation are done together, axis by axis, by one table of weights for each.

        So it is where the output is coarser by a spacing: with linear interpolation, between volumes that begin at the
        same edge.
        """
        if not self.smooths or self.order != 1 or self.mode != "nearest":
            return False
        matrix = np.array(self.matrix, np.float64)
        scales = matrix.diagonal()
        begins = np.abs(np.array(self.offset) - (scales - 1) / 2) <= 1e-9 * np.maximum(1, scales)
        return bool((matrix == np.diag(scales)).all() and (scales > 0).all() and begins.all())

    @property
    def reach(self) -> tuple[int, ...]:
        """Voxels around those to sample that the smoothing needs, for each axis of the source."""
        return tuple(map(gaussian_radius, self.sigmas)) or (0,) * self.rank

    def coordinates(self, start: Sequence[int], stop: Sequence[int]) -> tuple[tuple[float, float], ...]:
        """Return, for each axis of the source, between which coordinates a box of the output falls."""
        if self.separable:  # as the tables compute them, to the bit
            scales = (self.matrix[axis][axis] for axis in range(self.rank))
            voxels = zip(scales, start, stop, strict=True)
            return tuple(((a + 0.5) * f - 0.5, (b - 0.5) * f - 0.5) for f, a, b in voxels)
        bounds = []
        for row, shift in zip(self.matrix, self.offset, strict=True):
            ends = [(m * a, m * (b - 1)) for m, a, b in zip(row, start, stop, strict=True)]
            bounds.append((shift + sum(map(min, ends)), shift + sum(map(max, ends))))
        return tuple(bounds)

    def stays_inside(self, axis: int, low: float, high: float) -> bool:
        """Say whether linear interpolation between two coordinates needs no voxel beyond the edges of the source."""
        return low >= _ROUNDING and high < self.source_shape[axis] - 1 - _ROUNDING

    @property
    def support(self) -> tuple[int, int]:
        """Voxels to read below and above the voxel at or below a coordinate, which rounding may have moved."""
        reach = 0 if self.order < 2 else 1 + self.order // 2 + _FORGET[self.order]
        return reach, 1 + reach

    @property
    def pad(self) -> int:
        """Voxels by which a box is continued at either end of each axis before it is filtered."""
        return SPLINE_PAD if self.order > 1 and self.mode == "nearest" else 0


@dataclass(frozen=True)
class Block:
    """A block of the output, and the box of the source that it is made from.

    Attributes
    ----------
    number : int
        Of the block, from 0, the last axis fastest.
    start, stop : tuple of int
        Corners in the output.
    source_start, source_stop : tuple of int
        Corners in the source, within its shape; equal where the block lies wholly outside and nothing is read.
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
        """The block as an index into the output."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def source_box(self) -> tuple[slice, ...]:
        """The box as an index into the source."""
        return tuple(slice(a, b) for a, b in zip(self.source_start, self.source_stop, strict=True))


@dataclass(frozen=True)
class ResamplePlan:
    """How an output is made, block by block.

    Attributes
    ----------
    grid : AffineGrid
        What is made.
    block_shape : tuple of int
        Whole stored objects (chunks or shards) of the output; blocks at its end are cut.
    """

    grid: AffineGrid
    block_shape: tuple[int, ...]
    counts: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        pairs = zip(self.grid.output_shape, self.block_shape, strict=True)
        object.__setattr__(self, "counts", tuple(-(-n // b) for n, b in pairs))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[Block]:
        return map(self.block, range(len(self)))

    def block(self, number: int) -> Block:
        """Make the record of one block."""
        if not 0 <= number < len(self):
            raise IndexError(f"block {number}: this plan has {len(self)}")
        corner = np.unravel_index(number, self.counts)
        start = tuple(int(c) * b for c, b in zip(corner, self.block_shape, strict=True))
        pairs = zip(start, self.block_shape, self.grid.output_shape, strict=True)
        stop = tuple(min(a + b, n) for a, b, n in pairs)
        return Block(number, start, stop, *source_box(self.grid, start, stop))

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Voxels of the largest box of the source, and of the largest block."""
        return max(math.prod(one.source_shape) for one in self), math.prod(
            map(min, self.block_shape, self.grid.output_shape)
        )


def source_box(grid: AffineGrid, start: Sequence[int], stop: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Find the box of the source that a box of the output is made from.

    It holds every voxel whose value has a say in the result, also where coordinates are off by what rounding may do,
    and no more: of a stored chunk that a box reaches by one voxel, a reader may have to read all.

    Parameters
    ----------
    grid : AffineGrid
        The map, the order and the mode.
    start, stop : sequence of int
        Corners of the box in the output.

    Returns
    -------
    start, stop : tuple of int
        Corners in the source; all zeros where the output lies outside of it.
    """
    axes = []
    for axis, (low, high) in enumerate(grid.coordinates(start, stop)):
        one = axis_box(grid, axis, low, high)
        if one is None:
            return (0,) * grid.rank, (0,) * grid.rank
        axes.append(one)
    return tuple(a for a, _ in axes), tuple(b for _, b in axes)


def axis_box(grid: AffineGrid, axis: int, low: float, high: float) -> tuple[int, int] | None:
    """Find the voxels needed along one axis; None for none."""
    box = _linear_box(grid, axis, low, high) if grid.separable else _sampled_box(grid, axis, low, high)
    if box is None:
        return None
    reach = grid.reach[axis]
    return max(box[0] - reach, 0), min(box[1] + reach, grid.source_shape[axis])


def _linear_box(grid: AffineGrid, axis: int, low: float, high: float) -> tuple[int, int]:
    """Find the voxels that tables of weights take between two coordinates: none whose weight is 0."""
    low, high = (min(max(one, 0.0), grid.source_shape[axis] - 1.0) for one in (low, high))
    return math.floor(low), math.ceil(high) + 1


def _sampled_box(grid: AffineGrid, axis: int, low: float, high: float) -> tuple[int, int] | None:
    """Find the voxels that are sampled between two coordinates along one axis."""
    n, (before, after) = grid.source_shape[axis], grid.support
    if grid.mode == "constant" and (high < -_ROUNDING or low > n - 1 + _ROUNDING):
        return None
    if grid.mode in ("constant", "nearest", "grid-constant") or grid.stays_inside(axis, low, high):
        # Beyond the edges there is one value, or that of the last voxel: no need to look further.
        low, high = (min(max(one, 0.0), n - 1.0) for one in (low - _ROUNDING, high + _ROUNDING))
        return max(math.floor(low) - before, 0), min(math.floor(high) + after, n - 1) + 1
    if n == 1 or high - low >= 2 * n:
        return 0, n
    # Whole turns are taken off first: they change nothing, and keep the numbers small.
    turn = 2 * int(period(n, grid.mode))
    shift = math.floor(low / turn) * turn
    voxels = np.arange(math.floor(low - shift) - before - 1, math.floor(high - shift) + after + 2)
    folded = fold(voxels, n, grid.mode)
    return max(int(folded.min()) - 1, 0), min(int(folded.max()) + 2, n)
