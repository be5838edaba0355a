"""If this fails, slices are stacked with wrong overlaps, outliers or blending."""

import numpy as np
import pytest

from linumpy.mosaic.stacking import blend_overlap, candidate_overlaps, enforce_z_consistency, find_z_overlap, plan_stack
from linumpy.testing.synthetic import MosaicSpec, block
from tests.support.stacks import consecutive_slices, stack_slices

SPEC = MosaicSpec(tiles=(1, 1), tile_shape=(48, 160, 176), looks=4)


def slices(overlap, dtype="float32"):
    return [block(one, (0, 0, 0), one.shape).astype(dtype) for one in consecutive_slices(SPEC, overlap)]


@pytest.mark.parametrize("overlap", [9, 16, 23])
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_the_true_overlap(overlap, dtype):
    fixed, moving = slices(overlap, dtype)
    # Expected are 16 planes of 5 µm; the motor was up to 7 planes off.
    found, correlation = find_z_overlap(fixed, moving, (48 - 16) * 5e-3, 0.05, 5.0)
    assert found == overlap
    assert 0.3 < correlation <= 1


def test_only_the_central_half_counts():
    fixed, moving = slices(12)
    spoilt = moving.copy()
    spoilt[:, :40], spoilt[:, :, :44], spoilt[:, 120:], spoilt[:, :, 132:] = 1e6, 1e6, 1e6, 1e6
    assert find_z_overlap(fixed, spoilt, 0.18, 0.05, 5.0) == find_z_overlap(fixed, moving, 0.18, 0.05, 5.0)


def test_without_any_structure_the_expected_overlap():
    flat = np.ones((48, 8, 8), "f4")
    assert find_z_overlap(flat, flat, 0.16, 0.04, 5.0) == (16, 0.0)
    assert find_z_overlap(flat, np.full_like(flat, np.nan), 0.16, 0.04, 5.0) == (16, 0.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((48, 48, 0.16, 0.01, 5.0), [14, 15, 16, 17, 18]),
        ((48, 48, 0.16, 0.0, 5.0), [16]),
        ((48, 15, 0.16, 0.01, 5.0), [14, 15]),
        ((48, 48, 0.235, 0.1, 5.0), list(range(1, 22))),
        ((48, 48, 0.1612, 0.0, 5.0), [16]),  # none is within reach: the nearest
        ((10, 10, 0.3, 0.1, 10.0), list(range(1, -20, -1))),
    ],
)
def test_candidates(arguments, expected):
    if min(expected) < 1:
        with pytest.raises(ValueError, match="no overlap within"):
            candidate_overlaps(*arguments)
    else:
        assert candidate_overlaps(*arguments)[0] == expected


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((0, 0.1, 5), "slicing_interval_mm=0"),
        ((0.1, -1, 5), "search_range_mm=-1"),
        ((0.1, 0.1, float("nan")), "z_spacing=nan"),
        ((float("inf"), 0.1, 5), "slicing_interval_mm=inf"),
        ((9, 0.1, 5), "no overlap within"),
    ],
)
def test_bad_lengths(lengths, message):
    with pytest.raises(ValueError, match=message):
        find_z_overlap(np.ones((9, 4, 4)), np.ones((9, 4, 4)), *lengths)


def test_outliers_are_mended():
    done = enforce_z_consistency([20, 21, 20, 3, 19, 20])
    assert done.overlaps == (20, 21, 20, 20, 19, 20)
    assert done.mended == (False, False, False, True, False, False)
    assert done.typical == 20


def test_overlaps_that_do_not_correlate_are_not_trusted():
    done = enforce_z_consistency([5, 5, 5, 21, 20], [0.1, np.nan, 0.0, 0.9, 0.8])
    assert done.overlaps == (21, 21, 21, 21, 20)
    assert done.mended == (True, True, True, False, False)
    assert enforce_z_consistency([5, 6, 5], [0, 0, 0]).overlaps == (5, 6, 5)
    assert enforce_z_consistency([7]).overlaps == (7,)


@pytest.mark.parametrize(
    ("overlaps", "correlations"), [([], None), ([[1, 2]], None), ([1, 2], [0.5]), ([np.nan], None)]
)
def test_overlaps_that_make_no_sense(overlaps, correlations):
    with pytest.raises(ValueError, match=r"overlaps"):
        enforce_z_consistency(overlaps, correlations)


@pytest.mark.parametrize("dtype", ["f4", "f8", "u2", "u1", "i2", "f2"])
def test_blending_is_a_hann_ramp_of_valid_voxels(dtype):
    rng = np.random.default_rng(0)
    fixed, moving = (rng.integers(1, 100, (7, 9, 8)).astype(dtype) for _ in range(2))
    fixed[:, 0], moving[:, :, 0] = 0, 0
    got = blend_overlap(fixed, moving)
    for k in range(7):
        weight = 0.5 - 0.5 * np.cos(np.pi * (k + 0.5) / 7)
        expected = (1 - weight) * fixed[k] + weight * moving[k].astype("f8")
        expected = np.where(fixed[k] == 0, moving[k], np.where(moving[k] == 0, fixed[k], expected))
        assert np.abs(got[k] - expected).max() <= (0.5001 if fixed.dtype.kind in "iu" else 0.04)
    assert got.dtype == dtype
    assert (got[:, 0, 0] == 0).all()


