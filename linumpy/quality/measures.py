"""Figures of merit of images: sharpness, and outliers among such numbers.

In: batches of images (n, Y, X), on the host or the device. Out: a number for each image, in the memory of the images.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.ndimage.correlate import correlate
from linumpy.registration.robust import robust_deviation


def sharpness(images: Array, mask: Array | None = None) -> Array:
    """Return the normalised gradient energy of each image: energy of Sobel's filter over the squared mean (Tenengrad).

    - `images` (n, Y, X): real numbers.
    - `mask` (n, Y, X): pixels that count.

    Returns: The energy does not change with gain, and decreases with blur; NaN where the mean is 0 or no pixel counts.
    """
    xp = array_module(images)
    pixels = images.astype(np.float64)
    # Sobel's filter along the two axes of an image: along all three axes it would smooth from image to image.
    slope, smooth = np.array([-0.5, 0.0, 0.5]), np.array([0.25, 0.5, 0.25])
    slopes = [correlate(correlate(pixels, slope, axis), smooth, other) for axis, other in ((1, 2), (2, 1))]
    energy = _mean(xp, slopes[0] ** 2 + slopes[1] ** 2, mask)
    mean = _mean(xp, pixels, mask)
    result: Array = xp.where(mean != 0, energy / xp.where(mean != 0, mean, 1) ** 2, np.nan)
    return result


def _mean(xp: ModuleType, values: Array, mask: Array | None) -> Array:
    """Return the mean of each image over the pixels that count; NaN where none counts."""
    if mask is None:
        return xp.mean(values, axis=(1, 2))
    count = mask.sum(axis=(1, 2))
    return xp.where(count > 0, xp.where(mask, values, 0).sum(axis=(1, 2)) / xp.maximum(count, 1), np.nan)


def robust_outliers(values: np.ndarray, deviations: float = 4.0) -> np.ndarray:
    """Return which values are further from the median than `deviations` robust standard deviations.

    Values that are not finite are no outliers; of fewer than five finite values none is an outlier.
    """
    finite = np.isfinite(values)
    if finite.sum() < 5:
        return np.zeros(values.shape, bool)
    median = float(np.median(values[finite]))
    spread = robust_deviation(values[finite] - median)
    with np.errstate(invalid="ignore"):
        return finite & (np.abs(values - median) > deviations * max(spread, 1e-3 * abs(median)))


def step_outliers(values: np.ndarray, deviations: float = 4.0, least: float = 0.3) -> np.ndarray:
    """Return which values are far from both of their neighbours, or at the ends from the only one.

    Steps are relative to the greater magnitude of both values. Far is a step of more than `deviations` robust standard
    deviations of all steps, and of more than `least`, so that neither a trend nor noise makes outliers. Values that are
    not finite are left out; of fewer than five finite values none is an outlier.
    """
    result, finite = np.zeros(values.shape, bool), np.isfinite(values)
    if finite.sum() < 5:
        return result
    kept = values[finite]
    greater = np.maximum(np.abs(kept[1:]), np.abs(kept[:-1]))
    steps = np.diff(kept) / np.where(greater > 0, greater, 1)
    spread = deviations * robust_deviation(steps - np.median(steps))
    far = np.concatenate([[np.inf], np.abs(steps), [np.inf]])
    result[finite] = np.minimum(far[:-1], far[1:]) > max(spread, least)
    return result
