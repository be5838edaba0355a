"""Jobs of the native core: regions of arrays, read into host memory or to a device by the core's own threads.

In: layouts, and regions with their outputs as arrays of numbers. Out: :class:`CoreJob` records, which are waited for.
No Python runs in the core's threads, and none of them needs Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.errors import ChunkError
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.layout import ArrayLayout

#: Bytes of the shard indexes that a reader keeps.
_INDEX_NBYTES = 64 * 2**20
#: Layouts whose records are kept.
_LAYOUTS = 2048
#: Seconds after which a wait looks for signals: Python handles them between two calls.
_SLICE = 0.1


def takes(layout: ArrayLayout) -> bool:
    """Say whether the core reads arrays of this layout; filters of numcodecs before a compressor it does not undo."""
    return layout.chain is None or not layout.chain.host_filter


def chain_record(chain: DecodeChain | None) -> native.Chain:
    """Describe how chunks were encoded, for the core."""
    if chain is None:
        return native.Chain()
    inner = native.COMPRESSORS.index(chain.inner) if chain.inner else 0
    return native.Chain(
        1,
        native.COMPRESSORS.index(chain.compressor),
        inner,
        chain.stored_checksum,
        chain.decoded_checksum,
        chain.shuffle,
    )


class CoreReader:
    """Reads regions of Zarr arrays; for several threads.

    Parameters
    ----------
    threads : int
        Threads that work is cut for; they belong to the process.
    device : Device, optional
        Memory of the device that outputs lie on; by default they lie in host memory.

    Raises
    ------
    CoreUnavailableError
        There is no native core.
    """

    def __init__(self, threads: int, device: native.Device | None = None) -> None:
        self._library = native.library()
        self._process = os.getpid()
        self._device = device  # holds what the core calls to read
        why = ctypes.create_string_buffer(256)
        self._pointer = self._library.quick.lc_reader_new(threads, _INDEX_NBYTES, device, why)
        if not self._pointer:
            raise RuntimeError(f"the native core could not be started: {why.value.decode(errors='replace')}")
        self._records: OrderedDict[int, tuple[ArrayLayout, native.Geometry, native.Array]] = OrderedDict()
        self._lock = threading.Lock()
        self._dropped: dict[int, Any] = {}  # jobs that nobody waits for, with their outputs
        self._releasing = threading.Lock()
        self.is_closing = False

    def give_memory(self, slabs: int, kept: int = 0, kept_nbytes: int = 0) -> None:
        """Hand over device memory: the address of the slabs, and of the memory for chunks that are kept."""
        self._library.quick.lc_reader_memory(self._pointer, slabs, kept, kept_nbytes)

    def submit(
        self,
        layouts: Sequence[ArrayLayout],
        regions: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        outputs: Sequence[Any],
        target: int,
        fill: np.ndarray,
        *,
        one_job: bool = False,
        on_device: native.OnDevice | None = None,
        ready: Any = None,
    ) -> list[CoreJob]:
        """Ask for regions of arrays of one geometry.

        Parameters
        ----------
        layouts : sequence of ArrayLayout
            The arrays, alike in :attr:`~linumpy.plan.layout.ArrayLayout.geometry`.
        regions : tuple of numpy.ndarray of int64
            Which array each region is of, (n,); first voxels and those behind the last, (n, rank); bytes between
            neighbours in each output, (n, rank); addresses of the outputs, (n,).
        outputs : sequence
            What holds the memory of each job's output, until the job is over.
        target : int
            Code of the outputs' dtype.
        fill : numpy.ndarray of uint8, (16,)
            Fill value as an element of the outputs.
        one_job : bool
            Whether all regions are one job.
        on_device : OnDevice, optional
            Kernels, and the event behind which outputs may be written, where those are on a device.
        ready : object
            What holds these until the jobs are over.
        """
        columns = [np.ascontiguousarray(column, np.int64) for column in regions]
        count = len(columns[0])
        with self._lock:
            records = [self._record(layout) for layout in layouts]
        arrays = (native.Array * len(records))(*(record[2] for record in records))
        batch = native.Batch(
            ctypes.pointer(records[0][1]),
            arrays,
            len(records),
            count,
            *(column.ctypes.data for column in columns),
            target,
        )
        ctypes.memmove(batch.fill, fill.ctypes.data, 16)
        batch.one_job = one_job
        if on_device is not None:
            batch.on_device = ctypes.pointer(on_device)
        pointers = (ctypes.c_void_p * (1 if one_job else count))()
        # Made before they are submitted: an interrupt behind the call must not free outputs that are written to.
        jobs = [
            CoreJob(self, pointers, n, output, ready) for n, output in zip(range(len(pointers)), outputs, strict=True)
        ]
        quick, waiting = self._library.quick, self._library.waiting
        self._release_dropped()
        while state := quick.lc_submit(self._pointer, batch, pointers):
            if state != 1:
                raise MemoryError(f"{count} regions could not be submitted: no memory")
            waiting.lc_wait_capacity(self._pointer, _SLICE)
        return jobs

    def _record(self, layout: ArrayLayout) -> tuple[ArrayLayout, native.Geometry, native.Array]:
        """Describe an array for the core; records of those that were read last are kept."""
        known = self._records.get(id(layout))
        if known is None:
            known = self._records[id(layout)] = (layout, _geometry_record(layout), _array_record(layout))
            if len(self._records) > _LAYOUTS:
                self._records.popitem(last=False)
        return known

    def stats(self) -> native.Stats:
        """Say what has been done so far."""
        stats = native.Stats()
        self._library.quick.lc_reader_stats(self._pointer, stats)
        return stats

    def close(self) -> None:
        """Cancel what is queued and finish what is under way; in a child process, do nothing."""
        if os.getpid() != self._process:
            return
        self.is_closing = True
        self._library.quick.lc_reader_close(self._pointer)
        while not self._library.waiting.lc_wait_closed(self._pointer, _SLICE):
            pass
        self._release_dropped()

    def drop(self, pointer: int, output: Any) -> None:
        """Let go of a job that nobody waits for; its output is kept as long as the core may write to it."""
        if os.getpid() != self._process:
            return
        if self._library.quick.lc_job_done(pointer):
            self._library.quick.lc_job_release(pointer)
        else:
            self._dropped[pointer] = output

    def _release_dropped(self) -> None:
        if not self._releasing.acquire(blocking=False):
            return  # another thread does
        try:
            for pointer in list(self._dropped):
                if self._library.quick.lc_job_done(pointer):
                    del self._dropped[pointer]
                    self._library.quick.lc_job_release(pointer)
        finally:
            self._releasing.release()

    def __del__(self) -> None:
        if os.getpid() == self._process and getattr(self, "_pointer", None):
            self.close()
            self._library.quick.lc_reader_delete(self._pointer)


class CoreJob:
    """One job of a reader; over when its last chunk is settled.

    Attributes
    ----------
    output : object
        What holds the memory of the output.
    """

    __slots__ = ("_number", "_pointers", "_reader", "_ready", "output")

    def __init__(self, reader: CoreReader, pointers: Any, number: int, output: Any, ready: Any = None) -> None:
        self._reader, self._pointers, self._number, self.output, self._ready = reader, pointers, number, output, ready

    @property
    def _pointer(self) -> int | None:
        """The core's handle; None until the job is submitted."""
        pointer: int | None = self._pointers[self._number]
        return pointer

    def done(self) -> bool:
        """Say whether the job is over."""
        return bool(self._reader._library.quick.lc_job_done(self._pointer))

    def wait(self) -> None:
        """Wait until the job is over; signals are handled meanwhile."""
        wait = self._reader._library.waiting.lc_wait_job
        while not self.done():
            if wait(self._pointer, _SLICE) < 0:
                raise RuntimeError("the interpreter is ending, and the job was not finished")
        self._ready = None

    def cancel(self) -> bool:
        """Give the job up; False where it is over already."""
        return bool(self._reader._library.quick.lc_job_cancel(self._pointer))

    def report(self) -> native.Report:
        """Say what was done, once the job is over."""
        report = native.Report()
        self._reader._library.quick.lc_job_report(self._pointer, report)
        return report

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return why the job failed, once it is over; None where it did not."""
        error = native.Error()
        self._reader._library.quick.lc_job_error(self._pointer, error)
        return None if error.code == native.OK else _exception(error, layout)

    def __del__(self) -> None:
        if (pointer := self._pointer) is not None:
            self._reader.drop(pointer, (self.output, self._ready))


def _geometry_record(layout: ArrayLayout) -> native.Geometry:
    record = native.Geometry(rank=layout.rank, dtype=native.DTYPE_CODES[layout.dtype.str[1:]], swapped=layout.swapped)
    record.chunk_shape[: layout.rank] = layout.chunk_shape
    record.stored_axes[: layout.rank] = layout.stored_axes
    record.chain = chain_record(layout.chain)
    if (shard := layout.shard) is not None:
        record.chunks_per_shard[: layout.rank] = shard.chunks_per_shard
        record.index_at_end = shard.index_at_end
        record.index_big_endian = shard.index_big_endian
        record.index_checksum = shard.index_checksum
    return record


def _array_record(layout: ArrayLayout) -> native.Array:
    prefix, separator = layout.chunk_path
    return native.Array(os.fsencode(prefix), separator.encode(), os.fsencode(metadata_path(layout)))


def metadata_path(layout: ArrayLayout) -> str:
    """Name the file that is there as long as the array is."""
    return f"{layout.root}/{'zarr.json' if layout.zarr_format == 3 else '.zarray'}"


def why_gone(layout: ArrayLayout) -> str:
    """Say that neither chunks nor metadata of an array are there."""
    return f"chunks of {layout.name} are missing, and so is {metadata_path(layout)}: is the folder gone?"


def _exception(error: native.Error, layout: ArrayLayout) -> BaseException:
    """Make the exception of a job, in words that name the chunk and its file."""
    code, rank = error.code, layout.rank
    stored, chunk = tuple(error.object[:rank]), tuple(error.chunk[:rank])
    prefix, separator = layout.chunk_path
    path = prefix + separator.join(map(str, stored))
    name = f"{'chunk' if layout.shard is None else 'shard'} {stored} of {layout.name}: {path}"
    text = error.text.decode(errors="replace")
    if code == native.CANCELLED:
        return CancelledError("the job was cancelled")
    if code == native.CLOSED:
        return RuntimeError("the reader is closed")
    if code == native.DEVICE:
        return RuntimeError(f"{layout.name}: the device failed: {text}")
    if code == native.THREAD:
        return RuntimeError(f"no thread could be started to read {layout.name}: {os.strerror(error.number)}")
    if code == native.MEMORY:
        return MemoryError(f"chunk {chunk} of {layout.name}: no memory for its {layout.chunk_nbytes} bytes")
    if code == native.DECODE:
        name = f"chunk {chunk} of {layout.name}: {path}"
        if layout.shard is not None:
            name += f", bytes {error.offset} to {error.offset + error.nbytes}"
        return ChunkError(f"{name} cannot be decoded ({layout.chain}): {text}")
    sentences = {
        native.OPEN: f"{name} cannot be opened: {os.strerror(error.number)}",
        native.NOT_FILE: f"{name} cannot be read: it is no file",
        native.SIZE: (
            f"{name} has {error.a} bytes, but a raw chunk of {layout.dtype} {layout.chunk_shape} has {error.b}"
        ),
        native.REPLACED: (
            f"{name} was replaced while it was being read (it had {error.a} bytes, and has {error.b} now): "
            f"read it again when its writer is done"
        ),
        native.READ: f"{name} cannot be read: {os.strerror(error.number)}",
        native.SHORT: f"{name}: {error.a} of {error.b} bytes could be read",
        native.INDEX: f"{name}: {text}",
        native.GONE: why_gone(layout),
    }
    if code in sentences:
        return ChunkError(sentences[code])
    return RuntimeError(f"{name}: the native core failed: {text}")
