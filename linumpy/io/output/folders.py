"""Output folders and ``.ozx`` files that appear complete or not at all: filled under a temporary name, then renamed.

A *work folder* beside the output, whose name begins with a dot, holds the new folder while it is filled, and a lock,
which shows whether the process that fills it still runs. A killed process leaves its work folder. The next process that
writes to the same path removes it, and restores the output that the killed process was replacing.

An ``.ozx`` file is a ZIP file as RFC-9 of NGFF (https://ngff.openmicroscopy.org/rfc/9/) requires. Its entries are not
compressed. The ``zarr.json`` of the root is the first entry. Then come the ``zarr.json`` of folders, breadth first,
then the chunks. The file has a comment with the NGFF version, and the end record of ZIP64. The same folder gives the
same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import struct
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from linumpy.errors import ResumeError
from linumpy.io.output.checks import check_target
from linumpy.io.output.objects import ObjectFolder, Target, clean_objects, new_objects
from linumpy.io.output.syscalls import (
    exchange,
    is_named,
    lock,
    named_errors,
    opened_folder,
    rename_new,
    sync_file_system,
    sync_path,
    unlock,
)
from linumpy.io.paths import is_archive
from linumpy.io.zarr_mode import wait_for_zarr

log = logging.getLogger(__name__)

#: Errors of a full disk, an exhausted quota and a file that is too large.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Maximum bytes of a file name on Linux's file systems.
_NAME_NBYTES = 255
#: Names in a work folder: the lock, the new folder, the old output while it is replaced, the new folder as a ZIP file.
_LOCK, _IMAGE, _OLD, _PACKED = "lock", "image", "old", "packed"
#: Suffix of work folders that several runs may fill, one after another.
_UNFINISHED = ".unfinished"


@contextmanager
def new_folder(path: Target, *, overwrite: bool, durable: bool = True) -> Iterator[Target]:
    """Yield a temporary folder, empty, which is renamed to `path` when the block ends without an error.

    - `path`: the folder to make, or the ``.ozx`` file into which the finished folder is packed.
    - `durable`: whether to flush the folder to the disk before the rename, so that a power cut leaves no half-written
      output.

    After any error or interrupt nothing remains of the new output, and an existing output is unchanged. For a URL see
    :mod:`linumpy.io.output.objects`.
    """
    if isinstance(path, ObjectFolder):
        with new_objects(path, overwrite=overwrite):
            yield path
        return
    recover(path)
    check_target(path, overwrite=overwrite)
    with full_disk(path, "nothing is left of"):
        work, descriptor = _new_work(path)
        try:
            temporary = work / _IMAGE
            temporary.mkdir()
            with opened_folder(temporary) as opened:
                yield temporary
                if not is_named(opened, temporary):
                    text = "another process removed the unfinished folder; its voxels are lost"
                    raise OSError(errno.ENOENT, text, str(path))
                if durable:
                    sync_file_system(opened)
                rename_to_target(temporary, path, overwrite=overwrite, durable=durable)
        finally:
            try:
                if (work / _IMAGE).exists():
                    wait_for_zarr()  # otherwise zarr's threads could write to the folder while it is removed
                remove_work(work)
            finally:
                unlock(descriptor)
    remove_unfinished(path)


@contextmanager
def full_disk(path: Path, left: str) -> Iterator[None]:
    """Add to the error of a full disk the words `left` before the path, which say what remains of the output."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {left}", str(path)) from error


def temporary_beside(path: Path) -> Path:
    """Return an unused path in the same folder; its name begins with a dot."""
    return path.parent / f"{_name_prefix(path)}.part-{os.getpid()}-{secrets.token_hex(4)}"


def unfinished_beside(path: Path) -> Path:
    """Return the path of the work folder that several runs may fill, one after another."""
    return path.parent / f"{_name_prefix(path)}{_UNFINISHED}"


def _name_prefix(path: Path) -> str:
    """Return the prefix of the names of work folders for an output; a long name is shortened and gets a digest."""
    name, limit = os.fsencode(path.name), _NAME_NBYTES - len("..part-4194304-00000000")
    if len(name) <= limit:
        return f".{path.name}"
    return f".{os.fsdecode(name[: limit - 9])}~{hashlib.sha256(name).hexdigest()[:8]}"


