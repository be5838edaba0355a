"""Tiles resampled each by itself: against ``resample_volume``, by the host's compiler, by NVRTC and on a device."""

import itertools

import numpy as np
import pytest
from emulator import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import compile_kernel

from linumpy.gpu import resample_tiles as room
from linumpy.gpu.interpolation import resample_volume
from linumpy.gpu.resample_tiles import kernel_spec, resample_tiles
from linumpy.plan.tile_axis import TileAxis

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4", "f8"]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


def volume_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(max(info.min, -(2**30)), min(info.max, 2**31), shape, endpoint=True).astype(dtype)


def by_kernel(volume, axes, dtype=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "load", emulated)
        patch.setattr(room, "is_device_array", lambda _: True)
        return resample_tiles(volume, axes, dtype)


def whole_tiles(tiles, tile, new_tile):
    return [TileAxis(n * t, t, m) for n, t, m in zip(tiles, tile, new_tile, strict=True)]


axes_of = st.lists(
    st.builds(TileAxis, st.integers(1, 23), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=3
)


@pytest.mark.parametrize("compute", [resample_tiles, pytest.param(by_kernel, marks=needs_compiler)])
@pytest.mark.parametrize("spacing", [20.0, 14.0, 47.0, 6.0, (10.0, 25.0, 5.0)])
def test_each_whole_tile_as_resample_volume_makes_it(compute, spacing):
    tile, tiles = (12, 10, 15), (1, 3, 2)
    volume = volume_of("f4", [n * t for n, t in zip(tiles, tile, strict=True)], 0)
    one, _ = resample_volume(volume[: tile[0], : tile[1], : tile[2]], (10.0, 10.0, 10.0), spacing)
    got = compute(volume, whole_tiles(tiles, tile, one.shape))
    for place in itertools.product(*map(range, tiles)):
        before, after = (
            tuple(slice(p * t, (p + 1) * t) for p, t in zip(place, size, strict=True)) for size in (tile, one.shape)
        )
        expected, _ = resample_volume(volume[before], (10.0, 10.0, 10.0), spacing)
        np.testing.assert_allclose(got[after], expected, rtol=1e-5, atol=1e-3)


@needs_compiler
@settings(max_examples=150)
@given(axes=axes_of, dtype=st.sampled_from(DTYPES), to=st.sampled_from([None, "f4", "u2"]), seed=st.integers(0, 2**32))
def test_the_kernel_as_scipy(axes, dtype, to, seed):
    volume = volume_of(dtype, [axis.size for axis in axes], seed)
    if to == "u2":  # SciPy does not say what becomes of what does not fit
        volume = np.abs(volume.astype("f8") % 60000).astype(dtype)
    got, expected = by_kernel(volume, axes, to), resample_tiles(volume, axes, to)
    assert got.dtype == expected.dtype == np.dtype(to or dtype)
    assert got.shape == expected.shape == tuple(axis.new_size for axis in axes)
    scale = float(np.abs(volume.astype("f8")).max(initial=1))
    tolerance = 2e-3 * scale if "f2" in (dtype, to) else max(2e-6 * scale, 1.0 if expected.dtype.kind != "f" else 0)
    assert np.abs(got.astype("f8") - expected.astype("f8")).max() <= tolerance


@pytest.mark.parametrize("compute", [resample_tiles, pytest.param(by_kernel, marks=needs_compiler)])
def test_tiles_do_not_bleed(compute):
    axes = [TileAxis(8, 8, 4), TileAxis(3 * 9 + 4, 9, 4), TileAxis(4 * 6, 6, 2)]
    volume = np.full([axis.size for axis in axes], 7.0, "f4")
    alone = volume.copy()
    volume[:, 9:18, 6:12] = np.nan
    volume[:, 27:, 18:] = 1e30
    got = compute(volume, axes)
    rest = np.ones(got.shape, bool)
    rest[:, 4:8, 2:4] = rest[:, 12:, 6:] = False
    np.testing.assert_allclose(got[rest], compute(alone, axes)[rest], rtol=1e-6)
    np.testing.assert_allclose(got[rest], 7.0, rtol=1e-6)
    assert np.isnan(got[:, 4:8, 2:4]).all()
    np.testing.assert_allclose(got[:, 12:, 6:], 1e30, rtol=1e-5)


@given(axes=axes_of)
def test_weights_stay_in_the_tile_and_add_up_to_one(axes):
    for axis in axes:
        taps, tiles = axis.taps(), list(axis.tiles())
        np.testing.assert_allclose(taps.weights.sum(axis=1), 1)
        assert tiles[-1][1].stop == axis.new_size == len(taps.first)
        assert [one for one, _ in tiles[:-1]] == [slice(s, s + axis.tile) for s in range(0, axis.size, axis.tile)][:-1]
        for before, after in tiles:
            assert (taps.first[after] >= before.start).all()
            assert ((taps.first + taps.count)[after] <= before.stop).all()
        for row, count in zip(taps.weights, taps.count, strict=True):
            assert row[count - 1] > 0
            assert not row[count:].any()


def test_a_ramp_stays_the_ramp_that_the_spacing_says():
    # Also in the last tile, which is cut short: its voxels lie where those of a whole tile would.
    axis = TileAxis(2 * 20 + 13, 20, 8)
    got = resample_tiles(np.arange(axis.size, dtype="f8"), [axis])
    places = (np.arange(axis.new_size) + 0.5) * 2.5 - 0.5
    inner = [2, 3, 4, 5, 10, 11, 12, 13, 18, 19]
    np.testing.assert_allclose(got[inner], places[inner], atol=0.02)
    assert axis.new_size == 8 + 8 + 5


@pytest.mark.parametrize("compute", [resample_tiles, pytest.param(by_kernel, marks=needs_compiler)])
def test_memory_in_any_order(compute):
    axes = [TileAxis(9, 9, 5), TileAxis(10, 5, 3), TileAxis(7, 3, 2)]
    volume = volume_of("u2", (7, 9, 10), 3)
    turned = volume.transpose(1, 2, 0)[:, ::-1]
    assert np.array_equal(compute(turned, axes), compute(np.ascontiguousarray(turned), axes))
    assert compute(turned, axes).flags.c_contiguous


def test_byte_order_and_tiles_that_stay():
    axes = [TileAxis(4, 2, 2), TileAxis(6, 3, 3)]
    volume = volume_of(">u2", (4, 6), 0)
    got = resample_tiles(volume, axes)
    assert got.dtype == np.dtype("=u2")
    assert got.dtype.isnative
    assert np.array_equal(got, volume)
    smaller = [TileAxis(4, 2, 1), TileAxis(6, 3, 3)]
    assert np.array_equal(resample_tiles(volume, smaller), resample_tiles(volume.astype("=u2"), smaller))


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"axes of \(4,\) voxels: the volume has \(5,\)"):
        resample_tiles(np.ones(5), [TileAxis(4, 2, 1)])
    for dtype in ("b1", "c8"):
        with pytest.raises(TypeError, match="cannot be resampled"):
            resample_tiles(np.ones(4, dtype), [TileAxis(4, 2, 1)])
    with pytest.raises(TypeError, match="cannot be resampled"):
        resample_tiles(np.ones(4), [TileAxis(4, 2, 1)], "b1")


