"""A smooth factor of the intensity of a whole image, by the method of N4.

In: an image of two or three axes, on the host or a device. Out: its bias field, in the same memory. The method is that
of Tustison et al., N4ITK: improved N3 bias correction, IEEE Transactions on Medical Imaging 29:1310 (2010). Each
iteration sharpens the histogram of the logarithm of the intensity by Wiener deconvolution, fits the change of the
intensities by a cubic B-spline, and adds the spline to the field. The mesh of the spline gets finer from level to
level.

The spline is the approximation of Lee, Wolberg and Shin (IEEE Transactions on Visualization and Computer Graphics
3:228, 1997), a weighted mean for each control point. On a grid of voxels its weights are products of one factor for
each axis, so that a fit is two products of the image with a small matrix for each axis, with a mask or without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host

#: Maximum voxels of the reduced image, unless the caller chooses the factor.
_WORKING_VOXELS = 2**21


@dataclass(frozen=True)
class BiasOptions:
    """How a bias field is estimated; defaults are those of N4.

    Attributes
    ----------
    spans : int
        Spans of the spline along each axis at the first level, doubled from level to level.
    levels, iterations : int
        Number of levels, and maximum number of iterations of each.
    tolerance : float
        Coefficient of variation of the change of the field, below which a level has converged.
    fwhm : float
        Full width at half maximum of the field's distribution, in units of the logarithm.
    noise : float
        Noise of the Wiener filter.
    bins : int
        Bins of the histogram.
    shrink : int, optional
        Factor by which the image is reduced first, by means over blocks. By default at most 2 million voxels are left.
    """

    spans: int = 1
    levels: int = 4
    iterations: int = 50
    tolerance: float = 1e-3
    fwhm: float = 0.15
    noise: float = 0.01
    bins: int = 200
    shrink: int | None = None

    def __post_init__(self) -> None:
        if min(self.spans, self.levels, self.iterations, 1 if self.shrink is None else self.shrink) < 1:
            raise ValueError(f"{self}: spans, levels, iterations and shrink are 1 or more")
        if self.bins < 2 or not min(self.fwhm, self.noise) > 0:
            raise ValueError(f"{self}: pass two bins or more, and a width and a noise above 0")


def estimate_bias_field(image: Array, mask: Array | None = None, options: BiasOptions | None = None) -> Array:
    """Estimate the bias field of an image.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray, (Y, X) or (Z, Y, X)
        Intensities. Only voxels that are finite and above 0 are used, because they have a logarithm.
    mask : array of bool, same shape, optional
        Voxels to use.
    options : BiasOptions, optional
        How to estimate it.

    Returns
    -------
    array of float32, same shape
        Positive, with a geometric mean of 1 over the voxels that are used; divide the image by it. It is 1 if no voxel
        is used or all intensities are equal.

    Raises
    ------
    ValueError
        Another number of axes, an axis without voxels, a mask of another shape.
    """
    options = options or BiasOptions()
    if image.ndim not in (2, 3) or 0 in image.shape or image.dtype.kind not in "biuf":
        raise ValueError(f"an image of {image.dtype} and shape {tuple(image.shape)}: pass two or three axes of numbers")
    if mask is not None and mask.shape != image.shape:
        raise ValueError(f"mask of shape {tuple(mask.shape)} for an image of shape {tuple(image.shape)}")
    xp = array_module(image)
    shrink = options.shrink or max(1, math.ceil((image.size / _WORKING_VOXELS) ** (1 / image.ndim)))
    values, counts = _reduced(xp, image, mask, shrink)
    log = xp.log(xp.where(counts, values, 1)).astype(np.float32)
    field = xp.zeros_like(log)
    lattices = []
    for level in range(options.levels):
        spans = options.spans * 2**level
        splines = [_basis(xp, size, shrink, count, spans) for size, count in zip(image.shape, log.shape, strict=True)]
        fit = _Fit(xp, splines, counts)
        lattice = 0.0
        for _ in range(options.iterations):
            corrected = log - field
            sharpened = _sharpened(xp, corrected, counts, options)
            if sharpened is None:
                break
            points = fit(corrected - sharpened)
            change = _product(points, [spline.T for spline in splines])
            field, lattice = field + change, lattice + points
            if _variation(xp, change, counts) < options.tolerance:
                break
        lattices.append((spans, lattice))
    whole = xp.zeros(image.shape, np.float32)
    for spans, lattice in lattices:
        if not isinstance(lattice, float):
            whole += _product(lattice, [_basis(xp, size, 1, size, spans).T for size in image.shape])
    number = counts.sum()
    return xp.exp(whole - (field * counts).sum() / xp.maximum(number, 1)).astype(np.float32)


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
    begin = np.arange(count) * shrink
    middle = (begin + np.minimum(begin + shrink, size) - 1) / 2
    position = middle * spans / max(1, size - 1)
    first = np.minimum(position.astype(np.int64), spans - 1)
    t = position - first
    values = [(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]
    matrix = np.zeros((spans + 3, count), np.float32)
    for k, value in enumerate(values):
        matrix[first + k, np.arange(count)] = value / 6
    return xp.asarray(matrix)


class _Fit:
    """Approximates values on a grid by a spline; weights, which do not depend on the values, are computed once."""

    def __init__(self, xp: ModuleType, splines: list[Any], counts: Array) -> None:
        self._xp = xp
        self._cubes = [spline**3 for spline in splines]
        self._scale = counts.astype(np.float32)
        weights = _product(self._scale, [spline**2 for spline in splines])
        self._weights = xp.where(weights > 1e-12, weights, np.inf)
        for axis, spline in enumerate(splines):
            squares = (spline**2).sum(axis=0)
            self._scale = self._scale / squares.reshape([-1 if k == axis else 1 for k in range(len(splines))])

    def __call__(self, values: Array) -> Array:
        """Return the control points."""
        return _product(values * self._scale, self._cubes) / self._weights


def _product(values: Array, matrices: Sequence[Array]) -> Array:
    """Multiply an array by a matrix along each axis."""
    xp = array_module(values)
    for matrix in matrices:  # each product moves its axis to the end, so that the axes are in order after the last
        values = xp.tensordot(values, matrix, axes=(0, 1))
    return values


def _sharpened(xp: ModuleType, log: Array, counts: Array, options: BiasOptions) -> Array | None:
    """Return the expected true logarithm of each voxel; None if all are equal."""
    if not bool(counts.any()):
        return None
    low, high = (float(bound) for bound in (xp.where(counts, log, np.inf).min(), xp.where(counts, log, -np.inf).max()))
    if not high - low > 1e-6:
        return None
    slope = (high - low) / (options.bins - 1)
    position = xp.clip((log - low) / slope, 0, options.bins - 1)
    below = xp.minimum(position.astype(np.int32), options.bins - 2)
    share = (position - below).astype(np.float64)
    weights = counts.astype(np.float64)
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


def _variation(xp: ModuleType, change: Array, counts: Array) -> float:
    """Return the coefficient of variation of the factor by which the field changed."""
    factor = xp.exp(change)
    number = counts.sum()
    mean = (factor * counts).sum() / number
    return float(xp.sqrt(((factor - mean) ** 2 * counts).sum() / number) / mean)
