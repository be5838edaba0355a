"""A folder that is filled over several runs, part by part, and takes its place when it is complete.

In: where it shall stand, and what was asked for (:class:`Request`). Out: a :class:`Resumable` that knows which parts
are there. All lies in ``.NAME.unfinished`` beside the place: the folder itself, a journal with the request and one line
for each box of parts that is complete, and a lock. Parts count only when their line is whole, and it is written after
them; so a run that is killed leaves nothing that looks finished, and the next one goes on from there. (A power cut is
another matter: the disk may then hold the line and not the parts.) Errors: :class:`~linumpy.errors.ResumeError` where
another run, or another request, has the place; ``FileExistsError`` where something finished has it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.errors import ResumeError
from linumpy.io.place import check_place, take_place

log = logging.getLogger(__name__)

#: Of file systems that were mounted without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_JOURNAL, _LOCK, _FOLDER = "journal.jsonl", "lock", "image"


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
        Everything that the bytes of the parts depend on, by name.
    """

    kind: str
    grid: tuple[int, ...]
    settings: tuple[tuple[str, str], ...]

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Name what differs in a request that a journal holds."""
        mine, theirs = self.as_json(), {str(key): value for key, value in other.items()}
        return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))

    def as_json(self) -> dict[str, Any]:
        """Spell it for the journal."""
        return {"kind": self.kind, "grid": list(self.grid), **dict(self.settings)}


class Resumable:
    """A folder being filled; made by :func:`resumable_folder`.

    Attributes
    ----------
    folder : Path
        Where the parts go.
    complete : numpy.ndarray of bool
        Which parts are there.
    """

    def __init__(self, folder: Path, complete: np.ndarray, journal: int) -> None:
        self.folder = folder
        self.complete = complete
        self._journal = journal

    def add(self, start: Sequence[int], stop: Sequence[int]) -> None:
        """Note that a box of parts is there. They must have been written to the last byte."""
        os.write(self._journal, (" ".join(map(str, (*start, *stop))) + "\n").encode())
        self.complete[tuple(map(slice, start, stop))] = True

    def holds(self, start: Sequence[int], stop: Sequence[int]) -> bool:
        """Say whether all parts of a box are there."""
        return bool(self.complete[tuple(map(slice, start, stop))].all())


@contextmanager
def resumable_folder(
    path: Path, request: Request, create: Callable[[Path], object], *, overwrite: bool = False
) -> Iterator[Resumable]:
    """Fill a folder; it takes its place if the block ends well with all parts complete, and waits there otherwise.

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

    Raises
    ------
    FileExistsError
        The place is taken.
    ResumeError
        Another run is filling it, or one with another request has begun to.
    """
    check_place(path, overwrite=overwrite)
    work = path.parent / f".{path.name}.unfinished"
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work, path):
        check_place(path, overwrite=overwrite)  # another run may have ended just now
        folder, journal = work / _FOLDER, work / _JOURNAL
        complete = _read_journal(journal, request, work) if folder.exists() else None
        if complete is None:
            _begin(folder, journal, request, create)
        descriptor = os.open(journal, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        _drop_torn_line(journal, descriptor)
        try:
            state = Resumable(folder, np.zeros(request.grid, bool) if complete is None else complete, descriptor)
            yield state
        finally:
            os.close(descriptor)
        if state.complete.all():
            check_place(path, overwrite=overwrite)  # someone else may have come first
            take_place(folder, path)
            shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(work: Path, path: Path) -> Iterator[None]:
    """Keep other runs away. The lock goes with the process that holds it, however that ends."""
    descriptor = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            os.close(descriptor)
            raise ResumeError(f"{path} is being written by another run: wait for it, or choose another place") from None
        log.warning("%s: this file system has no locks; take care that only one run writes there", path)
    try:
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, journal: Path, request: Request, create: Callable[[Path], object]) -> None:
    """Make the empty folder and its journal. The folder is renamed last: without it the journal does not count."""
    empty = folder.with_name(f"{_FOLDER}.empty")
    for old in (folder, empty):
        shutil.rmtree(old, ignore_errors=True)
    create(empty)
    journal.write_text(json.dumps(request.as_json()) + "\n")
    empty.rename(folder)


def _drop_torn_line(journal: Path, descriptor: int) -> None:
    """Take off the end of a line that a killed run did not finish: the next one must not be joined to it."""
    os.ftruncate(descriptor, journal.read_bytes().rfind(b"\n") + 1)


def _read_journal(journal: Path, request: Request, work: Path) -> np.ndarray | None:
    """Read which parts are complete; None where the journal says nothing of use.

    The last line has no end where a killed run did not finish it, and does not count.
    """
    try:
        head, *lines = journal.read_bytes().split(b"\n")[:-1]
        asked = json.loads(head)
    except (FileNotFoundError, ValueError):
        return None
    different = request.differences(asked)
    if different:
        raise ResumeError(
            f"{work} holds the beginning of another request, which differs in {', '.join(different)}: "
            f"finish that one, choose another place, or delete that folder"
        )
    complete = np.zeros(request.grid, bool)
    for line in lines:
        corners = [int(word) for word in line.split()]
        complete[tuple(map(slice, corners[: complete.ndim], corners[complete.ndim :]))] = True
    return complete
