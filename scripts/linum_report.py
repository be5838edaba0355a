"""Write a report of a folder of results as one HTML page.

The page begins with warnings: those that stages wrote, stages that were left out, rejected registrations, clipping,
missing slices, jumps of brightness between slices, slices that do not match where they meet, slices that differ from
their neighbours. Then it shows the slices side by side: a row for each slice, a column for each stage, with one grey
scale for all slices of a column; red where a warning concerns a slice. Below are numbers, times, tables, and the
pictures of stages. The page needs no other files, and no network.

FOLDER holds the results of linum-pipeline or of single commands, also in folders below it. The RUN file of
linum-pipeline may be given in its place.

For example:
  linum-report results/ report.html
  linum-report run.toml report.html
"""

from pathlib import Path

from linumpy import cli


def _report(parsed: cli.Namespace) -> None:
    from linumpy.pipeline.settings import read_run
    from linumpy.quality.report import write_report

    folder = read_run(parsed.input).output if parsed.input.is_file() else parsed.input
    report = write_report(
        folder, parsed.output, device=cli.device_and_name(parsed)[0], overwrite=parsed.overwrite,
        follow_links=parsed.follow_links,
    )  # fmt: skip
    cli.say(f"{folder} -> {parsed.output}: {len(report.images)} images, {len(report.warnings)} warnings")


main = cli.Command(
    "linum-report", __doc__, _report,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of results, or a run of linum-pipeline."),
    cli.Option("output", type=Path, metavar="OUTPUT", help="HTML page to write."),
    cli.Option(
        "--follow-links", action="store_true", help="Also report images and files behind symbolic links."
    ),
    *cli.shared("device", "overwrite"),
)  # fmt: skip
