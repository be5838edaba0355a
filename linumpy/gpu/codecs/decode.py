"""The kernels that decode chunks on the device.

In: the launches of :mod:`linumpy.plan.decode.launches`. Out: compiled kernels, with the shared memory that they need.
linumpy has its own decoders: nvCOMP's are fast on many small chunks, but take temporary memory of six times the data,
and a broken chunk makes them access memory out of bounds, after which the process cannot use its GPU any more.
"""

from __future__ import annotations

from typing import Any

from linumpy.gpu.kernels import KernelSpec
from linumpy.plan.decode.launches import DecodeLaunch, DeviceLimits

#: Dynamic shared memory beyond this, with what the kernel declares, has to be requested.
_DEFAULT_SHARED_NBYTES = 2**13


def kernel_spec(launch: DecodeLaunch) -> KernelSpec:
    """Return the kernel of a launch; decoders are specialised by their team only."""
    return KernelSpec(
        launch.source,
        launch.kernel,
        (("TEAM_WARPS", str(launch.team)),) if launch.team else (),
        "linumpy.gpu.codecs.cuda",
    )


def limits_of(device: Any) -> DeviceLimits:
    """Return the properties of a device that launches depend on."""
    attributes = device.attributes
    return DeviceLimits(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


#: Dynamic shared memory requested so far for each kernel, in bytes.
_requested: dict[Any, int] = {}


def allow(kernel: Any, shared_nbytes: int) -> None:
    """Request dynamic shared memory for a kernel; once, since a call of the driver takes as long as a launch."""
    if _requested.get(kernel, -1) >= shared_nbytes:
        return
    kernel.preferred_shared_memory_carveout = 100  # these kernels need little L1 cache
    if shared_nbytes > _DEFAULT_SHARED_NBYTES and kernel.max_dynamic_shared_size_bytes < shared_nbytes:
        kernel.max_dynamic_shared_size_bytes = shared_nbytes
    _requested[kernel] = shared_nbytes
