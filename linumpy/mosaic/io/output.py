"""The OME-Zarr image that a step of this package writes.

In: the caller's parameters, and the mosaic from which the image is made. Out: a writer. The image gets the metadata of
the mosaic that still apply, and a log line names the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from numpy.typing import DTypeLike

from linumpy.io.carried import Carried, carried_from
from linumpy.mosaic.io.image import MosaicImage, tile_attributes
from linumpy.write.writer import OmeZarrWriter, Progress


@dataclass(frozen=True, kw_only=True)
class OutputImage:
    """How an image is written.

    - `codec`: how chunks are compressed, as for :class:`linumpy.write.writer.OmeZarrWriter`.
    - `overwrite`: whether to replace an existing image.
    - `progress`: called with the number of bytes done since the last call.
    """

    path: str | Path
    levels: int = 1
    codec: str | None = None
    overwrite: bool = False
    progress: Progress | None = None

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
        carried.log_dropped(source, self.path)
        return OmeZarrWriter(
            self.path, shape, dtype, spacing, axes=axes, origin=origin, levels=self.levels, chunks=chunks,
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
        self, image: MosaicImage, column: Sequence[int], *, finest: bool, dropped: Sequence[str] = ()
    ) -> OmeZarrWriter:
        """Open the writer of a float32 image with the lateral axes of a mosaic, and its times and channels.

        - `column`: shape of a column (a box of the whole depth) of the mosaic; a chunk of the map is as large
          laterally.
        - `finest`: whether `image` is the finest resolution. Only then the map gets the tile shape of the metadata.
        - `dropped`: metadata that do not apply to the map, as for :meth:`linumpy.io.carried.Carried.without`.
        """
        first, second = image.lateral_axes
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
