"""Triangle meshes on a grid: checks for every backend, and the voxelization on the host.

In: vertices, (x, y, z) in µm, and triangles. Out: :class:`TriangleMesh`, whose corners are integers in units of a
fraction of a voxel, as fine as 64-bit arithmetic allows (2^-20 of a voxel for a mesh up to 1024 voxels wide); bool
masks. Errors: ``ValueError`` and ``TypeError`` that name the parameter.

A column is a line of voxel centres along an axis; its plane is spanned by the other two axes, u and v. Which columns a
triangle crosses is exact. A column through an edge of a triangle is assigned to one side of the edge, as if it were
shifted a little along u and by far less along v. So closed meshes have no gaps, and all backends agree.

There are three kinds of meshes. In an oriented mesh each edge occurs equally often in both directions; it is solid
where the winding number is not 0. In a closed mesh that is not oriented each edge occurs an even number of times; it is
solid where a line has crossed it an odd number of times. Any other mesh is open; it is solid where its generalised
winding number (Jacobson, Kavan and Sorkine-Hornung 2013), a sum of solid angles, is above 1/2 or below -1/2.

That number is computed from the crossings of the mesh that :mod:`linumpy.voxel.caps` closes.

The shell of an open mesh is the voxels in which a column along any axis crosses it. No path of face neighbours passes
through a shell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.voxel import caps
from linumpy.voxel.caps import Caps
from linumpy.voxel.grid import Numbers, VoxelGrid

#: Pairs of a triangle and a column that the host processes together.
_BATCH = 2**20

#: Kinds of meshes: see the docstring of the module.
ORIENTED, CLOSED, OPEN = "oriented", "closed", "open"

#: For each axis of columns (0 x, 1 y, 2 z): the axes (u, v, along the column).
PLANES = {0: (1, 2, 0), 1: (2, 0, 1), 2: (0, 1, 2)}


@dataclass(frozen=True, eq=False)
class TriangleMesh:
    """A mesh in integer coordinates.

    - `corners` (int64, shape (n, 3, 3)): (x, y, z) of each corner of each triangle, from the grid's origin in units of
      ``2**-bits`` voxels; the caps of an open mesh come last.
    - `kind` ("oriented", "closed", "open"): kind of the mesh, which defines its inside.
    - `caps`: the caps of an open mesh; None if there are none with an area.
    """

    corners: Array
    bits: int
    kind: str
    caps: Caps | None = None

    @property
    def given(self) -> Array:
        """The corners without the caps."""
        return self.corners[: len(self.corners) - (0 if self.caps is None else len(self.caps.triangles))]


class Trimesh(Protocol):
    """A ``trimesh.Trimesh``, or any other object with these attributes."""

    @property
    def vertices(self) -> Numbers:
        """(x, y, z) µm, shape (n, 3)."""

    @property
    def faces(self) -> Numbers:
        """Indices of vertices, shape (m, 3)."""


def with_triangles(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace a trimesh as first argument by its vertices and triangles; return other arguments unchanged."""
    if args and hasattr(args[0], "vertices") and hasattr(args[0], "faces"):
        return (args[0].vertices, args[0].faces, *args[1:])
    return args


