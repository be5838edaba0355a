"""Illumination of a mosaic's tiles, estimated and corrected from disk to disk.

In: OME-Zarr mosaic grids, tiles side by side. Out: the fields, estimated from the tiles of one mosaic or of several of
the same microscope; a mosaic with even illumination, as OME-Zarr with the same dtype, axes, chunks, spacing and origin;
a picture of the fields. First, some tiles are read to estimate the fields, each reduced to at most 128 × 128 pixels in
every plane. Then the mosaic is read, corrected and written.

Shapes (Z, A, B) are those of a tile, with depth first: A and B are the lateral axes in the array's order.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.illumination import Illumination, illumination_of, reduce_tile
from linumpy.correction.shading import ShadingOptions
from linumpy.device import array_module, to_host
from linumpy.errors import MetadataError
from linumpy.io.output.checks import check_apart, check_target
from linumpy.io.output.files import check_picture, replacing
from linumpy.mosaic.io.corrected import write_corrected
from linumpy.mosaic.io.image import MosaicImage, needed_tile, open_mosaic
from linumpy.mosaic.io.output import OutputImage
from linumpy.mosaic.io.tiles import Box, box_nbytes, column_shape, read_box, tile_nbytes, whole_tiles
from linumpy.resample.tile_work import TileWork, tile_work
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

log = logging.getLogger(__name__)

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
    use_gpu: bool = False,
    overwrite: bool = False,
    distributed: Client | Cluster | str | None = None,
) -> Illumination:
    """Estimate the illumination that the tiles of several mosaics share, such as slices from one microscope.

    Parameters
    ----------
    sources : sequence of str or Path
        The mosaics, as for :func:`fix_illumination`, with tiles of one shape (Z, A, B).
    tile_shape, options, max_tiles, report, use_gpu, overwrite, distributed
        As for :func:`fix_illumination`; `max_tiles` is the maximum for all mosaics together.

    Returns
    -------
    Illumination
        On the host, for `fields` of :func:`fix_illumination`.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError, GpuUnavailableError
        As :func:`fix_illumination`; mosaics whose tiles differ in shape.
    """
    if not sources:
        raise ValueError("sources: pass one mosaic or more")
    images = [_opened(source) for source in sources]
    tiles = [needed_tile(image, tile_shape) for image in images]
    if report is not None:
        check_picture(report, overwrite=overwrite)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        fields = _on_host(_estimate(images, tiles, options, work, None, max_tiles))
    if report is not None:
        _report(Path(report), images[0], tiles[0], fields, overwrite)
    return fields


def fix_illumination(
    source: str | Path,
    output: str | Path,
    tile_shape: tuple[int, int] | None = None,
    options: ShadingOptions | None = None,
    *,
    fields: Illumination | None = None,
    max_tiles: int = MAX_TILES,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    levels: int = 1,
    report: str | Path | None = None,
    codec: str | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
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
    tile_shape, channel, time, spacing, levels, codec, use_gpu, overwrite, tile_bytes, distributed
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.
    report : str or Path, optional
        A PNG, PDF or SVG to write: the flat field at three depths, and along depth.
    progress : callable, optional
        Called with the number of bytes done since the last call. Without `fields` :func:`bytes_to_read` returns their
        sum; with `fields` the sum is the bytes of the mosaic.

    Returns
    -------
    Illumination
        On the host; ``flat`` and ``dark`` have the axes (Z, A, B).

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError, GpuUnavailableError
        An existing output, a source that is no mosaic, tiles that do not fit it; no CUDA device with `use_gpu`.
    """
    image = _opened(source, channel=channel, time=time, spacing=spacing)
    check_apart([output] if report is None else [output, report], [source])
    check_target(Path(output), overwrite=overwrite)
    if report is not None:
        check_picture(report, overwrite=overwrite)
    tile = needed_tile(image, tile_shape)
    shape = (image.array.shape[image.depth_axis], *tile)
    if fields is not None and fields.flat.shape != shape:
        raise ValueError(f"fields of shape {fields.flat.shape} do not fit the tiles of {image.name}, {shape}")
    with tile_work(distributed, use_gpu=use_gpu) as work:
        used = fields or _estimate([image], [tile], options, work, progress, max_tiles)
        on_host, xp = _on_host(used), work.xp
        flat, dark = xp.asarray(used.flat), xp.asarray(used.dark)

        def correct(box: Box, voxels: Array) -> Array:
            xp = array_module(voxels)
            first, second = (
                xp.arange(box[axis].start, box[axis].stop) % size
                for axis, size in zip(image.lateral_axes, tile, strict=True)
            )
            index = (box[image.depth_axis], first[:, None], second)
            corrected: Array = (voxels - xp.asarray(dark)[index]) / xp.asarray(flat)[index]
            return corrected

        size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
        write_corrected(image, OutputImage(output, levels, codec, overwrite, progress), size, correct, work)
    if report is not None:
        _report(Path(report), image, tile, on_host, overwrite)
    return on_host


