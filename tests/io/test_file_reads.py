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

from linumpy.io import file_reads, posix_aio
from linumpy.io.file_reads import FileReads, Pending, ReadEngine
from linumpy.io.plain_reads import read_files

KINDS = ["POSIX", "threads that pread"]


def nothing_at_once(monkeypatch):
    """Let no batch be small enough for plain system calls of the caller."""
    monkeypatch.setattr(file_reads, "SMALL_READS", 0)


@pytest.fixture(params=KINDS)
def engine(request, monkeypatch):
    if request.param == "threads that pread":
        monkeypatch.setattr(posix_aio, "why_unavailable", lambda: "there is none")
    nothing_at_once(monkeypatch)
    with contextlib.closing(ReadEngine(3)) as engine:
        assert engine.name.startswith(request.param)
        yield engine


@pytest.fixture
def small_units(monkeypatch):
    """Let a few kilobytes become many tasks."""
    monkeypatch.setattr(file_reads, "TASK_NBYTES", 1500)


def write(folder, sizes, seed=0):
    rng = np.random.default_rng(seed)
    paths = []
    for number, size in enumerate(sizes):
        path = folder / f"ä {seed} {number}"
        path.write_bytes(rng.bytes(size))
        paths.append(str(path))
    return paths


def batch(paths, rows):
    """Reads of rows of (file, offset, bytes) into memory of 0xA5, a gap after each."""
    file, offset, nbytes = np.array(rows, np.int64).reshape(-1, 3).T
    begins = np.cumsum(nbytes + 8) - nbytes - 8
    memory = np.full(int((nbytes + 8).sum()), 0xA5, np.uint8)
    return FileReads(paths, file, offset, nbytes, memory.ctypes.data + begins, memory), begins


def version(path):
    found = os.stat(path)
    return [found.st_ino & (2**63 - 1), found.st_size, found.st_mtime_ns, found.st_mode]


def check(reads, begins, results):
    """Compare with os.pread and os.stat; nothing else is written."""
    expected = np.full(len(reads.memory), 0xA5, np.uint8)
    for row, file in enumerate(reads.file.tolist()):
        descriptor = os.open(reads.paths[file], os.O_RDONLY)
        piece = os.pread(descriptor, int(reads.nbytes[row]), int(reads.offset[row]))
        os.close(descriptor)
        expected[begins[row] : begins[row] + len(piece)] = np.frombuffer(piece, np.uint8)
        assert results.nbytes[row] == len(piece)
    assert (reads.memory == expected).all()
    assert (results.opened == 0).all()
    assert results.before.tolist() == results.after.tolist() == [version(path) for path in reads.paths]
    assert [column.dtype for column in vars(results).values()] == [np.int64] * 4


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
from linumpy.io import file_reads
file_reads.SMALL_READS = file_reads._FEW_FILES = int(sys.argv[2])
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
            assert "io_uring" in run(AS_NOBODY, folder, small)
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


def between_steps(monkeypatch, act):
    """Call `act` with the number of the window after its files were opened and before they are read."""
    entries, numbers = read_jobs.ReadJob._read_entries, iter(range(10**6))

    def changed(job, window, found):
        act(next(numbers))
        return entries(job, window, found)

    monkeypatch.setattr(read_jobs.ReadJob, "_read_entries", changed)


@pytest.mark.parametrize("how", ["replaced", "replaced for a moment", "written again", "truncated", "removed"])
def test_a_file_that_changes_between_its_reads_is_told(small_units, tmp_path, monkeypatch, how):
    nothing_at_once(monkeypatch)
    (path,) = write(tmp_path, [8000])
    other = tmp_path / "other"
    other.write_bytes(bytes(8000))

    def act(number):
        if how == "replaced for a moment":
            if number == 1:
                os.rename(path, other.with_name("aside"))
                os.link(other, path)
            elif number == 3:
                os.rename(other.with_name("aside"), path)
        elif number == 2:
            if how == "replaced":
                other.rename(path)
            elif how == "written again":
                with open(path, "r+b") as file:
                    file.write(b"other")
                os.utime(path, ns=(0, 10**18))  # the clock of a file system may tick only every 10 ms
            elif how == "truncated":
                os.truncate(path, 100)
            else:
                os.unlink(path)

    with contextlib.closing(ReadEngine(1, descriptors=1)) as engine:
        between_steps(monkeypatch, act)
        before = version(path)
        reads, _ = batch([path], [(0, 1000 * n, 1000) for n in range(8)])
        results = engine.start(reads).wait()
    if how == "removed":
        assert results.opened.tolist() == [-errno.ENOENT]
        assert set(results.nbytes.tolist()) == {-errno.ENOENT}
        return
    assert results.before.tolist() == [before]
    assert results.after.tolist() != [before]
    if how == "truncated":
        assert 0 in results.nbytes


