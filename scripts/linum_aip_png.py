"""Draw the average intensity projection of an OCT mosaic as a PNG of 16 bits.

Reads an OME-Zarr volume with axes z, y and x, in any order, and takes the mean along z. Intensities from the 0.1st to
the 99.9th percentile become black to white, one pixel for each voxel. Voxels that focal correction filled are excluded.
--time and --channel select one of several volumes.

For example:
  linum-aip-png mosaic.ome.zarr aip.png
  linum-aip-png mosaic.ome.zarr aip.png --level 2 --device cpu
"""

from linumpy import cli


def _project(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.aip import WINDOW, project_mosaic_to_png

    command = cli.TileCommand(parsed)
    black, white = command.call("projection", project_mosaic_to_png, parsed.input, parsed.output)
    low, high = WINDOW
    command.close(f"black is {black:.6g}, white {white:.6g}: percentiles {low} and {high}; values beyond are clipped")


main = cli.Command(
    "linum-aip-png", __doc__, _project,
    *cli.paths("OME-Zarr volume.", "Picture to write."),
    *cli.shared("level", *cli.VOLUME, *cli.TILES),
)  # fmt: skip
