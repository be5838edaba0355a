"""The type of arrays in signatures, which NumPy's and CuPy's arrays satisfy; where an array lies; ml_dtypes' dtypes.

Neither CuPy nor ml_dtypes is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Literal, TypeGuard

import numpy as np

#: An array on the host (``numpy.ndarray``) or on a device (``cupy.ndarray``). CuPy has no types, and its arrays have
#: NumPy's methods; :func:`array_module` returns the package that works on one.
Array = np.ndarray

#: Names of devices, as callers pass them: ``"auto"`` is the GPU if there is one.
DeviceName = Literal["auto", "cuda", "cpu"]
#: Where a reader reads to: a CUDA device by its number, or host memory.
ReadDevice = int | Literal["cpu"]


def bits_of(dtype: np.dtype) -> np.dtype:
    """Return the unsigned integer dtype of the same size for a dtype of ml_dtypes, and any other dtype unchanged."""
    return np.dtype(f"u{dtype.itemsize}") if is_small(dtype) else dtype


def is_small(dtype: np.dtype) -> bool:
    """Return whether a dtype is registered by another package than NumPy: ml_dtypes, for example bfloat16."""
    return dtype.isbuiltin == 2  # NumPy's code for dtypes that other packages register


def is_device_array(x: object) -> TypeGuard[Any]:
    """Return whether `x` is a CuPy array, without importing CuPy."""
    cupy = sys.modules.get("cupy")  # no CuPy array can exist before CuPy is imported
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_module(x: Any) -> ModuleType:
    """Return the module whose functions take `x`: CuPy for its arrays, else NumPy."""
    return sys.modules["cupy"] if is_device_array(x) else np


def to_host(x: Any) -> np.ndarray:
    """Return `x` in host memory, copied if it is on a device."""
    return sys.modules["cupy"].asnumpy(x) if is_device_array(x) else np.asarray(x)


def is_writable(array: Array) -> bool:
    """Return whether each voxel can be changed in place, which is not so in read-only memory and broadcast views."""
    is_broadcast = any(n > 1 and step == 0 for n, step in zip(array.shape, array.strides, strict=True))
    return not is_broadcast and bool(getattr(array.flags, "writeable", True))  # CuPy's arrays have no such flag
