"""The resizing kernels on the CPU, thread after thread, against SciPy; they compile for GPUs."""

import numpy as np
import pytest
from emulator import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import compile_kernel
from scipy import ndimage
from skimage import transform

from linumpy.device import to_host
from linumpy.gpu import resizing
from linumpy.gpu.interpolation import resize

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: the kernels run on a GPU only")
DTYPES = ["u1", "u2", "i2", "f2", "f4", "f8"]
shapes = st.integers(2, 3).flatmap(
    lambda rank: st.tuples(*(st.tuples(st.integers(1, 17), st.integers(1, 17)) for _ in range(rank)))
)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(resizing, "load", emulated)


def image_of(dtype, shape, seed):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, endpoint=True).astype(dtype)


def by_scipy(image, output_shape, order, mode, sigmas):
    smooth = ndimage.gaussian_filter(image.astype(np.float64), sigmas, mode=mode.replace("grid-", ""))
    zoom = [m / n for n, m in zip(image.shape, output_shape, strict=True)]
    return ndimage.zoom(smooth, zoom, order=order, mode=mode, grid_mode=True)


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(shapes, st.sampled_from(DTYPES), st.sampled_from([0, 1]), st.sampled_from(resizing.MODES), st.integers(0, 999))
def test_kernels_as_scipy(sizes, dtype, order, mode, seed):
    shape, wanted = zip(*sizes, strict=True)
    image = image_of(dtype, shape, seed)
    sigmas = [max(0.0, (n / m - 1) / 2) for n, m in sizes]
    between = np.dtype("f8" if dtype == "f8" else "f4")
    plans = resizing.plan_axes(shape, wanted, order, mode, sigmas)
    got = resizing.run_passes(image, plans, between, between)
    expected = by_scipy(image, wanted, order, mode, sigmas)
    scale = max(1.0, float(np.abs(image.astype("f8")).max()))
    assert got.shape == expected.shape
    assert np.allclose(got, expected, rtol=0, atol=(1e-12 if dtype == "f8" else 3e-6) * scale)
    assert np.allclose(
        resizing.resample_axes(image, wanted, order=order, mode=mode, sigmas=sigmas), expected, atol=1e-5 * scale
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["along", "along_x"])
def test_the_kernels_compile(name, dtype):
    for target in ("f4", "f8") if dtype == "f8" else ("f4", dtype):
        for architecture in ("sm_80", "sm_90"):
            spec = resizing.kernel_spec(name, np.dtype(dtype), np.dtype(target))
            assert name.encode() in compile_kernel(spec, architecture)


@needs_compiler
@pytest.mark.parametrize(("dtype", "target"), [("u1", "u1"), ("u2", "u2"), ("i2", "i2"), ("f4", "u1"), ("f4", "f2")])
def test_the_last_pass_rounds_and_saturates(dtype, target):
    image = image_of(dtype, (9, 10, 12), 5)
    plans = resizing.plan_axes(image.shape, (4, 5, 12), 1, "mirror", (0, 0, 0))
    got = resizing.run_passes(image, plans, np.dtype("f4"), np.dtype(target))
    expected = by_scipy(image, (4, 5, 12), 1, "mirror", (0, 0, 0))
    if np.dtype(target).kind in "iu":
        info = np.iinfo(target)
        expected = np.clip(expected, info.min, info.max)
    assert got.dtype == target
    # A unit where rounding decides; float16 has 11 bits.
    assert np.abs(got.astype("f8") - expected).max() <= (0.51 if np.dtype(target).kind in "iu" else 0.2)


def test_the_axis_that_shrinks_most_goes_first():
    plans = resizing.plan_axes((8, 9, 10, 7), (4, 18, 2, 7), 1, "mirror", (0.5, 0, 2, 0))
    assert [plan.axis for plan in plans] == [2, 0, 1]


MODES = ["reflect", "symmetric", "edge", "wrap", "constant"]


@given(
    shapes,
    st.sampled_from(["u1", ">u2", "i2", "f4", "f8"]),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(MODES),
    st.sampled_from([None, True, False]),
    st.booleans(),
    st.integers(0, 999),
)
def test_same_as_scikit_image(sizes, dtype, order, mode, anti_aliasing, preserve_range, seed):
    shape, wanted = zip(*sizes, strict=True)
    image = image_of(dtype, shape, seed)
    got = resize(image, wanted, order=order, mode=mode, anti_aliasing=anti_aliasing, preserve_range=preserve_range)
    # At order 0 scikit-image smooths integers as integers; this package as floats.
    given_image = image.astype("f8") if order == 0 else image
    smooth = anti_aliasing if order or anti_aliasing is not None else None if image.dtype.kind == "f" else False
    expected = transform.resize(
        given_image, wanted, order=order, mode=mode, anti_aliasing=smooth, preserve_range=preserve_range, clip=False
    )
    assert got.dtype == ("f8" if dtype == "f8" else "f4")
    assert np.allclose(got, expected, rtol=0, atol=2e-5 * max(1.0, np.abs(expected).max()))


def test_a_sigma_of_ones_own_and_strided_images():
    image = image_of("f8", (20, 22), 1)[::2, ::-1]
    for sigma in (1.3, (0.7, 0.0)):
        expected = transform.resize(image, (5, 9), anti_aliasing_sigma=sigma, anti_aliasing=True, clip=False)
        assert np.allclose(resize(image, (5, 9), anti_aliasing_sigma=sigma), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"output_shape": (0, 2)}, ValueError, "output_shape"),
        ({"output_shape": (2,)}, ValueError, "output_shape"),
        ({"mode": "mirror"}, ValueError, "mode='mirror'"),
        ({"order": 6}, ValueError, "order=6"),
        ({"anti_aliasing_sigma": -1}, ValueError, "anti_aliasing_sigma=-1"),
        ({"anti_aliasing_sigma": (1, 2, 3)}, ValueError, "anti_aliasing_sigma"),
        ({"image": np.ones((4, 4), bool)}, TypeError, "bool"),
        ({"image": np.ones((0, 4))}, ValueError, r"shape \(0, 4\)"),
    ],
)
def test_bad_input(arguments, error, message):
    with pytest.raises(error, match=message):
        resize(**{"image": np.ones((4, 4)), "output_shape": (2, 2), **arguments})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize("wanted", [(12, 16, 18), (40, 7, 55), (1, 31, 36)])
def test_same_on_the_gpu(cupy, monkeypatch, dtype, order, wanted):
    monkeypatch.undo()  # the kernels as they are
    image = image_of(dtype, (23, 31, 36), 4)
    for mode in MODES:
        got = resize(cupy.asarray(image), wanted, order=order, mode=mode)
        expected = resize(image, wanted, order=order, mode=mode)
        assert isinstance(got, cupy.ndarray)
        assert got.dtype == expected.dtype
        scale = float(np.abs(image.astype("f8")).max())
        assert np.allclose(to_host(got), expected, rtol=0, atol=(1e-9 if dtype == "f8" else 2e-5) * scale)
