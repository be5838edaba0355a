"""Carry out the jobs of a reader by zarr-python: all arrays that the core does not read. The only such fallback.

In: regions of arrays, and their outputs. Out: :class:`ZarrJob` objects. Four threads read one region after another into
host memory, cast it as the core does, and copy it into the output. To a device, each thread copies on a separate stream
and waits for the copy. The log names each array that linumpy's reader does not support, and why, once.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.core import native
from linumpy.core.records import metadata_path, why_gone
from linumpy.errors import ChunkError, StaleLayoutError, UnsupportedLayoutError
from linumpy.gpu.read.outputs import Event, Regions, view_of
from linumpy.gpu.read.report import ReaderStats, ReadReport, job_report
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.ticket import JobList
from linumpy.io.budget import PROCESS, Share
from linumpy.io.source import open_node
from linumpy.io.zarr_mode import in_mode_of_caller, read_chunks_on_host
from linumpy.plan.layout import ArrayLayout

log = logging.getLogger(__name__)

#: Threads of a reader; zarr reads the chunks of each region by threads of its own.
_THREADS = 4
#: Maximum files that zarr has open for a region, a little more than its default.
_FILES = 16
#: Seconds between two polls of a waiting thread, in case an interrupt lost the wake-up.
_POLL_SECONDS = 0.1


class ZarrJob:
    """One region. The job ends when it is copied, when it fails, or when it is cancelled.

    `output`: the object that holds the memory of the output.
    """

    def __init__(self, work: Callable[[ZarrJob], None], output: Any) -> None:
        self.work, self.output = work, output
        self.in_mode = in_mode_of_caller()
        self.begin = self.end = time.perf_counter()
        self._error: BaseException | None = None
        self._is_over = self.is_cancelled = False
        self._state_lock, self._running = threading.Lock(), threading.Lock()
        self._running.acquire()
        self._process = os.getpid()

    def done(self) -> bool:
        """Say whether the job has ended."""
        return self._is_over

    def wait(self) -> None:
        """Wait until the job has ended; signals are handled meanwhile."""
        while not self._is_over:
            if os.getpid() != self._process:
                raise RuntimeError("this job was submitted by the parent of this process: submit it again here")
            if self._running.acquire(timeout=_POLL_SECONDS):
                self._running.release()

    def cancel(self) -> bool:
        """Cancel the job; False if it has already ended."""
        with self._state_lock:
            if self._is_over:
                return False
            self.is_cancelled = True
            return True

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return why the job failed; None if it did not."""
        return self._error

    def settle(self, error: BaseException | None) -> None:
        """End the job; called by the thread that carries it out."""
        with self._state_lock:
            self._error = error
            if self.is_cancelled and error is None:
                self._error = CancelledError("the job was cancelled")
            self.end = time.perf_counter()
            self._is_over = True
        self._running.release()