def make_mesh(xp: ModuleType, vertices: Numbers, triangles: Numbers, grid: VoxelGrid) -> TriangleMesh:
    """Check a mesh, and convert it to integer coordinates.

    - `xp`: array module of the result, NumPy or CuPy.
    - `vertices` (n, 3): (x, y, z) µm.
    - `triangles` (m, 3): indices of vertices.
    - `grid`: any box of the volume: only origin and pitch are used.

    Returns: The mesh. A warning says what is open, if it is not watertight.
    """
    for name, array in (("vertices", vertices), ("triangles", triangles)):
        if xp is np and is_device_array(array):
            raise TypeError(f"{name} is on the device, but this backend works on the host: use get_backend('cuda')")
    points, faces = xp.asarray(vertices), xp.asarray(triangles)
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in "iuf":
        raise ValueError(f"vertices of shape {points.shape}, {points.dtype}: (n, 3) real numbers in µm are needed")
    if faces.ndim != 2 or faces.shape[1] != 3 or faces.dtype.kind not in "iu" or not len(faces):
        raise ValueError(f"triangles of shape {faces.shape}, {faces.dtype}: (m, 3) indices of vertices are needed")
    if not len(points):  # the minimum of no vertices is undefined
        raise ValueError(f"triangles refer to vertex {int(faces[0, 0])}, but there are 0")
    coordinates = (points.astype(np.float64, copy=False) - xp.asarray(grid.origin)) / xp.asarray(grid.pitch)
    # One copy to the host, because each copy waits for the device's queue. Reductions column by column: CuPy takes a
    # hundred times as long along an axis other than the last.
    columns = xp.ascontiguousarray(coordinates.T)
    ends = [xp.stack([faces.min(), faces.max()]).astype(np.float64)]
    ends += [xp.stack([getattr(column, side)() for column in columns]) for side in ("min", "max")]
    bounds = to_host(xp.concatenate(ends))
    if bounds[0] < 0 or bounds[1] >= len(points):
        first, last = int(faces.min()), int(faces.max())
        raise ValueError(f"triangles refer to vertex {first if first < 0 else last}, but there are {len(points)}")
    faces, low, high = faces.astype(np.int64, copy=False), bounds[2:5], bounds[5:]
    size, far = float((high - low).max()), float(np.maximum(np.abs(low), np.abs(high)).max())
    if not math.isfinite(far):
        row = int(xp.argmin(xp.isfinite(coordinates).all(axis=1)))
        raise ValueError(f"vertices: number {row} is {points[row].tolist()}, which is not finite")
    if size > 2**22 or far > 2**40:
        raise ValueError(
            f"the mesh is {size:.3g} voxels wide and up to {far:.3g} from the origin: is it in µm, and pitch= right?"
        )
    bits = min(20, 30 - math.ceil(math.log2(max(size, 1.0))))
    integers = xp.rint(coordinates * 2.0**bits).astype(np.int64)
    kind, numbers = _kind(xp, integers, faces)
    if kind != OPEN:
        return TriangleMesh(integers[faces], bits, kind)
    scale = np.asarray(grid.pitch) * 2.0**-bits
    corners, closing = caps.closed(to_host(integers[faces]), to_host(numbers), scale)
    return TriangleMesh(xp.asarray(corners), bits, kind, closing if len(closing.triangles) else None)


def _kind(xp: ModuleType, points: Array, faces: Array) -> tuple[str, Array]:
    """Return the kind of a mesh with integer `points`, and its faces, by numbers of points.

    Loose triangles, as in STL files, look open; so the numbers of equal points are equal then.
    """
    kind = _kind_by_index(xp, faces, len(points))
    if kind != OPEN:
        return kind, faces
    numbers = _merged(xp, points)[faces]
    return _kind_by_index(xp, numbers, len(points)), numbers


def _merged(xp: ModuleType, points: Array) -> Array:
    """Return a number for each point, the same for equal points."""
    order = xp.lexsort(xp.ascontiguousarray(points.T))
    is_new = (xp.diff(points[order], axis=0) != 0).any(axis=1)
    number = xp.zeros(len(points), np.int64)
    number[order[1:]] = xp.cumsum(is_new.astype(np.int64))
    return number


def _kind_by_index(xp: ModuleType, faces: Array, count: int) -> str:
    """Return the kind of a mesh by the edges of its faces, pairs of indices of `count` vertices."""
    a, b = faces.ravel(), xp.roll(faces, -1, axis=1).ravel()
    edges = xp.minimum(a, b) * count + xp.maximum(a, b)
    # In nearly all closed meshes each edge occurs once in either direction; a single sort detects that.
    both = xp.sort(2 * edges + (a > b))
    if len(both) % 2 == 0 and bool(((both[1::2] - both[::2] == 1) & (both[::2] % 2 == 0)).all()):
        return ORIENTED  # an edge from a vertex to itself never passes this test
    forth, back = xp.sort(edges[a < b]), xp.sort(edges[a > b])
    if len(forth) == len(back) and bool((forth == back).all()):
        return ORIENTED
    both = xp.sort(xp.concatenate([forth, back]))
    return CLOSED if len(both) % 2 == 0 and bool((both[::2] == both[1::2]).all()) else OPEN


