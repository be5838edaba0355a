#!/usr/bin/env python3
"""Find the positions of the tiles of an OCT mosaic grid by their overlaps.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Neighbouring tiles show the same tissue in their overlap. The shift between them is found by
phase correlation, to fractions of a voxel. The positions are the best fit to all shifts that are not rejected. A shift
is rejected if its correlation is low, if it is far from the regular grid of the acquisition, or if it contradicts the
others. Tiles without contrast are placed on the regular grid.

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
        "--min_confidence", type=float, default=0.3, metavar="R",
        help="A shift is rejected if the overlap correlates less. [%(default)s]",
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
            parsed.input, parsed.output, overlap=parsed.overlap, min_confidence=parsed.min_confidence, **shared
        )
    print(table_of(positions))
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _estimate, arguments)


if __name__ == "__main__":
    sys.exit(main())
