"""Files that are being read, and those that stay open for the next batch.

In: paths, and the versions that are expected of them. Out: descriptors. An interrupt at any time leaves no descriptor
open that nobody refers to: a file goes from one container into the other within one call of the interpreter.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import threading

from linumpy.io.reads.plain_reads import OPEN_FLAGS, Version, refusal, version

_NONE: Version = (0, 0, 0, 0)


class OpenFile:
    """A file that is being read: its descriptors, and its versions before and after."""

    __slots__ = ("after", "before", "descriptors", "opened", "refusal")

    def __init__(self) -> None:
        self.descriptors: list[int] = []
        self.opened = self.refusal = 0
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
        if self.descriptors:
            self.after = version(os.fstat(self.descriptors[0]))

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

    def close(self) -> None:
        """Close all files."""
        for file in self:
            file.close()

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
                as_expected = file.before[:3] == file.after[:3] == expected[number]
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
