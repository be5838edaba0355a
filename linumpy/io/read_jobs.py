"""Batches of reads as work for threads, and their results put together.

The unit is a chain: open a file, note its version, read some parts of it, note its version again, close it. Long reads
and files with many reads become several chains, each with a descriptor of its own, so that threads share no state; at
the end their versions are compared. A window is a number of chains that are carried out together.

In: :class:`~linumpy.io.plain_reads.FileReads`. Out: :class:`~linumpy.io.plain_reads.ReadResults`.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.io import posix_aio, uring
from linumpy.io.plain_reads import (
    INODE_BITS,
    OPEN_FLAGS,
    FileReads,
    ReadResults,
    is_regular,
    read_file,
    refusals,
    stat_file,
    version,
)

#: Longer reads are cut, so that several threads copy them.
PIECE_NBYTES = 2**20
#: A chain ends with the read that reaches this.
CHAIN_NBYTES = 2**19
#: What a window holds at most, and at least where there are threads for more windows.
WINDOW_NBYTES, SMALL_WINDOW_NBYTES = 32 * 2**20, 2 * 2**20
#: A read and a chain count as that much more than their bytes, which bounds their number in a chain and in a window.
_READ_COST, _CHAIN_COST = 2**15, 2**18
#: Paths of a window of :class:`StatBatch`.
_STATS = 512
#: Failures that say nothing about the file: such reads are tried again by plain system calls.
_PASSING = [
    errno.EAGAIN, errno.EINTR, errno.ECANCELED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EOPNOTSUPP
]  # fmt: skip
Settle = Callable[[Any, BaseException | None], None]


def _read_batch(*columns: np.ndarray) -> np.ndarray:
    return posix_aio.read_by_threads(*columns) if posix_aio.why_unavailable() else posix_aio.read_batch(*columns)


def _versions(found: np.ndarray) -> np.ndarray:
    rows = np.empty((*found.shape, 4), np.int64)
    rows[..., 0] = found["inode"] & np.uint64(INODE_BITS)
    rows[..., 1] = found["size"]
    rows[..., 2] = found["seconds"] * 10**9 + found["nanoseconds"]
    rows[..., 3] = found["mode"]
    return rows


class Job:
    """What a batch is to the threads that carry it out: windows, and a result when all are complete."""

    def __init__(self, paths: list[str], settle: Settle) -> None:
        self.paths, self._settle = paths, settle
        self._blob = np.frombuffer(os.fsencode("\0".join(paths)) + b"\0", np.uint8)
        ends = np.flatnonzero(self._blob == 0)
        if len(ends) != len(paths):
            raise ValueError("a path contains a null character")
        self._path_address = (self._blob.ctypes.data + np.concatenate([[0], ends[:-1] + 1])).astype(np.uint64)
        self._lock, self._left = threading.Lock(), 0
        self._error: BaseException | None = None

    def _cut(self, first: np.ndarray, total: int, *, opens: bool) -> list[Window]:
        bounds = [*first.tolist(), total]
        self._left = len(first)
        return [Window(self, a, b, b - a if opens else 0) for a, b in itertools.pairwise(bounds)]

    def complete_window(self, error: BaseException | None) -> None:
        """Note that a window has ended; the last one puts the results together."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
        results = None
        try:
            results = None if self._error else self.results()
        except BaseException as failure:
            self._error = failure
        self._settle(results, self._error)

    def windows(self, threads: int, descriptors: int) -> list[Window]:
        """Cut into windows for that many threads, each with at most that many open files."""
        raise NotImplementedError

    def steps(self, begin: int, end: int) -> uring.Steps:
        """Carry out a window on a ring."""
        raise NotImplementedError

    def run(self, begin: int, end: int) -> None:
        """Carry out a window by plain system calls."""
        raise NotImplementedError

    def results(self) -> Any:
        """Return what the caller gets."""
        raise NotImplementedError


@dataclass(frozen=True)
class Window:
    """A part of a job that one thread carries out: see :class:`linumpy.io.uring.Work`."""

    job: Job
    begin: int
    end: int
    descriptors: int

    def steps(self) -> uring.Steps:
        """Carry it out on a ring."""
        return self.job.steps(self.begin, self.end)

    def run(self) -> None:
        """Carry it out by plain system calls."""
        try:
            self.job.run(self.begin, self.end)
        except BaseException as error:
            self.complete(error)
        else:
            self.complete(None)

    def complete(self, error: BaseException | None) -> None:
        """Note that it has ended."""
        self.job.complete_window(error)


