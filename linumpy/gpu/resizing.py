"""Resize an image axis by axis, smoothing and interpolation in one table of weights: both are linear and separable.

In: an image and the shape wanted. Out: the resized image, float32 (float64 for float64) unless asked otherwise. The
tables are planned in NumPy and SciPy alone; CuPy arrays are resampled by kernels of ``resize.cu``, NumPy arrays by the
same tables as sparse matrices. No kernel is compiled for a shape. Temporary memory: the results between two passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse

from linumpy.device import array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, load

#: Boundary modes, by SciPy's names: the voxel that stands for one outside. Those outside a constant image are zero.
MODES = ("nearest", "mirror", "reflect", "grid-wrap", "grid-constant")
_TRUNCATE = 4.0  # sigmas, as SciPy's gaussian_filter
_THREADS, _OUTPUTS, _PACK = 256, 4, 4  # OUTPUTS of resize.cu


@dataclass(frozen=True)
class AxisPlan:
    """How one axis is resampled.

    Attributes
    ----------
    axis : int
        Of the image.
    size, length : int
        Voxels along it, before and after.
    order : int
        0 nearest, 1 linear.
    mode : str
        One of :data:`MODES`.
    sigma : float
        Of the Gaussian, in voxels of the image; 0 for none.
    """

    axis: int
    size: int
    length: int
    order: int
    mode: str
    sigma: float


def plan_axes(
    shape: Sequence[int], output_shape: Sequence[int], order: int, mode: str, sigmas: Sequence[float]
) -> tuple[AxisPlan, ...]:
    """List the passes: the axis that shrinks most first, then earlier axes, whose reads are coalesced."""
    plans = [
        AxisPlan(axis, int(n), int(m), order, mode, float(sigma))
        for axis, (n, m, sigma) in enumerate(zip(shape, output_shape, sigmas, strict=True))
        if n != m or sigma > 0
    ]
    return tuple(sorted(plans, key=lambda plan: (plan.length / plan.size, plan.axis)))


def fold(index: np.ndarray, size: int, mode: str) -> np.ndarray:
    """Find the voxels that stand for those outside; -1 for none."""
    if mode == "nearest":
        return np.clip(index, 0, size - 1)
    if mode == "grid-wrap":
        return index % size
    if mode == "reflect":
        place = index % (2 * size)
        return np.minimum(place, 2 * size - 1 - place)
    if mode == "mirror":
        period = max(1, 2 * size - 2)
        place = index % period
        return np.minimum(place, period - place)
    return np.where((index >= 0) & (index < size), index, -1)


def _matrix(index: np.ndarray, weights: np.ndarray, size: int, mode: str) -> sparse.csr_array:
    """Make a matrix of (rows, taps) weights at voxels that may lie outside."""
    rows = np.broadcast_to(np.arange(len(index))[:, None], index.shape)
    columns = fold(index, size, mode)
    kept = (columns >= 0) & (weights != 0)
    return sparse.coo_array((weights[kept], (rows[kept], columns[kept])), shape=(len(index), size)).tocsr()


def axis_matrix(plan: AxisPlan) -> sparse.csr_array:
    """Compose interpolation and smoothing: (length, size), float64.

    The centre of voxel i of the result lies at voxel (i + 1/2) size / length - 1/2. The Gaussian is that of SciPy's
    ``gaussian_filter``, cut at four sigmas.
    """
    place = (np.arange(plan.length) + 0.5) * (plan.size / plan.length) - 0.5
    if plan.order == 0:
        index, weights = np.floor(place + 0.5)[:, None], np.ones((plan.length, 1))
    else:
        below = np.floor(place)
        index, weights = np.stack([below, below + 1], 1), np.stack([below + 1 - place, place - below], 1)
    matrix = _matrix(index.astype(np.int64), weights, plan.size, plan.mode)
    if plan.sigma <= 1e-15:
        return matrix
    radius = int(_TRUNCATE * plan.sigma + 0.5)
    taps = np.arange(-radius, radius + 1)
    bell = np.exp(-0.5 / plan.sigma**2 * taps**2)
    index = np.arange(plan.size)[:, None] + taps
    return matrix @ _matrix(index, np.broadcast_to(bell / bell.sum(), index.shape), plan.size, plan.mode)


def axis_table(plan: AxisPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay the matrix out as the kernels read it.

    Returns
    -------
    weights : numpy.ndarray of float64, (taps, length)
        Zero behind a row's last.
    first, count : numpy.ndarray of int32, (length,)
        The first voxel of each row and how many follow from it.
    """
    entries = axis_matrix(plan).tocoo()
    first = np.full(plan.length, plan.size, np.int64)
    last = np.full(plan.length, -1, np.int64)
    np.minimum.at(first, entries.row, entries.col)
    np.maximum.at(last, entries.row, entries.col)
    first = np.where(last < 0, 0, first)  # a row that holds nothing
    count = np.where(last < 0, 0, last + 1 - first)
    weights = np.zeros((max(1, int(count.max(initial=1))), plan.length))
    np.add.at(weights, (entries.col - first[entries.row], entries.row), entries.data)
    return weights, first.astype(np.int32), count.astype(np.int32)


