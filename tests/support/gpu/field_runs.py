"""Decode fields of linumpy.sampling on the host, and by their kernels under the emulator."""

import contextlib

import numpy as np
import pytest

from linumpy.sampling.fields import device_tables
from tests.support.gpu.emulator import emulated, needs_compiler

#: Where the same points are decoded: by NumPy, and by the kernel.
SIDES = ["host", pytest.param("kernel", marks=needs_compiler)]


@contextlib.contextmanager
def by_kernel(field):
    """Let NumPy arrays go where CuPy's go."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(field), "decode", type(field).launch)
        patch.setattr(device_tables, "load", emulated)
        yield


def decode(field, coords, side="host"):
    """Values at points: (n, 3) → (channels, n); what the field does not write stays -12345."""
    coords = np.ascontiguousarray(coords, np.float32)
    out = np.full((field.n_channels, len(coords)), -12345, np.float32)
    with by_kernel(field) if side == "kernel" else contextlib.nullcontext():
        field.decode(coords, out)
    return out


def on_gpu(field, coords):
    """Values at points, decoded on the GPU."""
    import cupy

    out = cupy.full((field.n_channels, len(coords)), -12345, cupy.float32)
    field.decode(cupy.asarray(np.ascontiguousarray(coords, np.float32)), out)
    return out.get()


def grid_coords(shape, points):
    """Coordinates in the unit cube of points in units of voxels, whose centres are at integers: (n, 3) → (n, 3)."""
    return ((np.asarray(points, float) + 0.5) / shape).astype(np.float32)
