"""If this fails, a device resamples unlike SciPy, or compiles a kernel for a shape."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu.interpolation import affine_transform, map_coordinates
from linumpy.gpu.ndimage.sampling_launch import MODES
from tests.gpu.ndimage.test_sampling import close, image_of, shapes

pytestmark = pytest.mark.gpu

DTYPES = ["u1", "u2", "i2", "f4", "f8", "i4"]


@pytest.mark.parametrize("order", range(6))
@settings(max_examples=35, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(MODES),
    kind=st.sampled_from(["f4", "f8"]),
    prefilter=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_points_as_scipy(cupy, shape, dtype, order, mode, kind, prefilter, seed):
    rng = np.random.default_rng(seed)
    image = image_of(dtype, shape, seed)
    places = np.stack([rng.uniform(-3, n + 2, 60) for n in shape]).astype(kind).reshape(len(shape), 6, 10)
    options = {"order": order, "mode": mode, "cval": 7.0, "prefilter": prefilter}
    got = to_host(map_coordinates(cupy.asarray(image), cupy.asarray(places), **options))
    expected = ndimage.map_coordinates(image, places, **options)
    assert got.dtype == expected.dtype
    assert close(got, expected, image, order).mean() > 0.98


@pytest.mark.parametrize("order", range(6))
@settings(max_examples=35, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(MODES),
    form=st.sampled_from(["diagonal", "square", "with offset", "homogeneous"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_affine_as_scipy(cupy, shape, dtype, order, mode, form, seed):
    rng = np.random.default_rng(seed)
    rank = len(shape)
    image = image_of(dtype, shape, seed)
    matrix = np.diag(rng.uniform(0.5, 2, rank)) + (rng.normal(0, 0.2, (rank, rank)) if form != "diagonal" else 0)
    offset = rng.uniform(-2, 2, rank)
    given = {
        "diagonal": np.diag(matrix),
        "square": matrix,
        "with offset": np.column_stack([matrix, offset]),
        "homogeneous": np.vstack([np.column_stack([matrix, offset]), [0] * rank + [1]]),
    }[form]
    out_shape = tuple(int(n) for n in rng.integers(1, 15, rank))
    options = {"order": order, "mode": mode, "cval": 3.0, "output_shape": out_shape}
    got = to_host(affine_transform(cupy.asarray(image), given, offset, **options))
    expected = ndimage.affine_transform(image, given, offset, **options)
    assert got.dtype == expected.dtype
    assert close(got, expected, image, order).mean() > 0.98


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 2, 2), (1, 1, 3), (4, 1)])
def test_short_axes(cupy, mode, shape):
    image = image_of("u2", shape, 0)
    places = np.random.default_rng(0).uniform(0, np.array(shape)[:, None] - 1 + 1e-9, (len(shape), 30))
    got = to_host(map_coordinates(cupy.asarray(image), cupy.asarray(places), order=3, mode=mode))
    expected = ndimage.map_coordinates(image, places, order=3, mode=mode)
    assert close(got, expected, image, 3).all()


def test_nothing_is_compiled_for_a_shape(cupy, monkeypatch):
    made = []
    real = cupy.RawModule
    monkeypatch.setattr(cupy, "RawModule", lambda *args, **options: made.append(1) or real(*args, **options))
    rng = np.random.default_rng(0)
    for number in range(50):
        shape = tuple(int(n) for n in rng.integers(1, 40, 3))
        image = cupy.asarray(rng.normal(size=shape).astype("f4"))
        affine_transform(image, np.eye(3) * 1.1, 0.3, output_shape=shape[::-1], order=1)
        map_coordinates(image, cupy.asarray(rng.uniform(0, 5, (3, number + 1)).astype("f4")), order=1)
    assert len(made) <= 3  # the affine map turned or not, and points


def test_large_images_and_outputs_in_place(cupy):
    image = cupy.asarray(np.random.default_rng(1).normal(size=(130, 140, 150)).astype("f4"))
    matrix = np.eye(3) + np.random.default_rng(2).normal(0, 0.05, (3, 3))
    out = cupy.empty((140, 130, 120), "f4")
    for order in (0, 1, 3):
        got = affine_transform(image, matrix, (1, 2, 3), output_shape=out.shape, order=order, mode="mirror", output=out)
        assert got is out
        expected = ndimage.affine_transform(to_host(image), matrix, (1, 2, 3), out.shape, order=order, mode="mirror")
        assert (np.abs(to_host(out) - expected) < 1e-4).mean() > (0.9999 if order else 0.999)


def test_halves(cupy):
    image = np.random.default_rng(1).normal(size=(20, 21, 22)).astype("f2")
    got = to_host(affine_transform(cupy.asarray(image), np.eye(3) * 0.9, 0.2, order=1, mode="nearest"))
    expected = ndimage.affine_transform(image.astype("f4"), np.eye(3) * 0.9, 0.2, order=1, mode="nearest")
    assert got.dtype == np.float16
    assert np.abs(got - expected).max() < 4e-3
