"""If this fails, a call that fails half-way leaves a job without an end, or a reader unusable."""

import contextlib
import errno
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from tests.support.budget import first
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values, same, stored

pytestmark = needs_stand_in

KINDS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": "auto"},
    "raw shards": {"compressors": None, "shards": (16, 48)},
    "zstd shards": {"compressors": "auto", "shards": (16, 48)},
}
SHAPE = (40, 48)


def make(folder, kind="raw", shape=SHAPE, chunks=(8, 16), **options):
    return stored(folder, random_values("u2", shape, 1), chunks, **(KINDS[kind] | options))


def over(ticket):
    """Wait for a ticket, which must end."""
    limit = time.monotonic() + 20
    while not ticket.done():
        assert time.monotonic() < limit, "a job waits for ever"
        time.sleep(0.0005)
    return ticket


@contextlib.contextmanager
def place(where):
    """Where outputs lie: the argument of Reader, and a function that makes NumPy arrays of them."""
    if where == "cpu":
        yield "cpu", np.asarray
        return
    with reference.fake_device(1):
        yield 0, lambda array: array.get()


FAILING = {
    "open": (errno.EIO, ChunkError, r"(chunk|shard) \(.*cannot be opened: Input/output error"),
    "fstat": (errno.EIO, ChunkError, r"(chunk|shard) \(.*cannot be read: Input/output error"),
    "pread": (errno.EIO, ChunkError, r"(chunk|shard) \(.*cannot be read: Input/output error"),
    "short": (-1, ChunkError, r"(chunk|shard) \(.*bytes"),
    "memory": (0, MemoryError, "memory"),
}


