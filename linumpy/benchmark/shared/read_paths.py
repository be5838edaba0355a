"""Implementations that read a stored array into memory, as entries of a case.

In: a :class:`~linumpy.benchmark.shared.stores.StoredArray`. Out: entries whose call makes a new array each time, on the
device if there is one and else on the host. Errors: :class:`~linumpy.benchmark.cases.CannotRunError`, with a message of
one line, if this machine lacks a requirement of an entry.

Every call starts from the array's folder, so that its time includes opening the array. kvikio has the same threads and
tasks in every entry that uses it; other packages keep their defaults.
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
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.benchmark.cases import CannotRunError, Entry, Prepared, peer_module
from linumpy.benchmark.machine import TASK_BYTES, kvikio_threads
from linumpy.benchmark.shared.stores import OWN_PIPELINE, StoredArray, host_zarr, truth
from linumpy.device import free_memory, usable_cores, why_no_cuda
from linumpy.io.zarr_mode import gpu_mode
from linumpy.packages import install_line

#: Maximum bytes of page-locked host memory; bytes of host memory that must stay free.
_MAX_PINNED_NBYTES, _SPARE_HOST_NBYTES = 8 * 2**30, 2**30

# ---- the limits


@contextlib.contextmanager
def _flat_to_device(stored: StoredArray) -> Iterator[Prepared]:
    """Read one file of the same decoded bytes in one call of kvikio."""
    cupy, kvikio = _need_cuda(), _kvikio()
    free = free_memory()
    if stored.nbytes > free:
        raise CannotRunError(f"{stored.nbytes:,} bytes to read, {free:,} bytes of device memory free")
    with _flat_file(stored) as flat, _kvikio_settings():

        def read() -> Array:
            out = cupy.empty(stored.result_shape, stored.dtype)
            with kvikio.CuFile(flat, "r") as file:
                nbytes = file.read(out.reshape(-1).view(np.uint8), task_size=TASK_BYTES)
            return _complete(out, nbytes, flat)

        yield Prepared(read, files=(flat,))


@contextlib.contextmanager
def _flat_to_host(stored: StoredArray) -> Iterator[Prepared]:
    """Read one file of the same decoded bytes by several threads."""
    _need_host_memory(stored)
    with _flat_file(stored) as flat:

        def read() -> Array:
            out = np.empty(stored.result_shape, stored.dtype)
            buffer = out.reshape(-1).view(np.uint8).data
            with open(flat, "rb", buffering=0) as file, ThreadPoolExecutor(usable_cores()) as threads:
                fd = file.fileno()
                offsets = range(0, len(buffer), TASK_BYTES)
                nbytes = sum(
                    threads.map(lambda offset: os.preadv(fd, [buffer[offset : offset + TASK_BYTES]], offset), offsets)
                )
            return _complete(out, nbytes, flat)

        yield Prepared(read, files=(flat,))


def _complete(out: Array, nbytes: int, flat: Path) -> Array:
    """Return an array that was read, after checking that all bytes of it were read."""
    if nbytes != out.nbytes:
        raise OSError(f"{flat}: {nbytes:,} of {out.nbytes:,} bytes read")
    return out


@contextlib.contextmanager
def _flat_file(stored: StoredArray) -> Iterator[Path]:
    """Write the decoded voxels into one file beside the array, on the same disk, and remove the file at the end."""
    folder = stored.path.parent
    if not os.access(folder, os.W_OK):
        raise CannotRunError(f"no right to write the flat file into {folder}")
    free = shutil.disk_usage(folder).free
    if free < stored.nbytes:
        raise CannotRunError(f"the flat file takes {stored.nbytes:,} bytes, {free:,} bytes free in {folder}")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".linum-benchmark-", suffix=".flat") as file:
        file.truncate(stored.nbytes)
        flat = np.memmap(file.name, stored.dtype, "r+", shape=stored.result_shape)
        for block, piece in truth(stored):
            flat[block] = piece
        flat.flush()
        del flat  # the page cache drops no page that is mapped
        yield Path(file.name)


@contextlib.contextmanager
def _pinned_copy(stored: StoredArray) -> Iterator[Prepared]:
    """Copy page-locked host memory to the device; no file is read."""
    cupy = _need_cuda()
    if stored.nbytes > _MAX_PINNED_NBYTES:
        raise CannotRunError(
            f"would lock {stored.nbytes:,} bytes of host memory; at most {_MAX_PINNED_NBYTES:,} are locked"
        )
    _need_host_memory(stored)
    pinned = importlib.import_module("cupyx").empty_pinned(stored.result_shape, stored.dtype)
    for block, piece in truth(stored):
        pinned[block] = piece

    def read() -> Array:
        out = cupy.empty(stored.result_shape, stored.dtype)
        out.set(pinned)
        return out

    yield Prepared(read)


# ---- straight to the device


@contextlib.contextmanager
def _linumpy(stored: StoredArray, backend: Literal["auto", "kvikio"]) -> Iterator[Prepared]:
    _need_cuda()
    from linumpy.gpu.zarr_io import read_zarr_to_gpu

    def note() -> str:
        # An extra read: a report times kernels, which would slow the timed reads.
        _, report = read_zarr_to_gpu(stored.path, region=stored.selection, backend=backend, return_report=True)
        decoder = report.decoder.partition(", ")[2].partition(",")[0]
        how = report.fallback or (f"decoded {decoder}" if decoder else "")
        return f"by {report.backend}" + (f": {how}" if how else "")

    yield Prepared(lambda: read_zarr_to_gpu(stored.path, region=stored.selection, backend=backend), note=note)


@contextlib.contextmanager
def _zarr_gpu(stored: StoredArray) -> Iterator[Prepared]:
    _need_cuda()

    def read() -> object:
        with gpu_mode(), zarr.config.set(OWN_PIPELINE):
            return zarr.open_array(stored.path, mode="r")[stored.selection]

    yield Prepared(read)


@contextlib.contextmanager
def _zarr_gpu_gds(stored: StoredArray) -> Iterator[Prepared]:
    _need_cuda()
    _kvikio()
    gds_store = _kvikio("kvikio.zarr").GDSStore

    def read() -> object:
        with gpu_mode(), zarr.config.set(OWN_PIPELINE):
            return zarr.open_array(gds_store(stored.path, read_only=True), mode="r")[stored.selection]

    with _kvikio_settings():
        yield Prepared(read)


def _kvikio_settings() -> AbstractContextManager[None]:
    """Set kvikio's threads and tasks once for all runs, since a change of the number of threads starts a new pool."""
    defaults = _kvikio("kvikio.defaults")
    return defaults.set({"num_threads": kvikio_threads(), "task_size": TASK_BYTES})


