"""The resizing kernels on the CPU, thread after thread, against SciPy; they compile for GPUs."""

import numpy as np
import pytest
from emulator import COMPILER, emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from nvrtc import compile_kernel
from scipy import ndimage

from linumpy.gpu import resizing

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
