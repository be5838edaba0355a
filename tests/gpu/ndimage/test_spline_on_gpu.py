"""If this fails, a device filters or samples splines unlike SciPy."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu.interpolation import affine_transform, map_coordinates, spline_filter
from linumpy.gpu.ndimage import splines
from linumpy.gpu.ndimage.sampling_launch import MODES
from linumpy.gpu.ndimage.splines import Ends
from tests.gpu.ndimage.test_sampling import image_of
from tests.gpu.ndimage.test_splines import error, exact, shapes

pytestmark = pytest.mark.gpu


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    dtype=st.sampled_from(["u1", "u2", "i2", "f4", "f8", "i4"]),
    kind=st.sampled_from([np.float32, np.float64]),
    mode=st.sampled_from(MODES),
    turned=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_scipy(cupy, shape, dtype, kind, mode, turned, seed):
    image = image_of(dtype, shape, seed)
    given_ = cupy.asarray(np.ascontiguousarray(image.T)).T if turned else cupy.asarray(image)
    got = spline_filter(given_, output=kind, mode=mode)
    assert isinstance(got, cupy.ndarray)
    assert got.dtype == kind
    assert error(to_host(got), exact(image, mode), image) < (5e-6 if kind == np.float32 else 1e-9)
    assert np.array_equal(to_host(given_), image)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(100, 130, 170), (3, 700, 65), (1300, 1100), (70000,), (5000, 2, 40)])
def test_large_images_as_scipy(cupy, shape, mode):
    """Long lines are cut into segments, in place too."""
    image = image_of("f4", shape, 1)
    got = spline_filter(cupy.asarray(image), output=np.float32, mode=mode)
    assert error(to_host(got), exact(image, mode), image) < 5e-6
    wide = image.astype("f8")
    itself = cupy.asarray(wide)
    assert spline_filter(itself, output=itself, mode=mode) is itself
    assert error(to_host(itself), exact(image, mode), image) < 1e-12


@pytest.mark.parametrize("cval", [None, 3.0])
@pytest.mark.parametrize("kind", ["f4", "f8"])
@pytest.mark.parametrize("shape", [(100, 130, 170), (700, 1100), (5, 1, 4), (1, 300)])
def test_padded_images_as_scipy(cupy, shape, kind, cval):
    image = image_of(kind, shape, 2)
    mode = "nearest" if cval is None else "grid-constant"
    got = to_host(splines.filtered(cupy.asarray(image), Ends(mode, 12, cval), kind))
    assert error(got, exact(image, mode, 12, cval), image) < (5e-6 if kind == "f4" else 1e-9)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.integers(2, 3).flatmap(lambda rank: st.tuples(*([st.integers(1, 14)] * rank))),
    dtype=st.sampled_from(["u1", "u2", "f4", "f8"]),
    mode=st.sampled_from(MODES),
    cval=st.sampled_from([0.0, 7.0]),
    far=st.sampled_from([0.4, 3.0, 40.0]),
    kind=st.sampled_from(["f4", "f8"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_cubic_splines_as_scipy(cupy, shape, dtype, mode, cval, far, kind, seed):
    rng = np.random.default_rng(seed)
    image = image_of(dtype, shape, seed)
    out = np.float64 if dtype == "f8" else np.float32
    largest = np.append(np.abs(image.astype("f8")).ravel(), cval)
    places = np.stack([rng.uniform(-far, n - 1 + far, 60) for n in shape]).astype(kind)
    options = {"order": 3, "mode": mode, "cval": cval}
    got = map_coordinates(cupy.asarray(image), cupy.asarray(places), output=out, **options)
    expected = ndimage.map_coordinates(image.astype("f8"), places.astype("f8"), **options)
    assert error(to_host(got), expected, largest) < 1e-5

    matrix = np.diag(rng.uniform(0.5, 2, len(shape))) + rng.normal(0, 0.2, (len(shape),) * 2)
    offset = rng.uniform(-4, 4, len(shape))
    got = affine_transform(cupy.asarray(image), matrix, offset, output=out, **options)
    expected = ndimage.affine_transform(image.astype("f8"), matrix, offset, **options)
    off = np.abs(to_host(got).astype("f8") - expected) > 1e-5 * largest.max()
    # In mode constant a place beside an end of the image may be decided the other way.
    assert off.mean() <= (0.02 if mode == "constant" else 0)


def test_ways_to_give_the_output(cupy):
    image = cupy.asarray(image_of("u2", (30, 40, 50), 3))
    expected = exact(to_host(image), "mirror")
    assert spline_filter(image).dtype == np.float64
    for out in (cupy.empty(image.shape, "f4"), cupy.empty((60, 40, 50), "f4")[::2]):
        assert spline_filter(image, output=out) is out
        assert error(to_host(out), expected, to_host(image)) < 5e-6


@pytest.mark.parametrize("order", [2, 4, 5])
@pytest.mark.parametrize("mode", ["mirror", "grid-wrap"])
def test_other_orders(cupy, order, mode):
    image = image_of("f8", (30, 31, 32), 4)
    got = to_host(spline_filter(cupy.asarray(image), order, mode=mode))
    assert np.allclose(got, ndimage.spline_filter(image, order, mode=mode), atol=1e-6 * np.abs(image).max())


def test_no_memory_beyond_the_result(cupy):
    image = cupy.asarray(image_of("u2", (150, 160, 170), 5))
    spline_filter(image, output=np.float32)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = spline_filter(image, output=np.float32)
    # The pool hands out blocks of 512 bytes; lines that are cut into segments need a little more.
    assert pool.total_bytes() - before <= 1.05 * result.nbytes


def test_nothing_is_compiled_for_a_shape(cupy, monkeypatch):
    made = []
    real = cupy.RawModule
    monkeypatch.setattr(cupy, "RawModule", lambda *args, **options: made.append(1) or real(*args, **options))
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape = tuple(int(n) for n in rng.integers(1, 300, 3))
        spline_filter(cupy.asarray(rng.normal(size=shape).astype("f4")), output=np.float32, mode="reflect")
    assert len(made) <= 4  # columns, rows, short axes, and boundaries of segments


def test_work_goes_to_the_current_stream(cupy):
    image = cupy.asarray(image_of("f4", (64, 64, 64), 6))
    cupy.cuda.get_current_stream().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        got = spline_filter(image, output=np.float32)
        doubled = 2 * got
    stream.synchronize()
    assert error(to_host(doubled), 2 * exact(to_host(image), "mirror"), to_host(image)) < 1e-5


@pytest.mark.gpu_alone
def test_a_volume_of_more_than_2_to_the_31_voxels(cupy):
    """Its lines are those of small images: an axis is checked where indices exceed 32 bits."""
    shape = (1100, 1400, 1401)
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    image = (cupy.arange(shape[0] * shape[1] * shape[2], dtype=cupy.uint32) * cupy.uint32(2654435761)).view(cupy.uint8)
    image = image[3::4].reshape(shape)  # pseudo-random bytes
    result = spline_filter(image, output=np.float32)
    for corner in ((0, 0, 0), (1040, 1340, 1341), (700, 60, 600)):
        start = [max(0, a - 24) for a in corner]
        box = tuple(slice(a, b + 60 + 24) for a, b in zip(start, corner, strict=True))
        expected = ndimage.spline_filter(to_host(image[box]).astype("f8"))
        inside = tuple(slice(b - a, b - a + 60) for a, b in zip(start, corner, strict=True))
        got = to_host(result[tuple(slice(b, b + 60) for b in corner)])
        assert np.abs(got - expected[inside]).max() < 255 * 5e-6
    cupy.get_default_memory_pool().free_all_blocks()
