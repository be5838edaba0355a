"""If this fails, the native core and Python disagree about who holds what: outputs, handles, signals, forks."""

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.storage import MemoryStore

from linumpy.core import native
from linumpy.core import reader as reader_module
from linumpy.errors import CoreUnavailableError
from linumpy.gpu import Reader
from linumpy.gpu.read.outputs import Regions
from tests.support import budget
from tests.support.budget import first, matrix

pytestmark = pytest.mark.needs_core
SHAPE = (40, 37, 41)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("core") / "a.zarr"
    array = zarr.create_array(path, shape=SHAPE, chunks=(8, 8, 8), shards=(16, 16, 16), dtype="u2", fill_value=7)
    array[:] = np.random.default_rng(1).integers(0, 2**16, SHAPE, dtype=np.uint16)
    return path


def boxes(random, count):
    """Return random regions, (count, rank, 2); none is empty."""
    low = np.stack([random.integers(0, size, count) for size in SHAPE], axis=1)
    high = np.stack([random.integers(low[:, a] + 1, size + 1) for a, size in enumerate(SHAPE)], axis=1)
    return np.stack([low, high], axis=2)


def expected(store, box):
    return zarr.open_array(store, mode="r")[tuple(slice(*axis) for axis in box)]


def run(code, *arguments, timeout=60):
    """Run a program of its own; returns what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def test_dropped_tickets_write_to_nothing_that_is_freed(store):
    random = np.random.default_rng(2)
    with Reader(device="cpu") as reader:
        for _ in range(30):
            dropped = reader.submit_many(store, boxes(random, 8))
            del dropped
            regions = boxes(random, 3)
            others = [np.full(tuple(box[:, 1] - box[:, 0]), 3, np.uint16) for box in regions]  # of freed memory, maybe
            tickets = reader.submit_many(store, regions)
            for ticket, box, other in zip(tickets, regions, others, strict=True):
                np.testing.assert_array_equal(ticket.result(), expected(store, box))
                assert (other == 3).all()


def test_threads_that_drop_and_submit(store):
    errors = []

    def work(seed):
        random = np.random.default_rng(seed)
        try:
            for _ in range(budget.examples(75)):
                regions = boxes(random, 4)
                tickets = reader.submit_many(store, regions)
                tickets[:2] = []
                for ticket, box in zip(tickets, regions[2:], strict=True):
                    np.testing.assert_array_equal(ticket.result(), expected(store, box))
        except BaseException as error:  # a thread's error is raised by the test
            errors.append(error)

    with Reader(device="cpu") as reader:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]


def test_threads_that_wait_leave_no_memory_behind(tmp_path):
    """They decode small jobs themselves, and may end right after."""
    array = zarr.create_array(tmp_path / "a", shape=(128, 64, 64), chunks=(128, 64, 64), dtype="u2")
    array[...] = np.random.default_rng(0).integers(0, 9, array.shape)
    part, page = array[:100], os.sysconf("SC_PAGESIZE")

    def work():
        same.append(np.array_equal(reader.submit(array, np.s_[:100]).result(), part))

    with Reader(device="cpu") as reader:
        for n in range(200):
            same: list[bool] = []
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            assert same == [True]
            if n == 20:
                before = page * int(Path("/proc/self/statm").read_text().split()[1])
        assert page * int(Path("/proc/self/statm").read_text().split()[1]) - before < 64 * 2**20


class HeldStore(MemoryStore):
    """A store in memory whose chunks arrive when the test says so."""

    arrive = threading.Event()

    async def get(self, key, *arguments, **options):
        if "zarr.json" not in key:
            await asyncio.to_thread(self.arrive.wait, 30)
        return await super().get(key, *arguments, **options)


@pytest.fixture
def held():
    """An array whose reads do not end before `held.store.arrive` is set."""
    array = zarr.create_array(HeldStore(), shape=(4, 4), chunks=(2, 4), dtype="u2", fill_value=7)
    array.store.arrive.set()
    array[...] = 5
    array.store.arrive.clear()
    yield array
    array.store.arrive.set()


def interrupted(action, nth):
    """Run an action whose `nth` bytecode in the core's reader, from 0 on, is interrupted; returns whether one was."""
    left = nth

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != reader_module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return left < 0


def submit_one(reader, array, outputs):
    return [reader.submit(array, out=outputs[0])]


