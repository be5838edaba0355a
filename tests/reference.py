"""A slow, obvious executor of plans on the CPU: the reader's own loop, with POSIX reads and NumPy in place of CUDA."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from linumpy.gpu import kvikio_zarr
from linumpy.gpu.output import DEFAULT_SCRATCH_BYTES, ReadRequest, result_dtype
from linumpy.io.layout import read_layout
from linumpy.io.source import open_source
from linumpy.plan.read import plan_read


class PosixFile:
    """What the reader needs of kvikio's ``CuFile``, reading into host memory; counts what is open."""

    open_files = 0
    pool = ThreadPoolExecutor(2)

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY)
        PosixFile.open_files += 1

    def fileno(self):
        return self._fd

    def pread(self, buffer, size, offset, task_size):
        future = self.pool.submit(os.preadv, self._fd, [memoryview(buffer)[:size]], offset)
        future.get = future.result
        return future

    def close(self):
        os.close(self._fd)
        PosixFile.open_files -= 1


def copy_boxes(table, dtype_in, dtype_out, source, target, fill, conversion):
    """The scatter kernel's twin: NumPy's own strided views, one box after another."""
    if conversion.is_copy:
        dtype_in = dtype_out = np.dtype((np.void, table.unit))
    into = target.view(dtype_out) if conversion.is_copy else target.view(conversion.target)
    for first, to, *extent in table.rows.tolist():
        strides = tuple(s * into.itemsize for s in table.target_strides)
        box = np.lib.stride_tricks.as_strided(into[to:], extent, strides)
        if first < 0:
            unit = np.resize(np.frombuffer(fill.tobytes(), np.uint8), into.itemsize)
            box[...] = unit.view(into.dtype)[0]
            continue
        stored = source[first * table.unit :]
        stored = stored[: len(stored) // table.unit * table.unit]
        one = stored.view(dtype_in) if conversion.is_copy else stored.view(_stored_dtype(conversion))
        strides = tuple(s * table.unit for s in table.source_strides)
        values = np.lib.stride_tricks.as_strided(one, extent, strides)
        with np.errstate(all="ignore"):
            box[...] = values if conversion.is_copy else values.astype(conversion.target)


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

    def target(self, slot, slab, read):
        place, straight, nbytes = int(slab.place[read]), int(slab.straight[read]), int(slab.nbytes[read])
        if self._direct and straight >= 0:
            return self._out[straight : straight + nbytes]
        assert place + nbytes <= self._job.limits.nbytes, "a read leaves its slab"
        return self._arena[slot][place : place + nbytes]

    def place(self, slot, slab, table):
        if not self._direct:
            from linumpy.gpu.slots import straight_runs

            for begin, to, nbytes in straight_runs(slab):
                self._out[to : to + nbytes] = self._arena[slot][begin : begin + nbytes]
        if table is not None:
            self._scatter(table, self._arena[slot])

    def fill(self, table):
        self._scatter(table, None)

    def _scatter(self, table, source):
        layout = self._job.plan.layout
        fill = layout.fill_value.astype(self._job.request.dtype)
        copy_boxes(table, None, None, source, self._out, fill, self._job.conversion)

    def finish(self):
        self.finished += 1


def make_job(source, region=None, *, dtype=None, scratch_bytes=None, direct=False, slab_nbytes=None):
    plan = plan_read(read_layout(open_source(source)), region)
    assert plan.layout.unsupported is None, plan.layout.unsupported
    request = ReadRequest(plan, result_dtype(plan, dtype), None, scratch_bytes or DEFAULT_SCRATCH_BYTES)
    return kvikio_zarr.make_job(request, direct=direct, slab_nbytes=slab_nbytes)


def execute(job, opener=PosixFile):
    """Run the reader's loop; the result is poisoned first, so that an element it forgets shows."""
    out = np.full(max(1, job.plan.region.size * job.request.dtype.itemsize), 0x5A, np.uint8)
    slots = NumpySlots(out, job, direct=job.direct)
    if job.plan.region.size:
        kvikio_zarr.run(job, slots, opener)
        assert slots.finished == 1
    out = out[: job.plan.region.size * job.request.dtype.itemsize]
    return out.view(job.request.dtype).reshape(job.plan.shape)


def read(source, region=None, **options):
    return execute(make_job(source, region, **options))
