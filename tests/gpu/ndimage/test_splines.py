"""If this fails, the spline filter's kernels, or samples of what they make, differ from SciPy."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.gpu import interpolation
from linumpy.gpu.kernels import IN_FLOAT32
from linumpy.gpu.ndimage import sampling, splines
from linumpy.gpu.ndimage.sampling_launch import MODES
from linumpy.gpu.ndimage.splines import Ends
from tests.gpu.ndimage.test_sampling import image_of
from tests.support.budget import examples, matrix, some
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.gpu.on_cpu import by_kernels

DTYPES = ["u1", "i1", "u2", "i2", "f2", "f4", "f8", "i4", "u4", "i8", "u8"]
#: Combinations of types take a compilation each.
KINDS = [("u1", "f4", 2), ("u2", "f4", 3), ("f4", "f4", 5), ("f8", "f8", 4), ("i4", "f8", 5), ("f4", "f8", 3)]
PAIRS = [("u1", "f4"), ("u2", "f4"), ("f4", "f4"), ("f8", "f8"), ("i4", "f8"), ("f4", "f8")]


#: Dtype, order and mode: each mode with an order of one and of two poles.
SAMPLED = [
    ("u1", 3, "constant"),
    ("f4", 5, "grid-constant"),
    ("u2", 3, "grid-constant"),
    ("f4", 2, "nearest"),
    ("f8", 4, "nearest"),
    ("f4", 3, "reflect"),
    ("u2", 5, "mirror"),
    ("f8", 3, "wrap"),
    ("u1", 2, "grid-wrap"),
    ("f4", 3, "mirror"),
]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(splines, "load", emulated)
    monkeypatch.setattr(sampling, "load", emulated)


def exact(image, mode, pad=0, cval=None, order=3):
    """SciPy's coefficients in float64, of the image padded as SciPy's functions do."""
    wide = image.astype(np.float64)
    if pad:
        more = {"mode": "edge"} if cval is None else {"mode": "constant", "constant_values": cval}
        wide = np.pad(wide, pad, **more)
    return ndimage.spline_filter(wide, order, mode=mode)


def error(got, expected, image):
    """Relative to the largest value."""
    scale = max(float(np.abs(image.astype(np.float64)).max(initial=0)), 1e-300)
    return float(np.abs(got.astype(np.float64) - expected).max()) / scale


axes = st.one_of(st.integers(1, 10), st.integers(11, 80))
shapes = (
    st.integers(1, 3)
    .flatmap(lambda rank: st.tuples(*([axes] + [st.integers(1, 40)] * (rank - 1))))
    .flatmap(st.permutations)
)


@needs_compiler
@settings(max_examples=examples(120))
@given(shape=shapes, kind=st.sampled_from(KINDS), mode=st.sampled_from(MODES), seed=st.integers(0, 2**32 - 1))
def test_as_scipy(shape, kind, mode, seed):
    *pair, order = kind
    image = image_of(pair[0], shape, seed)
    got = splines.filtered(image, Ends(mode, order=order), pair[1])
    assert got.shape == image.shape
    # In mode reflect SciPy's filter of 9 voxels is off by 2e-11; see _SHORT. What higher orders make grows with them.
    tolerance = (5e-6 if pair[1] == "f4" else 1e-9) * 6 ** (order - 3)
    assert error(got, exact(image, mode, order=order), image) < tolerance


@needs_compiler
@pytest.mark.parametrize(("order", "pad"), [(5, 0), (4, 12)])
def test_other_orders_in_segments_and_pads(monkeypatch, order, pad):
    """Two poles are applied one after the other, the second in place on what was padded; on some axes alone, too."""
    monkeypatch.setattr(splines, "_SEGMENT", 40)
    for shape in ((170, 9), (5, 6, 190), (200,), (4, 150, 3)):
        image = image_of("f4", shape, order)
        for mode in ("reflect", "grid-wrap", "mirror"):
            got = splines.filtered(image, Ends(mode, pad, 3.0 if pad else None, order), "f8")
            assert error(got, exact(image, mode, pad, 3.0 if pad else None, order), image) < 1e-8
            if not pad and len(shape) > 1:
                got = splines.filtered(image, Ends(mode, order=order), "f8", axes=[1])
                expected = ndimage.spline_filter1d(image.astype("f8"), order, 1, mode=mode)
                assert error(got, expected, image) < 1e-8


@needs_compiler
@settings(max_examples=examples(60))
@given(
    shape=shapes,
    pair=st.sampled_from(PAIRS),
    mode=st.sampled_from(["nearest", "grid-constant", "grid-wrap"]),
    cval=st.sampled_from([None, 0.0, 37.0]),
    pad=st.sampled_from([1, 12, 15]),
    seed=st.integers(0, 2**32 - 1),
)
def test_padded_as_scipy(shape, pair, mode, cval, pad, seed):
    image = image_of(pair[0], shape, seed)
    got = splines.filtered(image, Ends(mode, pad, cval), pair[1])
    assert got.shape == tuple(n + 2 * pad for n in shape)
    largest = np.append(np.abs(image.astype("f8")).ravel(), 37)
    # Where an axis is short, SciPy's mode reflect is off: see _SHORT.
    tolerance = 5e-6 if pair[1] == "f4" or pad == 1 else 1e-9
    if pad == 1 and min(shape) < 8:
        tolerance = 1e-3
    assert error(got, exact(image, mode, pad, cval), largest) < tolerance


@needs_compiler
@settings(max_examples=examples(40))
@given(
    shape=st.sampled_from([(125, 9), (9, 190), (150, 5, 6), (5, 121, 3), (4, 3, 195), (330,)]),
    kind=st.sampled_from(["f4", "f8"]),
    mode=st.sampled_from(MODES),
    pad=st.sampled_from([0, 12]),
    segment=st.integers(32, 60),
    block=st.sampled_from([8, 16, 32]),
    seed=st.integers(0, 2**32 - 1),
)
def test_lines_in_segments(shape, kind, mode, pad, segment, block, seed):
    """In place, a segment must not need what the one before it wrote."""
    image = image_of(kind, shape, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splines, "_SEGMENT", segment)
        tuned = {key: (block, 32 if key[1] else 64, 1) for key in splines.TUNING}
        patch.setattr(splines, "TUNING", tuned)
        assert max(splines._segments(n, 1, block)[1] for n in shape) > 1
        got = splines.filtered(image, Ends(mode, pad), kind)
        in_place = image.copy()
        if not pad:
            splines.filter_axes(in_place, Ends(mode), in_place)
    expected = exact(image, mode, pad)
    tolerance = 5e-6 if kind == "f4" else 1e-9
    assert error(got, expected, image) < tolerance
    if not pad:
        assert error(in_place, expected, image) < tolerance


@needs_compiler
@pytest.mark.parametrize(("dtype", "kind"), matrix(DTYPES, ["f4", "f8"]))
def test_every_dtype(dtype, kind):
    image = image_of(dtype, (11, 3, 34), 5)
    got = splines.filtered(image, Ends("reflect"), kind)
    assert error(got, exact(image, "reflect"), image) < (5e-6 if kind == "f4" else 1e-12)


@needs_compiler
def test_other_layouts():
    whole = image_of("f4", (30, 40, 50), 7)
    for view in (whole.T, whole[::2, ::-1, 3:40], whole[:, :1], np.broadcast_to(whole[:1], (3, 40, 50))):
        before = view.copy()
        for pad in (0, 12):
            got = splines.filtered(view, Ends("nearest", pad), np.float32)
            assert error(got, exact(before, "nearest", pad), whole) < 5e-6
        assert np.array_equal(view, before)


@needs_compiler
def test_constant_and_linear_fields():
    """The spline of a constant is that constant; that of a line, mirrored, is the line between its ends."""
    assert np.allclose(splines.filtered(np.full((20, 33, 40), 7, "u2"), Ends("mirror"), "f4"), 7, atol=1e-5)
    line = np.arange(200, dtype="f8")
    assert np.allclose(splines.filtered(line, Ends("mirror"), "f8")[40:-40], line[40:-40], atol=1e-12)


@needs_compiler
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_on_its_line(axis, bad):
    """And does not spoil what lies more than two windows before it there."""
    image = image_of("f4", (9, 200), 8) if axis else image_of("f4", (200, 9), 8)
    at = (4, 150) if axis else (150, 4)
    expected = splines.filtered(image, Ends("mirror"), "f4")
    image[at] = bad
    with np.errstate(invalid="ignore"):
        matrix = splines.filtered(image, Ends("mirror"), "f4")
    assert not np.isfinite(matrix[at])
    before = (slice(None), slice(100)) if axis else (slice(100), slice(None))
    assert np.array_equal(matrix[before], expected[before])


@by_kernels
@settings(max_examples=examples(100))
@given(
    shape=st.integers(2, 3).flatmap(lambda rank: st.tuples(*([st.integers(1, 14)] * rank))),
    sampled=st.sampled_from(SAMPLED),
    kind=st.sampled_from(["f4", "f8"]),
    cval=st.sampled_from([0.0, 7.0]),
    far=st.sampled_from([0.4, 3.0, 40.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_points_of_splines_as_scipy(shape, sampled, kind, cval, far, seed):
    dtype, order, mode = sampled
    rng = np.random.default_rng(seed)
    image = image_of(dtype, shape, seed)
    places = np.stack([rng.uniform(-far, n - 1 + far, 60) for n in shape]).astype(kind)
    places[:, :10] = np.round(places[:, :10])
    options = {"order": order, "mode": mode, "cval": cval}
    out = np.float32 if dtype != "f8" else np.float64
    got = interpolation.map_coordinates(image, places, output=out, **options)
    expected = ndimage.map_coordinates(image.astype("f8"), places.astype("f8"), **options)
    assert error(got, expected, np.append(image.astype("f8").ravel(), cval)) < 1e-5


@by_kernels
@pytest.mark.parametrize(("mode", "kind"), matrix(MODES, ["f4", "f8"]))
def test_places_in_and_beyond_the_pad(mode, kind):
    image = image_of(kind, (7, 15), 2)
    rng = np.random.default_rng(3)
    places = np.stack([rng.uniform(-40, n + 40, 5000) for n in image.shape])
    places[0, :2000] = rng.uniform(0, 6, 2000)
    places[1, 1000:3000] = rng.uniform(0, 8, 2000)
    options = {"order": 3, "mode": mode, "cval": 2.0}
    got = interpolation.map_coordinates(image, places, **options)
    expected = ndimage.map_coordinates(image.astype("f8"), places, **options)
    assert error(got, expected, image) < (5e-6 if kind == "f4" else 1e-12)
    matrix, offset = [[3.0, 0.9], [-0.8, 2.5]], [-30.0, -20.0]
    got = interpolation.affine_transform(image, matrix, offset, output_shape=(40, 40), **options)
    expected = ndimage.affine_transform(image.astype("f8"), matrix, offset, (40, 40), **options)
    assert error(got, expected, image) < (5e-6 if kind == "f4" else 1e-12)


@by_kernels
@settings(max_examples=examples(60))
@given(
    shape=st.integers(2, 3).flatmap(lambda rank: st.tuples(*([st.integers(1, 14)] * rank))),
    sampled=st.sampled_from(SAMPLED),
    turned=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_affine_maps_of_splines_as_scipy(shape, sampled, turned, seed):
    dtype, order, mode = sampled
    rng = np.random.default_rng(seed)
    rank = len(shape)
    image = image_of(dtype, shape, seed)
    matrix = np.diag(rng.uniform(0.5, 2, rank)) + (rng.normal(0, 0.3, (rank, rank)) if turned else 0)
    offset = rng.uniform(-4, 4, rank)
    out_shape = tuple(int(n) for n in rng.integers(1, 20, rank))
    options = {"output_shape": out_shape, "order": order, "mode": mode, "cval": 3.0}
    out = np.float32 if dtype != "f8" else np.float64
    got = interpolation.affine_transform(image, matrix, offset, output=out, **options)
    expected = ndimage.affine_transform(image.astype("f8"), matrix, offset, **options)
    largest = np.append(np.abs(image.astype("f8")).ravel(), 3.0)
    # Beside the ends of the image the constant modes jump: rounding decides on which side a place is.
    off = np.abs(got.astype("f8") - expected) > 1e-5 * largest.max()
    assert off.mean() <= (0.01 if mode == "constant" else 0)


@by_kernels
@pytest.mark.parametrize("cval", [7.9, -3.2, 200.0])
def test_the_pad_holds_what_the_image_can_hold(cval):
    """SciPy casts the constant to the image's dtype in its pad, and takes it as it is beyond."""
    image = image_of("u1" if cval > 0 else "i2", (5, 6), 3)
    places = np.random.default_rng(0).uniform(-30, 35, (2, 500))
    options = {"order": 3, "mode": "grid-constant", "cval": cval, "output": np.float64}
    got = interpolation.map_coordinates(image, places, **options)
    assert np.allclose(got, ndimage.map_coordinates(image, places, **options), atol=1e-5 * np.abs(image).max())


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "mode", "cval"),
    some(
        itertools.product(
            [(9, 8), (5, 6, 7), (2, 3, 4, 5)], ["grid-constant", "constant"], [300.0, 256.0, -3.0, 0.4, 1.0]
        ),
        lambda shape, mode, cval: len(shape) < 4 or cval == 300.0,
    ),
)
def test_booleans_are_padded_by_booleans(monkeypatch, shape, mode, cval):
    """In SciPy the padding of the image has its dtype: 300 is True, which is 1, and no number of uint8."""
    image = np.random.default_rng(0).integers(0, 2, shape).astype(bool)
    options = {"mode": mode, "cval": cval, "output": np.float64}
    factors = (2.3,) * len(shape)
    expected = [ndimage.zoom(image, factors, **options), ndimage.shift(image, 0.7, **options)]
    on_cpu.patch(monkeypatch)
    got = [interpolation.zoom(image, factors, **options), interpolation.shift(image, 0.7, **options)]
    for one, other in zip(got, expected, strict=True):
        assert np.allclose(one, other, atol=1e-6 * max(1, abs(cval)))


