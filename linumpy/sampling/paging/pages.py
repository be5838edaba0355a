"""A Zarr volume larger than device memory: the type ``zarr`` on the device ``cuda_out_of_core``.

In: a :class:`~linumpy.sampling.paging.page_cache.PageCache`. Out: values at points, and samples. A page is one or
several chunks, a part is a box of pages. The volume is sampled part by part: while the points of one part are sampled,
the missing pages of the next part are read.

A small batch of independent samples needs pages of the whole volume. So the values of many future samples are computed
in one pass over the volume and returned by later calls; the stream of samples does not change.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.device import to_host
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, load
from linumpy.sampling.arguments import MAX_SAMPLES
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import Window, plan_boxes
from linumpy.sampling.coordinates.draws import NO_ARRAY
from linumpy.sampling.field import Field
from linumpy.sampling.paging.page_cache import PageCache
from linumpy.sampling.paging.plan import ZYX, PagesOfBoxes
from linumpy.sampling.volume import VOLUME_RECORD
from linumpy.sampling.voxel_field import normalisation

#: The structure ``Pages`` of pages.cu.
_PAGES = np.dtype(
    [
        *[("slot", "i8"), ("channel", "i8"), ("values", "i8"), ("page", "i4", 3), ("pages", "i4", 3)],
        *[("begin", "i4", 3), ("end", "i4", 3)],
    ],
    align=True,
)
assert _PAGES.itemsize == 72
#: Threads of a block, and samples of each thread.
_THREADS, _GROUPS = 256, 4


@dataclass(frozen=True)
class _Future:
    """Values of independent samples that later calls return."""

    key: tuple[int, int]
    first: int
    values: Array  # (channels, samples)

    def holds(self, key: tuple[int, int], number: int) -> bool:
        """Return whether the value of a sample of a stream is in :attr:`values`."""
        return self.key == key and self.first <= number < self.first + self.values.shape[1]


class PagedVolume(Field):
    """A field whose voxels are read when they are needed; linear interpolation.

    Voxels become (v - low) / (high - low), clipped to 0 to 1, with `low_high`. The values of `ahead` independent
    samples are computed in one pass over the volume, and take 4 bytes for each sample and channel. By default `window`,
    the number of samples that are sorted by box together, is two for each voxel, at least 2^20. `xp` is CuPy, or NumPy
    in tests.
    """

    def __init__(
        self,
        cache: PageCache,
        xp: ModuleType,
        *,
        low_high: tuple[float, float] | None,
        value_range: tuple[float, float],
        ahead: int,
        window: int | None = None,
    ) -> None:
        self._cache, self._xp, self._low_high, self._ahead = cache, xp, low_high, ahead
        self._paging = cache.paging
        self.dims = cache.paging.dims
        self.n_channels = int(cache.slots.shape[1])
        self.value_range = value_range
        self.boxes = plan_boxes(self.dims, 2 * math.prod(self._paging.page))  # boxes are about as large as pages
        self.window_size = window or min(MAX_SAMPLES, max(2**20, 2 * math.prod(self.dims)))
        self._future: _Future | None = None
        self._pages_of_boxes: PagesOfBoxes | None = None
        self._lock = threading.Lock()  # no thread may replace pages that another thread samples

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate at points; wait for the device once, to learn which pages the points need."""
        if not len(coords):
            return
        with self._lock:
            is_needed = self._xp.zeros(self._paging.pages, np.uint8)
            record = self._record(len(coords))
            args = (coords, is_needed, record, self._pages_record((0, 0, 0), (0, 0, 0), 0))
            load(_spec("mark", self._defines(False)))((-(-len(coords) // _THREADS),), (_THREADS,), args)
            self._pass(coords, out, record, to_host(is_needed).astype(bool))

    def sample(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw independent points and copy the values that were computed ahead; compute more if these are used up."""
        draws.draw(draws.Draw(), key, first, coords)
        done = 0
        with self._lock:
            while done < len(coords):
                if self._future is None or not self._future.holds(key, first + done):
                    self._make_ahead(key, first + done)
                    continue
                values = self._future.values[:, first + done - self._future.first :]
                part = min(len(coords) - done, values.shape[1])
                out[:, done : done + part] = values[:, :part]
                done += part

    def sample_window(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        """Make samples of a window, sorted by its boxes; each page is read about once in a window."""
        if not len(coords):
            return
        with self._lock:
            if self._pages_of_boxes is None or self._pages_of_boxes.window is not window:
                self._pages_of_boxes = PagesOfBoxes(window, self._paging)
            plan = self._pages_of_boxes
            draws.draw_window(window, begin, coords)
            first, last = plan.boxes_of(begin, begin + len(coords))
            record = self._record(len(coords))
            slots = int(self._cache.slots.shape[0])
            for low, high, pages in plan.groups(first, last, slots // 2):
                self._cache.request(pages)
                self._cache.request(plan.upcoming(last, slots // 8), keep=pages)
                self._cache.wait(pages)
                self._launch(coords, out, record, low, high, draw=False)

    def _make_ahead(self, key: tuple[int, int], first: int) -> None:
        values = self._future.values if self._future else self._xp.empty((self.n_channels, self._ahead), np.float32)
        self._future = None
        record = self._record(values.shape[1])
        record["key"], record["first"] = key, first
        self._pass(None, values, record, None)
        self._future = _Future(key, first, values)

    def _pass(self, coords: Array | None, out: Array, record: np.ndarray, needed: np.ndarray | None) -> None:
        """Sample the volume part by part, first the parts whose pages are in memory.

        `coords` None: the kernel draws the points. `needed`: which pages contain cells of points; None: all.
        """
        parts = []
        for begin, end in self._paging.parts():
            pages = self._paging.with_neighbours(begin, end, needed)
            if len(pages):
                parts.append((begin, end, pages))
        parts.sort(key=lambda part: not self._cache.holds(part[2]))
        for number, (begin, end, pages) in enumerate(parts):
            self._cache.request(pages)
            self._cache.wait(pages)
            if number + 1 < len(parts):
                self._cache.request(parts[number + 1][2], keep=pages)
            low, high = self._paging.first_voxel(begin), self._paging.first_voxel(end)
            self._launch(coords, out, record, low, high, draw=coords is None)

    def _launch(
        self, coords: Array | None, out: Array, record: np.ndarray, begin: ZYX, end: ZYX, *, draw: bool
    ) -> None:
        count = int(record["count"])
        pages = self._pages_record(begin, end, count)
        kernel = load(_spec("sample_pages", self._defines(draw)))
        args = (self._cache.slots, self._cache.table, NO_ARRAY if coords is None else coords, out, record, pages)
        kernel((-(-count // (_THREADS * _GROUPS)),), (_THREADS,), args)

    def _record(self, count: int) -> np.ndarray:
        record = np.zeros((), VOLUME_RECORD)
        record["count"], record["dims"], record["channels"] = count, self.dims, self.n_channels
        if self._low_high is not None:
            record["low"], record["scale"] = normalisation(*self._low_high)
        return record

    def _pages_record(self, begin: ZYX, end: ZYX, count: int) -> np.ndarray:
        record = np.zeros((), _PAGES)
        voxels = math.prod(self._paging.page)
        record["slot"], record["channel"], record["values"] = voxels * self.n_channels, voxels, count
        record["page"], record["pages"] = self._paging.page, self._paging.pages
        record["begin"], record["end"] = begin, end
        return record

    def _defines(self, draw: bool) -> dict[str, str]:
        is_float = self._cache.slots.dtype.kind == "f"
        return {
            "SOURCE": CUDA_TYPES[self._cache.slots.dtype.str[1:]],
            "NORMALISE": str(int(self._low_high is not None) * (1 + is_float)),
            "DRAW": str(int(draw)),
            "INDEX": "int64",
            "LAYOUT": "0",
        }


def _spec(name: str, defines: dict[str, str]) -> KernelSpec:
    return KernelSpec("pages", name, tuple(sorted(defines.items())), "linumpy.sampling.cuda")
