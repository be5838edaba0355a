"""If this fails, a region means something else than NumPy's index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linumpy.errors import RegionError
from linumpy.plan.region import normalize_region
from tests.support.stores import regions

shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)


@given(st.data())
def test_same_elements_as_numpy(data):
    shape = data.draw(shapes)
    index = data.draw(regions(shape))
    array = np.arange(np.prod(shape)).reshape(shape)
    region = normalize_region(index, shape)
    assert np.array_equal(array[region.selection], array[index])
    assert region.shape == array[index].shape
    assert region.size == array[index].size


@pytest.mark.parametrize("index", [None, ..., (), slice(None), (slice(None), ...), (..., slice(None))])
def test_all_of_it(index):
    assert normalize_region(index, (3, 4)).selection == (slice(0, 3), slice(0, 4))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (5, "index 5 is out of bounds for axis 0, which has length 5"),
        (-6, "index -6 is out of bounds for axis 0"),
        ((slice(None), slice(0, 8)), r"slice\(0, 8, None\) is out of bounds for axis 1, which has length 7"),
        ((slice(None), slice(-8, None)), "out of bounds for axis 1"),
        (slice(0, 4, 2), "only steps of 1"),
        (slice(None, None, -1), "only steps of 1"),
        ((0, 0, 0), "names 3 axes, but the array has 2"),
        ((..., 0, ...), "more than one"),
    ],
)
def test_what_does_not_fit(index, message):
    with pytest.raises(RegionError, match=message) as caught:
        normalize_region(index, (5, 7))
    assert isinstance(caught.value, IndexError)


@pytest.mark.parametrize("index", [[0, 1], np.array([True] * 5), True, 1.0, "a", (slice(0.0, 2),), None.__class__])
def test_what_is_no_region(index):
    with pytest.raises(TypeError, match=r"use a slice, an int or '...'"):
        normalize_region(index, (5, 7))


def test_an_empty_axis_has_no_index():
    with pytest.raises(RegionError, match=r"index 0 is out of bounds for axis 0, which has length 0"):
        normalize_region(0, (0,))
