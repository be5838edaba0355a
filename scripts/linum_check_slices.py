"""Check the mosaic grids of a brain and its tables, before a run of hours.

FOLDER holds the mosaic grids as OME-Zarr with axes z, y, x, one for each slice, numbered from the top down: by the
digits after a z in the name (slice_z03.ome.zarr), or else by the last digits. Every mosaic must have units of length
and a tile shape, in its metadata or as --tile-shape, and the table of the motor's shifts must lead from each slice to
the next. linum-pipeline makes the same checks at its start. No voxels are read.

For example:
  linum-check-slices mosaics --shifts shifts_xy.csv --slice-config slice_config.csv --tile-shape 512 512
"""

from pathlib import Path

from linumpy import cli


def _check(parsed: cli.Namespace) -> None:
    from linumpy.io.output.files import check_file, replacing
    from linumpy.mosaic.io.slice_table import check_mosaics

    if parsed.list is not None:
        check_file(parsed.list, overwrite=parsed.overwrite)
    tables = {"shifts": parsed.shifts, "slice_config": parsed.slice_config}
    slices = check_mosaics(parsed.input, tile_shape=parsed.tile_shape, **tables)
    names = [path.name.removesuffix(".zarr").removesuffix(".ome") for path in slices.values()]
    if parsed.list is not None:
        with replacing(parsed.list, overwrite=parsed.overwrite) as path:
            path.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    for number, name in zip(slices, names, strict=True):
        print(f"slice {number}: {name}")
    print(f"{parsed.input}: {len(slices)} slices can be processed")


main = cli.Command(
    "linum-check-slices", __doc__, _check,
    cli.Option("input", type=Path, metavar="FOLDER", help="Folder of the mosaic grids."),
    *cli.shared("shifts", "slice_config", "tile_shape"),
    cli.Option(
        "--list", type=Path, metavar="TXT", help="Text file to write: the names of the slices that are used. [none]"
    ),
    *cli.shared("overwrite"),
)  # fmt: skip
