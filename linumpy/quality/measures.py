"""Figures of merit of images: sharpness, and outliers among such numbers. In and out: numbers and host arrays."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import correlate1d

from linumpy.registration.robust import robust_deviation


def sharpness(image: np.ndarray, mask: np.ndarray) -> float:
    """Return the normalised gradient energy of an image: energy of Sobel's filter over the squared mean (Tenengrad).

    It does not change with gain, and decreases with blur; NaN where the mean is 0. `mask`: pixels that count, all if
    there are none.
    """
    pixels, counted = image.astype(np.float64), mask if mask.any() else np.ones(mask.shape, bool)
    slope, smooth = (-0.5, 0.0, 0.5), (0.25, 0.5, 0.25)
    slopes = [correlate1d(correlate1d(pixels, slope, axis), smooth, 1 - axis) for axis in (0, 1)]
    mean = pixels[counted].mean()
    return float((slopes[0] ** 2 + slopes[1] ** 2)[counted].mean() / mean**2) if mean else float("nan")


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
