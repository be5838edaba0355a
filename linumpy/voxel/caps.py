"""Meshes that are not watertight: closed by caps, whose solid angles give the generalised winding number.

In: triangles, and winding numbers of the closed mesh. Out: :class:`Caps`; bool masks. On the host.

The caps are triangles from one vertex of each connected set of open edges to these edges. The generalised winding
number of an open mesh (Jacobson, Kavan and Sorkine-Hornung 2013) is the whole number of the closed mesh minus the solid
angle of the caps over 4π. So only voxels from which the caps may have a solid angle of 2π are computed, near holes that
are large or not flat, and the time does not depend on the number of triangles. Where a voxel is on the limit, as on a
flat cap, the closed mesh decides. Sets of caps that are small for their distance count as dipoles (Barill et al. 2018).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linumpy.voxel.grid import VoxelGrid

log = logging.getLogger(__name__)

#: Winding numbers this close to 1/2 are on the limit: corners of caps are rounded to integers, and devices round sums.
ON_LIMIT = 2.0**-12

#: Where the solid angle is taken, from the centre in voxels (x, y, z): on the side of a cap through the centre on which
#: :mod:`linumpy.voxel.mesh` counts the centre.
SHIFT = (2.0**-24, 2.0**-29, 2.0**-34)

#: Voxels of a block, along each axis, that are tested together for being near a cap.
_BLOCK = 16

#: Pairs of a triangle and a voxel whose solid angles are computed together: they fit into a core's cache.
_PAIRS = 2**14

#: A set of caps this many radii away counts as a dipole (Barill et al. 2018), with an error of about its square.
DIPOLE_RADII = 8.0

#: A set of caps with a larger solid angle is bounded for each voxel of a block, others once for the block.
_FAR_ANGLE = 0.01


@dataclass(frozen=True, eq=False)
class Caps:
    """Triangles that close a mesh.

    - `triangles` (float64, shape (k, 3, 3)): (x, y, z) of each corner, in µm from the grid's origin.
    - `groups` (float64, shape (g, 10)): for each connected set of caps: centre (x, y, z) and radius of a ball that
      contains it, its area, its area vector (x, y, z), and the numbers of its first triangle and after its last.
    """

    triangles: np.ndarray
    groups: np.ndarray


def closed(corners: np.ndarray, faces: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, Caps]:
    """Close a mesh, and log what was open.

    - `corners` (int64, shape (n, 3, 3)): corners of the triangles.
    - `faces` (int64, shape (n, 3)): a number for each corner, the same for equal points.
    - `scale` (3,): size of a unit of `corners`, (x, y, z) µm.

    Returns: The triangles, turned so that neighbours agree on a side, and the caps; the caps again.
    """
    turned = _turned(faces)
    corners, faces = (np.where(turned.reshape(-1, *(1,) * (a.ndim - 1)), a[:, ::-1], a) for a in (corners, faces))
    index = np.empty(int(faces.max()) + 1, np.int64)
    index[faces.ravel()] = np.arange(faces.size)  # of a corner at each point
    start, end, share = _open_edges(faces)
    first, set_of_edge = _connected_sets(start, end)
    added = corners.reshape(-1, 3)[index[np.stack([first, end, start], axis=1)]]
    has_area = np.cross(added[:, 1] - added[:, 0], added[:, 2] - added[:, 0]).any(axis=1)
    order = np.flatnonzero(has_area)[np.argsort(set_of_edge[has_area], kind="stable")]
    added = added[order]
    caps = Caps(added * scale, _balls(added * scale, set_of_edge[order]))
    area, cap_area = np.linalg.norm(_area_vectors(corners * scale), axis=1).sum(), caps.groups[:, 4].sum()
    log.warning(
        "the mesh is not watertight: %d edges (%.2g %%) are open%s, and closing them takes triangles with %.2g %% of "
        "the surface; it is solid where its winding number is above 1/2",
        len(start), 100 * share, f", {turned.sum()} triangles faced the other way" if turned.any() else "",
        100 * cap_area / max(area + cap_area, np.finfo(float).tiny),
    )  # fmt: skip
    return np.concatenate([corners, added]), caps


def inside(winding: np.ndarray, caps: Caps, grid: VoxelGrid) -> np.ndarray:
    """Return the mask of the voxels inside an open mesh, by the `winding` number of the closed mesh."""
    out = winding != 0
    for part, points in _near(caps.groups, grid):
        angles = _angles_of(caps, points + np.asarray(SHIFT) * grid.pitch)
        number = np.abs(winding[part] - angles / (4 * np.pi))
        out[part] = np.where(out[part], number >= 0.5 - ON_LIMIT, number > 0.5 + ON_LIMIT)
    return out


def _near(groups: np.ndarray, grid: VoxelGrid) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray]]:
    """Yield voxels from which caps may have a solid angle of 2π, block by block: their indices, and centres in µm."""
    limit, steps = 2 * np.pi * (1 - ON_LIMIT), np.asarray(grid.pitch)[::-1]
    starts = np.meshgrid(*(np.arange(0, n, _BLOCK) for n in grid.shape), indexing="ij")
    corners = np.stack(starts, axis=-1).reshape(-1, 3)
    sizes, offset = np.minimum(_BLOCK, np.asarray(grid.shape) - corners), np.array((grid.z_offset, 0, 0))
    middles, radii = (corners + offset + sizes / 2) * steps, np.linalg.norm(sizes * steps, axis=1) / 2
    rows = max(1, 2**20 // max(1, len(groups)))
    for begin in range(0, len(corners), rows):
        part = slice(begin, begin + rows)
        bounds = _largest_angles(groups, middles[part, ::-1], radii[part])
        for row in np.flatnonzero(bounds.sum(axis=1) > limit):
            is_far = bounds[row] < _FAR_ANGLE
            index = np.indices(sizes[begin + row]).reshape(3, -1).T + corners[begin + row]
            centres = ((index + offset + 0.5) * steps)[:, ::-1]
            bound = _largest_angles(groups[~is_far], centres, np.zeros(len(centres))).sum(axis=1)
            is_near = bound + bounds[row, is_far].sum() > limit
            if is_near.any():
                yield tuple(index[is_near].T), centres[is_near]


def _largest_angles(groups: np.ndarray, points: np.ndarray, radii: np.ndarray) -> np.ndarray:
    """Return bounds, (points, groups), of the solid angle of each set of caps from balls around the points.

    The solid angle of a triangle is at most its area over the square of its distance.
    """
    squared = np.zeros((len(points), len(groups)))
    for axis in range(3):
        squared += (points[:, axis, None] - groups[:, axis]) ** 2
    distance = np.sqrt(squared) - groups[:, 3] - radii[:, None]
    return np.where(distance > 0, groups[:, 4] / np.where(distance > 0, distance, 1) ** 2, 4 * np.pi)


def _angles_of(caps: Caps, points: np.ndarray) -> np.ndarray:
    """Return the sum of the solid angles of caps from each point; far sets of caps count as dipoles."""
    total, groups = np.zeros(len(points)), caps.groups
    step = max(1, 8 * _PAIRS // len(groups))
    for begin in range(0, len(points), step):
        part = points[begin : begin + step]
        away = [groups[:, axis] - part[:, axis, None] for axis in range(3)]
        squared = away[0] ** 2 + away[1] ** 2 + away[2] ** 2
        is_far = squared > (DIPOLE_RADII * groups[:, 3]) ** 2
        dot = away[0] * groups[:, 5] + away[1] * groups[:, 6] + away[2] * groups[:, 7]
        angles = np.where(is_far, dot / np.where(is_far, squared * np.sqrt(squared), 1), 0).sum(axis=1)
        for number in np.flatnonzero(~is_far.all(axis=0)):
            near, (first, last) = ~is_far[:, number], groups[number, 8:].astype(int)
            angles[near] += _solid_angles(caps.triangles[first:last], part[near])
        total[begin : begin + step] = angles
    return total


def _solid_angles(triangles: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return the sum of the solid angles of triangles from each point (Van Oosterom and Strackee 1983)."""
    total = np.zeros(len(points))
    step = max(1, _PAIRS // len(triangles))
    for begin in range(0, len(points), step):
        part = points[begin : begin + step].T[:, None]
        for first in range(0, len(triangles), _PAIRS):
            # The coordinates of corners, relative to the points, are along the first axis.
            a, b, c = triangles[first : first + _PAIRS].transpose(1, 2, 0)[..., None] - part
            ab, bc, ca = ((p * q).sum(axis=0) for p, q in ((a, b), (b, c), (c, a)))
            la, lb, lc = (np.sqrt((p * p).sum(axis=0)) for p in (a, b, c))
            volume = (
                a[0] * (b[1] * c[2] - b[2] * c[1])
                + a[1] * (b[2] * c[0] - b[0] * c[2])
                + a[2] * (b[0] * c[1] - b[1] * c[0])
            )
            angles = 2 * np.arctan2(volume, la * lb * lc + ab * lc + bc * la + ca * lb)
            total[begin : begin + step] += angles.sum(axis=0)
    return total


def _turned(faces: np.ndarray) -> np.ndarray:
    """Return which triangles to turn so that neighbours agree on a side, as few as possible of each connected part."""
    a, b = faces.ravel(), np.roll(faces, -1, axis=1).ravel()
    pairs = np.sort(np.stack([a, b]), axis=0)
    order = np.lexsort(pairs)
    step = (np.diff(pairs[:, order], axis=1) != 0).any(axis=0)
    ends = np.concatenate([[0], np.flatnonzero(step) + 1, [len(a)]])
    one = order[ends[:-1][np.diff(ends) == 2]]  # edges of exactly two triangles
    other = order[ends[:-1][np.diff(ends) == 2] + 1]
    disagree, n = (a[one] < b[one]) == (a[other] < b[other]), len(faces)
    if not disagree.any():
        return np.zeros(n, bool)
    # Nodes t and n + t are triangle t as it is and turned; a link joins the sides of two neighbours that agree.
    rows = np.concatenate([one // 3, one // 3 + n])
    columns = np.concatenate([other // 3 + n * disagree, other // 3 + n * ~disagree])
    label = _components(rows, columns, 2 * n)
    part, turned = np.minimum(label[:n], label[n:]), label[:n] > label[n:]
    is_most = 2 * np.bincount(part, turned) > np.bincount(part)
    return np.where(label[:n] == label[n:], False, turned ^ is_most[part])


def _components(rows: np.ndarray, columns: np.ndarray, count: int) -> np.ndarray:
    """Return the number of the connected component of each node of a graph."""
    from scipy.sparse import coo_matrix, csgraph

    graph = coo_matrix((np.ones(len(rows), bool), (rows, columns)), (count, count))
    return csgraph.connected_components(graph, directed=False)[1]


def _open_edges(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return start and end of the edges that occur more often in one direction, and their share of all edges."""
    a, b = faces.ravel(), np.roll(faces, -1, axis=1).ravel()
    count = int(faces.max()) + 1
    edges, number = np.unique(np.minimum(a, b) * count + np.maximum(a, b), return_inverse=True)
    net = np.bincount(number, np.sign(b - a)).astype(np.int64)
    low, high = np.divmod(np.repeat(edges, np.abs(net)), count)
    forth = np.repeat(net, np.abs(net)) > 0
    return np.where(forth, low, high), np.where(forth, high, low), np.count_nonzero(net) / len(edges)


def _connected_sets(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for each edge a vertex of the connected set of edges that it belongs to, and the number of the set."""
    vertices, number = np.unique(np.concatenate([start, end]), return_inverse=True)
    label = _components(number[: len(start)], number[len(start) :], len(vertices))
    first = vertices[np.unique(label, return_index=True)[1]]
    set_of_edge = label[number[: len(start)]]
    return first[set_of_edge], set_of_edge


def _balls(caps: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Return for each set of caps, sorted by the number of the set, the row of ``TriangleMesh.groups``."""
    if not len(caps):
        return np.empty((0, 10))
    ends = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1, [len(caps)]])
    vectors = _area_vectors(caps)
    areas = np.linalg.norm(vectors, axis=1)
    area = np.add.reduceat(areas, ends[:-1])
    centre = np.add.reduceat(caps.mean(axis=1) * areas[:, None], ends[:-1]) / area[:, None]
    from_centre = np.linalg.norm(caps - np.repeat(centre, np.diff(ends), axis=0)[:, None], axis=2).max(axis=1)
    radius, vector = np.maximum.reduceat(from_centre, ends[:-1]), np.add.reduceat(vectors, ends[:-1])
    return np.column_stack([centre, radius, area, vector, ends[:-1], ends[1:]])


def _area_vectors(triangles: np.ndarray) -> np.ndarray:
    a, b, c = triangles.transpose(1, 0, 2)
    return np.cross(b - a, c - a) / 2
