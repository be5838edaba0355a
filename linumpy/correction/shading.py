"""The fields of a field of view: sums of Legendre polynomials, and how well their coefficients are known.

In: options of the estimate, which :mod:`linumpy.correction.shading_fit` carries out. Out: :class:`Shading`, and from
it the flat field and the dark field of tiles of any shape. The logarithm of the flat field is a sum of polynomials of y
and x, and of a few that change along depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.polynomial.legendre import legvander

from linumpy.declared import Declared, Help, Positive

#: Degree of the polynomials of y and x.
_DEGREE = 6
#: Degree of each polynomial of :func:`modes_of`.
DEGREES = np.repeat(np.arange(1, _DEGREE + 1), np.arange(2, _DEGREE + 2))


@dataclass(frozen=True)
class ShadingOptions(Declared):
    """How the fields are estimated.

    - `dark`: whether to return a dark field; otherwise it is zero.
    - `smoothness`: factor of the variance that the tiles' structure seems to have: a larger one makes the flat field
      more even.
    - `force`: whether to return fields that are too uncertain to be of use.
    """

    dark: Annotated[bool, Help("Estimate an offset, too, from planes without light.")] = False
    smoothness: Annotated[
        Positive, Help("How much tiles are taken to differ by themselves: a larger S makes the fields more even.", "S")
    ] = 1.0
    force: Annotated[bool, Help("Use fields that are too uncertain to be of use.")] = False


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an illumination is known from.

    - `tiles`: number of tiles with light.
    - `independent_tiles`: of as many independent ones; neighbouring slices show much of the same tissue.
    - `coverage`: share of the tiles that tell of a position of the field, at the position with the fewest.
    - `unevenness`: RMS deviation of the estimated flat field from 1.
    - `error`: expected RMS error of the estimated flat field.
    - `left_out`: why the fields are left out; empty if they are not.
    """

    tiles: int
    independent_tiles: float
    coverage: float
    unevenness: float
    error: float
    left_out: str = ""


@dataclass(frozen=True, kw_only=True)
class Shading:
    """The fields of a field of view, and how well they are known.

    - `coefficients` (float64, (polynomials, 2)): the logarithm of the flat field: its mean over depth, and its change.
    - `depths` (float, float): first and last depth that has light, from 0 to 1 over a tile; beyond them the flat field
      does not change.
    - `dark` (float64, (polynomials + 2,)): brightness of the darkest planes, its share that is light, and the pattern
      of the planes.
    - `floor`: the darkest pixels, which limit the dark field.
    """

    coefficients: np.ndarray
    depths: tuple[float, float]
    dark: np.ndarray
    floor: float
    evidence: Evidence

    def fields(self, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat field (Z, Y, X), of mean 1 in each plane, and the dark field (Y, X), as float32."""
        modes = modes_of(shape[1:]).astype(np.float32)
        along = along_depth(shape[0], self.depths)
        flat = even(np.exp((along @ self.coefficients.T).astype(np.float32) @ modes.T))
        dark = dark_field(modes, self.coefficients, self.dark, self.floor)
        return flat.reshape(shape), dark.astype(np.float32).reshape(shape[1:])


def _legendre(points: np.ndarray, count: int) -> np.ndarray:
    """Return the first polynomials, of mean square 1 from -1 to 1, at points: (count, points)."""
    return legvander(points, count - 1).T * np.sqrt(2 * np.arange(count) + 1)[:, None]


def modes_of(size: tuple[int, ...]) -> np.ndarray:
    """Return the polynomials of y and x up to :data:`_DEGREE`, except for the constant: (pixels, polynomials)."""
    y, x = (_legendre((np.arange(n) + 0.5) * (2 / n) - 1, _DEGREE + 1) for n in size)
    pairs = [(k, degree - k) for degree in range(1, _DEGREE + 1) for k in range(degree + 1)]
    return np.stack([(y[a][:, None] * x[b]).ravel() for a, b in pairs], axis=1)


def along_depth(planes: int, depths: tuple[float, float]) -> np.ndarray:
    """Return the two factors along depth: 1, and a line from the first to the last depth with light: (planes, 2)."""
    position = ((np.arange(planes) + 0.5) / planes - depths[0]) / max(depths[1] - depths[0], 1e-6)
    return _legendre(np.clip(2 * position - 1, -1, 1), 2).T


def even(field: np.ndarray) -> np.ndarray:
    """Give a field (..., pixels) a mean of 1."""
    return np.asarray(field / field.mean(axis=-1, keepdims=True))


def dark_field(modes: np.ndarray, coefficients: np.ndarray, dark: np.ndarray, floor: float) -> np.ndarray:
    """Return the dark field (pixels,): the darkest planes without the light in them."""
    flat = even(np.exp(modes @ coefficients[:, 0]))
    pattern = 1 + modes[:, : len(dark) - 2] @ dark[2:]
    return np.clip(dark[0] * (pattern - dark[1] * flat), 0, 0.95 * floor)
