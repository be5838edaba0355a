"""The images that one call of ``resample_zarr`` fills: the target, and the labels in it.

Labels and image are aligned in µm, so labels may be coarser than their image, or cover a part of it. Errors:
:class:`~linumpy.errors.SourceError` for a source that changed during the run, :class:`~linumpy.errors.MetadataError`
for labels that do not exist, cannot be resampled, or have no known position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import DeviceName
from linumpy.errors import MetadataError, SourceError
from linumpy.io.carried import Carried
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import Placement, Spacing
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.output.objects import Target, writable_store
from linumpy.io.source import describe_source, name_on_disk
from linumpy.io.volume import Chosen, Volumes, select_volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.point_map import Affine, Field, PointMap
from linumpy.plan.grid.regrid import Regrid, without_rounding
from linumpy.resample.blocks.pipeline import BlockJob
from linumpy.resample.blocks.plans import plan_blocks
from linumpy.resample.identity import digest_of, identify_data, unknown_data
from linumpy.resample.resumable import Request
from linumpy.version import __version__
from linumpy.write.new_image import NewImage, create_labels_group, plan_image

#: Values of the parameter `labels` of ``resample_zarr``.
LABELS = ("resample", "drop")

_ADVICE = "correct its metadata, or pass labels='drop'"


def plan_labels(
    volumes: Volumes, name: str, regrid: Regrid, mode: str, spacing: Spacing | None
) -> tuple[Volumes, AffineGrid]:
    """Open a label image inside an image; return its volumes, and the map from voxels of the new grid to the nearest.

    - `mode`: how the image is extended beyond its edges. Labels with the image's grid are extended by the same mode;
      other labels are 0 there.
    - `spacing`: voxel spacing in µm that replaces that of the image, and of labels of the same shape.
    """
    chosen = volumes.chosen
    assert chosen is not None  # a single array has no labels
    labels = _select_for_image(_open_labels(chosen.image, name, spacing), chosen, volumes)
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
    return labels, AffineGrid(labels.first.shape, regrid.shape, matrix, offset, 0, labels_mode, (), regrid.warp)


def _open_labels(image: OmeZarrImage, name: str, spacing: Spacing | None) -> OmeZarrImage:
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


@dataclass(frozen=True)
class TargetImage:
    """An image to fill: the target itself, or labels in it.

    - `folder`: path within the target; empty for the target itself.
    - `grid`: the map from voxels of the image to voxels of the source.
    - `carried`: metadata that the image takes from the source.
    """

    folder: str
    volumes: Volumes
    grid: AffineGrid
    carried: Carried
    image: NewImage

    @property
    def voxels_nbytes(self) -> int:
        """Bytes of the voxels of the finest resolution, of all times and channels."""
        return self.image.dtype.itemsize * math.prod(self.image.shapes[0])

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of a shard, or else of a chunk, along the axes of space."""
        return self.image.stored[0][len(self.volumes.leading) :]

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of shards, or else of chunks, along each axis of the image."""
        along = (-(-n // s) for n, s in zip(self.grid.output_shape, self.stored, strict=True))
        return (*self.volumes.leading_shape, *along)


def plan_target(
    image: TargetImage, device: DeviceName, memory_bytes: int | None, *, may_cache: bool = True
) -> BlockJob:
    """Plan the blocks of an image by :func:`linumpy.resample.blocks.plans.plan_blocks`."""
    new, encoding = image.image, image.image.encoding
    if encoding is not None and not (encoding.compressor or encoding.checksum or new.shards):
        encoding = None  # raw chunks need no memory to encode in
    return plan_blocks(
        image.grid, image.volumes.first, image.stored, device, memory_bytes, encoding, new.chunk_nbytes,
        may_cache=may_cache,
    )  # fmt: skip


def plan_target_image(
    volumes: Volumes,
    regrid: Regrid,
    axes: str | None,
    carried: Carried,
    *,
    name: str,
    chunks: Sequence[int] | None,
    shards: Sequence[int] | None,
    **options: Any,
) -> NewImage:
    """Plan the image to which volumes are resampled, by :func:`plan_image`, which takes the `options`."""
    rank, leading = volumes.first.ndim, len(volumes.leading)
    return plan_image(
        volumes.leading_shape + regrid.shape,
        volumes.first.dtype.newbyteorder("="),
        regrid.spacing,
        name=carried.name or name,
        axes=volumes.leading + (axes or volumes.axes),
        chunks=_with_leading("chunks", chunks, rank, leading),
        shards=_with_leading("shards", shards, rank, leading),
        origin=regrid.origin,
        carried=carried,
        **options,
    )


def _with_leading(label: str, sizes: Sequence[int] | None, rank: int, leading: int) -> Sequence[int] | None:
    """Prepend ones to sizes along the axes of space: a chunk has one time and one channel."""
    if sizes is None or not leading:
        return sizes
    if len(sizes) != rank:
        raise ValueError(f"{label}={tuple(sizes)}: pass {rank} sizes, along the axes of space")
    return (*(1,) * leading, *sizes)


def request_of(targets: Sequence[TargetImage], device: DeviceName, cval: float) -> Request:
    """Return everything that the bytes of the target depend on; the bytes do not depend on the shape of blocks."""
    first, *labels = targets
    settings = {**_settings(first), "linumpy": __version__, "cval": float(cval), "device": device}
    settings |= {label.folder: digest_of(_settings(label)) for label in labels}
    named = tuple((key, str(value)) for key, value in settings.items())
    # If the source data cannot be identified, a stopped run is never continued.
    origin = [(_data_name(target), _data(target) or unknown_data()) for target in targets]
    return Request("resample_zarr", first.counts, named, tuple(origin), tuple(label.counts for label in labels))


def _settings(target: TargetImage) -> dict[str, object]:
    """Return everything that the bytes of one image depend on."""
    array, grid, image = target.volumes.first.array, target.grid, target.image
    return {
        "source": name_on_disk(array),
        "source metadata": digest_of(array.metadata.to_dict()),
        "source shape": grid.source_shape,
        "source volumes": [volume.index for volume in target.volumes.volumes.values()],
        "dtype": image.dtype.str,
        "transform": (grid.matrix, grid.offset),
        "warp": digest_of(_described(grid.warp)),
        "order": grid.order,
        "mode": grid.mode,
        "anti_aliasing": grid.sigmas if grid.smooths else None,
        "output shapes": image.shapes,
        "chunks": image.chunks,
        "shards": image.shards,
        "compressors": image.compressors,
        "metadata": digest_of(image.metadata),
    }


def _data_name(target: TargetImage) -> str:
    """Return the name of a source's data in the request and in messages."""
    return f"data of {target.folder}" if target.folder else "source data"


