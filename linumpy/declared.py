"""Options of which each is declared once, as an annotated field of a frozen record that checks itself when it is made.

In: records that derive from :class:`Declared`, whose annotations say type, range and choices. Out: ``ValueError`` for a
value that its declaration does not allow, naming the option, the value, and what to pass. A value is checked where it
comes in: the options of all stages before the first one begins, those of a command before it reads anything.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union


@dataclass(frozen=True, kw_only=True)
class Range:
    """The range of a number.

    - `least`, `most`: the number is not less, and not greater.
    """

    above: float = -math.inf
    least: float = -math.inf
    most: float = math.inf
    infinite: bool = False

    def has(self, value: float) -> bool:
        """Return whether a number is in the range; NaN is not."""
        is_inside = self.least <= value <= self.most and (value > self.above or self.above == -math.inf)
        return is_inside and (self.infinite or math.isfinite(value))

    def __str__(self) -> str:
        limits = [f"above {self.above:g}"] if math.isfinite(self.above) else []
        limits += [f"not below {self.least:g}"] if math.isfinite(self.least) else []
        limits += [f"not above {self.most:g}"] if math.isfinite(self.most) else []
        return " and ".join(limits) or "finite"


@dataclass(frozen=True)
class Help:
    """What the help of a command says of a field.

    - `text`: ends with the default in brackets if the field's default does not say it.
    - `option`: name of the option without hyphens in front; by default the name of the field.
    """

    text: str
    metavar: str | None = None
    option: str = ""


@dataclass(frozen=True)
class Parsed:
    """A value that a function can parse; otherwise the function raises ``ValueError``."""

    parse: Callable[[Any], object]


Count = Annotated[int, Range(least=1)]
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(least=0)]
#: A probability or a share.
Share = Annotated[float, Range(least=0, most=1)]


class Declared:
    """A record whose values are checked against the annotations of its fields."""

    def __post_init__(self) -> None:
        declared = typing.get_type_hints(type(self), include_extras=True)
        for member in dataclasses.fields(self):  # type: ignore[arg-type]
            check_value(member.name, getattr(self, member.name), declared[member.name])


def check_value(name: str, value: object, declaration: Any) -> None:
    """Check a value against a declaration.

    - `name`: name of the option, for the error.
    - `declaration`: ``bool``, ``int``, ``float``, ``str``, a ``Literal``, a tuple of fixed length, or a union of these
      and None; also ``Annotated`` with :class:`Range` or :class:`Parsed`.

    Raises `ValueError`: the value is not allowed.
    """
    if not _allows(declaration, value):
        raise ValueError(f"{name}={value!r}: pass {_described(declaration)}")
    _parse(declaration, value)


def _allows(declaration: Any, value: Any) -> bool:
    """Return whether a declaration allows a value."""
    kind, parts = typing.get_origin(declaration), typing.get_args(declaration)
    if kind is Annotated:
        ranges = [part for part in parts[1:] if isinstance(part, Range)]
        return _allows(parts[0], value) and all(part.has(value) for part in ranges)
    if kind in (Union, types.UnionType):
        return any(_allows(part, value) for part in parts)
    if kind is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if kind is tuple:
        return isinstance(value, tuple) and len(value) == len(parts) and all(map(_allows, parts, value))
    if declaration in (int, float):  # booleans are no numbers, though Python takes them for integers
        number = numbers.Integral if declaration is int else numbers.Real
        return isinstance(value, number) and not isinstance(value, bool)
    return isinstance(value, declaration)


def _parse(declaration: Any, value: object) -> None:
    """Have the functions of :class:`Parsed` parse a value that is not None."""
    kind, parts = typing.get_origin(declaration), typing.get_args(declaration)
    if kind is Annotated:
        for part in parts[1:]:
            if isinstance(part, Parsed):
                part.parse(value)
    elif kind in (Union, types.UnionType) and value is not None:
        for part in parts:
            _parse(part, value)


def _described(declaration: Any) -> str:
    """Return what a declaration allows, for people."""
    kind, parts = typing.get_origin(declaration), typing.get_args(declaration)
    if kind is Annotated:
        ranges = [str(part) for part in parts[1:] if isinstance(part, Range)]
        return " ".join([_described(parts[0]), *ranges])
    if kind in (Union, types.UnionType):
        return " or ".join(_described(part) for part in parts if part is not types.NoneType)
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind is tuple:
        return f"{len(parts)} values, each {_described(parts[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(declaration, getattr(declaration, "__name__", str(declaration)))
