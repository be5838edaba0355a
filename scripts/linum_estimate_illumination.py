"""Estimate the uneven illumination that the tiles of several OCT mosaics share, such as the slices of a brain.

An objective does not light its field of view evenly, so that a mosaic has a pattern that repeats with its tiles. More
tiles tell the pattern better. Reads OME-Zarr volumes as linum-fix-illumination does, which takes the fields by
--fields. Beside OUTPUT (.npz) a file with the suffix .json has their range, the number of tiles, the expected error and
warnings. If the tiles cannot tell the fields, a warning says so, and linum-fix-illumination leaves voxels as they are.

For example:
  linum-estimate-illumination slices/*.ome.zarr fields.npz --report illumination.png
"""

from pathlib import Path

from linumpy import cli
from linumpy.correction.shading import ShadingOptions


def _estimate(parsed: cli.Namespace) -> None:
    from linumpy.io.output.files import check_file
    from linumpy.mosaic.illumination import estimate_illumination, summary_of, write_fields

    command, summary = cli.TileCommand(parsed), parsed.output.with_suffix(".json")
    if parsed.output.suffix != ".npz":
        raise ValueError(f"{parsed.output}: give the file of fields a name that ends in .npz")
    for path in (parsed.output, summary):
        check_file(path, overwrite=parsed.overwrite)
    fields = estimate_illumination(
        parsed.input, options=cli.record_of(parsed, ShadingOptions), max_tiles=parsed.max_tiles, report=parsed.report,
        **command.parameters(),
    )  # fmt: skip
    write_fields(fields, parsed.output, summary, overwrite=parsed.overwrite)
    command.close(summary_of(fields), what=f"{len(parsed.input)} mosaics")


main = cli.Command(
    "linum-estimate-illumination", __doc__, _estimate,
    cli.Option("input", type=cli.path_or_url, nargs="+", metavar="INPUT", help="OME-Zarr volumes."),
    cli.Option("output", type=Path, metavar="OUTPUT", help="File to write (.npz)."),
    *cli.shared("tile_shape"),
    cli.Option("--report", type=Path, metavar="PICTURE", help="Picture of the fields (.png, .pdf, .svg)."),
    *cli.options_of(ShadingOptions, "estimating illumination"),
    *cli.shared("max_tiles", *cli.TILES),
)  # fmt: skip
