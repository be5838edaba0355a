"""Stitch the tiles of a mosaic grid of any size, from disk to disk.

In: an OME-Zarr mosaic grid, and the positions of its tiles. Out: one OME-Zarr volume with its pyramid. Each box of the
volume is blended in one pass from all tiles that cover it. Boxes are made row by row. A row of tiles is kept in memory
from the first box that needs it to the last, so that every voxel is read once if two rows of tiles and three boxes fit
into memory; workers of a cluster keep none.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, free_memory
from linumpy.errors import SourceError
from linumpy.gpu.oct.blend import PlacedTile, blend_tiles
from linumpy.io.carried import Carried, carried_from
from linumpy.mosaic.io.image import MosaicImage, needed_tile
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box, box_nbytes, box_shape, boxes, read_box, stored, whole_tiles
from linumpy.mosaic.io.tiles import tile_shape as box_size
from linumpy.mosaic.options import Stitch
from linumpy.registration.position_files import read_positions
from linumpy.registration.positions import TilePositions

log = logging.getLogger(__name__)

#: Memory for kept tiles: bytes on the host, and share of the free memory on a device.
HOST_KEPT_BYTES, _KEPT_SHARE = 4 * 2**30, 0.4
#: Maximum span of the positions along an axis, relative to the length of one row and one column of tiles end to end.
_MAX_EXTENT = 2
#: Smaller fractions of a voxel count as 0.
_MIN_FRACTION = 1e-4
#: Diffusion weights are at least the distance weights scaled to this maximum. Without this limit all weights of a tile
#: that other tiles cover completely would be 0.
_DISTANCE_SHARE = 1e-3

#: Row and column of a tile.
Tile = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class StitchPlan:
    """The offsets of the tiles in a stitched volume.

    - `size` (int, int): lateral voxels of the volume.
    - `tile_shape` (int, int): lateral voxels of a tile.
    - `origin` (float, float): position of the volume's first voxel, in voxels from the first voxel of the first tile.
    - `offsets` ((int, int) to numpy.ndarray): position of each tile's first voxel in the volume, to fractions of a
      voxel, by row and column; missing tiles are left out.
    """

    size: tuple[int, int]
    tile_shape: tuple[int, int]
    origin: tuple[float, float]
    offsets: Mapping[Tile, np.ndarray]

    def corner(self, tile: Tile, axis: int) -> tuple[int, float]:
        """Return where the volume's first voxel lies in a tile, along a lateral axis: voxel and fraction of a voxel."""
        coordinate = -float(self.offsets[tile][axis])
        voxel = math.floor(coordinate + _MIN_FRACTION)
        return voxel, coordinate - voxel if coordinate - voxel >= _MIN_FRACTION else 0.0

    def part(self, tile: Tile, lateral: Sequence[slice]) -> tuple[slice, slice] | None:
        """Return the lateral voxels of a tile that a box of the volume needs; None if it needs none."""
        needed = []
        for axis, extent in enumerate(lateral):
            (voxel, fraction), length = self.corner(tile, axis), self.tile_shape[axis]
            is_interpolated = fraction > 0  # between two voxels, so one more voxel is needed at the end
            start, stop = max(0, extent.start + voxel), min(length - is_interpolated, extent.stop + voxel)
            if start >= stop:
                return None
            needed.append(slice(start, stop + is_interpolated))
        return needed[0], needed[1]

    def tiles(self, lateral: Sequence[slice]) -> list[Tile]:
        """List the tiles that a box of the volume needs."""
        return [tile for tile in self.offsets if self.part(tile, lateral) is not None]


def plan_stitching(found: TilePositions, *, interpolate: bool = True) -> StitchPlan:
    """Plan the smallest volume that holds all tiles; pure.

    - `found`: the positions; missing tiles are left out.
    - `interpolate`: whether tiles are placed at fractions of voxels; otherwise positions are rounded to whole voxels.

    Raises `ValueError`: all tiles are missing, or they lie much further apart than side by side, as with a wrong unit.
    """
    tiles = [(int(i), int(j)) for i, j in np.argwhere(found.present)]
    if not tiles:
        raise ValueError("all tiles are missing, so there is nothing to stitch")
    positions = np.array([found.positions[tile] for tile in tiles])
    if not interpolate:
        positions = np.rint(positions)
    origin = positions.min(axis=0)
    offsets = positions - origin
    limit = _MAX_EXTENT * sum(found.grid) * max(found.tile_shape)
    if not (offsets <= limit).all():
        raise ValueError(
            f"the positions span {offsets.max():.4g} voxels, and {found.grid[0]} × {found.grid[1]} tiles of "
            f"{tuple(found.tile_shape)} voxels at most {limit}: positions are in voxels of the mosaic"
        )
    size = np.floor(offsets.max(axis=0) + _MIN_FRACTION).astype(int) + found.tile_shape
    return StitchPlan(
        size=(int(size[0]), int(size[1])), tile_shape=found.tile_shape, origin=(float(origin[0]), float(origin[1])),
        offsets=dict(zip(tiles, offsets, strict=True)),
    )  # fmt: skip


