"""Resize an image axis by axis, smoothing and interpolation in one table of weights: both are linear and separable.

In: an image and the shape wanted. Out: the resized image, float32 (float64 for float64) unless asked otherwise. Passes,
tiles and tables are planned in NumPy alone and kept. CuPy arrays are resampled by kernels of ``resize.cu``, NumPy
arrays by the same weights as sparse matrices; nearest voxels are taken as they are. No kernel is compiled for a shape.
Temporary memory: the results between two passes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, IN_FLOAT32, KernelSpec, Uploaded, address_of, int32, int64, load
from linumpy.gpu.ndimage import nearest
from linumpy.gpu.ndimage.nearest import Line
from linumpy.gpu.ndimage.sampling import contiguous
from linumpy.gpu.resize.plan import Step, Tuning, plan_steps
from linumpy.gpu.resize.tables import AxisPlan, axis_matrix, join, unchanged, windows_of
from linumpy.gpu.rounding import rounded
from linumpy.gpu.tables import Queue, queue_of, upload

DEFAULT = Tuning()
_THREADS = 256
_ALIGNED = 16  # bytes: of the loads of resize.cu
#: Tables of more bytes are made and sent up again at every call.
_KEPT_BYTES = 4 * 2**20
_HOST_VOXELS = 2**19  # that are float64 at a time


@functools.lru_cache(maxsize=256)
def _plan_axes(
    shape: tuple[int, ...], output_shape: tuple[int, ...], order: int, mode: str, sigmas: tuple[float, ...]
) -> tuple[tuple[AxisPlan, ...], tuple[Line, ...] | None]:
    """Plan every axis; and lay the lines out along which voxels are taken, where all that is done is to take some."""
    axes = plan_axes(shape, output_shape, order, mode, sigmas)
    taken = all(plan.order == 0 and plan.sigma == 0 for plan in axes)
    return axes, tuple(map(_line_of, axes)) if taken else None


def plan_axes(
    shape: Sequence[int], output_shape: Sequence[int], order: int, mode: str, sigmas: Sequence[float]
) -> tuple[AxisPlan, ...]:
    """Plan every axis by itself."""
    return tuple(
        AxisPlan(int(n), int(m), order, mode, float(sigma)) if n != m or sigma > 0 else unchanged(int(n))
        for n, m, sigma in zip(shape, output_shape, sigmas, strict=True)
    )


def resample_axes(
    image: Any,
    output_shape: Sequence[int],
    *,
    order: int,
    mode: str,
    sigmas: Sequence[float],
    dtype: Any = None,
    clamp: bool = False,
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
        One of :data:`~linumpy.gpu.resize.tables.MODES`.
    sigmas : sequence of float
        Of the Gaussian, one for each axis, in voxels of the image.
    dtype : dtype, optional
        Of the result; integers are rounded, halves away from zero, and saturate. By default float64 for float64, else
        float32.
    clamp : bool
        Whether no result may leave the range of the image, by rounding, where nothing lies outside of it: not with
        ``"grid-constant"``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`, where the image is; never a view of it.
    """
    between = np.dtype(np.float64 if image.dtype == np.float64 else np.float32)
    target = between if dtype is None else np.dtype(dtype)
    axes, lines = _plan_axes(tuple(image.shape), tuple(output_shape), order, mode, tuple(sigmas))
    if lines is not None:
        taken = _nearest(image, axes, lines)
        return taken if taken.dtype == target and taken is not image else taken.astype(target)
    return apply_tables(image, axes, between, target, clamp=clamp)


def computed_in(*dtypes: np.dtype) -> np.dtype:
    """Choose what sums are of: float32, unless it does not hold the numbers of a dtype."""
    return np.dtype(np.float32 if all(one.str[1:] in IN_FLOAT32 for one in dtypes) else np.float64)


