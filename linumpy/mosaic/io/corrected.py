"""Correct the intensities of a mosaic box by box.

In: a mosaic, and a function that corrects one box. Out: an OME-Zarr image with the shape, axes, chunks, spacing and
metadata of the mosaic. While one box is computed, the next is read and the last is written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.io.carried import carried_from
from linumpy.mosaic.io.image import MosaicImage, tile_attributes
from linumpy.mosaic.io.measured import corrections_attribute
from linumpy.mosaic.io.step import Step
from linumpy.mosaic.io.tiles import Box, box_nbytes, read_box
from linumpy.resample.tile_work import TileWork


def write_corrected(
    image: MosaicImage,
    step: Step,
    size: tuple[int, ...],
    correct: Callable[[Box, Array], Array],
    work: TileWork,
    *,
    dtype: DTypeLike | None = None,
) -> float:
    """Correct a mosaic of one volume in boxes of `size` voxels, and write it.

    - `size`: voxels of a box along the axes of the image.
    - `correct`: takes a box, in the image's order of axes, and its voxels as float32 with depth first; returns the
      corrected voxels with depth first.
    - `work`: where boxes are read and computed.
    - `dtype`: data type of the output, as for :func:`as_dtype`; by default the image's.

    Returns: Of the output's voxels that are not 0, the share at the largest value of an integer dtype.

    Raises `TypeError`: the output is boolean.
    """
    array, z = image.array, image.depth_axis
    out_dtype = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    own_attribute = corrections_attribute(image.corrections, image.lateral_names)
    if image.tile_shape is not None:
        own_attribute |= tile_attributes(image, image.tile_shape)["linumpy"]

    def compute(box: Box, voxels: Array) -> Array:
        xp = array_module(voxels)
        lines = xp.moveaxis(voxels, z, 0).astype(np.float32, copy=False)
        return xp.ascontiguousarray(xp.moveaxis(as_dtype(correct(box, lines), out_dtype), 0, z))

    counts: list[Array] = []

    def write(box: Box, voxels: Array) -> None:
        if out_dtype.kind in "iu":
            xp = array_module(voxels)
            clipped = voxels == np.iinfo(out_dtype).max
            counts.append(xp.stack([xp.count_nonzero(clipped), xp.count_nonzero(voxels)]))
        writer.write(box, voxels)

    attributes = {"linumpy": own_attribute} if own_attribute else None
    with step.writer_like(image, carried_from(image), out_dtype, attributes) as writer:
        work(
            [box for _, box in image.boxes(size)],
            partial(read_box, array, device=work.device),
            compute,
            write,
            done=lambda box: step.advance(box_nbytes(array, box)),
        )
    # One copy at the end: a copy of each count would wait for the device.
    total = to_host(array_module(counts[0]).stack(counts)).sum(axis=0) if counts else (0, 0)
    return float(total[0] / max(1, total[1]))


def as_dtype(voxels: Array, dtype: np.dtype) -> Array:
    """Convert float voxels. For integers they are rounded and clipped to the range of `dtype`, and NaN becomes 0.

    Raises `TypeError`: `dtype` is bool.
    """
    if dtype.kind == "f":
        return voxels.astype(dtype, copy=False)
    xp = array_module(voxels)
    if dtype.kind == "b":
        raise TypeError("a mosaic of booleans has no intensities to correct")
    info = np.iinfo(dtype)
    # float32 holds all integers of 16 bits; float64 has the largest of 64 bits only rounded up.
    floats = xp.nan_to_num(voxels, nan=0.0).astype(np.float32 if dtype.itemsize < 4 else np.float64, copy=False)
    high = float(info.max) if dtype.itemsize < 8 else np.nextafter(float(info.max), 0)
    return xp.clip(xp.rint(floats), float(info.min), high).astype(dtype)
