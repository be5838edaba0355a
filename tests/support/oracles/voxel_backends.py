"""Backends that take NumPy arrays wherever they work, for tests."""

import importlib.util

import numpy as np
import pytest

from linumpy.device import to_host
from tests.support.gpu.cupy_on_host import install

NO_WARP = importlib.util.find_spec("warp") is None
needs_warp = pytest.mark.skipif(NO_WARP, reason="Warp is not installed: pip install warp-lang")


def make(name, patch):
    if name == "warp-cpu":
        return on_host(patch)
    if name == "scipy":
        from linumpy.voxel.backends.by_scipy import ScipyBackend

        return ScipyBackend()
    from linumpy.voxel.backends.by_warp import WarpBackend

    return WarpBackend("cuda")


def on_host(patch):
    """Make ``WarpBackend("cuda")`` with Warp's device "cpu" and no streams; Zarr arrays are read by zarr-python."""
    from linumpy.gpu import zarr_io
    from linumpy.voxel.backends import by_warp as warp_backend
    from linumpy.write import device_chunks

    def read(array, region=None):
        return cupy.asarray(np.ascontiguousarray(array[region]))

    for module in (zarr_io, device_chunks):
        patch.setattr(module, "read_zarr_to_gpu", read)
    cupy = install(patch)
    patch.setattr(warp_backend, "require_cuda", lambda: cupy)
    patch.setattr(warp_backend, "_stream", lambda device, pointer: None)
    made = warp_backend.WarpBackend("cuda")
    made._device = "cpu"
    return made


class Tried:
    """A backend whose methods take NumPy arrays and give them back, wherever it works; for tests."""

    def __init__(self, name, patch):
        self.backend = make(name, patch)
        self.name = name

    def put(self, array):
        return self.backend.xp.array(array)

    def __getattr__(self, method):
        def call(*arguments, **options):
            taken = [self.put(one) if isinstance(one, np.ndarray) and one.dtype == bool else one for one in arguments]
            found = getattr(self.backend, method)(*taken, **options)
            for given, here in zip(arguments, taken, strict=True):
                if here is not given and isinstance(given, np.ndarray):
                    given[...] = to_host(here)  # what is changed in place
            return tuple(map(self._get, found)) if isinstance(found, tuple) else self._get(found)

        return call

    def _get(self, found):
        if hasattr(found, "shape"):
            assert isinstance(found, self.backend.xp.ndarray) or found.shape == ()
            return to_host(found)
        return found
