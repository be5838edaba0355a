"""Read binary files whose counts may be wrong: counts are checked against the file size before memory is allocated.

In: a path, or bytes already in memory. Out: numbers and arrays. Errors: a :class:`Cursor` raises :class:`SourceError`,
which names the file, the field and the byte where the field begins; the decoders of bytes raise ``ValueError``.
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

#: Upper bound of the compression ratio of Blosc's codecs: Blosc allocates the size in its header, which may be wrong.
_MAX_RATIO = 2**16


def no_such_error(kind: str, name: str | None, names: list[str], path: str) -> SourceError:
    """Return the error for a grid or an array (`kind`) that a file does not contain; `names` are those it contains."""
    return SourceError(f"{path}: has no {kind} {name!r}; its {kind}s are {names}. Give one of them as field=.")


class Cursor:
    """A position in a seekable file, from whose beginning fields are read; errors have the file's `name`."""

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

    def error(self, problem: str) -> SourceError:
        """Return an error that names this file."""
        return SourceError(f"{self.name}: {problem}")

    def seek(self, position: int, field: str) -> None:
        """Go to a byte of the file, or to the end; the error says that `field` would begin there."""
        if not 0 <= position <= self.size:
            raise self.error(f"{field} would begin at byte {position} of a file of {self.size}")
        self.position = position
        self._file.seek(position)

    def take(self, nbytes: int, field: str) -> bytes:
        """Read `nbytes` bytes."""
        self._check(nbytes, field, f"{nbytes} bytes")
        content = self._file.read(nbytes)
        if len(content) != nbytes:
            raise self.error(f"{field}: only {len(content)} of {nbytes} bytes could be read at byte {self.position}")
        self.position += nbytes
        return content

    def array(self, dtype: DTypeLike, count: int, field: str) -> np.ndarray:
        """Read `count` records into a new, writable array."""
        dtype = np.dtype(dtype)
        self._check(count * dtype.itemsize, field, f"{count} records of {dtype.itemsize} bytes")
        values = np.empty(count, dtype)
        filled = self._file.readinto(values.view(np.uint8).data) if values.nbytes else 0  # type: ignore[attr-defined]
        if filled != values.nbytes:
            raise self.error(f"{field}: only {filled} of {values.nbytes} bytes could be read at byte {self.position}")
        self.position += values.nbytes
        return values

    def number(self, dtype: DTypeLike, field: str) -> Any:
        """Read a number, as an int or float of Python."""
        dtype = np.dtype(dtype)
        return np.frombuffer(self.take(dtype.itemsize, field), dtype)[0].item()

    def count(self, dtype: DTypeLike, itemsize: int, field: str) -> int:
        """Read a number of records; these, of at least `itemsize` bytes each, must fit into the rest of the file."""
        count = self.number(dtype, f"the number of {field}")
        self._check(count * itemsize, field, f"{count} records of {itemsize} bytes")
        return count

    def text(self, field: str, width: DTypeLike = "<u4") -> str:
        """Read a string and its length, a number of dtype `width` before the string."""
        return self.take(self.count(width, 1, field), field).decode("utf-8", "replace")

    def _check(self, nbytes: int, field: str, wanted: str) -> None:
        if nbytes < 0 or nbytes > self.left:
            raise self.error(
                f"{field}: {wanted} do not fit behind byte {self.position}, where {self.left} bytes are left; "
                "the file is truncated or not of this format"
            )


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Cursor]:
    """Open a file, and close it at the end of the ``with`` block."""
    with open(path, "rb") as file:
        yield Cursor(file, os.fspath(path))


def unzip(content: bytes, nbytes: int) -> bytes:
    """Decode a zlib stream to `nbytes` bytes; ``ValueError`` if it is broken or has another size."""
    try:
        decoded = zlib.decompressobj().decompress(content, min(nbytes, sys.maxsize - 1) + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(decoded) != nbytes:
        raise ValueError(f"they are not {nbytes} bytes once unzipped")
    return decoded


def unpack_blosc(content: bytes, nbytes: int) -> bytes:
    """Decode a Blosc buffer to `nbytes` bytes; ``ValueError`` if it is broken or has another size."""
    from numcodecs import Blosc

    sizes = np.frombuffer(content[4:16].ljust(12, b"\0"), "<u4")
    if sizes[0] != nbytes or sizes[2] != len(content) or nbytes > _MAX_RATIO * len(content):
        raise ValueError(f"Blosc says {sizes[0]} bytes in {sizes[2]}, where {nbytes} in {len(content)} are expected")
    try:
        return bytes(Blosc().decode(content))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