# ---- through the host


@contextlib.contextmanager
def _through_host(
    stored: StoredArray, make: Callable[[StoredArray], Callable[[], np.ndarray]], gpu: bool
) -> Iterator[Prepared]:
    """Read to the host by the function that `make` returns, and copy to the device if there is a GPU."""
    cupy = _need_cuda() if gpu else None
    _need_host_memory(stored)
    read_host = make(stored)
    yield Prepared(read_host if cupy is None else lambda: cupy.asarray(read_host()))


def _zarr_numpy(stored: StoredArray, pipeline: str | None = None) -> Callable[[], np.ndarray]:
    other = {} if pipeline is None else {"codec_pipeline.path": pipeline}

    def read() -> np.ndarray:
        with host_zarr(), zarr.config.set(other):
            return np.asarray(zarr.open_array(stored.path, mode="r")[stored.selection]).astype(stored.dtype, copy=False)

    return read


def _zarrs(stored: StoredArray) -> Callable[[], np.ndarray]:
    peer_module("zarrs")
    return _zarr_numpy(stored, "zarrs.ZarrsCodecPipeline")


def _tensorstore(stored: StoredArray) -> Callable[[], np.ndarray]:
    tensorstore = peer_module("tensorstore")
    driver = "zarr3" if stored.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{stored.path}/"}}

    def read() -> np.ndarray:
        # A new context, whose cache holds no chunk of an earlier run.
        opened = tensorstore.open(spec, open=True, read=True, context=tensorstore.Context()).result()
        return np.asarray(opened[stored.selection].read().result()).astype(stored.dtype, copy=False)

    return read


# ---- requirements of entries


def _kvikio(module: str = "kvikio") -> ModuleType:
    return peer_module(module, install_line())


def _need_cuda() -> ModuleType:
    missing = why_no_cuda()
    if missing is not None:
        raise CannotRunError(missing)
    return importlib.import_module("cupy")


def _need_host_memory(stored: StoredArray) -> None:
    """Raise an error if the host lacks memory: Linux would end this process without a message."""
    available = available_host_bytes()
    if available is not None and stored.nbytes + _SPARE_HOST_NBYTES > available:
        raise CannotRunError(f"{stored.nbytes:,} bytes to hold, {available:,} bytes of host memory available")


def available_host_bytes() -> int | None:
    """Return the bytes of memory available without swapping; None if Linux does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(sizes[0]) * 1024 if sizes else None


# ---- all of them


#: Names on the command line, with the title without a GPU and, if different, the title with a GPU.
PATHS: dict[str, tuple[str, ...]] = {
    "flat": ("flat file (limit)",),
    "h2d": ("pinned host → device (limit)",),
    "linumpy-auto": ("linumpy auto",),
    "linumpy-kvikio": ("linumpy kvikio",),
    "zarr-gpu": ("zarr-gpu",),
    "zarr-gpu-gds": ("zarr-gpu + GDSStore",),
    "zarr-numpy": ("zarr → NumPy", "zarr → NumPy → CuPy"),
    "tensorstore": ("tensorstore → NumPy", "tensorstore → CuPy"),
    "zarrs": ("zarrs → NumPy", "zarrs → CuPy"),
}


def read_entries(stored: StoredArray, gpu: bool) -> tuple[Entry, ...]:
    """Return all entries, the limits first, without checks of results; without a GPU some entries cannot run."""
    prepare: dict[str, Callable[[StoredArray], AbstractContextManager[Prepared]]] = {
        "flat": _flat_to_device if gpu else _flat_to_host,
        "h2d": _pinned_copy,
        "linumpy-auto": partial(_linumpy, backend="auto"),
        "linumpy-kvikio": partial(_linumpy, backend="kvikio"),
        "zarr-gpu": _zarr_gpu,
        "zarr-gpu-gds": _zarr_gpu_gds,
        "zarr-numpy": partial(_through_host, make=_zarr_numpy, gpu=gpu),
        "tensorstore": partial(_through_host, make=_tensorstore, gpu=gpu),
        "zarrs": partial(_through_host, make=_zarrs, gpu=gpu),
    }
    return tuple(
        Entry(name, titles[-1 if gpu else 0], partial(prepare[name], stored), _role(name))
        for name, titles in PATHS.items()
    )


def _role(name: str) -> Literal["ours", "peer", "limit"]:
    return "limit" if name in ("flat", "h2d") else "ours" if name.startswith("linumpy") else "peer"
