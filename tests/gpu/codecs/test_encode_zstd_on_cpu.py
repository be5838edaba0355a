"""If this fails, zstd frames that the device writes are read wrong (oracle: numcodecs, linumpy's decoders)."""

import numcodecs
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from linumpy.plan.codecs import DecodeChain, Encoding
from linumpy.plan.encode.chunks import plan_encoding
from linumpy.plan.encode.launches import PRESETS, search_of
from tests.support.budget import examples
from tests.support.gpu.byte_kinds import KINDS, oct_bytes
from tests.support.gpu.decoders import Decoder
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.encoders import encoded

inside_a_test = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


sizes = st.one_of(st.integers(0, 300), st.integers(0, 6000), st.sampled_from([16384, 32769, 65535, 65536, 70001]))


@needs_compiler
@settings(inside_a_test, max_examples=examples(40, short=4))
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    nbytes=sizes,
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    seed=st.integers(1, 2**20),
    skew=st.integers(0, 3),
)
@example(preset="fast", nbytes=0, kinds=["constant"], seed=1, skew=0)
@example(preset="fast", nbytes=5000, kinds=sorted(KINDS), seed=2, skew=1)
@example(preset="small", nbytes=5003, kinds=sorted(KINDS), seed=3, skew=2)
@example(preset="fast", nbytes=30_000, kinds=["fibonacci"], seed=7, skew=0)
@example(preset="fast", nbytes=100_001, kinds=["grains", "far"], seed=4, skew=3)
@example(preset="small", nbytes=70_001, kinds=["words"], seed=5, skew=0)
@example(preset="fast", nbytes=131_073, kinds=["ends", "constant"], seed=6, skew=0)
def test_readers_get_the_same_bytes(preset, nbytes, kinds, seed, skew):
    encoding, rng = Encoding("zstd", preset=preset), np.random.default_rng(seed)
    chunks = np.stack([KINDS[kind](rng, nbytes) for kind in kinds])
    frames = encoded(chunks, encoding, seed=seed, skew=skew)
    assert frames == encoded(chunks, encoding, seed=seed + 1), "the order of threads changes what is written"
    assert frames[:1] == encoded(chunks[:1], encoding), "a frame depends on those beside it"
    expected = [row.tobytes() for row in chunks]
    assert all(len(one) <= nbytes + 13 + 3 * (nbytes // 4096) for one in frames)
    if not nbytes:  # numcodecs refuses frames of no bytes; magic number, flags, size, the last and empty block
        assert frames == [bytes([0x28, 0xB5, 0x2F, 0xFD, 0x20, 0, 1, 0, 0])] * len(kinds)
        return
    assert [bytes(numcodecs.Zstd().decode(one)) for one in frames] == expected
    decoded, status = Decoder(DecodeChain("zstd"), nbytes).decode(frames, skew=1)
    assert not status.any(), "a frame is left to the host"
    assert decoded == expected


@needs_compiler
def test_long_frames_have_a_window():
    """More than 8 MiB: readers that decode piece by piece need 128 KiB."""
    chunk = np.resize(np.repeat(np.arange(251, dtype=np.uint8), 40_000), 2**23 + 5)
    (frame,) = encoded(chunk[None], Encoding("zstd"))
    assert frame[4] == 2 << 6
    assert frame[5] == 7 << 3
    assert bytes(numcodecs.Zstd().decode(frame)) == chunk.tobytes()
    assert len(frame) < 10_000


@needs_compiler
@pytest.mark.parametrize("preset", ["fast", "small"])
def test_ratio(preset):
    """Of OCT better than level 1 (the mark is 5 % worse), of runs and of a constant chunk about as good."""
    for chunk, most in ((oct_bytes((32, 32, 32)), 0.9), (oct_bytes((32, 32, 32), change=0.02), 1.1)):
        (frame,) = encoded(chunk[None], Encoding("zstd", preset=preset))
        assert len(frame) < most * len(numcodecs.Zstd(1).encode(chunk))
    (frame,) = encoded(np.full((1, 65536), 7, np.uint8), Encoding("zstd", preset=preset))
    assert len(frame) < 16


@given(count=st.integers(0, 300), nbytes=st.integers(0, 2**22), preset=st.sampled_from(sorted(PRESETS)))
@example(count=3, nbytes=2**31, preset="small")
def test_memory_is_known(count, nbytes, preset):
    plan, search = plan_encoding(count, nbytes, Encoding("zstd", preset=preset)), search_of(nbytes, preset)
    assert plan.arena_nbytes >= count * (nbytes + 9)
    assert 4096 <= search.block <= 2**17
    assert search.segment + search.reached <= 2**17  # as far as a window reaches
    assert plan.scratch_nbytes <= 4.3 * count * (nbytes + search.block) + 4096
    assert len(plan.launches) == (6 if count else 1)


def test_chunks_that_are_too_long_are_refused():
    with pytest.raises(ValueError, match="at most"):
        plan_encoding(1, 2**31 + 1, Encoding("zstd"))
