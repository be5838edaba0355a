"""If this fails, LZ4 and Blosc chunks that the device writes are read wrong (oracle: numcodecs, linumpy's decoders)."""

import numcodecs
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from linumpy.plan.codecs import DecodeChain, Encoding
from linumpy.plan.encode.chunks import cut_chunk, plan_encoding
from linumpy.plan.encode.launches import stream_nbytes
from linumpy.testing.stores import oct_voxels
from tests.support.budget import examples
from tests.support.gpu.decoders import Decoder
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.encoders import encoded

inside_a_test = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
WIDTHS = (1, 2, 3, 4, 8, 16, 17, 40, 255)


def oct_chunk(shape=(8, 32, 32), dtype="u2"):
    block = tuple(slice(0, n) for n in shape)
    return oct_voxels(np.random.default_rng(1), shape, block, np.dtype(dtype), 0.2634).view(np.uint8).reshape(-1)


def make(kind, rng, nbytes):
    """Bytes of a kind; runs and repeats are longer than a search compares, and than a literal's or match's 255."""
    if kind == "constant":
        return np.full(nbytes, rng.integers(256), np.uint8)
    if kind == "noise":
        return rng.integers(0, 256, nbytes, np.uint8)
    if kind == "few":
        return rng.integers(0, 3, nbytes, np.uint8)
    if kind == "runs":
        return np.resize(np.repeat(rng.integers(0, 256, 40, np.uint8), rng.integers(1, 900, 40)), nbytes)
    if kind == "repeats":
        words = [rng.integers(0, 256, n, np.uint8) for n in rng.integers(3, 700, 9)]
        return np.resize(np.concatenate([words[k] for k in rng.integers(0, 9, 60)]), nbytes)
    return np.resize(oct_chunk(), nbytes)


KINDS = ("constant", "noise", "few", "runs", "repeats", "oct")
sizes = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([32768, 65536 + 12, 70001, 131072]))


def decoded_by_linumpy(encoding, streams, nbytes):
    decoder = Decoder(DecodeChain(encoding.compressor, inner=encoding.inner), nbytes)
    decoded, status = decoder.decode(streams, skew=1)
    assert not status.any()
    return decoded


@needs_compiler
@settings(inside_a_test, max_examples=examples(90, short=4))
@given(
    inner=st.sampled_from(["", "lz4", "lz4", "zstd"]),
    shuffle=st.sampled_from(["none", "byte", "bit"]),
    preset=st.sampled_from(["fast", "small"]),
    itemsize=st.sampled_from(WIDTHS),
    nbytes=sizes,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    seed=st.integers(1, 2**20),
    skew=st.integers(0, 3),
)
@example(
    inner="lz4", shuffle="bit", preset="fast", itemsize=2, nbytes=70001, kinds=["oct", "noise", "runs"], seed=1, skew=0
)
@example(inner="lz4", shuffle="byte", preset="fast", itemsize=3, nbytes=40000, kinds=["repeats", "few"], seed=2, skew=1)
@example(inner="lz4", shuffle="bit", preset="fast", itemsize=2, nbytes=65536, kinds=["constant", "oct"], seed=3, skew=0)
@example(inner="", shuffle="none", preset="fast", itemsize=1, nbytes=70001, kinds=list(KINDS), seed=4, skew=3)
@example(inner="zstd", shuffle="bit", preset="fast", itemsize=2, nbytes=140001, kinds=["oct", "noise"], seed=7, skew=0)
@example(inner="zstd", shuffle="byte", preset="small", itemsize=3, nbytes=5000, kinds=["runs", "few"], seed=8, skew=1)
@example(
    inner="", shuffle="none", preset="fast", itemsize=1, nbytes=65536 + 12, kinds=["noise", "constant"], seed=5, skew=0
)
@example(
    inner="lz4", shuffle="none", preset="small", itemsize=255, nbytes=70001, kinds=["oct", "repeats"], seed=6, skew=2
)
def test_readers_get_the_same_bytes(inner, shuffle, preset, itemsize, nbytes, kinds, seed, skew):
    """Numcodecs' LZ4 frames, or Blosc's with a codec inside."""
    encoding = Encoding("blosc", inner, preset, shuffle, itemsize) if inner else Encoding("lz4", preset=preset)
    rng = np.random.default_rng(seed)
    chunks = np.stack([make(kind, rng, nbytes) for kind in kinds])
    streams = encoded(chunks, encoding, seed=seed, skew=skew)
    assert streams == encoded(chunks, encoding, seed=seed + 1), "the order of threads changes what is written"
    expected = [row.tobytes() for row in chunks]
    most = nbytes + 16 if inner else nbytes + nbytes // 255 + 20
    assert all(len(one) <= most for one in streams)
    # C-Blosc2, which is no requirement of these tests, reads sorted bits of whole elements only.
    assert shuffle != "bit" or not inner or nbytes % itemsize == 0 or not any(one[2] & 4 for one in streams)
    if nbytes:  # numcodecs refuses its own frames of no bytes
        reader = numcodecs.Blosc() if inner else numcodecs.LZ4()
        assert [bytes(reader.decode(one)) for one in streams] == expected
        assert decoded_by_linumpy(encoding, streams, nbytes) == expected


