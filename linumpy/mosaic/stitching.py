"""Stitch the tiles of a mosaic grid of any size, from disk to disk.

In: an OME-Zarr mosaic grid, and the positions of its tiles. Out: one OME-Zarr volume with its pyramid. Each box of the
volume is blended in one pass from all tiles that cover it. Boxes are made row by row; a tile is read when the first of
them needs it and kept until the last one has, so that every voxel is read once, as far as two rows of tiles fit into
memory. Three boxes are in memory beside them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, free_memory
from linumpy.errors import SourceError
from linumpy.gpu.oct.blend import PlacedTile, blend_tiles
from linumpy.io.carried import Carried, carried_from
from linumpy.io.output.checks import check_apart, check_target
from linumpy.mosaic.blend_weights import diffusion_weights, distance_weights
from linumpy.mosaic.io.image import MosaicImage, open_mosaic
from linumpy.mosaic.io.tiles import Box, box_nbytes, boxes, read_box, stored, tile_nbytes, tile_shape
from linumpy.mosaic.tile_positions import lateral_tile, whole_tiles
from linumpy.registration.position_files import read_positions
from linumpy.registration.positions import TilePositions
from linumpy.resample.tile_work import tile_work
from linumpy.write.writer import OmeZarrWriter, Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

log = logging.getLogger(__name__)

#: Memory for kept tiles: on the host so many bytes, on a device this share of what is free.
HOST_KEPT_BYTES, _KEPT_SHARE = 4 * 2**30, 0.4
#: Extent of all tiles along an axis at most, relative to a row and a column of them laid end to end.
_WIDEST = 2
#: A fraction of a voxel below this is none.
_WHOLE = 1e-4

Tile = tuple[int, int]


@dataclass(frozen=True)
class StitchPlan:
    """Where the tiles lie in a stitched volume.

    Attributes
    ----------
    size : (int, int)
        Lateral voxels of the volume.
    tile_shape : (int, int)
        Of a tile.
    origin : (float, float)
        Position of the volume's first voxel, in voxels from the first tile's.
    offsets : mapping of (int, int) to numpy.ndarray
        For each tile that is there, by row and column: its first voxel in the volume, to fractions of a voxel.
    """

    size: tuple[int, int]
    tile_shape: tuple[int, int]
    origin: tuple[float, float]
    offsets: Mapping[Tile, np.ndarray]

    def corner(self, tile: Tile, axis: int) -> tuple[int, float]:
        """Return the volume's first voxel in a tile along a lateral axis: whole voxels, and the fraction on top."""
        at = -float(self.offsets[tile][axis])
        whole = math.floor(at + _WHOLE)
        return whole, at - whole if at - whole >= _WHOLE else 0.0

    def part(self, tile: Tile, lateral: Sequence[slice]) -> tuple[slice, slice] | None:
        """Return the lateral voxels of a tile that a box of the volume needs; None if it needs none."""
        needed = []
        for axis, extent in enumerate(lateral):
            (whole, fraction), length = self.corner(tile, axis), self.tile_shape[axis]
            beyond = fraction > 0
            start, stop = max(0, extent.start + whole), min(length - beyond, extent.stop + whole)
            if start >= stop:
                return None
            needed.append(slice(start, stop + beyond))
        return needed[0], needed[1]

    def tiles(self, lateral: Sequence[slice]) -> list[Tile]:
        """List the tiles that a box of the volume needs."""
        return [tile for tile in self.offsets if self.part(tile, lateral) is not None]


