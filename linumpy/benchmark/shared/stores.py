"""Zarr arrays to read: the user's, and stores that the benchmark makes.

In: a description of a store (:class:`StoreSpec`), or the path of an array. Out: a :class:`StoredArray` in a local
folder. Errors: ``ValueError`` for a description of which no array can be made, ``FileExistsError`` for a path that
exists, ``OSError`` for a disk that is too small, and the errors of opening an array.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import zarr
from zarr.abc.store import Store
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec
from zarr.storage import LocalStore, MemoryStore

from linumpy.arrays import Array
from linumpy.benchmark.cases import Mark
from linumpy.benchmark.data import Block, blocks, change_for_ratio, generator, oct_voxels, random_voxels
from linumpy.device import array_module, to_host
from linumpy.errors import SourceError
from linumpy.io.open import open_source
from linumpy.io.zarr_mode import host_zarr_context, write_from_host

_METADATA = frozenset((".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"))

#: Codecs of the chunks, for zarr v2 and v3, with fixed settings.
CODECS: dict[str, tuple[Any, Any]] = {
    "none": (None, None),
    "zstd": (numcodecs.Zstd(3), ZstdCodec(level=3)),
    # most files of NGFF 0.4 have this codec
    "blosc": (numcodecs.Blosc("lz4", 5, 1), BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")),
    # iohub's codec
    "blosc-zstd": (numcodecs.Blosc("zstd", 1, 2), BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle")),
    "gzip": (numcodecs.GZip(5), GzipCodec(level=5)),
}

#: Values of `reach_of`: the names of the entries to compare with (none for GiB/s), and the unit for people.
REACH_OF: dict[str, tuple[tuple[str, ...], str]] = {
    "rate": ((), "GiB/s"),
    "flat": (("flat",), "× flat"),
    "zarr-gpu": (("zarr-gpu",), "× zarr-gpu"),
    "host": (("zarr-numpy", "tensorstore", "zarrs"), "× the best host path"),
}


def check_dtype(dtype: Any) -> np.dtype:
    """Return a data type in this machine's byte order; ``ValueError`` if a device does not have it."""
    try:
        result = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown to NumPy") from error
    if result.kind not in "biufc" or result.itemsize > (16 if result.kind == "c" else 8):
        raise ValueError(f"dtype {result}: bool, integers, floats and complex numbers can be read on a GPU")
    return result.newbyteorder("=")


