"""A folder and a table of shifts for the functions of the whole brain, of the slices that were recorded.

In: paths of slices, and the motor's table. Out: a folder of links, and a table of these slices, in which shifts are
summed over slices that are left out.
"""

from __future__ import annotations

import csv
import itertools
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from linumpy.errors import SourceError
from linumpy.io.output.files import replacing
from linumpy.mosaic.io.slice_table import SHIFT_COLUMNS, find_slices, read_shifts


def link_slices(folder: Path, slices: Sequence[Path]) -> tuple[int, ...]:
    """Make a folder anew with a link to each slice; return the slices' numbers."""
    if folder.exists():
        shutil.rmtree(folder)  # removes the links, not their targets
    folder.mkdir()
    for path in slices:
        (folder / path.name).symlink_to(os.path.relpath(path, folder))
    return tuple(find_slices(folder))


def write_shifts(path: Path, numbers: Sequence[int], inputs: Mapping[str, Sequence[Path]]) -> Path:
    """Write the table of shifts of some slices from the motor's table (role ``shifts``); without it shifts are 0.

    Raises
    ------
    SourceError
        The motor's table lacks a pair of neighbours.
    """
    tables = inputs.get("shifts", ()) if len(numbers) > 1 else ()  # for one slice the table has no rows
    known = {(shift.fixed_id, shift.moving_id): shift for table in tables for shift in read_shifts(table)}
    with replacing(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(SHIFT_COLUMNS)
        for fixed, moving in itertools.pairwise(numbers):
            y = x = 0.0
            for pair in itertools.pairwise(range(fixed, moving + 1)) if known else ():
                if pair not in known:
                    raise SourceError(f"{inputs['shifts'][0]} has no row for slices {pair[0]} and {pair[1]}")
                y, x = y + known[pair].y_mm, x + known[pair].x_mm
            table.writerow([fixed, moving, 0, 0, x, y])  # shifts in voxels are not used
    return path
