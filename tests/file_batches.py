"""Batches of reads for the tests of the engine that carries them out, and the oracle: ``os.pread`` and ``os.stat``."""

import contextlib
import os

import numpy as np
from linumpy.io.reads import file_reads
from linumpy.io.reads.file_reads import FileReads

KINDS = ["POSIX", "threads that pread"]


class RefusesBatches:
    """A C library that queues nothing, as where it lacks resources for a moment."""

    @staticmethod
    def lio_listio(*arguments):
        return -1

    @staticmethod
    def aio_error(*arguments):
        return 0


def nothing_at_once(monkeypatch):
    """Let no batch be small enough for plain system calls of the caller."""
    monkeypatch.setattr(file_reads, "SMALL_READS", 0)


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


def fail(monkeypatch, name, code, begin, times=10**9):
    """Let calls of a function of ``os`` fail from the one numbered `begin` on."""
    real, calls = getattr(os, name), iter(range(10**9))

    def failing(*arguments):
        if begin <= next(calls) < begin + times:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, name, failing)


def open_files():
    """Descriptors of files; not those of event loops, which the garbage of other tests may close at any time."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if os.readlink(f"/proc/self/fd/{one}").startswith("/"):
                found.append(one)
    return sorted(found)


class Interrupt(BaseException):
    pass


def interrupt_at(step, names):
    """Trace, and raise before that step of the interpreter inside of functions of these names."""
    steps = iter(range(10**9))

    def trace(frame, event, _):
        if frame.f_code.co_name not in names:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and next(steps) == step:
            raise Interrupt
        return trace

    return trace
