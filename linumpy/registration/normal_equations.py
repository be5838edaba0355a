"""Normal equations of pairs of images, for :mod:`linumpy.registration.refine`.

In: a level of the pyramid, and the state of each pair. Out: the equations and further sums, on the host. All pairs are
sampled in the same launches, in strips that fit the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.registration.pyramid import Level

#: Maximum bytes of coordinates, samples and columns in memory, on a device and on the host.
SCRATCH_BYTES, HOST_SCRATCH_BYTES = 2**30, 2**25
#: Cauchy's constant for 95 % efficiency.
_CAUCHY = 2.385
#: Approximate number of residuals of a pair from which their spread is estimated.
_SAMPLES = 4096


class PairState:
    """The transform and the model of each pair, on the host.

    Attributes
    ----------
    matrices : numpy.ndarray, (N, rank + 1, rank + 1)
        Transforms in µm.
    weights : numpy.ndarray, (N, 2 or 3)
        Weights of the moving image, of 1 and of the shadows, if any, whose sum is the fixed image.
    scales : numpy.ndarray, (N,)
        Robust standard deviation of the residuals; infinite if unknown.
    converged : numpy.ndarray of bool, (N,)
        Whether the last step was below the tolerance.
    """

    def __init__(self, matrices: np.ndarray, *, shadows: bool) -> None:
        self.matrices = matrices
        self.weights = np.tile([1.0, 0.0, 0.0][: 3 if shadows else 2], (len(matrices), 1))
        self.scales = np.full(len(matrices), np.inf)
        self.converged = np.zeros(len(matrices), bool)

    def stepped(self) -> PairState:
        """Return a copy whose transforms and weights may be changed."""
        other = copy(self)
        other.matrices, other.weights = self.matrices.copy(), self.weights.copy()
        return other


@dataclass
class NormalEquations:
    """The normal equations of pairs at their transforms, and further sums; on the host.

    Attributes
    ----------
    hessian, slope : numpy.ndarray, (N, P, P) and (N, P)
        Of the P directions of an update and the weights.
    cost, weight, variance : numpy.ndarray, (N,)
        Mean loss, voxels that both images share, and weighted mean square of the residuals.
    moments : numpy.ndarray, (N, 3, 3)
        Products of the fixed image, the moving image and 1.
    residuals : numpy.ndarray, (N, samples)
        Every n-th residual; NaN outside of the masks.
    """

    hessian: np.ndarray
    slope: np.ndarray
    cost: np.ndarray
    weight: np.ndarray
    variance: np.ndarray
    moments: np.ndarray
    residuals: np.ndarray


def generators(model: str, rank: int, radius: np.ndarray) -> np.ndarray:
    """Return the directions of an update, (P, rank + 1, rank + 1).

    Each direction moves the points of a box of half-lengths `radius`, in µm, by about 1 µm.
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


class System:
    """Builds the normal equations of a level."""

    def __init__(self, level: Level, directions: np.ndarray) -> None:
        self.level, self.directions = level, directions
        self.xp = array_module(level.fixed)
        axes = tuple(range(1, level.fixed.ndim))
        self.voxels = to_host(level.fixed_mask.sum(axis=axes, dtype=np.float64))

    def normal(self, pairs: PairState, chosen: np.ndarray) -> NormalEquations:
        """Compare the images of the chosen pairs at the transforms, weights and scales of `pairs`."""
        xp, level, count = self.xp, self.level, len(self.directions)
        maps = level.voxel_maps(pairs.matrices[chosen])
        columns = count + (2 if level.shadows is None else 3)
        sums = xp.zeros((len(chosen), columns + 1, columns + 1), np.float64)
        moments = xp.zeros((len(chosen), 3, 3), np.float64)
        costs = xp.zeros((3, len(chosen)), np.float64)
        residuals, picked = [], xp.asarray(chosen)
        *weights, sharpness = (
            xp.asarray(values[chosen], np.float32).reshape((-1, *[1] * len(level.shape)))
            for values in (*pairs.weights.T, 1 / pairs.scales)
        )
        every = max(1, int(math.prod(level.shape) // _SAMPLES))
        for rows in self._strips(len(chosen), columns):
            fixed, mask = level.fixed[picked, rows], level.fixed_mask[picked, rows]
            moving = level.moving.sample(maps, chosen, rows)
            mask = mask * (level.moving_mask.sample(maps, chosen, rows) > np.float32(0.99))
            parts = [moving, xp.ones_like(fixed), *([] if level.shadows is None else [level.shadows[picked, rows]])]
            residual = fixed - sum(weight * part for weight, part in zip(weights, parts, strict=False))
            scaled = residual * sharpness / np.float32(_CAUCHY)
            robust = 1 / (1 + scaled * scaled)
            weight = mask * robust
            sums += _products([*self._columns(picked, rows), *(-part for part in parts), residual], weight)
            shown = fixed - weights[2] * parts[2] if len(parts) > 2 else fixed
            moments += _products([shown, moving, xp.ones_like(fixed)], mask)
            axes = tuple(range(1, mask.ndim))
            # Cauchy's loss, which is half the square for small residuals; the square itself for an infinite scale.
            infinite = sharpness == 0
            loss = xp.where(infinite, residual * residual, xp.log1p(scaled * scaled))
            costs[0] += (loss * mask).sum(axis=axes, dtype=np.float64)
            costs[1] += mask.sum(axis=axes, dtype=np.float64)
            costs[2] += weight.sum(axis=axes, dtype=np.float64)
            residuals.append(xp.where(mask > 0, residual, np.float32(np.nan)).reshape(len(chosen), -1)[:, ::every])
        sums, (cost, weight, robust) = to_host(sums), to_host(costs)
        return NormalEquations(
            sums[:, :columns, :columns], -sums[:, :columns, columns], cost / np.maximum(weight, 1), weight,
            sums[:, columns, columns] / np.maximum(robust, 1), to_host(moments),
            to_host(xp.concatenate(residuals, axis=1)),
        )  # fmt: skip

    def _strips(self, pairs: int, columns: int) -> Iterator[slice]:
        """Cut the first axis into strips that fit the memory."""
        first, *others = self.level.shape
        nbytes = pairs * math.prod(others) * (8 * len(self.level.shape) + 8 * columns + 40)
        limit = HOST_SCRATCH_BYTES if self.xp is np else SCRATCH_BYTES
        step = max(1, limit // nbytes)
        return (slice(begin, min(begin + step, first)) for begin in range(0, first, step))

    def _columns(self, picked: Array, rows: slice) -> Iterator[Any]:
        """Yield the change of the fixed images by each direction: their gradients times the displacement."""
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


def _products(columns: Sequence[Array], weight: Array) -> Array:
    """Sum the weighted products of each two columns, (N, rows, ...): (N, columns, columns).

    Rows are a batch: only sums within a row are float32, so that rounding errors do not grow with the image.
    """
    xp = array_module(weight)
    flat = xp.stack([column.reshape((*column.shape[:2], -1)) for column in columns], axis=2)
    weighted = flat * weight.reshape((*weight.shape[:2], 1, -1))
    return xp.matmul(weighted, flat.transpose(0, 1, 3, 2)).sum(axis=1, dtype=np.float64)
