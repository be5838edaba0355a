"""Tables of weights by which an axis is resampled: smoothing and interpolation are linear, so one table does both.

In: an :class:`AxisPlan`. Out: a sparse matrix, or the tables that the kernels of ``resize.cu`` read. Pure; float64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from linumpy.plan.boundary import fold
from linumpy.plan.grid.blocks import gaussian_radius

#: Boundary modes, by SciPy's names: the voxel that stands for one outside. Those outside a constant image are zero.
MODES = ("nearest", "mirror", "reflect", "grid-wrap", "grid-constant")


@dataclass(frozen=True)
class Part:
    """Where a box of an image, and the block of the result that is made from it, lie along an axis.

    Attributes
    ----------
    size, length : int
        Voxels along the whole axis, before and after.
    scale : float
        Voxels of the image between neighbours of the result.
    source_start, start : int
        The first voxel of the box and of the block, in the whole.
    """

    size: int
    length: int
    scale: float
    source_start: int
    start: int


@dataclass(frozen=True)
class AxisPlan:
    """How one axis is resampled.

    Attributes
    ----------
    size, length : int
        Voxels along it, before and after.
    order : int
        0 nearest, 1 linear.
    mode : str
        One of :data:`MODES`.
    sigma : float
        Of the Gaussian, in voxels of the image; 0 for none.
    tile : (int, int) or None
        For an axis of tiles of which each is resampled by itself: voxels of a whole tile, before and after. The last
        one may be shorter. Only with modes that continue a tile by its own voxels: nearest, mirror, reflect.
    part : Part or None
        For a box of a larger image, which must hold all that the block needs: `size` and `length` are then those of box
        and block, and the weights those of the whole axis. Only with the mode nearest, and without tiles.
    """

    size: int
    length: int
    order: int
    mode: str
    sigma: float
    tile: tuple[int, int] | None = None
    part: Part | None = None

    @property
    def whole(self) -> tuple[int, int]:
        """Voxels along the whole axis, before and after; by them passes are ordered, so that a part has its bits."""
        return (self.size, self.length) if self.part is None else (self.part.size, self.part.length)


def unchanged(size: int) -> AxisPlan:
    """Plan an axis that stays as it is."""
    return AxisPlan(size, size, 0, "nearest", 0.0)


@dataclass(frozen=True)
class Windows:
    """The voxels that each voxel of the result is made of.

    Attributes
    ----------
    first, count : numpy.ndarray of int64, (length,)
        They lie at [first, first + count); what leaves the axis goes on at its other end.
    weights : numpy.ndarray of float64, (taps, length)
        Zero behind a window's last.
    """

    first: np.ndarray
    count: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class Groups:
    """The windows of neighbours, joined.

    Attributes
    ----------
    first, count, start : numpy.ndarray of int64, (groups,)
        Their voxels lie at [first, first + count); their weights begin at row `start`.
    weights : numpy.ndarray of float64, (rows, outputs)
        A row for each voxel; zero for neighbours whose window it is not in.
    """

    first: np.ndarray
    count: np.ndarray
    start: np.ndarray
    weights: np.ndarray


def _beside(size: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Give sizes, one for each row of `index`, a shape that broadcasts with it."""
    return size.reshape(-1, *(1,) * (index.ndim - 1))


def _entries(plan: AxisPlan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """List the voxels and weights of each voxel of the result, (length, entries); -1 for no voxel; and where it lies.

    The centre of voxel i of the result lies at voxel (i + 1/2) size / length - 1/2. The image is smoothed first and
    continued then, so voxels are folded twice. The Gaussian is that of SciPy's ``gaussian_filter``, cut at four sigmas.
    Voxels are counted from the first one of their tile, until the end; an axis without tiles is one. Those of a part
    are counted from the first one of its box at the end.
    """
    if plan.part is None:
        tile, new_tile = plan.tile or (plan.size, plan.length)
        number, voxel = np.divmod(np.arange(plan.length), new_tile)
        start, scale = number * tile, tile / new_tile
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
    voxels = fold(index.astype(np.int64), _beside(size, index), plan.mode)
    radius = gaussian_radius(plan.sigma)
    if radius:
        taps = np.arange(-radius, radius + 1)
        bell = np.exp(-0.5 / plan.sigma**2 * taps**2)
        taken = voxels[..., None] + taps
        smoothed = fold(taken, _beside(size, taken), plan.mode)
        voxels = np.where(voxels[..., None] < 0, -1, smoothed).reshape(plan.length, -1)
        weights = (weights[..., None] * (bell / bell.sum())).reshape(plan.length, -1)
    within = (voxels >= 0) & (weights != 0)
    if plan.part is not None:
        held = voxels[within] - plan.part.source_start
        assert held.min() >= 0, "the box begins too late"
        assert held.max() < plan.size, "the box ends too early"
    return np.where(within, voxels + start[:, None], -1), weights, below.astype(np.int64)


def axis_matrix(plan: AxisPlan) -> sparse.csr_array:
    """Make the matrix that resamples the axis: (length, size), float64."""
    voxels, weights, _ = _entries(plan)
    kept = voxels >= 0
    rows = np.broadcast_to(np.arange(plan.length)[:, None], voxels.shape)
    shape = (plan.length, plan.size)
    return sparse.coo_array((weights[kept], (rows[kept], voxels[kept])), shape=shape).tocsr()


@functools.lru_cache(maxsize=32)
def windows_of(plan: AxisPlan) -> Windows:
    """Lay the matrix out as one window of each row."""
    voxels, weights, below = _entries(plan)
    kept = voxels >= 0
    # Around a wrapped axis a window is short only if it may begin before 0; one as long as the axis begins at 0. So no
    # voxel of a window is without weight: it might be NaN.
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
    """Join the windows of each `outputs` neighbours."""
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
