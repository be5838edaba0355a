"""Shifts between pairs of images by phase correlation, all pairs in one batch, on the host or the device.

In: two batches of images (n, Y, X). Out: the shift of each pair to fractions of a pixel, and its confidence.

1. Images are band-pass filtered (difference of Gaussians), which removes illumination and some of the noise.
2. The phase correlation of the windowed images (Kuglin and Hines, 1975) has its highest peaks at candidate shifts. A
   discrete Fourier transform is periodic, so each peak has up to four possible shifts. Of all these the whole-pixel
   shift is taken whose overlap has the greatest normalised cross-correlation.
3. Fractions of a pixel are found by Gauss-Newton steps on the weighted squared difference of the two smoothed images
   over their overlap, with the mean of both gradients (Benhimane and Malis, 2004) and cubic convolution (Keys, 1981).
   In strips as narrow as overlaps of tiles, a peak fitted to a windowed correlation would be biased to whole pixels,
   because windows select different tissue in the two images. Here the same tissue has the same weight in both images.
   The weighted correlation of the overlap at the final shift is the confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.gpu.ndimage.correlate import gaussian

#: Standard deviations in pixels of the Gaussians whose difference is correlated.
BAND = (1.0, 8.0)
#: Number of peaks of a phase correlation that are tried, and pixels to each side of a maximum that belong to its peak.
_PEAKS, _RADIUS = 4, 2
#: Share of the window, at each end, over which the window decreases to 0.
_TAPER = 0.25
#: Number of Gauss-Newton steps, and maximum distance in pixels from the whole-pixel shift along each axis.
_STEPS, _REACH = 10, 3.0


@dataclass(frozen=True)
class FoundShifts:
    """Shifts of pairs of images.

    Attributes
    ----------
    shifts : numpy.ndarray or cupy.ndarray of float64, (n, 2)
        Along Y and X, in pixels: pixel p of the moving image is at p + shift in the fixed image. 0 for a confidence of
        0.
    confidence : numpy.ndarray or cupy.ndarray of float64, (n,)
        Normalised cross-correlation of the overlap at the shift, from -1 to 1; 0 without contrast.
    """

    shifts: Array
    confidence: Array


def find_shifts(
    fixed: Array,
    moving: Array,
    *,
    max_shift: Sequence[float] | None = None,
    min_overlap: float = 0.25,
    band: tuple[float, float] = BAND,
) -> FoundShifts:
    """Find the shift of each pair of images.

    Parameters
    ----------
    fixed, moving : numpy.ndarray or cupy.ndarray, (n, Y, X)
        Real numbers, both on the host or both on the device. Pixels that are not finite count as the image's mean.
    max_shift : (float, float), optional
        Maximum whole-pixel shift along Y and X in pixels, to each side; fractions are searched up to 3 pixels further.
        By default, and at most, the shift that `min_overlap` allows.
    min_overlap : float
        Minimum share of the pixels along each axis in which shifted images overlap.
    band : (float, float)
        Standard deviations in pixels of the Gaussians whose difference is correlated. If the first is 0, images are not
        smoothed.

    Returns
    -------
    FoundShifts
        In the memory of the images. On a device the call does not wait for the result.

    Raises
    ------
    ValueError
        Images of different shapes or in different memory, or of fewer than 4 pixels along an axis; limits out of range.
    """
    if fixed.ndim != 3 or fixed.shape != moving.shape or min(fixed.shape[1:]) < 4:
        raise ValueError(f"images of {fixed.shape} and {moving.shape}: pass (n, Y, X) of one shape, 4 pixels at least")
    if array_module(fixed) is not array_module(moving):
        raise ValueError("one batch is on the device and the other on the host: copy one of them to the other side")
    if not 0 < min_overlap <= 1 or not 0 <= band[0] < band[1]:
        raise ValueError(f"min_overlap={min_overlap}, band={band}: pass a share up to 1, and two rising numbers")
    xp, size = array_module(fixed), (fixed.shape[1], fixed.shape[2])
    allowed = [int((1 - min_overlap) * n) for n in size]
    if max_shift is not None:
        allowed = [min(int(np.ceil(shift)), limit) for shift, limit in zip(max_shift, allowed, strict=True)]
    if not fixed.shape[0]:
        return FoundShifts(xp.zeros((0, 2)), xp.zeros(0))
    (smooth_fixed, band_fixed), (smooth_moving, band_moving) = (_filtered(xp, side, band) for side in (fixed, moving))
    candidates = _candidates(xp, band_fixed, band_moving, allowed)
    whole = _best(xp, band_fixed, band_moving, candidates, allowed)
    shifts, confidence = _refined(xp, smooth_fixed, smooth_moving, whole)
    return FoundShifts(xp.where((confidence != 0)[:, None], shifts, 0.0), confidence)


def _filtered(xp: ModuleType, images: Array, band: tuple[float, float]) -> tuple[Array, Array]:
    """Return smoothed images and band-passed images, float32; both are exactly 0 for an image without contrast."""
    pixels = images.astype(np.float32)
    finite = xp.isfinite(pixels)
    pixels = xp.where(finite, pixels, 0)
    mean = pixels.sum(axis=(1, 2), keepdims=True, dtype=np.float64) / xp.maximum(
        finite.sum(axis=(1, 2), keepdims=True), 1
    )
    largest = abs(pixels).max(axis=(1, 2), keepdims=True)
    pixels = xp.where(finite, pixels - mean, 0).astype(np.float32)
    scale = abs(pixels).max(axis=(1, 2), keepdims=True)
    # The mean of equal pixels is rounded, so their difference from it may not be exactly 0.
    pixels = xp.where(scale > 1e-6 * largest, pixels / xp.where(scale > 0, scale, 1), 0)
    fine, coarse = (gaussian(pixels, (0, sigma, sigma), truncate=3.0) for sigma in band)
    return fine, fine - coarse


def _taper(xp: ModuleType, position: Array) -> Array:
    """Return the Tukey window at positions in an interval from 0 to 1; 0 outside of the interval."""
    edge = xp.clip(xp.minimum(position, 1 - position) / _TAPER, 0, 1)
    return xp.where(edge > 0, 0.5 - 0.5 * xp.cos(np.pi * edge), 0)


def _candidates(xp: ModuleType, fixed: Array, moving: Array, allowed: Sequence[int]) -> Array:
    """Return the whole shifts of the highest peaks of the phase correlation, (peaks, n, 2), from 0 to the size - 1."""
    n, height, width = fixed.shape
    window = [_taper(xp, (xp.arange(size) + 0.5) / size).astype(np.float32) for size in (height, width)]
    weight = window[0][:, None] * window[1]
    cross = xp.fft.rfft2(fixed * weight) * xp.conj(xp.fft.rfft2(moving * weight))
    strength = abs(cross)
    # Frequencies that the band-pass filter removed have rounding errors, whose small amplitude must not be normalised.
    floor = 1e-3 * strength.max(axis=(1, 2), keepdims=True)
    surface = xp.fft.irfft2(cross / xp.maximum(strength, xp.where(floor > 0, floor, 1)), s=(height, width))
    for axis, (size, limit) in enumerate(zip((height, width), allowed, strict=True)):
        shift = xp.arange(size)
        unreachable = (shift > limit) & (size - shift > limit)
        surface = xp.where(unreachable[:, None] if axis == 0 else unreachable, -np.inf, surface)
    pairs, around = xp.arange(n)[:, None, None], xp.arange(-_RADIUS, _RADIUS + 1)
    peaks = []
    for _ in range(_PEAKS):
        y, x = xp.divmod(surface.reshape(n, -1).argmax(axis=1), width)
        peaks.append(xp.stack([y, x], axis=1))
        surface[pairs, ((y[:, None] + around) % height)[:, :, None], ((x[:, None] + around) % width)[:, None]] = -np.inf
    return xp.stack(peaks)


def _best(xp: ModuleType, fixed: Array, moving: Array, candidates: Array, allowed: Sequence[int]) -> Array:
    """Return for each pair the whole-pixel shift with the greatest correlation of the overlap, (n, 2)."""
    n, height, width = fixed.shape
    best, shift = xp.full(n, -np.inf), xp.zeros((n, 2), np.int64)
    limit = xp.asarray(np.asarray(allowed))
    for peak in candidates:
        for wrapped in ((0, 0), (0, width), (height, 0), (height, width)):
            tried = peak - xp.asarray(np.asarray(wrapped))
            score = xp.where((abs(tried) <= limit).all(axis=1), _overlap_correlation(xp, fixed, moving, tried), -np.inf)
            better = score > best
            best, shift = xp.where(better, score, best), xp.where(better[:, None], tried, shift)
    return shift


def _pixels(xp: ModuleType, shape: tuple[int, ...], shift: Array) -> tuple[Array, Array, Array]:
    """Return for each pixel of the fixed images its coordinates in the moving images, and its weight.

    Rows (n, Y) and columns (n, X) are fractions of pixels if shifts are; weights are (n, Y, X), decrease towards the
    borders of the overlap, and are 0 outside.
    """
    coordinates, weights = [], []
    for axis, size in enumerate(shape[1:]):
        step, pixel = shift[:, axis, None], xp.arange(size)
        coordinates.append(pixel - step)
        position = (pixel + 0.5 - xp.maximum(step, 0)) / xp.maximum(size - abs(step), 1)
        weights.append(_taper(xp, position).astype(np.float32))
    return *coordinates, weights[0][:, :, None] * weights[1][:, None]


def _overlap_correlation(xp: ModuleType, fixed: Array, moving: Array, shift: Array) -> Array:
    """Return Pearson's correlation of the overlap of each pair at whole shifts."""
    n, height, width = fixed.shape
    rows, columns, weight = _pixels(xp, fixed.shape, shift)
    rows, columns = xp.clip(rows, 0, height - 1), xp.clip(columns, 0, width - 1)
    shifted = moving[xp.arange(n)[:, None, None], rows[:, :, None], columns[:, None]]
    return _correlation(xp, fixed, shifted, (weight > 0).astype(np.float32))


