"""Which voxels of a mosaic were measured, and which ones focal correction filled.

In: the attribute in which a corrected mosaic records its corrections. Out: for each A-line the bounds of its measured
voxels; volumes whose filled voxels are overwritten by measured ones, in the memory of the input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.errors import MetadataError
from linumpy.geometry.focal import FocalCurvature, measured_planes

#: Key of the corrections in linumpy's attribute, beside ``tile_shape``: one entry for each, the oldest first.
ATTRIBUTE = "focal_corrections"


@dataclass(frozen=True, kw_only=True)
class MeasuredVoxels:
    """The measured voxels of a box: in each A-line the voxels from `first` to before `stop`.

    - `depth_axis`: axis of the box along depth.
    - `planes`: voxels of the box along depth.
    - `first`, `stop`: bounds in each A-line, counted from the first voxel of the box; they may lie outside of it.
    """

    depth_axis: int
    planes: int
    first: np.ndarray
    stop: np.ndarray

    @property
    def complete(self) -> bool:
        """Whether all voxels were measured."""
        return bool((self.first <= 0).all() and (self.stop >= self.planes).all())

    def mask(self, xp: ModuleType) -> Array:
        """Return a NumPy or CuPy array of bool of the box's shape, True for measured voxels."""
        first, stop = (xp.expand_dims(xp.asarray(bound), self.depth_axis) for bound in (self.first, self.stop))
        z = xp.arange(self.planes).reshape([-1 if axis == self.depth_axis else 1 for axis in range(3)])
        return (z >= first) & (z < stop)

    def count(self, xp: ModuleType) -> Array:
        """Return the number of measured voxels of each A-line, a NumPy or CuPy array of int64."""
        return xp.asarray(np.clip(self.stop, 0, self.planes) - np.clip(self.first, 0, self.planes))

    def repeat(self, voxels: Array) -> Array:
        """Overwrite the other voxels by the nearest measured voxel of the A-line, in place, and return `voxels`.

        An A-line without a measured voxel stays as it is.
        """
        first, stop = np.clip(self.first, 0, self.planes), np.clip(self.stop, 0, self.planes)
        lines, xp = array_module(voxels).moveaxis(voxels, self.depth_axis, 0), array_module(voxels)
        any_measured = first < stop
        top, end = (xp.asarray(np.where(any_measured, bound, 0)) for bound in (first, stop))
        for z in range(int(first[any_measured].max(initial=0))):
            lines[z] = xp.where(z < top, xp.take_along_axis(lines, top[None], 0)[0], lines[z])
        last = xp.maximum(end - 1, 0)
        for z in range(int(stop[any_measured].min(initial=self.planes)), self.planes):
            lines[z] = xp.where((z >= end) & (end > 0), xp.take_along_axis(lines, last[None], 0)[0], lines[z])
        return voxels


@dataclass(frozen=True)
class Correction:
    """A focal correction of a mosaic; see :func:`linumpy.geometry.focal.correct_focal_curvature`.

    - `interpolate`: whether A-lines were shifted by fractions of voxels.
    - `margin`: number of measured voxels next to filled ones that count as filled, because resampling mixed both.
    """

    curvature: FocalCurvature
    interpolate: bool
    margin: int = 0


def read_corrections(kept: Mapping[str, Any], lateral_names: str, name: str) -> tuple[Correction, ...]:
    """Read the corrections of a mosaic from linumpy's attribute.

    - `kept`: linumpy's attribute: :attr:`linumpy.io.ome.OmeZarrImage.linumpy`.
    - `lateral_names`: names of the lateral axes in their order.
    - `name`: name of the image, for errors.

    Raises `MetadataError`: the attribute does not have the form of :func:`corrections_attribute`.
    """
    v, u = tuple(lateral_names)
    corrections = []
    try:
        for entry in kept.get(ATTRIBUTE, []):
            tile, coefficients = entry["tile_shape"], entry["voxels"]
            sizes = int(tile[v]), int(tile[u])
            vv, vu, uu = (float(coefficients[key]) for key in (v + v, _mixed_key(v, u), u + u))
            if min(sizes) < 1 or not isinstance(entry["interpolate"], bool) or not np.isfinite((vv, vu, uu)).all():
                raise ValueError("no tile, or no curvature")
            curvature, margin = (
                FocalCurvature(tile_shape=sizes, vv=vv, vu=vu, uu=uu, rms=0.0, tiles=0),
                int(entry.get("margin", 0)),
            )
            corrections.append(Correction(curvature, entry["interpolate"], margin))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MetadataError(
            f"{name}: the attribute 'linumpy' has the {ATTRIBUTE} {kept[ATTRIBUTE]!r}, from which the filled voxels "
            "cannot be found: correct the mosaic again"
        ) from error
    return tuple(corrections)


