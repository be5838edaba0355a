"""Sample grids of vertices and the unstructured elements that stitch them (ExaStitch's ``.umesh`` and ``.grids``).

In: paths. Out: a field over the box of all grids and elements. Vertex (i, j, k) of a grid lies at
``(lower + (i, j, k) + 0.5) * 2^level``, in the same units as the vertices of the mesh. Inside a grid's cell the value
is trilinear; inside an element it is the weighted sum of the values of the element's vertices. Where several contain a
point, the first counts: grids, then tetrahedra, pyramids, wedges and hexahedra. A grid's cell with a vertex without a
value is empty: grids and elements after it count there.
"""

from __future__ import annotations

import os

import numpy as np

from linumpy.errors import SourceError
from linumpy.gpu.kernels import KernelSpec
from linumpy.sampling.fields import box_lists, device_tables
from linumpy.sampling.files.bricks import Blocks, read_grids, read_scalars
from linumpy.sampling.files.umesh import Mesh, read_umesh
from linumpy.sampling.voxel_field import finite_range

#: Largest number of entries of the box lists per grid or element.
_PER_ELEMENT = 16
#: Largest extent of the domain: products of float32 coordinates and cells must be finite.
_LARGEST = 1e34
#: Distance outside an element, in the element's coordinates, up to which a point counts as inside: it exceeds rounding.
TOLERANCE = 1e-7
_CONVERGED, _MAX_STEPS = 1e-9, 20
_MIDDLES = {5: (0.375, 0.375, 0.75), 6: (1 / 3, 1 / 3, 0.5), 8: (0.5, 0.5, 0.5)}
#: For each corner of a hexahedron and each axis: whether the corner has coordinate 1 instead of 0.
_FAR = np.array([[(k ^ k >> 1) & 1, k >> 1 & 1, k >> 2] for k in range(8)], bool)
_NO_VECTORS, _NO_NUMBERS = np.zeros((0, 3), np.int64), np.zeros(0, np.int64)
_NO_BLOCKS = Blocks(_NO_VECTORS, _NO_NUMBERS, _NO_VECTORS, _NO_NUMBERS, np.zeros(0, np.float32))
_GRID = np.dtype([("lower", "<f4", 3), ("cells", "<f4"), ("offset", "<i8"), ("size", "<i4", 3), ("unused", "<i4")])


def open_exastitch(
    umesh: str | os.PathLike[str] | None = None,
    grids: str | os.PathLike[str] | None = None,
    scalar: str | os.PathLike[str] | None = None,
    background: float = np.nan,
) -> StitchedField:
    """Open a mesh, grids, or both.

    Triangles and quads of `umesh` have no volume and are ignored. `grids` has records of int32: lower[3], level,
    cells[3], and the ids of all vertices, x fastest; a vertex whose id has no value leaves the cells around it empty.
    `scalar` has float32 values, indexed by the ids of grids, which need it, and by the tags of the mesh's vertices.
    Without it, or for a mesh without tags, the first set of values in the mesh's file is used. `background` is the
    value outside.
    """
    if umesh is None and grids is None:
        raise SourceError("give umesh=, grids= or both")
    if grids is not None and scalar is None:
        raise SourceError(f"{os.fspath(grids)}: grids hold ids of values; give the file of the values as scalar=")
    scalars = np.zeros(0, np.float32) if scalar is None else read_scalars(scalar)
    mesh = None if umesh is None else read_umesh(umesh)
    values = np.zeros(0, np.float32) if mesh is None else _vertex_values(mesh, scalars, os.fspath(umesh or ""))
    blocks = None if grids is None else read_grids(grids, scalars)
    try:
        return StitchedField(mesh, values, blocks, background)
    except ValueError as error:
        raise SourceError(f"{os.fspath(umesh or grids or '')}: {error}") from error


