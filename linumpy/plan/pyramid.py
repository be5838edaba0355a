"""Plan the writing of a pyramid: boxes of whole stored objects, and the coarser boxes that are made from them. Pure.

Boxes are tuples of slices, in voxels of a resolution (level 0 is the finest) or, where a function says so, in stored
objects (chunks or shards). Along each axis a resolution has half the voxels of the next finer one, rounded up, or as
many voxels (an axis of time or channel). Along a halved axis voxel ``i`` is made from voxels ``2 i`` and ``2 i + 1``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Pyramid:
    """The shape of each resolution, and of a stored object (chunk or shard) in it, finest first."""

    shapes: tuple[tuple[int, ...], ...]
    stored: tuple[tuple[int, ...], ...]
    itemsize: int

    def factors(self, level: int, finest: int | None = None) -> tuple[int, ...]:
        """Return the downsampling factor of each axis from level `finest` (by default ``level - 1``) to `level`."""
        pairs = itertools.pairwise(self.shapes[level - 1 if finest is None else finest : level + 1])
        steps = [[1 if n == m else 2 for n, m in zip(*pair, strict=True)] for pair in pairs]
        return tuple(math.prod(along) for along in zip((1,) * len(self.shapes[0]), *steps, strict=True))

    def grid(self, level: int) -> tuple[int, ...]:
        """Return the number of stored objects along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shapes[level], self.stored[level], strict=True))

    def units(self, level: int, box: Box) -> Box:
        """Return the stored objects that a box touches, as slices of the grid of stored objects."""
        return tuple(slice(b.start // s, -(-b.stop // s)) for b, s in zip(box, self.stored[level], strict=True))

    def voxels(self, level: int, units: Box) -> Box:
        """Return the box of voxels of stored objects, which `units` gives as slices of the grid of stored objects."""
        axes = zip(units, self.stored[level], self.shapes[level], strict=True)
        return tuple(slice(u.start * s, min(u.stop * s, n)) for u, s, n in axes)

    def whole(self, level: int, box: Box) -> Box | None:
        """Return the largest box of whole stored objects within a box; the last object of an axis may be cut."""
        result = []
        for b, s, n in zip(box, self.stored[level], self.shapes[level], strict=True):
            start, stop = -(-b.start // s) * s, n if b.stop == n else b.stop // s * s
            if start >= stop:
                return None
            result.append(slice(start, stop))
        return tuple(result)

    def coarser(self, level: int, box: Box) -> Box | None:
        """Return the largest box of whole stored objects of ``level + 1`` that a box of `level` determines; or None."""
        determined = []
        axes = zip(box, self.shapes[level], self.shapes[level + 1], self.factors(level + 1), strict=True)
        for b, n, m, f in axes:
            determined.append(slice(-(-b.start // f), m if b.stop == n else b.stop // f))
            if determined[-1].start >= determined[-1].stop:
                return None
        return self.whole(level + 1, tuple(determined))

    def finer(self, level: int, box: Box) -> Box:
        """Return the box of ``level - 1`` from which a box of `level` is computed."""
        axes = zip(box, self.shapes[level - 1], self.factors(level), strict=True)
        return tuple(slice(f * b.start, min(f * b.stop, n)) for b, n, f in axes)

    def touched(self, level: int, box: Box) -> Box:
        """Return the stored objects of `level` that a box of level 0 touches, as slices of their grid."""
        scaled = tuple(
            slice(b.start // f, min(-(-b.stop // f), n))
            for b, n, f in zip(box, self.shapes[level], self.factors(level, 0), strict=True)
        )
        return self.units(level, scaled)

    def step(self, level: int, limit: int, first: int = 0) -> tuple[int, ...]:
        """Choose the shape of the boxes in which a resolution is processed: up to `limit` bytes, or one stored object.

        A box covers whole stored objects of as many coarser resolutions as the limit allows, so that they are computed
        from one box. A box covers whole stored objects of the `first` next coarser resolutions whatever the limit.
        """
        shape = self._covering_shape(level, first)
        for coarser in range(first + 1, len(self.shapes) - level):
            larger = self._covering_shape(level, coarser)
            if math.prod(larger) * self.itemsize > limit:
                break
            shape = larger
        return grown(shape, self.shapes[level], self.itemsize, limit)

    def _covering_shape(self, level: int, coarser: int) -> tuple[int, ...]:
        """Return the shape, in voxels of `level`, that one stored object of ``level + coarser`` covers."""
        factors = self.factors(level + coarser, level)
        return tuple(
            min(s * f, n) for s, n, f in zip(self.stored[level + coarser], self.shapes[level], factors, strict=True)
        )


def split(box: Box, step: tuple[int, ...]) -> Iterator[Box]:
    """Yield the parts of a box that is cut at the multiples of `step` along each axis."""
    starts = [range(b.start // s * s, b.stop, s) for b, s in zip(box, step, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(max(a, b.start), min(a + s, b.stop)) for a, b, s in zip(corner, box, step, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(b.stop - b.start for b in box)


def within(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of another box that contains it."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))


def grown(step: tuple[int, ...], shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Lengthen a box of shape `step` by whole steps, along the last axes first, up to `limit` bytes and to `shape`."""
    grown_shape = list(step)
    for axis in reversed(range(len(shape))):
        other_axes_nbytes = math.prod(grown_shape) // grown_shape[axis] * itemsize
        count = min(-(-shape[axis] // step[axis]), limit // (other_axes_nbytes * step[axis]))
        grown_shape[axis] = min(max(1, count) * step[axis], shape[axis])
    return tuple(grown_shape)
