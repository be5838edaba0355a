"""If this fails, overlapping tiles are blended by wrong weights, or at a wrong place."""

import numpy as np
import pytest

from linumpy.gpu.oct import blend as blend_module
from linumpy.gpu.oct.blend import PlacedTile, blend_tiles
from tests.support.budget import some
from tests.support.gpu.emulator import emulated, needs_compiler

DTYPES = ["u2", "f4", "u1", "f8", "i2", "f2", "i4", "i8"]


def case(seed, most):
    """A box and tiles around and in it, some of which do not reach it."""
    rng = np.random.default_rng(seed)
    dtype, depth_axis = np.dtype(DTYPES[seed % len(DTYPES)]), int(rng.integers(3))
    depth, *tile = (int(n) for n in rng.integers(2, most, 3))
    size = [int(n) for n in rng.integers(1, most, 2)]
    shape = [0, 0, 0]
    lateral = [axis for axis in range(3) if axis != depth_axis]
    shape[depth_axis], shape[lateral[0]], shape[lateral[1]] = depth, *size
    tiles = []
    for _ in range(rng.integers(1, 6)):
        values = rng.gamma(2.0, 20.0, (depth, *tile))
        if dtype.kind == "f":
            values[rng.random(values.shape) < 0.02] = rng.choice([np.nan, np.inf])
        voxels = np.moveaxis(values.astype(dtype), 0, depth_axis)
        order = rng.permutation(3)
        voxels = np.ascontiguousarray(voxels.transpose(order)).transpose(np.argsort(order))
        corner = tuple(int(c) for c in rng.integers([-n for n in size], tile))
        fraction = tuple(float(f) for f in rng.choice([0, 0.25, 0.5, 0.875], 2))
        weights = rng.uniform(0.1, 5, tile).astype(np.float32)
        tiles.append(PlacedTile(voxels, (0, 0), corner, fraction, weights))
    return tiles, shape, depth_axis, dtype


def slow(tiles, shape, depth_axis, dtype):
    """The definition, one voxel after another."""
    lateral = [axis for axis in range(3) if axis != depth_axis]
    out = np.zeros([shape[depth_axis], *(shape[axis] for axis in lateral)])

    def sample(image, y, x):
        (i, fy), (j, fx) = (divmod(p, 1) for p in (y, x))
        i, j = int(i), int(j)
        near = [(a, b, wa * wb) for a, wa in ((i, 1 - fy), (i + 1, fy)) for b, wb in ((j, 1 - fx), (j + 1, fx))]
        return sum(float(image[a, b]) * w for a, b, w in near if w)

    for z, y, x in np.ndindex(*out.shape):
        parts = []
        for tile in tiles:
            place = [p + c + f for p, c, f in zip((y, x), tile.corner, tile.fraction, strict=True)]
            if all(0 <= p <= n - 1 for p, n in zip(place, tile.weights.shape, strict=True)):
                value = sample(np.moveaxis(tile.voxels, depth_axis, 0)[z], *place)
                if np.isfinite(value):
                    parts.append((sample(tile.weights, *place), value))
        if parts:
            out[z, y, x] = sum(w * v for w, v in parts) / sum(w for w, _ in parts)
    return np.moveaxis(out, 0, depth_axis)


def assert_near(got, expected, dtype, most=0.5001):
    assert got.dtype == dtype
    if dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=2e-3 if dtype == "f2" else 1e-5)
    else:  # what lies half way between two integers may be rounded either way
        assert np.abs(got.astype(np.float64) - expected).max() <= most


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("seed", range(24))
def test_same_as_the_definition(seed):
    arguments = case(seed, 9)
    assert_near(blend_tiles(*arguments, np), slow(*arguments), arguments[3])


@needs_compiler
@pytest.mark.parametrize("seed", some(range(40), lambda seed: seed < 2 * len(DTYPES)))
def test_the_kernel_does_the_same(monkeypatch, seed):
    arguments = case(seed, 40)
    monkeypatch.setattr(blend_module, "load", emulated)
    monkeypatch.setattr(blend_module, "is_device_array", lambda _: True)
    got = blend_tiles(*arguments, np)
    monkeypatch.undo()
    assert_near(got, blend_tiles(*arguments, np), arguments[3], 1)


def test_equal_voxels_stay_as_they_are_and_parts_of_tiles_suffice():
    rng = np.random.default_rng(0)
    volume = rng.normal(size=(3, 20, 30)).astype(np.float32)
    whole, part = rng.uniform(0.1, 9, (2, 20, 30)).astype(np.float32)
    tiles = [
        PlacedTile(volume, (0, 0), (5, 7), (0.0, 0.0), whole),
        PlacedTile(volume[:, 5:12, 7:20], (5, 7), (5, 7), (0.0, 0.0), part),
    ]
    np.testing.assert_array_equal(blend_tiles(tiles, (3, 7, 13), 0, volume.dtype, np), volume[:, 5:12, 7:20])
    assert not blend_tiles([], (3, 2, 2), 0, volume.dtype, np).any()
    with pytest.raises(TypeError, match="cannot be blended"):
        blend_tiles([], (3, 2, 2), 0, np.dtype("c8"), np)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_on_the_device(seed):
    import cupy

    tiles, *rest = case(seed, 120)
    moved = [PlacedTile(cupy.asarray(t.voxels), t.begin, t.corner, t.fraction, cupy.asarray(t.weights)) for t in tiles]
    assert_near(cupy.asnumpy(blend_tiles(moved, *rest, cupy)), blend_tiles(tiles, *rest, np), rest[2], 1)
