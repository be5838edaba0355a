"""Choose how an image is sampled: SciPy for NumPy arrays, one of the kernels for CuPy arrays.

In: an image, and coordinates, displacements or a map, all checked (:mod:`~linumpy.gpu.ndimage.arguments`). Out:
samples, in the memory of the image. On a device:

- order 0, the image's own dtype, a diagonal map: voxels are copied (:mod:`~linumpy.gpu.ndimage.nearest`);
- images of two and three axes, and stacks of them along axes that the map does not change:
  :mod:`~linumpy.gpu.ndimage.sampling`;
- everything else, in double precision: :mod:`~linumpy.gpu.ndimage.general`.

The real and the imaginary part of complex images are sampled one after the other, as in SciPy. For voxels that are not
finite, stacks differ from SciPy, which (except in ``rotate``) spreads them to neighbouring images of the stack by
0 × NaN. Therefore an image of three axes is not sampled as a stack at orders 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import computed_in
from linumpy.gpu.ndimage import by_scipy, general, nearest, sampling, splines
from linumpy.gpu.ndimage.arguments import Spline, Target
from linumpy.gpu.ndimage.nearest import Line
from linumpy.gpu.rounding import rounded
from linumpy.plan.boundary import SPLINE_PAD

#: The modes for which SciPy pads the image before it computes the spline's coefficients.
_PADDED = ("nearest", "grid-constant")


@dataclass(frozen=True)
class GridMap:
    """An affine map from the voxels of a result to coordinates in an image.

    `linear` (rank, axes of the result): coordinates are ``linear @ voxel + shift``. `shift` (rank,): in voxels of the
    image. `lines`: the same map axis by axis, if it is diagonal; in SciPy's order of operations. `planes`: the axes
    that the map changes; the image is then sampled as a stack along all others. By default stacks are recognised, where
    finite voxels give the same result.
    """

    linear: np.ndarray
    shift: np.ndarray
    lines: tuple[Line, ...] | None = None
    planes: tuple[int, ...] | None = None


def sample_at(image: Array, coordinates: Array, how: Spline, target: Target) -> Array:
    """Sample at coordinates, (rank, ...)."""
    if not is_device_array(image):
        return by_scipy.sample_at(image, coordinates, how, target)
    coordinates = _as_floats(coordinates)

    def sample(part: Array, spline_of: Spline, out: Array) -> None:
        source, sampler = _prepare(part, spline_of, part.ndim, out.dtype)
        module = sampling if sampling.can_sample(source) else general
        module.sample_points(source, coordinates, sampler, out)

    return _by_parts(image, how, target, sample, coordinates)


def sample_grid(
    image: Array, grid: GridMap, how: Spline, target: Target, by_host: by_scipy.ScipyCall | None = None
) -> Array:
    """Sample on the grid of an affine map; `by_host` is the call of SciPy for NumPy arrays, by default of its map."""
    if not is_device_array(image):
        affine = by_scipy.scipy_call("affine_transform", grid.linear, grid.shift, target.shape, **how.options)
        return by_scipy.transform(image, how, target, by_host or affine)
    if how.order == 0 and grid.lines and image.dtype == target.dtype and nearest.can_take(image, grid.lines):
        out = target.array(image)
        nearest.take(sampling.contiguous(image), grid.lines, how.mode, how.cval, out)
        return target.take(out)

    return _by_parts(image, how, target, lambda part, spline_of, out: _sample_grid(part, grid, spline_of, out))


def sample_displaced(image: Array, field: Array, sizes: Sequence[float] | None, how: Spline, target: Target) -> Array:
    """Sample at the displaced voxels of a grid.

    `field` is (rank, ...): in voxels if `sizes` is None, else in the unit of `sizes`, the size of a voxel along each
    axis. If the image has one axis more, it is a stack along the first, and so is the result.
    """
    rank = len(field)
    if not is_device_array(image) or rank not in sampling.RANKS:
        coordinates = by_scipy.displaced(field, sizes, array_module(field))
        if image.ndim == rank:
            return sample_at(image, coordinates, how, target)
        out = target.array(image, field)
        for member, result in zip(image, out, strict=True):
            sample_at(member, coordinates, how, Target(result.shape, result.dtype, result))
        return target.take(out)
    field = _as_floats(field)

    def sample(part: Array, spline_of: Spline, out: Array) -> None:
        source, sampler = _prepare(part, spline_of, rank, out.dtype)
        sampling.sample_displaced(source, field, sizes, sampler, out)

    return _by_parts(image, how, target, sample, field)


def filter_on_device(image: Array, order: int, axes: Sequence[int], mode: str, target: Target) -> Array:
    """Compute the coefficients of a spline along some axes, in the dtype of the target, as SciPy does."""
    xp = array_module(image)
    if image.dtype.kind == "c":
        out = target.array(image)
        for part in ("real", "imag"):
            component = getattr(out, part)
            component[...] = filter_on_device(
                getattr(image, part), order, axes, mode, Target(target.shape, component.dtype)
            )
        return target.take(out)
    out = target.array(image)
    if order < 2 or not image.size or not image.ndim:
        out[...] = image
        return target.take(out)
    source = image.view(np.uint8) if image.dtype.kind == "b" else image
    ends = splines.Ends(mode, order=order)
    if target.dtype.str[1:] in ("f4", "f8"):
        return target.take(splines.filtered(source, ends, target.dtype, out, axes))
    for axis in axes:  # SciPy stores the result of each axis in the dtype of the target, truncated
        in_float64 = splines.filtered(source, ends, np.float64, axes=[axis])
        if target.dtype.kind in "iu":
            in_float64 = xp.trunc(in_float64).astype(np.int64)
        out[...] = xp.abs(in_float64) >= 1 if target.dtype.kind == "b" else in_float64
        source = out.view(np.uint8) if target.dtype.kind == "b" else out
    return target.take(out)


def _by_parts(
    image: Array, how: Spline, target: Target, sample: Callable[[Array, Spline, Array], None], *inputs: Array
) -> Array:
    """Sample an image on the device by `sample`, part by part and with conversions for dtypes that it does not support.

    The parts are the real and the imaginary part. `sample` takes an image of real numbers that is not empty, its
    parameters, and a contiguous array for the result. It also reads `inputs`, with which the result must not share
    memory.
    """
    if target.shape and not all(target.shape):
        return target.take(target.array(image))
    if not image.size:
        raise ValueError(f"an image of shape {image.shape} has no voxels to sample")
    xp = array_module(image)
    if image.dtype.kind == "c":
        out = target.array(image, *inputs)
        for part in ("real", "imag"):
            component = getattr(out, part)
            component[...] = _by_parts(
                getattr(image, part), how.part(part), Target(target.shape, component.dtype), sample, *inputs
            )
        return target.take(out)
    if target.dtype.kind == "b":
        in_float64 = xp.empty(target.shape, np.float64)
        sample(image, how, in_float64)
        return target.take(rounded(in_float64, target.dtype))
    out = target.array(image, *inputs)
    sample(image, how, out)
    return target.take(out)


def _sample_grid(image: Array, grid: GridMap, how: Spline, out: Array) -> None:
    """Sample an image of real numbers: as a stack, by the kernels for two and three axes, or by the general one."""
    planes = grid.planes if grid.planes is not None else _planes_of(image, grid, how, out.shape)
    if len(planes) < image.ndim:
        _sample_stack(image, grid, planes, how, out)
        return
    source, sampler = _prepare(image, how, image.ndim, out.dtype)
    module = sampling if sampling.can_sample(source) and out.ndim == image.ndim else general
    module.sample_affine(source, _affine_map(grid.linear, grid.shift), sampler, out)


def _planes_of(image: Array, grid: GridMap, how: Spline, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Choose the axes to sample along; the others are axes of a stack. Finite voxels give the same result.

    Any axis that the map does not change may be an axis of a stack. Of three axes, it is only the first, and only above
    order 1, where this saves the filter and the weights along it.
    """
    all_axes = tuple(range(image.ndim))
    if image.ndim < 3 or len(shape) != image.ndim or not how.is_local:
        return all_axes
    if image.ndim == 3:
        return all_axes[1:] if how.order > 1 and _is_unchanged(0, image, grid, shape) else all_axes
    stacked = [axis for axis in all_axes if _is_unchanged(axis, image, grid, shape)]
    sampled = [axis for axis in all_axes if axis not in stacked]
    while len(sampled) < min(sampling.RANKS):  # prefer the last axes, which are contiguous
        sampled.append(stacked.pop())
    return tuple(sorted(sampled)) if len(sampled) <= max(sampling.RANKS) else all_axes


