"""Which voxels of a mosaic were measured, and which focal correction filled.

In: the attribute by which a corrected mosaic records how it was corrected. Out: for each A-line the first voxel that
was measured and the first one after these; volumes without what lies outside of them. Arrays stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module
from linumpy.errors import MetadataError
from linumpy.geometry.focal import FocalCurvature, measured_planes

#: The attribute, beside ``tile_shape``: one entry for each correction, the first one first.
ATTRIBUTE = "focal_corrections"


@dataclass(frozen=True)
class MeasuredVoxels:
    """The measured voxels of a box: for each A-line those from `first` on and before `stop`.

    Attributes
    ----------
    depth_axis : int
        Axis of depth of the box.
    planes : int
        Its voxels along depth.
    first, stop : numpy.ndarray of int
        One for each A-line, along the lateral axes of the box, counted from the first voxel of the box.
    """

    depth_axis: int
    planes: int
    first: np.ndarray
    stop: np.ndarray

    @property
    def complete(self) -> bool:
        """Whether all voxels were measured."""
        return bool((self.first <= 0).all() and (self.stop >= self.planes).all())

    def mask(self, xp: Any) -> Any:
        """Return a bool array of the box's shape, true where a voxel was measured; of NumPy or CuPy."""
        first, stop = (xp.expand_dims(xp.asarray(one), self.depth_axis) for one in (self.first, self.stop))
        z = xp.arange(self.planes).reshape([-1 if axis == self.depth_axis else 1 for axis in range(3)])
        return (z >= first) & (z < stop)

    def count(self, xp: Any) -> Any:
        """Count the measured voxels of each A-line: int64, of NumPy or CuPy."""
        return xp.asarray(np.clip(self.stop, 0, self.planes) - np.clip(self.first, 0, self.planes))

    def repeat(self, voxels: Any) -> Any:
        """Overwrite the others by the nearest measured voxel of their A-line, in place; returns `voxels`."""
        first, stop = np.clip(self.first, 0, self.planes), np.clip(self.stop, 0, self.planes)
        lines, xp = array_module(voxels).moveaxis(voxels, self.depth_axis, 0), array_module(voxels)
        known = first < stop
        top, end = (xp.asarray(np.where(known, one, 0)) for one in (first, stop))
        for z in range(int(first[known].max(initial=0))):
            lines[z] = xp.where(z < top, xp.take_along_axis(lines, top[None], 0)[0], lines[z])
        last = xp.maximum(end - 1, 0)
        for z in range(int(stop[known].min(initial=self.planes)), self.planes):
            lines[z] = xp.where((z >= end) & (end > 0), xp.take_along_axis(lines, last[None], 0)[0], lines[z])
        return voxels


@dataclass(frozen=True)
class Correction:
    """How focal curvature was taken out of a mosaic; see :func:`linumpy.geometry.focal.correct_focal_curvature`.

    Attributes
    ----------
    curvature : FocalCurvature
        Of which tile and coefficients count.
    interpolate : bool
        Whether A-lines were shifted by fractions of voxels.
    margin : int
        Measured voxels next to those that were filled which count as filled too: resampling mixed both.
    """

    curvature: FocalCurvature
    interpolate: bool
    margin: int = 0


def recorded(kept: Mapping[str, Any], lateral_names: str, name: str) -> tuple[Correction, ...]:
    """Read how a mosaic was corrected from what linumpy keeps of it.

    Parameters
    ----------
    kept : mapping
        As :attr:`linumpy.io.ome.OmeZarrImage.linumpy`.
    lateral_names : str
        Names of the lateral axes in their order.
    name : str
        Of the image, for errors.

    Raises
    ------
    MetadataError
        The attribute is not one that :func:`record` makes.
    """
    v, u = tuple(lateral_names)
    found = []
    try:
        for one in kept.get(ATTRIBUTE, []):
            tile, form = one["tile_shape"], one["voxels"]
            sizes, (vv, vu, uu) = (int(tile[v]), int(tile[u])), (float(form[k]) for k in (v + v, _pair(v, u), u + u))
            if min(sizes) < 1 or not isinstance(one["interpolate"], bool) or not np.isfinite((vv, vu, uu)).all():
                raise ValueError("no tile, or no curvature")
            curvature, margin = FocalCurvature(sizes, vv, vu, uu, 0.0, 0), int(one.get("margin", 0))
            found.append(Correction(curvature, one["interpolate"], margin))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MetadataError(
            f"{name}: the attribute 'linumpy' has the {ATTRIBUTE} {kept[ATTRIBUTE]!r}, which does not say what was "
            "filled: correct the mosaic again"
        ) from error
    return tuple(found)


