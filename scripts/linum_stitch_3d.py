"""Stitch the tiles of an OCT mosaic grid into one volume.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: overlapping tiles side by side along y and x, each of
them whole along z. Also reads the positions of the tiles, as linum-estimate-transform writes them. Writes a volume of
the same dtype and axes, with --levels resolutions. Tiles are placed to fractions of voxels, and blended by weights
where they overlap. Missing tiles are left out; where no tile lies the volume is 0.

For example:
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr --blending diffusion --levels 4 --device cuda
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import Stitch


def _stitch(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.stitching import stitch_mosaic

    command, options = cli.TileCommand(parsed), cli.record_of(parsed, Stitch)
    stitched = command.call(
        "stitching", stitch_mosaic, parsed.input, parsed.positions, parsed.output, options, chunks=parsed.chunks
    )
    height, width = stitched.plan.size
    command.close(f"{len(stitched.plan.offsets)} tiles stitched to {height} × {width} voxels", nbytes=stitched.nbytes)


main = cli.Command(
    "linum-stitch-3d", __doc__, _stitch,
    cli.Option("input", type=cli.path_or_url, metavar="INPUT", help="OME-Zarr mosaic grid."),
    cli.Option("positions", type=Path, metavar="POSITIONS", help="Positions of the tiles: .json or .csv."),
    cli.Option("output", type=cli.path_or_url, metavar="OUTPUT", help="OME-Zarr volume to write."),
    *cli.options_of(Stitch),
    *cli.shared("tile_shape"),
    cli.Option(
        "--chunks", type=int, nargs=3, metavar="N", help="Chunks of the volume. [at most 8 MiB, about cubes]"
    ),
    *cli.shared(*cli.IMAGE),
)  # fmt: skip
