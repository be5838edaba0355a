#!/usr/bin/env python3
"""Correct the galvo shift of an OCT mosaic: rotate the columns of its tiles back.

MOSAIC is a mosaic grid as OME-Zarr with axes z, y, x. If the camera starts its lines late or early, the columns of all
tiles are rotated cyclically along x, and a seam runs through each tile where the last column lies beside the first. The
seam is found by comparing neighbouring A-lines; without a clear seam the mosaic is written unchanged.

For example:
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr --columns 12
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-fix-galvo-shift", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="Mosaic grid to read.")
    parser.add_argument("output", type=Path, metavar="OUT", help="OME-Zarr mosaic to write.")
    parser.add_argument("--columns", type=int, metavar="N", help="Columns by which tiles are rotated. [detected]")
    parser.add_argument(
        "--min_contrast", type=float, default=1.5, metavar="C",
        help="Minimum contrast of a seam: the difference of its columns over the greatest difference of other "
        "neighbouring columns. [%(default)s]",
    )  # fmt: skip
    cli.add_tile_shape_argument(parser)
    cli.add_image_arguments(parser)
    return parser


def _fix(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.galvo import fix_galvo_shift

    command = cli.TileCommand.start(parsed)
    nbytes = command.input_nbytes()
    with command.progress("galvo", nbytes) as shared:
        shift = fix_galvo_shift(
            parsed.input, parsed.output, columns=parsed.columns, min_contrast=parsed.min_contrast, **shared
        )
    print(f"tiles were rotated by {shift.columns} columns (contrast of the seam {shift.contrast:.2f})")
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _fix, arguments)


if __name__ == "__main__":
    sys.exit(main())
