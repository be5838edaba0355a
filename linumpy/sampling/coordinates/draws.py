"""Draw coordinates: independent, stratified, by Sobol's sequence, by weights, or sorted by boxes.

In: a :class:`Draw` or a window, the generator's key, the number of the first sample. Out: float32 coordinates (x, y,
z), the same bits on the host and on a device, since the native core has a host build of the kernels; without the core
:class:`~linumpy.errors.CoreUnavailableError`. A sample depends only on its number, so batches may have any size.

Samples by weights can also be sorted by boxes of the volume, for ``order="binned"`` with a mask or importance. As a
set, the samples of a window are distributed as samples drawn one by one. Cells are sorted by the boxes that contain
their centres and laid along a line, each as long as its weight. The line is cut into as many parts of equal length as
there are boxes. So the counts of a window (:func:`linumpy.sampling.coordinates.boxes.make_window`), which are those of
boxes of equal size, are used for parts. Each sample is uniform along the line within its part.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.checks import integer
from linumpy.core.native import library
from linumpy.device import to_host
from linumpy.gpu.kernels import KernelSpec, address_of, int64, load
from linumpy.sampling.coordinates.boxes import Boxes, Window
from linumpy.sampling.coordinates.generator import Use
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
#: The null pointer, for an array that a kernel does not use.
NO_ARRAY = np.uint64(0)
#: Binary logarithm of the largest number of strata along an axis.
_MAX_STRATA_BITS = 10


def kernel_spec(name: str) -> KernelSpec:
    """Return the specification of a kernel of draw.cu: ``draw``, ``draw_boxes`` or ``draw_in_parts``."""
    return KernelSpec("draw", name, (("THREADS", str(_THREADS)),), "linumpy.sampling.cuda")


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
    """Fill an array (n, 3) with the coordinates of samples from number `first` on; `method` lies in the same memory."""
    if isinstance(coords, np.ndarray):
        _on_host(coords, 0, _record(method, key, first, len(coords)), method.ids, method.cumulative)
    else:
        launch(method, key, first, coords)


def launch(method: Draw, key: tuple[int, int], first: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw`."""
    tables = (NO_ARRAY if table is None else table for table in (method.ids, method.cumulative))
    _launch("draw", coords, *tables, _record(method, key, first, len(coords)))


def draw_window(window: Window, begin: int, coords: Array) -> None:
    """Fill an array in the memory of the window with its samples, which are sorted by box, from sample `begin` on."""
    if isinstance(coords, np.ndarray):
        _on_host(coords, begin, None, window=window)
    else:
        launch_window(window, begin, coords)


def launch_window(window: Window, begin: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw_window`."""
    _launch("draw_boxes", coords, window.starts, *int64(begin, len(coords)), window.record)


def draw_in_order(window: Window, cells: Draw, begin: int, coords: Array) -> None:
    """Fill an array with coordinates of the samples of a window, from sample `begin` of the window on.

    `cells`: from :func:`in_order`, with the boxes of the window and its arrays in the memory of `coords`.
    """
    if isinstance(coords, np.ndarray):
        record = _record(cells, window.key, window.first, len(coords))
        _on_host(coords, begin, record, cells.ids, cells.cumulative, window)
    else:
        launch_in_order(window, cells, begin, coords)


def launch_in_order(window: Window, cells: Draw, begin: int, coords: Array) -> None:
    """Fill an array on a device; see :func:`draw_in_order`."""
    record = _record(cells, window.key, window.first, len(coords))
    cumulative = NO_ARRAY if cells.cumulative is None else cells.cumulative
    _launch("draw_in_parts", coords, cells.ids, cumulative, window.starts, *int64(begin), record, window.record)


def _record(method: Draw, key: tuple[int, int], first: int, count: int) -> np.ndarray:
    record = np.zeros((), DRAW_RECORD)
    cells = method.ids if method.ids is not None else method.cumulative
    record["first"], record["count"], record["key"], record["use"] = first, count, key, method.use
    record["cells"], record["grid"] = 0 if cells is None else cells.size, method.grid
    record["strata_bits"] = method.strata_bits
    return record


def _launch(name: str, coords: Array, *args: Any) -> None:
    if len(coords):
        load(kernel_spec(name))((-(-len(coords) // _THREADS),), (_THREADS,), (coords, *args))


def _on_host(
    coords: np.ndarray,
    begin: int,
    record: np.ndarray | None,
    ids: Array | None = None,
    cumulative: Array | None = None,
    window: Window | None = None,
) -> None:
    """Fill an array by the kernels' host build in the native core, from sample `begin` on."""
    core = library().waiting
    starts, boxes = (None, None) if window is None else (window.starts, window.record)
    arrays = (ids, cumulative, starts, record, boxes)
    *tables, draw, halvings = (None if array is None else address_of(array) for array in arrays)
    in_threads(
        lambda start, stop: core.lc_draw_points(
            address_of(coords[start:]), *tables, begin + start, stop - start, draw, halvings
        ),
        len(coords),
    )


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
