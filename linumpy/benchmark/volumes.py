"""Volumes to time whole calls on: raw OME-Zarr images made of one tile.

In: a tile and how many there are. Out: an image, each of whose tiles is that one and a number, so that it is known what
must come out. Errors: ``ValueError`` for a folder on a disk that is too small.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from linumpy.io.zarr_mode import in_mode_of_caller
from linumpy.write.writer import OmeZarrWriter

_THREADS = 16


def check_size(what: str, gib: float, folder: Path | None = None) -> None:
    """Refuse a size that is none, and a folder that is not there.

    Raises
    ------
    ValueError, FileNotFoundError
        Naming them.
    """
    if not 0 < gib < 2**20:
        raise ValueError(f"{what} of {gib} GiB: more than 0 is needed")
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")


def check_free(folder: Path, nbytes: int) -> None:
    """Refuse a folder that cannot take so many bytes.

    Raises
    ------
    ValueError
        Saying how much is free.
    """
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{folder} has {free / 2**30:.1f} GiB free, {nbytes / 2**30:.1f} are needed: name another folder"
        )


def write_tiles(path: Path, base: np.ndarray, numbers: np.ndarray, spacing: Sequence[float]) -> Path:
    """Write an image of tiles, each a raw chunk: the one at ``index`` is ``base + numbers[index]``.

    Parameters
    ----------
    path : Path
        The image to make.
    base : numpy.ndarray
        A tile.
    numbers : numpy.ndarray
        One for each tile, of the dtype and rank of `base`.
    spacing : sequence of float
        Voxel spacing in µm.
    """
    shape = tuple(n * t for n, t in zip(numbers.shape, base.shape, strict=True))
    with (
        OmeZarrWriter(path, shape, base.dtype, spacing, chunks=base.shape, durable=False) as writer,
        ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), "linumpy-tiles", in_mode_of_caller()) as pool,
    ):

        def write(index: tuple[int, ...]) -> None:
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, base.shape, strict=True))
            writer.write(box, base + numbers[index])

        list(pool.map(write, np.ndindex(*numbers.shape)))
    return path


def flush(folder: Path, seconds: float = 60.0) -> bool:
    """Bring the files of a folder to the disk, so that it is at rest; they stay in the page cache.

    Parameters
    ----------
    folder : Path
        Of all of them.
    seconds : float
        After which no other file is begun with.

    Returns
    -------
    bool
        Whether all of them are there.
    """
    end = time.monotonic() + seconds

    def flush_one(path: Path) -> bool:
        if time.monotonic() > end:
            return False
        with open(path, "rb") as file:
            os.fdatasync(file.fileno())
        return True

    with ThreadPoolExecutor(_THREADS) as pool:
        return all(list(pool.map(flush_one, (path for path in folder.rglob("*") if path.is_file()))))
