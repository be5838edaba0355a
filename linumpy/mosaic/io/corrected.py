"""Write a mosaic whose intensities were corrected, box by box, with all else as in the source.

In: a mosaic and a function of one box. Out: an OME-Zarr image with its shape, axes, chunks, spacing and metadata. The
next box is read while one is computed and the last is written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.io.carried import carried_from
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.measured import record
from linumpy.mosaic.io.tiles import Box, box_nbytes, read_box
from linumpy.resample.tile_work import TileWork
from linumpy.write.writer import OmeZarrWriter, Progress


def write_corrected(
    image: MosaicImage,
    output: str | Path,
    size: tuple[int, ...],
    correct: Callable[[Box, Array], Array],
    work: TileWork,
    *,
    dtype: Any = None,
    levels: int = 1,
    codec: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    attributes: dict[str, Any] | None = None,
) -> None:
    """Correct a mosaic of one volume in boxes of a size.

    Parameters
    ----------
    image : MosaicImage
        The mosaic.
    output : str or Path
        The OME-Zarr image to write.
    size : tuple of int
        Voxels of a box along the axes of the image.
    correct : callable
        Box, its voxels as float32 with depth first → corrected voxels, in the same order of axes.
    work : TileWork
        Where boxes are carried out.
    dtype : dtype, optional
        That of the output; by default the image's. Integers are rounded and clipped to their range.
    levels, codec, overwrite, progress
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.
    attributes : dict, optional
        What the attribute ``linumpy`` of the output says besides tile shape and focal corrections.
    """
    array, z, use_gpu = image.array, image.depth_axis, work.use_gpu
    wanted = np.dtype(array.dtype if dtype is None else dtype).newbyteorder("=")
    kept: dict[str, Any] = dict(attributes or {}) | record(image.corrections, image.axes.replace("z", ""))
    if image.tile_shape is not None:
        lateral = [image.axes[axis] for axis in image.lateral_axes]
        kept["tile_shape"] = dict(zip(lateral, image.tile_shape, strict=True))
    carried = carried_from(image)
    carried.log_dropped(image.name, output)

    def compute(box: Box, voxels: Array) -> Array:
        xp = array_module(voxels)
        lines = xp.moveaxis(voxels, z, 0).astype(np.float32, copy=False)
        return xp.ascontiguousarray(xp.moveaxis(as_dtype(correct(box, lines), wanted), 0, z))  # type: ignore[no-any-return]

    with OmeZarrWriter(
        output, array.shape, wanted, image.spacing, axes=image.axes, origin=image.origin, levels=levels,
        chunks=array.chunks, shards=array.shards, codec=codec, overwrite=overwrite,
        attributes={"linumpy": kept} if kept else None, carried=carried,
    ) as writer:  # fmt: skip
        work(
            [box for _, box in image.boxes(size)],
            lambda box: read_box(array, box, use_gpu),
            compute,
            writer.write,
            done=lambda box: None if progress is None else progress(box_nbytes(array, box)),
        )


def as_dtype(voxels: Array, dtype: np.dtype) -> Array:
    """Convert float voxels: integers are rounded and clipped to the range of their type, and NaN becomes 0."""
    if dtype.kind == "f":
        return voxels.astype(dtype, copy=False)  # type: ignore[no-any-return]
    xp = array_module(voxels)
    if dtype.kind == "b":
        raise TypeError("a mosaic of booleans has no intensities to correct")
    info = np.iinfo(dtype)
    # float32 holds all integers of 16 bits; float64 has the largest of 64 bits only rounded up.
    wide = xp.nan_to_num(voxels, nan=0.0).astype(np.float32 if dtype.itemsize < 4 else np.float64, copy=False)
    high = float(info.max) if dtype.itemsize < 8 else np.nextafter(float(info.max), 0)
    return xp.clip(xp.rint(wide), float(info.min), high).astype(dtype)  # type: ignore[no-any-return]
