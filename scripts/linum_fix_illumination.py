#!/usr/bin/env python3
"""Estimate and correct the uneven illumination of the tiles of an OCT mosaic.

An objective does not light its field of view evenly, so that a mosaic has a pattern that repeats with its tiles. This
command estimates the pattern for every depth by the method of BaSiC (Peng et al., 2017), as a smooth flat field that
all tiles share, and writes (voxel - dark) / flat. Reads an OME-Zarr volume with axes z, y and x, in any order, whose
first tile begins at its first voxel and whose tiles do not overlap, and writes another with the same shape, dtype and
chunks.

For example:
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --tile_shape 512 512
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --report illumination.png --dark
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser("linum-fix-illumination", description=__doc__)
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    cli.add_tile_shape_argument(parser)
    parser.add_argument("--report", type=Path, metavar="PICTURE", help="Picture of the fields (.png, .pdf, .svg).")
    parser.add_argument("--dark", action="store_true", help="Estimate an offset, too; tiles must differ in brightness.")
    parser.add_argument(
        "--smoothness", type=float, default=1.0, metavar="S",
        help="Weight of smoothness: with a larger weight the fields follow less structure of the tissue. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--max_tiles",
        type=int,
        default=256,
        metavar="N",
        help="Maximum number of tiles to estimate from. [%(default)s]",
    )
    cli.add_image_arguments(parser)
    return parser


def _fix(parsed: argparse.Namespace) -> None:
    from linumpy.correction.shading import ShadingOptions
    from linumpy.mosaic.illumination import bytes_to_read, fix_illumination
    from linumpy.mosaic.io.image import open_mosaic

    command = cli.TileCommand.start(parsed)
    image = open_mosaic(parsed.input, **cli.volume_options(parsed))
    nbytes = bytes_to_read(image, parsed.tile_shape, max(1, parsed.max_tiles))
    with command.progress("illumination, correction", nbytes) as shared:
        fields = fix_illumination(
            parsed.input, parsed.output, options=ShadingOptions(dark=parsed.dark, smoothness=parsed.smoothness),
            max_tiles=parsed.max_tiles, report=parsed.report, **shared,
        )  # fmt: skip
    print(
        f"flat field from {fields.flat.min():.3f} to {fields.flat.max():.3f}, dark field {fields.dark.mean():.4g} in "
        f"the mean, from {len(fields.baseline)} tiles"
    )
    command.close(nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _fix, arguments)


if __name__ == "__main__":
    sys.exit(main())
