"""Backends for tests, which take NumPy arrays on the host and on a device."""

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
        from linumpy.voxel.backends.operations import Backend

        return Backend()
    from linumpy.voxel.backends.by_warp import WarpBackend

    return WarpBackend("cuda")


def on_host(patch, kind="WarpBackend"):
    """Make a backend for a device that stands in for a GPU; Zarr arrays are read by zarr-python."""
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
    backend = getattr(warp_backend, kind)()
    backend._device = "cpu"
    return backend


class Tried:
    """A backend whose methods take and return NumPy arrays, on the host and on a device."""

    def __init__(self, name, patch):
        self.backend = make(name, patch)
        self.name = name

    def put(self, array):
        return self.backend.xp.array(array)

    def __getattr__(self, method):
        def call(*arguments, **options):
            moved = [self.put(mask) if _is_mask(mask) else mask for mask in arguments]
            result = getattr(self.backend, method)(*moved, **options)
            for mask, device_mask in zip(arguments, moved, strict=True):
                if _is_mask(mask):
                    mask[...] = to_host(device_mask)  # methods may change masks in place
            return tuple(map(self._get, result)) if isinstance(result, tuple) else self._get(result)

        return call

    def _get(self, result):
        if hasattr(result, "shape"):
            assert isinstance(result, self.backend.xp.ndarray) or result.shape == ()
            return to_host(result)
        return result


def _is_mask(argument):
    return isinstance(argument, np.ndarray) and argument.dtype == bool
