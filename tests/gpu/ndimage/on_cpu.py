"""NumPy arrays in the place of CuPy's: the resampling functions run their kernels on the CPU, thread after thread."""

from emulator import emulated

from linumpy.gpu.ndimage import dispatch as sampling_paths
from linumpy.gpu.ndimage import general, nearest, sampling
from linumpy.gpu.ndimage import splines as spline
from linumpy.gpu.ndimage import transform as spline_transform
from linumpy.gpu.resize import resizing
from linumpy.resample import block as affine_box

#: Where functions ask on which side an array is.
_ASKING = (spline_transform, sampling_paths, affine_box, resizing)
_LAUNCHING = (general, nearest, resizing, sampling, spline)


def patch(monkeypatch):
    """Let NumPy arrays go where CuPy's go."""
    for module in _ASKING:
        monkeypatch.setattr(module, "is_device_array", lambda _: True)
    for module in _LAUNCHING:
        monkeypatch.setattr(module, "load", emulated)