def plan_stitching(found: TilePositions, *, interpolate: bool = True) -> StitchPlan:
    """Arrange tiles in the smallest volume that holds all of them; pure.

    Parameters
    ----------
    found : TilePositions
        The positions; missing tiles are left out.
    interpolate : bool
        Whether tiles lie at fractions of voxels; else positions are rounded.

    Raises
    ------
    ValueError
        No tile is there, or tiles lie further apart than they could side by side, as after a wrong unit.
    """
    places = [(int(i), int(j)) for i, j in np.argwhere(found.present)]
    if not places:
        raise ValueError("no tile is there: all of them are missing")
    positions = np.array([found.positions[place] for place in places])
    if not interpolate:
        positions = np.rint(positions)
    origin = positions.min(axis=0)
    offsets = positions - origin
    most = _WIDEST * sum(found.grid) * max(found.tile_shape)
    if not (offsets <= most).all():
        raise ValueError(
            f"the positions span {offsets.max():.4g} voxels, and {found.grid[0]} × {found.grid[1]} tiles of "
            f"{tuple(found.tile_shape)} voxels at most {most}: positions are in voxels of the mosaic"
        )
    size = np.floor(offsets.max(axis=0) + _WHOLE).astype(int) + found.tile_shape
    return StitchPlan(
        (int(size[0]), int(size[1])), found.tile_shape, (float(origin[0]), float(origin[1])),
        dict(zip(places, offsets, strict=True)),
    )  # fmt: skip


@dataclass(frozen=True)
class Stitched:
    """Summary of a stitched mosaic.

    Attributes
    ----------
    plan : StitchPlan
        Where the tiles lie.
    nbytes : int
        Bytes of the tiles.
    read_nbytes : int
        Bytes that were read, decoded; 0 where workers of a cluster read.
    """

    plan: StitchPlan
    nbytes: int
    read_nbytes: int


