#!/usr/bin/env python3
"""Time the ways of reading a Zarr array from the disk into GPU memory, side by side.

Give an array (or an OME-Zarr image, whose finest level is read), or have one made with --generate, or run the
standard cases with --suite. Each way's result is compared with what zarr-python reads before it is timed: a wrong
one is reported as WRONG and has no time. A way that cannot run here says why. Two limits stand above the ways:

  flat   one flat file of the same decoded size, read in one call by several threads
  h2d    page-locked host memory, copied to the device

and the ways are linumpy-auto, linumpy-kvikio, zarr-gpu (zarr.config.enable_gpu()), zarr-gpu-gds (the same over
kvikio.zarr.GDSStore), and through the host: zarr-numpy, tensorstore and zarrs, where these are installed.
Without a GPU the host's ways are measured, up to NumPy arrays.

The flat file is written beside the array, in its folder, and taken away in the end. A store that exists is never
overwritten. Rates are GiB of decoded bytes per second. kvikio's compat mode is not GPUDirect Storage; the first
lines say which one it was.

For example:
  linum-benchmark-kvikio-zarr mosaic.ome.zarr --plot mosaic.png
  linum-benchmark-kvikio-zarr mosaic.ome.zarr --cold --only flat linumpy-auto zarr-gpu
  linum-benchmark-kvikio-zarr --generate /data/bench --shape 512 1024 1024 --chunks 64 64 64 --dtype uint16 --codec zstd
  linum-benchmark-kvikio-zarr --suite raw --json raw.json --plot raw.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.benchmark import command
from linumpy.benchmark.cases import CaseResult
from linumpy.benchmark.suites.read_paths import PATH_NAMES
from linumpy.benchmark.suites.reading import ReadRequest, read_cases
from linumpy.benchmark.suites.specs import CODECS, SUITES, CaseSpec

_MADE = {"shape": (512, 512, 512), "chunks": (128, 128, 128), "shards": None, "dtype": "float32", "codec": "none"}


def _build_arg_parser() -> cli.Parser:
    parser = command.parser("linum-benchmark-kvikio-zarr", __doc__)
    parser.add_argument("array", metavar="ARRAY", nargs="?", help="Folder of a Zarr array or OME-Zarr image.")

    stores = parser.add_argument_group("stores to make")
    stores.add_argument("--generate", metavar="DIR", type=Path, help="Make a store in this folder, and leave it there.")
    stores.add_argument("--shape", type=int, nargs="+", metavar="N", help="Voxels per axis. [512 512 512]")
    stores.add_argument("--chunks", type=int, nargs="+", metavar="N", help="Voxels of a chunk. [128 128 128]")
    stores.add_argument("--shards", type=int, nargs="+", metavar="N", help="Voxels of a shard. [no shards]")
    stores.add_argument("--dtype", help="Type of a voxel. [float32]")
    stores.add_argument(
        "--codec",
        choices=tuple(CODECS),
        help="none: random voxels. zstd (level 3), gzip (5), blosc (lz4, byte shuffle), blosc-zstd (bit shuffle): "
        "OCT-like ones of ratio 3. [none]",
    )
    stores.add_argument(
        "--suite",
        choices=tuple(SUITES),
        help="The standard cases, in a temporary folder (TMPDIR) or in that of --generate.",
    )
    stores.add_argument("--scale", type=float, metavar="S", help="Shrink every axis of the suite's cases. [1]")

    timing = parser.add_argument_group("timing")
    state = timing.add_mutually_exclusive_group()
    state.add_argument(
        "--cold", action="store_true", help="Drop these files from the page cache before every run (needs no root)."
    )
    state.add_argument("--warm", action="store_true", help="Read once, untimed, before the runs. This is the default.")
    timing.add_argument("--only", nargs="+", choices=PATH_NAMES, metavar="WAY", help=f"Of {', '.join(PATH_NAMES)}.")

    command.add_options(parser, "5")
    return parser


def _request(args: argparse.Namespace) -> ReadRequest:
    """Turn the arguments into what the library takes; ``ValueError`` where they do not go together."""
    overrides = {name: getattr(args, name) for name in _MADE if getattr(args, name) is not None}
    making = args.generate is not None or args.suite is not None
    if (args.array is not None) == making:
        raise ValueError("give one of ARRAY, --generate DIR and --suite NAME (--help shows examples)")
    if overrides and (args.generate is None or args.suite is not None):
        raise ValueError(f"--{next(iter(overrides))} goes with --generate DIR, and not with --suite")
    if args.scale is not None and args.suite is None:
        raise ValueError("--scale goes with --suite")
    if args.scale is not None and not 0 < args.scale <= 1:
        raise ValueError(f"--scale {args.scale:g}: more than 0, at most 1")
    return ReadRequest(
        array=args.array,
        specs=_specs(args.suite, args.scale or 1.0, overrides) if making else (),
        folder=args.generate,
        only=tuple(args.only or ()),
        cold=args.cold,
    )


def _specs(suite: str | None, scale: float, overrides: dict) -> tuple[CaseSpec, ...]:
    if suite is not None:
        return tuple(spec.scaled(scale) for spec in SUITES[suite])
    wanted = {**_MADE, **overrides}
    sizes = {name: wanted[name] and tuple(wanted[name]) for name in ("shape", "chunks", "shards")}
    return (CaseSpec(f"{wanted['codec']} {wanted['dtype']}", dtype=wanted["dtype"], codec=wanted["codec"], **sizes),)


def _measure(args: argparse.Namespace, output: command.Output) -> Sequence[CaseResult]:
    request, settings = _request(args), command.settings_of(args, 5, cold=args.cold)
    with read_cases(request) as (folder, cases):
        return command.run(cases, settings, output, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a way read wrong values, 2 where nothing could be run."""
    return command.main(_build_arg_parser(), argv, _measure)


if __name__ == "__main__":
    sys.exit(main())
