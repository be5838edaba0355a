"""The slices of a brain: a folder of them, the table that leaves slices out, and the motor's table of lateral shifts.

In: a folder of slices numbered from the top down, ``slice_config.csv`` and ``shifts_xy.csv``. Out: paths or opened
images of the slices by number; a :class:`Shift` for each pair of neighbours. Errors name the file and the line.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy.errors import MetadataError, SourceError
from linumpy.mosaic.io.image import MosaicImage, needed_tile, open_mosaic

log = logging.getLogger(__name__)

#: Columns of a table of shifts. The columns in mm are used: a shift in voxels holds for one resolution only. Of other
#: columns only ``reliable`` is read.
SHIFT_COLUMNS = ("fixed_id", "moving_id", "x_shift", "y_shift", "x_shift_mm", "y_shift_mm")
#: Columns of a table of the slices that are used; other columns are ignored.
CONFIG_COLUMNS = ("slice_id", "use")
#: How tables spell a truth value.
_TRUTH = dict.fromkeys(("true", "1", "1.0", "yes"), True) | dict.fromkeys(("false", "0", "0.0", "no"), False)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """The shift between two slices: a point p of the moving slice is at p + shift in the fixed slice.

    - `fixed_id`, `moving_id`: numbers of the upper and the lower slice.
    - `y_mm`, `x_mm`: shift along Y and X in mm.
    - `reliable`: whether the table trusts the shift: False where its column ``reliable`` is 0 or false.
    """

    fixed_id: int
    moving_id: int
    y_mm: float
    x_mm: float
    reliable: bool = True


def read_shifts(path: str | Path) -> tuple[Shift, ...]:
    """Read a table of shifts.

    - `path`: CSV whose first line names at least :data:`SHIFT_COLUMNS`. Numbers of slices may be written as ``3``,
      ``03`` or ``3.0``. A column ``reliable`` (1 or 0, true or false) may mark shifts that the motor's log does not
      support.

    Raises `FileNotFoundError`: the file does not exist. `SourceError`: no CSV table, missing columns, a field that is
    no finite number, a row whose moving slice is not below its fixed slice, two rows from the same fixed slice, or no
    rows. The error names the file and the line.
    """
    shifts: dict[int, Shift] = {}
    for where, row in _read_table(path, SHIFT_COLUMNS):
        fixed, moving = _number(row, "fixed_id", where), _number(row, "moving_id", where)
        try:
            y, x = float(row["y_shift_mm"]), float(row["x_shift_mm"])
        except ValueError as error:
            raise SourceError(f"{where}: shifts must be numbers ({error})") from error
        if not (math.isfinite(y) and math.isfinite(x)):
            raise SourceError(f"{where}: the shifts {y} and {x} mm are not finite")
        if moving <= fixed:
            raise SourceError(f"{where}: the moving slice {moving} is not below the fixed slice {fixed}")
        if fixed in shifts:
            raise SourceError(f"{where}: the table has a shift from slice {fixed} to {shifts[fixed].moving_id} already")
        reliable = _truth(row, "reliable", where) if "reliable" in row else True
        shifts[fixed] = Shift(fixed_id=fixed, moving_id=moving, y_mm=y, x_mm=x, reliable=reliable)
    if not shifts:
        raise SourceError(f"{path} names no pair of slices")
    return tuple(shifts.values())


def motor_shifts(path: str | Path, numbers: Sequence[int]) -> tuple[Shift, ...]:
    """Return the motor's shift of each pair of neighbouring slices.

    This is the only way from a table to shifts. Across missing slices the rows are summed, and the sum is reliable if
    all its rows are. Rows that no pair needs are ignored. For fewer than two slices the table is not read.

    - `path`: the table, as for :func:`read_shifts`.

    Raises `FileNotFoundError`, `SourceError`: As :func:`read_shifts`; rows that are missing, all named.
    """
    if len(numbers) < 2:
        return ()
    rows, lacking, sums = {shift.fixed_id: shift for shift in read_shifts(path)}, [], []
    for fixed, moving in itertools.pairwise(numbers):
        steps, at = [], fixed
        while at < moving:
            step = rows.get(at)
            if step is None or step.moving_id > moving:
                after = min((row for row in rows if at < row < moving), default=moving)
                lacking.append(f"{at} and {after}")
                at = after
            else:
                steps.append(step)
                at = step.moving_id
        y, x = sum(step.y_mm for step in steps), sum(step.x_mm for step in steps)
        sums.append(
            Shift(fixed_id=fixed, moving_id=moving, y_mm=y, x_mm=x, reliable=all(step.reliable for step in steps))
        )
    if lacking:
        raise SourceError(f"{path} has no row for slices {', '.join(lacking)}; there are slices {_listed(numbers)}")
    return tuple(sums)


def unreliable_warnings(path: str | Path, shifts: Sequence[Shift]) -> tuple[str, ...]:
    """Return a sentence on the shifts that the table marks as not reliable; nothing if it trusts all."""
    pairs = [f"{shift.fixed_id} and {shift.moving_id}" for shift in shifts if not shift.reliable]
    if not pairs:
        return ()
    where = f"between slices {', '.join(pairs)}"
    return (
        f"{path} marks {len(pairs)} of {len(shifts)} shifts as not reliable ({where}); they are used none the less.",
    )


def _read_table(path: str | Path, columns: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Read the rows of a CSV table, each after a text that names the file and the line; empty rows are left out."""
    path, rows = Path(path), []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.reader(file, skipinitialspace=True)
            names = [name.strip() for name in next(table, [])]
            missing = [name for name in columns if names.count(name) != 1]
            if missing:
                hint = " (fields must be separated by commas)" if len(names) == 1 and names[0] else ""
                needed = f"it needs {', '.join(columns)}, each once{hint}"
                raise SourceError(f"{path} has no column {', '.join(missing)}: {needed}")
            for row in table:
                fields = [field.strip() for field in row]
                where = f"{path}, line {table.line_num}"
                if any(fields) and len(fields) != len(names):
                    raise SourceError(f"{where}: {len(fields)} fields do not fit {len(names)} columns")
                if any(fields):
                    rows.append((where, dict(zip(names, fields, strict=True))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise SourceError(f"{path} is no CSV table ({error})") from error
    return rows


def _number(row: Mapping[str, str], name: str, where: str) -> int:
    """Return the number of a slice, which may be written as a float."""
    try:
        number = float(row[name])
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise SourceError(f"{where}: {name} is {row[name]!r}: ids must be whole numbers")
    return int(number)


def _truth(row: Mapping[str, str], name: str, where: str) -> bool:
    """Return a truth value."""
    value = _TRUTH.get(row[name].lower())
    if value is None:
        raise SourceError(f"{where}: {name} is {row[name]!r}: write true or false, 1 or 0, yes or no")
    return value


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def read_slice_config(path: str | Path) -> dict[int, bool]:
    """Read which slices are used.

    - `path`: CSV whose first line names at least :data:`CONFIG_COLUMNS`: the number of the slice, as in
      :func:`read_shifts`, and true or false, 1 or 0, yes or no.

    Raises `FileNotFoundError`, `SourceError`: no such file; no CSV table, missing columns, a field that is no number or
    no truth value, a slice named twice.
    """
    use: dict[int, bool] = {}
    for where, row in _read_table(path, CONFIG_COLUMNS):
        number = _number(row, "slice_id", where)
        if number in use:
            raise SourceError(f"{where}: the table has slice {number} more than once")
        use[number] = _truth(row, "use", where)
    return use


def slice_number(name: str) -> int | None:
    """Return the number of a slice: the digits after the last ``z`` in the name of its file, or else the last digits.

    A ``z`` after a letter does not count. None for a name without digits.
    """
    stem = re.sub(r"(\.ome)?\.zarr$|\.\w+$", "", name)
    digits = re.findall(r"(?:^|[^a-zA-Z])z(\d+)", stem) or re.findall(r"\d+", stem)
    return int(digits[-1]) if digits else None


def find_slices(folder: str | Path, slice_config: str | Path | None = None) -> dict[int, Path]:
    """Find the slices in a folder: ``*.zarr``, numbered by :func:`slice_number`.

    ``slice_z03_10um.ome.zarr`` and ``slice_03.ome.zarr`` have the number 3. Hidden folders are left out.

    Parameters
    ----------
    folder : str or Path
        The folder.
    slice_config : str or Path, optional
        Table of the slices that are used, as for :func:`read_slice_config`; by default all are.

    Returns
    -------
    dict of int to Path
        Ordered by number.

    Raises
    ------
    FileNotFoundError
        The folder does not exist, or has no slices.
    SourceError
        A name without a number, or two names with the same number; a table without a row for a slice of the folder, or
        that uses none of them.
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
    slices = dict(sorted(slices.items()))
    return slices if slice_config is None else _used(slices, slice_config, folder)


def _used(slices: Mapping[int, Path], slice_config: str | Path, folder: Path) -> dict[int, Path]:
    """Return the slices that a table uses."""
    use = read_slice_config(slice_config)
    unlisted = [number for number in slices if number not in use]
    if unlisted:
        raise SourceError(f"{slice_config} has no row for slice {_listed(unlisted)}, found in {folder}")
    used = {number: path for number, path in slices.items() if use[number]}
    if not used:
        raise SourceError(f"{slice_config} uses none of the slices in {folder}: {_listed(slices)}")
    absent = sorted(number for number, wanted in use.items() if wanted and number not in slices)
    if absent:
        log.warning("%s uses slice %s, which %s lacks", slice_config, _listed(absent), folder)
    return used


def open_slices(
    paths: Mapping[int, Path],
    *,
    least: int = 2,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
) -> dict[int, MosaicImage]:
    """Open slices from :func:`find_slices`, which must have one dtype and one spacing.

    `least` is the minimum number of slices, 1 or 2; the other parameters are those of
    :func:`linumpy.mosaic.slices.stack_mosaics`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        As :func:`linumpy.mosaic.io.image.open_mosaic`; fewer slices than `least`, axes that are not z, y, x, slices of
        different dtype or spacing.
    ValueError
        Slices of several times or channels, of which none is selected.
    """
    slices = {number: open_mosaic(path, channel=channel, time=time, spacing=spacing) for number, path in paths.items()}
    first = next(iter(slices.values()))
    if len(slices) < least:
        raise SourceError(f"{first.name} is the only slice: a stack needs two")
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


def check_mosaics(
    folder: str | Path,
    *,
    shifts: str | Path | None = None,
    slice_config: str | Path | None = None,
    tile_shape: Sequence[int] | None = None,
) -> dict[int, Path]:
    """Check the mosaic grids of a brain and its tables before anything is computed; return the slices that are used.

    Shifts that the table marks as not reliable give a log line (warning).

    Raises
    ------
    FileNotFoundError, SourceError
        As :func:`find_slices` and :func:`motor_shifts`.
    MetadataError, ValueError
        As :func:`linumpy.mosaic.io.image.open_mosaic` and :func:`linumpy.mosaic.io.image.needed_tile`; a mosaic of
        several volumes, or with other axes than z, y, x.
    """
    slices = find_slices(folder, slice_config)
    if shifts is not None:
        for warning in unreliable_warnings(shifts, motor_shifts(shifts, tuple(slices))):
            log.warning(warning)
    for path in slices.values():
        image = open_mosaic(path)
        image.only("a slice is one volume")
        if image.axes != "zyx":
            raise MetadataError(f"{image.name}: axes {', '.join(image.axes)}; mosaics of a brain need axes z, y, x")
        needed_tile(image, tile_shape)
    return slices


def check_interval(name: str, interval_mm: float, images: Sequence[MosaicImage]) -> None:
    """Refuse an interval between slices that is far deeper than the slices, because it is probably in µm.

    Raises `ValueError`: the interval is more than ten times as deep as the deepest slice. The error names the
    parameter, `name`.
    """
    depth_mm = max(image.array.shape[0] * image.spacing[0] for image in images) / 1e3
    if interval_mm > 10 * depth_mm:
        raise ValueError(f"{name}={interval_mm:g}: slices are {depth_mm:.3g} mm deep; pass millimetres")
