"""What moves with the sample in the tiles of a slice: their structure, without what all tiles share.

In: tiles (n, Y, X). Out: for each tile its structure. Illumination (flat and dark field), dust and seams of the galvo
are fixed in the frame of a tile. They make all tiles alike, and tiles without sample would be aligned by them.

1. Tiles are band-pass filtered. Smoothing is a local linear regression with Gaussian weights, so that the border of a
   tile, where tiles overlap, has no bias.
2. What is left of the shared pattern is, at each pixel, proportional to the local level (flat field) plus a constant
   (dark field). Both are fitted over all tiles by weighted, robust least squares. The fit explains some variance by
   chance, more so with few tiles; so it is taken out only as far as it explains more (an F statistic over all pixels).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module

#: Standard deviations in pixels of the Gaussians whose difference is the band-pass filter.
BAND = (1.0, 6.0)
#: Number of tiles from which on a dark field is fitted besides the flat field.
_MIN_TILES_OF_DARK = 5
#: Error of the shared pattern that must be expected, as a share of the variance of a tile that shows nothing else.
_PATTERN_LEFT = 0.05
#: Residuals beyond this number of standard deviations have less weight.
_HUBER = 2.0


@dataclass(frozen=True)
class TileStructure:
    """The structure of tiles.

    - `smooth` (float32, (n, Y, X)): tiles without noise of single pixels, for fractions of pixels, where the shared
      pattern hardly matters.
    - `band` (float32, (n, Y, X)): the same after the band-pass filter, of about equal contrast everywhere.
    - `variance` (float32, (n, Y, X)): local mean square of `band`, below 1.
    """

    smooth: Array
    band: Array
    variance: Array


def find_structure(tiles: Array) -> TileStructure:
    """Separate the structure of tiles from the pattern that they share.

    - `tiles` (n, Y, X): tiles with contrast. Pixels that are not finite count as the tile's mean.
    """
    xp = array_module(tiles)
    pixels = _normalized(xp, tiles)
    fine, level = (_smoothed(xp, pixels, sigma) for sigma in BAND)
    band = fine - level
    variance = _smoothed(xp, band * band, BAND[1], order=0)
    before = xp.mean(variance, axis=(1, 2), keepdims=True)
    weight = 1 / (variance + 1e-3 * before + 1e-12)
    pattern = _shared_pattern(xp, band, level, weight)
    band -= pattern
    # Edges have much more contrast than the texture, and would decide alone. What is left of tiles that show only the
    # shared pattern is not amplified.
    variance = _smoothed(xp, band * band, BAND[1], order=0)
    total = variance + xp.mean(variance, axis=(1, 2), keepdims=True) + _PATTERN_LEFT * before + 1e-12
    return TileStructure(fine, band / xp.sqrt(total), variance / total)


def _normalized(xp: ModuleType, tiles: Array) -> Array:
    """Return tiles of float32, less their common mean, and relative to their common extent."""
    pixels = tiles.astype(np.float32)
    finite = xp.isfinite(pixels)
    count = xp.maximum(finite.sum(axis=(1, 2), keepdims=True), 1)
    mean = xp.where(finite, pixels, 0).sum(axis=(1, 2), keepdims=True, dtype=np.float64) / count
    pixels = xp.where(finite, pixels, mean.astype(np.float32))
    return pixels / abs(pixels).max()


def _smoothed(xp: ModuleType, images: Array, sigma: float, order: int = 1) -> Array:
    """Smooth images by local regression of an order: 0 for means, 1 for lines."""
    height, width = images.shape[1:]
    rows, columns = (xp.asarray(_smoother(size, sigma, order)) for size in (height, width))
    return rows @ (images @ columns.T)


@functools.lru_cache(maxsize=64)
def _smoother(size: int, sigma: float, order: int) -> np.ndarray:
    """Return the matrix of local regression with Gaussian weights: float32, (size, size)."""
    offset = np.arange(size)[None, :] - np.arange(size)[:, None]
    weight = np.exp(-0.5 * (offset / min(sigma, size / 6)) ** 2)
    sums = [(weight * offset**k).sum(axis=1, keepdims=True) for k in (0, 1, 2)]
    if order == 1:
        weight = weight * (sums[2] - sums[1] * offset)
    return (weight / weight.sum(axis=1, keepdims=True)).astype(np.float32)


def _shared_pattern(xp: ModuleType, band: Array, level: Array, weight: Array) -> Array:
    """Return the part of band-passed tiles that is fixed in their frame, (n, Y, X)."""
    number = len(band)
    parameters = 2 if number >= _MIN_TILES_OF_DARK else 1
    if number <= parameters:
        return xp.zeros_like(band)
    pattern = _fit(band, level, weight, parameters)
    total, left = ((weight * part * part).sum(dtype=np.float64) for part in (band, band - pattern))
    explained, chance = (total - left) / parameters, left / (number - parameters)
    share = xp.where(explained > chance, 1 - chance / xp.maximum(explained, 1e-30), 0).astype(np.float32)
    deviation = abs(band - pattern) * xp.sqrt(weight)
    return share * _fit(band, level, weight * xp.minimum(1, _HUBER / xp.maximum(deviation, 1e-6)), parameters)


def _fit(band: Array, level: Array, weight: Array, parameters: int) -> Array:
    """Fit ``flat * level + dark`` at each pixel over all tiles; with one parameter `dark` is 0."""
    total = weight.sum(axis=0)
    if parameters == 1:
        return level * ((weight * level * band).sum(axis=0) / ((weight * level * level).sum(axis=0) + 1e-6 * total))
    mean_level, mean_band = ((weight * part).sum(axis=0) / total for part in (level, band))
    varied = level - mean_level
    spread = (weight * varied * varied).sum(axis=0) + 1e-6 * total
    return mean_band + varied * ((weight * varied * band).sum(axis=0) / spread)
