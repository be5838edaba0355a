"""The way an image is sampled: this package's kernels, the texture unit, ``cupyx.scipy.ndimage``, or SciPy.

In: an image, and places, displacements or a map, all of them checked (:mod:`~linumpy.gpu.interpolation_args`). Out:
samples, where the image is. CuPy arrays of two and three axes are sampled by kernels for orders 0, 1 and 3, and those
of four axes channel by channel where the first one is left alone; other CuPy arrays go to cupyx, NumPy arrays to SciPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu import sampling, spline, texture
from linumpy.gpu.kernels import IN_FLOAT32
from linumpy.plan.resample import SPLINE_PAD

#: The modes that have no filter of their own: SciPy continues the image first.
_PADDED = ("nearest", "grid-constant")
_CONSTANT = ("constant", "grid-constant")
#: Beyond this no double has a fraction left to interpolate with: FARTHEST of sampling.cuh.
_FARTHEST = 2.0**52
#: A place that is outside of every image, with its pad.
_OUTSIDE = -1000.0


@dataclass(frozen=True)
class Spline:
    """How an image is interpolated, and what lies outside.

    Attributes
    ----------
    order, mode, cval, prefilter, interpolation
        As for :func:`linumpy.gpu.interpolation.map_coordinates`.
    """

    order: int
    mode: str
    cval: float
    prefilter: bool
    interpolation: str

    @property
    def is_local(self) -> bool:
        """Whether a whole place takes the voxel there and no other: whether channels can be taken one by one."""
        return self.order <= 1 or self.prefilter

    @property
    def outside(self) -> texture.Outside:
        """What the texture unit does not know."""
        return texture.Outside(self.mode, float(self.cval))


@dataclass(frozen=True)
class Target:
    """Where a result goes.

    Attributes
    ----------
    shape : tuple of int
        Of it.
    dtype : numpy.dtype
        Of it.
    out : array or None
        To put it in; None for a new one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    out: Any = None

    def array(self, *sources: Any) -> Any:
        """Make the array that is written to: `out`, unless it has gaps or may share memory with what is read."""
        xp = array_module(sources[0])
        out = self.out
        if out is not None and out.flags.c_contiguous and not any(xp.may_share_memory(out, one) for one in sources):
            return out
        return xp.empty(self.shape, self.dtype)

    def take(self, result: Any) -> Any:
        """Bring the result to where it goes."""
        if self.out is None or result is self.out:
            return result
        self.out[...] = result
        return self.out


def ndimage_of(array: Any) -> ModuleType:
    """Return SciPy's ``ndimage``, or CuPy's for its arrays."""
    if is_device_array(array):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage


def sample_at(image: Any, coordinates: Any, how: Spline, target: Target) -> Any:
    """Sample at places, (rank, ...)."""
    _check(image, how)
    if not _is_ours(image, target.dtype, how):
        return _places_by_ndimage(image, coordinates, how, target)
    places = _as_floats(coordinates)
    result = target.array(image, places)
    if how.interpolation == "texture":
        texture.sample_points(sampling.contiguous(image), places, how.outside, result)
    else:
        source, sampler = _prepared(image, how)
        sampling.sample_points(source, places, sampler, result)
    return target.take(result)


def sample_grid(image: Any, linear: np.ndarray, shift: np.ndarray, how: Spline, target: Target) -> Any:
    """Sample on the grid of an affine map: a square matrix and an offset."""
    if _is_by_channel(image, linear, shift, how, target):
        result = target.array(image)
        for channel, into in zip(image, result, strict=True):
            sample_grid(channel, linear[1:, 1:], shift[1:], how, Target(into.shape, into.dtype, into))
        return target.take(result)
    _check(image, how)
    if not _is_ours(image, target.dtype, how):
        matrix = array_module(image).asarray(linear)

        def call(source: Any, output: Any) -> Any:
            return ndimage_of(source).affine_transform(
                source, matrix, shift.tolist(), target.shape, output, how.order, how.mode, how.cval, how.prefilter
            )

        return _by_ndimage(image, target, call)
    affine = sampling.AffineMap(tuple(map(tuple, linear.tolist())), tuple(shift.tolist()))
    result = target.array(image)
    if how.interpolation == "texture":
        texture.sample_affine(sampling.contiguous(image), affine, how.outside, result)
    else:
        source, sampler = _prepared(image, how)
        sampling.sample_affine(source, affine, sampler, result)
    return target.take(result)


def sample_displaced(image: Any, field: Any, sizes: Sequence[float] | None, how: Spline, target: Target) -> Any:
    """Sample at the voxels of a grid that are displaced: `field` is (rank, ...), in voxels or in units of `sizes`."""
    _check(image, how)
    if not _is_ours(image, target.dtype, how):
        return sample_at(image, _displaced(field, sizes), how, target)
    field = _as_floats(field)
    result = target.array(image, field)
    if how.interpolation == "texture":
        texture.sample_displaced(sampling.contiguous(image), field, sizes, how.outside, result)
    else:
        source, sampler = _prepared(image, how)
        sampling.sample_displaced(source, field, sizes, sampler, result)
    return target.take(result)


def filter_by_ndimage(image: Any, order: int, mode: str, target: Target) -> Any:
    """Find the coefficients of a spline by SciPy or CuPy."""

    def call(source: Any, output: Any) -> Any:
        return ndimage_of(source).spline_filter(source, order, output, mode)

    return _by_ndimage(image, target, call)


def _check(image: Any, how: Spline) -> None:
    if how.interpolation == "texture" and is_device_array(image):
        texture.check_texture(image, how.order)


