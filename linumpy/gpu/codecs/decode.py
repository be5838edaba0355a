"""The kernels that decode chunks on the device.

In: the launches of :mod:`linumpy.plan.decode.launches`. Out: compiled kernels, with the shared memory that they need.
docs/architecture.md says why linumpy does not use nvCOMP's decoders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linumpy.gpu.kernels import KernelSpec
from linumpy.plan.decode.launches import DecodeLaunch, DeviceLimits

if TYPE_CHECKING:
    import cupy

#: More dynamic shared memory than this must be requested, since kernels also declare static shared memory.
_DEFAULT_SHARED_NBYTES = 2**13


def kernel_spec(launch: DecodeLaunch) -> KernelSpec:
    """Return the kernel of a launch. Decoders are specialised only by the size of their team."""
    return KernelSpec(
        launch.source,
        launch.kernel,
        (("TEAM_WARPS", str(launch.team)),) if launch.team else (),
        "linumpy.gpu.codecs.cuda",
    )


def limits_of(device: cupy.cuda.Device) -> DeviceLimits:
    """Return the properties of a device that launches depend on."""
    attributes = device.attributes
    return DeviceLimits(attributes["MultiProcessorCount"], attributes["MaxSharedMemoryPerBlockOptin"])


#: Dynamic shared memory requested so far for each kernel, in bytes.
_requested: dict[cupy.RawKernel, int] = {}


def allow(kernel: cupy.RawKernel, shared_nbytes: int) -> None:
    """Request dynamic shared memory for a kernel. Requested once, since the driver's call takes as long as a launch."""
    if _requested.get(kernel, -1) >= shared_nbytes:
        return
    kernel.preferred_shared_memory_carveout = 100  # these kernels need little L1 cache
    if shared_nbytes > _DEFAULT_SHARED_NBYTES and kernel.max_dynamic_shared_size_bytes < shared_nbytes:
        kernel.max_dynamic_shared_size_bytes = shared_nbytes
    _requested[kernel] = shared_nbytes
