"""Tables for the scatter kernel: which bytes of a buffer go where in the result.

In: pieces and their places in a buffer. Out: :class:`ScatterTable`, as few axes and as wide units as the bytes allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.pieces import Pieces, c_strides
from linumpy.plan.region import Region

#: Widest unit that one thread moves at once.
MAX_UNIT = 16


@dataclass(frozen=True, eq=False)
class ScatterTable:
    """Boxes to copy.

    Attributes
    ----------
    unit : int
        Bytes of what is copied as one: an element, or 2 to 16 bytes of neighbouring ones.
    source_strides, target_strides : tuple of int
        Units between neighbours along each axis, in the buffer and in the result.
    rows : numpy.ndarray of int64, (n, 2 + rank)
        For each box its first unit in the buffer, its first unit in the result, and its shape in units. The first is
        -1 for a box of fill values.
    """

    unit: int
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    rows: np.ndarray

    @property
    def rank(self) -> int:
        """Number of axes of the boxes."""
        return len(self.target_strides)

    @property
    def largest(self) -> int:
        """Units of the largest box."""
        return int(self.rows[:, 2:].prod(axis=1).max()) if len(self.rows) else 0


@dataclass(frozen=True)
class Geometry:
    """What all tables of one read share.

    Attributes
    ----------
    itemsize : int
        Bytes of a stored element.
    source_strides, target_strides : tuple of int
        Elements between neighbours along each axis of the array.
    groups : tuple of tuple of int
        Axes that can be walked as one, slowest first.
    """

    itemsize: int
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def geometry(layout: ArrayLayout, region: Region, pieces: Pieces) -> Geometry:
    """Find out which axes of all pieces can be walked as one: neighbours both as stored and in the result."""
    source, target = layout.chunk_strides, c_strides(region.box_shape)
    # An axis along which no piece has more than one element takes no part.
    axes = [axis for axis in range(layout.rank) if len(pieces) and pieces.extent[:, axis].max() > 1]
    groups: list[tuple[int, ...]] = []
    for axis in axes:
        if groups and _joins(groups[-1][-1], axis, source, target, pieces.extent):
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    # A kernel has at least one axis.
    return Geometry(layout.dtype.itemsize, source, target, tuple(groups) or ((layout.rank - 1,),))


def _joins(outer: int, inner: int, source: tuple[int, ...], target: tuple[int, ...], extent: np.ndarray) -> bool:
    count = int(extent[0, inner])
    same = bool((extent[:, inner] == count).all())
    return same and source[outer] == count * source[inner] and target[outer] == count * target[inner]


def is_contiguous(shared: Geometry, pieces: Pieces) -> np.ndarray:
    """Say for each piece whether its bytes lie as they are in one run of the result."""
    expected = np.ones(len(pieces), np.int64)
    run = np.ones(len(pieces), bool)
    # From the fastest axis of the result outwards: each axis of more than one element must go on where the faster
    # ones end, on both sides.
    for axis in reversed(range(pieces.extent.shape[1])):
        count = pieces.extent[:, axis]
        goes_on = (shared.source_strides[axis] == expected) & (shared.target_strides[axis] == expected)
        run &= (count == 1) | goes_on
        expected = expected * count
    return run


class TableMaker:
    """Makes the tables of one read; what all of them share is worked out once.

    Parameters
    ----------
    shared : Geometry
        Of all pieces of the read.
    pieces : Pieces
        All of them.
    widen : bool
        Whether bytes are copied as they are, so that neighbouring elements may be moved as one unit. False where they
        are swapped or cast.
    """

    def __init__(self, shared: Geometry, pieces: Pieces, *, widen: bool) -> None:
        self._shared, self._pieces, self._widen = shared, pieces, widen
        self._widest = self._widest_unit()
        self._tables: dict[int, ScatterTable] = {}

    def table(self, rows: np.ndarray, place: np.ndarray | None) -> ScatterTable:
        """Make a table.

        Parameters
        ----------
        rows : numpy.ndarray of int64, (n,)
            Pieces to place.
        place : numpy.ndarray of int64, (n,), or None
            First byte of each in the buffer; None for pieces of fill values.
        """
        unit = self._widest if place is None else max(self._shared.itemsize, _divisor(self._widest, place))
        every = self._of_unit(unit)
        mine = every.rows[rows]
        if place is not None:
            mine[:, 0] = place // unit
        return ScatterTable(unit, every.source_strides, every.target_strides, mine)

    def _strides(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes between neighbours along each group of axes."""
        inner = [group[-1] for group in self._shared.groups]
        source = np.array([self._shared.source_strides[axis] for axis in inner]) * self._shared.itemsize
        target = np.array([self._shared.target_strides[axis] for axis in inner]) * self._shared.itemsize
        return source, target

    def _extents(self) -> np.ndarray:
        return np.stack([self._pieces.extent[:, group].prod(axis=1) for group in self._shared.groups], axis=1)

    def _widest_unit(self) -> int:
        """Find the widest unit that fits strides, places in the result and runs of all pieces."""
        itemsize = self._shared.itemsize
        source, target = self._strides()
        if not self._widen or source[-1] != itemsize or target[-1] != itemsize:
            return itemsize
        run = self._extents()[:, -1] * itemsize
        return max(itemsize, _divisor(MAX_UNIT, source[:-1], target[:-1], self._pieces.target * itemsize, run))

    def _of_unit(self, unit: int) -> ScatterTable:
        """Make the table of all pieces in one unit, with nothing but fill values for a source."""
        if unit not in self._tables:
            itemsize = self._shared.itemsize
            extents, (source, target) = self._extents(), self._strides()
            if unit > itemsize:
                extents[:, -1] //= unit // itemsize
                source[-1] = target[-1] = unit  # the neighbour of a unit is the next unit
            first = self._pieces.target * itemsize // unit
            rows = np.concatenate([np.full_like(first, -1)[:, None], first[:, None], extents], axis=1)
            strides = (tuple((source // unit).tolist()), tuple((target // unit).tolist()))
            self._tables[unit] = ScatterTable(unit, *strides, rows)
        return self._tables[unit]


def _divisor(widest: int, *numbers: np.ndarray) -> int:
    """Find the widest power of two, at most `widest`, that divides all these byte counts."""
    bits = widest
    for array in numbers:
        bits |= int(np.bitwise_or.reduce(array)) if len(array) else 0
    return bits & -bits
