"""Stack OCT slices into one volume, by the shifts of the motor and by their overlaps along z.

FOLDER holds the slices as OME-Zarr with axes z, y, x, numbered from the top down: by the digits after a z in the name
(slice_z03.ome.zarr), or else by the last digits. SHIFTS is a CSV table with the columns fixed_id, moving_id, x_shift,
y_shift, x_shift_mm, y_shift_mm: a voxel at p of the moving slice is at p + shift of the fixed one. The columns in mm
are used, so the table fits slices of any resolution. Rows are summed across missing slices, which leave a gap, and rows
of other slices are ignored. Shifts whose column reliable, if there is one, is 0 or false are used, with a warning.

For each pair the overlap along z is searched around the expected overlap (depth of the slice less the slicing
interval). Overlaps with too little correlation, or too far from the others, are replaced by the typical overlap. Slices
are blended where they overlap. The decision for each pair is written to a table. Voxels that focal correction filled
are excluded from the search and, where the other slice has a measured voxel, from the stack.

For example:
  linum-stack-slices-motor slices shifts.csv stack.ome.zarr --slicing-interval-mm 0.2
  linum-stack-slices-motor slices shifts.csv stack.ome.zarr --slicing-interval-mm 0.2 --search-range-mm 0.05
"""

from pathlib import Path

from linumpy import cli
from linumpy.mosaic.options import ZSearch


def _stack(parsed: cli.Namespace) -> None:
    from linumpy.mosaic.io.slice_table import find_slices, open_slices
    from linumpy.mosaic.slices import stack_mosaics

    command, search = cli.TileCommand(parsed), cli.record_of(parsed, ZSearch)
    stem = parsed.output.name.removesuffix(".zarr").removesuffix(".ome")
    decisions = parsed.decisions or parsed.output.with_name(f"{stem}_decisions.csv")
    slices = open_slices(find_slices(parsed.input, parsed.slice_config), **cli.volume_options(parsed))
    nbytes = sum(image.nbytes for image in slices.values())
    _, rows = command.call(
        "stack", stack_mosaics, parsed.input, parsed.shifts, parsed.output, search, decisions=decisions,
        slice_config=parsed.slice_config, nbytes=nbytes,
    )  # fmt: skip
    mended = sum(row.mended for row in rows)
    command.close(
        f"{len(rows)} overlaps, {mended} of them replaced by the typical one; decisions in {decisions}", nbytes=nbytes
    )


main = cli.Command(
    "linum-stack-slices-motor", __doc__, _stack,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of the slices."),
    cli.Option("shifts", type=Path, metavar="SHIFTS", help="CSV table of shifts."),
    cli.Option("output", type=Path, metavar="OUTPUT", help="OME-Zarr volume to write."),
    *cli.options_of(ZSearch),
    cli.Option(
        "--decisions", type=Path, metavar="CSV",
        help="Table of decisions to write. [beside OUTPUT, ending in _decisions.csv]",
    ),
    *cli.shared("slice_config", *cli.IMAGE),
)  # fmt: skip
