"""The cases of a benchmark. A case is work to time; its entries are implementations that do the same work.

In: functions, or generators that prepare them. Out: :class:`Case` records for :mod:`linumpy.benchmark.runner`.

How to add a suite
------------------
A suite is a module of :mod:`linumpy.benchmark.suites` with a :class:`Suite`, listed in its ``__init__``. Its cases are

- *a function on arrays in memory beside the same function of a peer*: makers ``(xp, scale) -> Case`` that call
  :func:`kernel_case`, in a dict (name → maker) for :func:`kernel_suite`. These are timed by CUDA events, after a copy
  on the device as a limit. :mod:`linumpy.benchmark.suites.kernels.tissue` is an example;
- *anything else*: a context manager that yields a folder and an iterator of cases, and removes its files at the end.
  :mod:`linumpy.benchmark.suites.regions` is an example.

The runner enters ``entry.prepare()``, checks the result of one ``Prepared.call`` by ``Prepared.check``, warms up, and
takes the median of the timed runs. Entries are compared by the rate ``Case.nbytes`` / median. The tests of a suite run
each case at a small size, with NumPy, and show that each check notices a wrong result.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.errors import LinumpyError

#: Returns why a result is wrong; empty if it is right.
Check = Callable[[Any], str]


class CannotRunError(LinumpyError, RuntimeError):
    """An entry cannot run on this machine; the message is the reason, in one line."""


def peer_module(name: str, install: str = "") -> ModuleType:
    """Import a module of a peer.

    Parameters
    ----------
    name : str
        Name of the module.
    install : str
        How to install it; by default ``pip install`` with the name of its package.

    Raises
    ------
    CannotRunError
        The package is not installed, or not complete.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        state = "is not installed" if error.name == package else f"is not completely installed ({error})"
        raise CannotRunError(f"{package} {state}: {install or f'pip install {package}'}") from error


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes
    ----------
    call : callable
        Takes nothing, returns a result. Results are freed before the next call.
    check : callable, optional
        Takes a result; returns why it is wrong, or an empty string. By default results are not checked.
    before : callable, optional
        Called before each call, and not timed.
    files : tuple of Path
        Files that the call reads besides the files of the case.
    note : callable
        Returns a few words on how the work was done; called after the check.
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
        Name for options and JSON; title for people.
    prepare : callable
        Returns the context in which the :class:`Prepared` call works; raises :class:`CannotRunError`.
    role : str
        ``"ours"``, ``"peer"``, or ``"limit"``: a limit of the hardware, which does not do the same work.
    warm_ups : int
        Untimed calls after the check.
    max_seconds : float or None
        Limit of the time of all runs. If the last warm-up shows that they would take longer, fewer runs are made, but
        at least three. Without warm-ups (also with a cold page cache) there is no limit.
    share : float
        The amount of work of a call, where the case is 1: less than 1 if all of the work would take too long, more than
        1 if a call repeats the work. Times are divided by it.
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
        The rate in GiB/s, or relative to the rate of other entries.
    of : tuple of str
        Names of the other entries, or ``"CASE/ENTRY"`` for an entry of an earlier case; empty for GiB/s.
    label : str
        The unit, for people.
    slowest : bool
        Whether to compare with the slowest of several entries, instead of the fastest.
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
        Name for people.
    nbytes : int
        Bytes that rates count.
    entries : tuple of Entry
        The first of role ``"ours"`` is compared with the others.
    description : tuple of str
        Lines for people.
    facts : mapping
        Further fields of the JSON record.
    marks : tuple of Mark
        Rates that linumpy should reach.
    not_judged : str
        Why the marks do not count in this run; empty if they do.
    clock : str
        ``"wall"``, or ``"device"``: CUDA events if there is a GPU.
    in_turns : bool
        Whether all entries are prepared first and their runs alternate, so that a change of the disk's speed affects
        all entries alike.
    files : tuple of Path
        Files that all entries read; dropped from the page cache before each cold run.
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
        The sub-command, and the text of ``--help``.
    runs : int
        Default number of timed runs of each entry.
    cases : callable
        Takes the options by name; returns a context manager that yields the folder whose file system is described, and
        an iterator of cases, which makes one case at a time to save memory.
    names : tuple of str
        Choices of ``--only``; empty without that option.
    scale, folder : str
        The help of ``--scale`` and ``--folder``; empty without that option.
    add_options : callable
        Adds further options.
    closing : callable
        Takes all results; returns a text to print at the end.
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

