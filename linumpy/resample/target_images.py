"""The images that one call of ``resample_zarr`` fills: the target, and the labels in it.

In: the volumes of a source, the new grid, the metadata to keep. Out: a :class:`TargetImage` for each image; a
:class:`~linumpy.resample.resumable.Request` with everything that the images depend on; a function that makes the empty
images. Errors: ``ValueError`` for sizes that do not fit, :class:`~linumpy.errors.SourceError` for a source that changed
during the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr

from linumpy import __version__
from linumpy.errors import SourceError
from linumpy.io.carried import Carried
from linumpy.io.source import describe_source, local_store, name_on_disk
from linumpy.io.volume import Volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.point_map import Affine, Field, PointMap
from linumpy.plan.grid.regrid import Regrid
from linumpy.resample.blocks.plans import BlockPlan, Writing, plan_blocks
from linumpy.resample.identity import digest_of, identify_data, unknown_data
from linumpy.resample.resumable import Request
from linumpy.write.new_image import NewImage, create_labels_group, plan_image


@dataclass(frozen=True)
class TargetImage:
    """An image to fill: the target itself, or labels in it.

    - `folder`: path within the target; empty for the target itself.
    - `volumes`: the volumes of the source.
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
    def writing(self) -> Writing | None:
        """How linumpy encodes the chunks; None if the chunks are raw, or if only zarr-python can encode them."""
        encoding, image = self.image.encoding, self.image
        if encoding is None or not (encoding.compressor or encoding.checksum or image.shards):
            return None
        return Writing(encoding, image.chunk_nbytes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of shards, or else of chunks, along each axis of the image."""
        along = (-(-n // s) for n, s in zip(self.grid.output_shape, self.stored, strict=True))
        return (*self.volumes.leading_shape, *along)


def plan_target(image: TargetImage, kind: str, limit: int | None) -> BlockPlan:
    """Plan the blocks of an image; `kind` and `limit` as for :func:`linumpy.resample.blocks.plans.plan_blocks`."""
    return plan_blocks(image.grid, image.volumes.first, image.stored, kind, limit, image.writing)


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
    """Plan the image to which volumes are resampled; `options` are those of :func:`plan_image`.

    `axes` are the axes of space of the image; None for those of the volumes.
    """
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


def request_of(targets: Sequence[TargetImage], kind: str, cval: float) -> Request:
    """Return everything that the bytes of the target depend on; the bytes do not depend on the shape of blocks."""
    first, *labels = targets
    settings = {**_settings(first), "linumpy": __version__, "cval": float(cval), "device": kind}
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


def creator_of(targets: Sequence[TargetImage]) -> Callable[[Path], object]:
    """Return a function that takes a path and makes the empty images there."""

    def create(folder: Path) -> None:
        for target in targets:
            target.image.create(folder / target.folder)
            origin: dict[str, Any] = {
                "source": name_on_disk(target.volumes.first.array),
                "matrix": [list(row) for row in target.grid.matrix],
                "offset": list(target.grid.offset),
                "anti_aliasing_sigma": list(target.grid.sigmas) or [0.0] * target.grid.rank,
            }
            if target.grid.warp:
                origin["warp"] = _described(target.grid.warp)
            group = zarr.open_group(local_store(folder / target.folder, read_only=False), mode="r+")
            group.attrs["linumpy"] = {"resampled": origin}
        if names := [target.folder.removeprefix("labels/") for target in targets if target.folder]:
            create_labels_group(folder / "labels", names, targets[0].image.ngff_version)

    return create
