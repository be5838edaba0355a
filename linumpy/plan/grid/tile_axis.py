"""One axis of a volume cut into tiles, and the tiles of another number of voxels that it becomes.

In: voxels. Out: where tiles lie before and after. Every tile is resampled by itself: smoothed by a Gaussian of
(factor - 1) / 2 voxels where it gets coarser, and linearly interpolated, both continued at its edges by its own
outermost voxel. A new voxel takes its value at its centre.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


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
        return self.new_offset(self.size)

    def new_offset(self, offset: int) -> int:
        """Count the new voxels of what lies before a voxel: of whole tiles, or all but the end of the last one.

        A tile that is cut short keeps the factor of the whole ones, so that spacing is one all over; it has the nearest
        whole number of voxels, at least one.
        """
        tiles, rest = divmod(offset, self.tile)
        return tiles * self.new_tile + (max(1, round(rest / self.factor)) if rest else 0)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield the tiles: the voxels of each before, and after."""
        for start in range(0, self.size, self.tile):
            stop = min(start + self.tile, self.size)
            yield slice(start, stop), slice(self.new_offset(start), self.new_offset(stop))
