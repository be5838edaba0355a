"""If this fails, slices are turned or shifted against each other by more than the registration promises."""

import itertools

import numpy as np
import pytest
from scipy import ndimage

from benchmarks.tissue import by_simpleitk, corner_errors, known_pairs
from linumpy.registration.masked_correlation import match_pairs
from linumpy.registration.pairs import angles_within, register_pairs

#: Promised accuracy, in voxels and degrees.
VOXELS, DEGREES = 0.1, 0.05


def homogeneous(linear, shift, shape, spacing):
    """A map about the centre of an image, in µm."""
    centre = (np.array(shape) - 1) / 2 * spacing
    matrix = np.eye(len(shape) + 1)
    matrix[:-1, :-1] = linear
    matrix[:-1, -1] = centre - linear @ centre + shift
    return matrix


def turned(degrees, rank):
    matrix = np.eye(rank)
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    matrix[-2:, -2:] = [[c, -s], [s, c]]
    return matrix


def structure(shape, seed, margin=30):
    rng = np.random.default_rng(seed)
    big = ndimage.gaussian_filter(rng.standard_normal([n + 2 * margin for n in shape]), 2.5)
    return (big / big.std()).astype(np.float32)


def pair(shape, matrix, spacing, seed, noise, margin=30):
    """A fixed image, and what a moving one shows whose points are at `matrix @ p`: another gain, offset and noise."""
    rng = np.random.default_rng([seed, 1])
    big, back = structure(shape, seed, margin), np.linalg.inv(matrix)
    linear = back[:-1, :-1] * spacing / spacing[:, None]
    offset = back[:-1, -1] / spacing + margin
    moving = ndimage.affine_transform(big, linear, offset, output_shape=shape, order=3)
    fixed = big[(slice(margin, -margin),) * len(shape)]
    fixed = fixed + noise * rng.standard_normal(shape)
    return fixed.astype(np.float32), (3 * (moving + noise * rng.standard_normal(shape)) + 50).astype(np.float32)


def pairs(shape, spacing, count, noise, affine=False, seed=0):
    rng = np.random.default_rng(seed)
    rank, spacing = len(shape), np.array(spacing)
    images, truth = [], []
    for n in range(count):
        shift = rng.uniform(-0.06, 0.06, rank) * shape * spacing
        linear = turned(rng.uniform(-7, 7), rank)
        if affine:
            linear = linear @ (np.eye(rank) + rng.uniform(-0.03, 0.03, (rank, rank)))
        truth.append(homogeneous(linear, shift, shape, spacing))
        images.append(pair(shape, truth[-1], spacing, n + 100 * seed, noise))
    fixed, moving = (np.stack(side) for side in zip(*images, strict=True))
    return fixed, moving, np.array(truth)


def errors(found, truth, shape, spacing):
    """Root mean square error at the corners in voxels, and the error of the angle in degrees."""
    corners = [[*((n - 1) * s * k for n, s, k in zip(shape, spacing, ks, strict=True)), 1]
               for ks in itertools.product((0, 1), repeat=len(shape))]  # fmt: skip
    apart = np.einsum("nij,cj->nci", found - truth, np.array(corners))[..., :-1] / spacing
    angles = [np.degrees(np.arctan2(m[:, -2, -3], m[:, -3, -3])) for m in (found, truth)]
    return np.sqrt((apart**2).sum(axis=-1).mean(axis=1)), np.abs(angles[0] - angles[1])


@pytest.mark.parametrize(("shape", "spacing", "noise"), [
    ((150, 130), (10.0, 10.0), 0.5), ((120, 150), (5.0, 10.0), 0.0), ((20, 72, 80), (4.0, 2.0, 2.0), 0.5),
])  # fmt: skip
def test_rigid_pairs(shape, spacing, noise):
    fixed, moving, truth = pairs(shape, spacing, 3, noise)
    found = register_pairs(fixed, moving, spacing=spacing, levels=2 if len(shape) == 3 else None)
    apart, angles = errors(found.matrices, truth, shape, spacing)
    assert apart.max() < VOXELS
    assert angles.max() < DEGREES
    assert found.converged.all()
    # The error that is told is about that which is made.
    if noise:
        told = found.errors_um / np.min(spacing)
        assert (apart < 4 * told).all()
        assert (told < VOXELS).all()