def _correlation(xp: ModuleType, a: Array, b: Array, weight: Any) -> Array:
    """Return the weighted Pearson correlation of each pair; 0 if one image has no variance."""
    total = xp.maximum(weight.sum(axis=(1, 2), dtype=np.float64), 1e-6)
    sums = [(side * weight).sum(axis=(1, 2), dtype=np.float64) / total for side in (a, b, a * a, b * b, a * b)]
    variance = [xp.maximum(sums[2 + k] - sums[k] ** 2, 0) for k in (0, 1)]
    # Smaller variances are rounding errors.
    varied = (variance[0] > 1e-6 * sums[2]) & (variance[1] > 1e-6 * sums[3])
    spread = xp.where(varied, xp.sqrt(variance[0] * variance[1]), 1)
    return xp.where(varied, (sums[4] - sums[0] * sums[1]) / spread, 0.0)


def _refined(xp: ModuleType, fixed: Array, moving: Array, whole: Array) -> tuple[Array, Array]:
    """Refine whole-pixel shifts by Gauss-Newton steps; return the shifts, and the correlations there."""
    shift = whole.astype(np.float64)
    slope = _gradient(xp, fixed)
    for _ in range(_STEPS):
        shifted, weight = _shifted(xp, moving, shift)
        sides = [_without_plane(xp, side, weight) for side in (fixed, shifted)]
        powers = [(side * side * weight).sum(axis=(1, 2), keepdims=True) for side in sides]
        gain = xp.sqrt(powers[0] / xp.where(powers[1] > 0, powers[1], 1))
        difference = (sides[0] - gain * sides[1]) * weight
        y, x = (0.5 * (a + gain * b) for a, b in zip(slope, _gradient(xp, shifted), strict=True))
        yy, yx, xx, dy, dx = (
            part.sum(axis=(1, 2), dtype=np.float64)
            for part in (y * y * weight, y * x * weight, x * x * weight, y * difference, x * difference)
        )
        determinant = yy * xx - yx * yx
        known = determinant > 1e-6 * yy * xx
        safe = xp.where(known, determinant, 1)
        step = xp.stack([xx * dy - yx * dx, yy * dx - yx * dy], axis=1) / safe[:, None]
        shift = xp.clip(shift - xp.where(known[:, None], xp.clip(step, -0.5, 0.5), 0), whole - _REACH, whole + _REACH)
    shifted, weight = _shifted(xp, moving, shift)
    fixed, shifted = (_without_plane(xp, side, weight) for side in (fixed, shifted))
    return shift, _correlation(xp, fixed, shifted, weight)


