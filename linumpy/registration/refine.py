"""Refine rigid or affine transforms between pairs of images, all pairs in one batch.

In: pairs of images (N, [Z,] Y, X) with masks and first transforms. Out: a transform in µm for each pair, with its
standard error. The fixed image is modelled as the transformed moving image times a gain, plus an offset, plus shadows
times a factor. The squared residual is minimised by the inverse compositional Gauss-Newton method (Baker and Matthews,
Lucas-Kanade 20 years on, International Journal of Computer Vision 56, 2004) with Levenberg-Marquardt damping, from
coarse to fine (:mod:`linumpy.registration.pyramid`). Voxels with large residuals get small weights (Cauchy). Each
iteration samples all pairs in the same launches; only the normal equations, about 10 × 10 numbers for each pair, are
solved on the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.registration.masked_correlation import standardized
from linumpy.registration.normal_equations import PairState, System
from linumpy.registration.pyramid import SMOOTHING, Level, pyramid
from linumpy.registration.robust import SIGMA_PER_MAD

#: Maximum number of steps on a level; a pair is finished there when a step moves no corner by more than about so many
#: voxels.
_ITERATIONS, _TOLERANCE = 30, 2e-3
#: Share of the fixed mask that must stay inside the moving mask.
_MIN_OVERLAP = 0.2


@dataclass(frozen=True)
class PairTransforms:
    """Transforms of pairs: a point p of the fixed image is at ``matrix @ (p, 1)`` in the moving image.

    - `matrices` (N, rank + 1, rank + 1): homogeneous, in µm, axes in the order of the images; the centre of the first
      voxel is at 0. The first transform of a pair that could not be compared.
    - `errors_um` (N,): standard error of the position of a corner, from the residuals; infinite if the images could not
      be compared: too little overlap, or no contrast.
    - `correlations` (N,): Pearson's correlation of the voxels that both images share, smoothed and without shadows as
      on the finest level; 0 if the images could not be compared.
    - `overlaps` (N,): fraction of the fixed mask inside the moving mask.
    - `converged` (N,): whether the last step on the finest level was below the tolerance.
    - `evidence` (N,): probability that the first transform is right, from 0 to 1; 1 if it was given.
    - `is_at_edge` (N,): whether the first transform is at the end of the range that was searched; False if it was
      given.
    """

    matrices: np.ndarray
    errors_um: np.ndarray
    correlations: np.ndarray
    overlaps: np.ndarray
    converged: np.ndarray
    evidence: np.ndarray
    is_at_edge: np.ndarray

    def __len__(self) -> int:
        return len(self.matrices)


def refine_pairs(
    fixed: Array,
    moving: Array,
    initial: np.ndarray,
    *,
    shadows: Array | None,
    spacing: np.ndarray,
    model: str,
    levels: int | None,
    progress: Callable[[int], object] | None,
) -> PairTransforms:
    """Refine the transforms of pairs of images; parameters as for :func:`linumpy.registration.pairs.register_pairs`.

    - `initial` (N, rank + 1, rank + 1): first transforms of any kind, in µm, as in :class:`PairTransforms`, which are
      updated by transforms of the model. Their error should be at most about a voxel of the coarsest level.
    - `shadows`: voxels of the fixed images are valid only where they are finite. Their factor is fitted with the
      transform.
    """
    mask, standard_shadows = None, None
    if shadows is not None:
        mask = array_module(shadows).isfinite(shadows)
        standard_shadows = standardized(shadows, mask)[0]
    sides = standardized(fixed, mask), standardized(moving, None)
    resolutions = list(pyramid(*sides, standard_shadows, spacing, levels))
    pairs = PairState(initial.copy(), shadows=shadows is not None)
    for level in reversed(resolutions):
        _refine_on(level, pairs, model, progress if level is resolutions[0] else None)
    result = _result(resolutions[0], pairs, model)
    # Pairs that could not be compared keep their first transform, because their steps followed rounding errors.
    result.matrices[np.isinf(result.errors_um)] = initial[np.isinf(result.errors_um)]
    return result


def _refine_on(level: Level, pairs: PairState, model: str, progress: Callable[[int], object] | None) -> None:
    """Refine the transforms of all pairs on one level; `pairs` is changed in place."""
    system = System(level, model)
    basis, identity = system.basis, np.eye(len(level.shape) + 1)
    all_pairs = np.arange(len(pairs.matrices))
    valid = np.maximum(system.voxels, 1)
    pairs.scales[:] = np.inf
    pairs.scales[:] = _spread(system.normal(pairs, all_pairs).residuals)
    equations = system.normal(pairs, all_pairs)
    damping = np.full(len(all_pairs), 1e-3)
    # Pairs with too little overlap or without contrast keep their transform.
    active = (equations.shared_voxels > _MIN_OVERLAP * valid) & (np.abs(equations.hessian).max(axis=(1, 2)) > 0)
    pairs.converged[:] = False
    report, unfinished = progress or (lambda count: None), len(all_pairs)
    for _ in range(_ITERATIONS):
        active_pairs = all_pairs[active]
        report(unfinished - active_pairs.size)
        unfinished = active_pairs.size
        if not active_pairs.size:
            break
        steps = _solve(equations.hessian[active_pairs], equations.slope[active_pairs], damping[active_pairs])
        trial = pairs.stepped()
        count = len(basis)
        # The inverse of the step, by Cayley's transform: a rotation matrix stays one.
        half = np.einsum("np,pij->nij", steps[:, :count], basis) / 2
        moved = np.linalg.solve(identity + half, identity - half)
        trial.matrices[active_pairs] = pairs.matrices[active_pairs] @ system.centre @ moved @ system.to_centre
        trial.weights[active_pairs, : steps.shape[1] - count] += steps[:, count:]
        trial_equations = system.normal(trial, active_pairs)
        better = (trial_equations.cost <= equations.cost[active_pairs]) & (
            trial_equations.shared_voxels > _MIN_OVERLAP * valid[active_pairs]
        )
        accepted = active_pairs[better]
        for name in ("matrices", "weights"):
            getattr(pairs, name)[accepted] = getattr(trial, name)[accepted]
        for name in ("hessian", "slope", "cost", "shared_voxels"):
            getattr(equations, name)[accepted] = getattr(trial_equations, name)[better]
        small = np.abs(steps[:, :count]).sum(axis=1) < _TOLERANCE
        damping[active_pairs] = np.clip(
            np.where(better, damping[active_pairs] / 5, damping[active_pairs] * 8), 1e-9, None
        )
        pairs.converged[active_pairs[small]] = True
        active[active_pairs[small | (damping[active_pairs] > 1e6)]] = False
    report(unfinished)


def _solve(hessian: np.ndarray, slope: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """Solve damped normal equations; the step of a parameter without effect is 0."""
    diagonal = np.einsum("nkk->nk", hessian)
    floor = 1e-9 * diagonal.max(axis=1, keepdims=True)
    damped = hessian.copy()
    np.einsum("nkk->nk", damped)[...] += damping[:, None] * diagonal + floor
    return np.linalg.solve(damped, slope[..., None])[..., 0]


def _spread(residuals: np.ndarray) -> np.ndarray:
    """Return the robust standard deviation of each pair's residuals; infinite for a pair without residuals."""
    has_residuals = np.isfinite(residuals).any(axis=1)
    spread = np.full(len(residuals), np.inf)
    medians = np.nanmedian(np.abs(residuals[has_residuals]), axis=1)
    # With a lower limit small residuals of noise-free images are no outliers.
    spread[has_residuals] = np.maximum(SIGMA_PER_MAD * medians, 1e-3)
    return spread


