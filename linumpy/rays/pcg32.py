"""PCG32 (O'Neill, 2014), the generator XSH-RR 64/32 of the PCG family, with jump-ahead in O(log n).

In: a seed and a stream number. Out: unsigned integers of 32 bits, which equal the reference implementation's, and
floats in [0, 1). The CUDA kernels use the same numbers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

_MULTIPLIER = 6364136223846793005
_MASK = 2**64 - 1


def jump(delta: int, inc: int) -> tuple[int, int]:
    """Return `delta` steps, modulo 2^64, as one: ``state_after = state * multiplier + summand`` (modulo 2^64)."""
    multiplier, summand = 1, 0
    step_multiplier, step_summand = _MULTIPLIER, inc
    remaining = delta & _MASK
    while remaining:
        if remaining & 1:
            multiplier = multiplier * step_multiplier & _MASK
            summand = (summand * step_multiplier + step_summand) & _MASK
        step_summand = (step_multiplier + 1) * step_summand & _MASK
        step_multiplier = step_multiplier * step_multiplier & _MASK
        remaining >>= 1
    return multiplier, summand


def output(state: np.ndarray) -> np.ndarray:
    """Return the number that a generator outputs in a state; uint64 in, uint32 out."""
    shifted = (((state >> np.uint64(18)) ^ state) >> np.uint64(27)).astype(np.uint32)
    turn = (state >> np.uint64(59)).astype(np.uint32)
    return (shifted >> turn) | (shifted << ((np.uint32(32) - turn) & np.uint32(31)))


@dataclass
class PCG32:
    """A generator of random numbers.

    Attributes
    ----------
    state : int
        64 bits.
    inc : int
        Increment, odd: twice the stream number plus 1.
    """

    state: int
    inc: int

    @classmethod
    def seeded(cls, seed: int, stream: int = 0) -> PCG32:
        """Seed a generator as ``pcg32_srandom_r(seed, stream)`` of the reference implementation does.

        `seed` counts modulo 2^64, `stream` modulo 2^63.
        """
        seed, stream = operator.index(seed), operator.index(stream)  # NumPy's integers would overflow
        inc = ((stream << 1) | 1) & _MASK
        return cls((((inc + seed) & _MASK) * _MULTIPLIER + inc) & _MASK, inc)

    def advance(self, delta: int) -> None:
        """Skip `delta` numbers, in O(log `delta`) operations; a negative `delta` steps back."""
        multiplier, summand = jump(operator.index(delta), self.inc)
        self.state = (self.state * multiplier + summand) & _MASK

    def numbers(self, indices: np.ndarray, per_index: int, count: int) -> np.ndarray:
        """Return the first `count` numbers of many parts of the sequence, of equal lengths; the state does not change.

        Parameters
        ----------
        indices : numpy.ndarray of integers, (n,)
            Part `i` begins `i` * `per_index` numbers after the current state.
        per_index, count : int
            Length of a part, and how many of its numbers are returned.

        Returns
        -------
        numpy.ndarray of uint32, (count, n)
        """
        state = np.full(indices.shape, self.state, np.uint64)
        remaining = indices.astype(np.uint64)
        delta = per_index
        while remaining.any():
            multiplier, summand = jump(delta, self.inc)
            jumped = state * np.uint64(multiplier) + np.uint64(summand)
            state = np.where(remaining & np.uint64(1), jumped, state)
            remaining >>= np.uint64(1)
            delta *= 2
        rows = np.empty((count, *indices.shape), np.uint32)
        for row in rows:
            row[...] = output(state)
            state = state * np.uint64(_MULTIPLIER) + np.uint64(self.inc)
        return rows
