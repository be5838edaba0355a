"""Read images of VTK: ``.vti``, ``.pvti`` and legacy ``.vtk`` files of structured points.

In: a path and the name of an array. Out: its values, (components, Z, Y, X). Images of several pieces are put together
one piece after another, after their extents were checked. An array of points has a value for each point, one of cells
for each cell; both are the voxels of the image.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.files.legacy_vtk import read_legacy
from linumpy.sampling.files.vtk_values import XmlFile, read_values

_ORDERS = {"LittleEndian": "<", "BigEndian": ">"}
_HEADERS = {"UInt32": "u4", "UInt64": "u8"}
_MOST_PIECES = 2**16


def read_vtk(path: str | os.PathLike[str], field: str | None = None) -> np.ndarray:
    """Read an array of an image: that of this name, else the active scalars, else the first.

    Returns
    -------
    ndarray
        Shape (components, Z, Y, X), in native byte order.

    Raises
    ------
    SourceError
        The file is truncated or damaged, or has no such array; its pieces leave a part of the image empty, or hold one
        twice; a piece of a ``.pvti`` file is no regular file below the folder of that.
    UnsupportedLayoutError
        Another kind of data set, compression or type.
    """
    name = os.fspath(path)
    with open(path, "rb") as file:
        content = file.read()
    if content[:20].lower().startswith(b"# vtk datafile"):
        return read_legacy(content, name, field)
    parsed = _parse(content, name)
    extents = _piece_extents(parsed, _extent(parsed, parsed.image, "WholeExtent"))
    if parsed.image.tag == "PImageData":
        return _assembled(parsed, len(extents), _parallel_pieces(parsed, extents, field))
    return _assembled(parsed, len(extents), _pieces(parsed, extents, field))


def _parse(content: bytes, name: str) -> XmlFile:
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
    if image is None or order not in _ORDERS or header not in _HEADERS:
        raise SourceError(f"{name}: has no image, or byte_order={order!r} and header_type={header!r} make no sense")
    dtype = np.dtype(_ORDERS[order] + _HEADERS[header])
    return XmlFile(name, image, _ORDERS[order], dtype, root.get("compressor", ""), appended, raw)


def _extent(file: XmlFile, element: ElementTree.Element, key: str) -> np.ndarray:
    """First and last point along x, y, z: (2, 3)."""
    text = element.get(key, "")
    try:
        extent = np.array([int(one) for one in text.split()], np.int64).reshape(3, 2).T
    except (ValueError, OverflowError) as error:
        raise file.fail(f"{key}={text!r} are not six whole numbers") from error
    if (extent[1] < extent[0]).any() or np.abs(extent).max() >= 2**31:
        raise file.fail(f"{key}={text!r} is no extent of an image")
    return extent


def _piece_extents(file: XmlFile, whole: np.ndarray) -> list[np.ndarray]:
    """Extents of all pieces, which must lie inside of the whole one, reach its size together, and hold nothing twice.

    Neighbours share their outer points and, where pieces have ghost levels, as many cells on either side. So what a
    piece has beyond twice these levels is its own.
    """
    pieces = file.image.findall("Piece")
    if not 0 < len(pieces) <= _MOST_PIECES:
        raise file.fail(f"has {len(pieces)} pieces of an image; 1 to {_MOST_PIECES} are read")
    ghosts = file.image.get("GhostLevel", "0")
    if not _is_number(ghosts, 0, 2**31):
        raise file.fail(f"GhostLevel={ghosts!r} is no number of cells")
    points, own, extents = 0, 0, []
    for piece in pieces:
        extent = _extent(file, piece, "Extent")
        if (extent[0] < whole[0]).any() or (extent[1] > whole[1]).any():
            raise file.fail(
                f"its piece of extent {_text(extent)} lies outside of {_text(whole)}, which it is a part of"
            )
        own += math.prod(max(1, n - 2 * int(ghosts)) for n in (extent[1] - extent[0]).tolist())
        points += math.prod(_shape(extent, False))
        extents.append(extent)
    shape = _shape(whole, False)
    if points < math.prod(shape):
        raise file.fail(f"its pieces hold less than the {' × '.join(map(str, shape))} voxels of {_text(whole)}")
    if own > math.prod(shape):
        raise file.fail(
            f"its {len(pieces)} pieces overlap: they have {own} cells of their own, where {_text(whole)} has "
            f"{math.prod(shape)} points. Pieces may share their outer points, and GhostLevel cells more"
        )
    return extents


@dataclass(frozen=True)
class _Piece:
    extent: np.ndarray
    of_cells: bool
    values: np.ndarray  # (components, Z, Y, X)


def _pieces(file: XmlFile, extents: list[np.ndarray], field: str | None) -> Iterator[_Piece]:
    """Read pieces, one after another, so that one at a time is in memory."""
    for piece, extent in zip(file.image.findall("Piece"), extents, strict=True):
        array, of_cells = _choose(file, piece, field)
        shape = _shape(extent, of_cells)
        components = array.get("NumberOfComponents", "1")
        if not _is_number(components, 1, 64):
            raise file.fail(f"array {array.get('Name')!r} has {components} components; 1 to 64 are read")
        values = read_values(file, array, math.prod(shape) * int(components))
        yield _Piece(extent, of_cells, np.moveaxis(values.reshape(*shape, int(components)), 3, 0))


def _parallel_pieces(file: XmlFile, extents: list[np.ndarray], field: str | None) -> Iterator[_Piece]:
    for piece, extent in zip(file.image.findall("Piece"), extents, strict=True):
        source = piece.get("Source", "")
        inner = _parse(_content_below(file, source), os.path.join(os.path.dirname(file.name), source))
        if inner.image.tag != "ImageData":
            raise file.fail(f"its piece {source!r} is no .vti file")
        yield from _pieces(inner, _piece_extents(inner, extent), field)


def _content_below(file: XmlFile, source: str) -> bytes:
    """Read a piece: a regular file below the folder of its index, once links are resolved."""
    folder = os.path.realpath(os.path.dirname(file.name))
    path = os.path.realpath(os.path.join(folder, source))
    if os.path.commonpath([folder, path]) != folder:
        raise file.fail(f"its piece {source!r} lies outside of the folder of this file, and is not read")
    try:
        with open(path, "rb", opener=_open_regular) as opened:
            return opened.read()
    except OSError as error:
        raise file.fail(f"its piece {source!r} cannot be read: {error}") from error


def _open_regular(path: str, flags: int) -> int:
    """Open a file without waiting, as a FIFO without a writer would make us."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no regular file")


