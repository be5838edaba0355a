#!/usr/bin/env python3
"""Time batches of random crops, beside tensorstore and zarr-python in threads, on this machine.

W1a and W1b are 64×256×256 crops in batches of 8 from one 512×1024×1024 uint16 array, zstd and raw, 64³ chunks in
256×512×512 shards; W2 are 128³ crops in batches of 32 from 16 arrays of 512³ that zstd compresses 3 times, with and
without augmentation; T are those with a ratio of 1.48 and batches of 128; F are 32³ crops in batches of 64. The arrays
are made in a folder of its own below --folder and removed at the end.

The first batch of each is compared with zarr-python's first; a wrong one is reported as WRONG and has no time. Rates
count the bytes of crops in the stored dtype. The peers read a tenth of the batches, and their times are those for all.
With --busy the caller's own Python is busy meanwhile, as in a training loop: 5 or 10 ms of plain Python between two
batches, or one or two other threads that never sleep. Times are then those of a batch.
--scale makes arrays smaller and fewer, --batches runs shorter; then the marks are not judged.

For example:
  linum-benchmark-stream --folder /dev/shm
  linum-benchmark-stream --busy --folder /dev/shm
  linum-benchmark-stream --only W2 --scale 0.5 --batches 50 --runs 3 --json stream.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.cases import CaseResult
from linumpy.benchmark.suites.stream import WORKLOADS, StreamRequest, stream_cases
from linumpy.device import resolve


def _build_arg_parser() -> cli.Parser:
    parser = command.parser("linum-benchmark-stream", __doc__)
    command.add_case_options(parser, WORKLOADS, default="W1a W1b W2", scale="Part of all sizes.")
    parser.add_argument("--batches", type=int, metavar="N", help="Batches of a run. [200; of T 100]")
    parser.add_argument("--dtype", default="bf16", choices=("f32", "f16", "bf16", "stored"), help="[%(default)s]")
    parser.add_argument("--buffers", type=float, default=4.0, metavar="GIB", help="Each of two buffers. [%(default)s]")
    parser.add_argument("--lookahead", type=int, default=4, metavar="N", help="Batches read ahead. [%(default)s]")
    parser.add_argument("--busy", action="store_true", help="Beside Python of the caller that is busy. [W1a]")
    command.add_folder_option(parser, "Where arrays go.")
    command.add_options(parser, "3")
    return parser


def _measure(args: argparse.Namespace, output: command.Output) -> Sequence[CaseResult]:
    settings = command.settings_of(args, 3)
    request = StreamRequest(
        tuple(args.only or ()), args.folder, args.scale, args.batches, args.dtype, args.buffers,
        args.lookahead,
        resolve().is_cuda, args.busy,
    )  # fmt: skip
    with stream_cases(request) as (folder, cases):
        return command.run(cases, settings, output, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.main(_build_arg_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
