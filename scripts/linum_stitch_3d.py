#!/usr/bin/env python3
"""Stitch the tiles of an OCT mosaic grid into one volume.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: overlapping tiles side by side along y and x, each of
them whole along z. Also reads the positions of the tiles, as linum-estimate-transform writes them. Writes a volume of
the same dtype and axes, with --levels resolutions. Tiles are placed to fractions of voxels, and blended by weights
where they overlap. Missing tiles are left out; where no tile lies the volume is 0.

For example:
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr --blending diffusion --levels 4 --use_gpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-stitch-3d", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("positions", type=Path, metavar="POSITIONS", help="Positions of the tiles: .json or .csv.")
    parser.add_argument("output", type=Path, metavar="STITCHED", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--blending", choices=("distance", "diffusion"), default="distance",
        help="Weights of tiles where they overlap: by the distance to their borders, or by diffusion from the parts "
        "where one tile lies alone, which also suits displaced tiles. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--interpolate", action=argparse.BooleanOptionalAction, default=True,
        help="Place tiles to fractions of voxels, interpolated linearly, or at the nearest whole voxel. [interpolate]",
    )  # fmt: skip
    cli.add_tile_shape_argument(parser)
    parser.add_argument(
        "--chunks", type=int, nargs=3, metavar="N", help="Chunks of the volume. [at most 8 MiB, about cubes]"
    )
    cli.add_image_arguments(parser)
    return parser


def _stitch(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.stitching import stitch_mosaic

    command = cli.TileCommand.start(parsed)
    with command.progress("stitching", command.input_nbytes()) as shared:
        stitched = stitch_mosaic(
            parsed.input, parsed.positions, parsed.output, blending=parsed.blending, interpolate=parsed.interpolate,
            chunks=parsed.chunks, **shared,
        )  # fmt: skip
    height, width = stitched.plan.size
    print(f"{len(stitched.plan.offsets)} tiles stitched to {height} × {width} voxels")
    command.close(stitched.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _stitch, arguments)


if __name__ == "__main__":
    sys.exit(main())
