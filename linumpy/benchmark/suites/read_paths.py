"""The ways from a stored array to one in memory, each ready to be called again and again.

In: a :class:`~linumpy.benchmark.suites.stores.StoredArray`. Out: a :class:`~linumpy.benchmark.cases.Prepared` reading,
whose call makes a new array every time, on the device where there is one and else on the host. Errors:
:class:`~linumpy.benchmark.cases.CannotRunError`, in one line, where this machine lacks what a way needs.

Every way starts from the array's folder, so that opening it is in its time. kvikio gets the same threads and tasks
in every way that uses it; all else keeps the defaults that its users get.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.cases import CannotRunError, Prepared
from linumpy.benchmark.machine import TASK_BYTES, kvikio_threads
from linumpy.benchmark.suites.stores import OWN_PIPELINE, StoredArray, host_zarr, truth
from linumpy.device import free_memory, install_line, why_no_cuda
from linumpy.io.zarr_mode import gpu_mode

_PINNED_LIMIT = 8 * 2**30
_SPARE_HOST_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ReadPath:
    """A way of reading.

    Attributes
    ----------
    name : str
        As on the command line.
    title : str
        For people.
    prepare : callable
        StoredArray → context in which the :class:`~linumpy.benchmark.cases.Prepared` reading can be called; raises
        :class:`~linumpy.benchmark.cases.CannotRunError`.
    is_limit : bool
        Whether this is what the hardware gives, not a way to read the array.
    """

    name: str
    title: str
    prepare: Callable[[StoredArray], AbstractContextManager[Prepared]]
    is_limit: bool = False


# ---- the limits


@contextlib.contextmanager
def _flat_to_device(stored: StoredArray) -> Iterator[Prepared]:
    """Read one file with the same decoded bytes in one call of kvikio's."""
    cupy, kvikio = _need_cuda(), _need("kvikio")
    free = free_memory()
    if stored.nbytes > free:
        raise CannotRunError(f"{stored.nbytes:,} bytes to read, {free:,} bytes of device memory free")
    with _flat_file(stored) as flat, _kvikio_settings():

        def read() -> Any:
            out = cupy.empty(stored.result_shape, stored.dtype)
            with kvikio.CuFile(flat, "r") as opened:
                got = opened.read(out.reshape(-1).view(np.uint8), task_size=TASK_BYTES)
            return _whole(out, got, flat)

        yield Prepared(read, files=(flat,))


@contextlib.contextmanager
def _flat_to_host(stored: StoredArray) -> Iterator[Prepared]:
    """Read one file with the same decoded bytes, a part per thread and task."""
    _need_host_memory(stored)
    with _flat_file(stored) as flat:

        def read() -> Any:
            out = np.empty(stored.result_shape, stored.dtype)
            octets = out.reshape(-1).view(np.uint8).data
            with open(flat, "rb", buffering=0) as opened, ThreadPoolExecutor(os.cpu_count()) as threads:
                fd = opened.fileno()
                starts = range(0, len(octets), TASK_BYTES)
                got = sum(threads.map(lambda at: os.preadv(fd, [octets[at : at + TASK_BYTES]], at), starts))
            return _whole(out, got, flat)

        yield Prepared(read, files=(flat,))


def _whole(out: Any, got: int, flat: Path) -> Any:
    if got != out.nbytes:
        raise OSError(f"{flat}: {got:,} of {out.nbytes:,} bytes read")
    return out


@contextlib.contextmanager
def _flat_file(stored: StoredArray) -> Iterator[Path]:
    """Write the decoded voxels into one file beside the array, on the same disk, and take it away in the end."""
    folder = stored.path.parent
    if not os.access(folder, os.W_OK):
        raise CannotRunError(f"no right to write the flat file into {folder}")
    free = shutil.disk_usage(folder).free
    if free < stored.nbytes:
        raise CannotRunError(f"the flat file takes {stored.nbytes:,} bytes, {free:,} bytes free in {folder}")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".linum-benchmark-", suffix=".flat") as made:
        made.truncate(stored.nbytes)
        flat = np.memmap(made.name, stored.dtype, "r+", shape=stored.result_shape)
        for block, piece in truth(stored):
            flat[block] = piece
        flat.flush()
        del flat  # the page cache drops no page that is mapped
        yield Path(made.name)


@contextlib.contextmanager
def _pinned_copy(stored: StoredArray) -> Iterator[Prepared]:
    """Copy page-locked host memory to the device; no file is read."""
    cupy = _need_cuda()
    if stored.nbytes > _PINNED_LIMIT:
        raise CannotRunError(f"would lock {stored.nbytes:,} bytes of host memory; it locks {_PINNED_LIMIT:,} at most")
    _need_host_memory(stored)
    pinned = importlib.import_module("cupyx").empty_pinned(stored.result_shape, stored.dtype)
    for block, piece in truth(stored):
        pinned[block] = piece

    def read() -> Any:
        out = cupy.empty(stored.result_shape, stored.dtype)
        out.set(pinned)
        return out

    yield Prepared(read)


# ---- straight to the device


def _linumpy(backend: str) -> Callable[[StoredArray], AbstractContextManager[Prepared]]:
    @contextlib.contextmanager
    def prepare(stored: StoredArray) -> Iterator[Prepared]:
        _need_cuda()
        from linumpy.gpu.zarr_io import read_zarr_to_gpu

        def note() -> str:
            # A reading of its own: a report has the kernels timed, and nobody who wants speed asks for one.
            _, report = read_zarr_to_gpu(stored.path, region=stored.selection, backend=backend, return_report=True)
            where = report.decoder.partition(", ")[2].partition(",")[0]
            how = report.fallback or (f"decoded {where}" if where else "")
            return f"by {report.backend}" + (f": {how}" if how else "")

        yield Prepared(lambda: read_zarr_to_gpu(stored.path, region=stored.selection, backend=backend), note=note)

    return prepare


