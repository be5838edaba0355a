"""Plan the resampling of a mosaic grid (tiles side by side) to another voxel spacing, tile by tile.

Each tile is resampled independently: a Gaussian of (factor - 1) / 2 voxels smooths it if it gets coarser, and linear
interpolation gives the value at the centre of each new voxel. Both repeat the outermost voxels of the tile beyond its
edges. Spacings and origins are in µm, everything else in voxels, before ("old") or after resampling ("new").
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TileAxis:
    """An axis of `size` old voxels, in tiles of `tile` old and `new_tile` new voxels; the last tile may be shorter."""

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


@dataclass(frozen=True)
class TileGrid:
    """A mosaic of tiles before and after resampling, with the new spacing and origin in µm."""

    axes: tuple[TileAxis, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]

    @property
    def tile(self) -> tuple[int, ...]:
        """Old voxels of a whole tile."""
        return tuple(axis.tile for axis in self.axes)

    @property
    def new_tile(self) -> tuple[int, ...]:
        """New voxels of a whole tile."""
        return tuple(axis.new_tile for axis in self.axes)

    @property
    def new_shape(self) -> tuple[int, ...]:
        """New voxels of the mosaic."""
        return tuple(axis.new_size for axis in self.axes)

    def part(self, box: tuple[slice, ...]) -> tuple[TileAxis, ...]:
        """Return the axes of a box of tiles of the mosaic, given in old voxels; the last tile may be shorter."""
        pairs = zip(box, self.axes, strict=True)
        return tuple(TileAxis(bounds.stop - bounds.start, axis.tile, axis.new_tile) for bounds, axis in pairs)

    def new_box(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Convert a box of tiles from old to new voxels."""
        pairs = zip(box, self.axes, strict=True)
        return tuple(slice(axis.new_offset(bounds.start), axis.new_offset(bounds.stop)) for bounds, axis in pairs)


def plan_tile_grid(
    shape: Sequence[int],
    tile: Sequence[int],
    spacing: Sequence[float],
    origin: Sequence[float],
    target: Sequence[float] | float,
) -> TileGrid:
    """Plan the mosaic grid at another spacing, `target` in µm, one for all axes or one for each."""
    rank = len(shape)
    wanted = (float(target),) * rank if isinstance(target, int | float) else tuple(map(float, target))
    if len(wanted) != rank or not all(math.isfinite(width) and width > 0 for width in wanted):
        raise ValueError(
            f"wanted spacing {target!r}: a positive number of µm is needed, or one for each of {rank} axes"
        )
    if len(tile) != rank or not all(1 <= t <= n for t, n in zip(tile, shape, strict=True)):
        raise ValueError(f"tiles of {tuple(tile)} voxels do not fit a mosaic of {tuple(shape)}")
    axes = []
    for n, t, current, width in zip(shape, tile, spacing, wanted, strict=True):
        if not math.isfinite(t * current / width):
            raise ValueError(f"wanted spacing {width:g} µm is too small: the number of voxels overflows")
        new_tile = round(t * current / width)
        if new_tile < 1:
            raise ValueError(f"wanted spacing {width:g} µm: a tile is {t * current:g} µm wide and would have no voxel")
        axes.append(TileAxis(int(n), int(t), new_tile))
    return TileGrid(
        tuple(axes),
        tuple(s * axis.factor for s, axis in zip(spacing, axes, strict=True)),
        tuple(o + s * axis.offset for o, s, axis in zip(origin, spacing, axes, strict=True)),
    )
