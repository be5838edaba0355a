"""Time calls whose results are checked first, and print their medians: the one helper of all benchmarks.

A suite opens cases, and times linumpy and its peers in each::

    with bench.case("mean along Z", volume.nbytes / GIB) as case:
        case.time("linumpy", lambda: project(volume, 0), check)
        case.time("CuPy", lambda: volume.mean(axis=0))

A check returns why a result is wrong, or an empty string. A wrong result has no time. An exception ends a row of the
table, not the suite. Rows of linumpy have names that begin with "linumpy".
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from linumpy import cli
from linumpy.arrays import DeviceName
from linumpy.device import describe, kvikio_mode, resolve, synchronize, usable_cores, why_no_cuda
from linumpy.errors import GpuUnavailableError, LinumpyError, UnsupportedLayoutError

GIB = 2**30
OK, WRONG, FAILED, CANNOT_RUN = "ok", "WRONG", "failed", "cannot run"
#: Seconds that all runs of a row may take, if warm-ups show how long a run takes; at least three runs are made.
_MAX_SECONDS, _MIN_RUNS = 10.0, 3

#: Returns why a result is wrong; empty if it is right.
Check = Callable[[Any], str]


class CannotRunError(LinumpyError, RuntimeError):
    """A row cannot run on this machine; the message is the reason."""


class _WrongResultError(Exception):
    """A check failed."""


def peer_module(name: str, install: str = "") -> ModuleType:
    """Import a module of a peer; raise :class:`CannotRunError` with what to install if that fails."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise CannotRunError(f"{package} cannot be imported: {install or f'pip install {package}'}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A call to time.

    `before` is called before each call, and not timed. `share` is the part of the case's work that a call does: times
    are divided by it. `warm_ups` are untimed calls after the check; without them the runs are not limited in time.
    `note` returns a few words after the check. `files` are dropped from the page cache before each cold run.
    """

    name: str
    call: Callable[[], object]
    check: Check | None = None
    before: Callable[[], object] = lambda: None
    share: float = 1.0
    warm_ups: int = 2
    note: Callable[[], str] = str
    files: Sequence[Path] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one call: "ok" with the seconds of each run, or why there are none."""

    name: str
    verdict: str
    note: str = ""
    seconds: tuple[float, ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether this is a row of linumpy."""
        return self.name.startswith("linumpy")

    @property
    def median(self) -> float | None:
        """Median of the times, in seconds; None without times."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(kw_only=True)
class Case:
    """Work that linumpy and its peers do, with a row for each.

    Rates are `amount` / median, in `unit` a second. With `by_events` CUDA events time the calls, if the data are on a
    GPU, in place of the wall clock. `files` are dropped from the page cache before each cold run of every row.
    """

    bench: Bench
    name: str
    amount: float
    unit: str = "GiB"
    description: str = ""
    by_events: bool = False
    files: Sequence[Path] = ()
    rows: list[Row] = field(default_factory=list)

    def time(self, name: str, call: Callable[[], object], check: Check | None = None, **options: Any) -> None:
        """Check and time a call; `options` are those of :class:`Work`."""
        self.time_in_turns(Work(name=name, call=call, check=check, **options))

    def time_in_turns(self, *works: Work) -> None:
        """Check all calls, then time them in turns, so that a change of the machine's speed affects all alike."""
        runs: dict[str, int] = {}
        notes: dict[str, str] = {}
        seconds: dict[str, list[float]] = {work.name: [] for work in works}
        for work in works:
            with self.attempt(work.name):
                runs[work.name], notes[work.name] = self._check(work), work.note()
        for number in range(max(runs.values(), default=0)):
            for work in works:
                if number < runs.get(work.name, 0):
                    with self.attempt(work.name):
                        seconds[work.name].append(self._seconds(work) / work.share)
        failed = {row.name for row in self.rows}
        self.rows += [
            Row(name=name, verdict=OK, note=notes[name], seconds=tuple(times))
            for name, times in seconds.items()
            if name not in failed
        ]

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an exception of the block as the row `name`: a peer may be missing, or raise anything."""
        try:
            yield
        except Exception as error:
            unable = (CannotRunError, UnsupportedLayoutError, GpuUnavailableError)
            verdict = CANNOT_RUN if isinstance(error, unable) else FAILED
            text = str(error) if verdict == CANNOT_RUN else f"{type(error).__name__}: {error}"
            if isinstance(error, _WrongResultError):
                verdict, text = WRONG, str(error)
            self.rows.append(Row(name=name, verdict=verdict, note=" ".join(text.split())))
        _free_memory()

    def _check(self, work: Work) -> int:
        """Call once and check the result; then warm up, and return the number of runs."""
        _overwrite_free_memory()
        work.before()
        result = work.call()
        synchronize()
        wrong = work.check(result) if work.check is not None else ""
        del result
        if wrong:
            raise _WrongResultError(wrong)
        runs = self.bench.runs
        for _ in range(0 if self.bench.cold else work.warm_ups):
            runs = min(self.bench.runs, max(_MIN_RUNS, int(_MAX_SECONDS / max(self._seconds(work), 1e-9))))
        return runs

    def _seconds(self, work: Work) -> float:
        work.before()
        if self.bench.cold:
            drop_from_page_cache((*self.files, *work.files))
        return (_event_seconds if self.by_events and self.bench.on_gpu else _wall_seconds)(work.call)

    def text(self) -> str:
        """Return the table of the case; "linumpy ×" is how many times as fast linumpy's first row is."""
        ours = next((row.median for row in self.rows if row.is_ours), None)
        lines = [self.name, *filter(None, [self.description])]
        lines.append(f"{'':32}{self.unit + '/s':>10}{'median':>12}{'min':>12}{'max':>12}{'linumpy ×':>11}")
        for row in self.rows:
            if row.median is None:
                lines.append(f"{row.name:32}{row.verdict}: {row.note}")
                continue
            times = "".join(f"{_time_text(value):>12}" for value in (row.median, min(row.seconds), max(row.seconds)))
            ratio = "" if row.is_ours or ours is None else f"{row.median / ours:.3g}"
            lines.append(f"{row.name:32}{self.amount / row.median:>10.4g}{times}{ratio:>11}  {row.note}".rstrip())
        return "\n".join(lines)


@dataclass(kw_only=True)
class Bench:
    """How to time, and the cases that were timed.

    `scale` multiplies the sizes of a suite's data. `only` names the cases to run, all if it is empty. With `cold` files
    are dropped from the page cache before each run. Data are made in `folder`.
    """

    runs: int = 5
    scale: float = 1.0
    only: Sequence[str] = ()
    device: DeviceName = "auto"
    cold: bool = False
    folder: Path | None = None
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")
        if not 0 < self.scale <= 1:
            raise ValueError(f"scale={self.scale:g}: more than 0, at most 1")
        self.device = resolve(self.device).kind
        self.on_gpu, self.xp = self.device == "cuda", resolve(self.device).xp

    def wants(self, name: str) -> bool:
        """Whether a case is to be run."""
        return not self.only or name in self.only

    @contextmanager
    def work_folder(self) -> Iterator[Path]:
        """Make a new folder below `folder`, by default among temporary files, and remove it at the end."""
        with tempfile.TemporaryDirectory(prefix="linum-benchmark-", dir=self.folder) as path:
            yield Path(path)

    @contextmanager
    def case(self, name: str, amount: float, **options: Any) -> Iterator[Case]:
        """Open a case, and print it at its end; `options` are those of :class:`Case`."""
        case = Case(bench=self, name=name, amount=amount, **options)
        self.cases.append(case)
        try:
            yield case
        finally:
            print(case.text(), end="\n\n", flush=True)


def _time_text(seconds: float) -> str:
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * factor:.3g} {unit}"


