"""If this fails, capsules hold other voxels than exact fractions say."""

import itertools

import numpy as np
import pytest

from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.capsules import capsule_table, polyline_table
from tests.support.oracles.voxel_reference import in_capsule

SHAPE = (9, 10, 21)

#: Ends (x, y, z), radius, origin, pitch: centres lie on the surface of most of these, exactly.
EXACT = {
    "along x, half a voxel wide": ((2.5, 4.5, 4.5), (15.5, 4.5, 4.5), 1, (0, 0, 0), (1, 1, 1)),
    "radius 5 reaches (3, 4)": ((10.5, 5.5, 4.5), (10.5, 5.5, 4.5), 5, (0, 0, 0), (1, 1, 1)),
    "diagonal": ((0.5, 0.5, 0.5), (16.5, 8.5, 8.5), 2, (0, 0, 0), (1, 1, 1)),
    "between voxels": ((2, 4, 4), (15, 4, 4), 0.5, (0, 0, 0), (1, 1, 1)),
    "anisotropic": ((-10.0, 3.0, -2.0), (5.0, 9.0, 4.0), 2.5, (-12, 1.5, -4), (1.5, 1, 0.75)),
    "no length": ((7.25, 5.0, 4.0), (7.25, 5.0, 4.0), 2.5, (0, 0, 0), (0.75, 1, 1)),
    "no radius, through centres": ((0.5, 4.5, 4.5), (20.5, 4.5, 4.5), 0, (0, 0, 0), (1, 1, 1)),
    "no radius, past centres": ((0.5, 4.75, 4.5), (20.5, 4.75, 4.5), 0, (0, 0, 0), (1, 1, 1)),
    "outside": ((-40, 0, 0), (-30, 0, 0), 5, (0, 0, 0), (1, 1, 1)),
    "from far through it": ((-4000, 5, 4), (4000, 5, 4), 3, (0, 0, 0), (1, 1, 1)),
    "all of it": ((5, 5, 5), (6, 6, 6), 100, (0, 0, 0), (1, 1, 1)),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_capsule_is_exact(backend, name):
    p0, p1, radius, origin, pitch = EXACT[name]
    mask = np.random.default_rng(0).random(SHAPE) < 0.9
    right = in_capsule(SHAPE, p0, p1, radius, origin, pitch)
    was = mask.copy()
    removed = backend.subtract_swept_capsule(mask, p0, p1, radius, pitch=pitch, origin=origin)
    assert np.array_equal(mask, was & ~right)
    assert int(removed) == np.count_nonzero(was & right)


def test_z_offset_is_global(backend):
    whole = np.ones((40, 8, 9), bool)
    p0, p1 = (1.3, 2.2, 3.1), (7.9, 6.1, 35.7)
    options = {"pitch": (1.1, 0.9, 1.3), "origin": (-0.3, 0.2, -4.1)}
    total = backend.subtract_swept_capsule(whole, p0, p1, 1.7, **options)
    parts = np.ones_like(whole)
    removed = 0
    for start, stop in [(0, 1), (1, 14), (14, 37), (37, 40)]:
        part = parts[start:stop].copy()
        removed += backend.subtract_swept_capsule(part, p0, p1, 1.7, z_offset=start, **options)
        parts[start:stop] = part
    assert np.array_equal(parts, whole)
    assert removed == total == np.count_nonzero(~whole)


def test_the_last_planes_that_a_volume_may_have(backend):
    """Indices of planes are int32 in kernels."""
    offset = 2**30 - 4
    mask, right = (np.ones((4, 5, 6), bool) for _ in range(2))
    p0, p1 = (0.5, 0.5, offset + 1.0), (4.5, 3.5, offset + 3.0)
    removed = backend.subtract_swept_capsule(mask, p0, p1, 1.2, pitch=1, z_offset=offset)
    Backend().subtract_swept_capsule(right, (0.5, 0.5, 1.0), (4.5, 3.5, 3.0), 1.2, pitch=1)
    assert np.array_equal(mask, right)
    assert removed == np.count_nonzero(~right) > 10


def test_points_and_radii_on_the_device(backend):
    """They are prepared on the host, as a structuring element is."""
    put = backend.backend.xp.asarray
    p0, p1, radius = np.array([(1.0, 1, 1), (4, 4, 2)]), np.array([(3.0, 1, 1), (5, 4, 2)]), np.array([1.0, 2.0])
    mask, right = (np.ones((3, 6, 7), bool) for _ in range(2))
    backend.subtract_swept_capsule(mask, put(p0), put(p1), put(radius), pitch=1)
    backend.subtract_swept_polyline(mask, put(p0), 0.7, pitch=1)
    Backend().subtract_swept_capsule(right, p0, p1, radius, pitch=1)
    Backend().subtract_swept_polyline(right, p0, 0.7, pitch=1)
    assert np.array_equal(mask, right)


@pytest.mark.parametrize("count", [1, 31, 33, 300])
def test_many_capsules(backend, count):
    """Many at once, with radii of their own, over several bricks: as SciPy's backend, one after another."""
    rng = np.random.default_rng(count)
    pitch, origin = (0.7, 1.3, 2.1), (100.0, -300.0, 7.0)
    shape = (33, 50, 70)
    extent = np.array(shape[::-1]) * pitch
    p0 = rng.uniform(-0.2, 1.2, (count, 3)) * extent + origin
    p1 = p0 + rng.normal(0, 9, (count, 3)) * (rng.random((count, 1)) < 0.9)
    radius = rng.choice([0.0, 0.7, 1.3, 3.1], count)
    mask, right = (np.ones(shape, bool) for _ in range(2))
    removed = backend.subtract_swept_capsule(mask, p0, p1, radius, pitch=pitch, origin=origin)
    one_by_one = sum(
        Backend().subtract_swept_capsule(right, a, b, r, pitch=pitch, origin=origin)
        for a, b, r in zip(p0, p1, radius, strict=True)
    )
    assert np.array_equal(mask, right)
    assert removed == one_by_one == np.count_nonzero(~right)


@pytest.mark.parametrize("near", [(0,), (31,), (32,), (199,), (0, 199), (33, 62, 97), ()])
def test_few_of_many_capsules_are_near(backend, near):
    """Wherever in the table of a brick, whose words hold 32 capsules each, they stand."""
    p0 = np.full((200, 3), 1e4)
    p0[list(near)] = np.random.default_rng(len(near)).uniform(2, 12, (len(near), 3))
    p1 = p0 + np.array([3, 2, 1])
    mask, right = (np.ones((18, 17, 20), bool) for _ in range(2))
    removed = backend.subtract_swept_capsule(mask, p0, p1, 2.2, pitch=1)
    for one in near:
        Backend().subtract_swept_capsule(right, p0[one], p1[one], 2.2, pitch=1)
    assert np.array_equal(mask, right)
    assert removed == np.count_nonzero(~right)
    assert bool(removed) == bool(near)


def test_several_passes(backend, monkeypatch):
    """More capsules than the table of bricks holds at once."""
    if backend.name == "scipy":
        pytest.skip("SciPy's backend has no table")
    from linumpy.voxel.backends import by_warp as warp_backend

    monkeypatch.setattr(warp_backend, "_TABLE_NBYTES", 1)
    test_many_capsules(backend, 300)


def test_a_polyline(backend):
    points = np.array([(1.0, 1, 1), (9, 2, 3), (12, 9, 5), (3, 9, 8)])
    mask, right = (np.ones((9, 11, 14), bool) for _ in range(2))
    backend.subtract_swept_polyline(mask, points, 1.2, pitch=1)
    for a, b in itertools.pairwise(points):
        right &= ~in_capsule(right.shape, a.tolist(), b.tolist(), 1.2, (0, 0, 0), (1, 1, 1))
    assert np.array_equal(mask, right)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 0), (1, 1), 1), r"p0 of shape \(2,\)"),
        (((0, 0, np.nan), (1, 1, 1), 1), "p0: point 0 is .* not finite"),
        (((0, 0, 0), (1, np.inf, 1), 1), "p1: point 0"),
        (((0, 0, 0), (1, 1, 1), -1), "radius=-1"),
        (((0, 0, 0), (1, 1, 1), np.nan), "radius=nan"),
        (([(0, 0, 0)] * 2, [(1, 1, 1)] * 3, 1), "p0 has 2 points and p1 3"),
        (([(0, 0, 0)] * 2, [(1, 1, 1)] * 2, (1, 2, 3)), r"radius of shape \(3,\)"),
        (((0, 0, 0), (1e300, 0, 0), 1), "capsule 0 .* too long"),
        (("abc", (1, 1, 1), 1), "p0='abc': real numbers in µm are needed"),
        (((0, 0, 0), (1, 1, 1j), 1), "p1=.*: real numbers"),
        (((0, 0, 0), (1, 1, 1), "a"), "radius='a': real numbers"),
        (((0, 0, 0), (1, 1, 1), True), "radius=True: real numbers"),
        (((0, 0, 0), (1, 1, 1), None), "radius=None: real numbers"),
    ],
)
def test_invalid_capsules(arguments, message):
    with pytest.raises(ValueError, match=message):
        capsule_table(*arguments)


@pytest.mark.parametrize("points", [[(0, 0, 0)], [0, 0, 0], [(0, 0)] * 3])
def test_invalid_polylines(points):
    with pytest.raises(ValueError, match="at least two points"):
        polyline_table(points, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pitch": 0}, "pitch=0"),
        ({"pitch": (1, 2)}, r"pitch=\(1, 2\)"),
        ({"pitch": 1, "origin": 3}, "origin=3"),
        ({"pitch": 1, "z_offset": -1}, "z_offset=-1"),
        ({"pitch": 1, "z_offset": 0.5}, "z_offset=0.5"),
        ({"pitch": 1, "z_offset": 2**30}, "with z_offset=1073741824: a volume has at most 1073741824 voxels"),
    ],
)
def test_invalid_grids(backend, options, message):
    with pytest.raises(ValueError, match=message):
        backend.subtract_swept_capsule(np.ones((2, 3, 4), bool), (0, 0, 0), (1, 1, 1), 1, **options)
