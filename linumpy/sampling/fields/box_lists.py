"""Find the boxes that contain a point: a regular grid of cells, each with the list of the boxes that touch it.

In: boxes. Out: tables that a kernel and NumPy search in the same steps. A cell that many small boxes touch is cut once
more, so that lists are short where boxes are small. Boxes are enlarged by more than the rounding of float32, so
the list of a point's cell has each box that contains the point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

#: A cell is cut if its list is longer than this, and longer than twice the mean.
_SHORT = 8
#: Largest number of cells along an axis, of a cut cell and of the grid.
_MAX_INNER_CELLS, _MAX_CELLS = 64, 1024
#: Boxes are enlarged by so many cells in the grid, and in a cut cell.
_MARGIN, _FINE_MARGIN = 2.0**-9, 2.0**-5
#: Smallest extent of a domain along an axis, to avoid a division by 0 for flat domains.
_FLAT = 1e-30
#: Number of pairs of a box and a cell that are in memory at the same time.
_PAIRS = 2**22


@dataclass(frozen=True)
class BoxLists:
    """Lists of boxes for the cells of a grid over [0, extent].

    Attributes
    ----------
    cells : (3,) int32
        Cells along x, y, z.
    scale : (3,) float32
        Cells per unit of length.
    table : (k, 2) int32
        For each cell of the grid, z fastest, the first item of its list and the length; for a cut cell, the row of its
        first inner cell in this table, and minus the number of inner cells along each axis.
    items : (m,) int32
        The lists one after another: numbers of boxes, in rising order.
    """

    cells: np.ndarray
    scale: np.ndarray
    table: np.ndarray
    items: np.ndarray

    @property
    def fields(self) -> list[tuple[str, str, np.ndarray]]:
        """Fields of the kernel's record of the grid."""
        return [("scale", "<f4", self.scale), ("cells", "<i4", self.cells)]

    def find(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first item of the list of each point, and the length: (n, 3) float32 → two (n,) int64."""
        position = points * self.scale
        cell = np.clip(position.astype(np.int64), 0, self.cells - 1)
        entry = self.table[(cell[:, 0] * self.cells[1] + cell[:, 1]) * self.cells[2] + cell[:, 2]].astype(np.int64)
        cut = entry[:, 1] < 0
        if cut.any():
            along = -entry[cut, 1]
            fine = (position[cut] - cell[cut].astype(np.float32)) * along[:, None].astype(np.float32)
            inner = np.clip(fine.astype(np.int64), 0, along[:, None] - 1)
            row = (inner[:, 0] * along + inner[:, 1]) * along + inner[:, 2]
            entry[cut] = self.table[entry[cut, 0] + row]
        return entry[:, 0], entry[:, 1]


def build(low: np.ndarray, high: np.ndarray, extent: np.ndarray, per_box: int) -> BoxLists:
    """Make the lists.

    Parameters
    ----------
    low, high : (n, 3) float64
        Corners of the boxes.
    extent : (3,) float64
        Points lie between 0 and this.
    per_box : int
        Largest number of entries per box in the lists of the grid, on average.
    """
    extent = np.maximum(np.asarray(extent, float), _FLAT)
    cells = _cells(low, high, extent, per_box)
    scale = (cells / extent).astype(np.float32)
    coarse = _enlarged(low * scale, high * scale, _MARGIN)
    spans = _spans(*coarse, cells)
    starts, items = _lists(*spans, cells)
    counts = np.diff(starts)
    cut, owner, box = _cuts(starts, items, cells, coarse)
    table = [np.stack([starts[:-1], counts], 1)]
    parts, entries, base = [items], len(items), len(counts)
    for along in np.unique(cut[cut > 0]).tolist():
        chosen = np.flatnonzero(cut == along)
        inner, inner_items = _inner_lists(chosen, owner, box, along, cells, coarse)
        table.append(np.stack([inner[:-1] + entries, np.diff(inner)], 1))
        table[0][chosen] = np.stack([base + np.arange(len(chosen)) * along**3, np.full(len(chosen), -along)], 1)
        parts.append(inner_items)
        entries, base = entries + len(inner_items), base + len(chosen) * along**3
    if max(entries, base) >= 2**31:
        raise MemoryError(f"{len(low)} boxes would need lists of {entries} entries, more than 32-bit numbers reach")
    return BoxLists(
        cells.astype(np.int32), scale, np.concatenate(table).astype(np.int32), np.concatenate(parts).astype(np.int32)
    )


def _enlarged(low: np.ndarray, high: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    return low - margin, high + margin


def _cells(low: np.ndarray, high: np.ndarray, extent: np.ndarray, per_box: int) -> np.ndarray:
    """Choose the finest grid with no more cells, and no more entries in its lists, than the boxes may have."""
    budget = max(per_box * len(low), 64)
    width = (extent.prod() / max(budget / 4, 8)) ** (1 / 3)
    while True:
        cells = np.clip(np.ceil(extent / width), 1, _MAX_CELLS).astype(np.int64)
        first, last = _spans(low / extent * cells - _MARGIN, high / extent * cells + _MARGIN, cells)
        entries = max(int((last - first + 1).prod(1).sum()), int(cells.prod()))
        if (cells == 1).all() or entries <= budget:
            return cells
        width *= 1.12


def _spans(low: np.ndarray, high: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last cell of boxes, along each axis."""
    first = np.clip(np.floor(low), 0, cells - 1).astype(np.int64)
    return first, np.maximum(first, np.clip(np.floor(high), 0, cells - 1).astype(np.int64))


def _pairs(first: np.ndarray, last: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all cells of boxes, part by part: numbers of boxes (m,), and cells (m, 3)."""
    size = last - first + 1
    ends = np.cumsum(size.prod(1))
    begin = 0
    while begin < len(first):
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _PAIRS, "right")))
        numbers = np.repeat(np.arange(begin, stop), size[begin:stop].prod(1))
        within = np.arange(len(numbers)) - (ends[numbers] - done - size[numbers].prod(1))
        y, z = size[numbers, 1], size[numbers, 2]
        yield numbers, first[numbers] + np.stack([within // (y * z), within // z % y, within % z], 1)
        begin = stop


def _lists(first: np.ndarray, last: np.ndarray, cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first item of the list of each cell, (cells + 1,), and the lists."""
    numbers, cells_of = [], []
    for number, cell in _pairs(first, last):
        numbers.append(number)
        cells_of.append((cell[:, 0] * cells[1] + cell[:, 1]) * cells[2] + cell[:, 2])
    return _grouped(numbers, cells_of, math.prod(cells.tolist()))


def _grouped(items: list[np.ndarray], cells: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse import coo_array

    item = np.concatenate([np.zeros(0, np.int64), *items])
    cell = np.concatenate([np.zeros(0, np.int64), *cells])
    shape = (count, int(item.max(initial=0)) + 1)
    rows = coo_array((np.ones(len(item), np.int8), (cell, item)), shape).tocsr()
    rows.sort_indices()
    return rows.indptr.astype(np.int64), rows.indices.astype(np.int64)


def _cuts(
    starts: np.ndarray, items: np.ndarray, cells: np.ndarray, boxes: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how finely each cell is cut (0: not at all), and the cell and the box of each entry of a long list."""
    counts = np.diff(starts)
    cut = np.zeros(len(counts), np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    long = counts[owner] > max(_SHORT, 2 * counts[counts > 0].mean()) if len(owner) else np.zeros(0, bool)
    owner, box = owner[long], items[long]
    # About eight inner cells for each box, at most 23.
    finest = np.minimum(_MAX_INNER_CELLS, 2.0 ** np.round(np.log2(8 * np.maximum(counts, 1)) / 3))
    along = _MAX_INNER_CELLS
    while along >= 2:
        undecided = (cut[owner] == 0) & (finest[owner] >= along)
        first, last = _inside(owner[undecided], box[undecided], along, cells, boxes)
        entries = np.bincount(owner[undecided], (last - first + 1).prod(1), minlength=len(counts))
        # A cut pays if lists become a quarter as long, for twice the entries and one box that fills the cell.
        good = (entries > 0) & (entries <= 2 * counts + along**3) & (4 * entries <= counts * along**3)
        cut[good] = along
        along //= 2
    return cut, owner, box


def _inside(
    owner: np.ndarray, box: np.ndarray, along: int, cells: np.ndarray, boxes: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last inner cell of boxes in the cells that they touch."""
    corner = np.stack([owner // (cells[1] * cells[2]), owner // cells[2] % cells[1], owner % cells[2]], 1)
    inner = _enlarged((boxes[0][box] - corner) * along, (boxes[1][box] - corner) * along, _FINE_MARGIN)
    return _spans(*inner, np.full(3, along))


def _inner_lists(
    chosen: np.ndarray,
    owner: np.ndarray,
    box: np.ndarray,
    along: int,
    cells: np.ndarray,
    boxes: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lists of the inner cells of all cells that are cut alike."""
    position = np.full(int(cells.prod()), -1)
    position[chosen] = np.arange(len(chosen))
    is_chosen = position[owner] >= 0
    owner, box = owner[is_chosen], box[is_chosen]
    items, numbers = [], []
    for entry, cell in _pairs(*_inside(owner, box, along, cells, boxes)):
        items.append(box[entry])
        numbers.append(((position[owner[entry]] * along + cell[:, 0]) * along + cell[:, 1]) * along + cell[:, 2])
    return _grouped(items, numbers, len(chosen) * along**3)
