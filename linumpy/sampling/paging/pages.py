"""A Zarr volume larger than device memory: ``zarr`` on the device ``cuda_out_of_core``.

In: volumes of space (:class:`~linumpy.io.volume.Volume`, one for each channel) and a Reader. Out: values at points, and
samples. Pages of the volume, each of one or several chunks, lie in a fixed number of slots on the device; the ones used
longest ago are replaced. Points are sampled part of the volume by part: while those of one part are sampled, the
missing pages of the next are read.

A small batch of independent samples needs pages of the whole volume. So the values of many future samples are computed
in one pass over the volume and returned by later calls; the stream of samples is the same.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, load
from linumpy.io.volume import Volume
from linumpy.sampling import draws
from linumpy.sampling.boxes import MOST_SAMPLES, Boxes, Window, plan_boxes
from linumpy.sampling.host import normalisation
from linumpy.sampling.paging.plan import Page, Paging, Pieces
from linumpy.sampling.volume import VOLUME_RECORD

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


class PageCache:
    """Slots on a device, and which page is in each.

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
        ``submit_many(source, regions, outs=...)`` gives tickets, whose ``result()`` waits until a region is there.
    xp : module
        CuPy; NumPy with a reader of host memory.
    """

    def __init__(
        self, volumes: Sequence[Volume], paging: Paging, slots: int, dtype: np.dtype, reader: Any, xp: Any
    ) -> None:
        self._volumes, self.paging, self._reader, self._xp = volumes, paging, reader, xp
        self.slots = xp.zeros((slots, len(volumes), *paging.page), dtype)
        self._free = list(range(slots))
        self._held: OrderedDict[Page, int] = OrderedDict()  # the one used longest ago first
        self._tickets: dict[Page, list[Any]] = {}
        self._table = np.zeros(paging.pages, np.int32)
        self.table = xp.asarray(self._table.copy())
        self._is_current = True
        self.read = 0  # pages so far

    def request(self, pages: Sequence[Page], keep: frozenset[Page] | set[Page] = frozenset()) -> None:
        """Begin to read the pages that are missing, into slots of any pages but those to keep."""
        missing = [page for page in pages if page not in self._held]
        for page in pages:
            if page in self._held:
                self._held.move_to_end(page)
        if not missing:
            return
        wanted = keep | set(pages)
        for page in missing:
            self._held[page] = self._slot(wanted)
            self._table[page] = self._held[page]
        self._is_current = False
        try:
            self._submit(missing)
        except BaseException:
            self._forget(missing)  # or else they would count as read
            raise
        self.read += len(missing)

    def _submit(self, missing: Sequence[Page]) -> None:
        for channel, volume in enumerate(self._volumes):
            regions, outs = [], []
            for page in missing:
                box = self.paging.box(page)
                regions.append(_bounds(volume, box))
                slot = self.slots[(self._held[page], channel, *(slice(0, one.stop - one.start) for one in box))]
                outs.append(slot[tuple(slice(None) if one is None else None for one in volume.index)])
            tickets = self._reader.submit_many(volume.array, np.array(regions, np.int64), outs=outs)
            for page, ticket in zip(missing, tickets, strict=True):
                self._tickets.setdefault(page, []).append(ticket)

    def wait(self, pages: Sequence[Page]) -> None:
        """Wait until pages are there; kernels queued on the current stream from now on may read them.

        Raises
        ------
        ChunkError, OSError
            What reading a page gave; it is read again when it is asked for again.
        """
        try:
            for page in pages:
                for ticket in self._tickets.get(page, ()):
                    ticket.result()
                self._tickets.pop(page, None)
        except BaseException:
            self._forget(pages)
            raise
        if not self._is_current:
            # A copy of its own: the kernels that read the last one may not have run yet.
            self.table = self._xp.asarray(self._table.copy())
            self._is_current = True

    def _slot(self, wanted: set[Page] | frozenset[Page]) -> int:
        if self._free:
            return self._free.pop()
        page = next(one for one in self._held if one not in wanted)
        self._settle(page)
        return self._held.pop(page)

    def _forget(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self._settle(page)
            if page in self._held:
                self._free.append(self._held.pop(page))

    def _settle(self, page: Page) -> None:
        """Wait until no read writes to the slot of a page any more, so that it may hold another; ignore errors."""
        for ticket in self._tickets.get(page, ()):
            with contextlib.suppress(Exception):
                ticket.result()
        self._tickets.pop(page, None)


def _bounds(volume: Volume, box: tuple[slice, ...]) -> list[tuple[int, int]]:
    """First voxel and the one behind the last, along each axis of the array."""
    region = volume.region(box)
    return [(one.start, one.stop) if isinstance(one, slice) else (one, one + 1) for one in region]


class PagedVolume:
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
        Independent samples whose values are made together, in one pass over the volume: 4 bytes each.
    window : int
        Samples that are put in the order of boxes together, by default.
    """

    has_gradient = False

    def __init__(
        self,
        cache: PageCache,
        xp: Any,
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
        self.window_size = window or min(MOST_SAMPLES, max(2**20, 2 * math.prod(self.dims)))
        self._made: tuple[tuple[int, int], int, Any] | None = None  # key, first sample, values
        self._counted: Pieces | None = None
        self._lock = threading.Lock()  # pages that one thread samples may not be replaced by another

    @property
    def boxes(self) -> Boxes:
        """Boxes of the volume, about as large as pages."""
        return plan_boxes(self.dims, 2 * math.prod(self._paging.page))

    def decode(self, coords: Any, out: Any) -> None:
        """Evaluate at points; finding out which pages they need waits for the device once."""
        if len(coords):
            with self._lock:
                self._decode(coords, out)

    def _decode(self, coords: Any, out: Any) -> None:
        marks = self._xp.zeros(self._paging.pages, np.uint8)
        record = self._record(len(coords))
        args = (coords, marks, record, self._pages_record((0, 0, 0), (0, 0, 0), 0))
        load(_spec("mark", self._defines(False)))((-(-len(coords) // _THREADS),), (_THREADS,), args)
        needed = (marks if isinstance(marks, np.ndarray) else marks.get()).astype(bool)
        self._pass(coords, out, record, needed)

    def sample(self, key: tuple[int, int], first: int, coords: Any, out: Any) -> None:
        """Draw independent points and evaluate at them."""
        draws.draw(draws.Draw(), key, first, coords)
        with self._lock:
            self._copy_ahead(key, first, coords, out)

    def _copy_ahead(self, key: tuple[int, int], first: int, coords: Any, out: Any) -> None:
        done = 0
        while done < len(coords):
            made = self._made
            if made is None or made[0] != key or not made[1] <= first + done < made[1] + made[2].shape[1]:
                self._make_ahead(key, first + done)
                continue
            _, begin, values = made
            at = first + done - begin
            part = min(len(coords) - done, values.shape[1] - at)
            out[:, done : done + part] = values[:, at : at + part]
            done += part

    def pays_in_boxes(self, count: int) -> bool:
        """Say whether :meth:`sample_window` is to be used: always."""
        return True

    def sample_window(self, window: Window, begin: int, coords: Any, out: Any) -> None:
        """Make samples of a window in the order of its boxes; pages are read once for each window where they fit."""
        if len(coords):
            with self._lock:
                self._sample_window(window, begin, coords, out)

    def _sample_window(self, window: Window, begin: int, coords: Any, out: Any) -> None:
        if self._counted is None or self._counted.window is not window:
            self._counted = Pieces(window, self._paging)
        window.draw(begin, coords)
        first, last = self._counted.boxes_of(begin, begin + len(coords))
        record = self._record(len(coords))
        slots = int(self._cache.slots.shape[0])
        for low, high, pages in self._counted.groups(first, last, slots // 2):
            self._cache.request(pages)
            self._cache.request(self._counted.upcoming(last, slots // 8), keep=set(pages))
            self._cache.wait(pages)
            self._launch(coords, out, record, low, high, draw=False)

    def _make_ahead(self, key: tuple[int, int], first: int) -> None:
        values = self._made[2] if self._made else self._xp.empty((self.n_channels, self._ahead), np.float32)
        self._made = None
        record = self._record(values.shape[1])
        record["key"], record["first"] = key, first
        self._pass(None, values, record, None)
        self._made = key, first, values

    def _pass(self, coords: Any, out: Any, record: np.ndarray, needed: np.ndarray | None) -> None:
        """Sample one part of the volume after another; those first whose pages are there."""
        parts = []
        for begin, end in self._paging.parts():
            pages = self._paging.with_neighbours(begin, end, needed)
            if pages:
                parts.append((begin, end, pages))
        parts.sort(key=lambda one: any(page not in self._cache._held for page in one[2]))
        for number, (begin, end, pages) in enumerate(parts):
            self._cache.request(pages)
            self._cache.wait(pages)
            if number + 1 < len(parts):
                self._cache.request(parts[number + 1][2], keep=set(pages))
            low = tuple(b * p for b, p in zip(begin, self._paging.page, strict=True))
            high = tuple(e * p for e, p in zip(end, self._paging.page, strict=True))
            self._launch(coords, out, record, low, high, draw=coords is None)

    def _launch(self, coords: Any, out: Any, record: np.ndarray, begin: Any, end: Any, *, draw: bool) -> None:
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

    def _pages_record(self, begin: Any, end: Any, count: int) -> np.ndarray:
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
