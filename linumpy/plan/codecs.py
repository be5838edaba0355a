"""Codecs of chunks: what decodes stored bytes, and what encodes chunks. Pure: reads names and settings, no bytes.

In: the codecs of a chunk as the metadata list them, or the name of a codec. Out: :class:`DecodeChain`,
:class:`Encoding`. Errors: :class:`UndecodableError`; ``ValueError`` and ``TypeError`` for names of codecs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

#: A codec or filter as the metadata describe it: its name and settings.
CodecSettings: TypeAlias = Mapping[str, object]


@dataclass(frozen=True)
class Codec:
    """A compressor, in both directions.

    - `streams`: the device's decoder of its streams.
    - `levels`: level of the host's encoder by preset; the device's encoders use the preset itself. Empty for a
      compressor that is only decoded.
    - `on_device`: whether the device encodes, too.
    """

    streams: str
    levels: Mapping[str, int] = field(default_factory=dict)
    on_device: bool = True


#: Compressors by numcodecs' names (zarr v2; zarr v3 without the prefix "numcodecs."), Blosc with the compressor inside.
#: Raw chunks have the codec "", which changes no byte.
CODECS: Mapping[str, Codec] = {
    "": Codec("stored", {"fast": 0}),
    "zstd": Codec("zstd", {"fast": 1, "small": 9}),
    "lz4": Codec("lz4", {"fast": 1}),  # LZ4's parameter `acceleration`
    "gzip": Codec("inflate", {"fast": 1, "small": 6}, on_device=False),
    "zlib": Codec("inflate"),
    # Levels of Blosc, which passes level 9 to zstd at its own level 5.
    "blosc:lz4": Codec("lz4", {"fast": 5, "small": 9}),
    "blosc:zstd": Codec("zstd", {"fast": 1, "small": 5}),
    "blosc:zlib": Codec("inflate"),
}
#: Filters of numcodecs that only zarr-python decodes, if a compressor follows them: they are too rare for kernels.
HOST_FILTERS = ("delta", "fixedscaleoffset")
#: Largest element whose bytes the device unshuffles: blosc.cu holds at least eight elements in shared memory.
MAX_SHUFFLE_NBYTES = 2048
#: Size of a CRC-32C.
CHECKSUM_NBYTES = 4
#: Codec of an image whose source has no codec, or one that linumpy cannot write.
DEFAULT_CODEC = "zstd"
#: Default of the parameter `compressors`, which takes codecs as objects: the parameter `codec` is used instead.
BY_CODEC = "by codec"
_CHECKSUM = "+crc32c"
_SHUFFLES = ("none", "byte", "bit")


class UndecodableError(Exception):
    """The reason why linumpy cannot decode a chunk."""


@dataclass(frozen=True)
class DecodeChain:
    """The steps that decode a stored chunk, from the last codec back to the first.

    - `compressor`: a name of :data:`CODECS`, or ``"blosc"``, of whose streams `inner` is the compressor.
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
        return CODECS[self.inner or self.compressor].streams

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


def read_chain(codecs: Sequence[CodecSettings], chunk_nbytes: int) -> DecodeChain | None:
    """Parse the codecs that encode the bytes of a chunk, of `chunk_nbytes`; None for raw chunks.

    - `codecs`: in the order of encoding; each with ``"name"``, of zarr v3 or numcodecs (with or without "numcodecs."),
      and its settings. "numcodecs.crc32c" is refused.
    """
    compressor, inner, shuffle, host_filter = "", "", 0, ""
    decoded_checksums = stored_checksums = 0  # inside and outside of the compressed bytes
    for codec in codecs:
        name = _plain_name(codec)
        is_first = not (compressor or decoded_checksums or shuffle or host_filter)
        if name == "crc32c":
            if codec["name"] == "numcodecs.crc32c" or codec.get("location", "end") != "end":
                raise UndecodableError(f"codec {codec['name']!r}, whose checksum may come first")
            stored_checksums += bool(compressor)
            decoded_checksums += not compressor
        elif name in HOST_FILTERS and is_first:
            host_filter = json.dumps({**codec, "id": name}, sort_keys=True)
        elif name == "shuffle" and is_first:
            shuffle = _element_size(codec.get("elementsize", 4), chunk_nbytes)
        elif name and (name in CODECS or name == "blosc") and not compressor:
            compressor, inner = name, _blosc_inner(codec) if name == "blosc" else ""
        else:
            is_known = name in (*CODECS, "blosc", *HOST_FILTERS, "shuffle")
            where = "at this position" if is_known else "on the device"
            raise UndecodableError(f"codec {codec['name']!r} is not decoded {where}")
    if not compressor:
        stored_checksums, decoded_checksums = decoded_checksums, 0
    if shuffle > 1 and compressor == "blosc":
        raise UndecodableError("filter 'shuffle' before codec 'blosc'")
    if host_filter and not compressor:
        raise UndecodableError(f"filter {json.loads(host_filter)['id']!r} without a compressor")
    if decoded_checksums > 1 or stored_checksums > 1:
        raise UndecodableError("several checksums, one after another")
    chain = DecodeChain(
        compressor=compressor,
        inner=inner,
        stored_checksum=bool(stored_checksums),
        decoded_checksum=bool(decoded_checksums),
        shuffle=shuffle if shuffle > 1 else 0,
        host_filter=host_filter,
    )
    return None if chain == DecodeChain("") else chain


