"""Resamples a staged crop to a row of a batch in host memory, by NumPy and SciPy, where there is no GPU.

As in ``augment.cu``, coordinates are in double precision, interpolation is of order 0 or 1 as in SciPy, and values are
rounded if the batch has an integer dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy

from linumpy.arrays import Array
from linumpy.gpu.philox import philox
from linumpy.gpu.rounding import bfloat16_bits
from linumpy.plan.boundary import fold
from linumpy.stream.augment import Intensity
from linumpy.stream.config import Dtype
from linumpy.stream.planning.reach import spline_matrix
from linumpy.stream.planning.records import CropRead, PartShape, Resampling, zyx


@dataclass(frozen=True)
class Staged:
    """A staged crop."""

    read: CropRead  # the region that was read, and its resampling
    voxels: Array | None  # voxels of the region; None where nothing was read


def fill_row(row: np.ndarray, part: PartShape, staged: Staged, pad: str, fill: float) -> None:
    """Fill a row of a batch; a row in bf16 holds its bits as uint16."""
    resampling = staged.read.resampling
    assert resampling is not None
    shape = zyx(row.shape)
    target = row.reshape(-1, *shape)
    if staged.voxels is None:
        sampled = np.full(target.shape, fill)
        target[...] = as_elements(_with_intensities(sampled, resampling, part), part)
        return
    voxels = np.asarray(staged.voxels).reshape(-1, *resampling.box_shape)
    if resampling.order == 0:
        values, inside = _nearest(voxels, resampling, shape, pad)
        target[...] = as_elements(values, part)
        if not inside.all():
            target[:, ~inside] = as_elements(np.array(fill), part)
        return
    points, inside = coordinates(resampling, shape, pad)
    sampled = np.stack([_linear(box, staged.read, points, inside, fill) for box in voxels])
    target[...] = as_elements(_with_intensities(sampled, resampling, part), part)


def _with_intensities(values: np.ndarray, resampling: Resampling, part: PartShape) -> np.ndarray:
    """Blur, and change intensities; values are rounded to the dtype of the batch before the blur along each axis."""
    for axis, sigma in enumerate(resampling.sigma):
        if sigma > 0:
            rounded = as_elements(values, part)
            rounded = bfloat16_as_float32(rounded) if part.dtype is Dtype.BF16 else rounded
            values = scipy.ndimage.gaussian_filter1d(rounded.astype(np.float64), sigma, axis=axis + 1, mode="reflect")
    return change_intensities(values, resampling.intensity)


def coordinates(resampling: Resampling, shape: tuple[int, ...], pad: str) -> tuple[np.ndarray, np.ndarray]:
    """Compute the coordinates of the crop's voxels in the volume, (3, Z, Y, X), and which of them get no fill value.

    Coordinates outside of the volume are mapped into it as `pad` says; with ``"constant"`` they get the fill value.
    """
    voxels = np.stack(np.meshgrid(*(np.arange(n, dtype=float) for n in shape), indexing="ij"))
    points = np.tensordot(resampling.matrix, voxels, 1) + resampling.offset[:, None, None, None]
    if (field := resampling.grid) is not None:  # a cubic B-spline, evaluated axis by axis
        axes = zip(shape, resampling.grid_scale, resampling.grid_origin, strict=True)
        for axis, (n, scale, origin) in enumerate(axes):
            matrix = spline_matrix(np.arange(n), field.shape[axis + 1], scale, origin)
            field = np.moveaxis(np.tensordot(matrix, field, ([1], [axis + 1])), 0, axis + 1)
        points += field
    inside = np.ones(shape, bool)
    for axis, n in enumerate(resampling.volume):
        if pad == "constant":
            inside &= (points[axis] >= 0) & (points[axis] <= n - 1)
        elif pad == "edge" or n == 1:
            points[axis] = np.clip(points[axis], 0, n - 1)
        else:
            turned = np.mod(points[axis], 2 * n - 2)
            points[axis] = np.where(turned <= n - 1, turned, 2 * n - 2 - turned)
    return points, inside


def _linear(box: np.ndarray, read: CropRead, points: np.ndarray, inside: np.ndarray, fill: float) -> np.ndarray:
    """Interpolate linearly in the box that was read; the fill value where `inside` is False."""
    assert read.resampling is not None
    local = points - np.array(read.resampling.box_start, float)[:, None, None, None]
    if box.dtype == np.float16:  # SciPy does not accept it
        box = box.astype(np.float32)
    boxes = [box]
    if read.needed is not None:  # other voxels of the box are undefined
        start = read.resampling.box_start[-read.needed.shape[1] :]
        inner = read.needed - np.array(start)[:, None]
        indices: Any = [(..., *(slice(*ends) for ends in one)) for one in inner.tolist()]
        boxes = [box[index] for index in indices]
    # A neighbour outside of the box has weight 0, so that clamping to the box changes nothing.
    if box.dtype.kind == "f" and not all(np.isfinite(voxels).all() for voxels in boxes):
        return np.where(inside, _linear_without_zero_weights(box, local), fill)
    values = scipy.ndimage.map_coordinates(box, local, order=1, mode="nearest", output=np.float64)
    return np.where(inside, values, fill)


def _linear_without_zero_weights(box: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Interpolate without neighbours of weight 0: SciPy would multiply 0 by NaN where such a neighbour is NaN."""
    below = np.floor(local).astype(int)
    upper = local - below
    result = np.zeros(local.shape[1:])
    for corner in np.ndindex(2, 2, 2):
        weight = np.prod([u if k else 1 - u for k, u in zip(corner, upper, strict=True)], axis=0)
        index = tuple(np.clip(b + k, 0, n - 1) for b, k, n in zip(below, corner, box.shape, strict=True))
        result += np.where(weight == 0, 0.0, weight * np.where(weight == 0, 0.0, box[index].astype(float)))
    return result


