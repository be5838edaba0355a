"""If this fails, tiles are corrected by a wrong illumination."""

from pathlib import Path

import numpy as np
import pytest

from linumpy.correction.illumination import WORKING_SIZE, estimate_illumination, reduce_tile
from linumpy.correction.shading import ShadingOptions
from tests.data.write_basicpy import SEEDS, reduced, tiles

BASICPY = Path(__file__).parents[1] / "data/basicpy.npz"


def error(found, truth):
    return float(np.sqrt(np.mean((found / truth - 1) ** 2)))


@pytest.fixture(scope="module")
def stack():
    """Tiles (20, 2, 128, 128) of two depths, whose light differs a thousandfold."""
    made = [tiles(seed)[0] for seed in SEEDS]
    return np.stack([made[0], made[1] * 1000], axis=1), np.stack([tiles(seed)[1] for seed in SEEDS])


def test_the_flat_fields_are_those_of_basicpy_and_near_the_truth(stack):
    images, truth = stack
    found = estimate_illumination(images)
    theirs = np.load(BASICPY)["flat"]
    assert (found.flat.dtype, found.flat.shape, found.baseline.shape) == (np.float32, (2, 128, 128), (20, 2))
    assert not found.dark.any()
    for ours, other, true in zip(found.flat, theirs, truth, strict=True):
        assert error(reduced(ours), other) < 0.01
        assert error(ours, true) < 1.2 * error(other, reduced(true))
        assert error(images[:, 0].mean(0) / images[:, 0].mean(), true) > 0.05, "a mean would do as well"
    # All depths in one batch are each of them alone.
    alone = estimate_illumination(images[:, 1])
    assert np.allclose(alone.flat, found.flat[1], rtol=0.01)
    assert np.allclose(found.baseline[:, 1], images[:, 1].mean(axis=(1, 2)), rtol=0.25)


def test_a_dark_field_and_tiles_that_were_not_recorded():
    images, truth = tiles(3, count=60)
    images += np.float32(30)
    images[7], images[11, :40, :50] = 0, np.nan
    plain, found = (estimate_illumination(images, ShadingOptions(dark=dark)) for dark in (False, True))
    assert error(plain.flat, truth) > 0.08
    assert error(found.flat, truth) < 0.025
    assert 24 < found.dark.mean() < 36
    assert np.isfinite(found.flat).all()


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
    pixels, valid = reduce_tile(voxels[:2])
    assert (pixels.shape, valid) == ((2, WORKING_SIZE, width), None)
    assert np.allclose(pixels.mean(axis=(1, 2)), voxels[:2].mean(axis=(1, 2)), rtol=1e-5)


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


@pytest.mark.parametrize(
    "wrong", [{"iterations": 0}, {"reweights": 0}, {"epsilon": 0.0}, {"smoothness": np.nan}, {"smoothness": -1.0}]
)
def test_options_that_would_correct_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ShadingOptions(**wrong)


@pytest.mark.gpu
def test_on_a_device(cupy, stack):
    images, _ = stack
    options = ShadingOptions(dark=True, reweights=3)
    images = np.where(np.arange(128) < 3, np.float32(np.nan), images)
    host, device = (estimate_illumination(xp.asarray(images), options) for xp in (np, cupy))
    assert all(isinstance(field, cupy.ndarray) for field in (device.flat, device.dark, device.baseline))
    light = host.baseline.mean(axis=0)
    assert np.allclose(device.flat.get(), host.flat, atol=2e-3)
    assert np.allclose(device.baseline.get(), host.baseline, rtol=5e-3)
    assert np.allclose(device.dark.get() / light[:, None, None], host.dark / light[:, None, None], atol=5e-3)
