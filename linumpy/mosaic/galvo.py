"""Detect and mend tiles whose columns are rotated: the camera began a line when the galvanometer was not at its start.

In: a mosaic grid on disk, its tiles side by side. Out: by how many columns its tiles are rotated cyclically along X;
the mosaic with them rotated back. In a tile as it should be, neighbouring A-lines are alike, except for the first and
the last column. In a rotated one these two are neighbours: there a seam runs through all lines of all tiles.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.errors import MetadataError
from linumpy.io.carried import carried_from
from linumpy.io.output.checks import check_apart, check_target
from linumpy.mosaic.io.image import MosaicImage, known_tile, open_mosaic, tile_attributes
from linumpy.mosaic.io.tiles import Box, boxes, read_box, tile_nbytes, tile_shape
from linumpy.resample.tile_work import TileWork, tile_work
from linumpy.write.writer import OmeZarrWriter, Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

log = logging.getLogger(__name__)

#: Tiles that are looked at, spread over the mosaic.
_TILES = 25
#: Neighbouring lines along X that are averaged: it lowers speckle, and structure that spans several lines stays.
_ROWS = 8


@dataclass(frozen=True)
class GalvoShift:
    """By how many columns tiles are rotated.

    Attributes
    ----------
    columns : int
        Column x of a tile is found at ``(x + columns) % width``; 0 for tiles as they should be.
    contrast : float
        Difference of the columns at the seam, relative to the greatest one between other neighbours. Below about 1.5
        the seam is not known from structure.
    """

    columns: int
    contrast: float


def detect_galvo_shift(tiles: Array) -> GalvoShift:
    """Find the seam in tiles of one slice.

    Parameters
    ----------
    tiles : numpy.ndarray or cupy.ndarray, (N, Y, X)
        Projections of tiles along depth; lines along X that are constant or not finite are left out, with the up to
        seven neighbours with which they are averaged.

    Returns
    -------
    GalvoShift
        Without contrast if no line has any.
    """
    xp, (count, height, width) = array_module(tiles), tiles.shape
    rows = max(1, min(_ROWS, height))
    whole = tiles[:, : height // rows * rows].astype(np.float64)
    lines = whole.reshape((count * (height // rows), rows, width)).mean(axis=1)
    lines = lines[xp.isfinite(lines).all(axis=1)]
    # Dark and bright tiles count alike.
    spread = lines.std(axis=1, keepdims=True)
    lines = lines[spread[:, 0] > 0] / spread[spread[:, 0] > 0]
    if lines.shape[0] == 0 or lines.shape[1] < 4:
        return GalvoShift(0, 0.0)
    steps = to_host(abs(lines - xp.roll(lines, 1, axis=1)).mean(axis=0))
    seam = int(steps.argmax())
    others = np.delete(steps, seam)
    return GalvoShift(seam, float(steps[seam] / max(float(others.max()), 1e-30)))


def fix_galvo_shift(
    source: str | Path,
    output: str | Path,
    *,
    columns: int | None = None,
    min_contrast: float = 1.5,
    tile_shape: Sequence[int] | None = None,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    levels: int = 1,
    codec: str | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> GalvoShift:
    """Rotate the tiles of a mosaic back.

    Parameters
    ----------
    source, output : str or Path
        A mosaic grid of one volume with axes z, y, x; and the one to make.
    columns : int, optional
        By how many columns tiles are rotated; by default as :func:`detect_galvo_shift` finds it.
    min_contrast : float
        A shift that is found with less is not applied.
    tile_shape : (int, int), optional
        Voxels of a tile along Y and X, where the metadata lacks them.
    channel, time, spacing, levels, codec, use_gpu, overwrite, progress, tile_bytes, distributed
        As for :func:`linumpy.mosaic.slices.stack_mosaics`.

    Returns
    -------
    GalvoShift
        The one that was mended; 0 columns if it was not known.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError
        An existing output; a source that is no such mosaic, or whose tiles are unknown.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.
    """
    if not min_contrast >= 0:
        raise ValueError(f"min_contrast={min_contrast}: pass a number from 0 on")
    check_target(Path(output), overwrite=overwrite)
    check_apart([output], [source])
    image, tile = _open(source, tile_shape, channel=channel, time=time, spacing=spacing)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        found = GalvoShift(columns % tile[1], 0.0) if columns is not None else _detect(image, tile, work)
        if columns is None and found.contrast < min_contrast:
            log.warning("%s: no seam in its tiles is clear (contrast %.2f): nothing is mended", source, found.contrast)
            found = GalvoShift(0, found.contrast)
        limit = tile_nbytes(tile_bytes, use_gpu)
        _write(image, output, tile, found.columns, levels, codec, overwrite, work, limit, progress)
    return found


def find_galvo_shift(
    source: str | Path,
    *,
    tile_shape: Sequence[int] | None = None,
    use_gpu: bool = False,
    distributed: Client | Cluster | str | None = None,
) -> GalvoShift:
    """Find the seam in the tiles of a mosaic on disk, as :func:`fix_galvo_shift` does, and write nothing.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError, ValueError, GpuUnavailableError
        As :func:`fix_galvo_shift`.
    """
    image, tile = _open(source, tile_shape)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        return _detect(image, tile, work)


def _open(source: str | Path, given: Sequence[int] | None, **chosen: Any) -> tuple[MosaicImage, tuple[int, int]]:
    """Open a mosaic of one volume whose tiles are known."""
    image = open_mosaic(source, **chosen)
    image.only("a mosaic of one volume is mended")
    if image.axes != "zyx":
        raise MetadataError(f"{image.name}: axes {', '.join(image.axes)}; mosaics are mended with axes z, y, x")
    tile = known_tile(image, given)
    if tile is None:
        raise MetadataError(f"{image.name}: the metadata has no tile_shape: pass tile_shape=")
    return image, tile


def _detect(image: MosaicImage, tile: tuple[int, int], work: TileWork) -> GalvoShift:
    depth, height, width = image.array.shape
    every = list(boxes((depth, height // tile[0] * tile[0], width // tile[1] * tile[1]), (depth, *tile)))
    chosen = every[:: max(1, len(every) // _TILES)]
    means: dict[int, np.ndarray] = {}

    def read(number: int) -> Array:
        return read_box(image.array, chosen[number], work.use_gpu)

    work(
        range(len(chosen)), read, lambda number, voxels: to_host(voxels.astype(np.float32).mean(axis=0)),
        means.__setitem__,
    )  # fmt: skip
    return detect_galvo_shift(np.stack([means[number] for number in range(len(chosen))]))


def _write(
    image: MosaicImage, output: str | Path, tile: tuple[int, int], columns: int, levels: int, codec: str | None,
    overwrite: bool, work: TileWork, tile_bytes: int, progress: Progress | None,
) -> None:  # fmt: skip
    carried = carried_from(image).without("labels", "image_label")
    width, dtype = image.array.shape[2], image.array.dtype.newbyteorder("=")

    def whole_tiles(box: Box) -> Box:
        """Widen a box to the tiles that it has columns of."""
        begin, end = box[2].start // tile[1] * tile[1], -(-box[2].stop // tile[1]) * tile[1]
        return (*box[:2], slice(begin, min(end, width)))

    def read(box: Box) -> Array:
        return read_box(image.array, whole_tiles(box), work.use_gpu)

    def turn(box: Box, voxels: Array) -> Array:
        xp, first = array_module(voxels), whole_tiles(box)[2].start
        x = np.arange(box[2].start, box[2].stop)
        start = x // tile[1] * tile[1]
        # A last tile that is cut off is rotated within what is there of it.
        size = np.minimum(tile[1], width - start)
        return xp.take(voxels, xp.asarray(start + (x - start + columns) % size - first), axis=2).astype(
            dtype, copy=False
        )

    def done(box: Box) -> None:
        if progress is not None:
            progress(int(np.prod([extent.stop - extent.start for extent in box])) * dtype.itemsize)

    with OmeZarrWriter(
        output, image.array.shape, dtype, image.spacing, axes="zyx", origin=image.origin, levels=levels,
        chunks=image.array.chunks, shards=image.array.shards, codec=codec, overwrite=overwrite, carried=carried,
        attributes=tile_attributes(image, tile),
    ) as writer:  # fmt: skip
        size = tile_shape(image.array.shape, writer.stored, dtype.itemsize, tile_bytes)
        work(boxes(image.array.shape, size), read, turn, writer.write, done=done)
