"""If this fails, tiles are corrected by a wrong illumination."""

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from linumpy.correction.illumination import WORKING_SHAPE, estimate_illumination, illumination_of, reduce_tile
from linumpy.correction.shading import ShadingOptions
from linumpy.testing import brain
from tests.data.write_basicpy import SEEDS, reduced, tiles
from tests.support.budget import first

BASICPY = Path(__file__).parents[1] / "data/basicpy.npz"
FORCE = ShadingOptions(force=True)


def error(found, truth):
    return float(np.sqrt(np.mean((found / truth - 1) ** 2)))


@pytest.fixture(scope="module")
def stack():
    """Tiles (20, 2, 128, 128) of two depths, whose light differs a thousandfold."""
    made = [tiles(seed)[0] for seed in SEEDS]
    return np.stack([made[0], made[1] * 1000], axis=1), np.stack([tiles(seed)[1] for seed in SEEDS])


def test_the_flat_fields_are_nearer_the_truth_than_those_of_basicpy(stack):
    images, truth = stack
    found = estimate_illumination(images)
    theirs = np.load(BASICPY)["flat"]
    assert (found.flat.dtype, found.flat.shape, found.baseline.shape) == (np.float32, (2, 128, 128), (20, 2))
    assert not found.dark.any()
    for depth, (ours, other, true) in enumerate(zip(found.flat, theirs, truth, strict=True)):
        assert error(reduced(ours), other) < 0.02
        assert error(ours, true) < 0.75 * error(other, reduced(true))
        assert error(images[:, 0].mean(0) / images[:, 0].mean(), true) > 0.05, "a mean would do as well"
        # The depths help each other; one alone is not much worse.
        alone = estimate_illumination(images[:, depth])
        assert error(alone.flat, true) < error(other, reduced(true))
    assert np.allclose(found.baseline[:, 1], images[:, 1].mean(axis=(1, 2)), rtol=0.25)
    assert found.evidence.error > 0.5 * error(found.flat, truth)


def test_the_error_decreases_with_the_number_of_tiles():
    images, truth = tiles(3, count=160)
    errors = [error(estimate_illumination(images[:count]).flat, truth) for count in (8, 40, 160)]
    assert errors[2] < 0.007
    assert errors[2] < errors[1] < errors[0] < 0.03


@functools.cache
def brain_tiles(seed, kind, slices=3, size=3, overlap=None, **changes):
    """Draw a brain of voxels of 20 µm; return some tiles of it (N, Z, Y, X), their places, and the true flat field."""
    drawn = brain.draw_brain(seed, kind)
    faults = replace(drawn.faults, galvo=0, focal_um=0.0, **changes)
    spec = replace(
        drawn, tile_shape=(20, 32, 32), spacing_um=(20.0,) * 3, faults=faults, overlap=overlap or drawn.overlap
    )
    places = [(k, i, j) for k in spec.written[:slices] for i in range(size) for j in range(size)]
    flat = brain.truth_flat_field(spec)
    made = np.stack([brain.tile(spec, *place) for place in places]).astype(np.float32)
    return made, np.array(places), flat, brain.truth_dark_field(spec)


def estimate(images, places, options=None):
    return illumination_of([reduce_tile(image) for image in images], images.shape[1:], options, places)


@pytest.mark.parametrize("kind", ["full", "partial", "severe"])
def test_brains_are_never_made_worse(kind):
    """The fields are much better than none, or left out, and the expected error is about right."""
    rows = []
    for seed in range(2):
        images, places, truth, offset = brain_tiles(seed, kind)
        found = estimate(images, places, ShadingOptions(dark=True))
        none, left = error(1, truth), error(found.flat, truth)
        assert left < none + 1e-6
        assert left < 4 * found.evidence.error
        assert np.all(found.dark >= 0)
        assert np.abs(found.dark - offset).mean() <= offset.mean()
        if not found.evidence.left_out:
            rows.append((none, left))
    none, left = np.mean(rows, axis=0)
    assert left < 0.5 * none


@pytest.mark.parametrize(("kind", "overlap"), first([("severe", 0.2), ("full", 0.1), ("partial", 0.3)]))
def test_the_slope_of_the_surface_is_not_taken_for_the_flat_field(kind, overlap):
    """Where tiles overlap the flat field is told from a ramp that all tiles have, whatever the overlap is."""
    images, places, truth, _ = brain_tiles(3, kind, tilt=(0.03, -0.03), overlap=overlap)
    alone, found = (estimate(images, numbers, FORCE).flat for numbers in (None, places))
    u = np.linspace(-1, 1, truth.shape[-1])
    ramps = [
        np.linalg.norm([(rest * u).mean(), (rest.T * u).mean()])
        for rest in (np.log(flat / truth).mean(axis=0) for flat in (alone, found))
    ]
    assert ramps[0] > 0.007, "the sample has no ramp to be told from"
    assert ramps[1] < 0.4 * ramps[0]
    assert error(found, truth) < min(error(alone, truth), error(1, truth))


