#!/usr/bin/env python3
"""Draw the average intensity projection of an OCT mosaic as a PNG of 16 bits.

Reads an OME-Zarr volume with axes z, y and x, in any order, and takes the mean along z. Intensities from the 0.1st to
the 99.9th percentile become black to white, one pixel for each voxel. Voxels that focal correction filled are excluded.
--time and --channel select one of several volumes.

For example:
  linum-aip-png mosaic.ome.zarr aip.png
  linum-aip-png mosaic.ome.zarr aip.png --level 2 --no-use_gpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-aip-png", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="PNG", help="Picture to write.")
    parser.add_argument("--level", type=int, default=0, help="Resolution level to read; 0 is the finest. [0]")
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _project(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.aip import WINDOW, project_mosaic_to_png
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    with bytes_progress("projection", open_mosaic(parsed.input, parsed.level, **chosen).nbytes) as progress:
        projection = project_mosaic_to_png(
            parsed.input, parsed.output, level=parsed.level, use_gpu=use_gpu, overwrite=parsed.overwrite,
            progress=progress, distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    black, white = projection.window or (0.0, 0.0)
    low, high = WINDOW
    print(f"black is {black:.6g}, white {white:.6g}: percentiles {low} and {high}; values beyond are clipped")
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, projection.nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _project, arguments)


if __name__ == "__main__":
    sys.exit(main())
