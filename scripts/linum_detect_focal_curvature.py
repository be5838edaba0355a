"""Find and correct the focal curvature of an OCT mosaic.

The focal plane of an objective is slightly curved, so that a flat surface looks like a bowl in every tile. This command
finds the surface of the tissue, fits a quadratic to the mean tile, and shifts each A-line along z by the curvature at
its position in the tile. The curvature of the tissue itself is not corrected: it is found by the change of the slope
from tile to tile. Reads an OME-Zarr volume with axes z, y and x, in any order, whose first tile begins at its first
voxel and whose tiles do not overlap, and writes another with the same shape, dtype and chunks. --time and --channel
select one of several volumes.

Voxels that a shift leaves empty at an end of an A-line are filled with the nearest measured voxel of the A-line, which
makes no edge. The metadata of OUTPUT record the filled voxels (attribute linumpy, focal_corrections): surface
detection, the mean along z, the search for overlaps and the stack exclude them, whatever --fill-value is. With --wrap
nothing is filled, and voxels that enter from the other end count as measured.

For example:
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile-shape 512 512
  linum-detect-focal-curvature mosaic.ome.zarr flat.ome.zarr --tile-shape 512 512 --report focal.png --interpolate
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import FocalCorrection, SurfaceMethod


def _detect(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.focal import correct_mosaic

    command = cli.TileCommand(parsed)
    curvature = command.call(
        "surface, correction", correct_mosaic, parsed.input, parsed.output, nbytes=2 * command.nbytes,
        method=cli.record_of(parsed, SurfaceMethod), correction=cli.record_of(parsed, FocalCorrection),
        report=parsed.report,
    )  # fmt: skip
    command.close(
        f"focal curvature in voxels: {curvature.vv:.3f} v² + {curvature.vu:.3f} v u + {curvature.uu:.3f} u², from "
        f"{curvature.tiles} tiles, residual {curvature.rms:.3f} RMS"
    )


main = cli.Command(
    "linum-detect-focal-curvature", __doc__, _detect,
    *cli.paths("OME-Zarr volume.", "OME-Zarr volume to write."),
    *cli.shared("tile_shape"),
    cli.Option(
        "--report", type=Path, metavar="PICTURE",
        help="Picture of the fit (.png, .pdf, .svg); its numbers are written beside it (.json).",
    ),
    *cli.options_of(FocalCorrection),
    *cli.options_of(SurfaceMethod, "surface detection"),
    *cli.shared(*cli.IMAGE),
)  # fmt: skip
