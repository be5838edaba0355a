"""Test data: random voxels for uncompressed stores, OCT-like voxels for codecs, and images made of one tile.

In: the shape of a volume, and a piece of the volume (:func:`blocks` cuts a volume into pieces of bounded size along the
chunk grid). Out: the voxels of the piece as a NumPy array, the same for the same seed. A piece is never all zeros,
which a disk, file system or codec may process faster than other values. :func:`write_tiles` writes an image of known
tiles. Errors: ``ValueError`` for a disk that is too small or a size out of range, ``FileNotFoundError`` for a folder
that does not exist.

A *grain* of speckle is a run of equal voxels along the last axis.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from linumpy.device import usable_cores
from linumpy.io.zarr_mode import in_mode_of_caller
from linumpy.write.writer import OmeZarrWriter

#: Maximum bytes of a piece, unless a single chunk is larger.
BLOCK_BYTES = 256 * 2**20

_THREADS = 16

Block = tuple[slice, ...]

#: The compression ratio that compressed stores should have: decoded bytes over stored bytes.
TARGET_RATIO = 3.0


def generator(seed: int, block: Block) -> np.random.Generator:
    """Return the random generator of a piece, which depends on the seed and the start of the piece only."""
    return np.random.Generator(np.random.SFC64([seed, *(part.start for part in block)]))


def random_voxels(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Return random voxels: all values of an integer type, 0 to 1 for floats."""
    count = math.prod(shape)
    if dtype.kind == "c":
        parts = random_voxels(rng, (count, 2), np.dtype(f"f{dtype.itemsize // 2}"))
        return parts.view(dtype).reshape(shape)
    if dtype.kind == "f":
        drawn_dtype = np.dtype("f8" if dtype.itemsize == 8 else "f4")
        return rng.random(tuple(shape), dtype=drawn_dtype.type).astype(dtype, copy=False)
    words = rng.bit_generator.random_raw(-(-count * dtype.itemsize // 8))
    random_bytes = words.view(np.uint8)[: count * dtype.itemsize]
    voxels = (random_bytes & 1).view(np.bool_) if dtype.kind == "b" else random_bytes.view(dtype)
    return voxels.reshape(shape)


def oct_voxels(
    rng: np.random.Generator, shape: Sequence[int], block: Block, dtype: np.dtype, change: float
) -> np.ndarray:
    """Return a piece of an OCT-like volume: a curved surface, decay below it, speckle everywhere.

    `shape` is the shape of the whole volume, whose axis 0 is depth; `block` is the piece. `change` is the probability
    that a voxel begins a new grain of speckle: the mean length of a grain is 1 / `change`. The longer the grains, the
    higher is the compression ratio, even of a codec that only finds repeats, such as LZ4.
    """
    axes = np.ix_(*(np.arange(part.start, part.stop, dtype=np.float32) for part in block))
    across = [np.float32(2 * np.pi / extent) * axis for axis, extent in zip(axes[1:], shape[1:], strict=True)]
    surface = np.float32(0.3) + sum((np.float32(0.05) * np.sin(turn) for turn in across), np.float32(0))
    depth = axes[0] / np.float32(shape[0]) - surface
    brightest, speckle = _brightness(dtype)
    size = tuple(part.stop - part.start for part in block)
    values = np.float32(speckle) * rng.random(size, dtype=np.float32)
    values += np.float32(brightest) * np.exp(np.float32(-3) * np.abs(depth)) * (depth > 0)
    starts = rng.random(size, dtype=np.float32) < change
    begin = np.where(starts, np.arange(size[-1], dtype=np.int32), np.int32(0))
    np.maximum.accumulate(begin, axis=-1, out=begin)  # the first voxel of each voxel's grain
    grains = np.take_along_axis(values, begin, axis=-1)
    return grains >= 1 if dtype.kind == "b" else grains.astype(dtype)


def change_for_ratio(
    encoded_bytes: Callable[[np.ndarray], int],
    shape: Sequence[int],
    chunks: Sequence[int],
    dtype: np.dtype,
    seed: int = 0,
    target: float = TARGET_RATIO,
) -> float:
    """Compute the ``change`` of :func:`oct_voxels` for which a codec compresses a volume by a ratio, `target`.

    `encoded_bytes` takes an array, encodes it with the codec, and returns the number of bytes. If the codec cannot
    reach the ratio, the result gives the nearest possible ratio.
    """
    samples = _samples(shape, chunks, dtype)

    def ratio(change: float) -> float:
        arrays = [oct_voxels(generator(seed, block), shape, block, dtype, change) for block in samples]
        return sum(array.nbytes for array in arrays) / sum(encoded_bytes(array) for array in arrays)

    low, high = -8.0, 0.0
    for _ in range(12):  # bisect log2(change): the ratio falls as grains get shorter
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(2**middle) > target else (low, middle)
    return float(2 ** ((low + high) / 2))


def _samples(shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype, limit: int = 2**21) -> list[Block]:
    """Choose chunks, or parts of chunks of at most `limit` bytes, in the water, at the surface and in the tissue."""
    size = [min(chunk, extent) for chunk, extent in zip(chunks, shape, strict=True)]
    for axis in range(len(size)):
        excess = math.prod(size) * dtype.itemsize / limit
        size[axis] = max(1, int(size[axis] / max(1.0, excess)))
    tops = sorted({int(part * (shape[0] - size[0])) for part in (0.0, 0.35, 0.6, 1.0)})
    return [(slice(top, top + size[0]), *(slice(0, extent) for extent in size[1:])) for top in tops]


def _brightness(dtype: np.dtype) -> tuple[int, int]:
    """Return the brightest signal and the range of the speckle: 12 bits, as of a digitiser, if the dtype holds them."""
    if dtype.kind == "b":
        return 0, 2  # half of the voxels are 1 or more, which is true
    return (30, 90) if dtype.itemsize == 1 else (4000, 256)


def block_shape(shape: Sequence[int], unit: Sequence[int], itemsize: int, limit: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Return the shape of the largest piece within a limit of bytes: whole chunks or shards (`unit`), at least one."""
    sizes = [min(length, extent) for length, extent in zip(unit, shape, strict=True)]
    for axis in reversed(range(len(sizes))):  # the last axis first, so that pieces are as contiguous as possible
        count = max(1, limit // max(1, math.prod(sizes) * itemsize))
        sizes[axis] = min(shape[axis], sizes[axis] * count)
    return tuple(sizes)


def blocks(shape: Sequence[int], unit: Sequence[int], itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the pieces of a volume in C order, cut as by :func:`block_shape`; none for a volume without voxels."""
    if math.prod(shape) == 0:
        return
    sizes = block_shape(shape, unit, itemsize, limit)
    starts = [range(0, extent, size) for extent, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + size, extent)) for start, size, extent in zip(corner, sizes, shape, strict=True)
        )


# ---- images on disk


@contextmanager
def work_folder(folder: Path | None) -> Iterator[Path]:
    """Make a new folder in `folder`, by default in the folder of temporary files, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="linum-benchmark-", dir=folder) as path:
        yield Path(path)


def check_size(name: str, gib: float, folder: Path | None = None) -> None:
    """Check the size of a volume or memory, which errors call `name`, and check that a folder exists.

    Raises
    ------
    ValueError
        The size is not positive, or above 2^20 GiB (1 PiB).
    FileNotFoundError
        The folder does not exist.
    """
    if not 0 < gib < 2**20:
        raise ValueError(f"{name} of {gib} GiB: more than 0 is needed")
    if folder is not None and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")


def check_free(folder: Path, nbytes: int) -> None:
    """Raise ``ValueError`` if the disk of a folder has fewer bytes free."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"{folder} has {free / 2**30:.1f} GiB free, {nbytes / 2**30:.1f} are needed: name another folder"
        )


def write_tiles(path: Path, base: np.ndarray, numbers: np.ndarray, spacing: Sequence[float]) -> Path:
    """Write an image of tiles, each a raw chunk: the tile at ``index`` is ``base + numbers[index]``.

    `base` is a tile; `numbers` is an array with a number for each tile, of the dtype and rank of `base`; `spacing` is
    in µm.
    """
    shape = tuple(n * t for n, t in zip(numbers.shape, base.shape, strict=True))
    with (
        OmeZarrWriter(path, shape, base.dtype, spacing, chunks=base.shape, codec="none", durable=False) as writer,
        ThreadPoolExecutor(min(_THREADS, usable_cores()), "linumpy-tiles", in_mode_of_caller()) as pool,
    ):

        def write(index: tuple[int, ...]) -> None:
            box = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, base.shape, strict=True))
            writer.write(box, base + numbers[index])

        list(pool.map(write, np.ndindex(*numbers.shape)))
    return path


def flush(folder: Path, seconds: float = 60.0) -> bool:
    """Write the dirty pages of a folder's files to the disk; the pages stay in the page cache.

    Returns whether all files were written within the time limit of `seconds`.
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
