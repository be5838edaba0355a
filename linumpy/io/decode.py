"""Decode the stored bytes of one chunk on the host, with numcodecs.

In: a :class:`~linumpy.plan.codecs.DecodeChain` and stored bytes. Out: the bytes of the chunk, all of them. Errors:
:class:`DecodeError`, to which the caller adds file and chunk. numcodecs believes what a header says of sizes; here they
are compared with what the chunk must have before a byte is decoded.
"""

from __future__ import annotations

import json
from typing import Any

import google_crc32c
import numcodecs
import numpy as np

from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain

_BLOSC_HEAD = 16
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class DecodeError(ValueError):
    """Stored bytes are not what an encoder makes of a chunk."""


def decode_chunk(chain: DecodeChain, stored: bytes | memoryview, out: np.ndarray) -> None:
    """Decode one chunk.

    Parameters
    ----------
    chain : DecodeChain
        What was done to the chunk.
    stored : bytes
        What is stored.
    out : numpy.ndarray of uint8, (chunk_nbytes,)
        Where the chunk goes.

    Raises
    ------
    DecodeError
        Broken bytes, a wrong size, a wrong checksum.
    """
    if chain.stored_checksum:
        stored = _without_checksum(stored, "stored bytes")
    if not (chain.tail or chain.shuffle or chain.host_filter) and _fills(chain, stored, len(out)):
        decoded = _decompress(chain, stored, out)
        _check_size(len(decoded), len(out))
        return
    decoded = memoryview(_decompress(chain, stored, None)).cast("B")
    if not chain.host_filter:
        _check_size(len(decoded), len(out) + chain.tail)
    if chain.tail:
        decoded = memoryview(_without_checksum(decoded, "decoded bytes"))
    if chain.host_filter:
        decoded = _without_filter(json.loads(chain.host_filter), decoded)
        _check_size(len(decoded), len(out))
    if chain.shuffle:
        decoded = memoryview(numcodecs.Shuffle(chain.shuffle).decode(decoded)).cast("B")
    out[:] = np.frombuffer(decoded, np.uint8)


def _without_filter(settings: dict[str, Any], data: memoryview) -> memoryview:
    settings.pop("name", None)
    try:
        decoded = numcodecs.get_codec(settings).decode(data)
    except Exception as error:  # a number of bytes that is no whole number of elements, for one
        raise DecodeError(f"filter {settings['id']!r}: {error}") from error
    return np.ascontiguousarray(decoded).view(np.uint8).reshape(-1).data


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


def _fills(chain: DecodeChain, stored: bytes | memoryview, nbytes: int) -> bool:
    """Say whether a compressor may write right into the chunk: only one that says how much it is going to write."""
    if chain.compressor == "blosc":
        return True
    return chain.compressor == "zstd" and _zstd_content(bytes(stored[:14])) == nbytes


def _zstd_content(head: bytes) -> int | None:
    """Read the content size of a zstd frame, as RFC 8878 has it; None where the frame does not tell."""
    if len(head) < 6 or head[:4] != _ZSTD_MAGIC:
        return None
    flag, single = head[4] >> 6, head[4] >> 5 & 1
    length = (single, 2, 4, 8)[flag]
    at = 5 + (not single) + (0, 1, 2, 4)[head[4] & 3]
    if not length or at + length > len(head):
        return None
    return int.from_bytes(head[at : at + length], "little") + (256 if flag == 1 else 0)


def _decompress(chain: DecodeChain, stored: bytes | memoryview, out: np.ndarray | None) -> memoryview:
    codecs = {"zstd": numcodecs.Zstd, "lz4": numcodecs.LZ4, "zlib": numcodecs.Zlib, "gzip": numcodecs.GZip}
    try:
        if chain.compressor == "":
            return memoryview(stored)
        if chain.compressor == "blosc":
            _check_blosc(stored, None if out is None else len(out))
            return memoryview(numcodecs.Blosc().decode(stored, out))
        decoded = codecs[chain.compressor]().decode(stored, *(() if out is None else (out,)))
        return memoryview(decoded)
    except DecodeError:
        raise
    except Exception as error:  # each codec has errors of its own
        raise DecodeError(str(error)) from error


def _check_blosc(stored: bytes | memoryview, expected: int | None) -> None:
    """Compare the sizes that a Blosc header gives; the library believes them and would read beyond the bytes."""
    if len(stored) < _BLOSC_HEAD:
        raise DecodeError(f"{len(stored)} bytes are too few for a Blosc header")
    nbytes, _, stored_nbytes = np.frombuffer(bytes(stored[4:_BLOSC_HEAD]), "<u4").tolist()
    if stored_nbytes > len(stored):
        raise DecodeError(f"the Blosc header tells of {stored_nbytes} stored bytes, and there are {len(stored)}")
    if expected is not None:
        _check_size(nbytes, expected)
