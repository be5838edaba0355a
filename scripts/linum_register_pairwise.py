#!/usr/bin/env python3
"""Register the slices of a stack against each other, and solve for the transforms of all slices.

FOLDER holds the slices as OME-Zarr with axes z, y, x, numbered from the top down: by the digits after a z in the name
(slice_z03.ome.zarr), or else by the last digits. Each slice is compared with the next ones by projections of the planes
that show the same tissue, counted from the cut surfaces. Translation and rotation are searched by masked correlation,
then refined to fractions of a voxel, all pairs at once. A least-squares solution over all pairs gives the transforms,
which are written to TRANSFORMS (JSON). Pairs that do not fit the others are rejected, and a slice without a pair is
placed between its neighbours. linum-stack-slices makes the stack.

For example:
  linum-register-pairwise slices transforms.json --slicing_interval_mm 0.2
  linum-register-pairwise slices transforms.json --slicing_interval_mm 0.2 --shifts shifts.csv --scene
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-register-pairwise", description=__doc__)
    parser.add_argument("input", type=Path, metavar="FOLDER", help="Folder of the slices.")
    parser.add_argument("output", type=Path, metavar="TRANSFORMS", help="JSON file to write.")
    parser.add_argument(
        "--slicing_interval_mm", type=float, required=True, metavar="MM", help="Thickness cut off between slices."
    )
    parser.add_argument(
        "--shifts", type=Path, metavar="CSV",
        help="Table of the motor's shifts, as for linum-stack-slices-motor: where the search begins. [none]",
    )  # fmt: skip
    cli.add_slice_config_argument(parser)
    parser.add_argument(
        "--model", choices=("rigid", "affine", "translation"), default="rigid",
        help="Transforms in the plane of the slices. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--reach", type=int, default=2, metavar="N", help="Compare each slice with the next N slices. [%(default)s]"
    )
    parser.add_argument(
        "--max_angle",
        type=float,
        default=10.0,
        metavar="DEG",
        help="Maximum rotation to search, to each side. [%(default)s]",
    )
    parser.add_argument(
        "--max_shift", type=float, default=0.25, metavar="F",
        help="Maximum shift to search, as a fraction of the slice. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--min_correlation",
        type=float,
        default=0.2,
        metavar="R",
        help="Reject pairs that correlate less. [%(default)s]",
    )
    parser.add_argument(
        "--max_deviation", type=float, default=5.0, metavar="D",
        help="Reject pairs further than D robust standard deviations from the solution of all pairs. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--no_crop", action="store_true", help="Slices begin at their first plane: do not look for their cut surfaces."
    )
    parser.add_argument(
        "--depth_mm", type=float, metavar="MM", help="Use slices to this depth below their surface. [all]"
    )
    parser.add_argument(
        "--scene", action="store_true",
        help="Also write the transforms to FOLDER/zarr.json: a scene of NGFF 0.6 with the coordinate system 'stack'.",
    )  # fmt: skip
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_tile_arguments(parser)
    return parser


def _register(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.alignment.register import Alignment, register_slices
    from linumpy.mosaic.alignment.transforms import check_scene, write_scene

    command = cli.TileCommand.start(parsed)
    alignment = Alignment(
        parsed.slicing_interval_mm, parsed.model, parsed.reach, parsed.max_angle, parsed.max_shift,
        parsed.min_correlation, parsed.max_deviation, not parsed.no_crop, parsed.depth_mm,
    )  # fmt: skip
    if parsed.scene:
        check_scene(parsed.input, overwrite=parsed.overwrite)
    transforms = register_slices(
        parsed.input, parsed.output, alignment, shifts=parsed.shifts, slice_config=parsed.slice_config,
        **command.parameters(),
    )  # fmt: skip
    if parsed.scene:
        print(f"scene in {write_scene(parsed.input, transforms, overwrite=parsed.overwrite)}")
    print("fixed moving  correlation  error µm  residual µm")
    for pair in transforms.pairs:
        print(
            f"{pair.fixed_id:5d} {pair.moving_id:6d} {pair.correlation:12.3f} {pair.error_um:9.2f} "
            f"{pair.residual_um:12.2f}{'  rejected' if pair.rejected else ''}"
        )
    device, seconds = "GPU" if command.use_gpu else "CPU", time.perf_counter() - command.begin
    print(f"{parsed.input} -> {parsed.output} on {device}: {len(transforms.slices)} slices, {seconds:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _register, arguments)


if __name__ == "__main__":
    sys.exit(main())
