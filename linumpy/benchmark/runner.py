"""Check a path's result, then time it.

In: a case, the paths, how often and how. Out: :class:`CaseResult`, with one :class:`PathResult` per path: its times,
or why there are none. A path whose result is wrong is never timed. What a path raises ends that path, not the run.

A time is the wall clock of this process around the call and a wait for the device's current stream. The result of
one run is freed before the next starts; the memory goes back to its pool, and from the pool between paths.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from linumpy.benchmark import cache
from linumpy.benchmark.cases import Case
from linumpy.benchmark.paths import CannotRunError, Prepared, TimedPath
from linumpy.benchmark.truth import difference
from linumpy.device import is_device_array, synchronize
from linumpy.errors import GpuUnavailableError, UnsupportedLayoutError

OK, WRONG, FAILED, UNAVAILABLE = "ok", "WRONG", "failed", "cannot run"
#: Part of the pages that may be left after a drop: the kernel keeps a page here and there.
COLD_ENOUGH = 0.01


@dataclass(frozen=True, slots=True)
class Settings:
    """How to time: number of runs, whether the page cache is dropped before each, and whether a GPU is there."""

    runs: int = 5
    cold: bool = False
    gpu: bool = False


@dataclass(frozen=True, slots=True)
class PathResult:
    """What one path did.

    Attributes
    ----------
    name, title, is_limit
        Of the path.
    verdict : str
        ``"ok"``, ``"WRONG"`` (checked and refused), ``"failed"`` (raised) or ``"cannot run"``.
    note : str
        One line: how it read, or why there are no times.
    seconds : tuple of float
        Of every timed run, in their order; empty unless the verdict is ``"ok"``.
    nbytes : int
        Decoded bytes of one run.
    """

    name: str
    title: str
    is_limit: bool
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
        """Decoded GiB per second at the median time."""
        return None if self.median is None else self.nbytes / self.median / 2**30


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What all paths did with one case.

    Attributes
    ----------
    case : Case
        The case.
    settings : Settings
        How it was timed.
    paths : tuple of PathResult
        One per path.
    whole_rate : float or None
        With a region, the rate of ``linumpy auto`` on the whole array before it.
    """

    case: Case
    settings: Settings
    paths: tuple[PathResult, ...]
    whole_rate: float | None = None

    def path(self, name: str) -> PathResult | None:
        """Return the result of a path; None if it was not asked for."""
        return next((one for one in self.paths if one.name == name), None)

    def ratio(self, result: PathResult, to: str) -> float | None:
        """Return a path's rate over that of the path `to`; None where either has none."""
        base = self.path(to)
        if base is None or base.median is None or result.median is None:
            return None
        return base.median / result.median

    @property
    def got(self) -> float | None:
        """What ``linumpy auto`` reached, in the measure of the case's reach; None where a time is missing."""
        mine = self.path("linumpy-auto")
        if mine is None or mine.rate is None:
            return None
        if self.case.reach_of == "rate":
            return mine.rate
        if self.case.reach_of == "whole":
            return None if self.whole_rate is None else mine.rate / self.whole_rate
        if self.case.reach_of == "host":
            rates = [one.rate for one in self.paths if not one.is_limit and not one.name.startswith("linumpy")]
            best = max((rate for rate in rates if rate is not None), default=None)
            return None if best is None else mine.rate / best
        return self.ratio(mine, self.case.reach_of)

    @property
    def reached(self) -> bool | None:
        """Whether ``linumpy auto`` reached its mark.

        None where there is nothing to reach, no GPU, a cold cache, or no time to compare.
        """
        if self.case.reach is None or self.settings.cold or not self.settings.gpu:
            return None
        return None if self.got is None else self.got >= self.case.reach


def run_case(
    case: Case,
    paths: Sequence[TimedPath],
    settings: Settings,
    on_path: Callable[[Case, TimedPath], None] = lambda case, path: None,
    whole_rate: float | None = None,
) -> CaseResult:
    """Check and time all paths on one case, one after the other; `on_path` is told before each."""
    results = []
    for path in paths:
        on_path(case, path)
        results.append(measure(case, path, settings))
        _release_memory(settings.gpu)
    return CaseResult(case, settings, tuple(results), whole_rate)


def measure(case: Case, path: TimedPath, settings: Settings) -> PathResult:
    """Check and time one path."""

    def result(verdict: str, note: str, seconds: tuple[float, ...] = ()) -> PathResult:
        return PathResult(path.name, path.title, path.is_limit, verdict, note, seconds, case.nbytes)

    try:
        with ExitStack() as stack:
            prepared = stack.enter_context(path.prepare(case))
            wrong = _check(case, prepared, settings)
            if wrong is not None:
                return result(WRONG, wrong)
            note = prepared.note()
            seconds, left = _time(case, prepared, settings)
            return result(OK, "; ".join(part for part in (left, note) if part), seconds)
    except (CannotRunError, UnsupportedLayoutError, GpuUnavailableError) as error:
        return result(UNAVAILABLE, one_line(error))
    except Exception as error:  # a peer may raise anything, and the other paths are still to come
        return result(FAILED, f"{type(error).__name__}: {one_line(error)}")


def _check(case: Case, prepared: Prepared, settings: Settings) -> str | None:
    """Read once, untimed; return what is wrong, if anything."""
    array = prepared.read()
    synchronize()
    if is_device_array(array) != settings.gpu:
        return f"the result is on the wrong side: {type(array).__module__}.{type(array).__name__}"
    return difference(case, array)


def _time(case: Case, prepared: Prepared, settings: Settings) -> tuple[tuple[float, ...], str]:
    """Time the runs; return the times and what is to be said of the page cache."""
    if not settings.cold:
        prepared.read()  # the check's work between reading and now may have taken the caches
    seconds, left = [], ""
    for _ in range(settings.runs):
        gc.collect()
        if settings.cold:
            left = _chill((*case.files, *prepared.files)) or left
        synchronize()
        start = time.perf_counter()
        array = prepared.read()
        synchronize()
        seconds.append(time.perf_counter() - start)
        del array
    return tuple(seconds), left


def _chill(files: Sequence[Path]) -> str:
    """Drop the files from the page cache; say so if they did not leave."""
    cache.drop(files)
    part = cache.cached_part(files)
    if part is None:
        return "not known to be cold: the kernel tells only the files' owner"
    return f"NOT COLD: {part:.0%} stayed in the page cache" if part > COLD_ENOUGH else ""


def _release_memory(gpu: bool) -> None:
    """Give the pools' memory back, so that one path does not take the next one's."""
    gc.collect()
    if gpu:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def one_line(error: BaseException) -> str:
    """Return an exception's message as one line."""
    return " ".join(str(error).split()) or "no message"
