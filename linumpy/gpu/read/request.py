"""The requested result of a read: its dtype, and whether it fits into memory, checked before the first byte is read.

In: a plan, and the arguments of a read. Out: dtypes and arrays. Errors: ``TypeError`` and ``ValueError`` that name
the value; :class:`~linumpy.errors.DeviceMemoryError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.arrays import bits_of, is_device_array, is_small
from linumpy.checks import integer
from linumpy.device import free_memory, require_cuda
from linumpy.errors import DeviceMemoryError, GpuUnavailableError, UnsupportedLayoutError
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import ReadPlan

#: Memory of the device that a read may use beyond its result.
DEFAULT_SCRATCH_BYTES = 512 * 2**20
#: Less cannot hold a useful slab.
MIN_SCRATCH_BYTES = 2**20

_NUMBER_KINDS = "biufc"


def check_result(plan: ReadPlan, dtype: Any, out: Any) -> np.dtype:
    """Return the dtype of the result of a read to a device; raise if it, or `out`, does not fit the plan."""
    check_elements(plan.layout)
    target = cast_dtype(plan.layout.dtype, dtype if dtype is not None else getattr(out, "dtype", None))
    try:
        require_cuda()
    except GpuUnavailableError as error:
        advice = "linumpy.read_zarr(source) reads to the GPU where there is one and into host memory elsewhere"
        raise GpuUnavailableError(f"read_zarr_to_gpu needs a CUDA device: {error}. {advice}") from None
    if out is not None:
        check_out(out, plan.shape, target, on_device=True)
        if not out.flags.c_contiguous:
            raise ValueError(f"out has strides {out.strides}: pass a C-contiguous array")
    return target


def unsupported_error(layout: ArrayLayout, reason: str) -> UnsupportedLayoutError:
    """Return the error that linumpy's reader cannot read an array."""
    return UnsupportedLayoutError(f"linumpy's reader cannot read {layout.name}: {reason}")


def check_elements(layout: ArrayLayout) -> None:
    """Raise if the elements of an array have no fixed size.

    `TypeError`: Naming the array, its dtype, and what reads it.
    """
    if layout.dtype.hasobject or isinstance(layout.dtype, np.dtypes.StringDType):
        raise TypeError(
            f"{layout.name} has dtype {layout.dtype}, elements of any length, which linumpy does not read: read it by "
            f"zarr-python, zarr.open_array({layout.name!r})[...]"
        )


def check_scratch(scratch_bytes: Any) -> int:
    """Return `scratch_bytes` as an int, by default 512 MiB; raise if it is no whole number or too small."""
    if scratch_bytes is None:
        return DEFAULT_SCRATCH_BYTES
    scratch = integer("scratch_bytes", scratch_bytes, meaning="a whole number of bytes")
    if scratch < MIN_SCRATCH_BYTES:
        raise ValueError(f"scratch_bytes={scratch}: at least {MIN_SCRATCH_BYTES} (1 MiB) are needed")
    return scratch


def cast_dtype(stored: np.dtype, dtype: Any, *, on_device: bool = True) -> np.dtype:
    """Return the dtype that elements are cast to, by default the stored dtype; raise TypeError if there is no cast.

    The result is in this machine's byte order. Without a cast host memory takes any dtype; a device has numbers only.
    """
    target = stored if dtype is None else np.dtype(dtype).newbyteorder("=")
    if target == stored and not on_device:
        return stored
    if is_small(stored):
        if target != stored:
            raise TypeError(f"dtype={target}: {stored} is read as stored, without a cast; cast the result by astype")
        return stored
    for role, checked in (("stored", stored), ("requested", target)):
        if checked.kind not in _NUMBER_KINDS or is_small(checked) or checked.str[1:] in ("f16", "c32"):
            raise TypeError(f"{role} dtype {checked}: only bool, integers, floats and complex numbers go to the GPU")
    if stored.kind == "c" and target.kind not in "cb":
        raise TypeError(f"dtype={target} would drop the imaginary parts of {stored}: read it and take .real or .imag")
    return target


def check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype, *, on_device: bool) -> None:
    """Raise unless an output is a CuPy (or NumPy) array of the shape and dtype of the result."""
    if not (is_device_array(out) if on_device else isinstance(out, np.ndarray)):
        kind = "CuPy" if on_device else "NumPy"
        raise TypeError(f"out is a {type(out).__module__}.{type(out).__name__}: pass a {kind} array")
    if out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, but the region has shape {shape}")
    if out.dtype != dtype:
        raise TypeError(f"out has dtype {out.dtype}, but dtype={dtype} was asked for")


def device_of(out: Any) -> Any:
    """Return the CUDA device of the result: that of `out`, or else the current device."""
    return require_cuda().cuda.Device() if out is None else out.device


def check_memory(name: str, result: int, scratch: int) -> None:
    """Refuse a read whose result and scratch, in bytes, do not fit into the memory of the current device."""
    needed = result + scratch
    free = free_memory(needed)
    if needed > free:
        raise DeviceMemoryError(
            f"{name}: the result of {result} bytes and {scratch} bytes of scratch are {needed} bytes, but {free} bytes "
            f"of device memory are free. Read a part of it (region=...), a coarser resolution (level=...), or block by "
            f"block with dask"
        )


def new_array(xp: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    """Return a new array of NumPy or CuPy; ``TypeError`` for a dtype of ml_dtypes of which CuPy makes no arrays."""
    try:
        return xp.empty(shape, dtype)
    except (TypeError, ValueError) as error:
        if not is_small(dtype):
            raise
        raise TypeError(
            f"this version of CuPy has no arrays of {dtype}: read it into host memory, by linumpy.read_zarr(source, "
            f"device='cpu'), and copy its bits to the device, by cupy.asarray(values.view({str(bits_of(dtype))!r}))"
        ) from error