def apply_tables(
    image: Any, axes: Sequence[AxisPlan], between: np.dtype, target: np.dtype, out: Any = None, *, clamp: bool = False
) -> Any:
    """Resample an image as planned: NumPy arrays on the host, CuPy arrays by the kernels.

    Sums on a device, and what is kept between two axes, are of `between`; the result is `target`. It goes to `out`
    where that is given, a C-contiguous array of its shape and of `target`; then some axis must change. For `clamp` see
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
    """Lay the centres of new voxels out, as `_entries` of resize_tables does."""
    return Line(plan.size, plan.length, plan.size / plan.length, -0.5, 0.5)


def _nearest(image: Any, axes: Sequence[AxisPlan], lines: Sequence[Line]) -> Any:
    """Take voxels as they are: by the array module, or on a device in one pass, where its kernel can."""
    if is_device_array(image) and nearest.can_take(image, lines):
        out = array_module(image).empty([line.length for line in lines], image.dtype)
        nearest.take(contiguous(image), lines, "nearest", 0, out)
        return out
    xp = array_module(image)
    result = image  # what shrinks most goes first
    for axis in sorted(range(len(axes)), key=lambda axis: axes[axis].length / axes[axis].size):
        if axes[axis].length != axes[axis].size:
            result = xp.take(result, xp.asarray(windows_of(axes[axis]).first), axis=axis)
    return result


def _on_host(
    image: np.ndarray, axes: Sequence[AxisPlan], between: np.dtype, target: np.dtype, out: np.ndarray | None = None
) -> np.ndarray:
    """Resample by sparse matrices, in float64; between two axes `between` is kept, as on a device."""
    result = image
    for axis in sorted(range(len(axes)), key=lambda axis: axes[axis].whole[1] / axes[axis].whole[0]):
        if axes[axis] != unchanged(axes[axis].size):
            result = _along(np.ascontiguousarray(result), axis, axes[axis], between)
    if out is None and target.kind not in "iu":
        return np.ascontiguousarray(result, target)
    return store_rounded(result, np.empty(result.shape, target) if out is None else out)


def _along(image: np.ndarray, axis: int, plan: AxisPlan, between: np.dtype) -> np.ndarray:
    """Resample one axis, some lines at a time."""
    before, after = image.shape[:axis], image.shape[axis + 1 :]
    lines = image.reshape(math.prod(before), plan.size, math.prod(after))
    done = np.empty((len(lines), plan.length, lines.shape[2]), between)
    matrix = axis_matrix(plan)
    most = max(1, _HOST_VOXELS // max(plan.size, plan.length))
    step = min(lines.shape[2], most)
    for begin in range(0, len(lines), max(1, most // step)):
        some = slice(begin, begin + max(1, most // step))
        for first in range(0, lines.shape[2], step):
            part = lines[some, :, first : first + step]
            columns = np.moveaxis(part, 1, 0).reshape(plan.size, -1).astype(np.float64)
            made = (matrix @ columns).reshape(plan.length, len(part), -1)
            done[some, :, first : first + step] = np.moveaxis(made, 1, 0)
    return done.reshape(*before, plan.length, *after)


def store_rounded(result: Any, out: Any) -> Any:
    """Bring floats into an array of another dtype, as :func:`~linumpy.gpu.rounding.rounded` casts them.

    NumPy arrays go part by part, so that this takes little memory; `out` must be C-contiguous.
    """
    flat, target = result.reshape(-1), out.reshape(-1)
    step = max(1, flat.size) if is_device_array(flat) else _HOST_VOXELS
    for begin in range(0, flat.size, step):
        target[begin : begin + step] = rounded(flat[begin : begin + step], out.dtype)
    return out


@dataclass(frozen=True)
class _Launch:
    """A step with all that it needs on the device."""

    kernel: Any
    blocks: int
    shared: int
    tables: Uploaded
    sizes: tuple[np.generic, ...]
    shape: tuple[int, ...]
    target: np.dtype


def run_passes(
    image: Any,
    axes: Sequence[AxisPlan],
    between: np.dtype,
    target: np.dtype,
    tuning: Tuning = DEFAULT,
    out: Any = None,
    *,
    clamp: bool = False,
) -> Any:
    """Resample a C-contiguous image: the last pass writes `target`, to `out` where that is given, others `between`."""
    dtypes = (image.dtype, between, target)
    launches = _prepare(tuple(axes), dtypes, address_of(image) % _ALIGNED == 0, tuning, clamp, queue_of(image))
    for launch in launches:
        last = out is not None and launch is launches[-1]
        made = out if last else array_module(image).empty(launch.shape, launch.target)
        launch.kernel(
            (launch.blocks,), (_THREADS,), (image, made, *launch.tables.get(), *launch.sizes), shared_mem=launch.shared
        )
        image = made
    return image


@functools.lru_cache(maxsize=64)
def _steps(axes: tuple[AxisPlan, ...], dtypes: tuple[np.dtype, ...], aligned: bool, tuning: Tuning) -> tuple[Step, ...]:
    return plan_steps(axes, dtypes, aligned, tuning)


def _prepare(
    axes: tuple[AxisPlan, ...],
    dtypes: tuple[np.dtype, ...],
    aligned: bool,
    tuning: Tuning,
    clamp: bool,
    queue: Queue,
) -> tuple[_Launch, ...]:
    # The tables of a block serve no other one: kept, they would only push out those that are used again.
    whole = all(plan.part is None for plan in axes)
    make = _kept if queue is not None and whole and _is_small(axes) else _made
    return make(axes, dtypes, aligned, tuning, clamp, queue)


@functools.lru_cache(maxsize=64)
def _is_small(axes: tuple[AxisPlan, ...]) -> bool:
    return sum(windows_of(plan).weights.nbytes for plan in axes) <= _KEPT_BYTES


def _made(
    axes: tuple[AxisPlan, ...],
    dtypes: tuple[np.dtype, ...],
    aligned: bool,
    tuning: Tuning,
    clamp: bool,
    queue: Queue,
) -> tuple[_Launch, ...]:
    return tuple(_launch(step, tuning, clamp, queue) for step in _steps(axes, dtypes, aligned, tuning))


_kept = functools.lru_cache(maxsize=32)(_made)


def _launch(step: Step, tuning: Tuning, clamp: bool, queue: Queue) -> _Launch:
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
    return _Launch(
        kernel, step.blocks, step.shared, upload(_tables(step, tuning), queue), sizes, step.shape, step.target
    )


def _tables(step: Step, tuning: Tuning) -> list[np.ndarray]:
    """Lay out the tables that a kernel takes, in its order."""
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
    tuning: Tuning = DEFAULT,
    *,
    clamp: bool = False,
) -> KernelSpec:
    """Describe a kernel for the types it reads, adds up in (float32 or float64), and writes."""
    wide = compute == np.float64
    defines = {
        "SOURCE": CUDA_TYPES[source.str[1:]],
        "TARGET": CUDA_TYPES[target.str[1:]],
        "COMPUTE": CUDA_TYPES[compute.str[1:]],
        "CLAMP": str(int(clamp)),
        "OUTPUTS": str(tuning.outputs),
        "PACK": str(tuning.pack(source.itemsize)),
        "UNROLL": str(tuning.unroll),
        "BLOCKS": str(max(1, tuning.blocks // 2) if wide else tuning.blocks),
    }
    return KernelSpec("resize", name, tuple(defines.items()), "linumpy.gpu.resize.cuda")
