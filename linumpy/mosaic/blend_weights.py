"""Weights with which tiles are blended where they overlap; pure, NumPy.

In: the shape of a tile, and the positions of all. Out: a map of weights (height, width) for each tile, above 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Maximum of the distance weights that are the lower limit of diffusion weights: where no voxel of a tile lies alone,
#: all diffusion weights are 0.
_DISTANCE_SHARE = 1e-3


def distance_weights(tile_shape: Sequence[int]) -> np.ndarray:
    """Return the product of the distances to the nearest border along both axes, (height, width) of float32.

    Between two tiles side by side it falls linearly from one to the other.
    """
    rows, columns = (np.minimum(np.arange(n) + 1, n - np.arange(n)).astype(np.float32) for n in tile_shape)
    return np.outer(rows, columns)


def diffusion_weights(tile_shape: Sequence[int], positions: np.ndarray) -> list[np.ndarray]:
    """Return for each tile the solution of Laplace's equation in the voxels that it shares with others.

    Boundary values are 1 where the tile lies alone and 0 beyond its borders where others continue, with no flux through
    the border of the mosaic: weight diffuses from the tile's own part into its overlaps. Weights have no kinks, even
    where tiles are displaced.

    Parameters
    ----------
    tile_shape : (int, int)
        Voxels of a tile.
    positions : numpy.ndarray, (tiles, 2)
        First voxel of each tile; rounded to whole voxels.
    """
    corners = np.rint(positions).astype(np.int64)
    lowest = distance_weights(tile_shape)
    lowest *= _DISTANCE_SHARE / lowest.max()
    return [np.maximum(_diffused(tile_shape, corner, corners), lowest).astype(np.float32) for corner in corners]


def _diffused(tile_shape: Sequence[int], corner: np.ndarray, corners: np.ndarray) -> np.ndarray:
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
