"""A mosaic grid of any size at another voxel spacing, tile by tile, from disk to disk.

In: an OME-Zarr mosaic grid: tiles side by side, not yet stitched. Out: the mosaic grid of the same tiles at the new
spacing, as OME-Zarr with the same dtype and axes, one chunk for each tile. Each tile is resampled separately, so that
it does not bleed into its neighbour. Tiles are processed in batches: while one batch is resampled, the next is read and
the last is written.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from linumpy.errors import SourceError
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.carried import carried_from
from linumpy.mosaic.io.image import MosaicImage, needed_tile, tile_attributes
from linumpy.mosaic.io.measured import corrections_attribute, resampled_corrections
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import box_nbytes, read_box
from linumpy.mosaic.io.tiles import tile_shape as batch_shape
from linumpy.plan.grid.tile_grid import TileGrid, plan_tile_grid

log = logging.getLogger(__name__)


def resample_mosaic_grid(
    source: str | Path,
    output: str | Path,
    new_spacing: float | Sequence[float],
    *,
    tile_shape: tuple[int, int] | None = None,
    **common: Unpack[ImageOptions],
) -> TileGrid:
    """Resample an OME-Zarr mosaic grid to another voxel spacing, tile by tile.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, and t and c. A tile is whole along z; the first tile begins at
        the first voxel. Only the finest resolution is read, because tiles of others may end within a voxel.
    output : str or Path
        The OME-Zarr image to write: a mosaic grid of the same dtype, with the selected times and channels. Its tiles
        have the nearest whole number of voxels, to which its spacing is adapted; each chunk is a tile. Its metadata has
        the tile shape, the voxels that focal correction filled, and the metadata of the source that still apply.
    new_spacing : float or (float, float, float)
        New voxel spacing in µm, for all axes or along z, y and x.
    tile_shape : (int, int), optional
        Voxels of a tile along the lateral axes, in the order of the array's axes; by default from the metadata that
        linumpy writes. It is needed for mosaics without such metadata.
    levels : int
        Number of resolutions to write. Voxels of coarser resolutions are means of 2 × 2 × 2 voxels, also across borders
        of tiles if a tile has an odd number of voxels.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Returns
    -------
    TileGrid
        The tiles before and after, along the axes of the mosaic.
    """
    step = Step(output, **common)
    image = step.open(source)
    array = image.array
    if array.dtype.kind == "b":
        raise SourceError(f"{image.name}: voxels of {array.dtype} cannot be resampled: integers and floats can")
    grid = plan_tile_grid(
        array.shape, tile_of(image, tile_shape), image.spacing, image.origin, _in_order(image, new_spacing)
    )
    log.info("%s: tiles of %s voxels become %s, %s µm", image.name, grid.tile, grid.new_tile, grid.spacing)
    (first, second), z = image.lateral_axes, image.depth_axis
    lateral = grid.new_tile[first], grid.new_tile[second]
    attributes = tile_attributes(image, lateral)
    corrections = resampled_corrections(
        image.corrections, grid.new_shape[z] / array.shape[z], (grid.tile[first], grid.tile[second]), lateral
    )
    if corrections is None:
        log.warning(
            "%s: focal correction used another tile shape, so the voxels that it filled cannot be recorded: they count "
            "as measured from here on",
            image.name,
        )
    attributes["linumpy"] |= corrections_attribute(corrections or (), image.lateral_names)
    carried = carried_from(image).without("labels", "image_label").on_another_grid()
    with step.work() as work, step.writer(
        image.name, carried, image.leading_shape + grid.new_shape, array.dtype.newbyteorder("="), grid.spacing,
        axes=image.leading + image.axes, origin=grid.origin, chunks=(*(1 for _ in image.leading), *grid.new_tile),
        attributes=attributes,
    ) as writer:  # fmt: skip
        # If tiles get finer, a batch is larger after resampling than before.
        growth = max(1.0, math.prod(grid.new_tile) / math.prod(grid.tile))
        device, batch = work.device, int(step.tile_nbytes(work) / growth)
        work(
            image.boxes(batch_shape(array.shape, grid.tile, array.dtype.itemsize, batch)),
            lambda part: read_box(image.volumes[part[0]], part[1], device),
            lambda part, tiles: resample_tiles(tiles, grid.part(part[1])),
            lambda part, tiles: writer.write((*part[0], *grid.new_box(part[1])), tiles),
            done=lambda part: step.advance(box_nbytes(array, part[1])),
        )
    return grid


def tile_of(image: MosaicImage, tile_shape: tuple[int, int] | None = None) -> tuple[int, ...]:
    """Return the voxels of a tile along all axes of a mosaic grid, in their order; along z the whole depth.

    The lateral voxels, and the errors, are those of :func:`linumpy.mosaic.io.image.needed_tile`.
    """
    tile = list(image.array.shape)
    for axis, size in zip(image.lateral_axes, needed_tile(image, tile_shape), strict=True):
        tile[axis] = size
    return tuple(tile)


def _in_order(image: MosaicImage, new_spacing: float | Sequence[float]) -> tuple[float, ...]:
    """Return the new spacing in the order of the axes."""
    if isinstance(new_spacing, int | float):
        return (float(new_spacing),) * 3
    if len(new_spacing) != 3:
        raise ValueError(f"new_spacing={tuple(new_spacing)}: pass one number, or three, along z, y and x")
    return tuple(float(new_spacing["zyx".index(name)]) for name in image.axes)
