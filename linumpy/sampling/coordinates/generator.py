"""The counter-based generator: Philox4x32-10, the same numbers in NumPy here and on devices by ``philox.cuh``.

In: a seed and counters. Out: 32-bit words, or coordinates in [0, 1). A counter holds the number of a sample, so the
stream of a seed does not depend on how many samples a call makes, on the device, or on the number of threads.
J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import enum
import secrets
from typing import Any

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
#: Bits of a coordinate: what float32 holds of numbers in [0, 1) at equal distances.
COORDINATE_BITS = 24
_STEP = np.float32(2.0**-COORDINATE_BITS)


class Use(enum.IntEnum):
    """What a counter is for, in its third word, so that no two uses share numbers; numbered as in ``philox.cuh``."""

    IID = 0
    STRATIFIED = 1
    STRATA = 2
    SOBOL = 3
    WEIGHTED = 4
    CELL = 5
    SPLIT = 6
    BINNED = 7
    BINNED_CELL = 8
    BINNED_POINT = 9


#: The bits of the third word below the use number nodes of a tree of counts.
USE_SHIFT = 28

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> Words:
    """Philox4x32-10.

    Parameters
    ----------
    counter : four arrays or ints
        Words below 2^32, broadcast against each other.
    key : (int, int)
        Words below 2^32.

    Returns
    -------
    four ndarray of uint64
        Words below 2^32, in uint64 since further arithmetic needs it.
    """
    shape = np.broadcast_shapes(*(np.shape(word) for word in counter))
    c0, c1, c2, c3, spare = (np.empty(shape, np.uint64) for _ in range(5))
    for word, given in zip((c0, c1, c2, c3), counter, strict=True):
        word[...] = given
    low, high = key
    for _ in range(10):
        # c0 becomes the low word of its product, and `spare` the high word; then the same of c2.
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


def numbers(index: Any, use: Use, key: tuple[int, int], last: Any = 0) -> Words:
    """Return the words of samples, whose 64-bit numbers are `index`."""
    index = np.asarray(index, np.uint64)
    return philox((index & _LOW, index >> _HALF, use << USE_SHIFT, last), key)


def key_of(seed: int | None) -> tuple[int, int]:
    """Turn a seed into the generator's key; without one, take numbers of the operating system.

    Raises
    ------
    TypeError, ValueError
        A seed that is not an integer of at most 64 bits.
    """
    if seed is None:
        seed = secrets.randbits(64)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"seed is {seed!r}; it must be an integer or None")
    if not 0 <= int(seed) < 2**64:
        raise ValueError(f"seed is {seed}; it must lie in 0 to 2**64 - 1")
    return int(seed) & 0xFFFFFFFF, int(seed) >> 32


def as_coordinate(bits: np.ndarray) -> np.ndarray:
    """Turn integers of 24 bits into float32 in [0, 1), without rounding."""
    return bits.astype(np.float32) * _STEP


def sobol(index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three words of Sobol's sequence in the order of Gray codes, for indices below 2^32.

    The direction numbers are those of S. Joe and F. Kuo (2008), which these recurrences give for three dimensions.
    """
    gray = index ^ (index >> np.uint64(1))
    words = [np.zeros_like(index) for _ in range(3)]
    x, y = 1 << 31, 1 << 31
    z, before = 1 << 31, 3 << 30  # in the order in which they are used
    for bit in range(32):
        taken = np.uint64(0) - ((gray >> np.uint64(bit)) & np.uint64(1))
        for word, direction in zip(words, (x, y, z), strict=True):
            word ^= taken & np.uint64(direction)
        x, y = x >> 1, y ^ (y >> 1)
        z, before = before, before ^ z ^ (z >> 2)
    return words[0], words[1], words[2]


def shuffled(index: np.ndarray, words: Words, bits: int) -> np.ndarray:
    """Permute the integers below 2^bits, by a permutation for each tuple of words.

    Multiplying by an odd number and exclusive-or with higher bits are both invertible.
    """
    mask, by = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for word in words:
        index = (index * (word | np.uint64(1)) + (word >> np.uint64(7))) & mask
        index = index ^ (index >> by)
    return index
