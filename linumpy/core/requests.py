"""Carry out requests to stores for the native core: by obstore, or by a store of zarr-python.

In: records of :class:`~linumpy.core.native.Fetch`, from threads of the core, several at a time. Out: stored bytes, lent
to the core until it returns them, with the size and version of the object; or an error code and a text. Python's lock
is released while a request waits for the network. obstore repeats what a server answers by an error; the core repeats
requests whose response broke off, and late ones.

A request has a number of bytes ``nbytes`` and an ``offset``. It asks for a range of an object if ``nbytes`` is above 0,
counted from the end of the object if ``offset`` is -1; for the whole object if ``nbytes`` is -1; and only for its size
and version if ``nbytes`` is 0.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer.cpu import buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from linumpy.core import native
from linumpy.device import call_after_fork
from linumpy.io.stores.remote import check_process, explained, is_broken

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

#: Bytes of a block a little smaller than the largest block that the C library can be made to keep (32 MiB).
_FREED_NBYTES = 31 * 2**20
#: Maximum bytes of an object that is read whole because its server ignores ranges.
_WHOLE_NBYTES = 64 * 2**20
#: Seconds for which no ranges are requested from a store that ignored one. After that they are requested again, since a
#: proxy, not the server, may have sent the whole object.
_WITHOUT_RANGES_SECONDS = 60.0


class Stores:
    """Stores by the numbers that the core uses for them, and the bytes that are lent to the core.

    A store is forgotten when nothing else refers to it.
    """

    def __init__(self) -> None:
        self._stores: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._without_ranges: dict[int, float] = {}  # by store: the time until which no ranges are requested
        self._lent: dict[int, np.ndarray] = {}  # by the loan: the bytes

    def number_of(self, store: ObjectStore | Store) -> int:
        """Return the number of a store; the first call for a store assigns it."""
        with self._lock:
            for number, other in self._stores.items():
                if other is store:
                    return number
            number = next(self._numbers)
            self._stores[number] = store
            if number == 1:
                # The C library keeps freed blocks for later requests if they are not larger than the largest block
                # freed so far, and returns larger blocks to the system, which clears the memory of each new block.
                np.empty(_FREED_NBYTES, np.uint8)
                native.library().quick.lc_set_fetch(_callback)
            return number

    def carry_out(self, request: native.Fetch) -> None:
        """Take back loans and carry out a request. Never raise an exception, which the core cannot handle."""
        for n in range(request.returned_count):
            del self._lent[request.returned[n]]
        if request.key is None:
            return
        if not hasattr(_thread, "state"):
            # The state is never released: Python would make a new one at each call, which takes longer than the rest.
            _thread.state = ctypes.pythonapi.PyGILState_Ensure()
        try:
            self._fetch(request)
            request.code = native.OK
        except FileNotFoundError:
            request.code = native.MISSING
        except BaseException as error:
            request.code = native.BROKEN if is_broken(error) else native.REMOTE
            request.text = explained(error).encode()[:255]

    def _fetch(self, request: native.Fetch) -> None:
        store = self._stores[request.store]
        if isinstance(store, Store):
            data = _fetch_by_zarr(store, request)
        else:
            check_process()
            data = self._fetch_by_obstore(store, request)
        if data is not None and 0 < len(data) <= request.capacity:
            lent = np.frombuffer(data, np.uint8)
            request.address, _ = lent.__array_interface__["data"]
            request.got, request.loan = len(lent), id(lent)
            self._lent[request.loan] = lent

    def _fetch_by_obstore(self, store: ObjectStore, request: native.Fetch) -> Any:
        import obstore

        key, nbytes = request.key.decode(), request.nbytes
        if nbytes < 0 or not nbytes:
            response = obstore.get(store, key, options=None if nbytes else {"head": True})
            _describe(request, response.meta)
            return response.bytes() if nbytes and request.size <= request.capacity else None
        ignored_ranges = time.monotonic() < self._without_ranges.get(request.store, 0)
        data = None if ignored_ranges else _range(store, key, request)
        if data is None:
            data = _range_of_whole(store, key, request)
            if not ignored_ranges:
                self._without_ranges[request.store] = time.monotonic() + _WITHOUT_RANGES_SECONDS
        return data


def _fetch_by_zarr(store: Store, request: native.Fetch) -> np.ndarray | None:
    """Fetch from a store of zarr-python, which reports no version of the object, and no size unless all is read."""
    wait: Callable[[Any], Any] = _result if type(store) is MemoryStore else sync
    key, start, nbytes = request.key.decode(), request.offset, request.nbytes
    request.size = -1
    if not nbytes:
        if not wait(store.exists(key)):
            raise FileNotFoundError(key)
        return None
    byte_range: ByteRequest | None = None
    if nbytes > 0:
        byte_range = RangeByteRequest(start, start + nbytes) if start >= 0 else SuffixByteRequest(nbytes)
    buffer = wait(store.get(key, buffer_prototype, byte_range))
    if buffer is None:
        raise FileNotFoundError(key)
    data = np.ascontiguousarray(buffer.as_numpy_array())
    if nbytes < 0:
        request.size = data.nbytes
    return data


def _result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that never suspends, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a store in memory waits for something")


def _range(store: ObjectStore, key: str, request: native.Fetch) -> Any:
    """Request a range of an object; return None if the server ignores ranges."""
    import obstore
    from obstore.exceptions import NotSupportedError

    start, stop = request.offset, request.offset + request.nbytes
    byte_range: Any = (start, stop) if start >= 0 else {"suffix": request.nbytes}
    try:
        response = obstore.get(store, key, options={"range": byte_range})
    except NotSupportedError:
        if start >= 0:
            return None
        size = obstore.head(store, key)["size"]  # Azure has no ranges counted from the end
        try:
            response = obstore.get(store, key, options={"range": (max(0, size - request.nbytes), size)})
        except NotSupportedError:
            return None
    _describe(request, response.meta)
    return response.bytes()


def _range_of_whole(store: ObjectStore, key: str, request: native.Fetch) -> memoryview:
    """Read a whole object and return a range of it."""
    import obstore

    response = obstore.get(store, key)
    _describe(request, response.meta)
    if request.size > _WHOLE_NBYTES:
        raise OSError(f"its server ignores ranges of bytes, and the object has {request.size} bytes")
    start = request.offset if request.offset >= 0 else max(0, request.size - request.nbytes)
    return memoryview(response.bytes())[start : start + request.nbytes]


def _describe(request: native.Fetch, meta: ObjectMeta) -> None:
    """Write the size of an object to the request, and as version a digest of its ETag or else its modification time."""
    request.size = meta["size"]
    version = meta["e_tag"] or (str(meta["last_modified"]) if meta["last_modified"].timestamp() else "")
    if version:
        digest = hashlib.blake2b(version.encode(), digest_size=16).digest()
        request.version[:] = struct.unpack("qq", digest)


#: For each thread of the core, its Python thread state.
_thread = threading.local()
_STORES = Stores()
number_of = _STORES.number_of
#: The function that threads of the core call, as long as the process lives; so it is never freed.
_callback = native.FetchObject(lambda request: _STORES.carry_out(request.contents))


def _forget_lock() -> None:
    """Replace the lock in a child process, whose parent may have held it."""
    _STORES._lock = threading.Lock()


call_after_fork(_forget_lock)
