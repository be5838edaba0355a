"""Meshes: against winding numbers by solid angles, exact boxes, and each backend against SciPy's voxel for voxel."""

import itertools

import numpy as np
import pytest
from slow import filled, on_surface, winding_numbers

from linumpy.voxel.grid import grid_of_box, make_grid
from linumpy.voxel.mesh import make_mesh
from linumpy.voxel.scipy_backend import ScipyBackend

_FACES = [(0, 2, 1), (0, 3, 2), (4, 5, 6), (4, 6, 7), (0, 1, 5), (0, 5, 4), (1, 2, 6), (1, 6, 5)]
_FACES += [(2, 3, 7), (2, 7, 6), (3, 0, 4), (3, 4, 7)]
BOX = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)], float)


def box(low, high):
    return np.array(low) + BOX * (np.array(high) - low), np.array(_FACES)


def torus(major, minor, n=14, m=8):
    u, v = np.meshgrid(np.arange(n) * 2 * np.pi / n, np.arange(m) * 2 * np.pi / m, indexing="ij")
    x, y = ((major + minor * np.cos(v)) * trig(u) for trig in (np.cos, np.sin))
    points = np.stack([x, y, minor * np.sin(v)], axis=-1).reshape(-1, 3)
    faces = []
    for i, j in itertools.product(range(n), range(m)):
        a, b = i * m + j, (i + 1) % n * m + j
        c, d = i * m + (j + 1) % m, (i + 1) % n * m + (j + 1) % m
        faces += [(a, b, c), (b, d, c)]
    return points, np.array(faces)


def sphere(radius, n=9):
    """Rings of triangles between two poles."""
    rings = [np.array([[0, 0, radius]])]
    for k in range(1, n):
        t, p = np.pi * k / n, np.arange(2 * n) * np.pi / n
        rings.append(
            radius * np.stack([np.sin(t) * np.cos(p), np.sin(t) * np.sin(p), np.full(2 * n, np.cos(t))], axis=1)
        )
    rings.append(np.array([[0, 0, -radius]]))
    faces, start = [], 1
    for i in range(2 * n):
        faces.append((0, 1 + i, 1 + (i + 1) % (2 * n)))
    for _ in range(n - 2):
        for i in range(2 * n):
            a, b = start + i, start + (i + 1) % (2 * n)
            faces += [(a, a + 2 * n, b), (b, a + 2 * n, b + 2 * n)]
        start += 2 * n
    last = start + 2 * n
    faces += [(start + i, last, start + (i + 1) % (2 * n)) for i in range(2 * n)]
    return np.concatenate(rings), np.array(faces)


def joined(*meshes):
    count, points, faces = 0, [], []
    for vertices, triangles in meshes:
        points.append(vertices)
        faces.append(triangles + count)
        count += len(vertices)
    return np.concatenate(points), np.concatenate(faces)


def moved(mesh, shift):
    return mesh[0] + np.array(shift), mesh[1]


def inside_out(mesh):
    return mesh[0], mesh[1][:, ::-1]


CLOSED = {
    "box": box((-3.1, -2.2, -4.3), (3.7, 2.9, 1.4)),
    "sphere": moved(sphere(4.6), (0.11, -0.07, 0.03)),
    "torus": moved(torus(4.1, 1.6), (0.013, 0.027, -0.31)),
    "two that overlap": joined(box((-4.1, -3.2, -2.3), (1.2, 1.3, 1.4)), box((-1.7, -1.6, -1.5), (3.8, 3.9, 3.6))),
    "one in another": joined(moved(sphere(4.9), (0.1, 0.2, 0.3)), moved(sphere(2.2), (0.03, 0.05, 0.01))),
    "a cavity": joined(box((-4.1, -4.2, -4.3), (4.4, 4.5, 4.6)), inside_out(box((-1.2, -1.3, -1.4), (1.3, 1.2, 1.1)))),
    "a bow tie": joined(box((-4.1, -3.2, -2.3), (0.1, 1.3, 1.4)), inside_out(box((0.1, -1.6, -1.5), (3.8, 3.9, 3.6)))),
}  # fmt: skip
BOUNDS = ((-6.0, -6.0, -6.0), (6.0, 6.0, 6.0))


