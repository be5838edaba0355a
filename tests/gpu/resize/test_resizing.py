"""If this fails, `resize` means something else than scikit-image's, or differs between host and device."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage import transform

from linumpy.device import to_host
from linumpy.gpu.interpolation import resample_volume, resize
from linumpy.gpu.resize import resizing
from tests.support.budget import examples
from tests.support.gpu import on_cpu
from tests.support.gpu.emulator import COMPILER

DTYPES = ["u1", "u2", "i2", "f2", "f4", "f8"]
MODES = ["reflect", "symmetric", "edge", "wrap", "constant"]
shapes = st.integers(1, 3).flatmap(
    lambda rank: st.tuples(*(st.tuples(st.integers(1, 17), st.integers(1, 17)) for _ in range(rank)))
)


def image_of(dtype, shape, seed, offset=0):
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.4
    if kind == "f":
        return rng.normal(offset, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, min(info.max, 2**20), shape, endpoint=True).astype(dtype)


def by_scikit_image(image, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sigma where an axis grows
        return transform.resize(image, *arguments, **options)


def precision(image, options):
    """Return what results may differ by, relative to the range.

    SciPy's spline filter for mode reflect (numpy.pad's symmetric) is only approximate along short axes.
    """
    short = options["order"] > 1 and options["mode"] == "symmetric" and min(image.shape) < 8
    return 2e-3 if short else 2e-5


@settings(max_examples=examples(300))
@given(
    shapes,
    st.sampled_from(["?", "u1", ">u2", "i2", "i4", "f2", ">f4", "f4", "f8"]),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(MODES),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 0.8]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 500]),
    st.integers(0, 999),
)
def test_same_as_scikit_image(pairs, dtype, order, mode, anti_aliasing, sigma, preserve_range, clip, offset, seed):
    shape, wanted = zip(*pairs, strict=True)
    image = image_of(dtype, shape, seed, offset)
    options = {
        "order": order,
        "mode": mode,
        "anti_aliasing": anti_aliasing,
        "anti_aliasing_sigma": sigma,
        "preserve_range": preserve_range,
        "clip": clip,
    }
    if dtype == "?" and (order or anti_aliasing):
        for function in (resize, by_scikit_image):
            with pytest.raises(ValueError, match="bool"):
                function(image, wanted, **options)
        return
    expected = by_scikit_image(image, wanted, **options)
    got = resize(image, wanted, **options)
    assert got.shape == expected.shape
    if order == 0 and image.dtype.kind in "biu":
        assert got.dtype == image.dtype.newbyteorder("=")
        # scikit-image cuts integers off after every axis that is smoothed; ours went through float32.
        allowed = image.ndim + 1 + 1e-6 * np.abs(image.astype("f8")).max() if anti_aliasing else 0
        assert np.abs(got.astype("f8") - expected).max() <= allowed
    else:
        assert got.dtype == ("f8" if dtype == "f8" else "f4")
        assert np.allclose(got, expected, rtol=0, atol=precision(image, options) * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("wanted", [(7, 9), (7, 9, 5), (7, 9, 3, 2), (20, 22, 3, 1, 4)])
def test_axes_that_are_not_named_and_new_ones(wanted):
    image = image_of("f8", (20, 22, 3), 1)
    assert np.allclose(resize(image, wanted), by_scikit_image(image, wanted))


def test_strided_images_are_left_alone():
    image = image_of("f8", (20, 22), 1)[::2, ::-1]
    before = image.copy()
    for sigma in (None, 1.3, (0.7, 0.0)):
        expected = by_scikit_image(image, (5, 9), anti_aliasing_sigma=sigma, anti_aliasing=True)
        assert np.allclose(resize(image, (5, 9), anti_aliasing_sigma=sigma), expected)
    same = resize(image, image.shape)
    assert np.array_equal(same, image)
    assert not np.shares_memory(same, image)
    assert np.array_equal(image, before)


def test_labels_of_64_bits_stay_what_they_are():
    labels = np.random.default_rng(0).integers(2**62, 2**63 - 1, (9, 11))
    got = resize(labels, (5, 23), order=0)
    assert got.dtype == labels.dtype
    # scikit-image rounds them through float64: it is asked for their places.
    places = by_scikit_image(np.arange(labels.size).reshape(labels.shape), (5, 23), order=0)
    assert np.array_equal(got, labels.reshape(-1)[places])


def test_the_range_is_that_of_the_numbers():
    image = image_of("f4", (16, 16), 2)
    image[3, 3] = np.nan
    got = resize(image, (40, 40), order=1, mode="constant")
    expected = by_scikit_image(image, (40, 40), order=1, mode="constant", preserve_range=True)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    assert np.allclose(got, expected, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_shape": (0, 2)}, ValueError, "output_shape"),
        ({"output_shape": ()}, ValueError, "output_shape"),
        ({"output_shape": (2.5, 2)}, ValueError, r"output_shape=\(2.5, 2\)"),
        ({"mode": "mirror"}, ValueError, "mode='mirror'"),
        ({"order": 6}, ValueError, "order=6"),
        ({"anti_aliasing_sigma": -1}, ValueError, "anti_aliasing_sigma=-1"),
        ({"anti_aliasing_sigma": (1, 2, 3)}, ValueError, "anti_aliasing_sigma"),
        ({"image": np.ones((4, 4), bool)}, ValueError, "booleans"),
        ({"image": np.ones((4, 4), complex)}, TypeError, "complex"),
        ({"image": np.ones((0, 4))}, ValueError, r"shape \(0, 4\)"),
        ({"image": [[1.0, 2.0]]}, TypeError, "list"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        resize(**{"image": np.ones((4, 4)), "output_shape": (2, 2), **arguments})


def same_as_host(cupy, image, wanted, **options):
    """Compare the GPU with the CPU, within rounding of float32."""
    got = resize(cupy.asarray(image), wanted, **options)
    expected = resize(image, wanted, **options)
    assert isinstance(got, cupy.ndarray)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    numbers = image[np.isfinite(image)] if image.dtype.kind == "f" else image
    scale = max(1.0, float(np.abs(numbers.astype("f8")).max(initial=0)))
    # Integers: a unit where rounding decides.
    tolerance = 1.0 + 1e-6 * scale if expected.dtype.kind in "iu" and options.get("anti_aliasing") else 0.0
    if expected.dtype.kind == "f":
        relative = precision(image, {"order": 1, "mode": "reflect", **options})
        if options.get("order", 1) > 1:
            relative = max(relative, 2e-5)
        elif image.dtype == "f8":
            relative = 1e-9
        tolerance = scale * relative
    found = to_host(got).astype("f8")
    assert np.allclose(found, expected.astype("f8"), rtol=0, atol=tolerance, equal_nan=True), (wanted, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("wanted", [(12, 16, 18), (40, 7, 55), (1, 31, 36), (23, 31, 9), (23, 15, 36)])
def test_same_on_the_gpu(cupy, dtype, order, wanted):
    image = image_of(dtype, (23, 31, 36), 4)
    for mode in MODES:
        same_as_host(cupy, image, wanted, order=order, mode=mode)


@pytest.mark.gpu
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4),
    st.sampled_from(["?", "i4", "i8", *DTYPES]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(MODES),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 0.3, 2.5, 9.0]),
    st.sampled_from(["plain", "reversed", "late"]),
    st.integers(0, 999),
)
def test_ugly_images_on_the_gpu(pairs, dtype, order, mode, anti_aliasing, sigma, layout, seed):
    import cupy

    if len(pairs) == 4:
        pairs = [(min(n, 12), min(m, 12)) for n, m in pairs]
    if dtype == "?":
        order, anti_aliasing = 0, None
    shape, wanted = zip(*pairs, strict=True)
    image = image_of(dtype, shape, seed)
    options = {"order": order, "mode": mode, "anti_aliasing": anti_aliasing, "anti_aliasing_sigma": sigma}
    if layout == "plain":
        same_as_host(cupy, image, wanted, **options)
        return
    if layout == "reversed":
        image, on_device = image[::-1], cupy.asarray(image)[::-1]
    else:  # begins where no load of several elements may
        whole = cupy.zeros(image.size + 1, image.dtype)
        whole[1:] = cupy.asarray(image).reshape(-1)
        on_device = whole[1:].reshape(shape)
    got, expected = resize(on_device, wanted, **options), resize(cupy.asarray(image.copy()), wanted, **options)
    assert got.dtype == expected.dtype
    # The same sums in the same order, whatever the tiles.
    assert cupy.array_equal(got, expected)


def in_range(image, wanted, back=lambda a: a, **options):
    """No result is beyond the least and the greatest number of the image."""
    got = back(resize(image, wanted, **options))
    low, high = back(image).min(), back(image).max()
    assert got.min() >= got.dtype.type(low)
    assert got.max() <= got.dtype.type(high)


#: Numbers that many weighted means of are rounded to beyond them, and images of which whole parts are alike.
RANGES = [
    ("u1", 255),
    ("u1", 77),
    ("u2", 65535),
    ("i2", -32768),
    ("f4", 0.1),
    ("f4", -1e-30),
    ("f8", 0.1),
    ("i4", 2**31 - 1),
]


def image_in_range(dtype, value, shape=(9, 37, 41)):
    image = np.full(shape, value, dtype)
    image[::4, ::9, ::11] = 0
    return image


@pytest.mark.parametrize(("dtype", "value"), RANGES)
@pytest.mark.parametrize("side", ["host", "emulator"])
def test_no_result_leaves_the_range(monkeypatch, side, dtype, value):
    if side == "emulator":
        if COMPILER is None:
            pytest.skip("no C++ compiler")
        on_cpu.patch(monkeypatch)
    image = image_in_range(dtype, value)
    for wanted in ((9, 17, 20), (4, 50, 57), (13, 37, 3)):
        for options in ({}, {"anti_aliasing": False}, {"anti_aliasing_sigma": 3.3, "mode": "wrap"}):
            in_range(image, wanted, **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "value"), RANGES)
def test_no_result_leaves_the_range_on_the_gpu(cupy, dtype, value):
    image = cupy.asarray(image_in_range(dtype, value, (40, 200, 210)))
    for wanted in ((40, 90, 100), (20, 100, 105), (61, 310, 333), (40, 200, 3)):
        for options in ({}, {"anti_aliasing": False}, {"anti_aliasing_sigma": 3.3, "mode": "wrap"}):
            in_range(image, wanted, lambda a: a.get(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_on_the_gpu(cupy, value):
    for dtype in ("f2", "f4", "f8"):
        image = image_of(dtype, (24, 32, 40), 7)
        image[5, 6, 7] = image[20, 0, 39] = value
        for wanted in ((12, 16, 20), (24, 16, 20), (12, 32, 40), (50, 60, 70)):
            got = to_host(resize(cupy.asarray(image), wanted))
            assert np.array_equal(np.isfinite(got), np.isfinite(resize(image, wanted)))


@pytest.mark.gpu
def test_a_wide_window_needs_no_tile(cupy):
    """Along X a window that no tile holds, and a table that is not kept."""
    image = image_of("f4", (3, 40000), 8)
    same_as_host(cupy, image, (3, 2))
    same_as_host(cupy, image, (2, 5))
    same_as_host(cupy, image_of("u2", (9000, 90), 8), (4500, 45), anti_aliasing_sigma=60.0)


@pytest.mark.gpu
def test_tables_are_kept_and_nothing_is_compiled_for_a_shape(cupy):
    from linumpy.gpu import kernels

    image = cupy.asarray(image_of("f4", (40, 50, 60), 9))
    resize(image, (20, 25, 30))
    before = kernels._load.cache_info().misses, resizing._cached_steps.cache_info().misses
    resize(image, (20, 25, 30))
    assert (kernels._load.cache_info().misses, resizing._cached_steps.cache_info().misses) == before
    rng = np.random.default_rng(0)
    for _ in range(50):
        resize(cupy.zeros(tuple(rng.integers(1, 60, 3)), "f4"), rng.integers(1, 60, 3))
    assert kernels._load.cache_info().misses <= before[0] + 1  # `along_x`, where it is new


@pytest.mark.gpu
def test_other_streams_on_the_gpu(cupy):
    image = image_of("u2", (64, 64, 64), 10)
    on_device = cupy.asarray(image)
    expected = resize(image, (32, 32, 32))
    cupy.cuda.get_current_stream().synchronize()
    for _ in range(3):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            got = resize(on_device, (32, 32, 32))
        stream.synchronize()
        assert np.allclose(to_host(got), expected, rtol=0, atol=2e-5 * 65535)


@pytest.mark.gpu
def test_more_than_2_to_the_31_voxels_on_the_gpu(cupy):
    shape = (1100, 1408, 1400)
    lines = [cupy.random.RandomState(axis).randint(0, 256, n).astype("u1") for axis, n in enumerate(shape)]
    image = lines[0][:, None, None] + lines[1][None, :, None] + lines[2][None, None, :]
    assert image.size > 2**31
    assert image.dtype == np.uint8
    got = resize(image, (550, 704, 700))
    for part in (slice(None, 20), slice(-20, None)):  # what lies far from where it is cut
        corner = to_host(image[part, part, part])
        kept = slice(None, 7) if part.start is None else slice(3, None)
        expected = resize(corner, (10, 10, 10))[kept, kept, kept]
        found = to_host(got[:10, :10, :10] if part.start is None else got[-10:, -10:, -10:])[kept, kept, kept]
        assert np.allclose(found, expected, rtol=0, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_resample_volume_uses_the_same_kernels(cupy, dtype):
    volume = image_of(dtype, (30, 41, 52), 11)
    for order in (0, 1):
        expected, spacing = resample_volume(volume, (10.0, 5.0, 5.0), 10.0, order=order)
        got, reached = resample_volume(cupy.asarray(volume), (10.0, 5.0, 5.0), 10.0, order=order)
        assert reached == spacing
        assert got.dtype == expected.dtype
        assert np.allclose(to_host(got), expected, rtol=0, atol=2e-5 * float(np.abs(volume.astype("f8")).max()))
