"""Output folders that appear complete or not at all: filled under a temporary name, then renamed.

In: the path of a folder to make. Out: an empty folder in a work folder beside it, which is renamed to that path when
its block ends well and is removed when it does not. A process that is killed leaves its work folder, whose name begins
with a dot; the next one that writes to the same path removes it, and restores what the killed one was replacing. The
lock in a work folder says whether its process still runs. Errors: ``FileExistsError`` for a path that is taken,
``OSError`` for a disk that is full.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linumpy.io.syscalls import exchange, is_named, lock, rename_new, sync_file_system, sync_path, unlock
from linumpy.io.zarr_mode import wait_for_zarr

log = logging.getLogger(__name__)

_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
#: Names that people give to files; a folder of such a name would be taken for one, by other programs too.
_FILE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".pdf", ".svg"),
    *(".nii", ".gz", ".zip", ".h5", ".npy", ".json", ".csv", ".txt"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Bytes that a name may have on Linux's file systems.
_NAME_BYTES = 255
#: In a work folder: the lock, what is filled, and what had the path until now.
_LOCK, _IMAGE, _OLD = "lock", "image", "old"
_UNFINISHED = ".unfinished"


def absolute(path: str | Path) -> Path:
    """Make a path absolute without changing what it names.

    ``..`` stays: behind a symbolic link it is the folder above the one that the link leads to. Only where it is the
    last part, which no folder can be renamed to, or there is no last part, is the folder's real path taken.
    """
    path = Path(path).absolute()
    return path if path.name not in ("", "..") else Path(os.path.realpath(path))


@contextmanager
def new_folder(path: Path, *, overwrite: bool, durable: bool = True) -> Iterator[Path]:
    """Give a temporary folder, which is renamed to `path` when the block ends well.

    Parameters
    ----------
    path : Path
        The folder to make. The temporary one is there, and empty.
    overwrite : bool
        Whether to replace a Zarr folder that is there.
    durable : bool
        Whether all of it is on the disk before it is renamed, so that a power cut leaves nothing half-written.

    Raises
    ------
    FileExistsError, FileNotFoundError
        As :func:`check_place`.
    OSError
        The disk is full, or the temporary folder was removed. Nothing is left then, nor after any other error or
        interrupt.
    """
    settle(path)
    check_place(path, overwrite=overwrite)
    with full_disk(path, "nothing is left of"):
        work, held = _new_work(path)
        try:
            temporary = work / _IMAGE
            temporary.mkdir()
            yield from _filled(temporary, path, overwrite, durable)
        finally:
            try:
                if (work / _IMAGE).exists():
                    wait_for_zarr()  # or it would make the folder once more
                remove_work(work)
            finally:
                unlock(held)
    remove_unfinished(path)


def _filled(temporary: Path, path: Path, overwrite: bool, durable: bool) -> Iterator[Path]:
    same = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield temporary
        if not is_named(same, temporary):
            raise OSError(errno.ENOENT, "somebody removed the unfinished folder; what was written is lost", str(path))
        if durable:
            sync_file_system(same)
        take_place(temporary, path, overwrite=overwrite, durable=durable)
    finally:
        os.close(same)


@contextmanager
def full_disk(path: Path, left: str) -> Iterator[None]:
    """Say of a disk that is full what is left of the output."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {left}", str(path)) from error


def temporary_beside(path: Path) -> Path:
    """Return an unused path beside another one; its name begins with a dot."""
    return path.parent / f"{_stem(path)}.part-{os.getpid()}-{secrets.token_hex(4)}"


def unfinished_beside(path: Path) -> Path:
    """Name the work folder that several runs may fill, one after another."""
    return path.parent / f"{_stem(path)}{_UNFINISHED}"


def _stem(path: Path) -> str:
    """Return how names of work folders beside a path begin; of a long name the beginning and a digest."""
    name, limit = os.fsencode(path.name), _NAME_BYTES - len("..part-4194304-00000000")
    if len(name) <= limit:
        return f".{path.name}"
    return f".{os.fsdecode(name[: limit - 9])}~{hashlib.sha256(name).hexdigest()[:8]}"


def _new_work(path: Path) -> tuple[Path, int]:
    """Make a new work folder, and lock it."""
    while True:
        work = temporary_beside(path)
        try:
            return work, hold(work)[0]
        except BlockingIOError:
            continue  # another process took it for an abandoned one before it was locked
        except OSError:  # such as a full disk
            with suppress(OSError):
                work.rmdir()
            raise