@needs_compiler
@pytest.mark.parametrize("source", ["u1", "u2", "i2", "f4", "f8"])
@pytest.mark.parametrize("target", ["u1", "i1", "u2", "i2", "u4", "i4", "i8"])
def test_coefficients_in_integers_keep_their_low_bits(monkeypatch, source, target):
    """Negative coefficients of unsigned integers, too, as in SciPy."""
    image = (np.random.default_rng(1).integers(0, 100, (6, 9)) * 2).astype(source)
    image[2, 3] = 0
    expected = ndimage.spline_filter(image, 3, output=np.dtype(target))
    assert np.array_equal(interpolation.spline_filter(image, 3, output=target), expected)
    on_cpu.patch(monkeypatch)
    assert np.array_equal(interpolation.spline_filter(image, 3, output=target), expected)
    assert (ndimage.spline_filter(image, 3) < 0).any()


@needs_compiler
@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_places_in_a_pad_that_are_no_numbers(kind):
    image = image_of(kind, (5, 6, 7), 1)
    grown = splines.filtered(image, Ends("grid-constant", 12, 5.0), kind)
    bad = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 2.0**40, 2.0**31, -(2.0**31)])
    for axis in range(3):
        places = np.ones((3, len(bad)))
        places[axis] = bad
        got = np.empty(len(bad), kind)
        sampling.sample_points(grown, places, sampling.SplineSampling(3, "grid-constant", 5.0, 12), got)
        assert np.allclose(got, 5)


