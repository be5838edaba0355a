"""The average intensity projection of a mosaic of any size, from disk to disk.

In: an OME-Zarr mosaic. Out: its mean along depth, as an OME-Zarr image or as a PNG of 16 bits. The mosaic is cut into
columns, boxes of the whole depth. While one column is projected, the next is read and the last is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.gpu.oct.projection import project
from linumpy.io.output.checks import check_apart, check_target
from linumpy.io.output.files import check_picture, replacing
from linumpy.mosaic.io.image import MosaicImage, open_mosaic
from linumpy.mosaic.io.measured import MeasuredVoxels
from linumpy.mosaic.io.output import OutputImage
from linumpy.mosaic.io.tiles import box_nbytes, column_shape, read_box, tile_nbytes
from linumpy.resample.tile_work import TileWork, tile_work
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

#: Percentiles of the intensities that are black and white in a picture.
WINDOW = (0.1, 99.9)
#: Value of white in a PNG of 16 bits.
_WHITE = 65535


@dataclass(frozen=True)
class MosaicProjection:
    """Summary of a projection.

    - `shape` (int, int): pixels of the output.
    - `window` ((float, float) or None): intensities that are black and white in the picture; None for an OME-Zarr
      image.
    """

    shape: tuple[int, int]
    nbytes: int
    window: tuple[float, float] | None = None


def project_mosaic(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    codec: str | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> MosaicProjection:
    """Write the mean of an OME-Zarr mosaic along depth as an OME-Zarr image.

    Voxels that focal correction filled, which the mosaic's metadata records, are excluded.

    Parameters
    ----------
    source : str or Path
        The mosaic: axes z, y and x in any order, and t and c.
    output : str or Path
        The image to write: float32, with the mosaic's lateral axes, spacing and origin, and a projection for each time
        and channel. Metadata that still apply are copied.
    level : int
        Resolution level of the mosaic.
    channel, time : int, optional
        The entry to select, counted from 0; by default all.
    spacing, codec, use_gpu, overwrite, distributed
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.
    progress : callable, optional
        Called with the number of bytes of the mosaic projected since the last call.
    tile_bytes : int, optional
        Approximate bytes of a column; by default 256 MiB on a GPU and 32 MiB on the CPU. Three columns are in memory.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, GpuUnavailableError
        An existing output, a source that is no mosaic; no CUDA device with `use_gpu`.
    """
    image = open_mosaic(source, level, channel=channel, time=time, spacing=spacing)
    check_target(Path(output), overwrite=overwrite)
    check_apart([output], [source])
    size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
    target = OutputImage(path=output, codec=codec, overwrite=overwrite)
    with (
        tile_work(distributed, use_gpu=use_gpu) as work,
        target.map_writer(image, size, finest=level == 0) as writer,
    ):
        project_columns(image, size, writer.write, work, progress)
    return MosaicProjection(image.lateral_shape, image.nbytes)


def project_mosaic_to_png(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> MosaicProjection:
    """Draw the mean of an OME-Zarr mosaic along depth as a PNG of 16 bits.

    Intensities from the 0.1st to the 99.9th percentile become black to white, one pixel for each voxel; non-finite
    values are black. Parameters and errors are those of :func:`project_mosaic`, except that the output is a PNG and
    that one of several times or channels must be selected.
    """
    from PIL import Image

    image = open_mosaic(source, level, channel=channel, time=time, spacing=spacing)
    check_picture(output, overwrite=overwrite, formats=(".png",))
    check_apart([output], [source])
    image.only("a picture shows one volume")
    with tile_work(distributed, use_gpu=use_gpu) as work:
        pixels = work.xp.empty(image.lateral_shape, np.float32)

        def store_means(index: tuple[int | slice, ...], means: Array) -> None:
            pixels[index] = means

        size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
        project_columns(image, size, store_means, work, progress)
    picture, window = stretch(work.xp, pixels)
    with replacing(output, overwrite=overwrite) as temporary:
        Image.fromarray(to_host(picture)).save(temporary, format="PNG")
    return MosaicProjection(image.lateral_shape, image.nbytes, window)


def stretch(xp: ModuleType, pixels: Array) -> tuple[Array, tuple[float, float]]:
    """Map intensities to 16 bits, with the percentiles :data:`WINDOW` of the finite pixels as black and white.

    Returns: (1) Non-finite pixels are black. (2) The intensities that are black and white; (0, 0) without a finite
    pixel.
    """
    finite = pixels[xp.isfinite(pixels)]
    if not finite.size:
        return xp.zeros(pixels.shape, np.uint16), (0.0, 0.0)
    black, white = (float(intensity) for intensity in xp.percentile(finite, xp.asarray(WINDOW)))
    scale = _WHITE / (white - black) if white > black else 0.0
    levels = xp.clip((pixels - np.float32(black)) * np.float32(scale), 0, _WHITE)
    return xp.rint(xp.where(xp.isfinite(levels), levels, 0)).astype(np.uint16), (black, white)


def _mean(column: Array, measured: MeasuredVoxels | None, depth_axis: int) -> Array:
    """Compute the mean of the measured voxels along depth; NaN where there are none. Overwrites `column`."""
    if measured is None:
        return project(column, depth_axis)  # type: ignore[return-value]
    xp = array_module(column)
    # The mean over all planes, with 0 for voxels that were not measured, times planes over measured planes.
    xp.copyto(column, 0, where=~measured.mask(xp))
    count = measured.count(xp)
    ratio = xp.where(count > 0, measured.planes / xp.maximum(count, 1), np.nan)
    return project(column, depth_axis) * ratio.astype(np.float32)


def project_columns(
    image: MosaicImage,
    size: tuple[int, ...],
    write: Callable[[tuple[int | slice, ...], Array], None],
    work: TileWork,
    progress: Progress | None,
    projection: Callable[[Array, MeasuredVoxels | None, int], Array] = _mean,
) -> None:
    """Compute the means of all volumes along depth, or another projection, column by column.

    - `write`: takes the index of a column in the projections (an integer for each time and channel axis, then two
      slices), and the projection of the column.
    - `work`: where columns are read and computed.
    - `progress`: called with the number of bytes of the mosaic projected since the last call.
    - `projection`: takes a column, which it may overwrite, its measured voxels, or None if all are, and its axis of
      depth.
    """
    (first, second), use_gpu = image.lateral_axes, work.use_gpu
    work(
        image.boxes(size),
        lambda part: read_box(image.volumes[part[0]], part[1], use_gpu),
        lambda part, column: projection(column, image.measured(part[1]), image.depth_axis),
        lambda part, pixels: write((*part[0], part[1][first], part[1][second]), pixels),
        done=lambda part: None if progress is None else progress(box_nbytes(image.array, part[1])),
    )
