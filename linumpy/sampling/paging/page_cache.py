"""Pages of a Zarr volume in a fixed number of slots on a device; the least recently used pages are replaced.

In: the numbers of pages, and a Reader, which reads the pages. Out: an array of slots, and a table of each page's slot.
Errors: those of reading, when a page is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from linumpy.gpu.kernels import address_of
from linumpy.gpu.read.outputs import Regions
from linumpy.io.volume import Volume
from linumpy.sampling.paging.plan import Paging

if TYPE_CHECKING:
    from linumpy.gpu import Reader
    from linumpy.gpu.read.ticket import Together

_NO_PAGES = np.empty(0, np.int64)
#: Largest number of pages of a job.
_PAGES_PER_JOB = 256


class PageCache:
    """Slots on a device, and the page in each slot. Pages are numbered in C order.

    The reader's own cache cannot serve here. It keeps single chunks in the stored byte order, and only the reader's
    scatter kernels may access these chunks; a sampler's kernel reads pages in place, in native byte order, by the
    table.

    There is a volume for each channel. `slots` is the number of pages that are in memory at the same time. `xp` is
    CuPy, or NumPy in tests, with a reader of host memory.
    """

    def __init__(
        self, volumes: Sequence[Volume], paging: Paging, slots: int, dtype: np.dtype, reader: Reader, xp: ModuleType
    ) -> None:
        self._volumes, self.paging, self._reader, self._xp = volumes, paging, reader, xp
        self.slots = xp.zeros((slots, len(volumes), *paging.page), dtype)
        self._slot = np.full(math.prod(paging.pages), -1, np.int32)  # of each page; -1: not in memory
        self._page = np.full(slots, -1, np.int64)  # in each slot; -1: empty
        self._used = np.full(slots, -1, np.int64)  # request that used each slot last; -1: empty
        self._read_of = np.full(slots, -1, np.int64)  # number of the read that fills each slot; -1: none
        self._reads: dict[int, list[Together]] = {}
        self._last_request = self._last_read = 0
        self.table = xp.zeros(paging.pages, np.int32)
        self._is_current = False
        self.read = 0  # number of pages whose reading has begun so far

    def holds(self, pages: np.ndarray) -> bool:
        """Return whether all of these pages are in memory or being read."""
        return bool((self._slot[pages] >= 0).all())

    def request(self, pages: np.ndarray, keep: np.ndarray = _NO_PAGES) -> None:
        """Begin to read missing pages into the least recently used slots, but not into slots of `pages` or `keep`.

        If fewer slots are left than pages are missing, only the first missing pages are read.
        """
        if not len(pages):
            return
        self._last_request += 1
        slots = self._slot[np.concatenate([pages, keep])]
        self._used[slots[slots >= 0]] = self._last_request
        missing = pages[self._slot[pages] < 0][: int((self._used < self._last_request).sum())]
        if not len(missing):
            return
        taken = np.argpartition(self._used, len(missing) - 1)[: len(missing)]
        self._empty(taken)
        self._is_current = False
        try:
            self._page[taken], self._slot[missing], self._used[taken] = missing, taken, self._last_request
            for first in range(0, len(missing), _PAGES_PER_JOB):
                part = slice(first, first + _PAGES_PER_JOB)
                self._submit(missing[part], taken[part])
        except BaseException:
            self._forget(missing)  # these pages must not count as read
            raise
        self.read += len(missing)

    def _submit(self, pages: np.ndarray, slots: np.ndarray) -> None:
        """Begin to read pages, by a job for each channel; tickets are kept even if a later channel fails."""
        self._last_read += 1
        tickets = self._reads[self._last_read] = []
        self._read_of[slots] = self._last_read
        bounds = self.paging.bounds(pages)
        address = address_of(self.slots) + slots.astype(np.int64) * self.slots.strides[0]
        for channel, volume in enumerate(self._volumes):
            in_space = [index is None for index in volume.index]
            one_voxel = [0 if index is None else index for index in volume.index]
            start, stop, strides = (np.tile(np.array(one_voxel, np.int64), (len(pages), 1)) for _ in range(3))
            stop += 1
            start[:, in_space], stop[:, in_space] = bounds
            strides[:] = 0
            strides[:, in_space] = self.slots.strides[2:]
            regions = Regions(
                array=np.zeros(len(pages), np.int64), start=start, stop=stop, strides=strides,
                addresses=address + channel * self.slots.strides[1],
            )  # fmt: skip
            layout = self._reader.layout_of(volume.array)
            tickets.append(self._reader.submit_regions([layout], regions, self.slots.dtype, self.slots))

    def wait(self, pages: np.ndarray) -> None:
        """Wait until pages are in memory; kernels that are queued on the current stream from now on may read them."""
        assert self.holds(pages), "more pages are requested at once than there are slots"
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
            # A new table: kernels that read the previous table may not have run yet.
            self.table = self._xp.asarray(np.maximum(self._slot, 0).reshape(self.paging.pages))
            self._is_current = True

    def _end(self, number: int) -> None:
        """Forget a read that has ended without error."""
        del self._reads[number]
        self._read_of[self._read_of == number] = -1

    def _await(self, slots: np.ndarray) -> list[int]:
        """Wait until no read writes to slots any more; return the numbers of failed reads, whose tickets are kept."""
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
        """Empty slots; the error of a failed read is kept for the other pages of that read."""
        failed = self._await(slots)
        pages = self._page[slots]
        self._slot[pages[pages >= 0]] = -1
        self._page[slots] = self._used[slots] = self._read_of[slots] = -1
        for number in failed:
            if not (self._read_of == number).any():
                del self._reads[number]
        self._is_current = False

    def _forget(self, pages: np.ndarray) -> None:
        """Empty the slots of pages, and of all other pages whose reads failed together with a read of these pages."""
        slots = self._slot[pages]
        slots = slots[slots >= 0]
        failed = self._await(slots)
        self._empty(np.union1d(slots, np.flatnonzero(np.isin(self._read_of, failed))))
