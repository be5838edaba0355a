"""Buffer chunks (or shards) that a region covers only in part, until other regions complete them.

In: parts of stored objects (chunks or shards). Out: whole stored objects. Errors: ``ValueError`` if the buffer would
exceed the caller's limit.
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
        Bytes of the buffer: the voxels, and one byte per voxel that marks it as written.
    itemsize : int
        Bytes of a voxel.

    Raises
    ------
    ValueError
        The limit is not a number of bytes.
    """

    def __init__(self, limit: int, itemsize: int) -> None:
        if not isinstance(limit, (int, float, np.integer)) or not 0 <= limit < math.inf:
            raise ValueError(f"buffer_bytes={limit!r}: pass a number of bytes, 0 for none")
        self.limit = int(limit)
        self._itemsize = itemsize
        self._cut: dict[tuple[int, ...], _Cut] = {}
        self._nbytes = 0

    def reserve(self, boxes: Iterable[Box], region: str) -> None:
        """Check that these stored objects fit into the buffer, beside those in it.

        Raises
        ------
        BufferFullError
            They do not fit; the message names the region and the bytes.
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
            (NumPy or CuPy, box) → the voxels of the object before its first part, and whether all of them count as
            written.
        """
        corner = _corner(box)
        cut = self._cut.get(corner)
        if cut is None:
            initial, complete = begin(array_module(voxels), box)
            cut = self._cut[corner] = _Cut(box, initial, np.full(shape_of(box), not complete))
            self._nbytes += self._cost(box)
        inside = within(part, box)
        cut.voxels[inside] = _in_memory_of(cut.voxels, voxels)
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


def _in_memory_of(buffer: Array, voxels: Array) -> Array:
    """Copy voxels to the memory, host or device, of a buffer."""
    if is_device_array(buffer):
        return array_module(buffer).asarray(voxels)  # type: ignore[no-any-return]
    return to_host(voxels)