@needs_compiler
def test_ratio_on_oct_voxels():
    """Within 5 % of numcodecs' level 5."""
    chunk = oct_chunk((32, 64, 64))
    for encoding, other in (
        (Encoding("lz4"), numcodecs.LZ4()),
        (Encoding("blosc", "lz4", "fast", "byte", 2), numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)),
        (Encoding("blosc", "lz4", "fast", "bit", 2), numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE)),
    ):
        (made,) = encoded(chunk[None], encoding)
        assert len(made) < 1.05 * len(other.encode(chunk.view("u2")))


@given(nbytes=st.integers(0, 2**31 - 17), itemsize=st.integers(1, 255), inner=st.sampled_from(["lz4", "zstd"]))
@example(nbytes=2**31 - 17, itemsize=3, inner="lz4")
def test_blocks_are_cut_as_readers_cut_them(nbytes, itemsize, inner):
    cut = cut_chunk(nbytes, Encoding("blosc", inner, itemsize=itemsize))
    assert cut.block * cut.whole + cut.rest == nbytes
    assert 0 <= cut.rest < cut.block <= max(nbytes, 1)
    assert cut.block % cut.splits == 0
    if inner == "lz4":  # readers of before 1.11 know no flag
        assert cut.splits == (itemsize if itemsize <= 16 and cut.block // itemsize >= 128 else 1)
        assert cut.block // cut.splits <= 2**15
    if cut.whole > 1:
        assert cut.block % (8 * itemsize) == 0


@pytest.mark.parametrize("preset", ["fast", "small"])
def test_a_rest_too_long_for_a_warp_stays_as_it_is(preset):
    """The whole blocks are split into a stream for each byte of an element, and the rest of a long chunk is not."""
    encoding, limit = Encoding("blosc", "lz4", preset, "none", 2), stream_nbytes(preset)
    for rest in (limit, limit + 1):
        nbytes = limit // 8 * (2 * limit - 16) + rest
        assert cut_chunk(nbytes, encoding).rest == rest
        launches = plan_encoding(1, nbytes, encoding).launches
        lengths = [launch.args[1] for launch in launches if launch.kernel == "lz4_streams"]
        assert lengths == [limit - 8, rest][: 2 if rest == limit else 1]


@pytest.mark.parametrize("preset", ["fast", "small"])
def test_streams_of_blosc_are_searched_as_the_preset_says(preset):
    encoding = Encoding("blosc", "zstd", preset, "none")
    inner = [launch.defines for launch in plan_encoding(1, 2**20, Encoding("zstd", preset=preset)).launches]
    launches = plan_encoding(1, 2**20, encoding).launches
    assert [launch.defines for launch in launches if "zstd" in launch.source] == [one for one in inner if one]


def test_what_no_frame_can_hold_is_refused():
    with pytest.raises(NotImplementedError, match="checksums"):
        plan_encoding(1, 100, Encoding("lz4", checksum=True))
    with pytest.raises(ValueError, match="at most"):
        plan_encoding(1, 2**31 - 16, Encoding("blosc", "lz4"))
    with pytest.raises(ValueError, match="at most"):
        plan_encoding(1, 0x7E000001, Encoding("lz4"))
    with pytest.raises(ValueError, match="1 to 255"):
        plan_encoding(1, 100, Encoding("blosc", "lz4", itemsize=256))
