"""If this fails, intensities are normalised between wrong percentiles."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from linumpy.correction.percentiles import histogram_percentiles, histograms, normalise, plane_percentiles
from linumpy.device import to_host

NOT_FINITE = st.sampled_from([np.nan, np.inf, -np.inf])
VALUES = st.floats(-1e4, 1e4, width=32).map(lambda v: 0.0 if abs(v) < 1e-6 else v) | NOT_FINITE


@given(
    arrays("f4", st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=VALUES), st.floats(0, 49), st.floats(51, 100)
)
def test_percentiles_are_those_of_numpy(volume, low, high):
    found = plane_percentiles(volume, (low, high))
    counted = histogram_percentiles(histograms(volume), (low, high))
    for plane, ours, binned in zip(volume, found.T, counted.T, strict=True):
        finite = plane[np.isfinite(plane)]
        if not finite.size:
            assert np.isnan([*ours, *binned]).all()
            continue
        expected = np.percentile(finite.astype("f8"), (low, high))
        assert np.allclose(ours, expected, rtol=1e-5, atol=1e-2)
        # A rank of a histogram has no voxel between two others: it lies in the bin of the lower one.
        for value, share in zip(binned, (low, high), strict=True):
            lower, upper = (np.percentile(finite, share, method=m) for m in ("lower", "higher"))
            assert lower - abs(lower) / 100 - 1e-6 <= value <= upper + abs(upper) / 100 + 1e-6


def test_large_planes_by_histograms():
    rng = np.random.default_rng(0)
    volume = rng.gamma(2, 300, (3, 200, 200)).astype("u2")
    found = histogram_percentiles(histograms(volume), (1, 99))
    assert np.allclose(found, np.percentile(volume, (1, 99), axis=(1, 2)), rtol=0.01)


def test_normalised():
    volume = np.array([[1.0, 3.0, np.nan, 9.0], [5.0, 5.0, 5.0, 5.0]], "f4")
    bounds = np.array([[1.0, 5.0], [5.0, 5.0]], "f4")
    assert np.array_equal(normalise(volume, bounds), [[0, 0.5, np.nan, 1], [0, 0, 0, 0]], equal_nan=True)
    assert normalise(volume, bounds, clip=False)[0, 3] == 2
    unknown = np.full((2, 2), np.nan, "f4")
    assert not normalise(volume[1:], unknown[:, :1]).any()


def test_the_same_where_the_array_is(xp):
    rng = np.random.default_rng(0)
    volume = rng.normal(0, 100, (5, 40, 41)).astype("f4")
    volume[1], volume[2, :3] = np.nan, np.inf
    bounds = plane_percentiles(volume, (2, 98))
    found = plane_percentiles(xp.asarray(volume), (2, 98))
    assert isinstance(found, xp.ndarray)
    assert np.allclose(to_host(found), bounds, rtol=1e-5, equal_nan=True)
    assert np.array_equal(to_host(histograms(xp.asarray(volume))), histograms(volume))
    normalised = normalise(xp.asarray(volume), xp.asarray(bounds))
    assert isinstance(normalised, xp.ndarray)
    assert np.allclose(to_host(normalised), normalise(volume, bounds), atol=1e-6, equal_nan=True)
