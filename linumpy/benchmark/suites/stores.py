"""What is read: arrays of the user's, and stores made for the purpose.

In: a description of a store (:class:`~linumpy.benchmark.suites.specs.CaseSpec`) or the name of an array. Out: a
:class:`StoredArray`, an array in a local folder whose properties are known. Errors: ``FileExistsError`` where a store
would be overwritten, ``OSError`` where the disk is too small, and what opening an array raises.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore, MemoryStore

from linumpy.benchmark.data import Block, blocks, change_for_ratio, generator, oct_voxels, random_voxels
from linumpy.benchmark.suites.specs import CODECS, CaseSpec, check_dtype
from linumpy.device import array_module, to_host
from linumpy.errors import SourceError
from linumpy.io.open import open_source
from linumpy.io.zarr_mode import host_zarr_context, write_from_host

_METADATA = frozenset((".zarray", ".zattrs", ".zgroup", ".zmetadata", "zarr.json"))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a local folder, ready to be read.

    Attributes
    ----------
    name : str
        For people.
    path : Path
        Folder of the array.
    shape, chunks : tuple of int
        Of the array and of its (inner) chunks.
    dtype : numpy.dtype
        In this machine's byte order.
    shards : tuple of int or None
        Shape of a shard.
    codecs : str
        The codec chain.
    zarr_format : int
        2 or 3.
    files : tuple of Path
        The files that hold its chunks, and its metadata.
    stored_bytes : int
        Bytes of the chunks on the disk.
    data : str
        What the voxels are.
    region : tuple of (int, int), or None
        What is read of the array; None for all.
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
        """What is read, as zarr takes it."""
        return tuple(slice(a, b) for a, b in self.region or ((0, n) for n in self.shape))

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        return tuple(part.stop - part.start for part in self.selection)

    @property
    def nbytes(self) -> int:
        """Decoded bytes of what is read."""
        return math.prod(self.result_shape) * self.dtype.itemsize

    @property
    def chunk_files(self) -> int:
        """Number of files with chunks or shards."""
        return sum(file.name not in _METADATA for file in self.files)

    @property
    def ratio(self) -> float:
        """Decoded bytes over stored bytes; infinite where nothing is stored."""
        return math.prod(self.shape) * self.dtype.itemsize / self.stored_bytes if self.stored_bytes else math.inf


def _name(path: Path, source: Path) -> str:
    """Name an array; of an image with the name of its folder, since that of its level says nothing."""
    return f"{source.name}/{path.relative_to(source.absolute())}" if source.absolute() in path.parents else path.name


def open_stored(source: str | Path, *, name: str | None = None, data: str = "as found") -> StoredArray:
    """Look at an array, or at the finest level of an OME-Zarr image.

    Raises
    ------
    SourceError
        Where the array is not in a local folder, or has no voxels.
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


def new_store(spec: CaseSpec, folder: Path) -> Path:
    """Return where a store goes; ``FileExistsError`` where something is there already."""
    path = folder / spec.file_name
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists and is not overwritten: give another folder, or time it as ARRAY")
    return path