def hold(work: Path) -> tuple[int, bool]:
    """Make a work folder, if it is not there, and lock it.

    Returns
    -------
    descriptor : int
        Of the lock, for :func:`linumpy.io.syscalls.unlock`.
    locked : bool
        False where the file system has no locks.

    Raises
    ------
    BlockingIOError
        Another run has it.
    """
    while True:
        # Not exist_ok=True, which raises where the folder is removed between its two looks.
        with suppress(FileExistsError):
            work.mkdir()
        if work.is_symlink():
            raise FileExistsError(f"{work} is a symbolic link, and a work folder is needed there: remove it")
        try:
            descriptor = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            continue  # removed just now, by the run that had it
        try:
            locked = lock(descriptor)
            if is_named(descriptor, work / _LOCK):
                return descriptor, locked
        except BaseException:
            os.close(descriptor)
            raise
        unlock(descriptor)  # a folder that was removed must not keep the lock of a new one of its name


def settle(path: Path) -> None:
    """Clean up what killed runs have left beside a path.

    What was being replaced is put back. Work folders and files of ended processes are removed, except for one that a
    run may continue.
    """
    removed: list[str] = []
    unknown: list[str] = []
    for work in _left_beside(path):
        with _claimed(work) as ended:
            if ended is None:
                continue
            put_back(work, path)
            if work.name.endswith(_UNFINISHED):
                continue
            if ended:
                remove_work(work)
            (removed if ended else unknown).append(work.name)
    if removed:
        log.warning("%s: removed what runs that were stopped had left: %s", path, ", ".join(removed))
    if unknown:
        log.warning("%s: no locks tell whether a run still needs %s: remove them yourself", path, ", ".join(unknown))


def put_back(work: Path, path: Path) -> None:
    """Put back what a run was replacing when it was killed."""
    old = work / _OLD
    if os.path.lexists(old) and not os.path.lexists(path):
        rename_new(old, path)
        log.warning("%s: put back, since a run was stopped while it replaced it", path)


def remove_unfinished(path: Path) -> None:
    """Remove what a stopped run could have continued, once something complete has its path."""
    work = unfinished_beside(path)
    if work.is_dir():
        with _claimed(work) as ended:
            if ended:
                remove_work(work)
                log.warning("%s: removed the unfinished %s, whose place is taken now", path, work.name)


def _left_beside(path: Path) -> list[Path]:
    pattern = re.compile(re.escape(_stem(path)) + r"(\.part-\d+-[0-9a-f]{8}|\.unfinished)")
    try:
        with os.scandir(path.parent) as entries:
            return sorted(path.parent / one.name for one in entries if pattern.fullmatch(one.name))
    except FileNotFoundError:
        return []


