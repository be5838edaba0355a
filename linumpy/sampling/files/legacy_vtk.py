"""Read structured points of legacy VTK files (``.vtk``), as text or binary (big-endian).

In: the content of a file and the name of an array. Out: its values, (components, Z, Y, X).
"""

from __future__ import annotations

import math
from urllib.parse import unquote

import numpy as np

from linumpy.errors import SourceError, UnsupportedLayoutError

_NAMES = (
    "char i1, signed_char i1, unsigned_char u1, short i2, unsigned_short u2, int i4, unsigned_int u4, "
    "long i8, unsigned_long u8, vtktypeint64 i8, vtktypeuint64 u8, float f4, double f8"
)
_TYPES = dict(one.split() for one in _NAMES.split(", "))
#: Arrays that have one keyword, and how many components they have.
_COMPONENTS = {"VECTORS": 3, "NORMALS": 3, "TENSORS": 9}


class _Text:
    """Lines and numbers of a file, one after another."""

    def __init__(self, content: bytes, name: str) -> None:
        self.content, self.name, self.position = content, name, 0

    def fail(self, problem: str) -> SourceError:
        return SourceError(f"{self.name}: {problem} (before byte {self.position} of {len(self.content)})")

    def line(self) -> str:
        end = self.content.find(b"\n", self.position)
        end = len(self.content) if end < 0 else end
        line = self.content[self.position : end]
        self.position = min(end + 1, len(self.content))
        return line.decode("latin-1").strip()

    def skip_paragraph(self) -> None:
        """Pass lines up to and with an empty one."""
        while self.line():
            pass

    @property
    def ended(self) -> bool:
        """Whether nothing but white space follows."""
        while self.content[self.position : self.position + 1].isspace():
            self.position += 1
        return self.position == len(self.content)

    def words(self) -> list[str]:
        """Read the words of the next line that is not empty."""
        while not self.ended:
            if words := self.line().split():
                return words
        return []

    def next_word(self) -> bytes:
        """Look at the next word without going on, since binary values may begin like white space."""
        words = self.content[self.position : self.position + 64].split(maxsplit=1)
        return words[0].upper() if words else b""

    def numbers(self, count: int, dtype: np.dtype, binary: bool) -> np.ndarray:
        if binary:
            nbytes = count * dtype.itemsize
            if nbytes > len(self.content) - self.position:
                raise self.fail(f"{nbytes} bytes of values are needed and fewer are left; the file is truncated")
            found = np.frombuffer(self.content, dtype, count, self.position)
            self.position += nbytes
            return found.astype(dtype.newbyteorder("="))
        if 2 * count - 1 > len(self.content) - self.position:
            raise self.fail(f"{count} numbers are needed and the file is too short for them; it is truncated")
        found_: list[str] = []
        while len(found_) < count:
            if not (words := self.words()):
                raise self.fail(f"{count} numbers are needed and {len(found_)} are there; the file is truncated")
            found_ += words
        if len(found_) > count:
            raise self.fail(f"{len(found_)} numbers stand where {count} are needed")
        try:
            return np.array(found_, dtype.newbyteorder("="))
        except (ValueError, OverflowError) as error:
            raise self.fail(str(error)) from error


def read_legacy(content: bytes, name: str, field: str | None = None) -> np.ndarray:
    """Read an array of structured points: that of this name, else the first; see :func:`..vtk.read_vtk`."""
    text = _Text(content, name)
    text.line()
    text.line()
    form = text.line().upper()
    kind = text.words()
    if form not in ("ASCII", "BINARY"):
        raise text.fail(f"its third line says {form!r}, and not ASCII or BINARY")
    if [one.upper() for one in kind] != ["DATASET", "STRUCTURED_POINTS"]:
        raise UnsupportedLayoutError(f"{name}: {' '.join(kind)!r} is not read, only DATASET STRUCTURED_POINTS")
    names: list[str] = []
    dims: list[int] = []
    shape: tuple[int, ...] = ()
    binary = form == "BINARY"
    while words := text.words():
        key = words[0].upper()
        if key == "DIMENSIONS":
            dims = _whole(text, words[1:4], 3)
        elif key in ("POINT_DATA", "CELL_DATA"):
            shape = _shape(text, key, dims, words)
        elif key == "METADATA":
            text.skip_paragraph()
        elif key == "LOOKUP_TABLE" and len(words) == 3:
            text.numbers(4 * _whole(text, words[2:], 1)[0], np.dtype("u1" if binary else "f4"), binary)
        elif key not in ("ORIGIN", "SPACING", "ASPECT_RATIO"):
            found = _arrays(text, words, shape, binary, field, names)
            if found is not None:
                return found
    raise text.fail(f"has no array {field!r}; its arrays are {names}. Give one of them as field=.")


