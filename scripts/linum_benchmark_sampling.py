#!/usr/bin/env python3
"""Time samples of volumes on this machine's GPU, beside a sampler of texture units.

Timed are 2^26 samples of 512³ voxels: independent ones, those in the order of boxes, and values at given points, random
and along rows. Each result is checked first, in double precision to 1e-6 of the range; weights of texture units have 8
bits, so that sampler is not checked. Rates are coordinates and values, 16 bytes a sample; the last table has samples a
second.

For example:
  linum-benchmark-sampling --json sampling.json

With --larger, a volume of so many GiB is made in --folder, raw and as zstd in 64³ chunks, and sampled by a quarter of
that memory.

For example:
  linum-benchmark-sampling --larger 8 --folder /scratch --json larger.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.kernels import kernel_cases
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.sampling import MAKERS, table
from linumpy.benchmark.suites.sampling_larger import Larger, larger_cases
from linumpy.device import resolve


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="linum-benchmark-sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(MAKERS), metavar="CASE", help=f"Of {', '.join(MAKERS)}.")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="Shrink every axis. [%(default)s]")
    command.add_options(parser, "20; 3 with --larger")
    parser.add_argument("--larger", type=float, metavar="GIB", help="Sample a volume of this size on disk.")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="Where to make it. [where temporary files go]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    parser = _build_arg_parser()
    args = parser.parse_args(argv)
    if args.larger is not None and (args.only or args.scale != 1):
        parser.error("--only and --scale do not go with --larger")
    try:
        output = command.output_of(parser, args, argv)
        if args.larger is None:
            settings = Settings(20 if args.runs is None else args.runs)
            results = command.run(kernel_cases(MAKERS, args.scale, args.only or ()), settings, output)
        else:
            settings = Settings(3 if args.runs is None else args.runs)
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                cases = larger_cases(Larger.of_size(Path(folder), args.larger), use_gpu=resolve("auto").is_cuda)
                results = command.run(cases, settings, output, Path(folder))
    except cli.EXPECTED as error:
        parser.error(str(error))
    print(table(results))
    return command.exit_code(parser, results)


if __name__ == "__main__":
    sys.exit(main())
