"""Parse the codecs of a chunk into the steps that decode it.

In: the codecs of a chunk as the metadata list them. Out: :class:`DecodeChain`, or the reason why linumpy cannot decode
them. Pure: reads names and settings, no bytes.
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
#: Filters of numcodecs that only zarr-python decodes, if a compressor follows them: they are too rare for kernels.
HOST_FILTERS = ("delta", "fixedscaleoffset")
#: Largest element whose bytes the device unshuffles: blosc.cu holds at least eight elements in shared memory.
MAX_SHUFFLE_NBYTES = 2048
#: Size of a CRC-32C.
CHECKSUM_NBYTES = 4


@dataclass(frozen=True)
class DecodeChain:
    """The steps that decode a stored chunk, from the last codec back to the first.

    - `compressor`: one of :data:`COMPRESSORS`, or empty.
    - `inner`: with Blosc, the decoder of its streams: ``"lz4"``, ``"zstd"`` or ``"zlib"``.
    - `stored_checksum`: whether the stored bytes end in a CRC-32C of all bytes before it.
    - `decoded_checksum`: whether a CRC-32C of the chunk follows the chunk inside the compressed bytes.
    - `shuffle`: element size in bytes of numcodecs' shuffle filter before the compressor; 0 without the filter.
    - `host_filter`: a filter that only zarr-python decodes, as JSON: its name, ``"id"``, and its settings; for array
      codecs of zarr v3, which need no compressor, several names joined by " + ". Empty without such a filter.
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
        """Size of the checksum that follows the chunk in the decoded stream, in bytes; 0 without one."""
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

    - `codecs`: in the order of encoding; each with ``"name"`` and its settings. Names are names of zarr v3 or of
      numcodecs, the latter with or without ``"numcodecs."`` before them; "numcodecs.crc32c" is refused.
    - `chunk_nbytes`: size of the bytes that the codecs encode.
    - returns `chain`: None for raw chunks, and where there is a `reason`. A chain with a `host_filter` is for
      zarr-python.
    - returns `reason`: why linumpy cannot decode the codecs; None for raw chunks, and where there is a `chain`.
    """
    compressor, inner, shuffle, host_filter = "", "", 0, ""
    decoded_checksums = stored_checksums = 0  # inside and outside of the compressed bytes
    for codec in codecs:
        name = str(codec["name"]).removeprefix("numcodecs.")
        if name == "crc32c":
            if codec["name"] == "numcodecs.crc32c" or codec.get("location", "end") != "end":
                return None, f"codec {codec['name']!r}, whose checksum may come first"
            if compressor:
                stored_checksums += 1
            else:
                decoded_checksums += 1
        elif name in HOST_FILTERS and not (compressor or decoded_checksums or shuffle or host_filter):
            host_filter = json.dumps({**codec, "id": name}, sort_keys=True)
        elif name == "shuffle" and not (compressor or decoded_checksums or shuffle or host_filter):
            shuffle, reason = _parse_element_size(codec.get("elementsize", 4), chunk_nbytes)
            if reason:
                return None, reason
        elif name in COMPRESSORS and not compressor:
            compressor = name
            inner, reason = _parse_blosc_inner(codec) if name == "blosc" else ("", None)
            if reason:
                return None, reason
        else:
            is_known = name in (*COMPRESSORS, *HOST_FILTERS, "shuffle")
            return None, f"codec {codec['name']!r} is not decoded {'at this position' if is_known else 'on the device'}"
    if not compressor:
        stored_checksums, decoded_checksums = decoded_checksums, 0
    if shuffle > 1 and compressor == "blosc":
        return None, "filter 'shuffle' before codec 'blosc'"
    if host_filter and not compressor:
        return None, f"filter {json.loads(host_filter)['id']!r} without a compressor"
    if decoded_checksums > 1 or stored_checksums > 1:
        return None, "several checksums, one after another"
    shuffle = shuffle if shuffle > 1 else 0
    chain = DecodeChain(compressor, inner, bool(stored_checksums), bool(decoded_checksums), shuffle, host_filter)
    return (None if chain == DecodeChain("") else chain), None


def read_array_filter(
    codec: CodecSettings, dtype: np.dtype, endian: str | None
) -> tuple[dict[str, object] | None, str | None]:
    """Parse an array-to-array filter of zarr v3 as the filter of numcodecs that zarr v2 applies to bytes.

    - `codec`: ``"name"``, one of :data:`HOST_FILTERS` with "numcodecs." before it, and ``"configuration"``.
    - `dtype`: data type of the array, in this machine's byte order.
    - `endian`: byte order that the codec 'bytes' writes.
    - returns `settings`: name and settings, as :func:`read_chain` takes them.
    - returns `reason`: why numcodecs cannot decode the bytes that zarr v3 stores; None if numcodecs can.
    """
    name = str(codec["name"]).removeprefix("numcodecs.")
    configuration = codec.get("configuration")
    settings = dict(configuration) if isinstance(configuration, Mapping) else {}
    settings.pop("id", None)
    decoded_name = settings.get("dtype")
    if decoded_name is None and name == "fixedscaleoffset":  # zarr inserts the dtype of the array
        decoded_name = dtype.str
    stored_name = decoded_name if settings.get("astype") is None else settings["astype"]
    try:
        decoded, stored = np.dtype(_dtype_name(decoded_name)), np.dtype(_dtype_name(stored_name))
    except (TypeError, ValueError):
        return None, f"filter {name!r} from {stored_name!r} to {decoded_name!r}"
    if decoded != dtype or stored.kind not in "biufc":
        return None, f"filter {name!r} from {stored} to {decoded}, in an array of {dtype}"
    if stored.itemsize > 1 and endian is None:
        return None, f"filter {name!r} to {stored}: codec 'bytes' does not name its byte order"
    if stored.itemsize > 1 and (endian != "little" or stored != stored.newbyteorder("<")):
        return None, f"filter {name!r} to big-endian numbers"
    return {**settings, "name": name, "dtype": decoded.str, "astype": stored.str}, None


def _dtype_name(dtype: object) -> str:
    """Return the name of a dtype; raise TypeError for anything but text, since ``numpy.dtype(None)`` is float64."""
    if not isinstance(dtype, str):
        raise TypeError(dtype)
    return dtype


def _parse_element_size(size: object, chunk_nbytes: int) -> tuple[int, str | None]:
    """Return the element size of the filter 'shuffle'; or why the device cannot undo the shuffle.

    Elements of up to 1 byte are not shuffled. zarr raises if the element size does not divide the chunk.
    """
    if not isinstance(size, int):
        return 0, f"filter 'shuffle' with elements of {size!r} bytes"
    if size > 1 and chunk_nbytes % size:
        return 0, f"filter 'shuffle' with elements of {size} bytes, which do not divide the {chunk_nbytes} of a chunk"
    if size > MAX_SHUFFLE_NBYTES:
        return 0, f"filter 'shuffle' with elements of {size} bytes: the device takes up to {MAX_SHUFFLE_NBYTES}"
    return max(size, 0), None


def _parse_blosc_inner(codec: CodecSettings) -> tuple[str, str | None]:
    """Return the decoder of the streams of Blosc; or why the device has none."""
    name = codec.get("cname", "lz4")  # the default of numcodecs; zarr v3 always names it
    name = str(getattr(name, "value", name))
    if name not in BLOSC_INNER:
        return "", f"codec 'blosc' with {name!r} inside: the device decodes {', '.join(BLOSC_INNER)}"
    return BLOSC_INNER[name], None