def test_an_address_outside_of_the_process_is_an_error_of_its_read_alone(engine, tmp_path):
    paths = write(tmp_path, [1000] * 3)
    reads, _ = batch(paths, [(file, 0, 1000) for file in range(3)])
    reads.address[1] = -4096
    opened = open_files()
    results = engine.start(reads).wait()
    assert results.nbytes.tolist() == [1000, -errno.EFAULT, 1000]
    assert open_files() == opened


def open_files():
    return sorted(os.listdir("/proc/self/fd"))


# Limits.

LIMITED = """
import os, resource, sys
import numpy as np
from linumpy.io import file_reads, read_jobs
file_reads.SMALL_READS = 0
bound, limit, retries, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if not retries:
    read_jobs._PASSING.clear()
engine = file_reads.ReadEngine(4, descriptors=bound)
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
paths = [f"{folder}/{n}" for n in range(300)]
memory = np.zeros((300, 2, 50), np.uint8)
file = np.repeat(np.arange(300), 2)
address = memory.ctypes.data + np.arange(600) * 50
for _ in range(10):
    memory[:] = 0
    results = engine.start(file_reads.FileReads(paths, file, file * 0, file * 0 + 50, address)).wait()
    assert (results.nbytes == 50).all() and (results.opened == 0).all(), np.unique(results.nbytes)
    assert (memory == np.arange(300, dtype=np.uint8)[:, None, None]).all()
print(engine.name)
"""


@pytest.mark.parametrize(("bound", "limit", "retries"), [(1, 1, 0), (2, 2, 0), (7, 7, 0), (64, 64, 0), (1000, 9, 1)])
def test_no_more_files_are_open_than_may_be(tmp_path, bound, limit, retries):
    """Where the process may have one more, opening it would fail; with a lower limit opening is tried again."""
    for number in range(300):
        (tmp_path / str(number)).write_bytes(bytes([number % 256]) * 60)
    assert "io_uring" in run(LIMITED, bound, limit, retries, tmp_path)


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
def test_small_batches_of_slow_files_are_left_to_the_ring(tmp_path, monkeypatch, code, seconds, asked):
    paths, library = write(tmp_path, [2000]), Library(code, seconds)
    monkeypatch.setattr(file_reads, "_libc", library)
    with contextlib.closing(ReadEngine(2)) as engine:
        if not seconds:
            monkeypatch.setattr(file_reads, "_SLOW", 10)  # this machine may be slow, too
        for _ in range(9):
            read(engine, paths, [(0, 0, 1500)])
    assert library.flags == asked