def corrections_attribute(corrections: Sequence[Correction], lateral_names: str) -> dict[str, Any]:
    """Return the part of linumpy's attribute that records corrections; empty without corrections."""
    v, u = tuple(lateral_names)
    entries = [
        {
            "tile_shape": dict(zip((v, u), correction.curvature.tile_shape, strict=True)),
            "voxels": {
                v + v: correction.curvature.vv,
                _mixed_key(v, u): correction.curvature.vu,
                u + u: correction.curvature.uu,
            },
            "interpolate": correction.interpolate,
            "margin": correction.margin,
        }
        for correction in corrections
    ]
    return {ATTRIBUTE: entries} if entries else {}


def resampled_corrections(
    corrections: Sequence[Correction], depth_ratio: float, tile: tuple[int, int], new_tile: tuple[int, int]
) -> tuple[Correction, ...] | None:
    """Return the corrections of a mosaic whose tiles are resampled; None if a correction has another tile shape.

    - `corrections`: corrections of the mosaic before.
    - `depth_ratio`: voxels along depth after resampling, divided by those before.
    - `tile`, `new_tile` (int, int): voxels of a tile along the lateral axes, before and after resampling.
    """
    if any(tuple(correction.curvature.tile_shape) != tuple(tile) for correction in corrections):
        return None
    # Smoothing reaches two voxels of the coarser grid, and interpolation one voxel of the finer grid.
    reach = 2 + math.ceil(max(1.0, depth_ratio))
    return tuple(
        Correction(
            FocalCurvature(
                tile_shape=new_tile,
                vv=curvature.vv * depth_ratio,
                vu=curvature.vu * depth_ratio,
                uu=curvature.uu * depth_ratio,
                rms=0.0,
                tiles=0,
            ),
            True,
            math.ceil(correction.margin * depth_ratio) + reach,
        )
        for correction in corrections
        for curvature in [correction.curvature]
    )


def _mixed_key(v: str, u: str) -> str:
    """Return the key of the mixed coefficient, which does not depend on the order of the axes."""
    return min(v, u) + max(v, u)


def measured_of_box(
    corrections: Sequence[Correction],
    axes: str,
    finest_shape: Sequence[int],
    scale: Sequence[int],
    shape: Sequence[int],
    box: Sequence[slice],
) -> MeasuredVoxels:
    """Return the measured voxels of a box of one resolution; a coarser voxel is measured if all its finest voxels are.

    - `corrections`: As :func:`read_corrections` returns them; at least one.
    - `axes`: names of the three axes, z among them.
    - `finest_shape`, `shape`: shapes of the finest resolution, which was corrected, and of this resolution.
    - `scale`: voxels of the finest resolution in one voxel of this resolution, along each axis.
    """
    z = axes.index("z")
    lateral = [axis for axis in range(3) if axis != z]
    begin = box[lateral[0]].start * scale[lateral[0]], box[lateral[1]].start * scale[lateral[1]]
    end = [min(box[axis].stop * scale[axis], finest_shape[axis]) for axis in lateral]
    size = max(1, end[0] - begin[0]), max(1, end[1] - begin[1])
    within: tuple[np.ndarray, np.ndarray] | None = None
    for correction in corrections:
        within = measured_planes(
            correction.curvature, size, finest_shape[z], origin=begin, interpolate=correction.interpolate, within=within
        )
        if correction.margin:
            first, stop = within
            first = np.where(first > 0, np.minimum(first + correction.margin, finest_shape[z]), first)
            stop = np.where(stop < finest_shape[z], np.maximum(stop - correction.margin, 0), stop)
            within = first, np.maximum(stop, first)
    if within is None:
        raise ValueError("the mosaic has no corrections, so no voxels were filled")
    first, stop = within
    for number, axis in enumerate(lateral):
        if scale[axis] == 1:
            continue
        starts = np.arange(0, size[number], scale[axis])
        first, stop = np.maximum.reduceat(first, starts, number), np.minimum.reduceat(stop, starts, number)
    if scale[z] > 1:
        first, stop = -(-first // scale[z]), np.where(stop == finest_shape[z], shape[z], stop // scale[z])
    return MeasuredVoxels(
        depth_axis=z, planes=box[z].stop - box[z].start, first=first - box[z].start, stop=stop - box[z].start
    )