def _is_unchanged(axis: int, image: Array, grid: GridMap, shape: tuple[int, ...]) -> bool:
    """Say whether a map leaves an axis as it is and does not mix it with another."""
    unit = np.eye(image.ndim)[axis]
    same = np.array_equal(grid.linear[axis], unit) and np.array_equal(grid.linear[:, axis], unit)
    return bool(same and grid.shift[axis] == 0 and image.shape[axis] == shape[axis])


def _sample_stack(image: Array, grid: GridMap, planes: tuple[int, ...], how: Spline, out: Array) -> None:
    """Sample all planes (or volumes) of a stack in one launch."""
    xp = array_module(image)
    stacked = tuple(axis for axis in range(image.ndim) if axis not in planes)
    order = (*stacked, *planes)
    moved = image.transpose(order)
    shape = tuple(image.shape[axis] for axis in planes)
    source, sampler = _prepare(sampling.contiguous(moved).reshape((-1, *shape)), how, len(planes), out.dtype)
    out_shape = tuple(out.shape[axis] for axis in order)
    in_place = order == tuple(range(image.ndim))
    result = out if in_place else xp.empty(out_shape, out.dtype)
    linear = grid.linear[np.ix_(planes, planes)]
    affine = _affine_map(linear, grid.shift[list(planes)])
    sampling.sample_affine(source, affine, sampler, result.reshape((-1, *out_shape[len(stacked) :])))
    if not in_place:
        out[...] = result.transpose(np.argsort(order).tolist())


