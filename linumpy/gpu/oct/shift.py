"""Shift A-lines along depth, each by its own amount: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and a map of shifts, which repeats tile by tile. Out: a volume of the same dtype, memory order and lateral
shape. On the device one kernel moves every voxel once. In the code a and b are the lateral axes, the outer and the
inner one in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import (
    CUDA_TYPES,
    UNSIGNED_TYPES,
    KernelSpec,
    address_of,
    computed_in,
    int32,
    int64,
    load,
    memory_order,
    uint32,
)
from linumpy.gpu.rounding import saturated

_THREADS = 128
_MARCH = 8  # as in gather.cu
#: Size of a memory access, which may hold several neighbouring A-lines with the same shift.
_ACCESS_BYTES = 8
#: How voxels whose source lies outside the volume are filled: BEYOND of gather.cu.
_BEYOND = {"fill": 0, "wrap": 1, "repeat": 2}
#: Voxels of a block on the CPU, which limits the memory of its indices.
_BLOCK_VOXELS = 2**22


def shift_along_depth(
    vol: Array,
    shifts: Array,
    *,
    depth_axis: int = 0,
    origin: tuple[int, int] = (0, 0),
    wrap: bool = False,
    fill_value: float | None = 0,
    planes: int | None = None,
) -> Array:
    """Shift A-lines towards the surface: ``out[z] = vol[z + shift]`` along each A-line.

    `vol`: booleans, integers or floats, in any memory order. `shifts` (height, width): shifts of a tile, in voxels. The
    A-line at (i, j) of the lateral axes is shifted by ``shifts[i % height, j % width]``; a map of the lateral shape of
    the volume has one shift for each A-line. Integer shifts move voxels unchanged. Float shifts are converted to
    float32 and interpolate linearly between two voxels (rounded half to even in volumes of integers). Shifts are
    limited to ±2^30, beyond every volume; NaN counts as 2^30. `origin` (int, int): lateral offset of the volume's first
    A-line in the mosaic that the volume is a part of. `wrap`: whether depth is periodic. Otherwise a voxel is filled if
    its source (with interpolation, either of its two source voxels) lies outside the volume. `fill_value`: value to
    fill with; None repeats the nearest voxel of the A-line. Not used with `wrap`. `planes`: voxels of the result along
    depth; by default as many as the volume has.

    Returns: Of the dtype of `vol`, in this machine's byte order, in the memory (host or device) of `vol`.

    `ValueError`: A volume that is not of rank 3, a `depth_axis` that it does not have, shifts that are not a map, or
    negative `planes`. `TypeError`: Voxels or shifts that are not real numbers; a fill value that an integer dtype does
    not hold.
    """
    fill = _check(vol, shifts, depth_axis, 0 if fill_value is None else fill_value)
    beyond = "wrap" if wrap else "repeat" if fill_value is None else "fill"
    xp, depth_axis = array_module(vol), depth_axis % 3
    planes = vol.shape[depth_axis] if planes is None else int(planes)
    if planes < 0:
        raise ValueError(f"planes={planes}: a volume has 0 planes or more")
    if not vol.size or not planes:
        return xp.full([planes if k == depth_axis else n for k, n in enumerate(vol.shape)], fill[()], fill.dtype)
    compute: Callable[..., Array] = _by_kernel if is_device_array(vol) else _by_numpy
    return compute(vol, _bounded(xp, shifts), depth_axis, origin, beyond, fill, planes)


def _bounded(xp: ModuleType, shifts: Array) -> Array:
    """Convert shifts to int32 or float32, limited to ±2^30; NaN becomes 2^30.

    CuPy cannot clip a type by a limit outside its range, so shifts are converted to 64 bits first. On a device int32
    and float32 need no conversion, since gather.cu applies the limit.
    """
    shifts, limit = xp.asarray(shifts), 2**30
    if xp is not np and shifts.dtype in (np.int32, np.float32):
        return xp.ascontiguousarray(shifts)
    if shifts.dtype.kind == "f":
        in_float64 = shifts.astype(np.float64)
        return xp.clip(xp.where(xp.isnan(in_float64), limit, in_float64), -limit, limit).astype(np.float32, order="C")
    if shifts.dtype.kind == "u":
        return xp.minimum(shifts.astype(np.uint64), np.uint64(limit)).astype(np.int32, order="C")
    return xp.clip(shifts.astype(np.int64), -limit, limit).astype(np.int32, order="C")


def _check(vol: Array, shifts: Array, depth_axis: int, fill_value: float) -> np.ndarray:
    if vol.ndim != 3 or not -3 <= depth_axis < 3:
        raise ValueError(f"a volume of shape {vol.shape} and depth_axis={depth_axis}: three axes are needed")
    if shifts.ndim != 2 or not all(shifts.shape):
        raise ValueError(f"shifts of shape {shifts.shape}: a map (height, width) of a tile is needed")
    if vol.dtype.kind not in "biuf" or vol.dtype.itemsize > 8 or shifts.dtype.kind not in "iuf":
        raise TypeError(f"voxels of {vol.dtype}, shifts of {shifts.dtype}: real numbers are needed")
    native = vol.dtype.newbyteorder("=")
    if native.kind in "iu" and not (
        math.isfinite(fill_value) and np.iinfo(native).min <= fill_value <= np.iinfo(native).max
    ):
        raise TypeError(f"fill_value={fill_value}: {native} does not hold it")
    return np.array(fill_value).astype(native)


def _by_numpy(
    vol: np.ndarray,
    shifts: np.ndarray,
    depth_axis: int,
    origin: tuple[int, int],
    beyond: str,
    fill: np.ndarray,
    planes: int,
) -> np.ndarray:
    shape = [planes if k == depth_axis else n for k, n in enumerate(vol.shape)]
    out = np.empty_like(vol, dtype=fill.dtype, shape=shape)
    lines, result = np.moveaxis(vol, depth_axis, -1), np.moveaxis(out, depth_axis, -1)
    rows, columns, depth = lines.shape
    step = max(1, _BLOCK_VOXELS // (columns * max(depth, planes)))
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        tile_rows = np.arange(part.start, part.stop) + origin[0]
        shift = shifts[np.ix_(tile_rows % shifts.shape[0], (np.arange(columns) + origin[1]) % shifts.shape[1])]
        below = np.floor(shift)
        first = np.arange(planes) + below.astype(np.int64)[..., None]
        weight = (shift - below)[..., None]
        second = first + (weight > 0)
        outside = (first < 0) | (second >= depth)
        if beyond == "repeat":
            first, second = np.clip(first, 0, depth - 1), np.clip(second, 0, depth - 1)
            weight = np.where(outside, 0, weight)  # inf - inf would be NaN
        else:
            first, second = first % depth, second % depth
        values = np.take_along_axis(lines[part], first, axis=-1)
        if shifts.dtype.kind == "f":
            values = _between(values, np.take_along_axis(lines[part], second, axis=-1), weight)
        result[part] = np.where(outside, fill, values) if beyond == "fill" else values
    return out


def _between(first: np.ndarray, second: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Interpolate linearly between two voxels, as the kernel does."""
    compute_dtype = _computed_in(first.dtype)
    a, b = first.astype(compute_dtype), second.astype(compute_dtype)
    with np.errstate(invalid="ignore"):
        values = np.where(weight > 0, a + weight.astype(compute_dtype) * (b - a), a)
    if first.dtype.kind not in "biu":
        return values.astype(first.dtype)
    # Without a fraction the voxel is copied: 64-bit integers may not fit a float64.
    return np.where(weight > 0, saturated(np.rint(values), first.dtype.newbyteorder("=")), first)


