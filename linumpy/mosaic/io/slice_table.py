"""The slices in a folder, and their lateral shifts as measured by the motor.

In: a folder of slices numbered from the top down, and a CSV table of shifts. Out: paths or opened images of the slices
by number; a :class:`Shift` for each pair of neighbours. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy.errors import MetadataError, SourceError
from linumpy.mosaic.io.image import MosaicImage, open_mosaic

#: Columns of a table of shifts. The columns in mm are used: a shift in voxels holds for one resolution only.
SHIFT_COLUMNS = ("fixed_id", "moving_id", "x_shift", "y_shift", "x_shift_mm", "y_shift_mm")


@dataclass(frozen=True)
class Shift:
    """The shift between two neighbouring slices: a point p of the moving slice is at p + shift in the fixed slice.

    Attributes
    ----------
    fixed_id, moving_id : int
        Numbers of the upper and the lower slice.
    y_mm, x_mm : float
        Shift along Y and X in mm.
    """

    fixed_id: int
    moving_id: int
    y_mm: float
    x_mm: float


def read_shifts(path: str | Path) -> tuple[Shift, ...]:
    """Read a table of shifts.

    Parameters
    ----------
    path : str or Path
        CSV whose first line names at least :data:`SHIFT_COLUMNS`.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    SourceError
        No CSV table, missing columns, a field that is no finite number, a repeated pair, or no rows. The error names
        the file, and for a faulty field the line.
    """
    path, shifts = Path(path), []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, skipinitialspace=True)
            missing = [name for name in SHIFT_COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise SourceError(f"{path} has no column {', '.join(missing)}: it needs {', '.join(SHIFT_COLUMNS)}")
            for row in table:
                shifts.append(_shift(row, f"{path}, line {table.line_num}"))
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is no CSV table ({error})") from error
    if not shifts:
        raise SourceError(f"{path} names no pair of slices")
    pairs = [(shift.fixed_id, shift.moving_id) for shift in shifts]
    for pair in pairs:
        if pairs.count(pair) > 1:
            raise SourceError(f"{path} names slices {pair[0]} and {pair[1]} more than once")
    return tuple(shifts)


def _shift(row: Mapping[str, str], where: str) -> Shift:
    """Parse a row of the table; `where` names the file and the line in errors."""
    try:
        ids = [int(row[name]) for name in ("fixed_id", "moving_id")]
        moves = [float(row[name]) for name in ("y_shift_mm", "x_shift_mm")]
    except (TypeError, ValueError) as error:
        raise SourceError(f"{where}: ids must be whole numbers and shifts numbers ({error})") from error
    if not all(map(math.isfinite, moves)):
        raise SourceError(f"{where}: the shifts {moves[0]} and {moves[1]} mm are not finite")
    return Shift(ids[0], ids[1], *moves)


def slice_number(name: str) -> int | None:
    """Return the number of a slice: the digits after the last ``z`` in the name of its file, or else the last digits.

    A ``z`` after a letter does not count. None for a name without digits.
    """
    stem = re.sub(r"(\.ome)?\.zarr$|\.\w+$", "", name)
    digits = re.findall(r"(?:^|[^a-zA-Z])z(\d+)", stem) or re.findall(r"\d+", stem)
    return int(digits[-1]) if digits else None


def find_slices(folder: str | Path) -> dict[int, Path]:
    """Find the slices in a folder: ``*.zarr``, numbered by :func:`slice_number`.

    ``slice_z03_10um.ome.zarr`` and ``slice_03.ome.zarr`` have the number 3. Hidden folders are left out.

    Returns
    -------
    dict of int to Path
        Ordered by number.

    Raises
    ------
    FileNotFoundError
        The folder does not exist, or has no slices.
    SourceError
        A name without a number, or two names with the same number.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    slices: dict[int, Path] = {}
    for path in sorted(folder.glob("*.zarr")):
        if path.name.startswith("."):
            continue  # another process is writing it
        number = slice_number(path.name)
        if number is None:
            raise SourceError(f"{path} has no number in its name: slices are numbered, as in slice_z03.ome.zarr")
        if number in slices:
            raise SourceError(f"{slices[number].name} and {path.name} in {folder} are both slice {number}")
        slices[number] = path
    if not slices:
        raise FileNotFoundError(f"there are no slices (*.zarr) in {folder}")
    return dict(sorted(slices.items()))


def chain_shifts(numbers: tuple[int, ...], shifts: Sequence[Shift], where: str) -> list[Shift]:
    """Return the shift of each pair of neighbours, in their order.

    Raises
    ------
    SourceError
        A pair of neighbours without a shift, or a shift of slices that are not neighbours; `where` names the table.
    """
    table = {(shift.fixed_id, shift.moving_id): shift for shift in shifts}
    pairs = list(itertools.pairwise(numbers))
    for pair in pairs:
        if pair not in table:
            raise SourceError(f"{where} has no row for slices {pair[0]} and {pair[1]}, which are neighbours")
    for pair in table:
        if pair not in pairs:
            raise SourceError(
                f"{where} has a row for slices {pair[0]} and {pair[1]}, which are not neighbours; there are "
                f"{', '.join(map(str, numbers))}"
            )
    return [table[pair] for pair in pairs]


def open_slices(
    folder: str | Path,
    *,
    least: int = 2,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
) -> dict[int, MosaicImage]:
    """Open the slices of a folder, which must have one dtype and one spacing.

    `least` is the minimum number of slices, 1 or 2; the other parameters are those of
    :func:`linumpy.mosaic.slices.stack_mosaics`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        As :func:`find_slices` and :func:`linumpy.mosaic.io.image.open_mosaic`; fewer slices than `least`, axes that
        are not z, y, x, slices of different dtype or spacing.
    ValueError
        Slices of several times or channels, of which none is selected.
    """
    slices = {
        number: open_mosaic(path, channel=channel, time=time, spacing=spacing)
        for number, path in find_slices(folder).items()
    }
    first = next(iter(slices.values()))
    if len(slices) < least:
        raise SourceError(f"{first.name} is the only slice in {folder}: a stack needs two")
    for image in slices.values():
        image.only("a stack takes one volume of each slice")
        if image.axes != "zyx":
            raise MetadataError(f"{image.name}: axes {', '.join(image.axes)}; slices are stacked with axes z, y, x")
        if image.array.dtype != first.array.dtype:
            raise SourceError(
                f"{image.name} is {image.array.dtype}, {first.name} is {first.array.dtype}: slices need one dtype"
            )
        if not np.allclose(image.spacing, first.spacing, rtol=1e-4, atol=0):
            raise SourceError(
                f"{image.name} has a spacing of {image.spacing} µm, {first.name} of {first.spacing} µm: resample them"
            )
    return slices


def check_interval(name: str, interval_mm: float, images: Sequence[MosaicImage]) -> None:
    """Refuse an interval between slices that is far deeper than the slices, because it is probably in µm.

    Raises
    ------
    ValueError
        The interval is more than ten times as deep as the deepest slice. The error names the parameter, `name`.
    """
    depth_mm = max(image.array.shape[0] * image.spacing[0] for image in images) / 1e3
    if interval_mm > 10 * depth_mm:
        raise ValueError(f"{name}={interval_mm:g}: slices are {depth_mm:.3g} mm deep; pass millimetres")
