"""Plan the grid to which an image is resampled: by a spacing, a matrix, another image's grid, or a coordinate system.

Two images are aligned in µm, unless a scene contains both or the caller names a coordinate system of both (NGFF 0.6).
Errors: ``ValueError`` and ``TypeError`` for parameters that do not fit together, :class:`~linumpy.errors.MetadataError`
for coordinate systems and axes that do not fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from linumpy.errors import MetadataError
from linumpy.io.carried import Carried, carried_from
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.ngff.coordinate_systems import INTRINSIC, Systems
from linumpy.io.ome import open_image
from linumpy.io.scenes import map_between, map_from_system
from linumpy.io.source import Source
from linumpy.io.volume import Chosen, Volumes, select_volumes
from linumpy.plan.grid.point_map import Affine, PointMap, affine, as_matrix, compose, outputs_of
from linumpy.plan.grid.regrid import Regrid, plan_regrid, without_rounding
from linumpy.write.new_image import described_axes


@dataclass(frozen=True)
class TargetGrid:
    """A grid for the output, and the defaults that follow from it.

    - `smoothed`: default for whether to smooth the source where the grid is coarser.
    - `mode`: default extension of the source beyond its edges.
    - `carried`: metadata of the image, or of the coordinate system, that the grid is taken from.
    - `axes`: names of the axes of space, in the order of the output; None if it is the order of the source.
    """

    regrid: Regrid
    smoothed: bool
    mode: str
    levels: int = 1
    carried: Carried | None = field(default=None)
    axes: str | None = None

    @property
    def scaled(self) -> tuple[tuple[float, ...], ...]:
        """The matrix from steps of one output voxel to steps in the source, in voxels, without fields of displacements.

        With a field of coordinates, of which no single step is known, the matrix is the identity.
        """
        regrid = self.regrid
        linear = np.eye(len(regrid.shape))
        for step in compose(regrid.warp, (affine(regrid.matrix, regrid.offset),)):
            if isinstance(step, Affine):
                linear = np.array(step.matrix)[:, :-1] @ linear
            elif not step.relative:
                return tuple(map(tuple, np.eye(len(regrid.shape)).tolist()))
        return tuple(map(tuple, linear.tolist()))


def plan_target_grid(
    volumes: Volumes,
    transform_or_spacing: ArrayLike | None,
    like: Source | Volumes | None,
    system: str | None,
    output_shape: Sequence[int] | None,
    *,
    spacing_given: bool,
) -> TargetGrid:
    """Plan the grid; parameters are those of :func:`linumpy.resample.resample_zarr.resample_zarr`."""
    if (transform_or_spacing is None) == (like is None):
        raise ValueError("pass a spacing in µm or a matrix, or like= an image whose grid the output takes")
    if system is not None and not isinstance(system, str):
        raise TypeError(f"coordinate_system={system!r}: pass the name of a coordinate system")
    if system is not None and spacing_given:
        raise ValueError(f"coordinate_system={system!r} is reached from the metadata's spacing: leave out spacing=")
    if like is not None:
        if output_shape is not None:
            raise ValueError(f"output_shape={output_shape!r}: the output has the shape of like=, leave out one of them")
        like_volumes = like if isinstance(like, Volumes) else select_volumes(open_image(like))
        return _plan_like(volumes, like_volumes, system, spacing_given)
    assert transform_or_spacing is not None
    if system is not None:
        return _plan_in_system(volumes, transform_or_spacing, system, output_shape)
    regrid = plan_regrid(transform_or_spacing, volumes.first.shape, volumes.spacing, volumes.origin, output_shape)
    is_spacing = np.ndim(transform_or_spacing) < 2
    return TargetGrid(regrid, is_spacing, "nearest" if is_spacing else "constant")


def _plan_like(volumes: Volumes, like: Volumes, system: str | None, spacing_given: bool) -> TargetGrid:
    """Plan the grid of another image, aligned in µm or by coordinate systems."""
    if sorted(like.axes) != sorted(volumes.axes):
        raise MetadataError(
            f"{like.name} has the axes of space {like.names}, and {volumes.name} {volumes.names}: "
            "like= needs an image with the same ones"
        )
    between: PointMap | None = None
    if like.chosen is not None and volumes.chosen is not None:
        # Without a transformation both images have the same coordinates, and are aligned in µm.
        between = map_between(like.chosen.image, volumes.chosen.image, system) or None
    elif system is not None:
        raise MetadataError(f"coordinate_system={system!r}: a single array has no coordinate systems")
    if between is None:
        old = np.array(volumes.spacing)
        same = np.array([[float(a == b) for b in like.axes] for a in volumes.axes])
        linear = same * np.array(like.spacing) / old[:, None]
        steps: PointMap = (affine(linear, (same @ np.array(like.origin) - np.array(volumes.origin)) / old),)
    else:
        if spacing_given:
            raise ValueError("coordinate systems are reached from the metadata's spacing: leave out spacing=")
        assert like.chosen is not None
        assert volumes.chosen is not None
        steps = compose(_from_voxels(like.chosen), between, _to_voxels(volumes.chosen, between))
    regrid = _regrid(steps, like.first.shape, like.spacing, like.origin)
    max_levels = (max(like.first.shape) - 1).bit_length() + 1
    levels = 1 if like.chosen is None else min(len(like.chosen.image.levels), max_levels)
    return TargetGrid(regrid, True, "constant", levels, carried_from(like), like.axes)


def _regrid(steps: PointMap, shape: tuple[int, ...], spacing: Sequence[float], origin: Sequence[float]) -> Regrid:
    """Describe a grid with a map from its voxels to voxels of the source: a matrix if possible, else a warp."""
    rank = len(shape)
    matrix = as_matrix(compose(steps), rank)
    if matrix is None:
        matrix, warp = np.eye(rank, rank + 1), compose(steps)
    else:
        warp = ()
    linear, offset = without_rounding(matrix[:, :-1], matrix[:, -1], shape)
    return Regrid(tuple(shape), linear, offset, tuple(map(float, spacing)), tuple(map(float, origin)), warp)


def _from_voxels(chosen: Chosen) -> PointMap:
    """Return the map from voxels along the axes of space to coordinates of an image along all axes."""
    image, level = chosen.image, chosen.level
    linear = np.zeros((len(image.axes), len(image.spatial_axes)))
    for column, axis in enumerate(image.spatial_axes):
        linear[axis, column] = image.scale[level][axis]
    order = list(image.system_order)
    return (affine(linear[order], np.array(image.translation[level])[order]),)


def _to_voxels(chosen: Chosen, between: PointMap) -> PointMap:
    """Return the map from coordinates of an image along all axes to voxels along the axes of space."""
    image, level = chosen.image, chosen.level
    arrays = list(image.spatial_axes)
    scale, shift = np.array(image.scale[level])[arrays], np.array(image.translation[level])[arrays]
    spatial = [image.system_order.index(axis) for axis in arrays]  # in the coordinate system
    for step in between:
        if isinstance(step, Affine) and step.inputs == step.outputs == len(image.axes):
            others = [axis for axis in range(len(image.axes)) if axis not in spatial]
            if np.array(step.matrix)[np.ix_(spatial, others)].any():
                raise MetadataError(f"{image.name}: a transformation computes coordinates of space from other axes")
    return (affine(np.eye(len(image.axes))[spatial] / scale[:, None], -shift / scale),)


def _plan_in_system(
    volumes: Volumes, spacing: ArrayLike, system: str, output_shape: Sequence[int] | None
) -> TargetGrid:
    """Plan a grid in a coordinate system, with a spacing in µm, that covers the source."""
    chosen = volumes.chosen
    if chosen is None:
        raise MetadataError(f"coordinate_system={system!r}: a single array has no coordinate systems")
    steps, axes = map_from_system(system, chosen.image)
    space = [number for number, axis in enumerate(axes) if axis.get("type") == "space"]
    names = "".join(str(axes[number].get("name")).lower() for number in space)
    units = [MICROMETERS.get(str(axes[number].get("unit"))) for number in space]
    if sorted(names) != sorted(volumes.axes) or None in units:
        listed = ", ".join(f"{axes[number].get('name')} ({axes[number].get('unit') or 'no unit'})" for number in space)
        raise MetadataError(
            f"{volumes.name}: the coordinate system {system!r} has the axes of space {listed}; "
            f"{volumes.names} with units of length are needed"
        )
    rank, factors = len(space), np.array(units, np.float64)
    inner = compose((affine(np.eye(len(axes))[:, space] / factors, np.zeros(len(axes))),), steps)
    if outputs_of(inner, rank) != len(chosen.image.axes):
        raise MetadataError(f"{volumes.name}: the coordinate system {system!r} does not lead to all axes of the image")
    matrix = as_matrix(compose(inner, _to_voxels(chosen, steps)), rank)
    if matrix is None or np.linalg.matrix_rank(matrix[:, :-1]) < rank:
        raise MetadataError(
            f"{volumes.name}: the transformation from {system!r} is not affine, so the extent there is unknown: pass "
            "like= an image in it"
        )
    edges = [(-0.5, n - 0.5) for n in volumes.first.shape]
    corners = np.linalg.solve(matrix[:, :-1], np.array(list(itertools.product(*edges))).T - matrix[:, -1:])
    low, high = corners.min(axis=1), corners.max(axis=1)
    # plan_regrid checks the spacing, and returns a number for each axis.
    planned = plan_regrid(spacing, (1,) * rank, (1.0,) * rank, (0.0,) * rank, (1,) * rank)
    steps_um: np.ndarray = np.array(planned.spacing)
    if np.ndim(spacing) > 1:
        raise ValueError(f"coordinate_system={system!r} needs a spacing in µm, and no matrix")
    if output_shape is None:
        shape = tuple(max(1, math.ceil(n - 1e-6)) for n in (high - low) / steps_um)
    else:
        shape = plan_regrid(1.0, (1,) * rank, (1.0,) * rank, (0.0,) * rank, output_shape).shape
    origin = low + steps_um / 2
    voxels = compose((affine(np.diag(steps_um), origin),), (affine(matrix[:, :-1], matrix[:, -1]),))
    space_axes = [axes[number] for number in space]
    carried = Carried(
        units={name: str(axis["unit"]) for name, axis in zip(names, space_axes, strict=True)},
        orientations={
            name: axis["orientation"]
            for name, axis in zip(names, space_axes, strict=True)
            if isinstance(axis.get("orientation"), Mapping)
        },
        systems=Systems(system, (), ()),
    )
    return TargetGrid(_regrid(voxels, shape, steps_um.tolist(), origin.tolist()), True, "constant", 1, carried, names)


def on_grid_of(carried: Carried, grid: TargetGrid) -> Carried:
    """Return a source's metadata with the units, orientations and systems of the image that the grid is taken from."""
    other = grid.carried
    if other is None:
        return carried
    changed = [name for name in ("orientations", "systems") if getattr(carried, name) != getattr(other, name)]
    return replace(carried.without(*changed), units=other.units, orientations=other.orientations, systems=other.systems)


