"""Draw coordinates: independent, stratified, by Sobol's sequence, or by weights.

In: a :class:`Draw`, the generator's key, the number of the first sample. Out: float32 coordinates (x, y, z), the same
bits on the host and on a device. A sample depends only on its number, so batches may have any size.

Samples by weights can also be sorted by boxes of the volume, for ``order="binned"`` with a mask or importance. As a
set, the samples of a window are distributed as samples drawn one by one. Cells are sorted by the boxes that contain
their centres and laid along a line, each as long as its weight. The line is cut into as many parts of equal length as
there are boxes. So the counts of a window (:func:`linumpy.sampling.coordinates.boxes.make_window`), which are those of
boxes of equal size, are used for parts. Each sample is uniform along the line within its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.checks import integer
from linumpy.device import to_host
from linumpy.gpu.kernels import KernelSpec, int64, load
from linumpy.gpu.philox import Words, philox
from linumpy.sampling.coordinates.boxes import Boxes, Window
from linumpy.sampling.coordinates.generator import (
    COORDINATE_BITS,
    USE_SHIFT,
    Use,
    as_coordinate,
    numbers,
    shuffled,
    sobol,
)
from linumpy.sampling.threads import in_threads

_THREADS = 256
#: The structure ``Draw`` of draw.cu.
DRAW_RECORD = np.dtype(
    [
        *[("first", "u8"), ("count", "i8"), ("cells", "u8"), ("key", "u4", 2)],
        *[("use", "i4"), ("strata_bits", "i4"), ("grid", "i4", 3)],
    ],
    align=True,
)
assert DRAW_RECORD.itemsize == 56
_KERNEL = KernelSpec("draw", "draw", (), "linumpy.sampling.cuda")
_KERNEL_IN_ORDER = KernelSpec("draw", "draw_in_parts", (), "linumpy.sampling.cuda")
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
#: The null pointer, for an array that a kernel does not use.
NO_ARRAY = np.uint64(0)
#: Binary logarithm of the largest number of strata along an axis.
_MAX_STRATA_BITS = 10


@dataclass(frozen=True)
class Draw:
    """How coordinates are drawn."""

    #: IID, STRATIFIED, SOBOL or WEIGHTED. STRATIFIED needs `strata_bits`; WEIGHTED needs `grid` and either `ids` or
    #: `cumulative`.
    use: Use = Use.IID
    strata_bits: int = 0  # binary logarithm of the number of strata along each axis
    grid: tuple[int, int, int] = (1, 1, 1)  # cells of the grid of weights, along z, y and x
    ids: Array | None = None  # the cells of a mask, which have equal weights; all other cells have none
    #: Sums of the weights up to and including each cell, scaled so that the last sum is 2^63.
    cumulative: Array | None = None

    def moved(self, xp: ModuleType) -> Draw:
        """Return the same drawing with `ids` and `cumulative` in the memory of `xp`, NumPy or CuPy."""
        tables = (None if table is None else xp.asarray(table) for table in (self.ids, self.cumulative))
        return Draw(self.use, self.strata_bits, self.grid, *tables)


def stratified(strata: int) -> Draw:
    """Return a drawing in blocks of `strata`³ consecutive samples, one in each box of a grid, shuffled."""
    bits = integer("strata", strata, 2, 2**_MAX_STRATA_BITS, meaning="the boxes along each axis").bit_length() - 1
    if strata != 2**bits:
        raise ValueError(
            f"strata={strata}: give a power of two from 2 to {2**_MAX_STRATA_BITS}, the boxes along each axis"
        )
    return Draw(Use.STRATIFIED, strata_bits=bits)


def weighted(density: np.ndarray) -> Draw:
    """Return a drawing by a density that is constant in each cell of a grid over the volume.

    `density`: shape (Z, Y, X), of any size; finite, not negative, not zero everywhere. It need not be normalised. Bool
    is a mask: the density is uniform in the true voxels.
    """
    density = np.asarray(density)
    if density.ndim != 3 or not density.size:
        raise ValueError(f"a density of shape {density.shape}: give a grid of three axes (Z, Y, X)")
    shape = (int(density.shape[0]), int(density.shape[1]), int(density.shape[2]))
    if density.dtype == bool:
        ids = np.flatnonzero(density)
        if not 0 < ids.size < 2**32:
            raise ValueError(f"the mask has {ids.size} voxels to sample: give one with 1 to 2**32 - 1")
        return Draw(Use.WEIGHTED, grid=shape, ids=ids.astype(np.int64))
    sums = np.cumsum(density.reshape(-1), dtype=np.float64)
    if not (np.isfinite(sums[-1]) and density.min() >= 0 and sums[-1] > 0):
        raise ValueError("a density must be finite, nowhere negative and somewhere above 0")
    scaled = np.minimum(sums / sums[-1] * 2.0**63, 2.0**63).astype(np.uint64)
    scaled[np.flatnonzero(density.reshape(-1))[-1] :] = 2**63
    return Draw(Use.WEIGHTED, grid=shape, cumulative=scaled)


def draw(method: Draw, key: tuple[int, int], first: int, coords: Array) -> None:
    """Fill an array with coordinates.

    The array has shape (n, 3), float32, C-contiguous; NumPy, or CuPy, where the work is queued on the current stream.
    The arrays of `method` lie in the same memory. `first` is the number of the first sample in the stream.
    """
    if isinstance(coords, np.ndarray):

        def part(begin: int, end: int) -> None:
            index = np.arange(first + begin, first + end, dtype=np.uint64)
            coords[begin:end] = host_coordinates(method, key, index)

        in_threads(part, len(coords))
    else:
        launch(method, key, first, coords)


def _record(method: Draw, key: tuple[int, int], first: int, count: int) -> np.ndarray:
    record = np.zeros((), DRAW_RECORD)
    cells = method.ids if method.ids is not None else method.cumulative
    record["first"], record["count"], record["key"], record["use"] = first, count, key, method.use
    record["cells"], record["grid"] = 0 if cells is None else cells.size, method.grid
    record["strata_bits"] = method.strata_bits
    return record


def launch(method: Draw, key: tuple[int, int], first: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw`."""
    if not len(coords):
        return
    args = _record(method, key, first, len(coords))
    tables = (NO_ARRAY if table is None else table for table in (method.ids, method.cumulative))
    load(_KERNEL)((-(-len(coords) // _THREADS),), (_THREADS,), (coords, *tables, args))


def host_coordinates(method: Draw, key: tuple[int, int], index: np.ndarray) -> np.ndarray:
    """Compute the coordinates of samples by NumPy: (n, 3) float32.

    `method`, `key`: as for :func:`draw`. `index`: numbers of the samples.
    """
    if method.use == Use.WEIGHTED:
        return _weighted(method, key, index)
    if method.use == Use.SOBOL:
        shifts = numbers(index >> np.uint64(32), Use.SOBOL, key)
        words = [a ^ b for a, b in zip(sobol(index & np.uint64(0xFFFFFFFF)), shifts, strict=False)]
    else:
        words = list(numbers(index, method.use, key)[:3])
    bits = [word >> np.uint64(32 - COORDINATE_BITS) for word in words]
    if method.use == Use.STRATIFIED:
        b = method.strata_bits  # the highest bits of a coordinate are those of the stratum of the sample
        shuffling = numbers(index >> np.uint64(3 * b), Use.STRATA, key)
        stratum = shuffled(index & np.uint64((1 << 3 * b) - 1), shuffling, 3 * b)
        sides = [stratum >> np.uint64(axis * b) & np.uint64((1 << b) - 1) for axis in range(3)]
        bits = [w >> np.uint64(b) | side << np.uint64(COORDINATE_BITS - b) for w, side in zip(bits, sides, strict=True)]
    return np.stack([as_coordinate(word) for word in bits], axis=1)


def _weighted(method: Draw, key: tuple[int, int], index: np.ndarray) -> np.ndarray:
    high, low = numbers(index, Use.CELL, key)[:2]
    if method.ids is not None:
        count = np.uint64(method.ids.size)
        # As in the kernel: the words y, x are a fraction of 64 bits, y the highest, times the length of the list.
        cells = method.ids[(low * count + (high * count >> _HALF)) >> _HALF]
    else:
        weight = (high << _HALF | low) >> np.uint64(1)
        cells = np.searchsorted(np.asarray(method.cumulative), weight, side="right")
    return in_cells(cells, method.grid, numbers(index, Use.WEIGHTED, key))


def in_cells(cells: np.ndarray, grid: tuple[int, int, int], words: Words) -> np.ndarray:
    """Return float32 coordinates (n, 3), uniform in cells of a grid (Z, Y, X), from words of the generator.

    Where float32 rounds a coordinate to the upper border of its cell, which is part of the next cell, it becomes the
    next smaller number.
    """
    indices = np.unravel_index(cells, grid)
    coords = np.empty((cells.size, 3), np.float32)
    for axis, word in enumerate(words[:3]):
        cell, count = indices[2 - axis], grid[2 - axis]
        exact = ((cell + (word + 0.5) * 2.0**-32) / count).astype(np.float32)
        is_next = exact.astype(np.float64) * count >= cell + 1.0
        coords[:, axis] = np.where(is_next, np.nextafter(exact, np.float32(0)), exact)
    return coords


def in_order(weights: Draw, boxes: Boxes) -> Draw:
    """Return the cells whose weight is not 0, sorted by boxes: both `ids` and, unless weights are equal, `cumulative`.

    The arrays of `weights` may lie on a device; those of the result lie in host memory.
    """
    if weights.ids is not None:
        ids = to_host(weights.ids)
        return Draw(Use.WEIGHTED, grid=weights.grid, ids=ids[_order(ids, weights.grid, boxes)])
    sizes = np.diff(to_host(weights.cumulative), prepend=np.uint64(0))
    ids = np.flatnonzero(sizes).astype(np.int64)
    ids = ids[_order(ids, weights.grid, boxes)]
    return Draw(Use.WEIGHTED, grid=weights.grid, ids=ids, cumulative=np.cumsum(sizes[ids], dtype=np.uint64))


def _order(ids: np.ndarray, grid: tuple[int, int, int], boxes: Boxes) -> np.ndarray:
    """Return the indices that sort `ids` by the box that contains the centre of the cell; ties keep the order."""
    cells = zip(np.unravel_index(ids, grid), grid, boxes.halved, strict=True)
    z, y, x = (((cell + 0.5) / count * 2**halved).astype(np.int64) for cell, count, halved in cells)
    return np.argsort(boxes.numbers(z, y, x), kind="stable")


def draw_in_order(window: Window, cells: Draw, begin: int, coords: Array) -> None:
    """Fill an array with coordinates of the samples of a window, from sample `begin` of the window on.

    `cells`: from :func:`in_order`, with the boxes of the window and its arrays in the memory of `coords`.
    """
    if isinstance(coords, np.ndarray):

        def part(start: int, stop: int) -> None:
            coords[start:stop] = _in_order_on_host(window, cells, np.arange(begin + start, begin + stop))

        in_threads(part, len(coords))
    else:
        launch_in_order(window, cells, begin, coords)


def launch_in_order(window: Window, cells: Draw, begin: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw_in_order`."""
    if not len(coords):
        return
    record = _record(cells, window.key, window.first, len(coords))
    cumulative = NO_ARRAY if cells.cumulative is None else cells.cumulative
    args = (coords, cells.ids, cumulative, window.starts, *int64(begin), record, window.record)
    load(_KERNEL_IN_ORDER)((-(-len(coords) // _THREADS),), (_THREADS,), args)


def _in_order_on_host(window: Window, cells: Draw, position: np.ndarray) -> np.ndarray:
    assert cells.ids is not None
    levels = len(window.boxes.axes)
    part = np.searchsorted(np.asarray(window.starts), position, side="right") - 1
    words = _window_numbers(window, Use.BINNED_CELL, position)
    # Position along the line, whose length is 2^63: the part gives the highest bits, random words the others.
    along = part.astype(np.uint64) << np.uint64(63 - levels)
    along |= (words[0] << _HALF | words[1]) >> np.uint64(1 + levels)
    if cells.cumulative is None:
        # along * size >> 63; the product does not fit into 64 bits.
        size, high, low = np.uint64(cells.ids.size), along >> np.uint64(31), along << np.uint64(1) & _LOW
        entry: np.ndarray = high * size + (low * size >> _HALF) >> _HALF
    else:
        entry = np.searchsorted(np.asarray(cells.cumulative), along, side="right")
    return in_cells(cells.ids[entry], cells.grid, _window_numbers(window, Use.BINNED_POINT, position))


def _window_numbers(window: Window, use: Use, position: np.ndarray) -> Words:
    """Return the words of samples of a window; a counter's third word holds the highest of a position's 33 bits."""
    bits = position.astype(np.uint64)
    third = np.uint64(use << USE_SHIFT) | bits >> _HALF
    return philox((window.first & 0xFFFFFFFF, window.first >> 32, third, bits & _LOW), window.key)
