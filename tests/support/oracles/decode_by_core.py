"""Decode one chunk by the native core, as its threads do; by numcodecs where there is no core, or a filter."""

from __future__ import annotations

import ctypes

import numpy as np

from linumpy.core import native
from linumpy.core.records import chain_record
from linumpy.plan.codecs import DecodeChain
from tests.support.oracles import decode_by_numcodecs as by_numcodecs


def decode_chunk(chain: DecodeChain, stored: bytes | memoryview, out: np.ndarray) -> None:
    """Decode a chunk; arguments and errors as of :func:`.decode_by_numcodecs.decode_chunk`."""
    if chain.host_filter or native.why_no_core() is not None:
        by_numcodecs.decode_chunk(chain, stored, out)
        return
    data = np.frombuffer(stored, np.uint8)
    text = ctypes.create_string_buffer(256)
    code = native.library().waiting.lc_decode(
        chain_record(chain), data.ctypes.data, len(data), out.ctypes.data, len(out), text
    )
    if code == native.MEMORY:
        raise MemoryError(f"no memory to decode a chunk of {len(out)} bytes")
    if code != native.OK:
        raise by_numcodecs.DecodeError(text.value.decode(errors="replace"))
