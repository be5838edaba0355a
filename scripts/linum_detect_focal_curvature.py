#!/usr/bin/env python3
"""Find and correct the focal curvature of an OCT mosaic.

The focal plane of an objective is slightly curved, so that a flat surface looks like a bowl in every tile. This command
finds the surface of the tissue, fits a quadratic to the mean tile, and shifts each A-line along z by the curvature at
its position in the tile. The curvature of the tissue itself is not corrected: it is found by the change of the slope
from tile to tile. Reads an OME-Zarr volume with axes z, y and x, in any order, whose first tile begins at its first
voxel and whose tiles do not overlap, and writes another with the same shape, dtype and chunks. --time and --channel
select one of several volumes.

Voxels that a shift leaves empty at an end of an A-line are filled with the nearest measured voxel of the A-line, which
makes no edge. The metadata of OUTPUT record the filled voxels (attribute linumpy, focal_corrections): surface
detection, the mean along z, the search for overlaps and the stack exclude them, whatever --fill_value is. With --wrap
nothing is filled, and voxels that enter from the other end count as measured.

For example:
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile_shape 512 512
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile_shape 512 512 --report focal.png --interpolate
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-detect-focal-curvature", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    cli.add_tile_shape_argument(parser)
    parser.add_argument(
        "--report", type=Path, metavar="PICTURE",
        help="Picture of the fit (.png, .pdf, .svg); its numbers are written beside it (.json).",
    )  # fmt: skip
    parser.add_argument("--interpolate", action="store_true", help="Shift by fractions of voxels. [by whole voxels]")
    parser.add_argument("--wrap", action="store_true", help="Let voxels that leave at one end enter at the other.")
    parser.add_argument(
        "--fill_value", type=float, metavar="V",
        help="Value of voxels from outside, without --wrap. [the nearest measured voxel of the A-line]",
    )  # fmt: skip
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_surface_arguments(parser)
    cli.add_tile_arguments(parser)
    return parser


def _detect(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.focal import FocalCorrection, correct_mosaic
    from linumpy.mosaic.surface import SurfaceMethod

    command = cli.TileCommand.start(parsed)
    nbytes = command.input_nbytes()
    method = SurfaceMethod(**cli.surface_options(parsed))
    correction = FocalCorrection(parsed.interpolate, parsed.wrap, parsed.fill_value)
    with command.progress("surface, correction", 2 * nbytes) as shared:
        curvature = correct_mosaic(
            parsed.input, parsed.output, method=method, correction=correction, report=parsed.report, **shared
        )
    print(
        f"focal curvature in voxels: {curvature.vv:.3f} v² + {curvature.vu:.3f} v u + {curvature.uu:.3f} u², from "
        f"{curvature.tiles} tiles, residual {curvature.rms:.3f} RMS"
    )
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _detect, arguments)


if __name__ == "__main__":
    sys.exit(main())