class ReadJob(Job):
    """A batch of reads as chains."""

    def __init__(self, reads: FileReads, settle: Settle) -> None:
        super().__init__(reads.paths, settle)
        self._reads = reads
        self._cut_reads()
        self._cut_chains()
        chains = len(self._chain_file)
        self._opened = np.zeros(chains, np.int64)
        self._got = np.zeros(len(self._nbytes), np.int64)
        self._versions = np.zeros((chains, 2, 4), np.int64)

    def _cut_reads(self) -> None:
        reads = self._reads
        self._file, self._offset, self._nbytes = reads.file, reads.offset, reads.nbytes
        self._address = reads.address.astype(np.uint64)
        if self._nbytes.max() <= PIECE_NBYTES:
            return
        count = np.maximum(-(-reads.nbytes // PIECE_NBYTES), 1)
        self._first_piece = np.cumsum(count) - count
        row = np.repeat(np.arange(len(count)), count)
        within = (np.arange(len(row)) - self._first_piece[row]) * PIECE_NBYTES
        self._file, self._offset = self._file[row], self._offset[row] + within
        self._nbytes = np.minimum(self._nbytes[row] - within, PIECE_NBYTES)
        self._address = self._address[row] + within.astype(np.uint64)

    def _cut_chains(self) -> None:
        cost = self._nbytes + _READ_COST
        before = np.cumsum(cost) - cost
        first_of_file = np.searchsorted(self._file, np.arange(len(self.paths)))
        group = (before - before[first_of_file][self._file]) // CHAIN_NBYTES
        begins = (np.diff(self._file, prepend=-1) != 0) | (np.diff(group, prepend=-1) != 0)
        self._bounds = np.append(np.flatnonzero(begins), len(cost))  # pieces of each chain
        self._chain_file = self._file[self._bounds[:-1]]
        self._chain_cost = np.add.reduceat(cost, self._bounds[:-1]) + _CHAIN_COST

    def windows(self, threads: int, descriptors: int) -> list[Window]:
        """Cut into windows for that many threads, each with at most that many open files."""
        end = np.cumsum(self._chain_cost)
        most = min(max(-(-int(end[-1]) // threads), SMALL_WINDOW_NBYTES), WINDOW_NBYTES)
        window = (end - self._chain_cost) // most
        first = np.flatnonzero(np.diff(window, prepend=-1))
        within = np.arange(len(end)) - np.repeat(first, np.diff(first, append=len(end)))
        first = np.flatnonzero(within % descriptors == 0)
        return self._cut(first, len(end), opens=True)

    def steps(self, begin: int, end: int) -> uring.Steps:
        """Open all files of a window; then one linked chain for each."""
        opens = np.zeros(end - begin, uring.ENTRY)
        opens["opcode"], opens["fd"], opens["flags32"] = uring.OPENAT, uring.AT_FDCWD, OPEN_FLAGS
        opens["address"] = self._path_address[self._chain_file[begin:end]]
        found = yield opens
        self._opened[begin:end] = np.minimum(found, 0)
        opened = np.flatnonzero(found >= 0)
        if not len(opened):
            return
        chains, descriptor = begin + opened, found[opened]
        versions = np.zeros((len(chains), 2), uring.STATX_BUFFER)
        entries, first, closes, reads, pieces = self._chain_entries(chains, descriptor, versions)
        results = yield entries
        self._got[pieces] = results[reads]
        self._versions[chains] = _versions(versions)
        self._opened[chains] = np.minimum(np.minimum(results[first], results[closes - 1]), 0)
        for row in np.flatnonzero(results[closes] == -errno.ECANCELED).tolist():
            os.close(int(descriptor[row]))

    def _chain_entries(
        self, chains: np.ndarray, descriptor: np.ndarray, versions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        count = self._bounds[chains + 1] - self._bounds[chains] + 3
        end = np.cumsum(count)
        first, closes = end - count, end - 1
        is_read = np.ones(int(end[-1]), bool)
        is_read[first] = is_read[closes] = is_read[closes - 1] = False
        chain = np.repeat(np.arange(len(chains)), count)
        reads = np.flatnonzero(is_read)
        pieces = reads - first[chain[reads]] - 1 + self._bounds[chains][chain[reads]]
        entries = np.zeros(len(chain), uring.ENTRY)
        entries["fd"] = descriptor[chain]
        entries["opcode"], entries["flags"] = uring.READ, uring.HARDLINK
        entries["address"][reads], entries["offset"][reads] = self._address[pieces], self._offset[pieces]
        entries["length"][reads] = self._nbytes[pieces]
        no_path = self._blob.ctypes.data + len(self._blob) - 1  # the file of the descriptor itself
        for side, rows in enumerate((first, closes - 1)):
            entries["opcode"][rows], entries["flags32"][rows] = uring.STATX, uring.AT_EMPTY_PATH
            entries["address"][rows], entries["length"][rows] = no_path, uring.STATX_MASK
            entries["offset"][rows] = versions[:, side].ctypes.data + np.arange(len(chains)) * versions.strides[0]
        entries["opcode"][closes], entries["flags"][closes] = uring.CLOSE, 0
        return entries, first, closes, reads, pieces

    def run(self, begin: int, end: int) -> None:
        """Open and close the files of a window here, one after another, and read them in one call."""
        descriptors: list[int] = []
        try:
            for chain in range(begin, end):
                descriptors.append(self._open(chain))
            self._read(begin, end, np.array(descriptors))
            for chain, descriptor in zip(range(begin, end), descriptors, strict=True):
                if descriptor >= 0:
                    self._versions[chain, 1] = version(os.fstat(descriptor))
        finally:
            for descriptor in descriptors:
                if descriptor >= 0:
                    os.close(descriptor)

    def _open(self, chain: int) -> int:
        try:
            descriptor = os.open(self.paths[self._chain_file[chain]], OPEN_FLAGS)
        except OSError as error:
            self._opened[chain] = -(error.errno or errno.EIO)
            return -1
        self._versions[chain, 0] = version(os.fstat(descriptor))
        return descriptor

    def _read(self, begin: int, end: int, descriptors: np.ndarray) -> None:
        readable = (descriptors >= 0) & is_regular(self._versions[begin:end, 0, 3])
        chain = np.repeat(np.arange(end - begin), np.diff(self._bounds[begin : end + 1]))
        rows = np.flatnonzero(readable[chain])
        pieces = self._bounds[begin] + rows
        self._got[pieces] = _read_batch(
            descriptors[chain[rows]], self._address[pieces], self._nbytes[pieces], self._offset[pieces]
        )

    def results(self) -> ReadResults:
        """Put the chains of each file and the pieces of each read together."""
        reads, nbytes = self._reads, self._got
        if len(nbytes) != len(reads.nbytes):
            worst, total = (f.reduceat(nbytes, self._first_piece) for f in (np.minimum, np.add))
            nbytes = np.where(worst < 0, worst, total)
        first, last = self._chains_of_files()
        before, after = self._versions[first, 0], self._versions[last, 1]
        differs = (self._versions != before[self._chain_file][:, None]).any(axis=2)
        for chain, side in np.argwhere(differs).tolist():
            after[self._chain_file[chain]] = self._versions[chain, side]
        opened = self._opened
        if len(opened) != len(first) or opened.any():
            opened = np.minimum.reduceat(opened, first)
            before[opened < 0] = after[opened < 0] = 0
        if not is_regular(before[:, 3]).all():
            for code in (refusals(before[:, 3]), opened):
                nbytes = np.where(code[reads.file] < 0, code[reads.file], nbytes)
        results = ReadResults(nbytes, opened, before, after)
        if (nbytes != reads.nbytes).any():
            self._try_again(results)
        return results

    def _chains_of_files(self) -> tuple[np.ndarray, np.ndarray]:
        if len(self._chain_file) == len(self.paths):
            return self._chain_file, self._chain_file
        bounds = np.searchsorted(self._chain_file, np.arange(len(self.paths) + 1))
        return bounds[:-1], bounds[1:] - 1

    def _try_again(self, results: ReadResults) -> None:
        """Read by plain system calls what failed for a passing reason, or ended before the end of its file."""
        reads, nbytes = self._reads, results.nbytes
        early = (nbytes >= 0) & (nbytes < reads.nbytes) & (reads.offset + nbytes < results.after[reads.file, 1])
        again = np.flatnonzero(early | np.isin(-nbytes, _PASSING))
        for file in np.unique(reads.file[again]).tolist():
            rows = again[reads.file[again] == file]
            columns = (column[rows].tolist() for column in (reads.offset, reads.nbytes, reads.address))
            opened, first, last, counts = read_file(reads.paths[file], list(zip(*columns, strict=True)))
            nbytes[rows] = counts
            if results.opened[file] < 0:
                results.opened[file], results.before[file], results.after[file] = opened, first, last
            elif opened == 0:
                for found in (first, last):
                    if tuple(results.before[file].tolist()) != found:
                        results.after[file] = found


class StatJob(Job):
    """A batch of files to look at."""

    def __init__(self, paths: list[str], settle: Settle) -> None:
        super().__init__(paths, settle)
        self._rows = np.zeros((len(paths), 4), np.int64)

    def windows(self, threads: int, descriptors: int) -> list[Window]:
        """Cut into windows, which open no files."""
        return self._cut(np.arange(0, len(self.paths), _STATS), len(self.paths), opens=False)

    def steps(self, begin: int, end: int) -> uring.Steps:
        """Look at all files of a window."""
        found = np.zeros(end - begin, uring.STATX_BUFFER)
        entries = np.zeros(end - begin, uring.ENTRY)
        entries["opcode"], entries["fd"], entries["length"] = uring.STATX, uring.AT_FDCWD, uring.STATX_MASK
        entries["address"] = self._path_address[begin:end]
        entries["offset"] = found.ctypes.data + np.arange(end - begin) * found.itemsize
        results = yield entries
        self._rows[begin:end] = _versions(found)
        self._rows[begin:end][results < 0] = 0
        self._rows[begin:end, 0] += np.minimum(results, 0)

    def run(self, begin: int, end: int) -> None:
        """Look at one file after another."""
        for row in range(begin, end):
            self._rows[row] = stat_file(self.paths[row])

    def results(self) -> np.ndarray:
        """Return the rows."""
        for row in np.flatnonzero(np.isin(-self._rows[:, 0], _PASSING)).tolist():
            self._rows[row] = stat_file(self.paths[row])
        return self._rows
