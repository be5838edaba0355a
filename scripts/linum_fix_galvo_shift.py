#!/usr/bin/env python3
"""Rotate the tiles of an OCT mosaic back, whose lines begin at the wrong column.

MOSAIC is a mosaic grid as OME-Zarr with axes z, y, x. Where the camera began its lines late or early, the columns of
all tiles are rotated cyclically along x, and a seam runs through them where the last column lies beside the first. The
seam is found by comparing neighbouring A-lines; without a clear one the mosaic is written as it is.

For example:
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr --columns 12
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
        "linum-fix-galvo-shift", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="Mosaic grid to read.")
    parser.add_argument("output", type=Path, metavar="OUT", help="OME-Zarr mosaic to write.")
    parser.add_argument("--columns", type=int, metavar="N", help="Columns by which tiles are rotated. [detected]")
    parser.add_argument(
        "--min_contrast", type=float, default=1.5, metavar="C",
        help="Difference at the seam over the greatest one elsewhere, below which nothing is mended. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("Y", "X"), help="Voxels of a tile. [that of the metadata]"
    )
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _fix(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.galvo import fix_galvo_shift
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    nbytes = open_mosaic(parsed.input, **chosen).nbytes
    with bytes_progress("galvo", nbytes) as progress:
        found = fix_galvo_shift(
            parsed.input, parsed.output, columns=parsed.columns, min_contrast=parsed.min_contrast,
            tile_shape=parsed.tile_shape, levels=parsed.levels, codec=parsed.codec, use_gpu=use_gpu,
            overwrite=parsed.overwrite, progress=progress, distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    print(f"tiles were rotated by {found.columns} columns (contrast of the seam {found.contrast:.2f})")
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _fix, arguments)


if __name__ == "__main__":
    sys.exit(main())
