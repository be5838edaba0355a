"""Carry out requests to stores for the native core: by obstore, or by a store of zarr-python.

In: records of :class:`~linumpy.core.native.Fetch`, from threads of the core, several at a time. Out: stored bytes, lent
to the core until it gives them back, and what describes the object; a code and a text where there is none or a request
failed. Python's lock is released while a request waits for the network.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer.cpu import buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from linumpy.core import native
from linumpy.io.stores.remote import check_process, explained

#: Requests of the process that are under way at a time, and the environment variable for another number.
REQUESTS = 32
REQUESTS_VARIABLE = "LINUMPY_REMOTE_REQUESTS"
#: Bytes of a block below the largest that the C library may keep.
_FREED_NBYTES = 31 * 2**20
#: Bytes of an object of which all is read because its server ignores ranges.
_WHOLE_NBYTES = 64 * 2**20
#: How long ranges are not asked for again: one response of all bytes may come from a proxy, and not the server.
_WITHOUT_RANGES_SECONDS = 60.0


class Stores:
    """Stores by the number by which the core names them, as long as something else refers to them."""

    def __init__(self) -> None:
        self._stores: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._without_ranges: dict[int, float] = {}
        self._lent: dict[int, np.ndarray] = {}

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
                # The C library keeps freed blocks up to the size of the largest one that was freed. Others go back to
                # the system, which would clear the memory of each request anew.
                np.empty(_FREED_NBYTES, np.uint8)
                native.library().quick.lc_set_fetch(_callback, requests)
            return number

    def carry_out(self, request: Any) -> None:
        """Carry out a request of the core; never raises, since the core has no use for exceptions."""
        for n in range(request.returned_count):
            del self._lent[request.returned[n]]
        if request.key is None:
            return
        if not hasattr(_thread, "state"):
            # Never released: Python would make a state for the thread at each call, which takes longer than all else.
            _thread.state = ctypes.pythonapi.PyGILState_Ensure()
        try:
            self._fetch(request)
            request.code = native.OK
        except FileNotFoundError:
            request.code = native.MISSING
        except BaseException as error:
            request.code = native.REMOTE
            request.text = explained(error).encode()[:255]

    def _fetch(self, request: Any) -> None:
        store = self._stores[request.store]
        if isinstance(store, Store):
            data = _ask_zarr(store, request)
        else:
            check_process()
            data = self._ask_obstore(store, request)
        if data is not None and 0 < len(data) <= request.capacity:
            lent = np.frombuffer(data, np.uint8)
            request.address, _ = lent.__array_interface__["data"]
            request.got, request.loan = len(lent), id(lent)
            self._lent[request.loan] = lent

    def _ask_obstore(self, store: Any, request: Any) -> Any:
        import obstore

        key, nbytes = request.key.decode(), request.nbytes
        if nbytes < 0 or not nbytes:
            found = obstore.get(store, key, options=None if nbytes else {"head": True})
            _describe(request, found.meta)
            return found.bytes() if nbytes and request.size <= request.capacity else None
        is_known = time.monotonic() < self._without_ranges.get(request.store, 0)
        data = None if is_known else _range(store, key, request)
        if data is None:
            data = _range_of_whole(store, key, request)
            if not is_known:
                self._without_ranges[request.store] = time.monotonic() + _WITHOUT_RANGES_SECONDS
        return data


def _ask_zarr(store: Store, request: Any) -> Any:
    """Ask a store of zarr-python, which tells neither versions nor, of a part, the size of the object."""
    wait: Callable[[Any], Any] = _result if type(store) is MemoryStore else sync
    key, start, nbytes = request.key.decode(), request.offset, request.nbytes
    request.size = -1
    if not nbytes:
        if not wait(store.exists(key)):
            raise FileNotFoundError(key)
        return None
    wanted: ByteRequest | None = None
    if nbytes > 0:
        wanted = RangeByteRequest(start, start + nbytes) if start >= 0 else SuffixByteRequest(nbytes)
    found = wait(store.get(key, buffer_prototype, wanted))
    if found is None:
        raise FileNotFoundError(key)
    data = np.ascontiguousarray(found.as_numpy_array())
    if nbytes < 0:
        request.size = data.nbytes
    return data


def _result(coroutine: Any) -> Any:
    """Return the result of a coroutine that waits for nothing, without the detour by an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise RuntimeError("a store in memory waits for something")


def _range(store: Any, key: str, request: Any) -> Any:
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
    return found.bytes()


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
        request.version[:] = struct.unpack("qq", digest)


#: What Python keeps for each thread of the core.
_thread = threading.local()
_STORES = Stores()
number_of = _STORES.number_of
#: Held for good: threads of the core call it as long as the process lives.
_callback = native.FetchObject(lambda request: _STORES.carry_out(request.contents))


def _forget_lock() -> None:
    """Make the lock new in a child process, whose parent may have held it."""
    _STORES._lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
