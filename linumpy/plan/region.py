"""Regions of an array: basic indices, as zarr takes them → explicit bounds.

In: an index and the shape of the array. Out: :class:`Region`. Errors: :class:`~linumpy.errors.RegionError`,
``TypeError``. Pure.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias

from linumpy.errors import RegionError

#: The index of one axis, or ``...``.
AxisIndex: TypeAlias = slice | SupportsIndex | EllipsisType
#: A basic index as callers pass it; None for the whole array.
RegionLike: TypeAlias = AxisIndex | tuple[AxisIndex, ...] | None


@dataclass(frozen=True)
class Region:
    """A box of an array: ``0 <= start <= stop <= length`` along each axis.

    - `kept`: whether the result has the axis; an axis that an int indexes is dropped.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]
    kept: tuple[bool, ...]

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape with all axes of the array; dropped axes have length 1."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result, without dropped axes."""
        return tuple(n for n, kept in zip(self.box_shape, self.kept, strict=True) if kept)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.box_shape)

    @property
    def selection(self) -> tuple[slice | int, ...]:
        """The region as a basic index."""
        bounds = zip(self.start, self.stop, self.kept, strict=True)
        return tuple(slice(a, b) if kept else a for a, b, kept in bounds)

    def __str__(self) -> str:
        bounds = zip(self.start, self.stop, self.kept, strict=True)
        return "[" + ", ".join(f"{a}:{b}" if kept else str(a) for a, b, kept in bounds) + "]"


def normalize_region(region: RegionLike, shape: tuple[int, ...]) -> Region:
    """Resolve a basic index, as zarr takes it, into explicit bounds; steps other than 1 are errors.

    A bound outside the axis is an error and is not clipped: a region that is partly outside is more often a mistake
    than intended.
    """
    items = list(region) if isinstance(region, tuple) else [] if region is None else [region]
    ellipses = sum([item is ... for item in items])
    if ellipses > 1:
        raise RegionError(f"region {region!r} has more than one '...'")
    given = len(items) - ellipses
    if given > len(shape):
        raise RegionError(f"region {region!r} names {given} axes, but the array has {len(shape)}: shape {shape}")
    if ellipses or given < len(shape):
        missing: list[AxisIndex] = [slice(None)] * (len(shape) - given)
        position = next((i for i, item in enumerate(items) if item is ...), None)
        items = items + missing if position is None else items[:position] + missing + items[position + 1 :]
    axes = [_axis_bounds(item, length, axis) for axis, (item, length) in enumerate(zip(items, shape, strict=True))]
    start, stop, kept = zip(*axes, strict=True) if axes else ((), (), ())
    return Region(start, stop, kept)


def _axis_bounds(item: AxisIndex, length: int, axis: int) -> tuple[int, int, bool]:
    if isinstance(item, slice):
        return (*_slice_bounds(item, length, axis), True)
    index = _integer(item, axis)
    if not -length <= index < length:
        raise RegionError(f"index {index} is out of bounds for axis {axis}, which has length {length}")
    index %= length
    return index, index + 1, False


def _slice_bounds(item: slice, length: int, axis: int) -> tuple[int, int]:
    if item.step is not None and _integer(item.step, axis) != 1:
        raise RegionError(f"{item!r} on axis {axis}: only steps of 1 are read; slice the result for every n-th voxel")
    first, end = item.start, item.stop
    if type(first) is int and type(end) is int and 0 <= first <= end <= length:
        return first, end
    absolute = []
    for bound, default in ((item.start, 0), (item.stop, length)):
        value = default if bound is None else _integer(bound, axis)
        if not -length <= value <= length:
            raise RegionError(
                f"{item!r} is out of bounds for axis {axis}, which has length {length}: omit a bound to reach the end"
            )
        absolute.append(value + length if value < 0 else value)
    return absolute[0], max(absolute)


def _integer(value: SupportsIndex | EllipsisType, axis: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"region on axis {axis} is {value!r}: use a slice, an int or '...', not a mask")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # Ellipsis raises, as any other object does
    except TypeError:
        raise TypeError(f"region on axis {axis} is {value!r}: use a slice, an int or '...'") from None
