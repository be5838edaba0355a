"""The device's encoders in host memory, by numcodecs, for arrays of ``cupy_on_host``."""

from types import SimpleNamespace

import numpy as np

from linumpy.gpu.codecs import encode
from linumpy.io.codecs import host_encoder
from tests.support.gpu.cupy_on_host import Array


def install(patch):
    """Put the encoders where imports find them; returns a list of the encodings that they are called with."""
    seen = []

    def encode_chunks(chunks, encoding):
        assert isinstance(chunks, Array)
        assert chunks.dtype == np.uint8
        assert chunks.flags.c_contiguous
        assert not encoding.checksum
        seen.append(encoding)
        encode_one = host_encoder(encoding)
        streams = [bytes(encode_one(row.view(f"u{encoding.itemsize}"))) for row in chunks.host]
        arena = np.frombuffer(b"".join([*streams, b"behind the streams"]), np.uint8)
        offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
        return SimpleNamespace(arena=Array(arena), offsets=Array(offsets))

    patch.setattr(encode, "encode_chunks", encode_chunks)
    patch.setattr(encode, "encoding_nbytes", lambda count, nbytes, encoding: (count * nbytes, count * nbytes))
    return seen
