"""Zarr arrays of made-up voxels: random ones for raw chunks, OCT-like ones of a known compression ratio for codecs."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from linumpy.io.zarr_mode import write_from_host

#: Codecs of the chunks, for zarr v2 and v3, with fixed settings.
CODECS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "zstd": (numcodecs.Zstd(3), ZstdCodec(level=3)),
    "blosc": (numcodecs.Blosc("lz4", 5, 1), BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")),
    "blosc-zstd": (numcodecs.Blosc("zstd", 1, 2), BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle")),
    "gzip": (numcodecs.GZip(5), GzipCodec(level=5)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSpec:
    """An array to make: its sizes, those of its (inner) chunks and shards, and a key of :data:`CODECS`.

    `ratio` is the compression ratio of encoded voxels.
    """

    name: str
    chunks: tuple[int, ...]
    shape: tuple[int, ...] = (512, 1024, 1024)
    dtype: str = "uint16"
    codec: str = "none"
    shards: tuple[int, ...] | None = None
    zarr_format: Literal[2, 3] = 3
    ratio: float = 3.0

    def scaled(self, scale: float) -> StoreSpec:
        """Shrink all sizes; the numbers of chunks and shards stay about the same."""
        chunks = tuple(max(1, round(size * scale)) for size in self.chunks)
        per_chunk = [small / large for small, large in zip(chunks, self.chunks, strict=True)]
        shape = tuple(max(1, round(n * part)) for n, part in zip(self.shape, per_chunk, strict=True))
        shards = self.shards and tuple(round(n * part) for n, part in zip(self.shards, per_chunk, strict=True))
        return replace(self, shape=shape, chunks=chunks, shards=shards)

    def make(self, folder: Path, voxels: np.ndarray | None = None) -> Path:
        """Write an array of these voxels, or of made-up ones, into a folder; return its path, which is new."""
        folder.mkdir(parents=True, exist_ok=True)
        sizes = ["x".join(map(str, part)) for part in (self.shape, self.chunks, self.shards or ())]
        path = folder / f"{'_'.join([self.dtype, *filter(None, sizes), self.codec])}_v{self.zarr_format}.zarr"
        if path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten: give another folder, or time it as ARRAY")
        dtype, codec = np.dtype(self.dtype), CODECS[self.codec][self.zarr_format - 2]
        try:
            array = zarr.create_array(
                path, shape=self.shape, chunks=self.chunks, shards=self.shards, dtype=dtype, filters=None,
                fill_value=0, compressors=codec, zarr_format=self.zarr_format,
            )  # fmt: skip
            change = 0.0
            if codec is not None and voxels is None:
                encode = CODECS[self.codec][0].encode
                change = change_for_ratio(lambda part: len(encode(part)), self.shape, self.chunks, dtype, self.ratio)
            for block in slabs(array):
                rng, part = np.random.default_rng(block[0].start), None if voxels is None else voxels[block]
                if part is None:
                    part = oct_voxels(rng, self.shape, block, dtype, change) if change else _random(rng, block, dtype)
                write_from_host(array, block, part)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # this call made the folder
            raise
        return path


def slabs(array: zarr.Array) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an array along its first axis, each one chunk or shard deep."""
    depth = (array.shards or array.chunks)[0]
    for start in range(0, array.shape[0], depth):
        yield (slice(start, min(start + depth, array.shape[0])), *(slice(0, n) for n in array.shape[1:]))


def _random(rng: np.random.Generator, block: Sequence[slice], dtype: np.dtype) -> np.ndarray:
    """Return random voxels: all values of an integer type, 0 to 1 for others."""
    size = [part.stop - part.start for part in block]
    if dtype.kind in "iu":
        return np.frombuffer(rng.bytes(math.prod(size) * dtype.itemsize), dtype).reshape(size)
    return rng.random(size, np.float32).astype(dtype)


def oct_voxels(
    rng: np.random.Generator, shape: Sequence[int], block: Sequence[slice], dtype: np.dtype, change: float
) -> np.ndarray:
    """Return a block of an OCT-like volume (depth first): a curved surface, decay below it, speckle everywhere.

    `change` is the probability that a voxel begins a new run of equal speckle: the longer the runs, the higher is the
    compression ratio, even of a codec that only finds repeats.
    """
    axes = np.ix_(*(np.arange(part.start, part.stop, dtype=np.float32) for part in block))
    across = [np.float32(2 * np.pi / extent) * axis for axis, extent in zip(axes[1:], shape[1:], strict=True)]
    surface = np.float32(0.3) + sum((np.float32(0.05) * np.sin(turn) for turn in across), np.float32(0))
    depth = axes[0] / np.float32(shape[0]) - surface
    # 12 bits, as of a digitiser, if the dtype holds them; half of the voxels of a mask are true.
    brightest, speckle = (0, 2) if dtype.kind == "b" else (30, 90) if dtype.itemsize == 1 else (4000, 256)
    size = tuple(part.stop - part.start for part in block)
    values = np.float32(speckle) * rng.random(size, dtype=np.float32)
    values += np.float32(brightest) * np.exp(np.float32(-3) * np.abs(depth)) * (depth > 0)
    starts = rng.random(size, dtype=np.float32) < change
    begin = np.where(starts, np.arange(size[-1], dtype=np.int32), np.int32(0))
    np.maximum.accumulate(begin, axis=-1, out=begin)  # the first voxel of each voxel's run
    voxels = np.take_along_axis(values, begin, axis=-1)
    return voxels >= 1 if dtype.kind == "b" else voxels.astype(dtype)


def change_for_ratio(
    encoded_nbytes: Callable[[np.ndarray], int], shape: Sequence[int], chunks: Sequence[int], dtype: np.dtype,
    ratio: float = 3.0,
) -> float:  # fmt: skip
    """Return the `change` of :func:`oct_voxels` for which a codec reaches a ratio, or comes nearest to it."""
    size = [min(chunk, extent, 128) for chunk, extent in zip(chunks, shape, strict=True)]
    tops = sorted({int(part * (shape[0] - size[0])) for part in (0.0, 0.35, 0.6, 1.0)})
    samples = [(slice(top, top + size[0]), *(slice(0, extent) for extent in size[1:])) for top in tops]
    low, high = -8.0, 0.0
    for _ in range(12):  # bisect log2(change): the ratio falls as runs get shorter
        middle = (low + high) / 2
        rng = np.random.default_rng(0)
        arrays = [oct_voxels(rng, shape, block, dtype, 2**middle) for block in samples]
        is_above = sum(array.nbytes for array in arrays) > ratio * sum(map(encoded_nbytes, arrays))
        low, high = (middle, high) if is_above else (low, middle)
    return float(2 ** ((low + high) / 2))
