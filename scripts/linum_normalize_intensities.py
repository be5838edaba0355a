#!/usr/bin/env python3
"""Normalise the intensities of an OCT volume between two percentiles.

Maps two percentiles of each plane along z, or of the whole slice, to 0 and 1. Reads an OME-Zarr volume with axes z, y
and x, in any order, and writes another with the same shape and chunks, float32. If the planes of a chunk (with --per
slice: the volume) are small enough, the volume is read once. If they are larger, and always with --cluster, histograms
are counted first, and the volume is read twice.

For example:
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr
  linum-normalize-intensities mosaic.ome.zarr normalised.ome.zarr --percentiles 0.5 99.5 --per slice
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-normalize-intensities", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="VOLUME", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--percentiles", type=float, nargs=2, default=(1.0, 99.0), metavar=("LOW", "HIGH"),
        help="Percentiles that become 0 and 1. [1 99]",
    )  # fmt: skip
    parser.add_argument(
        "--per",
        choices=("plane", "slice"),
        default="plane",
        help="Take percentiles of each plane or of the slice. [%(default)s]",
    )
    parser.add_argument("--no_clip", action="store_true", help="Keep intensities below 0 and above 1.")
    cli.add_image_arguments(parser)
    return parser


def _normalize(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.intensities import normalize_intensities

    command = cli.TileCommand.start(parsed)
    nbytes = command.input_nbytes()
    with command.progress("normalisation", nbytes) as shared:
        bounds = normalize_intensities(
            parsed.input, parsed.output, *parsed.percentiles, per=parsed.per, clip=not parsed.no_clip, **shared
        )
    low, high = bounds[:, bounds.shape[1] // 2]
    print(f"middle plane: {low:.6g} becomes 0, {high:.6g} becomes 1")
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _normalize, arguments)


if __name__ == "__main__":
    sys.exit(main())
