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
from linumpy.benchmark.cases import CaseResult
from linumpy.benchmark.suites.sampling import MAKERS, table
from linumpy.benchmark.suites.sampling_larger import Larger, larger_cases
from linumpy.device import resolve


def _build_arg_parser() -> cli.Parser:
    parser = command.parser("linum-benchmark-sampling", __doc__)
    command.add_case_options(parser, MAKERS, scale="Shrink every axis.")
    command.add_options(parser, "20; 3 with --larger")
    parser.add_argument("--larger", type=float, metavar="GIB", help="Sample a volume of this size on disk.")
    command.add_folder_option(parser, "Where to make it.")
    return parser


def _measure(args: argparse.Namespace, output: command.Output) -> Sequence[CaseResult]:
    if args.larger is None:
        results = command.run_kernels(MAKERS, args, output, 20)
    else:
        if args.only or args.scale != 1:
            raise ValueError("--only and --scale do not go with --larger")
        settings = command.settings_of(args, 3)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            cases = larger_cases(Larger.of_size(Path(folder), args.larger), use_gpu=resolve().is_cuda)
            results = command.run(cases, settings, output, Path(folder))
    print(table(results))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.main(_build_arg_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
