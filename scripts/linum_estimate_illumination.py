#!/usr/bin/env python3
"""Estimate the uneven illumination that the tiles of several OCT mosaics share, such as the slices of a brain.

An objective does not light its field of view evenly, so that a mosaic has a pattern that repeats with its tiles. More
tiles tell the pattern better. Reads OME-Zarr volumes as linum-fix-illumination does, which takes the fields by
--fields. Beside FIELDS (.npz) a file with the suffix .json has their range, the number of tiles, the expected error and
warnings. If the tiles cannot tell the fields, a warning says so, and linum-fix-illumination leaves voxels as they are.

For example:
  linum-estimate-illumination slices/*.ome.zarr fields.npz --report illumination.png
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-estimate-illumination", description=__doc__)
    parser.add_argument("input", type=cli.source, nargs="+", metavar="MOSAIC", help="OME-Zarr volumes.")
    parser.add_argument("output", type=Path, metavar="FIELDS", help="File to write (.npz).")
    cli.add_tile_shape_argument(parser)
    parser.add_argument("--report", type=Path, metavar="PICTURE", help="Picture of the fields (.png, .pdf, .svg).")
    cli.add_illumination_arguments(parser)
    cli.add_tile_arguments(parser)
    return parser


def _estimate(parsed: argparse.Namespace) -> None:
    from linumpy.io.output.files import check_file
    from linumpy.mosaic.illumination import estimate_illumination, summary_of, write_fields

    use_gpu, begin, summary = cli.choose_device(parsed), time.perf_counter(), parsed.output.with_suffix(".json")
    if parsed.output.suffix != ".npz":
        raise ValueError(f"{parsed.output}: give the file of fields a name that ends in .npz")
    for path in (parsed.output, summary):
        check_file(path, overwrite=parsed.overwrite)
    fields = estimate_illumination(
        parsed.input, parsed.tile_shape and tuple(parsed.tile_shape), report=parsed.report, use_gpu=use_gpu,
        overwrite=parsed.overwrite, distributed=parsed.distributed, **cli.illumination_options(parsed),
    )  # fmt: skip
    write_fields(fields, parsed.output, summary, overwrite=parsed.overwrite)
    print(summary_of(fields))
    seconds = time.perf_counter() - begin
    print(f"{len(parsed.input)} mosaics -> {parsed.output} on {'GPU' if use_gpu else 'CPU'}: {seconds:.2f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _estimate, arguments)


if __name__ == "__main__":
    sys.exit(main())
