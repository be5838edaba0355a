"""Tables for the scatter kernel: which bytes of a buffer go where in the result.

In: pieces and their places in a buffer. Out: :class:`ScatterTable`, as few axes and as wide units as the bytes allow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pieces import Pieces, c_strides
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


def scatter_table(shared: Geometry, pieces: Pieces, place: np.ndarray | None, *, widen: bool) -> ScatterTable:
    """Make the table for some pieces.

    Parameters
    ----------
    shared : Geometry
        Of all pieces of the read.
    pieces : Pieces
        The ones to place.
    place : numpy.ndarray of int64, (n,), or None
        First byte of each in the buffer; None for pieces of fill values.
    widen : bool
        Whether bytes are copied as they are, so that neighbouring elements may be moved as one unit. False where
        they are swapped or cast.
    """
    itemsize = shared.itemsize
    inner = [group[-1] for group in shared.groups]
    extents = np.stack([pieces.extent[:, group].prod(axis=1) for group in shared.groups], axis=1)
    source = np.array([shared.source_strides[axis] for axis in inner]) * itemsize
    target = np.array([shared.target_strides[axis] for axis in inner]) * itemsize
    first = pieces.target * itemsize
    from_place = np.zeros_like(first) if place is None else place
    unit = itemsize
    if widen and source[-1] == target[-1] == itemsize:
        run = extents[:, -1] * itemsize
        unit = _common_unit(itemsize, source[:-1], target[:-1], first, from_place, run)
    ratio = unit // itemsize
    extents[:, -1] //= ratio
    source[-1] *= ratio  # the neighbour of a unit is the next unit
    target[-1] *= ratio
    head = np.full_like(first, -1) if place is None else from_place // unit
    rows = np.concatenate([head[:, None], (first // unit)[:, None], extents], axis=1)
    return ScatterTable(unit, tuple((source // unit).tolist()), tuple((target // unit).tolist()), rows)


def _common_unit(itemsize: int, *numbers: np.ndarray) -> int:
    """Find the widest unit, a power of two times the element, that divides all these byte counts."""
    bits = MAX_UNIT
    for array in numbers:
        bits |= int(np.bitwise_or.reduce(array)) if len(array) else 0
    widest = bits & -bits
    return max(itemsize, min(widest, MAX_UNIT))
