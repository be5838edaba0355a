#!/usr/bin/env python3
"""Time resampling, beside cupyx.scipy.ndimage on the same arrays, on this machine's GPU.

Timed are map_coordinates and affine_transform on 512³ voxels: linear and cubic (of coefficients that are there
already), at coordinates that follow the grid and at random ones; orders 2 and 5 with their filters; stacks of small
images, beside a loop over them; labels; and resize to half of it, smoothed first. Beside the linear maps of float32
stands torch's grid_sample, where PyTorch is installed. Each result is checked first, at 2000 points or in some planes,
against SciPy in float64; a wrong one is reported as WRONG and has no time. Times are medians, by CUDA events after
warm-ups; × is another's time over linumpy's; "of copy" is the rate of bytes that must at least be read and written
(coordinates and result, or image and result), as a part of a plain copy's.

For example:
  linum-benchmark-resampling
  linum-benchmark-resampling --only affine-linear --runs 50 --json resampling.json

With --zarr, resample_zarr is timed instead: a raw volume of so many GiB to half its resolution, beside reading the same
boxes, writing the same bytes, and both at once, by the clock on the wall. --folder needs 1.25 times as much space.

For example:
  linum-benchmark-resampling --zarr 32 --folder /scratch --device_memory 8 --json zarr.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.cases import CaseResult
from linumpy.benchmark.suites.resampling import MAKERS
from linumpy.benchmark.suites.zarr_to_zarr import ZarrRequest, zarr_cases
from linumpy.device import resolve


def _build_arg_parser() -> cli.Parser:
    parser = command.parser("linum-benchmark-resampling", __doc__)
    command.add_case_options(parser, MAKERS, scale="Shrink every axis.")
    command.add_options(parser, "20; 5 with --zarr")
    parser.add_argument("--zarr", type=float, metavar="GIB", help="Time resample_zarr on a volume of this size.")
    command.add_folder_option(parser, "Where to make it.")
    parser.add_argument(
        "--device_memory", type=float, default=8.0, metavar="GIB", help="What resample_zarr may take. [%(default)s]"
    )
    return parser


def _measure(args: argparse.Namespace, output: command.Output) -> Sequence[CaseResult]:
    if args.zarr is None:
        return command.run_kernels(MAKERS, args, output, 20)
    if args.only or args.scale != 1:
        raise ValueError("--only and --scale do not go with --zarr")
    settings = command.settings_of(args, 5)
    request = ZarrRequest(args.zarr, args.folder, args.device_memory, use_gpu=resolve().is_cuda)
    with zarr_cases(request) as (folder, cases):
        return command.run(cases, settings, output, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.main(_build_arg_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
