"""If this fails, masks on the host do not go through a device, or a script without `pitch` finds other voxels."""

import numpy as np
import pytest

from linumpy.device import to_host
from linumpy.voxel import Backend, VoxelSession, backend_of, ball, get_backend
from linumpy.voxel.backends import by_warp
from linumpy.voxel.backends import choose as backends
from tests.support.oracles.voxel_backends import needs_warp, on_host
from tests.support.oracles.voxel_shapes import torus

MASK = np.random.default_rng(3).random((9, 10, 11)) < 0.3
OTHER = np.random.default_rng(4).random(MASK.shape) < 0.5
TORUS = torus(4.0, 1.5)
BOUNDS = ((-6.0, -6.0, -6.0), (6.0, 6.0, 6.0))
SCIPY = Backend()

pytestmark = needs_warp

CALLS = {
    "boolean": lambda b, put: b.boolean("subtract", put(MASK), put(OTHER)),
    "boolean by name": lambda b, put: b.boolean("union", b=put(MASK), a=put(OTHER)),
    "dilate": lambda b, put: b.dilate(put(MASK), radius=1.5),
    "erode": lambda b, put: b.erode(put(MASK), np.ones((1, 2, 1), bool), border_value=True),
    "open": lambda b, put: b.open(mask=put(MASK), radius=1, pitch=1),
    "close": lambda b, put: b.close(put(MASK), radius=2.1),
    "fill_holes": lambda b, put: b.fill_holes(put(MASK)),
    "distance_transform": lambda b, put: b.distance_transform(put(MASK)),
    "connected_components": lambda b, put: b.connected_components(put(MASK), 26),
    "voxelize_mesh": lambda b, put: b.voxelize_mesh(put(TORUS[0]), put(TORUS[1]), BOUNDS, 0.5),
}


@pytest.fixture
def moving(monkeypatch):
    """The backend that copies masks to a device, which here stands in for a GPU."""
    return on_host(monkeypatch, "TransferBackend")


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", CALLS)
def test_host_arrays_come_back_as_host_arrays_equal_to_scipys(moving, name):
    right = as_tuple(CALLS[name](SCIPY, np.array))
    found = as_tuple(CALLS[name](moving, np.array))
    for one, other in zip(found, right, strict=True):
        assert type(one) is type(other)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", CALLS)
def test_device_arrays_stay_on_the_device(moving, name):
    right = as_tuple(CALLS[name](SCIPY, np.array))
    for one, other in zip(as_tuple(CALLS[name](moving, moving.xp.array)), right, strict=True):
        assert isinstance(one, (moving.xp.ndarray, int))
        np.testing.assert_array_equal(to_host(one), other)


def test_what_changes_in_place_changes_on_the_host(moving):
    right, found = np.ones((8, 9, 10), bool), np.ones((8, 9, 10), bool)
    count = SCIPY.subtract_swept_capsule(right, (1, 1, 1), (8, 7, 6), 2)
    removed = moving.subtract_swept_capsule(found, (1, 1, 1), (8, 7, 6), 2)
    assert (type(removed), removed) == (type(count), count)
    assert count > 0
    assert np.array_equal(found, right)
    points = [(9, 1, 1), (1, 8, 2), (3, 3, 7)]
    assert moving.subtract_swept_polyline(found, points, 1.0) == SCIPY.subtract_swept_polyline(right, points, 1.0)
    assert np.array_equal(found, right)
    out = np.zeros(MASK.shape, bool)
    assert moving.boolean("union", MASK, OTHER, out=out) is out
    assert np.array_equal(out, MASK | OTHER)
    both = MASK.copy()
    assert moving.boolean("intersect", both, OTHER, both) is both
    assert np.array_equal(both, MASK & OTHER)


def test_out_lies_where_the_caller_has_it(moving):
    a, b = moving.xp.array(MASK), moving.xp.array(OTHER)
    out = np.zeros(MASK.shape, bool)
    assert moving.boolean("subtract", a, b, out) is out
    assert np.array_equal(out, MASK & ~OTHER)
    there = moving.xp.zeros(MASK.shape, bool)
    assert moving.boolean("union", MASK, OTHER, there) is there
    assert np.array_equal(to_host(there), MASK | OTHER)


def test_read_only_and_wrong_masks_are_refused_as_by_scipy(moving):
    fixed = MASK.copy()
    fixed.flags.writeable = False
    for backend in (moving, SCIPY):
        with pytest.raises(ValueError, match="mask is read-only"):
            backend.subtract_swept_capsule(fixed, (1, 1, 1), (2, 2, 2), 1)
        with pytest.raises(ValueError, match="out is read-only"):
            backend.boolean("union", MASK, OTHER, out=fixed)
        with pytest.raises(TypeError, match=r"mask of shape .* bool or integers"):
            backend.fill_holes(MASK.astype(np.float32))
        with pytest.raises(TypeError, match="mask is list"):
            backend.dilate([[[True]]], radius=1)
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            backend.dilate(MASK, radius=1, width=3)
    assert np.array_equal(fixed, MASK)


