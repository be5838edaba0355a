#!/usr/bin/env python3
"""Time resampling, beside cupyx.scipy.ndimage on the same arrays, on this machine's GPU.

Timed are map_coordinates and affine_transform on 512³ voxels: linear and cubic (of coefficients that are there
already), at places that follow the grid and at random ones; and resize to half of it, smoothed first. Beside the linear
maps of float32 stands torch's grid_sample, where PyTorch is installed. Each result is checked first, at 2000 places or
in some planes, against SciPy in float64; a wrong one is reported as WRONG and has no time. Times are medians, by CUDA
events after warm-ups; × is another's time over linumpy's; "of copy" is the rate of bytes that must at least be read and
written (places and result, or image and result), as a part of a plain copy's.

For example:
  linum-benchmark-resampling
  linum-benchmark-resampling --only affine-linear --runs 50 --json resampling.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.benchmark.kernel_run import KernelRequest, run, wrong_results
from linumpy.benchmark.resampling import MAKERS


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-resampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="Timed runs. [%(default)s]")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Shrink every axis. [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all times, with hardware and versions.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the times.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    try:
        results = run(KernelRequest(tuple(args.only or ()), args.runs, args.scale, args.json, args.plot), MAKERS)
    except cli.EXPECTED as error:
        parser.error(str(error))
    wrong = wrong_results(results)
    if wrong:
        print(f"{parser.prog}: {wrong} results were WRONG", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
