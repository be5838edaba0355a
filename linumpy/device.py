"""The device of computations; the only module that finds out which GPU packages can be used.

In: ``"auto"``, ``"cuda"`` or ``"cpu"``, or an array. Out: a :class:`Device`, the array module (CuPy or NumPy), or a
description of the machine. Errors: ``ValueError`` for an unknown device,
:class:`~linumpy.errors.GpuUnavailableError` if a CUDA device is requested and cannot be used. GPU packages are imported
on first use.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from linumpy import kernel_cache, packages
from linumpy.arrays import DeviceName
from linumpy.arrays import array_module as array_module
from linumpy.arrays import is_device_array as is_device_array
from linumpy.arrays import to_host as to_host
from linumpy.errors import GpuUnavailableError

log = logging.getLogger(__name__)

#: Environment variable that ``resolve()`` uses if the caller names no device.
DEVICE_VARIABLE = "LINUMPY_DEVICE"
_KINDS: tuple[DeviceName, ...] = ("auto", "cuda", "cpu")

#: Whether this process has started CUDA; and whether it was forked from a process that had, so that CUDA fails in it.
_cuda_started = _cuda_lost = False


def _after_fork() -> None:
    global _cuda_lost
    _cuda_lost = _cuda_started


def call_after_fork(function: Callable[[], object]) -> None:
    """Have a function called in every child that this process forks; Windows has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


call_after_fork(_after_fork)


def usable_cores() -> int:
    """Return the number of cores that this process may use; of all cores where the system does not tell (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Return the bytes of memory of this machine; 8 GiB where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2**33


@dataclass(frozen=True, slots=True)
class Device:
    """A device for computations.

    Attributes
    ----------
    kind : str
        ``"cuda"`` or ``"cpu"``.
    index : int or None
        Number of the CUDA device; None on the CPU.
    reason : str
        Why this device was chosen, in a few words.
    """

    kind: Literal["cuda", "cpu"]
    index: int | None
    reason: str

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA device."""
        return self.kind == "cuda"

    @property
    def xp(self) -> ModuleType:
        """The array module of the device: CuPy or NumPy."""
        return _import_cupy() if self.is_cuda else np

    def __str__(self) -> str:
        return f"cuda:{self.index}" if self.is_cuda else "cpu"


def resolve(kind: DeviceName | None = None, device_id: int | None = None) -> Device:
    """Choose the device.

    Parameters
    ----------
    kind : {"auto", "cuda", "cpu"}, optional
        ``"auto"`` chooses the GPU if CuPy and a device are available and else the CPU, and logs the choice and its
        reason. ``"cuda"`` raises without a device. By default the value of the environment variable
        ``LINUMPY_DEVICE``, and without it ``"auto"``.
    device_id : int, optional
        Number of the CUDA device, which must then be available; by default CuPy's current device.

    Raises
    ------
    ValueError
        Another `kind` or value of ``LINUMPY_DEVICE``, a negative `device_id`, or a `device_id` together with ``"cpu"``.
    GpuUnavailableError
        ``"cuda"`` or a `device_id` is requested, and there is no such device.
    """
    requested = requested_kind(kind)
    # Floats with an integer value, such as 1.0, are taken; True is not.
    if device_id is not None and (isinstance(device_id, bool) or int(device_id) != device_id or device_id < 0):
        raise ValueError(f"device_id={device_id!r}: a CUDA device has a number from 0 on")
    if requested == "cpu":
        if device_id is not None:
            raise ValueError(f"device_id={device_id!r} goes with a CUDA device, but the device is 'cpu'")
        return Device("cpu", None, "asked for")
    missing = why_no_cuda(device_id)
    if missing is None:
        index = int(_import_cupy().cuda.Device().id) if device_id is None else int(device_id)
        device = Device("cuda", index, "asked for" if requested == "cuda" else "a CUDA device is there")
    elif requested == "cuda" or device_id is not None:
        raise GpuUnavailableError(missing)
    else:
        device = Device("cpu", None, missing)
    if requested == "auto":
        log.info("device: %s (%s)", device, device.reason)
    return device


