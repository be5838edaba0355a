"""Keep what regions have cut: a chunk (or shard) waits in memory until all of it is there.

In: parts of stored objects. Out: whole ones. Errors: ``ValueError`` where more would wait than the caller allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array, to_host
from linumpy.plan.pyramid import Box, shape_of, within


class BufferFullError(ValueError):
    """More would wait than the caller allows; nothing of the region was taken."""


@dataclass
class _Cut:
    """A stored object that is not all there: its voxels, where they came from, and which are missing."""

    box: Box
    voxels: Any
    missing: np.ndarray


class CutChunks:
    """Stored objects that are not all there. Not for several threads at the same time.

    Parameters
    ----------
    limit : int
        Bytes that may be kept: voxels, and a byte for each that says whether it was written.
    itemsize : int
        Bytes of a voxel.
    """

    def __init__(self, limit: int, itemsize: int) -> None:
        self.limit = limit
        self._itemsize = itemsize
        self._cut: dict[tuple[int, ...], _Cut] = {}
        self._nbytes = 0

    def reserve(self, boxes: Iterable[Box], region: str) -> None:
        """Check that what is cut now may wait as well.

        Raises
        ------
        BufferFullError
            Naming the region and the bytes.
        """
        new = sum(self._cost(box) for box in boxes if _corner(box) not in self._cut)
        if self._nbytes + new > self.limit:
            raise BufferFullError(
                f"region {region} cuts chunks, and {self._nbytes + new} bytes of cut ones would wait for the rest, "
                f"more than buffer_bytes={self.limit}: write regions in an order that completes chunks sooner, "
                "or allow more"
            )

    def add(self, box: Box, part: Box, voxels: Any, begin: Callable[[Any, Box], tuple[Any, bool]]) -> Any:
        """Take a part of a stored object; returns all of it when it is complete, else None.

        Parameters
        ----------
        box : tuple of slice
            All voxels of the object.
        part : tuple of slice
            Those that come now.
        voxels : numpy.ndarray or cupy.ndarray
            Their values.
        begin : callable
            NumPy or CuPy, box → what the object holds before anything comes, and whether that is all of it.
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
        """Forget a stored object, if it is here."""
        cut = self._cut.pop(corner, None)
        if cut is not None:
            self._nbytes -= self._cost(cut.box)

    def drain(self) -> Iterator[tuple[Box, Any]]:
        """Take out all that is here, complete or not."""
        while self._cut:
            cut = next(iter(self._cut.values()))
            self.drop(_corner(cut.box))
            yield cut.box, cut.voxels

    def _cost(self, box: Box) -> int:
        return math.prod(shape_of(box)) * (self._itemsize + 1)


def _corner(box: Box) -> tuple[int, ...]:
    return tuple(b.start for b in box)


def _beside(voxels: Any, held: Any) -> Any:
    """Copy voxels to the side (host or device) where others are."""
    if is_device_array(held):
        return array_module(held).asarray(voxels)
    return to_host(voxels)