def _without_plane(xp: ModuleType, images: Any, weight: Any) -> Any:
    """Subtract the weighted mean and the slope of illumination along both axes.

    A weight is the product of a weight of its row and a weight of its column, so the three terms of a plane are
    orthogonal.
    """
    total = xp.maximum(weight.sum(axis=(1, 2), keepdims=True), 1e-6)
    images = images - (images * weight).sum(axis=(1, 2), keepdims=True) / total
    for axis in (1, 2):
        position = xp.arange(images.shape[axis], dtype=np.float32).reshape((-1, 1) if axis == 1 else (1, -1))
        position = position - (position * weight).sum(axis=(1, 2), keepdims=True) / total
        spread = (position * position * weight).sum(axis=(1, 2), keepdims=True)
        slope = (images * position * weight).sum(axis=(1, 2), keepdims=True) / xp.maximum(spread, 1e-6)
        images = images - slope * position
    return images


def _gradient(xp: ModuleType, images: Array) -> tuple[Array, Array]:
    """Return central differences along Y and X, 0 at the borders."""
    y, x = xp.zeros_like(images), xp.zeros_like(images)
    y[:, 1:-1] = 0.5 * (images[:, 2:] - images[:, :-2])
    x[:, :, 1:-1] = 0.5 * (images[:, :, 2:] - images[:, :, :-2])
    return y, x


