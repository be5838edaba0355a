"""The images that one call of ``resample_zarr`` fills: the target, and labels in it.

In: volumes of a source, the new grid, what their metadata say. Out: :class:`Part`, one for each image; what all of them
depend on, as a :class:`~linumpy.resample.resumable.Request`; what makes them, empty. Errors: ``ValueError`` for sizes
that do not fit, :class:`~linumpy.errors.SourceError` for data that changed meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zarr

from linumpy import __version__
from linumpy.errors import SourceError
from linumpy.io.carried import Carried
from linumpy.io.source import describe_source, identify_data, local_store, name_on_disk
from linumpy.io.volume import Volumes
from linumpy.plan.grid.blocks import AffineGrid
from linumpy.plan.grid.regrid import Regrid
from linumpy.resample.resumable import Request
from linumpy.write.new_image import NewImage, list_labels, plan_image


@dataclass(frozen=True)
class Part:
    """An image that is filled: the target itself, or labels in it.

    Attributes
    ----------
    folder : str
        Within the target; empty for the target itself.
    volumes : Volumes
        What it is made from.
    grid : AffineGrid
        From its voxels to those of the source.
    carried : Carried
        What it has of the source's metadata.
    image : NewImage
        The image to make.
    downsampling : str
        How its coarser resolutions are made.
    """

    folder: str
    volumes: Volumes
    grid: AffineGrid
    carried: Carried
    image: NewImage
    downsampling: str

    @property
    def stored(self) -> tuple[int, ...]:
        """What is whole in storage, along the axes of space."""
        return self.image.stored[0][len(self.volumes.leading) :]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many of those there are along each axis of the image."""
        along = (-(-n // s) for n, s in zip(self.grid.output_shape, self.stored, strict=True))
        return (*self.volumes.leading_shape, *along)


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
    """Plan the image that volumes become."""
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
    """Put ones before the sizes of the axes of space: a chunk is of one time and one channel."""
    if sizes is None or not leading:
        return sizes
    if len(sizes) != rank:
        raise ValueError(f"{label}={tuple(sizes)}: {rank} sizes are needed, along the axes of space")
    return (*(1,) * leading, *sizes)


def request_of(parts: Sequence[Part], kind: str, cval: float) -> Request:
    """Name all that the bytes of the target depend on. The shape of blocks is not among it."""
    first, *labels = parts
    settings = {**_settings(first), "linumpy": __version__, "cval": float(cval), "device": kind}
    settings |= {one.folder: _digest(_settings(one)) for one in labels}
    named = tuple((key, str(value)) for key, value in settings.items())
    # Of data that nothing is known of, what a stopped run left is never gone on with.
    origin = [(_data_name(one), _data(one) or f"not known {secrets.token_hex(8)}") for one in parts]
    return Request("resample_zarr", first.counts, named, tuple(origin), tuple(one.counts for one in labels))


def _settings(part: Part) -> dict[str, Any]:
    """Name what the bytes of one image depend on."""
    array, grid, image = part.volumes.first.array, part.grid, part.image
    return {
        "source": name_on_disk(array),
        "source metadata": _digest(array.metadata.to_dict()),
        "source shape": grid.source_shape,
        "source volumes": [one.index for one in part.volumes.volumes.values()],
        "dtype": image.dtype.str,
        "transform": (grid.matrix, grid.offset),
        "order": grid.order,
        "mode": grid.mode,
        "anti_aliasing": grid.sigmas if grid.smooths else None,
        "output shapes": image.shapes,
        "chunks": image.chunks,
        "shards": image.shards,
        "compressors": image.compressors,
        "metadata": _digest(image.metadata),
    }


def _data_name(part: Part) -> str:
    return f"data of {part.folder}" if part.folder else "source data"


def _data(part: Part) -> str | None:
    return identify_data(part.volumes.first.array)


def check_unchanged(parts: Sequence[Part], request: Request) -> None:
    """Refuse a result that may hold two versions of the source."""
    known = dict(request.origin)
    for one in parts:
        data = _data(one)
        if data is not None and data != known[_data_name(one)]:
            raise SourceError(
                f"{describe_source(one.volumes.first.array)} was written to while it was resampled, so that the result "
                "may hold two versions of it; nothing is left: run again once it is complete"
            )


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def creator_of(parts: Sequence[Part]) -> Callable[[Path], object]:
    """Return what makes the empty target."""

    def create(folder: Path) -> None:
        for one in parts:
            one.image.create(folder / one.folder)
            origin: Any = {
                "source": name_on_disk(one.volumes.first.array),
                "matrix": [list(row) for row in one.grid.matrix],
                "offset": list(one.grid.offset),
                "anti_aliasing_sigma": list(one.grid.sigmas) or [0.0] * one.grid.rank,
            }
            group = zarr.open_group(local_store(folder / one.folder, read_only=False), mode="r+")
            group.attrs["linumpy"] = {"resampled": origin}
        if names := [one.folder.removeprefix("labels/") for one in parts if one.folder]:
            list_labels(folder / "labels", names, parts[0].image.ngff_version)

    return create