def _opened(
    source: str | Path, *, channel: int | None = None, time: int | None = None, spacing: Sequence[float] | None = None
) -> MosaicImage:
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    image.only("illumination is estimated in one volume")
    return image


def _on_host(fields: Illumination) -> Illumination:
    return Illumination(*(to_host(field) for field in (fields.flat, fields.dark, fields.baseline)))


def bytes_to_read(image: MosaicImage, tile_shape: tuple[int, int] | None, max_tiles: int = MAX_TILES) -> int:
    """Return the bytes that :func:`fix_illumination` reads of a mosaic if it estimates the fields."""
    tile = needed_tile(image, tile_shape)
    return image.nbytes + sum(box_nbytes(image.array, box) for box in _tiles(image, tile, max_tiles))


def _tiles(image: MosaicImage, tile: tuple[int, int], max_tiles: int) -> list[Box]:
    """Choose at most `max_tiles` complete tiles, evenly spread in the order of the grid."""
    rows, columns = whole_tiles(image.lateral_shape, tile)
    count = min(max_tiles, rows * columns)
    if count == 0:
        return []
    chosen = []
    for number in sorted({(2 * k + 1) * rows * columns // (2 * count) for k in range(count)}):
        box = [slice(0, n) for n in image.array.shape]
        for axis, index, size in zip(image.lateral_axes, divmod(number, columns), tile, strict=True):
            box[axis] = slice(index * size, (index + 1) * size)
        chosen.append(tuple(box))
    return chosen


def _estimate(
    images: Sequence[MosaicImage],
    tiles: Sequence[tuple[int, int]],
    options: ShadingOptions | None,
    work: TileWork,
    progress: Progress | None,
    max_tiles: int,
) -> Illumination:
    """Estimate the fields from tiles that are spread evenly over all mosaics."""
    if max_tiles < 1:
        raise ValueError(f"max_tiles={max_tiles}: at least one tile is needed")
    shape = (images[0].array.shape[images[0].depth_axis], *tiles[0])
    for image, tile in zip(images, tiles, strict=True):
        if (image.array.shape[image.depth_axis], *tile) != shape:
            raise MetadataError(
                f"{image.name} has tiles of {(image.array.shape[image.depth_axis], *tile)} voxels and "
                f"{images[0].name} of {shape}: illumination is estimated from tiles of one shape"
            )
    tiles_each, remainder = divmod(max_tiles, len(images))
    chosen = [
        (number, box)
        for number, (image, tile) in enumerate(zip(images, tiles, strict=True))
        for box in _tiles(image, tile, tiles_each + (number < remainder))
    ]
    reduced: dict[tuple[int, ...], tuple[Array, Array | None]] = {}
    use_gpu = work.use_gpu  # The functions below are sent to workers, which `work` cannot be.

    def reduce(name: tuple[int, Box], voxels: Array) -> Array:
        """Return the reduced tile, NaN where it has no valid voxel: one array can be sent from a worker."""
        number, box = name
        xp, image = array_module(voxels), images[number]
        measured = image.measured(box)
        if measured is not None:
            voxels = xp.where(measured.mask(xp), voxels, np.float32(np.nan))
        pixels, valid = reduce_tile(xp.moveaxis(voxels, image.depth_axis, 0))
        return pixels if valid is None else xp.where(valid, pixels, np.float32(np.nan))

    def keep(name: tuple[int, Box], pixels: Array) -> None:
        xp = array_module(pixels)
        valid = xp.isfinite(pixels)
        entry = (pixels, None) if bool(valid.all()) else (xp.where(valid, pixels, 0), valid)
        reduced[(name[0], *(part.start for part in name[1]))] = entry

    work(
        chosen,
        lambda name: read_box(images[name[0]].array, name[1], use_gpu),
        reduce,
        keep,
        done=lambda name: None if progress is None else progress(box_nbytes(images[name[0]].array, name[1])),
    )
    log.info("%s: illumination of %d tiles of %s voxels", images[0].name, len(chosen), tiles[0])
    return illumination_of([reduced[key] for key in sorted(reduced)], shape, options)


def _report(path: Path, image: MosaicImage, tile: tuple[int, int], fields: Illumination, overwrite: bool) -> None:
    """Write the picture of the fields."""
    from linumpy.mosaic.io.figures import draw_illumination
    from linumpy.pictures import save

    spacing = (image.spacing[image.depth_axis], *image.lateral_spacing)
    names, source = image.lateral_names.upper(), PurePosixPath(image.name).name
    flat, dark, baseline = (to_host(field) for field in (fields.flat, fields.dark, fields.baseline))
    drawn = draw_illumination(flat, dark, baseline, spacing, (names[0], names[1]), source=source)
    with replacing(path, overwrite=overwrite) as picture:
        save(drawn, picture, path.suffix)
