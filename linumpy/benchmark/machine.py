"""Describe the machine that a benchmark runs on; control the page cache of the files that it reads.

In: the folder of the data. Out: :class:`Machine`: hardware, versions, whether GPUDirect Storage is used, which
``gds_doctor.sh`` may have to find out. In: files. :func:`drop_from_page_cache` evicts them without root and touches no
other file. Caches of the disk, of a file server and of a virtual machine's host keep their data.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy.device import describe, kvikio_mode, usable_cores
from linumpy.packages import version_of
from linumpy.version import __version__

#: Bytes of one read task: kvikio's, in the entries that set the size, and one ``preadv`` of the limit of host memory.
TASK_BYTES = 4 * 2**20

_PEER_PACKAGES = ("numcodecs", "tensorstore", "zarrs")


@dataclass(frozen=True, slots=True)
class GdsStatus:
    """Whether reads bypass host memory, and the evidence.

    `mode` is ``"native"``, ``"compat"`` (kvikio reads by POSIX calls), ``"not native"`` (kvikio reads by cuFile, and
    GDS is not confirmed) or ``"none"`` (kvikio is missing or cannot be used).
    """

    mode: str
    evidence: str

    @property
    def warning(self) -> str:
        """Warning to print beside the results; empty if GDS is native."""
        if self.mode == "native":
            return ""
        return "GPUDirect Storage is not confirmed: no number here is a measurement of it"


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware, versions and settings.

    `gpu` is the name and memory of the device, empty without a device; `cores` is the number of cores that this process
    may use; `file_system` is the type of the data's file system; `versions` are names and versions of packages;
    `kvikio_threads` is the number of kvikio's threads in each entry that uses kvikio; `task_bytes` is
    :data:`TASK_BYTES`.
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
    gds: GdsStatus

    def header_lines(self) -> list[str]:
        """Return the lines to print above a table."""
        host = f"{self.cpu}, {self.cores} cores, {self.memory_bytes / 2**30:.0f} GiB; {self.file_system} files"
        lines = [f"device    {self.gpu or 'none: on the host only (' + self.why_no_gpu + ')'}", f"host      {host}"]
        named = [f"{label} {value}" for label, value in self.versions if value != "not installed"]
        lines.append(f"versions  {', '.join(named)}")
        lines.append(f"GDS       {self.gds.mode}: {self.gds.evidence}")
        if self.gds.warning and self.gpu:
            lines.append(f"          {self.gds.warning}")
        return lines


def describe_machine(folder: Path) -> Machine:
    """Describe the machine and the file system of a folder."""
    info = describe()
    gpu = "" if info.reason else f"{info.name}, {(info.memory_total or 0) / 2**30:.0f} GiB"
    peer_versions = [(name, version_of(name)) for name in _PEER_PACKAGES]
    driver = [("CUDA driver", info.driver)] if info.driver else []
    versions = [("linumpy", __version__), *info.versions, *peer_versions, *driver, ("Linux", platform.release())]
    return Machine(
        gpu=gpu,
        why_no_gpu=info.reason,
        cpu=_cpu_name(),
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        file_system=file_system(folder),
        versions=tuple(versions),
        kvikio_threads=kvikio_threads(),
        task_bytes=TASK_BYTES,
        gds=gds_status(folder),
    )


def kvikio_threads() -> int | None:
    """Return the number of kvikio's threads during a read by linumpy; None without kvikio."""
    try:
        defaults = importlib.import_module("kvikio.defaults")
    except ImportError:
        return None
    from linumpy.gpu.kvikio_settings import read_threads

    return read_threads(defaults.get("num_threads"))


def gds_status(folder: Path) -> GdsStatus:
    """Return whether reads from a folder are native GDS, which ``gds_doctor.sh`` must have observed."""
    mode, evidence = kvikio_mode()
    if mode != "cufile":
        return GdsStatus(mode, evidence)
    from linumpy.gpu.kvikio_zarr import gds_mode

    is_native, evidence = gds_mode(str(folder))
    return GdsStatus("native" if is_native else "not native", evidence)


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
    # The longest mount point that contains the folder; of equal ones the last, which hides the others.
    return max(mounts_above)[2] if mounts_above else "unknown"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# ---- the page cache


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Write the files' dirty pages to the disk and tell the kernel to drop all their pages.

    By the system call of ``kvikio.drop_file_page_cache``, without kvikio.
    """
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())  # a dirty page cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(files: Iterable[Path]) -> float | None:
    """Return the fraction of the files' pages in the page cache, 0 to 1.

    Returns
    -------
    float or None
        None if the process may not write a file: mincore(2) then reports every page as resident.
    """
    cached = pages = 0
    for file in files:
        if not os.access(file, os.W_OK):
            return None
        file_cached, file_pages = _count_resident_pages(file)
        cached, pages = cached + file_cached, pages + file_pages
    return cached / pages if pages else 0.0


def _count_resident_pages(file: Path) -> tuple[int, int]:
    """Count a file's pages in memory, and all its pages, with mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0, 0
    total = -(-size // mmap.PAGESIZE)
    resident = (ctypes.c_ubyte * total)()
    # ACCESS_COPY makes a writable private mapping, whose address ctypes can take; no page is read or written.
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
