"""The production reader on the CPU: :mod:`fake_cupy` in place of CuPy, :mod:`stand_in` in place of the driver."""

import contextlib
import importlib.machinery
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from linumpy import device as devices
from linumpy.core import native
from linumpy.gpu import kvikio_zarr
from linumpy.gpu.read.engines import core_device
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.plan.region import normalize_region
from tests.support.gpu import fake_cupy, stand_in

#: Scratch of readers: of a few slabs, of small ones, and of one a chunk hardly fits.
SCRATCHES = [
    one for one in (2**20, 2**22, 2**26, DEFAULT_SCRATCH_BYTES) if one >= getattr(core_device, "LEAST_SCRATCH_BYTES", 0)
]
#: System calls of the native core that may fail, as ``lc_fail_next`` numbers them.
CALLS = {name: number for number, name in enumerate(("open", "fstat", "pread", "close", "thread", "memory", "delay"))}


@contextlib.contextmanager
def failing_call(name, nth, number):
    """Let the `nth` next call of a kind fail with an errno; a negative one makes a read so many bytes shorter."""
    fail = native.library().quick.lc_fail_next
    fail(CALLS[name], nth, number)
    try:
        yield
    finally:
        fail(CALLS[name], 0, 0)


def open_files():
    """Descriptors of files; not those of event loops, which the garbage of other tests may close at any time."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{one}").startswith("/"):
                found.append(one)
    return sorted(found)


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
    with pytest.MonkeyPatch.context() as patch, stand_in.installed(device) as device.driver:
        patch.setitem(sys.modules, "cupy", device.cupy)
        patch.setitem(sys.modules, "cupyx", device.cupyx)
        kvikio = types.ModuleType("kvikio")
        kvikio.__spec__, kvikio.CuFile = importlib.machinery.ModuleSpec("kvikio", None), opener
        patch.setitem(sys.modules, "kvikio", None if opener is None else kvikio)
        patch.setattr(PreadFile, "random", device.random)
        patch.setattr(devices, "_cuda_started", False)
        try:
            yield device
        finally:
            device.end()  # also after a failure: memory of the next test may lie where this one's was


def leave_used_memory(device):
    """Give back memory of the stream that a reader allocates on, which is written to some time later."""
    with device.default_stream:
        held = [device.empty(2**18, np.uint8) for _ in range(2)]
        device.default_stream.pace = device.random.choice([0, 0.1, 0.3])
        for number in range(200):
            held[number % 2][: 2**14].fill(number)


class Job:
    """A region that is to be read, and in the end what was done for it."""

    def __init__(self, source, region=None, *, dtype=None, scratch_bytes=DEFAULT_SCRATCH_BYTES, seed=0, **options):
        self.region, self.dtype, self.seed = region, dtype, seed
        self.scratch_bytes, self.options = scratch_bytes, options
        self.layout = read_layout(open_source(source))
        assert self.layout.unsupported is None, self.layout.unsupported
        self.report = self.stats = None

    def reader(self):
        return Reader(0, self.scratch_bytes, **self.options)

    def run_on(self, device):
        """Read into memory that earlier work still uses, and use it as soon as the reader returns."""
        dtype = np.dtype(self.dtype or self.layout.dtype).newbyteorder("=")
        with device.cupy.cuda.Stream(non_blocking=True):
            out = device.empty(normalize_region(self.region, self.layout.shape).shape, dtype)
            out.fill(1)
            before = device.empty(out.shape, out.dtype)
            before[...] = out
            leave_used_memory(device)
            with self.reader() as reader:
                ticket = reader.submit(self.layout, self.region, out=out, dtype=dtype)
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


def execute(job, opener=None):
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