PAIRS = [(one, to) for one in DTYPES for to in {one, "f4", "f8"}] + [("f4", "u2"), ("f8", "i8"), ("f4", "f2")]


@pytest.mark.parametrize(("source", "target"), sorted(set(PAIRS)))
def test_the_kernels_compile(source, target):
    kinds = {room._computed_in(np.dtype(source), np.dtype(target))}
    for kind in kinds:
        for architecture in ("sm_80", "sm_90"):
            code = compile_kernel(kernel_spec(np.dtype(source), np.dtype(target), kind), architecture)
            assert b"resample_axis" in code


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_on_a_device(cupy, dtype, seed):
    rng = np.random.default_rng(seed)
    axes = [TileAxis(*(int(n) for n in rng.integers((20, 1, 1), (90, 40, 40)))) for _ in range(1 + seed % 3)]
    volume = volume_of(dtype, [axis.size for axis in axes], seed)
    got = resample_tiles(cupy.asarray(volume), axes)
    assert isinstance(got, cupy.ndarray)
    expected = resample_tiles(volume, axes)
    scale = float(np.abs(volume.astype("f8")).max(initial=1))
    tolerance = 2e-3 * scale if dtype == "f2" else max(2e-6 * scale, 1.0 if volume.dtype.kind != "f" else 0)
    assert got.dtype == expected.dtype
    assert np.abs(got.get().astype("f8") - expected.astype("f8")).max() <= tolerance


@pytest.mark.gpu
def test_on_any_stream_of_a_device(cupy):
    axes = [TileAxis(64, 32, 16), TileAxis(64, 32, 13), TileAxis(64, 64, 40)]
    volume = volume_of("u2", (64, 64, 64), 0)
    expected = resample_tiles(volume, axes)
    for _ in range(3):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            got = resample_tiles(cupy.asarray(volume), axes)
            stream.synchronize()
        assert np.abs(got.get().astype(int) - expected).max() <= 1


@needs_compiler
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_the_last_integers_of_64_bits_do_not_overflow(dtype):
    """float64 rounds them up to a number that the dtype has no more; the result is the largest that it has."""
    limits = np.iinfo(dtype)
    axes = [TileAxis(8, 8, 4), TileAxis(9, 6, 4)]
    for value in (limits.max, limits.min):
        volume = np.full((8, 9), value, dtype)
        assert (resample_tiles(volume, axes) == value).all()
        assert (by_kernel(volume, axes) == value).all()
    odd = np.full((8, 9), 2**52 + 1, dtype)
    assert (np.abs(resample_tiles(odd, axes).astype(object) - (2**52 + 1)) <= 1).all()
