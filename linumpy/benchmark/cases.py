"""What is timed: cases, each with entries that do the same work.

In: functions, or generators that prepare them. Out: :class:`Case` records for :mod:`linumpy.benchmark.runner`.

How to add a suite
------------------
A suite is a module of :mod:`linumpy.benchmark.suites` with a :class:`Suite`, listed in its ``__init__``. Its cases are

- *a function on arrays in memory beside the same function of a peer*: makers ``(xp, scale) -> Case`` that call
  :func:`kernel_case`, in a dict (name → maker) for :func:`kernel_suite`. These are timed by CUDA events, after a copy
  on the device as a limit. :mod:`linumpy.benchmark.suites.tissue` is an example;
- *anything else*: a context manager that gives a folder and an iterator of cases, and removes at its end what it wrote.
  :mod:`linumpy.benchmark.suites.stream` is an example.

The runner enters ``entry.prepare()``, calls ``Prepared.call`` once for ``Prepared.check``, warms up, and takes the
median of the timed runs. ``Case.nbytes`` over that median is the rate by which entries are compared. The tests of a
suite run each case small, with NumPy, and show that each check notices a wrong result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.errors import LinumpyError

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
        Says why a result is wrong. Without it results are not checked.
    before : callable, optional
        Called before each run, outside the time.
    files : tuple of Path
        What it reads besides the case's own files.
    note : callable
        A few words on how the work was done; called after the check.
    """

    call: Callable[[], object]
    check: Check | None = None
    before: Callable[[], object] | None = None
    files: tuple[Path, ...] = ()
    note: Callable[[], str] = str


Prepare = Callable[[], AbstractContextManager[Prepared]]


def ready(call: Callable[[], object], check: Check | None = None, **options: Any) -> Prepare:
    """Return the ``prepare`` of an entry that needs no preparation; `options` are those of :class:`Prepared`."""
    return lambda: nullcontext(Prepared(call, check, **options))


