"""What the steps of this package have in common: their keyword parameters, opening the source, writing the image.

In: the caller's parameters, and the mosaic from which the image is made. Out: the opened mosaic, checked paths, the
work on tiles, a writer. The image gets the metadata of the mosaic that still apply, and a log line names the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypedDict

from numpy.typing import DTypeLike

from linumpy.arrays import DeviceName
from linumpy.io.carried import Carried, carried_from
from linumpy.io.output.checks import check_apart, check_target, target_of
from linumpy.io.output.files import check_file, check_picture, replacing
from linumpy.mosaic.io.image import MosaicImage, open_mosaic, tile_attributes
from linumpy.mosaic.io.tiles import column_shape, tile_nbytes
from linumpy.pictures import Picture, save
from linumpy.resample.tile_work import TileWork, Workers, tile_work
from linumpy.write.writer import OmeZarrWriter, Progress


class StepOptions(TypedDict, total=False):
    """Keyword parameters of every step.

    Every step raises FileExistsError for an existing output, FileNotFoundError and SourceError for a source that cannot
    be read, MetadataError for one whose metadata lack what is needed, ValueError or TypeError for parameters that do
    not fit it, GpuUnavailableError for ``"cuda"`` without a device, WorkerError for workers that cannot do the work.

    Attributes
    ----------
    channel, time : int, optional
        The entry to select, counted from 0. By default all; a step that takes one volume needs a selection where there
        are several.
    spacing : (float, float, float), optional
        Voxel spacing of the finest resolution in µm along z, y and x, where the metadata has none or a wrong one.
    device : {"auto", "cuda", "cpu"}
        Where voxels are read to and computed; ``"auto"`` is the GPU if there is one.
    overwrite : bool
        Whether to replace existing outputs.
    distributed : distributed.Client, cluster or str, optional
        A dask client, a cluster, or the address of a scheduler. Its workers, which must see the source, read and
        compute; this process writes. With ``"cuda"`` each worker needs a GPU; ``"auto"`` uses GPUs if all have one.
    """

    channel: int | None
    time: int | None
    spacing: Sequence[float] | None
    device: DeviceName | None
    overwrite: bool
    distributed: Workers


class TileOptions(StepOptions, total=False):
    """Keyword parameters of every step that reads a mosaic box by box, besides :class:`StepOptions`.

    Attributes
    ----------
    progress : callable, optional
        Called with the number of bytes done since the last call; their sum is the bytes of the source, unless the step
        says otherwise.
    tile_bytes : int, optional
        Approximate bytes of the boxes that are read, computed and written one by one; by default 256 MiB on a GPU and
        32 MiB on the CPU. About three are in memory.
    """

    progress: Progress | None
    tile_bytes: int | None


class ImageOptions(TileOptions, total=False):
    """Keyword parameters of every step that writes an OME-Zarr image, besides :class:`TileOptions`.

    Attributes
    ----------
    levels : int
        Number of resolutions to write, by default 1.
    codec : str, optional
        How chunks are compressed, as for :class:`linumpy.write.writer.OmeZarrWriter`; by default as in the source.
    """

    levels: int
    codec: str | None


@dataclass(frozen=True)
class Step:
    """The image that a step writes, empty if it writes none, and the values of :class:`ImageOptions`."""

    output: str | Path = ""
    _: KW_ONLY
    channel: int | None = None
    time: int | None = None
    spacing: Sequence[float] | None = None
    levels: int = 1
    codec: str | None = None
    device: DeviceName | None = "auto"
    overwrite: bool = False
    progress: Progress | None = None
    tile_bytes: int | None = None
    distributed: Workers = None

    @classmethod
    def of(cls, options: type, common: Mapping[str, Any]) -> Step:
        """Make a step that writes no image. `TypeError`: a parameter that is none of `options`."""
        known: frozenset[str] = options.__optional_keys__  # type: ignore[attr-defined]
        for name in common.keys() - known:
            raise TypeError(f"{name}=: this step has no use for it, but for {', '.join(sorted(known))}")
        return cls(**common)

    @property
    def selection(self) -> dict[str, Any]:
        """What :func:`linumpy.mosaic.io.image.open_mosaic` takes besides the source and the level."""
        return {"channel": self.channel, "time": self.time, "spacing": self.spacing}

    def open(
        self,
        source: str | Path,
        level: int = 0,
        *,
        one: str = "",
        picture: str | Path | None = None,
        file: str | Path | None = None,
    ) -> MosaicImage:
        """Open the source, and check that the outputs can be written.

        - `one`: why one volume is needed, for the error; empty if the step takes several.
        - `picture`, `file`: further outputs.
        """
        image = open_mosaic(source, level, **self.selection)
        if one:
            image.only(one)
        self.check([source], picture, file)
        return image

    def check(
        self, sources: Sequence[str | Path], picture: str | Path | None = None, file: str | Path | None = None
    ) -> None:
        """Check that the outputs can be written, do not overlap, and replace no source."""
        check_apart([path for path in (self.output, picture, file) if path], sources)
        if self.output:
            check_target(target_of(self.output), overwrite=self.overwrite)
        if picture is not None:
            check_picture(picture, overwrite=self.overwrite)
        if file is not None:
            check_file(file, overwrite=self.overwrite)

    def draw(self, picture: Picture, path: str | Path) -> None:
        """Write a picture, whose suffix chooses the format."""
        with replacing(path, overwrite=self.overwrite) as temporary:
            save(picture, temporary, Path(path).suffix)

    def work(self) -> AbstractContextManager[TileWork]:
        """Choose the device, and yield what carries out the tiles."""
        return tile_work(self.distributed, device=self.device)

    def tile_nbytes(self, work: TileWork) -> int:
        """Return the bytes of a tile."""
        return tile_nbytes(self.tile_bytes, work.device)

    def column(self, image: MosaicImage, work: TileWork) -> tuple[int, ...]:
        """Return the shape of the columns in which a mosaic is read."""
        return column_shape(image.array, image.depth_axis, self.tile_nbytes(work))

    def advance(self, nbytes: int) -> None:
        """Report progress."""
        if self.progress is not None:
            self.progress(nbytes)

    def writer(
        self,
        source: str,
        carried: Carried,
        shape: Sequence[int],
        dtype: DTypeLike,
        spacing: Sequence[float],
        *,
        axes: str,
        origin: Sequence[float],
        chunks: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> OmeZarrWriter:
        """Open the writer, and log which metadata of the source are dropped."""
        carried.log_dropped(source, self.output)
        return OmeZarrWriter(
            self.output, shape, dtype, spacing, axes=axes, origin=origin, levels=self.levels, chunks=chunks,
            shards=shards, codec=self.codec, overwrite=self.overwrite, attributes=attributes, carried=carried,
        )  # fmt: skip

    def writer_like(
        self, image: MosaicImage, carried: Carried, dtype: DTypeLike, attributes: Mapping[str, object] | None
    ) -> OmeZarrWriter:
        """Open the writer of an image with the shape, axes, chunks, spacing and origin of a mosaic."""
        array = image.array
        return self.writer(
            image.name, carried, array.shape, dtype, image.spacing, axes=image.axes, origin=image.origin,
            chunks=array.chunks, shards=array.shards, attributes=attributes,
        )  # fmt: skip

    def map_writer(
        self, image: MosaicImage, work: TileWork, *, finest: bool, dropped: Sequence[str] = ()
    ) -> OmeZarrWriter:
        """Open the writer of a float32 image with the lateral axes of a mosaic, and its times and channels.

        A chunk of the map is as large as a column of the mosaic laterally.

        - `finest`: whether `image` is the finest resolution. Only then the map gets the tile shape of the metadata.
        - `dropped`: metadata that do not apply to the map, as for :meth:`linumpy.io.carried.Carried.without`.
        """
        (first, second), column = image.lateral_axes, self.column(image, work)
        tile = image.tile_shape if finest else None
        # Linumpy's own attribute is replaced by the tile shape or, without a tile shape, dropped.
        own_if_dropped = () if tile else ("own",)
        dropped = ("labels", "image_label", *dropped, "systems", *own_if_dropped)
        carried = carried_from(image).without(*dropped).on_another_grid()
        return self.writer(
            image.name, carried, image.leading_shape + image.lateral_shape, "float32", image.lateral_spacing,
            axes=image.leading + image.lateral_names, origin=(image.origin[first], image.origin[second]),
            chunks=(*(1 for _ in image.leading), column[first], column[second]),
            attributes=tile_attributes(image, tile) if tile else None,
        )  # fmt: skip


def carried_from_slices(images: Sequence[MosaicImage]) -> Carried:
    """Return the metadata of a stack: those that are equal in all slices."""
    first, *others = map(carried_from, images)
    return first.shared_with(others).without("labels", "image_label", "own").on_another_grid()
