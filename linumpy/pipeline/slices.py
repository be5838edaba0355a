"""The recorded slices of a brain as a folder and a table of shifts, which the functions of the whole brain take.

In: paths of slices, and the motor's table of shifts. Out: a folder of links to the slices, and a table of shifts
between them. A shift across slices that are left out is the sum of the motor's shifts.
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
    """Replace a folder by one with a link to each slice, and return the numbers of the slices."""
    if folder.exists():
        shutil.rmtree(folder)  # removes the links, not their targets
    folder.mkdir()
    for path in slices:
        (folder / path.name).symlink_to(os.path.relpath(path, folder))
    return tuple(find_slices(folder))


def write_shifts(path: Path, numbers: Sequence[int], inputs: Mapping[str, Sequence[Path]]) -> Path:
    """Write the table of shifts between some slices, and return its path.

    Shifts are those of the motor's table, which is the input of the role ``shifts``; without it they are 0.

    Raises
    ------
    FileNotFoundError, SourceError
        As :func:`linumpy.mosaic.io.slice_table.read_shifts`; the motor's table lacks a pair of neighbours.
    """
    tables = inputs.get("shifts", ()) if len(numbers) > 1 else ()  # for one slice the table has no rows
    motor_shifts = {(shift.fixed_id, shift.moving_id): shift for table in tables for shift in read_shifts(table)}
    with replacing(path, overwrite=True) as temporary, temporary.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(SHIFT_COLUMNS)
        for fixed, moving in itertools.pairwise(numbers):
            y = x = 0.0
            for pair in itertools.pairwise(range(fixed, moving + 1)) if motor_shifts else ():
                if pair not in motor_shifts:
                    raise SourceError(f"{inputs['shifts'][0]} has no row for slices {pair[0]} and {pair[1]}")
                y, x = y + motor_shifts[pair].y_mm, x + motor_shifts[pair].x_mm
            table.writerow([fixed, moving, 0, 0, x, y])  # readers use only the columns in mm
    return path
