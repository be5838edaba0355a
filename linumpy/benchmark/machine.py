"""Describe the machine that a benchmark runs on; control the page cache of the files that it reads.

In: the folder of the data. Out: :class:`Machine`: hardware, versions, whether GPUDirect Storage is used. :func:`drop`
removes files from this machine's page cache, without root and without touching another file; the disk, a file server or
the host of a virtual machine may have caches of their own.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy import __version__
from linumpy.device import describe, kvikio_mode

#: Size of kvikio's tasks in entries that set it.
TASK_BYTES = 4 * 2**20

_MORE_PACKAGES = ("numcodecs", "tensorstore", "zarrs")


@dataclass(frozen=True, slots=True)
class Gds:
    """Whether reads go from the disk to the device without passing host memory, and how that was determined.

    `mode` is ``"native"``, ``"compat"``, ``"not native"`` or ``"none"`` (no kvikio).
    """

    mode: str
    how: str

    @property
    def warning(self) -> str:
        """Warning for readers of the numbers; empty if GDS is native."""
        if self.mode == "native":
            return ""
        return "no number here is one of GPUDirect Storage: all bytes go through the host's memory"


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, versions and settings.

    `gpu` is the name and memory of the device, empty without one; `cores` are those that this process may use;
    `file_system` is the type of the data's file system; `versions` are names and versions of packages. Every entry that
    uses kvikio has `kvikio_threads`; `task_bytes` is the size of its tasks in the flat file's limit and the GDSStore.
    """

    gpu: str
    why_no_gpu: str
    cpu: str
    cores: int
    memory_bytes: int
    file_system: str
    versions: tuple[tuple[str, str], ...]
    kvikio_threads: int | None
    task_bytes: int
    gds: Gds

    def lines(self) -> list[str]:
        """Return the lines above a table."""
        host = f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; {self.file_system} files"
        lines = [f"device    {self.gpu or 'none: on the host only (' + self.why_no_gpu + ')'}", f"host      {host}"]
        named = [f"{label} {value}" for label, value in self.versions if value != "not installed"]
        lines.append(f"versions  {', '.join(named)}")
        lines.append(f"GDS       {self.gds.mode}: {self.gds.how}")
        if self.gds.warning and self.gpu:
            lines.append(f"          {self.gds.warning}")
        return lines


def describe_machine(folder: Path) -> Machine:
    """Describe the machine and the file system of a folder."""
    info = describe()
    gpu = "" if info.reason else f"{info.name}, {(info.memory_total or 0) / 2**30:.0f} GiB"
    more = [(name, _version(name)) for name in _MORE_PACKAGES]
    driver = [("driver for CUDA", info.driver)] if info.driver else []
    versions = [("linumpy", __version__), *info.versions, *more, *driver, ("Linux", platform.release())]
    return Machine(
        gpu=gpu,
        why_no_gpu=info.reason,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        file_system=file_system(folder),
        versions=tuple(versions),
        kvikio_threads=kvikio_threads(),
        task_bytes=TASK_BYTES,
        gds=gds(folder),
    )


def kvikio_threads() -> int | None:
    """Return the number of kvikio's threads that linumpy's reader uses; None without kvikio."""
    try:
        defaults = importlib.import_module("kvikio.defaults")
    except ImportError:
        return None
    from linumpy.gpu.kvikio_settings import read_threads

    return read_threads(defaults.get("num_threads"))


def gds(folder: Path) -> Gds:
    """Return whether reads from a folder are native GDS: a native read must have been observed."""
    mode, how = kvikio_mode()
    if mode != "cufile":
        return Gds(mode, how)
    from linumpy.gpu.kvikio_zarr import gds_mode

    native, how = gds_mode(str(folder))
    return Gds("native" if native else "not native", how)


def file_system(folder: Path) -> str:
    """Return the type of the file system of a folder; ``"unknown"`` if Linux does not list it."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    resolved = folder.resolve()
    mounts_above = [
        (len(point), number, kind)
        for number, (point, kind) in enumerate(mounts)
        if resolved.is_relative_to(point.replace("\\040", " "))
    ]
    # The longest mount point; the later of two equal ones hides the other.
    return max(mounts_above)[2] if mounts_above else "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- the page cache


def drop(files: Iterable[Path]) -> None:
    """Write the files' dirty pages to the disk and tell the kernel to drop all their pages.

    ``kvikio.drop_file_page_cache`` uses the same system call.
    """
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())  # a dirty page cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_part(files: Iterable[Path]) -> float | None:
    """Return the part of the files' pages that is in the page cache, 0 to 1.

    Returns
    -------
    float or None
        None if the caller may not write a file: the kernel then does not report its pages.
    """
    cached = pages = 0
    for file in files:
        if not os.access(file, os.W_OK):
            return None
        file_cached, file_pages = _resident(file)
        cached, pages = cached + file_cached, pages + file_pages
    return cached / pages if pages else 0.0


def _resident(file: Path) -> tuple[int, int]:
    """Count a file's pages in memory, and all its pages, with mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0, 0
    total = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * total)()
    # A private map, so that ctypes may take its address; no page is read or written.
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc().mincore(ctypes.addressof(first), ctypes.c_size_t(size), resident) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        finally:
            del first  # the map cannot be closed while ctypes points into it
    return int(np.count_nonzero(np.frombuffer(bytes(resident), np.uint8) & 1)), total


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]
    return libc
