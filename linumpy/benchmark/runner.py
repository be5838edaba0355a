"""Check a result, then time it: the runner of all suites.

In: :class:`~linumpy.benchmark.cases.Case` records. Out: :class:`CaseResult` records. An entry whose result is wrong is
never timed. An exception of an entry ends that entry, not the run.
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
#: Share of the pages that may stay in the page cache after a drop, since the kernel keeps a few pages.
COLD_ENOUGH = 0.01
#: Minimum number of runs of an entry with a time limit.
_MIN_RUNS = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """How to time: the number of runs, and whether files are dropped from the page cache before each run.

    Raises
    ------
    ValueError
        `runs` is less than 1.
    """

    runs: int = 5
    cold: bool = False

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")


@dataclass(frozen=True, slots=True)
class EntryResult:
    """The verdict and the times of an entry.

    The verdict is ``"ok"``, ``"WRONG"`` (the check failed), ``"failed"`` (an exception) or ``"cannot run"``. `note` is
    one line: how the work was done, or why there are no times. `seconds` has the time of every run, in order, if the
    verdict is ``"ok"``; `nbytes` is the number of bytes that the rate counts.
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
        """Median of the times, in seconds; None without times."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def rate(self) -> float | None:
        """GiB per second at the median time; None without times."""
        return None if self.median is None else self.nbytes / max(self.median, 1e-12) / 2**30


@dataclass(frozen=True, slots=True)
class MarkResult:
    """A mark, the rate that was reached (None if a time is missing), and whether the mark is met (None: not judged)."""

    mark: Mark
    got: float | None
    met: bool | None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The results of all entries of a case. `case` has no entries, which may hold much memory."""

    case: Case
    settings: Settings
    entries: tuple[EntryResult, ...]
    marks: tuple[MarkResult, ...] = ()

    def entry(self, name: str) -> EntryResult | None:
        """Return the result of an entry by name; None if no entry has the name."""
        return next((entry for entry in self.entries if entry.name == name), None)

    @property
    def ours(self) -> EntryResult | None:
        """The first of linumpy's entries."""
        return next((entry for entry in self.entries if entry.role == "ours"), None)

    def times_faster(self, than: EntryResult) -> float | None:
        """Return the rate of `ours` divided by the rate of another entry; None if a time is missing."""
        if self.ours is None or self.ours.rate is None or not than.rate:
            return None
        return self.ours.rate / than.rate

    @property
    def verdict(self) -> str:
        """``"WRONG"`` or ``"failed"`` if `ours` is; else ``"met"`` or ``"MISSED"``, or empty if no mark is judged."""
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
    """Check and time cases one after another, so that only one case holds memory.

    `on_entry` is called before each entry, `on_result` after each case.
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
    """Count the entries whose results are wrong, and the entries of linumpy that failed."""
    entries = [entry for result in results for entry in result.entries]
    return sum(entry.verdict == WRONG or (entry.verdict == FAILED and entry.role == "ours") for entry in entries)


class _EntryRun:
    """An entry on its way through preparation, check and timed runs."""

    def __init__(self, case: Case, entry: Entry, settings: Settings) -> None:
        self.case, self.entry, self.settings = case, entry, settings
        self.verdict, self.note, self.cache_note = OK, "", ""
        self.runs = settings.runs
        self.seconds: list[float] = []
        self.prepared: Prepared

    def attempt(self, step: Callable[[], None]) -> None:
        """Do a step unless an earlier step failed; record its exception."""
        if self.verdict != OK:
            return
        try:
            step()
        except (CannotRunError, UnsupportedLayoutError, GpuUnavailableError) as error:
            self.verdict, self.note = UNAVAILABLE, one_line(error)
        except Exception as error:  # a peer may raise anything, and the other entries are still to come
            self.verdict, self.note = FAILED, f"{type(error).__name__}: {one_line(error)}"

    def check(self) -> None:
        """Call once, untimed, and check the result; then warm up, and reduce the runs if an entry limits their time."""
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
                self.runs = max(_MIN_RUNS, min(self.settings.runs, affordable))

    def time(self) -> None:
        """Time a run, scaled to all of the work."""
        self.seconds.append(self._time_call() / self.entry.share)

    def _time_call(self) -> float:
        if self.prepared.before is not None:
            self.prepared.before()
        by_events = self.case.clock == "device" and why_no_cuda() is None
        if not by_events:  # before a launch, collecting would cost 0.1 ms: it evicts the interpreter from the caches
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
    """Prepare and check all entries of a group, then time the entries in turns."""
    runs = [_EntryRun(case, entry, settings) for entry in group]
    with ExitStack() as stack:
        for run in runs:
            on_entry(case, run.entry)

            def prepare(run: _EntryRun = run) -> None:
                run.prepared = stack.enter_context(run.entry.prepare())

            run.attempt(prepare)
            run.attempt(run.check)
        for number in range(max(run.runs for run in runs)):
            for run in runs:
                if number < run.runs:
                    run.attempt(run.time)
    return [run.result() for run in runs]


def _judge(mark: Mark, result: CaseResult, earlier: Sequence[CaseResult]) -> MarkResult:
    """Compare the rate of linumpy's first entry with a mark: in GiB/s, or relative to other entries."""
    rate = None if result.ours is None else result.ours.rate
    if mark.of:
        rates = [other for name in mark.of if (other := _rate_of(name, result, earlier)) is not None]
        complete = len(rates) == len(mark.of) if mark.slowest else bool(rates)
        rate = rate / (min if mark.slowest else max)(rates) if rate is not None and complete else None
    return MarkResult(mark, rate, None if result.case.not_judged or rate is None else rate >= mark.least)


def _rate_of(name: str, result: CaseResult, earlier: Sequence[CaseResult]) -> float | None:
    """Return the rate of ``"ENTRY"`` of this case or ``"CASE/ENTRY"`` of an earlier case; None if it has no rate."""
    case_name, _, entry_name = name.rpartition("/")
    named = [other for other in earlier if other.case.name == case_name] if case_name else [result]
    entry = named[-1].entry(entry_name) if named else None
    return None if entry is None else entry.rate


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
    """Time a call by CUDA events on the current stream; time in which the device waits for the host counts."""
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
    """Drop files from the page cache; return a note if pages stayed, or if the kernel does not report them."""
    machine.drop_from_page_cache(files)
    cached = machine.cached_fraction(files)
    if cached is None:
        return "not known to be cold: the kernel tells only the files' owner"
    return f"NOT COLD: {cached:.0%} stayed in the page cache" if cached > COLD_ENOUGH else ""


def _overwrite_free_memory(nbytes: int) -> None:
    """Fill `nbytes` of device memory, at most half of the free memory, and free it.

    A call that writes nothing then cannot return the right result of an earlier call.
    """
    if why_no_cuda() is None:
        import cupy

        free = cupy.cuda.runtime.memGetInfo()[0]
        cupy.full(min(nbytes, free // 2), 0xA5, cupy.uint8)


def _release_memory() -> None:
    """Free the unused memory of CuPy's pools, so that the next entry can allocate it."""
    gc.collect()
    if why_no_cuda() is None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line."""
    return " ".join(str(error).split()) or "no message"
