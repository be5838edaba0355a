"""Checks of arguments; their errors name the parameter. Pure."""

from __future__ import annotations

import keyword
import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from linumpy.checks import is_integer
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument

Box = tuple[tuple[int, int], ...]
#: Largest absolute coordinate of a crop: below it, double precision still resolves half a voxel.
_MAX_COORDINATE = 2**52


def check_name(name: object) -> None:
    """Raise where a name cannot be a field of a named tuple."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise InvalidArgument(f"name of a part must be an identifier without a leading underscore (got {name!r})")


def put(record: object, name: str, value: object) -> None:
    """Set an attribute of a frozen record."""
    object.__setattr__(record, name, value)


def integer(name: str, value: Any, minimum: int, end: int | None = None) -> int:
    """Return an integer from `minimum` to below `end`, or raise an error that names the parameter."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name} must be an int (got {type(value).__name__})")
    number = operator.index(value)
    if number < minimum:
        raise InvalidArgument(f"{name} must be >= {minimum} (got {number})")
    if end is not None and number >= end:
        raise InvalidArgument(f"{name} must be < {end} (got {number})")
    return number


def real_number(name: str, value: object) -> float:
    """Return a number as a float, or raise an error that names the parameter."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a number (got {type(value).__name__})")
    return float(value)


def check_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise unless `value` is one of `choices`, which are strings or None."""
    if not (value is None or isinstance(value, str)) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(map(str, choices))} (got {value!r})")


def put_coordinates(record: Any) -> None:
    """Check `spacing` and `origin` of a frozen record, and set them to tuples of floats; None stays None."""
    for name in ("spacing", "origin"):
        values = getattr(record, name)
        if values is None:
            continue
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ArgumentTypeError(f"{name} must hold µm for each axis of space (got {values!r})")
        lengths = tuple(real_number(name, value) for value in values)
        if not lengths or not all(map(math.isfinite, lengths)):
            required = "positive" if name == "spacing" else "finite"
            raise InvalidArgument(f"{name} must be {required} numbers of µm (got {lengths})")
        put(record, name, lengths)
    if record.spacing and not all(value > 0 for value in record.spacing):
        raise InvalidArgument(f"spacing must be positive numbers of µm (got {record.spacing})")
    if record.spacing and record.origin and len(record.spacing) != len(record.origin):
        raise InvalidArgument(f"spacing={record.spacing} and origin={record.origin} differ in their number of axes")


def sizes(shape: object, name: str = "shape") -> tuple[int, ...]:
    """Return the sizes of a shape, each 1 or more, as ints, or raise an error that names the parameter."""
    if isinstance(shape, str) or not isinstance(shape, Iterable):
        raise ArgumentTypeError(f"{name} must hold a number of voxels for each axis (got {shape!r})")
    counts = tuple(integer(name, n, 1) for n in shape)
    if not counts:
        raise InvalidArgument(f"{name} must hold a number of voxels for each axis (got none)")
    return counts


def uri_text(uri: object) -> str:
    """Return a path or URL as text."""
    if not isinstance(uri, (str, os.PathLike)):
        raise ArgumentTypeError(f"uri must be a path or a URL (got {type(uri).__name__})")
    if not (text := os.fsdecode(uri)):
        raise InvalidArgument("uri must be a path or a URL (got an empty string)")
    return text


def checked_aabb(aabb: object) -> tuple[Box, tuple[int, ...]]:
    """Return the crop as (start, stop) along each axis, and the axes that the caller gave as an int."""
    if isinstance(aabb, slice):
        aabb = (aabb,)
    if not isinstance(aabb, (Sequence, np.ndarray)) or isinstance(aabb, str) or len(aabb) == 0:
        raise ArgumentTypeError(f"aabb must hold a slice, (start, stop) or an int for each axis (got {aabb!r})")
    int_axes = tuple(axis for axis, extent in enumerate(aabb) if is_integer(extent))
    return tuple(_extent(axis, extent) for axis, extent in enumerate(aabb)), int_axes


def dropped_axes(dropped: Iterable[object], int_axes: tuple[int, ...], aabb: Box) -> tuple[int, ...]:
    """Return the axes of a crop that the batch does not have: `dropped` and `int_axes`, of one voxel each."""
    axes = tuple(sorted({*(integer("dropped", axis, 0, len(aabb)) for axis in dropped), *int_axes}))
    for axis in axes:
        if aabb[axis][1] - aabb[axis][0] != 1:
            raise InvalidArgument(f"dropped: axis {axis} of aabb has more than one voxel: {aabb[axis]}")
    return axes


def _extent(axis: int, value: Any) -> tuple[int, int]:
    name = f"aabb axis {axis}"
    if isinstance(value, slice):
        if value.stop is None:
            raise InvalidArgument(f"{name}: {value} is open; give a stop")
        if value.step not in (None, 1):
            raise InvalidArgument(f"{name}: {value} has a step; crops are contiguous")
        value = (0 if value.start is None else value.start, value.stop)
    if is_integer(value):
        value = (int(value), int(value) + 1)
    if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != 2:
        raise ArgumentTypeError(f"{name}: expected slice, (start, stop) tuple or int; got {type(value).__name__}")
    if any(isinstance(end, (bool, np.bool_)) for end in value):
        raise ArgumentTypeError(f"{name}: start and stop must be ints; got {value!r}")
    try:
        start, stop = map(operator.index, value)
    except TypeError:
        raise ArgumentTypeError(f"{name}: start and stop must be ints; got {value!r}") from None
    if stop <= start:
        raise InvalidArgument(f"{name}: start must be < stop; got ({start}, {stop})")
    if start < -_MAX_COORDINATE or stop > _MAX_COORDINATE:
        raise InvalidArgument(f"{name}: start and stop must be from -2**52 to 2**52; got ({start}, {stop})")
    return start, stop
