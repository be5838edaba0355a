"""Positions of the tiles of a slice, from the shifts between neighbouring tiles.

In: the tiles' projections in their grid, and the nominal overlap of the stage. Out: :class:`TilePositions`.

Tiles are compared by :mod:`~linumpy.registration.shift_evidence`, all pairs along an axis of the grid as one batch,
which also gives the probability that the shift of a pair is right. Pairs of less evidence are rejected.

The acquisition model is a regular affine grid. Its steps differ from the nominal ones as far as the accepted pairs show
that. The positions are a weighted least-squares solution over all accepted pairs, whose weights are those of their
errors. All neighbours are also linked by the model's shift, with the weight of the tiles' scatter about the model:
tiles without an accepted pair take their positions from it. The solution is repeated with weights that decrease with
the residuals by Cauchy's function. A pair that contradicts the positions that all others give is rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from scipy.sparse import coo_matrix, csc_matrix
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import splu

from linumpy.arrays import Array
from linumpy.declared import Range, Share, check_value
from linumpy.device import array_module, to_host
from linumpy.registration.robust import robust_deviation
from linumpy.registration.shift_evidence import MeasuredPairs, measure_pairs

#: Nominal overlap of neighbouring tiles, as a share of a tile.
Overlap = Annotated[float, Range(above=0, most=0.5)]
#: Minimum probability that the shift of an accepted pair is right.
MIN_EVIDENCE = 0.6
#: Least standard deviation of a measured shift, in pixels.
_MIN_DEVIATION = 0.1
#: Scatter of shifts about the model in pixels that is assumed before any pair is known.
_SCATTER = 1.0
#: A step is the nominal one unless the pairs deviate from it by more than this number of standard errors.
_PROVED = 2.0
#: Number of pairs with structure, none of which matches, from which on the overlap is taken to be wrong.
_MIN_STRUCTURED = 3
#: Standard deviations beyond which a shift is rejected, and distances in pixels from the median shift and from the
#: positions of the others within which it is not.
_CONTRADICTION, _NEAR_MODEL, _NEAR_OTHERS = 4.0, 2.0, 0.75
#: Number of reweighted solutions, and pairs whose variance is solved for together.
_ROUNDS, _BATCH = 10, 256


@dataclass(frozen=True, kw_only=True)
class TilePair:
    """Two neighbouring tiles.

    - `fixed`, `moving` (int, int): row and column of each tile.
    - `shift` (float, float): measured position of the moving tile relative to the fixed one, in pixels along Y and X.
    - `confidence`: correlation of the overlap, from -1 to 1.
    - `residual`: distance of the shift from the positions that are solved without this pair, in pixels.
    - `rejected`: the reason why the shift was not used; empty if it was used.
    - `evidence`: probability that the shift is right, judged by the scores of all other shifts; NaN if unknown.
    """

    fixed: tuple[int, int]
    moving: tuple[int, int]
    shift: tuple[float, float]
    confidence: float
    residual: float
    rejected: str
    evidence: float = float("nan")


@dataclass(frozen=True)
class AcquisitionModel:
    """The regular affine grid of the acquisition: tile (i, j) is at ``i * row + j * column``.

    - `row`, `column` (float, float): step from a tile to the tile in the next row, and to the tile in the next column,
      in pixels along Y and X.
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


