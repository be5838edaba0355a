"""Batches of reads against plain ``os.pread``."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from file_batches import RefusesBatches
from linumpy.io.reads import posix_aio


def test_it_works_here():
    assert posix_aio.why_unavailable() == ""


@pytest.fixture
def file(tmp_path):
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    yield descriptor, content
    os.close(descriptor)


@pytest.mark.parametrize("seed", range(20))
def test_random_pieces(file, seed):
    descriptor, _ = file
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 300))
    nbytes = rng.integers(1, 900, n)
    offsets = rng.integers(0, 99_000, n)
    places = np.cumsum(nbytes) - nbytes
    got = np.full(nbytes.sum(), 0xA5, np.uint8)
    more = [os.dup(descriptor) for _ in range(4)]
    counts = posix_aio.read_batch(np.resize([descriptor, *more], n), got.ctypes.data + places, nbytes, offsets)
    [os.close(one) for one in more]
    assert (counts == nbytes).all()
    expected = b"".join(os.pread(descriptor, int(k), int(o)) for k, o in zip(nbytes, offsets, strict=True))
    assert got.tobytes() == expected


def test_the_end_of_the_file_and_bad_descriptors_are_told(file):
    descriptor, content = file
    got = np.zeros(300, np.uint8)
    counts = posix_aio.read_batch(
        np.array([descriptor, 10**6, descriptor, descriptor]),
        got.ctypes.data + np.array([0, 100, 200, 200]),
        np.array([100, 100, 100, 100]),
        np.array([99_950, 0, 200_000, 5]),
    )
    assert counts.tolist() == [50, -errno.EBADF, 0, 100]
    assert (got[:50] == content[-50:]).all()


def test_a_short_read_is_tried_again(file, monkeypatch):
    """The C library may lack resources for a moment (EAGAIN) and queue nothing."""
    descriptor, content = file
    monkeypatch.setattr(posix_aio, "_library", RefusesBatches)
    got = np.zeros(100, np.uint8)
    counts = posix_aio.read_batch(np.array([descriptor]), np.array([got.ctypes.data]), np.array([100]), np.array([7]))
    assert counts.tolist() == [100]
    assert (got == content[7:107]).all()


def test_a_call_that_gives_other_bytes_is_not_used(monkeypatch):
    def wrong(descriptors, addresses, nbytes, offsets, *, retry):
        return nbytes  # as if all had been read

    monkeypatch.setattr(posix_aio, "read_batch", wrong)
    posix_aio.why_unavailable.cache_clear()
    try:
        assert "other bytes" in posix_aio.why_unavailable()
    finally:
        posix_aio.why_unavailable.cache_clear()


def test_another_c_library_is_not_tried(monkeypatch):
    monkeypatch.setattr(posix_aio.platform, "libc_ver", lambda: ("", ""))
    posix_aio.why_unavailable.cache_clear()
    try:
        assert "glibc" in posix_aio.why_unavailable()
    finally:
        posix_aio.why_unavailable.cache_clear()


def run(script, *arguments, timeout):
    """Run a script in a process of its own, which a wrong one would crash or hang; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    return done.stdout


#: Reads random pieces in a thread of its own while signals come, and compares them with what was written.
UNDER_SIGNALS = """
import os, signal, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
from linumpy.io.reads import posix_aio

kind, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
came = []
for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGUSR1):
    signal.signal(number, lambda *_: came.append(1))
content = np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint8)
file = tempfile.TemporaryFile()
file.write(content.tobytes())
file.flush()
rng, caller = np.random.default_rng(1), ThreadPoolExecutor(1)
reader, ended = caller.submit(threading.get_ident).result(), threading.Event()

def send():
    while not ended.wait(0.0005):
        signal.pthread_kill(reader, signal.SIGUSR1)

sender = threading.Thread(target=send)
timer = {"prof": signal.ITIMER_PROF, "alarm": signal.ITIMER_REAL}.get(kind)
if timer is None:
    sender.start()
else:
    signal.setitimer(timer, 0.001, 0.001)
begin, reads = time.monotonic(), 0
# A slow machine reads for longer, and a busy one, which has a clock of its time on a core, gets its signals later.
while (reads < count and time.monotonic() - begin < seconds) or reads <= 128 or len(came) <= 5:
    assert posix_aio.why_unavailable() == ""
    posix_aio.why_unavailable.cache_clear()  # so that the main thread is interrupted in it, too
    nbytes, offsets = rng.integers(1, 30_000, 64), rng.integers(0, 1_900_000, 64)
    places = np.cumsum(nbytes) - nbytes
    got = np.zeros(nbytes.sum(), np.uint8)
    arguments = np.full(64, file.fileno()), got.ctypes.data + places, nbytes, offsets
    for call in (lambda read, *these: caller.submit(read, *these).result(), lambda read, *these: read(*these)):
        got[:] = 0
        assert (call(posix_aio.read_batch, *arguments) == nbytes).all()
        rows = zip(places, offsets, nbytes)
        assert all((got[p : p + n] == content[o : o + n]).all() for p, o, n in rows)
    reads += 128
if timer is None:
    ended.set()
    sender.join()
else:
    signal.setitimer(timer, 0)
print(reads, len(came))
"""