def submit_many(reader, array, outputs):
    return reader.submit_many(array, np.array([[[0, 4], [0, 4]]] * len(outputs)), outs=outputs)


def submit_together(reader, array, outputs):
    regions = np.array([[[0, 4], [0, 4]]] * len(outputs))
    columns = Regions(
        np.zeros(len(outputs), np.int64),
        regions[..., 0],
        regions[..., 1],
        np.array([outputs[0].strides] * len(outputs)),
        np.array([output.ctypes.data for output in outputs]),
    )
    return [reader.submit_regions([reader.layout_of(array)], columns, np.dtype("u2"), list(outputs))]


def held_now():
    """Numbers of batches and jobs that are not released."""
    return len(reader_module._HELD), len(reader_module._DELETED), len(reader_module._DROPPED)


def watched(count):
    """Outputs for a submission, and a function that returns how many of them exist."""
    outputs = [np.zeros((4, 4), np.uint16) for _ in range(count)]
    watching = [weakref.ref(output) for output in outputs]
    return outputs, lambda: sum(output() is not None for output in watching)


@pytest.mark.parametrize(
    ("way", "step"), matrix([(submit_one, 1), (submit_many, 2), (submit_together, 2)], ["deletion", "submission"])
)
def test_outputs_outlive_an_interrupt_at_any_bytecode(held, way, step, monkeypatch):
    """The core writes to an output until its job is over: freed memory may be another array of the caller by then."""
    submit, count = way
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)  # pytest's keeps the deleted objects
    with Reader(device="cpu") as reader:
        for nth in range(2000):
            held.store.arrive.clear()
            outputs, alive = watched(count)
            tickets = submit(reader, held, outputs) if step == "deletion" else []
            if step == "deletion":
                was_interrupted = interrupted(tickets.clear, nth)
            else:
                was_interrupted = interrupted(lambda: submit(reader, held, outputs), nth)  # noqa: B023
            outputs.clear()
            gc.collect()
            assert alive() == count or (step == "submission" and not alive())
            held.store.arrive.set()
            deadline = time.monotonic() + 20
            while (left := [*held_now(), alive()]) != [0, 0, 0, 0] and time.monotonic() < deadline:
                reader.stats()
                gc.collect()  # tracebacks
            assert left == [0, 0, 0, 0]
            if not was_interrupted:
                break
        else:
            raise AssertionError("no end of bytecodes")
    assert nth > 20


def test_a_deleted_reader_lives_until_its_jobs_are_over(held):
    reader = Reader(device="cpu")
    outputs, alive = watched(2)
    submit_many(reader, held, outputs)
    outputs.clear()
    timer = threading.Timer(0.3, held.store.arrive.set)
    timer.start()
    core = weakref.ref(reader._core._core)
    del reader
    gc.collect()
    timer.join()
    assert alive() == 0
    assert core() is None


def test_threads_that_release_dropped_jobs_do_not_take_the_same_one_twice(held):
    released = []
    with Reader(device="cpu") as reader:
        jobs = reader.stats().jobs
        for _ in range(100):
            submit_many(reader, held, watched(2)[0])
        assert len(reader_module._DELETED) == 100
        held.store.arrive.set()

        def work():
            while reader_module._DELETED:
                reader_module._release_deleted()
            released.append(True)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert released == [True] * 8
        assert reader.stats().jobs == jobs + 200
    assert held_now() == (0, 0, 0)


@pytest.mark.parametrize("attempt", first(range(3)))
def test_the_interpreter_exits_with_jobs_in_flight(store, attempt):
    code = """
        import sys
        from linumpy.gpu import Reader
        reader = Reader(device="cpu")
        tickets = [reader.submit(sys.argv[1]) for _ in range(200)]
        print("in flight")
    """
    assert "in flight" in run(code, store)


def test_a_forked_child_reads_with_a_reader_of_its_own(store):
    code = """
        import os, sys, warnings
        import numpy as np, zarr
        from linumpy.gpu import Reader
        warnings.simplefilter("ignore")
        expected = zarr.open_array(sys.argv[1], mode="r")[:]
        reader = Reader(device="cpu")
        tickets = [reader.submit(sys.argv[1]) for _ in range(50)]
        child = os.fork()
        if not child:
            with Reader(device="cpu") as own:
                same = np.array_equal(own.submit(sys.argv[1]).result(), expected)
            os._exit(0 if same else 5)
        assert os.waitpid(child, 0)[1] == 0
        assert all(np.array_equal(ticket.result(), expected) for ticket in tickets)
    """
    run(code, store)


