"""Triangle meshes on a grid: what every backend does first, and how the host crosses columns of voxels with them.

In: vertices in (x, y, z) µm and triangles. Out: :class:`Mesh`, corners as whole numbers: fractions of a voxel as fine
as 64-bit arithmetic allows (2^-20 of a voxel where a mesh is up to 1024 voxels wide). Which columns of voxel centres a
triangle crosses is then decided exactly; a centre on an edge belongs to one of its sides, as if it lay a little further
along both axes of the plane, along the second by far less. So closed meshes have no gaps, and all backends agree.

A mesh whose triangles are oriented alike (each edge is passed once in either direction) is solid where its winding
number is not 0; one that is closed otherwise, where a line crosses it an odd number of times. Any other is a shell: the
voxels in which a line through voxel centres, along any axis, crosses it. No path of face neighbours passes through a
shell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import is_device_array, to_host
from linumpy.voxel.grid import Grid

#: Columns that are looked at together on the host.
_BATCH = 2**20

#: What a mesh is: see the module's description.
ORIENTED, CLOSED, SHELL = "oriented", "closed", "shell"

#: For each axis of the lines (0 x, 1 y, 2 z), the axes (first of the plane, second of the plane, along the line).
PLANES = {0: (1, 2, 0), 1: (2, 0, 1), 2: (0, 1, 2)}


@dataclass(frozen=True, eq=False)
class Mesh:
    """A mesh in whole numbers.

    Attributes
    ----------
    corners : numpy.ndarray or cupy.ndarray of int64, shape (n, 3, 3)
        For each triangle and corner (x, y, z), counted from the grid's origin in ``2**-bits`` of a voxel.
    bits : int
        Of the fraction.
    kind : {"oriented", "closed", "shell"}
        How its inside is found.
    """

    corners: Any
    bits: int
    kind: str


def make_mesh(xp: Any, vertices: Any, triangles: Any, grid: Grid) -> Mesh:
    """Check a mesh, and bring it to whole numbers.

    Parameters
    ----------
    xp : module
        NumPy or CuPy: where the mesh shall be.
    vertices : array_like, shape (n, 3)
        (x, y, z) µm.
    triangles : array_like of int, shape (m, 3)
        Indices of vertices.
    grid : Grid
        Any box of the volume: only origin and pitch count.

    Raises
    ------
    TypeError
        Arrays on a device for a backend on the host.
    ValueError
        Shapes that do not fit, an index without a vertex, a vertex that is not finite, a mesh that is more than
        4 million voxels wide.
    """
    for name, array in (("vertices", vertices), ("triangles", triangles)):
        if xp is np and is_device_array(array):
            raise TypeError(f"{name} on the device, and the backend works on the host: take get_backend('cuda')")
    points, faces = xp.asarray(vertices), xp.asarray(triangles)
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in "iuf":
        raise ValueError(f"vertices of shape {points.shape}, {points.dtype}: (n, 3) real numbers in µm are needed")
    if faces.ndim != 2 or faces.shape[1] != 3 or faces.dtype.kind not in "iu" or not len(faces):
        raise ValueError(f"triangles of shape {faces.shape}, {faces.dtype}: (m, 3) indices of vertices are needed")
    if not len(points):  # without any there is no least one either
        raise ValueError(f"triangles: vertex {int(faces[0, 0])} is named, but there are 0")
    places = (points.astype(np.float64, copy=False) - xp.asarray(grid.origin)) / xp.asarray(grid.pitch)
    # One copy to the host says all: on a device each of them waits for what is queued. Column by column, since CuPy
    # takes a hundred times as long for an axis that is not the last one.
    columns = xp.ascontiguousarray(places.T)
    ends = [xp.stack([faces.min(), faces.max()]).astype(np.float64)]
    ends += [xp.stack([getattr(one, side)() for one in columns]) for side in ("min", "max")]
    found = to_host(xp.concatenate(ends))
    if found[0] < 0 or found[1] >= len(points):
        first, last = int(faces.min()), int(faces.max())
        raise ValueError(f"triangles: vertex {first if first < 0 else last} is named, but there are {len(points)}")
    faces, low, high = faces.astype(np.int64, copy=False), found[2:5], found[5:]
    size, far = float((high - low).max()), float(np.maximum(np.abs(low), np.abs(high)).max())
    if not math.isfinite(far):
        row = int(xp.argmin(xp.isfinite(places).all(axis=1)))
        raise ValueError(f"vertices: number {row} is {points[row].tolist()}, which is not finite")
    if size > 2**22 or far > 2**40:
        raise ValueError(
            f"a mesh that is {size:.3g} voxels wide and up to {far:.3g} away: is it in µm, and pitch= right?"
        )
    bits = min(20, 30 - math.ceil(math.log2(max(size, 1.0))))
    whole = xp.rint(places * 2.0**bits).astype(np.int64)
    return Mesh(whole[faces], bits, _kind(xp, whole, faces))


def _kind(xp: Any, whole: Any, faces: Any) -> str:
    """Say how closed a mesh is; vertices of equal coordinates count as one, as a file of loose triangles has them."""
    kind = _kind_by_index(xp, faces, len(whole))
    if kind != SHELL:
        return kind
    order = xp.lexsort(xp.ascontiguousarray(whole.T))
    new = (xp.diff(whole[order], axis=0) != 0).any(axis=1)
    number = xp.zeros(len(whole), np.int64)
    number[order[1:]] = xp.cumsum(new.astype(np.int64))
    return _kind_by_index(xp, number[faces], len(whole))


def _kind_by_index(xp: Any, faces: Any, count: int) -> str:
    a, b = faces.ravel(), xp.roll(faces, -1, axis=1).ravel()
    edges = xp.minimum(a, b) * count + xp.maximum(a, b)
    # Nearly all meshes have each edge once in either direction, which one sort shows.
    both = xp.sort(2 * edges + (a > b))
    if len(both) % 2 == 0 and bool(((both[1::2] - both[::2] == 1) & (both[::2] % 2 == 0)).all()):
        return ORIENTED  # an edge from a vertex to itself has no other direction
    forth, back = xp.sort(edges[a < b]), xp.sort(edges[a > b])
    if len(forth) == len(back) and bool((forth == back).all()):
        return ORIENTED
    both = xp.sort(xp.concatenate([forth, back]))
    return CLOSED if len(both) % 2 == 0 and bool((both[::2] == both[1::2]).all()) else SHELL


def box_of(mesh: Mesh, grid: Grid, axis: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return offset and voxels of a grid along the two axes of the plane and along the lines; see :data:`PLANES`."""
    first, second, along = (((grid.z_offset if one == 2 else 0), grid.shape[2 - one]) for one in PLANES[axis])
    return first, second, along


