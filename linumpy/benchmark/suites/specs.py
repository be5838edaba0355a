"""Which stores the benchmark makes: their description, their codecs, and the standard cases.

Nothing is written here. Errors: ``ValueError`` for a description that makes no array.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numcodecs
import numpy as np
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from linumpy.benchmark.cases import Mark


def _blosc(zarr_format: int) -> Any:
    # What NGFF 0.4 files have most often.
    if zarr_format == 2:
        return numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)
    return BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")


def _blosc_zstd(zarr_format: int) -> Any:
    # What iohub writes.
    if zarr_format == 2:
        return numcodecs.Blosc("zstd", 1, numcodecs.Blosc.BITSHUFFLE)
    return BloscCodec(cname="zstd", clevel=1, shuffle="bitshuffle")


#: What may be between the chunks and the disk, by zarr format. The codec's own settings, so that its name says all.
CODECS: dict[str, Callable[[int], Any]] = {
    "none": lambda zarr_format: None,
    "zstd": lambda zarr_format: numcodecs.Zstd(3) if zarr_format == 2 else ZstdCodec(level=3),
    "blosc": _blosc,
    "blosc-zstd": _blosc_zstd,
    "gzip": lambda zarr_format: numcodecs.GZip(5) if zarr_format == 2 else GzipCodec(level=5),
}


#: What a reach may be measured by.
REACH_OF: dict[str, Callable[[float], Mark]] = {
    "flat": lambda least: Mark(least, ("flat",), "× flat"),
    "rate": Mark,
    "zarr-gpu": lambda least: Mark(least, ("zarr-gpu",), "× zarr-gpu"),
    "host": lambda least: Mark(least, ("zarr-numpy", "tensorstore", "zarrs"), "× the best host path"),
}


def check_dtype(dtype: Any) -> np.dtype:
    """Return the type in this machine's byte order, if a device has it."""
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"dtype {dtype!r} is unknown to NumPy") from error
    if known.kind not in "biufc" or known.itemsize > (16 if known.kind == "c" else 8):
        raise ValueError(f"dtype {known}: bool, integers, floats and complex numbers can be read on a GPU")
    return known.newbyteorder("=")


@dataclass(frozen=True, slots=True)
class CaseSpec:
    """A store to make.

    Attributes
    ----------
    name : str
        For people.
    shape, chunks : tuple of int
        Of the array and of its chunks; in shards, of the inner chunks.
    dtype : str
        NumPy's name of the type: bool, integer, float or complex.
    shards : tuple of int or None
        Shape of a shard, a multiple of the chunk in each axis.
    codec : str
        A key of :data:`CODECS`.
    reach : float or None
        What ``linumpy auto`` is to reach.
    reach_of : str
        Of what: a key of :data:`REACH_OF`, or the name of an earlier case whose rate is compared.
    region : tuple of (int, int), or None
        First and last-but-one voxel along each axis of what is read; None for all.
    zarr_format : int
        2 or 3.
    """

    name: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    shards: tuple[int, ...] | None = None
    codec: str = "none"
    reach: float | None = None
    reach_of: str = "flat"
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
        """What ``linumpy auto`` is to reach, if anything."""
        if self.reach is None:
            return None
        if self.reach_of in REACH_OF:
            return REACH_OF[self.reach_of](self.reach)
        return Mark(self.reach, (f"{self.reach_of}/linumpy-auto",), f"× {self.reach_of}")

    @property
    def nbytes(self) -> int:
        """Decoded bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def file_name(self) -> str:
        """Name of the store's folder: the same description makes the same name."""
        parts = [np.dtype(self.dtype).name, _times(self.shape), "c" + _times(self.chunks)]
        parts += ["s" + _times(self.shards)] if self.shards else []
        parts += ["r" + _times(tuple(b - a for a, b in self.region))] if self.region else []
        parts += ["v2"] if self.zarr_format == 2 else []
        return "_".join([*parts, self.codec]) + ".zarr"

    def scaled(self, scale: float) -> CaseSpec:
        """Shrink all axes of array, chunks and shards; the numbers of chunks and shards stay about the same.

        A scaled case has nothing to reach: its chunks are of another size.
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


def _times(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


_SHAPE, _SHARDS = (512, 1024, 1024), (256, 512, 512)
_SHARDED = "zstd, 64³ in 256×512×512 shards"


def _uint16(
    name: str, shape: tuple[int, ...], chunks: tuple[int, ...], codec: str, reach: float, of: str = "rate", **more: Any
) -> CaseSpec:
    return CaseSpec(name, shape, chunks, "uint16", codec=codec, reach=reach, reach_of=of, **more)


#: The standard cases and what is to be reached in them, on an H200-class machine with a warm page cache.
SUITES: dict[str, tuple[CaseSpec, ...]] = {
    "raw": (
        CaseSpec("raw float32, 128³ chunks", (512, 1024, 1024), (128,) * 3, "float32", reach=0.85),
        CaseSpec("raw uint16, 64³ chunks", (512, 1024, 1024), (64,) * 3, "uint16", reach=0.4),
        CaseSpec(
            "raw uint16, 64³ in 256×512×512 shards",
            (512, 1024, 1024),
            (64,) * 3,
            "uint16",
            shards=(256, 512, 512),
            reach=0.8,
        ),
        CaseSpec("raw float32, 256³ chunks, ragged", (500, 1000, 1000), (256,) * 3, "float32", reach=0.8),
    ),
    "codecs": (
        _uint16("zstd, 64×128×128 chunks", _SHAPE, (64, 128, 128), "zstd", 12),
        _uint16("Blosc lz4 shuffle, 64×128×128, v2", _SHAPE, (64, 128, 128), "blosc", 12, zarr_format=2),
        _uint16("Blosc zstd bitshuffle, 16×256×256, v2", _SHAPE, (16, 256, 256), "blosc-zstd", 10, zarr_format=2),
        _uint16(_SHARDED, _SHAPE, (64,) * 3, "zstd", 12, shards=_SHARDS),
        _uint16(
            "1/8 of it",
            _SHAPE,
            (64,) * 3,
            "zstd",
            0.6,
            _SHARDED,
            shards=_SHARDS,
            region=((128, 384), (256, 768), (256, 768)),
        ),
        _uint16("zstd, 4096 chunks of 32³", (512,) * 3, (32,) * 3, "zstd", 10, "zarr-gpu"),
        _uint16("zstd, one chunk of 512 MiB", (256, 1024, 1024), (256, 1024, 1024), "zstd", 1, "host"),
    ),
}
