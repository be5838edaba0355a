"""Workloads of random crops for :mod:`linumpy.benchmark.suites.stream`, and their arrays.

In: a workload, a folder, a scale. Out: arrays on disk, and the list of crops.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.cases import Mark
from linumpy.benchmark.data import change_for_ratio, generator, oct_voxels
from linumpy.device import usable_cores
from linumpy.io.zarr_mode import in_mode_of_caller, write_from_host
from linumpy.stream import CropSampler, Sample, Volume


@dataclass(frozen=True)
class Workload:
    """Crops of arrays, read in `batches` of `batch` crops.

    Shapes are of an array, its inner chunks, its shards, and a crop. `ratio` is decoded bytes over stored bytes, 1 for
    raw chunks. Only `encoded_arrays` of the `arrays` are encoded; the files of the other arrays are copies. The
    pipeline keeps the metadata of `open_arrays`. The `mark` is for a pipeline without a cache of chunks. `variants` are
    further entries of linumpy, keys of ``_VARIANTS`` in :mod:`linumpy.benchmark.suites.stream`.
    """

    title: str
    shape: tuple[int, int, int]
    chunk: tuple[int, int, int]
    shard: tuple[int, int, int]
    crop: tuple[int, int, int]
    arrays: int
    batch: int
    batches: int
    ratio: float
    mark: Mark | None
    encoded_arrays: int = 16
    open_arrays: int = 64
    variants: tuple[str, ...] = ("cached",)


def _gb_per_second(rate: float) -> Mark:
    return Mark(round(rate * 1e9 / 2**30, 2))


_LARGE = ((512, 1024, 1024), (64, 64, 64), (256, 512, 512), (64, 256, 256))
_MANY = ((512, 512, 512), (32, 64, 64), (256, 256, 512), (128, 128, 128))
_W2 = "128³ crops of 16 zstd arrays"
WORKLOADS = {
    "W1a": Workload("64×256×256 crops of one zstd array", *_LARGE, 1, 8, 200, 3.0, _gb_per_second(6.5)),
    "W1b": Workload("64×256×256 crops of one raw array", *_LARGE, 1, 8, 200, 1.0, _gb_per_second(14.0)),
    "W2": Workload(_W2, *_MANY, 16, 32, 200, 3.0, _gb_per_second(15.0), variants=("cached", "augmented")),
    "M": Workload(
        "128³ crops of 1000 zstd arrays, 64 of them open", _MANY[2], *_MANY[1:], 1000, 32, 200, 3.0,
        Mark(0.8, (f"W2: {_W2}/stream",), "× W2"), variants=(),
    ),
    "T": Workload(f"{_W2} that compress little", *_MANY, 16, 128, 100, 1.48, _gb_per_second(7.0)),
    "F": Workload("32³ crops of one zstd array", *_LARGE[:3], (32, 32, 32), 1, 64, 200, 3.0, None),
}  # fmt: skip


def make_arrays(
    workload: Workload, folder: Path, scale: float, batches: int | None
) -> tuple[tuple[str, ...], tuple[Sample, ...]]:
    """Write the arrays of a workload, and draw the crops; return the paths of the arrays, and the crops."""
    shape = [
        max(c, int(n * scale) // s * s) for n, s, c in zip(workload.shape, workload.shard, workload.crop, strict=True)
    ]
    count = max(1, round(workload.arrays * scale))
    base, shift = _voxels(workload), workload.shard[2] // 4 + 1
    paths = [folder / f"{number}.zarr" for number in range(count)]

    def write(number: int) -> None:
        array = _create(workload, paths[number], shape)
        for k, index in enumerate(np.ndindex(*(-(-n // s) for n, s in zip(shape, workload.shard, strict=True)))):
            box = tuple(slice(i * s, min((i + 1) * s, n)) for i, s, n in zip(index, workload.shard, shape, strict=True))
            voxels = np.roll(base, shift * (k + 13 * number), axis=2)
            write_from_host(array, box, voxels[tuple(slice(0, b.stop - b.start) for b in box)])

    encoded = min(count, workload.encoded_arrays)
    with ThreadPoolExecutor(min(encoded, usable_cores()), initializer=in_mode_of_caller()) as pool:
        list(pool.map(write, range(encoded)))
        list(pool.map(lambda number: shutil.copytree(paths[number % encoded], paths[number]), range(encoded, count)))
    volumes = [Volume(str(path), tuple(shape)) for path in paths]
    sampler = CropSampler(volumes, workload.crop, length=workload.batch * (batches or workload.batches))
    return tuple(map(str, paths)), tuple(sampler)


def _voxels(workload: Workload) -> np.ndarray:
    """Make the voxels of one shard; other shards are copies that are shifted along X."""
    dtype = np.dtype("u2")
    change = 1.0
    if workload.ratio > 1:
        change = change_for_ratio(_encoded_bytes, workload.shard, workload.chunk, dtype, target=workload.ratio)
    box = tuple(slice(0, n) for n in workload.shard)
    return oct_voxels(generator(0, box), workload.shard, box, dtype, change)


def _encoded_bytes(sample: np.ndarray) -> int:
    from numcodecs import Zstd

    return len(Zstd(level=3).encode(np.ascontiguousarray(sample)))


def _create(workload: Workload, path: Path, shape: Sequence[int]) -> zarr.Array:
    codec = None if workload.ratio == 1 else zarr.codecs.ZstdCodec(level=3)
    shards = tuple(min(s, -(-n // c) * c) for s, n, c in zip(workload.shard, shape, workload.chunk, strict=True))
    options: dict[str, Any] = {"chunks": workload.chunk, "shards": shards, "compressors": codec}
    return zarr.create_array(str(path), shape=tuple(shape), dtype="u2", **options)
