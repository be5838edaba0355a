"""Write the files of chunks and shards from host memory. Errors: ``OSError`` that names the file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from linumpy.plan.layout import ArrayLayout

#: Bytes in host memory.
Bytes = bytes | np.ndarray
#: Buffers that one call of the system takes.
_MOST_BUFFERS = 1024
#: Bytes of the pieces in which large files are written.
_PIECE_NBYTES = 2 * 2**20
#: Calls a function with each number, in threads, and returns when all calls have ended.
InThreads = Callable[[Callable[[int], None], Sequence[int]], None]


def write_file(path: str, groups: Iterable[Sequence[Bytes]]) -> None:
    """Write a file from buffers, one behind another; those of a group by as few calls of the system as it takes.

    Raises
    ------
    OSError
        Naming the file.
    """
    with _new_file(path) as descriptor:
        offset = 0
        for group in groups:
            views = list(map(_view, group))
            _write_at(descriptor, views, offset, path)
            offset += sum(map(len, views))


@contextmanager
def _new_file(path: str) -> Iterator[int]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            os.close(descriptor)
        raise
    try:
        os.close(descriptor)  # where network file systems report that a write failed
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _view(buffer: Bytes) -> memoryview:
    return memoryview(buffer.reshape(-1).view(np.uint8) if isinstance(buffer, np.ndarray) else buffer)  # type: ignore[arg-type]


def _write_at(descriptor: int, buffers: Sequence[memoryview], offset: int, path: str) -> None:
    left = list(reversed(buffers))
    try:
        while left:
            some = left[: -_MOST_BUFFERS - 1 : -1]
            count = os.pwritev(descriptor, some, offset)
            offset += count
            while left and count >= len(left[-1]):
                count -= len(left.pop())
            if count:
                left[-1] = left[-1][count:]
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


class ChunkFiles:
    """The files of the chunks (or shards) of a local array.

    Parameters
    ----------
    layout : ArrayLayout
        With a root and keys.
    renamed : bool
        Whether a file gets its name when it is complete, as zarr's do: needed where another process may write the same
        chunk at the same time.
    """

    def __init__(self, layout: ArrayLayout, *, renamed: bool) -> None:
        assert layout.root is not None
        assert layout.keys is not None
        self._root, self._keys = layout.root, layout.keys
        #: What is appended to the name of a file until it is complete.
        self.suffix = f".{os.getpid()}-{secrets.token_hex(4)}.partial" if renamed else ""
        self._folders: set[str] = set()

    def path(self, index: Sequence[int]) -> str:
        """Return the path of a chunk's file, after making its folder."""
        path = f"{self._root}/{self._keys.prefix}{self._keys.separator.join(map(str, index))}"
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def write(self, path: str, parts: Sequence[Bytes]) -> int:
        """Write a file and return its size; without parts, remove it."""
        if not parts:
            with suppress(FileNotFoundError):
                os.unlink(path)
            return 0
        write_file(path + self.suffix, [parts])
        if self.suffix:
            os.replace(path + self.suffix, path)
        return sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts)

    def write_pieces(self, files: Sequence[tuple[str, Sequence[Bytes]]], in_threads: InThreads) -> int:
        """Write a few large files, pieces of all of them at the same time, and return their size.

        Parameters
        ----------
        files : sequence of (str, sequence of Bytes)
            Path and parts of each, as for :meth:`write`.
        in_threads : callable
            Calls a function with each number, in threads, and returns when all calls have ended.
        """
        nbytes = 0
        with ExitStack() as scope:
            pieces: list[tuple[int, list[memoryview], int, str]] = []
            for path, parts in files:
                if not parts:
                    self.write(path, parts)
                    continue
                name = path + self.suffix
                descriptor = scope.enter_context(_new_file(name))
                offset = 0
                for part in map(_view, parts):
                    for begin in range(0, len(part), _PIECE_NBYTES):
                        pieces.append((descriptor, [part[begin : begin + _PIECE_NBYTES]], offset + begin, name))
                    offset += len(part)
                nbytes += offset
            in_threads(lambda number: _write_at(*pieces[number]), range(len(pieces)))
        if self.suffix:
            for path in (path for path, parts in files if parts):
                os.replace(path + self.suffix, path)
        return nbytes
