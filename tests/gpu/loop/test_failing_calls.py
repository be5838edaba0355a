"""Calls that fail half-way, of the device, of memory and of threads: every job ends, and the reader goes on."""

import contextlib
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import budget
import numpy as np
import pytest
import reference
import zarr
from fake_cupy import Event, Stream
from linumpy.gpu.loop import host_decode, jobs
from linumpy.gpu.loop.carrier import Carrier
from linumpy.gpu.loop.loop import Loop
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.staging import engines, scatter
from linumpy.gpu.staging.direct import DirectStaging
from linumpy.gpu.staging.host import HostStaging
from stores import random_values, same

import linumpy
from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader

KINDS = {
    "raw": {"compressors": None},
    "zstd": {"compressors": "auto"},
    "raw shards": {"compressors": None, "shards": (16, 48)},
    "zstd shards": {"compressors": "auto", "shards": (16, 48)},
}
SHAPE = (40, 48)


def make(folder, kind="raw", shape=SHAPE, chunks=(8, 16), **options):
    array = zarr.create_array(folder, shape=shape, chunks=chunks, dtype="u2", **(KINDS[kind] | options))
    array[...] = random_values("u2", shape, 1)
    return array


def over(ticket):
    """Wait for a ticket, which must end."""
    assert ticket._settled.wait(20), "a job waits for ever"
    return ticket


def close(one):
    """Close a reader, which must end."""
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive(), "close() waits for ever"


class InjectedError(Exception):
    """What a call raises."""


class InjectedMemoryError(InjectedError, MemoryError):
    """As CuPy's, where there is no memory."""


class Calls:
    """Calls of the stand-in for CuPy by a reader's thread, of which one fails."""

    def __init__(self, device, patch):
        self.count, self.failing, self.error = 0, None, InjectedError
        for kind, name in ((Stream, "record"), (Stream, "wait_event"), (Stream, "synchronize"), (Event, "synchronize")):
            patch.setattr(kind, name, self.counted(getattr(kind, name)))
        for place, name in (
            (device.cupy.cuda.runtime, "memcpyAsync"),
            (device.cupy.cuda, "Stream"),
            (device.cupy, "empty"),
            (device.cupyx, "empty_pinned"),
        ):
            patch.setattr(place, name, self.counted(getattr(place, name)))
        load = scatter.load
        patch.setattr(scatter, "load", lambda spec: self.counted(load(spec)))

    def counted(self, function):
        def call(*arguments, **options):
            if threading.current_thread().name == "linumpy-reader":
                self.count += 1
                if self.count == self.failing:
                    raise self.error("injected")
            return function(*arguments, **options)

        return call


#: Calls that make a reader's streams: none of its jobs can be carried out without them.
STREAMS = 6


def jobs_with_a_failing_call(array, failing, error, direct=False, **options):
    """Carry out jobs while one call fails; return how many calls there were."""
    opener = reference.PreadFile if direct else None
    rows = [slice(k, min(40, k + 11)) for k in range(0, 40, 8)] + [slice(3, 3), slice(0, 40)]
    expected = array[...]
    with pytest.MonkeyPatch.context() as patch, reference.fake_device(failing or 0, opener) as device:
        patch.setattr(engines, "ReadEngine", reference.SmallEngine)
        calls = Calls(device, patch)
        calls.failing, calls.error = failing, error
        one = Reader(0, 2**20, direct=direct, **options)
        for _ in range(2):
            with reference.together(one):
                tickets = one.submit_many(array, rows[:4]) + one.submit_many(array, rows[4:], dtype="f8")
            for ticket, mine in zip(tickets, rows, strict=True):
                if over(ticket).exception() is None:
                    assert np.array_equal(ticket.result().get(), expected[mine])
                elif failing > STREAMS:
                    assert isinstance(ticket.exception(), error), ticket.exception()
        count, calls.failing = calls.count, None
        assert one.is_closed == (failing is not None and failing <= STREAMS)
        if not one.is_closed:
            assert same(over(one.submit(array)).result().get(), expected)
        close(one)
        carrier = one._loop.carrier
        if carrier is not None:
            assert not carrier.reading
            assert not carrier.decoding
            assert not carrier.again
            assert carrier.staging._host is None
            assert carrier.staging._device is None
            assert one.stats().device_bytes == 0
    assert reference.PreadFile.open_files == 0
    return count


