"""Interpolation weights of points in tetrahedra, pyramids, wedges and hexahedra, by NumPy.

``umesh.cu`` computes the same on the device; ``umesh.py`` chooses the elements and sums the values of their corners.

In: corners relative to the point, in VTK's order. Out: weights of the corners, and whether the point is inside.
Elements may be turned inside out. Faces with four corners may be curved (bilinear); both elements at a face agree on
its shape.
"""

from __future__ import annotations

import numpy as np

#: Distance outside an element, in the element's coordinates, up to which a point counts as inside: it exceeds rounding.
TOLERANCE = 1e-7
_CONVERGED, _MAX_STEPS = 1e-9, 20
_MIDDLES = {5: (0.375, 0.375, 0.75), 6: (1 / 3, 1 / 3, 0.5), 8: (0.5, 0.5, 0.5)}
#: For each corner of a hexahedron and each axis: whether the corner has coordinate 1 instead of 0.
_FAR = np.array([[(k ^ k >> 1) & 1, k >> 1 & 1, k >> 2] for k in range(8)], bool)


def weights_of(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return interpolation weights of corners, (n, corners, 3), at the origin; and whether it lies inside, (n,)."""
    corners = np.asarray(corners, np.float64)
    return _in_tets(corners) if corners.shape[1] == 4 else _in_curved(corners)


def _volume(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the determinant of each triple of vectors."""
    (ax, ay, az), (bx, by, bz), (cx, cy, cz) = a.T, b.T, c.T
    return ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx)


def _solved(columns: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors of three vectors (n, 3, 3) whose sum is `target` (n, 3); and whether they span a volume."""
    a, b, c = np.moveaxis(columns, 1, 0)
    volume = _volume(a, b, c)
    parts = np.stack([_volume(target, b, c), _volume(a, target, c), _volume(a, b, target)], -1)
    return parts / np.where(volume == 0, 1, volume)[:, None], volume != 0


def _in_tets(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    others, solid = _solved(corners[:, 1:] - corners[:, :1], -corners[:, 0])
    weights = np.concatenate([1 - others.sum(1, keepdims=True), others], 1)
    return weights, solid & (weights.min(1) >= -TOLERANCE)


def _in_curved(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the element's coordinates of the origin by Newton's method; they are kept within -1 to 2."""
    count = corners.shape[1]
    r = np.tile(np.array(_MIDDLES[count]), (len(corners), 1))
    inside = np.zeros(len(corners), bool)
    active = np.arange(len(corners))
    for _ in range(_MAX_STEPS):
        weights, slopes = _shape(r[active], count)
        miss = -np.einsum("nk,nka->na", weights, corners[active])
        change, solid = _solved(np.einsum("nkj,nka->nja", slopes, corners[active]), miss)
        r[active] = np.clip(r[active] + change, -1, 2)
        done = solid & (np.abs(change).max(1) < _CONVERGED)
        inside[active[done]] = _is_inside(r[active[done]], count)
        active = active[solid & ~done]
        if not len(active):
            break
    return _shape(r, count)[0], inside


def _is_inside(r: np.ndarray, count: int) -> np.ndarray:
    top = np.ones_like(r)
    if count == 5:
        top[:, 0] = top[:, 1] = r[:, 2]
    elif count == 6:
        top[:, 0] = 1 - r[:, 1]
    return np.asarray(((r >= -TOLERANCE) & (r <= top + TOLERANCE)).all(1))


def _shape(r: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights of corners at coordinates `r` of elements, (n, count), and derivatives, (n, count, 3)."""
    return {5: _pyramid, 6: _wedge, 8: _hexahedron}[count](r)


def _hexahedron(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    factors = np.where(_FAR, r[:, None], 1 - r[:, None])
    slopes = np.broadcast_to(np.where(_FAR, 1.0, -1.0), factors.shape)
    x, y, z = np.moveaxis(factors, 2, 0)
    dx, dy, dz = np.moveaxis(slopes, 2, 0)
    return x * y * z, np.stack([dx * y * z, x * dy * z, x * y * dz], -1)


def _wedge(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    corner = np.stack([1 - r[:, 0] - r[:, 1], r[:, 0], r[:, 1]], 1)
    below, above = 1 - r[:, 2:], r[:, 2:]
    along = np.array([[-1.0, -1.0], [1, 0], [0, 1]])
    slopes = np.concatenate([along * below[:, :, None], along * above[:, :, None]], 1)
    across = np.concatenate([-corner, corner], 1)
    return np.concatenate([corner * below, corner * above], 1), np.concatenate([slopes, across[:, :, None]], 2)


def _pyramid(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and derivatives of a pyramid.

    The third coordinate is 1 in the base and 0 at the tip; the others are coordinates in the base times the third, so
    that the tip is not singular.
    """
    a, b, t = r.T
    over = np.where(np.abs(t) < 1e-12, 0, 1 / np.where(np.abs(t) < 1e-12, 1, t))
    m, da, db = a * b * over, b * over, a * over
    dt = -m * over
    weights = np.stack([t - a - b + m, a - m, m, b - m, 1 - t], 1)
    nothing = np.zeros_like(a)
    slopes = np.stack(
        [
            np.stack([-1 + da, 1 - da, da, -da, nothing], 1),
            np.stack([-1 + db, -db, db, 1 - db, nothing], 1),
            np.stack([1 + dt, -dt, dt, -dt, nothing - 1], 1),
        ],
        2,
    )
    return weights, slopes
