"""Files that are being read, and those that stay open for the next batch.

In: paths, and the versions that are expected of them. Out: descriptors. An interrupt at any time leaves no descriptor
open that nobody refers to: a file goes from one container into the other within one call of the interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import threading

import numpy as np

from linumpy.io.reads.plain_reads import INT64_BITS, OPEN_FLAGS, Version, refusal, version

_NONE: Version = (0, 0, 0, 0)
#: Says whether a number is that of an open file.
_is_open = (0).__le__


class OpenFile:
    """A file that is being read: its descriptors, and its versions before and after.

    `lost` is minus the ``errno`` with which it could not be looked at after its reads, else 0.
    """

    __slots__ = ("after", "before", "descriptors", "lost", "opened", "refusal")

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.opened = self.refusal = self.lost = 0
        self.before = self.after = _NONE

    def open(self, path: str) -> None:
        """Open it; what is no regular file is refused."""
        try:
            # One call of the interpreter, so that no interrupt comes between the descriptor and its place in the list.
            self.descriptors.extend(map(os.open, (path,), (OPEN_FLAGS,)))
            self.before = version(os.fstat(self.descriptors[0]))
        except OSError as error:
            self.opened = self.refusal = -(error.errno or errno.EIO)
            return
        self.opened, self.refusal = 0, refusal(self.before[3])

    def duplicates(self, count: int) -> list[int]:
        """Return that many descriptors, or as many as there may be."""
        with contextlib.suppress(OSError):
            while len(self.descriptors) < count:
                self.descriptors.extend(map(os.dup, (self.descriptors[0],)))
        return self.descriptors

    def look_again(self) -> None:
        """Note the version behind all reads."""
        if not self.descriptors:
            return
        try:
            self.lost, self.after = 0, version(os.fstat(self.descriptors[0]))
        except OSError as error:
            self.lost, self.after = -(error.errno or errno.EIO), self.before

    def close(self) -> None:
        """Close all descriptors."""
        while self.descriptors:
            with contextlib.suppress(OSError, IndexError):
                # One call, too: a descriptor that was taken from the list is closed. It ends at the empty list.
                collections.deque(map(os.close, iter(self.descriptors.pop, None)), 0)


class OpenFiles(list[OpenFile]):
    """The files of a batch; those that nobody waits for are closed at last.

    One object of the batch has ``__del__``, not each file: an interrupt that comes there is lost.
    """

    @property
    def descriptors(self) -> np.ndarray:
        """One descriptor of each file, -1 where it could not be opened; int64."""
        return np.array([file.descriptors[0] if file.descriptors else -1 for file in self], np.int64)

    @property
    def refusals(self) -> np.ndarray:
        """0, or minus an ``errno``: why a file is not read."""
        return np.array([file.refusal for file in self], np.int64)

    def duplicates(self, number: int, count: int) -> list[int]:
        """Return that many descriptors of a file, or as many as there may be."""
        return self[number].duplicates(count)

    def look_again(self) -> np.ndarray:
        """Note the versions behind all reads; return 0, or minus the ``errno`` of a file that cannot be looked at."""
        for file in self:
            file.look_again()
        return np.array([file.lost for file in self], np.int64)

    def versions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what :class:`~linumpy.io.reads.plain_reads.ReadResults` tells of files."""
        columns = np.array([(file.opened, *file.before, *file.after) for file in self], np.int64).reshape(-1, 9)
        return columns[:, 0], columns[:, 1:5], columns[:, 5:]

    def close(self) -> None:
        """Close all files."""
        for file in self:
            file.close()

    def __del__(self) -> None:
        """Close what is open yet."""
        self.close()


