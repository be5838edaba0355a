"""If this fails, resampled images differ from known truth, scikit-image or SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from skimage.transform import resize

from linumpy.gpu.interpolation import resample_volume

shapes = st.tuples(*(st.integers(1, 12) for _ in range(3)))
spacings = st.tuples(*(st.floats(0.4, 4.0) for _ in range(3)))


@given(shapes, spacings, spacings, st.sampled_from([0, 1]), st.booleans())
def test_same_as_scikit_image(shape, current, target, order, anti_aliasing):
    volume = np.random.default_rng(0).normal(size=shape)
    got, reached = resample_volume(volume, current, target, order=order, anti_aliasing=anti_aliasing)
    smooth = anti_aliasing and order > 0  # order 0 is for labels
    expected = resize(
        volume, got.shape, order=order, mode="edge", anti_aliasing=smooth, preserve_range=True, clip=False
    )
    assert [n * s for n, s in zip(got.shape, reached, strict=True)] == pytest.approx(
        [n * s for n, s in zip(shape, current, strict=True)]
    )
    assert np.allclose(got, expected, atol=1e-9)


@given(st.integers(8, 40), st.floats(0.5, 3.0), st.floats(0.5, 3.0))
def test_voxel_centres_keep_their_place(n, current, target):
    """A linear field in µm is that field on every grid, away from the ends."""
    line = (np.arange(n) + 0.5) * current
    got, (reached,) = resample_volume(line, [current], [target], anti_aliasing=False)
    places = (np.arange(len(got)) + 0.5) * reached
    inside = (places > line[0]) & (places < line[-1])
    assert np.allclose(got[inside], places[inside])


def test_dtypes_and_nothing_to_do():
    for dtype, expected in (("u1", "f4"), ("i2", "f4"), ("f2", "f4"), ("f4", "f4"), ("f8", "f8"), (">u2", "f4")):
        volume = np.arange(24).reshape(2, 3, 4).astype(dtype)
        got, reached = resample_volume(volume, (1, 2, 3), (1, 2, 3))
        assert got.dtype == expected
        assert reached == (1, 2, 3)
        assert np.array_equal(got, volume)
        assert not np.shares_memory(got, volume)


def test_labels_stay_labels():
    labels = np.random.default_rng(0).choice(np.array([1, 5, 9], "u2"), (21, 22, 23))
    got, _ = resample_volume(labels, (1, 1, 1), 3.0, order=0)
    assert set(np.unique(got)) <= {1, 5, 9}


def test_one_spacing_for_all_axes():
    got, reached = resample_volume(np.ones((4, 6, 8)), (2, 2, 4), 2)
    assert got.shape == (4, 6, 16)
    assert reached == (2, 2, 2)


@pytest.mark.parametrize(
    ("volume", "arguments", "error", "message"),
    [
        (np.ones((2, 2)), ((1, 0), 1), ValueError, r"current_spacing=\(1, 0\)"),
        (np.ones((2, 2)), ((1, 1), float("nan")), ValueError, "target_spacing=nan"),
        (np.ones((2, 2)), ((1, 1), (1, 1, 1)), ValueError, "an image of 2 axes"),
        (np.ones((0, 2)), ((1, 1), 1), ValueError, r"shape \(0, 2\)"),
        (np.ones((2, 2), complex), ((1, 1), 1), TypeError, "complex128"),
        (np.ones((2, 2), bool), ((1, 1), 1), TypeError, "bool"),
    ],
)
def test_bad_input(volume, arguments, error, message):
    with pytest.raises(error, match=message):
        resample_volume(volume, *arguments)
    with pytest.raises(ValueError, match="order=6"):
        resample_volume(np.ones((2, 2)), (1, 1), 1, order=6)