#: By the name of a case, a function that makes the case from an array module and a scale.
Makers = Mapping[str, Callable[[ModuleType, float], Case]]

COPY = "copy on the device"
KERNEL_WARM_UPS = 3
#: Float32 elements that are copied at a scale of 1: 1 GiB.
_COPY_SIZE = 2**28
#: Limit of the time of all runs of a peer.
_PEER_SECONDS = 10.0


def kernel_case(
    name: str, image: Array, ours: Callable[[], object], peer: Callable[[], object], check: Check, nbytes: float,
    reach: float | None = None, *, peer_share: float = 1.0, copy_reach: float | None = None,
    third: tuple[str, Prepare] | None = None, peer_name: str = "CuPy",
) -> Case:  # fmt: skip
    """Make a case of a function on arrays in memory, and of a peer.

    Parameters
    ----------
    name : str
        Name for people.
    image : array
        The array whose shape and dtype describe the case.
    ours, peer : callable
        Take nothing, return a result. Only the result of `ours` is checked.
    check : callable
        Returns why a result is wrong.
    nbytes : float
        Minimum number of bytes that must be read and written.
    reach : float, optional
        The rate to reach, relative to the peer.
    peer_share : float
        As for :class:`Entry`.
    copy_reach : float, optional
        The rate to reach, relative to a plain copy.
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
    """Yield the case of a copy on the device, then the other cases, each made when it is requested.

    Parameters
    ----------
    makers : mapping
        Makers of all cases of the suite.
    scale : float
        Factor of the length of every axis; marks are judged at 1 only.
    only : sequence of str
        Names of the cases; all by default.
    xp : module, optional
        The array module; by default CuPy.

    Raises
    ------
    GpuUnavailableError
        `xp` is None, and there is no CUDA device.
    ValueError
        An unknown case, or a scale that is not in 0 to 1.
    """
    check_scale(scale)
    unknown = [name for name in only if name not in makers]
    if unknown:
        raise ValueError(f"case {unknown[0]!r} is unknown: choose from {', '.join(makers)}")
    return _make(makers, require_cuda() if xp is None else xp, scale, only)


def check_scale(scale: float) -> None:
    """Raise an error if a scale is not in 0 to 1."""
    if not 0 < scale <= 1:
        raise ValueError(f"scale={scale}: more than 0, at most 1")


def not_judged_at(scale: float) -> str:
    """Return why marks do not count at a scale; empty at 1."""
    return "" if scale == 1 else "marks are for a scale of 1"


def scaled(length: int, scale: float, minimum: int = 16) -> int:
    """Return the length of an axis at a scale."""
    return max(minimum, round(length * scale))


def _make(makers: Makers, xp: ModuleType, scale: float, only: Sequence[str]) -> Iterator[Case]:
    yield _copy_case(xp, scale)
    for name, make in makers.items():
        if not only or name in only:
            # The case is in no variable, so that only the caller keeps its arrays alive.
            yield replace(make(xp, scale), not_judged=not_judged_at(scale))


def copy_of(xp: ModuleType, nbytes: int) -> Prepare:
    """Return the ``prepare`` of a copy in the memory of `xp` that reads and writes `nbytes` in total."""
    source = xp.zeros(nbytes // 2, xp.uint8)
    target = xp.empty_like(source)
    return ready(lambda: xp.copyto(target, source))


def _copy_case(xp: ModuleType, scale: float) -> Case:
    nbytes = 8 * max(2**20, round(_COPY_SIZE * scale**3))
    entry = Entry("copy", "copy", copy_of(xp, nbytes), "limit", KERNEL_WARM_UPS)
    return Case(COPY, nbytes, (entry,), ("bytes read and written",), clock="device")


def kernel_suite(name: str, description: str | None, makers: Makers, runs: int, scale: str) -> Suite:
    """Make a suite of functions on arrays in memory; `scale` is the help of ``--scale``."""

    @contextmanager
    def cases(*, only: Sequence[str], scale: float) -> Iterator[tuple[Path, Iterator[Case]]]:
        yield Path(), kernel_cases(makers, scale, only)

    return Suite(name, description or "", runs, cases, tuple(makers), scale)
