"""Detect and correct the galvo shift: the columns of all tiles are rotated cyclically along X.

The shift occurs if the camera starts its lines when the galvanometer is not at the start of its scan. In a correct tile
neighbouring A-lines are alike, but the first and the last column differ. In a rotated tile these two columns are
neighbours, and a seam runs between them through all lines.

In: a mosaic grid on disk, its tiles side by side. Out: the number of columns by which tiles are rotated; the mosaic
with the columns rotated back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, to_host
from linumpy.errors import MetadataError
from linumpy.io.carried import carried_from
from linumpy.mosaic.io.image import MosaicImage, needed_tile, tile_attributes
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box, box_nbytes, boxes, read_box
from linumpy.mosaic.io.tiles import tile_shape as box_size
from linumpy.mosaic.options import Galvo
from linumpy.resample.tile_work import TileWork

log = logging.getLogger(__name__)

#: Approximate number of tiles, spread over the mosaic, in which the seam is searched.
_TILES = 25
#: Number of neighbouring lines along X in a group, whose mean has less speckle and keeps larger structure.
_ROWS = 8


@dataclass(frozen=True)
class GalvoShift:
    """The number of columns by which tiles are rotated.

    - `columns`: column x of a tile is at ``(x + columns) % width``; 0 for correct tiles.
    - `contrast`: difference of the columns at the seam, relative to the greatest difference of other neighbours. Below
      about 1.5 a seam cannot be distinguished from structure.
    """

    columns: int
    contrast: float


def detect_galvo_shift(tiles: Array) -> GalvoShift:
    """Find the seam that all tiles of a slice share.

    - `tiles` (N, Y, X): projections of tiles along depth. Groups of eight lines along X are averaged; a group is left
      out if its mean is constant or not finite.

    Returns: 0 columns with a contrast of 0 if no group has contrast, or for fewer than four columns.
    """
    xp, (count, height, width) = array_module(tiles), tiles.shape
    rows = max(1, min(_ROWS, height))
    complete_groups = tiles[:, : height // rows * rows].astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinite pixels
        lines = complete_groups.reshape((count * (height // rows), rows, width)).mean(axis=1)
    lines = lines[xp.isfinite(lines).all(axis=1)]
    # Normalised, so that dark and bright tiles have the same weight.
    spread = lines.std(axis=1, keepdims=True)
    lines = lines[spread[:, 0] > 0] / spread[spread[:, 0] > 0]
    if lines.shape[0] == 0 or lines.shape[1] < 4:
        return GalvoShift(0, 0.0)
    differences = to_host(abs(lines - xp.roll(lines, 1, axis=1)).mean(axis=0))
    seam = int(differences.argmax())
    others = np.delete(differences, seam)
    return GalvoShift(seam, float(differences[seam] / max(float(others.max()), 1e-30)))


def fix_galvo_shift(
    source: str | Path,
    output: str | Path,
    options: Galvo | None = None,
    *,
    tile_shape: Sequence[int] | None = None,
    **common: Unpack[ImageOptions],
) -> GalvoShift:
    """Rotate the columns of the tiles of a mosaic back.

    Parameters
    ----------
    source : str or Path
        A mosaic grid of one volume with axes z, y, x.
    output : str or Path
        The OME-Zarr mosaic grid to write.
    options : Galvo, optional
        The columns by which tiles are rotated, or the contrast from which a detected shift is corrected.
    tile_shape : (int, int), optional
        Voxels of a tile along Y and X, where the metadata lacks them.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Returns
    -------
    GalvoShift
        The corrected shift: 0 columns if the contrast was too low; a contrast of 0 if the columns were given.
    """
    options = options or Galvo()
    step = Step(output, **common)
    image, tile = _open(source, tile_shape, step)
    with step.work() as work:
        columns = options.columns
        shift = GalvoShift(columns % tile[1], 0.0) if columns is not None else _detect(image, tile, work)
        if columns is None and shift.contrast < options.min_contrast:
            log.warning("%s: no clear seam (contrast %.2f), so columns are not rotated", source, shift.contrast)
            shift = GalvoShift(0, shift.contrast)
        _write(image, step, tile, shift.columns, work)
    return shift


def find_galvo_shift(
    source: str | Path,
    *,
    tile_shape: Sequence[int] | None = None,
    device: DeviceName | None = "auto",
) -> GalvoShift:
    """Detect the shift of a mosaic on disk by :func:`detect_galvo_shift`, whatever its contrast, without writing.

    Raises `FileNotFoundError`, `SourceError`, `MetadataError`, `ValueError`, `GpuUnavailableError`: As
    :func:`fix_galvo_shift`.
    """
    step = Step(device=device)
    image, tile = _open(source, tile_shape, step)
    with step.work() as work:
        return _detect(image, tile, work)


def _open(source: str | Path, tile_given: Sequence[int] | None, step: Step) -> tuple[MosaicImage, tuple[int, int]]:
    """Open a mosaic of one volume; return it and the voxels of a tile."""
    image = step.open(source, one="a mosaic of one volume is corrected")
    if image.axes != "zyx":
        raise MetadataError(f"{image.name}: axes {', '.join(image.axes)}; the galvo shift needs axes z, y, x")
    return image, needed_tile(image, tile_given)


def _detect(image: MosaicImage, tile: tuple[int, int], work: TileWork) -> GalvoShift:
    """Detect the shift in tiles spread over a mosaic."""
    depth, height, width = image.array.shape
    tiles = list(boxes((depth, height // tile[0] * tile[0], width // tile[1] * tile[1]), (depth, *tile)))
    chosen = tiles[:: max(1, len(tiles) // _TILES)]
    means: dict[int, np.ndarray] = {}
    device = work.device  # The functions below are sent to workers, which `work` cannot be.
    work(
        range(len(chosen)),
        lambda number: read_box(image.array, chosen[number], device),
        lambda _, voxels: to_host(voxels.astype(np.float32).mean(axis=0)),
        means.__setitem__,
    )
    return detect_galvo_shift(np.stack([means[number] for number in range(len(chosen))]))


def _write(image: MosaicImage, step: Step, tile: tuple[int, int], columns: int, work: TileWork) -> None:
    """Write the mosaic with the columns of its tiles rotated back."""
    array, dtype = image.array, image.array.dtype.newbyteorder("=")
    width, device = array.shape[2], work.device

    def whole_tiles(box: Box) -> Box:
        """Widen a box to whole tiles along X."""
        begin, end = box[2].start // tile[1] * tile[1], -(-box[2].stop // tile[1]) * tile[1]
        return (*box[:2], slice(begin, min(end, width)))

    def rotate_back(box: Box, voxels: Array) -> Array:
        xp, first = array_module(voxels), whole_tiles(box)[2].start
        x = np.arange(box[2].start, box[2].stop)
        start = x // tile[1] * tile[1]
        # An incomplete last tile is rotated within its own width.
        size = np.minimum(tile[1], width - start)
        source = xp.asarray(start + (x - start + columns) % size - first)
        return xp.take(voxels, source, axis=2).astype(dtype, copy=False)

    carried = carried_from(image).without("labels", "image_label")
    with step.writer_like(image, carried, dtype, tile_attributes(image, tile)) as writer:
        size = box_size(array.shape, writer.stored, dtype.itemsize, step.tile_nbytes(work))
        work(
            boxes(array.shape, size), lambda box: read_box(array, whole_tiles(box), device), rotate_back, writer.write,
            done=lambda box: step.advance(box_nbytes(array, box)),
        )  # fmt: skip
