"""Pairs of images at several resolutions, for :mod:`linumpy.registration.refine`.

In: images (N, [Z,] Y, X) with masks. Out: levels, the finest first. A level has smoothed images, gradients of the cubic
spline through the fixed images, and moving images to sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.ndimage.correlate import gaussian
from linumpy.gpu.ndimage.transform import spline_filter1d
from linumpy.registration.stacked import StackedImages

#: Minimum voxels of the coarsest level along an axis that was halved.
_COARSEST = 24
#: Standard deviation of the Gaussian that smooths the images, in voxels of each level.
SMOOTHING = 1.0


@dataclass(frozen=True)
class Level:
    """Both images at one resolution: smoothed, with masks and gradients.

    - `fixed`, `fixed_mask` (float32, (N, [Z,] Y, X)): the fixed images, and 1 where they are valid.
    - `shadows` (float32): images that the fixed images also contain, in the shape of the fixed images. Only the finest
      level has them: far from the match they would compensate a wrong shift.
    - `gradients`: gradients of the fixed images along each axis, per µm.
    - `moving`, `moving_mask`: the moving images, and 1 where they are valid.
    - `spacing`: voxel spacing along each axis of space, in µm.
    """

    fixed: Array
    fixed_mask: Any
    shadows: Array | None
    gradients: tuple[Array, ...]
    moving: StackedImages
    moving_mask: StackedImages
    spacing: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels of an image along its axes of space."""
        return tuple(self.fixed.shape[1:])

    @property
    def centre(self) -> np.ndarray:
        """Centre of the images in µm; rotations about it are independent of translations."""
        return (np.array(self.shape) - 1) / 2 * self.spacing

    def voxel_maps(self, matrices: np.ndarray) -> np.ndarray:
        """Return transforms in µm as maps of voxels, (N, rank, rank + 1)."""
        maps = matrices[:, :-1] / self.spacing[:, None]
        maps[:, :, :-1] *= self.spacing
        return maps


def pyramid(
    fixed: tuple[Array, Array],
    moving: tuple[Array, Array],
    shadows: Array | None,
    spacing: np.ndarray,
    levels: int | None,
) -> Iterator[Level]:
    """Yield the levels, the finest first.

    - `fixed`, `moving` (array, array): images and their masks, as float32.
    - `shadows`: images that the fixed images also contain, valid where the fixed images are.
    - `spacing`: voxel spacing of the images along each axis of space, in µm.
    - `levels`: maximum number of levels; None for as many as the size of the images allows.
    """
    sides = [
        (image * mask, mask) for image, mask in (fixed, moving, *([] if shadows is None else [(shadows, fixed[1])]))
    ]
    steps = np.ones(len(spacing), int)
    for number in itertools.count():
        smoothed = [_normalized(*side, SMOOTHING) for side in sides]
        gradients = tuple(
            _derivative(smoothed[0][0], axis) / np.float32(step) for axis, step in enumerate(spacing * steps)
        )
        yield Level(
            *smoothed[0], smoothed[2][0] if shadows is not None and number == 0 else None, gradients,
            StackedImages(smoothed[1][0], 3 if number == 0 else 1), StackedImages(smoothed[1][1], 1, "zero"),
            spacing * steps,
        )  # fmt: skip
        size = sides[0][0].shape[1:]
        smallest_spacing = (spacing * steps).min()
        # Axes with coarser voxels are not halved before the other axes are as coarse.
        halved = [n >= 2 * _COARSEST and s < 1.5 * smallest_spacing for n, s in zip(size, spacing * steps, strict=True)]
        if not any(halved) or number + 1 == levels:
            return
        cut = (slice(None), *(slice(None, None, 2 if half else 1) for half in halved))
        sigmas = [1.0 if half else 0.0 for half in halved]
        sides = [tuple(gaussian(part, (0, *sigmas))[cut] for part in side) for side in sides]  # type: ignore[misc]
        steps = steps * np.where(halved, 2, 1)


def _normalized(weighted: Array, mask: Array, sigma: float) -> tuple[Array, Array]:
    """Smooth images that are 0 outside of their masks, by valid voxels only; the new masks leave out the border."""
    xp = array_module(weighted)
    sigmas = [0.0] + [sigma] * (weighted.ndim - 1)
    image, weight = gaussian(weighted, sigmas), gaussian(mask, sigmas)
    return image / xp.maximum(weight, np.float32(1e-3)), (weight > 0.7 * mask.max()).astype(np.float32)


def _derivative(images: Array, axis: int) -> Array:
    """Return the derivative, per voxel along an axis, of the cubic spline through images, at the voxels of the images.

    The derivative is half the difference of the neighbouring coefficients along the axis.
    """
    xp = array_module(images)
    coefficients = spline_filter1d(images, 3, axis + 1, images.dtype, "mirror")
    widths = [(1, 1) if k == axis + 1 else (0, 0) for k in range(images.ndim)]
    padded = xp.pad(coefficients, widths, mode="reflect")
    ends = [[slice(None)] * images.ndim for _ in range(2)]
    ends[0][axis + 1], ends[1][axis + 1] = slice(2, None), slice(None, -2)
    return (padded[tuple(ends[0])] - padded[tuple(ends[1])]) * np.float32(0.5)
