"""A slow, obvious executor of plans on the CPU: the reader's own loop, with POSIX reads and NumPy in place of CUDA."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.lib.stride_tricks import as_strided

from linumpy.gpu.read import engines
from linumpy.gpu.read import job as jobs
from linumpy.gpu.read import slab_loop as reader
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, ReadRequest, result_dtype
from linumpy.io.decode import DecodeError, decode_chunk
from linumpy.io.layout import read_layout
from linumpy.io.source import open_source
from linumpy.plan.decode.launches import DeviceLimits, plan_launches
from linumpy.plan.decode.workspace import decode_words, decoded_room
from linumpy.plan.read.plan import plan_read


class PreadFile:
    """What the reader needs of kvikio's ``CuFile``, reading into host memory; counts what is open."""

    open_files = 0
    pool = ThreadPoolExecutor(2)

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY)
        PreadFile.open_files += 1

    def fileno(self):
        return self._fd

    def pread(self, buffer, size, offset, task_size):
        future = self.pool.submit(os.preadv, self._fd, [memoryview(buffer)[:size]], offset)
        future.get = future.result
        return future

    def close(self):
        os.close(self._fd)
        PreadFile.open_files -= 1


class PreadEngine(engines.CuFileEngine):
    """The kvikio engine with another file in place of kvikio's."""

    name = "pread"

    def __init__(self, opener=PreadFile):
        self.open = opener
        self._task = None
        self._scope = contextlib.ExitStack()

    def __enter__(self):
        return self


def copy_boxes(table, source, target, fill, conversion):
    """The scatter kernel's twin: NumPy's own strided views, one box after another."""
    unit = np.dtype((np.void, table.unit))
    stored, into = (unit, unit) if conversion.is_copy else (_stored_dtype(conversion), conversion.target)
    target = _view(target, into)
    for first, to, *extent in table.rows.tolist():
        box = as_strided(target[to:], extent, tuple(s * into.itemsize for s in table.target_strides))
        if first < 0:
            box[...] = np.resize(np.frombuffer(fill.tobytes(), np.uint8), into.itemsize).view(into)[0]
            continue
        values = _view(source[first * stored.itemsize :], stored)
        values = as_strided(values, extent, tuple(s * stored.itemsize for s in table.source_strides))
        with np.errstate(all="ignore"):
            box[...] = values if conversion.is_copy else values.astype(into)


