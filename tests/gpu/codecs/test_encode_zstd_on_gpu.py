"""If this fails, a device writes zstd frames that are read wrong (oracle: numcodecs)."""

import itertools

import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy.gpu.codecs.encode import encode_chunks
from linumpy.plan.codecs import Encoding
from linumpy.plan.encode.launches import PRESETS
from tests.support.budget import examples
from tests.support.gpu.byte_kinds import KINDS, oct_bytes

pytestmark = pytest.mark.gpu


def frames_of(chunks, preset="fast"):
    import cupy

    made = encode_chunks(cupy.asarray(chunks), Encoding("zstd", preset=preset))
    offsets = made.offsets.get()
    arena = made.arena[: int(offsets[-1])].get()
    return [arena[a:b].tobytes() for a, b in itertools.pairwise(offsets)]


def check(chunks, preset="fast"):
    frames = frames_of(chunks, preset)
    for row, frame in zip(chunks, frames, strict=True):
        assert bytes(numcodecs.Zstd().decode(frame)) == row.tobytes()
    return sum(map(len, frames))


@settings(max_examples=examples(200), deadline=None)
@given(
    preset=st.sampled_from(sorted(PRESETS)),
    nbytes=st.one_of(st.integers(1, 9000), st.integers(1, 600_000), st.integers(16, 19).map(lambda n: 2**n)),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    seed=st.integers(1, 2**20),
)
def check_all_kinds(preset, nbytes, kinds, seed):
    rng = np.random.default_rng(seed)
    check(np.stack([KINDS[kind](rng, nbytes) for kind in kinds]), preset)


def test_all_kinds():
    check_all_kinds()


@pytest.mark.parametrize("preset", ["fast", "small"])
@pytest.mark.parametrize(("count", "nbytes"), [(256, 2**19), (5000, 2**12), (3, 2**25 + 7), (1, 300 * 2**20 + 1)])
def test_large_batches(preset, count, nbytes):
    """Many chunks, and chunks of thousands of blocks; offsets beyond those of one."""
    voxels = oct_bytes((64, 128, 128))
    total = np.resize(voxels, count * nbytes)
    total[:: 2**17 - 5] += 1
    chunks = total.reshape(count, nbytes)
    assert check(chunks, preset) < chunks.size / 2.5


def test_the_same_frame_in_every_batch():
    chunks = np.resize(oct_bytes((64, 64, 64)), (40, 200_000))
    together = frames_of(chunks)
    assert together == frames_of(chunks)
    assert together[7:8] == frames_of(chunks[7:8])


def test_the_largest_chunk():
    """2 GiB, the most that is encoded at once."""
    chunk = np.resize(oct_bytes((64, 64, 64)), (1, 2**31))
    chunk[0, :: 2**20] = 255
    check(chunk)
