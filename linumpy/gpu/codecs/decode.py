"""The kernels that decode chunks on the device.

In: the launches of :mod:`linumpy.plan.decode.launches`. Out: the specification of each kernel, which
:mod:`linumpy.gpu.kernels` compiles, and the kernels' shared memory. The core launches the kernels.
docs/architecture.md says why linumpy does not use nvCOMP's decoders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from linumpy.gpu.kernels import KernelSpec
from linumpy.plan.decode.launches import DecodeLaunch, DeviceLimits

if TYPE_CHECKING:
    import cupy

#: Bytes of dynamic shared memory that need no request: with the kernels' static shared memory they stay below 48 KiB.
_DEFAULT_SHARED_NBYTES = 2**13


def kernel_spec(launch: DecodeLaunch) -> KernelSpec:
    """Return the specification of the kernel of a launch. Decoders are specialised only by the number of team warps."""
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


#: Largest dynamic shared memory that was requested for each kernel so far, in bytes.
_requested: dict[cupy.RawKernel, int] = {}


def allow(kernel: cupy.RawKernel, shared_nbytes: int) -> None:
    """Allow a kernel to use `shared_nbytes` bytes of dynamic shared memory.

    The driver is called only for more than before, since its call takes as long as a launch.
    """
    if _requested.get(kernel, -1) >= shared_nbytes:
        return
    kernel.preferred_shared_memory_carveout = 100  # these kernels need little L1 cache
    if shared_nbytes > _DEFAULT_SHARED_NBYTES and kernel.max_dynamic_shared_size_bytes < shared_nbytes:
        kernel.max_dynamic_shared_size_bytes = shared_nbytes
    _requested[kernel] = shared_nbytes
