#!/usr/bin/env python3
"""Time resampling, beside cupyx.scipy.ndimage on the same arrays, on this machine's GPU.

Timed are map_coordinates and affine_transform on 512³ voxels: linear and cubic (of coefficients that are there
already), at places that follow the grid and at random ones; orders 2 and 5 with their filters; stacks of small images,
beside a loop over them; labels; and resize to half of it, smoothed first. Beside the linear
maps of float32 stands torch's grid_sample, where PyTorch is installed. Each result is checked first, at 2000 places or
in some planes, against SciPy in float64; a wrong one is reported as WRONG and has no time. Times are medians, by CUDA
events after warm-ups; × is another's time over linumpy's; "of copy" is the rate of bytes that must at least be read and
written (places and result, or image and result), as a part of a plain copy's.

For example:
  linum-benchmark-resampling
  linum-benchmark-resampling --only affine-linear --runs 50 --json resampling.json

With --zarr, resample_zarr is timed instead: a raw volume of so many GiB to half its resolution, beside reading the same
boxes, writing the same bytes, and both at once, by the clock on the wall. It takes 1.25 times as much room in --folder.

For example:
  linum-benchmark-resampling --zarr 32 --folder /scratch --device_memory 8 --json zarr.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.cases import Settings
from linumpy.benchmark.kernels import kernel_cases
from linumpy.benchmark.suites.resampling import MAKERS
from linumpy.benchmark.suites.zarr_to_zarr import ZarrRequest, zarr_cases
from linumpy.device import resolve


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-resampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Shrink every axis. [%(default)s]")
    command.add_options(parser, "20; 5 with --zarr")
    parser.add_argument("--zarr", type=float, metavar="GIB", help="Time resample_zarr on a volume of this size.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="Where to make it. [where temporary files go]")
    parser.add_argument(
        "--device_memory", type=float, default=8.0, metavar="GIB", help="What resample_zarr may take. [%(default)s]"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    if args.zarr is not None and (args.only or args.scale != 1):
        parser.error("--only and --scale do not go with --zarr")
    try:
        output = command.output_of(parser, args, argv)
        if args.zarr is None:
            settings = Settings(20 if args.runs is None else args.runs)
            results = command.run(kernel_cases(MAKERS, args.scale, args.only or ()), settings, output)
        else:
            settings = Settings(5 if args.runs is None else args.runs)
            request = ZarrRequest(args.zarr, args.folder, args.device_memory, use_gpu=resolve("auto").is_cuda)
            with zarr_cases(request) as (folder, cases):
                results = command.run(cases, settings, output, folder)
    except cli.EXPECTED as error:
        parser.error(str(error))
    return command.exit_code(parser, results)


if __name__ == "__main__":
    sys.exit(main())
