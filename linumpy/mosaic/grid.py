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
from linumpy.gpu.resample_tiles import resample_tiles
from linumpy.io.place import check_apart, check_place
from linumpy.io.writer import Progress
from linumpy.mosaic.image import MosaicImage, open_mosaic
from linumpy.mosaic.output import new_image
from linumpy.mosaic.tiles import Box, box_nbytes, boxes, read_box, tile_nbytes, tile_shape, work_through
from linumpy.plan.tile_grid import TileGrid, plan_tile_grid

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
    lateral_tile: tuple[int, int] | None = None,
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
        The mosaic grid: axes z, y and x in any order. A tile is whole along z; the first one begins at the first voxel.
        Its finest resolution is read: of others a chunk is no tile.
    output : str or Path
        The OME-Zarr image to write: a mosaic grid of the same dtype. Its tiles have the nearest whole number of voxels,
        its spacing is that which is reached so, and each of its chunks is a tile.
    resolution_um : float or (float, float, float)
        Wanted voxel spacing in µm, for all axes alike or along z, y and x.
    lateral_tile : (int, int), optional
        Voxels of a tile along the lateral axes, in the order of the array's axes; by default a chunk is a tile.
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
        A place that is taken, a source that is no mosaic grid, a spacing, tile or number of levels that does not fit.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    image = open_mosaic(source)
    check_place(Path(output), overwrite=overwrite)
    check_apart([output], [source])
    array = image.array
    if array.dtype.kind == "b":
        raise SourceError(f"{image.name}: voxels of {array.dtype} cannot be resampled: integers and floats can")
    grid = plan_tile_grid(
        array.shape, tile_of(image, lateral_tile), image.spacing, image.origin, _in_order(image, resolution_um)
    )
    log.info("%s: tiles of %s voxels become %s, %s µm", image.name, grid.tile, grid.new_tile, grid.spacing)
    with new_image(
        output, grid.new_shape, array.dtype.newbyteorder("="), grid.spacing, axes=image.axes, origin=grid.origin,
        n_levels=n_levels, chunks=grid.new_tile, overwrite=overwrite,
    ) as (write, _):  # fmt: skip

        def resample(box: Box, tiles: Any) -> Any:
            made = resample_tiles(tiles, grid.part(box))
            if progress is not None:
                progress(box_nbytes(array, box))
            return made

        # Where tiles get finer it is the result that takes the memory.
        growth = max(1.0, math.prod(grid.new_tile) / math.prod(grid.tile))
        batch = int(tile_nbytes(tile_bytes, use_gpu) / growth)
        work_through(
            boxes(array.shape, tile_shape(array.shape, grid.tile, array.dtype.itemsize, batch)),
            lambda box: read_box(array, box, use_gpu),
            resample,
            lambda box, tiles: write(grid.new_box(box), tiles),
            use_gpu=use_gpu,
        )
    return ResampledGrid(grid, image.nbytes)


def tile_of(image: MosaicImage, lateral_tile: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Tell the tile of a mosaic grid, in the order of its axes: whole along z; laterally as given, or a chunk.

    Raises
    ------
    SourceError
        A mosaic with shards, where no size is given: whether a tile is a shard or a chunk is not known.
    ValueError
        A size that does not fit the mosaic.
    """
    array = image.array
    if lateral_tile is None and array.shards is not None:
        raise SourceError(
            f"{image.name} has shards of {array.shards} and chunks of {array.chunks} voxels: which is a tile is not "
            "known, give the size of a tile"
        )
    lateral = [array.chunks[axis] for axis in image.lateral_axes] if lateral_tile is None else list(lateral_tile)
    tile = list(array.shape)
    for axis, size in zip(image.lateral_axes, lateral, strict=True):
        if lateral_tile is not None and not 1 <= size <= array.shape[axis]:
            raise ValueError(
                f"tiles of {tuple(lateral)} voxels: {image.name} has {array.shape[axis]} along {image.axes[axis]}"
            )
        tile[axis] = min(size, array.shape[axis])
    return tuple(tile)


def _in_order(image: MosaicImage, resolution_um: float | Sequence[float]) -> tuple[float, ...]:
    """Put the wanted spacing in the order of the axes."""
    if isinstance(resolution_um, int | float):
        return (float(resolution_um),) * 3
    if len(resolution_um) != 3:
        raise ValueError(f"a resolution of {len(resolution_um)} numbers: one is needed, or three, along z, y and x")
    return tuple(float(resolution_um["zyx".index(name)]) for name in image.axes)