class ZarrEngine:
    """Threads that read by zarr-python; the first job starts them.

    `cupy`: CuPy, for outputs on a device.
    """

    def __init__(self, cupy: ModuleType | None, device: int | None) -> None:
        self._cupy, self._device = cupy, device
        self._queue: queue.SimpleQueue[ZarrJob | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._local = threading.local()  # the stream of each thread
        self._jobs = 0

    def submit(
        self,
        layouts: list[ArrayLayout],
        conversion: Conversion,
        regions: Regions,
        owners: Sequence[Any],
        ready: Event | None,
        *,
        looks: object = None,
        timed: bool = False,
    ) -> JobList:
        """Submit regions as :meth:`linumpy.gpu.read.engines.by_core.CoreEngine.submit`, without `looks` and `timed`."""
        for layout in layouts:
            if layout.unsupported:
                log_once(f"{layout.name}: read by zarr-python, not by linumpy's reader: {layout.unsupported}")
        jobs = []
        for row, number in enumerate(regions.array.tolist()):
            owner = owners[row if len(owners) > 1 else 0]
            output = int(regions.addresses[row]), regions.strides[row].tolist()
            box = regions.start[row].tolist(), regions.stop[row].tolist()
            jobs.append(ZarrJob(partial(self._read, layouts[number], box, output, conversion, ready), owner))
        with self._lock:
            if self._is_closed:
                for job in jobs:
                    job.settle(RuntimeError("the reader is closed"))
                return JobList(jobs)
            self._start_threads()
            self._jobs += len(jobs)
            for job in jobs:
                self._queue.put(job)
        return JobList(jobs)

    def _start_threads(self) -> None:
        while len(self._threads) < _THREADS:
            thread = threading.Thread(target=_carry_out, args=(self._queue,), name="linumpy zarr", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                if not self._threads:
                    raise
                return
            self._threads.append(thread)

    def _read(
        self,
        layout: ArrayLayout,
        box: tuple[list[int], list[int]],
        output: tuple[int, list[int]],
        conversion: Conversion,
        ready: Event | None,
        job: ZarrJob,
    ) -> None:
        shape = [b - a for a, b in zip(*box, strict=True)]
        share = Share(descriptors=_FILES, host_nbytes=2 * math.prod(shape) * conversion.target.itemsize)
        with PROCESS.take(share, share):
            if job.is_cancelled:
                return
            values = conversion.cast(read_region(layout, tuple(map(slice, *box))))
            if job.is_cancelled or not values.size:
                return
            device = None if self._cupy is None else (self._cupy, self._device)
            self._copy(values.reshape(shape), view_of(*output, shape, conversion.target, job.output, device), ready)

    def _copy(self, values: np.ndarray, view: Any, ready: Event | None) -> None:
        if self._cupy is None:
            view[...] = values
            return
        with self._cupy.cuda.Device(self._device):
            stream = getattr(self._local, "stream", None)
            if stream is None:
                stream = self._local.stream = self._cupy.cuda.Stream(non_blocking=True)
            stream.wait_event(ready)
            with stream:
                if view.flags.c_contiguous:
                    view.set(np.asarray(values, order="C"))  # ascontiguousarray adds an axis where there is none
                else:
                    view[...] = self._cupy.asarray(values)
            stream.synchronize()

    def describe(self, job: ZarrJob, layout: ArrayLayout, conversion: Conversion) -> ReadReport:
        """Make the report of a job that has ended."""
        into = "host memory" if self._cupy is None else "host memory, and one copy to the device"
        return replace(
            job_report(layout.name, conversion.target_name, job.output),
            backend="zarr-python",
            engine=f"zarr-python into {into}",
            fallback=_why_not_core(layout),
            read_seconds=job.end - job.begin,
            decoder="" if layout.chain is None else f"{layout.chain}, on the host",
        )

    def stats(self, stats: ReaderStats) -> ReaderStats:
        """Add the number of jobs."""
        return replace(stats, jobs=stats.jobs + self._jobs)

    def close(self) -> None:
        """Cancel queued jobs, and wait for running ones."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job.cancel()
                job.settle(None)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():  # the garbage collector may close a reader in any thread
                thread.join()


def _carry_out(jobs: queue.SimpleQueue[ZarrJob | None]) -> None:
    """Carry out jobs until None arrives.

    The threads must not refer to their engine: an engine that a thread refers to would never be collected.
    """
    while (job := jobs.get()) is not None:
        error = None
        try:
            job.in_mode()
            job.work(job)
        except BaseException as caught:
            error = caught
        job.settle(error)
        del job, error


def why_unsupported(layout: ArrayLayout) -> str:
    """Return why linumpy's reader does not support an array; empty if it does, or if the caller wants zarr-python."""
    if layout.unsupported is not None:
        return layout.unsupported
    if (reason := native.why_no_core()) is not None:
        return f"no native core: {reason}"
    return native.why_not_decoded(layout.chain) or ""


def _why_not_core(layout: ArrayLayout) -> str:
    """Return why zarr-python reads an array: it is not supported, or needs a filter that only the host decodes."""
    if (reason := why_unsupported(layout)) or layout.unsupported is not None:
        return reason
    if layout.entries is not None and layout.entries.is_compressed:
        return "compressed entries of a ZIP file"
    return "a filter that only the host decodes"


def array_of(layout: ArrayLayout) -> zarr.Array:
    """Return the array of a layout, for zarr-python."""
    if layout.array is not None:
        return layout.array
    remote = layout.remote
    node = open_node(str(layout.root) if remote is None else (remote.store, remote.path))
    if not isinstance(node, zarr.Array):
        raise StaleLayoutError(f"{layout.name} was an array when its metadata were read, and is a group now")
    return node


def read_region(layout: ArrayLayout, region: tuple[slice, ...]) -> np.ndarray:
    """Read a region by zarr-python, in its stored byte order.

    `UnsupportedLayoutError`: zarr-python does not read the array either. `ChunkError`: A broken chunk; the array is
    gone.
    """
    try:
        values = np.asarray(read_chunks_on_host(array_of(layout), region))
        if layout.unsupported is None and layout.remote is None:
            os.stat(metadata_path(layout))
    except FileNotFoundError as error:  # zarr fills missing chunks, also those of a removed array
        raise ChunkError(why_gone(layout)) from error
    except ChunkError as error:
        if not isinstance(error.__cause__, NotImplementedError) or layout.unsupported is None:
            raise
        why = f"{layout.unsupported}, which zarr-python does not read either"
        raise UnsupportedLayoutError(f"{layout.name}: {why}") from error.__cause__
    return values


@functools.lru_cache(maxsize=1024)
def log_once(message: str) -> None:
    """Log a warning once in a process."""
    log.warning("%s", message)