def _new_work(path: Path) -> tuple[Path, int]:
    """Make and lock a new work folder; return its path and the descriptor of the lock."""
    while True:
        work = temporary_beside(path)
        try:
            return work, lock_work(work)[0]
        except BlockingIOError:
            continue  # another process locked the folder first, to clean it up
        except OSError:  # such as a full disk
            with suppress(OSError):
                work.rmdir()
            raise


def lock_work(work: Path) -> tuple[int, bool]:
    """Lock a work folder, and make it if it does not exist; `BlockingIOError` if another run holds the lock.

    Returns the descriptor of the lock, for `unlock`, and False where the file system has no locks.
    """
    while True:
        # With exist_ok=True, mkdir would raise if the folder is removed between its two checks.
        with suppress(FileExistsError):
            work.mkdir()
        if work.is_symlink():
            raise FileExistsError(f"{work} is a symbolic link, and a work folder is needed there: remove it")
        try:
            descriptor = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # the run that held the lock has removed the folder meanwhile
        try:
            locked = lock(descriptor)
            if is_named(descriptor, work / _LOCK):
                return descriptor, locked
        except BaseException:
            os.close(descriptor)
            raise
        unlock(descriptor)  # the folder was removed: lock a new folder of the same name instead


def recover(path: Path) -> None:
    """Clean up after killed runs that wrote to a path, except for a work folder that another run may continue."""
    removed: list[str] = []
    without_lock: list[str] = []
    for work in _left_beside(path):
        with _claimed(work) as ended:
            if ended is None:
                continue
            put_back(work, path)
            if work.name.endswith(_UNFINISHED):
                continue
            if ended:
                remove_work(work)
            (removed if ended else without_lock).append(work.name)
    if removed:
        log.warning("%s: removed what stopped runs had left: %s", path, ", ".join(removed))
    if without_lock:
        log.warning("%s: without locks, a run may still need %s: remove them yourself", path, ", ".join(without_lock))


def clean(target: Target) -> bool:
    """Remove what stopped runs have left of an output, also one that could be continued; return whether there was any.

    ``ResumeError`` if a run is active.
    """
    if isinstance(target, ObjectFolder):
        return clean_objects(target)
    left = _left_beside(target)
    for work in left:
        with _claimed(work) as ended:
            if ended is None and work.exists():
                raise ResumeError(f"{target} is being written by a run that is active: its {work.name} stays")
            put_back(work, target)
            remove_work(work)
    return bool(left)


def put_back(work: Path, path: Path) -> None:
    """Restore the output that a killed run was replacing, if it is still in the work folder."""
    old = work / _OLD
    if os.path.lexists(old) and not os.path.lexists(path):
        rename_new(old, path)
        log.warning("%s: put back, because a run was stopped while it replaced it", path)


def remove_unfinished(path: Path) -> None:
    """Remove the work folder of a stopped run that could be continued, once the output is complete."""
    work = unfinished_beside(path)
    if work.is_dir():
        with _claimed(work) as ended:
            if ended:
                remove_work(work)
                log.warning("%s: removed the unfinished %s, since this one is complete", path, work.name)


def _left_beside(path: Path) -> list[Path]:
    """List the work folders and temporary files for an output."""
    pattern = re.compile(re.escape(_name_prefix(path)) + r"(\.part-\d+-[0-9a-f]{8}|\.unfinished)")
    try:
        with os.scandir(path.parent) as entries:
            return sorted(path.parent / entry.name for entry in entries if pattern.fullmatch(entry.name))
    except FileNotFoundError:
        return []


@contextmanager
def _claimed(work: Path) -> Iterator[bool | None]:
    """Lock a work folder or temporary file, to find out whether its process has ended.

    Yields True if it is locked here; False if the file system has no locks; None if a run holds it, or it was removed.
    """
    try:
        is_folder = stat.S_ISDIR(os.lstat(work).st_mode)
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | (os.O_CREAT if is_folder else 0)
        descriptor = os.open(work / _LOCK if is_folder else work, flags, 0o666)
    except OSError:  # removed, or not writable by this user
        yield None
        return
    try:
        try:
            ended: bool | None = lock(descriptor)
        except BlockingIOError:
            ended = None
        yield ended if is_named(descriptor, work / _LOCK if is_folder else work) else None
    finally:
        os.close(descriptor)


