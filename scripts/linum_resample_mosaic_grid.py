"""Resample an OCT mosaic grid to another voxel spacing, tile by tile.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Every tile is resampled separately, so that none bleeds into its neighbour, and smoothed
along axes that get coarser. Writes a mosaic grid of the same dtype whose tiles have the nearest whole number of voxels,
to which the spacing in its metadata is adapted; each chunk is a tile.

Mosaics that linumpy wrote have the tile shape in their metadata; others need --tile-shape.

For example:
  linum-resample-mosaic-grid mosaic.ome.zarr mosaic_10um.ome.zarr --resolution 10
  linum-resample-mosaic-grid mosaic.ome.zarr out.ome.zarr --resolution 5 10 10 --tile-shape 512 512 --levels 3
"""

from linumpy import cli


def _resample(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.grid import resample_mosaic_grid

    command = cli.TileCommand(parsed)
    command.call("resampling", resample_mosaic_grid, parsed.input, parsed.output, cli.new_spacing(parsed))
    command.close()


main = cli.Command(
    "linum-resample-mosaic-grid", __doc__, _resample,
    *cli.paths("OME-Zarr mosaic grid.", "OME-Zarr mosaic grid to write."),
    cli.Option(
        "--resolution", type=float, nargs="+", required=True, metavar="UM",
        help="New voxel spacing in µm: one number, or three, along z, y and x.",
    ),
    *cli.shared("tile_shape", *cli.IMAGE, channel="all", time="all"),
)  # fmt: skip
