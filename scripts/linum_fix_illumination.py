#!/usr/bin/env python3
"""Estimate and correct the uneven illumination of the tiles of an OCT mosaic.

An objective does not light its field of view evenly, so that a mosaic has a pattern that repeats with its tiles. This
command estimates it by the method of BaSiC (Peng et al., 2017) for every depth, as a smooth flat field that all tiles
share, and writes (voxel - dark) / flat. Reads an OME-Zarr volume with axes z, y and x, in any order, whose first tile
begins at its first voxel and whose tiles do not overlap, and writes another with the same shape, dtype and chunks.

For example:
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --tile_shape 512 512
  linum-fix-illumination mosaic.ome.zarr even.ome.zarr --report illumination.png --dark
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
        "linum-fix-illumination", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("A", "B"),
        help="Voxels of a tile along the lateral axes, in their order in the array (usually y, then x). [from the "
        "metadata that linumpy writes]",
    )  # fmt: skip
    parser.add_argument("--report", type=Path, metavar="PICTURE", help="Picture of the fields (.png, .pdf, .svg).")
    parser.add_argument("--dark", action="store_true", help="Estimate an offset, too; tiles must differ in brightness.")
    parser.add_argument(
        "--smoothness", type=float, default=1.0, metavar="S",
        help="Weight of smooth fields; larger ones ignore more structure of the tissue. [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--max_tiles", type=int, default=256, metavar="N", help="Tiles to estimate from at most. [%(default)s]"
    )
    cli.add_levels_argument(parser)
    cli.add_codec_argument(parser)
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_cluster_argument(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _fix(parsed: argparse.Namespace) -> None:
    from linumpy.correction.shading import ShadingOptions
    from linumpy.mosaic.illumination import bytes_to_read, fix_illumination
    from linumpy.mosaic.io.image import open_mosaic
    from linumpy.progress import bytes_progress

    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    tile = parsed.tile_shape and tuple(parsed.tile_shape)
    nbytes = bytes_to_read(open_mosaic(parsed.input, **chosen), tile, max(1, parsed.max_tiles))
    with bytes_progress("illumination, correction", nbytes) as progress:
        fields = fix_illumination(
            parsed.input, parsed.output, tile, ShadingOptions(dark=parsed.dark, smoothness=parsed.smoothness),
            max_tiles=parsed.max_tiles, levels=parsed.levels, report=parsed.report, codec=parsed.codec,
            use_gpu=use_gpu, overwrite=parsed.overwrite, progress=progress, distributed=parsed.distributed, **chosen,
        )  # fmt: skip
    print(
        f"flat field from {fields.flat.min():.3f} to {fields.flat.max():.3f}, dark field {fields.dark.mean():.4g} in "
        f"the mean, from {len(fields.baseline)} tiles"
    )
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _fix, arguments)


if __name__ == "__main__":
    sys.exit(main())
