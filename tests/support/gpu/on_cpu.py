"""NumPy arrays in the place of CuPy's: the resampling functions run their kernels on the CPU, thread after thread."""

import pytest

from linumpy.gpu.ndimage import cells, dispatch, general, nearest, sampling, splines, transform
from linumpy.gpu.resize import resizing
from linumpy.resample.blocks import block
from tests.support.gpu.emulator import emulated, needs_compiler

#: Where functions ask on which side an array is.
_ASKING = (transform, dispatch, block, resizing)
LAUNCHING = (cells, general, nearest, resizing, sampling, splines)


def patch(monkeypatch):
    """Let NumPy arrays go where CuPy's go."""
    for module in _ASKING:
        monkeypatch.setattr(module, "is_device_array", lambda _: True)
    for module in LAUNCHING:
        monkeypatch.setattr(module, "load", emulated)


def by_kernels(test):
    """Mark a test whose NumPy arrays take the way of CuPy's, through kernels that run on the CPU."""
    return needs_compiler(pytest.mark.usefixtures("as_if_on_a_device")(test))
