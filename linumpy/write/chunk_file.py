"""Write the files of chunks and shards from host memory. Errors: ``OSError`` that names the file."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from linumpy.core.files import write_files
from linumpy.core.native import why_no_core
from linumpy.io.codecs import checksum
from linumpy.plan.codecs import CHECKSUM_NBYTES
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box

#: Bytes in host memory.
Bytes = bytes | np.ndarray
#: Buffers that one call of the system takes.
_MOST_BUFFERS = 1024


def write_file(path: str, groups: Iterable[Sequence[Bytes]]) -> int:
    """Write a file from buffers, one behind another; those of a group by as few calls of the system as it takes.

    Returns
    -------
    int
        Bytes written.

    Raises
    ------
    OSError
        Naming the file.
    """
    nbytes = 0
    with _new_file(path) as descriptor:
        for group in groups:
            for first in range(0, len(group), _MOST_BUFFERS):
                views = [_view(buffer) for buffer in group[first : first + _MOST_BUFFERS]]
                nbytes += _write_all(descriptor, views, path)
    return nbytes


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


def _write_all(descriptor: int, buffers: Sequence[memoryview], path: str) -> int:
    left, nbytes = list(buffers), 0
    try:
        while left:
            count = os.writev(descriptor, left)
            nbytes += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    return nbytes


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

    def paths(self, box: Box, shape: Sequence[int]) -> list[str]:
        """Return the paths of the files of a box, the last axis fastest, after making their folders.

        Parameters
        ----------
        box : tuple of slice
            In voxels, of whole objects.
        shape : sequence of int
            Of an object.
        """
        *outer, last = (range(b.start // s, -(-b.stop // s)) for b, s in zip(box, shape, strict=True))
        paths, separator = [], self._keys.separator
        for lead in itertools.product(*outer):
            head = f"{self._root}/{self._keys.prefix}{''.join(f'{number}{separator}' for number in lead)}"
            folder = os.path.dirname(head)
            if folder not in self._folders:
                os.makedirs(folder, exist_ok=True)
                self._folders.add(folder)
            paths += [f"{head}{number}" for number in last]
        return paths

    def write(self, path: str, groups: Iterable[Sequence[Bytes]]) -> int:
        """Write a file by :func:`write_file`, and return its size."""
        nbytes = write_file(path + self.suffix, groups)
        self.complete([path])
        return nbytes

    def complete(self, paths: Sequence[str]) -> None:
        """Give files that were written under another name theirs."""
        if self.suffix:
            for path in paths:
                os.replace(path + self.suffix, path)

    def write_many(
        self, paths: Sequence[str], data: np.ndarray, bounds: np.ndarray, *, with_checksum: bool = False
    ) -> int:
        """Write files, each from bytes that lie together, and return their size.

        Parameters
        ----------
        paths, data, bounds, with_checksum
            As for :func:`linumpy.core.files.write_files`.
        """
        if why_no_core() is None:
            write_files(paths, data, bounds, with_checksum=with_checksum, suffix=self.suffix)
            return int(np.diff(bounds).sum()) + len(paths) * CHECKSUM_NBYTES * with_checksum
        nbytes = 0
        for path, (begin, end) in zip(paths, bounds.tolist(), strict=True):
            part: list[Bytes] = [data[begin:end]]
            nbytes += self.write(path, [[*part, checksum(part[0])] if with_checksum else part])
        return nbytes

    def remove(self, path: str) -> None:
        """Remove the file of a chunk that holds nothing but the fill value, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(path)