def _result(level: Level, pairs: PairState, model: str) -> PairTransforms:
    """Compute errors, correlations and overlaps of pairs on the finest level."""
    rank = len(level.shape)
    corners = np.array(
        list(itertools.product(*((0.0, (n - 1) * s) for n, s in zip(level.shape, level.spacing, strict=True))))
    )
    system = System(level, model)
    basis = system.directions
    normal = system.normal(pairs, np.arange(len(pairs.matrices)))
    moved = np.einsum("pij,cj->pci", basis[:, :-1], np.c_[corners, np.ones(len(corners))])
    form = np.einsum("pci,qci->pq", moved, moved) / len(corners)
    # Smoothing correlates the noise of neighbouring voxels: this number of voxels is one independent sample.
    per_sample = max(1.0, (4 * math.pi * SMOOTHING**2) ** (rank / 2))
    errors, correlations = np.full(len(pairs.matrices), np.inf), np.zeros(len(pairs.matrices))
    overlaps = normal.shared_voxels / np.maximum(system.voxels, 1)
    for n, (hessian, variance, moments) in enumerate(zip(normal.hessian, normal.variance, normal.moments, strict=True)):
        count = max(moments[2, 2], 1.0)
        spreads = [moments[k, k] - moments[k, 2] ** 2 / count for k in range(2)]
        if min(spreads) <= 0 or overlaps[n] <= _MIN_OVERLAP:
            continue
        shared = moments[0, 1] - moments[0, 2] * moments[1, 2] / count
        correlations[n] = np.clip(shared / math.sqrt(spreads[0] * spreads[1]), -1, 1)
        covariance = np.linalg.pinv(hessian)[: len(basis), : len(basis)] * variance * per_sample
        errors[n] = math.sqrt(max(0.0, float((covariance * form).sum())))
    return PairTransforms(
        matrices=pairs.matrices, errors_um=errors, correlations=correlations, overlaps=overlaps,
        converged=pairs.converged.copy(), evidence=np.ones(len(errors)), is_at_edge=np.zeros(len(errors), bool),
    )  # fmt: skip
