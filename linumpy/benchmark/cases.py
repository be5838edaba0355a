"""What is timed, and what came of it: the records that suites make and the runner fills.

A :class:`Case` has entries; each prepares a call. ``nbytes`` over the median time is the rate by which they are
compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from linumpy.errors import LinumpyError

OK, WRONG, FAILED, UNAVAILABLE = "ok", "WRONG", "failed", "cannot run"
#: Why a result is wrong; empty where it is right.
Check = Callable[[Any], str]


class CannotRunError(LinumpyError, RuntimeError):
    """An entry cannot run here; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes
    ----------
    call : callable
        Takes nothing, returns a result. Results are freed before the next call.
    check : callable, optional
        Says why a result is wrong. Without one, results are not checked.
    before : callable, optional
        Called before each run, outside the time.
    files : tuple of Path
        What it reads besides the case's own files.
    note : callable
        A few words on how it was done; asked for after the check.
    """

    call: Callable[[], Any]
    check: Check | None = None
    before: Callable[[], object] | None = None
    files: tuple[Path, ...] = ()
    note: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class Entry:
    """One way to do the work of a case.

    Attributes
    ----------
    name, title : str
        For options and JSON, and for people.
    prepare : callable
        Returns the context in which the :class:`Prepared` call works; raises :class:`CannotRunError`.
    role : str
        ``"ours"``, ``"peer"``, or ``"limit"``: what the hardware allows, which does not do the same work.
    warm_ups : int
        Untimed calls after the check.
    max_seconds : float or None
        Fewer runs are made, but at least three, where all would take longer.
    share : float
        The part of the work that it does, where all of it would take too long. Times are those of all the work.
    """

    name: str
    title: str
    prepare: Callable[[], AbstractContextManager[Prepared]]
    role: Literal["ours", "peer", "limit"] = "peer"
    warm_ups: int = 1
    max_seconds: float | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A rate that linumpy should reach.

    Attributes
    ----------
    least : float
        In GiB/s, or relative to the rate of other entries.
    of : tuple of str
        Names of these entries, or ``"CASE/ENTRY"`` for one of an earlier case; empty for GiB/s.
    label : str
        The unit, for people.
    slowest : bool
        Whether the slowest of several counts, instead of the fastest.
    """

    least: float
    of: tuple[str, ...] = ()
    label: str = "GiB/s"
    slowest: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to time.

    Attributes
    ----------
    name : str
        For people, and to choose it by.
    nbytes : int
        Bytes that its rate counts.
    entries : tuple of Entry
        Those of role ``"ours"``: the first is compared with the others.
    description : tuple of str
        Lines for people.
    facts : mapping
        What JSON says of it besides.
    marks : tuple of Mark
        What the first of ours should reach.
    not_judged : str
        Why the marks do not count here; empty where they do.
    clock : str
        ``"wall"``, or ``"device"``: CUDA events where there is a GPU.
    in_turns : bool
        Whether the entries take turns, so that a disk that becomes slower does so for all. All of them are prepared at
        the same time.
    files : tuple of Path
        What all entries read; dropped from the page cache before each run that is to be cold.
    """

    name: str
    nbytes: int
    entries: tuple[Entry, ...]
    description: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    not_judged: str = ""
    clock: Literal["wall", "device"] = "wall"
    in_turns: bool = False
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Settings:
    """How to time: the number of runs, and whether files are dropped from the page cache before each.

    Raises
    ------
    ValueError
        Without a run.
    """

    runs: int = 5
    cold: bool = False

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What an entry did.

    Attributes
    ----------
    name, title, role
        Of the entry.
    verdict : str
        ``"ok"``, ``"WRONG"`` (checked and refused), ``"failed"`` (raised) or ``"cannot run"``.
    note : str
        One line: how it was done, or why there are no times.
    seconds : tuple of float
        Of every timed run, in their order; empty unless the verdict is ``"ok"``.
    nbytes : int
        Of the case.
    """

    name: str
    title: str
    role: str
    verdict: str
    note: str = ""
    seconds: tuple[float, ...] = ()
    nbytes: int = 0

    @property
    def median(self) -> float | None:
        """Median of the times, in seconds; None without any."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def rate(self) -> float | None:
        """GiB per second at the median time; None without times."""
        return None if self.median is None else self.nbytes / max(self.median, 1e-12) / 2**30


@dataclass(frozen=True, slots=True)
class MarkResult:
    """A mark, what was got (None where a time is missing), and whether it was met (None where it is not judged)."""

    mark: Mark
    got: float | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What all entries did with a case; the case is kept without its entries, which may hold much memory."""

    case: Case
    settings: Settings
    entries: tuple[EntryResult, ...]
    marks: tuple[MarkResult, ...] = ()

    def entry(self, name: str) -> EntryResult | None:
        """Return the result of an entry; None if there is none of this name."""
        return next((one for one in self.entries if one.name == name), None)

    @property
    def ours(self) -> EntryResult | None:
        """The first entry of linumpy's."""
        return next((one for one in self.entries if one.role == "ours"), None)

    def times_faster(self, than: EntryResult) -> float | None:
        """Return the rate of ours over that of another entry; None where a time is missing."""
        if self.ours is None or self.ours.rate is None or not than.rate:
            return None
        return self.ours.rate / than.rate

    @property
    def verdict(self) -> str:
        """``"WRONG"``, ``"failed"``, ``"met"``, ``"MISSED"``, or nothing where no mark is judged."""
        if self.ours is not None and self.ours.verdict in (WRONG, FAILED):
            return self.ours.verdict
        judged = [one.met for one in self.marks if one.met is not None]
        return "" if not judged else "met" if all(judged) else "MISSED"


def ready(
    call: Callable[[], Any], check: Check | None = None, **options: Any
) -> Callable[[], AbstractContextManager[Prepared]]:
    """Return the ``prepare`` of an entry that needs no preparation; `options` are those of :class:`Prepared`."""
    return lambda: nullcontext(Prepared(call, check, **options))
