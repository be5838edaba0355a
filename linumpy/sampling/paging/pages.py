"""A Zarr volume larger than device memory: ``zarr`` on the device ``cuda_out_of_core``.

In: volumes of space (:class:`~linumpy.io.volume.Volume`, one for each channel) and a Reader. Out: values at points, and
samples. Pages of the volume, each of one or several chunks, lie in a fixed number of slots on the device; the least
recently used are replaced. Points are sampled part of the volume by part: while those of one part are sampled, the
missing pages of the next part are read.

A small batch of independent samples needs pages of the whole volume. So the values of many future samples are computed
in one pass over the volume and returned by later calls; the stream of samples is the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, load
from linumpy.io.volume import Volume
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import MOST_SAMPLES, Window, plan_boxes
from linumpy.sampling.field import Field
from linumpy.sampling.host import normalisation
from linumpy.sampling.paging.plan import Page, Paging, Pieces
from linumpy.sampling.volume import VOLUME_RECORD

if TYPE_CHECKING:
    from linumpy.gpu import Reader
    from linumpy.gpu.read.ticket import Ticket

_PAGES = np.dtype(
    [
        *[("slot", "i8"), ("channel", "i8"), ("values", "i8"), ("page", "i4", 3), ("pages", "i4", 3)],
        *[("begin", "i4", 3), ("end", "i4", 3)],
    ],
    align=True,
)
assert _PAGES.itemsize == 72
_THREADS, _GROUPS = 256, 4
_NOTHING = np.uint64(0)
_NO_PAGES = np.empty(0, np.int64)
#: Largest number of pages that a job reads.
_TOGETHER = 256


class PageCache:
    """Slots on a device, and which page is in each. Pages are named by their numbers in C order.

    Parameters
    ----------
    volumes : sequence of Volume
        One for each channel.
    paging : Paging
        Of the volume.
    slots : int
        How many pages are held.
    dtype : dtype
        Of the voxels in memory.
    reader : Reader
        ``submit_rows(array, regions, slots, rows, kept)`` gives a ticket, whose ``result()`` waits until all are there.
    xp : module
        CuPy; NumPy with a reader of host memory.
    """

    def __init__(
        self, volumes: Sequence[Volume], paging: Paging, slots: int, dtype: np.dtype, reader: Reader, xp: ModuleType
    ) -> None:
        self._volumes, self.paging, self._reader, self._xp = volumes, paging, reader, xp
        self.slots = xp.zeros((slots, len(volumes), *paging.page), dtype)
        self._slot = np.full(math.prod(paging.pages), -1, np.int32)  # of each page; -1 for those that are not held
        self._page = np.full(slots, -1, np.int64)  # in each slot
        self._used = np.full(slots, -1, np.int64)  # when, by a clock of requests; -1 for slots that are empty
        self._read_of = np.full(slots, -1, np.int64)  # number of the read that fills a slot; -1 for none
        self._reads: dict[int, list[Ticket]] = {}
        self._now = self._last_read = 0
        self.table = xp.zeros(paging.pages, np.int32)
        self._is_current = False
        self.read = 0  # pages so far

    def holds(self, pages: np.ndarray) -> bool:
        """Say whether pages are there, or being read."""
        return bool((self._slot[pages] >= 0).all())

    def request(self, pages: np.ndarray, keep: np.ndarray = _NO_PAGES) -> None:
        """Begin to read the pages that are missing, into slots of any pages but those to keep.

        If there are pages to keep, fewer pages are read where slots do not suffice.
        """
        if not len(pages):
            return
        self._now += 1
        slots = self._slot[np.concatenate([pages, keep])]
        self._used[slots[slots >= 0]] = self._now
        missing = pages[self._slot[pages] < 0][: int((self._used < self._now).sum())]
        if not len(missing):
            return
        taken = np.argpartition(self._used, len(missing) - 1)[: len(missing)]
        self._empty(taken)
        self._is_current = False
        try:
            self._page[taken], self._slot[missing], self._used[taken] = missing, taken, self._now
            for first in range(0, len(missing), _TOGETHER):
                some = slice(first, first + _TOGETHER)
                self._submit(missing[some], taken[some])
        except BaseException:
            self._forget(missing)  # or else they would count as read
            raise
        self.read += len(missing)

    def _submit(self, pages: np.ndarray, slots: np.ndarray) -> None:
        """Begin to read pages together; whatever happens, what was begun is known."""
        self._last_read += 1
        tickets = self._reads[self._last_read] = []
        self._read_of[slots] = self._last_read
        start, stop = self.paging.bounds(pages)
        for channel, volume in enumerate(self._volumes):
            regions = np.empty((len(pages), len(volume.index), 2), np.int64)
            in_space = [index is None for index in volume.index]
            regions[:, in_space, 0], regions[:, in_space, 1] = start, stop
            for axis, at in enumerate(volume.index):
                if at is not None:
                    regions[:, axis] = at, at + 1
            tickets.append(self._reader.submit_rows(volume.array, regions, self.slots[:, channel], slots, in_space))

    def wait(self, pages: np.ndarray) -> None:
        """Wait until pages are there; kernels queued on the current stream from now on may read them.

        Raises
        ------
        ChunkError, OSError
            What reading a page gave; it and those that were read with it are read again when they are asked for.
        """
        assert self.holds(pages), "more pages are wanted at once than there are slots"
        reads = self._read_of[self._slot[pages]]
        try:
            for number in np.unique(reads[reads >= 0]).tolist() if self._reads else []:
                for ticket in self._reads[number]:
                    ticket.result()
                self._end(number)
        except BaseException:
            self._forget(pages)
            raise
        if not self._is_current:
            # A copy of its own: the kernels that read the last one may not have run yet.
            self.table = self._xp.asarray(np.maximum(self._slot, 0).reshape(self.paging.pages))
            self._is_current = True

    def _end(self, number: int) -> None:
        """Note that a read is over."""
        del self._reads[number]
        self._read_of[self._read_of == number] = -1

    def _await(self, slots: np.ndarray) -> list[int]:
        """Wait until no read writes to slots any more; returns the numbers of reads that failed, which stay known."""
        reads, failed = self._read_of[slots], []
        for number in np.unique(reads[reads >= 0]).tolist():
            errors = 0
            for ticket in self._reads[number]:
                try:
                    ticket.result()
                except Exception:
                    errors += 1
            if errors:
                failed.append(number)
            else:
                self._end(number)
        return failed

    def _empty(self, slots: np.ndarray) -> None:
        """Let slots hold no page; other pages of a read that failed give its error when they are waited for."""
        failed = self._await(slots)
        pages = self._page[slots]
        self._slot[pages[pages >= 0]] = -1
        self._page[slots] = self._used[slots] = self._read_of[slots] = -1
        for number in failed:
            if not (self._read_of == number).any():
                del self._reads[number]
        self._is_current = False

    def _forget(self, pages: np.ndarray) -> None:
        """Let pages not be held, nor those whose reads failed with theirs."""
        slots = self._slot[pages]
        slots = slots[slots >= 0]
        failed = self._await(slots)
        self._empty(np.union1d(slots, np.flatnonzero(np.isin(self._read_of, failed))))


@dataclass(frozen=True)
class _Future:
    """Values of independent samples that later calls return."""

    key: tuple[int, int]
    first: int
    values: Array  # (channels, samples)

    def holds(self, key: tuple[int, int], number: int) -> bool:
        return self.key == key and self.first <= number < self.first + self.values.shape[1]


class PagedVolume(Field):
    """A field whose voxels are read as they are needed; linear interpolation.

    Parameters
    ----------
    cache : PageCache
        Of the volume.
    low_high : (float, float), optional
        Voxels become (v - low) / (high - low), cut to 0 to 1.
    value_range : (float, float)
        Of what is decoded.
    ahead : int
        Independent samples whose values are computed together, in one pass over the volume: 4 bytes each.
    window : int
        Samples that are put in the order of boxes together, by default.
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
        self.boxes = plan_boxes(self.dims, 2 * math.prod(self._paging.page))  # about as large as pages
        self.window_size = window or min(MOST_SAMPLES, max(2**20, 2 * math.prod(self.dims)))
        self._future: _Future | None = None
        self._counted: Pieces | None = None
        self._lock = threading.Lock()  # pages that one thread samples may not be replaced by another

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate at points; finding out which pages they need waits for the device once."""
        if len(coords):
            with self._lock:
                self._decode(coords, out)

    def _decode(self, coords: Array, out: Array) -> None:
        marks = self._xp.zeros(self._paging.pages, np.uint8)
        record = self._record(len(coords))
        args = (coords, marks, record, self._pages_record((0, 0, 0), (0, 0, 0), 0))
        load(_spec("mark", self._defines(False)))((-(-len(coords) // _THREADS),), (_THREADS,), args)
        needed = (marks if isinstance(marks, np.ndarray) else marks.get()).astype(bool)
        self._pass(coords, out, record, needed)

    def sample(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw independent points and evaluate at them."""
        draws.draw(draws.Draw(), key, first, coords)
        with self._lock:
            self._copy_ahead(key, first, coords, out)

    def _copy_ahead(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        done = 0
        while done < len(coords):
            if self._future is None or not self._future.holds(key, first + done):
                self._make_ahead(key, first + done)
                continue
            values = self._future.values[:, first + done - self._future.first :]
            part = min(len(coords) - done, values.shape[1])
            out[:, done : done + part] = values[:, :part]
            done += part

    def sample_window(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        """Make samples of a window in the order of its boxes; pages are read once for each window where they fit."""
        if len(coords):
            with self._lock:
                self._sample_window(window, begin, coords, out)

    def _sample_window(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        if self._counted is None or self._counted.window is not window:
            self._counted = Pieces(window, self._paging)
        window.draw(begin, coords)
        first, last = self._counted.boxes_of(begin, begin + len(coords))
        record = self._record(len(coords))
        slots = int(self._cache.slots.shape[0])
        for low, high, pages in self._counted.groups(first, last, slots // 2):
            self._cache.request(pages)
            self._cache.request(self._counted.upcoming(last, slots // 8), keep=pages)
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
        """Sample one part of the volume after another; those first whose pages are there."""
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
        self, coords: Array | None, out: Array, record: np.ndarray, begin: Page, end: Page, *, draw: bool
    ) -> None:
        count = int(record["count"])
        pages = self._pages_record(begin, end, count)
        kernel = load(_spec("sample_pages", self._defines(draw)))
        args = (self._cache.slots, self._cache.table, _NOTHING if coords is None else coords, out, record, pages)
        kernel((-(-count // (_THREADS * _GROUPS)),), (_THREADS,), args)

    def _record(self, count: int) -> np.ndarray:
        record = np.zeros((), VOLUME_RECORD)
        record["count"], record["dims"], record["channels"] = count, self.dims, self.n_channels
        if self._low_high is not None:
            record["low"], record["scale"] = normalisation(*self._low_high)
        return record

    def _pages_record(self, begin: Page, end: Page, count: int) -> np.ndarray:
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
