"""Plan which pages of a volume are needed, and in what order. Pure.

In: sizes of a volume, of its chunks and of a cache; windows of samples that are sorted by boxes. Out: pages, by their
numbers in C order, for :mod:`linumpy.sampling.paging.pages`. A page is one or several chunks, a part is a box of pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from linumpy.device import to_host
from linumpy.sampling.coordinates.boxes import Window

#: Approximate number of voxels of a page, which joins several chunks if they are smaller.
_PAGE_VOXELS = 2**18
#: Indices of a page or of a voxel, or numbers of them: along z, y and x.
ZYX = tuple[int, int, int]
#: Estimate: number of pages that a box needs and the boxes before it do not.
_PAGES_OF_A_BOX = 8


@dataclass(frozen=True)
class Paging:
    """The pages of a volume, and the parts that are sampled one after another."""

    #: Voxels of the volume and of a page along z, y and x.
    dims: tuple[int, int, int]
    page: tuple[int, int, int]
    part: tuple[int, int, int]  # number of pages of a part along z, y and x

    @cached_property
    def pages(self) -> ZYX:
        """Number of pages along each axis."""
        z, y, x = (-(-n // p) for n, p in zip(self.dims, self.page, strict=True))
        return z, y, x

    def numbers(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers of pages in C order, from their indices (n, 3)."""
        _, y, x = self.pages
        return indices @ np.array([y * x, x, 1])

    def bounds(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first voxels of pages, and their last voxels + 1: two (n, 3)."""
        start = np.stack(np.unravel_index(numbers, self.pages), axis=1) * self.page
        return start, np.minimum(start + self.page, self.dims)

    def first_voxel(self, page: ZYX) -> ZYX:
        """Return the first voxel of a page along each axis."""
        z, y, x = (index * size for index, size in zip(page, self.page, strict=True))
        return z, y, x

    def parts(self) -> Iterator[tuple[ZYX, ZYX]]:
        """Yield the first page and the last page + 1 of each part."""
        steps = [range(0, n, p) for n, p in zip(self.pages, self.part, strict=True)]
        for z, y, x in itertools.product(*steps):
            end = tuple(min(a + p, n) for a, p, n in zip((z, y, x), self.part, self.pages, strict=True))
            yield (z, y, x), (end[0], end[1], end[2])

    def with_neighbours(self, begin: ZYX, end: ZYX, needed: np.ndarray | None = None) -> np.ndarray:
        """Return the numbers, sorted, of the pages that cells in the needed pages of a part touch.

        These are the needed pages (None: all pages of the part), and the next pages along all combinations of axes.
        """
        shape = tuple(min(e + 1, n) - b for b, e, n in zip(begin, end, self.pages, strict=True))
        is_touched = np.zeros(tuple(n + 1 for n in shape), bool)
        part = tuple(slice(b, e) for b, e in zip(begin, end, strict=True))
        in_part = np.ones([e - b for b, e in zip(begin, end, strict=True)], bool) if needed is None else needed[part]
        for step in itertools.product((0, 1), repeat=3):
            is_touched[tuple(slice(s, s + n) for s, n in zip(step, in_part.shape, strict=True))] |= in_part
        return self.numbers(np.argwhere(is_touched[tuple(slice(0, n) for n in shape)]) + np.array(begin))


def plan_paging(dims: tuple[int, int, int], chunks: Sequence[int], slots: int, voxels: int = _PAGE_VOXELS) -> Paging:
    """Choose pages, and parts that take at most half of the slots together with their neighbouring pages."""
    page = page_shape(dims, chunks, voxels)
    if slots < 16:
        raise ValueError(
            f"the cache has memory for {slots} pages of {' × '.join(map(str, page))} voxels; give cache_bytes for 16"
        )
    pages = Paging(dims, page, (1, 1, 1)).pages
    half = slots // 2
    layers = half // (pages[1] * pages[2]) - 1
    if layers >= 1:  # a layer's pages that the next layer needs stay in memory
        return Paging(dims, page, (min(layers, pages[0]), pages[1], pages[2]))
    part = [1, 1, 1]
    while True:
        grown = [min(n, p + 1) for p, n in zip(part, pages, strict=True)]
        if grown == part or math.prod(n + 1 for n in grown) > half:
            return Paging(dims, page, (part[0], part[1], part[2]))
        part = grown


def page_shape(dims: Sequence[int], chunks: Sequence[int], voxels: int = _PAGE_VOXELS) -> tuple[int, int, int]:
    """Return the voxels of a page along each axis: a chunk, doubled along the shortest axis until large enough.

    A page is large enough if it has at least `voxels` voxels or covers the volume.
    """
    page = [min(c, n) for c, n in zip(chunks, dims, strict=True)]
    while math.prod(page) < voxels:
        open_axes = [axis for axis in range(3) if page[axis] < dims[axis]]
        if not open_axes:
            break
        axis = min(open_axes, key=lambda number: page[number])
        page[axis] *= 2
    return page[0], page[1], page[2]


class PagesOfBoxes:
    """The pages that the boxes of a window need."""

    def __init__(self, window: Window, paging: Paging) -> None:
        self.window, self._paging = window, paging
        self._starts = to_host(window.starts)
        indices = window.boxes.indices(np.arange(window.boxes.count))
        lows, highs = [], []
        for index, halved, n in zip(indices, window.boxes.halved, paging.dims, strict=True):
            lows.append(np.clip(np.floor(index / 2**halved * n - 0.5), 0, n - 1).astype(np.int64))
            highs.append(np.clip(np.floor((index + 1) / 2**halved * n - 0.5), 0, n - 1).astype(np.int64))
        page = np.array(paging.page)
        self._first, self._last = np.stack(lows, 1) // page, np.stack(highs, 1) // page
        self._reached, self._step = 0, 0  # first box whose pages are not yet requested; boxes of the last request

    def boxes_of(self, begin: int, end: int) -> tuple[int, int]:
        """Return the first box, and the last box + 1, that contain samples `begin` to `end` of the window."""
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        return first, int(np.searchsorted(self._starts, end, side="left"))

    def groups(self, first: int, last: int, max_pages: int) -> Iterator[tuple[ZYX, ZYX, np.ndarray]]:
        """Yield boxes of voxels that together cover boxes `first` to `last` of the window.

        Each is (first voxel, last voxel + 1, numbers of the pages it needs); it needs at most `max_pages` pages.
        """
        low, high = self._first[first:last].min(0), self._last[first:last].max(0)
        size = high - low + 2
        if math.prod(size.tolist()) <= max_pages:
            yield self._group(low, high)
            return
        steps = self._paging.part
        starts = [range(int(a), int(b) + 1, step) for a, b, step in zip(low, high, steps, strict=True)]
        for corner in itertools.product(*starts):
            begin = np.array(corner)
            yield self._group(begin, np.minimum(begin + np.array(steps) - 1, high))

    def upcoming(self, box: int, max_pages: int) -> np.ndarray:
        """Return about `max_pages` pages that boxes after `box` need; none while enough pages are requested ahead."""
        self._reached = max(self._reached, box)
        pages = np.empty(0, np.int64)
        if self._reached - box > self._step // 2:
            return pages
        begin, count, step = self._reached, self.window.boxes.count, max(1, max_pages // _PAGES_OF_A_BOX)
        while len(pages) < max_pages and self._reached < count:
            end = min(self._reached + step, count)
            boxes = slice(self._reached, end)
            first, after = self._first[boxes], np.minimum(self._last[boxes] + 1, np.array(self._paging.pages) - 1)
            steps = np.stack(np.meshgrid(*map(np.arange, (after - first).max(0) + 1), indexing="ij"), -1)
            indices = first[:, None] + steps.reshape(-1, 3)
            pages = np.union1d(pages, self._paging.numbers(indices[(indices <= after[:, None]).all(-1)]))
            self._reached = end
        self._step = self._reached - begin
        return pages

    def _group(self, low: np.ndarray, high: np.ndarray) -> tuple[ZYX, ZYX, np.ndarray]:
        first, last, count = low.tolist(), high.tolist(), self._paging.pages
        z, y, x = (np.arange(a, min(b + 2, n)) for a, b, n in zip(first, last, count, strict=True))
        begin = self._paging.first_voxel((first[0], first[1], first[2]))
        end = self._paging.first_voxel((last[0] + 1, last[1] + 1, last[2] + 1))
        return begin, end, ((z[:, None, None] * count[1] + y[:, None]) * count[2] + x).reshape(-1)
