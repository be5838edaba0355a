"""Batches of reads of files against plain ``os.pread`` and ``os.stat``."""

import contextlib
import errno
import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from file_batches import (
    KINDS,
    Interrupt,
    RefusesBatches,
    batch,
    check,
    fail,
    interrupt_at,
    nothing_at_once,
    open_files,
    version,
    write,
)
from linumpy.io.reads import file_reads, posix_aio
from linumpy.io.reads.file_reads import FileReads, Pending, ReadEngine
from linumpy.io.reads.plain_reads import read_files


@pytest.fixture
def engine(kind, monkeypatch):
    nothing_at_once(monkeypatch)
    with contextlib.closing(ReadEngine(3)) as engine:
        assert engine.name.startswith(kind)
        yield engine


@pytest.fixture
def small_units(monkeypatch):
    """Let a few kilobytes become many tasks."""
    monkeypatch.setattr(file_reads, "TASK_NBYTES", 1500)


def read(engine, paths, rows):
    reads, begins = batch(paths, rows)
    results = engine.start(reads).wait()
    check(reads, begins, results)
    return results


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(engine, small_units, tmp_path, seed):
    rng = np.random.default_rng(seed)
    for number in range(6):
        paths = write(tmp_path, rng.integers(0, 9000, rng.integers(1, 40)), 100 * seed + number)
        file = np.sort(np.append(np.arange(len(paths)), rng.integers(0, len(paths), rng.integers(0, 100))))
        nbytes = rng.integers(0, 5000, len(file)) * (rng.random(len(file)) < 0.8)
        read(engine, paths, np.stack([file, rng.integers(0, 10_000, len(file)), nbytes], 1))


def test_units_of_the_shipped_size(engine, tmp_path):
    paths = write(tmp_path, [5_000_000, 0, 300_000, 1, 2**20, 2**20 + 1])
    whole = [(file, 0, os.path.getsize(path) + 10) for file, path in enumerate(paths)]
    parts = [(2, offset, 100) for offset in range(0, 300_000, 500)]
    read(engine, paths, sorted(whole + parts))


def test_many_small_files(engine, tmp_path):
    paths = write(tmp_path, np.arange(1500))
    read(engine, paths, [(file, 0, file) for file in range(1500)])


@pytest.mark.slow
def test_reads_above_two_gibibytes(engine, tmp_path):
    nbytes = 2**31 + 5 * 2**20
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        for offset in (0, 2**31 - 3, nbytes - 5):
            file.seek(offset)
            file.write(b"12345")
    memory = np.empty(nbytes + 100, np.uint8)
    column = functools.partial(np.array, ndmin=1)
    reads = FileReads([str(path)], column(0), column(0), column(nbytes + 100), column(memory.ctypes.data), memory)
    assert engine.start(reads).wait().nbytes.tolist() == [nbytes]
    for offset in (0, 2**31 - 3, nbytes - 5):
        assert memory[offset : offset + 5].tobytes() == b"12345"
    assert np.count_nonzero(memory[:nbytes]) == 15


def test_no_reads(engine):
    results = engine.start(FileReads([], *np.zeros((4, 0), np.int64))).wait()
    assert [column.shape for column in vars(results).values()] == [(0,), (0,), (0, 4), (0, 4)]
    assert engine.stat([]).shape == (0, 4)


@pytest.mark.parametrize("small", [False, True])
def test_failures_are_those_of_plain_calls(engine, tmp_path, monkeypatch, small):
    if small:
        monkeypatch.setattr(file_reads, "SMALL_READS", 8)
    (good,) = write(tmp_path, [1000])
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(good)
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "open pipe")
    writer = os.open(tmp_path / "open pipe", os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"not for us")
    expected = {
        good: 0,
        str(tmp_path / "none"): -errno.ENOENT,
        str(tmp_path / "folder"): -errno.EISDIR,
        str(tmp_path / "loop"): -errno.ELOOP,
        str(tmp_path / "link"): 0,
        good + "/below": -errno.ENOTDIR,
        str(tmp_path / "pipe"): -errno.EINVAL,
        str(tmp_path / "open pipe"): -errno.EINVAL,
        "/dev/zero": -errno.EINVAL,
        "/proc/self/mem": -errno.EIO,  # address 0 is mapped nowhere
        str(tmp_path / ("n" * 300)): -errno.ENAMETOOLONG,
    }
    unopened = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)
    paths = list(expected)
    for some in ([path] for path in paths) if small else [paths]:
        reads, _ = batch(some, [(file, 0, 500) for file in range(len(some)) for _ in range(2)])
        codes = [expected[path] for path in some]
        versions = [[0] * 4 if -code in unopened else version(path) for path, code in zip(some, codes, strict=True)]
        for results in (engine.start(reads).wait(), read_files(reads)):
            assert results.nbytes.reshape(-1, 2).tolist() == [[code or 500] * 2 for code in codes]
            assert results.opened.tolist() == [code if -code in unopened else 0 for code in codes]
            assert results.before.tolist() == results.after.tolist() == versions
    os.close(writer)