def test_affine_pairs():
    shape, spacing = (150, 130), (10.0, 10.0)
    fixed, moving, truth = pairs(shape, spacing, 3, 0.2, affine=True)
    found = register_pairs(fixed, moving, spacing=spacing, model="affine")
    assert errors(found.matrices, truth, shape, spacing)[0].max() < VOXELS
    rigid = register_pairs(fixed, moving, spacing=spacing)
    assert errors(rigid.matrices, truth, shape, spacing)[0].min() > VOXELS


def test_masks_and_outliers():
    """Tiles that are missing, with what is left of them unknown, and a bright hair in one image only."""
    shape, spacing = (150, 130), (10.0, 10.0)
    fixed, moving, truth = pairs(shape, spacing, 3, 0.3)
    fixed[:, :45, :50] = moving[:, 100:, 80:] = np.nan
    moving[:, 60:64, 20:] = 80.0
    found = register_pairs(fixed, moving, spacing=spacing)
    apart, angles = errors(found.matrices, truth, shape, spacing)
    assert apart.max() < VOXELS
    assert angles.max() < DEGREES


def test_shadows_do_not_move_a_match():
    """A fixed image with what lies above it, faint and elsewhere: alone it moves the match, as shadows it does not."""
    shape, spacing = (150, 130), (10.0, 10.0)
    fixed, moving, truth = pairs(shape, spacing, 3, 0.3)
    above = ndimage.shift(ndimage.gaussian_filter(fixed, (0, 1, 1)), (0, 3, -2), mode="nearest")
    above[0] = 0  # of the first pair nothing is known
    fixed = fixed - 0.4 * above
    above[1, 20:40, 30:50] = np.nan
    bare, told = (register_pairs(fixed, moving, shadows=one, spacing=spacing) for one in (None, above))
    apart, angles = errors(told.matrices, truth, shape, spacing)
    assert apart.max() < VOXELS
    assert angles.max() < DEGREES
    assert errors(bare.matrices, truth, shape, spacing)[0][1:].min() > 3 * apart.max()
    np.testing.assert_allclose(told.matrices[0], bare.matrices[0], atol=1e-3)
    with pytest.raises(ValueError, match="shadows of shape"):
        register_pairs(fixed, moving, shadows=above[:, 1:])


def test_correlations_are_those_of_a_slow_sum():
    """All shifts of small masked images, against a loop over them."""
    rng = np.random.default_rng(3)
    fixed, moving = rng.standard_normal((2, 1, 14, 12))
    masks = rng.random((2, 1, 14, 12)) > 0.2
    moving[0, 3:, 2:] += 2 * fixed[0, :-3, :-2]  # what is at p is at p + (3, 2)
    found = match_pairs(fixed, moving, (masks[0], masks[1]), max_shift=0.4, min_overlap=0.3)
    best = (-2.0, None)
    for dy, dx in itertools.product(range(-6, 7), range(-5, 6)):
        at = [(y, x) for y in range(14) for x in range(12) if 0 <= y + dy < 14 and 0 <= x + dx < 12]
        at = [(y, x) for y, x in at if masks[0][0, y, x] and masks[1][0, y + dy, x + dx]]
        if len(at) < 0.3 * min(masks[0].sum(), masks[1].sum()):
            continue
        values = np.array([(fixed[0, y, x], moving[0, y + dy, x + dx]) for y, x in at])
        best = max(best, (np.corrcoef(values.T)[0, 1], (dy, dx)))
    assert best[1] == (3, 2)
    np.testing.assert_allclose(found.matrices[0, :2, 2], best[1])
    np.testing.assert_allclose(found.correlations[0], best[0], atol=1e-5)


def test_the_evidence_is_a_probability():
    """Of images of other tissue few seem to match; of images that share a part, the more the better."""
    shape, count = (72, 64), 24
    fixed = np.stack([structure(shape, n, 0) for n in range(count)])
    moving = np.stack([structure(shape, n + 1000, 0) for n in range(count)])
    rng = np.random.default_rng(0)
    means, seen = [], []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8):
        mixed = share * np.roll(fixed, (3, -4), (1, 2)) + np.sqrt(1 - share**2) * moving
        found = match_pairs(fixed, mixed + 0.3 * rng.standard_normal(mixed.shape), angles=(-4.0, 0.0, 4.0))
        is_right = np.abs(found.matrices[:, :2, 2] - (3, -4)).max(axis=1) < 1.5
        means.append(found.evidence.mean())
        seen += list(zip(found.evidence, is_right, strict=True))
    assert (np.diff(means) > 0).all()
    assert means[0] < 0.5
    assert means[-1] > 0.95
    evidence, is_right = np.array(seen).T
    assert is_right[evidence > 0.95].mean() > 0.95
    assert is_right[evidence < 0.3].mean() < 0.3
    assert (np.array(seen)[:count, 0] > 0.95).sum() <= 2  # nothing in common


