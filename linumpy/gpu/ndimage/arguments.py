"""Check and normalise the arguments of resampling functions.

In: arguments as callers pass them. Out: plain numbers, shapes, dtypes and records. Errors: ``ValueError`` and
``TypeError`` that name the value. Pure.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from linumpy.arrays import Array, array_module, is_device_array, to_host
from linumpy.checks import is_integer
from linumpy.plan.boundary import MODES

#: SciPy's second names of modes, and the first names.
SYNONYMS = {"grid-mirror": "reflect"}


@dataclass(frozen=True)
class Spline:
    """Interpolation parameters.

    `order`, `mode`, `cval`, `prefilter`: as for :func:`linumpy.gpu.interpolation.map_coordinates`; ``"grid-mirror"`` is
    named ``"reflect"``.
    """

    order: int
    mode: str
    cval: Any = 0.0
    prefilter: bool = True

    @property
    def is_local(self) -> bool:
        """Whether a sample at integer coordinates is the value of that voxel, so that images of a stack do not mix."""
        return self.order <= 1 or self.prefilter

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of SciPy's functions."""
        return {"order": self.order, "mode": self.mode, "cval": self.cval, "prefilter": self.prefilter}

    def part(self, name: str) -> Spline:
        """Return the parameters for the real or the imaginary part of an image."""
        return replace(self, cval=float(getattr(np.asarray(self.cval), name)))


@dataclass(frozen=True)
class Target:
    """The output of a call.

    `dtype`: data type of the result. `out`: output array; None for a new one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    out: Array | None = None

    def array(self, *sources: Array) -> Array:
        """Return an array to write to: `out`, or a new one if `out` is not contiguous or may overlap a source."""
        xp = array_module(sources[0])
        out = self.out
        if (
            out is not None
            and out.flags.c_contiguous
            and not any(xp.may_share_memory(out, source) for source in sources)
        ):
            return out
        return xp.empty(self.shape, self.dtype)

    def take(self, result: Array) -> Array:
        """Return the result, copied to `out` if `out` is given and another array."""
        if self.out is None or result is self.out:
            return result
        self.out[...] = result
        return self.out


def check_image(image: Array, min_axes: int = 1) -> None:
    """Refuse an image that is no array of numbers (TypeError), or has less than `min_axes` axes (ValueError)."""
    if not (isinstance(image, np.ndarray) or is_device_array(image)):
        raise TypeError(f"the image is a {type(image).__name__}: pass a NumPy or CuPy array")
    if not _is_number(image.dtype):
        raise TypeError(f"an image of {image.dtype} cannot be interpolated: numbers of up to 64 bits can")
    if image.ndim < min_axes:
        raise ValueError(f"an image of {image.ndim} axes cannot be interpolated")


def _is_number(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" and dtype.char not in "gG"  # SciPy has no long doubles


def check_spline(order: object, mode: object) -> str:
    """Refuse an order or mode that SciPy does not have; return SciPy's first name of the mode."""
    if not is_integer(order) or order not in range(6):
        raise ValueError(f"order={order!r}: a spline order is an integer from 0 to 5")
    if not isinstance(mode, str) or mode not in (*MODES, *SYNONYMS):
        raise ValueError(f"mode={mode!r} is unknown: choose one of {', '.join((*MODES, *SYNONYMS))}")
    return SYNONYMS.get(mode, mode)


def read_spline(image: Array, order: int, mode: str, cval: complex, prefilter: bool, *, min_axes: int = 1) -> Spline:
    """Check an image of at least `min_axes` axes and its interpolation parameters."""
    check_image(image, min_axes)
    name = check_spline(order, mode)
    if type(cval) is float:
        return Spline(int(order), name, cval, bool(prefilter))
    value = np.asarray(to_host(cval))
    if value.ndim or value.dtype.kind not in ("biufc" if image.dtype.kind == "c" else "biuf"):
        kind = "number" if image.dtype.kind == "c" else "real number"
        raise TypeError(f"cval={cval!r}: an image of {image.dtype} needs one {kind}")
    return Spline(int(order), name, value.item(), bool(prefilter))


def read_coordinates(name: str, image: Array, values: Array) -> Array:
    """Check coordinates or displacements, which must be on the same side (host or device) as the image."""
    if not is_device_array(image) and not is_device_array(values):
        values = np.asarray(values)
    if is_device_array(values) != is_device_array(image):
        raise TypeError(f"image and {name} must both be on the GPU, or both on the host")
    if values.dtype.kind not in "biuf" or not _is_number(values.dtype):
        raise TypeError(f"{name} of {values.dtype}: integers and floats of up to 64 bits are coordinates")
    return values


