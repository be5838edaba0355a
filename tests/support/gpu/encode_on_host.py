"""The device's encoders in host memory, for arrays of ``cupy_on_host``: by numcodecs, or by their own kernels."""

from types import SimpleNamespace
from unittest import mock

import numpy as np

from linumpy.gpu.codecs import encode
from linumpy.io.codecs import host_encoder
from tests.support.gpu.cupy_on_host import Array
from tests.support.gpu.encoders import encoded


def install(patch, *, by_kernels=False):
    """Put the encoders where imports find them; returns a list of the encodings that they are called with.

    With `by_kernels` they are those of the device, under the emulator.
    """
    seen, plan_nbytes = [], encode.encoding_nbytes

    own = encode.encode_chunks

    def encode_chunks(chunks, encoding):
        assert isinstance(chunks, Array)
        assert chunks.dtype == np.uint8
        assert chunks.flags.c_contiguous
        assert not encoding.checksum
        seen.append(encoding)
        if by_kernels:
            with (
                mock.patch.object(encode, "encode_chunks", own),
                mock.patch.object(encode, "encoding_nbytes", plan_nbytes),
            ):
                streams = encoded(chunks.host, encoding)
        else:
            encode_one = host_encoder(encoding)
            streams = [bytes(encode_one(row.view(f"u{encoding.itemsize}"))) for row in chunks.host]
        arena = np.frombuffer(b"".join([*streams, b"behind the streams"]), np.uint8)
        offsets = np.cumsum([0, *map(len, streams)], dtype=np.int64)
        return SimpleNamespace(arena=Array(arena), offsets=Array(offsets))

    patch.setattr(encode, "encode_chunks", encode_chunks)
    if not by_kernels:
        patch.setattr(encode, "encoding_nbytes", lambda count, nbytes, encoding: (count * nbytes, count * nbytes))
    return seen
