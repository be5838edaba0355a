#!/usr/bin/env python3
"""Time the work on tissue, beside the same work written with CuPy's array functions, on this machine's GPU.

Timed are the tissue interface (200×1024×1024 float32; depth first, depth last as a view of that, depth last in
memory), the Z overlap (41 candidates of 512×512; the peer with views, as one writes it, and with contiguous copies),
the mean projection along Z (512³ uint16), the correction of focal curvature (the peer rolls A-line after A-line; 256
of them are timed, and the time is that for all) and the tiles of a mosaic grid at twice their voxel spacing (16 of 128³
uint16; the peer filters and interpolates one after another).

Each result is checked first: surfaces against SciPy on the CPU, correlations against the definition, and so on. A wrong
one is reported as WRONG and has no time. Times are medians, by CUDA events after warm-ups; × is CuPy's time over
linumpy's; "of copy" is the rate of bytes that must at least be read and written, as a part of a plain copy's.

With --end-to-end, whole scripts are timed instead: linum-aip and linum-resample-mosaic-grid on a raw mosaic of that
many GiB, made in a folder of its own below --folder and removed at the end. "ratio" is the time of the slower of
reading alone and writing alone over that of the script. It runs on the CPU, too, where there is no GPU.

For example:
  linum-benchmark-tissue
  linum-benchmark-tissue --only interface-depth-first mean-projection --runs 50 --json tissue.json
  linum-benchmark-tissue --end-to-end 16 --folder /scratch --runs 5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.cases import CaseResult
from linumpy.benchmark.suites.scripts import SCRIPTS, EndToEndRequest, end_to_end_cases
from linumpy.benchmark.suites.tissue import MAKERS
from linumpy.device import resolve


def _build_arg_parser() -> cli.Parser:
    parser = command.parser("linum-benchmark-tissue", __doc__)
    command.add_case_options(parser, (*MAKERS, *SCRIPTS), scale="Shrink every axis.")
    parser.add_argument("--end-to-end", type=float, metavar="GIB", help="Time whole scripts, on a mosaic of this size.")
    command.add_folder_option(parser, "Where that is made.")
    command.add_options(parser, "20; 5 from end to end")
    return parser


def _measure(args: argparse.Namespace, output: command.Output) -> Sequence[CaseResult]:
    if args.end_to_end is None:
        return command.run_kernels(MAKERS, args, output, 20)
    if args.scale != 1:
        raise ValueError("--scale does not go with --end-to-end")
    settings = command.settings_of(args, 5)
    request = EndToEndRequest(args.end_to_end, args.folder, tuple(args.only or ()), use_gpu=resolve().is_cuda)
    with end_to_end_cases(request) as (folder, cases):
        return command.run(cases, settings, output, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.main(_build_arg_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