def requested_kind(kind: DeviceName | None) -> DeviceName:
    """Return the kind of device that the caller, or else ``LINUMPY_DEVICE``, requests; ``ValueError`` if unknown."""
    if kind is not None:
        if kind not in _KINDS:
            raise ValueError(f"device {kind!r} is unknown: choose one of {', '.join(_KINDS)}")
        return kind
    name = os.environ.get(DEVICE_VARIABLE, "").strip().lower() or "auto"
    if name not in _KINDS:
        raise ValueError(f"{DEVICE_VARIABLE}={name!r} is unknown: set it to one of {', '.join(_KINDS)}")
    return name


def array_module_of(kind: str) -> ModuleType:
    """Return CuPy for ``"cuda"``, which must be usable, and NumPy for ``"cpu"``."""
    return require_cuda() if kind == "cuda" else np


def require_cuda(device_id: int | None = None) -> ModuleType:
    """Return CuPy if a CUDA device can be used.

    `GpuUnavailableError`: Names what is missing and, for a missing package, the command that installs it.
    """
    missing = why_no_cuda(device_id)
    if missing is not None:
        raise GpuUnavailableError(missing)
    return _import_cupy()


def why_no_cuda(device_id: int | None = None) -> str | None:
    """Return why no CUDA device, or not the device `device_id`, can be used; None if it can."""
    global _cuda_started
    if _cuda_lost:
        return (
            "this process was forked after CUDA had been started, and CUDA does not work in such a child: start it "
            'with multiprocessing.get_context("spawn") or "forkserver"'
        )
    if importlib.util.find_spec("cupy") is None:
        # Without a driver, the advice to install packages would not help.
        if packages.driver_cuda_version() is None:
            return "this machine has no NVIDIA driver (libcuda.so.1): a GPU needs one before any package"
        return f"CuPy is not installed: {packages.install_line()}"
    if not _cuda_started:
        kernel_cache.choose_folder()
    try:
        cupy = _import_cupy()
    except Exception as error:
        return f"CuPy cannot be imported ({error}): {packages.install_line()}"
    if not _cuda_started:
        kernel_cache.watch(cupy)
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        cause = "no NVIDIA driver is loaded" if packages.driver_cuda_version() is None else str(error)
        return f"CUDA finds no device ({cause}): check that `nvidia-smi` lists one"
    _cuda_started = True
    if count == 0:
        return "CUDA finds no device: check that `nvidia-smi` lists one"
    if device_id is not None and device_id >= count:
        return f"there is no CUDA device {device_id}: this machine has {count}, numbered from 0"
    return None


def _import_cupy() -> ModuleType:
    import cupy

    return cupy


