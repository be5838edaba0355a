"""Register pairs of images: search translation and rotation on a coarse grid, then refine.

In: pairs of images (N, [Z,] Y, X), NaN where they are not valid. Out: on the host,
:class:`~linumpy.registration.refine.PairTransforms`. All pairs are registered in one batch. Slow changes over an image
are removed first, because they differ between slices and outweigh the tissue's structure; an example is the attenuation
that remains where a cut is tilted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.registration.masked_correlation import match_pairs, standardized
from linumpy.registration.refine import PairTransforms, refine_pairs

#: Slow changes are found by a Gaussian over the means of blocks. Its standard deviation as a fraction of the image's
#: length (about two voxels of the coarse grid), the minimum of the standard deviation in voxels, and the maximum number
#: of blocks along an axis. With a wider Gaussian, remaining attenuation would outweigh the structure, and matches would
#: follow the outline of the tissue.
_SLOW, _SLOW_VOXELS, _BLOCKS = 1 / 48, 8, 96
#: Step between the angles of the search in degrees, and approximate maximum of voxels along an axis of its coarse grid.
_ANGLE_STEP, _COARSE = 2.0, 96


def register_pairs(
    fixed: Array,
    moving: Array,
    *,
    shadows: Array | None = None,
    spacing: Sequence[float] | None = None,
    model: str = "rigid",
    max_angle: float = 10.0,
    max_shift: float = 0.25,
    levels: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> PairTransforms:
    """Find the transforms between pairs of images.

    - `fixed`, `moving` (N, [Z,] Y, X): the images, all of one shape; smaller images are padded by NaN. The images of a
      pair may differ by a gain and an offset that change slowly along Y and X, by noise, and in parts of their
      contents.
    - `shadows`: images that the fixed images contain by an unknown factor, such as shadows of the tissue above; in the
      shape of the fixed images, 0 for no shadow. The fixed images are valid only where their shadows are finite.
    - `spacing` ([Z,] Y, X): voxel spacing in µm; by default 1 along each axis.
    - `model` ("rigid", "affine", "translation"): kind of the transforms.
    - `max_angle`: of the search, maximum angle to each side in degrees, in the plane of the last two axes.
    - `max_shift`: of the search, maximum shift along each axis as a fraction of the image.
    - `levels`: maximum number of resolutions of the refinement; by default down to the coarse grid.
    - `progress`: called with the number of pairs that are finished since the last call.

    Returns: the transforms from fixed to moving images, on the host.

    The device memory needed is about 14 copies of the images as float32, and up to 1 GiB each for the search and the
    refinement.
    """
    if model not in ("rigid", "affine", "translation"):
        raise ValueError(f"model={model!r}: pass 'rigid', 'affine' or 'translation'")
    if not (0 <= max_angle <= 180 and 0 <= max_shift <= 1):
        raise ValueError(f"max_angle={max_angle}, max_shift={max_shift}: pass degrees to 180, a fraction to 1")
    if fixed.shape != moving.shape or fixed.ndim not in (3, 4) or min(fixed.shape) < 1 or min(fixed.shape[1:]) < 4:
        raise ValueError(
            f"images of {fixed.shape} and {moving.shape} are no pairs: pass (N, Y, X) or (N, Z, Y, X) of one shape, "
            "with four voxels or more along each axis"
        )
    steps = np.ones(fixed.ndim - 1) if spacing is None else np.array(spacing, np.float64)
    if steps.shape != (fixed.ndim - 1,) or not (steps > 0).all() or not np.isfinite(steps).all():
        raise ValueError(f"spacing={spacing}: pass a positive number for each of {fixed.ndim - 1} axes")
    # The coarse grid has voxels that are about cubes, and at least four along each axis.
    pitch = max(n * s for n, s in zip(fixed.shape[1:], steps, strict=True)) / _COARSE
    factors = [max(1, min(round(pitch / s), n // 4)) for n, s in zip(fixed.shape[1:], steps, strict=True)]
    fixed, moving = flattened(fixed), flattened(moving)
    if shadows is not None:
        if shadows.shape != fixed.shape:
            raise ValueError(f"shadows of shape {shadows.shape}: the images are {fixed.shape}")
        shadows = flattened(shadows)
        fixed = _without_shadows(fixed, shadows)
    coarse = [block_means(images, factors) for images in (fixed, moving)]
    matches = match_pairs(
        coarse[0][0], coarse[1][0], (coarse[0][1], coarse[1][1]), angles=angles_within(max_angle),
        max_shift=max_shift, spacing=(steps * factors).tolist(),
    )  # fmt: skip
    # From voxels of the coarse grid to µm from the first voxel of the images.
    to_um = np.diag([*(steps * factors), 1.0])
    to_um[:-1, -1] = (np.array(factors) - 1) / 2 * steps
    initial = to_um @ matches.matrices @ np.linalg.inv(to_um)
    if levels is None:
        # Down to the coarse grid: images of larger voxels would show only the rest of the slow changes.
        levels = max(2, 1 + math.ceil(math.log2(max(factors))))
    refined = refine_pairs(
        fixed, moving, initial, shadows=shadows, spacing=steps, model=model, levels=levels, progress=progress
    )
    evidence = np.where(np.isfinite(refined.errors_um), matches.evidence, 0.0)
    return replace(refined, evidence=evidence, is_at_edge=matches.is_at_edge)


def angles_within(max_angle: float) -> list[float]:
    """Return the angles to try, in degrees: symmetric about 0, up to `max_angle` to each side."""
    count = math.floor(max_angle / _ANGLE_STEP + 1e-9)
    return [k * _ANGLE_STEP for k in range(-count, count + 1)]


def _without_shadows(images: Array, shadows: Array) -> Any:
    """Subtract shadows from images, so that the search does not match them.

    A regression gives the factor of each image. Shadows darken, so a positive factor comes from structure that both
    have: nothing is subtracted then.
    """
    xp, axes = array_module(images), tuple(range(1, images.ndim))
    known = xp.isfinite(images) & xp.isfinite(shadows)
    count = xp.maximum(known.sum(axis=axes, keepdims=True), 1)
    image, shadow = (xp.where(known, part, 0).astype(np.float32) for part in (images, shadows))
    means = [part.sum(axis=axes, keepdims=True) / count for part in (image, shadow)]
    shared = (image * shadow).sum(axis=axes, keepdims=True) / count - means[0] * means[1]
    spread = (shadow * shadow).sum(axis=axes, keepdims=True) / count - means[1] ** 2
    factor = xp.minimum(shared / xp.maximum(spread, 1e-6), 0).astype(np.float32)
    return images - factor * shadow


def flattened(images: Array) -> Array:
    """Remove slow changes along the last two axes of images: subtract the local mean, and even out local contrast.

    NaN where a voxel is not finite. Where the local contrast is below half of the image's contrast it is mostly noise,
    and is not fully evened out.
    """
    xp = array_module(images)
    image, valid = standardized(images, None)
    (down_y, up_y), (down_x, up_x) = (_slow_along(n) for n in images.shape[-2:])
    down, up = (xp.asarray(down_y), xp.asarray(down_x.T)), (xp.asarray(up_y), xp.asarray(up_x.T))
    bounded = xp.clip(image, -2, 2)  # so that a thin bright object, such as a hair, hardly affects the local mean
    sums = [up[0] @ (down[0] @ part @ down[1]) @ up[1] for part in (valid, bounded, bounded * bounded)]
    count = xp.maximum(sums[0], np.float32(1e-6))
    mean = sums[1] / count
    variance = xp.maximum(sums[2] / count - mean * mean, 0)
    return xp.where(valid > 0, (image - mean) / xp.sqrt(variance + np.float32(0.25)), np.float32(np.nan))


def _slow_along(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two matrices for an axis: sums over blocks of voxels, and the Gaussian weights of blocks at each voxel."""
    voxels, blocks = np.arange(size), min(size, _BLOCKS)
    down = (voxels * blocks // size == np.arange(blocks)[:, None]).astype(np.float32)
    centres = down @ voxels / down.sum(axis=1)
    return down, np.exp(-(((voxels[:, None] - centres) / max(_SLOW * size, _SLOW_VOXELS)) ** 2) / 2).astype(np.float32)


def block_means(images: Array, factors: Sequence[int]) -> tuple[Any, Any]:
    """Average the finite voxels of blocks; return a voxel for each block, and whether half of its voxels are finite.

    Incomplete blocks at the end of an axis are left out.
    """
    xp = array_module(images)
    valid = xp.isfinite(images)
    sums, counts = xp.where(valid, images, 0).astype(np.float32), valid.astype(np.float32)
    for axis, factor in enumerate(factors, 1):
        size = sums.shape[axis] // factor * factor
        cut = (slice(None),) * axis + (slice(0, size),)
        split = (*sums.shape[:axis], size // factor, factor, *sums.shape[axis + 1 :])
        sums, counts = (part[cut].reshape(split).sum(axis=axis + 1) for part in (sums, counts))
    return sums / xp.maximum(counts, 1), counts >= math.prod(factors) / 2
