"""Correct the intensities of a mosaic box by box.

In: a mosaic and a function of one box. Out: an OME-Zarr image with the mosaic's shape, axes, chunks, spacing and
metadata. The next box is read while one is computed and the last is written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.io.carried import carried_from
from linumpy.mosaic.io.image import MosaicImage, tile_attributes
from linumpy.mosaic.io.measured import record
from linumpy.mosaic.io.output import OutputImage
from linumpy.mosaic.io.tiles import Box, box_nbytes, read_box
from linumpy.resample.tile_work import TileWork


def write_corrected(
    image: MosaicImage,
    output: OutputImage,
    size: tuple[int, ...],
    correct: Callable[[Box, Array], Array],
    work: TileWork,
    *,
    dtype: DTypeLike | None = None,
) -> None:
    """Correct a mosaic of one volume in boxes of a size.

    Parameters
    ----------
    image : MosaicImage
        The mosaic.
    output : OutputImage
        The image to write.
    size : tuple of int
        Voxels of a box along the axes of the image.
    correct : callable
        Takes a box and its voxels as float32 with depth first; returns corrected voxels, in the same order of axes.
    work : TileWork
        Where boxes are computed.
    dtype : dtype, optional
        Of the output; by default the image's. Integers are rounded and clipped to their range.
    """
    array, z, use_gpu = image.array, image.depth_axis, work.use_gpu
    out_dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    own = record(image.corrections, image.lateral_names)
    if image.tile_shape is not None:
        own |= tile_attributes(image, image.tile_shape)["linumpy"]

    def compute(box: Box, voxels: Array) -> Array:
        xp = array_module(voxels)
        lines = xp.moveaxis(voxels, z, 0).astype(np.float32, copy=False)
        corrected: Array = xp.ascontiguousarray(xp.moveaxis(as_dtype(correct(box, lines), out_dtype), 0, z))
        return corrected

    with output.writer_like(image, carried_from(image), out_dtype, {"linumpy": own} if own else None) as writer:
        work(
            [box for _, box in image.boxes(size)],
            lambda box: read_box(array, box, use_gpu),
            compute,
            writer.write,
            done=lambda box: output.advance(box_nbytes(array, box)),
        )


def as_dtype(voxels: Array, dtype: np.dtype) -> Array:
    """Convert float voxels: integers are rounded and clipped to the range of their type, and NaN becomes 0."""
    if dtype.kind == "f":
        return voxels.astype(dtype, copy=False)
    xp = array_module(voxels)
    if dtype.kind == "b":
        raise TypeError("a mosaic of booleans has no intensities to correct")
    info = np.iinfo(dtype)
    # float32 holds all integers of 16 bits; float64 has the largest of 64 bits only rounded up.
    wide = xp.nan_to_num(voxels, nan=0.0).astype(np.float32 if dtype.itemsize < 4 else np.float64, copy=False)
    high = float(info.max) if dtype.itemsize < 8 else np.nextafter(float(info.max), 0)
    return xp.clip(xp.rint(wide), float(info.min), high).astype(dtype)
