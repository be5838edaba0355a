"""A place for a folder: taken or free, filled under a temporary name, and taken by a rename.

In: where a folder shall stand. Out: a temporary one beside it, which is renamed when its block ends well and removed
when it does not. A process that is killed leaves the temporary one, whose name begins with a dot. Errors:
``FileExistsError`` for a place that is taken, ``OSError`` for a disk that is full.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from linumpy.io.zarr_mode import wait_for_zarr

_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
#: Names that people give to files; a folder of such a name would be taken for one, by other programs too.
_FILE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".gif", ".pdf", ".svg"),
    *(".nii", ".gz", ".zip", ".h5", ".npy", ".json", ".csv", ".txt"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: Bytes that a name may have on Linux's file systems.
_NAME_BYTES = 255


@contextmanager
def new_folder(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary place for a folder, which takes its own when the block ends well.

    Parameters
    ----------
    path : Path
        The folder to make, and those above it. The temporary one is there, and empty.
    overwrite : bool
        Whether to replace a Zarr folder that is there.

    Raises
    ------
    FileExistsError
        As :func:`check_place`.
    OSError
        The disk is full, or somebody removed the temporary place. Nothing is left then, nor after any other error or
        interrupt.
    """
    check_place(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    temporary.mkdir()
    same = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield temporary
        if not (temporary.exists() and os.path.samestat(os.stat(temporary), os.fstat(same))):
            raise OSError(errno.ENOENT, "somebody removed the unfinished folder; what was written is lost", str(path))
        check_place(path, overwrite=overwrite)  # someone else may have come first
        take_place(temporary, path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)}; nothing is left of", str(path)) from error
    finally:
        os.close(same)
        if temporary.exists():
            wait_for_zarr()  # or it would make the folder once more
        _remove(temporary)


def temporary_beside(path: Path) -> Path:
    """Name a place beside another one that nobody else takes; its name begins with a dot."""
    suffix = f".part-{os.getpid()}-{secrets.token_hex(4)}"
    room = _NAME_BYTES - len(f".{suffix}.old")
    return path.parent / f".{os.fsdecode(os.fsencode(path.name)[:room])}{suffix}"


def _remove(folder: Path) -> None:
    """Remove a folder, to which threads that were interrupted may still add a last file."""
    for wait in (0.0, 0.05, 0.2, 1.0):
        time.sleep(wait)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken, unless it holds a Zarr folder that may be replaced.

    Raises
    ------
    FileExistsError
        Naming the place.
    ValueError
        A URL, which as a path would be a folder called ``s3:``; the name of a file, such as ``a.png``.
    """
    refuse_url(path)
    if path.suffix.lower() in _FILE_SUFFIXES:
        raise ValueError(f"{path}: {path.suffix} is the name of a file, and an OME-Zarr image is a folder: *.ome.zarr")
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists: choose another place, or overwrite it")
    if not any((path / name).is_file() for name in _ZARR_FILES):
        raise FileExistsError(f"{path} is not a Zarr folder, so it is not overwritten")


def refuse_url(path: Path) -> None:
    """Refuse what as a path would begin with a folder called ``s3:``."""
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
    places = [(one, Path(one).resolve()) for one in outputs]
    read = [(one, Path(one).resolve()) for one in sources if "://" not in str(one)]
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
        Whether they are compressed, by nobody knows how much; a hundredfold is taken for the most.

    Raises
    ------
    OSError
        With the bytes needed and those that are free; its ``errno`` is ``ENOSPC``.
    """
    folder = next(one for one in (path, *path.absolute().parents) if one.exists())
    free, least = shutil.disk_usage(folder).free, nbytes // 100 if encoded else nbytes
    if least > free:
        error = OSError(
            f"{path} would take {'at least ' if encoded else ''}{least / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB "
            "are free there: choose another disk, or larger voxels"
        )
        error.errno = errno.ENOSPC
        raise error


def take_place(temporary: Path, path: Path) -> None:
    """Rename the finished folder to its place; what was there goes only when the new one stands."""
    if not (path.exists() or path.is_symlink()):
        temporary.rename(path)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    if old.is_symlink():
        old.unlink()  # what it points to is somebody else's
    else:
        shutil.rmtree(old, ignore_errors=True)


def drop_partial_files(folder: Path) -> None:
    """Remove the temporary files that zarr leaves of chunks it was writing when the process was killed."""
    for partial in folder.rglob("*.partial"):
        partial.unlink(missing_ok=True)