AS_NOBODY = """
import errno, os, sys
import numpy as np
from linumpy.io.reads import file_reads
file_reads.SMALL_READS = int(sys.argv[2])
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
engine = file_reads.ReadEngine(2)
memory = np.zeros(10, np.uint8)
columns = np.array([[0], [0], [10], [memory.ctypes.data]])
results = engine.start(file_reads.FileReads([sys.argv[1]], *columns)).wait()
assert results.opened.tolist() == results.nbytes.tolist() == [-errno.EACCES], vars(results)
assert engine.stat([sys.argv[1] + "/x"] * 20)[:, 0].tolist() == [-errno.EACCES] * 20
print(engine.name)
"""


def run(script, *arguments, timeout=60):
    """Run a script in a process of its own, which a wrong one would crash or hang; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


def test_what_may_not_be_read():
    folder = f"/tmp/linumpy-{os.getpid()}"
    os.mkdir(folder)
    os.chmod(folder, 0)
    try:
        for small in (0, 8):
            assert run(AS_NOBODY, folder, small).startswith("POSIX")
    finally:
        os.rmdir(folder)


def test_contradictions_are_refused(engine, tmp_path):
    paths = write(tmp_path, [10, 10])
    good = {"file": [0, 1], "offset": [0, 0], "nbytes": [1, 1], "address": [4096, 4096]}
    for name, column, words in [
        ("file", [0, 0], "rise from 0 to 1"),
        ("file", [1, 1], "rise from 0 to 1"),
        ("file", [1, 0], "rise from 0 to 1"),
        ("file", [0, 2], "rise from 0 to 1"),
        ("offset", [0, -1], "negative"),
        ("nbytes", [-1, 1], "negative"),
        ("address", [4096], "same length"),
    ]:
        columns = {key: np.array(value) for key, value in {**good, name: column}.items()}
        with pytest.raises(ValueError, match=words):
            engine.start(FileReads(paths, **columns))
    with pytest.raises(ValueError, match="null"):
        engine.start(FileReads(["a\0b", paths[0]], **{key: np.array(value) for key, value in good.items()}))
    with pytest.raises(ValueError, match="positive"):
        ReadEngine(descriptors=0)


@pytest.mark.parametrize("count", [3, 3000])
def test_stat(engine, tmp_path, count):
    paths = write(tmp_path, np.arange(min(count, 40)))
    paths = [paths[n % len(paths)] for n in range(count)]
    paths[1::7] = [str(tmp_path)] * len(paths[1::7])
    paths[2::9] = [str(tmp_path / "none")] * len(paths[2::9])
    expected = [[-errno.ENOENT, 0, 0, 0] if path.endswith("none") else version(path) for path in paths]
    assert engine.stat(paths).tolist() == expected


# Files that change.


def act_on_tasks(monkeypatch, engine, when, act):
    """Call `act` after the files were opened, before, between or behind the tasks that read them."""
    read = engine._read

    def changed(*columns):
        half = {"before": 0, "between": len(columns[0]) // 2, "behind": len(columns[0])}[when]
        first = read(*(column[:half] for column in columns))
        act()
        return np.append(first, read(*(column[half:] for column in columns)))

    monkeypatch.setattr(engine, "_read", changed)


@pytest.mark.parametrize("when", ["before", "between", "behind"])
@pytest.mark.parametrize("how", ["written again", "truncated"])
def test_a_file_that_changes_between_its_reads_is_told(engine, small_units, tmp_path, monkeypatch, how, when):
    (path,) = write(tmp_path, [8000])

    def act():
        if how == "truncated":
            os.truncate(path, 100)
            return
        with open(path, "r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(0, 10**18))  # the clock of a file system may tick only every 10 ms

    act_on_tasks(monkeypatch, engine, when, act)
    before = version(path)
    results = engine.start(batch([path], [(0, 1000 * n, 1000) for n in range(8)])[0]).wait()
    assert results.before.tolist() == [before]
    assert results.after.tolist() == [version(path)] != [before]
    assert (0 in results.nbytes) == (how == "truncated" and when != "behind")


@pytest.mark.parametrize("when", ["before", "between", "behind"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_whose_name_is_taken_is_read_to_its_end(engine, small_units, tmp_path, monkeypatch, how, when):
    (path,) = write(tmp_path, [8000])
    before, content = version(path), np.fromfile(path, np.uint8)
    other = tmp_path / "other"
    other.write_bytes(bytes(8000))
    act_on_tasks(monkeypatch, engine, when, lambda: other.rename(path) if how == "replaced" else os.unlink(path))
    reads, begins = batch([path], [(0, 0, 8000)])
    results = engine.start(reads).wait()
    assert results.before.tolist() == results.after.tolist() == [before]
    assert (reads.memory[begins[0] : begins[0] + 8000] == content).all()


def test_an_address_outside_of_the_process_is_an_error_of_its_read_alone(engine, tmp_path):
    paths = write(tmp_path, [1000] * 3)
    reads, _ = batch(paths, [(file, 0, 1000) for file in range(3)])
    reads.address[1] = -4096
    opened = open_files()
    results = engine.start(reads).wait()
    assert results.nbytes.tolist() == [1000, -errno.EFAULT, 1000]
    assert open_files() == opened


# Limits.

LIMITED = """
import os, resource, sys
import numpy as np
from linumpy.io.reads import file_reads
file_reads.SMALL_READS = 0
bound, limit, again, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if not again:
    file_reads._PASSING.clear()
