"""If this fails, a device filters splines, or samples large images, unlike SciPy; see test_random_calls.py."""

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


def test_ways_to_give_the_output(cupy):
    image = cupy.asarray(image_of("u2", (30, 40, 50), 3))
    expected = exact(to_host(image), "mirror")
    assert spline_filter(image).dtype == np.float64
    for out in (cupy.empty(image.shape, "f4"), cupy.empty((60, 40, 50), "f4")[::2]):
        assert spline_filter(image, output=out) is out
        assert error(to_host(out), expected, to_host(image)) < 5e-6


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
    for number in range(50):
        image = cupy.asarray(rng.normal(size=rng.integers(1, 40, 3)).astype("f4"))
        affine_transform(image, np.eye(3) * 1.1, 0.3, output_shape=image.shape[::-1], order=1)
        map_coordinates(image, cupy.asarray(rng.uniform(0, 5, (3, number + 1)).astype("f4")), order=1)
    assert len(made) <= 3  # the affine map turned or not, and points
    for _ in range(50):
        image = cupy.asarray(rng.normal(size=rng.integers(1, 300, 3)).astype("f4"))
        spline_filter(image, output=np.float32, mode="reflect")
    assert len(made) <= 7  # columns, rows, short axes, and boundaries of segments


def test_large_images_and_outputs_in_place(cupy):
    image = cupy.asarray(np.random.default_rng(1).normal(size=(130, 140, 150)).astype("f4"))
    matrix = np.eye(3) + np.random.default_rng(2).normal(0, 0.05, (3, 3))
    out = cupy.empty((140, 130, 120), "f4")
    for order in (0, 1, 3):
        got = affine_transform(image, matrix, (1, 2, 3), output_shape=out.shape, order=order, mode="mirror", output=out)
        assert got is out
        expected = ndimage.affine_transform(to_host(image), matrix, (1, 2, 3), out.shape, order=order, mode="mirror")
        assert (np.abs(to_host(out) - expected) < 1e-4).mean() > (0.9999 if order else 0.999)


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
