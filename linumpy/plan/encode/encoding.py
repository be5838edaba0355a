"""Names and settings of chunk encodings. Pure: encodes nothing.

In: the name of a codec, or the codecs of an array as its metadata list them. Out: :class:`Encoding`, from which the
encoders on the device and the codecs of zarr-python are made. Errors: ``ValueError`` for an unknown
name, ``TypeError`` for a name that is no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linumpy.plan.codecs import BLOSC_INNER, CodecSettings

#: Compression level of the host's encoders, by compressor and preset; the device's encoders use the preset itself.
LEVELS: Mapping[tuple[str, str], int] = {
    ("zstd", "fast"): 1,
    ("zstd", "small"): 9,
    ("gzip", "fast"): 1,
    ("gzip", "small"): 6,
    ("lz4", "fast"): 1,  # LZ4's parameter `acceleration`
    # Levels of Blosc, which passes level 9 to zstd at its own level 5.
    ("blosc:lz4", "fast"): 5,
    ("blosc:lz4", "small"): 9,
    ("blosc:zstd", "fast"): 1,
    ("blosc:zstd", "small"): 5,
}
COMPRESSORS = ("zstd", "lz4", "gzip", "blosc")
INNER = ("lz4", "zstd")
PRESETS = ("fast", "small")
SHUFFLES = ("none", "byte", "bit")
#: Codec of an image whose source has no codec, or one that linumpy cannot write.
DEFAULT_CODEC = "zstd"
#: Default of the parameter `compressors`, which takes codecs as objects: the parameter `codec` is used instead.
BY_CODEC = "by codec"
_CHECKSUM = "+crc32c"


@dataclass(frozen=True)
class Encoding:
    """The bytes-to-bytes codecs of a chunk.

    - `compressor`: ``"zstd"``, ``"lz4"``, ``"blosc"``, ``"gzip"``, or empty.
    - `inner`: with Blosc, the encoder of its streams: ``"lz4"`` or ``"zstd"``.
    - `preset`: ``"fast"``, or ``"small"``, which takes longer.
    - `shuffle`: with Blosc: ``"none"``, ``"byte"`` or ``"bit"``.
    - `itemsize`: bytes of a voxel; the element size of the shuffle.
    - `checksum`: whether a CRC-32C of the stored bytes follows them.
    """

    compressor: str
    inner: str = ""
    preset: str = "fast"
    shuffle: str = "none"
    itemsize: int = 1
    checksum: bool = False

    @property
    def level(self) -> int:
        """Compression level of the host's encoder; ``KeyError`` without a compressor."""
        return LEVELS[(f"blosc:{self.inner}" if self.inner else self.compressor, self.preset)]

    @property
    def not_on_device(self) -> str:
        """Why the device does not encode such chunks; empty if it does."""
        return "gzip is encoded by the host" if self.compressor == "gzip" else ""

    def __str__(self) -> str:
        """Return the name that :func:`parse_codec` turns into an equal encoding, apart from `itemsize`."""
        words = [self.compressor or "none"]
        if self.compressor == "blosc":
            words += [self.inner, self.shuffle]
        if self.preset != "fast":
            words.append(self.preset)
        return ":".join(words) + (_CHECKSUM if self.checksum else "")


def parse_codec(codec: str, itemsize: int = 1) -> Encoding:
    """Parse the name of a codec.

    - `codec`: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``, ``"blosc:lz4"`` or ``"blosc:zstd"``, followed by any of:
      ``":byte"`` (the default), ``":bit"`` or ``":none"``, the shuffle of Blosc; ``":small"`` for fewer bytes and more
      time, not for ``"lz4"`` and ``"none"``; ``"+crc32c"`` at the end for a checksum.
    - `itemsize`: bytes of a voxel.
    """
    if not isinstance(codec, str):
        raise TypeError(f"codec={codec!r}: pass the name of a codec, such as 'zstd'")
    name, *words = codec.removesuffix(_CHECKSUM).split(":")
    encoding = Encoding("" if name == "none" else name, itemsize=itemsize, checksum=codec.endswith(_CHECKSUM))
    allowed = ["preset"]
    if name == "blosc":
        inner, *words = words or [""]
        encoding, allowed = replace(encoding, inner=inner, shuffle="byte"), ["preset", "shuffle"]
    for word in words:
        setting = "shuffle" if word in SHUFFLES else "preset"
        if setting not in allowed:
            raise _unknown_codec_error(codec)
        allowed.remove(setting)
        encoding = replace(encoding, shuffle=word) if setting == "shuffle" else replace(encoding, preset=word)
    compressor = f"blosc:{encoding.inner}" if name == "blosc" else name
    if (compressor, encoding.preset) not in LEVELS and (compressor, words) != ("none", []):
        raise _unknown_codec_error(codec)
    return encoding


def _unknown_codec_error(codec: str) -> ValueError:
    return ValueError(
        f"codec={codec!r}: choose one of zstd, zstd:small, lz4, gzip, gzip:small, none; or blosc:lz4 or blosc:zstd, "
        "which take :bit, :byte or :none, and :small; each may end in +crc32c, for a checksum"
    )


def nearest_encoding(codecs: Sequence[CodecSettings], itemsize: int) -> Encoding | None:
    """Return the encoding most similar to the codecs of an array.

    None if a codec has no counterpart here, or if there are several compressors.

    - `codecs`: bytes-to-bytes codecs in the order of encoding: name, as zarr v3 or numcodecs spell it, and settings.
    - `itemsize`: bytes of a voxel.
    """
    encoding = Encoding("", itemsize=itemsize)
    for codec in codecs:
        name = str(codec["name"]).removeprefix("numcodecs.")
        if name == "crc32c":
            encoding = replace(encoding, checksum=True)
        elif name not in COMPRESSORS or encoding.compressor:
            return None
        else:
            inner = BLOSC_INNER.get(str(codec.get("cname", "lz4")), "") if name == "blosc" else ""
            encoding = replace(encoding, compressor=name, inner=inner, shuffle=_shuffle(codec) if inner else "none")
            if name == "blosc" and inner not in INNER:
                return None
            encoding = replace(encoding, preset=_preset(encoding, codec))
    return encoding


def _shuffle(codec: CodecSettings) -> str:
    """Return the shuffle of Blosc, which is a number in zarr v2 (-1, automatic, is taken for byte) and a word in v3."""
    shuffle = codec.get("shuffle", 1)
    words = {0: "none", 1: "byte", 2: "bit", "noshuffle": "none", "shuffle": "byte", "bitshuffle": "bit"}
    return words.get(shuffle, "byte")  # type: ignore[call-overload, no-any-return]


def _preset(encoding: Encoding, codec: CodecSettings) -> str:
    level = codec.get("clevel", codec.get("level", 0))
    small_level = LEVELS.get((f"blosc:{encoding.inner}" if encoding.inner else encoding.compressor, "small"))
    return "small" if small_level is not None and isinstance(level, int) and level >= small_level else "fast"
