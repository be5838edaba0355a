"""Random numbers of samples, by a counter-based generator: the same in NumPy here and on devices by ``philox.cuh``.

In: a seed and counters. Out: 32-bit words. A counter contains the number of a sample, so the
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
