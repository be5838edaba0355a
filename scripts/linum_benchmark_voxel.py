#!/usr/bin/env python3
"""Time voxel operations by Warp on this machine's GPU, beside other ways to do them.

Timed are a boolean operation on two masks of 1024³ voxels (beside CuPy's logical functions, and a plain copy), 1000
capsules removed from 512³ voxels in one pass (beside a launch for each), a dilation by a ball of radius 10
(beside cupyx.scipy.ndimage.binary_dilation) and a sphere of a million triangles made to 512³ voxels, from its vertices
on the device to the mask. Beside each stands SciPy on the host: one core works on a part, and the time is what 16 cores
would take for all of it if nothing were lost.

Each result is checked first; a wrong one is reported as WRONG and has no time. Times are medians, by CUDA events.

For example:
  linum-benchmark-voxel
  linum-benchmark-voxel --only ball mesh --runs 50 --json voxel.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.kernels import kernel_cases
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.voxel import MAKERS


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-voxel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Shrink every axis. [%(default)s]")
    command.add_options(parser, "20")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    try:
        output = command.output_of(parser, args, argv)
        settings = Settings(20 if args.runs is None else args.runs)
        results = command.run(kernel_cases(MAKERS, args.scale, tuple(args.only or ())), settings, output)
    except cli.EXPECTED as error:
        parser.error(str(error))
    return command.exit_code(parser, results)


if __name__ == "__main__":
    sys.exit(main())
