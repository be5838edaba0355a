"""Read images of VTK: ``.vti``, ``.pvti`` and legacy ``.vtk`` files of structured points.

In: a path and the name of an array. Out: its values, (components, Z, Y, X). Read are arrays as text, in base64 and
appended (raw or base64), plain or by zlib, LZ4 or LZMA, of either byte order; images of several pieces. An array of
points has a value for each point, one of cells for each cell; both are the voxels of the image.
"""

from __future__ import annotations

import base64
import binascii
import lzma
import math
import os
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.files.legacy_vtk import read_legacy
from linumpy.sampling.files.openvdb import unzip

_TYPES = {f"{sign}Int{8 * n}": f"{code}{n}" for sign, code in (("", "i"), ("U", "u")) for n in (1, 2, 4, 8)}
_TYPES |= {"Float32": "f4", "Float64": "f8"}
_ORDERS = {"LittleEndian": "<", "BigEndian": ">"}
_MOST_PIECES = 2**16


@dataclass(frozen=True)
class _File:
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
        return SourceError(f"{self.name}: {problem}")


def read_vtk(path: str | os.PathLike[str], field: str | None = None) -> np.ndarray:
    """Read an array of an image: that of this name, else the active scalars, else the first.

    Returns
    -------
    ndarray
        Shape (components, Z, Y, X), in native byte order.

    Raises
    ------
    SourceError
        The file is truncated or damaged, or has no such array.
    UnsupportedLayoutError
        Another kind of data set, compression or type.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read()
    if content[:20].lower().startswith(b"# vtk datafile"):
        return read_legacy(content, name, field)
    file_ = _parse(content, name)
    kind = file_.image.tag
    pieces = _parallel_pieces(file_, field) if kind == "PImageData" else _pieces(file_, field)
    return _assembled(file_, pieces)


def _parse(content: bytes, name: str) -> _File:
    """Split off appended data, which need not be XML, and read the rest."""
    begin = content.find(b"<AppendedData")
    appended, raw = b"", False
    if begin >= 0:
        close = content.find(b">", begin)
        mark = content.find(b"_", close)
        if close < 0 or mark < 0:
            raise SourceError(f"{name}: its appended data has no beginning; the file is truncated")
        raw = b"raw" in content[begin:close]
        appended, content = content[mark + 1 :], content[:begin] + b"</VTKFile>"
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
        raise SourceError(f"{name}: is no VTK file: it defines XML entities")
    try:
        root = ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise SourceError(f"{name}: is no VTK image, or truncated: {error}") from error
    kind = root.get("type", "")
    if root.tag != "VTKFile" or kind not in ("ImageData", "PImageData"):
        raise UnsupportedLayoutError(f"{name}: holds {kind or root.tag!r}, and only ImageData and PImageData are read")
    image = root.find(kind)
    order, header = root.get("byte_order", "LittleEndian"), root.get("header_type", "UInt32")
    if image is None or order not in _ORDERS or header not in ("UInt32", "UInt64"):
        raise SourceError(f"{name}: has no image, or byte_order={order!r} and header_type={header!r} make no sense")
    dtype = np.dtype(_ORDERS[order] + _TYPES[header])
    return _File(name, image, _ORDERS[order], dtype, root.get("compressor", ""), appended, raw)


def _extent(file: _File, element: ElementTree.Element, key: str) -> np.ndarray:
    """First and last point along x, y, z: (2, 3)."""
    text = element.get(key, "")
    try:
        extent = np.array([int(one) for one in text.split()], np.int64).reshape(3, 2).T
    except (ValueError, OverflowError) as error:
        raise file.fail(f"{key}={text!r} are not six whole numbers") from error
    if (extent[1] < extent[0]).any() or np.abs(extent).max() >= 2**31:
        raise file.fail(f"{key}={text!r} is no extent of an image")
    return extent


@dataclass(frozen=True)
class _Piece:
    extent: np.ndarray
    of_cells: bool
    values: np.ndarray  # (components, Z, Y, X)


def _pieces(file: _File, field: str | None) -> list[_Piece]:
    found = []
    for piece in file.image.findall("Piece"):
        extent = _extent(file, piece, "Extent")
        array, of_cells = _choose(file, piece, field)
        shape = _shape(extent, of_cells)
        components = array.get("NumberOfComponents", "1")
        if not components.isdigit() or not 1 <= int(components) <= 64:
            raise file.fail(f"array {array.get('Name')!r} has {components} components; 1 to 64 are read")
        values = _values(file, array, math.prod(shape) * int(components))
        found.append(_Piece(extent, of_cells, np.moveaxis(values.reshape(*shape, int(components)), 3, 0)))
    return found


def _parallel_pieces(file: _File, field: str | None) -> list[_Piece]:
    found = []
    pieces = file.image.findall("Piece")
    if len(pieces) > _MOST_PIECES:
        raise file.fail(f"has {len(pieces)} pieces, more than {_MOST_PIECES}")
    for piece in pieces:
        source = os.path.join(os.path.dirname(file.name), piece.get("Source", ""))
        try:
            with open(source, "rb") as opened:
                inner = _parse(opened.read(), source)
        except OSError as error:
            raise file.fail(f"its piece {piece.get('Source')!r} cannot be read: {error}") from error
        if inner.image.tag != "ImageData":
            raise file.fail(f"its piece {piece.get('Source')!r} is no .vti file")
        found += _pieces(inner, field)
    return found


def _shape(extent: np.ndarray, of_cells: bool) -> tuple[int, ...]:
    """Z, Y, X of the values of an extent; what is flat has one layer of cells."""
    points = (extent[1] - extent[0] + 1).tolist()
    return tuple(max(1, one - 1) if of_cells else one for one in reversed(points))


def _choose(file: _File, piece: ElementTree.Element, field: str | None) -> tuple[ElementTree.Element, bool]:
    arrays = []
    for of_cells, tag in ((False, "PointData"), (True, "CellData")):
        group = piece.find(tag)
        for array in group.findall("DataArray") if group is not None else ():
            active = group is not None and array.get("Name") == group.get("Scalars")
            arrays.append((array, of_cells, active))
    for array, of_cells, _ in sorted(arrays, key=lambda one: not one[2]):
        if field is None or array.get("Name") == field:
            return array, of_cells
    names = [array.get("Name") for array, *_ in arrays]
    raise file.fail(f"has no array {field!r}; its arrays are {names}. Give one of them as field=.")


def _values(file: _File, array: ElementTree.Element, count: int) -> np.ndarray:
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


def _binary(file: _File, array: ElementTree.Element, form: str, nbytes: int) -> bytes:
    if form == "appended":
        offset = int(array.get("offset", ""))
        if not 0 <= offset < len(file.appended):
            raise ValueError(f"offset {offset} is none of {len(file.appended)} bytes of appended data; truncated?")
        content = file.appended[offset:]
        reader: Any = _Raw(content) if file.raw else _Base64(content)
    else:
        reader = _Base64((array.text or "").encode("ascii", "replace"))
    if not file.compressor:
        return _plain(reader, file.header, nbytes)
    return _compressed(reader, file.header, file.compressor, nbytes)


class _Raw:
    """Bytes, one group after another."""

    def __init__(self, content: bytes) -> None:
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


def _assembled(file: _File, pieces: list[_Piece]) -> np.ndarray:
    """Put pieces, which may overlap, into the whole extent, which they must fill."""
    whole = _extent(file, file.image, "WholeExtent")
    if not pieces:
        raise file.fail("holds no piece of an image")
    first = pieces[0]
    shape = _shape(whole, first.of_cells)
    same = {(piece.of_cells, piece.values.dtype, len(piece.values)) for piece in pieces}
    if len(same) > 1:
        raise file.fail(
            "its pieces hold arrays of different types or numbers of components, or some of points and some of cells"
        )
    if sum(piece.values[0].size for piece in pieces) < math.prod(shape):
        raise file.fail(f"its pieces hold less than the {' × '.join(map(str, shape))} voxels of the whole extent")
    if len(pieces) == 1 and first.values.shape[1:] == shape:
        return np.ascontiguousarray(first.values)
    values = np.empty((len(first.values), *shape), first.values.dtype)
    there = np.zeros(shape, bool)
    for piece in pieces:
        start = (piece.extent[0] - whole[0])[::-1]
        stop = start + piece.values.shape[1:]
        if (start < 0).any() or (stop > shape).any():
            raise file.fail("a piece lies outside of the whole extent")
        box = tuple(map(slice, start, stop))
        values[(slice(None), *box)] = piece.values
        there[box] = True
    if not there.all():
        raise file.fail("its pieces leave a part of the whole extent empty")
    return values
