#!/usr/bin/env python3
"""Stitch the tiles of an OCT mosaic grid into one volume.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: overlapping tiles side by side along y and x, each of
them whole along z; and the positions of its tiles, as linum-estimate-transform writes them. Writes a volume of the same
dtype and axes, with its pyramid. Where tiles overlap they are blended by weights; tiles are placed to fractions of
voxels. Missing tiles are left out; where no tile lies the volume is 0.

For example:
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr
  linum-stitch-3d mosaic.ome.zarr positions.json slice.ome.zarr --blending diffusion --levels 4 --use_gpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-stitch-3d", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("positions", type=Path, metavar="POSITIONS", help="Positions of its tiles: .json or .csv.")
    parser.add_argument("output", type=Path, metavar="STITCHED", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--blending", choices=("distance", "diffusion"), default="distance",
        help="Weights of tiles where they overlap: by the distance to their borders, or by diffusion from where each "
        "lies alone, which follows displaced tiles. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--interpolate", action=argparse.BooleanOptionalAction, default=True,
        help="Place tiles to fractions of voxels, interpolated linearly, or at the nearest whole voxel. [interpolate]",
    )  # fmt: skip
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("N", "M"),
        help="Voxels of a tile along the lateral axes, in their order. [that of the metadata; else a chunk]",
    )  # fmt: skip
    parser.add_argument(
        "--chunks", type=int, nargs=3, metavar="N", help="Chunks of the volume. [at most 8 MiB, about cubes]"
    )
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _stitch(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.mosaic.stitching import stitch_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    with bytes_progress("stitching", open_mosaic(parsed.input, **chosen).nbytes) as progress:
        stitched = stitch_mosaic(
            parsed.input, parsed.positions, parsed.output, blending=parsed.blending, interpolate=parsed.interpolate,
            tile_shape=parsed.tile_shape and tuple(parsed.tile_shape), chunks=parsed.chunks, levels=parsed.levels,
            codec=parsed.codec, use_gpu=use_gpu, overwrite=parsed.overwrite, progress=progress,
            distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    height, width = stitched.plan.size
    print(f"{len(stitched.plan.offsets)} tiles stitched to {height} × {width} voxels")
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, stitched.nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _stitch, arguments)


if __name__ == "__main__":
    sys.exit(main())
