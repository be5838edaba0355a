"""What the benchmark commands share: parser, options, the run, and its results on the screen and in files.

In: cases (:mod:`linumpy.benchmark.runner`), or functions that make them. Out: a table on standard output, a JSON
document and a plot where asked for, and an exit code. Errors: ``ValueError`` and ``FileNotFoundError`` for options that
cannot be; what making a case raises. A command ends with one line for each of these (:func:`main`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from linumpy import cli
from linumpy.benchmark import machine, report
from linumpy.benchmark.cases import Case, CaseResult, Entry, Settings
from linumpy.benchmark.kernels import Makers, kernel_cases
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


def parser(program: str, description: str | None) -> cli.Parser:
    """Make the parser of a command, whose help is the docstring of its script."""
    return cli.Parser(prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_case_options(parser: argparse.ArgumentParser, names: Iterable[str], *, default: str = "", scale: str) -> None:
    """Add which cases are timed, and how much smaller they are made.

    Parameters
    ----------
    parser : ArgumentParser
        Of the command.
    names : iterable of str
        All cases.
    default : str
        Those that are timed by default; all without it.
    scale : str
        What ``--scale`` makes smaller.
    """
    names = tuple(names)
    text = f"Of {', '.join(names)}." + (f" [{default}]" if default else "")
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help=text)
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help=f"{scale} [%(default)s]")


def add_folder_option(parser: argparse.ArgumentParser, text: str) -> None:
    """Add where data are made, in a folder of its own that is removed at the end."""
    parser.add_argument("--folder", type=Path, metavar="DIR", help=f"{text} [where temporary files go]")


def add_options(parser: argparse.ArgumentParser, runs: str) -> None:
    """Add the options of every benchmark; `runs` tells the default of ``--runs``, which is None."""
    parser.add_argument("--runs", type=int, metavar="N", help=f"Timed runs of each. [{runs}]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all times, with hardware and versions.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the rates.")


def main(
    parser: cli.Parser,
    argv: Sequence[str] | None,
    measure: Callable[[argparse.Namespace, Output], Sequence[CaseResult]],
) -> int:
    """Carry a command out.

    Parameters
    ----------
    parser : cli.Parser
        With :func:`add_options`.
    argv : sequence of str, optional
        Words of the command line, by default those of this process.
    measure : callable
        Times what the arguments ask for and writes the results (:func:`run`, :func:`run_kernels`).

    Returns
    -------
    int
        0 where all went well; 1 where a result was wrong, after a line on standard error. What cannot be run at all
        ends the process with 2.
    """
    args = parser.parse_args(argv)
    command = shlex.join([parser.prog, *(sys.argv[1:] if argv is None else argv)])
    try:
        results = measure(args, Output(args.json, args.plot, command))
    except cli.EXPECTED as error:
        parser.error(parser.in_options(error))
    count = failures(results)
    if count:
        print(f"{parser.prog}: {count} results were WRONG or failed", file=sys.stderr)
    return 1 if count else 0


def settings_of(args: argparse.Namespace, runs: int, *, cold: bool = False) -> Settings:
    """Say how to time: ``--runs``, by default `runs`."""
    return Settings(runs if args.runs is None else args.runs, cold)


def run_kernels(makers: Makers, args: argparse.Namespace, output: Output, runs: int) -> tuple[CaseResult, ...]:
    """Time the cases on this machine's GPU that :func:`add_case_options` asks for."""
    settings = settings_of(args, runs)
    return run(kernel_cases(makers, args.scale, tuple(args.only or ())), settings, output)


def kernels_main(
    program: str, description: str | None, makers: Makers, argv: Sequence[str] | None, *, runs: int, scale: str
) -> int:
    """Carry out a command that times kernels and nothing else; see :func:`main` and :func:`add_case_options`."""
    words = parser(program, description)
    add_case_options(words, makers, scale=scale)
    add_options(words, str(runs))
    return main(words, argv, lambda args, output: run_kernels(makers, args, output, runs))
