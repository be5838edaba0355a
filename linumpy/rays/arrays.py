"""Where arrays are: on the host (NumPy) or on a device (CuPy); others come in by DLPack, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.device import is_device_array, require_cuda

_HOSTS = (1, 3, 11)  # of DLPack: the CPU's memory, and what CUDA and ROCm have pinned of it


def as_array(array: Any) -> Any:
    """Return NumPy's and CuPy's arrays as they are, and what else speaks DLPack (such as torch) as one of them."""
    if array is None or isinstance(array, np.ndarray) or is_device_array(array):
        return array
    if not hasattr(array, "__dlpack_device__"):
        return np.asarray(array)
    return np.from_dlpack(array) if array.__dlpack_device__()[0] in _HOSTS else require_cuda().from_dlpack(array)


def same_side(**arrays: Any) -> bool:
    """Say whether arrays are on a device.

    Raises
    ------
    TypeError
        Some are and some are not: arrays are not copied between host and device.
    """
    where = {name: is_device_array(one) for name, one in arrays.items() if one is not None}
    if len(set(where.values())) > 1:
        on = [name for name, device in where.items() if device]
        off = [name for name, device in where.items() if not device]
        raise TypeError(f"{', '.join(on)} on the device, {', '.join(off)} on the host: move all to one of them")
    return any(where.values())


def whole_number(value: Any, name: str, low: int, high: int | None = None) -> int:
    """Return a whole number of a range as Python's int, which has no overflow; else raise ValueError."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        wanted = f"from {low} on" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name}={value!r}: a whole number {wanted} is needed")
    return int(value)


def check_cdf(cdf: Any, name: str) -> None:
    """Raise ValueError for what is no cumulative distribution along its last axis; on a device nothing is looked at."""
    if is_device_array(cdf):
        return
    ends = np.abs(cdf[..., -1] - 1) <= 1e-5  # sums in float32 are rounded
    if not ((cdf[..., :1] >= 0).all() and (np.diff(cdf) >= 0).all() and ends.all()):
        raise ValueError(f"{name}: a cumulative distribution grows from 0 or more and ends at 1")


def check_array(array: Any, dtype: Any, shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError for an array of another dtype or shape, or one that is not C-contiguous."""
    if not hasattr(array, "flags"):
        raise TypeError(f"{name} is {type(array).__name__}: an array of {np.dtype(dtype)} is needed, of NumPy or CuPy")
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        needed = f"{np.dtype(dtype)} {shape}, C-contiguous,"
        raise ValueError(f"{name} of {array.dtype} {array.shape}: {needed} is needed")
