"""If this fails, LZ4 and Blosc chunks that a device writes are read wrong (oracle: numcodecs, linumpy's decoders)."""

import itertools

import numcodecs
import numpy as np
import pytest

from linumpy.gpu.codecs.encode import encode_chunks, encoding_nbytes
from linumpy.plan.codecs import DecodeChain, Encoding
from tests.gpu.codecs.test_encode_lz4_blosc_on_cpu import KINDS, WIDTHS, make, oct_chunk
from tests.support.gpu.decoders import DeviceDecoder

pytestmark = pytest.mark.gpu


def on_device(chunks, encoding):
    """Encode on a stream of its own, twice; returns the stored bytes of each chunk."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        rows = cupy.asarray(chunks)
        first, again = encode_chunks(rows, encoding), encode_chunks(rows, encoding)
        offsets = first.offsets.get()
        arena, second = first.arena[: offsets[-1]].get(), again.arena[: offsets[-1]].get()
        assert np.array_equal(offsets, again.offsets.get())
        assert np.array_equal(arena, second), "other bytes at the second time"
        assert first.arena.nbytes + first.offsets.nbytes == encoding_nbytes(*chunks.shape, encoding)[0]
        assert np.array_equal(rows.get(), chunks)
    return [arena[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def check(chunks, encoding, decode=True):
    streams, expected = on_device(chunks, encoding), [row.tobytes() for row in chunks]
    reader = numcodecs.LZ4() if encoding.compressor == "lz4" else numcodecs.Blosc()
    assert all(bytes(reader.decode(one)) == row for one, row in zip(streams, expected, strict=True))
    if decode:
        decoder = DeviceDecoder(DecodeChain(encoding.compressor, inner=encoding.inner), chunks.shape[1])
        decoded, status = decoder.decode(streams, skew=1)
        assert not status.any()
        assert decoded == expected
    return sum(map(len, streams))


ENCODINGS = [
    Encoding("lz4"),
    Encoding("lz4", preset="small"),
    *(
        Encoding("blosc", inner, preset, shuffle, 2)
        for inner in ("lz4", "zstd")
        for preset in ("fast", "small")
        for shuffle in ("none", "byte", "bit")
    ),
]


def name_of(encoding):
    return "-".join(filter(None, [encoding.compressor, encoding.inner, encoding.preset, encoding.shuffle]))


@pytest.mark.parametrize("encoding", ENCODINGS, ids=name_of)
def test_chunks_of_many_kinds(encoding):
    rng = np.random.default_rng(1)
    for nbytes in (2**19, 300_001):
        check(np.stack([make(kind, rng, nbytes) for kind in KINDS * 4]), encoding)


@pytest.mark.parametrize("inner", ["lz4", "zstd"])
@pytest.mark.parametrize("itemsize", WIDTHS)
def test_elements_of_any_size(inner, itemsize):
    rng = np.random.default_rng(itemsize)
    for nbytes, shuffle in ((40_000 * itemsize, "bit"), (40_003 * itemsize + 1, "byte"), (4001 * itemsize, "bit")):
        chunks = np.stack([make(kind, rng, nbytes) for kind in KINDS])
        check(chunks, Encoding("blosc", inner, "fast", shuffle, itemsize))


@pytest.mark.parametrize("encoding", [Encoding("lz4"), Encoding("blosc", "lz4", "fast", "bit", 2)], ids=name_of)
def test_more_chunks_than_a_grid_is_wide(encoding):
    rng = np.random.default_rng(2)
    check(rng.integers(0, 3, (70_000, 301), np.uint8), encoding, decode=False)  # slabs of the decoder have fewer


@pytest.mark.parametrize(
    "encoding",
    [Encoding("lz4"), Encoding("blosc", "lz4", "fast", "bit", 2), Encoding("blosc", "zstd", "fast", "bit", 2)],
    ids=name_of,
)
def test_a_large_chunk(encoding):
    """So large that what is left of its last block is longer than a warp encodes."""
    chunk = np.resize(oct_chunk((32, 64, 64)), 300_000_002)
    chunk[100_000_000:140_000_000] = np.random.default_rng(3).integers(0, 256, 40_000_000, np.uint8)
    assert check(chunk[None], encoding, decode=False) < 0.75 * chunk.size
