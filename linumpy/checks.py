"""Checks of arguments at the doors of the library: errors name the argument, its value, and what is allowed. Pure.

Booleans are no numbers here, though Python takes them for integers.
"""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import numpy as np


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of Python or NumPy, and no boolean."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number of Python or NumPy, and no boolean."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def integer(name: str, value: Any, low: int | None = None, high: int | None = None, *, meaning: str = "") -> int:
    """Return an integer, from `low` to `high`, as Python's int.

    `TypeError`: A boolean, or another type than integers. `ValueError`: A number below `low` or above `high`.
    """
    needed = meaning or "an integer"
    if low is not None or high is not None:
        limits = (f" from {low}" if low is not None else "") + (f" up to {high}" if high is not None else "")
        needed += limits if high is not None else f"{limits} on"
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r}: {needed} is needed")
    number = operator.index(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name}={number}: {needed} is needed")
    return number