@contextlib.contextmanager
def _zarr_gpu(stored: StoredArray) -> Iterator[Prepared]:
    _need_cuda()

    def read() -> Any:
        with gpu_mode(), zarr.config.set(OWN_PIPELINE):
            return zarr.open_array(stored.path, mode="r")[stored.selection]

    yield Prepared(read)


@contextlib.contextmanager
def _zarr_gpu_gds(stored: StoredArray) -> Iterator[Prepared]:
    _need_cuda()
    _need("kvikio")
    gds_store = _need("kvikio.zarr").GDSStore

    def read() -> Any:
        with gpu_mode(), zarr.config.set(OWN_PIPELINE):
            return zarr.open_array(gds_store(stored.path, read_only=True), mode="r")[stored.selection]

    with _kvikio_settings():
        yield Prepared(read)


def _kvikio_settings() -> AbstractContextManager[Any]:
    """Set kvikio's threads and tasks; what the caller had comes back at the end.

    It is set around all runs and not in each, as a new number of threads makes a new pool of threads.
    """
    defaults = _need("kvikio.defaults")
    return defaults.set({"num_threads": kvikio_threads(), "task_size": TASK_BYTES})


# ---- through the host


def _through_host(
    make: Callable[[StoredArray], Callable[[], np.ndarray]], gpu: bool
) -> Callable[[StoredArray], AbstractContextManager[Prepared]]:
    """Read to the host, and from there, on a machine with a GPU, copy to the device."""

    @contextlib.contextmanager
    def prepare(stored: StoredArray) -> Iterator[Prepared]:
        cupy = _need_cuda() if gpu else None
        _need_host_memory(stored)
        read_host = make(stored)
        yield Prepared(read_host if cupy is None else lambda: cupy.asarray(read_host()))

    return prepare


def _zarr_numpy(stored: StoredArray) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with host_zarr():
            return np.asarray(zarr.open_array(stored.path, mode="r")[stored.selection]).astype(stored.dtype, copy=False)

    return read


def _zarrs(stored: StoredArray) -> Callable[[], np.ndarray]:
    _need("zarrs")

    def read() -> np.ndarray:
        with host_zarr(), zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
            return np.asarray(zarr.open_array(stored.path, mode="r")[stored.selection]).astype(stored.dtype, copy=False)

    return read


def _tensorstore(stored: StoredArray) -> Callable[[], np.ndarray]:
    tensorstore = _need("tensorstore")
    described = {
        "driver": "zarr3" if stored.zarr_format == 3 else "zarr",
        "kvstore": {"driver": "file", "path": f"{stored.path}/"},
    }

    def read() -> np.ndarray:
        # A context of its own: no chunk that an earlier run left in tensorstore's cache.
        opened = tensorstore.open(described, open=True, read=True, context=tensorstore.Context()).result()
        return np.asarray(opened[stored.selection].read().result()).astype(stored.dtype, copy=False)

    return read


# ---- what a path needs


def _need(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        reason = "" if error.name == package else f" whole ({error})"
        how = install_line() if package == "kvikio" else f"pip install {package}"
        raise CannotRunError(f"{package} is not installed{reason}: {how}") from error


def _need_cuda() -> ModuleType:
    missing = why_no_cuda()
    if missing is not None:
        raise CannotRunError(missing)
    return importlib.import_module("cupy")


def _need_host_memory(stored: StoredArray) -> None:
    """Refuse what would drive the machine into its out-of-memory killer, which says nothing."""
    available = available_host_bytes()
    if available is not None and stored.nbytes + _SPARE_HOST_BYTES > available:
        raise CannotRunError(f"{stored.nbytes:,} bytes to hold, {available:,} bytes of host memory available")


def available_host_bytes() -> int | None:
    """Return the memory that Linux says can be had without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


# ---- all of them


def standard_paths(gpu: bool) -> tuple[ReadPath, ...]:
    """Return all paths, the limits first; without a GPU some of them will say that they cannot run."""
    there = "CuPy" if gpu else "NumPy"
    return (
        ReadPath("flat", "flat file (limit)", _flat_to_device if gpu else _flat_to_host, is_limit=True),
        ReadPath("h2d", "pinned host → device (limit)", _pinned_copy, is_limit=True),
        ReadPath("linumpy-auto", "linumpy auto", _linumpy("auto")),
        ReadPath("linumpy-kvikio", "linumpy kvikio", _linumpy("kvikio")),
        ReadPath("zarr-gpu", "zarr-gpu", _zarr_gpu),
        ReadPath("zarr-gpu-gds", "zarr-gpu + GDSStore", _zarr_gpu_gds),
        ReadPath("zarr-numpy", "zarr → NumPy" + (" → CuPy" if gpu else ""), _through_host(_zarr_numpy, gpu)),
        ReadPath("tensorstore", f"tensorstore → {there}", _through_host(_tensorstore, gpu)),
        ReadPath("zarrs", f"zarrs → {there}", _through_host(_zarrs, gpu)),
    )


#: As on the command line.
PATH_NAMES = tuple(path.name for path in standard_paths(gpu=False))