FAILING = {
    "raw": {"kind": "raw"},
    "raw, direct": {"kind": "raw", "direct": True},
    "host": {"kind": "zstd shards", "decode_on": "host", "cache_bytes": 1024},
    "raw, cached": {"kind": "raw shards", "cache_bytes": 2**20},
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_of_the_device_that_fails(tmp_path, name, step):
    options = dict(FAILING[name])
    array = make(tmp_path / "a", options.pop("kind"))
    count = jobs_with_a_failing_call(array, None, InjectedError, **options)
    assert count > 30
    for failing in range(1, count, step):
        jobs_with_a_failing_call(array, failing, (InjectedError, InjectedMemoryError)[failing % 2], **options)


def test_a_kernel_that_fails_while_chunks_are_decoded(tmp_path, monkeypatch):
    """CuPy's ``Event.done`` is False from then on; what waits for the device raises."""
    array = make(tmp_path / "a", "zstd")

    def fail(*_):
        raise InjectedError("an illegal memory access was encountered")

    with reference.fake_device() as device, monkeypatch.context() as patch:
        one = Reader(0, decode_on="device")
        assert over(one.submit(array)).exception() is None
        device.cupy.cuda.runtime.eventQuery = lambda event: 700
        patch.setattr(Event, "synchronize", fail)
        patch.setattr(Event, "done", False)
        tickets = one.submit_many(array, [slice(0, 8), slice(8, 16)])
        assert [str(over(ticket).exception()) for ticket in tickets] == ["an illegal memory access was encountered"] * 2
        close(one)
        patch.undo()


@pytest.mark.parametrize("place", ["cpu", 0])
def test_an_engine_that_cannot_be_made(tmp_path, monkeypatch, place):
    """As where no thread can be started: the jobs fail, and later ones find an engine."""
    array = make(tmp_path / "a")
    failing = [True]

    class Engine(reference.SmallEngine):
        def __init__(self, **options):
            if failing:
                raise RuntimeError("can't start new thread")
            super().__init__(**options)

    monkeypatch.setattr(engines, "ReadEngine", Engine)
    with reference.fake_device(), Reader(place) as one:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                over(one.submit(array)).result()
        failing.clear()
        assert over(one.submit(array)).exception() is None


def test_an_engine_that_cannot_be_made_anew(monkeypatch):
    """More files may be open than the engine was made for: the old one is closed."""
    made = engines.Engines(HostStaging(2**20))
    made.use(10, 2)
    old = made.batches
    monkeypatch.setattr(engines, "ReadEngine", None)
    with pytest.raises(TypeError):
        made.use(100, 2)
    monkeypatch.undo()
    made.use(10, 2)
    assert made.batches is not old
    made.close()


def no_memory(*arguments, **options):
    raise MemoryError("no memory")


@pytest.mark.parametrize("place", ["cpu", 0])
@pytest.mark.parametrize(
    "failing",
    [
        ((Carrier, "_start"), (Part, "fail"), (Part, "fail_all")),  # a work, then the errors of its jobs
        ((Part, "finish"),),  # nobody knows which jobs are over
        ((Loop, "_settle"),),
        ((Loop, "_next_work"), (Loop, "_fail_everything")),
        ((Loop, "_open"), (Loop, "_fail_everything")),
    ],
)
def test_where_memory_ends_twice_every_job_ends(tmp_path, monkeypatch, place, failing):
    """Nobody is left to tell: who waits finds out, at the latest when the thread has ended."""
    array = make(tmp_path / "a")
    with reference.fake_device():
        for owner, name in failing:
            monkeypatch.setattr(owner, name, no_memory)
        one = Reader(place)
        tickets = one.submit_many(array, [slice(n, n + 9) for n in range(20)])
        errors = []
        waiting = threading.Thread(target=lambda: errors.extend(t.exception() for t in tickets), daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive(), "a job waits for ever"
        assert all(isinstance(error, (MemoryError, RuntimeError)) for error in errors)
        assert "MemoryError" in repr(errors[-1])
        assert all(ticket.done() for ticket in tickets)
        one._loop._thread.join(20)
        assert one.is_closed
        with pytest.raises(RuntimeError, match=r"has ended with an error: MemoryError"):
            one.submit(array).result()
        close(one)


def test_after_the_shared_reader_has_died_the_next_read_makes_another(tmp_path, monkeypatch):
    array = make(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(Part, "finish", no_memory)
        with pytest.raises((MemoryError, RuntimeError), match=r"memory|Memory"):
            linumpy.read_zarr(array, device="cpu")
    assert same(linumpy.read_zarr(array, device="cpu"), array[...])


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


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_every_job_ends_whatever_memory_there_is(tmp_path, kind):
    """Limits from none, where hardly an array can be made, to enough; each in the same process."""
    make(tmp_path / "a", kind, shape=(256, 256), chunks=(8, 8))
    limits = [str(extra) for extra in (0, 0.5, 1, 2, 4, 8, 9, 10, 12, 16, 32, 64)]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "a"), *limits], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.strip() == "all ended", (done.returncode, done.stderr[-2000:])


class FewThreads(threading.Thread):
    """A thread that decodes cannot be started where there are some already."""

    def start(self):
        if self.name.startswith("linumpy-decode") and self.name[-1] != "0":
            raise RuntimeError("can't start new thread")
        super().start()


def test_a_decoding_thread_that_cannot_be_started(tmp_path, monkeypatch):
    """Those that there are write into staging memory: it is not given to others before they have ended."""
    array = make(tmp_path / "a", "zstd")
    writing, real, written = threading.Event(), host_decode._decode, []

    def slow(part, span, buffer):
        writing.wait(0.2)
        written.append(span)
        return real(part, span, buffer)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    monkeypatch.setattr(host_decode, "_decode", slow)
    with Reader("cpu") as one:
        assert over(one.submit(array, slice(3, 3))).exception() is None  # its other threads run
        monkeypatch.setattr(threading, "Thread", FewThreads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            over(one.submit(array)).result()
        count = len(written)
        writing.wait(0.5)
        assert len(written) == count, "a thread writes for a job that is over"
        monkeypatch.undo()
        assert same(over(one.submit(array)).result(), array[...])


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_a_chunk_cache_without_memory(tmp_path, caplog, name):
    """Jobs do not need it."""
    array = make(tmp_path / "a", name)
    with reference.fake_device() as device, Reader(0, decode_on="host", cache_bytes=2**20) as one:
        real = device.cupy.empty

        def empty(shape, dtype):
            if shape < 2**20:
                raise MemoryError("out of memory")
            return real(shape, dtype)

        device.cupy.empty = empty
        with device.cupy.cuda.Stream(non_blocking=True):
            out = device.empty(SHAPE, "u2")
            for _ in range(2):
                assert same(over(one.submit(array, out=out)).result().get(), array[...])
        assert one.stats().cache_hits == 0
    assert "the chunk cache stays at 0 of 1048576 bytes: out of memory" in caplog.text


def test_closing_gives_the_memory_of_the_cache_back(tmp_path):
    array = make(tmp_path / "a")
    with reference.fake_device() as device:
        one = Reader(0, cache_bytes=2**20)
        assert same(one.submit(array).result().get(), array[...])
        assert one.stats().device_bytes > 2**20
        one.close()
        free = sum(len(some) for some in device._pool.values())
        assert free == len(device._memory), "device memory is held"
        assert one.stats().device_bytes == 0


@pytest.mark.parametrize("place", ["cpu", 0])
@pytest.mark.parametrize("failing", [2, 3, 5])
def test_a_request_that_cannot_be_made(tmp_path, monkeypatch, place, failing):
    """A job of several requests is over when those are that have begun; none writes to its output afterwards."""
    array = make(tmp_path / "a")
    monkeypatch.setattr(jobs, "REQUEST_BOXES", 4)
    real, calls, settled = jobs.make_request, [], []

    def make_request(*arguments):
        calls.append(1)
        if len(calls) == failing:
            raise MemoryError("no memory to cut boxes")
        return real(*arguments)

    class Engine(reference.SmallEngine):
        def start(self, reads):
            settled.append(tickets[1].done())
            return super().start(reads)

    monkeypatch.setattr(jobs, "make_request", make_request)
    monkeypatch.setattr(engines, "ReadEngine", Engine)
    with reference.fake_device() as device, Reader(place) as one:
        empty = np.empty if place == "cpu" else device.empty
        out = [empty((8, 48), "u2"), empty(SHAPE, "u2"), empty((8, 48), "u2")]
        with reference.together(one):
            tickets = one.submit_many(array, [slice(0, 8), slice(0, 40), slice(8, 16)], outs=out)
        outcomes = [over(ticket).exception() for ticket in tickets]
        assert outcomes[0] is None
        assert [str(one) for one in outcomes[1:]] == ["no memory to cut boxes"] * 2
        assert any(settled) == (failing == 2), "a job is over while it is being read"
        assert over(one.submit(array)).exception() is None
        assert one._loop._queued_boxes == 0


def test_a_large_job_that_is_cancelled_is_not_cut_to_its_end(tmp_path, monkeypatch):
    array = make(tmp_path / "a", shape=(800, 48))
    monkeypatch.setattr(jobs, "REQUEST_BOXES", 3)
    real, calls = jobs.make_request, []

    def make_request(*arguments):
        calls.append(1)
        if len(calls) == 5:
            ticket.cancel()
        return real(*arguments)

    monkeypatch.setattr(jobs, "make_request", make_request)
    with Reader("cpu") as one:
        with reference.together(one):
            ticket = one.submit(array)
        with pytest.raises(CancelledError):
            over(ticket).result()
        assert len(calls) == 5
        assert same(one.submit(array, slice(0, 9)).result(), array[:9])


def test_a_job_is_not_cancelled_while_it_ends(tmp_path):
    """Where it is cancelled in time its kernels are waited for; else it is not cancelled."""
    array, said = make(tmp_path / "a"), []

    class Counts(dict):
        def __setitem__(self, name, value):
            if name == "jobs":  # the last step before a ticket is settled
                said.append(ticket.cancel())
            super().__setitem__(name, value)

    with reference.fake_device(), Reader(0) as one:
        one._loop.counts = Counts(one._loop.counts)
        with reference.together(one):
            ticket = one.submit(array)
        assert over(ticket).exception() is None
        assert said == [False]
        assert same(ticket.result().get(), array[...])


def test_a_slab_that_loses_a_chunk_while_the_cache_is_emptied(tmp_path, monkeypatch):
    """The tables of the others fit the memory that was taken for them, though the cache has places for all by now."""
    array = make(tmp_path / "a", "zstd", shape=(400, 48))
    expected = array[...]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    with reference.fake_device() as device, Reader(0, decode_on="host", cache_bytes=2**20) as one:
        out = device.empty((400, 48), "u2")
        assert over(one.submit(array, slice(0, 8), out=out[:8])).exception() is None
        cache = one._loop.carrier.cache
        real, calls = cache.reserve, []

        def reserve(part, spans):
            calls.append(len(spans))
            return np.full(len(spans), -1) if calls.index(len(spans)) == len(calls) - 1 else real(part, spans)

        monkeypatch.setattr(cache, "reserve", reserve)  # it has places when it is asked again
        os.truncate(tmp_path / "a/c/20/0", 3)
        rows = [slice(160, 168), slice(0, 160), slice(168, 400)]
        tickets = one.submit_many(array, rows, outs=[out[mine] for mine in rows])
        assert isinstance(over(tickets[0]).exception(), ChunkError)
        assert max(calls) > 50
        for ticket, mine in list(zip(tickets, rows, strict=True))[1:]:
            assert over(ticket).exception() is None
            assert same(ticket.result().get(), expected[mine])


def test_a_slab_that_nobody_wants_any_more_fills_all_memory():
    """It has no tables: nothing is copied to the end of the memory."""
    with reference.fake_device(0, reference.PreadFile):
        staging = DirectStaging(2**20, 2**20)
        taken = staging.take_read(3 * 2**18)
        assert taken.nbytes == staging.arena_nbytes
        assert staging.place_read(taken, taken.nbytes, staging.plan_tables([]), timed=False).status is None
        staging.close()


class Asker:
    """A caller that asks for regions, cancels some, and writes to the outputs of those that have ended in vain."""

    def __init__(self, seed, one, arrays, fake):
        self.rng, self.one, self.arrays, self.fake = random.Random(seed), one, arrays, fake
        self.ended, self.failure = [], None

    def __call__(self):
        try:
            for _ in range(self.rng.randrange(1, 4)):
                self.ask(*self.rng.choice(self.arrays))
        except BaseException as error:
            self.failure = error

    def ask(self, array, expected, allowed):
        rows = [slice(*sorted(self.rng.sample(range(len(expected) + 1), 2))) for _ in range(self.rng.randrange(1, 8))]
        empty = np.zeros if self.fake is None else self.fake.empty
        outs = [empty((mine.stop - mine.start, expected.shape[1]), "u2") for mine in rows]
        tickets = self.one.submit_many(array, rows, outs=outs)
        for ticket in tickets:
            if self.rng.random() < 0.3:
                ticket.cancel()
        for ticket, out, mine in self.rng.sample(list(zip(tickets, outs, rows, strict=True)), len(rows)):
            error = over(ticket).exception()
            if error is None:
                got = ticket.result()
                assert np.array_equal(got if self.fake is None else got.get(), expected[mine])
            else:
                assert isinstance(error, (CancelledError, *allowed)) or "is closed" in str(error), error
                self.use(out)

    def use(self, out):
        """Write to an output that nobody else writes to any more."""
        if self.fake is not None:
            self.fake.default_stream.synchronize()  # of its memory there may have been an earlier user
        self.ended.append(out)
        self.memory(out)[...] = 12345

    def memory(self, out):
        return out if self.fake is None else out.host


def end_at_any_time(seed, arrays):
    rng = random.Random(seed)
    direct, on_host = rng.random() < 0.3, rng.random() < 0.3
    with (
        pytest.MonkeyPatch.context() as patch,
        reference.fake_device(seed, reference.PreadFile if direct else None) as fake,
    ):
        patch.setattr(jobs, "REQUEST_BOXES", rng.choice([2**16, 4, 9]))
        patch.setattr(engines, "ReadEngine", reference.SmallEngine)
        options = {"scratch_bytes": 2**20, "slab_nbytes": rng.choice([None, 4096])}
        if rng.random() < 0.5:
            reference.use_small_rings(patch)
            options["scratch_bytes"] = reference.SMALL_RING
        if not on_host:
            options |= {"direct": direct, "cache_bytes": rng.choice([0, 1000, 2**20]), "decode_on": "host"}
        one = Reader("cpu" if on_host else 0, **options)
        askers = [
            Asker(number + 3 * seed, one, arrays, None if on_host else fake) for number in range(rng.choice([1, 3]))
        ]
        running = [threading.Thread(target=asker) for asker in askers]
        [thread.start() for thread in running]
        if rng.random() < 0.7:
            threading.Event().wait(rng.random() * 0.02)
            close(one)
        [thread.join(60) for thread in running]
        close(one)
        fake.rest()
        for asker in askers:
            assert asker.failure is None
            for out in asker.ended:
                assert (asker.memory(out) == 12345).all(), "an output is written to after the job is over"
    assert reference.PreadFile.open_files == 0


def test_jobs_that_end_at_any_time(tmp_path):
    """By a cancellation, a broken chunk, or the end of the reader: their outputs are their callers' then."""
    arrays = []
    for kind in (*KINDS, "broken"):
        array = make(tmp_path / kind, kind if kind in KINDS else "zstd", shape=(160, 48))
        arrays.append((array, array[...], (ChunkError,) if kind == "broken" else ()))
    os.truncate(tmp_path / "broken/c/3/1", 5)
    for seed in range(budget.examples(200)):
        end_at_any_time(seed, arrays)


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
import os, sys, threading
import cupy
from linumpy.gpu import Reader
from linumpy.gpu.staging import device

one = Reader(decode_on="device")
one.submit(sys.argv[1]).result()
cupy.cuda.Device().synchronize()
bad = cupy.RawKernel('extern "C" __global__ void bad(int *at) { *at = 1; }', "bad")
bad.compile()
device.decode.start = lambda launches: bad((1,), (1,), (cupy.uint64(8),))
ticket = one.submit(sys.argv[1])
ended = ticket._settled.wait(60)
print(ended, ended and type(ticket.exception()).__name__.startswith("CUDA"))
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
    command = [sys.executable, "-c", FAULT_OF_A_KERNEL, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True True\nFalse\n", done.stderr[-2000:]
