"""Check a result, then time it: the one runner of every benchmark.

In: ``Case`` records (:mod:`linumpy.benchmark.cases`; all its names can be imported from here, too), each with its
entries: linumpy's call, its peers, and limits that the hardware sets. Out: ``CaseResult`` records;
:mod:`linumpy.benchmark.command` shows them as a table, and writes one JSON document and one plot where
asked for. An entry whose result is wrong is never timed. What an entry raises ends that entry, not the run.

How to add a suite
------------------
A suite is a module of :mod:`linumpy.benchmark.suites` that makes cases:

- *A function on arrays beside the same function by a peer*: write makers ``(xp, scale) -> Case`` by
  :func:`linumpy.benchmark.kernels.kernel_case`, list them in a dict ``MAKERS`` (name → maker), and run them with
  ``command.run(kernel_cases(MAKERS, scale, only), settings, output)``. This times by CUDA events, frees memory between
  cases, and adds a copy on the device as a limit. :mod:`linumpy.benchmark.suites.tissue` is an example.
- *Anything else*: write a generator that yields ``Case`` records one after another and removes after each
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
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from linumpy.benchmark import cache
from linumpy.benchmark.cases import (
    FAILED,
    OK,
    UNAVAILABLE,
    WRONG,
    CannotRunError,
    Case,
    CaseResult,
    Check,
    Entry,
    EntryResult,
    Mark,
    MarkResult,
    Prepared,
    Settings,
    ready,
)
from linumpy.device import synchronize, why_no_cuda
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError

__all__ = [
    "FAILED", "OK", "UNAVAILABLE", "WRONG", "CannotRunError", "Case", "CaseResult", "Check", "Entry", "EntryResult",
    "Mark", "MarkResult", "Prepared", "Settings", "failures", "one_line", "ready", "run_case", "run_cases",
]  # fmt: skip

#: Part of the pages that may be left after a drop: the kernel keeps a page here and there.
COLD_ENOUGH = 0.01
#: Runs that are made of an entry at least, however slow it is.
_LEAST_RUNS = 3


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
        by_events = self.case.clock == "device" and _has_gpu()
        if not by_events:  # it takes the interpreter out of the processor's caches, which costs a launch 0.1 ms
            gc.collect()
        if self.settings.cold:
            self.left = _chill((*self.case.files, *self.prepared.files)) or self.left
        return (_event_seconds if by_events else _wall_seconds)(self.prepared.call)

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
