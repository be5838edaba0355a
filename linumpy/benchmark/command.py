"""What the benchmark commands share: options, the run, and its results on the screen and in files.

In: cases (:mod:`linumpy.benchmark.runner`). Out: a table on standard output, and a JSON document and a plot where asked
for. Errors: ``ValueError`` and ``FileNotFoundError`` for options that cannot be; what making a case raises.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from linumpy.benchmark import machine, report
from linumpy.benchmark.cases import Case, CaseResult, Entry, Settings
from linumpy.benchmark.runner import failures, run_cases


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go besides the screen.

    Attributes
    ----------
    json, plot : Path or None
        Files to write.
    command : str
        The command line, to be kept with the results.

    Raises
    ------
    FileNotFoundError
        Where the folder of a file is missing.
    ValueError
        For a plot that is no .png, .pdf or .svg file.
    """

    json: Path | None = None
    plot: Path | None = None
    command: str = ""

    def __post_init__(self) -> None:
        for file in (self.json, self.plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {str(file.parent)!r} for {file.name}")
        if self.plot is not None and self.plot.suffix.lower() not in (".png", ".pdf", ".svg"):
            raise ValueError(f"{self.plot}: a plot is a .png, .pdf or .svg file")


def run(
    cases: Iterable[Case], settings: Settings, output: Output | None = None, folder: Path | None = None
) -> tuple[CaseResult, ...]:
    """Check and time cases, show each as soon as it is done, and write the files asked for.

    Parameters
    ----------
    cases : iterable of Case
        Made one after another.
    settings : Settings
        How to time.
    output : Output, optional
        Files to write.
    folder : Path, optional
        Where the data lie; its file system is named in the results.
    """
    output = output or Output()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    here = machine.look(folder or Path())
    print(report.machine_text(here), end="\n\n")
    with tqdm(unit="run", leave=False, disable=None) as bar:

        def on_entry(case: Case, entry: Entry) -> None:
            bar.set_description(report.progress_text(case, entry.title))
            bar.update()

        def on_result(result: CaseResult) -> None:
            bar.clear()
            print(report.case_text(result), end="\n\n", flush=True)

        results = run_cases(cases, settings, on_entry, on_result)
    if any(one.marks for one in results):
        print(report.summary_text(results), end="\n\n")
    if output.json is not None:
        report.write_json(output.json, report.document(results, here, settings, output.command, date))
        print(f"written: {output.json}")
    if output.plot is not None:
        report.draw(results, here, date, output.plot)
        print(f"written: {output.plot}")
    return results


def add_options(parser: argparse.ArgumentParser, runs: str) -> None:
    """Add the options of every benchmark; `runs` tells the default of ``--runs``, which is None."""
    parser.add_argument("--runs", type=int, metavar="N", help=f"Timed runs of each. [{runs}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all times, with hardware and versions.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the rates.")


def output_of(parser: argparse.ArgumentParser, args: argparse.Namespace, argv: Sequence[str] | None) -> Output:
    """Return where the results go that the options of :func:`add_options` ask for."""
    return Output(args.json, args.plot, shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)]))


def exit_code(parser: argparse.ArgumentParser, results: Sequence[CaseResult]) -> int:
    """Return 0 where all went well; else 1, after a line on standard error."""
    count = failures(results)
    if count:
        print(f"{parser.prog}: {count} results were WRONG or failed", file=sys.stderr)
    return 1 if count else 0
