"""If this fails, overlaps of slices are chosen by wrong correlations (oracle: Pearson's coefficient)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linumpy.gpu.oct import correlation
from linumpy.gpu.oct.correlation import central_half, overlap_correlations


def slow(fixed, moving, overlaps):
    """The definition."""
    deepest = max(overlaps)
    fixed, moving = fixed[len(fixed) - deepest :].astype("f8"), moving[:deepest].astype("f8")
    good = np.isfinite(fixed).all(axis=0) & np.isfinite(moving).all(axis=0)
    results = []
    for n in overlaps:
        a, b = fixed[deepest - n :][:, good], moving[:n][:, good]
        varied = a.size > 0 and np.ptp(a) > 0 and np.ptp(b) > 0
        results.append(np.corrcoef(a.ravel(), b.ravel())[0, 1] if varied else 0.0)
    return np.array(results)


def pair(shape, other, dtype, seed, offset=0.0, holes=False):
    """Make two volumes that share some planes, noise apart."""
    rng = np.random.default_rng(seed)
    fixed, moving = (offset + rng.gamma(2.0, 20.0, (n, *shape[1:])) for n in (shape[0], other))
    shared = int(rng.integers(1, min(shape[0], other) + 1))
    fixed[-shared:] = moving[:shared] + rng.normal(0, 3, moving[:shared].shape)
    fixed, moving = fixed.astype(dtype), moving.astype(dtype)
    if holes and np.dtype(dtype).kind == "f":
        for vol in (fixed, moving):
            vol[rng.random(vol.shape) < 0.02] = rng.choice([np.nan, np.inf, -np.inf])
    return fixed, moving


@given(
    st.tuples(*(st.integers(1, 9) for _ in range(3))),
    st.integers(1, 9),
    st.sampled_from(["f4", "f8", "u2", "u1", ">i2", "f2"]),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_same_as_the_definition(shape, other, dtype, holes, seed):
    fixed, moving = pair(shape, other, dtype, seed, holes=holes)
    overlaps = list(range(1, min(shape[0], other) + 1))
    got = overlap_correlations(fixed, moving, overlaps)
    assert got.dtype == np.float64
    assert np.allclose(got, slow(fixed, moving, overlaps), atol=1e-9)


@pytest.mark.parametrize("scratch", [1, 10_000, 2**29])
def test_strips_do_not_show(monkeypatch, scratch):
    monkeypatch.setattr(correlation, "SCRATCH_BYTES", scratch)
    fixed, moving = pair((12, 31, 20), 9, "f4", 3, holes=True)
    overlaps = [9, 2, 5]
    assert np.allclose(overlap_correlations(fixed, moving, overlaps), slow(fixed, moving, overlaps), atol=1e-12)


def test_an_offset_costs_no_digits():
    fixed, moving = pair((12, 20, 20), 12, "f8", 1)
    near = overlap_correlations(fixed, moving, [3, 12])
    far = overlap_correlations(fixed + 1e7, moving - 1e7, [3, 12])
    assert np.allclose(near, far, atol=1e-9)


@pytest.mark.parametrize("value", [0, 7, 1e6, 0.1])
def test_no_variance_correlates_with_nothing(value):
    vol = np.random.default_rng(0).normal(size=(4, 40, 40)).astype("f4")
    flat = np.full_like(vol, value)
    assert (overlap_correlations(flat, vol, [1, 2, 4]) == 0).all()
    assert (overlap_correlations(vol, flat, [1, 2, 4]) == 0).all()
    vol[1] = np.nan  # no A-line is whole
    assert (overlap_correlations(vol, vol, [4]) == 0).all()


def test_a_volume_is_its_own_best_match():
    vol = np.random.default_rng(0).normal(size=(8, 9, 9))
    got = overlap_correlations(vol, vol, range(1, 9))
    assert got[-1] == pytest.approx(1.0)
    assert got.max() <= 1.0


@pytest.mark.parametrize(("size", "bounds"), [(1, (0, 1)), (2, (0, 1)), (3, (0, 2)), (4, (1, 3)), (512, (128, 384))])
def test_central_half(size, bounds):
    vol = np.broadcast_to(np.arange(size), (1, 1, size))
    assert central_half(vol).ravel().tolist() == list(range(*bounds))


@pytest.mark.parametrize(
    ("shapes", "overlaps", "message"),
    [
        (((4, 5, 5), (4, 5, 6)), [1], "do not fit"),
        (((4, 5), (4, 5)), [1], "do not fit"),
        (((4, 5, 0), (4, 5, 0)), [1], "do not fit"),
        (((4, 5, 5), (3, 5, 5)), [4], "have 1 to 3"),
        (((4, 5, 5), (3, 5, 5)), [0], "have 1 to 3"),
        (((4, 5, 5), (3, 5, 5)), [], "have 1 to 3"),
    ],
)
def test_bad_input(shapes, overlaps, message):
    with pytest.raises(ValueError, match=message):
        overlap_correlations(*(np.ones(shape) for shape in shapes), overlaps)
    with pytest.raises(TypeError, match="complex128"):
        overlap_correlations(np.ones((2, 2, 2), complex), np.ones((2, 2, 2), complex), [1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f4", "u2", "f2", "f8", "u1"])
@pytest.mark.parametrize("holes", [False, True])
def test_same_on_a_device(cupy, monkeypatch, dtype, holes):
    monkeypatch.setattr(correlation, "SCRATCH_BYTES", 2**22)
    fixed, moving = pair((60, 120, 130), 70, dtype, 5, offset=1000.0 if dtype != "u1" else 0.0, holes=holes)
    overlaps = [60, 1, *range(20, 41)]
    got = overlap_correlations(cupy.asarray(fixed), cupy.asarray(moving), overlaps)
    assert isinstance(got, cupy.ndarray)
    assert np.allclose(cupy.asnumpy(got), slow(fixed, moving, overlaps), atol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_voxels_that_were_not_measured_take_no_part(monkeypatch, seed):
    """Whatever they hold, against the correlation of those pairs of which both were."""
    rng = np.random.default_rng(seed)
    fixed, moving = (rng.gamma(2.0, 20.0, (planes, 13, 17)) for planes in (9, 7))
    masks = [rng.random(one.shape) < 0.7 for one in (fixed, moving)]
    spoilt = [np.where(mask, one, rng.choice([1e9, np.nan])) for one, mask in zip((fixed, moving), masks, strict=True)]
    known = (masks[0], None) if seed % 4 == 3 else tuple(masks)
    if seed % 4 == 3:
        spoilt[1], masks[1] = moving, np.ones(moving.shape, bool)
    expected = []
    for n in range(1, 8):
        both = masks[0][-n:] & masks[1][:n]
        expected.append(np.corrcoef(fixed[-n:][both], moving[:n][both])[0, 1])
    monkeypatch.setattr(correlation, "SCRATCH_BYTES", int(rng.choice([1, 2**20])))
    np.testing.assert_allclose(overlap_correlations(*spoilt, range(1, 8), known), expected, atol=1e-9)
    nothing = np.zeros(fixed.shape, bool)
    assert (overlap_correlations(fixed, moving, [3], (nothing, None)) == 0).all()
