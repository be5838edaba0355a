"""Samples by weights, sorted by boxes of the volume: ``order="binned"`` with a mask or importance.

In: weights of the cells of a grid (:class:`~linumpy.sampling.coordinates.draws.Draw`), boxes of the volume, a window.
Out: coordinates of the window's samples, the same bits on the host and on a device. As a set, the samples are
distributed as samples drawn one by one: independent, each in a cell with a probability proportional to its weight.

Cells are sorted by the boxes that contain their centres and laid along a line, each as long as its weight. The line is
cut into as many parts of equal length as there are boxes. So the counts of a window
(:func:`linumpy.sampling.coordinates.boxes.make_window`), which are those of boxes of equal size, are used for parts.
Each sample is uniform along the line within its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import to_host
from linumpy.gpu.kernels import KernelSpec, int64, load
from linumpy.gpu.philox import Words, philox
from linumpy.sampling.coordinates.boxes import Boxes, Window
from linumpy.sampling.coordinates.draws import DRAW_RECORD, NO_ARRAY, Draw, in_cells
from linumpy.sampling.coordinates.generator import USE_SHIFT, Use
from linumpy.sampling.threads import in_threads

_THREADS = 256
_KERNEL = KernelSpec("draw", "draw_in_parts", (), "linumpy.sampling.cuda")
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True)
class OrderedCells:
    """Cells of a grid of weights, sorted by boxes."""

    grid: tuple[int, int, int]  # cells along z, y and x
    ids: Array  # cells whose weight is not 0, sorted
    #: Sums of the weights up to and including each of these cells, scaled so that the last sum is 2^63; None if all
    #: weights are equal.
    cumulative: Array | None

    def moved(self, xp: ModuleType) -> OrderedCells:
        """Return the same cells with `ids` and `cumulative` in the memory of `xp`, NumPy or CuPy."""
        return OrderedCells(
            self.grid, xp.asarray(self.ids), None if self.cumulative is None else xp.asarray(self.cumulative)
        )


def in_order(weights: Draw, boxes: Boxes) -> OrderedCells:
    """Sort the cells of weights by boxes.

    `weights`: from :func:`linumpy.sampling.coordinates.draws.weighted`; its arrays may lie on a device. `boxes`: boxes
    of the volume. Returns OrderedCells: In host memory.
    """
    if weights.ids is not None:
        ids = to_host(weights.ids)
        return OrderedCells(weights.grid, ids[_order(ids, weights.grid, boxes)], None)
    sizes = np.diff(to_host(weights.cumulative), prepend=np.uint64(0))
    ids = np.flatnonzero(sizes).astype(np.int64)
    ids = ids[_order(ids, weights.grid, boxes)]
    return OrderedCells(weights.grid, ids, np.cumsum(sizes[ids], dtype=np.uint64))


def _order(ids: np.ndarray, grid: tuple[int, int, int], boxes: Boxes) -> np.ndarray:
    """Return the indices that sort `ids` by the box that contains the centre of the cell; ties keep the order."""
    cells = zip(np.unravel_index(ids, grid), grid, boxes.halved, strict=True)
    z, y, x = (((cell + 0.5) / count * 2**halved).astype(np.int64) for cell, count, halved in cells)
    return np.argsort(boxes.numbers(z, y, x), kind="stable")


def draw(window: Window, cells: OrderedCells, begin: int, coords: Array) -> None:
    """Fill an array with coordinates of the samples of a window, from sample `begin` of the window on.

    `window`: a window of the boxes by which `cells` are sorted. `cells`: with its arrays in the memory of `coords`.
    `begin`: first sample. `coords`: as for :func:`linumpy.sampling.coordinates.draws.draw`.
    """
    if isinstance(coords, np.ndarray):

        def part(start: int, stop: int) -> None:
            coords[start:stop] = _on_host(window, cells, np.arange(begin + start, begin + stop))

        in_threads(part, len(coords))
    else:
        launch(window, cells, begin, coords)


def launch(window: Window, cells: OrderedCells, begin: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw`."""
    count = len(coords)
    if not count:
        return
    record = np.zeros((), DRAW_RECORD)
    record["first"], record["count"], record["key"], record["use"] = window.first, count, window.key, Use.WEIGHTED
    record["cells"], record["grid"] = cells.ids.size, cells.grid
    cumulative = NO_ARRAY if cells.cumulative is None else cells.cumulative
    args = (coords, cells.ids, cumulative, window.starts, *int64(begin), record, window.record)
    load(_KERNEL)((-(-count // _THREADS),), (_THREADS,), args)


def _on_host(window: Window, cells: OrderedCells, position: np.ndarray) -> np.ndarray:
    levels = len(window.boxes.axes)
    part = np.searchsorted(np.asarray(window.starts), position, side="right") - 1
    words = _numbers(window, Use.BINNED_CELL, position)
    # Position along the line, whose length is 2^63: the part gives the highest bits, random words the others.
    along = part.astype(np.uint64) << np.uint64(63 - levels)
    along |= (words[0] << _HALF | words[1]) >> np.uint64(1 + levels)
    if cells.cumulative is None:
        # along * size >> 63; the product does not fit into 64 bits.
        size, high, low = np.uint64(cells.ids.size), along >> np.uint64(31), along << np.uint64(1) & _LOW
        entry: np.ndarray = high * size + (low * size >> _HALF) >> _HALF
    else:
        entry = np.searchsorted(np.asarray(cells.cumulative), along, side="right")
    return in_cells(cells.ids[entry], cells.grid, _numbers(window, Use.BINNED_POINT, position))


def _numbers(window: Window, use: Use, position: np.ndarray) -> Words:
    """Return the words of samples of a window; a counter's third word holds the highest of a position's 33 bits."""
    bits = position.astype(np.uint64)
    third = np.uint64(use << USE_SHIFT) | bits >> _HALF
    return philox((window.first & 0xFFFFFFFF, window.first >> 32, third, bits & _LOW), window.key)