engine = file_reads.ReadEngine(4, descriptors=bound)
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
paths = [f"{folder}/{n}" for n in range(300)]
memory = np.zeros((300, 2, 50), np.uint8)
file = np.repeat(np.arange(300), 2)
address = memory.ctypes.data + np.arange(600) * 50
for _ in range(5):
    memory[:] = 0
    results = engine.start(file_reads.FileReads(paths, file, file * 0, file * 0 + 50, address)).wait()
    assert (results.nbytes == 50).all() and (results.opened == 0).all(), np.unique(results.nbytes)
    assert (results.before == results.after).all() and (results.before[:, 1] == 60).all()
    assert (memory == np.arange(300).astype(np.uint8)[:, None, None]).all()
print(engine.name)
"""


@pytest.mark.parametrize(("bound", "limit", "again"), [(1, 1, 0), (7, 7, 0), (64, 64, 0), (1000, 9, 1)])
def test_no_more_files_are_open_than_may_be(tmp_path, bound, limit, again):
    """Where the process may have one more, opening it would fail; with a lower limit opening is tried again."""
    for number in range(300):
        (tmp_path / str(number)).write_bytes(bytes([number % 256]) * 60)
    assert run(LIMITED, bound, limit, again, tmp_path).startswith("POSIX")


@pytest.mark.parametrize(("bound", "files", "each"), [(7, 7, 1), (13, 7, 1), (14, 7, 2), (500, 7, 3), (500, 1, 3)])
def test_duplicates_count_as_open_files(small_units, kind, tmp_path, monkeypatch, bound, files, each):
    """Two batches under way have twice as many."""
    nothing_at_once(monkeypatch)
    paths, event = write(tmp_path, [8000] * files), threading.Event()
    with contextlib.closing(ReadEngine(3, descriptors=bound)) as engine:
        hold_back(monkeypatch, engine, event)
        opened = len(open_files())
        pending = []
        for number in (1, 2):
            reads, begins = batch(paths, [(file, 0, 8000) for file in range(files)])
            pending.append((reads, begins, engine.start(reads)))
            assert len(open_files()) - opened == number * files * each <= number * bound
        event.set()
        for reads, begins, one in pending:
            check(reads, begins, one.wait())
        assert len(open_files()) == opened


@pytest.mark.parametrize("begin", [0, 1, 4])
def test_fewer_duplicates_than_wanted(engine, small_units, tmp_path, monkeypatch, begin):
    paths = write(tmp_path, [8000] * 4)
    opened = open_files()
    fail(monkeypatch, "dup", errno.EMFILE, begin)
    read(engine, paths, [(file, 0, 8000) for file in range(4)])
    assert open_files() == opened


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM])
def test_opening_is_tried_again(engine, tmp_path, monkeypatch, code):
    paths = write(tmp_path, [800] * 6)
    reads, begins = batch(paths, [(file, 100 * part, 100) for file in range(6) for part in range(4)])
    with monkeypatch.context() as patch:
        fail(patch, "open", code, 2, 3)
        results = engine.start(reads).wait()
    check(reads, begins, results)
    with monkeypatch.context() as patch:
        fail(patch, "open", code, 4)
        results = engine.start(reads).wait()
    assert results.opened.tolist() == [0] * 4 + [-code] * 2
    assert results.nbytes.tolist() == [100] * 16 + [-code] * 8


def test_a_batch_that_the_c_library_refuses_is_read(tmp_path, monkeypatch):
    nothing_at_once(monkeypatch)
    with contextlib.closing(ReadEngine()) as engine:
        monkeypatch.setattr(posix_aio, "_library", RefusesBatches)
        read(engine, write(tmp_path, [800] * 6), [(file, 10, 700) for file in range(6)])


def test_small_batches_are_read_by_the_caller(tmp_path, monkeypatch):
    paths = write(tmp_path, [2000, 70_000, 500_000])
    with contextlib.closing(ReadEngine(2)) as engine:
        monkeypatch.setattr(engine, "_begin", None)
        read(engine, paths, [(0, 0, 3000), (1, 60_000, 20_000), (1, 5, 7), (2, 1, 300_000), (2, 600_000, 5)])


class Library:
    """A C library whose file system says `code` where it is asked not to wait, and takes `seconds`."""

    def __init__(self, code, seconds):
        self.code, self.seconds, self.flags, self._libc = code, seconds, [], file_reads._libc

    def preadv2(self, *arguments):
        self.flags.append(arguments[-1])
        time.sleep(self.seconds)
        if arguments[-1]:
            file_reads.ctypes.set_errno(self.code)
            return -1
        return self._libc.preadv2(*arguments)


@pytest.mark.parametrize(
    ("code", "seconds", "asked"),
    [
        (errno.EAGAIN, 0, [os.RWF_NOWAIT]),  # not in the page cache
        (errno.EOPNOTSUPP, 0.002, [os.RWF_NOWAIT, 0]),  # the file system cannot tell, and is slow
        (errno.EOPNOTSUPP, 0, [os.RWF_NOWAIT, 0] * 9),
    ],
)
def test_small_batches_of_slow_files_are_left_to_the_threads(tmp_path, monkeypatch, code, seconds, asked):
    paths, library = write(tmp_path, [2000]), Library(code, seconds)
    monkeypatch.setattr(file_reads, "_libc", library)
    with contextlib.closing(ReadEngine(2)) as engine:
        if not seconds:
            monkeypatch.setattr(file_reads, "SLOW", 10)  # this machine may be slow, too
        for _ in range(9):
            read(engine, paths, [(0, 0, 1500)])
    assert library.flags == asked


# Threads and ends.


def test_threads_start_batches_at_the_same_time(engine, small_units, tmp_path):
    paths = write(tmp_path, np.arange(0, 6000, 100))
    failures = []

    def reader(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(15):
                some = sorted(rng.choice(paths, rng.integers(1, 30), replace=False).tolist())
                pending = []
                for _ in range(3):
                    reads, begins = batch(some, [(n, rng.integers(0, 3000), 2500) for n in range(len(some))])
                    pending.append((reads, begins, engine.start(reads)))
                for reads, begins, one in reversed(pending):
                    check(reads, begins, one.wait())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert failures == []


def test_who_does_not_wait_sees_the_end(engine, tmp_path):
    paths = write(tmp_path, [2000] * 20)
    reads, begins = batch(paths, [(file, 0, 2000) for file in range(20)])
    pending = [engine.start(reads) for _ in range(2)]
    while not all(one.done() for one in pending):
        time.sleep(0.001)
    for one in pending:
        check(reads, begins, one.wait())
        one.abandon()


def test_one_thread_waits_for_what_another_started(engine, tmp_path):
    paths = write(tmp_path, [300_000] * 40)
    opened = open_files()
    for _ in range(10):
        reads, begins = batch(paths, [(file, 0, 300_000) for file in range(40)])
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(engine.start, reads).result()
        check(reads, begins, pending.wait())
        assert open_files() == opened


def test_the_end(tmp_path, engine):
    paths = write(tmp_path, [2000] * 20)
    reads, begins = batch(paths, [(file, 0, 2000) for file in range(20)])
    pending = [engine.start(reads) for _ in range(5)]
    engine.close()
    assert all(one.done() for one in pending)
    check(reads, begins, pending[0].wait())
    engine.close()
    for call in (lambda: engine.start(reads), lambda: engine.stat(paths)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_an_engine_that_is_closed_while_a_batch_is_started(engine, tmp_path):
    reads, _ = batch(write(tmp_path, [2000] * 3), [(file, 0, 2000) for file in range(3)])
    opened = open_files()
    engine._thread.close()  # between the first step of start() and the last one
    with pytest.raises(RuntimeError, match="closed"):
        engine.start(reads)
    assert open_files() == opened


def test_what_reading_itself_raises_is_raised_to_who_waits(engine, tmp_path, monkeypatch):
    reads, begins = batch(write(tmp_path, [2000] * 3), [(file, 0, 2000) for file in range(3)])
    opened = open_files()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_read", lambda *columns: [][0])
        with pytest.raises(IndexError):
            engine.start(reads).wait()
    assert open_files() == opened
    check(reads, begins, engine.start(reads).wait())


def test_files_are_closed_that_nobody_waits_for(engine, tmp_path):
    reads, _ = batch(write(tmp_path, [2000] * 3), [(file, 0, 2000) for file in range(3)])
    opened = open_files()
    for _ in range(5):
        engine.start(reads)
    engine.close()
    assert open_files() == opened


def test_a_thread_ends_with_its_engine(tmp_path):
    engine = ReadEngine()
    thread = engine._thread._thread
    assert thread.is_alive()
    del engine
    thread.join(10)
    assert not thread.is_alive()


def thread_count():
    return len(os.listdir("/proc/self/task"))


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("small", "count"),
    [(0, 1500), (8, 15_000), pytest.param(0, 100_000, marks=pytest.mark.slow)],
)
def test_small_batches_leave_nothing_behind(tmp_path, monkeypatch, small, count):
    monkeypatch.setattr(file_reads, "SMALL_READS", small)
    paths = write(tmp_path, [900, 1100])
    reads, begins = batch(paths, [(0, 0, 1000), (1, 100, 500)])
    with contextlib.closing(ReadEngine(2)) as engine:
        for number in range(count + 500):
            if number == 500:
                held = open_files(), thread_count(), resident()
            results = engine.start(reads).wait()
        check(reads, begins, results)
        files, threads, nbytes = held
        assert open_files() == files
        assert thread_count() <= threads + 64  # threads of the C library come and go, as many as it may have
        assert resident() < nbytes + 8e6


# Signals and forks.

INTERRUPTED = """
import os, random, signal, sys, time
import numpy as np
from linumpy.io.reads import file_reads, posix_aio

