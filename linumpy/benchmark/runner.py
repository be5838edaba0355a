"""Check a result, then time it: the one runner of every benchmark.

In: :class:`~linumpy.benchmark.cases.Case` records. Out: :class:`CaseResult` records. An entry whose result is wrong is
never timed. What an entry raises ends that entry, not the run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from linumpy.benchmark import machine
from linumpy.benchmark.cases import CannotRunError, Case, Entry, Mark, Prepared
from linumpy.device import synchronize, why_no_cuda
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError

OK, WRONG, FAILED, UNAVAILABLE = "ok", "WRONG", "failed", "cannot run"
#: Part of the pages that may stay after a drop: the kernel keeps a page here and there.
COLD_ENOUGH = 0.01
#: Runs of an entry that are made however slow it is.
_LEAST_RUNS = 3


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
        One line: how the work was done, or why there are no times.
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
    """A mark, what was reached (None where a time is missing), and whether it is enough (None where not judged)."""

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
        return next((entry for entry in self.entries if entry.name == name), None)

    @property
    def ours(self) -> EntryResult | None:
        """The first entry of linumpy's."""
        return next((entry for entry in self.entries if entry.role == "ours"), None)

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
        judged = [mark.met for mark in self.marks if mark.met is not None]
        return "" if not judged else "met" if all(judged) else "MISSED"


OnEntry = Callable[[Case, Entry], object]


def run_cases(
    cases: Iterable[Case],
    settings: Settings,
    on_entry: OnEntry = lambda case, entry: None,
    on_result: Callable[[CaseResult], object] = lambda result: None,
) -> tuple[CaseResult, ...]:
    """Check and time cases one after another, so that one at a time holds memory.

    Parameters
    ----------
    cases : iterable of Case
        Made one after another.
    settings : Settings
        How to time.
    on_entry, on_result : callable
        Called before each entry, and after each case.
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
    on_entry: OnEntry = lambda case, entry: None,
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


def failures(results: Sequence[CaseResult]) -> int:
    """Count entries with wrong results, and entries of linumpy's that failed."""
    entries = [entry for result in results for entry in result.entries]
    return sum(one.verdict == WRONG or (one.verdict == FAILED and one.role == "ours") for one in entries)


class _Run:
    """One entry: prepared, checked, then timed."""

    def __init__(self, case: Case, entry: Entry, settings: Settings) -> None:
        self.case, self.entry, self.settings = case, entry, settings
        self.verdict, self.note, self.cache_note = OK, "", ""
        self.runs = settings.runs
        self.seconds: list[float] = []
        self.prepared: Prepared

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
        """Call once, untimed, and look at the result; then warm up."""
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
            seconds = self._time_call()
            if self.entry.max_seconds is not None:
                affordable = int(self.entry.max_seconds / max(seconds, 1e-9))
                self.runs = max(_LEAST_RUNS, min(self.settings.runs, affordable))

    def time(self) -> None:
        """Time a run."""
        self.seconds.append(self._time_call() / self.entry.share)

    def _time_call(self) -> float:
        if self.prepared.before is not None:
            self.prepared.before()
        by_events = self.case.clock == "device" and why_no_cuda() is None
        if not by_events:  # it evicts the interpreter from the processor's caches, which costs a launch 0.1 ms
            gc.collect()
        if self.settings.cold:
            self.cache_note = _drop_from_cache((*self.case.files, *self.prepared.files)) or self.cache_note
        return (_event_seconds if by_events else _wall_seconds)(self.prepared.call)

    def result(self) -> EntryResult:
        seconds = tuple(self.seconds) if self.verdict == OK else ()
        note = "; ".join(part for part in (self.cache_note, self.note) if part)
        entry = self.entry
        return EntryResult(entry.name, entry.title, entry.role, self.verdict, note, seconds, self.case.nbytes)


def _run_group(case: Case, group: Sequence[Entry], settings: Settings, on_entry: OnEntry) -> list[EntryResult]:
    """Prepare and check the entries of a group, then time them in turns."""
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


def _judge(mark: Mark, result: CaseResult, earlier: Sequence[CaseResult]) -> MarkResult:
    rate = None if result.ours is None else result.ours.rate
    if mark.of:
        rates = [base for name in mark.of if (base := _rate_of(name, result, earlier)) is not None]
        complete = len(rates) == len(mark.of) if mark.slowest else bool(rates)
        rate = rate / (min if mark.slowest else max)(rates) if rate is not None and complete else None
    return MarkResult(mark, rate, None if result.case.not_judged or rate is None else rate >= mark.least)


def _rate_of(name: str, result: CaseResult, earlier: Sequence[CaseResult]) -> float | None:
    case, _, entry = name.rpartition("/")
    named = [one for one in earlier if one.case.name == case] if case else [result]
    base = named[-1].entry(entry) if named else None
    return None if base is None else base.rate


def _wall_seconds(call: Callable[[], object]) -> float:
    """Time a call by the host's clock, from an idle device to an idle device."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds


def _event_seconds(call: Callable[[], object]) -> float:
    """Time a call by CUDA events on the current stream, with the host's share of it."""
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    collects = gc.isenabled()
    gc.disable()
    try:
        cupy.cuda.get_current_stream().synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
    finally:
        if collects:
            gc.enable()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3


def _drop_from_cache(files: Sequence[Path]) -> str:
    """Drop the files from the page cache; say so if they stayed."""
    machine.drop(files)
    part = machine.cached_part(files)
    if part is None:
        return "not known to be cold: the kernel tells only the files' owner"
    return f"NOT COLD: {part:.0%} stayed in the page cache" if part > COLD_ENOUGH else ""


def _overwrite_free_memory(nbytes: int) -> None:
    """Fill memory that the next call may be given: one that writes nothing must not return an earlier right result."""
    if why_no_cuda() is None:
        import cupy

        free = cupy.cuda.runtime.memGetInfo()[0]
        cupy.full(min(nbytes, free // 2), 0xA5, cupy.uint8)


def _release_memory() -> None:
    """Give the pools' memory back, so that one entry does not take the next one's."""
    gc.collect()
    if why_no_cuda() is None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line."""
    return " ".join(str(error).split()) or "no message"
