"""If this fails, voxels of a new grid are displaced in µm."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linumpy.plan.grid.regrid import plan_regrid

numbers = st.floats(0.1, 50)


@st.composite
def volumes(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.lists(st.integers(1, 90), min_size=rank, max_size=rank)))
    spacing = tuple(draw(st.lists(numbers, min_size=rank, max_size=rank)))
    origin = tuple(draw(st.lists(st.floats(-100, 100), min_size=rank, max_size=rank)))
    return shape, spacing, origin


@given(volumes(), st.data())
def test_a_spacing_keeps_extent_and_places(volume, data):
    shape, spacing, origin = volume
    wanted = [data.draw(numbers) for _ in shape]
    grid = plan_regrid(wanted, shape, spacing, origin)
    assert np.allclose(np.multiply(grid.shape, grid.spacing), np.multiply(shape, spacing))
    assert all(m == max(1, round(n * s / w)) for m, n, s, w in zip(grid.shape, shape, spacing, wanted, strict=True))
    # Both begin at the same edge, half a voxel before the first centre.
    edge = np.subtract(origin, np.divide(spacing, 2))
    assert np.allclose(np.subtract(grid.origin, np.divide(grid.spacing, 2)), edge)
    voxel = np.array([data.draw(st.integers(0, n - 1)) for n in grid.shape])
    place = np.array(grid.matrix) @ voxel + grid.offset
    assert np.allclose(np.add(origin, place * spacing), np.add(grid.origin, voxel * grid.spacing))


@given(volumes(), numbers)
def test_an_output_shape_takes_the_spacing_as_it_is(volume, wanted):
    shape, spacing, origin = volume
    grid = plan_regrid(wanted, shape, spacing, origin, output_shape=[7] * len(shape))
    assert grid.shape == (7,) * len(shape)
    assert np.allclose(grid.spacing, wanted)


@given(volumes(), st.integers(0, 2**32 - 1))
def test_all_forms_of_a_matrix_are_the_same(volume, seed):
    shape, spacing, origin = volume
    rank = len(shape)
    rng = np.random.default_rng(seed)
    linear, offset = rng.normal(size=(rank, rank)), rng.normal(size=rank)
    wide = np.column_stack([linear, offset])
    square = np.vstack([wide, [0] * rank + [1]])
    grid = plan_regrid(wide, shape, spacing, origin)
    assert grid == plan_regrid(square.tolist(), shape, spacing, origin)
    assert grid.shape == shape
    assert np.array_equal(grid.matrix, linear)
    assert np.array_equal(grid.offset, offset)
    assert plan_regrid(linear, shape, spacing, origin).offset == (0.0,) * rank
    step = np.array(spacing) * linear[:, 0]
    assert math.isclose(grid.spacing[0], math.hypot(*step))
    assert np.allclose(grid.origin, np.array(origin) + np.array(spacing) * offset)


@pytest.mark.parametrize(
    ("transform", "shape", "message"),
    [
        (0, None, "spacing 0: a volume of 2 axes needs a positive number"),
        ((1, -1), None, "positive number"),
        ((1, math.nan), None, "positive number"),
        ((1, 2, 3), None, "a volume of 2 axes"),
        (np.eye(4), None, r"a transform of shape \(4, 4\)"),
        (np.ones((1, 2, 3)), None, r"shape \(1, 2, 3\)"),
        ([[1, 0, 0], [0, 1, 0], [0, 1, 1]], None, r"the last row of the transform is \[0.0, 1.0, 1.0\]"),
        (1, (3, 0), r"output_shape=\(3, 0\)"),
        (1, (3,), "2 sizes"),
        (1, (3, 2.5), "2 sizes"),
    ],
)
def test_bad_input(transform, shape, message):
    with pytest.raises(ValueError, match=message):
        plan_regrid(transform, (4, 5), (1.0, 2.0), (0.0, 0.0), shape)
