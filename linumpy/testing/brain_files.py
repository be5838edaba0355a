"""A synthetic brain on disk, as input of the commands for mosaics.

In: a :class:`~linumpy.testing.brain.BrainSpec` and a folder. Out: one OME-Zarr mosaic grid for each slice, and the
table of shifts of the motor.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from linumpy.arrays import Array, DeviceName
from linumpy.mosaic.io.slice_table import SHIFT_COLUMNS
from linumpy.testing.brain import BrainSpec, tile, truth_shift
from linumpy.testing.synthetic import write_boxes


def write_brain(
    spec: BrainSpec,
    folder: str | Path,
    *,
    device: DeviceName = "cpu",
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Write a brain as mosaic grids.

    - `folder`: the folder to fill; it is made if its parent exists. The slices are ``mosaics/slice_z00.ome.zarr`` and
      so on: mosaic grids, such as ``linum-resample-mosaic-grid`` takes, each chunk a tile. ``shifts.csv`` is a table
      such as ``linum-stack-slices-motor`` takes; it has rows for absent slices, too, since the motor moved to them.
    - `device`: where tiles are made; speckle of ``"cuda"`` and ``"cpu"`` differs, so none is chosen.
    - `overwrite`: whether to replace existing files.
    - `progress`: called with the number of bytes written since the last call.

    Returns: `folder`.
    """
    from linumpy.io.output.checks import check_parent
    from linumpy.io.output.files import replacing
    from linumpy.write.writer import OmeZarrWriter

    folder = Path(folder)
    check_parent(folder)
    (folder / "mosaics").mkdir(parents=True, exist_ok=True)
    depth, height, width = spec.tile_shape
    shape = depth, spec.tiles[0] * height, spec.tiles[1] * width
    attributes = {"linumpy": {"tile_shape": {"y": height, "x": width}}}
    for number in spec.written:
        path = folder / "mosaics" / f"slice_z{number:02d}.ome.zarr"
        with OmeZarrWriter(
            path, shape, spec.dtype, spec.spacing_um, chunks=spec.tile_shape, attributes=attributes, overwrite=overwrite
        ) as writer:

            def make(box: tuple[slice, ...], number: int = number) -> Array:
                return tile(spec, number, box[1].start // height, box[2].start // width, device=device)

            write_boxes(writer, make, progress, threads=1 if device == "cuda" else None)
    with replacing(folder / "shifts.csv", overwrite=overwrite) as path, path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(SHIFT_COLUMNS)
        for number in range(1, spec.slices):
            y, x = truth_shift(spec, number)
            table.writerow([number - 1, number, x, y, x * spec.spacing_um[2] / 1e3, y * spec.spacing_um[1] / 1e3])
    return folder
