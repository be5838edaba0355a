#!/usr/bin/env python3
"""Normalise the intensities of an OCT volume between two percentiles.

Maps two percentiles of each plane along z, or of the whole slice, to 0 and 1. Reads an OME-Zarr volume with axes z, y
and x, in any order, and writes another with the same shape and chunks, float32. What fits into memory is read once;
otherwise histograms are counted first, and the volume is read twice.

For example:
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr --percentiles 0.5 99.5 --per slice
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        "linum-normalize-intensities", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="VOLUME", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--percentiles", type=float, nargs=2, default=(1.0, 99.0), metavar=("LOW", "HIGH"),
        help="Percentiles that become 0 and 1. [1 99]",
    )  # fmt: skip
    parser.add_argument(
        "--per", choices=("plane", "slice"), default="plane", help="What percentiles are taken of. [%(default)s]"
    )
    parser.add_argument("--no_clip", action="store_true", help="Keep intensities below 0 and above 1.")
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _normalize(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.intensities import normalize_intensities
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    nbytes = open_mosaic(parsed.input, **chosen).nbytes
    with bytes_progress("normalisation", nbytes) as progress:
        bounds = normalize_intensities(
            parsed.input, parsed.output, *parsed.percentiles, per=parsed.per, clip=not parsed.no_clip,
            levels=parsed.levels, codec=parsed.codec, use_gpu=use_gpu, overwrite=parsed.overwrite, progress=progress,
            distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    low, high = bounds[:, bounds.shape[1] // 2]
    print(f"middle plane: {low:.6g} becomes 0, {high:.6g} becomes 1")
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _normalize, arguments)


if __name__ == "__main__":
    sys.exit(main())
