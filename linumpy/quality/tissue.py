"""Masks of tissue, by a threshold and the morphology of :mod:`linumpy.voxel`.

In: a volume (Z, Y, X), on the host or the device. Out: a mask, in the memory of the volume.
"""

from __future__ import annotations

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.oct.surface_filters import ndimage_module
from linumpy.quality.thresholds import METHODS
from linumpy.voxel import backend_of


def tissue_mask(
    volume: Array,
    *,
    method: str = "otsu",
    sigma: float = 1.0,
    radius: float = 2.0,
    use_log: bool = True,
) -> Array:
    """Find tissue: smooth, threshold, remove thin parts, fill enclosed holes.

    - `volume` (Z, Y, X): intensity. Voxels that are not finite are not tissue. Pass a projection as a volume of one
      plane.
    - `method` ("otsu", "li"): :func:`~linumpy.quality.thresholds.otsu_threshold` or
      :func:`~linumpy.quality.thresholds.li_threshold`.
    - `sigma`: standard deviation of the Gaussian before the threshold, in voxels.
    - `radius`: radius in voxels of the ball by which the mask is opened; 0 for no opening.
    - `use_log`: whether to smooth and threshold logarithms, because intensities of OCT have a wide range.

    Returns: All False if all smoothed voxels are equal.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: choose one of {', '.join(METHODS)}")
    if volume.ndim != 3:
        raise ValueError(f"a volume of shape {volume.shape}: pass (Z, Y, X)")
    xp = array_module(volume)
    finite = xp.isfinite(volume)
    values = xp.where(finite, volume, 0).astype(np.float32)
    if use_log:
        positive = values > 0
        smallest = xp.where(positive, values, np.inf).min()
        values = xp.log(xp.where(positive, values, xp.where(xp.isfinite(smallest), smallest, 1)))
    values = ndimage_module(volume).gaussian_filter(values, sigma) if sigma else values
    if not values.size or float(values.min()) == float(values.max()):
        nothing: Array = xp.zeros(volume.shape, bool)
        return nothing
    mask = (values > METHODS[method](values)) & finite
    backend = backend_of(mask)
    if radius:
        mask = backend.open(mask, radius=radius)
    return backend.fill_holes(mask)
