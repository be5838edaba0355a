"""Object stores by URL, through obstore: S3, Google Cloud Storage, Azure, and HTTP servers.

Names and messages have no credentials. Errors: ``ImportError`` without obstore, ``ValueError`` for a URL with a query
or fragment, ``RuntimeError`` in a process that was forked after obstore was used, and obstore's own exceptions.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import GpuMemoryStore, ObjectStore

from linumpy.device import call_after_fork
from linumpy.errors import LinumpyError, SourceError, StorageRefusedError
from linumpy.plan.layout import RemoteArray

#: Schemes of URLs that obstore opens.
SCHEMES = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
_AZURE = ("az", "adl", "azure", "abfs", "abfss")
#: How often, and how long, a request is repeated after a server error (5xx) or a broken connection. obstore does not
#: read Retry-After: pauses of 5 to 40 s together outlast a server that asks for a few seconds.
_BACKOFF = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)}
_RETRIES = {"max_retries": 16, "retry_timeout": timedelta(minutes=2), "backoff": _BACKOFF}
#: Time-outs: a request may take long, but fails if no byte comes for a while.
_CLIENT = {"timeout": "10min", "read_timeout": "30s"}
#: Environment variables that name the server of S3.
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT")
#: Maximum number of stores that stay open, with their connections.
_MAX_STORES = 32


#: Exceptions of obstore for a conditional request whose condition does not hold, or that the store does not have.
_CONDITIONS = ("AlreadyExistsError", "PreconditionError", "NotModifiedError", "NotSupportedError")


class AccessError(StorageRefusedError, PermissionError):
    """An object store denies access to an object; some stores do so for a missing object."""


class RemoteStore(ObjectStore[Any]):
    """An object store that is named by its URL, without credentials.

    - `held`: objects that are kept in memory instead of in the store, by their keys; None until they are written.
    - `refusal`: why nothing may be written any more, an error that :meth:`put` raises.
    """

    refusal: Exception | None = None

    def __init__(
        self, store: Any, url: str, *, read_only: bool = True, held: dict[str, bytes | None] | None = None
    ) -> None:
        super().__init__(store, read_only=read_only)
        self.url, self.held = url, {} if held is None else held

    def __str__(self) -> str:
        return self.url

    def with_read_only(self, read_only: bool = False) -> RemoteStore:
        """Return the same store for reading, or for writing."""
        return RemoteStore(self.store, self.url, read_only=read_only, held=self.held)

    @property
    def supports_listing(self) -> bool:
        """Whether the keys can be listed: not those of an HTTP server, which few servers list and none in one way."""
        return type(self.store).__name__ != "HTTPStore"

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of an object or a range of them; None if there is no such object."""
        if key in self.held:
            data = self.held[key]
            return None if data is None else prototype.buffer.from_bytes(data)
        with self.errors(key):
            return await super().get(key, prototype, byte_range)

    async def exists(self, key: str) -> bool:
        """Return whether an object exists."""
        if key in self.held:
            return self.held[key] is not None
        with self.errors(key):
            return await super().exists(key)

    async def set(self, key: str, value: Buffer) -> None:
        """Write an object."""
        if key in self.held:
            self.held[key] = value.to_bytes()
            return
        with self.errors(key, "written"):
            await super().set(key, value)

    async def set_if_not_exists(self, key: str, value: Buffer) -> None:
        """Write an object, unless there is one."""
        if not await self.exists(key):
            await self.set(key, value)

    async def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        if key in self.held:
            self.held[key] = None
            return
        with self.errors(key, "removed"):
            await super().delete(key)

    def put(self, key: str, data: bytes | memoryview, mode: Any = None) -> dict[str, str]:
        """Write an object, and return its version, which as `mode` allows to replace only this version."""
        import obstore

        if self.refusal is not None:
            raise self.refusal
        with self.errors(key, "written"):
            result = obstore.put(self.store, key, data, mode=mode)
        return {name: value for name, value in result.items() if value is not None}  # type: ignore[misc]

    def remove(self, key: str) -> None:
        """Remove an object, if there is one."""
        import obstore

        with suppress(FileNotFoundError), self.errors(key, "removed"):
            obstore.delete(self.store, key)

    async def getsize(self, key: str) -> int:
        """Return the number of bytes of an object."""
        with self.errors(key):
            return await super().getsize(key)

    async def list_prefix(self, prefix: str) -> AsyncGenerator[str, None]:
        """Yield the keys that begin with a prefix."""
        with self.errors(prefix, "listed"):
            async for key in super().list_prefix(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncGenerator[str, None]:
        """Yield the names of the direct members of a folder."""
        import obstore

        folder = prefix.rstrip("/")
        with self.errors(folder, "listed"):
            listed = await obstore.list_with_delimiter_async(self.store, folder)
        for key in (*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"])):
            if name := key[len(folder) :].strip("/"):  # else it is a folder marker: an empty object that ends in "/"
                yield name

    @contextmanager
    def errors(self, key: str, done: str = "read") -> Iterator[None]:
        """Raise linumpy's errors for those of obstore, with the name of the object."""
        try:
            yield
        except LinumpyError:
            raise
        except FileNotFoundError:
            if done == "written":
                raise FileNotFoundError(f"{self.url}/{key} cannot be written: there is no such bucket") from None
            raise
        except Exception as error:
            if not _is_of_obstore(error) or type(error).__name__ in _CONDITIONS:
                raise
            kind: type[Exception] = (
                AccessError if _is_denied(error) else SourceError if done == "listed" else StorageRefusedError
            )
            if done in ("written", "removed"):
                kind = PermissionError if _is_denied(error) else OSError
            name = f"{self.url}/{key}".rstrip("/")
            raise kind(f"{name} cannot be {done}: {explained(error)}") from None


def is_remote(url: str) -> bool:
    """Return whether a URL has one of :data:`SCHEMES`."""
    return url.partition("://")[0].lower() in SCHEMES and "://" in url


#: Open stores with their URLs and options, the most recently used store last.
_stores: list[tuple[str, dict[str, Any], RemoteStore]] = []
_lock = threading.Lock()
#: Whether this process has used obstore, which starts threads; and whether it was forked from a process that had.
_is_used = _is_lost = False


def _after_fork() -> None:
    global _lock, _is_lost
    _lock, _is_lost = threading.Lock(), _is_used
    _stores.clear()


call_after_fork(_after_fork)


def check_process() -> None:
    """Raise ``RuntimeError`` in a process that was forked after obstore was used: requests would wait forever."""
    if _is_lost:
        raise RuntimeError(
            "this process was forked from one that had read from an object store, where obstore cannot read: start "
            "processes by spawn (multiprocessing.get_context('spawn'))"
        )


def open_store(url: str, options: Mapping[str, Any] | None = None) -> tuple[RemoteStore, str]:
    """Return the store of a URL, and the path in it; calls with the same server and options share the store."""
    global _is_used
    check_process()
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ValueError(
            f"{without_credentials(url)!r}: the part after '?' or '#' of a URL is not passed on to the objects below "
            "it; pass credentials by storage_options="
        )
    given = dict(options or {})
    is_http = parts.scheme.lower() in ("http", "https")
    # The URL names an HTTP server, or if there are settings of a store, a bucket.
    is_plain_http = is_http and not given.keys() - {"client_options", "retry_config"}
    # All objects of one bucket or server share a store and its connections.
    root, path = f"{parts.scheme}://{parts.netloc}", unquote(parts.path).strip("/")
    if parts.scheme.lower() in _AZURE or (is_http and not is_plain_http):
        root, path = url.rstrip("/"), ""  # obstore finds the bucket in the URL
    with _lock:
        for n, (open_root, open_options, store) in enumerate(_stores):
            if open_root == root and open_options == given:
                _stores.append(_stores.pop(n))
                return store, path
        _is_used = True
        store = RemoteStore(_make_store(root, given, is_plain_http=is_plain_http), without_credentials(root))
        _stores.append((root, given, store))
        del _stores[:-_MAX_STORES]
    return store, path


def open_to_write(url: str, options: Mapping[str, Any] | None = None) -> RemoteStore:
    """Return a store of the objects below a URL, open for writing."""
    global _is_used
    check_process()
    if "?" in url or "#" in url:
        raise ValueError(f"{without_credentials(url)!r}: an image cannot be written to a URL with '?' or '#'")
    _is_used = True
    store = _make_store(url.rstrip("/"), dict(options or {}), is_plain_http=False)
    return RemoteStore(store, without_credentials(url.rstrip("/")), read_only=False, held={})


def place_of(store: Any, path: str) -> str | None:
    """Return server, bucket and path of an object, whatever URL names it; None for a store without buckets."""
    own = getattr(store, "store", None)
    config = getattr(own, "config", None) or {}
    bucket = config.get("bucket") or config.get("container_name")
    if own is None or bucket is None:
        return None
    servers = (config.get("account_name"), config.get("endpoint"), *map(os.environ.get, _ENDPOINTS))
    server = next(filter(None, servers), "").rstrip("/")
    return posixpath.normpath("/".join(filter(None, (type(own).__name__, server, bucket, own.prefix, path))))


def _make_store(root: str, options: dict[str, Any], *, is_plain_http: bool) -> Any:
    """Make obstore's store for a URL."""
    import obstore.store

    stores: Any = obstore.store
    parts, settings = urlsplit(root), dict(options)
    client = {**_CLIENT, **(settings.pop("client_options", None) or {})}
    retries = {**_RETRIES, **(settings.pop("retry_config", None) or {})}
    for name, value in (*settings.items(), *((name, os.environ.get(name, "")) for name in _ENDPOINTS)):
        if "endpoint" in name.lower() and value and "://" not in str(value):  # obstore would end in a panic
            raise ValueError(f"{name}={value!r}: pass a URL, such as https://{value}")
    named = (*settings.items(), *os.environ.items())
    endpoints = (root, *(str(value) for name, value in named if "endpoint" in name.lower()))
    if any(url.startswith("http://") for url in endpoints):
        client.setdefault("allow_http", True)
    if not is_plain_http:
        return stores.from_url(root, client_options=client, retry_config=retries, **settings)
    user, at, host = parts.netloc.rpartition("@")
    if at:  # the credentials are sent in a header, since obstore prints the URL
        token = base64.b64encode(unquote(user).encode()).decode()
        client["default_headers"] = {"authorization": f"Basic {token}", **(client.get("default_headers") or {})}
    return stores.HTTPStore.from_url(f"{parts.scheme}://{host}", client_options=client, retry_config=retries)


def is_object_store(store: Store) -> bool:
    """Return whether a store is obstore's. Subclasses are not: they may read bytes from elsewhere, or change them."""
    return type(store) in (ObjectStore, RemoteStore)


def remote_array(array: zarr.Array) -> RemoteArray | None:
    """Return the store and path of an array, as the native core needs them; None for a ``GpuMemoryStore``."""
    global _is_used
    store = array.store
    if isinstance(store, GpuMemoryStore):
        return None
    name = without_credentials(str(store))
    if not is_object_store(store):
        return RemoteArray(store, store, f"zarr's {type(store).__name__}", array.path, name)
    _is_used = True
    return RemoteArray(store, store.store, "obstore", array.path, name)  # type: ignore[attr-defined]


def without_credentials(text: str) -> str:
    """Remove user names, passwords and queries from the URLs of object stores in a text."""
    scheme = rf"\b((?:{'|'.join(SCHEMES)})://"
    return re.sub(rf"{scheme})[^/\n]*@", r"\1", re.sub(rf"{scheme}[^\s?#\"']*)[?#][^\s\"')]*", r"\1", text))


def is_broken(error: BaseException) -> bool:
    """Return whether a response broke off or has other bytes than requested: obstore repeats or refuses all others."""
    return _is_of_obstore(error) and "Error performing" not in str(error)


def _is_of_obstore(error: BaseException) -> bool:
    return type(error).__module__.startswith("obstore")


def _is_denied(error: BaseException) -> bool:
    return type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError")


def explained(error: BaseException) -> str:
    """Return the message of an error without credentials, and what to do.

    The message of an error of obstore is shortened to one line, without URLs, the server's page and debug records.
    """
    if not _is_of_obstore(error):
        return without_credentials(str(error))
    text = re.sub(
        r"(status code: \d+[^:]*).*", r"\1", str(error).split("\n\nDebug source")[0].split("<")[0], flags=re.S
    )
    text = re.sub(r"Error performing (\w+) \S+ in ([\d.]+)\S*?(\w+?)(?=[ ,])", r"\1 took \2 \3", text)
    text = " ".join(re.sub(r"\w+://\S+", "", text).split()).rstrip(":.") or type(error).__name__
    if "configuration" in text.lower():
        return f"{text}: check storage_options="
    if _is_denied(error):
        return f"{text}: check the credentials in storage_options="
    return f"{text}: read it again later" if is_broken(error) or " retries" in text else text
