#!/usr/bin/env python3
"""Resample an OCT mosaic grid to another voxel spacing, tile by tile.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Every tile is resampled separately, so that none bleeds into its neighbour, and smoothed
along axes that get coarser. Writes a mosaic grid of the same dtype whose tiles have the nearest whole number of voxels,
to which the spacing in its metadata is adapted; each chunk is a tile.

Mosaics that linumpy wrote have the tile shape in their metadata; others need --tile_shape.

For example:
  linum-resample-mosaic-grid mosaic.ome.zarr mosaic_10um.ome.zarr --resolution 10
  linum-resample-mosaic-grid mosaic.ome.zarr out.ome.zarr --resolution 5 10 10 --tile_shape 512 512 --levels 3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-resample-mosaic-grid", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("output", type=Path, metavar="RESAMPLED", help="OME-Zarr mosaic grid to write.")
    parser.add_argument(
        "--resolution", type=float, nargs="+", required=True, metavar="UM",
        help="New voxel spacing in µm: one number, or three, along z, y and x.",
    )  # fmt: skip
    cli.add_tile_shape_argument(parser)
    cli.add_image_arguments(parser, all_of_them=True)
    return parser


def _resample(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.grid import resample_mosaic_grid

    command = cli.TileCommand.start(parsed)
    with command.progress("resampling", command.input_nbytes()) as shared:
        resampled = resample_mosaic_grid(parsed.input, parsed.output, cli.new_spacing(parsed), **shared)
    command.close(resampled.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _resample, arguments)


if __name__ == "__main__":
    sys.exit(main())
