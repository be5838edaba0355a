"""Resize an image axis by axis, with one table of weights for smoothing and interpolation.

In: an image and an output shape. Out: the resized image, by default float32 (float64 for float64). Passes, tiles and
tables are planned in NumPy and cached. The kernels of ``resize.cu`` resample CuPy arrays; sparse matrices of the same
weights resample NumPy arrays. At order 0 without smoothing the nearest voxels are copied. No kernel is compiled for a
shape. Temporary memory: the results between passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import (
    CUDA_TYPES,
    KernelSpec,
    Queue,
    Uploaded,
    address_of,
    int32,
    int64,
    load,
    queue_of,
    upload,
)
from linumpy.gpu.ndimage import nearest
from linumpy.gpu.ndimage.nearest import Line
from linumpy.gpu.ndimage.sampling import contiguous
from linumpy.gpu.resize.plan import ResizeTuning, Step, plan_steps
from linumpy.gpu.resize.tables import AxisPlan, axis_matrix, join, unchanged, windows_of
from linumpy.gpu.rounding import rounded

DEFAULT = ResizeTuning()
_THREADS = 256
_ALIGNED = 16  # bytes: of the loads of resize.cu
#: Larger tables are not cached, but made and uploaded by every call.
_CACHED_NBYTES = 4 * 2**20
_HOST_VOXELS = 2**19  # processed in float64 at a time


@functools.lru_cache(maxsize=256)
def _plan_axes(
    shape: tuple[int, ...], output_shape: tuple[int, ...], order: int, mode: str, sigmas: tuple[float, ...]
) -> tuple[tuple[AxisPlan, ...], tuple[Line, ...] | None]:
    """Plan every axis; also return the coordinates along each axis if voxels are only copied, else None."""
    axes = plan_axes(shape, output_shape, order, mode, sigmas)
    is_copy = all(plan.order == 0 and plan.sigma == 0 for plan in axes)
    return axes, tuple(map(_line_of, axes)) if is_copy else None


def plan_axes(
    shape: Sequence[int], output_shape: Sequence[int], order: int, mode: str, sigmas: Sequence[float]
) -> tuple[AxisPlan, ...]:
    """Plan every axis; an axis of the same size that is not smoothed is unchanged."""
    return tuple(
        AxisPlan(int(n), int(m), order, mode, float(sigma)) if n != m or sigma > 0 else unchanged(int(n))
        for n, m, sigma in zip(shape, output_shape, sigmas, strict=True)
    )


def resample_axes(
    image: Array,
    output_shape: Sequence[int],
    *,
    order: int,
    mode: str,
    sigmas: Sequence[float],
    dtype: DTypeLike | None = None,
    clamp: bool = False,
) -> Array:
    """Smooth and interpolate an image, axis by axis.

    `image`: of integers or floats, or booleans at order 0 without smoothing; not empty. `output_shape`: one size >= 1
    for each axis. `order`: 0 nearest, 1 linear. `mode`: one of :data:`~linumpy.gpu.resize.tables.MODES`. `sigmas`:
    standard deviations of the Gaussian, one for each axis, in voxels of the image. `dtype`: data type of the result;
    integers are rounded, halves away from zero, and saturate. By default float64 for float64, else float32. `clamp`:
    whether to limit results to the range of the image, which they exceed only by rounding. Not with
    ``"grid-constant"``.

    Returns: Of `output_shape`, in the memory of the image; never a view of it.
    """
    between = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    target = between if dtype is None else np.dtype(dtype)
    axes, lines = _plan_axes(tuple(image.shape), tuple(output_shape), order, mode, tuple(sigmas))
    if lines is not None:
        copied = _nearest(image, axes, lines)
        return copied if copied.dtype == target and copied is not image else copied.astype(target)
    return apply_tables(image, axes, between, target, clamp=clamp)


def apply_tables(
    image: Any,
    axes: Sequence[AxisPlan],
    between: np.dtype,
    target: np.dtype,
    out: Any = None,
    *,
    clamp: bool = False,
) -> Array:
    """Resample an image as planned: NumPy arrays on the host, CuPy arrays by the kernels.

    `between` is the dtype of sums on a device and of results between axes, `target` the dtype of the result. `out`, if
    given, is a C-contiguous array of the result's shape and dtype; at least one axis must change then. For `clamp` see
    :func:`resample_axes`.
    """
    if not is_device_array(image):
        result = _on_host(image, axes, between, target, out)
        if clamp:
            low, high = (bound.reduce(image, axis=None).astype(result.dtype) for bound in (np.fmin, np.fmax))
            np.clip(result, low, high, out=result)
        return result
    return run_passes(array_module(image).ascontiguousarray(image), axes, between, target, out=out, clamp=clamp)


def _line_of(plan: AxisPlan) -> Line:
    """Return the coordinates of the centres of new voxels, as `_entries` of tables.py computes them."""
    return Line(plan.size, plan.length, plan.size / plan.length, -0.5, 0.5)


def _nearest(image: Array, axes: Sequence[AxisPlan], lines: Sequence[Line]) -> Array:
    """Copy the nearest voxels: on a device in one pass if the kernel supports it, else by the array module."""
    if is_device_array(image) and nearest.can_take(image, lines):
        out: Array = array_module(image).empty([line.length for line in lines], image.dtype)
        nearest.take(contiguous(image), lines, "nearest", 0, out)
        return out
    xp = array_module(image)
    result = image
    # The axis that shrinks most comes first.
    for axis in sorted(range(len(axes)), key=lambda axis: axes[axis].length / axes[axis].size):
        if axes[axis].length != axes[axis].size:
            result = xp.take(result, xp.asarray(windows_of(axes[axis]).first), axis=axis)
    return result


def _on_host(
    image: np.ndarray, axes: Sequence[AxisPlan], between: np.dtype, target: np.dtype, out: np.ndarray | None = None
) -> np.ndarray:
    """Resample by sparse matrices, in float64; results between axes are of dtype `between`, as on a device."""
    result = image
    for axis in sorted(range(len(axes)), key=lambda axis: axes[axis].whole[1] / axes[axis].whole[0]):
        if axes[axis] != unchanged(axes[axis].size):
            result = _along(np.ascontiguousarray(result), axis, axes[axis], between)
    if out is None and target.kind not in "iu":
        return np.ascontiguousarray(result, target)
    return store_rounded(result, np.empty(result.shape, target) if out is None else out)


def _along(image: np.ndarray, axis: int, plan: AxisPlan, between: np.dtype) -> np.ndarray:
    """Resample one axis, a batch of lines at a time."""
    before, after = image.shape[:axis], image.shape[axis + 1 :]
    lines = image.reshape(math.prod(before), plan.size, math.prod(after))
    result = np.empty((len(lines), plan.length, lines.shape[2]), between)
    matrix = axis_matrix(plan)
    max_lines = max(1, _HOST_VOXELS // max(plan.size, plan.length))
    step = min(lines.shape[2], max_lines)
    for begin in range(0, len(lines), max(1, max_lines // step)):
        batch = slice(begin, begin + max(1, max_lines // step))
        for first in range(0, lines.shape[2], step):
            part = lines[batch, :, first : first + step]
            columns = np.moveaxis(part, 1, 0).reshape(plan.size, -1).astype(np.float64)
            resampled = (matrix @ columns).reshape(plan.length, len(part), -1)
            result[batch, :, first : first + step] = np.moveaxis(resampled, 1, 0)
    return result.reshape(*before, plan.length, *after)


def store_rounded(result: Array, out: Array) -> Any:
    """Cast floats into an array of another dtype, as :func:`~linumpy.gpu.rounding.rounded` does.

    Return `out`, which must be C-contiguous. NumPy arrays are cast part by part, to save memory.
    """
    flat, target = result.reshape(-1), out.reshape(-1)
    step = max(1, flat.size) if is_device_array(flat) else _HOST_VOXELS
    for begin in range(0, flat.size, step):
        target[begin : begin + step] = rounded(flat[begin : begin + step], out.dtype)
    return out


@dataclass(frozen=True)
class _PreparedStep:
    """A step with its compiled kernel, and its tables on the device."""

    kernel: Callable[..., None]
    blocks: int
    shared: int
    tables: Uploaded
    sizes: tuple[np.generic, ...]
    shape: tuple[int, ...]
    target: np.dtype


def run_passes(
    image: Array,
    axes: Sequence[AxisPlan],
    between: np.dtype,
    target: np.dtype,
    tuning: ResizeTuning = DEFAULT,
    out: Array | None = None,
    *,
    clamp: bool = False,
) -> Array:
    """Resample a C-contiguous image: the last pass writes dtype `target`, to `out` if given, the others `between`."""
    aligned = address_of(image) % _ALIGNED == 0
    axes, queue = tuple(axes), queue_of(image)
    # Tables of a block are used once: in the cache they would only evict tables that are used again.
    is_block = any(plan.part is not None for plan in axes)
    prepare = _cached_steps if queue is not None and not is_block and _has_small_tables(axes) else _prepared_steps
    steps = prepare(axes, (image.dtype, between, target), aligned, tuning, clamp, queue)
    for step in steps:
        is_last = step is steps[-1]
        output = out if is_last and out is not None else array_module(image).empty(step.shape, step.target)
        args = (image, output, *step.tables.get(), *step.sizes)
        step.kernel((step.blocks,), (_THREADS,), args, shared_mem=step.shared)
        image = output
    return image


@functools.lru_cache(maxsize=64)
def _has_small_tables(axes: tuple[AxisPlan, ...]) -> bool:
    return sum(windows_of(plan).weights.nbytes for plan in axes) <= _CACHED_NBYTES


def _prepared_steps(
    axes: tuple[AxisPlan, ...],
    dtypes: tuple[np.dtype, ...],
    aligned: bool,
    tuning: ResizeTuning,
    clamp: bool,
    queue: Queue,
) -> tuple[_PreparedStep, ...]:
    steps = _planned_steps(axes, dtypes, aligned, tuning)
    return tuple(_prepared_step(step, tuning, clamp, queue) for step in steps)


_planned_steps = functools.lru_cache(maxsize=64)(plan_steps)
_cached_steps = functools.lru_cache(maxsize=32)(_prepared_steps)


def _prepared_step(step: Step, tuning: ResizeTuning, clamp: bool, queue: Queue) -> _PreparedStep:
    sizes: tuple[np.generic, ...]
    if step.kernel == "planes":
        assert step.tile is not None
        y, x = step.axes
        tile = step.tile
        sizes = int32(y.size, y.length, x.size, x.length, tile.width, tile.groups, tile.pitch, int(step.packed))
    elif step.kernel == "along":
        (plan,) = step.axes
        sizes = (*int64(step.outer), *int32(plan.size, plan.length), *int64(step.inner), *int32(int(step.packed)))
    else:
        (plan,) = step.axes
        sizes = (*int64(step.outer), *int32(plan.size, plan.length))
    kernel = load(kernel_spec(step.kernel, step.source, step.compute, step.target, tuning, clamp=clamp))
    return _PreparedStep(
        kernel, step.blocks, step.shared, upload(_tables(step, tuning), queue), sizes, step.shape, step.target
    )


def _tables(step: Step, tuning: ResizeTuning) -> list[np.ndarray]:
    """Return the tables of a kernel, in the order of its parameters."""
    tables: list[np.ndarray] = []
    if step.kernel != "along_x":
        groups = join(windows_of(step.axes[0]), tuning.outputs)
        tables += [_records(groups.first, groups.count, groups.start), groups.weights.astype(step.compute)]
    if step.kernel != "along":
        windows = windows_of(step.axes[-1])
        tables += [_records(windows.first, windows.count), windows.weights.astype(step.compute)]
    if step.tile is not None:
        tables.append(np.array(step.tile.spans, np.int32))
    return tables


def _records(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, 1).astype(np.int32)


def kernel_spec(
    name: str,
    source: np.dtype,
    compute: np.dtype,
    target: np.dtype,
    tuning: ResizeTuning = DEFAULT,
    *,
    clamp: bool = False,
) -> KernelSpec:
    """Return a kernel for the dtypes of its input, its sums (float32 or float64) and its output."""
    is_double = compute == np.float64
    defines = {
        "SOURCE": CUDA_TYPES[source.str[1:]],
        "TARGET": CUDA_TYPES[target.str[1:]],
        "COMPUTE": CUDA_TYPES[compute.str[1:]],
        "CLAMP": str(int(clamp)),
        "OUTPUTS": str(tuning.outputs),
        "PACK": str(tuning.pack(source.itemsize)),
        "UNROLL": str(tuning.unroll),
        "BLOCKS": str(max(1, tuning.blocks // 2) if is_double else tuning.blocks),
    }
    return KernelSpec("resize", name, tuple(defines.items()), "linumpy.gpu.resize.cuda")
