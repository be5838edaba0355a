"""Plan how the label images inside an image are resampled to the new grid of the image.

In: the selected volumes of an image, and its new grid, a :class:`~linumpy.plan.grid.regrid.Regrid`. Out: the volumes of
each label image, and the grid that maps voxels of the new image to the nearest voxels of the labels. Labels and image
are aligned in µm, so labels may be coarser than their image, or cover a part of the image. Errors:
:class:`~linumpy.errors.MetadataError` for labels that do not exist, cannot be resampled, or have no known position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import Placement, Spacing
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.volume import Chosen, Volumes, select_volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.regrid import Regrid, without_rounding

#: Values of the parameter `labels` of ``resample_zarr``.
LABELS = ("resample", "drop")

_ADVICE = "correct its metadata, or pass labels='drop'"


@dataclass(frozen=True)
class LabelImage:
    """A label image to resample.

    - `name`: name in the metadata of the group ``labels``.
    - `volumes`: the selected volumes: of the resolution that fits the image's, at the image's times and channels.
    - `grid`: the map from voxels of the new image to the nearest voxels of the labels.
    """

    name: str
    volumes: Volumes
    grid: AffineGrid


def plan_labels(
    volumes: Volumes, names: Sequence[str], regrid: Regrid, mode: str, spacing: Spacing | None
) -> list[LabelImage]:
    """Open the label images inside an image, and plan the map of each to the new grid of the image.

    - `volumes`: the selected volumes of the image.
    - `names`: names of the label images.
    - `regrid`: the new grid of the image.
    - `mode`: how the image is extended beyond its edges. Labels with the image's grid are extended by the same mode;
      other labels are 0 there.
    - `spacing`: voxel spacing in µm that replaces the spacing in the metadata of the image, and of labels of the same
      shape.
    """
    return [_plan(volumes, name, regrid, mode, spacing) for name in names]


def _plan(volumes: Volumes, name: str, regrid: Regrid, mode: str, spacing: Spacing | None) -> LabelImage:
    chosen = volumes.chosen
    assert chosen is not None  # a single array has no labels
    labels = _select_for_image(_open(chosen.image, name, spacing), chosen, volumes)
    if labels.axes != volumes.axes:
        raise MetadataError(
            f"the labels {name!r} of {volumes.name} have the axes of space {labels.names}, and the image has "
            f"{volumes.names}: {_ADVICE}"
        )
    if labels.first.dtype.kind not in "biuf" or labels.first.dtype.itemsize > 8:
        raise MetadataError(
            f"the labels {name!r} of {volumes.name} are of {labels.first.dtype}, which is not resampled: {_ADVICE}"
        )
    matrix, offset = _map_to_labels(volumes, labels, regrid)
    has_same_grid = labels.first.shape == volumes.first.shape and (matrix, offset) == (regrid.matrix, regrid.offset)
    labels_mode = mode if has_same_grid else "grid-constant"
    grid = AffineGrid(labels.first.shape, regrid.shape, matrix, offset, 0, labels_mode, (), regrid.warp)
    return LabelImage(name, labels, grid)


def _open(image: OmeZarrImage, name: str, spacing: Spacing | None) -> OmeZarrImage:
    """Open a label image. Labels without a known position get the image's position if they have the image's shape."""
    if {"", ".", ".."} & set(name.split("/")):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which is no path inside it: {_ADVICE}")
    group = open_member(image.group, f"labels/{name}")
    if not isinstance(group, zarr.Group):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which do not exist: {_ADVICE}")
    try:
        label_image = open_image(group, spacing=spacing)
        _ = label_image.spacing  # raises an error if the spacing is unknown
    except SourceError as error:
        raise MetadataError(f"the labels {name!r} of {image.name} cannot be read ({error}): {_ADVICE}") from error
    except (MetadataError, ValueError) as error:
        return _aligned_with_image(image, group, name, error)
    if spacing is not None and _shape_in_space(label_image) != _shape_in_space(image):
        raise MetadataError(
            f"spacing={spacing!r} is for {image.name}, and not for its labels {name!r}, which have "
            f"another shape: {_ADVICE}"
        )
    return label_image


def _aligned_with_image(image: OmeZarrImage, group: zarr.Group, name: str, error: Exception) -> OmeZarrImage:
    """Open labels without a known position at the position of the image; raise an error if the shapes differ."""
    try:
        label_image = open_image(group, spacing=image.spacing[0])
    except (MetadataError, ValueError):
        label_image = None
    if label_image is None or _shape_in_space(label_image) != _shape_in_space(image):
        raise MetadataError(
            f"the position of the labels {name!r} of {image.name} is unknown ({error}): {_ADVICE}"
        ) from error
    origin = np.array(label_image.origin) - label_image.origin[0] + image.origin[0]
    placements = map(Placement, label_image.spacing, map(tuple, origin.tolist()))
    return replace(label_image, placements=tuple(placements))


def _shape_in_space(image: OmeZarrImage) -> tuple[int, ...]:
    """Return the shape of the finest resolution along the axes of space."""
    return tuple(image.levels[0].shape[axis] for axis in image.spatial_axes)


def _select_for_image(labels: OmeZarrImage, chosen: Chosen, volumes: Volumes) -> Volumes:
    """Select the volumes of labels at the image's times and channels.

    The resolution is the coarsest that is not coarser than the image's, or the finest if all are coarser.
    """
    fine_levels = [
        number
        for number, steps in enumerate(labels.spacing)
        if all(a <= b * (1 + 1e-6) for a, b in zip(steps, volumes.spacing, strict=False))
    ]
    level = max(fine_levels, default=0)
    label_volumes, image = select_volumes(labels, level), select_volumes(chosen.image, chosen.level)
    label_counts, image_counts = (
        dict(zip(each.leading, each.leading_shape, strict=True)) for each in (label_volumes, image)
    )
    entries = {}
    for axis, kind, entry in (("t", "time", chosen.time), ("c", "channel", chosen.channel)):
        if entry is not None and axis in label_counts:
            if label_counts[axis] != image_counts.get(axis, 1):
                raise MetadataError(
                    f"{kind}={entry} is chosen of {image_counts.get(axis, 1)} of {volumes.name}, and the labels "
                    f"{labels.name} have {label_counts[axis]}: {_ADVICE}"
                )
            entries[kind] = entry
    return select_volumes(labels, level, **entries)


def _map_to_labels(
    volumes: Volumes, labels: Volumes, regrid: Regrid
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Compute matrix and offset from voxels of the new image to voxels of the labels, through source voxels and µm."""
    if np.allclose(labels.spacing, volumes.spacing, rtol=1e-9, atol=0) and np.allclose(
        labels.origin, volumes.origin, rtol=0, atol=1e-6 * min(volumes.spacing)
    ):
        return regrid.matrix, regrid.offset
    image_spacing, labels_spacing = np.array(volumes.spacing), np.array(labels.spacing)
    matrix = (image_spacing / labels_spacing)[:, None] * np.array(regrid.matrix)
    shift = np.array(volumes.origin) - np.array(labels.origin)
    offset = (shift + image_spacing * np.array(regrid.offset)) / labels_spacing
    return without_rounding(matrix, offset, regrid.shape)
