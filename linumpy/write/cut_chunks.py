"""Buffer the chunks (or shards) of which a region has written only a part, until they are complete.

In: parts of stored objects. Out: whole ones. Errors: ``ValueError`` if the buffer would exceed the caller's limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array, to_host
from linumpy.plan.pyramid import Box, shape_of, within


class BufferFullError(ValueError):
    """The buffer would exceed the caller's limit; nothing of the region was written."""


@dataclass
class _Cut:
    """An incomplete stored object: its box, its voxels, and a mask of the missing ones."""

    box: Box
    voxels: Array
    missing: np.ndarray


class CutChunks:
    """Incomplete stored objects. Not thread-safe.

    Parameters
    ----------
    limit : int
        Bytes of the buffer: the voxels, and a byte for each that marks it as written.
    itemsize : int
        Bytes of a voxel.
    """

    def __init__(self, limit: int, itemsize: int) -> None:
        self.limit = limit
        self._itemsize = itemsize
        self._cut: dict[tuple[int, ...], _Cut] = {}
        self._nbytes = 0

    def reserve(self, boxes: Iterable[Box], region: str) -> None:
        """Check that the buffer also holds these stored objects.

        Raises
        ------
        BufferFullError
            Naming the region and the bytes.
        """
        new = sum(self._cost(box) for box in boxes if _corner(box) not in self._cut)
        if self._nbytes + new > self.limit:
            raise BufferFullError(
                f"region {region} cuts chunks, so that {self._nbytes + new} bytes of incomplete chunks would be "
                f"buffered, more than buffer_bytes={self.limit}: write regions in an order that completes chunks "
                "sooner, or allow more"
            )

    def add(
        self, box: Box, part: Box, voxels: Array, begin: Callable[[ModuleType, Box], tuple[Array, bool]]
    ) -> Array | None:
        """Add a part of a stored object; returns all its voxels once it is complete, else None.

        Parameters
        ----------
        box : tuple of slice
            Box of the object.
        part : tuple of slice
            Box of the part.
        voxels : numpy.ndarray or cupy.ndarray
            Voxels of the part.
        begin : callable
            NumPy or CuPy, box → the object before its first part, and whether it is complete.
        """
        corner = _corner(box)
        cut = self._cut.get(corner)
        if cut is None:
            held, complete = begin(array_module(voxels), box)
            cut = self._cut[corner] = _Cut(box, held, np.full(shape_of(box), not complete))
            self._nbytes += self._cost(box)
        inside = within(part, box)
        cut.voxels[inside] = _beside(voxels, cut.voxels)
        cut.missing[inside] = False
        if cut.missing.any():
            return None
        self.drop(corner)
        return cut.voxels

    def drop(self, corner: tuple[int, ...]) -> None:
        """Remove a stored object, if it is buffered."""
        cut = self._cut.pop(corner, None)
        if cut is not None:
            self._nbytes -= self._cost(cut.box)

    def drain(self) -> Iterator[tuple[Box, Array]]:
        """Remove and yield all stored objects, complete or not."""
        while self._cut:
            cut = next(iter(self._cut.values()))
            self.drop(_corner(cut.box))
            yield cut.box, cut.voxels

    def _cost(self, box: Box) -> int:
        return math.prod(shape_of(box)) * (self._itemsize + 1)


def _corner(box: Box) -> tuple[int, ...]:
    return tuple(b.start for b in box)


def _beside(voxels: Array, held: Array) -> Array:
    """Copy voxels to the memory (host or device) of other voxels."""
    if is_device_array(held):
        return array_module(held).asarray(voxels)  # type: ignore[no-any-return]
    return to_host(voxels)
