"""Devices for tests of what goes on around the kernels."""

import pytest

from linumpy.rays import compositing, launch, occupancy
from tests.support.gpu.cupy_on_host import install, load
from tests.support.gpu.emulator import needs_compiler


def forget_uploads():
    """What is kept on a device is kept for its number, which a CuPy in host memory shares with a device."""
    launch._linear_upload.cache_clear()
    occupancy._order_on_device.cache_clear()


@pytest.fixture(params=[pytest.param("host", marks=needs_compiler), pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """CuPy; or one in host memory with emulated kernels, which runs everything around them."""
    if request.param == "gpu":
        yield request.getfixturevalue("cupy")
        return
    forget_uploads()
    for module in (launch, compositing):
        monkeypatch.setattr(module, "load", load)
    yield install(monkeypatch)
    forget_uploads()


@pytest.fixture
def many(request):
    """So many rays that a device runs several blocks at a time; fewer where each thread is emulated."""
    return 5000 if request.node.get_closest_marker("gpu") else 1000
