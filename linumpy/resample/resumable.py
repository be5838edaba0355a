"""Fill a folder part by part, in one or several runs; the folder appears at its path when it is complete.

A *part* is a chunk or shard of one of the arrays, with an index in the array's grid. Until the folder is complete,
everything is in ``.NAME.unfinished`` beside the path: the folder, whose name identifies the request; a journal; and a
lock. A line of the journal is written after its parts, so a killed run leaves nothing that looks finished, and the next
run continues from there.

The first line of the journal holds the request. The others are ``boot`` with the kernel's boot id, at the beginning of
each run; ``box`` with the number of the grid and two corners in it; and ``sync``, when all parts of the lines before
are on the disk. Parts without a later ``sync`` count only in the same boot: what a killed process wrote is in the
kernel's memory, which a power cut empties. Each line begins with a checksum over its own text and the first line. A
line that is incomplete, joined to another line, made of zeros or outside the grid is ignored, and its parts are made
again.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.errors import ResumeError
from linumpy.io.output.checks import check_target
from linumpy.io.output.folders import (
    clear_work,
    full_disk,
    lock_work,
    recover,
    remove_work,
    rename_to_target,
    unfinished_beside,
)
from linumpy.io.output.objects import Claim, ObjectFolder, Target, claimed
from linumpy.io.output.syscalls import BINARY, named_errors, opened_folder, sync_file_system, unlock, write_fully
from linumpy.resample.identity import digest_of


def boot_id() -> str:
    """Return the kernel's id of the current boot; empty if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _line(seed: int, text: str) -> bytes:
    """Return a line of a journal; `seed` is the checksum of the first line, and 0 for that line itself."""
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data, seed), data)


def _text(line: bytes, seed: int) -> str:
    """Return the text of a line; empty if its checksum is wrong."""
    if b"%08x " % zlib.crc32(line[9:], seed) != line[:9]:
        return ""
    return line[9:].decode(errors="replace")


def _read_journal(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the first line of a journal, empty if it is missing or broken, and the texts of the others."""
    if not path.exists():
        return {}, []
    head, *lines = path.read_bytes().split(b"\n")
    try:
        document = json.loads(_text(head, 0))
    except ValueError:
        document = None
    # The last line has no line end and is incomplete.
    return document if isinstance(document, dict) else {}, [_text(line, zlib.crc32(head)) for line in lines[:-1]]


def _complete_parts(lines: Sequence[str], grids: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Read from the lines of a journal which parts of each grid are complete: a mask for each grid."""
    boot, current_boot = "", boot_id()
    complete, unsynced = ([np.zeros(grid, bool) for grid in grids] for _ in range(2))
    for line in lines:
        word, _, text = line.partition(" ")
        if word == "boot":
            boot = text
        elif word == "sync":
            for synced, written in zip(complete, unsynced, strict=True):
                synced |= written
        elif word == "box" and (found := _box(text, grids)) is not None:
            number, box = found
            unsynced[number][box] = True
            if boot and boot == current_boot:
                complete[number][box] = True
    return complete


def _box(text: str, grids: Sequence[tuple[int, ...]]) -> tuple[int, tuple[slice, ...]] | None:
    """Parse the number of a grid and corners in it; None if they are not numbers within the grid."""
    number, *corners = [int(word) for word in text.split() if re.fullmatch(r"\d{1,18}", word)] or [len(grids)]
    rank = len(grids[number]) if number < len(grids) else 0
    if not rank or len(corners) != 2 * rank:
        return None
    start, stop = corners[:rank], corners[rank:]
    if not all(0 <= a < b <= n for a, b, n in zip(start, stop, grids[number], strict=True)):
        return None
    return number, tuple(map(slice, start, stop))


log = logging.getLogger(__name__)

_JOURNAL, _FOLDER = "journal", "image"
#: Seconds between flushes to the disk: a power cut loses the work of at most this time.
_SYNC_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """The parameters of a run. A run continues another run only if both have the same request.

    - `kind`: name of the function that makes the parts, such as ``"resample_zarr"``.
    - `grid`: number of parts along each axis of the first array.
    - `settings`: names and values of the caller's parameters that the bytes of the parts depend on.
    - `origin`: names and digests of the source data. Parts of other data cannot be completed, and are removed.
    - `beside`: the same number of parts for each further array in the folder, such as labels.
    """

    kind: str
    grid: tuple[int, ...]
    settings: tuple[tuple[str, str], ...]
    origin: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[int, ...], ...] = ()

    def differences(self, other: Mapping[str, object]) -> list[str]:
        """Return the names of the values that differ from the request of a journal (`other`)."""
        own, stored = self.as_json(), {str(key): value for key, value in other.items()}
        return sorted(key for key in own.keys() | stored.keys() if own.get(key) != stored.get(key))

    def as_json(self) -> dict[str, object]:
        """Return the request as the journal stores it."""
        beside = {"grids beside it": [list(grid) for grid in self.beside]} if self.beside else {}
        return {"kind": self.kind, "grid": list(self.grid), **beside, **dict(self.settings), **dict(self.origin)}

    @property
    def digest(self) -> str:
        """Digits for the name of the folder, so that a late worker of another request does not find the folder."""
        return digest_of(self.as_json())[:8]


