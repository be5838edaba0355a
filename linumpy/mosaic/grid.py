"""A mosaic grid of any size at another voxel spacing, tile by tile, from disk to disk.

In: an OME-Zarr mosaic grid: tiles side by side, not yet stitched. Out: the mosaic grid of the same tiles with other
voxels, as OME-Zarr with the same dtype and axes, a chunk a tile. Each tile is resampled by itself, so that none bleeds
into its neighbour. Tiles pass in batches: the next one is read while one is resampled and the last one is written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linumpy.errors import SourceError
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.carried import carried_from
from linumpy.io.place import check_apart, check_place
from linumpy.mosaic.image import MosaicImage, known_tile, open_mosaic, tile_attributes
from linumpy.mosaic.measured import record, resampled
from linumpy.mosaic.tiles import Box, box_nbytes, read_box, tile_nbytes
from linumpy.mosaic.tiles import tile_shape as batch_shape
from linumpy.plan.grid.tile_grid import TileGrid, plan_tile_grid
from linumpy.resample.overlap import work_through
from linumpy.write.writer import OmeZarrWriter, Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResampledGrid:
    """What was made.

    Attributes
    ----------
    grid : TileGrid
        The tiles before and after, in the order of the mosaic's axes.
    nbytes : int
        Bytes of the mosaic that was read.
    """

    grid: TileGrid
    nbytes: int


def resample_mosaic_grid(
    source: str | Path,
    output: str | Path,
    resolution_um: float | Sequence[float],
    *,
    tile_shape: tuple[int, int] | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    n_levels: int = 1,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
) -> ResampledGrid:
    """Resample an OME-Zarr mosaic grid to another voxel spacing, tile by tile.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, and t and c. A tile is whole along z; the first one begins at the
        first voxel. Its finest resolution is read, whose tiles are whole numbers of voxels.
    output : str or Path
        The OME-Zarr image to write: a mosaic grid of the same dtype. Its tiles have the nearest whole number of voxels,
        its spacing is that which is reached so, each of its chunks is a tile, and its metadata keeps the tile's size
        and which voxels focal correction filled. It has the times and channels that are taken, and of the metadata all
        that stays true.
    resolution_um : float or (float, float, float)
        Wanted voxel spacing in µm, for all axes alike or along z, y and x.
    tile_shape : (int, int), optional
        Voxels of a tile along the lateral axes, in the order of the array's axes. By default as the metadata that
        linumpy writes has it; where there is none a chunk is taken for a tile, and a log line (warning) says so.
    channel, time : int, optional
        The one to take, counted from 0; by default all of them.
    spacing : (float, float, float), optional
        Voxel spacing of the mosaic's finest resolution in µm along z, y and x, where its metadata lacks it.
    n_levels : int
        Resolutions to write. Coarser ones are means of 2 × 2 × 2 voxels, over the borders of tiles of odd size.
    use_gpu : bool
        Whether to read to the GPU and work there.
    overwrite : bool
        Whether to replace an output that is there.
    progress : callable, optional
        Called with the number of bytes resampled since the last call.
    tile_bytes : int
        About how many bytes of voxels a batch of tiles has, before or after, whichever is more, but one tile at least;
        about three are in memory. By default 256 MiB on a GPU and 32 MiB on the CPU.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError
        A path that is taken, a source that is no mosaic grid, a spacing, tile or number of levels that does not fit.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    check_place(Path(output), overwrite=overwrite)
    check_apart([output], [source])
    array = image.array
    if array.dtype.kind == "b":
        raise SourceError(f"{image.name}: voxels of {array.dtype} cannot be resampled: integers and floats can")
    grid = plan_tile_grid(
        array.shape, tile_of(image, tile_shape), image.spacing, image.origin, _in_order(image, resolution_um)
    )
    log.info("%s: tiles of %s voxels become %s, %s µm", image.name, grid.tile, grid.new_tile, grid.spacing)
    (first, second), z = image.lateral_axes, image.depth_axis
    lateral = grid.new_tile[first], grid.new_tile[second]
    kept = tile_attributes(image, lateral)
    filled = resampled(
        image.corrections, grid.new_shape[z] / array.shape[z], (grid.tile[first], grid.tile[second]), lateral
    )
    if filled is None:
        log.warning(
            "%s: focal correction had other tiles than these, so which voxels it filled is not kept: they count as "
            "measured from here on",
            image.name,
        )
    kept["linumpy"] |= record(filled or (), image.axes.replace("z", ""))
    carried = carried_from(image).without("labels", "image_label").on_another_grid()
    carried.log_dropped(image.name, output)
    with OmeZarrWriter(
        output, image.leading_shape + grid.new_shape, array.dtype.newbyteorder("="), grid.spacing,
        axes=image.leading + image.axes, origin=grid.origin, n_levels=n_levels, overwrite=overwrite,
        chunks=(*(1 for _ in image.leading), *grid.new_tile), attributes=kept, carried=carried,
    ) as writer:  # fmt: skip

        def resample(part: tuple[tuple[int, ...], Box], tiles: Any) -> Any:
            made = resample_tiles(tiles, grid.part(part[1]))
            if progress is not None:
                progress(box_nbytes(array, part[1]))
            return made

        # Where tiles get finer it is the result that takes the memory.
        growth = max(1.0, math.prod(grid.new_tile) / math.prod(grid.tile))
        batch = int(tile_nbytes(tile_bytes, use_gpu) / growth)
        work_through(
            image.boxes(batch_shape(array.shape, grid.tile, array.dtype.itemsize, batch)),
            lambda part: read_box(image.volumes[part[0]], part[1], use_gpu),
            resample,
            lambda part, tiles: writer.write((*part[0], *grid.new_box(part[1])), tiles),
            use_gpu=use_gpu,
        )
    return ResampledGrid(grid, image.nbytes)


def tile_of(image: MosaicImage, tile_shape: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return the tile of a mosaic grid, in the order of its axes.

    It is whole along z; laterally as given, as the metadata has it, or else a chunk, which a log line (warning) says.

    Raises
    ------
    SourceError
        A mosaic with shards, where no size is known: whether a tile is a shard or a chunk is not known either.
    ValueError
        A size that does not fit the mosaic.
    """
    array, tile = image.array, list(image.array.shape)
    lateral = known_tile(image, tile_shape)
    if lateral is None:
        first, second = image.lateral_axes
        if array.shards is not None:
            raise SourceError(
                f"{image.name} has shards of {array.shards} and chunks of {array.chunks} voxels, and its metadata does "
                "not say which is a tile: give the voxels of a tile by tile_shape="
            )
        lateral = min(array.chunks[first], tile[first]), min(array.chunks[second], tile[second])
        log.warning(
            "%s: its metadata does not say how large a tile is, so that a chunk is taken for one: %d × %d voxels along "
            "%s and %s. Give tile_shape if it is another",
            image.name, *lateral, image.axes[first], image.axes[second],
        )  # fmt: skip
    for axis, size in zip(image.lateral_axes, lateral, strict=True):
        tile[axis] = size
    return tuple(tile)


def _in_order(image: MosaicImage, resolution_um: float | Sequence[float]) -> tuple[float, ...]:
    """Put the wanted spacing in the order of the axes."""
    if isinstance(resolution_um, int | float):
        return (float(resolution_um),) * 3
    if len(resolution_um) != 3:
        raise ValueError(f"a resolution of {len(resolution_um)} numbers: one is needed, or three, along z, y and x")
    return tuple(float(resolution_um["zyx".index(name)]) for name in image.axes)
