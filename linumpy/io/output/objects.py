"""Outputs in object stores, which have no rename: an image appears complete or not at all.

Objects get their final names at once. The metadata documents of the image's root, by which programs find it, are kept
in memory and stored last. Until then the object ``.linumpy-unfinished`` in the image, the *journal*, names the run that
writes it. Conditional requests keep two runs apart: the journal is made only where there is none, and a run replaces
only the version that it wrote last. It does so every 10 s, and stops if that fails for a minute. A journal that is
older than two minutes belongs to a run that was killed, which another run may continue, or remove.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zarr.storage import LocalStore, StorePath

from linumpy.errors import ResumeError, SourceError
from linumpy.io.paths import DOCUMENTS, OZX, ZARR_FILES, absolute
from linumpy.io.stores.remote import RemoteStore, explained, is_remote, open_to_write, without_credentials
from linumpy.io.zarr_mode import wait_for_zarr

log = logging.getLogger(__name__)

#: Name of the journal in an image.
JOURNAL = ".linumpy-unfinished"
#: Seconds between two versions of a journal; after which a run without a new version stops; and counts as killed.
_BEAT_SECONDS, _SILENT_SECONDS, _LEASE_SECONDS = 10.0, 60.0, 120.0


@dataclass(frozen=True)
class ObjectFolder:
    """The place of an image at a URL, or of a group or array in it.

    - `store`: of the image's objects, whose keys begin in the image; open for writing.
    - `inside`: path in the image.
    """

    store: RemoteStore
    inside: str = ""

    def __str__(self) -> str:
        return f"{self.store.url}/{self.inside}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectFolder:
        return replace(self, inside=f"{self.inside}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """Last part of the path."""
        return str(self).rpartition("/")[2]


#: Where an output is written.
Target = Path | ObjectFolder


def writable_store(folder: Target) -> LocalStore | StorePath:
    """Return the store of the place of an array or group that is written."""
    if isinstance(folder, ObjectFolder):
        return StorePath(folder.store, folder.inside)
    return LocalStore(absolute(folder))


def object_folder(url: str, options: Mapping[str, Any] | None) -> ObjectFolder:
    """Return the place of an image to write; ``ValueError`` for a URL to which nothing can be written."""
    name = without_credentials(url)
    if not is_remote(url):
        scheme = url.partition("://")[0]
        raise ValueError(
            f"{name}: images are written to folders and to s3://, gs:// and az:// URLs, not to {scheme}://"
        )
    if url.rstrip("/").lower().endswith(OZX):
        raise ValueError(f"{name}: an .ozx file is written to a local folder only: write it there and upload it")
    whole = ValueError(f"{name} is a whole bucket: name an image in it, such as {name}/brain.ome.zarr")
    if "/" not in url.rstrip("/").partition("://")[2]:
        raise whole
    try:
        folder = ObjectFolder(open_to_write(url, options))
    except ImportError as error:
        raise SourceError(f'{name} cannot be written: {error}: pip install "linumpy-gpu[remote]"') from error
    except ValueError:
        raise
    except Exception as error:  # obstore's own
        why = explained(error).removesuffix(": read it again later")
        text = f"{name} is no URL of a bucket (s3://, gs://, az://), or storage_options= do not fit it: {why}"
        raise ValueError(text) from None
    if not folder.store.supports_listing:
        raise ValueError(f"{name} is no URL of a bucket (s3://, gs://, az://): HTTP servers are read only")
    if not folder.store.store.prefix:  # such as of s3://bucket/i/..
        raise whole
    return folder


def check_objects(folder: ObjectFolder, *, overwrite: bool) -> None:
    """Check that an image may be written at a URL; `overwrite` allows a Zarr group or array there."""
    names = _names(folder)
    if names & set(ZARR_FILES):
        if not overwrite:
            raise FileExistsError(f"{folder} exists: choose another URL, or replace it with overwrite=True")
    elif names and JOURNAL not in names:
        raise FileExistsError(f"{folder} has objects ({min(names)}) but is no Zarr image: choose another URL")


def _names(folder: ObjectFolder) -> set[str]:
    """Return the names directly in an image."""
    import obstore

    with folder.store.errors("", "listed"):
        listed = obstore.list_with_delimiter(folder.store.store)
    return {key.strip("/") for key in (*listed["common_prefixes"], *(entry["path"] for entry in listed["objects"]))}


def _remove(folder: ObjectFolder, *, keep: str = "") -> None:
    """Remove all objects of an image, the documents of its root first; except the one named `keep`."""
    import obstore

    with folder.store.errors("", "removed"):
        keys = [entry["path"] for batch in obstore.list(folder.store.store) for entry in batch]
        of_root = [key for key in keys if key in DOCUMENTS]
        others = [key for key in keys if key not in (*DOCUMENTS, keep)]
        for part in (of_root, *(others[n : n + 1000] for n in range(0, len(others), 1000))):
            with suppress(FileNotFoundError):
                obstore.delete(folder.store.store, part)


class Claim:
    """The journal of an image that this run writes, which it renews in a thread.

    - `document`: returns what the journal holds; called in any thread.
    """

    def __init__(self, folder: ObjectFolder, earlier: dict[str, Any]) -> None:
        self.folder = folder
        self.document: Callable[[], dict[str, Any]] = lambda: earlier
        self.run, self._count = secrets.token_hex(8), 0
        self._version: Any = None
        self._lock, self._stop, self._renewed = threading.Lock(), threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="linumpy-journal", daemon=True)

    def take(self, earlier: Any) -> None:
        """Make the journal, or replace the version `earlier` of it; ``ResumeError`` if another run was faster."""
        self._version = earlier
        self.write()
        self._thread.start()

    def write(self, **more: Any) -> None:
        """Replace the journal; ``ResumeError`` if it is not this run's."""
        store = self.folder.store
        with self._lock:
            self._count += 1
            body = json.dumps({**self.document(), **more, "run": self.run, "version": self._count}).encode()
            try:
                self._version = _put_if(store, JOURNAL, body, self._version)
            except _RefusedError:
                # An answer may have been lost, so that the same request was sent again.
                found = _journal(self.folder)
                if found is None or found.document.get("run") != self.run:
                    why = "was removed while it was written" if found is None else "is being written by another run"
                    store.refusal = ResumeError(f"{self.folder} {why}: this run stops")
                    raise store.refusal from None
                self._version = found.version
            self._renewed = time.monotonic()

    def check(self) -> None:
        """Raise ``ResumeError`` if another run has taken the image over, or may do so."""
        if self.folder.store.refusal is not None:
            raise self.folder.store.refusal

    def finish(self) -> None:
        """Store the documents of the root, so that the image appears, and remove the journal."""
        self.stop()
        self.write()
        store = self.folder.store
        for key, data in reversed(store.held.items()):
            if data is not None:
                try:
                    _put_if(store, key, data, None)
                except _RefusedError:
                    if _read(store, key)[0] != data:
                        raise FileExistsError(f"{self.folder} was made by another program meanwhile") from None
        store.held.clear()
        store.remove(JOURNAL)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _renew(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            try:
                self.write()
            except ResumeError:
                return
            except Exception as error:  # the next version may be written again
                log.warning("%s: its journal was not renewed: %s", self.folder, error)
                if time.monotonic() - self._renewed > _SILENT_SECONDS:
                    text = f"{self.folder}: the store did not answer for {_SILENT_SECONDS:.0f} s: this run stops"
                    self.folder.store.refusal = ResumeError(text)
                    return


class _RefusedError(Exception):
    """The condition of a request does not hold."""


def _put_if(store: RemoteStore, key: str, data: bytes, version: Any) -> dict[str, str]:
    """Write an object if its version is `version`, or for None, if there is none; return its new version."""
    if str(store) in _without_conditions:
        return store.put(key, data)
    try:
        return store.put(key, data, "create" if version is None else version)
    except FileNotFoundError:
        raise _RefusedError from None
    except Exception as error:
        if type(error).__name__ in ("AlreadyExistsError", "PreconditionError"):
            raise _RefusedError from None
        is_missing = type(error).__name__ in ("NotSupportedError", "NotImplementedError")
        if not is_missing and "501 Not Implemented" not in str(error):
            raise
    _without_conditions.add(str(store))
    log.warning("%s: this store has no conditional requests; make sure that only one run writes there", store)
    return store.put(key, data)


#: URLs of stores without conditional requests, of which a warning was logged.
_without_conditions: set[str] = set()


def _read(store: RemoteStore, key: str) -> tuple[bytes, Any]:
    """Return the bytes of an object, and what the store tells of it."""
    import obstore

    with store.errors(key):
        found = obstore.get(store.store, key)
        return found.bytes().to_bytes(), found.meta


@dataclass(frozen=True)
class _Journal:
    """The journal of some run: what it holds, its version in the store, and its age in seconds."""

    document: dict[str, Any]
    version: dict[str, str]
    age: float

    @property
    def is_active(self) -> bool:
        """Whether the run may still write: it has not ended by an error, and was not killed."""
        return not self.document.get("released") and self.age < _LEASE_SECONDS


def _journal(folder: ObjectFolder) -> _Journal | None:
    """Read the journal of an image; None if there is none."""
    try:
        body, meta = _read(folder.store, JOURNAL)
    except FileNotFoundError:
        return None
    try:
        document = json.loads(body)
    except ValueError:
        document = {}
    age = (datetime.now(UTC) - meta["last_modified"]).total_seconds()
    version = {name: value for name in ("e_tag", "version") if (value := meta.get(name)) is not None}
    return _Journal(document if isinstance(document, dict) else {}, version, max(age, 0.0))  # type: ignore[arg-type]


@contextmanager
def claimed(
    folder: ObjectFolder, *, overwrite: bool, continues: Callable[[dict[str, Any]], bool] = lambda _: False
) -> Iterator[tuple[Claim, dict[str, Any]]]:
    """Yield the claim of an image that this run alone writes, and the journal of a killed run that it continues.

    - `continues`: whether a killed run can be continued, from its journal. The journal that is yielded is empty if
      not, or if there is none; all objects of the image are then removed.
    """
    check_objects(folder, overwrite=overwrite)
    left = _journal(folder)
    if left is not None and left.is_active:
        raise ResumeError(
            f"{folder} is being written by another run, which was active {left.age:.0f} s ago: wait for it, or "
            f"choose another URL; a killed run can be followed after {_LEASE_SECONDS:.0f} s"
        )
    earlier = dict(left.document) if left is not None and continues(left.document) else {}
    earlier.pop("released", None)
    claim = Claim(folder, earlier)
    try:
        claim.take(None if left is None else left.version)
        try:
            check_objects(folder, overwrite=overwrite)  # the run whose journal this was may have made the image
        except BaseException:
            folder.store.remove(JOURNAL)
            raise
        if not earlier:
            if left is not None:
                log.warning("%s: removed what a stopped run had left", folder)
            _remove(folder, keep=JOURNAL)
        folder.store.held.update(dict.fromkeys(DOCUMENTS))
        yield claim, earlier
    finally:
        claim.stop()


@contextmanager
def new_objects(folder: ObjectFolder, *, overwrite: bool) -> Iterator[ObjectFolder]:
    """Yield the place of an image to fill, which appears when the block ends without an error.

    After an error nothing remains of it. An image that is overwritten is removed when the block begins.
    """
    with claimed(folder, overwrite=overwrite) as (claim, _):
        try:
            yield folder
            claim.check()
            claim.finish()
        except ResumeError:
            raise  # the objects belong to another run now
        except BaseException:
            wait_for_zarr()
            claim.stop()
            try:
                _remove(folder)
            except Exception as error:
                log.warning("%s: linum-clean removes what was written, which is left: %s", folder, error)
            raise


def clean_objects(folder: ObjectFolder) -> bool:
    """Remove what a stopped run has left at a URL; return whether there was something.

    ``ResumeError`` if a run was active in the last two minutes.
    """
    left = _journal(folder)
    if left is None:
        return False
    if left.is_active:
        raise ResumeError(f"{folder} is being written by a run that was active {left.age:.0f} s ago")
    if not _names(folder) & set(ZARR_FILES):
        _remove(folder)
    folder.store.remove(JOURNAL)
    return True