def test_an_interrupt_comes_while_a_result_is_waited_for(store, monkeypatch):
    # A job that is never over, as far as Python can tell.
    waiting, quick = native.library().waiting, native.library().quick
    with Reader(device="cpu") as reader:
        ticket = reader.submit(store)
        ticket.result()
        with monkeypatch.context() as patch:
            patch.setattr(quick, "lc_job_done", lambda pointer: 0)
            patch.setattr(waiting, "lc_wait_job", lambda pointer, seconds: time.sleep(seconds) or 0)
            sent = []
            timer = threading.Timer(0.2, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT)))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                ticket.result()
            assert time.monotonic() - sent[0] < 0.5
            timer.join()


def test_a_busy_thread_does_not_stop_reads(store):
    with Reader(device="cpu") as reader:
        reader.submit(store).result()
        over = threading.Event()

        def spin():
            while not over.is_set():
                sum(range(100))

        thread = threading.Thread(target=spin)
        thread.start()
        try:
            begin = time.monotonic()
            for _ in range(10):
                reader.submit(store).result()
            seconds = time.monotonic() - begin
        finally:
            over.set()
            thread.join()
    assert seconds < 1


def test_a_library_of_another_interface_is_refused(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("a library of another interface is compiled, and there is no compiler")
    source, path = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(f'extern "C" long lc_abi() {{ return {native.ABI + 1}; }}\n')
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(CoreUnavailableError) as error:
        native.Library(str(path))
    text = str(error.value)
    assert "\n" not in text
    assert f"{path} has interface {native.ABI + 1}" in text


def test_a_library_that_does_not_fit_is_told_of_and_not_used(tmp_path, monkeypatch):
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native.importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin=str(path)))
    with pytest.warns(RuntimeWarning, match=r"broken\.so.*zarr-python reads instead"):
        loaded, why = native._load.__wrapped__()
    assert loaded is None
    assert "broken.so" in why


def core_threads():
    """Number of threads of the core in this process."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
            names.append(Path(f"/proc/self/task/{task}/comm").read_text())
    return names.count("linumpy-core\n")


@pytest.mark.parametrize("shards", first([None, ((16, 16, 16),)]), ids=["files", "shards"])
def test_reads_in_flight_follow_the_latency_of_the_storage(tmp_path, shards):
    """Where each read takes 10 ms, more threads than cores wait, results are right, and later the threads end."""
    code = """
        import sys, time
        import numpy as np, zarr
        sys.path.insert(0, sys.argv[2])
        from tests.core.test_core_reader import core_threads
        from linumpy.core import native
        from linumpy.gpu import Reader
        with Reader(device="cpu") as reader:
            reader.submit(sys.argv[1], np.s_[:8]).result()
            delay = native.library().quick.lc_fail_next
            delay(6, 10**6, 10_000)
            most, ticket = 0, reader.submit(sys.argv[1])
            while not ticket.done():
                most = max(most, core_threads())
                time.sleep(1e-3)
            assert np.array_equal(ticket.result(), zarr.open_array(sys.argv[1], mode="r")[:])
            delay(6, 0, 0)
            for _ in range(200):
                time.sleep(0.1)
                reader.submit(sys.argv[1], np.s_[:1]).result()
                if core_threads() <= 32:
                    break
            print(most, core_threads())
    """
    voxels = np.random.default_rng(0).integers(0, 999, (64, 64, 64), "u2")
    zarr.create_array(tmp_path / "a.zarr", data=voxels, chunks=(8, 8, 8), shards=shards)
    most, left = map(int, run(code, tmp_path / "a.zarr", Path(__file__).parents[2]).split())
    assert most > 40
    assert left <= 32


@pytest.mark.parametrize("text", ["many", "0", "-3", "5000"])
def test_a_limit_of_reads_that_is_none(monkeypatch, text):
    monkeypatch.setenv(reader_module.READS_VARIABLE, text)
    with pytest.raises(ValueError, match=f"LINUMPY_READS='{text}': pass a number of reads from 1 to 4096"):
        Reader(device="cpu")


def test_a_switch_that_is_neither_0_nor_1(monkeypatch):
    monkeypatch.setenv(reader_module.HEDGING_VARIABLE, "maybe")
    with pytest.raises(ValueError, match="LINUMPY_HEDGING='maybe': pass 0 or 1"):
        Reader(device="cpu")
