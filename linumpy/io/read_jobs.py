"""Batches of reads as jobs of units, and their results put together.

A unit opens a file, notes its version, reads some parts of it, notes its version again and closes it. Long reads and
files with many reads become several units, each with a descriptor of its own, so that threads share no state; at the
end their versions are compared. One thread carries out the units of a run, one after another. A window is a number of
units that are submitted together.

In: :class:`~linumpy.io.plain_reads.FileReads`. Out: :class:`~linumpy.io.plain_reads.ReadResults`.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Any, Generic, TypeVar

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
from linumpy.io.rings import MAX_STEP, Window

#: Bytes of a run. The smaller number is for batches that would not give all threads one of the larger.
RUN_NBYTES, SMALL_RUN_NBYTES = 2**19, 2**18
#: A read and a unit take as long as that many bytes, about; this bounds the number of reads in a unit.
_READ_COST, _UNIT_COST = 2**14, 2**16
#: Units of a window: while they are read, those of the next are opened.
WINDOW_UNITS = 128
#: Files that one thread looks at, one after another.
_STATS = 64
#: Failures that say nothing about the file: such reads are tried again by plain system calls.
_PASSING = [
    errno.EAGAIN, errno.EINTR, errno.ECANCELED, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EBADF, errno.EOPNOTSUPP,
    errno.EFAULT,
]  # fmt: skip
#: Results of operations that were not carried out; EFAULT where the thread that submitted them has ended since.
_NOT_DONE = [-errno.ECANCELED, -errno.EFAULT]

Outcome = TypeVar("Outcome")

_OPEN_WORD = uring.OPENAT | (uring.AT_FDCWD & 0xFFFFFFFF) << 32
_STATX_WORD, _READ_WORD, _CLOSE_WORD = (op | uring.HARDLINK for op in (uring.STATX, uring.READ, uring.CLOSE))


def _read_batch(*columns: np.ndarray) -> np.ndarray:
    return posix_aio.read_by_threads(*columns) if posix_aio.why_unavailable() else posix_aio.read_batch(*columns)


def _versions(words: np.ndarray) -> np.ndarray:
    """Take versions out of structures of ``statx(2)``."""
    rows = words[..., [4, 5, 14, 3]]
    rows[..., 0] &= np.uint64(INODE_BITS)
    rows[..., 2] *= np.uint64(10**9)
    rows[..., 2] += words[..., 15] & np.uint64(0xFFFFFFFF)
    rows[..., 3] >>= np.uint64(32)
    rows[..., 3] &= np.uint64(0xFFFF)
    return rows.view(np.int64)


class Job(Generic[Outcome]):
    """Work on files: a :class:`linumpy.io.rings.Job`, or carried out by :meth:`run`.

    Attributes
    ----------
    outcome : object
        The results, after the end.
    error : Exception or None
        Why there are none.
    """

    ring: uring.Ring
    outcome: Outcome

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.error: BaseException | None = None
        self.windows: list[Window] = []
        self.begun, self.complete, self.ended = 0, 0, False
        self.gate = threading.Lock()  # for a thread that waits while another one runs this
        self._blob = np.frombuffer(os.fsencode("\0".join(paths)) + b"\0", np.uint8)
        ends = np.flatnonzero(self._blob == 0)
        if len(ends) != len(paths):
            raise ValueError("a path contains a null character")
        self._path_address = self._blob.ctypes.data + np.concatenate([[0], ends[:-1] + 1])

    def step(self, window: Window) -> np.ndarray | None:
        """Go on with a window: see :class:`linumpy.io.rings.Job`."""
        try:
            return None if self.error and window.stage == 0 else self._step(window)
        except Exception as error:
            self.error = self.error or error
            self._drop(window)
            return None

    def run(self) -> None:
        """Carry out all of it without a ring."""
        try:
            for window in self.windows:
                self._run(window.begin, window.end)
        except BaseException as error:
            self.error = error
        self.end()

    def end(self) -> None:
        """Put the results together, or keep the error that this gives."""
        if self.error is None:
            try:
                self.outcome = self.results()
            except Exception as error:
                self.error = error
        self.ended = True

    def results(self) -> Outcome:
        """Return what the caller gets."""
        raise NotImplementedError

    def _step(self, window: Window) -> np.ndarray | None:
        raise NotImplementedError

    def _drop(self, window: Window) -> None:
        """Close what a window has open."""

    def _run(self, begin: int, end: int) -> None:
        raise NotImplementedError


class ReadJob(Job[ReadResults]):
    """A batch of reads.

    Parameters
    ----------
    reads : FileReads
        The batch, which is not empty.
    threads : int
        Threads that read.
    descriptors : int
        Files that may be open at the same time.
    """

    def __init__(self, reads: FileReads, threads: int, descriptors: int) -> None:
        super().__init__(reads.paths)
        self.reads = reads
        run = RUN_NBYTES if int(reads.nbytes.sum()) >= threads * RUN_NBYTES else SMALL_RUN_NBYTES
        self._cut_reads(run)
        self._cut_units(run)
        self._cut_windows(descriptors)
        units = len(self._unit_file)
        self._opened = np.zeros(units, np.int64)
        self._got = np.zeros(len(self._nbytes), np.int64)
        self._statx = np.zeros((units, 2, uring.STATX_WORDS), np.uint64)
        self._statx_address = self._statx.ctypes.data + self._statx.strides[0] * np.arange(units)
        self._versions: Any = None

    def _cut_reads(self, piece: int) -> None:
        """Cut long reads, so that several threads copy them; the last piece has half of `piece` to 1.5 of it."""
        reads = self.reads
        self._file, self._offset, self._nbytes = reads.file, reads.offset, reads.nbytes
        self._address = reads.address.astype(np.int64)
        if self._nbytes.max() <= piece + piece // 2:
            return
        count = np.maximum((reads.nbytes + piece // 2) // piece, 1)
        self._first_piece = np.cumsum(count) - count
        row = np.repeat(np.arange(len(count)), count)
        within = (np.arange(len(row)) - self._first_piece[row]) * piece
        self._file, self._offset, self._address = (
            reads.file[row],
            reads.offset[row] + within,
            self._address[row] + within,
        )
        self._nbytes = np.full(len(row), piece)
        last = self._first_piece + count - 1
        self._nbytes[last] = reads.nbytes - within[last]

    def _cut_units(self, run: int) -> None:
        cost, file = self._nbytes + _READ_COST, self._file
        if len(file) == len(self.paths):  # a read of each file
            self._unit = self._unit_file = file
            self._bounds = np.arange(len(file) + 1)
        else:
            before = np.cumsum(cost) - cost
            begins = np.ones(len(file), bool)
            np.not_equal(file[1:], file[:-1], out=begins[1:])
            group = (before - before[begins][file]) // run
            begins[1:] |= group[1:] != group[:-1]
            first = np.flatnonzero(begins)
            self._unit, self._unit_file = np.cumsum(begins) - 1, file[first]
            self._bounds = np.append(first, len(file))  # pieces of each unit
            cost = np.add.reduceat(cost, first)
        cost = cost + _UNIT_COST
        number = (np.cumsum(cost) - cost) // run
        self._begins_run = np.ones(len(cost) + 1, bool)
        np.not_equal(number[1:], number[:-1], out=self._begins_run[1:-1])
        self._entry = self._bounds + 3 * np.arange(len(self._bounds))  # entries before each unit, opens apart

    def _cut_windows(self, descriptors: int) -> None:
        most = min(max(descriptors // 2, 1), WINDOW_UNITS)
        ends = self._entry[1:].tolist()
        begin, first = 0, 0
        while begin < len(ends):
            end = min(begin + most, len(ends))
            while ends[end - 1] - first > MAX_STEP:
                end -= 1
            self.windows.append(Window(self, begin, end, descriptors=end - begin, entries=ends[end - 1] - first))
            begin, first = end, ends[end - 1]
            self._begins_run[end] = True

    def _step(self, window: Window) -> np.ndarray | None:
        if window.stage == 0:
            return self._open_entries(window)
        if window.stage == 1:
            return self._read_entries(window, window.results)
        self._note(window, window.results)
        return None

    def _drop(self, window: Window) -> None:
        if window.stage == 1:
            _close_all(window.results, np.arange(len(window.results)))

    def _open_entries(self, window: Window) -> np.ndarray:
        entries = np.zeros((window.end - window.begin, uring.ENTRY_WORDS), np.uint64)
        entries[:, 0] = _OPEN_WORD
        entries[:, 2] = self._path_address[self._unit_file[window.begin : window.end]]
        entries[:, 3] = OPEN_FLAGS << 32
        return entries

    def _read_entries(self, window: Window, found: np.ndarray) -> np.ndarray:
        """Return the chains of a window; where a file could not be opened all of it fails without a descriptor."""
        begin, end = window.begin, window.end
        at = self._entry[begin : end + 1] - self._entry[begin]
        first, close = at[:-1], at[1:] - 1
        pieces = slice(int(self._bounds[begin]), int(self._bounds[end]))
        unit = self._unit[pieces] - begin
        read = np.arange(1, len(unit) + 1) + 3 * unit
        descriptor = np.maximum(found, -1).astype(np.uint64) << np.uint64(32)
        entries = np.zeros((int(at[-1]), uring.ENTRY_WORDS), np.uint64)
        entries[read, 0] = descriptor[unit] | np.uint64(_READ_WORD)
        for number, column in enumerate((self._offset, self._address, self._nbytes), 1):
            entries[read, number] = column[pieces]
        looks = np.empty((2, end - begin, 4), np.uint64)
        looks[...] = 0, 0, self._blob.ctypes.data + len(self._blob) - 1, uring.STATX_MASK | uring.AT_EMPTY_PATH << 32
        looks[:, :, 0] = descriptor | np.uint64(_STATX_WORD)
        looks[0, :, 0] |= self._begins_run[begin:end] * np.uint64(uring.ASYNC)
        looks[0, :, 1] = address = self._statx_address[begin:end]
        looks[1, :, 1] = address + self._statx.strides[1]
        entries[first, :4], entries[close - 1, :4] = looks
        unlink = self._begins_run[begin + 1 : end + 1] * np.uint64(uring.HARDLINK)
        entries[close, 0] = (descriptor | np.uint64(_CLOSE_WORD)) ^ unlink
        window.notes = found, pieces, first, read, close
        return entries

    def _note(self, window: Window, results: np.ndarray) -> None:
        found, pieces, first, read, close = window.notes
        _close_all(found, np.flatnonzero(np.isin(results[close], _NOT_DONE)) if results[close].any() else close[:0])
        self._got[pieces] = results[read]
        looked = np.minimum(np.minimum(results[first], results[close - 1]), 0)
        self._opened[window.begin : window.end] = np.where(found < 0, found, looked)

    def _run(self, begin: int, end: int) -> None:
        """Open and close the files of a window here, and read it in one call."""
        if self._versions is None:
            self._versions = np.zeros((len(self._unit_file), 2, 4), np.int64)
        descriptors: list[int] = []
        try:
            for unit in range(begin, end):
                descriptors.append(self._open(unit))
            self._read(begin, end, np.array(descriptors))
            for unit, descriptor in zip(range(begin, end), descriptors, strict=True):
                if descriptor >= 0:
                    self._versions[unit, 1] = version(os.fstat(descriptor))
        finally:
            for descriptor in descriptors:
                if descriptor >= 0:
                    os.close(descriptor)

    def _open(self, unit: int) -> int:
        try:
            descriptor = os.open(self.paths[self._unit_file[unit]], OPEN_FLAGS)
        except OSError as error:
            self._opened[unit] = -(error.errno or errno.EIO)
            return -1
        self._versions[unit, 0] = version(os.fstat(descriptor))
        return descriptor

    def _read(self, begin: int, end: int, descriptors: np.ndarray) -> None:
        readable = (descriptors >= 0) & is_regular(self._versions[begin:end, 0, 3])
        unit = self._unit[self._bounds[begin] : self._bounds[end]] - begin
        rows = np.flatnonzero(readable[unit])
        pieces = self._bounds[begin] + rows
        self._got[pieces] = _read_batch(
            descriptors[unit[rows]], self._address[pieces], self._nbytes[pieces], self._offset[pieces]
        )

    def results(self) -> ReadResults:
        """Put the units of each file and the pieces of each read together."""
        reads, nbytes, opened = self.reads, self._got, self._opened
        versions = _versions(self._statx) if self._versions is None else self._versions
        if len(nbytes) != len(reads.nbytes):
            worst, total = (f.reduceat(nbytes, self._first_piece) for f in (np.minimum, np.add))
            nbytes = np.where(worst < 0, worst, total)
        before, after = versions[:, 0], versions[:, 1]
        if len(opened) != len(self.paths):
            first = np.searchsorted(self._unit_file, np.arange(len(self.paths) + 1))
            before, after = before[first[:-1]], after[first[1:] - 1]
            for unit, side in np.argwhere((versions != before[self._unit_file][:, None]).any(axis=2)).tolist():
                after[self._unit_file[unit]] = versions[unit, side]
            opened = np.minimum.reduceat(opened, first[:-1])
        if opened.any():
            before[opened < 0] = after[opened < 0] = 0
        if not is_regular(before[:, 3]).all():
            for code in (refusals(before[:, 3]), opened):
                nbytes = np.where(code[reads.file] < 0, code[reads.file], nbytes)
        results = ReadResults(nbytes, opened, before, after)
        if (nbytes != reads.nbytes).any():
            self._try_again(results)
        return results

    def _try_again(self, results: ReadResults) -> None:
        """Read by plain system calls what failed for a passing reason, or ended before the end of its file."""
        reads, nbytes = self.reads, results.nbytes
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


class StatJob(Job[np.ndarray]):
    """A batch of files to look at."""

    def __init__(self, paths: list[str]) -> None:
        super().__init__(paths)
        self._rows = np.zeros((len(paths), 4), np.int64)
        for begin in range(0, len(paths), MAX_STEP):
            end = min(begin + MAX_STEP, len(paths))
            self.windows.append(Window(self, begin, end, descriptors=0, entries=end - begin))

    def _step(self, window: Window) -> np.ndarray | None:
        rows = self._rows[window.begin : window.end]
        if window.stage:
            rows[:] = _versions(window.notes)
            rows[window.results < 0] = 0
            rows[:, 0] += np.minimum(window.results, 0)
            return None
        found = window.notes = np.zeros((len(rows), uring.STATX_WORDS), np.uint64)
        entries = np.zeros((len(rows), uring.ENTRY_WORDS), np.uint64)
        entries[:, 0] = uring.STATX | uring.HARDLINK | (uring.AT_FDCWD & 0xFFFFFFFF) << 32
        entries[::_STATS, 0] |= np.uint64(uring.ASYNC)
        entries[_STATS - 1 :: _STATS, 0] ^= np.uint64(uring.HARDLINK)
        if len(rows) % _STATS:
            entries[-1, 0] ^= np.uint64(uring.HARDLINK)
        entries[:, 1] = found.ctypes.data + np.arange(len(rows)) * found.strides[0]
        entries[:, 2] = self._path_address[window.begin : window.end]
        entries[:, 3] = uring.STATX_MASK
        return entries

    def _run(self, begin: int, end: int) -> None:
        for row in range(begin, end):
            self._rows[row] = stat_file(self.paths[row])

    def results(self) -> np.ndarray:
        """Return the rows."""
        for row in np.flatnonzero(np.isin(-self._rows[:, 0], _PASSING)).tolist():
            self._rows[row] = stat_file(self.paths[row])
        return self._rows


def _close_all(found: np.ndarray, rows: np.ndarray) -> None:
    """Close descriptors that no chain closes. Called again after an exception, it goes on."""
    for row in rows.tolist():
        descriptor = int(found[row])
        if descriptor >= 0:
            found[row] = -errno.ECANCELED
            os.close(descriptor)