@contextmanager
def _claimed(work: Path) -> Iterator[bool | None]:
    """Lock a work folder or file: True if that worked, False where there are no locks, None if a run has it."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(work).st_mode)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if is_folder else 0)
        descriptor = os.open(work / _LOCK if is_folder else work, flags, 0o666)
    except OSError:  # gone, or not ours to write
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
    """Remove a work folder, the lock last; or a single file."""
    if not work.is_dir():
        work.unlink(missing_ok=True)
        return
    if clear_work(work):
        (work / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # the next run has begun to use it
            work.rmdir()


def clear_work(work: Path) -> bool:
    """Remove all that is in a work folder but the lock; returns whether nothing else is left.

    Threads that were interrupted may still add a last file.
    """
    for wait in (0.0, 0.05, 0.2, 1.0):
        time.sleep(wait)
        for one in _but_the_lock(work):
            _remove(one)
        if not _but_the_lock(work):
            return True
    return False


def _but_the_lock(work: Path) -> list[Path]:
    return [one for one in work.iterdir() if one.name != _LOCK]


def _remove(path: Path) -> None:
    """Remove a file, a folder, or a symbolic link, but not what it points to."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken, unless it holds a Zarr folder that may be replaced.

    Raises
    ------
    FileExistsError
        Naming the path.
    FileNotFoundError
        The folder that it is in is not there: folders are not made, since a typing error would make them too.
    ValueError
        A URL, which as a path would be a folder called ``s3:``, or a ``~``; the name of a file, such as ``a.png``.
    """
    refuse_url(path)
    if path.suffix.lower() in _FILE_SUFFIXES:
        raise ValueError(f"{path}: {path.suffix} is the name of a file, and an OME-Zarr image is a folder: *.ome.zarr")
    if not (path.exists() or path.is_symlink()):
        check_parent(path)
        return
    if not overwrite:
        raise taken(path)
    if not any((path / name).is_file() for name in _ZARR_FILES):
        raise FileExistsError(f"{path} is not a Zarr folder, so it is not overwritten")


def check_parent(path: Path) -> None:
    """Refuse a path in a folder that is not there.

    Raises
    ------
    FileNotFoundError
        Naming the first folder that lacks.
    """
    folder = absolute(path).parent
    if not folder.is_dir():
        lacking = next(one for one in (*reversed(folder.parents), folder) if not one.is_dir())
        raise FileNotFoundError(f"{path}: there is no folder {lacking}: make it first, or choose another path")


def taken(path: Path) -> FileExistsError:
    """Make the error of an output whose path is taken."""
    return FileExistsError(f"{path} exists: choose another path, or replace it with overwrite=True")


def refuse_url(path: Path) -> None:
    """Refuse what as a path would begin with a folder called ``s3:`` or ``~``."""
    if len(path.parts) > 1 and path.parts[0].startswith("~") and not os.path.isdir(path.parts[0]):
        raise ValueError(f"{str(path)!r} begins with {path.parts[0]!r}, which only shells expand: give the whole path")
    if len(path.parts) > 1 and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]+:", path.parts[0]):
        raise ValueError(f"{path} is a URL: only local folders are written, give the path of one")


def check_apart(outputs: Iterable[str | Path], sources: Iterable[str | Path] = ()) -> None:
    """Refuse outputs that would take the place of a source, of a part of one, or of each other.

    Parameters
    ----------
    outputs, sources : iterable of str or Path
        What is written, and what is read; URLs among these are passed over.

    Raises
    ------
    ValueError
        Naming the two.
    """
    # Not Path.resolve, which raises RuntimeError for a link that leads to itself.
    places = [(one, Path(os.path.realpath(one))) for one in outputs]
    read = [(one, Path(os.path.realpath(one))) for one in sources if "://" not in str(one)]
    for (output, place), (source, other) in itertools.product(places, read):
        if place == other or place in other.parents:
            raise ValueError(f"the output {output} would take the place of the source {source}: choose another place")
        if other in place.parents:
            raise ValueError(f"the output {output} would lie inside the source {source}: choose another place")
    for (first, place), (second, other) in itertools.combinations(places, 2):
        if place == other or place in other.parents or other in place.parents:
            raise ValueError(f"the outputs {first} and {second} would lie in one place: choose two")


def check_free_space(path: Path, nbytes: int, *, encoded: bool) -> None:
    """Refuse what cannot fit on a file system before work begins.

    Parameters
    ----------
    path : Path
        Where it is going to be; the nearest folder above it that exists is on that file system.
    nbytes : int
        Bytes of the voxels.
    encoded : bool
        Whether they are compressed; the ratio is unknown, and taken to be 100 at most.

    Raises
    ------
    OSError
        With the bytes needed and those that are free; its ``errno`` is ``ENOSPC``.
    """
    folder = next(one for one in (path, *path.absolute().parents) if one.exists())
    free, least = shutil.disk_usage(folder).free, nbytes // 100 if encoded else nbytes
    if least > free:
        unit, size = ("GiB", 2**30) if least >= 2**30 else ("MiB", 2**20)
        error = OSError(
            f"{path} would take {'at least ' if encoded else ''}{least / size:,.1f} {unit}, and {free / size:,.1f} "
            f"{unit} are free there: choose another disk, or larger voxels"
        )
        error.errno = errno.ENOSPC
        raise error


def take_place(temporary: Path, path: Path, *, overwrite: bool, durable: bool) -> None:
    """Rename the finished folder to its path, in one step; what was there is then in the work folder.

    Where the file system cannot exchange two names, the old one waits as ``old`` in the work folder meanwhile, from
    where :func:`settle` puts it back if the process is killed right then.

    Raises
    ------
    FileExistsError
        As :func:`check_place`; another process may have made it first.
    """
    while True:
        check_place(path, overwrite=overwrite)
        try:
            if not os.path.lexists(path):
                rename_new(temporary, path)
            elif not exchange(temporary, path):
                _replace_in_two_steps(temporary, path)
            break
        except (FileExistsError, FileNotFoundError):
            if not os.path.lexists(temporary):
                raise
    if durable:
        sync_path(path.parent)


def _replace_in_two_steps(temporary: Path, path: Path) -> None:
    old = temporary.parent / _OLD
    path.rename(old)
    try:
        rename_new(temporary, path)
    except OSError:
        put_back(temporary.parent, path)
        raise


def drop_partial_files(folder: Path) -> None:
    """Remove the temporary files that zarr leaves of chunks it was writing when the process was killed."""
    for partial in folder.rglob("*.partial"):
        partial.unlink(missing_ok=True)
