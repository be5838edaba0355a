"""If this fails, meshes fill other voxels than winding numbers say."""

import functools
import itertools

import numpy as np
import pytest

from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.grid import grid_of_box, make_grid
from linumpy.voxel.mesh import make_mesh
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu.cupy_on_host import install
from tests.support.oracles.voxel_reference import filled, on_surface, winding_numbers
from tests.support.oracles.voxel_shapes import BOX, CLOSED, FACES, box, moved, sphere, torus

BOUNDS = ((-6.0, -6.0, -6.0), (6.0, 6.0, 6.0))


@functools.cache
def winding_of(name, pitch):
    """The same for each backend."""
    vertices, triangles = CLOSED[name] if name in CLOSED else holed(name)
    grid = grid_of_box(BOUNDS, pitch)
    return winding_numbers(grid.shape, vertices, triangles, grid.origin, pitch)


@pytest.mark.parametrize(("name", "pitch"), matrix(CLOSED, [(0.5, 0.5, 0.5), (1.0, 0.75, 0.4)]))
def test_a_closed_mesh_is_where_it_winds(backend, name, pitch):
    vertices, triangles = CLOSED[name]
    found = backend.voxelize_mesh(vertices, triangles, BOUNDS, pitch)
    grid = grid_of_box(BOUNDS, pitch)
    winding = winding_of(name, pitch)
    assert found.shape == grid.shape
    clear = np.abs(winding - np.round(winding)) < 0.01  # not on the surface
    assert clear.mean() > 0.99
    assert np.array_equal(found[clear], np.round(winding[clear]) != 0)
    assert np.array_equal(found, Backend().voxelize_mesh(vertices, triangles, BOUNDS, pitch))
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


@functools.cache
def meshes_on_centres():
    """Meshes with where they wind, and what is not on their surface."""
    rng, made, box = np.random.default_rng(1), [], ((24,) * 3, (-12,) * 3, (1,) * 3)
    for shape in (sphere(1.0, 6), torus(1.0, 0.4, 8, 6)):
        for _ in range(4 if budget.SLOW else 2):
            vertices = np.round(shape[0] * rng.integers(4, 8) * 2) / 2 + rng.integers(-3, 4, 3) / 2 + 0.5
            mesh = box[0], vertices, shape[1], *box[1:]
            made.append((vertices, shape[1], winding_numbers(*mesh), ~on_surface(*mesh)))
    return made


def test_triangles_that_meet_in_centres_leave_no_gaps(backend):
    """Vertices and edges of a closed mesh on voxel centres, in every direction."""
    touched = 0
    for vertices, triangles, winding, clear in meshes_on_centres():
        found = backend.voxelize_mesh(vertices, triangles, ((-12,) * 3, (12,) * 3), 1)
        assert np.array_equal(found, Backend().voxelize_mesh(vertices, triangles, ((-12,) * 3, (12,) * 3), 1))
        assert not found[:, :, [0, -1]].any()
        touched += np.count_nonzero(~clear)
        assert np.array_equal(found[clear], np.round(winding[clear]) != 0)
    assert 50 < touched < 5000


@pytest.mark.parametrize(("name", "pitch"), matrix(["box", "sphere", "torus"], [(1.0, 0.75, 0.4), (0.5, 0.5, 0.5)]))
def test_a_shell(backend, name, pitch):
    """A mesh without one triangle: the voxels of its shell lie on it, and separate inside from outside."""
    vertices, triangles = sphere(4.6, 16) if name == "sphere" else CLOSED[name]
    small = np.linalg.norm(np.cross(*(vertices[triangles[:, i]] - vertices[triangles[:, 0]] for i in (1, 2))), axis=1)
    open_mesh = np.delete(triangles, small.argmin(), axis=0)
    shell = backend.voxelize_mesh(vertices, open_mesh, BOUNDS, pitch, fill_holes=False)
    scipy = Backend()
    assert np.array_equal(shell, scipy.voxelize_mesh(vertices, open_mesh, BOUNDS, pitch, fill_holes=False))
    whole = filled(shell)
    solid = scipy.voxelize_mesh(vertices, triangles, BOUNDS, pitch)
    distance = np.minimum(scipy.distance_transform(~solid, pitch), 9) + np.minimum(
        scipy.distance_transform(solid, pitch), 9
    )
    assert distance[shell].max() <= 1.5 * np.linalg.norm(pitch)
    if name == "sphere":  # the hole is smaller than a voxel
        assert not (solid & ~whole).any()


