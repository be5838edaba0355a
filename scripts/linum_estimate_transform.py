#!/usr/bin/env python3
"""Find the positions of the tiles of an OCT mosaic grid by their overlaps.

Reads an OME-Zarr mosaic grid with axes z, y and x, in any order: tiles side by side along y and x, not yet stitched,
each of them whole along z. Neighbouring tiles show the same tissue in their overlap; their shifts are found by phase
correlation, to fractions of a voxel. The positions fit all shifts best, without those that are rejected: of little
correlation, far from the regular grid of the acquisition, or in contradiction to others. Tiles without contrast take
their place in the regular grid.

Writes the positions as JSON, with all pairs, or as a CSV table; linum-stitch-3d reads both. Prints the regular grid and
the residuals.

For example:
  linum-estimate-transform mosaic.ome.zarr positions.json
  linum-estimate-transform mosaic.ome.zarr positions.csv --overlap 0.3 --tile_shape 512 512
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
        "linum-estimate-transform", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr mosaic grid.")
    parser.add_argument("output", type=Path, metavar="POSITIONS", help="File to write: .json or .csv.")
    parser.add_argument(
        "--overlap", type=float, default=0.2, metavar="SHARE",
        help="Share of a tile in which the stage has neighbours overlap; the true one may differ by three quarters of "
        "it. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--min_confidence", type=float, default=0.3, metavar="R",
        help="A shift whose overlaps correlate less is rejected. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("N", "M"),
        help="Voxels of a tile along the lateral axes, in their order. [that of the metadata; else a chunk]",
    )  # fmt: skip
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _estimate(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.mosaic.tile_positions import estimate_positions
    from linumpy.progress import bytes_progress
    from linumpy.registration.position_files import table_of

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    nbytes = open_mosaic(parsed.input, **chosen).nbytes
    with bytes_progress("positions", nbytes) as progress:
        found = estimate_positions(
            parsed.input, parsed.output, overlap=parsed.overlap, min_confidence=parsed.min_confidence,
            tile_shape=parsed.tile_shape and tuple(parsed.tile_shape), use_gpu=use_gpu, overwrite=parsed.overwrite,
            progress=progress, distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    print(table_of(found))
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _estimate, arguments)


if __name__ == "__main__":
    sys.exit(main())
