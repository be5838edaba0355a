"""Illumination of tiles by the method of BaSiC: the brightness of each position of the field of view, for every depth.

In: tiles of one microscope, on the host or a device. Out: :class:`Illumination`, in the memory of the input. Tiles are
reduced to at most 128 × 128 pixels in each plane by means over areas. :mod:`linumpy.correction.shading` fits sums of
cosines to the reduced tiles, which are then evaluated at every voxel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.shading import ShadingOptions, dct_matrix, estimate_shading
from linumpy.device import array_module

#: Maximum pixels of a reduced tile along an axis.
WORKING_SIZE = 128
#: Maximum pixels of the reduced tiles that are solved together; the solver needs about 32 bytes for each pixel.
_BATCH_PIXELS = {"numpy": 2**22, "cupy": 2**27}


@dataclass(frozen=True)
class Illumination:
    """Illumination of a field of view.

    Attributes
    ----------
    flat : array of float32, (..., Y, X)
        Factor of the intensity, with a mean of about 1 over a tile; at least 0.01.
    dark : array of float32, (..., Y, X)
        Offset in units of intensity, not negative; 0 unless it was estimated.
    baseline : array of float32, (N, ...)
        Brightness of each tile in units of intensity.
    """

    flat: Array
    dark: Array
    baseline: Array

    def correct(self, tiles: Array) -> Array:
        """Return ``(tiles - dark) / flat`` as float32; `tiles` has the axes (..., Y, X), or more in front."""
        return (tiles.astype(np.float32, copy=False) - self.dark) / self.flat


def estimate_illumination(tiles: Array, options: ShadingOptions | None = None) -> Illumination:
    """Estimate the illumination of tiles.

    Parameters
    ----------
    tiles : numpy.ndarray or cupy.ndarray, (N, ..., Y, X)
        Tiles of real numbers. Each index of the axes between the first and the last two, such as each depth, gets its
        own fields. Voxels that are not finite are not used.
    options : ShadingOptions, optional
        How to estimate the fields.

    Returns
    -------
    Illumination
        In the memory of `tiles`. The flat field is 1 at depths without light.

    Raises
    ------
    ValueError
        Fewer than three axes, or an axis without elements.
    TypeError
        Voxels that are not real numbers.
    """
    if tiles.ndim < 3 or 0 in tiles.shape:
        raise ValueError(f"tiles of shape {tuple(tiles.shape)}: pass an array (N, ..., Y, X) that has elements")
    if tiles.dtype.kind not in "biuf":
        raise TypeError(f"tiles of {tiles.dtype} have no intensity; real numbers are needed")
    return illumination_of(map(reduce_tile, tiles), tiles.shape[1:], options)


def reduce_tile(tile: Array) -> tuple[Array, Array | None]:
    """Reduce a tile (..., Y, X) to at most 128 × 128 pixels by means over areas.

    Returns
    -------
    pixels : array of float32, (depths, h, w)
        Means of the finite voxels; 0 where no voxel is finite.
    valid : array of bool, (depths, h, w), or None
        Pixels with a finite voxel; None if all voxels are finite.
    """
    xp = array_module(tile)
    voxels = tile.astype(np.float32, copy=False).reshape(-1, *tile.shape[-2:])
    rows, columns = (_area_means(xp, size) for size in voxels.shape[-2:])
    finite = xp.isfinite(voxels)
    if bool(finite.all()):
        return rows @ voxels @ columns.T, None
    covered = rows @ finite.astype(np.float32) @ columns.T
    sums = rows @ xp.where(finite, voxels, 0) @ columns.T
    valid = covered > 1e-3
    return xp.where(valid, sums / xp.where(valid, covered, 1), 0), valid


def illumination_of(
    reduced: Iterable[tuple[Array, Array | None]], shape: tuple[int, ...], options: ShadingOptions | None = None
) -> Illumination:
    """Estimate the illumination from reduced tiles.

    Parameters
    ----------
    reduced : iterable
        Results of :func:`reduce_tile`, one for each tile.
    shape : tuple of int
        Shape (..., Y, X) of a tile.
    options : ShadingOptions, optional
        How to estimate the fields.

    Returns
    -------
    Illumination
        In the memory of the reduced tiles.
    """
    options = options or ShadingOptions()
    tiles = list(reduced)
    xp = array_module(tiles[0][0])
    depths, *size = tiles[0][0].shape
    step = max(1, _BATCH_PIXELS[xp.__name__] // (len(tiles) * math.prod(size)))
    parts = []
    for begin in range(0, depths, step):
        part = slice(begin, begin + step)
        images, valid = _batch(xp, tiles, part)
        parts.append(estimate_shading(images, valid, options))
    flat, dark = (
        _expand(xp, xp.concatenate([getattr(part, name) for part in parts]), shape[-2:]).reshape(shape)
        for name in ("flat", "dark")
    )
    baseline = xp.concatenate([part.baseline for part in parts], axis=1).reshape(len(tiles), *shape[:-2])
    return Illumination(xp.maximum(flat, np.float32(0.01)), xp.maximum(dark, 0), baseline)


def _batch(xp: ModuleType, tiles: list[tuple[Array, Array | None]], part: slice) -> tuple[Array, Array | None]:
    """Stack some depths of all tiles; return the images, and which pixels are valid (None if all are).

    A pixel that is not valid gets the mean of the valid pixels at its position or, if there are none, at its depth.
    """
    images = xp.stack([pixels[part] for pixels, _ in tiles])
    if all(valid is None for _, valid in tiles):
        return images, None
    valid = xp.stack([xp.ones(pixels[part].shape, bool) if v is None else v[part] for pixels, v in tiles])
    count = valid.sum(axis=0)
    mean = xp.where(valid, images, 0).sum(axis=0) / xp.maximum(count, 1)
    depth_mean = (mean * count).sum(axis=(1, 2)) / xp.maximum(count.sum(axis=(1, 2)), 1)
    mean = xp.where(count > 0, mean, depth_mean[:, None, None])
    return xp.where(valid, images, mean).astype(np.float32), valid


def _area_means(xp: ModuleType, size: int) -> Any:
    """Return the matrix (pixels, size) of means over equal parts of an axis; the sum of each row is 1."""
    count = min(size, WORKING_SIZE)
    edges = np.arange(count + 1) * size / count
    sample = np.arange(size)
    overlap = np.minimum(edges[1:, None], sample + 1) - np.maximum(edges[:-1, None], sample)
    return xp.asarray(np.maximum(overlap, 0) * count / size, np.float32)


def _expand(xp: ModuleType, fields: Any, shape: tuple[int, ...]) -> Array:
    """Evaluate the cosines of reduced fields (z, h, w) at every voxel of a tile."""
    height, width = fields.shape[-2:]
    if (height, width) == tuple(shape):
        return fields
    rows, columns = (
        dct_matrix(xp, size, count) * np.float32(math.sqrt(size / count))
        for size, count in zip(shape, (height, width), strict=True)
    )
    coefficients = dct_matrix(xp, height) @ fields @ dct_matrix(xp, width).T
    return rows.T @ coefficients @ columns
