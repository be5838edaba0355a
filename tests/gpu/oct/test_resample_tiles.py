"""If this fails, tiles of a mosaic mix when it is resampled, or differ from SciPy's (tile after tile)."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.gpu.interpolation import resample_volume
from linumpy.gpu.kernels import computed_in
from linumpy.gpu.oct import resample_tiles as resample_tiles_module
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.gpu.resize import resizing
from linumpy.gpu.resize.plan import ResizeTuning
from linumpy.plan.grid.tile_grid import TileAxis
from tests.gpu.ndimage.test_sampling import image_of
from tests.support.budget import examples, shown, some
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.nvrtc import compile_kernel

DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4", "f8"]


def by_kernel(volume, axes, dtype=None, tuning=resizing.DEFAULT):
    def apply(image, *planned):
        return resizing.run_passes(np.ascontiguousarray(image), *planned, tuning)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "load", emulated)
        patch.setattr(resample_tiles_module, "apply_tables", apply)
        return resample_tiles(volume, axes, dtype)


def by_scipy(volume, axes, dtype=None):
    """Resample tile after tile in float64, without tables; integers are rounded by SciPy."""
    target = np.dtype(volume.dtype if dtype is None else dtype).newbyteorder("=")
    out = np.empty([axis.new_size for axis in axes], target)
    factors, offsets = [axis.factor for axis in axes], [axis.offset for axis in axes]
    for pieces in itertools.product(*(axis.tiles() for axis in axes)):
        before, after = (tuple(piece[k] for piece in pieces) for k in (0, 1))
        smooth = ndimage.gaussian_filter(volume[before].astype("f8"), [axis.sigma for axis in axes], mode="nearest")
        out[after] = ndimage.affine_transform(
            smooth, factors, offsets, out[after].shape, "f8" if target.kind == "f" else target, 1, "nearest"
        )
    return out


def whole_tiles(tiles, tile, new_tile):
    return [TileAxis(n * t, t, m) for n, t, m in zip(tiles, tile, new_tile, strict=True)]


#: One has no room for the kernels' own tiles, one hardly any.
TUNINGS = [ResizeTuning(), ResizeTuning(shared=3000), ResizeTuning(shared=100)]
#: Each takes seconds to compile.
EMULATED = [
    ("u1", None),
    ("u2", None),
    ("i2", "f4"),
    ("i4", None),
    ("i8", None),
    ("f2", None),
    ("f4", None),
    ("f4", "u2"),
    ("f8", None),
]

axes_of = st.lists(
    st.builds(TileAxis, st.integers(1, 23), st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=3
)
AXES = [TileAxis(7, 4, 3), TileAxis(9, 3, 5), TileAxis(20, 6, 4)]


@pytest.mark.parametrize("compute", [resample_tiles, pytest.param(by_kernel, marks=needs_compiler)])
@pytest.mark.parametrize("spacing", [20.0, 14.0, 47.0, 6.0, (10.0, 25.0, 5.0)])
def test_each_whole_tile_as_resample_volume_makes_it(compute, spacing):
    tile, tiles = (12, 10, 15), (1, 3, 2)
    volume = image_of("f4", [n * t for n, t in zip(tiles, tile, strict=True)], 0)
    one, _ = resample_volume(volume[: tile[0], : tile[1], : tile[2]], (10.0, 10.0, 10.0), spacing)
    got = compute(volume, whole_tiles(tiles, tile, one.shape))
    for place in itertools.product(*map(range, tiles)):
        before, after = (
            tuple(slice(p * t, (p + 1) * t) for p, t in zip(place, size, strict=True)) for size in (tile, one.shape)
        )
        expected, _ = resample_volume(volume[before], (10.0, 10.0, 10.0), spacing)
        np.testing.assert_allclose(got[after], expected, rtol=1e-5, atol=1e-3)


def check_as_scipy(compute, axes, dtype, to, seed):
    volume = image_of(dtype, [axis.size for axis in axes], seed)
    if to == "u2":  # SciPy does not say what becomes of what does not fit
        volume = (np.abs(volume.astype("f8")) % 60000).clip(0, 127 if dtype == "i1" else None).astype(dtype)
    got, expected = compute(volume, axes, to), by_scipy(volume, axes, to)
    assert got.dtype == expected.dtype == np.dtype(to or dtype)
    assert got.shape == expected.shape == tuple(axis.new_size for axis in axes)
    scale = float(np.abs(volume.astype("f8")).max(initial=1))
    tolerance = {"f2": 1e-3, "f4": 1e-6, "f8": 1e-12}.get(expected.dtype.str[1:], 0) * scale
    if expected.dtype.kind in "iu":  # a unit where rounding decides
        tolerance = 1.0
    assert np.abs(got.astype("f8") - expected.astype("f8")).max() <= tolerance


@settings(max_examples=examples(150))
@given(axes=axes_of, dtype=st.sampled_from(DTYPES), to=st.sampled_from([None, "f4", "u2"]), seed=st.integers(0, 2**32))
@shown(axes=[AXES], dtype=DTYPES, to=[None, "f4", "u2"], seed=[0])
def test_as_scipy(axes, dtype, to, seed):
    check_as_scipy(resample_tiles, axes, dtype, to, seed)


@needs_compiler
@settings(max_examples=examples(150))
@given(axes=axes_of, pair=st.sampled_from(EMULATED), tuning=st.sampled_from(TUNINGS), seed=st.integers(0, 2**32))
@shown(axes=[AXES], pair=EMULATED, tuning=TUNINGS, seed=[0])
def test_the_kernels_as_scipy(axes, pair, tuning, seed):
    check_as_scipy(functools.partial(by_kernel, tuning=tuning), axes, *pair, seed)


@needs_compiler
@settings(max_examples=examples(30), deadline=None)
@given(tiles=st.integers(1, 30), tile=st.integers(1, 40), new_tile=st.integers(1, 40), rest=st.integers(0, 39))
def test_many_tiles_in_a_row(tiles, tile, new_tile, rest):
    # Wider than the kernels' own tiles, which end elsewhere.
    axes = [TileAxis(tiles * tile + rest % tile, tile, new_tile), TileAxis(9, 4, 3)]
    check_as_scipy(by_kernel, axes, "u2", None, tiles)
    check_as_scipy(by_kernel, axes[::-1], "u2", None, tiles)


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


def by_kernel_or_not(tuning):
    return resample_tiles if tuning is None else functools.partial(by_kernel, tuning=tuning)


@needs_compiler
@settings(max_examples=examples(150))
@given(axes=axes_of, tuning=st.sampled_from([None, *TUNINGS]), value=st.sampled_from([np.nan, np.inf]), data=st.data())
def test_what_is_not_finite_stays_in_its_tile(axes, tuning, value, data):
    place = [data.draw(st.integers(0, axis.size - 1)) for axis in axes]
    volume = np.full([axis.size for axis in axes], 7.0, "f4")
    volume[tuple(place)] = value
    got = by_kernel_or_not(tuning)(volume, axes)
    inside = [after for p, axis in zip(place, axes, strict=True) for before, after in axis.tiles()
              if before.start <= p < before.stop]  # fmt: skip
    got[tuple(inside)] = 7.0
    np.testing.assert_allclose(got, 7.0, rtol=1e-6)


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
    volume = image_of("u2", (7, 9, 10), 3)
    turned = volume.transpose(1, 2, 0)[:, ::-1]
    assert np.array_equal(compute(turned, axes), compute(np.ascontiguousarray(turned), axes))
    assert compute(turned, axes).flags.c_contiguous


@pytest.mark.parametrize("compute", [resample_tiles, pytest.param(by_kernel, marks=needs_compiler)])
def test_as_many_voxels_that_lie_elsewhere(compute):
    # What is left of a tile: no more voxels, nothing to smooth, and yet other places.
    axes = [TileAxis(3, 8, 9), TileAxis(4, 9, 8)]
    assert [axis.new_size for axis in axes] == [3, 4]
    for one in (axes, axes[::-1], axes[:1]):
        check_as_scipy(compute, one, "f4", None, 0)


def test_byte_order_and_tiles_that_stay():
    axes = [TileAxis(4, 2, 2), TileAxis(6, 3, 3)]
    volume = image_of(">u2", (4, 6), 0)
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


CASTS = [("f4", "u2"), ("f8", "i8"), ("f4", "f2")]
PAIRS = {(one, to) for one in DTYPES for to in (one, "f4", "f8")} | set(CASTS)


@pytest.mark.parametrize(
    ("source", "target"), some(sorted(PAIRS), lambda *pair: pair in CASTS or pair in [("f4", "f4"), ("u2", "u2")])
)
def test_the_kernels_compile(source, target):
    types = np.dtype(source), np.dtype(target)
    for name in ("planes", "along", "along_x"):
        spec = resizing.kernel_spec(name, types[0], computed_in(*types), types[1])
        assert name.encode() in compile_kernel(spec, "sm_90")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_the_same_on_a_device(cupy, dtype, seed):
    rng = np.random.default_rng(seed)
    axes = [TileAxis(*(int(n) for n in rng.integers((20, 1, 1), (90, 40, 40)))) for _ in range(1 + seed % 3)]

    def compute(volume, axes, dtype):
        got = resample_tiles(cupy.asarray(volume), axes, dtype)
        assert isinstance(got, cupy.ndarray)
        return got.get()

    check_as_scipy(compute, axes, dtype, None, seed)
    if dtype.startswith("f"):
        volume = image_of(dtype, [axis.size for axis in axes], seed)
        volume.flat[rng.integers(0, volume.size, 5)] = [np.nan, np.inf, -np.inf, np.nan, np.inf]
        spread = np.isnan(resample_tiles(volume, axes)), np.isfinite(resample_tiles(volume, axes))
        got = compute(volume, axes, None)
        assert np.array_equal(np.isnan(got), spread[0])
        assert np.array_equal(np.isfinite(got), spread[1])


@pytest.mark.gpu
def test_on_any_stream_of_a_device(cupy):
    axes = [TileAxis(64, 32, 16), TileAxis(64, 32, 13), TileAxis(64, 64, 40)]
    volume = image_of("u2", (64, 64, 64), 0)
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
        for compute in (resample_tiles, by_kernel):  # weights add up to 1 but for rounding
            assert (np.abs(compute(volume, axes).astype(object) - int(value)) <= 2**14).all()
    odd = np.full((8, 9), 2**52 + 1, dtype)
    assert (np.abs(resample_tiles(odd, axes).astype(object) - (2**52 + 1)) <= 8).all()
