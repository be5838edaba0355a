"""Read binary files whose counts may be wrong: they are checked against the file size before memory is allocated.

In: a path, or bytes already in memory. Out: little-endian numbers and arrays. Errors: :class:`SourceError`, which names
the file, the field and the byte where it begins.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.errors import SourceError

#: Blosc allocates what its header says; no codec of it makes more of a byte than this.
_MOST_RATIO = 2**16


class Cursor:
    """A position in a file, from which fields are read one after another.

    Parameters
    ----------
    file : binary file object
        Seekable, at its beginning.
    name : str
        What errors call it.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self.name = name
        self.size = file.seek(0, os.SEEK_END)
        self.position = 0
        file.seek(0)

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self.size - self.position

    def fail(self, problem: str) -> SourceError:
        """Make an error that names this file; the caller raises it."""
        return SourceError(f"{self.name}: {problem}")

    def seek(self, position: int, what: str) -> None:
        """Go to a byte, which must lie in the file or at its end."""
        if not 0 <= position <= self.size:
            raise self.fail(f"{what} would begin at byte {position} of a file of {self.size}")
        self.position = position
        self._file.seek(position)

    def take(self, nbytes: int, what: str) -> bytes:
        """Read bytes."""
        self._check(nbytes, what, f"{nbytes} bytes")
        taken = self._file.read(nbytes)
        if len(taken) != nbytes:
            raise self.fail(f"{what}: only {len(taken)} of {nbytes} bytes could be read at byte {self.position}")
        self.position += nbytes
        return taken

    def array(self, dtype: DTypeLike, count: int, what: str) -> np.ndarray:
        """Read `count` records; a copy in memory that may be written to."""
        dtype = np.dtype(dtype)
        self._check(count * dtype.itemsize, what, f"{count} records of {dtype.itemsize} bytes")
        values = np.empty(count, dtype)
        filled = self._file.readinto(values.view(np.uint8).data) if values.nbytes else 0  # type: ignore[attr-defined]
        if filled != values.nbytes:
            raise self.fail(f"{what}: only {filled} of {values.nbytes} bytes could be read at byte {self.position}")
        self.position += values.nbytes
        return values

    def number(self, dtype: DTypeLike, what: str) -> Any:
        """Read one number, as Python's."""
        dtype = np.dtype(dtype)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def count(self, dtype: DTypeLike, itemsize: int, what: str) -> int:
        """Read how many records of `itemsize` bytes or more follow: not negative, and no more than the file holds."""
        count = self.number(dtype, f"the number of {what}")
        self._check(count * itemsize, what, f"{count} records of {itemsize} bytes")
        return count

    def text(self, what: str, width: DTypeLike = "<u4") -> str:
        """Read a string behind its length."""
        return self.take(self.count(width, 1, what), what).decode("utf-8", "replace")

    def _check(self, nbytes: int, what: str, wanted: str) -> None:
        if nbytes < 0 or nbytes > self.left:
            raise self.fail(
                f"{what}: {wanted} do not fit behind byte {self.position}, where {self.left} bytes are left; "
                "the file is truncated or not of this format"
            )


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Cursor]:
    """Open a file for reading."""
    with open(path, "rb") as file:
        yield Cursor(file, os.fspath(path))


def unzip(content: bytes, nbytes: int) -> bytes:
    """Decode a zlib stream of a known size; ValueError where it has another."""
    try:
        decoded = zlib.decompressobj().decompress(content, min(nbytes, sys.maxsize - 1) + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(decoded) != nbytes:
        raise ValueError(f"they are not {nbytes} bytes once unzipped")
    return decoded


def unpack_blosc(content: bytes, nbytes: int) -> bytes:
    """Decode a Blosc buffer of a known size; ValueError where it has another."""
    from numcodecs import Blosc

    sizes = np.frombuffer(content[4:16].ljust(12, b"\0"), "<u4")
    if sizes[0] != nbytes or sizes[2] != len(content) or nbytes > _MOST_RATIO * len(content):
        raise ValueError(f"Blosc says {sizes[0]} bytes in {sizes[2]}, where {nbytes} in {len(content)} are expected")
    try:
        return bytes(Blosc().decode(content))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