def _whole(text: _Text, words: list[str], count: int) -> list[int]:
    if len(words) != count or not all(word.isdecimal() and len(word) <= 10 and 0 < int(word) < 2**31 for word in words):
        raise text.fail(f"{' '.join(words)!r} are not {count} positive whole numbers")
    return [int(word) for word in words]


def _shape(text: _Text, key: str, dims: list[int], words: list[str]) -> tuple[int, ...]:
    if not dims:
        raise text.fail("values come before DIMENSIONS")
    shape = tuple(max(1, one - 1) if key == "CELL_DATA" else one for one in reversed(dims))
    if _whole(text, words[1:], 1)[0] != math.prod(shape):
        raise text.fail(f"{' '.join(words)!r} does not fit DIMENSIONS, which need {math.prod(shape)}")
    return shape


def _arrays(
    text: _Text, words: list[str], shape: tuple[int, ...], binary: bool, field: str | None, names: list[str]
) -> np.ndarray | None:
    """Pass what a keyword announces; return the array that is wanted if it is among it."""
    key = words[0].upper()
    if key == "FIELD" and len(words) == 3:
        for _ in range(_whole(text, words[2:], 1)[0]):
            head = text.words()
            if head and head[0].upper() == "METADATA":
                text.skip_paragraph()
                head = text.words()
            if len(head) != 4:
                raise text.fail(f"{' '.join(head)!r} does not announce an array of a FIELD")
            components, count = _whole(text, head[1:3], 2)
            values = text.numbers(components * count, _dtype(text, head[3], binary), binary)
            if shape and count == math.prod(shape) and _wanted(head[0], field, names):
                return _shaped(values, shape, components)
        return None
    if key == "COLOR_SCALARS" and len(words) == 3 and shape:
        components = _whole(text, words[2:], 1)[0]
        colors = _colors(text, components * math.prod(shape), binary)
        return _shaped(colors, shape, components) if _wanted(words[1], field, names) else None
    if key not in ("SCALARS", *_COMPONENTS) or len(words) < 3 or not shape:
        raise UnsupportedLayoutError(f"{text.name}: {' '.join(words)[:60]!r} is not read in structured points")
    components = _COMPONENTS.get(key) or _whole(text, words[3:4] or ["1"], 1)[0]
    if key == "SCALARS" and text.next_word() == b"LOOKUP_TABLE":
        text.words()
    values = text.numbers(components * math.prod(shape), _dtype(text, words[2], binary), binary)
    return _shaped(values, shape, components) if _wanted(words[1], field, names) else None


def _colors(text: _Text, count: int, binary: bool) -> np.ndarray:
    """Read bytes, which VTK writes as colours: in text as parts of 255."""
    if binary:
        return text.numbers(count, np.dtype("u1"), binary)
    parts = text.numbers(count, np.dtype("f8"), binary)
    if not ((parts >= 0) & (parts <= 1)).all():
        raise text.fail("COLOR_SCALARS in text are numbers from 0 to 1")
    return np.rint(parts * 255).astype("u1")


def _dtype(text: _Text, word: str, binary: bool) -> np.dtype:
    if word.lower() not in _TYPES:
        raise UnsupportedLayoutError(f"{text.name}: values of type {word!r} are not read, only {list(_TYPES)}")
    return np.dtype((">" if binary else "=") + _TYPES[word.lower()])


def _wanted(name: str, field: str | None, names: list[str]) -> bool:
    """Say whether an array is wanted; VTK writes spaces and other special characters of names as %20 and so on."""
    names.append(unquote(name))
    return field is None or field in (name, names[-1])


def _shaped(values: np.ndarray, shape: tuple[int, ...], components: int) -> np.ndarray:
    return np.ascontiguousarray(np.moveaxis(values.reshape(*shape, components), 3, 0))