def turned_systems(carried: Carried, volumes: Volumes, source: Volumes, regrid: Regrid) -> Carried:
    """Describe turned axes in NGFF 0.6: the new image gets a system of its own, with a transformation to the source's.

    `volumes` are those of the image, or of labels in it; `source` is the image, to whose voxels `regrid` maps.
    """
    systems = carried.systems or Systems(INTRINSIC, (), ())
    units = [carried.units.get(name, "micrometer") for name in volumes.axes]
    axes = described_axes(volumes.leading + volumes.axes, carried)
    # The map from coordinates of the output to coordinates of the source, in µm.
    source_spacing, new_spacing = np.array(source.spacing), np.array(regrid.spacing)
    linear = source_spacing[:, None] * np.array(regrid.matrix) / new_spacing
    shift = source_spacing * np.array(regrid.offset) + source.origin - linear @ np.array(regrid.origin)
    # The same in the units of the axes, and along all axes.
    factors, leading = np.array([MICROMETERS[unit] for unit in units]), len(volumes.leading)
    affine_rows = np.eye(len(axes), len(axes) + 1)
    affine_rows[leading:, leading:-1] = linear * factors / factors[:, None]
    affine_rows[leading:, -1] = shift / factors
    to_source = {"type": "affine", "affine": affine_rows.tolist()}
    used_names = {systems.intrinsic, *(str(system["name"]) for system in systems.others)}
    names = itertools.chain(["resampled"], (f"resampled {number}" for number in itertools.count(2)))
    name = next(name for name in names if name not in used_names)
    others = [
        {
            **{key: step[key] for key in ("output", "name") if key in step},
            "type": "sequence",
            "transformations": [to_source, {k: v for k, v in step.items() if k not in ("input", "output", "name")}],
        }
        for step in systems.transformations
    ]
    outgoing = [{**to_source, "output": {"name": systems.intrinsic}}, *others]
    source_system = {"name": systems.intrinsic, "axes": axes}
    transformations = tuple({**step, "input": {"name": name}} for step in outgoing)
    return replace(carried, systems=Systems(name, (source_system, *systems.others), transformations), orientations={})