def remove_work(work: Path) -> None:
    """Remove a work folder, its lock last; or a temporary file."""
    if not work.is_dir():
        work.unlink(missing_ok=True)
        return
    if clear_work(work):
        (work / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # it fails if the next run already uses the folder
            work.rmdir()


def clear_work(work: Path) -> bool:
    """Remove all of a work folder but the lock, in several attempts: stopped threads may still write a last file."""
    for delay in (0.0, 0.05, 0.2, 1.0):
        time.sleep(delay)
        for entry in _entries_except_lock(work):
            _remove(entry)
        if not _entries_except_lock(work):
            return True
    return False


def _entries_except_lock(work: Path) -> list[Path]:
    return [entry for entry in work.iterdir() if entry.name != _LOCK]


def _remove(path: Path) -> None:
    """Remove a file, a folder, or a symbolic link but not its target."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def rename_to_target(temporary: Path, path: Path, *, overwrite: bool, durable: bool) -> None:
    """Rename the finished folder to the path of the output, atomically.

    A replaced output is in the work folder afterwards. For an ``.ozx`` path the folder is packed into a file, which is
    renamed. If the file system cannot exchange two names, the old output is first renamed to ``old`` in the work
    folder; :func:`recover` restores it from there if the process is killed before the second rename.
    """
    if is_archive(path):
        with named_errors(path):
            temporary = pack(temporary, temporary.parent / _PACKED, durable=durable)
    while True:
        check_target(path, overwrite=overwrite)
        try:
            if not os.path.lexists(path):
                rename_new(temporary, path)
            elif not exchange(temporary, path):
                path.rename(temporary.parent / _OLD)
                try:
                    rename_new(temporary, path)
                except OSError:
                    put_back(temporary.parent, path)
                    raise
            break
        except (FileExistsError, FileNotFoundError):
            # Another process made or removed the output in between: check and try again.
            if not os.path.lexists(temporary):
                raise
    if durable:
        sync_path(path.parent)


def drop_partial_files(folder: Target) -> None:
    """Remove the temporary files of chunks that zarr was writing when its process was killed."""
    if isinstance(folder, ObjectFolder):
        return
    for partial in folder.rglob("*.partial"):
        partial.unlink(missing_ok=True)


_COPY_NBYTES = 4 * 2**20
#: The end record of a ZIP file, the end record of ZIP64, and the record that locates the latter.
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_METADATA = "zarr.json"


def pack(folder: Path, file: Path, *, durable: bool) -> Path:
    """Pack the folder of an OME-Zarr image into a file, which is overwritten; return the file."""
    names = [
        os.path.relpath(os.path.join(above, name), folder) for above, _, files in os.walk(folder) for name in files
    ]
    with open(file, "w+b") as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            ome = json.loads((folder / _METADATA).read_bytes())["attributes"]["ome"]
            central = {"centralDirectory": {"jsonFirst": True}}
            archive.comment = json.dumps({"ome": {"version": ome["version"], "zipFile": central}}).encode()
            for name in sorted(names, key=_sort_key):
                _add(archive, folder / name, name)
        _use_zip64(stream)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    return file


def _sort_key(name: str) -> tuple[bool, int, list[tuple[bool, int, str]]]:
    """Return the sort key of an entry: metadata first, by depth; then chunks, by their coordinates as numbers."""
    parts = name.split("/")
    is_metadata = parts[-1] == _METADATA
    numbered = [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
    return not is_metadata, len(parts) if is_metadata else 0, numbered


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    entry = zipfile.ZipInfo(name)  # by default its date is in 1980: the same folder gives the same bytes
    entry.external_attr = 0o100644 << 16
    with open(path, "rb") as source:
        entry.file_size = os.fstat(source.fileno()).st_size  # zipfile chooses ZIP64 for the entry by this size
        with archive.open(entry, "w") as target:
            shutil.copyfileobj(source, target, _COPY_NBYTES)


def _use_zip64(stream: BinaryIO) -> None:
    """Append the end record of ZIP64, which RFC-9 requires at any size, unless zipfile has written it."""
    with zipfile.ZipFile(stream) as archive:
        begin, count, comment = archive.start_dir, len(archive.infolist()), archive.comment
    size = stream.seek(0, os.SEEK_END) - len(comment) - _END.size - begin
    stream.seek(begin + size - _LOCATOR.size)
    if stream.read(4) == b"PK\x06\x07":
        return
    stream.seek(begin + size)
    stream.write(_END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, size, begin))
    stream.write(_LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1))
    stream.write(_END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, len(comment)) + comment)
