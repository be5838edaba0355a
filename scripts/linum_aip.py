"""Take the average intensity projection of an OCT mosaic.

Reads an OME-Zarr volume with axes z, y and x, in any order, and writes the mean along z as an OME-Zarr image (float32)
with the mosaic's lateral spacing: one for each time and channel, or for those of --time and --channel. Voxels that
focal correction filled are excluded.

For example:
  linum-aip mosaic.ome.zarr aip.ome.zarr
  linum-aip mosaic.ome.zarr aip.ome.zarr --level 1 --device cuda --overwrite
  linum-aip mosaic.ome.zarr aip.ome.zarr --channel 0 --spacing 5 10 10
"""

from pathlib import Path

from linumpy import cli


def _project(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.aip import project_mosaic

    if Path(parsed.output).suffix.lower() in (".png", ".jpg", ".jpeg", ".tif", ".tiff"):
        raise ValueError(
            f"{parsed.output} names a picture: linum-aip-png draws one, linum-aip writes an OME-Zarr image"
        )
    command = cli.TileCommand(parsed)
    command.call("projection", project_mosaic, parsed.input, parsed.output)
    command.close()


main = cli.Command(
    "linum-aip", __doc__, _project,
    *cli.paths("OME-Zarr volume.", "OME-Zarr image to write."),
    *cli.shared("level", *cli.VOLUME, "codec", *cli.TILES, channel="all", time="all"),
)  # fmt: skip
