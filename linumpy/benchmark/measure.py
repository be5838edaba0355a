"""A whole benchmark: make or open the cases, run the paths, show what came of it.

In: a :class:`Request`. Out: text on standard output, and JSON and a picture where asked for. Stores that went into a
folder of the caller's stay; those of a temporary folder, and every flat file, are taken away.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from linumpy.benchmark import export, machine, plot, table
from linumpy.benchmark.cases import Case, generate, new_store, open_case
from linumpy.benchmark.paths import PATH_NAMES, TimedPath, standard_paths
from linumpy.benchmark.runner import WRONG, CaseResult, Settings, run_case
from linumpy.benchmark.specs import CaseSpec


@dataclass(frozen=True, slots=True)
class Request:
    """What to time, and where the results go.

    Attributes
    ----------
    array : str or None
        An array that is there.
    specs : tuple of CaseSpec
        Stores to make.
    folder : Path or None
        Where they are made; a temporary folder by default.
    only : tuple of str
        Names of the paths; all by default.
    runs : int
        Timed runs of a path.
    cold : bool
        Whether the files are dropped from the page cache before each run.
    json, plot : Path or None
        Files to write.
    command : str
        The command line, to be kept with the results.
    """

    array: str | None = None
    specs: tuple[CaseSpec, ...] = ()
    folder: Path | None = None
    only: tuple[str, ...] = ()
    runs: int = 5
    cold: bool = False
    json: Path | None = None
    plot: Path | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if (self.array is None) == (not self.specs):
            raise ValueError("give either an array that is there or stores to make")
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")
        unknown = [name for name in self.only if name not in PATH_NAMES]
        if unknown:
            raise ValueError(f"path {unknown[0]!r} is unknown: choose from {', '.join(PATH_NAMES)}")
        for file in (self.json, self.plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {str(file.parent)!r} for {file.name}")
        if self.plot is not None and self.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"{self.plot}: a plot is a .png, .pdf or .svg file")


def run(request: Request, paths: Sequence[TimedPath] | None = None) -> tuple[CaseResult, ...]:
    """Run a benchmark.

    Parameters
    ----------
    request : Request
        What to time.
    paths : sequence of TimedPath, optional
        Instead of the standard ones.

    Returns
    -------
    tuple of CaseResult
        One per case.

    Raises
    ------
    Exception
        What opening or making the case raises. What a path raises stands in its row.
    """
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    with _folder(request) as folder:
        for spec in request.specs:  # all of them, before hours are spent on the first
            new_store(spec, folder)
        found = None if request.array is None else open_case(request.array)
        here = machine.look(found.path if found else folder)
        settings = Settings(request.runs, request.cold, gpu=bool(here.gpu))
        chosen = [one for one in paths or standard_paths(settings.gpu) if not request.only or one.name in request.only]
        print(table.machine_text(here), end="\n\n")
        results = tuple(_run_cases(request, found, folder, chosen, settings))
    if any(one.case.reach is not None for one in results):
        print(table.summary_text(results), end="\n\n")
    if request.json is not None:
        export.write(request.json, export.document(results, here, settings, request.command, date))
        print(f"written: {request.json}")
    if request.plot is not None:
        plot.draw(results, here, date, request.plot)
        print(f"written: {request.plot}")
    return results


def wrong_results(results: Sequence[CaseResult]) -> int:
    """Count the paths that read wrong values."""
    return sum(path.verdict == WRONG for result in results for path in result.paths)


@contextlib.contextmanager
def _folder(request: Request) -> Iterator[Path]:
    if request.folder is not None or request.array is not None:
        yield request.folder or Path()
        return
    with tempfile.TemporaryDirectory(prefix="linum-benchmark-") as made:
        yield Path(made)


def _run_cases(
    request: Request, found: Case | None, folder: Path, paths: Sequence[TimedPath], settings: Settings
) -> Iterator[CaseResult]:
    """Run case after case; each one's table is shown as soon as it is there."""
    total = len(paths) * max(1, len(request.specs))
    with tqdm(total=total, unit="path", leave=False, disable=None) as bar:

        def on_path(case: Case, path: TimedPath) -> None:
            bar.set_description(table.case_progress(case, path.title))
            bar.update()

        whole = None
        for case in _cases(request, found, folder, bar):
            result = run_case(case, paths, settings, on_path, whole if case.region else None)
            mine = result.path("linumpy-auto")
            whole = mine.rate if mine and not case.region else whole
            bar.clear()
            print(table.case_text(result), end="\n\n", flush=True)
            yield result


def _cases(request: Request, found: Case | None, folder: Path, bar: tqdm) -> Iterator[Case]:
    if found is not None:
        yield found
    for spec in request.specs:
        bar.set_description(f"{spec.name}: writing")
        case = generate(spec, folder)
        yield case
        if request.folder is None:
            shutil.rmtree(case.path)