class Interrupt(BaseException):
    pass

def interrupt(*_):
    # Once a round: a second one could come before start() has begun to end what it started.
    global armed
    signal.setitimer(signal.ITIMER_REAL, random.random() * between + 1e-5)
    if armed:
        armed = False
        raise Interrupt

armed = False
file_reads.SMALL_READS, seconds, least = int(sys.argv[1]), float(sys.argv[2]), list(map(int, sys.argv[3].split()))
between = 0.002  # becomes about twice the time of a batch, whatever machine this is
if not sys.argv[4].startswith("POSIX"):
    posix_aio.why_unavailable = lambda: "there is none"
paths = sys.argv[5:]
contents = [np.frombuffer(open(path, "rb").read(), np.uint8) for path in paths]
count = len(paths)
size = len(contents[0])
memory = np.zeros((count, size), np.uint8)
reads = file_reads.FileReads(
    paths, np.arange(count), np.zeros(count, int), np.full(count, size),
    memory.ctypes.data + np.arange(count) * size, memory,
)
engine = file_reads.ReadEngine(2)
engine.start(reads).wait()
time.sleep(0.05)
before = len(os.listdir("/proc/self/fd"))
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.001)
begin, came, good = time.monotonic(), 0, 0
while time.monotonic() - begin < seconds or came <= least[0] or good <= least[1]:
    memory[:] = 0
    pending = []
    try:
        armed = True
        pending.extend(map(engine.start, (reads,)))  # kept in the same instant
        results = pending[0].wait()
        armed = False
        good, between = good + 1, max(1e-4, between * 0.9)
        assert (results.nbytes == size).all()
        assert all((row == content).all() for row, content in zip(memory, contents))
    except Interrupt:
        came, between = came + 1, between * 1.1
        if pending:
            pending[0].abandon()
        memory[:] = 77
        if came % 20 == 0:
            time.sleep(0.005)
        assert (memory == 77).all(), "read after the end"
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(os.listdir("/proc/self/fd")) == before
engine.close()
print(engine.name, came, good)
"""


def interrupted(folder, kind, small, seconds, least):
    """Interrupt batches for a time, and on a slow machine until as many were interrupted, and ended, as asked for."""
    paths = write(folder, [100_000] * (6 if small else 20))
    *name, came, good = run(INTERRUPTED, small, seconds, least, kind, *paths, timeout=200 + seconds).split()
    assert " ".join(name).startswith(kind)
    return int(came), int(good)


@pytest.mark.parametrize(("kind", "small"), [(KINDS[0], 0), (KINDS[0], 8), (KINDS[1], 0)])
def test_interrupts_at_any_time(tmp_path, kind, small):
    came, good = interrupted(tmp_path, kind, small, 1, "20 5")
    assert came > 20
    assert good > 5


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "small"), [(KINDS[0], 0), (KINDS[0], 8), (KINDS[1], 0)])
def test_interrupts_at_any_time_for_a_while(tmp_path, kind, small):
    came, good = interrupted(tmp_path, kind, small, 60, "1000 100")
    assert came > 1000
    assert good > 100


FORKED = """
import os, sys, traceback
import numpy as np
from linumpy.io.reads import file_reads, posix_aio
file_reads.SMALL_READS = 0
if sys.argv[1] != "POSIX":
    posix_aio.why_unavailable = lambda: "there is none"
