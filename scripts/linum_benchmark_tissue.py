#!/usr/bin/env python3
"""Time the work on tissue, beside the same work written with CuPy's array functions, on this machine's GPU.

Timed are the tissue interface (200×1024×1024 float32; depth first, depth last as a view of that, depth last in
memory), the Z overlap (41 candidates of 512×512; the peer with views, as one writes it, and with contiguous copies),
the mean projection along Z (512³ uint16) and the correction of focal curvature (the peer rolls A-line after A-line; 256
of them are timed, and the time is that for all).

Each result is checked first: surfaces against SciPy on the CPU, correlations against the definition, and so on. A wrong
one is reported as WRONG and has no time. Times are medians, by CUDA events after warm-ups; × is CuPy's time over
linumpy's; "of copy" is the rate of bytes that must at least be read and written, as a part of a plain copy's.

For example:
  linum-benchmark-tissue
  linum-benchmark-tissue --only interface-depth-first mean-projection --runs 50 --json tissue.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.benchmark.kernel_run import KernelRequest, run, wrong_results
from linumpy.benchmark.tissue import MAKERS


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-tissue", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="Timed runs. [%(default)s]")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Shrink every axis. [%(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all times, with hardware and versions.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    try:
        results = run(KernelRequest(tuple(args.only or ()), args.runs, args.scale, args.json), MAKERS)
    except cli.EXPECTED as error:
        parser.error(str(error))
    wrong = wrong_results(results)
    if wrong:
        print(f"{parser.prog}: {wrong} results were WRONG", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
