"""Decode: stored bytes of chunks → chunks, on the device.

In: the launches that :mod:`linumpy.plan.decode.launches` lists. Out: kernels on CuPy's current stream. The decoders are
ours: nvCOMP's are fast on many small chunks, but take a device memory of six times the data, and a broken chunk makes
them read and write where nothing is theirs, after which the process has lost its GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.gpu.kernels import KernelSpec, load, prepare
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.launches import DeviceLimits, Launch, plan_launches
from linumpy.plan.decode.workspace import plan_workspace

#: A kernel that wants more shared memory, together with what it declares, must ask for it.
_WITHOUT_ASKING = 2**13


def kernel_spec(launch: Launch) -> KernelSpec:
    """Name the kernel of a launch; decoders are compiled for no type and no shape."""
    return KernelSpec(
        launch.source,
        launch.kernel,
        (("TEAM_WARPS", str(launch.team)),) if launch.team else (),
        "linumpy.gpu.codecs.cuda",
    )


def kernel_specs(chain: DecodeChain) -> list[KernelSpec]:
    """Name the kernels that decode a chain, for :func:`linumpy.gpu.kernels.prepare`."""
    space = plan_workspace(chain, chunks=1, stored_nbytes=1, decoded_nbytes=1, words_nbytes=0, pool_nbytes=0)
    return [kernel_spec(launch) for launch in plan_launches(chain, space, 0, 0, 1, 1, DeviceLimits(1, 2**16))]


def limits_of(device: Any) -> DeviceLimits:
    """Ask a ``cupy.cuda.Device`` what the launches are planned by."""
    attributes = device.attributes
    return DeviceLimits(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


#: Shared memory that kernels have been allowed, beyond what they have without asking.
_allowed: dict[Any, int] = {}


def start(launches: list[Launch]) -> None:
    """Start kernels, in their order, on CuPy's current stream; those that are new are compiled side by side."""
    specs = [kernel_spec(launch) for launch in launches]
    prepare(specs)
    for launch, spec in zip(launches, specs, strict=True):
        kernel = load(spec)
        allow(kernel, launch.shared)
        args = tuple(np.uint64(value) for value in launch.args)
        kernel(launch.grid, (launch.block,), args, shared_mem=launch.shared)


def allow(kernel: Any, shared: int) -> None:
    """Let a kernel have so much shared memory; the driver is asked once, since that takes as long as a launch."""
    if _allowed.get(kernel, -1) >= shared:
        return
    kernel.preferred_shared_memory_carveout = 100  # these kernels live in shared memory
    if shared > _WITHOUT_ASKING and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    _allowed[kernel] = shared