def test_a_session_works_through_it(moving):
    right, found = MASK.copy(), MASK.copy()
    for mask, backend in ((right, SCIPY), (found, moving)):
        with VoxelSession(mask, backend=backend, slab_bytes=5000) as session:
            session.close(radius=1.5)
            session.boolean("subtract", OTHER)
            session.subtract_swept_capsule((1, 1, 1), (8, 7, 6), 2)
    assert np.array_equal(found, right)


def test_copies_are_logged_once(moving, caplog):
    by_warp._log_once.cache_clear()
    with caplog.at_level("INFO"):
        moving.fill_holes(moving.xp.array(MASK))
        assert not caplog.records
        moving.fill_holes(MASK)
        moving.dilate(MASK, radius=1)
    (record,) = caplog.records
    assert f"on NumPy arrays run on {moving.name}: each call copies the arrays there" in record.getMessage()


def test_unless_it_is_refused(monkeypatch):
    device = on_host(monkeypatch)
    with pytest.raises(TypeError, match="on the host, but this backend is"):
        device.fill_holes(MASK)
    monkeypatch.setattr(backends, "why_no_cuda", lambda: None)
    monkeypatch.setattr(backends, "why_no_warp", lambda: None)
    backend = get_backend("cuda", transfer=False)
    assert type(backend) is type(backend_of(device.xp.array(MASK))) is by_warp.WarpBackend
    assert type(get_backend("auto")) is by_warp.TransferBackend
    assert type(get_backend("cpu")) is type(backend_of(MASK)) is Backend


def test_a_pitch_that_is_not_given_is_1(backend):
    assert np.array_equal(backend.dilate(MASK, radius=1.5), SCIPY.dilate(MASK, radius=1.5, pitch=1))
    assert np.array_equal(backend.close(MASK, radius=1.5), SCIPY.close(MASK, radius=1.5, pitch=(1, 1, 1)))
    assert np.array_equal(backend.distance_transform(MASK), SCIPY.distance_transform(MASK, 1))
    assert np.array_equal(ball(2.5).mask, ball(2.5, 1.0).mask)
    mask, right = MASK.copy(), MASK.copy()
    backend.subtract_swept_polyline(mask, [(1, 2, 3), (7, 6, 5)], 1.5)
    SCIPY.subtract_swept_polyline(right, [(1, 2, 3), (7, 6, 5)], 1.5, pitch=1, origin=(0, 0, 0))
    assert np.array_equal(mask, right)
    assert np.array_equal(backend.voxelize_mesh(*TORUS, BOUNDS), SCIPY.voxelize_mesh(*TORUS, BOUNDS, 1.0))


def test_a_trimesh_in_place_of_vertices_and_triangles(backend, monkeypatch):
    trimesh = pytest.importorskip("trimesh", reason="trimesh is not installed: pip install trimesh")
    vertices, triangles = TORUS
    mesh = trimesh.Trimesh(vertices, triangles, process=False)
    right = SCIPY.voxelize_mesh(vertices, triangles, BOUNDS, 0.5)
    assert right.any()
    assert np.array_equal(backend.voxelize_mesh(mesh, BOUNDS, 0.5), right)
    assert np.array_equal(backend.voxelize_mesh(mesh, bbox=BOUNDS, pitch=0.5, fill_holes=False), right)
    moved = on_host(monkeypatch, "TransferBackend").voxelize_mesh(mesh, BOUNDS, pitch=0.5)
    assert type(moved) is np.ndarray
    assert np.array_equal(moved, right)
    empty, full = np.zeros((12, 12, 12), bool), np.ones((12, 12, 12), bool)
    for mask, operation in ((empty, "union"), (full, "subtract")):
        with VoxelSession(mask, BOUNDS[0], backend=SCIPY) as session:
            session.voxelize_mesh(mesh, operation)
    assert np.array_equal(empty, SCIPY.voxelize_mesh(vertices, triangles, BOUNDS))
    assert np.array_equal(full, ~empty)


@pytest.mark.gpu
def test_on_a_device(cupy):
    backend = get_backend("cuda")
    for name, call in CALLS.items():
        for one, other in zip(as_tuple(call(backend, np.array)), as_tuple(call(SCIPY, np.array)), strict=True):
            assert type(one) is type(other), name
            np.testing.assert_array_equal(one, other, err_msg=name)
