"""If this fails, images are smoothed by other weights, along another axis, or with another border than in SciPy."""

import numpy as np
import pytest
import scipy.ndimage

from linumpy.gpu.ndimage import correlate
from tests.support.gpu import emulator

DTYPES = [np.dtype("f4"), np.dtype("f8")]
CASES = [
    ((2, 13, 9), (0, 1.0, 0.7)), ((1, 1, 5), (0, 2.0, 2.0)), ((300,), (16.0,)), ((3, 4), (9.0, 0)),
    ((0, 4), (1.0, 1.0)),
]  # fmt: skip


@pytest.fixture(params=["host", pytest.param("emulator", marks=emulator.needs_compiler),
                        pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.sanitize])])  # fmt: skip
def xp(request, monkeypatch):
    """What makes the arrays: NumPy, also for the kernels on the CPU, or CuPy."""
    if request.param == "gpu":
        return request.getfixturevalue("cupy")
    if request.param == "emulator":
        monkeypatch.setattr(correlate, "is_device_array", lambda _: True)
        monkeypatch.setattr(correlate, "load", emulator.emulated)
    return np


@pytest.mark.parametrize(("shape", "sigmas"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_scipy(xp, shape, sigmas, dtype):
    images = np.random.default_rng(5).normal(0, 100, shape).astype(dtype)
    if images.size:
        images.flat[-1] = np.nan
    wanted = scipy.ndimage.gaussian_filter(images, sigmas, mode="nearest")
    for given in (xp.asarray(images), xp.asarray(images.T.copy()).T):
        found = correlate.gaussian(given, sigmas)
        assert type(found) is type(given)
        assert found.dtype == dtype
        got = found if xp is np else found.get()
        np.testing.assert_allclose(got, wanted, rtol=1e-12 if dtype == "f8" else 1e-6, atol=1e-5)
