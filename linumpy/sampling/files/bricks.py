"""Read bricks of cells (``.bricks``), grids of vertices (``.grids``) and their values (``.scalar``).

In: paths. Out: frozen records of NumPy arrays. All numbers in the files are little-endian: int32, values float32.
Errors: :class:`~linumpy.errors.SourceError`, which names the file and the record.

A record is a header of seven integers and an id for each value; an id is the index of a value in the file of values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from linumpy.sampling.files.binary import Cursor, opened

_HEADER_INTS = 7
#: Largest level: cells of a coarser one would be wider than float32 can count in cells of the finest level.
_MAX_LEVEL = 24


@dataclass(frozen=True)
class Blocks:
    """Blocks of values on regular grids of several levels; level 0 is the finest."""

    #: Lower corner (x, y, z) of each block; of a brick in cells of the finest level, of a grid in cells of its own
    #: level: (n, 3) int64.
    lower: np.ndarray
    level: np.ndarray  # level of each block: a cell is 2^level cells of the finest level wide: (n,) int64
    size: np.ndarray  # number of values along x, y, z: cells of a brick, vertices of a grid: (n, 3) int64
    offset: np.ndarray  # index of the first value of each block in `values`: (n,) int64
    values: np.ndarray  # values of all blocks, x fastest; NaN for vertices of grids without a value: (total,) float32


class _Record(NamedTuple):
    """A brick or a grid in a file; attributes as of :class:`Blocks`."""

    size: list[int]
    lower: list[int]
    level: int
    ids: np.ndarray


class _HeaderLayout(NamedTuple):
    """Where the fields of a header are, and how many more values than the size in the header a record has per axis."""

    size: slice
    lower: slice
    level: int
    extra: int


_BRICK = _HeaderLayout(slice(0, 3), slice(3, 6), 6, 0)
_GRID = _HeaderLayout(slice(4, 7), slice(0, 3), 3, 1)


def read_scalars(path: str | os.PathLike[str]) -> np.ndarray:
    """Read the values, (n,) float32; the id of a value is its index."""
    with opened(path) as cursor:
        if cursor.size % 4:
            raise cursor.error(f"has {cursor.size} bytes, which are no whole number of float32 values")
        return cursor.array("<f4", cursor.size // 4, "values")


def read_bricks(path: str | os.PathLike[str], scalars: np.ndarray) -> Blocks:
    """Read bricks of cells: size, lower, level and the ids of all cells. Each id must have a value."""
    with opened(path) as cursor:
        records = list(_records(cursor, _BRICK))
        if not records:
            raise cursor.error("holds no brick")
        ids = np.concatenate([record.ids for record in records])
        wrong = np.flatnonzero((ids < 0) | (ids >= len(scalars)))
        if len(wrong):
            number = np.searchsorted(np.cumsum([len(record.ids) for record in records]), wrong[0], side="right")
            raise cursor.error(f"brick {number} has cell id {ids[wrong[0]]}, but scalar= holds {len(scalars)} values")
    return _blocks(records, scalars[ids])


def read_grids(path: str | os.PathLike[str], scalars: np.ndarray) -> Blocks:
    """Read grids of vertices: lower, level, cells and the ids of all vertices. An id without a value becomes NaN."""
    with opened(path) as cursor:
        records = list(_records(cursor, _GRID))
    ids = np.concatenate([np.zeros(0, np.int32), *(record.ids for record in records)])
    valid = (ids >= 0) & (ids < len(scalars))
    values = np.full(len(ids), np.nan, np.float32)
    values[valid] = scalars[ids[valid]]
    return _blocks(records, values)


def _records(cursor: Cursor, layout: _HeaderLayout) -> Iterator[_Record]:
    """Yield the records of a file, checked but for their ids."""
    if cursor.size % 4:
        raise cursor.error(f"has {cursor.size} bytes, which are no whole number of int32")
    content = cursor.array("<i4", cursor.size // 4, "records")
    start = number = 0
    while start < len(content):
        head = content[start : start + _HEADER_INTS].tolist()
        if len(head) < _HEADER_INTS:
            raise cursor.error(f"ends inside the header of record {number}; it is truncated")
        size, level = head[layout.size], head[layout.level]
        shape = [n + layout.extra for n in size]
        if min(size) < 1 or not 0 <= level <= _MAX_LEVEL:
            raise cursor.error(
                f"record {number} has size {size} and level {level}; sizes are 1 or more and levels 0 to "
                f"{_MAX_LEVEL}, so the file is damaged or not of this format"
            )
        first_id, start = start + _HEADER_INTS, start + _HEADER_INTS + math.prod(shape)
        if start > len(content):
            raise cursor.error(
                f"record {number} has {math.prod(shape)} ids, of which only {len(content) - first_id} are there; "
                "the file is truncated or not of this format"
            )
        yield _Record(shape, head[layout.lower], level, content[first_id:start])
        number += 1


def _blocks(records: list[_Record], values: np.ndarray) -> Blocks:
    size = np.array([record.size for record in records], np.int64).reshape(-1, 3)
    lower = np.array([record.lower for record in records], np.int64).reshape(-1, 3)
    level = np.array([record.level for record in records], np.int64)
    return Blocks(lower, level, size, np.cumsum(size.prod(1)) - size.prod(1), values)
