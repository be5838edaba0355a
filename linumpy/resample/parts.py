"""The images that one call of ``resample_zarr`` fills: the target, and labels in it.

In: volumes of a source, the new grid, their metadata. Out: a :class:`TargetImage` for each image; a
:class:`~linumpy.resample.resumable.Request` with everything that they depend on; a function that makes them, empty.
Errors: ``ValueError`` for sizes that do not fit, :class:`~linumpy.errors.SourceError` for data that changed meanwhile.
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
from linumpy.write.new_image import NewImage, list_labels, plan_image


@dataclass(frozen=True)
class TargetImage:
    """An image to fill: the target itself, or labels in it.

    Attributes
    ----------
    folder : str
        Path within the target; empty for the target itself.
    volumes : Volumes
        The volumes of its source.
    grid : AffineGrid
        The map from its voxels to the source's.
    carried : Carried
        Metadata that it takes from the source.
    image : NewImage
        The image to make.
    downsampling : str
        Method of its coarser resolutions.
    """

    folder: str
    volumes: Volumes
    grid: AffineGrid
    carried: Carried
    image: NewImage
    downsampling: str

    @property
    def voxels_nbytes(self) -> int:
        """Bytes of the voxels of the finest resolution."""
        return self.image.dtype.itemsize * math.prod(self.image.shapes[0])

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of a shard, or else of a chunk, along the axes of space."""
        return self.image.stored[0][len(self.volumes.leading) :]

    @property
    def writing(self) -> Writing | None:
        """How its chunks are encoded; None if they are raw, or if only zarr-python can encode them."""
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
    """Choose the blocks of an image; parameters are those of :func:`linumpy.resample.blocks.plans.plan_blocks`."""
    return plan_blocks(image.grid, image.volumes.first, image.stored, kind, limit, image.writing)


def plan_part_image(
    volumes: Volumes,
    regrid: Regrid,
    carried: Carried,
    *,
    name: str,
    chunks: Sequence[int] | None,
    shards: Sequence[int] | None,
    **options: Any,
) -> NewImage:
    """Plan the image that resampling volumes makes; `options` are those of :func:`plan_image`."""
    rank, leading = volumes.first.ndim, len(volumes.leading)
    return plan_image(
        volumes.leading_shape + regrid.shape,
        volumes.first.dtype.newbyteorder("="),
        regrid.spacing,
        name=carried.name or name,
        axes=volumes.leading + volumes.axes,
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


def request_of(parts: Sequence[TargetImage], kind: str, cval: float) -> Request:
    """Return everything that the bytes of the target depend on; the shape of blocks is no part of it."""
    first, *labels = parts
    settings = {**_settings(first), "linumpy": __version__, "cval": float(cval), "device": kind}
    settings |= {label.folder: digest_of(_settings(label)) for label in labels}
    named = tuple((key, str(value)) for key, value in settings.items())
    # A stopped run whose data cannot be identified is never continued.
    origin = [(_data_name(part), _data(part) or unknown_data()) for part in parts]
    return Request("resample_zarr", first.counts, named, tuple(origin), tuple(label.counts for label in labels))


def _settings(part: TargetImage) -> dict[str, object]:
    """Return everything that the bytes of one image depend on."""
    array, grid, image = part.volumes.first.array, part.grid, part.image
    return {
        "source": name_on_disk(array),
        "source metadata": digest_of(array.metadata.to_dict()),
        "source shape": grid.source_shape,
        "source volumes": [volume.index for volume in part.volumes.volumes.values()],
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


def _data_name(part: TargetImage) -> str:
    return f"data of {part.folder}" if part.folder else "source data"


def _data(part: TargetImage) -> str | None:
    """Return a digest of the data of an image's source, and of the fields of vectors that map to it."""
    arrays = [part.volumes.first.array, *(step.array for step in part.grid.warp if isinstance(step, Field))]
    digests = [identify_data(array) for array in arrays]
    return None if None in digests else " ".join(map(str, digests))


def _described(warp: PointMap) -> list[dict[str, object]]:
    """Describe a map, for the metadata, by values of JSON."""
    return [
        {"matrix": [list(row) for row in step.matrix]}
        if isinstance(step, Affine)
        else {key: getattr(step, key) for key in ("scale", "translation", "relative", "order", "first")}
        | {"field": name_on_disk(step.array)}
        for step in warp
    ]


def check_unchanged(parts: Sequence[TargetImage], request: Request) -> None:
    """Raise an error if a source has changed since the run began: the result may mix two versions of it."""
    earlier = dict(request.origin)
    for part in parts:
        data = _data(part)
        if data is not None and data != earlier[_data_name(part)]:
            raise SourceError(
                f"{describe_source(part.volumes.first.array)} was changed while it was resampled, so that the result "
                "may mix two versions of it and is not kept: run again once it is complete"
            )


def creator_of(parts: Sequence[TargetImage]) -> Callable[[Path], object]:
    """Return a function that makes the empty target."""

    def create(folder: Path) -> None:
        for part in parts:
            part.image.create(folder / part.folder)
            origin: dict[str, Any] = {
                "source": name_on_disk(part.volumes.first.array),
                "matrix": [list(row) for row in part.grid.matrix],
                "offset": list(part.grid.offset),
                "anti_aliasing_sigma": list(part.grid.sigmas) or [0.0] * part.grid.rank,
            }
            if part.grid.warp:
                origin["warp"] = _described(part.grid.warp)
            group = zarr.open_group(local_store(folder / part.folder, read_only=False), mode="r+")
            group.attrs["linumpy"] = {"resampled": origin}
        if names := [part.folder.removeprefix("labels/") for part in parts if part.folder]:
            list_labels(folder / "labels", names, parts[0].image.ngff_version)

    return create
