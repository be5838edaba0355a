"""One thing that is timed on a device, beside the same thing done by somebody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Why a result is wrong; empty where it is right.
Check = Callable[[Any], str]


def verdict_of(wrong: str, *marks: tuple[float | None, float | None]) -> str:
    """Judge a result by values, each with what it should reach; None where there is no value, or no mark.

    Returns
    -------
    str
        ``"WRONG"``, ``"met"``, ``"MISSED"``, or nothing where there is no mark.
    """
    if wrong:
        return "WRONG"
    judged = [value >= mark for value, mark in marks if value is not None and mark is not None]
    return "" if not judged else "met" if all(judged) else "MISSED"


@dataclass(frozen=True)
class Other:
    """The same thing by a third package.

    Attributes
    ----------
    name : str
        Of the package.
    call : callable
        Takes nothing, returns a result.
    check : callable
        Says why a result is wrong.
    """

    name: str
    call: Callable[[], Any]
    check: Check


@dataclass(frozen=True)
class KernelCase:
    """One thing to time.

    Attributes
    ----------
    name : str
        For people, and to choose it by.
    shape, dtype
        Of its volume.
    ours, peer : callable
        Take nothing, return a result. Ours is checked.
    check : callable
        Says why a result is wrong.
    nbytes : int
        What must be read and written at least.
    reach : float or None
        How many times faster than the peer it should be.
    peer_share : float
        The part of the work that the peer does, where all of it would take too long.
    copy_reach : float or None
        The part of a plain copy's bandwidth that it should reach.
    other : callable or None
        Makes the same thing by a third package, or None where that is not installed. Called when ours and the peer are
        timed: importing a package may load libraries of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    ours: Callable[[], Any]
    peer: Callable[[], Any]
    check: Check
    nbytes: int
    reach: float | None
    peer_share: float = 1.0
    copy_reach: float | None = None
    other: Callable[[], Other | None] | None = None
