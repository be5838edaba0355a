"""Plan the writing of a pyramid: boxes of whole stored objects, and the coarser boxes that are made from them.

In: shapes of all resolutions, and the shape of a stored object (chunk or shard) in each. Out: boxes, as tuples of
slices in the voxels of a resolution. Along each axis a resolution has half the voxels of the next finer one, rounded
up, or as many voxels (an axis of time or channel). Along a halved axis voxel ``i`` is the mean of ``2 i`` and, if it
exists, ``2 i + 1``. Pure: opens nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Pyramid:
    """Resolutions of an image and their stored objects.

    Attributes
    ----------
    shapes : tuple of tuple of int
        Shape of each resolution, finest first.
    stored : tuple of tuple of int
        Shape of a stored object (chunk or shard) of each resolution.
    itemsize : int
        Bytes of a voxel.
    """

    shapes: tuple[tuple[int, ...], ...]
    stored: tuple[tuple[int, ...], ...]
    itemsize: int

    def factors(self, level: int, finest: int | None = None) -> tuple[int, ...]:
        """Downsampling factors from resolution `finest` (by default the next finer one) to `level`, by axis."""
        pairs = itertools.pairwise(self.shapes[level - 1 if finest is None else finest : level + 1])
        steps = [[1 if n == m else 2 for n, m in zip(*pair, strict=True)] for pair in pairs]
        return tuple(math.prod(along) for along in zip((1,) * len(self.shapes[0]), *steps, strict=True))

    def grid(self, level: int) -> tuple[int, ...]:
        """Number of stored objects along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shapes[level], self.stored[level], strict=True))

    def units(self, level: int, box: Box) -> Box:
        """Return the stored objects that a box touches, as slices of the grid."""
        return tuple(slice(b.start // s, -(-b.stop // s)) for b, s in zip(box, self.stored[level], strict=True))

    def voxels(self, level: int, units: Box) -> Box:
        """Return the voxels of stored objects."""
        rows = zip(units, self.stored[level], self.shapes[level], strict=True)
        return tuple(slice(u.start * s, min(u.stop * s, n)) for u, s, n in rows)

    def whole(self, level: int, box: Box) -> Box | None:
        """Return the largest box of whole stored objects within a box; None if it contains none.

        An object that the end of the array cuts counts as whole if the box reaches that end.
        """
        result = []
        for b, s, n in zip(box, self.stored[level], self.shapes[level], strict=True):
            start, stop = -(-b.start // s) * s, n if b.stop == n else b.stop // s * s
            if start >= stop:
                return None
            result.append(slice(start, stop))
        return tuple(result)

    def coarser(self, level: int, box: Box) -> Box | None:
        """Return the largest box of whole objects of the next coarser resolution that a box of `level` determines."""
        below = []
        sizes = zip(box, self.shapes[level], self.shapes[level + 1], self.factors(level + 1), strict=True)
        for b, n, m, f in sizes:
            below.append(slice(-(-b.start // f), m if b.stop == n else b.stop // f))
            if below[-1].start >= below[-1].stop:
                return None
        return self.whole(level + 1, tuple(below))

    def finer(self, level: int, box: Box) -> Box:
        """Return the voxels of the next finer resolution from which a box is made."""
        rows = zip(box, self.shapes[level - 1], self.factors(level), strict=True)
        return tuple(slice(f * b.start, min(f * b.stop, n)) for b, n, f in rows)

    def touched(self, level: int, box: Box) -> Box:
        """Return the stored objects of `level` that a box of the finest resolution touches, as slices of the grid."""
        scaled = tuple(
            slice(b.start // f, min(-(-b.stop // f), n))
            for b, n, f in zip(box, self.shapes[level], self.factors(level, 0), strict=True)
        )
        return self.units(level, scaled)

    def step(self, level: int, limit: int, first: int = 0) -> tuple[int, ...]:
        """Choose the shape of the boxes in which a resolution is processed: up to `limit` bytes, or one stored object.

        A step covers whole objects of as many coarser resolutions as the limit allows, so that one step suffices to
        make them. It covers whole objects of the `first` coarser resolutions whatever the limit.
        """
        size = self._aligned(level, first)
        for above in range(first + 1, len(self.shapes) - level):
            larger = self._aligned(level, above)
            if math.prod(larger) * self.itemsize > limit:
                break
            size = larger
        return grown(size, self.shapes[level], self.itemsize, limit)

    def _aligned(self, level: int, above: int) -> tuple[int, ...]:
        factors = self.factors(level + above, level)
        return tuple(
            min(s * f, n) for s, n, f in zip(self.stored[level + above], self.shapes[level], factors, strict=True)
        )


def split(box: Box, step: tuple[int, ...]) -> Iterator[Box]:
    """Cut a box at the multiples of a step."""
    starts = [range(b.start // s * s, b.stop, s) for b, s in zip(box, step, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(max(a, b.start), min(a + s, b.stop)) for a, b, s in zip(corner, box, step, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the lengths of a box."""
    return tuple(b.stop - b.start for b in box)


def within(box: Box, outer: Box) -> Box:
    """Return a box relative to the start of another box that contains it."""
    return tuple(slice(b.start - o.start, b.stop - o.start) for b, o in zip(box, outer, strict=True))


def grown(step: tuple[int, ...], shape: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Lengthen a step by whole steps, the last axes first, within a limit of bytes."""
    size = list(step)
    for axis in reversed(range(len(shape))):
        others = math.prod(size) // size[axis] * itemsize
        count = min(-(-shape[axis] // step[axis]), limit // (others * step[axis]))
        size[axis] = min(max(1, count) * step[axis], shape[axis])
    return tuple(size)
