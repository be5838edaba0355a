"""Random numbers of samples, by a counter-based generator: the same in NumPy here and on devices by ``philox.cuh``.

In: a seed and counters. Out: 32-bit words, or coordinates in [0, 1). A counter contains the number of a sample, so the
stream of a seed depends neither on the sizes of calls, nor on the device, nor on the number of threads.
"""

from __future__ import annotations

import enum
import secrets

import numpy as np
from numpy.typing import ArrayLike

from linumpy.checks import integer
from linumpy.gpu.philox import Words, philox

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
#: Bits of a coordinate: float32 represents all multiples of 2^-24 in [0, 1).
COORDINATE_BITS = 24
_STEP = np.float32(2.0**-COORDINATE_BITS)


class Use(enum.IntEnum):
    """Purpose of random numbers, part of the counter, so that no two uses share numbers; as in ``philox.cuh``."""

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


#: Shift of the use in the counter's third word; the bits below it are 0, the node of a tree of counts (SPLIT), or the
#: highest bits of a position (BINNED_CELL, BINNED_POINT).
USE_SHIFT = 28


def numbers(index: ArrayLike, use: Use, key: tuple[int, int], last: ArrayLike = 0) -> Words:
    """Return the words for the 64-bit numbers `index` of samples; `last` is the counter's last word."""
    index = np.asarray(index, np.uint64)
    return philox((index & _LOW, index >> _HALF, use << USE_SHIFT, last), key)


def key_of(seed: int | None) -> tuple[int, int]:
    """Return the generator's key for a seed; without a seed, a random key of the operating system."""
    if seed is None:
        seed = secrets.randbits(64)
    seed = integer("seed", seed, 0, 2**64 - 1, meaning="the seed of the stream of samples")
    return seed & 0xFFFFFFFF, seed >> 32


def as_coordinate(bits: np.ndarray) -> np.ndarray:
    """Convert integers of 24 bits to float32 in [0, 1), without rounding."""
    return bits.astype(np.float32) * _STEP


def sobol(index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three words of Sobol's sequence in the order of Gray codes, for indices below 2^32.

    These recurrences give the direction numbers of S. Joe and F. Kuo (2008) for three dimensions.
    """
    gray = index ^ (index >> np.uint64(1))
    words = [np.zeros_like(index) for _ in range(3)]
    x, y = 1 << 31, 1 << 31
    z, next_z = 1 << 31, 3 << 30
    for bit in range(32):
        mask = np.uint64(0) - ((gray >> np.uint64(bit)) & np.uint64(1))
        for word, direction in zip(words, (x, y, z), strict=True):
            word ^= mask & np.uint64(direction)
        x, y = x >> 1, y ^ (y >> 1)
        z, next_z = next_z, next_z ^ z ^ (z >> 2)
    return words[0], words[1], words[2]


def shuffled(index: np.ndarray, words: Words, bits: int) -> np.ndarray:
    """Permute the integers below 2^bits; each tuple of words gives another permutation.

    Multiplying by an odd number and exclusive-or with higher bits are both invertible.
    """
    mask, shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for word in words:
        index = (index * (word | np.uint64(1)) + (word >> np.uint64(7))) & mask
        index = index ^ (index >> shift)
    return index