def _nearest(
    voxels: np.ndarray, resampling: Resampling, shape: tuple[int, ...], pad: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest voxel for each voxel of the crop, and which voxels of the crop get no fill value."""
    if np.array_equal(resampling.matrix, np.eye(3)) and resampling.grid is None:
        return _shifted(voxels, resampling, shape, pad)
    points, inside = coordinates(resampling, shape, pad)
    index = tuple(
        np.clip(np.floor(point + 0.5).astype(int) - start, 0, n - 1)
        for point, start, n in zip(points, resampling.box_start, resampling.box_shape, strict=True)
    )
    return voxels[(slice(None), *index)], inside


def _shifted(
    voxels: np.ndarray, resampling: Resampling, shape: tuple[int, ...], pad: str
) -> tuple[np.ndarray, np.ndarray]:
    """Do as :func:`_nearest` for a map that is only a translation: take voxels axis by axis."""
    inside, index = [], []
    for axis, size in enumerate(shape):
        voxel = np.arange(size) + int(np.floor(resampling.offset[axis] + 0.5))
        n = resampling.volume[axis]
        inside.append((voxel >= 0) & (voxel < n) if pad == "constant" else np.ones(size, bool))
        mapped = fold(voxel, n, "mirror" if pad == "reflect" else "nearest")
        index.append(np.clip(mapped - resampling.box_start[axis], 0, resampling.box_shape[axis] - 1))
    values = voxels[np.ix_(np.arange(len(voxels)), *index)]
    return values, inside[0][:, None, None] & inside[1][:, None] & inside[2]


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast values. Floats that become integers are rounded, halves away from zero, and saturated; NaN becomes 0."""
    if dtype.kind == "b":
        return narrow(values, np.dtype("u1")).astype(bool)
    if dtype.kind not in "iu" or values.dtype.kind in "iub":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    limits = np.iinfo(dtype)
    rounded = np.trunc(values + np.copysign(0.5, values))
    rounded = np.where(np.abs(values) >= 2.0**52, values, rounded)
    result = np.clip(np.nan_to_num(rounded, nan=0.0), float(limits.min), float(limits.max)).astype(dtype)
    return np.where(rounded >= float(limits.max), limits.max, result).astype(dtype)


def as_elements(values: np.ndarray, part: PartShape) -> np.ndarray:
    """Cast values to the elements of a part in a batch."""
    return bfloat16_bits(values) if part.dtype is Dtype.BF16 else narrow(values, part.element)


def bfloat16_as_float32(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 numbers, whose bits are given as uint16, as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def change_intensities(values: np.ndarray, intensity: Intensity) -> np.ndarray:
    """Change intensities by gamma, contrast and noise; in a whole crop, since noise follows from the voxel's index."""
    values = np.asarray(values, np.float64)
    low, span = intensity.low, intensity.span
    if intensity.gamma != 1:
        values = low + span * np.maximum((values - low) / span, 0.0) ** intensity.gamma
    if intensity.contrast != 1:
        middle = low + 0.5 * span
        values = middle + (values - middle) * intensity.contrast
    if intensity.noise != 0:
        values = values + intensity.noise * normals(intensity.key, values.size).reshape(values.shape)
    return values


def normals(key: int, count: int) -> np.ndarray:
    """Return the first `count` normally distributed numbers of a key, by Philox4x32-10 and the Box-Muller transform."""
    counter = np.arange(count, dtype=np.uint64)
    words = philox((counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32), 0, 0), (key & 0xFFFFFFFF, key >> 32))
    first, second = (word.astype(np.float64) for word in words[:2])
    radius = np.sqrt(-2.0 * np.log((first + 1.0) / 4294967296.0))
    return radius * np.cos(6.283185307179586476925 * (second / 4294967296.0))