def _data(target: TargetImage) -> str | None:
    """Return digests of the source's data and of the fields of vectors; None if one of them cannot be identified."""
    arrays = [target.volumes.first.array, *(step.array for step in target.grid.warp if isinstance(step, Field))]
    digests = [identify_data(array) for array in arrays]
    return None if None in digests else " ".join(map(str, digests))


def _described(warp: PointMap) -> list[dict[str, object]]:
    """Describe a map in JSON values, for the metadata."""
    return [
        {"matrix": [list(row) for row in step.matrix]}
        if isinstance(step, Affine)
        else {key: getattr(step, key) for key in ("scale", "translation", "relative", "order", "first")}
        | {"field": name_on_disk(step.array)}
        for step in warp
    ]


def check_unchanged(targets: Sequence[TargetImage], request: Request) -> None:
    """Raise an error if a source has changed since the run began: the result may mix two versions of the source."""
    earlier = dict(request.origin)
    for target in targets:
        data = _data(target)
        if data is not None and data != earlier[_data_name(target)]:
            raise SourceError(
                f"{describe_source(target.volumes.first.array)} was changed while it was resampled, so that the result "
                "may mix two versions of it and is not kept: run again once it is complete"
            )


def creator_of(targets: Sequence[TargetImage]) -> Callable[[Target], object]:
    """Return a function that makes the empty images in the folder, or at the URL, that it is given."""
    names = [target.folder.removeprefix("labels/") for target in targets if target.folder]

    def create(folder: Target) -> None:
        for target in targets:
            target.image.create(folder / target.folder)
            if target is targets[0] and names:  # before the labels: zarr makes the groups above a new group, too
                create_labels_group(folder / "labels", names, target.image.ngff_version)
            origin: dict[str, Any] = {
                "source": name_on_disk(target.volumes.first.array),
                "matrix": [list(row) for row in target.grid.matrix],
                "offset": list(target.grid.offset),
                "anti_aliasing_sigma": list(target.grid.sigmas) or [0.0] * target.grid.rank,
            }
            if target.grid.warp:
                origin["warp"] = _described(target.grid.warp)
            group = zarr.open_group(writable_store(folder / target.folder), mode="r+")
            group.attrs["linumpy"] = {"resampled": origin}

    return create
