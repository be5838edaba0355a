"""Reads of files by plain system calls, one after another; and the records that say what to read and what was read.

In: :class:`FileReads`, a batch of reads with the addresses that they fill. Out: :class:`ReadResults`. Errors:
``ValueError`` for records that contradict themselves; none for a file or a read that fails, whose count is minus an
``errno``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

# np.unique imports it on its first call: without a free descriptor, that would fail where such failures are handled.
import numpy.ma

from linumpy.io.reads import posix_aio

#: O_NONBLOCK means nothing to a file, but without it a pipe in its place would be waited for.
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
#: Of inodes and times, so that both fit int64: a file system's inode may have 64 bits, and a date lie behind 2262.
INT64_BITS = 2**63 - 1
Version = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class FileReads:
    """Reads of one batch.

    Attributes
    ----------
    paths : list of str
        Absolute paths of the files. Symbolic links are followed.
    file : numpy.ndarray of int64, (reads,)
        Index into `paths`, non-decreasing. Every file has a read; one of 0 bytes only opens and checks it.
    offset, nbytes : numpy.ndarray of int64, (reads,)
        Which bytes of the file.
    address : numpy.ndarray of int64 or uint64, (reads,)
        Host address that each read fills. That memory is the engine's until the batch has ended.
    memory : object
        Kept alive until then; the owner of that memory.
    versions : numpy.ndarray of int64, (files, 3), or None
        Inode, size and time of writing that each file is known to have, -1 where nothing is. Such files may be open
        already, and may stay so for later batches.
    """

    paths: list[str]
    file: np.ndarray
    offset: np.ndarray
    nbytes: np.ndarray
    address: np.ndarray
    memory: Any = None
    versions: np.ndarray | None = None

    @cached_property
    def expected(self) -> list[tuple[int, ...] | None]:
        """Version of each file, None where none is known."""
        if self.versions is None:
            return [None] * len(self.paths)
        return [tuple(row) if row[1] >= 0 else None for row in self.versions.tolist()]

    def check(self) -> None:
        """Raise ``ValueError`` where the columns contradict each other."""
        count, files = len(self.file), len(self.paths)
        if not count == len(self.offset) == len(self.nbytes) == len(self.address):
            raise ValueError("file, offset, nbytes and address must be of the same length")
        if not count and not files:
            return
        step = self.file[1:] - self.file[:-1]
        complete = count and self.file[0] == 0 and self.file[-1] == files - 1
        if not complete or step.min(initial=0) < 0 or step.max(initial=0) > 1:
            raise ValueError(f"file must rise from 0 to {files - 1} by steps of 0 and 1, so that each file has a read")
        if self.offset.min() < 0 or self.nbytes.min() < 0:
            raise ValueError("offset and nbytes must not be negative")


@dataclass(frozen=True, eq=False)
class ReadResults:
    """What became of a batch of reads.

    Attributes
    ----------
    nbytes : numpy.ndarray of int64, (reads,)
        Bytes read, fewer than asked for at the end of the file only; or minus an ``errno``. What is not a regular file
        is not read: ``EISDIR`` for a folder, ``EINVAL`` for all else.
    opened : numpy.ndarray of int64, (files,)
        0, or minus the ``errno`` with which the file could not be opened.
    before, after : numpy.ndarray of int64, (files, 4)
        Inode and time of writing in ns (63 bits of each), size and ``st_mode`` of the open file, before its first read
        and after its last one. Zeros where it could not be opened. They differ where any two looks at the file
        differed. A file that cannot be looked at after its reads has failed reads, and the same row twice.
    """

    nbytes: np.ndarray
    opened: np.ndarray
    before: np.ndarray
    after: np.ndarray


def version(found: os.stat_result) -> Version:
    """Return the row of :attr:`ReadResults.before`."""
    return found.st_ino & INT64_BITS, found.st_size, found.st_mtime_ns & INT64_BITS, found.st_mode


def refusal(mode: int) -> int:
    """Return 0 for a regular file, and minus the ``errno`` with which all else is not read."""
    if stat.S_ISREG(mode):
        return 0
    return -errno.EISDIR if stat.S_ISDIR(mode) else -errno.EINVAL


ReadOne = Callable[[int, int, int, int], int]


def stat_file(path: str) -> Version:
    """Return the version of a file; minus the ``errno`` and zeros where it cannot be told."""
    try:
        return version(os.stat(path))
    except OSError as error:
        return -(error.errno or errno.EIO), 0, 0, 0


def read_file(
    path: str, rows: list[tuple[int, int, int]], read: ReadOne = posix_aio.read_now
) -> tuple[int, Version, Version, list[int]]:
    """Open, check, read and close one file by plain system calls.

    Parameters
    ----------
    path : str
        The file.
    rows : list of tuple
        Offset, bytes and address of each read.
    read : callable
        Reads: descriptor, address, bytes, offset → count or minus an ``errno``.

    Returns
    -------
    tuple
        0 or minus the ``errno`` of the open, version before and after, counts.
    """
    descriptor: list[int] = []
    before: Version | None = None
    try:
        # One call of the interpreter, so that no interrupt comes between the descriptor and its place in the list.
        descriptor.extend(map(os.open, (path,), (OPEN_FLAGS,)))
        before = version(os.fstat(descriptor[0]))
        wrong = refusal(before[3])
        counts = [wrong or read(descriptor[0], address, nbytes, offset) for offset, nbytes, address in rows]
        return 0, before, version(os.fstat(descriptor[0])), counts
    except OSError as error:
        code = -(error.errno or errno.EIO)
        if before is not None:
            return 0, before, before, [code] * len(rows)
        return code, (0, 0, 0, 0), (0, 0, 0, 0), [code] * len(rows)
    finally:
        if descriptor:
            os.close(descriptor[0])


def read_files(reads: FileReads, read: ReadOne = posix_aio.read_now) -> ReadResults:
    """Carry out a batch by plain system calls, one after another; `read` as in :func:`read_file`."""
    of_file: list[list[tuple[int, int, int]]] = [[] for _ in reads.paths]
    rows = zip(reads.offset.tolist(), reads.nbytes.tolist(), reads.address.tolist(), strict=True)
    for file, row in zip(reads.file.tolist(), rows, strict=True):
        of_file[file].append(row)
    nbytes: list[int] = []
    files = []
    for path, mine in zip(reads.paths, of_file, strict=True):
        opened, before, after, counts = read_file(path, mine, read)
        nbytes += counts
        files.append((opened, *before, *after))
    columns = np.array(files, np.int64).reshape(-1, 9)
    return ReadResults(np.array(nbytes, np.int64), columns[:, 0], columns[:, 1:5], columns[:, 5:])
