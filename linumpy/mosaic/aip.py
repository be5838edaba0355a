"""The average intensity projection of a mosaic of any size, from disk to disk.

In: an OME-Zarr mosaic. Out: its mean along depth, as an OME-Zarr image or as a PNG of 16 bits. The mosaic is cut into
columns, boxes of the whole depth. While one column is projected, the next is read and the last is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Unpack

import numpy as np
from PIL import Image

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.gpu.oct.projection import project
from linumpy.io.output.checks import check_apart
from linumpy.io.output.files import check_picture, replacing
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.measured import MeasuredVoxels
from linumpy.mosaic.io.step import ImageOptions, Step, TileOptions
from linumpy.mosaic.io.tiles import box_nbytes, read_box
from linumpy.resample.tile_work import TileWork

#: Percentiles of the intensities that are black and white in a picture.
WINDOW = (0.1, 99.9)
#: Value of white in a PNG of 16 bits.
_WHITE = 65535


def project_mosaic(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    **common: Unpack[ImageOptions],
) -> None:
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
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.
    """
    step = Step(output, **common)
    image = step.open(source, level)
    with step.work() as work, step.map_writer(image, work, finest=level == 0) as writer:
        project_columns(image, step, writer.write, work)


def project_mosaic_to_png(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    **common: Unpack[TileOptions],
) -> tuple[float, float]:
    """Draw the mean of an OME-Zarr mosaic along depth as a PNG of 16 bits.

    Intensities from the 0.1st to the 99.9th percentile become black to white, one pixel for each voxel; non-finite
    values are black. Parameters and errors are those of :func:`project_mosaic`, except that the output is a PNG and
    that one of several times or channels must be selected.

    Returns: The intensities that are black and white.
    """
    step = Step.of(TileOptions, common)
    image = step.open(source, level, one="a picture shows one volume")
    check_picture(output, overwrite=step.overwrite, formats=(".png",))
    check_apart([output], [source])
    with step.work() as work:
        pixels = work.xp.empty(image.lateral_shape, np.float32)
        project_columns(image, step, pixels.__setitem__, work)
    picture, window = stretch(work.xp, pixels)
    with replacing(output, overwrite=step.overwrite) as temporary:
        Image.fromarray(to_host(picture)).save(temporary, format="PNG")
    return window


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
    step: Step,
    write: Callable[[tuple[int | slice, ...], Array], None],
    work: TileWork,
    projection: Callable[[Array, MeasuredVoxels | None, int], Array] = _mean,
) -> None:
    """Compute the means of all volumes along depth, or another projection, column by column.

    - `write`: takes the index of a column in the projections (an integer for each time and channel axis, then two
      slices), and the projection of the column.
    - `work`: where columns are read and computed.
    - `projection`: takes a column, which it may overwrite, its measured voxels, or None if all are, and its axis of
      depth.
    """
    (first, second), device = image.lateral_axes, work.device
    work(
        image.boxes(step.column(image, work)),
        lambda part: read_box(image.volumes[part[0]], part[1], device),
        lambda part, column: projection(column, image.measured(part[1]), image.depth_axis),
        lambda part, pixels: write((*part[0], part[1][first], part[1][second]), pixels),
        done=lambda part: step.advance(box_nbytes(image.array, part[1])),
    )
