"""Random fields of synthetic tissue: plane waves and lattices for its structure, and speckle.

In: seeds, and boxes. Out: plane waves, periodic lattices of random numbers, and the speckle of a box. Values depend
only on the seed and the position: a box that is made by itself has the same voxels as that box of a larger volume.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from linumpy.arrays import Array, array_module

#: Speckle is drawn in cells (Z, Y, X) of this shape, each from its own random generator.
_CELL = (32, 64, 64)
#: Standard deviation of the logarithm of the structure.
_DEVIATION = 0.5

#: Data type of synthetic voxels.
Dtype = Literal["float32", "uint16"]


def plane_waves(
    seed: Sequence[int], number: int, shortest_um: float, longest_um: float
) -> list[tuple[list[float], float]]:
    """Draw plane waves ``cos(2π Σ position / period + phase)``: signed periods along (Z, Y, X) in µm, and phases.

    Periods along each axis are uniform between two lengths.
    """
    rng = np.random.default_rng(list(seed))
    waves = []
    for _ in range(number):
        periods = rng.uniform(shortest_um, longest_um, 3) * rng.choice([-1, 1], 3)
        waves.append((periods.tolist(), float(rng.uniform(0, 2 * np.pi))))
    return waves


def sum_of_waves(
    seed: Sequence[int], number: int, periods_um: tuple[float, float], spacing_um: Sequence[float], at: tuple[Any, ...]
) -> Array:
    """Sum plane waves at points (Z, Y, X), each wave a product of a line along Z and a plane: float32.

    - `at`: z (Z,), what is subtracted from z in each A-line, y and x, which have or broadcast to (Y, X); in voxels.
    """
    z, above, y, x = at
    total = array_module(y).zeros((len(z), *np.broadcast_shapes(y.shape, x.shape)), np.float32)
    for periods, phase in plane_waves(seed, number, *periods_um):
        turns = [2 * np.pi * step / period for step, period in zip(spacing_um, periods, strict=True)]
        add_cosine(total, turns[0] * z, turns[1] * y + turns[2] * x + phase - turns[0] * above)
    return total


def add_cosine(total: Array, line: Array, plane: Array, height: float = 1.0) -> None:
    """Add ``height * cos(line[k] + plane[i, j])`` to a volume: cosines of a line and of a plane are few."""
    xp = array_module(plane)
    line, product = line[:, None, None], xp.empty_like(total)
    cosine, sine = (np.float32(height) * part for part in (xp.cos(plane), xp.sin(plane)))
    total += xp.multiply(xp.cos(line).astype(np.float32), cosine.astype(np.float32), out=product)
    total -= xp.multiply(xp.sin(line).astype(np.float32), sine.astype(np.float32), out=product)


def log_normal(total: Array, waves: int) -> Array:
    """Return reflectivities of mean 1, about log-normal, from a sum of waves, each of a variance of 1/2."""
    return array_module(total).exp(np.float32(_DEVIATION * (2 / waves) ** 0.5) * total - np.float32(_DEVIATION**2 / 2))


@lru_cache(maxsize=32)
def lattice(seed: tuple[int, ...]) -> np.ndarray:
    """Draw normal numbers on a lattice that repeats itself along each axis: float32, (32, 32, 32)."""
    return np.random.default_rng(seed).standard_normal((32, 32, 32), np.float32)


def speckle(seed: Sequence[int], looks: int, start: Sequence[int], stop: Sequence[int]) -> np.ndarray:
    """Return speckle of mean 1 in a box (Z, Y, X): the mean of `looks` exponentially distributed intensities."""
    out = np.empty([b - a for a, b in zip(start, stop, strict=True)], np.float32)
    cells = (range(a // c, -(-b // c)) for a, b, c in zip(start, stop, _CELL, strict=True))
    for cell in itertools.product(*cells):
        low = [max(a, k * c) for a, k, c in zip(start, cell, _CELL, strict=True)]
        high = [min(b, (k + 1) * c) for b, k, c in zip(stop, cell, _CELL, strict=True)]
        inside = tuple(slice(a - k * c, b - k * c) for a, b, k, c in zip(low, high, cell, _CELL, strict=True))
        target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
        out[target] = _cell([*seed, *cell], looks)[inside]
    return out


def _cell(seed: Sequence[int], looks: int) -> np.ndarray:
    """Draw the speckle of one cell."""
    rng = np.random.Generator(np.random.SFC64(list(seed)))
    total = rng.standard_exponential(_CELL, dtype=np.float32)
    for _ in range(looks - 1):
        total += rng.standard_exponential(_CELL, dtype=np.float32)
    return total / np.float32(looks)


def stored(voxels: Array, dtype: Dtype) -> Any:
    """Return intensities in a data type, rounded and clipped to its range."""
    if dtype == "uint16":
        xp = array_module(voxels)
        return xp.clip(xp.rint(voxels), 0, 65535).astype(np.uint16)
    return voxels.astype(dtype, copy=False)