def _shifted(xp: ModuleType, moving: Array, shift: Array) -> tuple[Any, Any]:
    """Sample the moving images at the pixels of the fixed images by cubic convolution; also return pixels' weights."""
    n, height, width = moving.shape
    rows, columns, weight = _pixels(xp, moving.shape, shift)
    pairs = xp.arange(n)[:, None, None]
    below = xp.floor(rows).astype(np.int64)
    along = sum(
        factor[:, None, None] * moving[pairs, xp.clip(below + k, 0, height - 1)[:, :, None], xp.arange(width)]
        for k, factor in _cubic(rows[:, 0] - below[:, 0])
    )
    below = xp.floor(columns).astype(np.int64)
    both = sum(
        factor[:, None, None] * along[pairs, xp.arange(height)[:, None], xp.clip(below + k, 0, width - 1)[:, None]]
        for k, factor in _cubic(columns[:, 0] - below[:, 0])
    )
    return both, weight


def _cubic(t: Array) -> list[tuple[int, Array]]:
    """Return the offsets of the four pixels around a fraction t, and their weights in cubic convolution."""
    weights = (
        ((-0.5 * t + 1) * t - 0.5) * t,
        (1.5 * t - 2.5) * t * t + 1,
        ((-1.5 * t + 2) * t + 0.5) * t,
        (0.5 * t - 0.5) * t * t,
    )
    return [(k - 1, weight.astype(np.float32)) for k, weight in enumerate(weights)]