@pytest.mark.parametrize("kind", ["prof", "alarm", "thread"])
def test_signals_during_reads(kind):
    reads, signals = map(int, run(UNDER_SIGNALS, kind, 10**9, 0.8, timeout=60).split())
    assert reads > 128
    assert signals > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["prof", "alarm", "thread"])
def test_signals_during_ten_thousand_reads(kind):
    reads, signals = map(int, run(UNDER_SIGNALS, kind, 10_000, 200, timeout=250).split())
    assert reads >= 10_000
    assert signals > 5


FORKED = """
import errno, os, sys
import numpy as np
from linumpy.io.reads import posix_aio

content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
with open(sys.argv[1], "wb") as file:
    file.write(content.tobytes())
descriptor = os.open(sys.argv[1], os.O_RDONLY)

def read():
    nbytes, offsets = np.array([300, 1, 40_000, 700, 500]), np.array([5, 17, 60_000, 0, 99_900])
    places, got = np.cumsum(nbytes) - nbytes, np.zeros(nbytes.sum(), np.uint8)
    descriptors = np.full(5, descriptor)
    counts = posix_aio.read_batch(descriptors, got.ctypes.data + places, nbytes, offsets)
    assert counts.tolist() == [300, 1, 40_000, 700, 100], counts
    assert all((got[p : p + n] == content[o : o + n]).all() for p, o, n in zip(places, offsets, counts))
    one = np.ones(1, int)
    assert posix_aio.read_batch(10**6 * one, got.ctypes.data * one, one, one).tolist() == [-errno.EBADF]
    assert posix_aio.why_unavailable() == ""

def in_a_child(work):
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

if sys.argv[2] == "after":
    read()
in_a_child(lambda: (read(), in_a_child(read), read()))
read()
in_a_child(read)
print("done")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_reads_that_was_forked_before_or_after_a_read(tmp_path, when):
    assert run(FORKED, tmp_path / "f", when, timeout=30) == "done\n"


def test_no_read_asks_for_a_signal(file, monkeypatch):
    """A request full of zeros would ask for signal 0 when it is complete: a system call for each read."""
    descriptor, _ = file
    real, seen = posix_aio._library(), []

    class Library:
        def __getattr__(self, name):
            return getattr(real, name)

        def lio_listio(self, mode, requests, count, event):
            addresses = (ctypes.c_uint64 * count).from_address(requests.value)
            seen.extend(ctypes.c_int.from_address(one + 44).value for one in addresses)
            return real.lio_listio(mode, requests, count, event)

    monkeypatch.setattr(posix_aio, "_library", Library)
    got = np.zeros(200, np.uint8)
    posix_aio.read_batch(
        np.full(2, descriptor), got.ctypes.data + np.array([0, 100]), np.full(2, 100), np.zeros(2, int)
    )
    assert seen == [1, 1]


LAYOUT = """
#include <aio.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
int main(void) {
    printf("%zu %zu %zu %zu %zu %zu %zu %d %d %d\\n", sizeof(struct aiocb), offsetof(struct aiocb, aio_fildes),
           offsetof(struct aiocb, aio_lio_opcode), offsetof(struct aiocb, aio_buf), offsetof(struct aiocb, aio_nbytes),
           offsetof(struct aiocb, aio_sigevent.sigev_notify), offsetof(struct aiocb, aio_offset), SIGEV_NONE,
           LIO_NOWAIT, LIO_READ);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_requests_are_laid_out_as_the_c_library_has_them(tmp_path):
    (tmp_path / "layout.c").write_text(LAYOUT)
    subprocess.run(["cc", "layout.c", "-o", "layout"], cwd=tmp_path, check=True)
    told = list(map(int, subprocess.run([tmp_path / "layout"], capture_output=True, check=True).stdout.split()))
    names = ("descriptor", "opcode", "address", "nbytes", "notify", "offset")
    ours = [posix_aio._CONTROL.itemsize, *(posix_aio._CONTROL.fields[name][1] for name in names)]
    assert told == [*ours, posix_aio._SIGEV_NONE, posix_aio._LIO_NOWAIT, posix_aio._LIO_READ]