def by_x(sizes: tuple[int, ...], sign: str = "x") -> str:
    """Format sizes as ``8x16``."""
    return sign.join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store to make.

    Shapes are of the array, its (inner) chunks and its shards. `codec` is a key of :data:`CODECS`; `reach` is the rate
    that ``linumpy auto`` should reach, relative to `reach_of`, a key of :data:`REACH_OF` or the name of an earlier
    case. `region` has the begin and the end of the region to read along each axis; None for the whole array.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    codec: str = "none"
    reach: float | None = None
    reach_of: str = "flat"
    shards: tuple[int, ...] | None = None
    region: tuple[tuple[int, int], ...] | None = None
    zarr_format: Literal[2, 3] = 3

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"codec {self.codec!r} is unknown: choose one of {', '.join(CODECS)}")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape {self.shape}: every axis has 1 voxel or more")
        for label, sizes in (("chunks", self.chunks), ("shards", self.shards or self.chunks)):
            if len(sizes) != len(self.shape) or min(sizes) < 1:
                raise ValueError(f"{label} {sizes}: shape {self.shape} needs {len(self.shape)} sizes from 1 on")
        if self.shards and any(outer % inner for outer, inner in zip(self.shards, self.chunks, strict=True)):
            raise ValueError(f"shards {self.shards} are no multiple of the chunks {self.chunks}")
        if self.zarr_format not in (2, 3) or (self.shards and self.zarr_format == 2):
            raise ValueError(f"zarr_format {self.zarr_format}: 2 or 3, and shards are of 3")
        if self.region is not None and (
            len(self.region) != len(self.shape)
            or any(not 0 <= a < b <= n for (a, b), n in zip(self.region, self.shape, strict=True))
        ):
            raise ValueError(f"region {self.region} does not lie in shape {self.shape}")
        check_dtype(self.dtype)

    @property
    def mark(self) -> Mark | None:
        """The rate that ``linumpy auto`` should reach, if any."""
        if self.reach is None:
            return None
        earlier = (f"{self.reach_of}/linumpy-auto",), f"× {self.reach_of}"
        return Mark(self.reach, *REACH_OF.get(self.reach_of, earlier))

    @property
    def nbytes(self) -> int:
        """Decoded bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def file_name(self) -> str:
        """Name of the store's folder; the same for equal descriptions, whatever their `name` and `reach`."""
        parts = [np.dtype(self.dtype).name, by_x(self.shape), "c" + by_x(self.chunks)]
        parts += ["s" + by_x(self.shards)] if self.shards else []
        parts += ["r" + by_x(tuple(b - a for a, b in self.region))] if self.region else []
        parts += ["v2"] if self.zarr_format == 2 else []
        return "_".join([*parts, self.codec]) + ".zarr"

    def scaled(self, scale: float) -> StoreSpec:
        """Shrink all axes of array, chunks and shards; the numbers of chunks and shards stay about the same.

        A scaled case has no mark, since its chunks have another size.
        """
        if scale == 1:
            return self
        chunks = tuple(max(1, round(size * scale)) for size in self.chunks)
        shards = self.shards and tuple(
            outer // inner * size for outer, inner, size in zip(self.shards, self.chunks, chunks, strict=True)
        )
        shape = tuple(
            max(1, round(extent * size / inner))
            for extent, size, inner in zip(self.shape, chunks, self.chunks, strict=True)
        )
        region = self.region and tuple(
            (a * small // large, max(a * small // large + 1, b * small // large))
            for (a, b), large, small in zip(self.region, self.shape, shape, strict=True)
        )
        return replace(self, shape=shape, chunks=chunks, shards=shards, region=region, reach=None)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a local folder.

    Sizes of the array, its (inner) chunks and its shards are in voxels; `dtype` is in this machine's byte order;
    `files` hold chunks and metadata, and `stored_bytes` counts the chunks; `data` describes the voxels; `region` is the
    begin and end of the region to read along each axis, None for the whole array.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    shards: tuple[int, ...] | None
    codecs: str
    zarr_format: int
    files: tuple[Path, ...]
    stored_bytes: int
    data: str = "as found"
    region: tuple[tuple[int, int], ...] | None = None

    @property
    def selection(self) -> tuple[slice, ...]:
        """The region to read, as slices."""
        return tuple(slice(a, b) for a, b in self.region or ((0, n) for n in self.shape))

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the region to read."""
        return tuple(part.stop - part.start for part in self.selection)

    @property
    def nbytes(self) -> int:
        """Decoded bytes of the region to read."""
        return math.prod(self.result_shape) * self.dtype.itemsize

    @property
    def chunk_files(self) -> int:
        """Number of files with chunks or shards."""
        return sum(file.name not in _METADATA for file in self.files)

    @property
    def ratio(self) -> float:
        """Decoded bytes over stored bytes; infinite if nothing is stored."""
        return math.prod(self.shape) * self.dtype.itemsize / self.stored_bytes if self.stored_bytes else math.inf


def _name(path: Path, source: Path) -> str:
    """Return the name of an array, for people; the name of a resolution begins with the name of its image."""
    return f"{source.name}/{path.relative_to(source.absolute())}" if source.absolute() in path.parents else path.name


def open_stored(source: str | Path, *, name: str | None = None, data: str = "as found") -> StoredArray:
    """Describe an array, or the finest level of an OME-Zarr image.

    Raises
    ------
    SourceError
        The array is not in a local folder, or has no voxels.
    """
    array = open_source(source if isinstance(source, Path) else str(source))
    if not isinstance(array.store, LocalStore):
        raise SourceError(f"{source}: a {type(array.store).__name__}; the benchmark reads local folders")
    path = Path(array.store.root) / array.path
    if math.prod(array.shape) == 0 or not array.shape:
        raise SourceError(f"{source}: shape {array.shape} has nothing to time")
    files = tuple(Path(folder, file) for folder, _, names in os.walk(path) for file in sorted(names))
    return StoredArray(
        name=name or _name(path, Path(source)),
        path=path,
        shape=array.shape,
        chunks=tuple(array.chunks),
        dtype=check_dtype(array.dtype),
        shards=None if array.shards is None else tuple(array.shards),
        codecs=" + ".join(_codec_names(array)) or "none",
        zarr_format=int(array.metadata.zarr_format),
        files=files,
        stored_bytes=sum(file.stat().st_size for file in files if file.name not in _METADATA),
        data=data,
    )


def new_store(spec: StoreSpec, folder: Path) -> Path:
    """Return the path of a store to make; raise ``FileExistsError`` if the path exists."""
    path = folder / spec.file_name
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists and is not overwritten: give another folder, or time it as ARRAY")
    return path


def generate(spec: StoreSpec, folder: str | Path, seed: int = 0) -> StoredArray:
    """Write a store into a folder, which is made if needed, and describe it.

    Raises
    ------
    FileExistsError
        The path exists; it is not changed.
    OSError
        The disk is too small.
    """
    folder = Path(folder)
    path = new_store(spec, folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < spec.nbytes:
        raise OSError(f"{folder}: {spec.nbytes:,} bytes to write at most, {free:,} bytes free")
    path.mkdir()
    try:
        data = _write(spec, path, seed)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # this call made the folder
        raise
    return replace(open_stored(path, name=spec.name, data=data), region=spec.region)


def _write(spec: StoreSpec, path: Path, seed: int) -> str:
    """Write the voxels piece by piece; return a description of them."""
    dtype = np.dtype(spec.dtype)
    change = 0.0 if spec.codec == "none" else change_for_ratio(_encoder(spec), spec.shape, spec.chunks, dtype, seed)
    array = _create(spec, LocalStore(path), spec.shape, spec.chunks, spec.shards)
    for block in blocks(spec.shape, spec.shards or spec.chunks, dtype.itemsize):
        rng = generator(seed, block)
        size = tuple(part.stop - part.start for part in block)
        if change:
            voxels = oct_voxels(rng, spec.shape, block, dtype, change)
        else:
            voxels = random_voxels(rng, size, dtype.newbyteorder("="))
        write_from_host(array, block, voxels)
    return f"OCT-like, speckle grains of {1 / change:.1f} voxels" if change else "random, next to incompressible"


def _create(
    spec: StoreSpec, store: Store, shape: tuple[int, ...], chunks: tuple[int, ...], shards: tuple[int, ...] | None
) -> zarr.Array:
    return zarr.create_array(
        store, shape=shape, chunks=chunks, shards=shards, dtype=spec.dtype, filters=None, fill_value=0,
        compressors=CODECS[spec.codec][spec.zarr_format - 2], zarr_format=spec.zarr_format,
    )  # fmt: skip


def _encoder(spec: StoreSpec) -> Callable[[np.ndarray], int]:
    """Return a function that encodes an array as one chunk of the store, and returns the number of stored bytes."""

    def encoded_bytes(sample: np.ndarray) -> int:
        array = _create(spec, MemoryStore(), sample.shape, sample.shape, None)
        metadata = array.nbytes_stored()
        write_from_host(array, ..., sample)
        return max(1, array.nbytes_stored() - metadata)

    return encoded_bytes


def _codec_names(array: zarr.Array) -> list[str]:
    """Name the filters and compressors of an array, without the codec that turns numbers into bytes."""
    return [_codec_name(codec) for codec in (*array.filters, *array.compressors)]


def _codec_name(codec: Any) -> str:
    """Name a codec of zarr v3, or a codec of numcodecs (zarr v2), which has settings and name in one mapping."""
    described = codec.get_config() if hasattr(codec, "get_config") else codec.to_dict()
    settings = described.get("configuration", described)
    name = str(described.get("id") or described.get("name"))
    if name != "blosc":
        return name
    shuffle = settings.get("shuffle")
    if isinstance(shuffle, int):
        shuffle = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle", -1: "autoshuffle"}.get(shuffle, shuffle)
    return f"blosc({settings.get('cname')}, {shuffle})"


# ---- the truth: zarr-python's result on the host

#: zarr-python's own codec pipeline.
OWN_PIPELINE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


@contextmanager
def host_zarr() -> Iterator[None]:
    """Make zarr-python read with its own pipeline into host memory, independently of the caller's settings."""
    with host_zarr_context(), zarr.config.set(OWN_PIPELINE):
        yield


def truth(stored: StoredArray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield pieces of the region to read: the box within the region, and the voxels that zarr-python reads there."""
    first = [part.start for part in stored.selection]
    for block in blocks(stored.result_shape, stored.shards or stored.chunks, stored.dtype.itemsize):
        region = tuple(slice(a + part.start, a + part.stop) for a, part in zip(first, block, strict=True))
        with host_zarr():
            piece = np.asarray(zarr.open_array(stored.path, mode="r")[region])
        yield block, piece.astype(stored.dtype, copy=False)


def difference(stored: StoredArray, result: Array) -> str:
    """Return where and how an array differs from the truth; empty if it does not differ.

    NaN equals NaN. NumPy arrays are compared on the host, CuPy arrays on their device.
    """
    if tuple(result.shape) != stored.result_shape:
        return f"shape {tuple(result.shape)}, not {stored.result_shape}"
    if np.dtype(result.dtype).newbyteorder("=") != stored.dtype:
        return f"dtype {result.dtype}, not {stored.dtype}"
    xp = array_module(result)
    for block, piece in truth(stored):
        values, expected = result[block], xp.asarray(piece)
        wrong = values != expected
        if stored.dtype.kind in "fc":
            wrong &= ~(xp.isnan(values) & xp.isnan(expected))
        if bool(wrong.any()):
            index = np.unravel_index(int(wrong.argmax()), wrong.shape)
            voxel = tuple(int(part.start + n) for part, n in zip(block, index, strict=True))
            value, right, count = to_host(values[index]), to_host(expected[index]), int(wrong.sum())
            return f"voxel {voxel} is {value}, not {right}; {count:,} differ in its block"
    return ""
