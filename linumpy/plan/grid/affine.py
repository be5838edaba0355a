"""Plan the brick of an image, the box of voxels in shared memory from which an affine transform computes a tile.

In: a matrix, the spline's order, the shape of a tile of the output. Out: a :class:`Brick`, or None. Pure.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

#: Possible distances in voxels between rows of a brick: 8 more or less than a multiple of 32 (see affine.cu).
_PITCHES = (24, 40, 72)
#: Upper bound of the elements of the inverse matrix: single precision then gives voxel indices to within 0.01.
_MAX_INVERSE = 100.0

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Brick:
    """A box of the image in shared memory.

    - `pitch`: distance between rows, in voxels.
    - `numbers`: Kernel parameters `inverse`, `per` and `slack` of affine.cu.
    """

    shape: tuple[int, int, int]
    pitch: int
    nbytes: int
    numbers: tuple[float, ...]


@functools.lru_cache(maxsize=64)
def plan_brick(
    matrix: Matrix, order: int, tile: tuple[int, int, int], itemsize: int, nbytes_limit: int
) -> Brick | None:
    """Plan the brick of the image that a tile of the output needs; None if it does not fit or needs double precision.

    - `matrix` (3, 3): maps voxels of the output to coordinates in the image.
    - `order`: spline order: 1 or 3.
    - `tile`: voxels of the output that a block of threads computes.
    - `itemsize`, `nbytes_limit`: bytes of a voxel in shared memory, and of a block's shared memory.
    """
    reach = [sum(abs(m) * (n - 1) for m, n in zip(row, tile, strict=True)) for row in matrix]
    if not max(reach) < 2**20:
        return None
    # The neighbours of a point, and one more voxel for rounding. Along X rows begin at a multiple of four voxels.
    z, y, x = (math.floor(length + 3e-6) + 2 + order for length in reach)
    x += 3
    for pitch in _PITCHES:
        nbytes = z * y * pitch * itemsize
        if x <= pitch and nbytes <= nbytes_limit:
            numbers = _inverse_numbers(matrix, order)
            return None if numbers is None else Brick((z, y, x), pitch, nbytes, numbers)
    return None


def _inverse_numbers(matrix: Matrix, order: int) -> tuple[float, ...] | None:
    """Return the parameters `inverse`, `per` and `slack` of the kernel; None if single precision is not sufficient.

    The kernel fetches eight adjacent columns of a row where any point of the tile needs one of them. Such a point is
    less than (order + 1) / 2 voxels away from the nearest of these columns, along each axis of the image. `slack` is
    the corresponding distance along each axis of the output from the centre of the eight columns.
    """
    (a, b, c), (d, e, f), (g, h, i) = matrix
    minors = (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )
    determinant = a * minors[0][0] + b * minors[1][0] + c * minors[2][0]
    if abs(determinant) * _MAX_INVERSE <= max(abs(minor) for row in minors for minor in row):
        return None
    rows = [[minor / determinant for minor in row] for row in minors]
    support = (order + 1) / 2
    slack = [support * (abs(z) + abs(y)) + (support + 3.5) * abs(x) + 0.01 for z, y, x in rows]
    per = [1 / row[0] if abs(row[0]) > 1e-6 else 0.0 for row in rows]
    return (*rows[0], *rows[1], *rows[2], *per, *slack)