paths = sys.argv[2:]
content = np.stack([np.fromfile(path, np.uint8) for path in paths])
def batch():
    memory = np.zeros_like(content)
    n, size = content.shape
    address = memory.ctypes.data + np.arange(n) * size
    return memory, file_reads.FileReads(paths, np.arange(n), np.zeros(n, int), np.full(n, size), address, memory)

def use(engine):
    memory, reads = batch()
    assert (engine.start(reads).wait().nbytes == content.shape[1]).all()
    assert (memory == content).all()
    assert (engine.stat(paths)[:, 1] == content.shape[1]).all()

engine = file_reads.ReadEngine(4)
for number in range(4):
    use(engine)
    opened = len(os.listdir("/proc/self/fd"))
    memory, reads = batch()
    under_way = engine.start(reads)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            memory[:] = 0
            assert under_way.done()
            if number == 3:
                under_way.abandon()
                memory[:] = content
            else:
                assert (under_way.wait().nbytes == content.shape[1]).all() and under_way.done()
            assert (memory == content).all()
            assert len(os.listdir("/proc/self/fd")) == opened
            use(engine)
            engine.close()
            own = file_reads.ReadEngine(4)
            use(own)
            if number == 2:
                own.start(reads)
                sys.exit()  # the parent's thread, which is not here, is not waited for
            own.close()
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            if number != 2:
                os._exit(status)
    under_way.wait()
    assert (memory == content).all()
    use(engine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""


@pytest.mark.parametrize("kind", KINDS)
def test_forks(tmp_path, kind):
    assert run(FORKED, kind, *write(tmp_path, [150_000] * 30)) == "done\n"


@pytest.mark.parametrize("kind", KINDS)
def test_the_interpreter_ends_while_batches_are_under_way(tmp_path, kind):
    run(
        """
        import atexit, os, sys, numpy as np
        pending = []
        atexit.register(lambda: all(one.done() for one in pending) or os._exit(3))  # runs after those of linumpy
        from linumpy.io.reads import file_reads, posix_aio
        if sys.argv[1] != "POSIX":
            posix_aio.why_unavailable = lambda: "there is none"
        file_reads.SMALL_READS = 0
        engine = file_reads.ReadEngine(2)
        memory = np.zeros(20_000_000, np.uint8)
        n = 20
        for _ in range(20):
            reads = file_reads.FileReads(sys.argv[2:], np.arange(n), np.zeros(n, int), np.full(n, 10**6),
                                         memory.ctypes.data + np.arange(n) * 10**6)
            pending.append(engine.start(reads))
        """,
        kind,
        *write(tmp_path, [10**6] * 20),
    )


def hold_back(monkeypatch, engine, event):
    """Let no batch be read before an event."""
    read = engine._read

    def held_back(*columns):
        event.wait(20)
        return read(*columns)

    monkeypatch.setattr(engine, "_read", held_back)


@pytest.fixture
def held(engine, monkeypatch):
    """An event without which no batch ends."""
    event = threading.Event()
    hold_back(monkeypatch, engine, event)
    return event


@pytest.mark.parametrize("end", [Pending.wait, Pending.abandon])
def test_an_interrupt_does_not_end_the_waiting(engine, tmp_path, held, end):
    def interrupt(*_):
        threading.Timer(0.05, held.set).start()
        raise Interrupt

    class Running:
        """The lock on which the waiting thread blocks: a signal comes there, once."""

        def __init__(self, lock):
            self._lock, self._signals, self.release = lock, iter([signal.SIGALRM]), lock.release

        def acquire(self, **options):
            for number in self._signals:
                signal.raise_signal(number)
            return self._lock.acquire(**options)

    pending = engine.start(batch(write(tmp_path, [3000]), [(0, 0, 3000)])[0])
    pending._call._running = Running(pending._call._running)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupt) if end is Pending.wait else contextlib.nullcontext():
            end(pending)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert held.is_set()
    assert pending.done()


