"""Positions of tiles as a file: JSON with positions and pairs, or a CSV table of positions.

In: :class:`~linumpy.registration.positions.TilePositions`, or a file. Out: a file, or
:class:`~linumpy.registration.positions.TilePositions`. Errors: :class:`~linumpy.errors.SourceError` for a file without
positions, naming the file and the fault.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from linumpy.errors import SourceError
from linumpy.io.output.files import check_file, replacing
from linumpy.io.output.results import JSON, notes_of, read_result, write_result
from linumpy.registration.positions import AcquisitionModel, TilePair, TilePositions
from linumpy.version import __version__

#: Columns of a CSV table; `present` is 1 or 0.
COLUMNS = ("row", "column", "y", "x", "present")


def check_positions_file(path: str | Path, *, overwrite: bool) -> None:
    """Refuse a path that exists, unless it may be replaced, or whose name ends neither in .json nor in .csv.

    Raises `FileExistsError`, `ValueError`: naming the path.
    """
    if Path(path).suffix.lower() not in (".json", ".csv"):
        raise ValueError(f"{path}: positions are written as JSON and CSV: give it a name that ends in .json or .csv")
    check_file(path, overwrite=overwrite)


def write_positions(
    path: str | Path, found: TilePositions, source: str, spacing: Sequence[float], *, overwrite: bool = False
) -> None:
    """Write positions.

    - `path`: ``*.json`` or ``*.csv``.
    - `spacing` (float, float): lateral voxel spacing in µm.
    - `overwrite`: whether to replace an existing file.
    """
    check_positions_file(path, overwrite=overwrite)
    by_pairs = found.by_pairs
    rows = [
        {
            "row": i,
            "column": j,
            "y": float(y),
            "x": float(x),
            "present": bool(found.present[i, j]),
            "placed_by": "pairs" if by_pairs[i, j] else "model",
        }
        for i, line in enumerate(found.positions)
        for j, (y, x) in enumerate(line)
    ]
    if Path(path).suffix.lower() == ".csv":
        with (
            replacing(path, overwrite=overwrite) as temporary,
            temporary.open("w", newline="", encoding="utf-8") as file,
        ):
            table = csv.writer(file, lineterminator="\n")
            table.writerow(COLUMNS)
            table.writerows([*(row[name] for name in COLUMNS[:-1]), int(row["present"])] for row in rows)
        return
    content = {
        "linumpy": __version__,
        "source": source,
        "unit": "voxels of the finest resolution, along the lateral axes in the order of the mosaic's axes",
        "spacing_um": list(spacing),
        "tile_shape": list(found.tile_shape),
        "model": asdict(found.model),
        "rms_leave_one_out": found.rms_leave_one_out,
        "tiles": rows,
        "pairs": [asdict(pair) for pair in found.pairs],
    }
    write_result(path, content, warnings=found.warnings, overwrite=overwrite)


def read_positions(path: str | Path, tile_shape: tuple[int, int]) -> TilePositions:
    """Read positions.

    - `path`: a file of :func:`write_positions`.
    - `tile_shape` (int, int): voxels of a tile of the mosaic that the positions are for.

    Returns: A CSV table has no pairs and no model; its model is the regular grid with the mean steps between
    neighbours.

    Raises `FileNotFoundError`: the file does not exist. `SourceError`: a file of another form, a missing or repeated
    tile, or tiles of another shape.
    """
    try:
        if Path(path).suffix.lower() == ".csv":
            text = Path(path).read_text(encoding="utf-8-sig")
            return _arranged(list(csv.DictReader(text.splitlines(), skipinitialspace=True)), tile_shape)
        return _from_json(read_result(path), tile_shape)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, csv.Error) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise SourceError(f"{path}: these are no positions of tiles: {reason}") from error


def _from_json(content: Mapping[str, JSON], tile_shape: tuple[int, int]) -> TilePositions:
    if tuple(content["tile_shape"]) != tuple(tile_shape):
        raise ValueError(
            f"they are for tiles of {content['tile_shape']} voxels, and the mosaic's tiles have {tile_shape}"
        )
    pairs = [
        TilePair(
            fixed=tuple(p["fixed"]),
            moving=tuple(p["moving"]),
            shift=tuple(p["shift"]),
            confidence=p["confidence"],
            residual=p["residual"],
            rejected=p["rejected"],
            evidence=math.nan if p.get("evidence") is None else p["evidence"],
        )
        for p in content["pairs"]
    ]
    model = AcquisitionModel(tuple(content["model"]["row"]), tuple(content["model"]["column"]))
    return replace(_arranged(content["tiles"], tile_shape, model, tuple(pairs)), warnings=notes_of(content)[0])


def _arranged(
    rows: Sequence[Mapping[str, JSON]],
    tile_shape: tuple[int, int],
    model: AcquisitionModel | None = None,
    pairs: tuple[TilePair, ...] = (),
) -> TilePositions:
    """Arrange the rows of a file in the grid of tiles, and check that each tile has one row."""
    if not rows:
        raise ValueError("it has no tiles")
    tiles = [(int(row["row"]), int(row["column"])) for row in rows]
    grid = max(tile[0] for tile in tiles) + 1, max(tile[1] for tile in tiles) + 1
    if len(tiles) != grid[0] * grid[1] or sorted(tiles) != list(np.ndindex(*grid)):
        raise ValueError(f"a tile of the {grid[0]} × {grid[1]} is missing or repeated")
    positions, present = np.empty((*grid, 2)), np.empty(grid, bool)
    for tile, row in zip(tiles, rows, strict=True):
        positions[tile] = float(row["y"]), float(row["x"])
        present[tile] = bool(int(row["present"]))
    if not np.isfinite(positions).all():
        raise ValueError("a position is not finite")
    if model is None:  # the regular grid with the mean steps between neighbours
        steps = [np.diff(positions, axis=axis).reshape(-1, 2) for axis in (0, 1)]
        model = AcquisitionModel(*(tuple(step.mean(axis=0).tolist()) if len(step) else (0.0, 0.0) for step in steps))
    return TilePositions(positions=positions, present=present, tile_shape=tile_shape, model=model, pairs=pairs)


def table_of(found: TilePositions) -> str:
    """Return lines to print: the tiles, the regular grid, the residuals, and each rejected pair."""
    rejected = [pair for pair in found.pairs if pair.rejected]
    used = len(found.pairs) - len(rejected)
    (row_y, row_x), (column_y, column_x) = found.model.row, found.model.column
    by_model = int((found.present & ~found.by_pairs).sum())
    lines = [
        f"{found.grid[0]} × {found.grid[1]} tiles, {int((~found.present).sum())} of them missing, "
        f"{by_model} placed by the regular grid",
        f"regular grid{'' if used else ' (nominal)'}: next row {row_y:+.2f} {row_x:+.2f}, "
        f"next column {column_y:+.2f} {column_x:+.2f} voxels",
    ]
    if used:
        lines.append(
            "camera against the stage: {:+.3f}° along rows, {:+.3f}° along columns; positions account for it".format(
                *found.model.degrees
            )
        )
    pairs = f"{len(found.pairs)} pairs, {len(rejected)} rejected"
    if used:
        pairs += f"; each of the others fits to the rest within {found.rms_leave_one_out:.3f} voxels RMS"
    lines.append(pairs)
    if rejected:
        lines.append("rejected  tiles               shift (voxels)   correlation  evidence  why")
    for pair in rejected:
        tiles = f"{pair.fixed[0]},{pair.fixed[1]} and {pair.moving[0]},{pair.moving[1]}"
        lines.append(
            f"          {tiles:<18}{pair.shift[0]:9.2f}{pair.shift[1]:9.2f}{pair.confidence:12.2f}{pair.evidence:10.2f}"
            f"  {pair.rejected}"
        )
    return "\n".join(lines)