class Resumable:
    """A folder, or an image in an object store, that is being filled; made by :func:`resumable_folder`.

    - `grids`: mask of the complete parts of each array.
    """

    folder: Target
    grids: list[np.ndarray]

    def add(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        """Record that a box of parts of array `number` is complete; all bytes of the parts must have been written."""
        self.grids[number][tuple(map(slice, start, stop))] = True

    def holds(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> bool:
        """Return whether all parts of a box of array `number` are complete."""
        return bool(self.grids[number][tuple(map(slice, start, stop))].all())


class _ResumableObjects(Resumable):
    """An image in an object store, whose journal has the request, the masks, and the documents of its root."""

    def __init__(self, claim: Claim, request: Request, earlier: dict[str, Any]) -> None:
        self.folder, self._claim, self._request = claim.folder, claim, request
        texts = earlier.get("parts") or [""] * (1 + len(request.beside))
        self.grids = [_mask(text, grid) for text, grid in zip(texts, (request.grid, *request.beside), strict=True)]
        for name, text in earlier.get("root", {}).items():
            claim.folder.store.held[name] = text.encode()
        claim.document = self._document

    def add(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        self._claim.check()
        super().add(start, stop, number)

    def _document(self) -> dict[str, Any]:
        held = dict(self._claim.folder.store.held)
        root = {name: data.decode() for name, data in held.items() if data is not None}
        parts = [base64.b64encode(zlib.compress(np.packbits(grid).tobytes())).decode() for grid in self.grids]
        return {"request": self._request.as_json(), "root": root, "parts": parts}


def _mask(text: str, grid: tuple[int, ...]) -> np.ndarray:
    """Read the mask of the complete parts of a grid; an empty text has none."""
    if not text:
        return np.zeros(grid, bool)
    return np.unpackbits(np.frombuffer(_bits(text), np.uint8), count=math.prod(grid)).astype(bool).reshape(grid)


def _bits(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


@contextmanager
def _resumable_objects(
    folder: ObjectFolder, request: Request, create: Callable[[Target], object], *, overwrite: bool
) -> Iterator[Resumable]:
    def continues(earlier: dict[str, Any]) -> bool:
        if not isinstance(earlier.get("request"), dict) or "parts" not in earlier:
            return False
        try:
            has_parts = any(any(_bits(text)) for text in earlier["parts"])
        except (TypeError, ValueError, zlib.error):  # of another program, or of another version
            return False
        return _is_same(request, earlier["request"], folder, has_parts, str(folder))

    with claimed(folder, overwrite=overwrite, continues=continues) as (claim, earlier):
        if not earlier:
            create(folder)
        state = _ResumableObjects(claim, request, earlier)
        try:
            yield state
            claim.check()
        except ResumeError:
            raise
        except BaseException:
            with suppress(OSError):  # such as the one that ended the run
                claim.write(released=True)
            log.warning("%s is incomplete: the same call continues it, and linum-clean removes it", folder)
            raise
        if all(grid.all() for grid in state.grids):
            claim.finish()


class _ResumableFolder(Resumable):
    """A local folder, whose journal has a line for each box of complete parts."""

    def __init__(self, folder: Path, journal: Path, request: Request, descriptor: int | None) -> None:
        self.folder = folder
        self._descriptor, self._synced = descriptor, time.monotonic()
        self._path, self._journal = journal, os.open(journal, os.O_RDWR | os.O_APPEND | BINARY)
        try:
            lines = journal.read_bytes()
            # Remove the incomplete last line of a killed run, so that the next line is not joined to it.
            os.ftruncate(self._journal, lines.rfind(b"\n") + 1)
            self._seed = zlib.crc32(lines.split(b"\n", 1)[0])
            self._append(f"boot {boot_id()}")
            self.grids = _complete_parts(_read_journal(journal)[1], (request.grid, *request.beside))
        except BaseException:
            self.close()
            raise

    def add(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        self._append(" ".join(map(str, ("box", number, *start, *stop))))
        super().add(start, stop, number)
        if self._descriptor is not None and time.monotonic() - self._synced > _SYNC_SECONDS:
            sync_file_system(self._descriptor)
            self._append("sync")
            getattr(os, "fdatasync", os.fsync)(self._journal)  # macOS has fsync only
            self._synced = time.monotonic()

    def close(self) -> None:
        """Close the journal."""
        with named_errors(self._path):
            os.close(self._journal)

    def _append(self, text: str) -> None:
        write_fully(self._journal, _line(self._seed, text))


@contextmanager
def resumable_folder(
    path: Target,
    request: Request,
    create: Callable[[Target], object],
    *,
    overwrite: bool = False,
    durable: bool = True,
) -> Iterator[Resumable]:
    """Yield a folder, or an image in an object store, to fill; it appears if all parts are complete without an error.

    - `create`: takes a path, and makes the folder there, without parts.
    - `durable`: whether to flush the folder to the disk before it is renamed, and parts every 30 s. Otherwise the parts
      of a stopped run count only on this machine, until its next boot.
    """
    if isinstance(path, ObjectFolder):
        with _resumable_objects(path, request, create, overwrite=overwrite) as state:
            yield state
        return
    recover(path)
    check_target(path, overwrite=overwrite)
    work = unfinished_beside(path)
    with full_disk(path, f"complete parts are in {work}, for the next run of"), locked(work, path):
        check_target(path, overwrite=overwrite)  # a run that held the lock may have made the path
        folder = _folder(path, work, request, create)
        with opened_folder(folder) as descriptor:
            with closing(_ResumableFolder(folder, work / _JOURNAL, request, descriptor if durable else None)) as state:
                yield state
            if all(grid.all() for grid in state.grids):
                if durable:
                    sync_file_system(descriptor)
                rename_to_target(folder, path, overwrite=overwrite, durable=durable)
                remove_work(work)


@contextmanager
def locked(work: Path, path: Path) -> Iterator[None]:
    """Lock out other runs. The lock ends with this process, even if it is killed."""
    try:
        descriptor, locked = lock_work(work)
    except BlockingIOError:
        raise ResumeError(f"{path} is being written by another run: wait for it, or choose another path") from None
    if not locked:
        log.warning("%s: this file system has no locks; make sure that only one run writes there", path)
    try:
        yield
    finally:
        unlock(descriptor)


def _folder(path: Path, work: Path, request: Request, create: Callable[[Target], object]) -> Path:
    """Return the folder that an earlier run with this request has left, or make an empty folder and its journal.

    The folder gets its name last: until then the journal is invalid.
    """
    folder = work / f"{_FOLDER}-{request.digest}"
    if _can_continue(path, work, request):
        return folder
    clear_work(work)
    empty = folder.with_name(f"{folder.name}.empty")
    try:
        with named_errors(path):
            create(empty)
    except BaseException:
        remove_work(work)  # no part is complete, so there is nothing to continue
        raise
    document = {"request": request.as_json(), "inode": empty.stat().st_ino}
    with named_errors(path):
        (work / _JOURNAL).write_bytes(_line(0, json.dumps(document)))
    empty.rename(folder)
    return folder


def _can_continue(path: Path, work: Path, request: Request) -> bool:
    """Return whether an earlier run with this request can be continued.

    `ResumeError` if a run with another request has made parts from the same source data.
    """
    head, lines = _read_journal(work / _JOURNAL)
    if not isinstance(head.get("request"), dict):
        return False
    # A folder with another inode is a replaced target, which was exchanged with the finished folder and has no parts.
    if head.get("inode") not in [folder.stat().st_ino for folder in work.glob(f"{_FOLDER}-????????")]:
        return False
    return _is_same(request, head["request"], path, any(line.startswith("box") for line in lines), str(work))


def _is_same(request: Request, earlier: Mapping[str, object], target: Target, has_parts: bool, work: str) -> bool:
    """Return whether an earlier request is this one; `ResumeError` if it is another and has made parts of the data."""
    different = request.differences(earlier)
    changed_data = [name for name in different if name in dict(request.origin)]
    if changed_data:
        text = ", ".join(changed_data)
        log.warning("%s: removed what a stopped run had left: it was made from another %s", target, text)
        return False
    if different and has_parts:
        raise ResumeError(
            f"{work} holds the beginning of another request, which differs in {', '.join(different)}: "
            "finish that one, choose another path, or remove it by linum-clean"
        )
    return not different