@dataclass(frozen=True)
class Stitched:
    """Summary of a stitched mosaic.

    - `nbytes`, `read_nbytes`: bytes of the tiles, and bytes that were read, decoded; 0 if workers of a cluster read.
    """

    plan: StitchPlan
    nbytes: int
    read_nbytes: int


def stitch_mosaic(
    source: str | Path,
    positions: str | Path | TilePositions,
    output: str | Path,
    options: Stitch | None = None,
    *,
    tile_shape: tuple[int, int] | None = None,
    chunks: Sequence[int] | None = None,
    kept_bytes: int | None = None,
    **common: Unpack[ImageOptions],
) -> Stitched:
    """Stitch the tiles of an OME-Zarr mosaic grid.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, tiles whole along z. Of several times or channels one must be
        selected.
    positions : str, Path or TilePositions
        The positions of the tiles, or a file that has them.
    output : str or Path
        The OME-Zarr image to write, of the mosaic's dtype and axes; 0 where no tile lies. Its origin is the smallest
        coordinate of a tile along each axis. It has the metadata of the mosaic that still apply.
    options : Stitch, optional
        Weights of tiles where they overlap (diffusion takes about a second more for each tile), and whether tiles are
        placed to fractions of voxels.
    tile_shape : (int, int), optional
        As for :func:`linumpy.mosaic.grid.resample_mosaic_grid`.
    chunks : (int, int, int), optional
        Chunks of the output; by default chosen by the writer.
    progress : callable, optional
        Called with the number of bytes of the mosaic, in proportion to the voxels of the output that were written since
        the last call.
    kept_bytes : int, optional
        Maximum bytes of the tiles that are kept in memory; by default 4 GiB on the CPU and 40 % of the free memory of a
        GPU. If the rows of tiles that neighbouring boxes need do not fit, voxels at borders of boxes are read again.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.
    """
    step, options = Step(output, **common), options or Stitch()
    image = step.open(source, one="the tiles of one volume are stitched")
    step.check([] if isinstance(positions, TilePositions) else [positions])
    tile = needed_tile(image, tile_shape)
    plan = plan_stitching(_checked_positions(image, positions, tile), interpolate=options.interpolate)
    if image.corrections:
        log.info("%s: voxels that focal correction filled count as measured in the stitched volume", image.name)
    # Tile shape and corrections are dropped without a warning: the volume has no tiles.
    carried = replace(carried_from(image).without("labels", "image_label"), own=Carried().own).on_another_grid()
    z, lateral, dtype = image.depth_axis, image.lateral_axes, image.array.dtype.newbyteorder("=")
    shape, origin = list(image.array.shape), list(image.origin)
    for k, axis in enumerate(lateral):
        shape[axis] = plan.size[k]
        origin[axis] += plan.origin[k] * image.spacing[axis]
    with step.work() as work, step.writer(
        image.name, carried, shape, dtype, image.spacing, axes=image.axes, origin=origin, chunks=chunks
    ) as writer:  # fmt: skip
        if kept_bytes is None:
            kept_bytes = int(_KEPT_SHARE * free_memory()) if work.device_here == "cuda" else HOST_KEPT_BYTES
        max_kept = kept_bytes if work.client is None else 0
        todo, keep = _boxes(image, plan, shape, writer.stored, step.tile_nbytes(work), max_kept)
        tiles = _TileReader(image, plan, work.device, todo if keep else [])
        weights = [distance_weights(tile)]
        if options.blending == "diffusion":
            weights = diffusion_weights(tile, np.array(list(plan.offsets.values())))
        maps = [work.xp.asarray(weight) for weight in weights]
        weight_of = {tile: maps[k % len(maps)] for k, tile in enumerate(plan.offsets)}

        def blend(box: Box, parts: list[tuple[Tile, Array, tuple[int, int]]]) -> Array:
            xp = array_module(parts[0][1]) if parts else np
            placed = []
            for tile, voxels, begin in parts:
                (y, y_fraction), (x, x_fraction) = plan.corner(tile, 0), plan.corner(tile, 1)
                corner, fraction = (y + box[lateral[0]].start, x + box[lateral[1]].start), (y_fraction, x_fraction)
                placed.append(PlacedTile(voxels, begin, corner, fraction, xp.asarray(weight_of[tile])))
            return blend_tiles(placed, box_shape(box), z, dtype, xp)

        voxels_done, all_voxels = 0, math.prod(shape)

        def done(box: Box) -> None:
            nonlocal voxels_done
            before, voxels_done = voxels_done, voxels_done + math.prod(box_shape(box))
            step.advance(voxels_done * image.nbytes // all_voxels - before * image.nbytes // all_voxels)

        work(todo, tiles.read, blend, writer.write, done=done)
    return Stitched(plan, len(plan.offsets) * math.prod(tile) * image.array.shape[z] * dtype.itemsize, tiles.nbytes)


def _checked_positions(
    image: MosaicImage, positions: str | Path | TilePositions, tile: tuple[int, int]
) -> TilePositions:
    """Return the positions; refuse positions of another grid or another tile shape than the mosaic's."""
    located = positions if isinstance(positions, TilePositions) else read_positions(positions, tile)
    grid = whole_tiles(image.lateral_shape, tile)
    if located.grid != grid or tuple(located.tile_shape) != tile:
        raise SourceError(
            f"the positions are of {located.grid[0]} × {located.grid[1]} tiles of {tuple(located.tile_shape)} voxels, "
            f"and {image.name} has {grid[0]} × {grid[1]} of {tile}"
        )
    return located


def distance_weights(tile_shape: Sequence[int]) -> np.ndarray:
    """Return the product of the distances to the nearest border along both axes, (height, width) of float32.

    In the overlap of two tiles side by side the share of each tile falls linearly towards the border of the tile.
    """
    rows, columns = (np.minimum(np.arange(n) + 1, n - np.arange(n)).astype(np.float32) for n in tile_shape)
    return np.outer(rows, columns)


def diffusion_weights(tile_shape: Sequence[int], positions: np.ndarray) -> list[np.ndarray]:
    """Return for each tile the solution of Laplace's equation in the voxels that it shares with other tiles.

    Boundary values are 1 where the tile lies alone, and 0 beyond its borders where other tiles continue. There is no
    flux through the border of the mosaic. Weights have no kinks, even where tiles are displaced.

    - `positions` (tiles, 2): first voxel of each tile; rounded to whole voxels.
    """
    corners = np.rint(positions).astype(np.int64)
    minimum = distance_weights(tile_shape)
    minimum *= _DISTANCE_SHARE / minimum.max()
    return [np.maximum(_diffused(tile_shape, corner, corners), minimum).astype(np.float32) for corner in corners]


def _diffused(tile_shape: Sequence[int], corner: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Solve Laplace's equation for the tile at `corner`; 0 everywhere if the tile lies alone nowhere."""
    from scipy.sparse import coo_matrix, csgraph
    from scipy.sparse.linalg import spsolve

    height, width = tile_shape
    # Number of other tiles at each voxel of the tile and of a rim of one voxel around it.
    count = np.zeros((height + 2, width + 2), np.int64)
    for other in corners - corner + 1:
        if np.any(other != 1):
            (top, left), (bottom, right) = np.maximum(other, 0), np.maximum(other + tile_shape, 0)
            count[top:bottom, left:right] += 1
    inside = np.zeros(count.shape, bool)
    inside[1:-1, 1:-1] = True
    weights = (inside & (count == 0)).astype(np.float64)
    unknown = np.flatnonzero(inside & (count > 0))
    exists, number = (inside | (count > 0)).ravel(), np.arange(count.size).reshape(count.shape)
    first = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    second = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    both = np.flatnonzero(exists[first] & exists[second])
    links = coo_matrix((np.ones(both.size), (first[both], second[both])), (count.size, count.size))
    links = (links + links.T).tocsr()
    right_side = (links @ weights.ravel())[unknown]
    if right_side.any():
        laplacian = csgraph.laplacian(links).tocsr()[unknown][:, unknown]
        weights.ravel()[unknown] = spsolve(laplacian.tocsc(), right_side)
    return weights[1:-1, 1:-1]


def _boxes(
    image: MosaicImage,
    plan: StitchPlan,
    shape: Sequence[int],
    stored_out: Sequence[int],
    tile_bytes: int,
    max_kept: int,
) -> tuple[list[Box], bool]:
    """Plan the boxes of the volume, in the order in which they are made, and whether rows of tiles are kept.

    Boxes are as deep as `max_kept` bytes of rows of tiles allow, in steps that cut no chunk of either image. If no
    depth fits, boxes are a chunk deep and no rows are kept.
    """
    z, depth = image.depth_axis, shape[image.depth_axis]
    step = min(depth, math.lcm(stored_out[z], min(depth, stored(image.array)[z])))
    for planes in [depth, *range(depth // step * step, 0, -step)]:
        cut = _row_by_row(image, shape, stored_out, tile_bytes, planes)
        if _max_kept_nbytes(image, plan, cut) <= max_kept:
            return cut, True
    return _row_by_row(image, shape, stored_out, tile_bytes, min(depth, stored_out[z])), False


def _row_by_row(
    image: MosaicImage, shape: Sequence[int], stored_out: Sequence[int], tile_bytes: int, planes: int
) -> list[Box]:
    """Cut the volume into boxes of at most `planes` planes: slab by slab along Z, in each slab row by row."""
    z, (first, second) = image.depth_axis, image.lateral_axes
    slab, step = list(shape), list(stored_out)
    slab[z] = step[z] = planes
    size = box_size(tuple(slab), step, image.array.dtype.itemsize, tile_bytes)
    return sorted(boxes(tuple(shape), size), key=lambda box: (box[z].start, box[first].start, box[second].start))


def _rows_of(image: MosaicImage, plan: StitchPlan, todo: Sequence[Box]) -> list[set[tuple[int, int]]]:
    """Return the rows of tiles that each box needs: for each row its number and the first plane of the box."""
    lateral = image.lateral_axes
    return [
        {(tile[0], box[image.depth_axis].start) for tile in plan.tiles([box[axis] for axis in lateral])} for box in todo
    ]


def _last_uses(rows: list[set[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Return for each row of tiles the number of the last box that needs it."""
    return {row: number for number, needed in enumerate(rows) for row in needed}


def _max_kept_nbytes(image: MosaicImage, plan: StitchPlan, todo: Sequence[Box]) -> int:
    """Return the maximum bytes of rows of tiles in memory: rows still needed, and rows of the last two boxes."""
    rows = _rows_of(image, plan, todo)
    last, begun, max_rows = _last_uses(rows), set(), 0
    for number, needed in enumerate(rows):
        begun |= needed
        max_rows = max(max_rows, sum(last[row] >= number - 2 for row in begun))
    planes = max(box[image.depth_axis].stop - box[image.depth_axis].start for box in todo)
    width = image.array.shape[image.lateral_axes[1]]
    return max_rows * plan.tile_shape[0] * width * planes * image.array.dtype.itemsize


class _TileReader:
    """Reads the tiles that boxes need.

    - `kept`: all boxes in the order in which they will be read, to read whole rows of tiles once and keep them until
      their last box; empty to read the tiles of each box separately.
    """

    def __init__(self, image: MosaicImage, plan: StitchPlan, device: DeviceName, kept: Sequence[Box]) -> None:
        self._image, self._plan, self._device = image, plan, device
        self._keep, self._number, self.nbytes = bool(kept), 0, 0
        self._last = _last_uses(_rows_of(image, plan, kept))
        self._rows: dict[tuple[int, int], Array] = {}

    def read(self, box: Box) -> list[tuple[Tile, Array, tuple[int, int]]]:
        """Return for each tile of a box its row and column, its voxels, and their lateral offset in the tile."""
        depth, lateral = box[self._image.depth_axis], [box[axis] for axis in self._image.lateral_axes]
        parts = []
        for tile in self._plan.tiles(lateral):
            if self._keep:
                height, width = self._plan.tile_shape
                row = self._row(tile[0], depth)
                inside = slice(0, height), slice(tile[1] * width, (tile[1] + 1) * width)
                parts.append((tile, row[self._box(slice(None), *inside)], (0, 0)))
            else:
                parts.append(self._part(tile, depth, lateral))
        for key in [key for key in self._rows if self._last[key] <= self._number]:
            del self._rows[key]
        self._number += 1
        return parts

    def _box(self, depth: slice, first: slice, second: slice) -> Box:
        box = [depth] * 3
        for axis, extent in zip(self._image.lateral_axes, (first, second), strict=True):
            box[axis] = extent
        return tuple(box)

    def _row(self, number: int, depth: slice) -> Array:
        key = number, depth.start
        if key not in self._rows:
            height, columns = self._plan.tile_shape[0], [tile[1] for tile in self._plan.offsets]
            width = (max(columns) + 1) * self._plan.tile_shape[1]
            self._rows[key] = self._read(
                self._box(depth, slice(number * height, (number + 1) * height), slice(0, width))
            )
        return self._rows[key]

    def _part(self, tile: Tile, depth: slice, lateral: Sequence[slice]) -> tuple[Tile, Array, tuple[int, int]]:
        part = self._plan.part(tile, lateral)
        assert part is not None
        first, second = (
            slice(extent.start + number * size, extent.stop + number * size)
            for extent, number, size in zip(part, tile, self._plan.tile_shape, strict=True)
        )
        return tile, self._read(self._box(depth, first, second)), (part[0].start, part[1].start)

    def _read(self, box: Box) -> Array:
        self.nbytes += box_nbytes(self._image.array, box)
        voxels = read_box(self._image.array, box, self._device)
        dtype = self._image.array.dtype.newbyteorder("=")
        return voxels if voxels.dtype == dtype else voxels.astype(dtype)
