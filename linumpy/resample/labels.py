"""The labels of an image, on the new grid of the image.

In: the volumes that are taken of an image, and its :class:`~linumpy.plan.grid.regrid.Regrid`. Out: for each label
image inside of it its volumes, and the grid that takes its nearest voxels to those of the new image. The two meet in
µm, so labels may be coarser than their image, or a part of it. Errors: :class:`~linumpy.errors.MetadataError` for
labels of which the place is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.volume import Chosen, Volumes, select_volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.regrid import Regrid

#: What can be done with the labels inside of an image.
LABELS = ("resample", "drop")

_ADVICE = "mend its metadata, or leave labels out by labels='drop'"


@dataclass(frozen=True)
class LabelPart:
    """A label image, and how it gets onto the new grid.

    Attributes
    ----------
    name : str
        As the group of labels lists it.
    volumes : Volumes
        What is taken of it: the resolution that fits the image's, and its times and channels.
    grid : AffineGrid
        From voxels of the new image to those of the labels, by the nearest one.
    """

    name: str
    volumes: Volumes
    grid: AffineGrid


def plan_labels(
    volumes: Volumes, names: Sequence[str], regrid: Regrid, mode: str, spacing: Sequence[float] | None
) -> list[LabelPart]:
    """Open the labels of an image, and place them on its new grid.

    Parameters
    ----------
    volumes : Volumes
        What is taken of the image.
    names : sequence of str
        Of its label images.
    regrid : Regrid
        The new grid of the image.
    mode : str
        How the image is continued beyond its edges; labels of the same extent are continued alike, others by 0.
    spacing : sequence of float or None
        Voxel spacing in µm that replaces that of the image's metadata, and that of labels of the same shape.

    Raises
    ------
    MetadataError
        Labels that are not there, have other axes of space, or do not say where they lie.
    """
    return [_plan(volumes, name, regrid, mode, spacing) for name in names]


def _plan(volumes: Volumes, name: str, regrid: Regrid, mode: str, spacing: Sequence[float] | None) -> LabelPart:
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
    beyond = mode if same else "grid-constant"
    return LabelPart(name, labels, AffineGrid(labels.first.shape, regrid.shape, matrix, offset, 0, beyond, ()))


def _open(image: OmeZarrImage, name: str, spacing: Sequence[float] | None) -> OmeZarrImage:
    """Open a label image; one of the image's shape has the image's place where it does not say its own."""
    if {"", ".", ".."} & set(name.split("/")):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which is no path inside of it: {_ADVICE}")
    try:
        group = image.group[f"labels/{name}"]
    except KeyError:
        group = None
    if not isinstance(group, zarr.Group):
        raise MetadataError(f"{image.name} lists the labels {name!r}, which are not there: {_ADVICE}")
    try:
        found = open_image(group, spacing=spacing)
    except SourceError as error:
        raise MetadataError(f"the labels {name!r} of {image.name} cannot be read ({error}): {_ADVICE}") from error
    except (MetadataError, ValueError) as error:
        return _where_the_image_is(image, group, name, error)
    if spacing is not None and _space(found) != _space(image):
        raise MetadataError(
            f"source_spacing={tuple(spacing)} is that of {image.name}, and not of its labels {name!r}, which have "
            f"another shape: {_ADVICE}"
        )
    return found


def _where_the_image_is(image: OmeZarrImage, group: zarr.Group, name: str, error: Exception) -> OmeZarrImage:
    """Open labels that do not say where they lie, if they have as many voxels as the image."""
    try:
        found = open_image(group, spacing=image.spacing[0])
    except (MetadataError, ValueError):
        found = None
    if found is None or _space(found) != _space(image):
        raise MetadataError(
            f"where the labels {name!r} of {image.name} lie is not known ({error}): {_ADVICE}"
        ) from error
    origin = np.array(found.origin) - found.origin[0] + image.origin[0]
    return replace(found, origin=tuple(map(tuple, origin.tolist())))


def _space(image: OmeZarrImage) -> tuple[int, ...]:
    return tuple(image.levels[0].shape[axis] for axis in image.spatial_axes)


def _on_image(labels: OmeZarrImage, chosen: Chosen, volumes: Volumes) -> Volumes:
    """Take of labels the coarsest resolution that is no coarser than the image's, and its times and channels."""
    fine = [
        number
        for number, steps in enumerate(labels.spacing)
        if all(a <= b * (1 + 1e-6) for a, b in zip(steps, volumes.spacing, strict=False))
    ]
    level = max(fine, default=0)
    every, image = select_volumes(labels, level), select_volumes(chosen.image, chosen.level)
    mine, theirs = (dict(zip(one.leading, one.leading_shape, strict=True)) for one in (every, image))
    entries = {}
    for axis, kind, entry in (("t", "time", chosen.time), ("c", "channel", chosen.channel)):
        if entry is not None and axis in mine:
            if mine[axis] != theirs.get(axis, 1):
                raise MetadataError(
                    f"{kind}={entry} is chosen of {theirs.get(axis, 1)} of {volumes.name}, and the labels "
                    f"{labels.name} have {mine[axis]}: {_ADVICE}"
                )
            entries[kind] = entry
    return select_volumes(labels, level, **entries)


def _between(
    volumes: Volumes, labels: Volumes, regrid: Regrid
) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Map voxels of the new image to those of its labels: by way of the old image, and of µm."""
    if np.allclose(labels.spacing, volumes.spacing, rtol=1e-9, atol=0) and np.allclose(
        labels.origin, volumes.origin, rtol=0, atol=1e-6 * min(volumes.spacing)
    ):
        return regrid.matrix, regrid.offset
    old, new = np.array(volumes.spacing), np.array(labels.spacing)
    matrix = (old / new)[:, None] * np.array(regrid.matrix)
    offset = (np.array(volumes.origin) - np.array(labels.origin) + old * np.array(regrid.offset)) / new
    # Labels of twice the resolution have edges at centres of voxels: rounding must not choose between two of them.
    return tuple(map(tuple, matrix.round(12).tolist())), tuple(offset.round(9).tolist())
