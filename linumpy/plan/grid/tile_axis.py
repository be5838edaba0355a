"""One axis of a volume of tiles that is resampled tile by tile.

In: voxels. Out: the extents of tiles before and after resampling. Each tile is resampled by itself: it is smoothed by a
Gaussian of (factor - 1) / 2 voxels if it gets coarser, and interpolated linearly; both steps repeat its outermost
voxels beyond its edges. A new voxel has the value at its centre.
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
        Voxels of the axis, which begins with the first voxel of a tile; the last tile may be shorter.
    tile, new_tile : int
        Voxels of a whole tile, before and after resampling.
    """

    size: int
    tile: int
    new_tile: int

    @property
    def factor(self) -> float:
        """Old voxels per new voxel."""
        return self.tile / self.new_tile

    @property
    def sigma(self) -> float:
        """Standard deviation of the Gaussian, in voxels; 0 without smoothing."""
        return max(0.0, (self.factor - 1) / 2)

    @property
    def offset(self) -> float:
        """Centre of a new tile's first voxel, in old voxels."""
        return (self.factor - 1) / 2

    @property
    def new_size(self) -> int:
        """New voxels of the axis."""
        return self.new_offset(self.size)

    def new_offset(self, offset: int) -> int:
        """Convert the offset of a tile's first voxel, or the size of the axis, to new voxels.

        A shorter last tile keeps the factor of whole tiles, so that the spacing is uniform; its number of new voxels is
        rounded, and at least 1.
        """
        tiles, remainder = divmod(offset, self.tile)
        return tiles * self.new_tile + (max(1, round(remainder / self.factor)) if remainder else 0)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield the old and the new voxels of each tile."""
        for start in range(0, self.size, self.tile):
            stop = min(start + self.tile, self.size)
            yield slice(start, stop), slice(self.new_offset(start), self.new_offset(stop))