def with_t_junction(vertices, triangles):
    """The first triangle is two, which meet its neighbour in the middle of an edge."""
    a, b, c = triangles[0]
    vertices = np.concatenate([vertices, [(vertices[a] + vertices[b]) / 2]])
    middle = len(vertices) - 1
    return vertices, np.concatenate([triangles[1:], [(a, middle, c), (middle, b, c)]])


def without_orientation(vertices, triangles):
    """Without its first triangle, and each third one faces the other way."""
    mixed = triangles[1:].copy()
    mixed[::3] = mixed[::3, ::-1]
    return vertices, mixed


DEFECTS = {
    "a missing triangle": (lambda v, f: (v, f[1:]), "3 edges"),
    "missing triangles apart": (lambda v, f: (v, np.delete(f, [0, 17, 40], axis=0)), "edges"),
    "a triangle twice": (lambda v, f: (v, np.concatenate([f, f[5:6]])), "3 edges"),
    "a T-junction": (with_t_junction, "3 edges"),
    "loose triangles": (lambda v, f: (v[f[1:]].reshape(-1, 3), np.arange(3 * len(f) - 3).reshape(-1, 3)), "3 edges"),
    "no orientation": (without_orientation, "triangles faced the other way"),
    "inside out": (lambda v, f: (v, f[1:, ::-1]), "3 edges"),
}


@pytest.mark.parametrize("pitch", [(0.5, 0.5, 0.5), (1.0, 0.75, 0.4)])
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("shape", ["torus", "sphere"])
def test_a_small_defect_changes_no_voxel(backend, caplog, shape, defect, pitch):
    mesh = sphere(4.6, 12) if shape == "sphere" else torus(4.0, 1.5)
    right = Backend().voxelize_mesh(*mesh, BOUNDS, pitch)
    spoil, told = DEFECTS[defect]
    assert not caplog.records
    assert np.array_equal(backend.voxelize_mesh(*spoil(*mesh), BOUNDS, pitch), right)
    (record,) = caplog.records
    assert "not watertight" in record.getMessage()
    assert told in record.getMessage()


def holed(name):
    vertices, triangles = CLOSED["box"] if "box" in name else sphere(4.6, 12)
    middles = vertices[triangles].mean(axis=1) - vertices.mean(axis=0)
    if name == "box without two sides":  # its edge is not flat
        size = np.ptp(vertices, axis=0) / 2
        return vertices, triangles[~(np.abs(middles[:, [0, 2]] - size[[0, 2]]) < 1e-6).any(axis=1)]
    if name == "bowl":
        return vertices, triangles[middles[:, 2] < 1.0]
    if name == "sphere with a slit":
        return vertices, triangles[(np.abs(middles[:, 0]) > 0.7) | (middles[:, 2] < 0)]
    vertices, triangles = sphere(4.6, 8)
    keep = np.random.default_rng(5).random(len(triangles)) < (0.85 if name == "sieve" else 0.5)
    return vertices, triangles[keep]


@pytest.mark.parametrize(
    ("name", "pitch"),
    matrix(
        ["sphere with a slit", "box without two sides", "bowl", "sieve", "half a sieve"],
        [(1.0, 0.75, 0.4), (0.5, 0.5, 0.5)],
    ),
)
def test_a_mesh_with_large_holes_is_where_its_winding_number_is_above_a_half(backend, name, pitch):
    vertices, triangles = holed(name)
    found = backend.voxelize_mesh(vertices, triangles, BOUNDS, pitch)
    winding = winding_of(name, pitch)
    clear = np.abs(winding - 0.5) > (0.003 if "sieve" in name else 0.001)
    assert clear.mean() > 0.98
    assert np.array_equal(found[clear], winding[clear] > 0.5)
    assert found.any()
    mesh = make_mesh(backend.backend.xp, vertices, triangles, grid_of_box(BOUNDS, pitch))
    part = make_grid((7, *found.shape[1:]), BOUNDS[0], pitch, 10)
    assert np.array_equal(backend.voxelize(mesh, part), found[10:17])
    host = make_mesh(np, vertices, triangles, grid_of_box(BOUNDS, pitch))
    assert np.array_equal(Backend().voxelize(host, part), found[10:17])


