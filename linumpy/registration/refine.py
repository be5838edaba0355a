"""Refine rigid or affine transforms between pairs of images, all pairs in one batch.

In: pairs of images (N, [Z,] Y, X) with masks and first transforms. Out: a transform for each pair with its error, in
µm. The squared difference of the images, up to a gain and an offset, is minimised by the inverse compositional
Gauss-Newton method (Baker and Matthews, Lucas-Kanade 20 years on, International Journal of Computer Vision 56, 2004)
with Levenberg-Marquardt damping, from coarse to fine. Gradients are those of the cubic spline through the fixed
image. Voxels that differ much count less (Cauchy weights). Each iteration samples all pairs in the same launches; only
the normal equations, some ten numbers squared a pair, are solved on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array, to_host
from linumpy.gpu.ndimage.transform import spline_filter1d
from linumpy.registration.masked_correlation import check_pairs, standardized
from linumpy.registration.stacked import StackedImages

MODELS = ("translation", "rigid", "affine")

#: Bytes of coordinates, samples and columns that are in memory at a time, on a device and on the host.
SCRATCH_BYTES, HOST_SCRATCH_BYTES = 2**30, 2**25
#: Cauchy's constant for 95 % efficiency, and the factor from a median absolute deviation to a standard deviation.
_CAUCHY, _MAD = 2.385, 1.4826
#: Residuals of a pair from which their spread is estimated.
_SAMPLES = 4096
#: Size of the coarsest level, at least.
_COARSEST = 24


@dataclass(frozen=True)
class Refinement:
    """How transforms are refined.

    Attributes
    ----------
    model : {"rigid", "affine", "translation"}
        What an update may change. The first transforms may be of any kind.
    levels : int, optional
        Resolutions, each half of the one before; by default down to about 24 voxels.
    iterations : int
        Steps on each level at most.
    smoothing : float
        Standard deviation, in voxels of each level, of the Gaussian that smooths both images.
    tolerance : float
        A pair is finished on a level when a step moves no corner by more, in voxels.
    order : {1, 3}
        Spline that samples the moving image on the finest level; coarser ones are sampled linearly.
    robust : bool
        Whether voxels that differ much count less.
    min_overlap : float
        Fraction of the fixed mask that must stay inside the moving one.
    """

    model: str = "rigid"
    levels: int | None = None
    iterations: int = 30
    smoothing: float = 1.0
    tolerance: float = 2e-3
    order: int = 3
    robust: bool = True
    min_overlap: float = 0.2

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model={self.model!r}: choose one of {', '.join(MODELS)}")
        if self.order not in (1, 3):
            raise ValueError(f"order={self.order}: choose 1 or 3")
        if self.iterations < 1 or (self.levels is not None and self.levels < 1):
            raise ValueError(f"iterations={self.iterations}, levels={self.levels}: pass 1 or more")
        if not self.smoothing > 0 or not self.tolerance > 0 or not 0 <= self.min_overlap <= 1:
            raise ValueError(
                f"smoothing={self.smoothing}, tolerance={self.tolerance}, min_overlap={self.min_overlap}: pass "
                "positive numbers of voxels, and a fraction"
            )


@dataclass(frozen=True)
class PairTransforms:
    """Transforms of pairs: a point p of the fixed image is at ``matrix @ (p, 1)`` in the moving one.

    Attributes
    ----------
    matrices : numpy.ndarray, (N, rank + 1, rank + 1)
        Homogeneous, in µm, axes in the order of the images; the centre of the first voxel is at 0.
    errors_um : numpy.ndarray, (N,)
        Standard error of the position of a corner, from the residuals; infinite where nothing could be compared.
    correlations : numpy.ndarray, (N,)
        Pearson's, of the voxels that both images share, smoothed as on the finest level.
    overlaps : numpy.ndarray, (N,)
        Fraction of the fixed mask inside the moving one.
    converged : numpy.ndarray of bool, (N,)
        Whether the last step on the finest level was below the tolerance.
    """

    matrices: np.ndarray
    errors_um: np.ndarray
    correlations: np.ndarray
    overlaps: np.ndarray
    converged: np.ndarray

    def __len__(self) -> int:
        return len(self.matrices)


def refine_pairs(
    fixed: Array,
    moving: Array,
    initial: np.ndarray | None = None,
    *,
    masks: tuple[Array | None, Array | None] = (None, None),
    spacing: Sequence[float] | None = None,
    method: Refinement | None = None,
) -> PairTransforms:
    """Refine the transforms of pairs of images.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (N, [Z,] Y, X)
        The images, all of one shape. Voxels that are not finite are not valid.
    initial : numpy.ndarray, (N, rank + 1, rank + 1), optional
        First transforms, in µm, as :class:`PairTransforms` has them; by default the identity. They should be right to
        about a voxel of the coarsest level.
    masks : (array of bool or None, array of bool or None)
        Valid voxels of the fixed and the moving images, in their shape; None for all.
    spacing : sequence of float, optional
        Voxel spacing in µm along the axes of space; by default 1.
    method : Refinement, optional
        How to refine.

    Raises
    ------
    ValueError
        Images of other axes or of different shapes; transforms or a spacing that do not fit.
    """
    check_pairs(fixed, moving, masks)
    method, rank = method or Refinement(), fixed.ndim - 1
    steps = np.ones(rank) if spacing is None else np.array(spacing, np.float64)
    if steps.shape != (rank,) or not (steps > 0).all() or not np.isfinite(steps).all():
        raise ValueError(f"spacing={spacing}: pass a positive number for each of {rank} axes")
    start = np.tile(np.eye(rank + 1), (len(fixed), 1, 1)) if initial is None else np.array(initial, np.float64)
    if start.shape != (len(fixed), rank + 1, rank + 1) or not np.isfinite(start).all():
        raise ValueError(f"initial of shape {start.shape}: {len(fixed)} matrices of {rank + 1} × {rank + 1} are needed")
    levels = list(_pyramid(standardized(fixed, masks[0]), standardized(moving, masks[1]), steps, method))
    pairs = _Pairs(start.copy())
    for level in reversed(levels):
        _refine_on(level, pairs, method)
    result = _result(levels[0], pairs, method)
    # Steps of a pair without anything to compare follow rounding errors.
    result.matrices[np.isinf(result.errors_um)] = start[np.isinf(result.errors_um)]
    return result


class _Pairs:
    """What is known of each pair, on the host."""

    def __init__(self, matrices: np.ndarray) -> None:
        self.matrices = matrices
        self.gains, self.offsets = np.ones(len(matrices)), np.zeros(len(matrices))
        self.scales = np.full(len(matrices), np.inf)
        self.converged = np.zeros(len(matrices), bool)


@dataclass(frozen=True)
class _Level:
    """Both images at one resolution: smoothed, with masks and gradients."""

    fixed: Any
    fixed_mask: Any
    gradients: tuple[Any, ...]
    moving: StackedImages
    moving_mask: StackedImages
    spacing: np.ndarray
    smoothing: float

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.fixed.shape[1:])

    @property
    def centre(self) -> np.ndarray:
        """Centre in µm: rotations are about it, so that they are independent of translations."""
        return (np.array(self.shape) - 1) / 2 * self.spacing

    def voxel_maps(self, matrices: np.ndarray) -> np.ndarray:
        """Return transforms in µm as maps of voxels, (N, rank, rank + 1)."""
        maps = matrices[:, :-1] / self.spacing[:, None]
        maps[:, :, :-1] *= self.spacing
        return maps


def _pyramid(
    fixed: tuple[Any, Any], moving: tuple[Any, Any], spacing: np.ndarray, method: Refinement
) -> Iterator[_Level]:
    """Yield the levels, the finest first."""
    sides = [(image * mask, mask) for image, mask in (fixed, moving)]
    steps = np.ones(len(spacing), int)
    for number in itertools.count():
        smoothed = [_normalized(*side, method.smoothing) for side in sides]
        gradients = tuple(
            _derivative(smoothed[0][0], axis) / np.float32(step) for axis, step in enumerate(spacing * steps)
        )
        order = method.order if number == 0 else 1
        yield _Level(
            *smoothed[0], gradients, StackedImages(smoothed[1][0], order),
            StackedImages(smoothed[1][1], 1, "zero"), spacing * steps, method.smoothing,
        )  # fmt: skip
        size = sides[0][0].shape[1:]
        finest = (spacing * steps).min()
        # Axes of coarser voxels wait for the others.
        halved = [n >= 2 * _COARSEST and s < 1.5 * finest for n, s in zip(size, spacing * steps, strict=True)]
        if not any(halved) or number + 1 == method.levels:
            return
        cut = (slice(None), *(slice(None, None, 2 if half else 1) for half in halved))
        sigmas = [1.0 if half else 0.0 for half in halved]
        sides = [tuple(_gaussian(part, sigmas)[cut] for part in side) for side in sides]  # type: ignore[misc]
        steps = steps * np.where(halved, 2, 1)


def _normalized(weighted: Any, mask: Any, sigma: float) -> tuple[Any, Any]:
    """Smooth an image that is 0 outside of its mask by the voxels in it; the new mask leaves out the fringe."""
    xp = array_module(weighted)
    sigmas = [sigma] * (weighted.ndim - 1)
    image, weight = _gaussian(weighted, sigmas), _gaussian(mask, sigmas)
    return image / xp.maximum(weight, np.float32(1e-3)), (weight > 0.7 * mask.max()).astype(np.float32)


def _gaussian(images: Any, sigmas: Sequence[float]) -> Any:
    """Smooth images along their axes of space; they go on as they end."""
    if is_device_array(images):
        from cupyx.scipy import ndimage
    else:
        from scipy import ndimage
    return ndimage.gaussian_filter(images, [0.0, *sigmas], mode="nearest")


def _derivative(images: Any, axis: int) -> Any:
    """Return the derivative of the cubic spline through images, at their voxels, a voxel as unit.

    Along one axis it is half the difference of the neighbouring coefficients; across it the spline interpolates.
    """
    xp = array_module(images)
    coefficients = spline_filter1d(images, 3, axis + 1, images.dtype, "mirror")
    widths = [(1, 1) if k == axis + 1 else (0, 0) for k in range(images.ndim)]
    padded = xp.pad(coefficients, widths, mode="reflect")
    ends = [[slice(None)] * images.ndim for _ in range(2)]
    ends[0][axis + 1], ends[1][axis + 1] = slice(2, None), slice(None, -2)
    return (padded[tuple(ends[0])] - padded[tuple(ends[1])]) * np.float32(0.5)


def generators(model: str, rank: int, radius: np.ndarray) -> np.ndarray:
    """Return the directions of an update, (P, rank + 1, rank + 1).

    Each moves the points of a box of half-lengths `radius`, in µm, by about 1 µm.
    """
    out = []
    for axis in range(rank):
        matrix = np.zeros((rank + 1, rank + 1))
        matrix[axis, rank] = 1
        out.append(matrix)
    planes = itertools.combinations(range(rank), 2) if model == "rigid" else ()
    for a, b in planes:
        matrix = np.zeros((rank + 1, rank + 1))
        matrix[b, a], matrix[a, b] = np.array([1, -1]) / math.hypot(radius[a], radius[b])
        out.append(matrix)
    for a, b in itertools.product(range(rank), repeat=2) if model == "affine" else ():
        matrix = np.zeros((rank + 1, rank + 1))
        matrix[a, b] = 1 / radius[b]
        out.append(matrix)
    return np.array(out)


@dataclass
class _Normal:
    """The normal equations of pairs at some transforms, and what else is summed on the way; on the host."""

    hessian: np.ndarray
    slope: np.ndarray
    cost: np.ndarray
    weight: np.ndarray
    variance: np.ndarray
    moments: np.ndarray
    residuals: np.ndarray


def _refine_on(level: _Level, pairs: _Pairs, method: Refinement) -> None:
    """Refine all pairs on one level."""
    rank = len(level.shape)
    centre = np.eye(rank + 1)
    centre[:-1, -1] = level.centre
    back = np.linalg.inv(centre)
    radius = np.maximum(level.centre, level.spacing)
    unit = float(level.spacing.min())
    basis = generators(method.model, rank, radius) * unit
    system = _System(level, centre @ basis @ back)
    every = np.arange(len(pairs.matrices))
    valid = np.maximum(system.voxels, 1)
    if method.robust:
        pairs.scales[:] = np.inf
        pairs.scales[:] = _spread(system.normal(pairs, every).residuals)
    state = system.normal(pairs, every)
    damping = np.full(len(every), 1e-3)
    # Pairs that share too little or have no contrast stay as they are.
    active = (state.weight > method.min_overlap * valid) & (np.abs(state.hessian).max(axis=(1, 2)) > 0)
    pairs.converged[:] = False
    for _ in range(method.iterations):
        now = every[active]
        if not now.size:
            break
        steps = _solve(state.hessian[now], state.slope[now], damping[now])
        trial = _Pairs(pairs.matrices.copy())
        trial.scales, trial.gains, trial.offsets = pairs.scales, pairs.gains.copy(), pairs.offsets.copy()
        count = len(basis)
        # Cayley's transform: the inverse of the step, which stays a rotation where the basis has rotations.
        half = np.einsum("np,pij->nij", steps[:, :count], basis) / 2
        moved = np.linalg.solve(np.eye(rank + 1) + half, np.eye(rank + 1) - half)
        trial.matrices[now] = pairs.matrices[now] @ centre @ moved @ back
        trial.gains[now] += steps[:, count]
        trial.offsets[now] += steps[:, count + 1]
        found = system.normal(trial, now)
        better = (found.cost <= state.cost[now]) & (found.weight > method.min_overlap * valid[now])
        taken = now[better]
        for name in ("matrices", "gains", "offsets"):
            getattr(pairs, name)[taken] = getattr(trial, name)[taken]
        for name in ("hessian", "slope", "cost", "weight"):
            getattr(state, name)[taken] = getattr(found, name)[better]
        small = np.abs(steps[:, :count]).sum(axis=1) < method.tolerance
        damping[now] = np.clip(np.where(better, damping[now] / 5, damping[now] * 8), 1e-9, None)
        pairs.converged[now[small]] = True
        active[now[small | (damping[now] > 1e6)]] = False


def _solve(hessian: np.ndarray, slope: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """Solve damped normal equations; a parameter without effect does not change."""
    diagonal = np.einsum("nkk->nk", hessian)
    floor = 1e-9 * diagonal.max(axis=1, keepdims=True)
    damped = hessian.copy()
    np.einsum("nkk->nk", damped)[...] += damping[:, None] * diagonal + floor
    solved: np.ndarray = np.linalg.solve(damped, slope[..., None])[..., 0]
    return solved


def _spread(residuals: np.ndarray) -> np.ndarray:
    """Return the robust standard deviation of each pair's residuals; infinite for one without."""
    known = np.isfinite(residuals).any(axis=1)
    spread = np.full(len(residuals), np.inf)
    middle = np.nanmedian(np.abs(residuals[known]), axis=1)
    # Noise-free images: residuals below this are no outliers.
    spread[known] = np.maximum(_MAD * middle, 1e-3)
    return spread