def stitch_mosaic(
    source: str | Path,
    positions: str | Path | TilePositions,
    output: str | Path,
    *,
    blending: str = "distance",
    interpolate: bool = True,
    tile_shape: tuple[int, int] | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    chunks: Sequence[int] | None = None,
    levels: int = 1,
    codec: str | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    kept_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> Stitched:
    """Stitch the tiles of an OME-Zarr mosaic grid.

    Parameters
    ----------
    source : str or Path
        The mosaic grid: axes z, y and x in any order, tiles whole along z. Of several times or channels one must be
        selected.
    positions : str, Path or TilePositions
        The positions of its tiles, or a file of them.
    output : str or Path
        The OME-Zarr image to write, of the mosaic's dtype and axes; 0 where no tile lies. Its origin is that of the
        tile with the smallest coordinates; it has the metadata that still apply.
    blending : {"distance", "diffusion"}
        Weights of tiles where they overlap: :mod:`linumpy.mosaic.blend_weights`. Diffusion takes about a second a tile
        more.
    interpolate : bool
        Whether tiles are placed to fractions of voxels, interpolated linearly; else at the nearest whole voxel.
    tile_shape : (int, int), optional
        Voxels of a tile along the lateral axes, in the order of the array's axes; by default as for
        :func:`linumpy.mosaic.grid.resample_mosaic_grid`.
    channel, time : int, optional
        The entry to select, counted from 0; needed where there are several.
    spacing : (float, float, float), optional
        Voxel spacing of the mosaic's finest resolution in µm along z, y and x, where its metadata lacks it.
    chunks : (int, int, int), optional
        Of the output; by default chosen by the writer.
    levels : int
        Number of resolutions to write.
    codec : str, optional
        How chunks are compressed, as for :class:`linumpy.write.writer.OmeZarrWriter`. By default that of the source.
    use_gpu : bool
        Whether to read to the GPU and compute there.
    overwrite : bool
        Whether to replace an existing output.
    progress : callable, optional
        Called with the number of the mosaic's bytes done since the last call.
    tile_bytes : int
        Approximate bytes of a box of the output; by default 256 MiB on a GPU and 32 MiB on the CPU.
    kept_bytes : int, optional
        Bytes of the tiles that may be kept in memory; by default 4 GiB on the CPU and 40 % of what is free on a GPU.
        With less than two rows of tiles, voxels at the borders of boxes are read again.
    distributed : distributed.Client, cluster or str, optional
        A dask client, a cluster, or the address of a scheduler. Its workers, which must see the source, read and
        blend, without keeping tiles; with `use_gpu` each needs a GPU. This process writes.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError
        An existing output, a source that is no mosaic grid, positions that do not fit it.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    image.only("the tiles of one volume are stitched")
    check_target(Path(output), overwrite=overwrite)
    check_apart([output], [source] if isinstance(positions, TilePositions) else [source, positions])
    tile = lateral_tile(image, tile_shape)
    plan = plan_stitching(_fitting(image, positions, tile), interpolate=interpolate)
    weights = _weights(plan, blending)
    if image.corrections:
        log.info("%s: voxels that focal correction filled count as measured in the stitched volume", image.name)
    # Without a warning that sizes of tiles and their corrections end here: there are no tiles any more.
    carried = replace(carried_from(image).without("labels", "image_label"), own=Carried().own).on_another_grid()
    carried.log_dropped(image.name, output)
    z, lateral, dtype = image.depth_axis, image.lateral_axes, image.array.dtype.newbyteorder("=")
    shape, origin = list(image.array.shape), list(image.origin)
    for k, axis in enumerate(lateral):
        shape[axis] = plan.size[k]
        origin[axis] += plan.origin[k] * image.spacing[axis]
    with tile_work(distributed, use_gpu=use_gpu) as work, OmeZarrWriter(
        output, shape, dtype, image.spacing, axes=image.axes, origin=origin, levels=levels, chunks=chunks, codec=codec,
        overwrite=overwrite, carried=carried,
    ) as writer:  # fmt: skip
        here = work.client is None
        limit = 0 if not here else kept_bytes if kept_bytes is not None else _kept_bytes(use_gpu)
        todo, keep = _boxes(image, plan, shape, writer.stored, tile_nbytes(tile_bytes, use_gpu), limit)
        tiles = _Tiles(image, plan, use_gpu, todo if keep else [])
        maps = [work.xp.asarray(one) for one in weights]
        of_tile = {one: maps[k % len(maps)] for k, one in enumerate(plan.offsets)}

        def blend(box: Box, parts: list[tuple[Tile, Array, tuple[int, int]]]) -> Array:
            xp: Any = array_module(parts[0][1]) if parts else np
            placed = []
            for one, voxels, begin in parts:
                (y, fy), (x, fx) = plan.corner(one, 0), plan.corner(one, 1)
                corner = y + box[lateral[0]].start, x + box[lateral[1]].start
                placed.append(PlacedTile(voxels, begin, corner, (fy, fx), xp.asarray(of_tile[one])))
            return blend_tiles(placed, [extent.stop - extent.start for extent in box], z, dtype, xp)

        told, whole = 0, math.prod(shape) * dtype.itemsize

        def done(box: Box) -> None:
            nonlocal told
            before, told = told, told + math.prod(extent.stop - extent.start for extent in box) * dtype.itemsize
            if progress is not None:
                progress(told * image.nbytes // whole - before * image.nbytes // whole)

        work(todo, tiles.read, blend, writer.write, done=done)
    return Stitched(plan, len(plan.offsets) * math.prod(tile) * image.array.shape[z] * dtype.itemsize, tiles.nbytes)


def _fitting(image: MosaicImage, positions: str | Path | TilePositions, tile: tuple[int, int]) -> TilePositions:
    """Return the positions, which must be of as many tiles of this shape as the mosaic has."""
    found = positions if isinstance(positions, TilePositions) else read_positions(positions, tile)
    first, second = image.lateral_axes
    grid = whole_tiles((image.array.shape[first], image.array.shape[second]), tile)
    if found.grid != grid or tuple(found.tile_shape) != tile:
        raise SourceError(
            f"the positions are of {found.grid[0]} × {found.grid[1]} tiles of {tuple(found.tile_shape)} voxels, and "
            f"{image.name} has {grid[0]} × {grid[1]} of {tile}"
        )
    return found


def _weights(plan: StitchPlan, blending: str) -> list[np.ndarray]:
    """Return one map for all tiles, or one for each."""
    if blending == "distance":
        return [distance_weights(plan.tile_shape)]
    if blending == "diffusion":
        return diffusion_weights(plan.tile_shape, np.array(list(plan.offsets.values())))
    raise ValueError(f"blending={blending!r}: choose distance or diffusion")


def _kept_bytes(use_gpu: bool) -> int:
    return int(_KEPT_SHARE * free_memory()) if use_gpu else HOST_KEPT_BYTES


def _boxes(
    image: MosaicImage, plan: StitchPlan, shape: Sequence[int], stored_out: Sequence[int], tile_bytes: int, limit: int
) -> tuple[list[Box], bool]:
    """Cut the volume into boxes, in the order in which they are made; and say whether rows of tiles are kept.

    Boxes are as deep as kept rows of tiles allow, in steps that cut no chunk of either image; else a chunk deep.
    """
    z, depth = image.depth_axis, shape[image.depth_axis]
    step = min(depth, math.lcm(stored_out[z], min(depth, stored(image.array)[z])))
    for planes in [depth, *range(depth // step * step, 0, -step)]:
        cut = _row_by_row(image, shape, stored_out, tile_bytes, planes)
        if _most_kept(image, plan, cut) <= limit:
            return cut, True
    return _row_by_row(image, shape, stored_out, tile_bytes, min(depth, stored_out[z])), False


def _row_by_row(
    image: MosaicImage, shape: Sequence[int], stored_out: Sequence[int], tile_bytes: int, planes: int
) -> list[Box]:
    z, (first, second) = image.depth_axis, image.lateral_axes
    slab, step = list(shape), list(stored_out)
    slab[z] = step[z] = planes
    size = tile_shape(tuple(slab), step, image.array.dtype.itemsize, tile_bytes)
    return sorted(boxes(tuple(shape), size), key=lambda box: (box[z].start, box[first].start, box[second].start))


def _rows_of(image: MosaicImage, plan: StitchPlan, todo: Sequence[Box]) -> list[set[tuple[int, int]]]:
    """Return the rows of tiles that each box needs, each with its first plane."""
    lateral = image.lateral_axes
    return [
        {(tile[0], box[image.depth_axis].start) for tile in plan.tiles([box[axis] for axis in lateral])} for box in todo
    ]


def _last_uses(rows: list[set[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Return the number of the last box that needs each row of tiles."""
    return {row: number for number, needed in enumerate(rows) for row in needed}


def _most_kept(image: MosaicImage, plan: StitchPlan, todo: Sequence[Box]) -> int:
    """Return the most bytes of rows of tiles in memory at the same time: kept ones, and those of the last two boxes."""
    rows = _rows_of(image, plan, todo)
    last, begun, most = _last_uses(rows), set(), 0
    for number, needed in enumerate(rows):
        begun |= needed
        most = max(most, sum(last[row] >= number - 2 for row in begun))
    planes = max(box[image.depth_axis].stop - box[image.depth_axis].start for box in todo)
    width = image.array.shape[image.lateral_axes[1]]
    return most * plan.tile_shape[0] * width * planes * image.array.dtype.itemsize


class _Tiles:
    """Reads the tiles that boxes need; with `kept`, whole rows of tiles, once.

    Parameters
    ----------
    image : MosaicImage
        The mosaic grid.
    plan : StitchPlan
        Where tiles lie.
    use_gpu : bool
        Whether to read to the GPU.
    kept : sequence of Box
        All boxes in the order in which they will be read; empty to read each box by itself.
    """

    def __init__(self, image: MosaicImage, plan: StitchPlan, use_gpu: bool, kept: Sequence[Box]) -> None:
        self._image, self._plan, self._use_gpu = image, plan, use_gpu
        self._keep, self._number, self.nbytes = bool(kept), 0, 0
        self._last = _last_uses(_rows_of(image, plan, kept))
        self._rows: dict[tuple[int, int], Array] = {}

    def read(self, box: Box) -> list[tuple[Tile, Array, tuple[int, int]]]:
        """Return the tiles of a box: row and column, the voxels that are needed at least, and the first lateral one."""
        depth, lateral = box[self._image.depth_axis], [box[axis] for axis in self._image.lateral_axes]
        found = []
        for tile in self._plan.tiles(lateral):
            if self._keep:
                height, width = self._plan.tile_shape
                row = self._row(tile[0], depth)
                inside = slice(0, height), slice(tile[1] * width, (tile[1] + 1) * width)
                found.append((tile, row[self._box(slice(None), *inside)], (0, 0)))
            else:
                found.append(self._part(tile, depth, lateral))
        for key in [key for key in self._rows if self._last[key] <= self._number]:
            del self._rows[key]
        self._number += 1
        return found

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
        voxels = read_box(self._image.array, box, self._use_gpu)
        dtype = self._image.array.dtype.newbyteorder("=")
        return voxels if voxels.dtype == dtype else voxels.astype(dtype)
