"""Tables of weights of an axis: smoothing and interpolation are linear, so one table does both.

In: an :class:`AxisPlan`. Out: a sparse matrix, or the tables that the kernels of ``resize.cu`` read. Pure; float64.

Each voxel of the result has a window, the voxels of the image that it is a weighted sum of. "Before" and "after" mean
before and after resampling.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import scipy

from linumpy.plan.boundary import fold, gaussian_radius

#: Boundary modes, by SciPy's names; voxels outside are 0 with "grid-constant".
MODES = ("nearest", "mirror", "reflect", "grid-wrap", "grid-constant")


@dataclass(frozen=True)
class AxisPart:
    """Offsets, along an axis, of a box of an image, and of the block of the result that is computed from the box.

    `size`, `length`: voxels along the whole axis, before and after. `scale`: voxels of the image between neighbours of
    the result. `source_start`, `start`: offsets of the box and of the block in the whole.
    """

    size: int
    length: int
    scale: float
    source_start: int
    start: int


@dataclass(frozen=True)
class AxisPlan:
    """How one axis is resampled.

    `size`, `length`: voxels along it, before and after. `order`: 0 nearest, 1 linear. `mode`: one of :data:`MODES`.
    `sigma`: standard deviation of the Gaussian, in voxels of the image; 0 for none. `tile` ((int, int) or None): for an
    axis of tiles that are resampled independently: voxels of a whole tile, before and after. The last tile may be
    shorter. Only with modes that extend a tile by its own voxels: nearest, mirror, reflect. `part`: for a box of a
    larger image, which must contain all voxels that the block needs. `size` and `length` are then those of box and
    block, and the weights those of the whole axis. Only with the mode nearest, and without tiles.
    """

    size: int
    length: int
    order: int
    mode: str
    sigma: float
    tile: tuple[int, int] | None = None
    part: AxisPart | None = None

    @property
    def whole(self) -> tuple[int, int]:
        """Voxels along the whole axis, before and after. They order the passes, so that a block equals the whole."""
        return (self.size, self.length) if self.part is None else (self.part.size, self.part.length)


def unchanged(size: int) -> AxisPlan:
    """Plan an unchanged axis."""
    return AxisPlan(size, size, 0, "nearest", 0.0)


@dataclass(frozen=True)
class Windows:
    """The window and the weights of each voxel of the result.

    `first`, `count` (int64, (length,)): the window is the voxels [first, first + count); beyond an end of the axis it
    continues at the other end. `weights` (float64, (largest count, length)): a column for each voxel of the result;
    zero after the end of its window.
    """

    first: np.ndarray
    count: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Groups:
    """The joined windows of groups of neighbouring voxels of the result.

    `first`, `count`, `start` (int64, (groups,)): the joined window is the voxels [first, first + count); their weights
    begin at row `start`. `weights` (float64, (rows, outputs)): a row for each voxel of a joined window; zero for the
    neighbours whose windows do not contain the voxel.
    """

    first: np.ndarray
    count: np.ndarray
    start: np.ndarray
    weights: np.ndarray


def _as_columns(size: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Reshape sizes, one for each row of `index`, to a shape that broadcasts with `index`."""
    return size.reshape(-1, *(1,) * (index.ndim - 1))


