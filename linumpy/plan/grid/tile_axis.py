"""Plan the resampling of a volume of tiles along one axis, tile by tile.

In: sizes in voxels. Out: the voxels of each tile before ("old") and after resampling ("new"). Each tile is resampled
independently: a Gaussian of (factor - 1) / 2 voxels smooths it if it gets coarser, and linear interpolation gives the
value at the centre of each new voxel. Both steps repeat the outermost voxels of the tile beyond its edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class TileAxis:
    """An axis of tiles.

    - `size`: old voxels of the axis. The first tile begins at the first voxel; the last tile may be shorter.
    - `tile`, `new_tile`: voxels of a whole tile, before and after resampling.
    """

    size: int
    tile: int
    new_tile: int

    @property
    def factor(self) -> float:
        """Width of a new voxel in old voxels."""
        return self.tile / self.new_tile

    @property
    def sigma(self) -> float:
        """Standard deviation of the Gaussian, in old voxels; 0 without smoothing."""
        return max(0.0, (self.factor - 1) / 2)

    @property
    def offset(self) -> float:
        """Coordinate of the centre of a tile's first new voxel, in old voxels of the tile."""
        return (self.factor - 1) / 2

    @property
    def new_size(self) -> int:
        """Number of new voxels of the axis."""
        return self.new_offset(self.size)

    def new_offset(self, offset: int) -> int:
        """Return the number of new voxels before an old voxel that begins a tile, or before the end of the axis.

        A shorter last tile keeps the factor of whole tiles, so that the spacing is uniform. Its number of new voxels is
        rounded, and at least 1.
        """
        tiles, remainder = divmod(offset, self.tile)
        return tiles * self.new_tile + (max(1, round(remainder / self.factor)) if remainder else 0)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield the old and the new voxels of each tile."""
        for start in range(0, self.size, self.tile):
            stop = min(start + self.tile, self.size)
            yield slice(start, stop), slice(self.new_offset(start), self.new_offset(stop))