def test_a_bowl_is_half_a_ball(backend, caplog):
    """By the formula of a ball; the share of its surface that is open is that of the disc, a third of the whole."""
    vertices, triangles = sphere(5.0, 40)
    bowl = triangles[vertices[triangles].mean(axis=1)[:, 2] < 0]
    found = backend.voxelize_mesh(vertices, bowl, BOUNDS, 0.5)
    z, y, x = np.indices(found.shape) * 0.5 - 5.75
    radius = np.sqrt(x**2 + y**2 + z**2)
    assert found[(radius < 4.97) & (z < 0)].all()
    assert not found[(radius > 5) | (z > 0)].any()
    assert "80 edges (1.7 %) are open" in caplog.text
    assert "triangles with 33 % of the surface" in caplog.text


def test_a_sheet_has_no_inside(backend):
    sheet = np.array([(-1.0, -1, 2.25), (7, -1, 2.25), (7, 7, 2.25), (-1, 7, 2.25)])
    assert not backend.voxelize_mesh(sheet, [(0, 1, 2), (0, 2, 3)], ((0, 0, 0), (5, 5, 5)), 1).any()


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
        for fill in (False, True):
            right = backend.voxelize(mesh, whole, fill_holes=fill)
            for start, stop in ((0, 1), (3, 9), (9, 24)):
                part = make_grid((stop - start, *whole.shape[1:]), whole.origin, whole.pitch, start)
                assert np.array_equal(backend.voxelize(mesh, part, fill_holes=fill), right[start:stop])


@pytest.mark.parametrize(
    ("vertices", "triangles", "message"),
    [
        (BOX[:, :2], FACES, r"vertices of shape \(8, 2\)"),
        (BOX, np.array(FACES, float), "triangles of shape .* float64"),
        (BOX, np.empty((0, 3), int), r"triangles of shape \(0, 3\)"),
        (BOX, [(0, 1, 8)], "refer to vertex 8, but there are 8"),
        (np.empty((0, 3)), [(0, 0, 0)], "refer to vertex 0, but there are 0"),
        (BOX, [(0, 1, -1)], "refer to vertex -1"),
        (BOX, np.array([(0, 1, 2**63 + 5)], np.uint64), "refer to vertex 9223372036854775813"),
        (np.where(np.arange(24).reshape(8, 3) == 7, np.nan, BOX), FACES, "vertices: number 2 is .* not finite"),
        (BOX * 1e9, FACES, "is it in µm"),
    ],
)
def test_invalid_meshes(backend, vertices, triangles, message):
    with pytest.raises(ValueError, match=message):
        backend.voxelize_mesh(vertices, triangles, BOUNDS, 1)


@pytest.mark.parametrize("bounds", [((0, 0, 0), (1, 1, 0)), 5, ((0, 0, 0),), ((0, 0, 0), (1, np.inf, 1))])
def test_invalid_boxes(backend, bounds):
    with pytest.raises(ValueError, match="bbox"):
        backend.voxelize_mesh(BOX, FACES, bounds, 1)


def test_a_box_of_too_many_voxels(backend):
    with pytest.raises(ValueError, match=r"bbox=.* is 1e\+10 voxels long, more than 1073741824: is pitch=1e-06 right"):
        backend.voxelize_mesh(BOX, FACES, ((0, 0, 0), (1e4, 1, 1)), 1e-6)


def test_the_last_planes_that_a_volume_may_have(backend):
    """Kernels compute twice the index of a plane in int32."""
    offset, shape = 2**30 - 9, (9, 8, 7)
    grid, low = make_grid(shape, (0, 0, 0), 1, offset), make_grid(shape, (0, 0, 0), 1)
    vertices, triangles = moved(sphere(3.0), (3.6, 4.1, 4.2))
    xp = backend.backend.xp
    for faces in (triangles, triangles[1:]):
        mesh = make_mesh(xp, vertices + np.array([0, 0, offset]), faces, grid)
        right = Backend().voxelize(make_mesh(np, vertices, faces, low), low, fill_holes=False)
        assert np.array_equal(backend.voxelize(mesh, grid, fill_holes=False), right)
        assert right.any()


def test_arrays_on_the_device_for_the_host(monkeypatch):
    cupy = install(monkeypatch)
    with pytest.raises(TypeError, match="vertices is on the device, but this backend works on the host"):
        Backend().voxelize_mesh(cupy.asarray(BOX), FACES, BOUNDS, 1)
