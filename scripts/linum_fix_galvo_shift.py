"""Correct the galvo shift of an OCT mosaic: rotate the columns of its tiles back.

INPUT is a mosaic grid as OME-Zarr with axes z, y, x. If the camera starts its lines late or early, the columns of all
tiles are rotated cyclically along x, and a seam runs through each tile where the last column lies beside the first. The
seam is found by comparing neighbouring A-lines; without a clear seam the mosaic is written unchanged.

For example:
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr
  linum-fix-galvo-shift mosaic.ome.zarr fixed.ome.zarr --columns 12
"""

from linumpy import cli
from linumpy.mosaic.options import Galvo


def _fix(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.galvo import fix_galvo_shift

    command = cli.TileCommand(parsed)
    shift = command.call("galvo", fix_galvo_shift, parsed.input, parsed.output, cli.record_of(parsed, Galvo))
    command.close(f"tiles were rotated by {shift.columns} columns (contrast of the seam {shift.contrast:.2f})")


main = cli.Command(
    "linum-fix-galvo-shift", __doc__, _fix,
    *cli.paths("Mosaic grid to read.", "OME-Zarr mosaic to write."),
    *cli.options_of(Galvo),
    *cli.shared("tile_shape", *cli.IMAGE),
)  # fmt: skip
