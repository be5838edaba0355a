#!/usr/bin/env python3
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
  linum-estimate-transform mosaic.ome.zarr positions.csv --overlap 0.3 --tile_shape 512 512
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-estimate-transform", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("output", type=Path, metavar="POSITIONS", help="File to write: .json or .csv.")
    parser.add_argument(
        "--overlap", type=float, default=0.2, metavar="SHARE",
        help="Nominal overlap of neighbouring tiles, as a share of a tile; the true overlap may differ by three "
        "quarters of the nominal one. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--min_evidence", type=float, default=0.6, metavar="P",
        help="A shift is rejected if it is right with less probability. [%(default)s]",
    )  # fmt: skip
    cli.add_tile_shape_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_tile_arguments(parser)
    return parser


def _estimate(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.tile_positions import estimate_positions
    from linumpy.registration.position_files import table_of

    command = cli.TileCommand.start(parsed)
    nbytes = command.input_nbytes()
    with command.progress("positions", nbytes) as shared:
        positions = estimate_positions(
            parsed.input, parsed.output, overlap=parsed.overlap, min_evidence=parsed.min_evidence, **shared
        )
    print(table_of(positions))
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _estimate, arguments)


if __name__ == "__main__":
    sys.exit(main())
