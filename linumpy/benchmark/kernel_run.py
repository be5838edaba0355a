"""Check, time and show kernels, beside the same work done by CuPy.

In: a :class:`KernelRequest`. Out: :class:`KernelResult` records, a table, and JSON where asked for. Times are those of
CUDA events around a call, with the host's share of it; what is wrong is not timed.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from linumpy.benchmark import kernel_plot, machine
from linumpy.benchmark.kernel_case import KernelCase, verdict_of
from linumpy.benchmark.table import machine_text
from linumpy.device import require_cuda
from linumpy.io.files import replacing

_WARM_UPS = 3
#: What the numbers of the JSON are, said in it: it is read without this source.
_UNITS = "*_ms: milliseconds of each timed run; share_of_copy: of a plain copy's bytes per second; reach: mark for ×"
#: Of a slow peer fewer runs are made, so that all take about so long.
_PEER_SECONDS = 10.0


@dataclass(frozen=True)
class KernelRequest:
    """What to time.

    Attributes
    ----------
    only : tuple of str
        Names of the cases; all by default.
    runs : int
        Timed runs.
    scale : float
        Every axis is shrunk by it; reaches are for 1.
    json, plot : Path or None
        Files to write.
    """

    only: tuple[str, ...] = ()
    runs: int = 20
    scale: float = 1.0
    json: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale={self.scale}: more than 0, at most 1")
        for file in (self.json, self.plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {str(file.parent)!r} for {file.name}")
        if self.plot is not None and self.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"{self.plot}: a plot is a .png, .pdf or .svg file")


@dataclass(frozen=True)
class KernelResult:
    """What came of a case.

    Attributes
    ----------
    name, shape, dtype, reach
        Of the case.
    wrong : str
        Why the result is wrong; empty where it is right.
    ours_ms, peer_ms : tuple of float
        Every timed run; the peer's for all of the work. Empty where the result is wrong.
    share_of_copy : float or None
        Bytes a second, as a part of those of a plain copy on the same device.
    copy_reach : float or None
        What that share should be.
    other, other_wrong : str
        A third package, where there is one, and why its result is wrong or missing.
    other_ms : tuple of float
        Its timed runs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    reach: float | None
    wrong: str
    ours_ms: tuple[float, ...] = ()
    peer_ms: tuple[float, ...] = ()
    share_of_copy: float | None = None
    copy_reach: float | None = None
    other: str = ""
    other_wrong: str = ""
    other_ms: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer; None where there are no times."""
        if not self.ours_ms or not self.peer_ms:
            return None
        return statistics.median(self.peer_ms) / statistics.median(self.ours_ms)

    @property
    def verdict(self) -> str:
        """``"WRONG"``, ``"met"``, ``"MISSED"``, or nothing where there is no mark."""
        return verdict_of(self.wrong, (self.ratio, self.reach), (self.share_of_copy, self.copy_reach))


Makers = Mapping[str, Callable[[ModuleType, float], KernelCase]]
"""Makes each case by its name, from an array module and a scale."""


def make_cases(makers: Makers, xp: ModuleType, scale: float, only: Sequence[str] = ()) -> Iterator[KernelCase]:
    """Make cases one after another, so that only one is in memory."""
    unknown = [name for name in only if name not in makers]
    if unknown:
        raise ValueError(f"case {unknown[0]!r} is unknown: choose from {', '.join(makers)}")
    for name, make in makers.items():
        if not only or name in only:
            yield make(xp, scale)


def run(request: KernelRequest, makers: Makers) -> tuple[KernelResult, ...]:
    """Check and time the cases, and show what came of it.

    Raises
    ------
    GpuUnavailableError
        There is no CUDA device.
    ValueError
        A case that is not known.
    """
    xp = require_cuda()
    here = machine.look(Path())
    print(machine_text(here), end="\n\n")
    bandwidth = _copy_bandwidth(xp, request)
    print(f"copy on the device: {bandwidth / 1e12:.2f} TB/s, read and written; medians of {request.runs} runs\n")
    print(HEADER)
    results = []
    for case in make_cases(makers, xp, request.scale, request.only):
        results.append(_measure(xp, case, request, bandwidth))
        print(row(results[-1]), flush=True)
        del case
        gc.collect()
        xp.get_default_memory_pool().free_all_blocks()
    if request.json is not None:
        document = {"machine": asdict(here), "copy_bytes_per_second": bandwidth, "scale": request.scale}
        document |= {"units": _UNITS}
        document["results"] = [asdict(one) for one in results]
        with replacing(request.json, overwrite=True) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nwritten: {request.json}")
    if request.plot is not None:
        kernel_plot.draw(results, here.gpu, request.plot)
        print(f"written: {request.plot}")
    return tuple(results)


def _measure(xp: Any, case: KernelCase, request: KernelRequest, bandwidth: float) -> KernelResult:
    judged = request.scale == 1
    reach = case.reach if judged else None
    # A kernel that writes nothing must not find the right result of an earlier run in memory that is used again.
    spoilt = xp.full(case.nbytes, 0xA5, xp.uint8)
    del spoilt
    wrong = case.check(case.ours())
    if wrong:
        return KernelResult(case.name, case.shape, case.dtype, reach, wrong)
    xp.get_default_memory_pool().free_all_blocks()
    ours = _times(xp, case.ours, request.runs)
    once = _times(xp, case.peer, 1, warm_ups=1)[0]
    peer = _times(xp, case.peer, max(3, min(request.runs, int(_PEER_SECONDS * 1e3 / once))), warm_ups=1)
    share = case.nbytes / (statistics.median(ours) / 1e3) / bandwidth
    whole = tuple(one / case.peer_share for one in peer)
    mark = case.copy_reach if judged else None
    other = _measure_other(xp, case, request)
    return KernelResult(case.name, case.shape, case.dtype, reach, "", ours, whole, share, mark, *other)


def _measure_other(xp: Any, case: KernelCase, request: KernelRequest) -> tuple[str, str, tuple[float, ...]]:
    """Check and time a third package: its name, what is wrong, and times."""
    xp.get_default_memory_pool().free_all_blocks()
    other = case.other() if case.other is not None else None
    if other is None:
        return "", "", ()
    try:
        wrong = other.check(other.call())
        times = () if wrong else _times(xp, other.call, request.runs)
    except RuntimeError as error:  # it is not ours: what fails there must not end the run
        return other.name, f"it failed: {error}".splitlines()[0][:100], ()
    return other.name, wrong, times


def _times(xp: Any, call: Callable[[], Any], runs: int, warm_ups: int = _WARM_UPS) -> tuple[float, ...]:
    """Time calls by events on the current stream, in ms."""
    for _ in range(warm_ups):
        call()
    times = []
    for _ in range(runs):
        start, stop = xp.cuda.Event(), xp.cuda.Event()
        xp.cuda.get_current_stream().synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(float(xp.cuda.get_elapsed_time(start, stop)))
    return tuple(times)


def _copy_bandwidth(xp: Any, request: KernelRequest) -> float:
    """Bytes a second that a copy on the device reads and writes."""
    source = xp.zeros(max(2**20, round(2**28 * request.scale**3)), xp.float32)
    target = xp.empty_like(source)
    seconds = statistics.median(_times(xp, lambda: xp.copyto(target, source), request.runs)) / 1e3
    return 2 * source.nbytes / seconds


HEADER = (
    f"{'case':<27}{'volume':<24}{'linumpy':>10}{'min – max':>17}{'CuPy':>11}{'×':>8}{'reach':>8}{'of copy':>9}\n"
    + "─" * 122
)


def row(result: KernelResult) -> str:
    """Show a result as a line of the table."""
    volume = f"{'×'.join(map(str, result.shape))} {result.dtype}"
    head = f"{result.name:<27}{volume:<24}"
    if result.wrong:
        return f"{head}WRONG: {result.wrong}"
    ours, peer = statistics.median(result.ours_ms), statistics.median(result.peer_ms)
    spread = f"{min(result.ours_ms):.3g} – {max(result.ours_ms):.3g}"
    reach = "–" if result.reach is None else f"≥ {result.reach:g}"
    share = "–" if result.share_of_copy is None else f"{result.share_of_copy:.2f}"
    numbers = f"{ours:>7.3f} ms{spread:>17}{peer:>8.4g} ms{result.ratio:>8.1f}{reach:>8}{share:>9}"
    return f"{head}{numbers}  {result.verdict}{_other_text(result)}".rstrip()


def _other_text(result: KernelResult) -> str:
    if not result.other:
        return ""
    if result.other_wrong:
        return f"  {result.other}: {result.other_wrong}"
    other = statistics.median(result.other_ms)
    return f"  {result.other} {other:.4g} ms, × {other / statistics.median(result.ours_ms):.1f}"


def wrong_results(results: Sequence[KernelResult]) -> int:
    """Count wrong results."""
    return sum(bool(one.wrong) for one in results)