def test_memory_is_kept_while_it_is_written(engine, tmp_path, held):
    reads, _ = batch(write(tmp_path, [3000]), [(0, 0, 3000)])
    alive = weakref.ref(reads.memory)
    engine.start(reads)
    del reads
    assert alive() is not None
    held.set()
    limit = time.monotonic() + 10
    while alive() is not None and time.monotonic() < limit:
        time.sleep(0.001)
    assert alive() is None


def test_an_interrupt_at_any_step_leaves_nothing_behind(small_units, tmp_path, monkeypatch):
    """Neither a call that nobody waits for nor an open file."""
    nothing_at_once(monkeypatch)
    reads, begins = batch(write(tmp_path, [3000]), [(0, 0, 3000)])
    began, ended, traced = [], [], sys.gettrace()
    with contextlib.closing(ReadEngine(2)) as engine:
        read_tasks, opened = engine._read, open_files()

        def slowly(*columns):
            began.append(None)
            time.sleep(0.0005)
            counts = read_tasks(*columns)
            ended.append(None)
            return counts

        monkeypatch.setattr(engine, "_read", slowly)
        for step in range(2000):
            # Not CallThread.start(): no handler runs between the last call of a with block and the release of its lock.
            sys.settrace(interrupt_at(step, {"begin", "open", "_spread", "duplicates", "put"}))
            try:
                pending = engine.start(reads)
                break
            except Interrupt:
                sys.settrace(traced)
                assert len(began) == len(ended), step
                assert open_files() == opened, step
            finally:
                sys.settrace(traced)
        count = len(began)
        check(reads, begins, pending.wait())
        assert 100 < step < 1999
        assert len(ended) <= count + 1
