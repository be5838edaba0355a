"""``linum-benchmark SUITE``: the options, the run, and the results on the screen and in files.

In: the words of the command line. Out: a table on standard output, a JSON document and a plot if requested, and an exit
code: 0 on success; 1, after a line on standard error, if a result was wrong or an entry of linumpy failed; 2, after a
line on standard error, if the options or the data do not allow a run.
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

from linumpy import cli
from linumpy.benchmark import machine, report
from linumpy.benchmark.cases import Case, Entry, Suite
from linumpy.benchmark.runner import CaseResult, Settings, failures, run_cases
from linumpy.benchmark.suites import SUITES, load_suite

DESCRIPTION = """Time linumpy beside its peers and the limits of the hardware, on this machine.

Each result is checked before it is timed; a wrong result is reported as WRONG and has no time. Times are medians after
warm-ups. A peer that is not installed is reported, with what to install. linum-benchmark SUITE --help describes a
suite.

For example:
  linum-benchmark read mosaic.ome.zarr --plot mosaic.png
  linum-benchmark stream --folder /dev/shm --json stream.json
"""


@dataclass(frozen=True, slots=True)
class Output:
    """Files to write, and the command line that is stored with the results.

    Raises
    ------
    FileNotFoundError
        The folder of a file does not exist.
    ValueError
        The plot is not a .png, .pdf or .svg file.
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
    """Check and time cases, print each case as soon as it is complete, and write the files of `output`.

    Parameters
    ----------
    cases, settings
        As for :func:`linumpy.benchmark.runner.run_cases`.
    output : Output, optional
        Files to write.
    folder : Path, optional
        Folder of the data, whose file system the results name; by default the current folder.

    Returns
    -------
    tuple of CaseResult
        The result of each case.
    """
    output = output or Output()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    this_machine = machine.describe_machine(folder or Path())
    print(report.machine_text(this_machine), end="\n\n")
    with tqdm(unit="run", leave=False, disable=None) as bar:

        def on_entry(case: Case, entry: Entry) -> None:
            bar.set_description(report.progress_text(case, entry.title))
            bar.update()

        def on_result(result: CaseResult) -> None:
            bar.clear()
            print(report.case_text(result), end="\n\n", flush=True)

        results = run_cases(cases, settings, on_entry, on_result)
    if any(result.marks for result in results):
        print(report.summary_text(results), end="\n\n")
    if output.json is not None:
        report.write_json(output.json, report.document(results, this_machine, settings, output.command, date))
        print(f"written: {output.json}")
    if output.plot is not None:
        report.draw(results, this_machine, date, output.plot)
        print(f"written: {output.plot}")
    return results


def _add_options(parser: argparse.ArgumentParser, suite: Suite) -> None:
    suite.add_options(parser)
    if suite.names:
        help = f"Only these, of {', '.join(suite.names)}."
        parser.add_argument("--only", nargs="+", default=(), choices=suite.names, metavar="NAME", help=help)
    if suite.scale:
        parser.add_argument("--scale", type=float, default=1.0, metavar="S", help=f"{suite.scale} [%(default)s]")
    if suite.folder:
        help = f"{suite.folder}, in a new folder that is removed at the end. [where temporary files go]"
        parser.add_argument("--folder", type=Path, metavar="DIR", help=help)
    runs_help = "Timed runs of each entry. [%(default)s]"
    parser.add_argument("--runs", type=int, default=suite.runs, metavar="N", help=runs_help)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all times, with hardware and versions.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the rates.")
    parser.set_defaults(suite=suite, parser=parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``linum-benchmark``; see the module for the exit code."""
    form = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(prog="linum-benchmark", description=DESCRIPTION, formatter_class=form)
    suites = parser.add_subparsers(metavar="SUITE", required=True, title="suites")
    chosen = (sys.argv[1:] if argv is None else list(argv))[:1]
    for name, summary in SUITES.items():
        if [name] == chosen:
            suite = load_suite(name)
            description = suite.description
            _add_options(suites.add_parser(name, help=summary, description=description, formatter_class=form), suite)
        else:
            suites.add_parser(name, help=summary)
    return _run_command(parser, argv)


def suite_main(program: str, name: str, argv: Sequence[str] | None = None) -> int:
    """Run one suite as a command of its own."""
    suite = load_suite(name)
    description = suite.description.replace(f"linum-benchmark {name}", program)
    form = argparse.RawDescriptionHelpFormatter
    parser = cli.Parser(prog=program, description=description, formatter_class=form)
    _add_options(parser, suite)
    return _run_command(parser, argv)


def _run_command(parser: cli.Parser, argv: Sequence[str] | None) -> int:
    options = vars(parser.parse_args(argv))
    command = shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)])
    suite, parser, runs, json, plot = (options.pop(name) for name in ("suite", "parser", "runs", "json", "plot"))
    try:
        settings, output = Settings(runs, options.get("cold", False)), Output(json, plot, command)
        with suite.cases(**options) as (folder, cases):
            results = run(cases, settings, output, folder)
    except cli.EXPECTED as error:
        parser.error(parser.in_options(error))
    print(suite.closing(results), end="")
    count = failures(results)
    if count:
        print(f"{parser.prog}: {count} results were WRONG or failed", file=sys.stderr)
    return 1 if count else 0