@by_kernels
def test_the_public_filter():
    image = image_of("u2", (9, 10, 40), 4)
    expected = exact(image, "reflect")
    got = interpolation.spline_filter(image, mode="reflect")
    assert got.dtype == np.float64
    assert error(got, expected, image) < 1e-9
    for out in (np.empty(image.shape, "f4"), np.empty((18, 10, 40), "f4")[::2]):
        assert interpolation.spline_filter(image, output=out, mode="reflect") is out
        assert error(out, expected, image) < 5e-6
    itself = image.astype("f4")
    assert interpolation.spline_filter(itself, output=itself, mode="reflect") is itself
    assert error(itself, expected, image) < 5e-6


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((np.ones((3, 3)), 1), {}, ValueError, "order=1: splines of order 2 to 5"),
        ((np.ones((3, 3)), 6), {}, ValueError, "order=6"),
        ((np.ones((3, 3)),), {"mode": "edge"}, ValueError, "mode='edge'"),
        ((np.ones((3, 3)),), {"output": np.empty((3, 4))}, ValueError, r"output has shape \(3, 4\)"),
        (([1, 2, 3],), {}, TypeError, "list"),
        ((np.array(["a"]),), {}, TypeError, "<U1"),
    ],
)
def test_bad_input(arguments, options, error, message):
    with pytest.raises(error, match=message):
        interpolation.spline_filter(*arguments, **options)