def _vertex_values(mesh: Mesh, scalars: np.ndarray, name: str) -> np.ndarray:
    if len(mesh.tags) and len(scalars):
        if mesh.tags.max() >= len(scalars):
            raise SourceError(f"{name}: a vertex has tag {mesh.tags.max()}, but scalar= holds {len(scalars)} values")
        return scalars[mesh.tags.astype(np.int64)]
    if len(mesh.values) != len(mesh.vertices):
        raise SourceError(f"{name}: its vertices have no values; give a file of values as scalar= for a mesh with tags")
    return mesh.values


class StitchedField(device_tables.TableField):
    """Grids of vertices and unstructured elements as a field; the unit cube covers the box `domain`, (2, 3) float64."""

    n_channels = 1
    _spec = KernelSpec("umesh", "umesh", (), "linumpy.sampling.fields.cuda")

    def __init__(
        self, mesh: Mesh | None, values: np.ndarray, blocks: Blocks | None, background: float = np.nan
    ) -> None:
        blocks = _NO_BLOCKS if blocks is None else blocks
        self._corners, vertices = _corners(mesh)
        low, high = _boxes(self._corners, vertices, blocks)
        self.domain = np.stack([low.min(0), high.max(0)])
        origin, extent = self.domain[0], self.domain[1] - self.domain[0]
        used = np.unique(self._corners[self._corners >= 0])
        self.value_range = finite_range(blocks.values, values[used])
        self._grids, self._values = np.zeros(len(blocks.level), _GRID), blocks.values
        self._grids["lower"], self._grids["cells"] = _grid_boxes(blocks)[0] - origin, 0.5**blocks.level
        self._grids["offset"], self._grids["size"] = blocks.offset, blocks.size
        self._vertices = np.concatenate([vertices - origin, values[:, None]], 1).astype(np.float32)
        # Rounded as vertices are, so that boxes that touch each other still touch.
        self._boxes = np.stack([low - origin, high - origin], 1).astype(np.float32)
        edges = self._boxes.astype(float)
        self._lists = box_lists.build(edges[:, 0], edges[:, 1], extent, _PER_ELEMENT)
        counts = [("grids", "<i4", len(self._grids)), ("unused", "<i4", 0)]
        self._frame = device_tables.record(
            [("extent", "<f4", extent), ("background", "<f4", background), *self._lists.fields, *counts]
        )
        self._tables = device_tables.DeviceTables(
            self._frame.view(np.uint8),
            self._lists.table,
            self._lists.items,
            self._boxes,
            self._grids.view(np.uint8),
            self._values,
            self._corners,
            self._vertices,
        )

    def _decode_host(self, coords: np.ndarray, values: np.ndarray) -> None:
        out = values[0]
        points = coords * self._frame["extent"][0]
        starts, counts = self._lists.find(points)
        out[:] = self._frame["background"][0]
        pending = np.flatnonzero(counts)
        for k in range(counts.max(initial=0)):
            pending = pending[counts[pending] > k]
            numbers = self._lists.items[starts[pending] + k]
            box = self._boxes[numbers]
            near = ((points[pending] >= box[:, 0]) & (points[pending] <= box[:, 1])).all(1)
            has_value = np.zeros(len(pending), bool)
            has_value[near] = self._evaluate(points, pending[near], numbers[near], out)
            pending = pending[~has_value]

    def _evaluate(self, points: np.ndarray, rows: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Write the values of points ``points[rows]`` in grids and elements `numbers`; return which points have one."""
        has_value = np.zeros(len(rows), bool)
        in_grid = numbers < len(self._grids)
        has_value[in_grid] = self._in_grids(points, rows[in_grid], numbers[in_grid], out)
        elements = np.flatnonzero(~in_grid)
        corners = self._corners[numbers[elements] - len(self._grids)]
        counts = np.count_nonzero(corners >= 0, axis=1)
        for count in (4, 5, 6, 8):
            entries = elements[counts == count]
            if not len(entries):
                continue
            vertices = self._vertices[corners[counts == count, :count]]
            weights, inside = weights_of(vertices[:, :, :3].astype(float) - points[rows[entries], None])
            value = (weights * vertices[:, :, 3]).sum(1)
            out[rows[entries[inside]]] = value[inside]
            has_value[entries] = inside
        return has_value

    def _in_grids(self, points: np.ndarray, rows: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> np.ndarray:
        """As :meth:`_evaluate`, for points in grids: a point has a value if no vertex of its cell lacks a value."""
        grid = self._grids[numbers]
        size = grid["size"].astype(np.int64)
        position = (points[rows] - grid["lower"]) * grid["cells"][:, None]
        low = np.clip(position.astype(np.int64), 0, size - 2)
        weight = np.clip(position - low, 0, 1).astype(np.float32)
        value, is_complete = np.zeros(len(rows), np.float32), np.ones(len(rows), bool)
        for corner in np.ndindex(2, 2, 2):
            cell = low + corner
            offset = (cell[:, 2] * size[:, 1] + cell[:, 1]) * size[:, 0] + cell[:, 0]
            corner_value = self._values[grid["offset"] + offset]
            value += np.where(corner, weight, 1 - weight).prod(1) * corner_value
            is_complete &= ~np.isnan(corner_value)
        out[rows[is_complete]] = value[is_complete]
        return is_complete


def _corners(mesh: Mesh | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the vertices of all elements, (n, 8) padded with -1, and the positions of vertices, (v, 3) float64."""
    if mesh is None:
        return np.zeros((0, 8), np.int32), np.zeros((0, 3))
    elements = [mesh.tets, mesh.pyramids, mesh.wedges, mesh.hexes]
    padded = [np.pad(corners, ((0, 0), (0, 8 - corners.shape[1])), constant_values=-1) for corners in elements]
    return np.concatenate(padded).astype(np.int32), mesh.vertices.astype(float)


def _grid_boxes(blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the first and last vertex of grids, two (n, 3) float64."""
    width = 2.0 ** blocks.level[:, None]
    return (blocks.lower + 0.5) * width, (blocks.lower + blocks.size - 0.5) * width


def _boxes(corners: np.ndarray, vertices: np.ndarray, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper corners of the boxes of all grids, then of all elements: two (n, 3) float64."""
    of_elements = vertices[np.where(corners < 0, corners[:, :1], corners)] if len(corners) else np.zeros((0, 1, 3))
    low, high = (
        np.concatenate(end) for end in zip(_grid_boxes(blocks), (of_elements.min(1), of_elements.max(1)), strict=True)
    )
    if not len(low):
        raise ValueError("there is no grid and no element with a volume")
    if not np.isfinite(low).all() or not np.isfinite(high).all():
        raise ValueError("a vertex of an element has a coordinate that is not finite")
    extent = (high.max(0) - low.min(0)).max()
    if extent > _LARGEST:
        raise ValueError(f"grids and elements reach over {extent:g} units, {_LARGEST:g} at most")
    return low, high


def weights_of(corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return interpolation weights of the corners of elements at the origin; and whether it lies inside, (n,).

    `corners`: (n, corners, 3), in VTK's order. Elements may be turned inside out. Faces with four corners may be curved
    (bilinear); both elements at a face agree on its shape.
    """
    corners = np.asarray(corners, np.float64)
    if corners.shape[1] > 4:
        return _in_curved(corners)
    others, solid = _solved(corners[:, 1:] - corners[:, :1], -corners[:, 0])
    weights = np.concatenate([1 - others.sum(1, keepdims=True), others], 1)
    return weights, solid & (weights.min(1) >= -TOLERANCE)


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
        near = r[active[done]]
        top = np.ones_like(near)
        if count == 5:
            top[:, 0] = top[:, 1] = near[:, 2]
        elif count == 6:
            top[:, 0] = 1 - near[:, 1]
        inside[active[done]] = ((near >= -TOLERANCE) & (near <= top + TOLERANCE)).all(1)
        active = active[solid & ~done]
        if not len(active):
            break
    return _shape(r, count)[0], inside


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
