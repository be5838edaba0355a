"""Figures of merit and pictures of images on disk, computed from a resolution that fits into memory.

In: paths of OME-Zarr images. Out: an :class:`ImageSummary` of each image, with small host arrays for pictures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from scipy import ndimage

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, to_host
from linumpy.io.volume import Volumes, open_volumes
from linumpy.mosaic.io.tiles import Box, read_box
from linumpy.voxel import Backend

#: Maximum voxels that are read of an image: the finest resolution with at most so many voxels or, if the coarsest has
#: more, planes in the middle of the coarsest.
VOXELS = 2**26
#: Maximum pixels along an axis of a picture.
PIXELS = 320
#: Pixels of tissue that two pictures must share for a ratio of their brightness.
_SHARED = 30


@dataclass(frozen=True)
class Gray:
    """A small gray picture.

    - `values` (float32, (rows, columns)): means over blocks of pixels, at most :data:`PIXELS` along each axis.
    - `pixel` (float, float): height and width of a pixel in µm.
    """

    values: np.ndarray
    pixel: tuple[float, float]

    @property
    def extent(self) -> tuple[float, float]:
        """Height and width in µm."""
        rows, columns = self.values.shape
        return rows * self.pixel[0], columns * self.pixel[1]

    def resized(self, pixel: tuple[float, float]) -> np.ndarray:
        """Return the picture with pixels of another size: means over them, or repeated values."""
        if np.allclose(pixel, self.pixel, rtol=1e-6):
            return self.values
        rows, columns = (
            max(1, round(count * old / new))
            for count, old, new in zip(self.values.shape, self.pixel, pixel, strict=True)
        )
        picture = Image.fromarray(self.values.astype(np.float32))
        return np.asarray(picture.resize((columns, rows), Image.Resampling.BOX))


@dataclass(frozen=True, kw_only=True)
class ImageSummary:
    """Figures of merit and pictures of an image, or of some of its planes.

    - `shape`, `spacing`: voxels of the finest resolution, and their spacing in µm.
    - `axes`: names of the axes of space.
    - `dtype`: data type of the voxels.
    - `level`: the resolution that was read.
    - `projection`: mean along depth, with 0 for voxels that are not finite; for an image of two axes the image itself.
    - `section`: the middle section, depth first; None for an image of two axes.
    - `mask`: tissue in the projection; all False for an image of two axes or with equal voxels.
    - `tissue`, `sharpness`: share of tissue in the projection, and the projection's sharpness; NaN for an image of two
      axes or with equal voxels.
    - `median`: median of the finite voxels of an image of two axes; NaN for others.
    - `not_finite`: share of the read voxels that are NaN or infinite.
    - `constant`: whether all read voxels are equal; voxels that are not finite count as 0.
    """

    path: Path
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    axes: str
    dtype: str
    level: int
    projection: Gray
    section: Gray | None
    mask: np.ndarray
    tissue: float
    sharpness: float
    median: float
    not_finite: float
    constant: bool


def summarize(path: Path, *, depth_um: tuple[float, float] | None = None, device: DeviceName = "cpu") -> ImageSummary:
    """Read an image, and compute its figures of merit.

    - `path`: an OME-Zarr image of two or three axes of space; of several times and channels the first is read.
    - `depth_um` (float, float): coordinates along z between which planes are read, at least one; by default all planes.
    - `device`: where to read to and compute, ``"cuda"`` or ``"cpu"``.

    Raises `SourceError`, `MetadataError`, `ValueError`, `OSError`: an image that cannot be read, or has no spacing.
    """
    finest = open_volumes(path)
    chosen, level = finest, 0
    while math.prod(chosen.first.shape) > VOXELS:
        try:
            chosen = open_volumes(path, level + 1)
        except ValueError:  # there is no coarser resolution
            break
        level += 1
    z = chosen.axes.index("z") if len(chosen.axes) == 3 and "z" in chosen.axes else None
    voxels = read_box(chosen.first, _box_to_read(chosen, z, depth_um), device)
    xp, order = array_module(voxels), None if z is None else (z, *(k for k in range(3) if k != z))
    voxels = voxels if order is None else voxels.transpose(*order)
    spacing = chosen.spacing if order is None else tuple(chosen.spacing[k] for k in order)
    finite = xp.isfinite(voxels)
    filled = xp.where(finite, voxels, 0).astype(np.float32)
    constant = bool((filled == filled.ravel()[0]).all())
    projection = to_host(xp.where(finite, filled, np.float32(np.nan)) if order is None else filled.mean(axis=0))
    mask, tissue, sharp, median = np.zeros(projection.shape, bool), math.nan, math.nan, math.nan
    if order is None:
        median = float(xp.median(voxels[finite])) if bool(finite.any()) else math.nan
    elif not constant:
        mask = tissue_mask(projection)
        tissue, sharp = float(mask.mean()), sharpness(projection, mask)
    section = None if order is None else _reduced(filled[:, filled.shape[1] // 2], (spacing[0], spacing[2]))
    return ImageSummary(
        path=path, shape=finest.first.shape, spacing=finest.spacing, axes=chosen.axes, dtype=str(chosen.first.dtype),
        level=level, projection=_reduced(projection, spacing[-2:]), section=section,
        mask=_reduced(mask, spacing[-2:]).values > 0.5, tissue=tissue, sharpness=sharp, median=median,
        not_finite=1 - float(finite.mean()), constant=constant,
    )  # fmt: skip


def _box_to_read(chosen: Volumes, z: int | None, depth_um: tuple[float, float] | None) -> Box:
    """Return the box of the planes between two depths; of too many voxels, planes in its middle."""
    shape = chosen.first.shape
    box = [slice(0, n) for n in shape]
    if z is None:
        return tuple(box)
    first, stop = 0, shape[z]
    if depth_um is not None:
        first, stop = (round((depth - chosen.origin[z]) / chosen.spacing[z]) for depth in depth_um)
        first = min(max(0, first), shape[z] - 1)
        stop = min(max(first + 1, stop), shape[z])
    planes = max(1, min(stop - first, VOXELS * shape[z] // math.prod(shape)))
    first += (stop - first - planes) // 2
    box[z] = slice(first, first + planes)
    return tuple(box)


def tissue_mask(projection: np.ndarray) -> np.ndarray:
    """Find tissue in a projection (Y, X): smooth the logarithms, threshold them, remove thin parts.

    The threshold has the greatest variance between both classes (Otsu, 1979). All False if all smoothed values are
    equal.
    """
    values = projection.astype(np.float32)
    positive = values > 0
    smallest = values[positive].min() if positive.any() else np.float32(1)
    values = ndimage.gaussian_filter(np.log(np.where(positive, values, smallest)), 1.0)
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.zeros(values.shape, bool)
    counts, edges = np.histogram(values, 256, range=(low, high))
    centres = (edges[1:] + edges[:-1]) / 2
    below, moment = np.cumsum(counts, dtype=np.float64), np.cumsum(counts * centres)
    above = counts.sum() - below
    apart = moment / np.maximum(below, 1) - (moment[-1] - moment) / np.maximum(above, 1)
    threshold = centres[(below * above * apart**2)[:-1].argmax()]
    return np.asarray(Backend().open((values > threshold)[None], radius=2.0)[0])


def sharpness(image: np.ndarray, mask: np.ndarray) -> float:
    """Return the normalised gradient energy of an image: energy of Sobel's filter over the squared mean (Tenengrad).

    It does not change with gain, and decreases with blur; NaN where the mean is 0. `mask`: pixels that count, all if
    there are none.
    """
    pixels, counted = image.astype(np.float64), mask if mask.any() else np.ones(mask.shape, bool)
    slopes = [ndimage.sobel(pixels, axis) / 8 for axis in (0, 1)]
    mean = pixels[counted].mean()
    return float((slopes[0] ** 2 + slopes[1] ** 2)[counted].mean() / mean**2) if mean else float("nan")


def _reduced(values: Array, pixel: tuple[float, ...]) -> Gray:
    """Return means over blocks, at most :data:`PIXELS` along each axis, on the host; `pixel` is the size of a value."""
    step = [-(-count // PIXELS) for count in values.shape]
    rows, columns = (count // size for count, size in zip(values.shape, step, strict=True))
    complete = values[: rows * step[0], : columns * step[1]].astype(np.float32)
    # One axis after the other: both at a time take NumPy ten times as long.
    lines = complete.reshape(rows, step[0], complete.shape[1]).mean(axis=1)
    means = lines.reshape(rows, columns, step[1]).mean(axis=2)
    return Gray(to_host(means), (step[0] * pixel[0], step[1] * pixel[1]))


def brightness_ratio(image: ImageSummary, following: ImageSummary) -> float:
    """Return the mean of `following`'s projection over that of `image`, where both have tissue; NaN without such."""
    first, second = image.projection.pixel, following.projection.pixel
    pixel = max(first[0], second[0]), max(first[1], second[1])
    values = [side.projection.resized(pixel) for side in (image, following)]
    masks = [Gray(side.mask.astype(np.float32), side.projection.pixel).resized(pixel) for side in (image, following)]
    both = tuple(slice(min(sizes)) for sizes in zip(*(part.shape for part in values), strict=True))
    shared = np.minimum(*(mask[both] for mask in masks)) > 0.5
    if image.section is None or following.section is None or np.count_nonzero(shared) < _SHARED:
        return math.nan
    above, below = (part[both][shared].mean(dtype=np.float64) for part in values)
    return float(below / above) if min(above, below) > 0 else math.nan
