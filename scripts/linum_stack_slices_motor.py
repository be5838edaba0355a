#!/usr/bin/env python3
"""Stack OCT slices into one volume, by the shifts of the motor and by their overlaps along z.

FOLDER holds the slices as OME-Zarr with axes z, y, x, numbered from the top down: by the digits after a z in the name
(slice_z03.ome.zarr), or else by the last digits. SHIFTS is a CSV table with the columns fixed_id, moving_id, x_shift,
y_shift, x_shift_mm, y_shift_mm: a voxel at p of the moving slice is at p + shift of the fixed one. The columns in mm
are used, so the table fits slices of any resolution. Rows are summed across missing slices, which leave a gap, and rows
of other slices are ignored. Shifts whose column reliable, if there is one, is 0 or false are used, with a warning.

For each pair the overlap along z is searched around the expected overlap (depth of the slice less the slicing
interval). Overlaps with too little correlation, or too far from the others, are replaced by the typical overlap. Slices
are blended where they overlap. The decision for each pair is written to a table. Voxels that focal correction filled
are excluded from the search and, where the other slice has a measured voxel, from the stack.

For example:
  linum-stack-slices-motor slices shifts.csv stack.ome.zarr --slicing_interval_mm 0.2
  linum-stack-slices-motor slices shifts.csv stack.ome.zarr --slicing_interval_mm 0.2 --search_range_mm 0.05 --use_gpu
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-stack-slices-motor", description=__doc__)
    parser.add_argument("input", type=Path, metavar="FOLDER", help="Folder of the slices.")
    parser.add_argument("shifts", type=Path, metavar="SHIFTS", help="CSV table of shifts.")
    parser.add_argument("output", type=Path, metavar="STACK", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--slicing_interval_mm", type=float, required=True, metavar="MM", help="Thickness cut off between slices."
    )
    parser.add_argument(
        "--search_range_mm", type=float, default=0.1, metavar="MM",
        help="Largest distance of an overlap from the expected one, to each side. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--min_correlation",
        type=float,
        default=0.2,
        metavar="R",
        help="Replace overlaps that correlate less. [%(default)s]",
    )
    parser.add_argument(
        "--max_deviation", type=float, default=3.0, metavar="D",
        help="Replace overlaps further than D robust standard deviations from the typical overlap. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--decisions",
        type=Path,
        metavar="CSV",
        help="Table of decisions to write. [beside STACK, ending in _decisions.csv]",
    )
    cli.add_slice_config_argument(parser)
    cli.add_image_arguments(parser)
    return parser


def _stack(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.io.slice_table import find_slices, open_slices
    from linumpy.mosaic.slices import ZSearch, stack_mosaics

    command = cli.TileCommand.start(parsed)
    search = ZSearch(parsed.slicing_interval_mm, parsed.search_range_mm, parsed.min_correlation, parsed.max_deviation)
    stem = parsed.output.name.removesuffix(".zarr").removesuffix(".ome")
    decisions = parsed.decisions or parsed.output.with_name(f"{stem}_decisions.csv")
    slices = open_slices(find_slices(parsed.input, parsed.slice_config), **cli.volume_options(parsed))
    with command.progress("stack", sum(image.nbytes for image in slices.values())) as shared:
        stack = stack_mosaics(
            parsed.input, parsed.shifts, parsed.output, search, decisions=decisions, slice_config=parsed.slice_config,
            **shared,
        )  # fmt: skip
    mended = sum(row.mended for row in stack.decisions)
    print(f"{len(stack.decisions)} overlaps, {mended} of them replaced by the typical one; decisions in {decisions}")
    command.close(stack.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _stack, arguments)


if __name__ == "__main__":
    sys.exit(main())