def _entries(plan: AxisPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries of each voxel of the result: voxels (-1 for none) and weights, (length, entries).

    Also return the voxel below each centre, (length,), which counts from the beginning of its tile, or for a part of
    the whole axis. The centre of voxel i of the result is at voxel (i + 1/2) size / length - 1/2. The image is smoothed
    first and then extended, so voxels are folded twice. The Gaussian is as in SciPy's ``gaussian_filter``, cut at four
    sigmas. Voxels are computed relative to their tile; an axis without tiles is one tile. The returned voxels are
    relative to the whole axis, or for a part to its box.
    """
    if plan.part is None:
        tile, new_tile = plan.tile or (plan.size, plan.length)
        tile_index, voxel = np.divmod(np.arange(plan.length), new_tile)
        start, scale = tile_index * tile, tile / new_tile
        size = np.minimum(tile, plan.size - start)
    else:
        voxel, scale = np.arange(plan.part.start, plan.part.start + plan.length), plan.part.scale
        start, size = np.full(plan.length, -plan.part.source_start), np.full(plan.length, plan.part.size)
    centre = (voxel + 0.5) * scale - 0.5
    below = np.floor(centre)
    if plan.order == 0:
        index, weights = np.floor(centre + 0.5)[:, None], np.ones((plan.length, 1))
    else:
        index, weights = np.stack([below, below + 1], 1), np.stack([below + 1 - centre, centre - below], 1)
    voxels = fold(index.astype(np.int64), _as_columns(size, index), plan.mode)
    radius = gaussian_radius(plan.sigma)
    if radius:
        taps = np.arange(-radius, radius + 1)
        bell = np.exp(-0.5 / plan.sigma**2 * taps**2)
        neighbours = voxels[..., None] + taps
        smoothed = fold(neighbours, _as_columns(size, neighbours), plan.mode)
        voxels = np.where(voxels[..., None] < 0, -1, smoothed).reshape(plan.length, -1)
        weights = (weights[..., None] * (bell / bell.sum())).reshape(plan.length, -1)
    within = (voxels >= 0) & (weights != 0)
    if plan.part is not None:
        in_box = voxels[within] - plan.part.source_start
        assert in_box.min() >= 0, "the box starts too late"
        assert in_box.max() < plan.size, "the box ends too early"
    return np.where(within, voxels + start[:, None], -1), weights, below.astype(np.int64)


def axis_matrix(plan: AxisPlan) -> scipy.sparse.csr_array:
    """Return the matrix that resamples the axis: (length, size), float64."""
    voxels, weights, _ = _entries(plan)
    kept = voxels >= 0
    rows = np.broadcast_to(np.arange(plan.length)[:, None], voxels.shape)
    shape = (plan.length, plan.size)
    return scipy.sparse.coo_array((weights[kept], (rows[kept], voxels[kept])), shape=shape).tocsr()


@functools.lru_cache(maxsize=32)
def windows_of(plan: AxisPlan) -> Windows:
    """Return the window and the weights of each voxel of the result: the rows of :func:`axis_matrix`."""
    voxels, weights, below = _entries(plan)
    kept = voxels >= 0
    # On a wrapped axis a window may begin before 0, so that it is short; a window as long as the axis begins at 0.
    # Windows do not end with voxels of weight 0, which might be NaN.
    radius = gaussian_radius(plan.sigma)
    base = np.zeros_like(below)
    if plan.mode == "grid-wrap" and 2 * radius + 2 <= plan.size:
        base = below - radius
        voxels = np.where(kept, (voxels - base[:, None]) % plan.size, -1)
    low = np.where(kept, voxels, plan.size).min(1)
    count = voxels.max(1) + 1 - low
    table = np.zeros((int(count.max()), plan.length))
    rows = np.broadcast_to(np.arange(plan.length)[:, None], voxels.shape)
    np.add.at(table, ((voxels - low[:, None])[kept], rows[kept]), weights[kept])
    return Windows(low + base, count, table)


def join(windows: Windows, outputs: int) -> Groups:
    """Join the windows of each group of `outputs` neighbours."""
    starts = np.arange(0, len(windows.first), outputs)
    first = np.minimum.reduceat(windows.first, starts)
    count = np.maximum.reduceat(windows.first + windows.count, starts) - first
    start = np.concatenate([[0], np.cumsum(count)[:-1]])
    taps, length = windows.weights.shape
    tap, row = np.nonzero(np.arange(taps)[:, None] < windows.count)
    group = np.arange(length) // outputs
    weights = np.zeros((int(count.sum()), outputs))
    weights[(start[group] + windows.first - first[group])[row] + tap, row % outputs] = windows.weights[tap, row]
    return Groups(first, count, start, weights)