@dataclass(frozen=True, slots=True)
class Entry:
    """One implementation of a case's work.

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
        The part of the work that it does, where all of it would take too long. Times are scaled to all the work.
    """

    name: str
    title: str
    prepare: Prepare
    role: Literal["ours", "peer", "limit"] = "peer"
    warm_ups: int = 1
    max_seconds: float | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Mark:
    """A rate that the first of linumpy's entries should reach.

    Attributes
    ----------
    least : float
        In GiB/s, or relative to the rate of other entries.
    of : tuple of str
        Names of these entries, or ``"CASE/ENTRY"`` for an entry of an earlier case; empty for GiB/s.
    label : str
        The unit, for people.
    slowest : bool
        Whether the slowest of several entries counts, instead of the fastest.
    """

    least: float
    of: tuple[str, ...] = ()
    label: str = "GiB/s"
    slowest: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """Work to time.

    Attributes
    ----------
    name : str
        For people, and to choose it by.
    nbytes : int
        Bytes that its rate counts.
    entries : tuple of Entry
        The first of role ``"ours"`` is compared with the others.
    description : tuple of str
        Lines for people.
    facts : mapping
        Further fields of its JSON record.
    marks : tuple of Mark
        What linumpy should reach.
    not_judged : str
        Why the marks do not count here; empty where they do.
    clock : str
        ``"wall"``, or ``"device"``: CUDA events where there is a GPU.
    in_turns : bool
        Whether all entries are prepared at once and their runs alternate: a disk that slows down does so for all.
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
class Suite:
    """A sub-command of ``linum-benchmark``.

    Attributes
    ----------
    name, description : str
        The sub-command and its help.
    runs : int
        Timed runs of each entry by default.
    cases : callable
        Takes its options by name; a context manager that gives the folder whose file system is described, and the
        cases, made one after another so that one at a time holds memory.
    names : tuple of str
        What ``--only`` chooses from; empty where there is no such option.
    scale, folder : str
        The help of ``--scale`` and ``--folder``; empty where there is no such option.
    add_options : callable
        Adds further options.
    closing : callable
        Text to print after all results.
    """

    name: str
    description: str
    runs: int
    cases: Callable[..., AbstractContextManager[tuple[Path, Iterator[Case]]]]
    names: tuple[str, ...] = ()
    scale: str = ""
    folder: str = ""
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    closing: Callable[[Any], str] = lambda results: ""


# ---- functions on arrays in memory

#: Makes each case by its name, from an array module and a scale.
Makers = Mapping[str, Callable[[ModuleType, float], Case]]

COPY = "copy on the device"
KERNEL_WARM_UPS = 3
#: Float32 elements that are copied at a scale of 1: 1 GiB.
_COPY_SIZE = 2**28
#: A slow peer makes fewer runs, so that all take about so many seconds.
_PEER_SECONDS = 10.0


def kernel_case(
    name: str, image: Array, ours: Callable[[], object], peer: Callable[[], object], check: Check, nbytes: float,
    reach: float | None = None, *, peer_share: float = 1.0, copy_reach: float | None = None,
    third: tuple[str, Prepare] | None = None, peer_name: str = "CuPy",
) -> Case:  # fmt: skip
    """Describe a function and its peer.

    Parameters
    ----------
    name : str
        For people, and to choose it by.
    image : array
        Whose shape and dtype describe the case.
    ours, peer : callable
        Take nothing, return a result. Only ours is checked.
    check : callable
        Says why a result is wrong.
    nbytes : float
        What must be read and written at least.
    reach : float, optional
        How many times faster than the peer it should be.
    peer_share : float
        The part of the work that the peer does, where all of it would take too long.
    copy_reach : float, optional
        The part of a plain copy's bandwidth that it should reach.
    third : (str, callable), optional
        Another package, and the ``prepare`` of its entry.
    peer_name : str
        Title of the peer.
    """
    key, shape, dtype = peer_name.lower(), list(image.shape), str(image.dtype)
    entries = [
        Entry("linumpy", "linumpy", ready(ours, check), "ours", KERNEL_WARM_UPS),
        Entry(key, peer_name, ready(peer), max_seconds=_PEER_SECONDS, share=peer_share),
    ]
    entries += [] if third is None else [Entry(third[0], third[0], third[1], warm_ups=KERNEL_WARM_UPS)]
    marks = [] if reach is None else [Mark(reach, (key,), f"× {peer_name}")]
    marks += [] if copy_reach is None else [Mark(copy_reach, (f"{COPY}/copy",), "× copy")]
    return Case(
        name, int(nbytes), tuple(entries), (f"{'×'.join(map(str, shape))} {dtype}",),
        {"shape": shape, "dtype": dtype}, tuple(marks), clock="device",
    )  # fmt: skip


def kernel_cases(
    makers: Makers, scale: float = 1.0, only: Sequence[str] = (), xp: ModuleType | None = None
) -> Iterator[Case]:
    """Make the copy on the device, then cases one after another.

    Parameters
    ----------
    makers : mapping
        All cases of the suite.
    scale : float
        Every axis is shrunk by it; marks are judged at 1 only.
    only : sequence of str
        Names of the cases; all by default.
    xp : module, optional
        By default CuPy.

    Raises
    ------
    GpuUnavailableError
        There is no CUDA device, and no other module is asked for.
    ValueError
        For an unknown case, or a scale that is not in 0 to 1.
    """
    check_scale(scale)
    unknown = [name for name in only if name not in makers]
    if unknown:
        raise ValueError(f"case {unknown[0]!r} is unknown: choose from {', '.join(makers)}")
    return _make(makers, require_cuda() if xp is None else xp, scale, only)


def check_scale(scale: float) -> None:
    """Refuse a scale that is not in 0 to 1."""
    if not 0 < scale <= 1:
        raise ValueError(f"scale={scale}: more than 0, at most 1")


def _make(makers: Makers, xp: ModuleType, scale: float, only: Sequence[str]) -> Iterator[Case]:
    why = "" if scale == 1 else "marks are for a scale of 1"
    yield _copy_case(xp, scale)
    for name, make in makers.items():
        if not only or name in only:
            yield replace(make(xp, scale), not_judged=why)  # in no variable: only the caller keeps its arrays alive


def copy_of(xp: ModuleType, nbytes: int) -> Prepare:
    """Prepare a copy on the device that reads and writes so many bytes together."""
    source = xp.zeros(nbytes // 2, xp.uint8)
    target = xp.empty_like(source)
    return ready(lambda: xp.copyto(target, source))


def _copy_case(xp: ModuleType, scale: float) -> Case:
    nbytes = 8 * max(2**20, round(_COPY_SIZE * scale**3))
    entry = Entry("copy", "copy", copy_of(xp, nbytes), "limit", KERNEL_WARM_UPS)
    return Case(COPY, nbytes, (entry,), ("bytes read and written",), clock="device")


def kernel_suite(name: str, description: str | None, makers: Makers, runs: int, scale: str) -> Suite:
    """Describe a suite of functions on arrays in memory."""

    @contextmanager
    def cases(*, only: Sequence[str], scale: float) -> Iterator[tuple[Path, Iterator[Case]]]:
        yield Path(), kernel_cases(makers, scale, only)

    return Suite(name, description or "", runs, cases, tuple(makers), scale)
