"""Estimate and correct the uneven illumination of the tiles of an OCT mosaic.

An objective does not light its field of view evenly, so that a mosaic has a pattern that repeats with its tiles. This
command estimates the pattern as a smooth flat field that all tiles share, and writes (voxel - dark) / flat. If tiles
are too few, or show too much structure of their own, a warning says so and voxels keep their values. Slices of one
brain should share one pattern: estimate it by linum-estimate-illumination. Reads an OME-Zarr volume with axes z, y and
x, in any order, whose first tile begins at its first voxel and whose tiles do not overlap, and writes another with the
same shape, dtype and chunks.

For example:
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --tile-shape 512 512
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --fields fields.npz
"""

from pathlib import Path

from linumpy import cli
from linumpy.correction.shading import ShadingOptions


def _fix(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.illumination import bytes_to_read, fix_illumination, read_fields, summary_of
    from linumpy.mosaic.io.image import open_mosaic

    command = cli.TileCommand(parsed)
    image = open_mosaic(parsed.input, **cli.volume_options(parsed))
    given = parsed.fields and read_fields(parsed.fields)
    nbytes = image.nbytes if given else bytes_to_read(image, parsed.tile_shape, max(1, parsed.max_tiles))
    fields = command.call(
        "illumination, correction", fix_illumination, parsed.input, parsed.output, nbytes=nbytes, fields=given,
        options=cli.record_of(parsed, ShadingOptions), max_tiles=parsed.max_tiles, report=parsed.report,
    )  # fmt: skip
    command.close(summary_of(fields), nbytes=nbytes)


main = cli.Command(
    "linum-fix-illumination", __doc__, _fix,
    *cli.paths("OME-Zarr volume.", "OME-Zarr volume to write."),
    *cli.shared("tile_shape"),
    cli.Option("--report", type=Path, metavar="PICTURE", help="Picture of the fields (.png, .pdf, .svg)."),
    cli.Option(
        "--fields", type=Path, metavar="FILE",
        help="Use the fields that linum-estimate-illumination wrote. [estimate them from this mosaic]",
    ),
    *cli.options_of(ShadingOptions, "estimating illumination"),
    *cli.shared("max_tiles", *cli.IMAGE),
)  # fmt: skip
