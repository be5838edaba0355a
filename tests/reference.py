"""The production reader on the CPU: :mod:`fake_cupy` in place of CuPy, the device's kernels under the emulator."""

import contextlib
import os
import random
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import fake_cupy
import numpy as np
import pytest
from decoders import start
from linumpy.gpu.loop import loop
from linumpy.gpu.staging import device as staging
from linumpy.gpu.staging import engines, scatter
from linumpy.io.reads.file_reads import ReadEngine

from linumpy import device as devices
from linumpy.gpu import kvikio_zarr
from linumpy.gpu.read import reader, request
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES
from linumpy.io.layout import read_layout
from linumpy.io.source import open_source
from linumpy.plan.read import ring
from linumpy.plan.read.plan import plan_read


class PreadFile:
    """What GPUDirect Storage needs of kvikio's ``CuFile``; counts what is open.

    Bytes come into device memory at some time before the future is complete.
    """

    open_files = 0
    pool = ThreadPoolExecutor(2)
    random = None

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY)
        PreadFile.open_files += 1

    def fileno(self):
        return self._fd

    def pread(self, buffer, size, offset, task_size):
        future = self.pool.submit(os.preadv, self._fd, [memoryview(getattr(buffer, "host", buffer))[:size]], offset)
        future.get = future.result
        if self.random is not None and self.random.random() < 0.5:
            future.result()
        return future

    def close(self):
        os.close(self._fd)
        PreadFile.open_files -= 1


@contextlib.contextmanager
def fake_device(seed=0, opener=None):
    """Put a device in CuPy's place, and what opens files for GPUDirect Storage in kvikio's."""
    device = fake_cupy.Device(seed)
    with pytest.MonkeyPatch.context() as patch:
        # Small regions by themselves (tests/gpu/loop/test_alone.py) or as others are; those without a seed as others.
        patch.setattr(reader, "FEW_CHUNKS", random.Random(seed).choice([0, reader.FEW_CHUNKS]) if seed else 0)
        patch.setitem(sys.modules, "cupy", device.cupy)
        patch.setitem(sys.modules, "cupyx", device.cupyx)
        if opener is not None:
            patch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=opener))
        patch.setattr(engines, "transfer_settings", contextlib.nullcontext)
        patch.setattr(engines, "kvikio_mode", lambda: ("none" if opener is None else "compat", "a stand-in"))
        patch.setattr(engines, "LONG_READ_NBYTES", device.random.choice([50, 2**21]))  # kvikio's reads or batches
        patch.setattr(PreadFile, "random", device.random)
        patch.setattr(devices, "_cuda_started", False)
        patch.setattr(scatter, "load", device.load)
        patch.setattr(staging, "prepare", lambda specs: None)
        patch.setattr(staging.decode, "start", lambda launches: [queue(device, one) for one in launches])
        yield device
        device.rest()
        assert not device.faults


def queue(device, one):
    device.stream.add(lambda: start([one]))


class SmallEngine(ReadEngine):
    """An engine of few threads, since a test makes many."""

    def __init__(self, **options):
        super().__init__(2, **options)


def together(reader):
    """Hold the reader's thread back inside a ``with`` block, so that all that is submitted there is one wave."""
    return reader._loop._changed


SMALL_RING = 2**18


def use_small_rings(patch):
    """Let staging have so little memory that slabs of a small array take what earlier ones have used."""
    patch.setattr(ring, "_SMALLEST", 2**14)
    patch.setattr(loop, "_host_memory", lambda: SMALL_RING)
    patch.setattr(request, "MIN_SCRATCH_BYTES", SMALL_RING)


def leave_used_memory(device):
    """Give back memory of the stream that the reader's thread allocates on, which is written to some time later."""
    with device.default_stream:
        held = [device.empty(2**18, np.uint8) for _ in range(2)]
        device.default_stream.pace = device.random.choice([0, 0.1, 0.3])
        for number in range(200):
            held[number % 2][: 2**14].fill(number)


class Job:
    """A region that is to be read, and in the end what was done for it."""

    def __init__(self, source, region=None, *, dtype=None, scratch_bytes=None, seed=0, small_rings=False, **options):
        self.source, self.region, self.dtype, self.seed = source, region, dtype, seed
        self.small_rings = small_rings
        self.scratch_bytes = scratch_bytes or (SMALL_RING if small_rings else DEFAULT_SCRATCH_BYTES)
        self.options = options
        self.plan = plan_read(read_layout(open_source(source)), region)
        assert self.plan.layout.unsupported is None, self.plan.layout.unsupported
        self.report = self.stats = self.limits = None

    def reader(self):
        return Reader(0, self.scratch_bytes, **self.options)

    def run_on(self, device):
        """Read into memory that earlier work still uses, and use it as soon as the reader returns."""
        layout = self.plan.layout
        dtype = np.dtype(self.dtype or layout.dtype).newbyteorder("=")
        with pytest.MonkeyPatch.context() as patch, device.cupy.cuda.Stream(non_blocking=True):
            patch.setattr(engines, "ReadEngine", SmallEngine)
            patch.setattr(ring, "_SMALLEST", 2**17)  # so that it is memory that was left
            if self.small_rings:
                use_small_rings(patch)
            out = device.empty(self.plan.shape, dtype)
            out.fill(1)
            before = device.empty(out.shape, out.dtype)
            before[...] = out
            leave_used_memory(device)
            with self.reader() as reader:
                self.limits = reader.limits
                ticket = reader.submit_layout(layout, self.plan.region, out=out, dtype=dtype)
                try:
                    ticket.result()
                finally:
                    self.stats = reader.stats()
                self.report = ticket.report
                after = device.empty(out.shape, out.dtype)
                after[...] = out
                got = after.get()
            assert (before.get() == np.ones((), out.dtype)).all()
        return got


def execute(job, opener=PreadFile):
    """Carry a job out on a device of its own."""
    with fake_device(job.seed, opener) as device:
        return job.run_on(device)


def read(source, region=None, **options):
    """Read a region."""
    return execute(Job(source, region, **options))


make_job = Job


def use_own_readers(patch, **options):
    """Give each ``read_zarr_to_gpu`` a reader of its own with these options."""

    @contextlib.contextmanager
    def use(self, device, *, direct):
        with Reader(device, self.scratch_bytes, direct=direct, **options) as reader:
            yield reader

    patch.setattr(kvikio_zarr.OwnReader, "use", use)


@contextlib.contextmanager
def peak_memory(cupy):
    """Give a function that says how much more device memory was in use at most than at the beginning, by any thread.

    CuPy's memory hooks are those of one thread.
    """
    pool = cupy.get_default_memory_pool()
    begin, used = pool.used_bytes(), []

    def allocate(nbytes):
        memory = pool.malloc(nbytes)
        used.append(pool.used_bytes())
        return memory

    cupy.cuda.set_allocator(allocate)
    try:
        yield lambda: max(used) - begin
    finally:
        cupy.cuda.set_allocator(pool.malloc)