@pytest.mark.parametrize("pitch", [(0.5, 0.5, 0.5), (1.0, 0.75, 0.4)])
@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_mesh_is_where_it_winds(backend, name, pitch):
    vertices, triangles = CLOSED[name]
    found = backend.voxelize_mesh(vertices, triangles, BOUNDS, pitch)
    grid = grid_of_box(BOUNDS, pitch)
    winding = winding_numbers(grid.shape, vertices, triangles, grid.origin, pitch)
    assert found.shape == grid.shape
    clear = np.abs(winding - np.round(winding)) < 0.01  # not on the surface
    assert clear.mean() > 0.99
    assert np.array_equal(found[clear], np.round(winding[clear]) != 0)
    assert np.array_equal(found, ScipyBackend().voxelize_mesh(vertices, triangles, BOUNDS, pitch))
    assert found.any()


def test_faces_on_centres_belong_to_one_side(backend):
    """A face that goes through voxel centres takes them in at the low side of a box, and not at the high one."""
    vertices, triangles = box((1.5, 2.5, 0.5), (5.5, 4.5, 3.5))
    right = np.zeros((6, 7, 8), bool)
    right[0:3, 2:4, 1:5] = True
    assert np.array_equal(backend.voxelize_mesh(vertices, triangles, ((0, 0, 0), (8, 7, 6)), 1), right)
    rng = np.random.default_rng(0)
    for _ in range(20):  # boxes that tile space take every voxel once
        cut = rng.integers(1, 11, 3) / 2
        count = np.zeros((6, 6, 6), int)
        for corner in itertools.product((0, 1), repeat=3):
            low = np.where(corner, cut, -1)
            count += backend.voxelize_mesh(*box(low, np.where(corner, 7, cut)), ((0, 0, 0), (6, 6, 6)), 1)
        assert (count == 1).all()


def test_triangles_that_meet_in_centres_leave_no_gaps(backend):
    """Vertices and edges of a closed mesh on voxel centres, in every direction."""
    rng = np.random.default_rng(1)
    for shape in (sphere(1.0, 6), torus(1.0, 0.4, 8, 6)):
        for _ in range(4):
            vertices = np.round(shape[0] * rng.integers(4, 8) * 2) / 2 + rng.integers(-3, 4, 3) / 2 + 0.5
            found = backend.voxelize_mesh(vertices, shape[1], ((-12,) * 3, (12,) * 3), 1)
            assert np.array_equal(found, ScipyBackend().voxelize_mesh(vertices, shape[1], ((-12,) * 3, (12,) * 3), 1))
            assert not found[:, :, [0, -1]].any()
            winding = winding_numbers(found.shape, vertices, shape[1], (-12, -12, -12), (1, 1, 1))
            clear = ~on_surface(found.shape, vertices, shape[1], (-12, -12, -12), (1, 1, 1))
            assert 0 < np.count_nonzero(~clear) < 1000
            assert np.array_equal(found[clear], np.round(winding[clear]) != 0)


@pytest.mark.parametrize("pitch", [(0.5, 0.5, 0.5), (1.0, 0.75, 0.4)])
@pytest.mark.parametrize("name", ["box", "sphere", "torus"])
def test_a_shell(backend, name, pitch):
    """A mesh without one triangle: its voxels lie on it, separate inside from outside, and are filled."""
    vertices, triangles = sphere(4.6, 16) if name == "sphere" else CLOSED[name]
    small = np.linalg.norm(np.cross(*(vertices[triangles[:, i]] - vertices[triangles[:, 0]] for i in (1, 2))), axis=1)
    open_mesh = np.delete(triangles, small.argmin(), axis=0)
    shell = backend.voxelize_mesh(vertices, open_mesh, BOUNDS, pitch, fill_holes=False)
    scipy = ScipyBackend()
    assert np.array_equal(shell, scipy.voxelize_mesh(vertices, open_mesh, BOUNDS, pitch, fill_holes=False))
    whole = backend.voxelize_mesh(vertices, open_mesh, BOUNDS, pitch)
    assert np.array_equal(whole, filled(shell))
    solid = scipy.voxelize_mesh(vertices, triangles, BOUNDS, pitch)
    distance = np.minimum(scipy.distance_transform(~solid, pitch), 9) + np.minimum(
        scipy.distance_transform(solid, pitch), 9
    )
    assert distance[shell].max() <= 1.5 * np.linalg.norm(pitch)
    if name == "sphere":  # the hole is smaller than a voxel
        assert not (solid & ~whole).any()


