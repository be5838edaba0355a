"""Decode: stored bytes of chunks → chunks, on the device.

In: the launches that :mod:`linumpy.plan.decode` lists. Out: kernels on CuPy's current stream. The decoders are our own:
nvCOMP's are fast on many small chunks, but take a device memory of six times the data, and a broken chunk makes them
read and write where nothing is theirs, after which the process has lost its GPU.
"""

from __future__ import annotations

import numpy as np

from linumpy.gpu.kernels import KernelSpec, load
from linumpy.plan.decode import Launch


def kernel_spec(launch: Launch) -> KernelSpec:
    """Name the kernel of a launch; decoders are compiled for no type and no shape."""
    return KernelSpec(launch.source, launch.kernel, ())


def start(launches: list[Launch]) -> None:
    """Start kernels, in their order, on CuPy's current stream."""
    for launch in launches:
        load(kernel_spec(launch))(launch.grid, (launch.block,), tuple(np.uint64(value) for value in launch.args))