def resample_axes(
    image: Any,
    output_shape: Sequence[int],
    *,
    order: int,
    mode: str,
    sigmas: Sequence[float],
    dtype: Any = None,
) -> Any:
    """Smooth and interpolate an image, axis by axis.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of integers or floats, not empty.
    output_shape : sequence of int
        One size for each axis, none 0.
    order : int
        0 nearest, 1 linear.
    mode : str
        One of :data:`MODES`.
    sigmas : sequence of float
        Of the Gaussian, one for each axis, in voxels of the image.
    dtype : dtype, optional
        Of the result; integers are rounded, halves away from zero, and saturate. By default float64 for float64, else
        float32.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`, where the image is; never a view of it.
    """
    between = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    target = between if dtype is None else np.dtype(dtype)
    # Without a pass there may still be a cast to do: an axis resampled onto itself does it.
    plans = plan_axes(image.shape, output_shape, order, mode, sigmas)
    if not plans:
        if target == between:
            return image.astype(between)
        plans = (AxisPlan(0, image.shape[0], image.shape[0], 0, mode, 0.0),)
    if not is_device_array(image):
        return _on_host(image, plans, target)
    return run_passes(array_module(image).ascontiguousarray(image), plans, between, target)


def _on_host(image: np.ndarray, plans: Sequence[AxisPlan], target: np.dtype) -> np.ndarray:
    result = image.astype(np.float64)
    for plan in plans:
        lines = np.moveaxis(result, plan.axis, 0)
        done = axis_matrix(plan) @ lines.reshape(plan.size, -1)
        result = np.moveaxis(done.reshape(plan.length, *lines.shape[1:]), 0, plan.axis)
    if target.kind in "iu":
        info = np.iinfo(target)
        result = np.clip(np.trunc(result + np.copysign(0.5, result)), info.min, info.max)
    return np.ascontiguousarray(result, target)


def run_passes(image: Any, plans: Sequence[AxisPlan], between: np.dtype, target: np.dtype) -> Any:
    """Launch one kernel for each plan on a C-contiguous image; the last writes `target`, others `between`."""
    xp = array_module(image)
    for number, plan in enumerate(plans):
        shape = (*image.shape[: plan.axis], plan.length, *image.shape[plan.axis + 1 :])
        out = xp.empty(shape, target if number == len(plans) - 1 else between)
        _launch(image, out, plan, between)
        image = out
    return image


@functools.lru_cache(maxsize=32)
def _packed_table(plan: AxisPlan, compute: np.dtype) -> np.ndarray:
    """Lay a table's three arrays into one, of bytes: one copy to the device."""
    weights, first, count = axis_table(plan)
    return np.concatenate([one.reshape(-1).view(np.uint8) for one in (weights.astype(compute), first, count)])


def _launch(image: Any, out: Any, plan: AxisPlan, compute: np.dtype) -> None:
    packed = array_module(image).asarray(_packed_table(plan, compute))
    ends = packed.size - 8 * plan.length, packed.size - 4 * plan.length
    table = (packed[: ends[0]], packed[ends[0] : ends[1]], packed[ends[1] :])
    outer, inner = math.prod(image.shape[: plan.axis]), math.prod(image.shape[plan.axis + 1 :])
    sizes: tuple[np.generic, ...] = (*int64(outer), *int32(plan.size, plan.length))
    if inner == 1:
        threads = outer * plan.length
        kernel = "along_x"
    else:
        pack = _PACK if inner % _PACK == 0 and _is_aligned(image) and _is_aligned(out) else 1
        threads = outer * -(-plan.length // _OUTPUTS) * (inner // pack)
        kernel, sizes = "along", (*sizes, *int64(inner), *int32(pack))
    load(kernel_spec(kernel, image.dtype, out.dtype))(
        (-(-threads // _THREADS),), (_THREADS,), (image, out, *table, *sizes)
    )


def _is_aligned(array: Any) -> bool:
    address = array.data.ptr if is_device_array(array) else array.ctypes.data
    return address % (_PACK * array.itemsize) == 0


def kernel_spec(name: str, source: np.dtype, target: np.dtype) -> KernelSpec:
    """Describe a kernel for the types it reads and writes; sums of float64 images are float64, others float32."""
    kinds = source.str[1:], target.str[1:]
    wide = source == np.float64
    defines = {
        "SOURCE": CUDA_TYPES[kinds[0]],
        "TARGET": CUDA_TYPES[kinds[1]],
        "COMPUTE": "double" if wide else "float",
    }
    return KernelSpec("resize", name, tuple(defines.items()))