def _wall_seconds(call: Callable[[], object]) -> float:
    """Time a call by the host's clock, from an idle device to an idle device."""
    gc.collect()
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
    gc.disable()  # collecting before a launch would cost 0.1 ms: it evicts the interpreter from the caches
    try:
        cupy.cuda.get_current_stream().synchronize()
        start.record()
        call()
        stop.record()
        stop.synchronize()
    finally:
        gc.enable()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3


def _overwrite_free_memory() -> None:
    """Fill free device memory, so that a call that writes nothing cannot return an earlier call's right result."""
    if why_no_cuda() is None:
        import cupy

        cupy.full(min(8 * GIB, cupy.cuda.runtime.memGetInfo()[0] // 2), 0xA5, cupy.uint8)


def _free_memory() -> None:
    gc.collect()
    if why_no_cuda() is None:
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        cupy.get_default_pinned_memory_pool().free_all_blocks()


def drop_from_page_cache(files: Iterable[Path]) -> None:
    """Write the files' dirty pages to the disk and tell the kernel to drop all their pages; this needs no root."""
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())  # a dirty page cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- the command


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A sub-command: what it runs, its help, the names of its cases, and defaults of the common options.

    `prepare`: is called before anything is printed.
    """

    run: Callable[[Bench, argparse.Namespace], None]
    help: str
    cases: Sequence[str] = ()
    runs: int = 5
    device: DeviceName = "auto"
    options: Sequence[cli.Option] = ()
    prepare: Callable[[argparse.Namespace], object] = lambda args: None


def run_suite(program: str, suite: Suite, argv: Sequence[str] | None = None) -> int:
    """Run one suite as a command; return 0, 1 if a result was wrong or a row of linumpy failed, 2 for bad options."""
    words = sys.argv[1:] if argv is None else list(argv)
    cases: list[Case] = []

    def body(args: argparse.Namespace) -> None:
        for folder in [args.folder, *(file.absolute().parent for file in (args.json, args.plot) if file)]:
            if folder is not None and not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {str(folder)!r}")
        suite.prepare(args)
        options = {name: value for name, value in vars(args).items() if name in Bench.__dataclass_fields__}
        bench = Bench(**options, cases=cases)
        facts = machine(bench.folder or Path())
        print(facts, end="\n\n")
        suite.run(bench, args)
        if args.json is not None:
            _write_json(args.json, [*program.split(), *words], facts, cases)
        if args.plot is not None:
            draw(cases, args.plot)

    code = cli.Command(program, suite.help, body, *_options(suite))(words)
    bad = [
        row for case in cases for row in case.rows if row.verdict == WRONG or (row.verdict == FAILED and row.is_ours)
    ]
    if bad:
        print(f"{program}: {len(bad)} results were WRONG or failed", file=sys.stderr)
    return code or int(bool(bad))


def _write_json(file: Path, command: Sequence[str], facts: str, cases: Sequence[Case]) -> None:
    """Write all times in seconds, and rates in the case's unit a second."""
    content = {
        "command": shlex.join(command),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": facts.splitlines(),
        "cases": [
            {name: getattr(case, name) for name in ("name", "description", "amount", "unit")}
            | {"rows": [asdict(row) | {"median": row.median} for row in case.rows]}
            for case in cases
        ],
    }
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _options(suite: Suite) -> Iterator[cli.Option]:
    yield from suite.options
    if suite.cases:
        text = f"Only these, of {', '.join(suite.cases)}."
        yield cli.Option("--only", nargs="+", default=(), choices=suite.cases, metavar="NAME", help=text)
    text = "Make data in a new folder here, which is removed at the end. [among temporary files]"
    yield from (
        cli.Option("--folder", type=Path, metavar="DIR", help=text),
        cli.Option("--scale", type=float, default=1.0, metavar="S", help="Shrink the data. [%(default)s]"),
        cli.Option("--device", choices=("auto", "cuda", "cpu"), default=suite.device, help="[%(default)s]"),
        cli.Option("--runs", type=int, default=suite.runs, metavar="N", help="Timed runs. [%(default)s]"),
        cli.Option("--json", type=Path, metavar="FILE", help="Write all times."),
        cli.Option("--plot", type=Path, metavar="FILE.png", help="Draw the rates."),
    )


def machine(folder: Path) -> str:
    """Describe the hardware, versions, the file system of a folder, and whether GPUDirect Storage reads from it."""
    points = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    kind = max((len(point), kind) for point, kind in points if folder.resolve().is_relative_to(point))[1]
    lines = [str(describe()), f"{'host':<12}{usable_cores()} cores, files on {kind}"]
    if kvikio_mode()[0] == "cufile":
        from linumpy.gpu.kvikio_zarr import gds_mode

        lines.append(f"{'folder':<12}{gds_mode(str(folder))[1]}")
    return "\n".join(lines)


def draw(cases: Sequence[Case], path: Path) -> None:
    """Draw a panel for each case, with a bar for each row."""
    from matplotlib.figure import Figure

    heights = [1 + len(case.rows) for case in cases]
    figure = Figure(figsize=(9, 1 + 0.3 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(cases), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, case in zip(panels, cases, strict=True):
        rates = [case.amount / row.median if row.median else 0 for row in case.rows]
        bars = panel.barh(
            [row.name for row in case.rows], rates, color=["C0" if r.is_ours else "0.6" for r in case.rows]
        )
        texts = [f"{rate:.3g}" if rate else row.verdict for rate, row in zip(rates, case.rows, strict=True)]
        panel.bar_label(bars, texts)
        panel.invert_yaxis()
        panel.set_title(f"{case.name}, {case.unit}/s", fontsize="medium", loc="left")
    figure.suptitle(describe().name)
    figure.savefig(path)