def _view(array, dtype):
    """As many whole elements as there are."""
    return array[: len(array) // dtype.itemsize * dtype.itemsize].view(dtype)


def _stored_dtype(conversion):
    return conversion.source.newbyteorder() if conversion.swapped else conversion.source


class NumpySlots:
    """Slots in host memory. Bytes are poisoned before each use, so that nothing unread passes for data."""

    def __init__(self, out, job, *, direct):
        self.depth = job.depth
        self._job, self._direct = job, direct
        self._out = out.reshape(-1).view(np.uint8)
        self._arena = [np.full(job.limits.nbytes, 0xA5, np.uint8) for _ in range(job.depth)]
        self.finished = 0

    def wait(self, slot):
        self._arena[slot][:] = 0xA5

    def buffers(self, slot, slab):
        assert slab.end <= self._job.limits.nbytes, "a read leaves its slab"
        rows = zip(slab.straight.tolist(), slab.place.tolist(), slab.nbytes.tolist(), strict=True)
        return [
            self._out[straight : straight + nbytes]
            if self._direct and straight >= 0
            else self._arena[slot][place : place + nbytes]
            for straight, place, nbytes in rows
        ]

    def addresses(self, slot, slab):
        assert not self._direct
        assert slab.end <= self._job.limits.nbytes, "a read leaves its slab"
        return self._arena[slot].ctypes.data + slab.place

    def place(self, slot, slab, table):
        if not self._direct:
            from linumpy.gpu.read.staging import straight_runs

            for begin, to, nbytes in straight_runs(slab):
                self._out[to : to + nbytes] = self._arena[slot][begin : begin + nbytes]
        if table is not None:
            self._scatter(table, self._arena[slot])

    def fill(self, table):
        self._scatter(table, None)

    def _scatter(self, table, source):
        layout = self._job.plan.layout
        fill = layout.fill_value.astype(self._job.request.dtype)
        copy_boxes(table, source, self._out, fill, self._job.conversion)

    def finish(self):
        self.finished += 1


class NumpyEncodedSlots(NumpySlots):
    """Slots whose chunks are decoded before they are placed: by numcodecs, or by the device's own kernels."""

    limits = DeviceLimits(processors=4, shared_nbytes=227 * 1024)

    def __init__(self, out, job, *, direct, kernels=None):
        super().__init__(out, job, direct=direct)
        self._kernels = kernels
        self._failed = []

    def place(self, slot, slab, table):
        if table is None:
            return
        layout, chain, kind = self._job.plan.layout, self._job.way.chain, self._job.way.slot
        space = kind.lay_out(len(slab.pieces), slab.end)
        assert len(slab.pieces) <= kind.chunks
        assert space.nbytes <= kind.nbytes
        assert space.pool_nbytes >= 0
        if self._kernels:
            decoded = self._run_kernels(slot, slab, space)
            self._scatter(table, decoded)
            return
        stored = [
            self._arena[slot][a : a + n].tobytes()
            for a, n in zip(slab.piece_place.tolist(), slab.piece_nbytes.tolist(), strict=True)
        ]
        step = decoded_room(chain, layout.chunk_nbytes)
        decoded = np.full((len(stored), step), 0xA5, np.uint8)
        for row, number, one in zip(decoded, slab.pieces.tolist(), stored, strict=True):
            try:
                decode_chunk(chain, one, row[: layout.chunk_nbytes])
            except DecodeError:
                self._failed.append(number)
        self._scatter(table, decoded.reshape(-1))

    def _run_kernels(self, slot, slab, space):
        """Fill a slot as the device's is filled, and run the launches that are planned for it."""
        chain, chunk_nbytes, n = self._job.way.chain, self._job.plan.layout.chunk_nbytes, len(slab.pieces)
        memory = np.full(self._job.way.slot.nbytes + 512, 0xA5, np.uint8)
        memory = memory[-memory.ctypes.data % 256 :]
        memory[space.stored :][: slab.end] = self._arena[slot][: slab.end]
        place = np.arange(n) * decoded_room(chain, chunk_nbytes)
        words = decode_words(chain, slab.piece_place, slab.piece_nbytes, place, chunk_nbytes)
        memory[space.words :][: len(words)] = words
        status = np.zeros(n, np.int32)
        self._kernels(plan_launches(chain, space, memory.ctypes.data, status.ctypes.data, n, chunk_nbytes, self.limits))
        assert (memory[self._job.way.slot.nbytes :] == 0xA5).all(), "a kernel wrote behind its slot"
        self._failed += slab.pieces[status != 0].tolist()
        return memory[space.decoded :]

    def failed(self):
        return np.array(self._failed, np.int64)


class NumpyHostSlots(NumpySlots):
    """Slots of chunks that the host decodes."""

    def __init__(self, out, job, count):
        super().__init__(out, job, direct=False)
        self.count = count
        self._host = [np.empty(job.plan.layout.chunk_nbytes, np.uint8) for _ in range(count)]

    def buffer(self, slot):
        self._host[slot][:] = 0xA5
        return self._host[slot]

    def place(self, slot, begin, end, table):
        copied = np.full(self._job.plan.layout.chunk_nbytes + 64, 0xA5, np.uint8)
        copied[: end - begin] = self._host[slot][begin:end]
        self._scatter(table, copied)


def make_plan(source, region=None):
    plan = plan_read(read_layout(open_source(source)), region)
    assert plan.layout.unsupported is None, plan.layout.unsupported
    return plan


def make_job(source, region=None, *, dtype=None, scratch_bytes=None, direct=False, **options):
    plan = make_plan(source, region)
    request = ReadRequest(plan, result_dtype(plan, dtype), None, scratch_bytes or DEFAULT_SCRATCH_BYTES)
    (job,) = jobs.plan_transfer(request, direct=direct, **options).jobs()
    return job


def execute(job, engine=None, kernels=None):
    """Run the reader's loop, with POSIX batches unless told otherwise, into a result that is poisoned first."""
    out = np.full(max(1, job.plan.region.size * job.request.dtype.itemsize), 0x5A, np.uint8)
    if job.plan.region.size:
        execute_into(job, out, engine, kernels)
    out = out[: job.plan.region.size * job.request.dtype.itemsize]
    return out.view(job.request.dtype).reshape(job.plan.shape)


def execute_into(job, out, engine=None, kernels=None):
    """Do the same into the bytes of a result."""
    engine = engine or (PreadEngine() if job.direct else engines.PosixEngine(2))
    if job.way is None:
        slots = NumpySlots(out, job, direct=job.direct)
        reader.run(job, slots, engine)
    elif job.way.slot is None:
        slots = NumpyHostSlots(out, job, 2)
        reader.run_all_on_host(job, slots)
    else:
        slots = NumpyEncodedSlots(out, job, direct=job.direct, kernels=kernels)
        reader.run(job, slots, engine)
        rows = np.union1d(slots.failed(), job.counts.too_long).astype(np.int64)
        if len(rows):
            reader.run_on_host(job, NumpyHostSlots(out, job, 2), [rows])
    assert slots.finished == 1


def read(source, region=None, **options):
    return execute(make_job(source, region, **options))
