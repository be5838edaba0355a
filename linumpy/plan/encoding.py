"""How chunks are encoded. Pure: names and settings, no bytes.

In: the name of a codec, or the codecs of an array as its metadata list them. Out: :class:`Encoding`, from which the
encoders on the device and the codecs of zarr-python are made. Errors: ``ValueError`` for names that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linumpy.plan.codecs import BLOSC_INNER, CodecSettings

#: Compression level of the encoders on the host, by compressor and preset.
LEVELS: Mapping[tuple[str, str], int] = {
    ("zstd", "fast"): 1,
    ("zstd", "small"): 9,
    ("gzip", "fast"): 1,
    ("gzip", "small"): 6,
    ("lz4", "fast"): 1,  # its acceleration
    # Blosc's own levels: its level 5 is level 9 of zstd.
    ("blosc:lz4", "fast"): 5,
    ("blosc:lz4", "small"): 9,
    ("blosc:zstd", "fast"): 1,
    ("blosc:zstd", "small"): 5,
}
COMPRESSORS = ("zstd", "lz4", "gzip", "blosc")
INNER = ("lz4", "zstd")
PRESETS = ("fast", "small")
SHUFFLES = ("none", "byte", "bit")
#: Codec of images whose source has none, or none that linumpy can write.
DEFAULT_CODEC = "zstd"
#: Default of parameters `compressors`, which take codecs as objects: the parameter `codec` decides.
BY_CODEC = "by codec"
_CHECKSUM = "+crc32c"


@dataclass(frozen=True)
class Encoding:
    """The codecs of a chunk, from its bytes to the stored ones.

    Attributes
    ----------
    compressor : str
        ``"zstd"``, ``"lz4"``, ``"blosc"``, ``"gzip"``, or empty.
    inner : str
        With Blosc, the encoder of its streams: ``"lz4"`` or ``"zstd"``.
    preset : str
        ``"fast"``, or ``"small"``, which takes longer.
    shuffle : str
        With Blosc: ``"none"``, ``"byte"`` or ``"bit"``.
    itemsize : int
        Bytes of a voxel, for the shuffle.
    checksum : bool
        Whether a CRC-32C of the stored bytes follows them.
    """

    compressor: str
    inner: str = ""
    preset: str = "fast"
    shuffle: str = "none"
    itemsize: int = 1
    checksum: bool = False

    @property
    def level(self) -> int:
        """Compression level of the host's encoder."""
        return LEVELS[(f"blosc:{self.inner}" if self.inner else self.compressor, self.preset)]

    @property
    def not_on_device(self) -> str:
        """Why the device does not encode such chunks; empty if it does."""
        return "gzip is encoded by the host" if self.compressor == "gzip" else ""

    def __str__(self) -> str:
        """Return the name that :func:`parse_codec` reads."""
        words = [self.compressor or "none"]
        if self.compressor == "blosc":
            words += [self.inner, self.shuffle]
        if self.preset != "fast":
            words.append(self.preset)
        return ":".join(words) + (_CHECKSUM if self.checksum else "")


def parse_codec(codec: str, itemsize: int = 1) -> Encoding:
    """Parse the name of a codec.

    Parameters
    ----------
    codec : str
        ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``, or ``"blosc:lz4"`` and ``"blosc:zstd"`` with ``":byte"`` (the
        default), ``":bit"`` or ``":none"`` for the shuffle; all but ``"lz4"`` and ``"none"`` with ``":small"`` for
        fewer bytes and more time; all with ``"+crc32c"`` for a checksum.
    itemsize : int
        Bytes of a voxel.

    Raises
    ------
    TypeError
        `codec` is not a str.
    ValueError
        `codec` is another name.
    """
    if not isinstance(codec, str):
        raise TypeError(f"codec={codec!r}: pass the name of a codec, such as 'zstd'")
    name, *words = codec.removesuffix(_CHECKSUM).split(":")
    encoding = Encoding("" if name == "none" else name, itemsize=itemsize, checksum=codec.endswith(_CHECKSUM))
    fields = ["preset"]
    if name == "blosc":
        inner, *words = words or [""]
        encoding, fields = replace(encoding, inner=inner, shuffle="byte"), ["preset", "shuffle"]
    for word in words:
        field = "shuffle" if word in SHUFFLES else "preset"
        if field not in fields:
            raise _unknown(codec)
        fields.remove(field)
        encoding = replace(encoding, shuffle=word) if field == "shuffle" else replace(encoding, preset=word)
    compressor = f"blosc:{encoding.inner}" if name == "blosc" else name
    if (compressor, encoding.preset) not in LEVELS and (compressor, words) != ("none", []):
        raise _unknown(codec)
    return encoding


def _unknown(codec: str) -> ValueError:
    return ValueError(
        f"codec={codec!r}: choose one of zstd, zstd:small, lz4, gzip, gzip:small, none, blosc:lz4, or blosc:zstd with "
        ":bit, :byte or :none, and :small; each with +crc32c for a checksum"
    )


def nearest_encoding(codecs: Sequence[CodecSettings], itemsize: int) -> Encoding | None:
    """Return the encoding most similar to the codecs of an array; None if no encoding has their compressor.

    Parameters
    ----------
    codecs : sequence of mapping
        Bytes-to-bytes codecs in the order of encoding: name, as zarr v3 or numcodecs spell it, and settings.
    itemsize : int
        Bytes of a voxel.
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
    """Return the shuffle of Blosc, which is a number in zarr v2 (-1 depends on the dtype) and a word in v3."""
    shuffle = codec.get("shuffle", 1)
    words = {0: "none", 1: "byte", 2: "bit", "noshuffle": "none", "shuffle": "byte", "bitshuffle": "bit"}
    return words.get(shuffle, "byte")  # type: ignore[call-overload, no-any-return]


def _preset(encoding: Encoding, codec: CodecSettings) -> str:
    level = codec.get("clevel", codec.get("level", 0))
    small_level = LEVELS.get((f"blosc:{encoding.inner}" if encoding.inner else encoding.compressor, "small"))
    return "small" if small_level is not None and isinstance(level, int) and level >= small_level else "fast"
