"""Describe the machine that a benchmark runs on; control the page cache of the files that it reads.

In: the folder that was read. Out: :class:`Machine`: hardware, versions, whether GPUDirect Storage is used. :func:`drop`
takes files out of this machine's page cache, without root and without touching another file; the disk, a file server or
the host of a virtual machine may keep its own.
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

#: Size of kvikio's tasks wherever the benchmark sets it.
TASK_BYTES = 4 * 2**20

_MORE_PACKAGES = ("numcodecs", "tensorstore", "zarrs")


@dataclass(frozen=True, slots=True)
class Gds:
    """Whether reads go from the disk to the device without the host in between.

    Attributes
    ----------
    mode : str
        ``"native"``, ``"compat"``, ``"not native"`` or ``"none"`` (no kvikio).
    how : str
        How the mode was determined.
    """

    mode: str
    how: str

    @property
    def warning(self) -> str:
        """Warning for readers of the numbers; empty where GDS is native."""
        if self.mode == "native":
            return ""
        return "no number here is one of GPUDirect Storage: all bytes go through the host's memory"


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, versions and settings.

    Attributes
    ----------
    gpu : str
        Name and memory of the device; empty without one.
    why_no_gpu : str
        Why there is none; empty with one.
    cpu : str
        Name of the processor.
    cores : int
        Cores that this process may use.
    memory_bytes : int
        Of the host.
    file_system : str
        Type of the file system that was read.
    versions : tuple of (str, str)
        Packages.
    kvikio_threads : int or None
        Of every entry that uses kvikio.
    task_bytes : int
        Size of kvikio's tasks in the flat file's limit and the GDSStore.
    gds : Gds
        Whether GPUDirect Storage is used.
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
        """Return the lines that stand above a table."""
        host = f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; {self.file_system} files"
        lines = [f"device    {self.gpu or 'none: on the host only (' + self.why_no_gpu + ')'}", f"host      {host}"]
        named = [f"{label} {value}" for label, value in self.versions if value != "not installed"]
        lines.append(f"versions  {', '.join(named)}")
        lines.append(f"GDS       {self.gds.mode}: {self.gds.how}")
        if self.gds.warning and self.gpu:
            lines.append(f"          {self.gds.warning}")
        return lines


def look(folder: Path) -> Machine:
    """Look at the machine and at the file system of a folder."""
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
    """Return the number of kvikio's threads that linumpy's reader takes; None without kvikio."""
    try:
        defaults = importlib.import_module("kvikio.defaults")
    except ImportError:
        return None
    from linumpy.gpu.kvikio_settings import read_threads

    return read_threads(defaults.get("num_threads"))


def gds(folder: Path) -> Gds:
    """Say whether reads from a folder are native GDS: only a native read that was seen counts as such."""
    mode, how = kvikio_mode()
    if mode != "cufile":
        return Gds(mode, how)
    from linumpy.gpu.kvikio_zarr import gds_mode

    native, how = gds_mode(str(folder))
    return Gds("native" if native else "not native", how)


def file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on; ``"unknown"`` where Linux does not say."""
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
    return (
        max(mounts_above)[2] if mounts_above else "unknown"
    )  # the longest mount point; of two, the later one hides the other


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
    """Write the files' dirty pages to the disk and ask the kernel to forget the rest.

    This is the system call behind ``kvikio.drop_file_page_cache`` too.
    """
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())  # a dirty page cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_part(files: Iterable[Path]) -> float | None:
    """Return which part of the files' pages is in the page cache, 0 to 1.

    Returns
    -------
    float or None
        None where the kernel does not tell: it answers only for files that the caller may write.
    """
    cached = pages = 0
    for file in files:
        if not os.access(file, os.W_OK):
            return None
        file_cached, file_pages = _resident(file)
        cached, pages = cached + file_cached, pages + file_pages
    return cached / pages if pages else 0.0


def _resident(file: Path) -> tuple[int, int]:
    """Count a file's pages in memory, and all of them, with mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0, 0
    total = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * total)()
    # A private map, so that ctypes may take its address; nothing is written and no page is touched.
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
