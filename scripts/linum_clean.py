"""Remove what a stopped run has left of an image: its complete blocks, and temporary files.

An image that a run is writing, and a complete image, are left alone. OUTPUT is the path or URL that the stopped command
was to write. A bucket may also keep parts of uploads that were cut off, which only its own rules remove.

For example:
  linum-clean brain-25um.ome.zarr
  linum-clean s3://bucket/brain-25um.ome.zarr
"""

from linumpy import cli


def _clean(parsed: cli.Namespace) -> None:
    from linumpy.io.output.checks import target_of
    from linumpy.io.output.folders import clean

    found = clean(target_of(parsed.output))
    what = "removed what a stopped run had left" if found else "no stopped run has left anything"
    cli.say(f"{parsed.output}: {what}")


main = cli.Command(
    "linum-clean", __doc__, _clean,
    cli.Option("output", type=cli.path_or_url, metavar="OUTPUT", help="Image that was to be written."),
)  # fmt: skip
