"""How well pairs of images match at each shift, all pairs in one batch, on the host or the device.

In: two batches of images (n, Y, X). Out: a score map for each pair, and shifts refined to fractions of a pixel.

A score is Fisher's z of the correlation of the overlap, in standard deviations of what images of the same spectrum give
by chance: overlaps have many pixels, but neighbouring pixels are alike, and a few bright ones may decide. All shifts
are computed together by FFT.

Fractions of a pixel are found by Gauss-Newton steps on the weighted squared difference of two images over their
overlap, with the mean of both gradients (Benhimane and Malis, 2004) and cubic convolution (Keys, 1981). In strips as
narrow as overlaps of tiles, a peak fitted to a windowed correlation would be biased to whole pixels, because windows
select different tissue in the two images. Here the same tissue has the same weight in both images.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.registration.masked_correlation import fast_length

#: Share of the window, at each end, over which the window decreases to 0.
_TAPER = 0.25
#: Number of Gauss-Newton steps, and maximum distance in pixels from the first shift along each axis.
_STEPS, _REACH = 8, 2.0
#: Pixels of a noise sample in images smoothed by a Gaussian of 1 pixel.
_SMOOTHED = 4 * np.pi
#: Variance that is added to that of each overlap, relative to the mean of the images: overlaps without contrast get 0.
_FLOOR = 0.05


def score_shifts(
    fixed: tuple[Any, Any], moving: tuple[Any, Any], low: Sequence[int], high: Sequence[int]
) -> tuple[Array, Array, Array]:
    """Score each whole shift of pairs of images from `low` to `high`, both included, along Y and X.

    - `fixed`, `moving` ((array of float32, array of float32), each (n, Y, X)): images of mean about 0, and their local
      variance. At a shift, pixel p of the moving image is at p + shift in the fixed image.
    - `low`, `high` (2,): bounds of the shifts.

    Returns, as float32: (1) Fisher's z of the correlation, (n, shifts along Y, shifts along X). (2) Its standard
    deviation for images that do not match, of the same shape. (3) Pixels that make one independent sample of a pair,
    (n,).
    """
    xp, shape = array_module(fixed[0]), fixed[0].shape[1:]
    padded = [fast_length(size + max(abs(a), abs(b))) for size, a, b in zip(shape, low, high, strict=True)]
    window = [
        xp.asarray(np.arange(a, b + 1) % size).reshape((-1, 1) if axis == 0 else (1, -1))
        for axis, (a, b, size) in enumerate(zip(low, high, padded, strict=True))
    ]

    def spectrum(images: Array) -> Array:
        return xp.fft.rfft2(images, s=padded)

    def correlate(a: Array, b: Array) -> Array:
        return xp.fft.irfft2(a * xp.conj(b), s=padded)[:, window[0], window[1]]

    sides, variances = ([spectrum(side[k]) for side in (fixed, moving)] for k in (0, 1))
    ones = spectrum(xp.ones((1, *shape), np.float32))
    count = xp.maximum(correlate(ones, ones), 1)
    mean = [side[1].mean(axis=(1, 2), keepdims=True) for side in (fixed, moving)]
    energy = [
        xp.maximum(part, 0) + _FLOOR * average * count + 1e-12
        for part, average in zip((correlate(variances[0], ones), correlate(ones, variances[1])), mean, strict=True)
    ]
    product = energy[0] * energy[1]
    z = xp.arctanh(xp.clip(correlate(*sides) / xp.sqrt(product), -0.999, 0.999))
    # Pixels of a noise sample: the sum over all lags of the product of both autocorrelations.
    power = [(abs(side) ** 2).astype(np.float32) for side in sides]
    totals = [part.sum(axis=(1, 2), keepdims=True) for part in power]
    area = power[0].shape[1] * power[0].shape[2] * (power[0] * power[1]).sum(axis=(1, 2), keepdims=True)
    area = xp.maximum(area / xp.maximum(totals[0] * totals[1], 1e-12), 1)
    variance = area * xp.maximum(correlate(*variances) / product, 1 / count)
    return z.astype(np.float32), xp.sqrt(variance).astype(np.float32), area[:, 0, 0]


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
        edge = xp.clip(xp.minimum(position, 1 - position) / _TAPER, 0, 1)
        weights.append(xp.where(edge > 0, 0.5 - 0.5 * xp.cos(np.pi * edge), 0).astype(np.float32))
    return *coordinates, weights[0][:, :, None] * weights[1][:, None]


def _correlation(xp: ModuleType, a: Array, b: Array, weight: Any) -> Array:
    """Return the weighted Pearson correlation of each pair; 0 if one image has no variance."""
    total = xp.maximum(weight.sum(axis=(1, 2), dtype=np.float64), 1e-6)
    sums = [(side * weight).sum(axis=(1, 2), dtype=np.float64) / total for side in (a, b, a * a, b * b, a * b)]
    variance = [xp.maximum(sums[2 + k] - sums[k] ** 2, 0) for k in (0, 1)]
    # Smaller variances are rounding errors.
    varied = (variance[0] > 1e-6 * sums[2]) & (variance[1] > 1e-6 * sums[3])
    spread = xp.where(varied, xp.sqrt(variance[0] * variance[1]), 1)
    return xp.where(varied, (sums[4] - sums[0] * sums[1]) / spread, 0.0)


def refine_shifts(fixed: Array, moving: Array, first: Array) -> tuple[Array, Array, Array]:
    """Refine shifts of pairs of images by Gauss-Newton steps, at most by 2 pixels along each axis.

    - `fixed`, `moving` (float32, (n, Y, X)): smoothed images, both on the host or both on the device.
    - `first` (float64, (n, 2)): the shifts from which to start, in the memory of the images.

    Returns, as float64: (1) The shifts along Y and X in pixels, (n, 2): pixel p of the moving image is at p + shift in
    the fixed image. (2) Their standard deviations, (n, 2), from the difference of the images and their gradients;
    infinite if unknown. (3) Weighted correlation of the overlap at the shift, (n,), from -1 to 1; 0 without contrast.
    """
    xp, shift = array_module(fixed), first
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
        shift = xp.clip(shift - xp.where(known[:, None], xp.clip(step, -0.5, 0.5), 0), first - _REACH, first + _REACH)
    shifted, weight = _shifted(xp, moving, shift)
    sides = [_without_plane(xp, side, weight) for side in (fixed, shifted)]
    noise = (difference * difference).sum(axis=(1, 2), dtype=np.float64) / weight.sum(axis=(1, 2), dtype=np.float64)
    variance = _SMOOTHED * noise[:, None] * xp.stack([xx, yy], axis=1) / safe[:, None]
    deviations = xp.where(known[:, None], xp.sqrt(variance), np.inf)
    return shift, deviations, _correlation(xp, sides[0], sides[1], weight)


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
