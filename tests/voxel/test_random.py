"""If this fails, Warp's kernels give other voxels than SciPy's backend."""

import numpy as np
import pytest
from scipy import ndimage

from linumpy.voxel import VoxelSession
from linumpy.voxel.backends.operations import Backend
from tests.support.oracles.voxel_backends import Tried, needs_warp
from tests.support.oracles.voxel_shapes import CLOSED

pytestmark = needs_warp
SCIPY = Backend()
PITCHES = np.array([(1, 1, 1), (0.1, 0.3, 0.7), (2, 1, 0.5), (1e-3, 1e3, 1)])
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))]
#: Of one seed.
TIMES = 8


@pytest.fixture(params=["warp-cpu", pytest.param("warp-cuda", marks=pytest.mark.gpu)])
def warp(request, monkeypatch):
    return Tried(request.param, monkeypatch)


def random_shape(rng):
    return tuple(rng.integers(1, (12, 12, 140)).tolist())


def random_mask(rng, shape):
    return rng.random(shape) < rng.choice([0, 0.01, 0.3, 0.9, 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_structuring_elements(warp, seed):
    """Of any size along each axis, also larger than the mask, and with any of their voxels true."""
    rng = np.random.default_rng(seed)
    for _ in range(TIMES):
        mask = random_mask(rng, random_shape(rng))
        element = rng.random(rng.integers(1, (7, 7, 100) if rng.random() < 0.2 else (5, 6, 9))) < rng.choice(
            [0.05, 0.9]
        )
        element.flat[rng.integers(element.size)] = True
        for border in (False, True):
            expected = ndimage.binary_dilation(mask, element, border_value=border)
            assert np.array_equal(warp.dilate(mask, element, border_value=border), expected)
            expected = ndimage.binary_erosion(mask, element, border_value=border)
            assert np.array_equal(warp.erode(mask, element, border_value=border), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_balls(warp, seed):
    rng = np.random.default_rng(seed)
    for _ in range(TIMES):
        mask, pitch = random_mask(rng, random_shape(rng)), rng.choice(PITCHES[:3])
        radius = float(rng.choice([0, 0.5, 1, 2.2])) * pitch.max()
        for method in ("dilate", "erode", "open", "close"):
            expected = getattr(SCIPY, method)(mask, radius=radius, pitch=pitch)
            assert np.array_equal(getattr(warp, method)(mask, radius=radius, pitch=pitch), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_capsules(warp, seed):
    """Without length or radius, outside, and on half voxels, where centres lie on surfaces."""
    rng = np.random.default_rng(seed)
    for _ in range(TIMES):
        shape, pitch, count = random_shape(rng), rng.choice(PITCHES), int(rng.integers(1, 80))
        origin, extent = rng.normal(0, 100, 3) * rng.choice([0, 1, 1e4]), np.array(shape[::-1]) * pitch
        p0 = rng.uniform(-0.5, 1.5, (count, 3)) * extent
        p1 = p0 + rng.normal(0, 1, (count, 3)) * extent * (rng.random((count, 1)) < 0.8)
        if rng.random() < 0.5:
            p0, p1 = (np.round(one / pitch * 2) / 2 * pitch for one in (p0, p1))
        radius = rng.integers(0, 5, count) / 2 * pitch.min()
        mask = random_mask(rng, shape)
        right = mask.copy()
        options = {"pitch": pitch, "origin": origin, "z_offset": int(rng.integers(0, 50))}
        removed = warp.subtract_swept_capsule(mask, p0 + origin, p1 + origin, radius, **options)
        assert removed == SCIPY.subtract_swept_capsule(right, p0 + origin, p1 + origin, radius, **options)
        assert np.array_equal(mask, right)


def random_mesh(rng, extent, pitch):
    """Triangles anywhere, some without area or twice the same; or a closed mesh, or that with holes in it."""
    kind = rng.integers(3)
    if kind == 0:
        count = int(rng.integers(3, 30))
        vertices, triangles = (
            rng.normal(0.5, 0.5, (count, 3)) * extent,
            rng.integers(0, count, (rng.integers(1, 40), 3)),
        )
        triangles = np.concatenate([triangles, triangles[:2]])
    else:
        vertices, triangles = CLOSED[rng.choice(list(CLOSED))]
        vertices = (vertices / 10 + 0.5 + rng.normal(0, 0.1, 3)) * extent
        if kind == 2:
            triangles = triangles[1:][rng.random(len(triangles) - 1) < 0.9]
    if rng.random() < 0.4:
        vertices = np.round(vertices / pitch * 2) / 2 * pitch
    return vertices, triangles


@pytest.mark.parametrize("seed", SEEDS)
def test_meshes(warp, seed):
    rng = np.random.default_rng(seed)
    for _ in range(TIMES):
        shape, pitch = random_shape(rng), rng.choice(PITCHES)
        extent = np.array(shape[::-1]) * pitch
        mesh, box = random_mesh(rng, extent, pitch), (np.zeros(3), extent)
        for fill in (False, True):
            expected = SCIPY.voxelize_mesh(*mesh, box, pitch, fill_holes=fill)
            assert np.array_equal(warp.voxelize_mesh(*mesh, box, pitch, fill_holes=fill), expected)


def queue(session, rng, extent, pitch):
    """Queue four operations, each with numbers of its own."""
    for method in rng.choice(["dilate", "erode", "open", "close", "track", "mesh", "element"], 4):
        if method == "track":
            session.subtract_swept_polyline(rng.uniform(0, 1, (3, 3)) * extent, pitch.max())
        elif method == "mesh":
            vertices, triangles = CLOSED["torus"]
            session.voxelize_mesh((vertices / 12 + 0.5) * extent, triangles, rng.choice(["union", "subtract"]))
        elif method == "element":
            session.dilate(rng.random((4, 2, 3)) < 0.95)
        else:
            getattr(session, method)(radius=1.3 * pitch.max())


@pytest.mark.parametrize("seed", SEEDS)
def test_sessions_of_any_slab_size(warp, seed):
    """Against SciPy's backend on the whole volume at once."""
    rng = np.random.default_rng(seed)
    shape, pitch = tuple(rng.integers(1, (30, 12, 40)).tolist()), rng.choice(PITCHES[:3])
    mask, extent = rng.random(shape) < 0.5, np.array(shape[::-1]) * pitch
    right = mask.copy()
    with VoxelSession(right, (0, 0, 0), pitch, backend=SCIPY) as session:
        queue(session, np.random.default_rng(seed), extent, pitch)
    for slab_bytes in (1, int(rng.integers(1, 20 * mask.size)), 2**30):
        for array in (mask.copy(), warp.put(mask)):
            with VoxelSession(array, (0, 0, 0), pitch, backend=warp.backend, slab_bytes=slab_bytes) as session:
                queue(session, np.random.default_rng(seed), extent, pitch)
            assert np.array_equal(array if isinstance(array, np.ndarray) else array.get(), right)
