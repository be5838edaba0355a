"""Encodings of chunks ↔ codecs of zarr-python.

In: an :class:`~linumpy.plan.encoding.Encoding`, or an array. Out: the codecs to make an array with; the encoding of an
array, or the one most like it; a function that encodes a chunk on the host. Errors: ``ValueError`` for what a zarr
format does not store.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from linumpy.plan.codecs import CHECKSUM_NBYTES
from linumpy.plan.encoding import Encoding, nearest_encoding

_SHUFFLES_V2 = {"none": 0, "byte": 1, "bit": 2}
_SHUFFLES_V3 = {"none": "noshuffle", "byte": "shuffle", "bit": "bitshuffle"}


def zarr_codecs(encoding: Encoding, zarr_format: int) -> Any:
    """Return the codecs to make an array with, as zarr's parameter `compressors` takes them; None for raw chunks.

    Raises
    ------
    ValueError
        A checksum in zarr v2, which has no place for one.
    """
    if zarr_format == 2:
        if encoding.checksum:
            raise ValueError(
                f"codec={str(encoding)!r}: zarr v2 stores no checksum behind a chunk; leave it out, or pass "
                "ngff_version='0.5'"
            )
        return _numcodec(encoding)
    codecs: list[Any] = [Crc32cCodec()] if encoding.checksum else []
    if encoding.compressor:
        codecs.insert(0, _codec(encoding))
    return codecs or None


def _codec(encoding: Encoding) -> Any:
    """Return the codec of zarr v3."""
    if encoding.compressor == "zstd":
        return ZstdCodec(level=encoding.level)
    if encoding.compressor == "gzip":
        return GzipCodec(level=encoding.level)
    if encoding.compressor == "blosc":
        return BloscCodec(
            cname=encoding.inner, clevel=encoding.level, shuffle=_SHUFFLES_V3[encoding.shuffle],  # type: ignore[arg-type]
            typesize=encoding.itemsize,
        )  # fmt: skip
    with warnings.catch_warnings():  # not in the specification, which docs/formats.md says
        warnings.simplefilter("ignore")
        try:
            wrapped: Any = importlib.import_module("zarr.codecs.numcodecs")
        except ImportError:  # of older versions
            wrapped = importlib.import_module("numcodecs.zarr3")
        return wrapped.LZ4(acceleration=encoding.level)


def _numcodec(encoding: Encoding) -> Any:
    """Return the codec of zarr v2, whose bytes are those of the one of v3; None for raw chunks."""
    if encoding.compressor == "zstd":
        return numcodecs.Zstd(level=encoding.level)
    if encoding.compressor == "gzip":
        return numcodecs.GZip(level=encoding.level)
    if encoding.compressor == "lz4":
        return numcodecs.LZ4(acceleration=encoding.level)
    if encoding.compressor == "blosc":
        return numcodecs.Blosc(encoding.inner, encoding.level, _SHUFFLES_V2[encoding.shuffle])
    return None


def codec_settings(array: zarr.Array) -> list[dict[str, Any]] | None:
    """Return name and settings of the codecs of bytes of an array; None where filters change its voxels before."""
    if array.filters:
        return None
    found = []
    for codec in array.compressors:
        if isinstance(codec, numcodecs.abc.Codec):
            settings = dict(codec.get_config())
            settings["name"] = settings.pop("id")
        else:
            document: Any = codec.to_dict()  # type: ignore[union-attr]
            configuration = document.get("configuration")
            settings = {**(configuration if isinstance(configuration, Mapping) else {}), "name": document["name"]}
        found.append(settings)
    return found


def encoding_like(array: zarr.Array) -> Encoding | None:
    """Return the encoding most like the codecs of an array; None if there is none."""
    settings = codec_settings(array)
    return None if settings is None else nearest_encoding(settings, array.dtype.itemsize)


def encoding_of(array: zarr.Array) -> Encoding | None:
    """Return the encoding of an array; None where its codecs are not those that a name stands for."""
    found = encoding_like(array)
    if found is None:
        return None
    try:
        wanted = zarr_codecs(found, array.metadata.zarr_format)
    except ValueError:
        return None
    made = () if wanted is None else tuple(wanted) if isinstance(wanted, list) else (wanted,)
    return found if made == tuple(array.compressors) else None


def host_encoder(encoding: Encoding) -> Callable[[np.ndarray], bytes | np.ndarray]:
    """Return a function of a contiguous chunk to its stored bytes, less the checksum; for several threads."""
    codec = _numcodec(encoding)
    return _raw if codec is None else codec.encode  # type: ignore[no-any-return]


def _raw(chunk: np.ndarray) -> np.ndarray:
    return chunk.reshape(-1).view(np.uint8)


def checksum(data: Any) -> bytes:
    """Return the CRC-32C of bytes, as zarr's codec stores it."""
    crc = Checksum()
    crc.add(data)
    return crc.stored()


class Checksum:
    """The CRC-32C of bytes that come in parts."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, data: Any) -> None:
        """Add bytes behind those before."""
        import google_crc32c  # of zarr-python

        self._value = google_crc32c.extend(self._value, np.frombuffer(data, np.uint8))

    def stored(self) -> bytes:
        """Return it as zarr's codec stores it."""
        return self._value.to_bytes(CHECKSUM_NBYTES, "little")
