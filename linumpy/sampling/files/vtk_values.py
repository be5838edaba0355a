"""The numbers of an array of a VTK file of the XML kind.

In: a parsed file and the element of an array. Out: its values, checked to be as many as are wanted. Read are arrays as
text, in base64 and appended (raw or base64), plain or by zlib, LZ4 or LZMA, of either byte order.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.files.openvdb import unzip

_TYPES = {f"{sign}Int{8 * n}": f"{code}{n}" for sign, code in (("", "i"), ("U", "u")) for n in (1, 2, 4, 8)}
_TYPES |= {"Float32": "f4", "Float64": "f8"}


@dataclass(frozen=True)
class XmlFile:
    """A parsed file.

    Attributes
    ----------
    name : str
        Its path, for errors.
    image : Element
        What describes the image.
    order : str
        ``<`` or ``>``.
    header : dtype
        Of the numbers in front of binary data.
    compressor : str
        As the file names it; empty for none.
    appended : bytes
        What follows the ``_`` of appended data.
    raw : bool
        Whether that is not base64.
    """

    name: str
    image: ElementTree.Element
    order: str
    header: np.dtype
    compressor: str
    appended: bytes
    raw: bool

    def fail(self, problem: str) -> SourceError:
        """Make an error that names the file."""
        return SourceError(f"{self.name}: {problem}")


def read_values(file: XmlFile, array: ElementTree.Element, count: int) -> np.ndarray:
    """Read the numbers of an array, of which there must be `count`."""
    name, kind, form = array.get("Name"), array.get("type", ""), array.get("format", "")
    if kind not in _TYPES:
        raise UnsupportedLayoutError(f"{file.name}: array {name!r} is of type {kind!r}, only {list(_TYPES)} are read")
    dtype = np.dtype(file.order + _TYPES[kind])
    try:
        if form == "ascii":
            values = np.array((array.text or "").split(), dtype)
        elif form in ("binary", "appended"):
            content = _binary(file, array, form, count * dtype.itemsize)
            values = np.frombuffer(content, dtype)
        else:
            raise ValueError(f"format {form!r} is not known")
    except (ValueError, OverflowError, binascii.Error) as error:
        raise file.fail(f"array {name!r}: {error}") from error
    if len(values) != count:
        raise file.fail(f"array {name!r} has {len(values)} numbers, where its extent needs {count}")
    return values.astype(dtype.newbyteorder("="))


def _binary(file: XmlFile, array: ElementTree.Element, form: str, nbytes: int) -> bytes:
    if form == "appended":
        offset = int(array.get("offset", ""))
        if not 0 <= offset < len(file.appended):
            raise ValueError(f"offset {offset} is none of {len(file.appended)} bytes of appended data; truncated?")
        reader: Any = _Raw(memoryview(file.appended)[offset:]) if file.raw else _Base64(file.appended[offset:])
    else:
        reader = _Base64((array.text or "").encode("ascii", "replace"))
    if not file.compressor:
        return _plain(reader, file.header, nbytes)
    return _compressed(reader, file.header, file.compressor, nbytes)


class _Raw:
    """Bytes, one group after another."""

    def __init__(self, content: bytes | memoryview) -> None:
        self._content = memoryview(content)
        self._position = 0

    def take(self, nbytes: int) -> bytes:
        """Read some of a group of bytes."""
        if nbytes > len(self._content) - self._position:
            left = len(self._content) - self._position
            raise ValueError(f"{nbytes} bytes were expected and {left} are left; the file is truncated or damaged")
        self._position += nbytes
        return bytes(self._content[self._position - nbytes : self._position])

    def next_group(self) -> None:
        """Go on behind the padding of a group."""


class _Base64(_Raw):
    """The same of groups in base64, each padded by itself."""

    def __init__(self, content: bytes) -> None:
        end = content.find(b"<")  # appended data ends with a tag
        self._text = b"".join((content if end < 0 else content[:end]).split())
        super().__init__(b"")
        self._fill()

    def _fill(self) -> None:
        """Decode up to and with the next padding."""
        mark = self._text.find(b"=")
        end = len(self._text) if mark < 0 else -(-(mark + 1) // 4) * 4
        super().__init__(base64.b64decode(self._text[:end], validate=True))
        self._text = self._text[end:]

    def next_group(self) -> None:
        if self._position == len(self._content):
            self._fill()


def _plain(reader: _Raw, header: np.dtype, nbytes: int) -> bytes:
    stored = int(np.frombuffer(reader.take(header.itemsize), header)[0])
    if stored != nbytes:
        raise ValueError(f"{stored} bytes are stored, where its extent needs {nbytes}")
    return reader.take(nbytes)


def _compressed(reader: _Raw, header: np.dtype, compressor: str, nbytes: int) -> bytes:
    blocks, size, last = np.frombuffer(reader.take(3 * header.itemsize), header).tolist()
    total = blocks * size - (size - last if last and blocks else 0)
    if total != nbytes:
        raise ValueError(f"{total} bytes are stored, where its extent needs {nbytes}")
    sizes = np.frombuffer(reader.take(blocks * header.itemsize), header).tolist()
    reader.next_group()
    parts = []
    for number, stored in enumerate(sizes):
        wanted = last if last and number == blocks - 1 else size
        parts.append(_decompress(reader.take(stored), compressor, wanted))
    return b"".join(parts)


def _decompress(content: bytes, compressor: str, nbytes: int) -> bytes:
    if compressor == "vtkZLibDataCompressor":
        return unzip(content, nbytes)
    if compressor == "vtkLZMADataCompressor":
        try:
            decoded = lzma.LZMADecompressor().decompress(content, min(nbytes, sys.maxsize - 1) + 1)
        except lzma.LZMAError as error:
            raise ValueError(str(error)) from error
    elif compressor == "vtkLZ4DataCompressor":
        decoded = _unpack_lz4(content, nbytes)
    else:
        raise UnsupportedLayoutError(f"compressor {compressor!r} is not read, only zlib, LZ4 and LZMA of VTK")
    if len(decoded) != nbytes:
        raise ValueError(f"a block has {len(decoded)} bytes once decompressed, and not {nbytes}")
    return decoded


def _unpack_lz4(content: bytes, nbytes: int) -> bytes:
    from numcodecs import LZ4

    if nbytes > 255 * len(content) + 64 or nbytes >= 2**31:
        raise ValueError(f"{len(content)} bytes of LZ4 cannot hold {nbytes}")
    try:
        return bytes(LZ4().decode(nbytes.to_bytes(4, "little") + content))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
