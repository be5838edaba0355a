"""Decode the stored bytes of a chunk with numcodecs: the oracle of the decoders of the core and of the device.

In: a :class:`~linumpy.plan.codecs.DecodeChain` and stored bytes. Out: all bytes of the chunk. Errors:
:class:`DecodeError`, to which the caller adds file and chunk. numcodecs allocates the size in a header without a check,
and decodes streams without a size to their end; here no decoder gets more memory than the chunk needs. zarr-python
decodes, and refuses, the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from typing import Any

import google_crc32c
import numcodecs
import numpy as np

from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain

_BLOSC_HEAD = 16
_ZSTD_MAGIC, _ZSTD_SKIPPABLE = 0xFD2FB528, 0x184D2A50
#: Largest window of a zstd frame of unknown size, which numcodecs decodes as a stream: a limit of zstd.
_ZSTD_WINDOW = 2**27 + 1


class DecodeError(ValueError):
    """No encoder makes these stored bytes from a chunk."""


def decode_chunk(chain: DecodeChain, stored: bytes | memoryview, out: np.ndarray) -> None:
    """Decode a chunk.

    Parameters
    ----------
    chain : DecodeChain
        The codecs of the chunk.
    stored : bytes
        Stored bytes.
    out : numpy.ndarray of uint8, (chunk_nbytes,)
        Receives the chunk.

    Raises
    ------
    DecodeError
        Broken bytes, a wrong size, a wrong checksum.
    """
    if chain.stored_checksum:
        stored = _without_checksum(stored, "stored bytes")
    if not (chain.tail_nbytes or chain.shuffle or chain.host_filter):
        _decompress(chain.compressor, memoryview(stored), out)
        return
    decoded = np.empty(_filtered_nbytes(chain, len(out)) + chain.tail_nbytes, np.uint8)
    _decompress(chain.compressor, memoryview(stored), decoded)
    content = decoded.data
    if chain.tail_nbytes:
        content = _without_checksum(content, "decoded bytes")
    if chain.host_filter:
        content = _without_filter(chain.host_filter, content)
        _check_size(len(content), len(out))
    if chain.shuffle:
        content = _without_shuffle(chain.shuffle, content)
    out[:] = np.frombuffer(content, np.uint8)


def _filtered_nbytes(chain: DecodeChain, chunk_nbytes: int) -> int:
    """Return the bytes of a chunk after its host filter: the same number of elements, of the dtype that it stores."""
    if not chain.host_filter:
        return chunk_nbytes
    settings = json.loads(chain.host_filter)
    try:
        dtype = np.dtype(settings["dtype"])
        stored = np.dtype(settings.get("astype") or dtype)
    except (KeyError, TypeError) as error:
        raise DecodeError(f"filter {settings['id']!r}: {error}") from error
    return chunk_nbytes // dtype.itemsize * stored.itemsize


def _without_filter(host_filter: str, data: memoryview) -> memoryview:
    settings = json.loads(host_filter)
    settings.pop("name", None)
    try:
        decoded = numcodecs.get_codec(settings).decode(data)
    except MemoryError:
        raise
    except Exception as error:  # for example a number of bytes that is no multiple of the element's size
        raise DecodeError(f"filter {settings['id']!r}: {error}") from error
    return np.ascontiguousarray(decoded).view(np.uint8).reshape(-1).data


def _without_shuffle(size: int, data: memoryview) -> memoryview:
    if len(data) % size:
        raise DecodeError(f"{len(data)} bytes are no whole number of the elements of {size} that were shuffled")
    return memoryview(numcodecs.Shuffle(size).decode(data)).cast("B")


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise DecodeError(f"{found} bytes were decoded, and a chunk has {expected}")


def _without_checksum(data: bytes | memoryview, what: str) -> memoryview:
    view = memoryview(data)
    if len(view) < CHECKSUM_NBYTES:
        raise DecodeError(f"{len(view)} bytes are too few for a checksum")
    body, tail = view[:-CHECKSUM_NBYTES], view[-CHECKSUM_NBYTES:]
    stored, computed = int.from_bytes(tail, "little"), google_crc32c.value(bytes(body))
    if stored != computed:
        raise DecodeError(f"the checksum of the {what} is {stored:#010x} and must be {computed:#010x}")
    return body


def _decompress(compressor: str, stored: memoryview, out: np.ndarray) -> None:
    """Fill `out`, all of it."""
    decoders = {"": _copy, "zstd": _zstd, "lz4": _lz4, "blosc": _blosc, "zlib": _zlib, "gzip": _gzip}
    try:
        decoders[compressor](stored, out)
    except (DecodeError, MemoryError):
        raise
    except Exception as error:  # each codec has errors of its own
        raise DecodeError(str(error)) from error


def _copy(stored: memoryview, out: np.ndarray) -> None:
    _check_size(len(stored), len(out))
    out[:] = np.frombuffer(stored, np.uint8)


def _zstd(stored: memoryview, out: np.ndarray) -> None:
    if _zstd_head(stored)[0] != len(out):  # several frames, or a frame of unknown size
        frames = _zstd_frames(stored)
        known = [content for content, _ in frames if content is not None]
        if len(known) == len(frames):
            _check_size(sum(known), len(out))
        elif any(content is None and window > _ZSTD_WINDOW for content, window in frames):
            raise DecodeError("a zstd frame whose size is not known has a window of more than 128 MiB")
    # Frames of unknown size must fill `out` exactly; others do, after the checks above.
    numcodecs.Zstd().decode(stored, out)


def _zstd_head(frame: memoryview) -> tuple[int | None, int, int]:
    """Read the header of a zstd frame, as RFC 8878 has it.

    Returns
    -------
    content : int or None
        Number of decoded bytes; None if unknown; 0 for a skippable frame.
    window : int
        Bytes of the window.
    nbytes : int
        Bytes of the header, or of the whole skippable frame.
    """
    magic = int.from_bytes(frame[:4], "little")
    if magic & ~15 == _ZSTD_SKIPPABLE and len(frame) >= 8:
        return 0, 0, 8 + int.from_bytes(frame[4:8], "little")
    if magic != _ZSTD_MAGIC or len(frame) < 6:
        raise DecodeError("the stored bytes are no zstd frame")
    single, size_code, dictionary = frame[4] >> 5 & 1, frame[4] >> 6, (0, 1, 2, 4)[frame[4] & 3]
    length = (single, 2, 4, 8)[size_code]
    at = 5 + (not single) + dictionary
    if at + length > len(frame):
        raise DecodeError("a zstd frame is cut off")
    content = None
    if length:
        content = int.from_bytes(frame[at : at + length], "little") + (256 if size_code == 1 else 0)
    base = 1 << (frame[5] >> 3) + 10
    return content, base + base // 8 * (frame[5] & 7) if not single else 0, at + length


def _zstd_frames(stored: memoryview) -> list[tuple[int | None, int]]:
    """List the content size and the window of all frames, without decoding any."""
    frames = []
    while len(stored):
        content, window, at = _zstd_head(stored)
        frames.append((content, window))
        checksum = 4 if stored[4] & 4 else 0
        last = int.from_bytes(stored[:4], "little") != _ZSTD_MAGIC
        while not last:
            head = int.from_bytes(stored[at : at + 3], "little")
            # A block of a repeated byte stores the byte once.
            last, at = bool(head & 1), at + 3 + (1 if head >> 1 & 3 == 1 else head >> 3)
            if last:
                at += checksum
            if at > len(stored):
                break
        if at > len(stored):
            raise DecodeError("a zstd frame is cut off")
        stored = stored[at:]
    return frames


def _lz4(stored: memoryview, out: np.ndarray) -> None:
    if len(stored) < 4:
        raise DecodeError(f"{len(stored)} bytes are too few for the header that numcodecs puts before LZ4")
    _check_size(int.from_bytes(stored[:4], "little"), len(out))
    numcodecs.LZ4().decode(stored, out)


def _blosc(stored: memoryview, out: np.ndarray) -> None:
    """Check the sizes in the header: the library does not, and would read beyond the bytes."""
    if len(stored) < _BLOSC_HEAD:
        raise DecodeError(f"{len(stored)} bytes are too few for a Blosc header")
    nbytes, _, stored_nbytes = np.frombuffer(stored[4:_BLOSC_HEAD], "<u4").tolist()
    if stored_nbytes > len(stored):
        raise DecodeError(f"the Blosc header tells of {stored_nbytes} stored bytes, and there are {len(stored)}")
    _check_size(nbytes, len(out))
    numcodecs.Blosc().decode(stored, out)


def _zlib(stored: memoryview, out: np.ndarray) -> None:
    decoder = zlib.decompressobj()
    _put(decoder.decompress(stored, len(out) + 1), out)
    if not decoder.eof:
        raise DecodeError("the stored bytes are cut off")


def _gzip(stored: memoryview, out: np.ndarray) -> None:
    """Decode all members, as Python's module does, which numcodecs uses."""
    with gzip.GzipFile(fileobj=io.BytesIO(stored), mode="rb") as members:
        _put(members.read(len(out) + 1), out)


def _put(decoded: Any, out: np.ndarray) -> None:
    if len(decoded) > len(out):
        raise DecodeError(f"more than {len(out)} bytes were decoded, and a chunk has {len(out)}")
    _check_size(len(decoded), len(out))
    out[:] = np.frombuffer(decoded, np.uint8)
