"""Read bricks of cells (``.bricks``), grids of vertices (``.grids``) and their values (``.scalar``).

In: paths. Out: frozen records of NumPy arrays. All numbers in the files are little-endian: int32, values float32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linumpy.sampling.files.binary import Cursor, opened

_HEAD = 7  # numbers of a record before its ids
#: Cells of a coarser level would be larger than float32 can measure in cells of the finest level.
_COARSEST = 24


@dataclass(frozen=True)
class Blocks:
    """Blocks of values on regular grids of several levels; level 0 is the finest.

    Attributes
    ----------
    lower : (n, 3) int64
        Lower corner (x, y, z) of each block, in the file's units.
    level : (n,) int64
        The width of a cell is 2^level cells of the finest level.
    size : (n, 3) int64
        Values along x, y, z.
    offset : (n,) int64
        Index of the first value of each block in `values`.
    values : (total,) float32
        Values of all blocks, x fastest; NaN for vertices of grids without a value.
    """

    lower: np.ndarray
    level: np.ndarray
    size: np.ndarray
    offset: np.ndarray
    values: np.ndarray


def read_scalars(path: str | os.PathLike[str]) -> np.ndarray:
    """Read values by their ids: (n,) float32."""
    with opened(path) as cursor:
        if cursor.size % 4:
            raise cursor.fail(f"has {cursor.size} bytes, which are no whole number of float32 values")
        return cursor.array("<f4", cursor.size // 4, "values")


def read_bricks(path: str | os.PathLike[str], scalars: np.ndarray) -> Blocks:
    """Read bricks of cells: size, lower, level and the ids of all cells. Each id must have a value."""
    with opened(path) as cursor:
        records = list(_records(cursor, slice(0, 3), slice(3, 6), 6, extra=0))
        if not records:
            raise cursor.fail("holds no brick")
        values = np.empty(sum(len(ids) for *_, ids in records), np.float32)
        start = 0
        for number, (*_, ids) in enumerate(records):
            if ids.min() < 0 or ids.max() >= len(scalars):
                wrong = ids[(ids < 0) | (ids >= len(scalars))][0]
                raise cursor.fail(f"brick {number} has cell id {wrong}, but scalar= holds {len(scalars)} values")
            np.take(scalars, ids, out=values[start : start + len(ids)])
            start += len(ids)
    return _blocks(records, values)


def read_grids(path: str | os.PathLike[str], scalars: np.ndarray) -> Blocks:
    """Read grids of vertices: lower, level, cells and the ids of all vertices. An id without a value becomes NaN."""
    with opened(path) as cursor:
        records = list(_records(cursor, slice(4, 7), slice(0, 3), 3, extra=1))
        values = np.full(sum(len(ids) for *_, ids in records), np.nan, np.float32)
        start = 0
        for *_, ids in records:
            valid = (ids >= 0) & (ids < len(scalars))
            values[start : start + len(ids)][valid] = scalars[ids[valid]]
            start += len(ids)
    return _blocks(records, values)


def _records(
    cursor: Cursor, size: slice, lower: slice, level: int, extra: int
) -> Iterator[tuple[list[int], list[int], int, np.ndarray]]:
    """Yield the checked records of a file: size, lower, level, ids."""
    if cursor.size % 4:
        raise cursor.fail(f"has {cursor.size} bytes, which are no whole number of int32")
    content = cursor.array("<i4", cursor.size // 4, "records")
    start = number = 0
    while start < len(content):
        head = content[start : start + _HEAD].tolist()
        if len(head) < _HEAD:
            raise cursor.fail(f"ends inside the header of record {number}; it is truncated")
        shape = [n + extra for n in head[size]]
        if min(head[size]) < 1 or not 0 <= head[level] <= _COARSEST:
            raise cursor.fail(
                f"record {number} has size {head[size]} and level {head[level]}; sizes are 1 or more and levels 0 to "
                f"{_COARSEST}, so the file is damaged or not of this format"
            )
        ids, start = start + _HEAD, start + _HEAD + math.prod(shape)
        if start > len(content):
            raise cursor.fail(
                f"record {number} has {math.prod(shape)} ids, of which only {len(content) - ids} are there; "
                "the file is truncated or not of this format"
            )
        yield shape, head[lower], head[level], content[ids:start]
        number += 1


def _blocks(records: list[tuple[list[int], list[int], int, np.ndarray]], values: np.ndarray) -> Blocks:
    size = np.array([record[0] for record in records], np.int64).reshape(-1, 3)
    lower = np.array([record[1] for record in records], np.int64).reshape(-1, 3)
    level = np.array([record[2] for record in records], np.int64)
    return Blocks(lower, level, size, np.cumsum(size.prod(1)) - size.prod(1), values)