def _computed_in(dtype: np.dtype) -> np.dtype:
    return computed_in(np.dtype(np.uint8) if dtype.kind == "b" else dtype)


def _by_kernel(
    vol: Array, shifts: Array, depth_axis: int, origin: tuple[int, int], beyond: str, fill: np.ndarray, planes: int
) -> Array:
    xp = array_module(vol)
    if any(stride % vol.itemsize for stride in vol.strides):
        vol = xp.ascontiguousarray(vol)
    order = memory_order(vol.shape, vol.strides)
    shape = [planes if axis == depth_axis else vol.shape[axis] for axis in order]
    out: Array = xp.empty(shape, vol.dtype).transpose(np.argsort(order).tolist())
    a, b = (axis for axis in order if axis != depth_axis)
    depth_lane = order[-1] == depth_axis
    linear = shifts.dtype.kind == "f"
    strides = [array.strides[axis] // vol.itemsize for array in (vol, out) for axis in (a, b, depth_axis)]
    vec = 1 if linear or depth_lane or strides[1] != 1 else _lines_of_thread(vol, out, address_of(vol), b)
    lane_size, march_size = (planes, vol.shape[b]) if depth_lane else (vol.shape[b] // vec, planes)
    lanes = min(_THREADS, 1 << (lane_size - 1).bit_length())
    blocks_lane, blocks_march = -(-lane_size // lanes), -(-march_size // (_THREADS // lanes * _MARCH))
    # The axes of the map are the lateral axes in ascending order.
    swapped = a > b
    tile, pitch, first = (pair[::-1] if swapped else pair for pair in (shifts.shape, (shifts.shape[1], 1), origin))
    spec = kernel_spec(vol.dtype, linear=linear, beyond=beyond, depth_lane=depth_lane, vec=vec)
    # The origin modulo the tile, which fits 32 bits.
    begin = [offset % size for offset, size in zip(first, tile, strict=True)]
    load(spec)(
        (blocks_lane * blocks_march * vol.shape[a],),
        (_THREADS,),
        (
            *(vol, out, shifts, *int64(*strides), *int32(vol.shape[b], vol.shape[depth_axis], planes)),
            *(*int32(*tile, *pitch, *begin), *uint32(lanes, blocks_lane, blocks_march), _scalar(fill, linear)),
        ),
    )
    return out


def _lines_of_thread(vol: Array, out: Array, address: int, b: int) -> int:
    """Return the number of neighbouring A-lines of an access: alignment of the volume and its rows limits it."""
    rows = [array.strides[axis] for array in (vol, out) for axis in range(3) if axis != b]
    return math.gcd(max(_ACCESS_BYTES, vol.itemsize), address, vol.shape[b] * vol.itemsize, *rows) // vol.itemsize


def _scalar(fill: np.ndarray, linear: bool) -> Any:
    """Return the fill value as an argument of the kernel: as a number if the kernel interpolates, else its bits."""
    if linear and fill.dtype.kind in "iuf" and fill.dtype.itemsize != 2:
        return fill[()]
    return fill.reshape(1).view(f"u{fill.dtype.itemsize}")[0]


def kernel_spec(dtype: np.dtype, *, linear: bool, beyond: str, depth_lane: bool, vec: int = 1) -> KernelSpec:
    """Choose a kernel of gather.cu."""
    defines = {
        "SOURCE": CUDA_TYPES[dtype.str[1:]] if linear else UNSIGNED_TYPES[dtype.itemsize],
        "ACC": CUDA_TYPES[_computed_in(dtype).str[1:]],
        "LINEAR": str(int(linear)),
        "BEYOND": str(_BEYOND[beyond]),
        "DEPTH_LANE": str(int(depth_lane)),
        "VEC": str(vec),
    }
    return KernelSpec("gather", "shift_along_depth", tuple(defines.items()), "linumpy.gpu.oct.cuda")
