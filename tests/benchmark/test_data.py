"""If this fails, benchmarks run on voxels that compress better or worse than stated (judged by numcodecs)."""

import numcodecs
import numpy as np
import pytest

from linumpy.benchmark.data import change_for_ratio, generator, oct_voxels, random_voxels

SHAPE, CHUNKS = (64, 96, 128), (32, 48, 64)
WHOLE = tuple(slice(0, size) for size in SHAPE)
CODECS = {
    "zstd": numcodecs.Zstd(level=3),
    "blosc": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE),
}


@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "u2", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_random_voxels_are_of_the_type_and_vary(dtype):
    made = random_voxels(generator(0, (slice(0, 5),)), (5, 7, 9), np.dtype(dtype))
    assert made.dtype == np.dtype(dtype)
    assert made.shape == (5, 7, 9)
    assert np.isfinite(made).all()
    assert len(np.unique(made)) > (1 if dtype == "bool" else 100)


def test_random_integers_do_not_compress():
    made = random_voxels(generator(0, WHOLE), SHAPE, np.dtype("u2"))
    assert len(numcodecs.Zstd(level=9).encode(made)) > 0.99 * made.nbytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "f4"])
def test_the_ratio_of_oct_voxels_is_about_3(codec, dtype):
    dtype = np.dtype(dtype)

    def encoded_bytes(sample):
        return len(CODECS[codec].encode(np.ascontiguousarray(sample)))

    change = change_for_ratio(encoded_bytes, SHAPE, CHUNKS, dtype)
    volume = oct_voxels(generator(1, WHOLE), SHAPE, WHOLE, dtype, change)
    chunks = [volume[z : z + 32, y : y + 48, x : x + 64] for z in (0, 32) for y in (0, 48) for x in (0, 64)]
    assert volume.nbytes / sum(map(encoded_bytes, chunks)) == pytest.approx(3.0, rel=0.12)


def test_oct_voxels_are_dark_above_the_surface_and_decay_below_it():
    volume = oct_voxels(generator(0, WHOLE), SHAPE, WHOLE, np.dtype("f4"), 1.0)
    profile = volume.mean(axis=(1, 2))
    assert profile[:5].max() < 300 < 3000 < profile.max()
    assert np.argmax(profile) > 10
    assert profile[-1] < 0.6 * profile.max()


def test_shorter_grains_have_more_changes_along_x():
    def changes(change):
        volume = oct_voxels(generator(0, WHOLE), SHAPE, WHOLE, np.dtype("f4"), change)
        return np.count_nonzero(np.diff(volume, axis=-1)) / volume.size

    assert changes(1.0) > 0.95
    assert changes(0.25) == pytest.approx(0.25, abs=0.02)


def test_the_same_seed_and_piece_give_the_same_voxels_and_another_piece_others():
    first = (slice(0, 4), slice(0, 4))
    one, again = (random_voxels(generator(3, first), (4, 4), np.dtype("u4")) for _ in range(2))
    other = random_voxels(generator(3, (slice(4, 8), slice(0, 4))), (4, 4), np.dtype("u4"))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
