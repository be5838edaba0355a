"""The codecs of a chunk, and how the device decodes them.

In: the codecs of a chunk as the metadata list them. Out: :class:`DecodeChain`, or the reason why the device cannot
decode them. Pure: it reads names and settings, no bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

#: A codec or filter as the metadata describe it: its name and settings.
CodecSettings: TypeAlias = Mapping[str, object]

#: Compressors that the device decodes, by numcodecs' names (zarr v2; zarr v3 without the prefix "numcodecs.").
COMPRESSORS = ("zstd", "blosc", "lz4", "gzip", "zlib")
#: Compressors inside Blosc that the device decodes, and the decoder of each.
BLOSC_INNER = {"lz4": "lz4", "lz4hc": "lz4", "zstd": "zstd", "zlib": "zlib"}
#: Filters of numcodecs before a compressor that the host decodes: they are too rare for kernels.
HOST_FILTERS = ("delta", "fixedscaleoffset")
#: Largest element whose bytes the device unshuffles: blosc.cu holds at least eight elements in shared memory.
MAX_SHUFFLE_NBYTES = 2048
#: Size of a CRC-32C.
CHECKSUM_NBYTES = 4


@dataclass(frozen=True)
class DecodeChain:
    """The steps that decode a stored chunk, from the last codec back to the first.

    Attributes
    ----------
    compressor : str
        One of :data:`COMPRESSORS`, or empty.
    inner : str
        With Blosc, the decoder of its streams: ``"lz4"``, ``"zstd"`` or ``"zlib"``.
    stored_checksum : bool
        Whether a CRC-32C of the stored bytes follows them.
    decoded_checksum : bool
        Whether a CRC-32C of the chunk follows it inside the compressed bytes.
    shuffle : int
        Element size in bytes of numcodecs' shuffle filter before the compressor; 0 without the filter.
    host_filter : str
        Settings, as JSON, of a filter before the compressor that only zarr-python decodes; empty without one.
    """

    compressor: str
    inner: str = ""
    stored_checksum: bool = False
    decoded_checksum: bool = False
    shuffle: int = 0
    host_filter: str = ""

    @property
    def streams_by(self) -> str:
        """Decoder of the streams: ``"lz4"``, ``"zstd"``, ``"inflate"`` or ``"stored"``."""
        name = self.inner or self.compressor
        return {"": "stored", "gzip": "inflate", "zlib": "inflate"}.get(name, name)

    @property
    def is_reordered(self) -> bool:
        """Whether decoded bytes are written to a second buffer in their final order."""
        return self.compressor == "blosc" or self.shuffle > 0

    @property
    def tail_nbytes(self) -> int:
        """Bytes that follow the chunk in the decoded stream: its checksum."""
        return CHECKSUM_NBYTES if self.decoded_checksum else 0

    def __str__(self) -> str:
        steps = ["CRC-32C"] if self.stored_checksum else []
        steps += [f"Blosc ({self.inner})" if self.inner else self.compressor] if self.compressor else []
        steps += ["CRC-32C"] if self.decoded_checksum else []
        steps += ["byte shuffle"] if self.shuffle else []
        steps += [json.loads(self.host_filter)["id"]] if self.host_filter else []
        return " → ".join(steps)


def read_chain(codecs: Sequence[CodecSettings], chunk_nbytes: int) -> tuple[DecodeChain | None, str | None]:
    """Parse the codecs that encode the bytes of a chunk.

    Parameters
    ----------
    codecs : sequence of mapping
        In the order of encoding; each with ``"name"`` and its settings. Names are names of zarr v3 or of numcodecs, the
        latter with or without ``"numcodecs."`` before them.
    chunk_nbytes : int
        Bytes that the codecs encode.

    Returns
    -------
    chain : DecodeChain or None
        None for raw chunks and for codecs that the device does not decode.
    reason : str or None
        Why the device does not decode them; None if it does.
    """
    compressor, inner, shuffle, host_filter = "", "", 0, ""
    before = after = 0  # checksums inside and outside of the compressed bytes
    for codec in codecs:
        name = str(codec["name"]).removeprefix("numcodecs.")
        if name == "crc32c":
            if codec["name"] == "numcodecs.crc32c":
                return None, "codec 'numcodecs.crc32c': its checksum comes first"
            before, after = before + (not compressor), after + bool(compressor)
        elif name in HOST_FILTERS and not (compressor or before or shuffle or host_filter):
            host_filter = json.dumps({**codec, "id": name}, sort_keys=True)
        elif name == "shuffle" and not (compressor or before or shuffle or host_filter):
            shuffle, reason = _shuffle_element(codec.get("elementsize", 4), chunk_nbytes)
            if reason:
                return None, reason
        elif name in COMPRESSORS and not compressor:
            compressor = name
            inner, reason = _blosc_inner(codec) if name == "blosc" else ("", None)
            if reason:
                return None, reason
        else:
            return None, f"codec {codec['name']!r} is not decoded on the device"
    if not compressor:
        before, after = 0, before
    if shuffle > 1 and compressor == "blosc":
        return None, "filter 'shuffle' before codec 'blosc', which shuffles too"
    if host_filter and not compressor:
        return None, f"filter {json.loads(host_filter)['id']!r} without a compressor"
    if before > 1 or after > 1:
        return None, "several checksums, one after another"
    chain = DecodeChain(compressor, inner, bool(after), bool(before), shuffle if shuffle > 1 else 0, host_filter)
    return (None if chain == DecodeChain("") else chain), None


def read_array_filter(
    codec: CodecSettings, dtype: np.dtype, endian: str | None
) -> tuple[dict[str, object] | None, str | None]:
    """Parse an array-to-array filter of zarr v3 as the filter of numcodecs that zarr v2 applies to bytes.

    Parameters
    ----------
    codec : mapping
        ``"name"``, one of :data:`HOST_FILTERS` with "numcodecs." before it, and ``"configuration"``.
    dtype : numpy.dtype
        Data type of the array, in this machine's byte order.
    endian : str or None
        Byte order that the codec 'bytes' writes.

    Returns
    -------
    settings : dict or None
        Name and settings, as :func:`read_chain` takes them.
    reason : str or None
        Why numcodecs cannot decode the stored bytes as they are; None if it can.
    """
    name = str(codec["name"]).removeprefix("numcodecs.")
    configuration = codec.get("configuration")
    settings = dict(configuration) if isinstance(configuration, Mapping) else {}
    settings.pop("id", None)
    decoded = settings.get("dtype")
    if decoded is None and name == "fixedscaleoffset":  # zarr inserts the dtype of the array
        decoded = dtype.str
    encoded = decoded if settings.get("astype") is None else settings["astype"]
    try:
        to, stored = np.dtype(_dtype_name(decoded)), np.dtype(_dtype_name(encoded))
    except (TypeError, ValueError):
        return None, f"filter {name!r} from {encoded!r} to {decoded!r}"
    if to != dtype or stored.kind not in "biufc":
        return None, f"filter {name!r} from {stored} to {to}, in an array of {dtype}"
    if stored.itemsize > 1 and endian is None:
        return None, f"filter {name!r} to {stored}: codec 'bytes' does not name its byte order"
    if stored.itemsize > 1 and (endian != "little" or stored != stored.newbyteorder("<")):
        return None, f"filter {name!r} to big-endian numbers"
    return {**settings, "name": name, "dtype": to.str, "astype": stored.str}, None


def _dtype_name(dtype: object) -> str:
    """Return the name of a dtype; refuse anything but text, since ``numpy.dtype(None)`` is float64."""
    if not isinstance(dtype, str):
        raise TypeError(dtype)
    return dtype


def _shuffle_element(size: object, chunk_nbytes: int) -> tuple[int, str | None]:
    """Check an element size: zarr raises if it does not divide the chunk, and does not shuffle up to 1 byte."""
    if not isinstance(size, int):
        return 0, f"filter 'shuffle' with elements of {size!r} bytes"
    if size > 1 and chunk_nbytes % size:
        return 0, f"filter 'shuffle' with elements of {size} bytes, which do not divide the {chunk_nbytes} of a chunk"
    if size > MAX_SHUFFLE_NBYTES:
        return 0, f"filter 'shuffle' with elements of {size} bytes: the device takes up to {MAX_SHUFFLE_NBYTES}"
    return max(size, 0), None


def _blosc_inner(codec: CodecSettings) -> tuple[str, str | None]:
    name = codec.get("cname", "lz4")  # the default of numcodecs; zarr v3 always names it
    name = str(getattr(name, "value", name))
    if name not in BLOSC_INNER:
        return "", f"codec 'blosc' with {name!r} inside: the device decodes {', '.join(BLOSC_INNER)}"
    return BLOSC_INNER[name], None