def read_array_filter(codec: CodecSettings, dtype: np.dtype, endian: str | None) -> dict[str, object]:
    """Parse an array-to-array filter of zarr v3 as the filter of numcodecs that zarr v2 applies to bytes.

    - `codec`: ``"name"``, one of :data:`HOST_FILTERS` with "numcodecs." before it, and ``"configuration"``.
    - `endian`: byte order that the codec 'bytes' writes.
    """
    name, configuration = _plain_name(codec), codec.get("configuration")
    settings = dict(configuration) if isinstance(configuration, Mapping) else {}
    settings.pop("id", None)
    decoded_name = settings.get("dtype")
    if decoded_name is None and name == "fixedscaleoffset":  # zarr inserts the dtype of the array
        decoded_name = dtype.str
    stored_name = decoded_name if settings.get("astype") is None else settings["astype"]
    try:
        if not (isinstance(decoded_name, str) and isinstance(stored_name, str)):  # numpy.dtype(None) is float64
            raise TypeError
        decoded, stored = np.dtype(decoded_name), np.dtype(stored_name)
    except (TypeError, ValueError):
        raise UndecodableError(f"filter {name!r} from {stored_name!r} to {decoded_name!r}") from None
    if decoded != dtype or stored.kind not in "biufc":
        raise UndecodableError(f"filter {name!r} from {stored} to {decoded}, in an array of {dtype}")
    if stored.itemsize > 1 and endian is None:
        raise UndecodableError(f"filter {name!r} to {stored}: codec 'bytes' does not name its byte order")
    if stored.itemsize > 1 and (endian != "little" or stored != stored.newbyteorder("<")):
        raise UndecodableError(f"filter {name!r} to big-endian numbers")
    return {**settings, "name": name, "dtype": decoded.str, "astype": stored.str}


def _plain_name(codec: CodecSettings) -> str:
    return str(codec["name"]).removeprefix("numcodecs.")


def _element_size(size: object, chunk_nbytes: int) -> int:
    """Return the element size of the filter 'shuffle'. Elements of up to 1 byte are not shuffled."""
    if not isinstance(size, int):
        raise UndecodableError(f"filter 'shuffle' with elements of {size!r} bytes")
    if size > 1 and chunk_nbytes % size:  # zarr raises, too
        raise UndecodableError(
            f"filter 'shuffle' with elements of {size} bytes, which do not divide the {chunk_nbytes} of a chunk"
        )
    if size > MAX_SHUFFLE_NBYTES:
        raise UndecodableError(
            f"filter 'shuffle' with elements of {size} bytes: the device takes up to {MAX_SHUFFLE_NBYTES}"
        )
    return max(size, 0)


def _blosc_inner(codec: CodecSettings) -> str:
    """Return the compressor of the streams of Blosc; lz4hc is decoded as lz4."""
    name = codec.get("cname", "lz4")  # the default of numcodecs; zarr v3 always names it
    name = str(getattr(name, "value", name))
    inner = "lz4" if name == "lz4hc" else name
    if f"blosc:{inner}" not in CODECS:
        raise UndecodableError(f"codec 'blosc' with {name!r} inside: the device decodes lz4, lz4hc, zstd, zlib")
    return inner