def test_blending_leaves_out_what_is_not_finite():
    fixed, moving = np.full((3, 2, 2), 4.0, "f4"), np.full((3, 2, 2), 8.0, "f4")
    fixed[:, 0, 0], moving[:, 0, 1], fixed[:, 1, 1] = np.nan, np.inf, -np.inf
    moving[:, 1, 1] = np.nan
    got = blend_overlap(fixed, moving)
    assert (got[:, 0, 0] == 8).all()
    assert (got[:, 0, 1] == 4).all()
    assert (got[:, 1, 1] == 0).all()


@pytest.mark.parametrize("shapes", [((3, 4, 4), (3, 4, 5)), ((3, 4), (3, 4))])
def test_planes_that_cannot_be_blended(shapes):
    with pytest.raises(ValueError, match="cannot be blended"):
        blend_overlap(*(np.ones(shape) for shape in shapes))


@pytest.mark.parametrize("dtype", ["f4", "u2", "f8"])
def test_a_volume_that_was_cut_comes_together_again(dtype):
    """No seam: every voxel is what it was, also where slices are shifted and three of them meet."""
    whole = np.random.default_rng(0).integers(1, 60000, (40, 20, 24)).astype(dtype)
    pieces = [whole[0:18, :, 2:20], whole[10:30, :, 4:22], whole[25:33, :, 4:22], whole[27:40, :, :18]]
    stack = stack_slices(pieces, [8, 5, 6], [(0, 2), (0, 0), (0, -4)])
    expected = np.zeros((40, 20, 22), dtype)
    for piece, z, x in zip(pieces, (0, 10, 25, 27), (2, 4, 4, 0), strict=True):
        expected[z : z + len(piece), :, x : x + 18] = piece
    assert stack.dtype == dtype
    assert np.array_equal(stack, expected)


@pytest.mark.parametrize("overlap", [12, 20])
def test_found_overlaps_stack_to_the_known_tissue(overlap):
    fixed, moving = slices(overlap)
    found, _ = find_z_overlap(fixed, moving, (48 - 16) * 5e-3, 0.04, 5.0)
    stack = stack_slices([fixed, moving], [found])
    assert stack.shape[0] == 96 - overlap
    seam = slice(48 - overlap, 48)
    assert np.array_equal(stack[: seam.start], fixed[: seam.start])
    assert np.array_equal(stack[48:], moving[overlap:])
    low, high = np.minimum(fixed[seam], moving[:overlap]), np.maximum(fixed[seam], moving[:overlap])
    assert ((stack[seam] >= low * 0.999) & (stack[seam] <= high * 1.001)).all()


def test_plans():
    plan = plan_stack([(10, 5, 5), (8, 6, 5), (4, 5, 5)], [3, 4], [(0.4, -2.0), (0.4, 0.0)])
    assert plan.offsets == ((0, 0, 2), (7, 0, 0), (11, 1, 0))
    assert plan.shape == (15, 6, 7)
    assert plan.box(2) == (slice(11, 15), slice(1, 6), slice(0, 5))


@pytest.mark.parametrize(
    ("shapes", "overlaps", "shifts", "message"),
    [
        ([], [], None, "no slices"),
        ([(4, 4, 4)] * 2, [], None, "need 1 overlaps"),
        ([(4, 4, 4)] * 2, [5], None, "cannot overlap in 5"),
        ([(4, 4, 4)] * 2, [1], [], "need 1 overlaps"),
        ([(4, 4, 4)] * 2, [1], [(np.nan, 0)], "shifts"),
    ],
)
def test_stacks_that_cannot_be(shapes, overlaps, shifts, message):
    with pytest.raises(ValueError, match=message):
        plan_stack(shapes, overlaps, shifts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_same_on_the_gpu(cupy, dtype):
    fixed, moving = slices(14, dtype)
    arguments = ((48 - 16) * 5e-3, 0.05, 5.0)
    expected = find_z_overlap(fixed, moving, *arguments)
    on_device = [cupy.asarray(one) for one in (fixed, moving)]
    for volumes, device in [(on_device, None), (on_device, "cpu"), ((fixed, moving), "cuda"), (on_device, "cuda")]:
        found = find_z_overlap(*volumes, *arguments, device=device)
        assert found[0] == expected[0] == 14
        assert found[1] == pytest.approx(expected[1], abs=1e-9)
    stack = stack_slices(on_device, [14], [(1.0, -3.0)])
    assert isinstance(stack, cupy.ndarray)
    assert np.allclose(cupy.asnumpy(stack), stack_slices([fixed, moving], [14], [(1.0, -3.0)]), rtol=1e-5, atol=1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["i8", "u8"])
def test_blending_the_last_integers_of_64_bits(dtype):
    last = np.full((4, 3, 3), np.iinfo(dtype).max, dtype)
    assert (blend_overlap(last, last) == last).all()


def test_measured_voxels_go_before_others():
    """A filled voxel counts only where neither slice has a measured one."""
    fixed, moving = np.full((4, 1, 1), 8.0, "f4"), np.full((4, 1, 1), 2.0, "f4")
    known = np.array([1, 1, 0, 0], bool)[:, None, None], np.array([1, 0, 1, 0], bool)[:, None, None]
    plain = blend_overlap(fixed, moving)[:, 0, 0]
    got = blend_overlap(fixed, moving, measured=known)[:, 0, 0]
    assert got.tolist() == [plain[0], 8, 2, plain[3]]
    moving[2] = np.nan  # measured, and no number: what the other was filled with is left
    assert blend_overlap(fixed, moving, measured=known)[2, 0, 0] == 8
