"""Illumination of a mosaic's tiles, estimated and corrected from disk to disk.

In: OME-Zarr mosaic grids, tiles side by side. Out: the fields, estimated from the tiles of one mosaic or of several of
the same microscope, and written to a file; a mosaic with even illumination, as OME-Zarr with the same dtype, axes,
chunks, spacing and origin; a picture of the fields. First, some tiles are read to estimate the fields, each reduced to
a few planes of few pixels. Then the mosaic is read, corrected and written. If the tiles cannot tell the fields, a
warning says so, and voxels keep their values.

Shapes (Z, A, B) are those of a tile, with depth first: A and B are the lateral axes in the array's order.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any, Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.illumination import MAX_GAIN, Evidence, Illumination, illumination_of, reduce_tile
from linumpy.correction.shading import ShadingOptions
from linumpy.device import array_module, to_host
from linumpy.errors import MetadataError
from linumpy.io.output.files import replacing
from linumpy.io.output.results import write_result
from linumpy.mosaic.io.corrected import write_corrected
from linumpy.mosaic.io.image import MosaicImage, needed_tile
from linumpy.mosaic.io.step import ImageOptions, Step, StepOptions
from linumpy.mosaic.io.tiles import Box, box_nbytes, read_box, whole_tiles
from linumpy.pictures import Picture
from linumpy.progress import progress_bar
from linumpy.resample.tile_work import TileWork

log = logging.getLogger(__name__)

#: Why one volume is needed.
_ONE = "illumination is estimated in one volume"
_FIELDS = ("flat", "dark", "baseline")
#: Maximum number of tiles from which the fields are estimated. More tiles average out more of the tissue's structure,
#: but take more memory.
MAX_TILES = 256


def estimate_illumination(
    sources: Sequence[str | Path],
    tile_shape: tuple[int, int] | None = None,
    options: ShadingOptions | None = None,
    *,
    max_tiles: int = MAX_TILES,
    report: str | Path | None = None,
    **common: Unpack[StepOptions],
) -> Illumination:
    """Estimate the illumination that the tiles of several mosaics share, such as slices from one microscope.

    Parameters
    ----------
    sources : sequence of str or Path
        The mosaics, as for :func:`fix_illumination`, with tiles of one shape (Z, A, B).
    tile_shape, options, max_tiles, report
        As for :func:`fix_illumination`; `max_tiles` is the maximum for all mosaics together.
    **common
        :class:`~linumpy.mosaic.io.step.StepOptions`, which also says what is raised.

    Returns
    -------
    Illumination
        On the host, for `fields` of :func:`fix_illumination`.
    """
    if not sources:
        raise ValueError("sources: pass one mosaic or more")
    step = Step.of(StepOptions, common)
    images = [step.open(source, one=_ONE, picture=report) for source in sources]
    tiles = [needed_tile(image, tile_shape) for image in images]
    nbytes = sum(box_nbytes(images[number].array, box) for number, box in _chosen(images, tiles, max_tiles))
    with step.work() as work, progress_bar("illumination", nbytes) as progress:
        fields = _estimate(images, tiles, options, work, replace(step, progress=progress), max_tiles)
    if report is not None:
        step.draw(_picture(images[0], fields), report)
    return fields


def fix_illumination(
    source: str | Path,
    output: str | Path,
    tile_shape: tuple[int, int] | None = None,
    options: ShadingOptions | None = None,
    *,
    fields: Illumination | None = None,
    max_tiles: int = MAX_TILES,
    report: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> Illumination:
    """Estimate the illumination of the tiles of an OME-Zarr mosaic, and write the mosaic without it.

    Each voxel becomes ``(voxel - dark) / flat`` at its depth and its position in its tile.

    Parameters
    ----------
    source : str or Path
        The mosaic: axes z, y and x in any order. Its first tile begins at its first voxel, and tiles do not overlap.
        Of several times or channels one must be selected.
    output : str or Path
        The OME-Zarr image to write.
    options : ShadingOptions, optional
        How to estimate the fields.
    fields : Illumination, optional
        Fields from :func:`estimate_illumination`; by default they are estimated from this mosaic alone.
    max_tiles : int
        Maximum number of complete tiles, evenly spread over the mosaic, from which the fields are estimated.
    tile_shape
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.
    report : str or Path, optional
        A PNG, PDF or SVG to write: the flat field at three depths, and along depth.
    progress : callable, optional
        Called with the number of bytes done since the last call. Without `fields` :func:`bytes_to_read` returns their
        sum; with `fields` the sum is the bytes of the mosaic.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Returns
    -------
    Illumination
        On the host; ``flat`` and ``dark`` have the axes (Z, A, B).
    """
    step = Step(output, **common)
    image = step.open(source, one=_ONE, picture=report)
    tile = needed_tile(image, tile_shape)
    shape = (image.array.shape[image.depth_axis], *tile)
    if fields is not None and fields.flat.shape != shape:
        raise ValueError(f"fields of shape {fields.flat.shape} do not fit the tiles of {image.name}, {shape}")
    with step.work() as work:
        used = fields or _estimate([image], [tile], options, work, step, max_tiles)
        flat, dark = work.xp.asarray(used.flat), work.xp.asarray(used.dark)

        def correct(box: Box, voxels: Array) -> Array:
            xp = array_module(voxels)
            first, second = (
                xp.arange(box[axis].start, box[axis].stop) % size
                for axis, size in zip(image.lateral_axes, tile, strict=True)
            )
            index = (box[image.depth_axis], first[:, None], second)
            return (voxels - xp.asarray(dark)[index]) / xp.asarray(flat)[index]

        write_corrected(image, step, step.column(image, work), correct, work)
    if report is not None:
        step.draw(_picture(image, used), report)
    return used


def bytes_to_read(image: MosaicImage, tile_shape: tuple[int, int] | None, max_tiles: int = MAX_TILES) -> int:
    """Return the bytes that :func:`fix_illumination` reads of a mosaic if it estimates the fields."""
    tile = needed_tile(image, tile_shape)
    return image.nbytes + sum(box_nbytes(image.array, box) for _, box in _chosen([image], [tile], max_tiles))


def _chosen(images: Sequence[MosaicImage], tiles: Sequence[tuple[int, int]], max_tiles: int) -> list[tuple[int, Box]]:
    """Choose complete tiles, as number of the mosaic and voxels.

    They are squares of 2 × 2 tiles, since overlaps of neighbours tell much, evenly spread over all mosaics.
    """
    if max_tiles < 1:
        raise ValueError(f"max_tiles={max_tiles}: at least one tile is needed")
    chosen = []
    for number, (image, tile) in enumerate(zip(images, tiles, strict=True)):
        grid = np.ndindex(whole_tiles(image.lateral_shape, tile))
        for place in sorted(grid, key=lambda place: (place[0] // 2, place[1] // 2, place)):
            box = [slice(0, n) for n in image.array.shape]
            for axis, index, size in zip(image.lateral_axes, place, tile, strict=True):
                box[axis] = slice(index * size, (index + 1) * size)
            chosen.append((number, tuple(box)))
    squares, size = max(1, max_tiles // 4), min(4, max_tiles)
    if len(chosen) <= squares * size:
        return chosen
    firsts = ((2 * k + 1) * len(chosen) // (2 * squares) // 4 * 4 for k in range(squares))
    return [name for first in firsts for name in chosen[first : first + size]]


def _estimate(
    images: Sequence[MosaicImage],
    tiles: Sequence[tuple[int, int]],
    options: ShadingOptions | None,
    work: TileWork,
    step: Step,
    max_tiles: int,
) -> Illumination:
    """Estimate the fields from tiles that are spread evenly over all mosaics."""
    shape = (images[0].array.shape[images[0].depth_axis], *tiles[0])
    for image, tile in zip(images, tiles, strict=True):
        if (image.array.shape[image.depth_axis], *tile) != shape:
            raise MetadataError(
                f"{image.name} has tiles of {(image.array.shape[image.depth_axis], *tile)} voxels and "
                f"{images[0].name} of {shape}: illumination is estimated from tiles of one shape"
            )
    chosen = _chosen(images, tiles, max_tiles)
    reduced: dict[tuple[int, ...], np.ndarray] = {}
    device = work.device  # The functions below are sent to workers, which `work` cannot be.

    def reduce(name: tuple[int, Box], voxels: Array) -> Array:
        """Return the reduced tile."""
        number, box = name
        xp, image = array_module(voxels), images[number]
        measured = image.measured(box)
        if measured is not None:
            voxels = xp.where(measured.mask(xp), voxels, np.float32(np.nan))
        return reduce_tile(xp.moveaxis(voxels, image.depth_axis, 0))

    def keep(name: tuple[int, Box], pixels: Array) -> None:
        number, box = name
        place = (box[axis].start // size for axis, size in zip(images[number].lateral_axes, tiles[number], strict=True))
        reduced[(number, *place)] = to_host(pixels)

    work(
        chosen,
        lambda name: read_box(images[name[0]].array, name[1], device),
        reduce,
        keep,
        done=lambda name: step.advance(box_nbytes(images[name[0]].array, name[1])),
    )
    log.info("%s: illumination of %d tiles of %s voxels", images[0].name, len(chosen), tiles[0])
    places = sorted(reduced)
    fields = illumination_of([reduced[place] for place in places], shape, options, np.array(places))
    for warning in warnings_of(fields):
        log.warning("%s: %s", images[0].name, warning)
    return fields


def warnings_of(fields: Illumination) -> list[str]:
    """Return what a user should know of fields, as sentences."""
    if fields.evidence.left_out:
        return [f"The illumination is not corrected: {fields.evidence.left_out}."]
    low, high = float(fields.flat.min()), float(fields.flat.max())
    if low > 1.001 / MAX_GAIN and high < 0.999 * MAX_GAIN:
        return []
    return [f"The flat field reaches from {low:.2f} to {high:.2f}, the limits: the estimate may be wrong."]


def summary_of(fields: Illumination) -> str:
    """Return a line about fields, for people."""
    flat, evidence = fields.flat, fields.evidence
    return (
        f"flat field from {flat.min():.3f} to {flat.max():.3f} (±{100 * evidence.error:.1f} % expected), dark field "
        f"{fields.dark.mean():.4g} in the mean, from {len(fields.baseline)} tiles, {evidence.tiles} with light"
    )


def write_fields(fields: Illumination, path: str | Path, summary: str | Path, *, overwrite: bool = False) -> None:
    """Write fields to a NumPy archive for :func:`read_fields`, and their numbers and warnings to a JSON file."""
    evidence = asdict(fields.evidence)
    arrays: dict[str, Any] = {name: getattr(fields, name) for name in _FIELDS}
    with replacing(path, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays, evidence=json.dumps(evidence))
    numbers = {
        "gain_min": float(1 / fields.flat.max()),
        "gain_max": float(1 / fields.flat.min()),
        "dark": float(fields.dark.mean()),
    }
    left_out = evidence.pop("left_out")
    write_result(summary, evidence | numbers, warnings=warnings_of(fields), left_out=left_out, overwrite=overwrite)


def read_fields(path: str | Path) -> Illumination:
    """Read the fields that :func:`write_fields` wrote.

    Raises
    ------
    MetadataError
        A file that has no fields.
    """
    try:
        with np.load(path) as saved:
            evidence = Evidence(**json.loads(str(saved["evidence"])))
            return Illumination(**{name: saved[name] for name in _FIELDS}, evidence=evidence)
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise MetadataError(f"{path} has no fields of illumination: {error}") from error


def _picture(image: MosaicImage, fields: Illumination) -> Picture:
    """Draw the fields."""
    from linumpy.mosaic.io.figures import draw_illumination

    spacing = (image.spacing[image.depth_axis], *image.lateral_spacing)
    names, source = image.lateral_names.upper(), PurePosixPath(image.name).name
    flat, dark, baseline = (to_host(field) for field in (fields.flat, fields.dark, fields.baseline))
    return draw_illumination(flat, dark, baseline, spacing, (names[0], names[1]), source=source)
