"""Cast floats to integers and booleans as SciPy's ``ndimage`` does, or as NumPy does, and to bfloat16.

Interpolated values (`rounded`) are rounded to integers, read values (`cast_elements`) are truncated; both saturate.

In: a NumPy or CuPy array of floats; for read values, a NumPy array of any numbers. Out: an array of the dtype, in the
same memory. Limits of 64-bit integers need care: float64 rounds 2**64 - 1 up to 2**64, whose cast is undefined in C
(NumPy and SciPy give 0 for it, and the most negative number for 2**63).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.arrays import array_module

#: From here on every double is an integer, and adding a half would change it.
_WITHOUT_FRACTION = 2.0**52


def saturated(whole: Any, dtype: np.dtype) -> Any:
    """Cast floats without a fraction; the limits of 64-bit integers, which floats round up, saturate.

    `whole`: floats in the range of the dtype, whose limits may have been rounded up. `dtype`: booleans or integers, in
    this machine's byte order.
    """
    if dtype.itemsize < 8:
        return whole.astype(dtype)
    xp, limits = array_module(whole), np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        result = whole.astype(dtype)
    result = xp.where(whole >= float(limits.max), dtype.type(limits.max), result)
    return xp.where(whole <= float(limits.min), dtype.type(limits.min), result)


def rounded(values: Any, dtype: np.dtype) -> Any:
    """Cast floats: integers are rounded, halves away from zero, and saturate; NaN becomes 0.

    Booleans are true for magnitudes >= 1, since SciPy truncates. Floats beyond float16 become infinite.
    """
    xp = array_module(values)
    if dtype.kind == "b":
        return xp.abs(values) >= 1
    if dtype.kind not in "iu":
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    limits = np.iinfo(dtype)
    away_from_zero = xp.trunc(values + xp.copysign(values.dtype.type(0.5), values))
    whole = xp.where(xp.abs(values) >= _WITHOUT_FRACTION, values, away_from_zero)
    return saturated(xp.clip(xp.where(xp.isnan(values), 0, whole), limits.min, limits.max), dtype)


def cast_elements(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Cast elements on the host as ``scatter.cu`` does on a device.

    As ``astype``: integers keep their low bits, floats are truncated. Casts that C leaves undefined: floats beyond the
    range of an integer dtype become its nearest limit, and NaN becomes 0.

    `dtype`: data type of the result, in this machine's byte order; the dtype of `values` makes no copy.
    """
    with np.errstate(all="ignore"):
        if values.dtype.kind != "f" or dtype.kind not in "iu":
            return values.astype(dtype, copy=False)
        limits, single = np.iinfo(dtype), values.dtype.type
        low, high = single(limits.min), single(limits.max)  # high: the limit, or, rounded up, the first float beyond
        inside = (values > low) & (values < high)
        if inside.all():
            return values.astype(dtype)
        result = np.where(inside, values, 0).astype(dtype)
        result[values <= low], result[values >= high] = limits.min, limits.max
        return result


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round to float32 and then to bfloat16, halves to even; return the bits as uint16."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values, np.float32)
    bits = single.view(np.uint32)
    sums = bits >> np.uint32(16)
    sums &= np.uint32(1)
    sums += np.uint32(0x7FFF)
    sums += bits
    sums >>= np.uint32(16)
    result = sums.astype(np.uint16)
    nan = np.isnan(single)
    if nan.any():
        result[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return result
