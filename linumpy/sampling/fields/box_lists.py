"""Find the boxes that contain a point: a regular grid of cells, each with a list of the boxes that touch the cell.

In: boxes. Out: tables that a kernel and NumPy search in the same steps. An entry is a box in a list. A cell that many
small boxes touch is cut into inner cells, the same number along each axis, which have lists: so lists are short
where boxes are small. Boxes are enlarged by more than the rounding errors of float32, so the list of a point's cell
contains each box that contains the point.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

#: A cell may be cut if its list is longer than this, and longer than twice the mean of the lists that are not empty.
_SHORT = 8
#: Largest number of inner cells along an axis of a cut cell, and of cells along an axis of the grid.
_MAX_INNER_CELLS, _MAX_CELLS = 64, 1024
#: Boxes are enlarged by this many cells on all sides in the grid, and by this many inner cells in a cut cell.
_MARGIN, _FINE_MARGIN = 2.0**-9, 2.0**-5
#: Smallest extent of a domain along an axis: a flat domain must not cause a division by 0.
_FLAT = 1e-30
#: Number of entries that are computed at a time.
_PAIRS = 2**22


@dataclass(frozen=True)
class BoxLists:
    """Lists of boxes for the cells of a grid over [0, extent]."""

    cells: np.ndarray  # cells along x, y, z: (3,) int32
    scale: np.ndarray  # cells per unit of length: (3,) float32
    #: For each cell of the grid, z fastest, the index in `items` where its list begins, and the length of the list. For
    #: a cut cell, the row of this table where the inner cells begin, and minus the number of inner cells along each
    #: axis; the rows of inner cells are as those of cells: (k, 2) int32.
    table: np.ndarray
    items: np.ndarray  # the lists one after another: numbers of boxes, in rising order: (m,) int32

    @property
    def fields(self) -> list[tuple[str, str, np.ndarray]]:
        """Fields (name, dtype, value) of the kernel's structure ``Lists``."""
        return [("scale", "<f4", self.scale), ("cells", "<i4", self.cells)]

    def find(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the list of each point begins in `items`, and its length: (n, 3) float32 → two (n,) int64."""
        position = points * self.scale
        cell = np.clip(position.astype(np.int64), 0, self.cells - 1)
        entry = self.table[(cell[:, 0] * self.cells[1] + cell[:, 1]) * self.cells[2] + cell[:, 2]].astype(np.int64)
        cut = entry[:, 1] < 0
        if cut.any():
            inner_cells = -entry[cut, 1]
            fine = (position[cut] - cell[cut].astype(np.float32)) * inner_cells[:, None].astype(np.float32)
            inner = np.clip(fine.astype(np.int64), 0, inner_cells[:, None] - 1)
            row = (inner[:, 0] * inner_cells + inner[:, 1]) * inner_cells + inner[:, 2]
            entry[cut] = self.table[entry[cut, 0] + row]
        return entry[:, 0], entry[:, 1]


def build(low: np.ndarray, high: np.ndarray, extent: np.ndarray, per_box: int) -> BoxLists:
    """Make the lists of boxes.

    The corners `low` and `high` are (n, 3) float64; points lie between 0 and `extent`, (3,) float64. The grid has at
    most `per_box` cells, and as many entries without inner cells, per box.
    """
    extent = np.maximum(np.asarray(extent, float), _FLAT)
    cells = _cells(low, high, extent, per_box)
    scale = (cells / extent).astype(np.float32)
    coarse = low * scale - _MARGIN, high * scale + _MARGIN
    spans = _spans(*coarse, cells)
    starts, items = _lists(*spans, cells)
    counts = np.diff(starts)
    cut, owner, box = _cuts(starts, items, cells, coarse)
    table = [np.stack([starts[:-1], counts], 1)]
    parts, entries, base = [items], len(items), len(counts)
    for inner_cells in np.unique(cut[cut > 0]).tolist():
        chosen = np.flatnonzero(cut == inner_cells)
        inner, inner_items = _inner_lists(chosen, owner, box, inner_cells, cells, coarse)
        table.append(np.stack([inner[:-1] + entries, np.diff(inner)], 1))
        table[0][chosen] = np.stack(
            [base + np.arange(len(chosen)) * inner_cells**3, np.full(len(chosen), -inner_cells)], 1
        )
        parts.append(inner_items)
        entries, base = entries + len(inner_items), base + len(chosen) * inner_cells**3
    if max(entries, base) >= 2**31:
        raise MemoryError(f"{len(low)} boxes would need lists of {entries} entries, more than 32-bit numbers reach")
    return BoxLists(
        cells.astype(np.int32), scale, np.concatenate(table).astype(np.int32), np.concatenate(parts).astype(np.int32)
    )


def _cells(low: np.ndarray, high: np.ndarray, extent: np.ndarray, per_box: int) -> np.ndarray:
    """Return the cells along each axis of the finest grid with at most ``per_box * len(low)`` cells and entries."""
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
    """Return the first and last cell that each box touches, along each axis: two (n, 3)."""
    first = np.clip(np.floor(low), 0, cells - 1).astype(np.int64)
    return first, np.maximum(first, np.clip(np.floor(high), 0, cells - 1).astype(np.int64))


def _pairs(first: np.ndarray, last: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs of a box and a cell that it touches, part by part: numbers of boxes (m,), cells (m, 3)."""
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
    """Return where the list of each cell begins, (cells + 1,), and the lists one after another."""
    numbers, cells_of = [], []
    for number, cell in _pairs(first, last):
        numbers.append(number)
        cells_of.append((cell[:, 0] * cells[1] + cell[:, 1]) * cells[2] + cell[:, 2])
    return _grouped(numbers, cells_of, math.prod(cells.tolist()))


def _grouped(items: list[np.ndarray], cells: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Group items by their cells: return where the list of each of `count` cells begins, and the lists, sorted."""
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
    """Return the inner cells along an axis of each cell (0: not cut), and the cell and box of entries in long lists."""
    counts = np.diff(starts)
    cut = np.zeros(len(counts), np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    long = counts[owner] > max(_SHORT, 2 * counts[counts > 0].mean()) if len(owner) else np.zeros(0, bool)
    owner, box = owner[long], items[long]
    # About eight inner cells for each box, at most 23: the number along an axis is a power of two.
    finest = np.minimum(_MAX_INNER_CELLS, 2.0 ** np.round(np.log2(8 * np.maximum(counts, 1)) / 3))
    inner_cells = _MAX_INNER_CELLS
    while inner_cells >= 2:
        undecided = (cut[owner] == 0) & (finest[owner] >= inner_cells)
        first, last = _inside(owner[undecided], box[undecided], inner_cells, cells, boxes)
        entries = np.bincount(owner[undecided], (last - first + 1).prod(1), minlength=len(counts))
        # A cut pays if lists become at most a quarter as long on average, and if entries at most double, not counting
        # one box that fills the cell.
        good = (entries > 0) & (entries <= 2 * counts + inner_cells**3) & (4 * entries <= counts * inner_cells**3)
        cut[good] = inner_cells
        inner_cells //= 2
    return cut, owner, box


def _inside(
    owner: np.ndarray, box: np.ndarray, inner_cells: int, cells: np.ndarray, boxes: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last inner cell that boxes touch, along each axis, for pairs of a cell and a box."""
    corner = np.stack([owner // (cells[1] * cells[2]), owner // cells[2] % cells[1], owner % cells[2]], 1)
    low, high = ((side[box] - corner) * inner_cells for side in boxes)
    return _spans(low - _FINE_MARGIN, high + _FINE_MARGIN, np.full(3, inner_cells))


def _inner_lists(
    chosen: np.ndarray,
    owner: np.ndarray,
    box: np.ndarray,
    inner_cells: int,
    cells: np.ndarray,
    boxes: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the lists of the inner cells of cells `chosen`, all cut alike, begin, and the lists."""
    position = np.full(int(cells.prod()), -1)
    position[chosen] = np.arange(len(chosen))
    is_chosen = position[owner] >= 0
    owner, box = owner[is_chosen], box[is_chosen]
    items, numbers = [], []
    for entry, cell in _pairs(*_inside(owner, box, inner_cells, cells, boxes)):
        items.append(box[entry])
        numbers.append(
            ((position[owner[entry]] * inner_cells + cell[:, 0]) * inner_cells + cell[:, 1]) * inner_cells + cell[:, 2]
        )
    return _grouped(items, numbers, len(chosen) * inner_cells**3)