def test_agarose_tells_the_flat_field_where_tissue_does_not():
    """Tiles half of smooth agarose and half of strong structure: much better than tissue alone would be."""
    rng, (images, truth) = np.random.default_rng(5), tiles(4, count=8, texture=0.5)
    where = np.arange(128) < 64
    agarose = np.stack([where if k % 2 else ~where for k in range(8)])[:, None]
    smooth = 8 * truth * rng.normal(1, 0.1, images.shape)
    found = estimate_illumination(np.where(agarose, smooth, images).astype("f4"))
    assert error(found.flat, truth) < 0.4 * error(estimate_illumination(images, FORCE).flat, truth)


@pytest.mark.parametrize(("size", "slices"), [(1, 2), (2, 3)])
def test_too_few_tiles_are_left_alone(size, slices):
    images, places, _, _ = brain_tiles(0, "partial", slices, size)
    found = estimate(images, places, ShadingOptions(dark=True))
    assert np.all(found.flat == 1)
    assert not found.dark.any()
    assert f"{len(images)} tiles with light" in found.evidence.left_out
    assert "parts are needed" in found.evidence.left_out
    forced = estimate(images, places, FORCE)
    assert not forced.evidence.left_out
    assert 0.2 <= forced.flat.min() < forced.flat.max() <= 5


def test_tiles_without_light_show_no_part_of_the_sample():
    images = tiles(3, count=8)[0].copy()
    images[4:] = 0
    assert "4 tiles with light show 4 parts" in estimate_illumination(images).evidence.left_out


def test_even_light_stays_even():
    images, places, _, _ = brain_tiles(1, "partial", 2, vignette=0.0)
    found = estimate(images, places)
    assert error(found.flat, 1) < 0.02


def test_a_dark_field_and_tiles_that_were_not_recorded():
    """Tiles of several depths, of which the deepest have little light: what is left there is dark."""
    images, truth = tiles(3, count=30)
    light = np.array([1.0, 0.5, 0.2, 0.05, 0.01])[:, None, None]
    images = images[:, None] * 2 * light + np.float32(30)
    images[7], images[11, :, :40, :50] = 0, np.nan
    plain, found = (estimate_illumination(images, ShadingOptions(dark=dark)) for dark in (False, True))
    assert error(found.flat, truth) < 0.02
    assert 24 < found.dark.mean() < 36
    assert not plain.dark.any()
    assert np.isfinite(found.flat).all()
    assert found.evidence.tiles == 29


def test_tiles_of_any_size_are_reduced_and_the_field_expanded():
    rng = np.random.default_rng(0)
    height, width = 200, 90
    v, u = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    truth = 1 + 0.3 * np.cos(v) - 0.2 * u
    truth /= truth.mean()
    voxels = (1000 * truth * rng.uniform(0.8, 1.2, (12, 1, 1)) * rng.normal(1, 0.1, (12, height, width))).astype("u2")
    found = estimate_illumination(voxels)
    assert found.flat.shape == truth.shape
    assert error(found.flat, truth) < 0.005
    assert error(found.correct(voxels).mean(axis=(1, 2)), found.baseline) < 0.02
    pixels = reduce_tile(voxels[:2])
    assert pixels.shape == (2, *WORKING_SHAPE[1:])
    assert np.allclose(pixels.mean(axis=(1, 2)), voxels[:2].mean(axis=(1, 2)), rtol=1e-5)
    pixels = reduce_tile(np.where(np.arange(90) < 9, np.nan, voxels))
    assert pixels.shape == (12, *WORKING_SHAPE[1:])
    assert np.isfinite(pixels).mean() == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("value", [0.0, 7.0, np.nan])
@pytest.mark.parametrize("dark", [False, True])
def test_constant_and_empty_tiles_have_even_light(value, dark):
    found = estimate_illumination(np.full((3, 2, 8, 9), value, "f4"), ShadingOptions(dark=dark))
    assert np.allclose(found.flat, 1, atol=1e-5)
    assert np.allclose(found.dark, 0)
    assert np.allclose(found.baseline, np.nan_to_num(value), atol=1e-5)


def test_what_is_refused():
    for bad in (np.ones((4, 4)), np.ones((0, 4, 4))):
        with pytest.raises(ValueError, match="shape"):
            estimate_illumination(bad)
    with pytest.raises(TypeError, match="complex"):
        estimate_illumination(np.ones((2, 4, 4), complex))


@pytest.mark.parametrize("wrong", [np.nan, 0.0, -1.0, np.inf])
def test_options_that_would_correct_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match="smoothness"):
        ShadingOptions(smoothness=wrong)


@pytest.mark.gpu
def test_on_a_device(cupy, stack):
    images, _ = stack
    options = ShadingOptions(dark=True)
    images = np.where(np.arange(128) < 3, np.float32(np.nan), images)
    host, device = (estimate_illumination(xp.asarray(images), options) for xp in (np, cupy))
    assert all(isinstance(field, cupy.ndarray) for field in (device.flat, device.dark, device.baseline))
    light = host.baseline.mean(axis=0)
    assert np.allclose(device.flat.get(), host.flat, atol=2e-3)
    assert np.allclose(device.baseline.get(), host.baseline, rtol=5e-3)
    assert np.allclose(device.dark.get() / light[:, None, None], host.dark / light[:, None, None], atol=5e-3)