def test_a_shell_of_one_plane(backend):
    """A square sheet at a height within a layer of voxels is that layer; where it lies between two, the upper one."""
    sheet = np.array([(-1.0, -1, 2.25), (7, -1, 2.25), (7, 7, 2.25), (-1, 7, 2.25)])
    for height, layer in ((2.25, 2), (2.999, 2), (3.0, 3)):
        sheet[:, 2] = height
        found = backend.voxelize_mesh(sheet, [(0, 1, 2), (0, 2, 3)], ((0, 0, 0), (5, 5, 5)), 1, fill_holes=False)
        assert np.array_equal(np.unique(np.nonzero(found)[0]), [layer])
        assert found[layer].all()


def test_loose_triangles_and_mixed_orientation(backend):
    """As STL files have them; and faces that do not agree on a side are even and odd."""
    vertices, triangles = CLOSED["torus"]
    right = backend.voxelize_mesh(vertices, triangles, BOUNDS, 0.5)
    loose = vertices[triangles].reshape(-1, 3), np.arange(3 * len(triangles)).reshape(-1, 3)
    assert np.array_equal(backend.voxelize_mesh(*loose, BOUNDS, 0.5), right)
    mixed = triangles.copy()
    mixed[::3] = mixed[::3, ::-1]
    assert make_mesh(np, vertices, mixed, make_grid((1, 1, 1), (0, 0, 0), 1)).kind == "closed"
    assert np.array_equal(backend.voxelize_mesh(vertices, mixed, BOUNDS, 0.5), right)


def test_a_mesh_far_larger_than_the_grid_and_one_outside(backend):
    assert backend.voxelize_mesh(*box((-1e5, -1e5, -1e5), (1e5, 1e5, 1e5)), ((0, 0, 0), (5, 6, 7)), 1).all()
    assert not backend.voxelize_mesh(*box((10, 10, 10), (12, 12, 12)), ((0, 0, 0), (5, 6, 7)), 1).any()
    found = backend.voxelize_mesh(*box((-1e5, -1e5, 2), (1e5, 1e5, 4)), ((0, 0, 0), (5, 6, 7)), 1)
    assert found[2:4].all()
    assert found.sum() == 2 * 30


def test_boxes_of_the_volume_are_the_volume(backend):
    vertices, triangles = CLOSED["torus"]
    for faces in (triangles, triangles[1:]):
        whole = grid_of_box(BOUNDS, 0.5)
        mesh = make_mesh(backend.backend.xp, vertices, faces, whole)
        right = backend.voxelize(mesh, whole, fill_holes=False)
        for start, stop in ((0, 1), (3, 9), (9, 24)):
            part = make_grid((stop - start, *whole.shape[1:]), whole.origin, whole.pitch, start)
            assert np.array_equal(backend.voxelize(mesh, part, fill_holes=False), right[start:stop])


@pytest.mark.parametrize(
    ("vertices", "triangles", "message"),
    [
        (BOX[:, :2], _FACES, r"vertices of shape \(8, 2\)"),
        (BOX, np.array(_FACES, float), "triangles of shape .* float64"),
        (BOX, np.empty((0, 3), int), r"triangles of shape \(0, 3\)"),
        (BOX, [(0, 1, 8)], "vertex 8 is named, but there are 8"),
        (BOX, [(0, 1, -1)], "vertex -1 is named"),
        (np.where(np.arange(24).reshape(8, 3) == 7, np.nan, BOX), _FACES, "vertices: number 2 is .* no place"),
        (BOX * 1e9, _FACES, "is it in µm"),
    ],
)
def test_what_is_no_mesh(backend, vertices, triangles, message):
    with pytest.raises(ValueError, match=message):
        backend.voxelize_mesh(vertices, triangles, BOUNDS, 1)


@pytest.mark.parametrize("bounds", [((0, 0, 0), (1, 1, 0)), 5, ((0, 0, 0),), ((0, 0, 0), (1, np.inf, 1))])
def test_what_is_no_box(backend, bounds):
    with pytest.raises(ValueError, match="bbox"):
        backend.voxelize_mesh(BOX, _FACES, bounds, 1)
