#!/usr/bin/env python3
"""Take the average intensity projection of an OCT mosaic.

Reads an OME-Zarr volume with axes z, y and x, in any order, and writes the mean along z as an OME-Zarr image (float32)
with the mosaic's lateral spacing: one for each time and channel, or for those of --time and --channel. Voxels that
focal correction filled are excluded.

For example:
  linum-aip mosaic.ome.zarr aip.ome.zarr
  linum-aip mosaic.ome.zarr aip.ome.zarr --level 1 --use_gpu --overwrite
  linum-aip mosaic.ome.zarr aip.ome.zarr --channel 0 --spacing 5 10 10
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-aip", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="AIP", help="OME-Zarr image to write.")
    parser.add_argument("--level", type=int, default=0, help="Resolution level to read; 0 is the finest. [0]")
    cli.add_volume_arguments(parser, all_of_them=True)
    cli.add_codec_argument(parser)
    cli.add_tile_arguments(parser)
    return parser


def _project(parsed: argparse.Namespace) -> None:
    from linumpy.mosaic.aip import project_mosaic

    if parsed.output.suffix.lower() in (".png", ".jpg", ".jpeg", ".tif", ".tiff"):
        raise ValueError(
            f"{parsed.output} names a picture: linum-aip-png draws one, linum-aip writes an OME-Zarr image"
        )
    command = cli.TileCommand.start(parsed)
    with command.progress("projection", command.input_nbytes()) as shared:
        projection = project_mosaic(parsed.input, parsed.output, **shared)
    command.close(projection.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _project, arguments)


if __name__ == "__main__":
    sys.exit(main())
