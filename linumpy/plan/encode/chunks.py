"""Plan the encoding of chunks on the device, by the requested codec. Pure."""

from __future__ import annotations

import functools

from linumpy.plan.encode.blosc import plan_blosc
from linumpy.plan.encode.encoding import Encoding
from linumpy.plan.encode.launches import EncodePlan
from linumpy.plan.encode.lz4 import plan_lz4
from linumpy.plan.encode.zstd import plan_zstd


@functools.lru_cache(maxsize=256)
def plan_encoding(count: int, nbytes: int, encoding: Encoding) -> EncodePlan:
    """Plan the encoding of `count` chunks of `nbytes` bytes.

    Raises `NotImplementedError`: the codec has no kernel (gzip, or none), or the encoding has a checksum, which the
    writer appends.
    Raises `ValueError`: a chunk is larger than the codec allows, or its elements have a size that Blosc does not allow.
    """
    if encoding.checksum:
        raise NotImplementedError("checksums are appended when chunks are written, not by an encoder")
    if encoding.compressor == "lz4":
        return plan_lz4(count, nbytes, encoding.preset)
    if encoding.compressor == "zstd":
        return plan_zstd(count, nbytes, encoding.preset)
    if encoding.compressor == "blosc":
        return plan_blosc(count, nbytes, encoding, functools.partial(plan_zstd, preset=encoding.preset))
    raise NotImplementedError(encoding.compressor)
