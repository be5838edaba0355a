"""Figures of merit and pictures of images on disk, computed from a resolution that fits into memory.

In: paths of OME-Zarr images. Out: an :class:`ImageSummary` of each image, with host arrays for pictures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array, require_cuda, to_host
from linumpy.io.volume import Volumes, open_volumes
from linumpy.mosaic.io.tiles import read_box
from linumpy.quality.measures import sharpness, structural_similarity
from linumpy.quality.tissue import tissue_mask
from linumpy.voxel.backends.choose import why_no_warp

#: Maximum voxels that are read of an image: the finest resolution with at most so many voxels or, if the coarsest has
#: more, planes in the middle of the coarsest.
VOXELS = 2**26


@dataclass(frozen=True)
class ImageSummary:
    """Figures of merit and pictures of an image.

    Attributes
    ----------
    path : Path
        The image.
    shape, spacing : tuple
        Voxels of the finest resolution, and their spacing in µm.
    axes : str
        Names of the axes of space.
    dtype : str
        Data type of the voxels.
    level : int
        The resolution that was read.
    projection : numpy.ndarray, (Y, X)
        Mean along depth, with 0 for voxels that are not finite; for an image of two axes the image itself.
    section : numpy.ndarray or None
        The middle section, depth first; None for an image of two axes.
    pixel : tuple of float
        Spacing of the resolution that was read, in µm; depth first, if the image has depth.
    tissue, sharpness : float
        Share of tissue in the projection, and the projection's sharpness; NaN for an image of two axes or with equal
        voxels.
    similarity : float
        SSIM of the projections of this and of the next image of the same folder; NaN without a next image.
    not_finite : float
        Share of the read voxels that are NaN or infinite.
    constant : bool
        Whether all read voxels are equal; voxels that are not finite count as 0.
    """

    path: Path
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    axes: str
    dtype: str
    level: int
    projection: np.ndarray
    section: np.ndarray | None
    pixel: tuple[float, ...]
    tissue: float
    sharpness: float
    not_finite: float
    constant: bool
    similarity: float = math.nan


def summarize(path: Path, *, use_gpu: bool = False) -> ImageSummary:
    """Read an image, and compute its figures of merit.

    Parameters
    ----------
    path : Path
        An OME-Zarr image of two or three axes of space; of several times and channels the first is read.
    use_gpu : bool
        Whether to read to the GPU and compute there.

    Raises
    ------
    SourceError, MetadataError, ValueError, OSError
        An image that cannot be read, or has no spacing.
    """
    finest = open_volumes(path)
    chosen, level = _resolution_to_read(path, finest)
    array = chosen.first
    z = chosen.axes.index("z") if len(chosen.axes) == 3 and "z" in chosen.axes else None
    box = [slice(0, n) for n in array.shape]
    if z is not None and math.prod(array.shape) > VOXELS:
        planes = max(1, VOXELS * array.shape[z] // math.prod(array.shape))
        begin = (array.shape[z] - planes) // 2
        box[z] = slice(begin, begin + planes)
    voxels = read_box(array, tuple(box), use_gpu)
    xp, order = array_module(voxels), None if z is None else (z, *(k for k in range(3) if k != z))
    voxels = voxels if order is None else voxels.transpose(*order)
    spacing = chosen.spacing if order is None else tuple(chosen.spacing[k] for k in order)
    finite = xp.isfinite(voxels)
    filled = xp.where(finite, voxels, 0).astype(np.float32)
    constant = bool((filled == filled.ravel()[0]).all())
    projection = filled if order is None else filled.mean(axis=0)
    tissue = sharp = math.nan
    if order is not None and not constant:
        mask = _mask(projection)
        tissue = float(mask.mean())
        sharp = float(sharpness(projection[None], mask[None] if bool(mask.any()) else None)[0])
    shown = xp.where(finite, voxels, np.nan) if order is None and voxels.dtype.kind == "f" else projection
    return ImageSummary(
        path, finest.first.shape, finest.spacing, chosen.axes, str(array.dtype), level, to_host(shown),
        None if order is None else to_host(filled[:, filled.shape[1] // 2]), spacing, tissue, sharp,
        1 - float(finite.mean()), constant,
    )  # fmt: skip


def _resolution_to_read(path: Path, finest: Volumes) -> tuple[Volumes, int]:
    """Return the finest resolution of at most :data:`VOXELS` voxels, or else the coarsest, and its number."""
    chosen, level = finest, 0
    while math.prod(chosen.first.shape) > VOXELS:
        try:
            chosen = open_volumes(path, level + 1)
        except ValueError:  # there is no coarser resolution
            break
        level += 1
    return chosen, level


def _mask(projection: Array) -> Array:
    """Return the mask of tissue of a projection, computed on the host if Warp, which the device needs, is missing."""
    if not is_device_array(projection) or why_no_warp() is None:
        return tissue_mask(projection[None])[0]
    mask: Array = array_module(projection).asarray(tissue_mask(to_host(projection)[None])[0])
    return mask


def with_similarities(summaries: Sequence[ImageSummary], *, use_gpu: bool = False) -> list[ImageSummary]:
    """Return the summaries with the similarity of each image to the next one of the same folder.

    Projections are compared over the part that both have, on the GPU with `use_gpu`. The similarity stays NaN for
    images of two axes, for equal pixels, and if the shared part is smaller than the window of SSIM.
    """
    result, xp = list(summaries), require_cuda() if use_gpu else np
    for number, (image, following) in enumerate(itertools.pairwise(summaries)):
        shape = [min(sizes) for sizes in zip(image.projection.shape, following.projection.shape, strict=True)]
        if image.path.parent != following.path.parent or min(shape) < 7:
            continue
        if image.section is None or following.section is None:
            continue
        values = xp.stack([xp.asarray(side.projection[: shape[0], : shape[1]]) for side in (image, following)])
        data_range = float(xp.ptp(xp.percentile(values, xp.asarray((0.5, 99.5)))))
        if data_range > 0:
            similarity = float(structural_similarity(values[:1], values[1:], data_range)[0])
            result[number] = replace(image, similarity=similarity)
    return result