class _System:
    """Builds the normal equations of a level."""

    def __init__(self, level: _Level, directions: np.ndarray) -> None:
        self.level, self.directions = level, directions
        self.xp = array_module(level.fixed)
        axes = tuple(range(1, level.fixed.ndim))
        self.voxels = to_host(level.fixed_mask.sum(axis=axes, dtype=np.float64))

    def normal(self, pairs: _Pairs, chosen: np.ndarray) -> _Normal:
        """Compare the images of some pairs: at the transforms, gains, offsets and scales of `pairs`."""
        xp, level, count = self.xp, self.level, len(self.directions)
        maps = level.voxel_maps(pairs.matrices[chosen])
        columns = count + 2
        sums = xp.zeros((len(chosen), columns + 1, columns + 1), np.float64)
        moments = xp.zeros((len(chosen), 3, 3), np.float64)
        costs = xp.zeros((3, len(chosen)), np.float64)
        residuals, picked = [], xp.asarray(chosen)
        of_pair = [
            xp.asarray(values[chosen], np.float32).reshape((-1, *[1] * len(level.shape)))
            for values in (pairs.gains, pairs.offsets, 1 / pairs.scales)
        ]
        every = max(1, int(math.prod(level.shape) // _SAMPLES))
        for rows in self._strips(len(chosen), columns):
            fixed, mask = level.fixed[picked, rows], level.fixed_mask[picked, rows]
            moving = level.moving.sample(maps, chosen, rows)
            mask = mask * (level.moving_mask.sample(maps, chosen, rows) > np.float32(0.99))
            residual = fixed - of_pair[0] * moving - of_pair[1]
            scaled = residual * of_pair[2] / np.float32(_CAUCHY)
            robust = 1 / (1 + scaled * scaled)
            weight = mask * robust
            sums += _products([*self._columns(picked, rows), -moving, -xp.ones_like(fixed), residual], weight)
            moments += _products([fixed, moving, xp.ones_like(fixed)], mask)
            axes = tuple(range(1, mask.ndim))
            # Cauchy's, which is half the square for small residuals; with an infinite scale the square itself.
            infinite = of_pair[2] == 0
            loss = xp.where(infinite, residual * residual, xp.log1p(scaled * scaled))
            costs[0] += (loss * mask).sum(axis=axes, dtype=np.float64)
            costs[1] += mask.sum(axis=axes, dtype=np.float64)
            costs[2] += weight.sum(axis=axes, dtype=np.float64)
            residuals.append(xp.where(mask > 0, residual, np.float32(np.nan)).reshape(len(chosen), -1)[:, ::every])
        sums, (cost, weight, robust) = to_host(sums), to_host(costs)
        return _Normal(
            sums[:, :columns, :columns], -sums[:, :columns, columns], cost / np.maximum(weight, 1), weight,
            sums[:, columns, columns] / np.maximum(robust, 1), to_host(moments),
            to_host(xp.concatenate(residuals, axis=1)),
        )  # fmt: skip

    def _strips(self, pairs: int, columns: int) -> Iterator[slice]:
        """Cut the first axis, so that what is computed of a strip fits its memory."""
        first, *others = self.level.shape
        nbytes = pairs * math.prod(others) * (8 * len(self.level.shape) + 8 * columns + 40)
        limit = HOST_SCRATCH_BYTES if self.xp is np else SCRATCH_BYTES
        step = max(1, limit // nbytes)
        return (slice(begin, min(begin + step, first)) for begin in range(0, first, step))

    def _columns(self, picked: Any, rows: slice) -> Iterator[Any]:
        """Yield the change of the fixed images by each direction: their gradients times how far it moves."""
        xp, level = self.xp, self.level
        gradients = [gradient[picked, rows] for gradient in level.gradients]
        lines = []
        for axis, (n, step) in enumerate(zip(level.shape, level.spacing, strict=True)):
            line = np.arange(n)[rows] if axis == 0 else np.arange(n)
            along = [-1 if k == axis else 1 for k in range(len(level.shape))]
            lines.append(xp.asarray((line * step).astype(np.float32).reshape(along)))
        for matrix in self.directions:
            total: Any = 0
            for axis, gradient in enumerate(gradients):
                row = matrix[axis]
                if not row.any():
                    continue
                moved: Any = np.float32(row[-1])
                for weight, line in zip(row[:-1], lines, strict=True):
                    if weight:
                        moved = moved + np.float32(weight) * line
                total = total + gradient * moved
            yield total


def _products(columns: Sequence[Any], weight: Any) -> Any:
    """Sum the weighted products of each two columns, (N, rows, ...): (N, columns, columns).

    Sums of one row are float32, so that rounding errors do not grow with the image, and rows are a batch.
    """
    xp = array_module(weight)
    flat = xp.stack([column.reshape(*column.shape[:2], -1) for column in columns], axis=2)
    weighted = flat * weight.reshape(*weight.shape[:2], 1, -1)
    return xp.matmul(weighted, flat.transpose(0, 1, 3, 2)).sum(axis=1, dtype=np.float64)


def _result(level: _Level, pairs: _Pairs, method: Refinement) -> PairTransforms:
    """Summarize pairs, by a last look at the finest level."""
    rank = len(level.shape)
    corners = np.array(
        list(itertools.product(*((0.0, (n - 1) * s) for n, s in zip(level.shape, level.spacing, strict=True))))
    )
    centre = np.eye(rank + 1)
    centre[:-1, -1] = level.centre
    unit = float(level.spacing.min())
    basis = centre @ (generators(method.model, rank, np.maximum(level.centre, level.spacing)) * unit)
    basis = basis @ np.linalg.inv(centre)
    system = _System(level, basis)
    normal = system.normal(pairs, np.arange(len(pairs.matrices)))
    moved = np.einsum("pij,cj->pci", basis[:, :-1], np.c_[corners, np.ones(len(corners))])
    form = np.einsum("pci,qci->pq", moved, moved) / len(corners)
    # Smoothing correlates the noise of neighbours: so many voxels are one sample.
    per_sample = max(1.0, (4 * math.pi * level.smoothing**2) ** (rank / 2))
    errors, correlations = np.full(len(pairs.matrices), np.inf), np.zeros(len(pairs.matrices))
    overlaps = normal.weight / np.maximum(system.voxels, 1)
    for n, (hessian, variance, moments) in enumerate(zip(normal.hessian, normal.variance, normal.moments, strict=True)):
        count = max(moments[2, 2], 1.0)
        spreads = [moments[k, k] - moments[k, 2] ** 2 / count for k in range(2)]
        if min(spreads) <= 0 or overlaps[n] <= method.min_overlap:
            continue
        shared = moments[0, 1] - moments[0, 2] * moments[1, 2] / count
        correlations[n] = np.clip(shared / math.sqrt(spreads[0] * spreads[1]), -1, 1)
        covariance = np.linalg.pinv(hessian)[: len(basis), : len(basis)] * variance * per_sample
        errors[n] = math.sqrt(max(0.0, float((covariance * form).sum())))
    return PairTransforms(pairs.matrices, errors, correlations, overlaps, pairs.converged.copy())
