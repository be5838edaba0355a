"""The label images of an image, on the new grid of the image.

In: the selected volumes of an image, and its :class:`~linumpy.plan.grid.regrid.Regrid`. Out: for each label image
inside it its volumes, and the grid that maps voxels of the new image to the nearest voxels of the labels. Both are
aligned in µm, so labels may be coarser than their image, or cover a part of it. Errors:
:class:`~linumpy.errors.MetadataError` for labels without a known position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.ngff.axes import Placement, Spacing
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.volume import Chosen, Volumes, select_volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.regrid import Regrid

#: Choices for the labels inside an image.
LABELS = ("resample", "drop")

_ADVICE = "correct its metadata, or pass labels='drop'"


@dataclass(frozen=True)
class LabelPart:
    """A label image, and its map onto the new grid.

    Attributes
    ----------
    name : str
        Name in the list of the group of labels.
    volumes : Volumes
        Its selected volumes: of the resolution that fits the image's, at the image's times and channels.
    grid : AffineGrid
        From voxels of the new image to those of the labels, by the nearest one.
    """

    name: str
    volumes: Volumes
    grid: AffineGrid


def plan_labels(
    volumes: Volumes, names: Sequence[str], regrid: Regrid, mode: str, spacing: Spacing | None
) -> list[LabelPart]:
    """Open the labels of an image, and map them onto its new grid.

    Parameters
    ----------
    volumes : Volumes
        The selected volumes of the image.
    names : sequence of str
        Names of its label images.
    regrid : Regrid
        The new grid of the image.
    mode : str
        How the image is extended beyond its edges; labels with the image's grid are extended alike, others by 0.
    spacing : sequence of float, or mapping of axis names to float, or None
        Voxel spacing in µm that replaces the one in the metadata of the image, and of labels of the same shape.

    Raises
    ------
    MetadataError
        Labels that do not exist, have other axes of space, or no known position.
    """
    return [_plan(volumes, name, regrid, mode, spacing) for name in names]


def _plan(volumes: Volumes, name: str, regrid: Regrid, mode: str, spacing: Spacing | None) -> LabelPart:
    chosen = volumes.chosen
    assert chosen is not None  # a single array has no labels
    labels = _on_image(_open(chosen.image, name, spacing), chosen, volumes)
    if labels.axes != volumes.axes:
        raise MetadataError(
            f"the labels {name!r} of {volumes.name} have the axes of space {', '.join(labels.axes)}, and the image has "
            f"{', '.join(volumes.axes)}: {_ADVICE}"
        )
    if labels.first.dtype.kind not in "biuf" or labels.first.dtype.itemsize > 8:
        raise MetadataError(
            f"the labels {name!r} of {volumes.name} are of {labels.first.dtype}, which is not resampled: {_ADVICE}"
        )
    matrix, offset = _between(volumes, labels, regrid)
    same = labels.first.shape == volumes.first.shape and (matrix, offset) == (regrid.matrix, regrid.offset)
    labels_mode = mode if same else "grid-constant"
    grid = AffineGrid(labels.first.shape, regrid.shape, matrix, offset, 0, labels_mode, (), regrid.warp)
    return LabelPart(name, labels, grid)


def _open(image: OmeZarrImage, name: str, spacing: Spacing | None) -> OmeZarrImage:
    """Open a label image; if it has no position but the image's shape, it gets the image's position."""
    if {"", ".", ".."} & set(name.split("/")):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which is no path inside it: {_ADVICE}")
    try:
        group = image.group[f"labels/{name}"]
    except KeyError:
        group = None
    if not isinstance(group, zarr.Group):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which do not exist: {_ADVICE}")
    try:
        label_image = open_image(group, spacing=spacing)
        _ = label_image.spacing  # raises an error if the spacing is unknown
    except SourceError as error:
        raise MetadataError(f"the labels {name!r} of {image.name} cannot be read ({error}): {_ADVICE}") from error
    except (MetadataError, ValueError) as error:
        return _aligned_with_image(image, group, name, error)
    if spacing is not None and _space(label_image) != _space(image):
        raise MetadataError(
            f"spacing={spacing!r} is for {image.name}, and not for its labels {name!r}, which have "
            f"another shape: {_ADVICE}"
        )
    return label_image


def _aligned_with_image(image: OmeZarrImage, group: zarr.Group, name: str, error: Exception) -> OmeZarrImage:
    """Open labels without a position at the position of the image, if both have the same shape."""
    try:
        label_image = open_image(group, spacing=image.spacing[0])
    except (MetadataError, ValueError):
        label_image = None
    if label_image is None or _space(label_image) != _space(image):
        raise MetadataError(
            f"the position of the labels {name!r} of {image.name} is unknown ({error}): {_ADVICE}"
        ) from error
    origin = np.array(label_image.origin) - label_image.origin[0] + image.origin[0]
    placements = map(Placement, label_image.spacing, map(tuple, origin.tolist()))
    return replace(label_image, placements=tuple(placements))


def _space(image: OmeZarrImage) -> tuple[int, ...]:
    return tuple(image.levels[0].shape[axis] for axis in image.spatial_axes)


def _on_image(labels: OmeZarrImage, chosen: Chosen, volumes: Volumes) -> Volumes:
    """Select the image's times and channels of the labels' coarsest resolution that is not coarser than the image's."""
    fine = [
        number
        for number, steps in enumerate(labels.spacing)
        if all(a <= b * (1 + 1e-6) for a, b in zip(steps, volumes.spacing, strict=False))
    ]
    level = max(fine, default=0)
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


def _between(
    volumes: Volumes, labels: Volumes, regrid: Regrid
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Map voxels of the new image to those of its labels, through voxels of the old image and µm."""
    if np.allclose(labels.spacing, volumes.spacing, rtol=1e-9, atol=0) and np.allclose(
        labels.origin, volumes.origin, rtol=0, atol=1e-6 * min(volumes.spacing)
    ):
        return regrid.matrix, regrid.offset
    old, new = np.array(volumes.spacing), np.array(labels.spacing)
    matrix = (old / new)[:, None] * np.array(regrid.matrix)
    offset = (np.array(volumes.origin) - np.array(labels.origin) + old * np.array(regrid.offset)) / new
    # Labels of twice the resolution have edges at voxel centres: rounding errors must not choose between two labels.
    return tuple(map(tuple, matrix.round(12).tolist())), tuple(offset.round(9).tolist())