@dataclass(frozen=True)
class Encoding:
    """The bytes-to-bytes codecs of a chunk.

    - `compressor`: ``"zstd"``, ``"lz4"``, ``"blosc"``, ``"gzip"``, or empty for raw chunks.
    - `inner`, `shuffle`: of Blosc: ``"lz4"`` or ``"zstd"``; ``"none"``, ``"byte"`` or ``"bit"``.
    - `preset`: ``"fast"``, or ``"small"``, which takes longer.
    - `checksum`: whether a CRC-32C of the stored bytes follows them.
    """

    compressor: str
    inner: str = ""
    preset: str = "fast"
    shuffle: str = "none"
    itemsize: int = 1
    checksum: bool = False

    @property
    def codec(self) -> Codec | None:
        """The compressor; None for one that linumpy does not know."""
        return CODECS.get(f"blosc:{self.inner}" if self.compressor == "blosc" else self.compressor)

    @property
    def level(self) -> int:
        """Compression level of the host's encoder."""
        assert self.codec is not None
        return self.codec.levels[self.preset]

    def __str__(self) -> str:
        """Return the name that :func:`parse_codec` turns into an equal encoding, apart from `itemsize`."""
        words = [self.compressor or "none"]
        if self.compressor == "blosc":
            words += [self.inner, self.shuffle]
        if self.preset != "fast":
            words.append(self.preset)
        return ":".join(words) + (_CHECKSUM if self.checksum else "")


def parse_codec(codec: str, itemsize: int = 1) -> Encoding:
    """Parse the name of a codec, as :class:`linumpy.write.writer.OmeZarrWriter` documents it."""
    if not isinstance(codec, str):
        raise TypeError(f"codec={codec!r}: pass the name of a codec, such as 'zstd'")
    name, *words = codec.removesuffix(_CHECKSUM).split(":")
    is_blosc = name == "blosc"
    inner = words.pop(0) if is_blosc and words else ""
    given = {"shuffle" if word in _SHUFFLES else "preset": word for word in words}
    settings = {"shuffle": "byte" if is_blosc else "none", "preset": "fast", **given}
    encoding = Encoding(
        "" if name == "none" else name, inner, itemsize=itemsize, checksum=codec.endswith(_CHECKSUM), **settings
    )
    is_known = encoding.codec is not None and encoding.preset in encoding.codec.levels and name != ""
    is_raw = name == "none"
    if not is_known or len(given) < len(words) or ("shuffle" in given and not is_blosc) or (is_raw and words):
        raise ValueError(
            f"codec={codec!r}: choose one of zstd, zstd:small, lz4, gzip, gzip:small, none; or blosc:lz4 or "
            "blosc:zstd, which take :bit, :byte or :none, and :small; each may end in +crc32c, for a checksum"
        )
    return encoding


def nearest_encoding(codecs: Sequence[CodecSettings], itemsize: int) -> Encoding | None:
    """Return the encoding most similar to the codecs of an array; None if one has no counterpart, or two compress."""
    encoding = Encoding("", itemsize=itemsize)
    for codec in codecs:
        name = _plain_name(codec)
        if name == "crc32c":
            encoding = replace(encoding, checksum=True)
            continue
        inner = str(codec.get("cname", "lz4")).replace("lz4hc", "lz4") if name == "blosc" else ""
        found = replace(encoding, compressor=name, inner=inner, shuffle=_shuffle(codec) if inner else "none")
        if encoding.compressor or found.codec is None or not found.codec.levels:
            return None
        level, small_level = codec.get("clevel", codec.get("level", 0)), found.codec.levels.get("small")
        is_small = small_level is not None and isinstance(level, int) and level >= small_level
        encoding = replace(found, preset="small" if is_small else "fast")
    return encoding


def _shuffle(codec: CodecSettings) -> str:
    """Return the shuffle of Blosc, which is a number in zarr v2 (-1, automatic, is taken for byte) and a word in v3."""
    shuffle = codec.get("shuffle", 1)
    words = {0: "none", 1: "byte", 2: "bit", "noshuffle": "none", "shuffle": "byte", "bitshuffle": "bit"}
    return words.get(shuffle, "byte")  # type: ignore[call-overload, no-any-return]
