"""Check a result, then time it: the one runner of every benchmark.

In: :class:`Case` records, each with its :class:`Entry` records: linumpy's call, its peers, and limits that the hardware
sets. Out: :class:`CaseResult` records, a table on standard output, and one JSON document and one plot where asked for
(:mod:`linumpy.benchmark.report`). An entry whose result is wrong is never timed. What an entry raises ends that entry,
not the run.

How to add a suite
------------------
A suite is a module of :mod:`linumpy.benchmark.suites` that makes cases:

- *A function on arrays beside the same function by a peer*: write makers ``(xp, scale) -> Case`` by
  :func:`linumpy.benchmark.kernels.kernel_case`, list them in a dict ``MAKERS`` (name → maker), and run them with
  ``command.run(kernel_cases(MAKERS, scale, only), settings, output)``. This times by CUDA events, frees memory between
  cases, and adds a copy on the device as a limit. :mod:`linumpy.benchmark.suites.tissue` is an example.
- *Anything else*: write a generator that yields :class:`Case` records one after another and removes after each
  ``yield`` what it made. :mod:`linumpy.benchmark.suites.scripts` is an example.

The runner calls ``entry.prepare()`` for the context in which ``Prepared.call`` works, calls it once for
``Prepared.check``, warms up, and takes the median of the timed runs. ``Case.nbytes`` over that median is the rate by
which entries are compared; ``Case.marks`` says what rate linumpy should reach: in GiB/s, or relative to other entries.

A command needs little more: :mod:`linumpy.benchmark.command` has the options that all of them share, and
``scripts/linum_benchmark_resampling.py`` is an example. The tests of a suite run each maker with ``numpy`` and a small
scale, and show that each check notices a wrong result.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from linumpy.benchmark import cache
from linumpy.device import synchronize, why_no_cuda
from linumpy.errors import GpuUnavailableError, LinumpyError, UnsupportedLayoutError

OK, WRONG, FAILED, UNAVAILABLE = "ok", "WRONG", "failed", "cannot run"
#: Part of the pages that may be left after a drop: the kernel keeps a page here and there.
COLD_ENOUGH = 0.01
#: Runs that are made of an entry at least, however slow it is.
_LEAST_RUNS = 3

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


def run_cases(
    cases: Iterable[Case],
    settings: Settings,
    on_entry: Callable[[Case, Entry], None] = lambda case, entry: None,
    on_result: Callable[[CaseResult], None] = lambda result: None,
) -> tuple[CaseResult, ...]:
    """Check and time cases one after another, so that one at a time holds memory.

    Parameters
    ----------
    cases : iterable of Case
        Made one after another.
    settings : Settings
        How to time.
    on_entry, on_result : callable
        Told before each entry, and after each case.
    """
    results: list[CaseResult] = []
    for case in cases:
        results.append(run_case(case, settings, on_entry, results))
        on_result(results[-1])
        del case
        _release_memory()
    return tuple(results)


def run_case(
    case: Case,
    settings: Settings,
    on_entry: Callable[[Case, Entry], None] = lambda case, entry: None,
    earlier: Sequence[CaseResult] = (),
) -> CaseResult:
    """Check and time all entries of a case; marks may refer to the results of earlier cases."""
    groups = [case.entries] if case.in_turns else [(entry,) for entry in case.entries]
    entries: list[EntryResult] = []
    for group in groups:
        entries += _run_group(case, group, settings, on_entry)
        _release_memory()
    result = CaseResult(replace(case, entries=()), settings, tuple(entries))
    return replace(result, marks=tuple(_judge(mark, result, earlier) for mark in case.marks))


class _Run:
    """One entry on its way: prepared, checked, timed."""

    def __init__(self, case: Case, entry: Entry, settings: Settings) -> None:
        self.case, self.entry, self.settings = case, entry, settings
        self.verdict, self.note, self.left = OK, "", ""
        self.runs = settings.runs
        self.seconds: list[float] = []
        self.prepared: Prepared | None = None

    def attempt(self, step: Callable[[], None]) -> None:
        """Do a step unless an earlier one went wrong; note what it raises."""
        if self.verdict != OK:
            return
        try:
            step()
        except (CannotRunError, UnsupportedLayoutError, GpuUnavailableError) as error:
            self.verdict, self.note = UNAVAILABLE, one_line(error)
        except Exception as error:  # a peer may raise anything, and the other entries are still to come
            self.verdict, self.note = FAILED, f"{type(error).__name__}: {one_line(error)}"

    def check(self) -> None:
        """Call once, untimed, and look at the result."""
        assert self.prepared is not None
        _overwrite_free_memory(self.case.nbytes)
        if self.prepared.before is not None:
            self.prepared.before()
        result = self.prepared.call()
        synchronize()
        wrong = self.prepared.check(result) if self.prepared.check is not None else ""
        del result
        if wrong:
            self.verdict, self.note = WRONG, wrong
            return
        self.note = self.prepared.note()
        for _ in range(0 if self.settings.cold else self.entry.warm_ups):
            once = self._once()
            if self.entry.max_seconds is not None:
                self.runs = max(_LEAST_RUNS, min(self.settings.runs, int(self.entry.max_seconds / max(once, 1e-9))))

    def time(self) -> None:
        """Time a run."""
        self.seconds.append(self._once() / self.entry.share)

    def _once(self) -> float:
        assert self.prepared is not None
        if self.prepared.before is not None:
            self.prepared.before()
        gc.collect()
        if self.settings.cold:
            self.left = _chill((*self.case.files, *self.prepared.files)) or self.left
        return (_event_seconds if self.case.clock == "device" and _has_gpu() else _wall_seconds)(self.prepared.call)

    def result(self) -> EntryResult:
        """Return what came of it."""
        seconds = tuple(self.seconds) if self.verdict == OK else ()
        note = "; ".join(part for part in (self.left, self.note) if part)
        entry = self.entry
        return EntryResult(entry.name, entry.title, entry.role, self.verdict, note, seconds, self.case.nbytes)


def _run_group(
    case: Case, group: Sequence[Entry], settings: Settings, on_entry: Callable[[Case, Entry], None]
) -> list[EntryResult]:
    """Prepare and check the entries of a group, then time them by turns."""
    runs = [_Run(case, entry, settings) for entry in group]
    with ExitStack() as stack:
        for run in runs:
            on_entry(case, run.entry)

            def prepare(run: _Run = run) -> None:
                run.prepared = stack.enter_context(run.entry.prepare())

            run.attempt(prepare)
            run.attempt(run.check)
        for number in range(max(run.runs for run in runs)):
            for run in runs:
                if number < run.runs:
                    run.attempt(run.time)
    return [run.result() for run in runs]


def ready(
    call: Callable[[], Any], check: Check | None = None, **options: Any
) -> Callable[[], AbstractContextManager[Prepared]]:
    """Return the ``prepare`` of an entry that needs no preparation; `options` are those of :class:`Prepared`."""
    return lambda: nullcontext(Prepared(call, check, **options))


def _judge(mark: Mark, result: CaseResult, earlier: Sequence[CaseResult]) -> MarkResult:
    rate = None if result.ours is None else result.ours.rate
    if mark.of:
        found = (_rate_of(name, result, earlier) for name in mark.of)
        bases = [base for base in found if base is not None]
        whole = len(bases) == len(mark.of) if mark.slowest else bool(bases)
        base = (min if mark.slowest else max)(bases) if whole else None
        rate = None if rate is None or base is None else rate / base
    return MarkResult(mark, rate, None if result.case.not_judged or rate is None else rate >= mark.least)


def _rate_of(name: str, result: CaseResult, earlier: Sequence[CaseResult]) -> float | None:
    case, _, entry = name.rpartition("/")
    if case:
        named = [one for one in earlier if one.case.name == case]
        if not named:
            return None
        result = named[-1]
    found = result.entry(entry)
    return None if found is None else found.rate


def failures(results: Sequence[CaseResult]) -> int:
    """Count entries with wrong results, and entries of linumpy's that failed."""
    entries = [entry for result in results for entry in result.entries]
    return sum(one.verdict == WRONG or (one.verdict == FAILED and one.role == "ours") for one in entries)


def _wall_seconds(call: Callable[[], Any]) -> float:
    """Time a call by the host's clock, from a device at rest to a device at rest."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _event_seconds(call: Callable[[], Any]) -> float:
    """Time a call by CUDA events on the current stream, with the host's share of it."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    cupy.cuda.get_current_stream().synchronize()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3


def _chill(files: Sequence[Path]) -> str:
    """Drop the files from the page cache; say so if they did not leave."""
    cache.drop(files)
    part = cache.cached_part(files)
    if part is None:
        return "not known to be cold: the kernel tells only the files' owner"
    return f"NOT COLD: {part:.0%} stayed in the page cache" if part > COLD_ENOUGH else ""


def _has_gpu() -> bool:
    return why_no_cuda() is None


def _overwrite_free_memory(nbytes: int) -> None:
    """Fill memory that the next call may be given: one that writes nothing must not find an earlier right result."""
    if not _has_gpu():
        return
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    spoilt = cupy.full(min(nbytes, free // 2), 0xA5, cupy.uint8)
    del spoilt


def _release_memory() -> None:
    """Give the pools' memory back, so that one entry does not take the next one's."""
    gc.collect()
    if _has_gpu():
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line."""
    return " ".join(str(error).split()) or "no message"