def box_of(grid: VoxelGrid, axis: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return offset and size of a grid along u, v and the columns; see :data:`PLANES`."""
    first, second, along = (((grid.z_offset if k == 2 else 0), grid.shape[2 - k]) for k in PLANES[axis])
    return first, second, along


def solid(mesh: TriangleMesh, grid: VoxelGrid) -> np.ndarray:
    """Return the mask of the voxels whose centres lie inside a mesh, by its crossings along z."""
    change = np.zeros(grid.shape, np.int32)
    offset, n = box_of(grid, 2)[2]
    for u, v, height, sign in _crossings(mesh.corners, mesh.bits, grid, 2):
        plane = np.maximum(np.ceil(height - 0.5).astype(np.int64) - offset, 0)
        inside = plane < n
        np.add.at(change, (plane[inside], v[inside], u[inside]), sign[inside])
    winding = np.cumsum(change, axis=0, out=change)
    if mesh.kind == CLOSED:
        return winding % 2 != 0
    return winding != 0 if mesh.caps is None else caps.inside(winding, mesh.caps, grid)


def shell(mesh: TriangleMesh, grid: VoxelGrid) -> np.ndarray:
    """Return the mask of the voxels in which a column along z, y or x crosses a mesh."""
    out = np.zeros(grid.shape, bool)
    for axis in range(3):
        offset, n = box_of(grid, axis)[2]
        for u, v, height, _ in _crossings(mesh.given, mesh.bits, grid, axis):
            k = np.floor(height).astype(np.int64) - offset
            inside = (k >= 0) & (k < n)
            index = dict(zip(PLANES[axis], (u[inside], v[inside], k[inside]), strict=True))
            out[index[2], index[1], index[0]] = True
    return out


def _crossings(triangles: Array, bits: int, grid: VoxelGrid, axis: int) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the crossings of columns along `axis` and triangles, batch by batch, as four arrays.

    These are u and v of the column in the box, the height along the column in voxels of the volume, and the sign (1:
    the column enters the mesh, -1: it leaves).
    """
    (u_offset, nu), (v_offset, nv), _ = box_of(grid, axis)
    corners = triangles[:, :, PLANES[axis]]
    u0, u1 = _columns(corners[:, :, 0], bits, u_offset, nu)
    v0, v1 = _columns(corners[:, :, 1], bits, v_offset, nv)
    width, counts = u1 - u0, (u1 - u0) * (v1 - v0)
    rows = np.flatnonzero(counts)
    ends = np.cumsum(counts[rows])
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, _BATCH):
        number = np.arange(first, min(first + _BATCH, total))
        entry = np.searchsorted(ends, number, side="right")
        row = rows[entry]
        column = number - (ends[entry] - counts[row])
        u, v = u0[row] + column % width[row], v0[row] + column // width[row]
        centre = ((2 * (index + offset) + 1) << (bits - 1) for index, offset in ((u, u_offset), (v, v_offset)))
        hit, height, sign = _cross(corners[row], *centre)
        height = height * 2.0**-bits
        yield u[hit], v[hit], height[hit], sign[hit]


def _columns(values: np.ndarray, bits: int, offset: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, along u or v, the first and last + 1 columns that each triangle may cross, as indices of the box."""
    half, up = 1 << (bits - 1), (1 << bits) - 1
    first = np.clip(((values.min(axis=1) - half + up) >> bits) - offset, 0, n)
    last = np.clip(((values.max(axis=1) - half + up) >> bits) - offset, 0, n)
    return first, np.maximum(last, first)


def _cross(corners: np.ndarray, u: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each pair of a triangle and a column whether they cross, at which height, and with which sign."""
    (ua, va, ha), (ub, vb, hb), (uc, vc, hc) = corners.transpose(1, 2, 0)
    edges = ((ua, va, ub, vb), (ub, vb, uc, vc), (uc, vc, ua, va))
    ab, bc, ca = (_area(*edge, u, v) for edge in edges)
    sides = [_side(cross, *edge) for cross, edge in zip((ab, bc, ca), edges, strict=True)]
    hit = (sides[0] == sides[1]) & (sides[1] == sides[2]) & (sides[0] != 0)
    area = np.where(hit, (ab + bc) + ca, 1).astype(np.float64)
    part = ca.astype(np.float64) * (hb - ha).astype(np.float64) + ab.astype(np.float64) * (hc - ha).astype(np.float64)
    return hit, ha.astype(np.float64) + part / area, -sides[0]


def _area(ua: np.ndarray, va: np.ndarray, ub: np.ndarray, vb: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (ub - ua) * (v - va) - (vb - va) * (u - ua)


def _side(area: np.ndarray, ua: np.ndarray, va: np.ndarray, ub: np.ndarray, vb: np.ndarray) -> np.ndarray:
    """Return on which side of an edge a column lies; one through the edge is shifted along u, and far less along v."""
    return np.where(area != 0, np.sign(area), np.where(vb != va, np.sign(va - vb), np.sign(ub - ua))).astype(np.int32)
