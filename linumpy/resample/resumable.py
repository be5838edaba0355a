"""A folder that is filled over several runs, part by part, and appears at its path when it is complete.

In: where it shall stand, and what was asked for (:class:`Request`). Out: a :class:`Resumable` that knows which parts
are there. All lies in ``.NAME.unfinished`` beside the path: the folder itself, whose name identifies the request; a
journal (``linumpy.resample.journal``) with the request and one line for each box of parts that is complete; and a lock.
The line is written after the parts, so a run that is killed leaves nothing that looks finished, and the next one goes
on from there. Errors: :class:`~linumpy.errors.ResumeError` where another run, or another request, has the path;
``FileExistsError`` where something finished has it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.errors import ResumeError
from linumpy.io.place import (
    check_place,
    clear_work,
    full_disk,
    hold,
    remove_work,
    settle,
    take_place,
    unfinished_beside,
)
from linumpy.io.syscalls import sync_file_system, unlock
from linumpy.resample.journal import Journal, begin_journal, read_boxes, read_head

log = logging.getLogger(__name__)

_JOURNAL, _FOLDER = "journal", "image"
#: What was written is brought to the disk at least so often: after a power cut, so much is made again.
_SYNC_SECONDS = 30.0


@dataclass(frozen=True)
class Request:
    """What was asked for: a run may only go on with another's parts if both asked for the same.

    Attributes
    ----------
    kind : str
        What makes the parts, such as ``"resample_zarr"``.
    grid : tuple of int
        How many parts there are along each axis.
    settings : tuple of (str, str)
        What the caller asked for that the bytes of the parts depend on, by name.
    origin : tuple of (str, str)
        What else they depend on, and cannot be had again once it has changed: the data that they are made from. Parts
        of another origin are of no use, and are removed.
    beside : tuple of tuple of int
        Grids of parts of what is filled beside the first, such as labels.
    """

    kind: str
    grid: tuple[int, ...]
    settings: tuple[tuple[str, str], ...]
    origin: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[int, ...], ...] = ()

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Name what differs in a request that a journal holds."""
        mine, theirs = self.as_json(), {str(key): value for key, value in other.items()}
        return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))

    def as_json(self) -> dict[str, Any]:
        """Spell it for the journal."""
        beside = {"grids beside it": [list(one) for one in self.beside]} if self.beside else {}
        return {"kind": self.kind, "grid": list(self.grid), **beside, **dict(self.settings), **dict(self.origin)}

    @property
    def digest(self) -> str:
        """Identify it in the name of a folder, which a late worker of another request does not find then."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:8]


class Resumable:
    """A folder being filled; made by :func:`resumable_folder`.

    Attributes
    ----------
    folder : Path
        Where the parts go.
    complete : numpy.ndarray of bool
        Which parts are there.
    grids : list of numpy.ndarray of bool
        The same of all grids: the first one, and those beside it.
    """

    def __init__(self, folder: Path, grids: list[np.ndarray], journal: Journal, descriptor: int | None) -> None:
        self.folder = folder
        self.complete, self.grids = grids[0], grids
        self._journal = journal
        self._descriptor = descriptor
        self._synced = time.monotonic()

    def add(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        """Note that a box of parts of a grid is there. They must have been written to the last byte."""
        self._journal.add_box(start, stop, number)
        self.grids[number][tuple(map(slice, start, stop))] = True
        if self._descriptor is not None and time.monotonic() - self._synced > _SYNC_SECONDS:
            sync_file_system(self._descriptor)
            self._journal.add_sync()
            self._synced = time.monotonic()

    def holds(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> bool:
        """Say whether all parts of a box of a grid are there."""
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
    """Fill a folder; it is renamed to its path if the block ends well with all parts complete, and is kept otherwise.

    Parameters
    ----------
    path : Path
        Where it shall stand.
    request : Request
        What is asked for.
    create : callable
        Makes the empty folder at the path that it is given.
    overwrite : bool
        Whether to replace a finished Zarr folder that is there.
    durable : bool
        Whether all of it is on the disk before it is renamed, and parts every 30 s. Without it, parts that a run
        has left count only until the machine is started again, and on no other machine.

    Raises
    ------
    FileExistsError, FileNotFoundError
        The path is taken; the folder that it is in is not there.
    ResumeError
        Another run is filling it, or one with another request has begun to.
    OSError
        The disk is full. What is complete stays, and the next run goes on from there.
    """
    settle(path)
    check_place(path, overwrite=overwrite)
    work = unfinished_beside(path)
    with full_disk(path, f"what is complete waits in {work} for the next run of"), _locked(work, path):
        check_place(path, overwrite=overwrite)  # another run may have ended just now
        folder = _folder(path, work, request, create)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with closing(Journal(work / _JOURNAL)) as journal:
                complete = read_boxes(work / _JOURNAL, (request.grid, *request.beside))
                state = Resumable(folder, complete, journal, descriptor if durable else None)
                yield state
            if all(grid.all() for grid in state.grids):
                if durable:
                    sync_file_system(descriptor)
                take_place(folder, path, overwrite=overwrite, durable=durable)
                remove_work(work)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(work: Path, path: Path) -> Iterator[None]:
    """Keep other runs away. The lock goes with the process that holds it, however that ends."""
    try:
        descriptor, locked = hold(work)
    except BlockingIOError:
        raise ResumeError(f"{path} is being written by another run: wait for it, or choose another place") from None
    if not locked:
        log.warning("%s: this file system has no locks; take care that only one run writes there", path)
    try:
        yield
    finally:
        unlock(descriptor)


def _folder(path: Path, work: Path, request: Request, create: Callable[[Path], object]) -> Path:
    """Find the folder of a request with parts that count, or make it, empty, with its journal.

    The folder is renamed last: without it the journal does not count.
    """
    folder = work / f"{_FOLDER}-{request.digest}"
    if _goes_on(path, work, request):
        return folder
    clear_work(work)
    empty = folder.with_name(f"{folder.name}.empty")
    try:
        create(empty)
    except BaseException:
        remove_work(work)  # no part is there yet, so nothing would be gone on with
        raise
    begin_journal(work / _JOURNAL, {"request": request.as_json(), "inode": empty.stat().st_ino})
    empty.rename(folder)
    return folder


def _goes_on(path: Path, work: Path, request: Request) -> bool:
    """Say whether parts of this request are there; refuse to remove those of another one that can be finished."""
    head = read_head(work / _JOURNAL)
    if head is None or not isinstance(head.get("request"), dict):
        return False
    # A finished folder may have been exchanged with the one that had the path before, which holds none of the parts.
    if head.get("inode") not in [one.stat().st_ino for one in work.glob(f"{_FOLDER}-????????")]:
        return False
    different = request.differences(head["request"])
    lost = [name for name in different if name in dict(request.origin)]
    if lost:
        log.warning("%s: removed what a stopped run had left: it was made from another %s", path, ", ".join(lost))
        return False
    if different:
        raise ResumeError(
            f"{work} holds the beginning of another request, which differs in {', '.join(different)}: "
            f"finish that one, choose another place, or delete that folder"
        )
    return True
