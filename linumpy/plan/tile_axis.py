"""One axis of a volume cut into tiles, and the tiles of another number of voxels that it becomes.

In: voxels. Out: where tiles lie before and after, and of which voxels, by which weights, each new voxel is made. Every
tile is resampled by itself: smoothed by a Gaussian of (factor - 1) / 2 voxels where it gets coarser, and linearly
interpolated, both continued at its edges by its own outermost voxel. A new voxel takes its value at its centre.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

#: Standard deviations after which a Gaussian ends, as SciPy's does.
_TRUNCATE = 4.0


@dataclass(frozen=True)
class TileAxis:
    """An axis of tiles.

    Attributes
    ----------
    size : int
        Voxels. It begins with the first voxel of a tile; the last tile may be shorter.
    tile, new_tile : int
        Voxels of a whole tile, before and after.
    """

    size: int
    tile: int
    new_tile: int

    @property
    def factor(self) -> float:
        """How many voxels become one."""
        return self.tile / self.new_tile

    @property
    def sigma(self) -> float:
        """Standard deviation of the Gaussian, in voxels; 0 where nothing is smoothed."""
        return max(0.0, (self.factor - 1) / 2)

    @property
    def offset(self) -> float:
        """Where the centre of a new tile's first voxel lies, in voxels."""
        return (self.factor - 1) / 2

    @property
    def new_size(self) -> int:
        """Voxels after."""
        return self.new_place(self.size)

    def new_place(self, place: int) -> int:
        """Count the new voxels of what lies before a place: of whole tiles, or all but the end of the last one.

        A tile that is cut short keeps the factor of the whole ones, so that spacing is one all over; it has the nearest
        whole number of voxels, at least one.
        """
        tiles, rest = divmod(place, self.tile)
        return tiles * self.new_tile + (max(1, round(rest / self.factor)) if rest else 0)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Walk the tiles: where each lies before, and after."""
        for start in range(0, self.size, self.tile):
            stop = min(start + self.tile, self.size)
            yield slice(start, stop), slice(self.new_place(start), self.new_place(stop))

    def taps(self) -> Taps:
        """Say of what each new voxel is made."""
        whole, rest = divmod(self.size, self.tile)
        parts = []
        if whole:
            one = _tile_taps(self.tile, self.new_tile, self.factor)
            starts = np.arange(whole, dtype=np.int64)[:, None] * self.tile
            first = (one.first + starts).reshape(-1)
            parts.append(Taps(first, np.tile(one.count, whole), np.tile(one.weights, (whole, 1))))
        if rest:
            last = _tile_taps(rest, self.new_size - whole * self.new_tile, self.factor)
            parts.append(Taps(last.first + whole * self.tile, last.count, last.weights))
        return Taps(*(np.concatenate([getattr(one, name) for one in parts]) for name in ("first", "count", "weights")))


@dataclass(frozen=True)
class Taps:
    """Of what the voxels of a new axis are made: voxel ``o`` of ``weights[o, k]`` times voxel ``first[o] + k``.

    Attributes
    ----------
    first, count : numpy.ndarray of int64, (size,)
        The first voxel, and how many.
    weights : numpy.ndarray of float64, (size, width)
        Beyond ``count`` they are 0. They add up to 1.
    """

    first: np.ndarray
    count: np.ndarray
    weights: np.ndarray


def _tile_taps(size: int, new_size: int, factor: float) -> Taps:
    """Taps of one tile: the Gaussian and the two neighbours of a place, as one window that stays within the tile."""
    gauss = _gaussian((factor - 1) / 2)
    places = np.clip((np.arange(new_size) + 0.5) * factor - 0.5, 0, size - 1)
    low = np.floor(places)
    part = (places - low)[:, None]
    window = (1 - part) * np.append(gauss, 0) + part * np.append(0, gauss)
    reached = low.astype(np.int64)[:, None] + np.arange(window.shape[1]) - len(gauss) // 2
    inside = np.clip(reached, 0, size - 1)
    first = inside[:, 0]
    weights = np.zeros_like(window)
    np.add.at(weights, (np.arange(new_size)[:, None], inside - first[:, None]), window)
    used = weights > 0
    return Taps(first, used.shape[1] - used[:, ::-1].argmax(axis=1), weights)


def _gaussian(sigma: float) -> np.ndarray:
    if sigma <= 0:
        return np.ones(1)
    radius = int(_TRUNCATE * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return weights / weights.sum()
