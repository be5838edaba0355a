"""Work on several devices at the same time: a thread for each device, on the cores of the device's NUMA node.

In: numbers of devices, and a function. Out: the function's result for each device. Errors: if several devices fail, the
error of the device that comes first in the list, raised after all have ended.
"""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from linumpy.device import require_cuda
from linumpy.io.zarr_mode import in_mode_of_caller

Result = TypeVar("Result")

_BUS = Path("/sys/bus/pci/devices")


def checked_devices(devices: str | Iterable[int]) -> list[int]:
    """Check the devices that a caller names; return their numbers.

    `GpuUnavailableError`: No CUDA device, or a number that no device has. `ValueError`, `TypeError`: An empty list, a
    device twice, a negative number, or a value that is not a number.
    """
    count = require_cuda().cuda.runtime.getDeviceCount()
    if isinstance(devices, str):
        if devices != "all":
            raise ValueError(f'devices={devices!r}: "all", or numbers of CUDA devices')
        return list(range(count))
    numbers = [operator.index(number) for number in devices]
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise ValueError(f"devices {numbers}: different numbers of CUDA devices, from 0 on")
    require_cuda(max(numbers))
    return numbers


def on_each(devices: Sequence[int], work: Callable[[int], Result]) -> list[Result]:
    """Call a function for each device, at the same time.

    `work`: called with the index of a device in `devices`, in a thread in which that device is current.

    Returns: The result of each device, in the order of `devices`. The work that `work` queued on its stream has ended.
    """
    cupy = require_cuda()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()

    def call(position: int) -> Result:
        device = cupy.cuda.Device(devices[position])
        stay_near(device.pci_bus_id, cores)
        with device:
            result = work(position)
            # Other threads use the result on streams that are not ordered after this one.
            cupy.cuda.get_current_stream().synchronize()
            return result

    with ThreadPoolExecutor(len(devices), "linumpy-device", in_mode_of_caller()) as pool:
        futures = [pool.submit(call, position) for position in range(len(devices))]
    return [future.result() for future in futures]


def stay_near(bus_id: str, cores: set[int], root: Path = _BUS) -> None:
    """Run this thread on those of `cores` that belong to a device's NUMA node, or on all `cores` if there are none.

    `cores` is empty where the system does not choose cores for threads; then nothing changes.
    """
    if not cores:
        return
    near: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        near = cores_of((root / bus_id.lower() / "local_cpulist").read_text())
    os.sched_setaffinity(0, near & cores or cores)


def cores_of(text: str) -> set[int]:
    """Parse a list of cores in Linux's format: ``"0-3,8"``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
