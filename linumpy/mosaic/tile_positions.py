"""Positions of the tiles of a mosaic grid on disk.

In: an OME-Zarr mosaic grid, whose overlapping tiles lie side by side, and the nominal overlap. Out:
:class:`~linumpy.registration.positions.TilePositions`, and a file that holds them. Tiles are compared by a projection
along depth, for which every voxel is read once (:func:`project_structure`). Of these, tiles of at most 192 pixels along
each axis are held: larger ones are reduced by a whole factor. Memory is at most about 1 MiB for each tile, whatever its
depth and size, besides the columns that are read.
"""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.io.output.checks import check_apart
from linumpy.mosaic.aip import project_columns
from linumpy.mosaic.io.image import needed_tile
from linumpy.mosaic.io.measured import MeasuredVoxels
from linumpy.mosaic.io.step import Step, TileOptions
from linumpy.mosaic.io.tiles import whole_tiles
from linumpy.mosaic.options import Positions
from linumpy.registration.position_files import check_positions_file, write_positions
from linumpy.registration.positions import TilePositions, locate_tiles

#: Maximum pixels along an axis of a tile that are compared.
PIXELS = 192

#: Intensity that is added to that of each voxel before the logarithm, as a share of the mean of the A-line: where light
#: is gone, noise does not decide.
_NOISE = 0.2
#: Weight of the logarithm of the mean.
_MEAN = 0.3

log = logging.getLogger(__name__)


def estimate_positions(
    source: str | Path,
    output: str | Path | None = None,
    options: Positions | None = None,
    *,
    tile_shape: tuple[int, int] | None = None,
    **common: Unpack[TileOptions],
) -> TilePositions:
    """Find the positions of the tiles of an OME-Zarr mosaic grid.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, tiles whole along z. Of several times or channels one must be
        selected. Incomplete tiles at the end of an axis are ignored.
    output : str or Path, optional
        A file to write: ``*.json`` with the positions and all pairs, or ``*.csv`` with the positions only.
    options : Positions, optional
        The nominal overlap of tiles, and the evidence from which shifts are accepted.
    tile_shape : (int, int), optional
        As for :func:`linumpy.mosaic.grid.resample_mosaic_grid`.
    **common
        :class:`~linumpy.mosaic.io.step.TileOptions`, which also says what is raised.

    Returns
    -------
    TilePositions
        Positions in voxels along the lateral axes, in the order of the mosaic's axes.
    """
    options = options or Positions()
    step = Step.of(TileOptions, common)
    image = step.open(source, one="positions are those of the tiles of one volume")
    if output is not None:
        check_positions_file(output, overwrite=step.overwrite)
        check_apart([output], [source])
    tile = needed_tile(image, tile_shape)
    with step.work() as work:
        reduced = _ReducedTiles(work.xp, image.lateral_shape, tile)
        project_columns(image, step, reduced.add, work, project_structure)
        try:
            positions = locate_tiles(
                reduced.tiles(), options.overlap, min_evidence=options.min_evidence, tile_shape=tile
            )
        except ValueError as error:
            raise ValueError(f"{image.name}: {error}") from error
    rejected = sum(bool(pair.rejected) for pair in positions.pairs)
    log.info("%s: %d pairs of tiles, %d of them rejected", image.name, len(positions.pairs), rejected)
    for line in positions.warnings:
        log.warning("%s: %s", image.name, line)
    if output is not None:
        write_positions(output, positions, image.name, image.lateral_spacing, overwrite=step.overwrite)
    return positions


def project_structure(column: Array, measured: MeasuredVoxels | None, depth_axis: int) -> Array:
    """Project a column along depth such that the structure of the sample shows: float32, NaN for A-lines of zeros.

    Tissue that scatters more loses light faster. Once all light is scattered, its sum along depth is the same for all
    tissue, and the mean shows speckle and illumination only. What differs is where along depth the light is. So the
    projection is the mean logarithm of intensities relative to the mean of their A-line, plus a share of the logarithm
    of this mean, which alone shows structure that is the same at all depths.

    - `column`: intensities of a box of the whole depth.
    - `measured`: voxels that count; None if all do. Voxels that are not finite do not.
    """
    xp = array_module(column)
    voxels = column.astype(np.float32)
    counted = xp.isfinite(voxels) if measured is None else measured.mask(xp) & xp.isfinite(voxels)
    xp.copyto(voxels, 0, where=~counted)
    count = xp.maximum(counted.sum(axis=depth_axis), 1).astype(np.float32)
    # Of magnitudes: where a dark field was subtracted, noise has both signs.
    with np.errstate(over="ignore"):
        mean = abs(voxels).sum(axis=depth_axis) / count
    known = (mean > 0) & xp.isfinite(mean)
    mean = xp.where(known, mean, 1)
    xp.maximum(voxels, 0, out=voxels)
    voxels /= xp.expand_dims(mean, depth_axis)
    voxels += np.float32(_NOISE)
    xp.log(voxels, out=voxels)
    xp.copyto(voxels, 0, where=~counted)
    shown = voxels.sum(axis=depth_axis) / count + np.float32(_MEAN) * xp.log(mean)
    return xp.where(known, shown, np.nan).astype(np.float32)


class _ReducedTiles:
    """The tiles of a projection that arrives in parts, reduced to at most :data:`PIXELS` along an axis.

    - `shape`, `tile` (int, int): pixels of the projection and of a tile.
    """

    def __init__(self, xp: ModuleType, shape: tuple[int, int], tile: tuple[int, int]) -> None:
        self._xp, self._tile, self._factor = xp, tile, max(1, -(-max(tile) // PIXELS))
        self._grid = whole_tiles(shape, tile)
        self._size = tuple(max(1, n // self._factor) for n in tile)
        self._sums = xp.zeros([count * n for count, n in zip(self._grid, self._size, strict=True)], np.float32)
        self._counts = xp.zeros(self._sums.shape, np.float32)

    def add(self, index: tuple[int | slice, ...], part: Array) -> None:
        """Add a part of the projection; pixels that are not finite do not count."""
        finite = self._xp.isfinite(part)
        down, across = self._reduction(0, index[-2]), self._reduction(1, index[-1])
        for target, pixels in ((self._sums, self._xp.where(finite, part, 0)), (self._counts, finite)):
            target[down[0], across[0]] += down[1] @ pixels.astype(np.float32) @ across[1].T

    def _reduction(self, axis: int, extent: int | slice) -> tuple[slice, Array]:
        """Return the reduced pixels that an extent of the mosaic reaches, and the matrix that sums pixels to them."""
        assert isinstance(extent, slice)
        number, inside = np.divmod(np.arange(extent.start, extent.stop), self._tile[axis])
        reduced, size = inside // self._factor, self._size[axis]
        target = np.where((number < self._grid[axis]) & (reduced < size), number * size + reduced, -1)
        known = target[target >= 0]
        reached = slice(int(known.min()), int(known.max()) + 1) if known.size else slice(0, 0)
        members = np.arange(reached.start, reached.stop)[:, None] == target
        return reached, self._xp.asarray(members, np.float32)

    def tiles(self) -> Array:
        """Return the tiles (rows, columns, Y, X): means of the finite pixels, NaN where there are none."""
        (rows, columns), (height, width) = self._grid, self._size
        means = self._xp.where(self._counts > 0, self._sums / self._xp.maximum(self._counts, 1), np.nan)
        return means.reshape(rows, height, columns, width).transpose(0, 2, 1, 3)
