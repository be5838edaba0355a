"""Tables for the scatter kernel: which bytes of a buffer go where in which output.

In: boxes of chunks (:class:`~linumpy.plan.read.boxes.Boxes`). Out: :class:`ScatterTable`, as few axes and as wide units
as the bytes allow. Boxes of many outputs share a table; what an output has of its own stands in a header.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.boxes import Boxes

#: Widest unit that one thread moves at once.
MAX_UNIT = 16
#: Words of a header beside its strides: the fill value.
FILL_WORDS = 2
#: Words of a row beside its extents: source unit, target address, header.
ROW_WORDS = 3


@dataclass(frozen=True, eq=False)
class ScatterTable:
    """Boxes to copy, counted in bytes.

    Attributes
    ----------
    source_itemsize, target_itemsize : int
        Bytes of an element as stored, and in the outputs.
    source_strides, target_strides : numpy.ndarray of int64, (headers, axes)
        Bytes between neighbours along each axis.
    fill : numpy.ndarray of uint8, (headers, 16)
        Fill value of each output, repeated.
    source : numpy.ndarray of int64, (n,)
        First byte of each box in the buffer; -1 for a box of fill values.
    target : numpy.ndarray of int64, (n,)
        Address of its first element in its output.
    header : numpy.ndarray of int64, (n,)
        Which header it has.
    extent : numpy.ndarray of int64, (n, axes)
        Elements along each axis.
    widen : bool
        Whether bytes arrive as they are stored, so that neighbouring elements may be moved as one unit.
    """

    source_itemsize: int
    target_itemsize: int
    source_strides: np.ndarray
    target_strides: np.ndarray
    fill: np.ndarray
    source: np.ndarray
    target: np.ndarray
    header: np.ndarray
    extent: np.ndarray
    widen: bool

    def __len__(self) -> int:
        return len(self.source)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return int(self.extent.shape[1])

    @property
    def unit(self) -> int:
        """Bytes of what is moved as one: a stored element, or the widest unit that fits all boxes."""
        itemsize = self.source_itemsize
        source, target = self.source_strides, self.target_strides
        if not self.widen or (source[:, -1] != itemsize).any() or (target[:, -1] != itemsize).any():
            return itemsize
        stored = self.source[self.source >= 0] if (self.source < 0).any() else self.source
        run = self.extent[:, -1] * itemsize
        return max(itemsize, _divisor(MAX_UNIT, source[:, :-1], target[:, :-1], stored, self.target, run))

    def words(self, unit: int) -> tuple[np.ndarray, int, int]:
        """Lay out the table as the kernel reads it.

        Parameters
        ----------
        unit : int
            As :attr:`unit`, or narrower.

        Returns
        -------
        words : numpy.ndarray of int64
            Headers (source strides, target strides, both in units, fill value), then rows (first unit in the buffer or
            -1, address in the output, header, extents in units).
        first_row : int
            Word where the rows begin.
        largest : int
            Units of the largest box.
        """
        target_unit = unit if self.widen else self.target_itemsize
        headers = np.empty((len(self.fill), 2 * self.rank + FILL_WORDS), np.int64)
        headers[:, : self.rank] = self.source_strides // unit
        headers[:, self.rank : 2 * self.rank] = self.target_strides // target_unit
        headers[:, 2 * self.rank :] = self.fill.view(np.int64)
        rows = np.empty((len(self), ROW_WORDS + self.rank), np.int64)
        rows[:, 0] = np.where(self.source < 0, -1, self.source // unit)
        rows[:, 1], rows[:, 2], rows[:, 3:] = self.target, self.header, self.extent
        if unit > self.source_itemsize:
            rows[:, -1] //= unit // self.source_itemsize
            headers[:, self.rank - 1] = headers[:, 2 * self.rank - 1] = 1  # the neighbour of a unit is the next unit
        largest = int(rows[:, 3:].prod(axis=1).max()) if len(rows) else 0
        return np.concatenate([headers.reshape(-1), rows.reshape(-1)]), headers.size, largest


def table_nbytes(rank: int, rows: int) -> int:
    """Bytes that the words of a table take at most, with a header for each row."""
    return 8 * rows * (2 * rank + FILL_WORDS + ROW_WORDS + rank)


def joined(tables: list[ScatterTable]) -> ScatterTable:
    """Make one table of several whose elements have the same types."""
    if len(tables) == 1:
        return tables[0]
    rank = max(table.rank for table in tables)
    first = np.cumsum([0, *(len(table.fill) for table in tables)])

    def strides(name: str) -> np.ndarray:
        return np.concatenate([_padded(getattr(table, name), rank, 0) for table in tables])

    return ScatterTable(
        tables[0].source_itemsize,
        tables[0].target_itemsize,
        strides("source_strides"),
        strides("target_strides"),
        np.concatenate([table.fill for table in tables]),
        np.concatenate([table.source for table in tables]),
        np.concatenate([table.target for table in tables]),
        np.concatenate([table.header + begin for table, begin in zip(tables, first, strict=False)]),
        np.concatenate([_padded(table.extent, rank, 1) for table in tables]),
        tables[0].widen,
    )


def _padded(columns: np.ndarray, rank: int, value: int) -> np.ndarray:
    """Put axes of one element in front."""
    return np.pad(columns, ((0, 0), (rank - columns.shape[1], 0)), constant_values=value)


@dataclass(frozen=True, eq=False)
class Geometry:
    """What the tables of boxes have in common, worked out once.

    Attributes
    ----------
    source_strides : numpy.ndarray of int64, (axes,)
        Bytes between neighbours in a chunk, along each group of axes that is walked as one.
    target_strides : numpy.ndarray of int64, (regions, axes)
        The same in each region's output.
    extent : numpy.ndarray of int64, (n, axes)
        Elements of each box along them.
    """

    source_strides: np.ndarray
    target_strides: np.ndarray
    extent: np.ndarray


def geometry(layout: ArrayLayout, boxes: Boxes, target_strides: np.ndarray) -> Geometry:
    """Find out which axes of all boxes can be walked as one: neighbours both as stored and in every output.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    boxes : Boxes
        All of them.
    target_strides : numpy.ndarray of int64, (regions, rank)
        Bytes between neighbours in each output.
    """
    source = layout.chunk_byte_strides
    groups: list[list[int]] = []
    for axis in range(layout.rank):
        if not (boxes.extent[:, axis] > 1).any():
            continue  # an axis along which no box has more than one element takes no part
        if groups and _joins(groups[-1][-1], axis, source, target_strides, boxes.extent):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    if not groups:  # a kernel has at least one axis
        item = np.full(1, layout.dtype.itemsize, np.int64)
        return Geometry(item, np.tile(item, (len(target_strides), 1)), np.ones((len(boxes), 1), np.int64))
    inner = [group[-1] for group in groups]
    if all(len(group) == 1 for group in groups):
        extent = boxes.extent[:, inner]
    else:
        extent = np.stack([boxes.extent[:, group].prod(axis=1) for group in groups], axis=1)
    return Geometry(source[inner], target_strides[:, inner], extent)


def _joins(outer: int, inner: int, source: np.ndarray, target: np.ndarray, extent: np.ndarray) -> bool:
    count = extent[0, inner]
    return bool(
        source[outer] == count * source[inner]
        and (extent[:, inner] == count).all()
        and (target[:, outer] == count * target[:, inner]).all()
    )


def _divisor(widest: int, *numbers: np.ndarray) -> int:
    """Find the widest power of two, at most `widest`, that divides all these byte counts."""
    bits = widest
    for array in numbers:
        bits |= int(np.bitwise_or.reduce(array, axis=None)) if array.size else 0
    return bits & -bits