def solid(mesh: Mesh, grid: Grid) -> np.ndarray:
    """Return the voxels whose centres lie inside of a closed mesh: where lines along z, from below, have entered it."""
    change = np.zeros(grid.shape, np.int32)
    offset, n = box_of(mesh, grid, 2)[2]
    for u, v, height, sign in _crossings(mesh, grid, 2):
        plane = np.maximum(np.ceil(height - 0.5).astype(np.int64) - offset, 0)
        here = plane < n
        np.add.at(change, (plane[here], v[here], u[here]), sign[here])
    winding = np.cumsum(change, axis=0, out=change)
    return winding % 2 != 0 if mesh.kind == CLOSED else winding != 0


def shell(mesh: Mesh, grid: Grid) -> np.ndarray:
    """Return the voxels in which a line through voxel centres, along z, y or x, crosses a mesh."""
    out = np.zeros(grid.shape, bool)
    for axis in range(3):
        offset, n = box_of(mesh, grid, axis)[2]
        for u, v, height, _ in _crossings(mesh, grid, axis):
            k = np.floor(height).astype(np.int64) - offset
            here = (k >= 0) & (k < n)
            place = dict(zip(PLANES[axis], (u[here], v[here], k[here]), strict=True))
            out[place[2], place[1], place[0]] = True
    return out


def _crossings(mesh: Mesh, grid: Grid, axis: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yield, in batches, column (u, v) of the box, height in voxels of the volume, and ±1: up where a line enters."""
    (u_offset, nu), (v_offset, nv), _ = box_of(mesh, grid, axis)
    corners = mesh.corners[:, :, PLANES[axis]]
    u0, u1 = _columns(corners[:, :, 0], mesh.bits, u_offset, nu)
    v0, v1 = _columns(corners[:, :, 1], mesh.bits, v_offset, nv)
    width, counts = u1 - u0, (u1 - u0) * (v1 - v0)
    rows = np.flatnonzero(counts)
    ends = np.cumsum(counts[rows])
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, _BATCH):
        number = np.arange(first, min(first + _BATCH, total))
        which = np.searchsorted(ends, number, side="right")
        row = rows[which]
        rest = number - (ends[which] - counts[row])
        u, v = u0[row] + rest % width[row], v0[row] + rest // width[row]
        at = ((2 * (one + offset) + 1) << (mesh.bits - 1) for one, offset in ((u, u_offset), (v, v_offset)))
        hit, height, sign = _cross(corners[row], *at)
        height = height * 2.0**-mesh.bits
        yield u[hit], v[hit], height[hit], sign[hit]


def _columns(values: np.ndarray, bits: int, offset: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """First column, and that after the last, whose centres a triangle may cover, as indices of the box."""
    half, up = 1 << (bits - 1), (1 << bits) - 1
    first = np.clip(((values.min(axis=1) - half + up) >> bits) - offset, 0, n)
    last = np.clip(((values.max(axis=1) - half + up) >> bits) - offset, 0, n)
    return first, np.maximum(last, first)


def _cross(corners: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Say which columns cross their triangle, at what height, and with which sign, a column and a triangle each."""
    (ua, va, ha), (ub, vb, hb), (uc, vc, hc) = corners.transpose(1, 2, 0)
    edges = ((ua, va, ub, vb), (ub, vb, uc, vc), (uc, vc, ua, va))
    ab, bc, ca = (_area(*edge, u, v) for edge in edges)
    sides = [_side(area, *edge) for area, edge in zip((ab, bc, ca), edges, strict=True)]
    hit = (sides[0] == sides[1]) & (sides[1] == sides[2]) & (sides[0] != 0)
    whole = np.where(hit, (ab + bc) + ca, 1).astype(np.float64)
    part = ca.astype(np.float64) * (hb - ha).astype(np.float64) + ab.astype(np.float64) * (hc - ha).astype(np.float64)
    return hit, ha.astype(np.float64) + part / whole, -sides[0]


def _area(ua: Any, va: Any, ub: Any, vb: Any, u: Any, v: Any) -> Any:
    return (ub - ua) * (v - va) - (vb - va) * (u - ua)


def _side(area: Any, ua: Any, va: Any, ub: Any, vb: Any) -> Any:
    """On which side of an edge a centre lies; on it, where it would lie if moved along u by far more than along v."""
    return np.where(area != 0, np.sign(area), np.where(vb != va, np.sign(va - vb), np.sign(ub - ua))).astype(np.int32)
