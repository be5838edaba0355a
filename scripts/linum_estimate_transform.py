"""Find the positions of the tiles of an OCT mosaic grid by their overlaps.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Neighbouring tiles show the same tissue in their overlap. What all tiles share, such as
illumination, is taken out first. The shift between neighbours is found to fractions of a voxel, and with it the
probability that it is right, judged by how well the tiles match at all other shifts and how well tiles match that are
no neighbours. The positions are the best fit to all shifts that are probable enough and do not contradict the others.
Tiles that show no structure, such as tiles of agarose, are placed on the regular grid that the others show, or without
any on the nominal grid; a warning says how many. Illumination should be corrected first (linum-fix-illumination).

Writes the positions as JSON, with all pairs, or as a CSV table; linum-stitch-3d reads both. Prints the regular grid and
the residuals.

For example:
  linum-estimate-transform mosaic.ome.zarr positions.json
  linum-estimate-transform mosaic.ome.zarr positions.csv --overlap 0.3 --tile-shape 512 512
"""

from linumpy import cli
from linumpy.mosaic.options import Positions


def _estimate(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.tile_positions import estimate_positions
    from linumpy.registration.position_files import table_of

    command, options = cli.TileCommand(parsed), cli.record_of(parsed, Positions)
    positions = command.call("positions", estimate_positions, parsed.input, parsed.output, options)
    command.close(table_of(positions))


main = cli.Command(
    "linum-estimate-transform", __doc__, _estimate,
    *cli.paths("OME-Zarr mosaic grid.", "File to write: .json or .csv."),
    *cli.options_of(Positions),
    *cli.shared("tile_shape", *cli.VOLUME, *cli.TILES),
)  # fmt: skip
