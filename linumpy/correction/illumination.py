"""Illumination of tiles: the brightness of each position of the field of view, for every depth.

In: tiles of one microscope, on the host or a device. Out: :class:`Illumination`, with what it is known from. Tiles are
reduced to at most 20 planes of 32 × 32 pixels by means, where they are. :mod:`linumpy.correction.shading_fit` fits the
fields to the reduced tiles on the host, since they are small: a device would take longer to compile the fit than the
host takes to compute it. The fields are then evaluated at every voxel. If tiles are too few, or tell too little, the
fields are left out: a flat field of 1, no dark field, and the reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.shading import Evidence, Shading, ShadingOptions
from linumpy.correction.shading_fit import estimate_shading
from linumpy.device import array_module, to_host

#: Maximum planes, rows and columns of a reduced tile.
WORKING_SHAPE = (20, 32, 32)
#: Maximum factor by which a voxel is made brighter or darker.
MAX_GAIN = 5.0
#: Fields are used if their expected error is below this share of their unevenness, or below this error.
_USEFUL, _NEGLIGIBLE = 0.5, 0.01
#: Minimum number of tiles with light of different parts of the sample: the outline of the brain and the structure of
#: fewer tiles cannot be told from the fields. So many neighbouring slices count as one part.
_MIN_TILES, _SAME_PART = 6, 8


@dataclass(frozen=True, kw_only=True)
class Illumination:
    """Illumination of a field of view.

    - `flat` (float32, (..., Y, X)): factor of the intensity, with a mean of about 1 over a tile; from 1/5 to 5. 1 if
      the fields are left out.
    - `dark` (float32, (..., Y, X)): offset in units of intensity, not negative; 0 unless it was asked for.
    - `baseline` (float32, (N, ...)): mean brightness of each tile in units of intensity.
    - `evidence`: what the fields are known from.
    """

    flat: Array
    dark: Array
    baseline: Array
    evidence: Evidence

    def correct(self, tiles: Array) -> Array:
        """Return ``(tiles - dark) / flat`` as float32; `tiles` has the axes (..., Y, X), or more in front."""
        return (tiles.astype(np.float32, copy=False) - self.dark) / self.flat


def estimate_illumination(tiles: Array, options: ShadingOptions | None = None) -> Illumination:
    """Estimate the illumination of tiles.

    Parameters
    ----------
    tiles : numpy.ndarray or cupy.ndarray, (N, ..., Y, X)
        Tiles of real numbers. The axes between the first and the last two are depth: the flat field may change slowly
        along it. Voxels that are not finite are not used.
    options : ShadingOptions, optional
        How to estimate the fields.

    Returns
    -------
    Illumination
        In the memory of `tiles`.

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
    found = illumination_of([to_host(reduce_tile(tile)) for tile in tiles], tiles.shape[1:], options)
    flat, dark, baseline = (array_module(tiles).asarray(part) for part in (found.flat, found.dark, found.baseline))
    return Illumination(flat=flat, dark=dark, baseline=baseline, evidence=found.evidence)


def reduce_tile(tile: Array) -> Array:
    """Reduce a tile (..., Y, X) to at most 20 planes of 32 × 32 pixels by means of the finite voxels.

    Returns: NaN where no voxel is finite.
    """
    xp = array_module(tile)
    voxels = tile.astype(np.float32, copy=False).reshape(-1, *tile.shape[-2:])
    finite = xp.isfinite(voxels)
    if bool(finite.all()):
        return _means(xp, voxels)
    covered, sums = _means(xp, finite.astype(np.float32)), _means(xp, xp.where(finite, voxels, 0))
    return xp.where(covered > 1e-3, sums / xp.maximum(covered, np.float32(1e-3)), np.float32(np.nan))


def illumination_of(
    reduced: Sequence[np.ndarray],
    shape: tuple[int, ...],
    options: ShadingOptions | None = None,
    places: np.ndarray | None = None,
) -> Illumination:
    """Estimate the illumination from reduced tiles.

    - `reduced`: results of :func:`reduce_tile` on the host, one for each tile.
    - `shape`: shape (..., Y, X) of a tile.
    - `options`: how to estimate the fields.
    - `places` (N, 3): As for :func:`linumpy.correction.shading_fit.estimate_shading`.

    Returns: On the host.
    """
    options, images = options or ShadingOptions(), np.stack(reduced)
    shading = estimate_shading(images, options, places)
    parts = len(images) if places is None else len({(place[0] // _SAME_PART, *place[1:]) for place in places.tolist()})
    evidence = _evidence(shading, options, parts)
    depth = math.prod(shape[:-2])
    planes = np.arange(depth) * images.shape[1] // max(depth, 1)
    means = np.nansum(images, axis=(2, 3)) / np.maximum(np.isfinite(images).sum(axis=(2, 3)), 1)
    baseline = means.astype(np.float32)[:, planes].reshape(len(images), *shape[:-2])
    if evidence.left_out:
        return Illumination(
            flat=np.ones(shape, np.float32), dark=np.zeros(shape, np.float32), baseline=baseline, evidence=evidence
        )
    flat, dark = shading.fields((depth, shape[-2], shape[-1]))
    dark = np.broadcast_to(dark if options.dark else np.zeros_like(dark), shape)
    return Illumination(
        flat=np.clip(flat, 1 / MAX_GAIN, MAX_GAIN).reshape(shape), dark=dark, baseline=baseline, evidence=evidence
    )


def _evidence(shading: Shading, options: ShadingOptions, parts: int) -> Evidence:
    """Judge the fields by their expected error, and by the number of parts of the sample that tiles show."""
    found = shading.evidence
    parts = min(parts, found.tiles)
    limit = max(_USEFUL * found.unevenness, _NEGLIGIBLE)
    if options.force or (parts >= _MIN_TILES and found.error <= limit):
        return found
    if parts < _MIN_TILES:
        reason = (
            f"{found.tiles} tiles with light show {parts} parts of the sample, as neighbouring slices show the same: "
            f"{_MIN_TILES} or more parts are needed"
        )
        return replace(found, left_out=reason)
    needed = max(2 * found.tiles, found.tiles * (found.error / limit) ** 2)
    reason = (
        f"{found.tiles} tiles with light, as good as {found.independent_tiles:.0f} independent ones, tell the flat "
        f"field to {100 * found.error:.1f} %, but its unevenness seems to be {100 * found.unevenness:.1f} %: "
        f"about {math.ceil(needed)} tiles are needed"
    )
    return replace(found, left_out=reason)


def _means(xp: ModuleType, voxels: Array) -> Any:
    """Reduce voxels (z, y, x) to at most :data:`WORKING_SHAPE` by means over equal parts of each axis."""
    planes, rows, columns = (
        _area_means(xp, size, limit) for size, limit in zip(voxels.shape, WORKING_SHAPE, strict=True)
    )
    lateral = rows @ voxels @ columns.T
    return (planes @ lateral.reshape(len(lateral), -1)).reshape(-1, *lateral.shape[1:])


def _area_means(xp: ModuleType, size: int, limit: int) -> Any:
    """Return the matrix (pixels, size) of means over equal parts of an axis; the sum of each row is 1."""
    count = min(size, limit)
    edges = np.arange(count + 1) * size / count
    sample = np.arange(size)
    overlap = np.minimum(edges[1:, None], sample + 1) - np.maximum(edges[:-1, None], sample)
    return xp.asarray(np.maximum(overlap, 0) * count / size, np.float32)