def record(corrections: Sequence[Correction], lateral_names: str) -> dict[str, Any]:
    """Return the attribute of a mosaic that was corrected so; nothing where it was not."""
    v, u = tuple(lateral_names)
    entries = [
        {
            "tile_shape": dict(zip((v, u), one.curvature.tile_shape, strict=True)),
            "voxels": {v + v: one.curvature.vv, _pair(v, u): one.curvature.vu, u + u: one.curvature.uu},
            "interpolate": one.interpolate,
            "margin": one.margin,
        }
        for one in corrections
    ]
    return {ATTRIBUTE: entries} if entries else {}


def resampled(
    corrections: Sequence[Correction], depth_ratio: float, tile: tuple[int, int], new_tile: tuple[int, int]
) -> tuple[Correction, ...] | None:
    """Say how a mosaic was corrected whose tiles were resampled; None where a correction had other tiles.

    Parameters
    ----------
    corrections : sequence of Correction
        Of the mosaic before.
    depth_ratio : float
        Voxels along depth after, for each one before.
    tile, new_tile : (int, int)
        Voxels of a tile along the lateral axes, before and after.
    """
    if any(tuple(one.curvature.tile_shape) != tuple(tile) for one in corrections):
        return None
    # Smoothing reaches two voxels of the coarser grid, interpolation one of the finer.
    reach = 2 + math.ceil(max(1.0, depth_ratio))
    return tuple(
        Correction(
            FocalCurvature(new_tile, f.vv * depth_ratio, f.vu * depth_ratio, f.uu * depth_ratio, 0.0, 0),
            True,
            math.ceil(one.margin * depth_ratio) + reach,
        )
        for one in corrections
        for f in [one.curvature]
    )


def _pair(v: str, u: str) -> str:
    return min(v, u) + max(v, u)


def measured_of_box(
    corrections: Sequence[Correction],
    axes: str,
    finest_shape: Sequence[int],
    scale: Sequence[int],
    shape: Sequence[int],
    box: Sequence[slice],
) -> MeasuredVoxels:
    """Say which voxels of a box of one resolution were measured; a coarse voxel is if all that it is made of were.

    Parameters
    ----------
    corrections
        As :func:`recorded` returns them.
    axes : str
        Names of the three axes, z among them.
    finest_shape, shape : sequence of int
        Voxels of the finest resolution, which was corrected, and of this one.
    scale : sequence of int
        Voxels of the finest resolution in one of this, along each axis.
    box : sequence of slice
        Of this resolution.
    """
    z = axes.index("z")
    lateral = [axis for axis in range(3) if axis != z]
    begin = box[lateral[0]].start * scale[lateral[0]], box[lateral[1]].start * scale[lateral[1]]
    end = [min(box[axis].stop * scale[axis], finest_shape[axis]) for axis in lateral]
    size = max(1, end[0] - begin[0]), max(1, end[1] - begin[1])
    within: tuple[np.ndarray, np.ndarray] | None = None
    for one in corrections:
        within = measured_planes(
            one.curvature, size, finest_shape[z], origin=begin, interpolate=one.interpolate, within=within
        )
        if one.margin:
            first, stop = within
            first = np.where(first > 0, np.minimum(first + one.margin, finest_shape[z]), first)
            stop = np.where(stop < finest_shape[z], np.maximum(stop - one.margin, 0), stop)
            within = first, np.maximum(stop, first)
    if within is None:
        raise ValueError("a mosaic that was not corrected has no voxels that were filled")
    first, stop = within
    for number, axis in enumerate(lateral):
        if scale[axis] == 1:
            continue
        starts = np.arange(0, size[number], scale[axis])
        first, stop = np.maximum.reduceat(first, starts, number), np.minimum.reduceat(stop, starts, number)
    if scale[z] > 1:
        first, stop = -(-first // scale[z]), np.where(stop == finest_shape[z], shape[z], stop // scale[z])
    return MeasuredVoxels(z, box[z].stop - box[z].start, first - box[z].start, stop - box[z].start)
