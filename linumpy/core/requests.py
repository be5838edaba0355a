"""Carry out requests to object stores for the native core, by obstore.

In: records of :class:`~linumpy.core.native.Fetch`, from threads of the core, several at a time. Out: stored bytes in
the core's memory, and what describes the object; a code and a text where there is none or a request failed. Python's
lock is released while obstore waits for the network, and while bytes are copied.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from linumpy.core import native
from linumpy.io.remote import check_process, explained

#: Requests of the process that are under way at a time, and the environment variable for another number.
REQUESTS = 32
REQUESTS_VARIABLE = "LINUMPY_REMOTE_REQUESTS"
#: Bytes of an object of which all is read because its server ignores ranges.
_WHOLE_NBYTES = 64 * 2**20


class Stores:
    """Object stores by the number by which the core names them, as long as something else refers to them."""

    def __init__(self) -> None:
        self._stores: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._without_ranges: set[int] = set()

    def number_of(self, store: Any) -> int:
        """Return the number of a store; it gets one when it is asked for the first time."""
        with self._lock:
            for number, known in self._stores.items():
                if known is store:
                    return number
            requests = _most_requests()
            number = next(self._numbers)
            self._stores[number] = store
            if number == 1:
                native.library().quick.lc_set_fetch(_callback, requests)
            return number

    def carry_out(self, request: Any) -> None:
        """Carry out a request of the core; never raises, since the core has no use for exceptions."""
        try:
            check_process()
            self._fetch(request)
            request.code = native.OK
        except FileNotFoundError:
            request.code = native.MISSING
        except BaseException as error:
            request.code = native.REMOTE
            request.text = explained(error).encode()[:255]

    def _fetch(self, request: Any) -> None:
        import obstore

        store, key, nbytes = self._stores[request.store], request.key.decode(), request.nbytes
        if nbytes < 0 or not nbytes:
            found = obstore.get(store, key, options=None if nbytes else {"head": True})
            _describe(request, found.meta)
            if nbytes and request.size <= request.capacity:
                _copy(request, memoryview(found.bytes()))
            return
        data = None if request.store in self._without_ranges else self._range(store, key, request)
        if data is None:
            self._without_ranges.add(request.store)
            data = _range_of_whole(store, key, request)
        _copy(request, data)

    def _range(self, store: Any, key: str, request: Any) -> memoryview | None:
        """Return a range of an object; None where its server ignores ranges."""
        import obstore
        from obstore.exceptions import NotSupportedError

        start, stop = request.offset, request.offset + request.nbytes
        wanted: Any = (start, stop) if start >= 0 else {"suffix": request.nbytes}
        try:
            found = obstore.get(store, key, options={"range": wanted})
        except NotSupportedError:
            if start >= 0:
                return None
            size = obstore.head(store, key)["size"]  # Azure knows no last bytes
            try:
                found = obstore.get(store, key, options={"range": (max(0, size - request.nbytes), size)})
            except NotSupportedError:
                return None
        _describe(request, found.meta)
        return memoryview(found.bytes())


def _most_requests() -> int:
    text = os.environ.get(REQUESTS_VARIABLE) or str(REQUESTS)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{REQUESTS_VARIABLE}={text!r}: a number of requests is needed, 1 or more")
    return int(text)


def _range_of_whole(store: Any, key: str, request: Any) -> memoryview:
    """Read all of an object for a range of it."""
    import obstore

    found = obstore.get(store, key)
    _describe(request, found.meta)
    if request.size > _WHOLE_NBYTES:
        raise OSError(f"its server ignores ranges of bytes, and the object has {request.size} bytes")
    start = request.offset if request.offset >= 0 else max(0, request.size - request.nbytes)
    return memoryview(found.bytes())[start : start + request.nbytes]


def _describe(request: Any, meta: Any) -> None:
    """Write an object's size, and a digest of its ETag, or else of the time of its last change."""
    request.size = meta["size"]
    mark = meta["e_tag"] or (str(meta["last_modified"]) if meta["last_modified"].timestamp() else "")
    if mark:
        digest = hashlib.blake2b(mark.encode(), digest_size=16).digest()
        request.version[:] = np.frombuffer(digest, np.int64).tolist()


def _copy(request: Any, data: memoryview) -> None:
    request.got = nbytes = min(len(data), request.capacity)
    if nbytes:
        # By ctypes, since it releases Python's lock.
        ctypes.memmove(request.address, np.frombuffer(data, np.uint8).ctypes.data, nbytes)


_STORES = Stores()
number_of = _STORES.number_of
#: Held for good: threads of the core call it as long as the process lives.
_callback = native.FetchObject(lambda request: _STORES.carry_out(request.contents))


def _forget_lock() -> None:
    """Make the lock new in a child process, whose parent may have held it."""
    _STORES._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
