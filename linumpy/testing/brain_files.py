"""A synthetic brain on disk, as input of the commands for mosaics.

In: a :class:`~linumpy.testing.brain.BrainSpec` and a folder. Out: one OME-Zarr mosaic grid for each slice, and the
table of shifts of the motor.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from linumpy.arrays import DeviceName
from linumpy.device import usable_cores
from linumpy.mosaic.io.slice_table import SHIFT_COLUMNS
from linumpy.testing.brain import BrainSpec, tile, truth_shift


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
    from linumpy.io.zarr_mode import in_mode_of_caller

    folder = Path(folder)
    check_parent(folder)
    (folder / "mosaics").mkdir(parents=True, exist_ok=True)
    threads = 1 if device == "cuda" else min(8, usable_cores())
    with ThreadPoolExecutor(threads, "linumpy-synthetic", in_mode_of_caller()) as pool:
        for number in spec.written:
            path = folder / "mosaics" / f"slice_z{number:02d}.ome.zarr"
            for nbytes in _write_slice(spec, path, number, pool, device, overwrite):
                if progress is not None:
                    progress(nbytes)
    with replacing(folder / "shifts.csv", overwrite=overwrite) as path, path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(SHIFT_COLUMNS)
        for number in range(1, spec.slices):
            y, x = truth_shift(spec, number)
            table.writerow([number - 1, number, x, y, x * spec.spacing_um[2] / 1e3, y * spec.spacing_um[1] / 1e3])
    return folder


def _write_slice(
    spec: BrainSpec,
    path: Path,
    number: int,
    pool: ThreadPoolExecutor,
    device: DeviceName,
    overwrite: bool,
) -> Iterator[int]:
    """Write a slice tile by tile; yield the bytes of each."""
    from linumpy.write.writer import OmeZarrWriter

    depth, height, width = spec.tile_shape
    shape = depth, spec.tiles[0] * height, spec.tiles[1] * width
    attributes = {"linumpy": {"tile_shape": {"y": height, "x": width}}}
    with OmeZarrWriter(
        path, shape, spec.dtype, spec.spacing_um, chunks=spec.tile_shape, attributes=attributes, overwrite=overwrite
    ) as writer:

        def write(tile_index: tuple[int, ...]) -> int:
            row, column = tile_index
            voxels = tile(spec, number, row, column, device=device)
            box = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            writer[(slice(0, depth), *box)] = voxels
            return int(voxels.nbytes)

        yield from pool.map(write, itertools.product(*map(range, spec.tiles)))