def test_callers_take_no_more_files_than_they_may(tmp_path, monkeypatch):
    paths = write(tmp_path, [2000])
    at_once, most = [], []

    def slow(reads, read):
        at_once.append(None)
        most.append(len(at_once))
        time.sleep(0.01)
        at_once.pop()
        return read_files(reads, read)

    with contextlib.closing(ReadEngine(2, descriptors=16)) as engine:
        monkeypatch.setattr(file_reads, "read_files", slow)
        threads = [threading.Thread(target=read, args=(engine, paths, [(0, 0, 1500)])) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert max(most) == 2
        assert len(engine._tokens) == 2


# Threads, callbacks, ends.


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
    """The kernel ends what is under way when the thread ends that submitted it; that is then read again."""
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
        assert thread_count() <= threads + 2  # threads of the kernel come and go
        assert resident() < nbytes + 8e6


# Signals and forks.

INTERRUPTED = """
import os, random, signal, sys, time
import numpy as np
from linumpy.io import file_reads

class Interrupt(BaseException):
    pass

def interrupt(*_):
    signal.setitimer(signal.ITIMER_REAL, random.random() * 0.002 + 1e-5)
    if armed:
        raise Interrupt

armed = False
file_reads.SMALL_READS, seconds = int(sys.argv[1]), float(sys.argv[2])
paths = sys.argv[3:]
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
while time.monotonic() - begin < seconds:
    memory[:] = 0
    pending = []
    try:
        armed = True
        pending.extend(map(engine.start, (reads,)))  # kept in the same instant
        results = pending[0].wait()
        armed = False
        good += 1
        assert (results.nbytes == size).all()
        assert all((row == content).all() for row, content in zip(memory, contents))
    except Interrupt:
        armed = False
        came += 1
        if pending:
            pending[0].abandon()
        memory[:] = 77
        if came % 20 == 0:
            time.sleep(0.005)
        assert (memory == 77).all(), "read after the end"
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(os.listdir("/proc/self/fd")) == before
assert not (engine._tokens.count(None) - file_reads._CALLERS)
engine.close()
print(engine.name, came, good)
"""


@pytest.mark.parametrize("small", [0, 8])
def test_interrupts_at_any_time(tmp_path, small):
    paths = write(tmp_path, [100_000] * (6 if small else 20))
    *name, came, good = run(INTERRUPTED, small, 1.5, *paths).split()
    assert name[0] == "io_uring,"
    assert int(came) > 20
    assert int(good) > 20


FORKED = """
import os, sys, traceback
import numpy as np
from linumpy.io import file_reads
file_reads.SMALL_READS = file_reads._FEW_FILES = 0
paths = sys.argv[1:]
content = np.stack([np.fromfile(path, np.uint8) for path in paths])
def batch():
    memory = np.zeros_like(content)
    n, size = content.shape
    address = memory.ctypes.data + np.arange(n) * size
    return memory, file_reads.FileReads(paths, np.arange(n), np.zeros(n, int), np.full(n, size), address, memory)

def rings():
    links = []
    for one in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{one}"))
        except OSError:
            pass
    return sum("io_uring" in link for link in links)

def use(engine):
    memory, reads = batch()
    assert (engine.start(reads).wait().nbytes == content.shape[1]).all()
    assert (memory == content).all()
    assert (engine.stat(paths)[:, 1] == content.shape[1]).all()

engine = file_reads.ReadEngine(4)
for _ in range(5):
    use(engine)
    memory, reads = batch()
    under_way = engine.start(reads)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert rings() == 0
            if not under_way.done():  # else the memory was complete before the fork
                memory[:] = 0
            assert (under_way.wait().nbytes == content.shape[1]).all() and (under_way.done())
            assert (memory == content).all()
            use(engine)
            engine.close()
            own = file_reads.ReadEngine(4)
            assert own.why_not_uring == "" and rings() == 2
            use(own)
            own.close()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    under_way.wait()
    assert (memory == content).all()
    use(engine)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert rings() == 2
print("done")
"""


def test_forks(tmp_path):
    assert "done" in run(FORKED, *write(tmp_path, [150_000] * 30))


def test_the_interpreter_ends_while_batches_are_under_way(tmp_path):
    run(
        """
        import sys, numpy as np
        from linumpy.io import file_reads
        engine = file_reads.ReadEngine(2)
        memory = np.zeros(20_000_000, np.uint8)
        n = 20
        for _ in range(20):
            engine.start(file_reads.FileReads(sys.argv[1:], np.arange(n), np.zeros(n, int), np.full(n, 10**6),
                                              memory.ctypes.data + np.arange(n) * 10**6))
        """,
        *write(tmp_path, [10**6] * 20),
    )


class Interrupt(BaseException):
    pass


@pytest.fixture
def held(monkeypatch):
    """An event without which no batch ends."""
    take, event, limit = uring.Ring.take, threading.Event(), time.monotonic() + 20
    nothing = np.zeros((0, 4), np.int32)

    def held_back(ring):
        return take(ring) if event.is_set() or time.monotonic() > limit else (nothing, int(ring.head[0]))

    monkeypatch.setattr(uring.Ring, "take", held_back)
    return event


@pytest.mark.parametrize("end", [Pending.wait, Pending.abandon])
def test_an_interrupt_does_not_end_the_waiting(engine, tmp_path, held, end):
    def interrupt(*_):
        threading.Timer(0.05, held.set).start()
        raise Interrupt

    pending = engine.start(batch(write(tmp_path, [3000]), [(0, 0, 3000)])[0])
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
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
    while alive() is not None:
        read(engine, write(tmp_path, [10]), [(0, 0, 10)])
