#!/usr/bin/env python3
"""Time samples along rays, beside nerfacc on the same rays, on this machine's GPU.

Timed are 262 144 rays through a grid of 128³ voxels of which 10 % are occupied: given ones (march) and drawn from 100
images of 800 × 800 pixels (generate), in any order and in that of the rays. Beside given rays stands nerfacc's
sampling(), where PyTorch and nerfacc are installed. The samples of the first 1000 rays are compared with those of the
CPU first; a wrong result has no time. Times are medians, by CUDA events after warm-ups.

For example:
  linum-benchmark-rays
  linum-benchmark-rays --only march march-ordered --runs 50 --json rays.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.kernels import kernel_cases
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.rays import MAKERS


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-rays", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Part of the rays. [%(default)s]")
    command.add_options(parser, "50")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    try:
        output = command.output_of(parser, args, argv)
        settings = Settings(50 if args.runs is None else args.runs)
        results = command.run(kernel_cases(MAKERS, args.scale, args.only or ()), settings, output)
    except cli.EXPECTED as error:
        parser.error(str(error))
    return command.exit_code(parser, results)


if __name__ == "__main__":
    sys.exit(main())
