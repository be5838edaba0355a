"""Cast whole numbers in floats to integers: those that an integer of 64 bits has no more become its last one.

In: a NumPy or CuPy array of floats. Out: integers, where it is. float64 rounds 2**64 - 1 up to 2**64, and what C's cast
makes of that is left open: NumPy gives 0 for it, and for 2**63 the most negative number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.device import array_module


def saturated(whole: Any, dtype: np.dtype) -> Any:
    """Cast floats that hold whole numbers.

    Parameters
    ----------
    whole : numpy.ndarray or cupy.ndarray
        Of floats that are in the range of the dtype, but for the rounding of its last numbers.
    dtype : numpy.dtype
        Of booleans or integers, in this machine's byte order.
    """
    if dtype.itemsize < 8:
        return whole.astype(dtype)
    xp, limits = array_module(whole), np.iinfo(dtype)
    with np.errstate(invalid="ignore"):
        result = whole.astype(dtype)
    result = xp.where(whole >= float(limits.max), dtype.type(limits.max), result)
    return xp.where(whole <= float(limits.min), dtype.type(limits.min), result)
