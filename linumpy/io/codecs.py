"""Convert encodings of chunks to codecs of zarr-python, and back; encode on the host; checksums."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec
from zarr.abc.codec import BytesBytesCodec
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from linumpy.plan.codecs import CHECKSUM_NBYTES, Encoding, nearest_encoding

_SHUFFLES_V2 = {"none": 0, "byte": 1, "bit": 2}
_SHUFFLES_V3 = {"none": "noshuffle", "byte": "shuffle", "bit": "bitshuffle"}


def zarr_codecs(encoding: Encoding, zarr_format: int) -> Codec | list[BytesBytesCodec] | None:
    """Return the codecs to make an array with, as zarr's parameter `compressors` takes them; None for raw chunks."""
    if zarr_format == 2:
        if encoding.checksum:
            raise ValueError(
                f"codec={str(encoding)!r}: zarr v2 stores no checksum behind a chunk; leave it out, or pass "
                "ngff_version='0.5'"
            )
        return _numcodec(encoding)
    codecs: list[BytesBytesCodec] = [Crc32cCodec()] if encoding.checksum else []
    if encoding.compressor:
        codecs.insert(0, _codec(encoding))
    return codecs or None


def _codec(encoding: Encoding) -> BytesBytesCodec:
    """Return the codec of zarr v3 for the compressor."""
    if encoding.compressor == "zstd":
        return ZstdCodec(level=encoding.level)
    if encoding.compressor == "gzip":
        return GzipCodec(level=encoding.level)
    if encoding.compressor == "blosc":
        return BloscCodec(
            cname=encoding.inner, clevel=encoding.level, shuffle=_SHUFFLES_V3[encoding.shuffle],  # type: ignore[arg-type]
            typesize=encoding.itemsize,
        )  # fmt: skip
    with warnings.catch_warnings():  # zarr warns that lz4 is not in the specification; so does docs/formats.md
        warnings.simplefilter("ignore")
        try:
            module: Any = importlib.import_module("zarr.codecs.numcodecs")
        except ImportError:  # older versions of zarr-python
            module = importlib.import_module("numcodecs.zarr3")
        return module.LZ4(acceleration=encoding.level)


def _numcodec(encoding: Encoding) -> Codec | None:
    """Return the codec of zarr v2 for the compressor, which stores the bytes of zarr v3; None for raw chunks."""
    if encoding.compressor == "blosc":
        return numcodecs.Blosc(encoding.inner, encoding.level, _SHUFFLES_V2[encoding.shuffle])
    setting = "acceleration" if encoding.compressor == "lz4" else "level"
    settings = {"id": encoding.compressor, setting: encoding.level}
    return numcodecs.get_codec(settings) if encoding.compressor else None  # type: ignore[no-any-return]


def codec_settings(array: zarr.Array) -> list[dict[str, object]] | None:
    """Return name and settings of each bytes-to-bytes codec of an array; None if the array has filters."""
    if array.filters:
        return None
    codecs = []
    for codec in array.compressors:
        if isinstance(codec, Codec):
            settings = dict(codec.get_config())
            settings["name"] = settings.pop("id")
        else:
            document: Any = codec.to_dict()  # type: ignore[union-attr]
            configuration = document.get("configuration")
            settings = {**(configuration if isinstance(configuration, Mapping) else {}), "name": document["name"]}
        codecs.append(settings)
    return codecs


def encoding_like(array: zarr.Array) -> Encoding | None:
    """Return the encoding most similar to the codecs of an array; None if it has filters or another compressor."""
    settings = codec_settings(array)
    return None if settings is None else nearest_encoding(settings, array.dtype.itemsize)


def encoding_of(array: zarr.Array) -> Encoding | None:
    """Return the encoding that has exactly the codecs of an array; None if no encoding has them."""
    encoding = encoding_like(array)
    if encoding is None:
        return None
    try:
        codecs = zarr_codecs(encoding, array.metadata.zarr_format)
    except ValueError:
        return None
    expected = () if codecs is None else tuple(codecs) if isinstance(codecs, list) else (codecs,)
    return encoding if expected == tuple(array.compressors) else None


def host_encoder(encoding: Encoding) -> Callable[[np.ndarray], bytes | np.ndarray]:
    """Return a thread-safe function that encodes a contiguous chunk, without appending the checksum."""
    codec = _numcodec(encoding)
    return (lambda chunk: chunk.reshape(-1).view(np.uint8)) if codec is None else codec.encode


def checksum(data: bytes | memoryview | np.ndarray) -> bytes:
    """Return the CRC-32C of bytes as zarr's codec stores it."""
    crc = Checksum()
    crc.add(data)
    return crc.stored()


class Checksum:
    """The CRC-32C of bytes that arrive in parts."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, data: bytes | memoryview | np.ndarray) -> None:
        """Append bytes."""
        import google_crc32c  # a dependency of zarr-python

        self._value = google_crc32c.extend(self._value, np.frombuffer(data, np.uint8))

    def stored(self) -> bytes:
        """Return the checksum as zarr's codec stores it."""
        return self._value.to_bytes(CHECKSUM_NBYTES, "little")