def transfers(array: Any, device: DeviceName | None) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return two functions: to copy arrays to where a computation runs, and its results to the memory of `array`.

    They return an array unchanged if it is in the right memory.

    `array`: an input of the computation. `device`: as for :func:`resolve`, but by default where `array` lies.

    `GpuUnavailableError`: `device` is ``"cuda"``, and there is no CUDA device.
    """

    def copy_to(is_gpu: bool) -> Callable[[Any], Any]:
        return require_cuda().asarray if is_gpu else to_host

    is_on_gpu = is_device_array(array)
    return copy_to(is_on_gpu if device is None else resolve(device).is_cuda), copy_to(is_on_gpu)


def free_memory(enough: float = math.inf) -> int:
    """Return the bytes that CuPy's memory pool can still allocate on the current device.

    This is memory that is free in the pool, plus free memory of the device, up to the limit that is set on the pool.
    If the pool alone has `enough` free bytes, only these are returned, since asking the driver is slow.
    """
    cupy = require_cuda()
    pool = cupy.get_default_memory_pool()
    free = int(pool.free_bytes())
    if free >= enough:
        return free
    free += cupy.cuda.runtime.memGetInfo()[0]
    limit = pool.get_limit()
    return max(0, min(free, limit - pool.used_bytes())) if limit else free


def synchronize() -> None:
    """Wait for the work on CuPy's current stream; return at once if CuPy was not imported or no device can be used."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and why_no_cuda() is None:
        cupy.cuda.get_current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device of this machine, its driver and the installed packages, to print and to paste into reports.

    Attributes
    ----------
    name : str
        Name of the GPU, or of the processor where there is none.
    memory_total, memory_free : int or None
        Bytes of device memory; None without a GPU.
    driver : str or None
        Newest CUDA version that the driver can run; None without a driver.
    versions : tuple of (str, str)
        Packages and their versions; ``"not installed"`` where missing.
    gds : str
        The mode of kvikio in words: see :func:`kvikio_mode`.
    reason : str
        Why there is no GPU; empty where there is one.
    others : tuple of str
        Other installed distributions that provide the package ``linumpy``; Python imports only one of them.
    """

    name: str
    memory_total: int | None
    memory_free: int | None
    driver: str | None
    versions: tuple[tuple[str, str], ...]
    gds: str
    reason: str
    others: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [("device", self.name)]
        if self.memory_total is not None and self.memory_free is not None:
            rows.append(("memory", f"{self.memory_total / 2**30:.1f} GiB, {self.memory_free / 2**30:.1f} GiB free"))
        if self.reason:
            rows.append(("no GPU", self.reason))
        if self.others:
            conflict = f"{', '.join(self.others)} is installed too and also provides the package linumpy"
            advice = f"pip uninstall {' '.join(self.others)}, then install {packages.DISTRIBUTION} again"
            rows.append(("conflict", f"{conflict}: {advice}"))
        rows.append(("driver", f"up to CUDA {self.driver}" if self.driver else "no NVIDIA driver"))
        rows += [*self.versions, ("GDS", self.gds)]
        return "\n".join(f"{label:<12}{value}" for label, value in rows)


def describe(device_id: int | None = None) -> DeviceInfo:
    """Describe the GPU (or without one the processor), its memory, the driver, packages and the mode of kvikio."""
    missing = why_no_cuda(device_id)
    name, total, free = platform.processor() or platform.machine(), None, None
    if missing is None:
        cupy = _import_cupy()
        with cupy.cuda.Device(device_id):
            properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
            free, total = cupy.cuda.runtime.memGetInfo()
        name = properties["name"].decode()
    version = packages.driver_cuda_version()
    return DeviceInfo(
        name=name,
        memory_total=total,
        memory_free=free,
        driver=None if version is None else f"{version[0]}.{version[1]}",
        versions=(
            ("Python", platform.python_version()),
            *((label, packages.version_of(*names)) for label, names in _PACKAGES.items()),
        ),
        gds=kvikio_mode()[1],
        reason=missing or "",
        others=tuple(packages.other_distributions()),
    )


#: Packages, and the distributions that may provide each.
_PACKAGES = {
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "zarr": ("zarr",),
    "numpy": ("numpy",),
}


def kvikio_mode() -> tuple[str, str]:
    """Return the mode of kvikio, ``"compat"``, ``"cufile"`` or ``"none"``, and an explanation.

    ``"none"`` means that kvikio is not installed or cannot be used. ``"cufile"`` means that kvikio passes its reads to
    cuFile, which may still read through host memory.
    """
    if importlib.util.find_spec("kvikio") is None:
        return "none", "kvikio is not installed, which only GPUDirect Storage needs"
    try:
        from kvikio import defaults

        compat = bool(defaults.is_compat_mode_preferred())
    except Exception as error:
        return "none", f"kvikio cannot be used ({error})"
    if compat:
        return "compat", "compat mode, not GDS (kvikio's own word: is_compat_mode_preferred)"
    return (
        "cufile",
        "kvikio hands reads to cuFile; whether they are native depends on the folder (--path DIR)",
    )
