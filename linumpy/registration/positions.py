"""Positions of the tiles of a slice, from the shifts between neighbouring tiles.

In: the tiles' projections in their grid, and the nominal overlap of the stage. Out: :class:`TilePositions`.

Shifts come from :func:`~linumpy.registration.phase_correlation.find_shifts`: all pairs along an axis are one batch.
The acquisition model is a regular affine grid; each of its two steps (Y, X) is the weighted median of the shifts of all
pairs along an axis of the grid. A shift of low confidence, or far from the model, is rejected. The positions are a
weighted least-squares solution over all other pairs. It is solved several times, with weights that decrease with the
residuals by Cauchy's function, so that shifts that contradict the others have little influence; these are rejected,
too. All neighbours are also linked by the model's shift with a very small weight, which places tiles without a trusted
pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.registration.phase_correlation import find_shifts
from linumpy.registration.robust import robust_deviation

#: Minimum confidence of a trusted pair.
MIN_CONFIDENCE = 0.3
#: Width of the compared strips, relative to the expected overlap.
_STRIP = 1.25
#: Deviations from the model and from the other pairs, in pixels, up to which no shift is rejected.
_NEAR_MODEL, _NEAR_OTHERS = 2.0, 0.75
#: Robust standard deviations beyond which a shift is rejected.
_SPREADS = 4.0
#: Weight of the model's shift of each pair; the weight of a measured shift is about its confidence.
_MODEL_WEIGHT = 1e-4
#: Minimum scale of Cauchy's function in pixels: the error of a good shift.
_MIN_SCALE = 0.1
#: Number of reweighted solutions.
_ROUNDS = 10


@dataclass(frozen=True)
class TilePair:
    """Two neighbouring tiles.

    Attributes
    ----------
    fixed, moving : (int, int)
        Row and column of each tile.
    shift : (float, float)
        Measured position of the moving tile relative to the fixed one, in pixels along Y and X.
    confidence : float
        Correlation of the overlap, from -1 to 1.
    residual : float
        Distance of the shift from the solved positions, in pixels.
    rejected : str
        The reason why the shift was not used; empty if it was used.
    """

    fixed: tuple[int, int]
    moving: tuple[int, int]
    shift: tuple[float, float]
    confidence: float
    residual: float
    rejected: str


@dataclass(frozen=True)
class AcquisitionModel:
    """The regular affine grid of the acquisition: tile (i, j) is at ``i * row + j * column``.

    Attributes
    ----------
    row, column : (float, float)
        Step from a tile to the tile in the next row, and to the tile in the next column, in pixels along Y and X.
    """

    row: tuple[float, float]
    column: tuple[float, float]

    @property
    def steps(self) -> np.ndarray:
        """The steps to the next row and to the next column: (2, 2)."""
        return np.array([self.row, self.column])

    @property
    def degrees(self) -> tuple[float, float]:
        """Angles between the stage and the camera: of `row` to the pixels' axis Y, and of `column` to their axis X.

        A positive angle turns Y to X for `row` and X to -Y for `column`. Both angles are equal if the camera is
        rotated, and differ if the axes of the stage are not perpendicular. The angle of a step of 0 is 0.
        """
        (row_y, row_x), (column_y, column_x) = self.row, self.column
        return float(np.degrees(np.arctan2(row_x, row_y))), float(np.degrees(np.arctan2(-column_y, column_x)))


@dataclass(frozen=True)
class TilePositions:
    """Positions of the tiles of a slice.

    Attributes
    ----------
    positions : numpy.ndarray of float64, (rows, columns, 2)
        First pixel of each tile along Y and X, relative to the first pixel of tile (0, 0).
    present : numpy.ndarray of bool, (rows, columns)
        False for missing tiles, which have no contrast.
    tile_shape : (int, int)
        Pixels of a tile.
    model : AcquisitionModel
        The regular grid.
    pairs : tuple of TilePair
        All pairs of neighbouring tiles that are present.
    """

    positions: np.ndarray
    present: np.ndarray
    tile_shape: tuple[int, int]
    model: AcquisitionModel
    pairs: tuple[TilePair, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.present.shape[0], self.present.shape[1]

    @property
    def rms_residual(self) -> float:
        """Root mean square of the residuals of the pairs that were used, in pixels; NaN if no pair was used."""
        used = [pair.residual**2 for pair in self.pairs if not pair.rejected]
        return float(np.sqrt(np.mean(used))) if used else float("nan")


def locate_tiles(tiles: Array, overlap: float, *, min_confidence: float = MIN_CONFIDENCE) -> TilePositions:
    """Find the positions of tiles by their overlaps.

    Parameters
    ----------
    tiles : numpy.ndarray or cupy.ndarray, (rows, columns, Y, X)
        Projections of the tiles. A tile without contrast, or without a finite pixel, is missing.
    overlap : float
        Nominal overlap of neighbours along each axis, as a share of a tile: above 0 and at most 0.5. The true overlap
        may differ by three quarters of the nominal one, and tiles may be displaced by the same distance along the other
        axis.
    min_confidence : float
        A shift of less confidence is rejected.

    Raises
    ------
    ValueError
        An array of other axes, an overlap out of range or of fewer than 4 pixels, a confidence outside of -1 to 1.
    """
    if tiles.ndim != 4:
        raise ValueError(f"tiles of shape {tiles.shape}: pass (rows, columns, Y, X)")
    if not 0 < overlap <= 0.5:
        raise ValueError(f"overlap={overlap}: pass the share of a tile that it shares with the next, up to 0.5")
    if not -1 <= min_confidence <= 1:
        raise ValueError(f"min_confidence={min_confidence}: correlations are from -1 to 1")
    rows, columns, height, width = tiles.shape
    widths = [round(overlap * size) for size in (height, width)]
    if min(rows, columns) and any(count > 1 and w < 4 for count, w in zip((rows, columns), widths, strict=True)):
        raise ValueError(f"overlap={overlap}: tiles of {height} × {width} pixels share too few pixels (4 at least)")
    present = _have_contrast(tiles)
    nominal = AcquisitionModel((float(height - widths[0]), 0.0), (0.0, float(width - widths[1])))
    along = [_shifts_along(tiles, present, axis, widths[axis]) for axis in (0, 1)]
    fixed, moving, shifts, confidence = (np.concatenate(parts) for parts in zip(*along, strict=True))
    return solve_positions(
        present, (height, width), nominal, fixed, moving, shifts, confidence, min_confidence=min_confidence
    )


def _have_contrast(tiles: Array) -> np.ndarray:
    """Return which tiles have contrast."""
    xp = array_module(tiles)
    finite = xp.isfinite(tiles)
    high = xp.where(finite, tiles, -np.inf).max(axis=(2, 3))
    low = xp.where(finite, tiles, np.inf).min(axis=(2, 3))
    return to_host(high > low)


def _shifts_along(tiles: Array, present: np.ndarray, axis: int, overlap: int) -> tuple[np.ndarray, ...]:
    """Find the shifts of all neighbours along an axis of the grid: tiles, shifts and confidence of each pair."""
    fixed = np.array([tile for tile in np.argwhere(present) if tile[axis] + 1 < present.shape[axis]], np.int64)
    fixed = fixed.reshape(-1, 2)
    moving = fixed + np.eye(2, dtype=np.int64)[axis]
    both = present[moving[:, 0], moving[:, 1]]
    fixed, moving = fixed[both], moving[both]
    if not len(fixed):
        return fixed, moving, np.zeros((0, 2)), np.zeros(0)
    size = tiles.shape[2 + axis]
    strip = min(size, round(_STRIP * overlap))
    before = (slice(None), slice(None)) if axis else (slice(None),)
    sides = [
        tiles[side[:, 0], side[:, 1]][(*before, cut)]
        for side, cut in ((fixed, slice(size - strip, None)), (moving, slice(strip)))
    ]
    measured = find_shifts(sides[0], sides[1], max_shift=(overlap, overlap), min_overlap=1 - 1 / _STRIP)
    shifts = to_host(measured.shifts)
    shifts[:, axis] += size - strip
    return fixed, moving, shifts, to_host(measured.confidence)


def solve_positions(
    present: np.ndarray,
    tile_shape: tuple[int, int],
    nominal: AcquisitionModel,
    fixed: np.ndarray,
    moving: np.ndarray,
    shifts: np.ndarray,
    confidence: np.ndarray,
    *,
    min_confidence: float = MIN_CONFIDENCE,
) -> TilePositions:
    """Solve for the positions of all tiles of a grid; pure.

    Parameters
    ----------
    present : numpy.ndarray of bool, (rows, columns)
        False for missing tiles.
    tile_shape : (int, int)
        Pixels of a tile.
    nominal : AcquisitionModel
        Its step is used along an axis of the grid that has no trusted pair.
    fixed, moving : numpy.ndarray of int, (n, 2)
        Row and column of the tiles of each pair, neighbours along one axis.
    shifts : numpy.ndarray, (n, 2)
        Measured position of each moving tile relative to the fixed one.
    confidence : numpy.ndarray, (n,)
        Confidence of each shift.
    min_confidence : float
        A shift of less confidence is rejected.
    """
    axis = np.argmax(moving - fixed, axis=1) if len(fixed) else np.zeros(0, np.int64)
    rejected = np.where(confidence < min_confidence, "low correlation", "").astype(object)
    weights = np.clip(confidence, 0, 1) ** 2 / (1.05 - np.clip(confidence, 0, 1) ** 2)
    steps = nominal.steps
    for k in (0, 1):
        trusted = (axis == k) & (rejected == "")
        if trusted.any():
            steps[k] = _weighted_median(shifts[trusted], weights[trusted])
            distance = np.linalg.norm(shifts - steps[k], axis=1)
            far = trusted & (distance > max(_NEAR_MODEL, _SPREADS * robust_deviation(distance[trusted])))
            rejected[far] = "far from the regular grid"
    model = AcquisitionModel(_two_floats(steps[0]), _two_floats(steps[1]))
    used = rejected == ""
    solve = _Solver(present.shape, model, fixed, moving)
    positions = solve(shifts, np.where(used, weights, 0))
    # The scale of the first solution is kept: a shrinking scale would leave only a few pairs with residuals near 0.
    distance = solve.residuals(positions, shifts)
    scale = max(_MIN_SCALE, robust_deviation(distance[used])) if used.any() else 1.0
    for _ in range(_ROUNDS if used.any() else 0):
        distance = solve.residuals(positions, shifts)
        positions = solve(shifts, np.where(used, weights / (1 + (distance / scale) ** 2), 0))
    if used.any():
        distance = solve.residuals(positions, shifts)
        limit = max(_NEAR_OTHERS, _SPREADS * robust_deviation(distance[used]))
        rejected[used & (distance > limit)] = "contradicts the other pairs"
        positions = solve(shifts, np.where(rejected == "", weights, 0))
    distance = solve.residuals(positions, shifts)
    pairs = tuple(
        TilePair(
            (int(tile[0]), int(tile[1])),
            (int(other[0]), int(other[1])),
            _two_floats(shift),
            float(correlation),
            float(residual),
            str(reason),
        )
        for tile, other, shift, correlation, residual, reason in zip(
            fixed, moving, shifts, confidence, distance, rejected, strict=True
        )
    )
    return TilePositions(positions, present, tile_shape, model, pairs)


def _two_floats(values: Sequence[float]) -> tuple[float, float]:
    return float(values[0]), float(values[1])


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the weighted median along the first axis, the mean of the lower and the upper median."""
    result = np.empty(values.shape[1])
    for k, column in enumerate(values.T):
        order = np.argsort(column)
        below = np.cumsum(weights[order]) / weights.sum()
        ends = [int(np.searchsorted(below, 0.5 - 1e-9)), int(np.searchsorted(below, 0.5 + 1e-9))]
        result[k] = column[order[np.minimum(ends, len(column) - 1)]].mean()
    return result


