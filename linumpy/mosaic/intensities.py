"""Normalise the intensities of a volume between two percentiles, from disk to disk.

In: an OME-Zarr volume. Out: the volume as float32, as OME-Zarr with the same axes, chunks, spacing and origin; by
default intensities are clipped to 0 and 1. If the planes of a chunk, or with ``per="slice"`` the volume, are small
enough, the volume is read once, and percentiles are exact. If they are larger, and always on a cluster, the volume is
read twice: first to count histograms, then to map intensities.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.percentiles import (
    BINS,
    check_shares,
    histogram_percentiles,
    histograms,
    normalise,
    plane_percentiles,
)
from linumpy.device import array_module, to_host
from linumpy.mosaic.io.corrected import write_corrected
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box, read_box, stored, tile_shape
from linumpy.mosaic.io.tiles import boxes as all_boxes
from linumpy.mosaic.options import Normalization
from linumpy.resample.tile_work import TileWork

log = logging.getLogger(__name__)

#: Maximum bytes of planes that are read at once, relative to the bytes of a tile.
_PLANES = 8


def normalize_intensities(
    source: str | Path,
    output: str | Path,
    low: float = 1.0,
    high: float = 99.0,
    options: Normalization | None = None,
    **common: Unpack[ImageOptions],
) -> np.ndarray:
    """Map two percentiles of each plane, or of the slice, to 0 and 1.

    Parameters
    ----------
    source : str or Path
        The volume of a slice: axes z, y and x in any order.
    output : str or Path
        The OME-Zarr image to write, float32.
    low, high : float
        Percentiles of the finite voxels.
    options : Normalization, optional
        Whether percentiles are taken of each plane along z or of the whole slice, and whether intensities are clipped.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Returns
    -------
    numpy.ndarray of float32, (2, Z)
        The two intensities that become 0 and 1 in each plane; NaN where it has no finite voxel.
    """
    check_shares(low, high)
    options = options or Normalization()
    per, clip = options.per, options.clip
    step = Step(output, **common)
    image = step.open(source, one="intensities are normalised in one volume")
    shares, z, shape = (low, high), image.depth_axis, image.array.shape
    planes = tuple(n if axis != z else min(stored(image.array)[z], n) for axis, n in enumerate(shape))
    size = planes if per == "plane" else shape
    bounds = np.full((2, shape[z]), np.nan, np.float32)
    with step.work() as work:
        nbytes = step.tile_nbytes(work)
        read_once = work.client is None and math.prod(size) * image.array.dtype.itemsize <= _PLANES * nbytes
        if not read_once:
            size = tile_shape(shape, stored(image.array), image.array.dtype.itemsize, nbytes)
            log.info("%s: histograms are counted first, so the volume is read twice", image.name)
            bounds = _by_histograms(image, size, shares, per, work)

        def correct(box: Box, voxels: Array) -> Array:
            if not read_once:
                return normalise(voxels, array_module(voxels).asarray(bounds[:, box[z]]), clip=clip)
            sets = voxels if per == "plane" else voxels.reshape((1, -1))
            percentiles = plane_percentiles(sets, shares)
            bounds[:, box[z]] = to_host(percentiles)
            if per == "slice":
                percentiles = array_module(voxels).repeat(percentiles, len(voxels), 1)
            return normalise(voxels, percentiles, clip=clip)

        write_corrected(image, step, size, correct, work, dtype=np.float32)
    return bounds


def _by_histograms(
    image: MosaicImage, size: tuple[int, ...], shares: tuple[float, float], per: str, work: TileWork
) -> np.ndarray:
    """Read the volume, and return the two percentiles of each plane, or for all planes the percentiles of the slice."""
    z, array = image.depth_axis, image.array
    counts: Array = work.xp.zeros((array.shape[z] if per == "plane" else 1, BINS), np.int64)

    def count(_: Box, voxels: Array) -> Array:
        lines = array_module(voxels).moveaxis(voxels, z, 0)
        return histograms(lines if per == "plane" else lines.reshape((1, -1)))

    def add(box: Box, part: Array) -> None:
        counts[box[z] if per == "plane" else slice(None)] += part

    work(all_boxes(array.shape, size), partial(read_box, array, device=work.device), count, add)
    bounds = histogram_percentiles(to_host(counts), shares)
    return bounds if per == "plane" else np.repeat(bounds, array.shape[z], axis=1)