def generate(spec: CaseSpec, folder: str | Path, seed: int = 0) -> StoredArray:
    """Write a store and look at it.

    Parameters
    ----------
    spec : CaseSpec
        What to write.
    folder : str or Path
        Where; made if it is not there.
    seed : int
        Of the voxels.

    Raises
    ------
    FileExistsError
        Where the store, or anything else of its name, is there already. It is left as it is.
    OSError
        Where the disk is too small.
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
        shutil.rmtree(path, ignore_errors=True)  # ours: the folder was not there before
        raise
    return replace(open_stored(path, name=spec.name, data=data), region=spec.region)


def _write(spec: CaseSpec, path: Path, seed: int) -> str:
    """Write the voxels piece by piece; return what they are."""
    dtype = np.dtype(spec.dtype)
    change = 0.0 if spec.codec == "none" else change_for_ratio(_encoder(spec), spec.shape, spec.chunks, dtype, seed)
    array = _create(spec, LocalStore(path), spec.shape, spec.chunks, spec.shards)
    for block in blocks(spec.shape, spec.shards or spec.chunks, dtype.itemsize):
        rng = generator(seed, block)
        size = tuple(part.stop - part.start for part in block)
        voxels = (
            oct_voxels(rng, spec.shape, block, dtype, change)
            if change
            else random_voxels(rng, size, dtype.newbyteorder("="))
        )
        write_from_host(array, block, voxels)
    return f"OCT-like, speckle grains of {1 / change:.1f} voxels" if change else "random, next to incompressible"


def _create(spec: CaseSpec, store: Any, shape: Any, chunks: Any, shards: Any) -> zarr.Array:
    return zarr.create_array(
        store,
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype=spec.dtype,
        filters=None,
        compressors=CODECS[spec.codec](spec.zarr_format),
        zarr_format=spec.zarr_format,
        fill_value=0,
    )


def _encoder(spec: CaseSpec) -> Callable[[np.ndarray], int]:
    """Return what encodes a sample just as the store will, as one chunk in memory."""

    def encoded_bytes(sample: np.ndarray) -> int:
        array = _create(spec, MemoryStore(), sample.shape, sample.shape, None)
        metadata = array.nbytes_stored()
        write_from_host(array, ..., sample)
        return max(1, array.nbytes_stored() - metadata)

    return encoded_bytes


def _codec_names(array: zarr.Array) -> list[str]:
    """Name what stands between the voxels and the disk, except for the plain spelling of numbers."""
    return [_codec_name(codec) for codec in (*array.filters, *array.compressors)]


def _codec_name(codec: Any) -> str:
    """Name a codec: zarr v2 has numcodecs' own, whose settings stand beside the name."""
    described = codec.get_config() if hasattr(codec, "get_config") else codec.to_dict()
    settings = described.get("configuration", described)
    name = str(described.get("id") or described.get("name"))
    if name != "blosc":
        return name
    shuffle = settings.get("shuffle")
    if isinstance(shuffle, int):
        shuffle = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle", -1: "autoshuffle"}.get(shuffle, shuffle)
    return f"blosc({settings.get('cname')}, {shuffle})"


# ---- what is right: what zarr-python reads on the host

#: zarr-python's own way to decode chunks.
OWN_PIPELINE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}


@contextmanager
def host_zarr() -> Iterator[None]:
    """Have zarr-python read with its own pipeline into host memory, whatever the caller has set."""
    with host_zarr_context(), zarr.config.set(OWN_PIPELINE):
        yield


def truth(stored: StoredArray) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield what is read piece by piece, as zarr-python reads it."""
    first = [part.start for part in stored.selection]
    for block in blocks(stored.result_shape, stored.shards or stored.chunks, stored.dtype.itemsize):
        there = tuple(slice(a + part.start, a + part.stop) for a, part in zip(first, block, strict=True))
        with host_zarr():
            piece = np.asarray(zarr.open_array(stored.path, mode="r")[there])
        yield block, piece.astype(stored.dtype, copy=False)


def difference(stored: StoredArray, got: Any) -> str | None:
    """Say where an array differs from the truth; None where it does not.

    NaN equals NaN. The comparison of NumPy arrays runs on the host, of CuPy arrays on their device.
    """
    if tuple(got.shape) != stored.result_shape:
        return f"shape {tuple(got.shape)}, not {stored.result_shape}"
    if np.dtype(got.dtype).newbyteorder("=") != stored.dtype:
        return f"dtype {got.dtype}, not {stored.dtype}"
    xp = array_module(got)
    for block, piece in truth(stored):
        here, true = got[block], xp.asarray(piece)
        wrong = here != true
        if stored.dtype.kind in "fc":
            wrong &= ~(xp.isnan(here) & xp.isnan(true))
        if bool(wrong.any()):
            return _first(block, here, true, wrong)
    return None


def _first(block: Block, here: Any, true: Any, wrong: Any) -> str:
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    where = tuple(int(part.start + one) for part, one in zip(block, at, strict=True))
    return f"voxel {where} is {to_host(here[at])}, not {to_host(true[at])}; {int(wrong.sum()):,} differ in its block"