def _affine_map(linear: np.ndarray, shift: np.ndarray) -> sampling.AffineMap:
    return sampling.AffineMap(tuple(map(tuple, linear.tolist())), tuple(shift.tolist()))


def _as_floats(array: Array) -> Array:
    """Convert an array for the kernels: contiguous, float32 if that holds all its numbers, else float64."""
    array = sampling.contiguous(array)
    if array.dtype.str[1:] in ("f4", "f8"):
        return array
    fits_float32 = array.dtype.kind == "b" or array.dtype.str[1:] in ("f2", "i1", "u1", "i2", "u2")
    return array.astype(np.float32 if fits_float32 else np.float64)


def _prepare(image: Array, how: Spline, rank: int, target: np.dtype) -> tuple[Array, sampling.SplineSampling]:
    """Return an image or a stack as the kernels need it, contiguous and filtered, with the parameters to sample it."""
    order, mode, own_dtype = how.order, how.mode, image.dtype
    sampler = sampling.SplineSampling(order, mode, float(how.cval))
    image = image.view(np.uint8) if own_dtype.kind == "b" else image
    if order < 2 or not how.prefilter:
        return sampling.contiguous(image), sampler
    dtype = computed_in(image.dtype, target) if rank in sampling.RANKS else np.dtype(np.float64)
    axes = range(image.ndim - rank, image.ndim)
    if mode not in _PADDED:
        return splines.filtered(image, splines.Ends(mode, order=order), dtype, axes=axes), sampler
    sampler = sampling.SplineSampling(order, mode, float(how.cval), SPLINE_PAD)
    # In the padding `cval` has the image's dtype, as in SciPy; beyond the padding it is exact.
    value = np.pad(np.zeros(1, own_dtype), 1, constant_values=how.cval)[0] if mode == "grid-constant" else None
    if image.ndim == rank in (2, 3):
        ends = splines.Ends(mode, SPLINE_PAD, value if value is None else float(value), order)
        return splines.filtered(image, ends, dtype), sampler
    widths = [(SPLINE_PAD * (axis in axes),) * 2 for axis in range(image.ndim)]
    keywords = {"mode": "edge"} if value is None else {"constant_values": value}
    padded = array_module(image).pad(image, widths, **keywords)
    return splines.filtered(padded, splines.Ends(mode, order=order), dtype, axes=axes), sampler
