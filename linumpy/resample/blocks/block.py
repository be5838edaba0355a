"""Make a block of an affinely transformed image, smoothed if requested.

For orders 0 and 1 the block equals, bit for bit, its part of the transform of the whole image: coordinates are computed
from indices in the whole output, in SciPy's order of operations, with the boundaries of the whole image. A block that
is smoothed and linearly interpolated to another spacing equals its part of the result of ``resample_volume``. CuPy in,
CuPy out; NumPy in, NumPy out.

A *strip* is a part of a block that SciPy computes at once.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, is_device_array, to_host
from linumpy.gpu.kernels import IN_FLOAT32, computed_in
from linumpy.gpu.resize.resizing import apply_tables, store_rounded
from linumpy.gpu.resize.tables import AxisPart, AxisPlan, unchanged
from linumpy.gpu.rounding import rounded
from linumpy.plan.boundary import SPLINE_PAD, snap_to_edges
from linumpy.plan.grid.blocks import CLIPPED_MODES, AffineGrid, Block, source_box

if TYPE_CHECKING:
    from linumpy.gpu.ndimage.nearest import Line

#: Output voxels of a strip: only the coordinates of one strip are in memory at a time.
_STRIP = 2**18
#: Flag of Linux: a mapping takes memory only where it is written. ``mmap.MAP_NORESERVE`` exists from Python 3.13 on.
_MAP_NORESERVE = 0x4000


def make_box(source: Array, grid: AffineGrid, block: Block, cval: float, out: Array) -> Array:
    """Make a block of the output as :func:`affine_box` does; smooth the source first if the grid requests it.

    Smoothed voxels are float32 (float64 where float32 does not hold the source's numbers), and are rounded to the dtype
    of `out` at the end.
    """
    if not grid.smooths:
        return affine_box(source, grid, block, cval, out)
    float_dtype = computed_in(source.dtype)
    if grid.separable:
        return apply_tables(source, _tables(grid, block), float_dtype, out.dtype, out)
    plain_grid = replace(grid, sigmas=())
    start, stop = source_box(plain_grid, block.start, block.stop)  # without the margin of the smoothing
    inner = replace(block, source_start=start, source_stop=stop)
    if source.size:
        source = apply_tables(source, gaussians(grid, block, inner), float_dtype, float_dtype)
    float_out = out if out.dtype == float_dtype else array_module(out).empty(out.shape, float_dtype)
    affine_box(source.astype(float_dtype, copy=False), plain_grid, inner, cval, float_out)
    return out if float_out is out else store_rounded(float_out, out)


def _tables(grid: AffineGrid, block: Block) -> list[AxisPlan]:
    """Plan the combined smoothing and interpolation of each axis of a box."""
    plans = []
    for axis, (size, length) in enumerate(zip(block.source_shape, block.shape, strict=True)):
        scale, sigma = grid.matrix[axis][axis], grid.sigmas[axis]
        source, target = (block.source_start[axis], block.source_stop[axis]), (block.start[axis], block.stop[axis])
        if scale == 1 and not sigma and source == target:
            plans.append(unchanged(size))
            continue
        part = AxisPart(grid.source_shape[axis], grid.output_shape[axis], scale, source[0], target[0])
        plans.append(AxisPlan(size, length, 1, "nearest", sigma, part=part))
    return plans


def gaussians(grid: AffineGrid, block: Block, inner: Block) -> list[AxisPlan]:
    """Plan the smoothing of each axis: from the source box of `block` to the source box of `inner`, without margin."""
    plans = []
    for axis, (size, length) in enumerate(zip(block.source_shape, inner.source_shape, strict=True)):
        n, sigma = grid.source_shape[axis], grid.sigmas[axis]
        part = AxisPart(n, n, 1.0, block.source_start[axis], inner.source_start[axis])
        plans.append(AxisPlan(size, length, 0, "nearest", sigma, part=part) if sigma else unchanged(size))
    return plans


def affine_box(source: Array, grid: AffineGrid, block: Block, cval: float, out: Array) -> Array:
    """Make a block of the output from the voxels ``block.source_box`` of the image, `cval` outside of the image.

    - `out`: of the block's shape, C-contiguous, of the source's dtype, in the source's memory.

    Orders above 1 filter the box. Its margin is so wide that the result differs from that of the whole image by
    rounding only.
    """
    if source.size == 0:
        return fill(out, cval)
    if is_device_array(source):
        return _by_kernel(source, grid, block, cval, out)
    return _by_scipy(to_host(source), grid, block, cval, to_host(out))


def _by_kernel(source: Array, grid: AffineGrid, block: Block, cval: float, out: Array) -> Array:
    """Sample by the kernel of whole images, with the boundaries of the whole image.

    Memory is allocated only for booleans, and for the coefficients of orders above 1 (one for each voxel).
    """
    from linumpy.gpu.ndimage import general, nearest, sampling, splines

    xp = array_module(source)
    lines = _lines(grid, block) if grid.order == 0 else None
    if lines is not None and nearest.can_take(source, lines):
        nearest.take(sampling.contiguous(source), lines, grid.mode, cval, out)
        return out
    if source.dtype.kind == "b":
        float_out = xp.empty(out.shape, np.float64)
        out[...] = rounded(_by_kernel(source.view(np.uint8), grid, block, cval, float_out), out.dtype)
        return out
    pad, rank = grid.pad, source.ndim
    if grid.order > 1:
        in_ranks = rank in sampling.RANKS
        coefficient_dtype = computed_in(source.dtype, out.dtype) if in_ranks else np.dtype(np.float64)
        ends = splines.Ends(grid.mode, pad, order=grid.order)
        if pad and rank > 3:
            source, ends = xp.pad(source, pad, mode="edge"), splines.Ends(grid.mode, order=grid.order)
        source = splines.filtered(source, ends, coefficient_dtype)
    # The padded box has the same start in the padded image as the box has in the image.
    coordinates = {
        "whole": tuple(n + 2 * pad for n in grid.source_shape),
        "box_start": block.source_start,
        "out_start": block.start,
    }
    source, sampler = (
        sampling.contiguous(source),
        sampling.SplineSampling(grid.order, grid.mode, float(cval), pad, grid.snaps),
    )
    affine = sampling.AffineMap(tuple(map(tuple, grid.matrix)), tuple(grid.shift))
    module = sampling if rank in sampling.RANKS else general
    module.sample_affine(source, affine, sampler, out, **coordinates)
    return out


def _lines(grid: AffineGrid, block: Block) -> tuple[Line, ...] | None:
    """Describe a diagonal map axis by axis, as `affine_transform` does; return None if the matrix is not diagonal."""
    from linumpy.gpu.ndimage.nearest import Line

    matrix = np.array(grid.matrix)
    if np.count_nonzero(matrix - np.diag(np.diagonal(matrix))):
        return None
    boxes = zip(block.source_start, block.source_shape, strict=True)
    columns = (grid.source_shape, block.shape, np.diagonal(matrix).tolist(), grid.shift, block.start, boxes)
    return tuple(replace(Line(*line), snaps=grid.snaps) for line in zip(*columns, strict=True))


def _by_scipy(source: np.ndarray, grid: AffineGrid, block: Block, cval: float, out: np.ndarray) -> np.ndarray:
    """Sample by SciPy's ``map_coordinates``, strip by strip."""
    from scipy import ndimage

    if out.dtype == np.float16:  # which SciPy does not support
        float32_out = _by_scipy(source.astype(np.float32), grid, block, cval, np.empty(out.shape, np.float32))
        with np.errstate(over="ignore"):  # numbers beyond float16 become infinite
            out[...] = float32_out
        return out
    source, origin = _extended_like_image(source, grid, block)
    source, origin = _filtered(source, origin, grid)
    options = {"order": grid.order, "mode": grid.mode, "cval": cval, "prefilter": False}
    # SciPy casts numbers too large for uint64 to 0 instead of the largest number.
    saturates = out.dtype.kind != "u" or out.dtype.itemsize < 8
    for strip, coordinates in _coordinates(grid, block, origin):
        if saturates:
            ndimage.map_coordinates(source, coordinates, output=out[strip], **options)
        else:
            out[strip] = rounded(ndimage.map_coordinates(source, coordinates, output=np.float64, **options), out.dtype)
    return out


def work_bytes(dtype: np.dtype, order: int, device: DeviceName) -> tuple[int, int]:
    """Return the bytes that :func:`affine_box` takes beyond box and block: per voxel of the box, and of the block."""
    type_code = dtype.str[1:]
    if device == "cuda":
        return (0 if order <= 1 else 4 if type_code in IN_FLOAT32 else 8), 8 if type_code == "b1" else 0
    float32_copy = 4 if type_code == "f2" else 0
    # A spline needs the coefficients in float64, and a copy of them while they are filtered.
    return float32_copy + (0 if order <= 1 else 16), float32_copy


def box_work_bytes(dtype: np.dtype, grid: AffineGrid, device: DeviceName) -> tuple[int, int]:
    """Return the bytes that :func:`make_box` takes beyond box and block: per voxel of the box, and of the block."""
    if not grid.smooths:
        return work_bytes(dtype, grid.order, device)
    float_dtype = computed_in(dtype)
    # A pass along an axis has an input and an output, each at most as large as box and block together.
    passes = 2 * float_dtype.itemsize
    if grid.separable:
        return passes, passes
    work, output_work = work_bytes(float_dtype, grid.order, device)
    # The block in floats, and on a device temporary memory that rounds the block.
    return passes + float_dtype.itemsize + work, output_work + float_dtype.itemsize + (24 if device == "cuda" else 0)


def fill(out: Array, cval: float, where: Any = ...) -> Array:
    """Fill a block, or its voxels `where`, with `cval`, cast as SciPy does; return the block."""
    import scipy.ndimage as ndimage

    zero = np.zeros((1,), np.float32 if out.dtype == np.float16 else out.dtype)
    value = ndimage.map_coordinates(zero, [[-2.0]], order=0, mode="constant", cval=cval)
    with np.errstate(over="ignore"):  # numbers beyond float16 become infinite
        out[where] = value.astype(out.dtype)[0]
    return out


def _extended_like_image(source: np.ndarray, grid: AffineGrid, block: Block) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return an array that SciPy extends at the edges like the whole image, and the offset of its first voxel there.

    In the clipped modes, and along axes where no coordinate is near an edge of the image, the box suffices. Along other
    axes the array is as long as the image; its voxels outside the box are zeros that no result depends on.
    """
    if grid.mode in CLIPPED_MODES:
        return source, block.source_start
    bounds = enumerate(grid.coordinates(block.start, block.stop))
    needs_axis = [not grid.stays_inside(axis, low, high) for axis, (low, high) in bounds]
    if not any(needs_axis):
        return source, block.source_start
    origin = tuple(0 if needed else a for needed, a in zip(needs_axis, block.source_start, strict=True))
    shape = tuple(
        n if needed else m for needed, n, m in zip(needs_axis, grid.source_shape, block.source_shape, strict=True)
    )
    if shape == source.shape:
        return source, origin
    image = _sparse_zeros(shape, source.dtype)
    columns = zip(needs_axis, block.source_start, block.source_stop, strict=True)
    image[tuple(slice(a, b) if needed else slice(None) for needed, a, b in columns)] = source
    return image, origin


def _sparse_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make an array of zeros that takes memory, page by page, only where it is written."""
    if sys.platform != "linux":  # without its flag; macOS has no limit of memory that is not written
        return np.zeros(shape, dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=flags)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def _filtered(source: np.ndarray, origin: tuple[int, ...], grid: AffineGrid) -> tuple[np.ndarray, tuple[int, ...]]:
    """Compute the coefficients of the spline from voxels, as SciPy's ``map_coordinates`` does; orders 0, 1: none."""
    if grid.order < 2:
        return source, origin
    if grid.mode == "nearest":
        source = np.pad(source, SPLINE_PAD, mode="edge")
        origin = tuple(a - SPLINE_PAD for a in origin)
    from scipy import ndimage

    return ndimage.spline_filter(source, grid.order, np.float64, grid.mode), origin


def _coordinates(
    grid: AffineGrid, block: Block, origin: tuple[int, ...]
) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Compute the source coordinates of the voxels of a block, relative to `origin`, strip by strip.

    Sums are taken in SciPy's order: the offset first, then axis after axis. `origin` is a whole number: subtracting it
    from a coordinate that is not smaller is exact, so the fraction that weights the voxels does not change.
    """
    for strip in _strips(block.shape):
        voxels = []
        for axis, (bounds, start) in enumerate(zip(strip, block.start, strict=True)):
            line = np.arange(start + bounds.start, start + bounds.stop, dtype=np.float64)
            voxels.append(line.reshape([-1 if a == axis else 1 for a in range(grid.rank)]))
        coordinates = np.empty((grid.rank, *(bounds.stop - bounds.start for bounds in strip)), np.float64)
        for axis, (row, shift, first) in enumerate(zip(grid.matrix, grid.shift, origin, strict=True)):
            sum_: float | np.ndarray = shift
            for weight, line in zip(row, voxels, strict=True):
                sum_ = sum_ + line * weight
            coordinates[axis] = sum_
            if grid.snaps:
                snap_to_edges(coordinates[axis], grid.source_shape[axis])
            coordinates[axis] -= first
        yield strip, coordinates


def _strips(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Cut a block into strips of about :data:`_STRIP` voxels, each contiguous in the block."""
    plane = math.prod(shape[1:])
    step = max(1, _STRIP // plane)
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        if end - begin == 1 and len(shape) > 1 and plane > _STRIP:
            for inner in _strips(shape[1:]):
                yield slice(begin, end), *inner
        else:
            yield slice(begin, end), *(slice(0, n) for n in shape[1:])
