"""The bias field of an image, a smooth factor of its intensity, by the method of N4.

In: an image of two or three axes, on the host or a device. Out: its bias field, in the memory of the input. The method
is that of Tustison et al., N4ITK: improved N3 bias correction, IEEE Transactions on Medical Imaging 29:1310 (2010).
Each iteration sharpens the histogram of the logarithm of the intensity by Wiener deconvolution, fits a cubic B-spline
to the change of the logarithms, and adds the spline to the logarithm of the field. The mesh of the spline gets finer
from level to level.

The spline is the approximation of Lee, Wolberg and Shin (IEEE Transactions on Visualization and Computer Graphics
3:228, 1997): each control point is a weighted mean. On a grid of voxels the weights are products of one factor for each
axis. A fit is therefore a product of the image with a small matrix for each axis, and another such product for the sum
of the weights, with a mask or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import numpy as np

from linumpy.arrays import Array
from linumpy.declared import Count, Declared, Positive, Range
from linumpy.device import array_module, to_host

#: Maximum voxels of the reduced image, unless the caller chooses the factor.
_WORKING_VOXELS = 2**21


@dataclass(frozen=True, kw_only=True)
class BiasOptions(Declared):
    """How a bias field is estimated; defaults are those of N4.

    - `spans`: spans of the spline along each axis at the first level, doubled from level to level.
    - `levels`, `iterations`: number of levels, and maximum number of iterations of each.
    - `tolerance`: coefficient of variation of the change of the field, below which a level has converged.
    - `fwhm`: full width at half maximum of the field's distribution, in units of the logarithm.
    - `noise`: noise of the Wiener filter.
    - `shrink`: factor by which the image is reduced first, by means over blocks; by default at most about 2 million
      voxels are left.
    """

    spans: Count = 1
    levels: Count = 4
    iterations: Count = 50
    tolerance: float = 1e-3
    fwhm: Positive = 0.15
    noise: Positive = 0.01
    bins: Annotated[int, Range(least=2)] = 200
    shrink: Count | None = None


def estimate_bias_field(image: Array, mask: Array | None = None, options: BiasOptions | None = None) -> Array:
    """Estimate the bias field of an image.

    - `image` ((Y, X) or (Z, Y, X)): intensities. Only voxels that are finite and above 0 are used, because they have a
      logarithm.
    - `options`: how to estimate the field.

    Returns: The field, by which the image is to be divided: positive, with a geometric mean of 1 over the voxels that
    are used. It is 1 everywhere if no voxel is used or all intensities are equal.
    """
    options = options or BiasOptions()
    if image.ndim not in (2, 3) or 0 in image.shape or image.dtype.kind not in "biuf":
        raise ValueError(f"an image of {image.dtype} and shape {tuple(image.shape)}: pass two or three axes of numbers")
    if mask is not None and mask.shape != image.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for an image of shape {tuple(image.shape)}")
    xp = array_module(image)
    shrink = options.shrink or max(1, math.ceil((image.size / _WORKING_VOXELS) ** (1 / image.ndim)))
    values, is_used = _reduced(xp, image, mask, shrink)
    log_image = xp.log(xp.where(is_used, values, 1)).astype(np.float32)
    log_field = xp.zeros_like(log_image)
    lattices = []
    for level in range(options.levels):
        spans = options.spans * 2**level
        splines = [
            _basis(xp, size, shrink, count, spans) for size, count in zip(image.shape, log_image.shape, strict=True)
        ]
        fit = _SplineFit(xp, splines, is_used)
        lattice: Any = 0.0
        for _ in range(options.iterations):
            corrected = log_image - log_field
            sharpened = _sharpened(xp, corrected, is_used, options)
            if sharpened is None:
                break
            points = fit(corrected - sharpened)
            change = _product(points, [spline.T for spline in splines])
            log_field, lattice = log_field + change, lattice + points
            # Converged, if the factor by which the field changes hardly varies over the voxels that are used.
            factor, number = xp.exp(change), is_used.sum()
            mean = (factor * is_used).sum() / number
            if float(xp.sqrt(((factor - mean) ** 2 * is_used).sum() / number) / mean) < options.tolerance:
                break
        lattices.append((spans, lattice))
    full_log_field = xp.zeros(image.shape, np.float32)
    for spans, lattice in lattices:
        if not isinstance(lattice, float):
            full_log_field += _product(lattice, [_basis(xp, size, 1, size, spans).T for size in image.shape])
    mean = (log_field * is_used).sum() / xp.maximum(is_used.sum(), 1)
    return xp.exp(full_log_field - mean).astype(np.float32)


def _reduced(xp: ModuleType, image: Array, mask: Array | None, shrink: int) -> tuple[Any, Any]:
    """Return means over blocks of the used voxels, and which blocks have used voxels; the last block may be smaller."""
    values = image.astype(np.float32, copy=False)
    valid = xp.isfinite(values) & (values > 0)
    if mask is not None:
        valid &= mask.astype(bool)
    values = xp.where(valid, values, 0)
    if shrink == 1:
        return values, valid
    number = valid.astype(np.float32)
    for axis, size in enumerate(image.shape):
        padding = [(0, -size % shrink if k == axis else 0) for k in range(image.ndim)]
        values, number = (
            xp.pad(part, padding).reshape(*part.shape[:axis], -1, shrink, *part.shape[axis + 1 :]).sum(axis=axis + 1)
            for part in (values, number)
        )
    return values / xp.maximum(number, 1), number > 0


def _basis(xp: ModuleType, size: int, shrink: int, count: int, spans: int) -> Array:
    """Return the values of cubic B-splines at `count` blocks along an axis of `size` voxels: (control points, count).

    The spans cover the centres of the first and the last voxel.
    """
    from scipy.interpolate import BSpline

    begin = np.arange(count) * shrink
    middle = (begin + np.minimum(begin + shrink, size) - 1) / 2
    position = middle * spans / max(1, size - 1)
    matrix = BSpline.design_matrix(position, np.arange(-3.0, spans + 4), 3).toarray()
    return xp.asarray(np.ascontiguousarray(matrix.T, np.float32))


class _SplineFit:
    """Approximates values on a grid by a spline; the weights do not depend on the values, and are computed once."""

    def __init__(self, xp: ModuleType, splines: list[Any], is_used: Array) -> None:
        self._xp = xp
        self._cubes = [spline**3 for spline in splines]
        self._scale = is_used.astype(np.float32)
        weights = _product(self._scale, [spline**2 for spline in splines])
        self._weights = xp.where(weights > 1e-12, weights, np.inf)
        for axis, spline in enumerate(splines):
            squares = (spline**2).sum(axis=0)
            self._scale = self._scale / squares.reshape([-1 if k == axis else 1 for k in range(len(splines))])

    def __call__(self, values: Array) -> Array:
        """Compute the control points of the spline that approximates `values`."""
        return _product(values * self._scale, self._cubes) / self._weights


def _product(values: Array, matrices: Sequence[Array]) -> Array:
    """Multiply an array by a matrix along each axis."""
    xp = array_module(values)
    for matrix in matrices:  # each product moves its axis to the end, so that the axes are in order after the last
        values = xp.tensordot(values, matrix, axes=(0, 1))
    return values


def _sharpened(xp: ModuleType, log_image: Array, is_used: Array, options: BiasOptions) -> Array | None:
    """Return the expected true logarithm of each voxel; None if no voxel is used or all used voxels are equal."""
    if not bool(is_used.any()):
        return None
    low = float(xp.where(is_used, log_image, np.inf).min())
    high = float(xp.where(is_used, log_image, -np.inf).max())
    if not high - low > 1e-6:
        return None
    slope = (high - low) / (options.bins - 1)
    position = xp.clip((log_image - low) / slope, 0, options.bins - 1)
    below = xp.minimum(position.astype(np.int32), options.bins - 2)
    share = (position - below).astype(np.float64)
    weights = is_used.astype(np.float64)
    histogram = xp.bincount(below.ravel(), ((1 - share) * weights).ravel(), options.bins) + xp.bincount(
        below.ravel() + 1, (share * weights).ravel(), options.bins
    )
    table = xp.asarray(_expected(to_host(histogram), low, slope, options), np.float32)
    lower = table[below]
    return lower + share.astype(np.float32) * (table[below + 1] - lower)


def _expected(histogram: np.ndarray, low: float, slope: float, options: BiasOptions) -> np.ndarray:
    """Return the expected true logarithm of each bin, by Wiener deconvolution of the histogram."""
    bins = len(histogram)
    size = 2 ** (math.ceil(math.log2(bins)) + 1)
    offset = (size - bins) // 2
    padded = np.zeros(size)
    padded[offset : offset + bins] = histogram
    width = options.fwhm / slope
    distance = np.minimum(np.arange(size), size - np.arange(size))
    gaussian = np.exp(-4 * math.log(2) * (distance / width) ** 2) * 2 * math.sqrt(math.log(2) / math.pi) / width
    response = np.fft.fft(gaussian).real
    wiener = response / (response**2 + options.noise)
    true = np.maximum(np.fft.ifft(np.fft.fft(padded) * wiener).real, 0)
    centres = low + (np.arange(size) - offset) * slope
    above, below = (np.fft.ifft(np.fft.fft(part) * response).real for part in (true * centres, true))
    usable = below > 1e-9 * max(1.0, float(below.max()))
    return np.where(usable, above / np.where(usable, below, 1), centres)[offset : offset + bins]
