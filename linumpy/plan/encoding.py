"""How chunks are encoded. Pure: names and settings, no bytes.

In: what a caller asks for. Out: :class:`Encoding`, which the encoders on the device and the codecs of zarr-python are
made from.
"""

from __future__ import annotations

from dataclasses import dataclass


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