def _is_ours(image: Any, dtype: np.dtype, how: Spline) -> bool:
    return is_device_array(image) and dtype.kind in "iuf" and sampling.can_sample(image, how.order, how.mode)


def _is_by_channel(image: Any, linear: np.ndarray, shift: np.ndarray, how: Spline, target: Target) -> bool:
    """Say whether the first of four axes is one of channels, which the map leaves alone."""
    if not (is_device_array(image) and image.ndim == 4 and len(image) == target.shape[0] > 0 and how.is_local):
        return False
    alone = np.zeros(4)
    alone[0] = 1
    untouched = np.array_equal(linear[0], alone) and np.array_equal(linear[:, 0], alone) and shift[0] == 0
    return untouched and (how.interpolation == "texture" or _is_ours(image[0], target.dtype, how))


def _as_floats(array: Any) -> Any:
    """Return an array as the kernels take it: contiguous, of float32 where that holds its numbers, else float64."""
    array = sampling.contiguous(array)
    if array.dtype.str[1:] in ("f4", "f8"):
        return array
    small = array.dtype.kind == "b" or array.dtype.str[1:] in ("f2", "i1", "u1", "i2", "u2")
    return array.astype(np.float32 if small else np.float64)


def _prepared(image: Any, how: Spline) -> tuple[Any, sampling.Sampler]:
    """Return the image as the kernels take it, contiguous, and filtered for order 3; and how to sample that."""
    order, mode, cval = how.order, how.mode, float(how.cval)
    if order <= 1 or not how.prefilter:
        return sampling.contiguous(image), sampling.Sampler(order, mode, cval)
    kind = np.float32 if image.dtype.str[1:] in IN_FLOAT32 else np.float64
    if mode not in _PADDED:
        return spline.filtered(image, spline.Ends(mode), kind), sampling.Sampler(order, mode, cval)
    # SciPy adds what of `cval` the image's dtype can hold; beyond, it is exact again.
    value = np.pad(np.zeros(1, image.dtype), 1, constant_values=cval)[0] if mode == "grid-constant" else None
    ends = spline.Ends(mode, SPLINE_PAD, value if value is None else float(value))
    return spline.filtered(image, ends, kind), sampling.Sampler(order, mode, cval, SPLINE_PAD)


def _displaced(field: Any, sizes: Sequence[float] | None) -> Any:
    """Write out the places of displaced voxels, in float64."""
    xp = array_module(field)
    places = field.astype(np.float64)
    for axis, row in enumerate(places):
        if sizes is not None:
            row /= sizes[axis]
        row += xp.arange(row.shape[axis]).reshape([-1 if other == axis else 1 for other in range(row.ndim)])
    return places


def _places_by_ndimage(image: Any, coordinates: Any, how: Spline, target: Target) -> Any:
    """Sample by SciPy or CuPy, which know no NaN and no infinity, and read anywhere for them."""
    places, lost = _known_places(coordinates, how.mode)
    if places.ndim == 1:
        places = places[:, None]  # SciPy wants an axis of places
    shape = places.shape[1:]

    def call(source: Any, output: Any) -> Any:
        return ndimage_of(source).map_coordinates(source, places, output, how.order, how.mode, how.cval, how.prefilter)

    out = None if target.out is None else target.out.reshape(shape)
    result = _by_ndimage(image, Target(shape, target.dtype, out), call).reshape(target.shape)
    if lost is not None and how.mode not in _CONSTANT:
        result[lost] = np.nan if result.dtype.kind in "fc" else 0
    return target.take(result)


def _known_places(places: Any, mode: str) -> tuple[Any, Any]:
    """Replace places that are no numbers, or infinitely far; and say which ones they are. None for none.

    In the constant modes they go outside. With "nearest" only NaN is nowhere.
    """
    if places.dtype.kind != "f":
        return places, None
    xp = array_module(places)
    if places.dtype == np.float16:
        places = places.astype(np.float32)
    if mode == "nearest":
        places = xp.clip(places, -_FARTHEST / 2, _FARTHEST / 2)
    lost = ~(xp.abs(places) < _FARTHEST).all(axis=0)
    if xp is np and not lost.any():
        return places, None
    return xp.where(lost, places.dtype.type(_OUTSIDE if mode in _CONSTANT else 0), places), lost


def _by_ndimage(image: Any, target: Target, call: Callable[[Any, Any], Any]) -> Any:
    """Call SciPy or CuPy with the dtypes that they know: neither half precision, nor booleans on a device."""
    if not target.shape or all(target.shape):
        if not image.size:
            raise ValueError(f"an image of shape {image.shape} has nothing to sample")
    else:
        return target.take(array_module(image).empty(target.shape, target.dtype))
    source, kind = image, target.dtype
    on_device = is_device_array(image)
    if image.dtype == np.float16:
        source = image.astype(np.float32)
    elif on_device and image.dtype.kind == "b":
        source = image.view(np.uint8)
    elif on_device and image.dtype.kind in "iu" and image.dtype.itemsize > 2:
        source = image.astype(np.float64)  # CuPy would take float32, which does not hold them
    if kind == np.float16:
        kind = np.dtype(np.float32)
    elif on_device and kind.kind == "b":
        kind = np.dtype(np.float64)
    if kind == target.dtype:
        return target.take(call(source, kind if target.out is None else target.out))
    result = call(source, kind)
    if target.dtype.kind == "b":
        result = array_module(image).trunc(result)  # as SciPy casts to it
    with np.errstate(over="ignore"):  # beyond float16 lies infinity
        return target.take(result.astype(target.dtype))
