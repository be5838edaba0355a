"""How chunks are encoded. Pure: names and settings, no bytes.

In: what a caller asks for, or the codecs of an array as its metadata list them. Out: :class:`Encoding`, which the
encoders on the device and the codecs of zarr-python are made from. Errors: ``ValueError`` for names that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from linumpy.plan.codecs import BLOSC_INNER, CodecSettings

#: Effort of the encoders on the host, of each compressor and preset.
LEVELS: Mapping[tuple[str, str], int] = {
    ("zstd", "fast"): 1,
    ("zstd", "small"): 9,
    ("gzip", "fast"): 1,
    ("gzip", "small"): 6,
    ("lz4", "fast"): 1,  # its acceleration
    # Of Blosc, whose level 5 is level 9 of zstd.
    ("blosc:lz4", "fast"): 5,
    ("blosc:lz4", "small"): 9,
    ("blosc:zstd", "fast"): 1,
    ("blosc:zstd", "small"): 5,
}
COMPRESSORS = ("zstd", "lz4", "gzip", "blosc")
INNER = ("lz4", "zstd")
PRESETS = ("fast", "small")
SHUFFLES = ("none", "byte", "bit")
#: Codec of images whose source has none that can be taken over.
DEFAULT_CODEC = "zstd"
#: Default of parameters `compressors`, which take codecs by object: `codec` decides.
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
        With Blosc, what encodes its streams: ``"lz4"`` or ``"zstd"``.
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
        """Effort of the host's encoder."""
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
        default), ``":bit"`` or ``":none"`` for the shuffle; all but ``"lz4"`` and ``"none"`` with ``":small"`` for less
        bytes and more time; all with ``"+crc32c"`` for a checksum.
    itemsize : int
        Bytes of a voxel.

    Raises
    ------
    TypeError
        No str.
    ValueError
        Another name.
    """
    if not isinstance(codec, str):
        raise TypeError(f"codec={codec!r}: pass the name of a codec, such as 'zstd'")
    name, *words = codec.removesuffix(_CHECKSUM).split(":")
    found = Encoding("" if name == "none" else name, itemsize=itemsize, checksum=codec.endswith(_CHECKSUM))
    wanted = ["preset"]
    if name == "blosc":
        inner, *words = words or [""]
        found, wanted = replace(found, inner=inner, shuffle="byte"), ["preset", "shuffle"]
    for word in words:
        field = "shuffle" if word in SHUFFLES else "preset"
        if field not in wanted:
            raise _unknown(codec)
        wanted.remove(field)
        found = replace(found, shuffle=word) if field == "shuffle" else replace(found, preset=word)
    known = f"blosc:{found.inner}" if name == "blosc" else name
    if (known, found.preset) not in LEVELS and (known, words) != ("none", []):
        raise _unknown(codec)
    return found


def _unknown(codec: str) -> ValueError:
    return ValueError(
        f"codec={codec!r}: choose one of zstd, zstd:small, lz4, gzip, gzip:small, none, blosc:lz4, or blosc:zstd with "
        ":bit, :byte or :none, and :small; each with +crc32c for a checksum"
    )


def nearest_encoding(codecs: Sequence[CodecSettings], itemsize: int) -> Encoding | None:
    """Return the encoding that is most like the codecs of an array; None if none has its compressor.

    Parameters
    ----------
    codecs : sequence of mapping
        Those of bytes, in the order of encoding: name, as zarr v3 or numcodecs spell it, and settings.
    itemsize : int
        Bytes of a voxel.
    """
    found = Encoding("", itemsize=itemsize)
    for codec in codecs:
        name = str(codec["name"]).removeprefix("numcodecs.")
        if name == "crc32c":
            found = replace(found, checksum=True)
        elif name not in COMPRESSORS or found.compressor:
            return None
        else:
            inner = BLOSC_INNER.get(str(codec.get("cname", "lz4")), "") if name == "blosc" else ""
            found = replace(found, compressor=name, inner=inner, shuffle=_shuffle(codec) if inner else "none")
            if name == "blosc" and inner not in INNER:
                return None
            found = replace(found, preset=_preset(found, codec))
    return found


def _shuffle(codec: CodecSettings) -> str:
    """Return the shuffle of Blosc: a number in zarr v2, where -1 depends on the dtype, and a word in v3."""
    shuffle = codec.get("shuffle", 1)
    words = {0: "none", 1: "byte", 2: "bit", "noshuffle": "none", "shuffle": "byte", "bitshuffle": "bit"}
    return words.get(shuffle, "byte")  # type: ignore[call-overload, no-any-return]


def _preset(found: Encoding, codec: CodecSettings) -> str:
    level = codec.get("clevel", codec.get("level", 0))
    small = replace(found, preset="small")
    has_small = any(key == (f"blosc:{found.inner}" if found.inner else found.compressor, "small") for key in LEVELS)
    return "small" if has_small and isinstance(level, int) and level >= small.level else "fast"