@pytest.mark.parametrize("where", ["cpu", 0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", FAILING)
def test_each_call_of_the_system_fails_once(tmp_path, where, kind, call):
    """An error of the jobs that names the chunk, or none; then the same reader reads right."""
    array = make(tmp_path / "a", kind)
    expected, rows = array[...], [slice(0, 9), slice(12, 30), slice(30, 31), slice(0, 40)]
    number, kind_of_error, message = FAILING[call]
    name = {"short": "pread"}.get(call, call)
    before, failed, quiet, nth = reference.open_files(), 0, 0, 0
    with place(where) as (device, get), Reader(device, decode_on="host" if device == 0 else None) as reader:
        while quiet < 3 and nth < 200:
            nth += 1
            with reference.failing_call(name, nth, number):
                tickets = reader.submit_many(array, rows)
                errors = [over(ticket).exception() for ticket in tickets]
            for ticket, error, mine in zip(tickets, errors, rows, strict=True):
                if error is None:
                    assert same(get(ticket.result()), expected[mine])
                else:
                    with pytest.raises(kind_of_error, match=message):
                        raise error
            failed += any(errors)
            quiet = 0 if any(errors) else quiet + 1
            assert same(get(over(reader.submit(array)).result()), expected)
        assert nth < 200
    assert failed or call == "memory"
    assert set(reference.open_files()) <= set(before)


@pytest.mark.parametrize("where", ["cpu", 0])
@pytest.mark.parametrize(("call", "number"), [("close", errno.EIO), ("thread", errno.EIO), ("open", errno.EMFILE)])
def test_calls_whose_failing_nobody_needs_to_know(tmp_path, where, call, number):
    """A descriptor that cannot be closed is closed; existing threads read instead of another; descriptors get free."""
    array = make(tmp_path / "a", "zstd")
    with place(where) as (device, get), Reader(device) as reader:
        for nth in range(1, 20):
            with reference.failing_call(call, nth, number):
                assert same(get(over(reader.submit(array)).result()), array[...])


def test_a_device_without_memory_for_slabs(tmp_path):
    """The jobs fail; later ones find memory."""
    array = make(tmp_path / "a")
    with reference.fake_device() as device:
        real, failing = device.cupy.cuda.alloc, []

        def alloc(nbytes):
            if failing:
                raise MemoryError("out of memory")
            return real(nbytes)

        device.cupy.cuda.alloc = alloc
        failing.append(True)
        with pytest.raises(MemoryError, match="memory"):
            Reader(0).submit(array).result()
        failing.clear()
        with Reader(0) as reader:
            assert same(over(reader.submit(array)).result().get(), array[...])


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_a_chunk_cache_without_memory(tmp_path, caplog, name):
    """Jobs do not need it."""
    array = make(tmp_path / "a", name)
    with reference.fake_device() as device:
        real = device.cupy.cuda.alloc

        def alloc(nbytes):
            if nbytes <= 2**21:
                raise MemoryError("out of memory")
            return real(nbytes)

        device.cupy.cuda.alloc = alloc
        with Reader(0, 2**23, decode_on="host", cache_bytes=2**21) as reader:
            for _ in range(2):
                assert same(over(reader.submit(array)).result().get(), array[...])
            assert reader.stats().cache_hits == 0
    assert "chunk cache" in caplog.text
    assert "out of memory" in caplog.text


LIMITED = """
import os, resource, sys, time
import numpy as np, zarr
from linumpy.gpu import Reader

path = sys.argv[1]
with Reader(device="cpu") as reader:
    expected = reader.submit(path).result()
for extra in map(float, sys.argv[2:]):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    reader = Reader(device="cpu")
    resource.setrlimit(resource.RLIMIT_AS, (used + int(extra * 2**20), -1))
    tickets = []
    try:
        tickets = reader.submit_many(path, [np.s_[n % 256 : n % 256 + 1] for n in range(600)])
    except (MemoryError, RuntimeError):
        pass
    begin = time.monotonic()
    while not all(ticket.done() for ticket in tickets) and time.monotonic() - begin < 20:
        time.sleep(0.01)
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    assert all(ticket.done() for ticket in tickets), f"a job waits for ever beside {extra} MiB"
    for n, ticket in enumerate(tickets):
        error = ticket.exception()
        if error is None:
            assert (ticket.result() == expected[n % 256 : n % 256 + 1]).all()
        else:
            assert isinstance(error, (MemoryError, RuntimeError, OSError)), error
    reader.close()
print("all ended")
os._exit(0)
"""


def ended(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=200
    )
    return done.stdout.strip(), (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("kind", first(["zstd", "raw"]))
def test_every_job_ends_whatever_memory_there_is(tmp_path, kind):
    """Limits from none, where hardly an array can be made, to enough; each in the same process."""
    make(tmp_path / "a", kind, shape=(256, 256), chunks=(8, 8))
    out, told = ended(LIMITED, tmp_path / "a", 0, 0.5, 1, 2, 4, 8, 9, 10, 12, 16, 32, 64)
    assert out == "all ended", told


WITHOUT_DESCRIPTORS = """
import os, resource, sys

from linumpy.gpu import Reader

with Reader(device="cpu") as reader:
    expected = reader.submit(sys.argv[1]).result().copy()
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    error = str(reader.submit(sys.argv[1]).exception())
    [os.close(one) for one in held]
    print(error, (reader.submit(sys.argv[1]).result() == expected).all())
"""


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_a_reader_outlives_a_time_without_descriptors(tmp_path, kind):
    """In a process of its own: what is imported on first use must not be imported just then."""
    make(tmp_path / "a", kind, shape=(200, 60), chunks=(1, 60))
    out, told = ended(WITHOUT_DESCRIPTORS, tmp_path / "a")
    assert out.endswith("Too many open files: 100 are allowed, raise the limit by ulimit -n True"), told


class Interrupt(BaseException):
    """As a signal handler raises."""


def interrupt_after_a_call(number):
    """Trace, and raise when the caller of a lock's methods goes on after it: there signal handlers run."""
    calls = iter(range(10**9))

    def profile(frame, event, function):
        of_lock = event == "c_return" and "lock" in type(getattr(function, "__self__", None)).__name__.lower()
        if of_lock and next(calls) == number:
            sys.setprofile(None)
            raise Interrupt

    return profile


@pytest.mark.parametrize("number", range(12))
def test_an_interrupt_of_a_caller_leaves_no_lock_held(tmp_path, number):
    array, rows = make(tmp_path / "a"), [slice(0, 8), slice(8, 16)]
    with Reader("cpu") as one:
        others = one.submit_many(array, rows)
        tickets = []
        with contextlib.suppress(Interrupt):
            sys.setprofile(interrupt_after_a_call(number))
            tickets.append(one.submit(array))
            tickets[0].result()
        sys.setprofile(None)
        for ticket in (*others, *tickets):
            assert over(ticket).exception() is None
        reading = threading.Thread(target=lambda: others.append(one.submit(array)), daemon=True)
        reading.start()
        reading.join(20)
        assert len(others) == 3, "a lock of the reader is held"
        assert same(over(others[2]).result(), array[...])


FAULT_OF_A_KERNEL = """
import os, sys, threading, time
import cupy
from linumpy.gpu import Reader

one = Reader(decode_on="device")
one.submit(sys.argv[1]).result()
cupy.cuda.Device().synchronize()
cupy.RawKernel('extern "C" __global__ void bad(int *at) { *at = 1; }', "bad")((1,), (1,), (cupy.uint64(8),))
out = []
try:
    out = [one.submit(sys.argv[1])]
except cupy.cuda.runtime.CUDARuntimeError:
    print("refused", end=" ")
for ticket in out:
    begin = time.monotonic()
    while not ticket.done() and time.monotonic() - begin < 60:
        time.sleep(0.01)
    print("failed" if ticket.done() and "CUDA" in str(ticket.exception()) else "no end", end=" ")
closing = threading.Thread(target=one.close, daemon=True)
closing.start()
closing.join(60)
print(closing.is_alive(), flush=True)
os._exit(0)
"""


@pytest.mark.gpu
def test_a_kernel_that_fails_on_a_gpu(tmp_path, cupy):
    """In a process of its own, whose use of the device it ends: nobody waits for ever."""
    make(tmp_path / "a", "zstd")
    out, told = ended(FAULT_OF_A_KERNEL, tmp_path / "a")
    assert out in ("failed False", "refused False"), (out, told)
