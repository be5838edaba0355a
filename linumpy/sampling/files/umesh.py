"""Read unstructured meshes of the umesh format (``.umesh``).

In: a path. Out: a frozen record of NumPy arrays, all counts and indices checked. The formats with magic number
0x234235566 (one value for each vertex) and 0x234235567 (sets of values with names) are read; both are little-endian. A
section is an array of the file, as (the byte where its records begin, number of records).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.files.binary import Cursor, opened

_ONE_VALUE, _NAMED_VALUES, _WITH_GRIDS = 0x234235566, 0x234235567, 0x234235568
#: Kinds of elements in the order of the file, and their numbers of vertices. Triangles and quads are skipped.
_ELEMENTS = {"triangles": 3, "quads": 4, "tets": 4, "pyramids": 5, "wedges": 6, "hexes": 8}
#: dtypes that the length of a name may have; files do not say which they use.
_WIDTHS = ("<u8", "<u4")


@dataclass(frozen=True)
class Mesh:
    """An unstructured mesh."""

    vertices: np.ndarray  # x, y, z: (n, 3) float32
    values: np.ndarray  # the first set of values of the vertices: (n,) float32, or (0,) where the file has none
    tags: np.ndarray  # for each vertex the index of its value in another file: (n,) uint64, or (0,)
    #: Vertices of elements, in VTK's order: (m, 4), (m, 5), (m, 6), (m, 8) int32.
    tets: np.ndarray
    pyramids: np.ndarray
    wedges: np.ndarray
    hexes: np.ndarray


def read_umesh(path: str | os.PathLike[str]) -> Mesh:
    """Read a mesh."""
    with opened(path) as cursor:
        magic = cursor.number("<u8", "the magic number")
        if magic == _WITH_GRIDS:
            raise UnsupportedLayoutError(f"{cursor.name}: umesh files with grids inside ({magic:#x}) are not read")
        if magic not in (_ONE_VALUE, _NAMED_VALUES):
            raise cursor.error(f"is no umesh file: it begins with {magic:#x} instead of {_ONE_VALUE:#x}")
        if magic == _NAMED_VALUES:
            return _read(cursor, _named_values(cursor))
        sections = {"vertices": _skip(cursor, "vertices", 12), "values": _skip(cursor, "values", 4)}
        return _read(cursor, _with_elements(cursor, sections))


def _named_values(cursor: Cursor) -> dict[str, tuple[int, int]]:
    """Find the sections of a file with named values: try each dtype of the lengths of names; one must fit."""
    begin, readings, problems = cursor.position, [], []
    for width in _WIDTHS:
        cursor.seek(begin, "the mesh")
        try:
            readings.append(_with_names(cursor, width))
        except SourceError as error:
            problems.append(error)
    if not readings:
        raise problems[0]
    if len(readings) == 2 and readings[0] != readings[1]:
        raise cursor.error("names of values may have lengths of 4 or of 8 bytes: the file can be read in both ways")
    return readings[0]


def _with_names(cursor: Cursor, width: str) -> dict[str, tuple[int, int]]:
    sections = {"vertices": _skip(cursor, "vertices", 12)}
    for number in range(cursor.count("<u8", 12, "named values")):
        cursor.text("the name of values", width)
        section = _skip(cursor, "values", 4)
        if number == 0:
            sections["values"] = section
    if others := cursor.number("<u8", "the number of values of elements"):
        raise cursor.error(f"has {others} values for each element, which are not read; only values of vertices are")
    return _with_elements(cursor, sections)


def _with_elements(cursor: Cursor, sections: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Add the sections of elements and tags, with which a file ends."""
    for name, corners in _ELEMENTS.items():
        sections[name] = _skip(cursor, name, 4 * corners)
    if cursor.left:
        sections["tags"] = _skip(cursor, "vertex tags", 8)
    if cursor.left:
        raise cursor.error(f"has {cursor.left} bytes more than its counts say; it is damaged or not of this format")
    return sections


def _skip(cursor: Cursor, section: str, itemsize: int) -> tuple[int, int]:
    """Skip the records of a section, and return the section."""
    count = cursor.count("<u8", itemsize, section)
    begin = cursor.position
    cursor.seek(begin + count * itemsize, section)
    return begin, count


def _read(cursor: Cursor, sections: dict[str, tuple[int, int]]) -> Mesh:
    def values(name: str, dtype: str, along: int = 1) -> np.ndarray:
        begin, count = sections.get(name, (0, 0))
        cursor.seek(begin, name)
        return cursor.array(dtype, count * along, name)

    vertices = values("vertices", "<f4", 3).reshape(-1, 3)
    elements = {}
    for name, corners in list(_ELEMENTS.items())[2:]:
        elements[name] = values(name, "<i4", corners).reshape(-1, corners)
        indices = elements[name]
        if indices.size and (indices.min() < 0 or indices.max() >= len(vertices)):
            number = int(np.flatnonzero(((indices < 0) | (indices >= len(vertices))).any(1))[0])
            raise cursor.error(
                f"number {number} of its {name} has vertices {indices[number].tolist()}; there are {len(vertices)}"
            )
    mesh = Mesh(vertices, values("values", "<f4"), values("tags", "<u8"), **elements)
    for name, count in (("values", len(mesh.values)), ("vertex tags", len(mesh.tags))):
        if count not in (0, len(vertices)):
            raise cursor.error(f"has {len(vertices)} vertices and {count} {name}")
    return mesh
