#!/usr/bin/env python3
"""Find the focal curvature of an OCT mosaic, and take it out.

The focal plane of an objective is a little curved, so that a flat surface looks like a bowl in every tile. This finds
the surface of the tissue, fits what all tiles share (a quadratic; what belongs to the tissue is told from how the
slope changes from tile to tile), and shifts each A-line along z by the curvature at its position in its tile. Reads an
OME-Zarr volume with axes z, y and x, in any order, whose first tile begins at its first voxel and whose tiles do not
overlap, and writes another with the same shape, dtype and chunks. Of several times or channels --time and --channel
choose the volume that is worked on.

What a shift leaves empty at an end of an A-line is filled with its last measured voxel there, which makes no edge. The
metadata of OUTPUT record which voxels were filled (attribute linumpy, focal_corrections): the surface, the mean along
z, the search for overlaps and the stack leave them out, whatever --fill_value is. With --wrap nothing is filled: voxels
from the other end count as measured.

For example:
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile_shape 512 512
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile_shape 512 512 --report focal.png --interpolate
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli
from linumpy.mosaic.focal import FocalCorrection, correct_mosaic
from linumpy.mosaic.image import open_mosaic
from linumpy.mosaic.surface import SurfaceMethod
from linumpy.progress import bytes_progress


def _build_arg_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        "linum-detect-focal-curvature", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=cli.source, metavar="MOSAIC", help="OME-Zarr volume.")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write.")
    parser.add_argument(
        "--tile_shape", type=int, nargs=2, metavar=("A", "B"),
        help="Voxels of a tile along the lateral axes, in their order in the array (mostly y, then x). [as the "
        "metadata says, where linumpy wrote it]",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="PNG", help="Picture of the fit; its numbers go beside it (.json)."
    )
    parser.add_argument("--interpolate", action="store_true", help="Shift by fractions of voxels. [by whole voxels]")
    parser.add_argument("--wrap", action="store_true", help="Bring what leaves at one end in at the other.")
    parser.add_argument(
        "--fill_value", type=float, metavar="V",
        help="Of voxels from outside, without --wrap. [the nearest measured voxel of the A-line]",
    )  # fmt: skip
    parser.add_argument("--n_levels", type=int, default=1, metavar="N", help="Resolutions to write. [%(default)s]")
    cli.add_volume_arguments(parser, all_of_them=False)
    cli.add_surface_arguments(parser)
    cli.add_gpu_arguments(parser)
    cli.add_common_arguments(parser)
    return parser


def _detect(parsed: argparse.Namespace) -> None:
    use_gpu, begin, chosen = cli.choose_device(parsed), time.perf_counter(), cli.volume_options(parsed)
    nbytes = open_mosaic(parsed.input, **chosen).nbytes
    method = SurfaceMethod(**cli.surface_options(parsed))
    correction = FocalCorrection(parsed.interpolate, parsed.wrap, parsed.fill_value)
    with bytes_progress("surface, correction", 2 * nbytes) as progress:
        curvature = correct_mosaic(
            parsed.input, parsed.output, parsed.tile_shape and tuple(parsed.tile_shape), method, correction,
            n_levels=parsed.n_levels, report=parsed.report, use_gpu=use_gpu, overwrite=parsed.overwrite,
            progress=progress, **chosen,
        )  # fmt: skip
    print(
        f"focal curvature in voxels: {curvature.vv:.3f} v² + {curvature.vu:.3f} v u + {curvature.uu:.3f} u², from "
        f"{curvature.tiles} tiles, fit leaves {curvature.rms:.3f} RMS"
    )
    print(cli.closing_line(parsed.input, parsed.output, use_gpu, time.perf_counter() - begin, nbytes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script."""
    return cli.run(_build_arg_parser(), _detect, arguments)


if __name__ == "__main__":
    sys.exit(main())
