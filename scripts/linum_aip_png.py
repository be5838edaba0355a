#!/usr/bin/env python3
"""Draw the average intensity projection of an OCT mosaic as a PNG of 16 bits.

Reads an OME-Zarr volume with axes z, y and x, in any order, and takes the mean along z. Intensities from the 0.1st to
the 99.9th percentile become black to white, one pixel for each voxel. Voxels that focal correction filled are excluded.
--time and --channel select one of several volumes.

For example:
  linum-aip-png mosaic.ome.zarr aip.png
  linum-aip-png mosaic.ome.zarr aip.png --level 2 --no-use_gpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-aip-png", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="PNG", help="Picture to write.")
    parser.add_argument("--level", type=int, default=0, help="Resolution level to read; 0 is the finest. [0]")
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_tile_arguments(parser)
    return parser


def _project(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.aip import WINDOW, project_mosaic_to_png

    command = cli.TileCommand.start(parsed)
    with command.progress("projection", command.input_nbytes()) as shared:
        projection = project_mosaic_to_png(parsed.input, parsed.output, **shared)
    black, white = projection.window or (0.0, 0.0)
    low, high = WINDOW
    print(f"black is {black:.6g}, white {white:.6g}: percentiles {low} and {high}; values beyond are clipped")
    command.close(projection.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _project, arguments)


if __name__ == "__main__":
    sys.exit(main())
