"""Arrays that samples name, opened ahead by threads.

In: path or URL, and level. Out: :class:`~linumpy.stream.planning.records.ArrayInfo`, kept while the metadata files of
the array are unchanged.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from linumpy.stream.config import Config, Sample
from linumpy.stream.planning.alignment import is_own
from linumpy.stream.planning.records import ArrayInfo
from linumpy.stream.reading.arrays import OPENED, Key, located, open_info

#: Says whether the core checks the metadata files of an array when it reads the array.
IsCheckedLater = Callable[[ArrayInfo], bool]


class ArrayRequest(NamedTuple):
    """An array that a sample needs: open, or being opened."""

    key: Key
    opened: Future[ArrayInfo] | ArrayInfo
    is_shared: bool = False  # whether another sample requested the array before


class Sources:
    """The arrays of a pipeline, opened by threads ahead of their use.

    `config`: its ``n_zarrs_meta_cache``, ``n_io_threads``, limits of chunks and elements, spacing, origin and storage
    options are used. `pool`: threads that open arrays, and that read by zarr-python. `hits`, `misses`: requests for
    arrays that were kept; requests for other arrays, and arrays that were opened again.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.pool = ThreadPoolExecutor(config.n_io_threads, "linumpy-stream-open")
        self._kept: OrderedDict[Key, Future[ArrayInfo] | ArrayInfo] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.misses = 0

    def request(self, sample: Sample, folder: str) -> list[ArrayRequest]:
        """Request the arrays of a sample, one for each part; threads start to open arrays that are not kept.

        An error, such as of a path, is returned as a single request, which raises the error.

        `folder`: folder from which relative paths start.
        """
        try:
            return [self._get(key) for key in self._keys(sample, folder)]
        except Exception as error:
            failed: Future[ArrayInfo] = Future()
            failed.set_exception(error)
            return [ArrayRequest(Key(sample.uri, sample.level), failed)]

    def _keys(self, sample: Sample, folder: str) -> list[Key]:
        keys = [Key(located(sample.uri, folder), sample.level, self._config.spacing, self._config.origin)]
        for part in sample.parts:
            if is_own(sample, part):
                keys.append(keys[0]._replace(level=part.level))
            else:
                keys.append(Key(located(part.uri or sample.uri, folder), part.level, part.spacing, part.origin))
        return keys

    def _get(self, key: Key) -> ArrayRequest:
        with self._lock:
            kept = self._kept.get(key)
            if isinstance(kept, Future) and kept.done():
                kept = None if kept.exception() else kept.result()
                if kept is not None:
                    self._kept[key] = kept
            if kept is not None:
                self._kept.move_to_end(key)
                self.hits += 1
                return ArrayRequest(key, kept, is_shared=True)
            self.misses += 1
            opened: Future[ArrayInfo] | ArrayInfo
            if OPENED.get(key) is None:
                opened = self.pool.submit(open_info, key, self._config)
            else:  # faster here than in a thread
                opened = open_info(key, self._config)
            self._keep(key, opened)
            return ArrayRequest(key, opened)

    def _keep(self, key: Key, opened: Future[ArrayInfo] | ArrayInfo) -> None:
        self._kept[key] = opened
        self._kept.move_to_end(key)
        while len(self._kept) > self._config.n_zarrs_meta_cache:
            self._kept.popitem(last=False)

    @staticmethod
    def are_open(requests: Sequence[ArrayRequest]) -> bool:
        """Whether none of the requested arrays is still being opened."""
        return all(not isinstance(request.opened, Future) or request.opened.done() for request in requests)

    def wait_for(
        self, requests: Sequence[ArrayRequest], checked: dict[Key, ArrayInfo], is_checked_later: IsCheckedLater
    ) -> list[ArrayInfo]:
        """Wait for requested arrays, check their metadata files, and open rewritten arrays again.

        `requests`: requests that :meth:`request` returned. `checked`: arrays that need no check; the arrays of
        `requests` are added. `is_checked_later`: returns True for arrays whose metadata files are not checked here.
        """
        infos = []
        for request in requests:
            info = checked.get(request.key)
            if info is None:
                info = checked[request.key] = self._wait_for_one(request, is_checked_later)
            infos.append(info)
        return infos

    def _wait_for_one(self, request: ArrayRequest, is_checked_later: IsCheckedLater) -> ArrayInfo:
        opened = request.opened
        try:
            info = opened if isinstance(opened, ArrayInfo) else opened.result()
            if is_checked_later(info) or info.holds:
                return info
        except Exception:
            if not request.is_shared:
                raise  # else open it again: an array that was missing for an earlier sample may exist now
        return self.opened_again(request.key)

    def opened_again(self, key: Key) -> ArrayInfo:
        """Open an array again, after it was rewritten."""
        OPENED.forget(key)
        info = open_info(key, self._config)
        with self._lock:
            self.misses += 1
            self._keep(key, info)
        return info

    def close(self) -> None:
        """Stop the threads, and forget all arrays."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self._kept.clear()