class _Solver:
    """Least squares over the pairs of a grid; its matrix has a row for each pair, and one for each step of the model.

    Parameters
    ----------
    grid : tuple of int
        Rows and columns.
    model : AcquisitionModel
        The regular grid.
    fixed, moving : numpy.ndarray of int, (n, 2)
        Tiles of each measured pair.
    """

    def __init__(self, grid: tuple[int, ...], model: AcquisitionModel, fixed: np.ndarray, moving: np.ndarray) -> None:
        self._grid = grid
        numbers = np.arange(grid[0] * grid[1]).reshape(grid)
        down = numbers[:-1].ravel(), numbers[1:].ravel()
        right = numbers[:, :-1].ravel(), numbers[:, 1:].ravel()
        self._from = np.concatenate([numbers[fixed[:, 0], fixed[:, 1]], down[0], right[0]])
        self._to = np.concatenate([numbers[moving[:, 0], moving[:, 1]], down[1], right[1]])
        self._steps = np.concatenate(
            [np.repeat([model.row], len(down[0]), 0), np.repeat([model.column], len(right[0]), 0)]
        )
        self._pairs = len(fixed)

    def __call__(self, shifts: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the positions (rows, columns, 2) relative to the first tile."""
        from scipy.sparse import csc_matrix
        from scipy.sparse.linalg import splu

        count = self._grid[0] * self._grid[1]
        if count < 2:
            return np.zeros((*self._grid, 2))
        targets = np.concatenate([shifts, self._steps])
        weight = np.concatenate([weights, np.full(len(self._steps), _MODEL_WEIGHT)])
        # The normal matrix is the weighted Laplacian of the grid; the first tile is fixed at 0.
        ends = np.concatenate([self._from, self._to, self._from, self._to])
        others = np.concatenate([self._from, self._to, self._to, self._from])
        laplacian = csc_matrix((np.concatenate([weight, weight, -weight, -weight]), (ends, others)), (count, count))
        pull = np.zeros((count, 2))
        np.add.at(pull, self._to, weight[:, None] * targets)
        np.add.at(pull, self._from, -weight[:, None] * targets)
        positions = np.zeros((count, 2))
        positions[1:] = splu(laplacian[1:, 1:]).solve(pull[1:])
        return positions.reshape((*self._grid, 2))

    def residuals(self, positions: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """Return the distance of each shift from the shift between its positions, (n,)."""
        flat, n = positions.reshape(-1, 2), self._pairs
        distance: np.ndarray = np.linalg.norm(flat[self._to[:n]] - flat[self._from[:n]] - shifts, axis=1)
        return distance