def read_affine(
    matrix: ArrayLike, offset: ArrayLike, rank: int, columns: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Convert a matrix of any form that SciPy accepts, and an offset, to (rank, columns) and (rank,).

    `matrix`: ``(rank,)`` for a diagonal, ``(rank, columns)``, ``(rank, rank + 1)`` with the offset in its last column,
    or ``(rank + 1, rank + 1)``, homogeneous. `offset`: ignored if the matrix holds an offset, as in SciPy. `columns`:
    axes of the result; by default `rank`.

    Returns: (1) The matrix. (2) The offset.

    `ValueError`: A matrix or offset of another shape, that is not made of real numbers, or with a number that is not
    finite.
    """
    columns = rank if columns is None else columns
    array, shift = _numbers("matrix", matrix), _numbers("offset", offset)
    shift = np.full(rank, float(shift)) if shift.ndim == 0 else shift
    if array.ndim == 1 and len(array) == rank:
        array = np.diag(array)
    elif array.shape in ((rank, rank + 1), (rank + 1, rank + 1)):
        if array.shape[0] == rank + 1 and not np.array_equal(array[-1], [0] * rank + [1]):
            raise ValueError(f"the last row of a homogeneous matrix is {array[-1].tolist()}: it must be 0, …, 0, 1")
        array, shift = array[:rank, :rank], array[:rank, rank]
    if array.shape != (rank, columns):
        to = "" if columns == rank else f" to a result of {columns} (output_shape=)"
        forms = dict.fromkeys([(rank, columns)] if to else [(rank,), (rank, rank), (rank, rank + 1), (rank + 1,) * 2])
        raise ValueError(
            f"a matrix of shape {array.shape} does not map an image of {rank} axes{to}: "
            f"{', '.join(map(str, forms))} {'does' if to else 'do'}"
        )
    if shift.shape != (rank,):
        raise ValueError(f"offset {shift.tolist()}: an image of {rank} axes needs one number, or one for each")
    if not all(map(math.isfinite, (*array.ravel().tolist(), *shift.tolist()))):
        raise ValueError("the matrix or the offset has numbers that are not finite")
    return array, shift


def _numbers(name: str, value: ArrayLike) -> np.ndarray:
    try:
        array = np.asarray(to_host(value))
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}={value!r} is no array of numbers: {error}") from error
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}={value!r} holds {array.dtype}: real numbers are needed")
    return array.astype(np.float64)


def read_per_axis(name: str, value: float | Sequence[float], rank: int) -> tuple[float, ...]:
    """Return a number for each axis: `value` for all axes, or one of its numbers for each."""
    try:
        values = (float(value),) * rank if np.ndim(value) == 0 else tuple(map(float, value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        values = ()
    if len(values) != rank or not all(map(math.isfinite, values)):
        raise ValueError(f"{name}={value!r}: an image of {rank} axes needs one finite number, or one for each")
    return values


def read_shape(name: str, shape: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """Check a shape of one axis or more; None gives the default."""
    if shape is None:
        return default
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError as error:
        raise ValueError(f"{name}={shape!r}: whole numbers of 0 or more are needed, one for each axis") from error
    if not sizes or min(sizes) < 0:
        raise ValueError(f"{name}={shape!r}: whole numbers of 0 or more are needed, one for each axis")
    return sizes


def read_output_shape(
    shape: Sequence[int] | None, output: Array | DTypeLike | None, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the shape of a result: `shape`, else the shape of an array `output`, else the default."""
    array = output if isinstance(output, np.ndarray) or is_device_array(output) else None
    if shape is None and array is not None and not array.ndim:
        raise ValueError("output has shape (): a result has one axis or more")
    return read_shape("output_shape", shape, default if array is None else tuple(array.shape))


def read_target(output: Array | DTypeLike | None, image: Array, shape: tuple[int, ...]) -> Target:
    """Check the `output` of a call: an array, or the dtype of a new array; by default the dtype of the image.

    The result of a complex image is complex: a real dtype is promoted, with SciPy's ``UserWarning``, and a real array
    is refused.
    """
    if isinstance(output, np.ndarray) or is_device_array(output):
        if is_device_array(output) != is_device_array(image):
            raise TypeError("image and output must both be on the GPU, or both on the host")
        if tuple(output.shape) != shape:
            raise ValueError(f"output has shape {tuple(output.shape)}, and the result has {shape}")
        dtype, array = output.dtype, output
    else:
        dtype, array = image.dtype.newbyteorder("=") if output is None else _read_dtype(output), None
    if not _is_number(dtype):
        raise TypeError(f"output={output!r}: a result is made of numbers of up to 64 bits")
    if image.dtype.kind == "c" != dtype.kind:
        if array is not None or isinstance(output, str):
            raise TypeError(f"output of {dtype}: a complex image needs a complex one")
        warnings.warn("promoting specified output dtype to complex", UserWarning, stacklevel=4)
        dtype = np.promote_types(dtype, np.complex64)
    if dtype.kind == "c" != image.dtype.kind:
        raise TypeError(f"output of {dtype}: an image of {image.dtype} gives real numbers")
    return Target(shape, dtype, array)


def _read_dtype(output: DTypeLike) -> np.dtype:
    try:
        return np.dtype(output)
    except (TypeError, ValueError) as error:
        raise TypeError(f"output={output!r}: an array or a dtype is needed") from error


#: SciPy's boundary modes by scikit-image's names (those of ``numpy.pad``), and SciPy's own ``"nearest"``.
RESIZE_MODES = {
    "reflect": "mirror",
    "symmetric": "reflect",
    "edge": "nearest",
    "nearest": "nearest",
    "wrap": "grid-wrap",
    "constant": "grid-constant",
}


@dataclass(frozen=True)
class Resizing:
    """Checked arguments of `resize`.

    `image_shape`, `shape`: shape of the image, with an axis of size 1 appended for each new axis, and shape of the
    result. `mode`: boundary mode, by SciPy's name. `sigmas`: standard deviations of the Gaussian that smooths first, in
    voxels of the image; 0 for none.
    """

    image_shape: tuple[int, ...]
    shape: tuple[int, ...]
    mode: str
    sigmas: tuple[float, ...]


def read_resizing(
    image: Array,
    output_shape: Sequence[int],
    order: int,
    mode: str,
    anti_aliasing: bool | None,
    sigma: float | Sequence[float] | None,
) -> Resizing:
    """Check the arguments of `resize` and fill in scikit-image's defaults."""
    check_image(image)
    shape = tuple(image.shape)
    try:
        key = (image.dtype, shape, tuple(output_shape), order, mode, anti_aliasing, sigma)
        hash(key)
    except TypeError:  # a list of sigmas, or an argument that `_read_resizing` refuses
        return _read_resizing(image.dtype, shape, output_shape, order, mode, anti_aliasing, sigma)
    return _cached_resizing(*key)


def _read_resizing(
    dtype: np.dtype,
    image_shape: tuple[int, ...],
    output_shape: Sequence[int],
    order: int,
    mode: str,
    anti_aliasing: bool | None,
    sigma: float | Sequence[float] | None,
) -> Resizing:
    check_spline(order, "nearest")
    if not isinstance(mode, str) or mode not in RESIZE_MODES:
        raise ValueError(f"mode={mode!r} is unknown to resize: choose one of {', '.join(RESIZE_MODES)}")
    kind = dtype.kind
    if kind not in "biuf":
        raise TypeError(f"an image of {dtype} cannot be resized: integers, floats and booleans can")
    if not all(image_shape):
        raise ValueError(f"an image of shape {image_shape} has nothing to resize")
    source, shape = _resized_shapes(image_shape, output_shape)
    factors = [n / m for n, m in zip(source, shape, strict=True)]
    if kind == "b" and (order > 0 or anti_aliasing):
        raise ValueError("booleans are resized at order=0 without anti_aliasing: cast the image to another dtype first")
    if anti_aliasing is None:
        anti_aliasing = not (kind == "b" or (kind in "iu" and order == 0)) and any(factor > 1 for factor in factors)
    if not anti_aliasing:
        return Resizing(source, shape, RESIZE_MODES[mode], (0.0,) * len(shape))
    if sigma is None:
        return Resizing(source, shape, RESIZE_MODES[mode], tuple(max(0.0, (factor - 1) / 2) for factor in factors))
    try:
        sigmas = np.asarray(sigma, np.float64)
    except (TypeError, ValueError):
        sigmas = np.full(1, np.nan)
    if sigmas.shape not in ((), (1,), (len(shape),)) or not (np.isfinite(sigmas).all() and (sigmas >= 0).all()):
        raise ValueError(
            f"anti_aliasing_sigma={sigma!r}: one number of 0 or more is needed, or one for each of {len(shape)} axes"
        )
    return Resizing(source, shape, RESIZE_MODES[mode], tuple(np.broadcast_to(sigmas, len(shape)).tolist()))


# typed: True equals 1 but is not an order.
_cached_resizing = functools.lru_cache(maxsize=256, typed=True)(_read_resizing)


def _resized_shapes(shape: tuple[int, ...], output_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shapes of image and result, of one rank: a missing last size is the image's, new axes get size 1."""
    try:
        values = tuple(output_shape)
        target = tuple(map(int, values))
    except (TypeError, ValueError, OverflowError):
        values = target = ()
    if len(target) == len(shape) - 1:
        target += shape[-1:]
    if not values or len(target) < len(shape) or min(target) < 1 or target[: len(values)] != values:
        raise ValueError(f"output_shape={output_shape!r}: whole sizes of 1 or more are needed, for {len(shape)} axes")
    return tuple(shape) + (1,) * (len(target) - len(shape)), target