def test_a_match_at_the_end_of_the_range_is_told():
    fixed = structure((64, 64), 1)[None, 30:-30, 30:-30]
    moving = structure((64, 64), 1)[None, 30 - 6 : -36, 30:-30]  # what is at p is at p + (6, 0)
    assert match_pairs(fixed, moving, max_shift=6 / 64).is_at_edge.all()
    assert not match_pairs(fixed, moving, max_shift=12 / 64).is_at_edge.any()
    assert register_pairs(fixed, moving, max_shift=6 / 64).is_at_edge.all()


def test_images_without_anything_in_common_are_told():
    shape, empty = (64, 64), np.zeros((1, 64, 64), np.float32)
    other = structure(shape, 1)[None, 30:-30, 30:-30]
    for fixed, moving in ((empty, other), (other, empty), (empty * np.nan, other)):
        found = register_pairs(fixed, moving)
        assert np.isinf(found.errors_um[0])
        assert found.correlations[0] == 0
        np.testing.assert_array_equal(found.matrices[0], np.eye(3))
    noise = np.random.default_rng(0).standard_normal((1, 64, 64)).astype(np.float32)
    assert register_pairs(other, noise).correlations[0] < 0.5
    with pytest.raises(ValueError, match="no pairs"):
        register_pairs(other, noise[:, :60])


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((1, 3, 64), {}, "four voxels"),
        ((64, 64), {}, "no pairs"),
        ((1, 64, 64), {"model": "rgid"}, "model='rgid'"),
        ((1, 64, 64), {"max_angle": 181}, "max_angle=181"),
        ((1, 64, 64), {"max_angle": np.nan}, "max_angle=nan"),
        ((1, 64, 64), {"max_shift": 1.1}, "max_shift=1.1"),
        ((1, 64, 64), {"spacing": (1.0,)}, "for each of 2 axes"),
        ((1, 64, 64), {"spacing": (1.0, -1.0)}, "spacing="),
        ((1, 64, 64), {"spacing": (1.0, np.nan)}, "spacing="),
        ((1, 64, 64), {"shadows": np.zeros((1, 64, 60))}, "shadows of shape"),
    ],
)
def test_what_cannot_be_registered(shape, options, message):
    images = np.ones(shape, np.float32)
    with pytest.raises(ValueError, match=message):
        register_pairs(images, images, **options)


def test_a_pair_does_not_depend_on_the_others():
    shape, spacing = (100, 90), (1.0, 1.0)
    fixed, moving, _ = pairs(shape, spacing, 3, 0.3)
    together = register_pairs(fixed, moving)
    alone = [register_pairs(fixed[n : n + 1], moving[n : n + 1]).matrices[0] for n in range(3)]
    np.testing.assert_allclose(together.matrices, alone, atol=2e-3)


def test_errors_are_no_worse_than_those_of_simpleitk():
    pytest.importorskip("SimpleITK")
    fixed, moving, truth = known_pairs(4, 140, noise=0.5)
    theirs = corner_errors(np.array([by_simpleitk(*pair) for pair in zip(fixed, moving, strict=True)]), truth, 140)
    ours = corner_errors(register_pairs(fixed, moving).matrices, truth, 140)
    assert theirs.max() < 0.5  # it was called rightly
    assert ours.mean() < 1.1 * theirs.mean()
    assert ours.max() < VOXELS


def test_the_search_is_what_it_says():
    assert angles_within(5) == [-4, -2, 0, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(150, 130), (20, 72, 80)])
def test_the_device_finds_what_the_host_finds(shape):
    import cupy

    spacing = (10.0,) * len(shape)
    fixed, moving, _ = pairs(shape, spacing, 3, 0.3)
    moving[:, ..., :20] = np.nan
    host = register_pairs(fixed, moving, spacing=spacing)
    device = register_pairs(cupy.asarray(fixed), cupy.asarray(moving), spacing=spacing)
    assert errors(device.matrices, host.matrices, shape, spacing)[0].max() < 0.01
    np.testing.assert_allclose(device.correlations, host.correlations, atol=1e-3)
