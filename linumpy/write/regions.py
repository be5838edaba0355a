"""Check a region of an image and its voxels, and buffer the chunks that it cuts until other regions complete them.

Errors: those of ``OmeZarrWriter.write``; :class:`BufferFullError`, a ``ValueError``, if the buffer would exceed the
caller's limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array
from linumpy.device import array_module, is_device_array, to_host
from linumpy.plan.pyramid import Box, shape_of, within
from linumpy.plan.region import RegionLike, normalize_region


def checked_block(
    region: RegionLike, block: Array | ArrayLike, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[Box, Array]:
    """Check a region and its voxels; return the box of the region, and the voxels with all axes of the box."""
    normalized = normalize_region(region, shape)
    box = tuple(slice(a, b) for a, b in zip(normalized.start, normalized.stop, strict=True))
    if not normalized.size:
        raise ValueError(f"region {normalized} of an image of shape {shape} has no voxels to write")
    voxels: Array = block if hasattr(block, "shape") and hasattr(block, "dtype") else np.asarray(block)  # type: ignore[assignment]
    if np.ma.is_masked(voxels):
        raise TypeError("the block has masked voxels, and files hold no masks: fill them first")
    if tuple(voxels.shape) != normalized.shape:
        raise ValueError(f"region {normalized} has shape {normalized.shape}, but the block has {tuple(voxels.shape)}")
    if np.dtype(voxels.dtype).newbyteorder("=") != dtype.newbyteorder("="):
        raise TypeError(f"the block is of {voxels.dtype}, the image of {dtype}: round and cast it first")
    if not all(normalized.kept):
        voxels = (voxels if is_device_array(voxels) else np.asarray(voxels)).reshape(normalized.box_shape)
    return box, voxels


def region_text(box: Box) -> str:
    """Return a box as messages show it, such as ``[0:64, 0:128]``."""
    return "[" + ", ".join(f"{b.start}:{b.stop}" for b in box) + "]"


class BufferFullError(ValueError):
    """The buffer would exceed the caller's limit; nothing of the region was written."""


@dataclass
class _Incomplete:
    """An incomplete stored object: its box, its voxels, and a mask of the missing voxels."""

    box: Box
    voxels: Array
    missing: np.ndarray


class CutChunks:
    """The buffer of incomplete stored objects, on host and device together. Not thread-safe.

    - `limit`: maximum bytes of the buffer: the voxels, and a byte per voxel for the mask.
    """

    def __init__(self, limit: int, itemsize: int) -> None:
        if not isinstance(limit, (int, float, np.integer)) or not 0 <= limit < math.inf:
            raise ValueError(f"buffer_bytes={limit!r}: pass a number of bytes, 0 for none")
        self.limit = int(limit)
        self._itemsize = itemsize
        self._incomplete: dict[tuple[int, ...], _Incomplete] = {}
        self._nbytes = 0

    def check_fits(self, boxes: Iterable[Box], region: str) -> None:
        """Check that stored objects fit into the buffer, beside the objects that are in it."""
        new_nbytes = sum(self._buffer_nbytes(box) for box in boxes if _corner(box) not in self._incomplete)
        if self._nbytes + new_nbytes > self.limit:
            raise BufferFullError(
                f"region {region} cuts chunks, so that {self._nbytes + new_nbytes} bytes of incomplete chunks would be "
                f"buffered, more than buffer_bytes={self.limit}: write regions in an order that completes chunks "
                "sooner, or allow more"
            )

    def add(
        self, box: Box, part: Box, voxels: Array, initial_of: Callable[[ModuleType, Box], tuple[Array, bool]]
    ) -> Array | None:
        """Add a part of a stored object; if the object is complete, remove it from the buffer and return its voxels.

        - `initial_of`: (NumPy or CuPy, box) → the voxels of the object before its first part, and whether all of them
          count as written. The object is buffered in the memory of its first part.
        """
        corner = _corner(box)
        incomplete = self._incomplete.get(corner)
        if incomplete is None:
            initial, is_written = initial_of(array_module(voxels), box)
            incomplete = self._incomplete[corner] = _Incomplete(box, initial, np.full(shape_of(box), not is_written))
            self._nbytes += self._buffer_nbytes(box)
        inside = within(part, box)
        buffer = incomplete.voxels
        buffer[inside] = array_module(buffer).asarray(voxels) if is_device_array(buffer) else to_host(voxels)
        incomplete.missing[inside] = False
        if incomplete.missing.any():
            return None
        self.remove(box)
        return incomplete.voxels

    def remove(self, box: Box) -> None:
        """Remove a stored object, if it is buffered."""
        incomplete = self._incomplete.pop(_corner(box), None)
        if incomplete is not None:
            self._nbytes -= self._buffer_nbytes(incomplete.box)

    def drain(self) -> Iterator[tuple[Box, Array]]:
        """Remove all stored objects, which are incomplete, and yield the box and the voxels of each."""
        while self._incomplete:
            incomplete = next(iter(self._incomplete.values()))
            self.remove(incomplete.box)
            yield incomplete.box, incomplete.voxels

    def _buffer_nbytes(self, box: Box) -> int:
        """Return the bytes of the buffer for a stored object: its voxels and its mask."""
        return math.prod(shape_of(box)) * (self._itemsize + 1)


def _corner(box: Box) -> tuple[int, ...]:
    return tuple(b.start for b in box)