def _text(extent: np.ndarray) -> str:
    return repr(" ".join(map(str, extent.T.ravel())))


def _is_number(text: str, low: int, high: int) -> bool:
    return text.isdecimal() and len(text) <= 10 and low <= int(text) <= high


def _shape(extent: np.ndarray, of_cells: bool) -> tuple[int, ...]:
    """Z, Y, X of the values of an extent; what is flat has one layer of cells."""
    points = (extent[1] - extent[0] + 1).tolist()
    return tuple(max(1, one - 1) if of_cells else one for one in reversed(points))


def _choose(file: XmlFile, piece: ElementTree.Element, field: str | None) -> tuple[ElementTree.Element, bool]:
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


def _assembled(file: XmlFile, count: int, pieces: Iterator[_Piece]) -> np.ndarray:
    """Put pieces, which may overlap, into the whole extent, which they must fill."""
    whole = _extent(file, file.image, "WholeExtent")
    first = next(pieces)
    shape = _shape(whole, first.of_cells)
    if count == 1 and first.values.shape[1:] == shape:
        return np.ascontiguousarray(first.values)
    values = np.empty((len(first.values), *shape), first.values.dtype)
    there = np.zeros(shape, bool)
    for piece in itertools.chain([first], pieces):
        if (piece.of_cells, piece.values.dtype, len(piece.values)) != (first.of_cells, values.dtype, len(values)):
            raise file.fail(
                "its pieces hold arrays of different types or numbers of components, or some of points and some of "
                "cells"
            )
        start = (piece.extent[0] - whole[0])[::-1]
        stop = start + piece.values.shape[1:]
        if (stop > shape).any():
            raise file.fail("a piece has a layer of cells behind the last one of the whole extent")
        box = tuple(map(slice, start, stop))
        values[(slice(None), *box)] = piece.values
        there[box] = True
    if not there.all():
        raise file.fail("its pieces leave a part of the whole extent empty")
    return values
