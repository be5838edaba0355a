#!/usr/bin/env python3
"""Resample an OCT mosaic grid to another voxel spacing, tile by tile.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Every tile is resampled separately, smoothed where it gets coarser, so that none bleeds into
its neighbour. Writes a mosaic grid of the same dtype whose tiles have the nearest whole number of voxels, to which the
spacing in its metadata is adapted; each chunk is a tile.

Mosaics that linumpy wrote have the tile shape in their metadata; for others, pass --tile_shape. Without either, a chunk
is assumed to be a tile, with a warning.

For example:
  linum-resample-mosaic-grid mosaic.ome.zarr mosaic_10um.ome.zarr --resolution 10
  linum-resample-mosaic-grid mosaic.ome.zarr out.ome.zarr --resolution 5 10 10 --tile_shape 512 512 --levels 3
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
        "linum-resample-mosaic-grid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("output", type=Path, metavar="RESAMPLED", help="OME-Zarr mosaic grid to write.")
    parser.add_argument(
        "--resolution", type=float, nargs="+", required=True, metavar="UM",
        help="New voxel spacing in µm: one number, or three, along z, y and x.",
    )  # fmt: skip
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("N", "M"),
        help="Voxels of a tile along the lateral axes, in their order. [that of the metadata; else a chunk]",
    )  # fmt: skip
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=True)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _resample(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.grid import resample_mosaic_grid
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    wanted = parsed.resolution[0] if len(parsed.resolution) == 1 else parsed.resolution
    with bytes_progress("resampling", open_mosaic(parsed.input, **chosen).nbytes) as progress:
        result = resample_mosaic_grid(
            parsed.input, parsed.output, wanted, tile_shape=parsed.tile_shape and tuple(parsed.tile_shape),
            levels=parsed.levels, use_gpu=use_gpu, overwrite=parsed.overwrite, codec=parsed.codec,
            progress=progress, distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, result.nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _resample, arguments)


if __name__ == "__main__":
    sys.exit(main())
