"""Positions of the tiles of a mosaic grid on disk.

In: an OME-Zarr mosaic grid, whose overlapping tiles lie side by side, and the nominal overlap. Out:
:class:`~linumpy.registration.positions.TilePositions`, and a file that holds them. Tiles are compared by their means
along depth, for which every voxel is read once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linumpy.arrays import Array
from linumpy.io.output.checks import check_apart
from linumpy.mosaic.aip import project_columns
from linumpy.mosaic.io.image import needed_tile, open_mosaic
from linumpy.mosaic.io.tiles import column_shape, tile_nbytes, whole_tiles
from linumpy.registration.position_files import check_positions_file, write_positions
from linumpy.registration.positions import MIN_CONFIDENCE, TilePositions, locate_tiles
from linumpy.resample.tile_work import tile_work
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

log = logging.getLogger(__name__)


def estimate_positions(
    source: str | Path,
    output: str | Path | None = None,
    *,
    overlap: float = 0.2,
    min_confidence: float = MIN_CONFIDENCE,
    tile_shape: tuple[int, int] | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> TilePositions:
    """Find the positions of the tiles of an OME-Zarr mosaic grid.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, tiles whole along z. Of several times or channels one must be
        selected. Incomplete tiles at the end of an axis are ignored.
    output : str or Path, optional
        A file to write: ``*.json`` with the positions and all pairs, or ``*.csv`` with the positions only.
    overlap, min_confidence
        As for :func:`linumpy.registration.positions.locate_tiles`.
    tile_shape : (int, int), optional
        As for :func:`linumpy.mosaic.grid.resample_mosaic_grid`.
    progress : callable, optional
        Called with the number of bytes read since the last call.
    channel, time, spacing, use_gpu, overwrite, tile_bytes, distributed
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.

    Returns
    -------
    TilePositions
        Positions in voxels along the lateral axes, in the order of the mosaic's axes.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, GpuUnavailableError
        An existing output or another suffix, a source that is no mosaic, an overlap or a confidence out of range; no
        CUDA device with `use_gpu`.
    """
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    image.only("positions are those of the tiles of one volume")
    if output is not None:
        check_positions_file(output, overwrite=overwrite)
        check_apart([output], [source])
    tile = needed_tile(image, tile_shape)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        projection = work.xp.empty(image.lateral_shape, np.float32)
        size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
        project_columns(image, size, projection.__setitem__, work, progress)
        positions = locate_tiles(cut_tiles(projection, tile), overlap, min_confidence=min_confidence)
    rejected = sum(bool(pair.rejected) for pair in positions.pairs)
    log.info("%s: %d pairs of tiles, %d of them rejected", image.name, len(positions.pairs), rejected)
    if output is not None:
        write_positions(output, positions, image.name, image.lateral_spacing, overwrite=overwrite)
    return positions


def cut_tiles(image: Array, tile_shape: tuple[int, int]) -> Array:
    """Return the complete tiles of an image (Y, X), which lie side by side: (rows, columns, Y, X), a view."""
    (rows, columns), (height, width) = (whole_tiles(image.shape, tile_shape), tile_shape)
    complete = image[: rows * height, : columns * width]
    tiles: Array = complete.reshape(rows, height, columns, width).transpose(0, 2, 1, 3)
    return tiles