def test_pads_that_the_kernels_cannot_make():
    with pytest.raises(ValueError, match="not 16"):
        splines.filtered(np.ones((3, 3)), Ends("mirror", 16), np.float64)
    with pytest.raises(ValueError, match="4 axes"):
        splines.filtered(np.ones((3, 3, 3, 3)), Ends("mirror", 2), np.float64)


def specs():
    for source, target in [*PAIRS, ("f2", "f4"), ("i8", "f4")]:
        image, out = np.empty(1, source), np.empty(1, target)
        wide = source not in IN_FLOAT32 or target == "f8"
        for name in ("spline_columns", "spline_rows", "spline_boundaries", "spline_short"):
            for order in (3, 5):
                for pole in splines.POLES[order]:
                    yield splines._spec(name, image, out, order, pole, wide)


@by_kernels
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_the_worst_image_is_met_in_float32(order):
    """What a spline's filter amplifies most are voxels that alternate along all axes."""
    image = (np.indices((24, 25, 26)).sum(0) % 2).astype("f4")
    places = np.random.default_rng(0).uniform(0, 23, (3, 1000))
    got = interpolation.map_coordinates(image, places, order=order, mode="mirror")
    expected = ndimage.map_coordinates(image.astype("f8"), places, order=order, mode="mirror")
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 1e-5


def test_axes_that_kernels_cannot_number_are_refused():
    """The image is one voxel, shown so often."""
    image = np.broadcast_to(np.zeros(1, "f4"), (2**29,))
    with pytest.raises(ValueError, match=r"less than 2\^29 voxels"):
        splines.filter_axes(image, Ends("mirror"), image)
