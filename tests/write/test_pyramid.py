"""If this fails, coarser levels are not the means of finer ones."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.transform import downscale_local_mean

from linumpy.write.pyramid import halve, halved

INTEGERS = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"]
FLOATS = ["f2", "f4", "f8"]


def slow_half(data, downsampling="mean"):
    """One voxel after another: Python's integers do not overflow, and its round() is half to even."""
    out = np.empty([-(-n // 2) for n in data.shape], data.dtype.newbyteorder("="))
    for index in np.ndindex(out.shape):
        voxels = data[tuple(slice(2 * i, 2 * i + 2) for i in index)].ravel().tolist()
        if downsampling == "nearest":
            out[index] = voxels[0]
        elif downsampling == "label":  # of equally frequent ones a Counter gives the one that came first
            out[index] = Counter(voxels).most_common(1)[0][0]
        elif data.dtype.kind == "f":
            out[index] = math.fsum(voxels) / len(voxels)
        else:
            out[index] = round(Fraction(sum(map(int, voxels)), len(voxels)))
    return out


def extreme(rng, shape, dtype):
    """Integers from the whole range, many of them at its ends."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    info = np.iinfo(dtype)
    data = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    data[rng.random(shape) < 0.2] = info.max
    data[rng.random(shape) < 0.2] = info.min
    data[rng.random(shape) < 0.2] //= info.dtype.type(64)
    return data


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from(INTEGERS), st.integers(0, 2**32 - 1))
def test_means_of_integers_are_exact(shape, dtype, seed):
    data = extreme(np.random.default_rng(seed), shape, dtype)
    got = halve(data)
    assert got.dtype == data.dtype
    assert np.array_equal(got, slow_half(data))


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from(INTEGERS + FLOATS), st.integers(0, 2**32 - 1)
)
def test_labels_are_the_most_frequent_of_their_voxels(shape, dtype, seed):
    data = np.random.default_rng(seed).integers(0, 3, shape).astype(dtype)
    before = data.copy()
    got = halve(data, "label")
    assert got.dtype == data.dtype
    assert np.array_equal(got, slow_half(data, "label"))
    assert np.array_equal(data, before)


def test_half_goes_to_even():
    rows = np.array([[0, 1], [1, 2], [2, 3], [-1, 0], [-2, -1], [-3, -2]], "i8").repeat(2, axis=0)
    for dtype in ("i1", "i2", "i4", "i8"):
        assert halve(rows.astype(dtype)).ravel().tolist() == [0, 2, 2, 0, -2, -2]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from(FLOATS), st.integers(0, 2**32 - 1))
def test_means_of_floats(shape, dtype, seed):
    data = np.random.default_rng(seed).normal(0, 100, shape).astype(dtype)
    expected = slow_half(data)
    assert halve(data).dtype == dtype
    np.testing.assert_allclose(
        halve(data), expected, rtol=4 * np.finfo(dtype).eps, atol=1e-3 if dtype == "f2" else 1e-4
    )


def test_means_of_float32_are_rounded_once():
    """In float32 the sums would be inf, and small voxels beside large ones lost."""
    assert halve(np.full((2, 2), np.finfo("f4").max, "f4")) == np.finfo("f4").max
    assert halve(np.array([2.0**25, 1, 1, -(2.0**25)], "f4").reshape(2, 2)) == 0.5


def test_no_numbers_and_infinities_stay():
    data = np.array([[np.nan, 1], [1, 1], [np.inf, 1], [1, 1], [np.inf, -np.inf], [1, 1]], "f4")
    assert np.array_equal(halve(data), np.array([[np.nan], [np.inf], [np.nan]], "f4"), equal_nan=True)


@pytest.mark.parametrize("dtype", ["u1", "u2", "i4", "f4", "f8"])
def test_scikit_image_agrees_on_even_sizes(dtype):
    data = np.random.default_rng(1).uniform(0, 200, (8, 6, 10)).astype(dtype)
    expected = downscale_local_mean(data.astype("f8"), (2, 2, 2))
    got = halve(data)
    assert np.array_equal(got, np.rint(expected)) if dtype[0] != "f" else np.allclose(got, expected, rtol=1e-6)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.sampled_from([*INTEGERS, *FLOATS]))
def test_labels_are_taken_not_averaged(shape, dtype):
    data = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    assert np.array_equal(halve(data, "nearest"), slow_half(data, "nearest"))


@pytest.mark.parametrize("dtype", [">u2", ">i8", ">f4"])
@pytest.mark.parametrize("downsampling", ["mean", "label", "nearest"])
def test_foreign_bytes_and_strides(dtype, downsampling):
    data = np.random.default_rng(1).integers(0, 1000, (9, 12, 7)).astype(dtype)
    native = data.astype(data.dtype.newbyteorder("="))
    for view in (lambda x: x, lambda x: x.transpose(2, 0, 1), lambda x: x[::2, ::-1, 1:]):
        got = halve(view(data), downsampling)
        assert got.dtype == native.dtype
        assert np.array_equal(got, slow_half(np.ascontiguousarray(view(native)), downsampling))


def test_a_box_is_the_whole_cut_out():
    data = np.random.default_rng(1).integers(0, 1000, (9, 12, 7)).astype("u2")
    box = (slice(1, 5), slice(2, 6), slice(0, 4))
    assert np.array_equal(halved(data, box), halve(data)[box])
    assert np.array_equal(halved(data, box, "nearest"), data[::2, ::2, ::2][box])
