"""A mosaic grid, tiles side by side, and the mosaic grid that it becomes at another voxel spacing.

In: voxels, spacing and origin of a mosaic, the size of its tiles, and a wanted spacing. Out: :class:`TileGrid`. Spacing
and origins are in µm, everything else in voxels. Errors: ``ValueError`` naming the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linumpy.plan.grid.tile_axis import TileAxis


@dataclass(frozen=True)
class TileGrid:
    """A mosaic of tiles before and after.

    Attributes
    ----------
    axes : tuple of TileAxis
        Of the whole mosaic.
    spacing : tuple of float
        Afterwards, µm: the extent of a tile, cut into a whole number of voxels.
    origin : tuple of float
        Where the centre of the first voxel lies afterwards, µm.
    """

    axes: tuple[TileAxis, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]

    @property
    def tile(self) -> tuple[int, ...]:
        """Voxels of a whole tile before."""
        return tuple(axis.tile for axis in self.axes)

    @property
    def new_tile(self) -> tuple[int, ...]:
        """Voxels of a whole tile after."""
        return tuple(axis.new_tile for axis in self.axes)

    @property
    def new_shape(self) -> tuple[int, ...]:
        """Voxels of the mosaic after."""
        return tuple(axis.new_size for axis in self.axes)

    def part(self, box: tuple[slice, ...]) -> tuple[TileAxis, ...]:
        """Describe a box of whole tiles, and of those that the mosaic's end cuts short."""
        return tuple(
            TileAxis(one.stop - one.start, axis.tile, axis.new_tile) for one, axis in zip(box, self.axes, strict=True)
        )

    def new_box(self, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Say where such a box lies after."""
        return tuple(
            slice(axis.new_offset(one.start), axis.new_offset(one.stop))
            for one, axis in zip(box, self.axes, strict=True)
        )


def plan_tile_grid(
    shape: Sequence[int],
    tile: Sequence[int],
    spacing: Sequence[float],
    origin: Sequence[float],
    target: Sequence[float] | float,
) -> TileGrid:
    """Settle what becomes of a mosaic's tiles.

    Parameters
    ----------
    shape, spacing, origin : sequence
        Of the mosaic: voxels, µm between them, and where the centre of the first lies in µm.
    tile : sequence of int
        Voxels of a tile. The first tile begins at the first voxel; the last may be cut short.
    target : float or sequence of float
        Wanted spacing in µm, for all axes alike or for each.

    Raises
    ------
    ValueError
        A spacing that is no positive number, or so coarse that a tile has no voxel; a tile that does not fit.
    """
    rank = len(shape)
    wanted = (float(target),) * rank if isinstance(target, int | float) else tuple(float(one) for one in target)
    if len(wanted) != rank or not all(math.isfinite(one) and one > 0 for one in wanted):
        raise ValueError(
            f"wanted spacing {target!r}: a positive number of µm is needed, or one for each of {rank} axes"
        )
    if len(tile) != rank or not all(1 <= t <= n for t, n in zip(tile, shape, strict=True)):
        raise ValueError(f"tiles of {tuple(tile)} voxels do not fit a mosaic of {tuple(shape)}")
    axes = []
    for n, t, current, one in zip(shape, tile, spacing, wanted, strict=True):
        if not math.isfinite(t * current / one):
            raise ValueError(f"wanted spacing {one:g} µm: voxels so small are too many to count")
        new = round(t * current / one)
        if new < 1:
            raise ValueError(f"wanted spacing {one:g} µm: a tile is {t * current:g} µm wide and would have no voxel")
        axes.append(TileAxis(int(n), int(t), new))
    return TileGrid(
        tuple(axes),
        tuple(s * axis.factor for s, axis in zip(spacing, axes, strict=True)),
        tuple(o + s * axis.offset for o, s, axis in zip(origin, spacing, axes, strict=True)),
    )
