"""Weights with which tiles are blended where they overlap; pure, NumPy.

In: the shape of a tile, and the positions of all tiles. Out: maps of weights (height, width), all above 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Diffusion weights are at least the distance weights scaled to this maximum. Without this limit all weights of a tile
#: that other tiles cover completely would be 0.
_DISTANCE_SHARE = 1e-3


def distance_weights(tile_shape: Sequence[int]) -> np.ndarray:
    """Return the product of the distances to the nearest border along both axes, (height, width) of float32.

    In the overlap of two tiles side by side the share of each tile falls linearly towards the border of the tile.
    """
    rows, columns = (np.minimum(np.arange(n) + 1, n - np.arange(n)).astype(np.float32) for n in tile_shape)
    return np.outer(rows, columns)


def diffusion_weights(tile_shape: Sequence[int], positions: np.ndarray) -> list[np.ndarray]:
    """Return for each tile the solution of Laplace's equation in the voxels that it shares with other tiles.

    Weight diffuses from the part where the tile lies alone into its overlaps. Boundary values are 1 where the tile lies
    alone, and 0 beyond its borders where other tiles continue. There is no flux through the border of the mosaic.
    Weights have no kinks, even where tiles are displaced.

    - `tile_shape` (int, int): voxels of a tile.
    - `positions` (tiles, 2): first voxel of each tile; rounded to whole voxels.

    Returns: In the order of `positions`.
    """
    corners = np.rint(positions).astype(np.int64)
    minimum = distance_weights(tile_shape)
    minimum *= _DISTANCE_SHARE / minimum.max()
    return [np.maximum(_diffused(tile_shape, corner, corners), minimum).astype(np.float32) for corner in corners]


def _diffused(tile_shape: Sequence[int], corner: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Solve Laplace's equation for the tile at `corner`; 0 everywhere if the tile lies alone nowhere."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.linalg import spsolve

    height, width = tile_shape
    # Number of other tiles at each voxel of the tile and of a rim of one voxel around it.
    count = np.zeros((height + 2, width + 2), np.int64)
    for other in corners - corner + 1:
        if np.any(other != 1):
            (top, left), (bottom, right) = np.maximum(other, 0), np.maximum(other + tile_shape, 0)
            count[top:bottom, left:right] += 1
    inside = np.zeros(count.shape, bool)
    inside[1:-1, 1:-1] = True
    unknown = inside & (count > 0)
    weights = (inside & (count == 0)).astype(np.float64)
    number = np.full(count.shape, -1)
    number[unknown] = np.arange(unknown.sum())
    rows, columns, values, right_side = [], [], [], np.zeros(int(unknown.sum()))
    diagonal = np.zeros(right_side.size)
    for step in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        neighbour = np.roll(number, (-step[0], -step[1]), (0, 1))[unknown]
        value = np.roll(weights, (-step[0], -step[1]), (0, 1))[unknown]
        exists = np.roll(inside | (count > 0), (-step[0], -step[1]), (0, 1))[unknown]
        diagonal += exists
        right_side += value * exists
        linked = neighbour >= 0
        rows.append(np.flatnonzero(linked))
        columns.append(neighbour[linked])
        values.append(np.full(int(linked.sum()), -1.0))
    if not right_side.any():
        return weights[1:-1, 1:-1]
    rows.append(np.arange(diagonal.size))
    columns.append(np.arange(diagonal.size))
    values.append(np.maximum(diagonal, 1))
    entries = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
    weights[unknown] = spsolve(coo_matrix(entries).tocsc(), right_side)
    return weights[1:-1, 1:-1]
