"""Fill a folder part by part, in one or several runs; the folder appears at its path when it is complete.

In: the path of the folder, and a :class:`Request`. Out: a :class:`Resumable` with the complete parts. A part is a chunk
or shard of one of the arrays. Until the folder is complete, everything is in ``.NAME.unfinished`` beside the path: the
folder, whose name identifies the request; a journal (``linumpy.resample.journal``) with the request and a line for each
box of complete parts; and a lock. A line is written after its parts, so a killed run leaves nothing that looks
finished, and the next run continues from there. Errors: :class:`~linumpy.errors.ResumeError` if another run is writing
the folder, or if the folder belongs to another request; ``FileExistsError`` for a path that exists.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from linumpy.io.output.syscalls import named_errors, opened_folder, sync_file_system, unlock
from linumpy.resample.journal import Journal, begin_journal, has_boxes, read_boxes, read_head

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
    - `origin`: names and digests of the source data. Parts that were made from other data cannot be completed, and are
      removed.
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
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]


class Resumable:
    """A folder that is being filled; made by :func:`resumable_folder`.

    - `complete` (bool): mask of the complete parts of the first array.
    - `grids`: mask of the complete parts of each array; the first is `complete`.
    """

    def __init__(self, folder: Path, grids: list[np.ndarray], journal: Journal, descriptor: int | None) -> None:
        self.folder = folder
        self.complete, self.grids = grids[0], grids
        self._journal = journal
        self._descriptor = descriptor
        self._synced = time.monotonic()

    def add(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        """Record that a box of parts of array `number` is complete; all bytes of the parts must have been written."""
        self._journal.add_box(start, stop, number)
        self.grids[number][tuple(map(slice, start, stop))] = True
        if self._descriptor is not None and time.monotonic() - self._synced > _SYNC_SECONDS:
            sync_file_system(self._descriptor)
            self._journal.add_sync()
            self._synced = time.monotonic()

    def holds(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> bool:
        """Return whether all parts of a box of array `number` are complete."""
        return bool(self.grids[number][tuple(map(slice, start, stop))].all())


@contextmanager
def resumable_folder(
    path: Path,
    request: Request,
    create: Callable[[Path], object],
    *,
    overwrite: bool = False,
    durable: bool = True,
) -> Iterator[Resumable]:
    """Yield a folder to fill, and rename it to its path if the block ends without error and all parts are complete.

    - `path`: path of the finished folder.
    - `request`: the parameters of the run.
    - `create`: takes a path, and makes the folder there, without parts.
    - `overwrite`: whether to replace an existing Zarr folder.
    - `durable`: whether to flush the folder to the disk before it is renamed, and parts every 30 s. Otherwise the parts
      of a stopped run count only on this machine, until its next boot.

    Raises `FileExistsError`, `FileNotFoundError`: the path exists; its parent folder does not.
    Raises `OSError`: the disk is full. Complete parts are kept, and the next run continues from there.
    """
    recover(path)
    check_target(path, overwrite=overwrite)
    work = unfinished_beside(path)
    with full_disk(path, f"complete parts are in {work}, for the next run of"), _locked(work, path):
        check_target(path, overwrite=overwrite)  # a run that held the lock may have made the path
        folder = _folder(path, work, request, create)
        with opened_folder(folder) as descriptor:
            with closing(Journal(work / _JOURNAL)) as journal:
                complete = read_boxes(work / _JOURNAL, (request.grid, *request.beside))
                state = Resumable(folder, complete, journal, descriptor if durable else None)
                yield state
            if all(grid.all() for grid in state.grids):
                if durable:
                    sync_file_system(descriptor)
                rename_to_target(folder, path, overwrite=overwrite, durable=durable)
                remove_work(work)


@contextmanager
def _locked(work: Path, path: Path) -> Iterator[None]:
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


def _folder(path: Path, work: Path, request: Request, create: Callable[[Path], object]) -> Path:
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
    begin_journal(work / _JOURNAL, {"request": request.as_json(), "inode": empty.stat().st_ino})
    empty.rename(folder)
    return folder


def _can_continue(path: Path, work: Path, request: Request) -> bool:
    """Return whether an earlier run with this request can be continued.

    Raises an error if a run with another request has made parts from the same source data.
    """
    head = read_head(work / _JOURNAL)
    if head is None or not isinstance(head.get("request"), dict):
        return False
    # A folder with another inode is a replaced target, which was exchanged with the finished folder and has no parts.
    if head.get("inode") not in [folder.stat().st_ino for folder in work.glob(f"{_FOLDER}-????????")]:
        return False
    different = request.differences(head["request"])
    changed_data = [name for name in different if name in dict(request.origin)]
    if changed_data:
        text = ", ".join(changed_data)
        log.warning("%s: removed what a stopped run had left: it was made from another %s", path, text)
        return False
    if different:
        if not has_boxes(work / _JOURNAL):
            return False
        raise ResumeError(
            f"{work} holds the beginning of another request, which differs in {', '.join(different)}: "
            f"finish that one, choose another path, or delete that folder"
        )
    return True
