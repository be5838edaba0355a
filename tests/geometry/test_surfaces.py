"""If this fails, planes, quadratics, Gaussians and spheres are fitted with wrong parameters."""

import numpy as np
import pytest

from linumpy.device import to_host
from linumpy.geometry.surfaces import fit_interface

Y, X = np.mgrid[:60, :80].astype(float)


def noise(scale, seed=0):
    return np.random.default_rng(seed).normal(0, scale, Y.shape)


def gaussian(height):
    return 30 + height * np.exp(-(((Y - 25) / 14) ** 2) / 2 - ((X - 50) / 18) ** 2 / 2)


def sphere(side, spacing=(5.0, 10.0, 10.0), radius=900.0):
    root = np.sqrt(radius**2 - ((Y - 20) * spacing[1]) ** 2 - ((X - 45) * spacing[2]) ** 2)
    return 200 + side * root / spacing[0] if side < 0 else root / spacing[0] - 20


def test_plane_and_quadratic_are_exact():
    plane = 20 + 0.1 * Y - 0.05 * X
    found = fit_interface(plane, "plane")
    assert found.parameters == pytest.approx({"offset": 20, "y": 0.1, "x": -0.05})
    assert np.allclose(found.surface, plane)
    quadratic = plane + 0.01 * Y**2 - 0.004 * Y * X + 0.003 * X**2
    found = fit_interface(quadratic)
    assert found.parameters == pytest.approx(
        {"offset": 20, "y": 0.1, "x": -0.05, "yy": 0.01, "yx": -0.004, "xx": 0.003}
    )
    assert np.allclose(found.surface, quadratic)
    assert found.rms < 1e-9
    assert fit_interface(quadratic, "plane").rms > 1


@pytest.mark.parametrize("height", [-9, 12])
def test_a_gaussian(height):
    found = fit_interface(gaussian(height) + noise(0.3), "gaussian")
    p = found.parameters
    assert (p["offset"], p["height"]) == pytest.approx((30, height), abs=0.15)
    assert (p["centre_y"], p["centre_x"], p["sigma_y"], p["sigma_x"]) == pytest.approx((25, 50, 14, 18), abs=0.4)
    assert np.abs(found.surface - gaussian(height)).max() < 0.3
    assert found.rms == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("side", [-1, 1])
def test_a_sphere(side):
    spacing = (5.0, 10.0, 10.0)
    found = fit_interface(sphere(side) + noise(0.2), "spherical", spacing=spacing)
    p = found.parameters
    assert p["radius"] == pytest.approx(900, rel=0.01)
    assert (p["centre_y"], p["centre_x"]) == pytest.approx((20, 45), abs=0.2)
    assert p["centre_z"] == pytest.approx(200 if side < 0 else -20, abs=2)
    assert np.abs(found.surface - sphere(side)).max() < 0.2


def test_a_small_sphere_has_no_surface_beside_itself():
    inside = (Y - 30) ** 2 + (X - 40) ** 2 < 15**2
    surface = np.where(inside, 50 - np.sqrt(np.maximum(20**2 - (Y - 30) ** 2 - (X - 40) ** 2, 0)), np.nan)
    found = fit_interface(surface, "spherical")
    assert found.parameters["radius"] == pytest.approx(20, rel=1e-3)
    assert np.isnan(found.surface[0, 0])
    assert np.isfinite(found.surface[inside]).all()


@pytest.mark.parametrize("model", ["plane", "quadratic", "gaussian", "spherical"])
def test_what_is_unknown_or_outside_the_mask_takes_no_part(model):
    surface = {"gaussian": gaussian(-9), "spherical": sphere(-1)}.get(model, 20 + 0.1 * Y)
    rng = np.random.default_rng(0)
    dirty, mask = surface.copy(), rng.random(Y.shape) < 0.8
    dirty[~mask] = 1e4
    dirty[rng.random(Y.shape) < 0.1] = -1
    dirty[rng.random(Y.shape) < 0.1] = np.nan
    options = {"spacing": (5.0, 10.0, 10.0)}
    assert np.allclose(fit_interface(dirty, model, mask=mask, **options).surface, surface, atol=1e-3)
    assert not np.allclose(fit_interface(dirty, model, **options).surface, surface, atol=1e-3)


def test_integers():
    found = fit_interface(np.rint(20 + 0.1 * Y).astype(np.int32), "plane")
    assert found.parameters["y"] == pytest.approx(0.1, abs=5e-3)


@pytest.mark.parametrize(
    ("surface", "model", "options", "message"),
    [
        (np.ones((4, 4)), "cubic", {}, "cubic"),
        (np.ones(4), "plane", {}, r"shape \(4,\)"),
        (np.full((4, 4), -1), "plane", {}, "0 voxels"),
        (np.ones((1, 9)), "quadratic", {}, "9 voxels"),
        (np.full((5, 5), np.nan), "gaussian", {}, "0 voxels"),
        (np.ones((4, 4)), "plane", {"mask": np.ones((3, 4), bool)}, r"mask of \(3, 4\)"),
        (np.ones((4, 4)), "spherical", {"spacing": (1, 0, 1)}, "spacing"),
    ],
)
def test_bad_input(surface, model, options, message):
    with pytest.raises(ValueError, match=message):
        fit_interface(surface, model, **options)


def surface_of(model):
    return {"gaussian": gaussian(-9), "spherical": sphere(-1)}.get(model, 20 + 0.1 * Y) + noise(0.2)


def check_as_on_the_host(surface, model, given, **options):
    spacing = (5.0, 10.0, 10.0)
    expected = fit_interface(surface, model, spacing=spacing)
    got = fit_interface(given, model, spacing=spacing, **options)
    assert isinstance(got.surface, type(given))
    assert got.parameters == pytest.approx(expected.parameters, rel=1e-4, abs=1e-4)
    assert np.allclose(to_host(got.surface), expected.surface, atol=1e-3)


@pytest.mark.parametrize("model", ["plane", "quadratic", "gaussian", "spherical"])
def test_the_same_where_the_array_is(xp, model):
    surface = surface_of(model)
    check_as_on_the_host(surface, model, xp.asarray(surface))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["plane", "quadratic", "gaussian", "spherical"])
def test_the_same_where_it_is_asked_for(cupy, model):
    surface = surface_of(model)
    check_as_on_the_host(surface, model, surface, device="cuda")
    check_as_on_the_host(surface, model, cupy.asarray(surface), device="cpu")