@dataclass(frozen=True, kw_only=True)
class TilePositions:
    """Positions of the tiles of a slice.

    - `positions` (float64, (rows, columns, 2)): first pixel of each tile along Y and X, relative to the first pixel of
      tile (0, 0).
    - `present` (rows, columns): false for missing tiles, which have no contrast.
    - `tile_shape` (int, int): pixels of a tile.
    - `pairs`: all pairs of neighbouring tiles that are present.
    - `warnings`: what a user should know about the positions, in complete sentences.
    """

    positions: np.ndarray
    present: np.ndarray
    tile_shape: tuple[int, int]
    model: AcquisitionModel
    pairs: tuple[TilePair, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.present.shape[0], self.present.shape[1]

    @property
    def by_pairs(self) -> np.ndarray:
        """Which tiles belong to the largest group that accepted pairs connect, bool (rows, columns).

        The others have their positions relative to that group from the model.
        """
        ends = np.array([[*pair.fixed, *pair.moving] for pair in self.pairs if not pair.rejected]).reshape(-1, 4).T
        if not ends.size:
            return np.zeros(self.grid, bool)
        first, second = (np.ravel_multi_index(tuple(part), self.grid) for part in (ends[:2], ends[2:]))
        count = self.present.size
        _, group = connected_components(coo_matrix((np.ones(len(first)), (first, second)), (count, count)), False)
        return (group == np.bincount(group).argmax()).reshape(self.grid)

    @property
    def rms_leave_one_out(self) -> float:
        """Root mean square distance of accepted shifts from the positions solved without them; NaN without any."""
        used = [pair.residual**2 for pair in self.pairs if not pair.rejected]
        return float(np.sqrt(np.mean(used))) if used else float("nan")


def locate_tiles(
    tiles: Array,
    overlap: float,
    *,
    min_evidence: float = MIN_EVIDENCE,
    tile_shape: tuple[int, int] | None = None,
) -> TilePositions:
    """Find the positions of tiles by their overlaps.

    - `tiles` (rows, columns, Y, X): projections of the tiles. A tile without contrast, or without a finite pixel, is
      missing.
    - `overlap`: nominal overlap of neighbours along each axis, as a share of a tile: above 0 and at most 0.5. The true
      overlap may differ by three quarters of the nominal one, and tiles may be displaced by the same distance along the
      other axis.
    - `min_evidence`: minimum probability that the shift of an accepted pair is right.
    - `tile_shape` (int, int): pixels of a tile, if `tiles` are reduced: each of their pixels is one of ``f × f``
      pixels, f the same for both axes. Positions are in pixels that are not reduced.

    Returns: Its warnings say which positions are not known from the tiles.
    """
    if tiles.ndim != 4:
        raise ValueError(f"tiles of shape {tiles.shape}: pass (rows, columns, Y, X)")
    check_value("overlap", overlap, Overlap)
    check_value("min_evidence", min_evidence, Share)
    rows, columns, height, width = tiles.shape
    widths = [round(overlap * size) for size in (height, width)]
    if min(rows, columns) and any(count > 1 and w < 4 for count, w in zip((rows, columns), widths, strict=True)):
        raise ValueError(f"overlap={overlap}: tiles of {height} × {width} pixels share too few pixels (4 at least)")
    xp = array_module(tiles)
    finite = xp.isfinite(tiles)
    high, low = xp.where(finite, tiles, -np.inf).max(axis=(2, 3)), xp.where(finite, tiles, np.inf).min(axis=(2, 3))
    present = to_host(high > low)
    if not present.any():
        raise ValueError(f"all {present.size} tiles are empty: the pixels of each are equal, or not finite")
    whole = (height, width) if tile_shape is None else tile_shape
    factor = whole[0] // height
    step = [size - round(overlap * size) for size in whole]
    nominal = AcquisitionModel((float(step[0]), 0.0), (0.0, float(step[1])))
    measured = measure_pairs(tiles, present, (widths[0], widths[1]))
    measured = replace(measured, shifts=measured.shifts * factor, deviations=measured.deviations * factor)
    found = solve_positions(present, whole, nominal, measured, min_evidence=min_evidence)
    return replace(found, warnings=_warnings(found, measured, overlap))


def _warnings(found: TilePositions, measured: MeasuredPairs, overlap: float) -> tuple[str, ...]:
    """Return what a user should know; refuse tiles that show structure and match nowhere."""
    tiles, by_model = int(found.present.sum()), int((found.present & ~found.by_pairs).sum())
    if tiles < 2 or not by_model:
        return ()
    if by_model < tiles:
        are, them = ("is", "it") if by_model == 1 else ("are", "them")
        return (
            f"{by_model} of {tiles} tiles {are} placed by the regular grid that the others show, because no accepted "
            f"pair connects {them} to the others. Check the stitched slice there for seams.",
        )
    structured = int(measured.structured.sum())
    if structured >= max(_MIN_STRUCTURED, len(measured.structured) / 2):
        raise ValueError(
            f"overlap={overlap:g}: {structured} of {len(measured.structured)} pairs of neighbours show structure where "
            "they would overlap, but no pair shows the same: the overlap or the shape of the tiles is wrong "
            "(pass overlap= and tile_shape=)"
        )
    return (
        f"No pair of the {tiles} tiles shows common structure, so all of them were placed by the nominal overlap of "
        f"{overlap:g}. If they show tissue, check the overlap and the shape of the tiles.",
    )


def solve_positions(
    present: np.ndarray,
    tile_shape: tuple[int, int],
    nominal: AcquisitionModel,
    measured: MeasuredPairs,
    *,
    min_evidence: float = MIN_EVIDENCE,
) -> TilePositions:
    """Solve for the positions of all tiles of a grid; pure.

    - `present` (rows, columns): false for missing tiles.
    - `tile_shape` (int, int): pixels of a tile.
    - `nominal`: the grid from which the model deviates as far as pairs show it.
    - `min_evidence`: a pair of less evidence is rejected.
    """
    rejected = np.where(measured.evidence < min_evidence, "no evidence", "").astype(object)
    model, scatter = _regular_grid(nominal, measured, rejected)
    # A shift that is wrong is somewhere about the model.
    wrong = 1 - measured.evidence[:, None]
    variances = np.maximum(measured.deviations, _MIN_DEVIATION) ** 2 + (4 * scatter * wrong**2) ** 2
    solve = _Solver(present.shape, model, 1 / scatter**2, measured)
    robust, scale = np.where((rejected == "")[:, None], 1 / variances, 0), 1.0
    for _ in range(_ROUNDS if robust.any() else 0):
        positions, _ = solve(robust)
        square = (solve.residuals(positions) ** 2 / variances).sum(axis=1)
        scale = max(1.0, robust_deviation(np.sqrt(square[rejected == ""])))
        robust = np.where((rejected == "")[:, None], 1 / variances, 0) / (1 + square[:, None] / scale**2)
    positions, resistance = solve(robust)
    left_out, variance = _leave_one_out(solve.residuals(positions), robust, resistance)
    limit = np.maximum(_NEAR_OTHERS, _CONTRADICTION * scale * np.sqrt((variances + variance).mean(axis=1)))
    rejected[(rejected == "") & (left_out > limit)] = "contradicts the other pairs"
    robust[rejected != ""] = 0
    positions, resistance = solve(robust)
    left_out, _ = _leave_one_out(solve.residuals(positions), robust, resistance)
    return TilePositions(
        positions=positions,
        present=present,
        tile_shape=tile_shape,
        model=model,
        pairs=_pairs(measured, left_out, rejected),
    )


def _regular_grid(
    nominal: AcquisitionModel, measured: MeasuredPairs, rejected: np.ndarray
) -> tuple[AcquisitionModel, float]:
    """Return the regular grid that the pairs show, and the scatter of shifts about it in pixels; reject outliers."""
    axis = np.argmax(measured.moving - measured.fixed, axis=1) if len(measured.fixed) else np.zeros(0, np.int64)
    medians, groups = [], []
    for k in (0, 1):
        mine = (axis == k) & (rejected == "")
        medians.append(np.median(measured.shifts[mine], axis=0) if mine.any() else np.zeros(2))
        distance = np.linalg.norm(measured.shifts - medians[k], axis=1)
        if mine.any():
            limit = max(_NEAR_MODEL, _CONTRADICTION * robust_deviation(distance[mine]))
            rejected[mine & (distance > limit)] = "far from the regular grid"
        groups.append(measured.shifts[mine & (rejected == "")])
    apart = np.concatenate([group - median for group, median in zip(groups, medians, strict=True)])
    count = len(apart)
    # Not a robust deviation: a few tiles that the stage misplaced must not be drawn to the grid.
    scatter = float(np.hypot(np.sqrt(np.mean(apart**2)), _SCATTER / count)) if count else _SCATTER
    scatter = max(scatter, _MIN_DEVIATION)
    steps, turned = nominal.steps, 0.0
    for k, group in enumerate(groups):
        if len(group):
            deviation = medians[k] - steps[k]
            chance = (_PROVED * 1.25 * scatter) ** 2 / len(group)
            steps[k] += deviation * np.maximum(0, 1 - chance / np.maximum(deviation**2, 1e-12))
            turned = AcquisitionModel(_two_floats(steps[0]), _two_floats(steps[1])).degrees[k]
    for k, group in enumerate(groups):
        if not len(group):
            # The axes of the stage are at right angles, so the camera is turned against both by the same angle.
            angle, length = np.deg2rad(turned), np.linalg.norm(steps[k])
            across, along = np.sin(angle) * length, np.cos(angle) * length
            steps[k] = (along, across) if k == 0 else (-across, along)
    return AcquisitionModel(_two_floats(steps[0]), _two_floats(steps[1])), scatter


def _leave_one_out(residuals: np.ndarray, weights: np.ndarray, resistance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distance of each shift from the positions solved without it, (n,), and the variance of those, (n, 2).

    The closed form of linear least squares: the leverage of a pair is its weight times the variance of the difference
    of its two positions.
    """
    left = np.maximum(1 - weights * resistance, 1e-9)
    distance: np.ndarray = np.linalg.norm(residuals / left, axis=1)
    return distance, resistance / left


def _pairs(measured: MeasuredPairs, left_out: np.ndarray, rejected: np.ndarray) -> tuple[TilePair, ...]:
    return tuple(
        TilePair(
            fixed=(int(measured.fixed[k, 0]), int(measured.fixed[k, 1])),
            moving=(int(measured.moving[k, 0]), int(measured.moving[k, 1])),
            shift=_two_floats(measured.shifts[k]),
            confidence=float(measured.correlation[k]),
            residual=float(left_out[k]),
            rejected=str(rejected[k]),
            evidence=float(measured.evidence[k]),
        )
        for k in range(len(rejected))
    )


def _two_floats(values: Sequence[float]) -> tuple[float, float]:
    return float(values[0]), float(values[1])


class _Solver:
    """Least squares over the pairs of a grid, with a link of the model's step between all neighbours."""

    def __init__(self, grid: tuple[int, ...], model: AcquisitionModel, link: float, measured: MeasuredPairs) -> None:
        self._grid, self._link, self._pairs = grid, link, len(measured.fixed)
        numbers = np.arange(grid[0] * grid[1]).reshape(grid)
        down = numbers[:-1].ravel(), numbers[1:].ravel()
        right = numbers[:, :-1].ravel(), numbers[:, 1:].ravel()
        self._from = np.concatenate([numbers[measured.fixed[:, 0], measured.fixed[:, 1]], down[0], right[0]])
        self._to = np.concatenate([numbers[measured.moving[:, 0], measured.moving[:, 1]], down[1], right[1]])
        self._targets = np.concatenate(
            [measured.shifts, np.repeat([model.row], len(down[0]), 0), np.repeat([model.column], len(right[0]), 0)]
        )

    def __call__(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions (rows, columns, 2) relative to the first tile, and the variance of each pair's shift.

        `weights` has the weight of each pair along Y and X, (n, 2), as the variance.
        """
        count = self._grid[0] * self._grid[1]
        positions, variance = np.zeros((count, 2)), np.zeros((self._pairs, 2))
        links = len(self._from) - self._pairs
        for axis in (0, 1) if count > 1 else ():
            weight = np.concatenate([weights[:, axis], np.full(links, self._link)])
            positions[1:, axis], variance[:, axis] = self._along(weight, self._targets[:, axis], count)
        return positions.reshape((*self._grid, 2)), variance

    def _along(self, weight: np.ndarray, targets: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        # The normal matrix is the weighted Laplacian of the grid; the first tile is fixed at 0.
        ends = np.concatenate([self._from, self._to, self._from, self._to])
        others = np.concatenate([self._from, self._to, self._to, self._from])
        laplacian = csc_matrix((np.concatenate([weight, weight, -weight, -weight]), (ends, others)), (count, count))
        factors = splu(laplacian[1:, 1:])
        pull = np.bincount(self._to, weight * targets, count) - np.bincount(self._from, weight * targets, count)
        variance = np.empty(self._pairs)
        for first in range(0, self._pairs, _BATCH):
            pairs = np.arange(first, min(first + _BATCH, self._pairs))
            ends_of = np.zeros((count, len(pairs)))
            ends_of[self._to[pairs], pairs - first] = 1
            ends_of[self._from[pairs], pairs - first] = -1
            variance[pairs] = (ends_of[1:] * factors.solve(ends_of[1:])).sum(axis=0)
        return factors.solve(pull[1:]), variance

    def residuals(self, positions: np.ndarray) -> np.ndarray:
        """Return the difference between the positions of each pair less its shift, (n, 2)."""
        flat, n = positions.reshape(-1, 2), self._pairs
        return flat[self._to[:n]] - flat[self._from[:n]] - self._targets[:n]
