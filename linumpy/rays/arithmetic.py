"""Elementary functions as fixed sequences of IEEE additions, products and divisions; the counterpart of exact.cuh.

In: NumPy arrays of float32. Out: float32. The math libraries of CPUs and GPUs round differently. These functions give
the same bits everywhere, so that a sample lies in the same voxel on every machine. Polynomials have the coefficients
``_SINE`` to ``_LOG2``, from the lowest power on.
"""

from __future__ import annotations

import numpy as np

_SINE = (-1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800, 1 / 6227020800)
_COSINE = (-0.5, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600, -1 / 87178291200)
_EXP2 = tuple(np.float32(value) for value in (
    0.69314718, 0.24022651, 0.055504109, 0.0096181291, 0.0013333558, 0.00015403530, 0.000015252734,
))  # fmt: skip
_LOG2 = tuple(np.float32(value) for value in (2.88539008, 0.961796694, 0.577078016, 0.412198583, 0.320598898))


def sine_cosine(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return sine and cosine of angles below 10^6 rad, with an error of half a unit in the last place."""
    angle = x.astype(np.float64)
    quarter = np.rint(angle * 0.63661977236758134308)
    reduced = (angle - quarter * 1.57079632673412561417) - quarter * 6.07710050650619224932e-11
    square = reduced * reduced
    sine = reduced + reduced * (square * _horner(_SINE, square))
    cosine = 1.0 + square * _horner(_COSINE, square)
    turn = quarter.astype(np.int64) & 3
    swapped = (turn & 1) == 1
    s, c = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    s, c = np.where(turn & 2, -s, s), np.where((turn + 1) & 2, -c, c)
    return s.astype(np.float32), c.astype(np.float32)


def exp2(y: np.ndarray) -> np.ndarray:
    """Return two to the power of `y`, -126 <= y <= 126."""
    whole = np.rint(y)
    part = y - whole
    power = ((whole.astype(np.int32) + 127) << 23).view(np.float32)
    return (np.float32(1) + part * _horner(_EXP2, part)) * power


def log2(x: np.ndarray) -> np.ndarray:
    """Return the binary logarithm of positive numbers that are normal, that is at least 2^-126, and finite."""
    bits = x.view(np.int32)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32)
    large = mantissa > np.float32(1.41421356)
    mantissa = np.where(large, mantissa * np.float32(0.5), mantissa)
    exponent = exponent + large
    ratio = (mantissa - np.float32(1)) / (mantissa + np.float32(1))
    return exponent.astype(np.float32) + ratio * _horner(_LOG2, ratio * ratio)


def _horner(coefficients: tuple[float | np.float32, ...], x: np.ndarray) -> np.ndarray:
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = coefficient + x * value
    return value