class FilesOnce:
    """The files of a batch that are read once: opened together, looked at together, closed together.

    Each is one call of the interpreter for all files: with a few calls for each of them, thousands of small chunks take
    twice their time. As for :class:`OpenFiles`, no interrupt leaves a descriptor open, and what nobody waits for is
    closed at last.
    """

    def __init__(self) -> None:
        self._numbers: list[int] = []  # of each file, -1 where it could not be opened
        self._more: list[int] = []
        self._opened = self.refusals = np.zeros(0, np.int64)
        self._before = self._after = np.zeros((0, 4), np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def open(self, paths: list[str]) -> None:
        """Open files; what is no regular file is refused."""
        failed: dict[int, int] = {}
        rest = iter(paths)
        while len(self._numbers) < len(paths):
            try:
                self._numbers.extend(map(os.open, rest, itertools.repeat(OPEN_FLAGS)))
            except OSError as error:
                failed[len(self._numbers)] = -(error.errno or errno.EIO)
                self._numbers.append(-1)
        self._opened = np.zeros(len(paths), np.int64)
        self._opened[list(failed)] = list(failed.values())
        try:
            self._before = self._look()
        except OSError:
            self._before, lost = self._look_one_by_one()
            self._opened = np.where(self._opened < 0, self._opened, lost)
        self._after = self._before
        refusals = np.fromiter(map(refusal, self._before[:, 3].tolist()), np.int64)
        self.refusals = np.where(self._opened < 0, self._opened, refusals)

    def _look_one_by_one(self) -> tuple[np.ndarray, np.ndarray]:
        """Look at files of which some cannot be looked at, as where a network has lost them: minus their ``errno``."""
        found, lost = np.zeros((len(self._numbers), 4), np.int64), np.zeros(len(self._numbers), np.int64)
        for file in np.flatnonzero(self._opened == 0).tolist():
            try:
                found[file] = version(os.fstat(self._numbers[file]))
            except OSError as error:
                lost[file] = -(error.errno or errno.EIO)
        return found, lost

    def _look(self) -> np.ndarray:
        found, there = np.zeros((len(self._numbers), 4), np.int64), self._opened == 0
        numbers = self._numbers if there.all() else [*itertools.compress(self._numbers, there.tolist())]
        # As plain_reads.version has it, but without a call for each file.
        rows = [
            (one.st_ino & INT64_BITS, one.st_size, one.st_mtime_ns & INT64_BITS, one.st_mode)
            for one in map(os.fstat, numbers)
        ]
        if rows:
            found[there] = rows
        return found

    @property
    def descriptors(self) -> np.ndarray:
        """One descriptor of each file, -1 where it could not be opened; int64."""
        return np.array(self._numbers, np.int64)

    def duplicates(self, number: int, count: int) -> list[int]:
        """Return that many descriptors of a file, or as many as there may be."""
        first = len(self._more)
        with contextlib.suppress(OSError):
            self._more.extend(map(os.dup, itertools.repeat(self._numbers[number], count - 1)))
        return [self._numbers[number], *self._more[first:]]

    def look_again(self) -> np.ndarray:
        """Do what :meth:`OpenFiles.look_again` does."""
        try:
            self._after = self._look()
        except OSError:
            self._after, lost = self._look_one_by_one()
            self._after[lost < 0] = self._before[lost < 0]
            return lost
        return np.zeros(len(self._numbers), np.int64)

    def versions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what :class:`~linumpy.io.reads.plain_reads.ReadResults` tells of files."""
        return self._opened, self._before, self._after

    def close(self) -> None:
        """Close all files."""
        for numbers in (self._more, self._numbers):
            while numbers:
                with contextlib.suppress(OSError, IndexError):
                    collections.deque(map(os.close, filter(_is_open, iter(numbers.pop, None))), 0)

    def __del__(self) -> None:
        """Close what is open yet."""
        self.close()


class KeptFiles:
    """Files that stay open between batches; for several threads.

    A file is used again where its version is the one that the next batch expects of it, which has looked at its path:
    a file that has taken its name since is opened instead.

    Parameters
    ----------
    descriptors : int
        Of all files that are kept, at most.
    """

    def __init__(self, descriptors: int) -> None:
        self._most = descriptors
        self._files: dict[str, OpenFile] = {}  # the one that was used last at the end
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._files)

    def open_into(self, files: OpenFiles, path: str, expected: tuple[int, ...] | None) -> None:
        """Append the file of a path to `files`, of this inode, size and time where it is kept; else it is opened."""
        if expected is None:
            files.append(OpenFile())
            files[-1].open(path)
            return
        with self._lock:
            if path in self._files:
                files.extend(map(self._files.pop, (path,)))
            else:
                files.append(OpenFile())
        file = files[-1]
        if file.descriptors and file.before[:3] == expected:
            self.hits += 1
            return
        self.misses += 1
        file.close()
        file.open(path)

    def keep_from(self, files: OpenFiles, paths: list[str], expected: list[tuple[int, ...] | None]) -> None:
        """Take the files over that are as expected; the others stay in `files`."""
        with self._lock:
            for number in reversed(range(len(paths))):
                file, path = files[number], paths[number]
                as_expected = file.before[:3] == file.after[:3] == expected[number] and not file.lost
                if as_expected and file.descriptors and path not in self._files:
                    self._files.update(zip((path,), map(files.pop, (number,)), strict=True))
            self._drop_above(self._most)

    def _drop_above(self, most: int) -> None:
        """Close the files that were not used for longest."""
        held = sum(len(file.descriptors) for file in self._files.values())
        while self._files and held > most:
            dropped = OpenFiles()
            path, file = next(iter(self._files.items()))
            held -= len(file.descriptors)
            dropped.extend(map(self._files.pop, (path,)))
            dropped.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._drop_above(-1)
