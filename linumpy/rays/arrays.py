"""Checks and conversion of arrays: NumPy's on the host, CuPy's on a device.

In: arrays of users; arrays of other packages are converted by DLPack, without a copy. Errors name the array.
"""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, is_device_array
from linumpy.device import require_cuda

_HOSTS = (1, 3, 11)  # DLPack's device types of host memory: CPU, and pinned by CUDA or ROCm


@overload
def as_array(array: None) -> None: ...
@overload
def as_array(array: Any) -> Array: ...
def as_array(array: Any) -> Array | None:
    """Return NumPy's and CuPy's arrays, and None, unchanged; convert any other array, by DLPack if it supports that."""
    if array is None or isinstance(array, np.ndarray) or is_device_array(array):
        return array
    if not hasattr(array, "__dlpack_device__"):
        return np.asarray(array)
    if array.__dlpack_device__()[0] in _HOSTS:
        return np.from_dlpack(array)
    return require_cuda().from_dlpack(array)


def are_on_device(**arrays: Array | None) -> bool:
    """Return whether all arrays are on a device; None is ignored.

    Raises `TypeError`: some arrays are on a device and some on the host: arrays are not copied between both.
    """
    on_device = {name: is_device_array(array) for name, array in arrays.items() if array is not None}
    if len(set(on_device.values())) > 1:
        device = [name for name, is_on_device in on_device.items() if is_on_device]
        host = [name for name, is_on_device in on_device.items() if not is_on_device]
        raise TypeError(f"{', '.join(device)} on the device, {', '.join(host)} on the host: move all to one of them")
    return any(on_device.values())


def check_cdf(cdf: Array, name: str) -> None:
    """Raise ValueError unless an array holds cumulative distributions along its last axis; not checked on a device."""
    if is_device_array(cdf):
        return
    values = np.asarray(cdf)
    ends = np.abs(values[..., -1] - 1) <= 1e-5  # sums in float32 are rounded
    if not ((values[..., :1] >= 0).all() and (np.diff(values) >= 0).all() and ends.all()):
        raise ValueError(f"{name}: a cumulative distribution must not decrease, start at 0 or more and end at 1")


def check_array(array: Array, dtype: DTypeLike, shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError for an array of another dtype or shape, or not C-contiguous; TypeError for no array."""
    if not hasattr(array, "flags"):
        raise TypeError(f"{name} is {type(array).__name__}: a NumPy or CuPy array of {np.dtype(dtype)} is needed")
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        needed = f"{np.dtype(dtype)} {shape}, C-contiguous,"
        raise ValueError(f"{name} of {array.dtype} {array.shape}: {needed} is needed")
