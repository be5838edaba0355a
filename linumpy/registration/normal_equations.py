"""Normal equations of pairs of images, for :mod:`linumpy.registration.refine`.

In: a level of the pyramid, and the state of each pair. Out: the equations and further sums, on the host. All pairs are
sampled in the same launches, strip by strip. A strip is some rows of all images, along the first axis of space, that
fit into memory.
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
#: Constant of Cauchy's robust norm, in standard deviations, for 95 % efficiency.
_CAUCHY = 2.385
#: Approximate number of residuals of a pair from which the spread of the residuals is estimated.
_SAMPLES = 4096


class PairState:
    """The transform of each pair, and the model of the fixed image, on the host.

    The model of a fixed image is ``weights[0] * moving + weights[1]``, plus ``weights[2] * shadows`` if there are any.

    - `matrices` (N, rank + 1, rank + 1): transforms in µm.
    - `weights` (N, 2 or 3): weights of the model.
    - `scales` (N,): robust standard deviation of the residuals; infinite if unknown.
    - `converged` (N,): whether the last step was below the tolerance.
    """

    def __init__(self, matrices: np.ndarray, *, shadows: bool) -> None:
        self.matrices = matrices
        self.weights = np.tile([1.0, 0.0, 0.0][: 3 if shadows else 2], (len(matrices), 1))
        self.scales = np.full(len(matrices), np.inf)
        self.converged = np.zeros(len(matrices), bool)

    def stepped(self) -> PairState:
        """Return a copy whose transforms and weights may be changed; scales and convergence are shared."""
        other = copy(self)
        other.matrices, other.weights = self.matrices.copy(), self.weights.copy()
        return other


@dataclass
class NormalEquations:
    """The normal equations of pairs at their transforms, and further sums; on the host.

    - `hessian`, `slope` ((N, P, P) and (N, P)): matrix and right side of the equations. The P parameters are the
      directions of an update, then the weights of the model (:class:`PairState`).
    - `cost` (N,): mean loss of the shared voxels.
    - `shared_voxels` (N,): number of voxels that are valid in both images.
    - `variance` (N,): mean square of the residuals, with their robust weights.
    - `moments` (N, 3, 3): sums over the shared voxels of the products of the fixed image without shadows, the moving
      image and 1.
    - `residuals` (N, samples): every n-th residual; NaN outside of the masks.
    """

    hessian: np.ndarray
    slope: np.ndarray
    cost: np.ndarray
    shared_voxels: np.ndarray
    variance: np.ndarray
    moments: np.ndarray
    residuals: np.ndarray


def generators(model: str, rank: int, radius: np.ndarray) -> np.ndarray:
    """Return the directions of an update of a model: (directions, rank + 1, rank + 1).

    Each direction moves the points of a box, whose half-lengths are `radius` in µm, by about 1 µm.
    """
    directions = [{(axis, rank): 1.0} for axis in range(rank)]
    if model == "rigid":
        for first, second in itertools.combinations(range(rank), 2):
            turn = 1 / math.hypot(radius[first], radius[second])
            directions.append({(second, first): turn, (first, second): -turn})
    if model == "affine":
        directions += [{(row, k): 1 / radius[k]} for row, k in itertools.product(range(rank), repeat=2)]
    out = np.zeros((len(directions), rank + 1, rank + 1))
    for matrix, entries in zip(out, directions, strict=True):
        matrix[tuple(zip(*entries, strict=True))] = list(entries.values())
    return out


class System:
    """Computes the normal equations of a level, for updates of a model.

    - `basis`, `directions`: directions of an update, about the centre of the images and about their first voxel. Each
      moves the corners by about a voxel.
    """

    def __init__(self, level: Level, model: str) -> None:
        self.level, rank = level, len(level.shape)
        self.centre = np.eye(rank + 1)
        self.centre[:-1, -1] = level.centre
        self.to_centre = np.linalg.inv(self.centre)
        self.basis = generators(model, rank, np.maximum(level.centre, level.spacing)) * float(level.spacing.min())
        self.directions = self.centre @ self.basis @ self.to_centre
        self.xp = array_module(level.fixed)
        axes = tuple(range(1, level.fixed.ndim))
        self.voxels = to_host(level.fixed_mask.sum(axis=axes, dtype=np.float64))

    def normal(self, pairs: PairState, chosen: np.ndarray) -> NormalEquations:
        """Compute the normal equations of the chosen pairs, at their transforms, weights and scales."""
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
            without_shadows = fixed - weights[2] * parts[2] if len(parts) > 2 else fixed
            moments += _products([without_shadows, moving, xp.ones_like(fixed)], mask)
            axes = tuple(range(1, mask.ndim))
            # Cauchy's loss, which is about the square of a small scaled residual; with an infinite scale the square.
            infinite = sharpness == 0
            loss = xp.where(infinite, residual * residual, xp.log1p(scaled * scaled))
            costs[0] += (loss * mask).sum(axis=axes, dtype=np.float64)
            costs[1] += mask.sum(axis=axes, dtype=np.float64)
            costs[2] += weight.sum(axis=axes, dtype=np.float64)
            residuals.append(xp.where(mask > 0, residual, np.float32(np.nan)).reshape(len(chosen), -1)[:, ::every])
        sums, (cost, shared_voxels, weight_sum) = to_host(sums), to_host(costs)
        return NormalEquations(
            sums[:, :columns, :columns], -sums[:, :columns, columns], cost / np.maximum(shared_voxels, 1),
            shared_voxels, sums[:, columns, columns] / np.maximum(weight_sum, 1), to_host(moments),
            to_host(xp.concatenate(residuals, axis=1)),
        )  # fmt: skip

    def _strips(self, pairs: int, columns: int) -> Iterator[slice]:
        """Cut the first axis of space into strips that fit into memory."""
        first, *others = self.level.shape
        nbytes = pairs * math.prod(others) * (8 * len(self.level.shape) + 8 * columns + 40)
        limit = HOST_SCRATCH_BYTES if self.xp is np else SCRATCH_BYTES
        step = max(1, limit // nbytes)
        return (slice(begin, min(begin + step, first)) for begin in range(0, first, step))

    def _columns(self, picked: Array, rows: slice) -> Iterator[Any]:
        """Yield how each direction changes the fixed images: the gradients times the displacement."""
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
    """Sum the weighted products of each two of the columns, which are (N, rows, ...): (N, columns, columns).

    Only sums within a row are float32, so that rounding errors do not grow with the image.
    """
    xp = array_module(weight)
    flat = xp.stack([column.reshape((*column.shape[:2], -1)) for column in columns], axis=2)
    weighted = flat * weight.reshape((*weight.shape[:2], 1, -1))
    return xp.matmul(weighted, flat.transpose(0, 1, 3, 2)).sum(axis=1, dtype=np.float64)
