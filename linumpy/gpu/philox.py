"""The counter-based generator Philox4x32-10 in NumPy: the same numbers as on devices by ``philox4x32.cuh``.

In: counters and a key. Out: 32-bit words.
J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], key: tuple[int, int]) -> Words:
    """Compute Philox4x32-10.

    `counter`: words below 2^32, broadcast against each other. `key` (int, int): words below 2^32.

    Returns: Words below 2^32, as uint64 for further arithmetic.
    """
    shape = np.broadcast_shapes(*(np.shape(word) for word in counter))
    c0, c1, c2, c3, spare = (np.empty(shape, np.uint64) for _ in range(5))
    for word, value in zip((c0, c1, c2, c3), counter, strict=True):
        word[...] = value
    low, high = key
    for _ in range(10):
        # c0 becomes the low word of its product, and `spare` the high word; then c2 likewise.
        np.multiply(c0, _MULTIPLIERS[0], out=c0)
        np.right_shift(c0, _HALF, out=spare)
        spare ^= c3
        spare ^= np.uint64(high)
        c0 &= _LOW
        np.multiply(c2, _MULTIPLIERS[1], out=c2)
        np.right_shift(c2, _HALF, out=c3)
        c3 ^= c1
        c3 ^= np.uint64(low)
        c2 &= _LOW
        c0, c1, c2, c3, spare = c3, c2, spare, c0, c1
        low, high = (low + _WEYL[0]) & 0xFFFFFFFF, (high + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3
