"""The extents of the pieces of a VTK file of the XML kind, checked before the ``vtk`` package reads it.

In: a path. Out: :class:`Header`. Errors: see :func:`read_header` and :meth:`Header.check_filled`. VTK opens any file
that a ``.pvti`` file names, and leaves voxels outside all pieces uninitialised: this module refuses such files.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import NoReturn
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import ArrayLike

from linumpy.errors import SourceError, UnsupportedLayoutError

_KINDS = ("ImageData", "RectilinearGrid", "StructuredGrid")


@dataclass(frozen=True)
class Header:
    """The pieces of a file."""

    name: str  # path of the file, for errors
    extent: np.ndarray  # first and last point of the image along x, y, z: (2, 3) int64
    #: Extents of the pieces, and the headers of their files where the pieces are files.
    pieces: list[tuple[np.ndarray, Header | None]]

    def check_filled(self, of_cells: bool, box: np.ndarray | None = None) -> None:
        """Refuse pieces that do not cover the image or, of a piece in a file, `box`: ``SourceError``."""
        low, high = self.extent if box is None else box
        covered = np.zeros(shape_of(low, high, of_cells), bool)
        for extent, inner in self.pieces:
            first, last = np.maximum(extent[0], low), np.minimum(extent[1], high)
            if (first <= last).all():
                start = (first - low)[::-1]
                covered[tuple(map(slice, start, start + shape_of(first, last, of_cells)))] = True
            if inner is not None:
                inner.check_filled(of_cells, extent)
        if not covered.all():
            raise SourceError(f"{self.name}: its pieces leave a part of {_text(np.stack([low, high]))} empty")


def shape_of(first: ArrayLike, last: ArrayLike, of_cells: bool) -> tuple[int, ...]:
    """Return the numbers of values (Z, Y, X) between two points (x, y, z); a flat box has a layer of cells."""
    points = (np.asarray(last) - np.asarray(first) + 1).tolist()
    return tuple(max(1, n - 1) if of_cells else n for n in reversed(points))


def read_header(path: str) -> Header:
    """Read the extents of a file and of the files of its pieces."""
    return _header(path, _read_image(path))


def _header(path: str, image: Element) -> Header:
    """Read the extents of a file from its parsed text."""
    whole = _extent(path, image, "WholeExtent")
    pieces: list[tuple[np.ndarray, Header | None]] = []
    for piece in image.findall("Piece"):
        extent = _extent(path, piece, "Extent")
        if (extent[0] < whole[0]).any() or (extent[1] > whole[1]).any():
            raise SourceError(f"{path}: its piece of extent {_text(extent)} lies outside of {_text(whole)}")
        pieces.append((extent, _piece_header(path, piece) if image.tag.startswith("P") else None))
    return Header(path, whole, pieces)


def _read_image(path: str) -> Element:
    """Parse a file without its appended data, which is no XML."""
    with open(path, "rb", opener=_open_regular) as file:
        content = file.read()
    head, separator, _ = content.partition(b"<AppendedData")
    try:
        root = ElementTree.fromstring(head + b"</VTKFile>" if separator else content)
    except ElementTree.ParseError as error:
        raise SourceError(f"{path}: is no VTK image, or truncated: {error}") from error
    kind = root.get("type", root.tag)
    if kind.removeprefix("P") not in _KINDS:
        raise UnsupportedLayoutError(f"{path}: holds {kind!r}, and only {', '.join(_KINDS)} are read")
    image = root.find(kind)
    if image is None:
        raise SourceError(f"{path}: has no image; the file is truncated or damaged")
    return image


def _extent(name: str, element: Element, key: str) -> np.ndarray:
    """Return the first and last point along x, y, z: (2, 3)."""
    text = element.get(key, "")
    try:
        extent = np.array([int(number) for number in text.split()], np.int64).reshape(3, 2).T
    except (ValueError, OverflowError) as error:
        raise SourceError(f"{name}: {key}={text!r} are not six whole numbers") from error
    if (extent[1] < extent[0]).any() or np.abs(extent).max() >= 2**31:
        raise SourceError(f"{name}: {key}={text!r} is no extent of an image")
    return extent


def _piece_header(index: str, piece: Element) -> Header:
    """Read the header of a piece: a regular file below the folder of the `index` that names it, links resolved."""
    source, folder = piece.get("Source", ""), os.path.realpath(os.path.dirname(index))
    path = os.path.realpath(os.path.join(folder, source))
    if os.path.commonpath([folder, path]) != folder:
        _refuse_piece(index, source, "lies outside of the folder of this file, and is not read")
    try:
        image = _read_image(path)
    except OSError as error:
        raise SourceError(f"{index}: its piece {source!r} cannot be read: {error}") from error
    if image.tag.startswith("P"):
        _refuse_piece(index, source, "has pieces in other files, and is not read")
    return _header(path, image)


def _refuse_piece(index: str, source: str, problem: str) -> NoReturn:
    raise SourceError(f"{index}: its piece {source!r} {problem}")


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file; a FIFO is refused without waiting for its writer."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no FIFOs
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no regular file")


def _text(extent: np.ndarray) -> str:
    return repr(" ".join(map(str, extent.T.ravel())))
