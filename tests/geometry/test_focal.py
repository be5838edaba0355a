"""If this fails, focal curvature of surfaces and mosaics is not the one that they were made with."""

import numpy as np
import pytest

from linumpy.geometry import focal
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature, detect_focal_curvature
from linumpy.geometry.interface import find_tissue_interface
from linumpy.testing.synthetic import MosaicSpec, block, surface_depth


def true_depth(spec):
    """Curvature of a synthetic mosaic, relative to the middle of a tile."""
    v, u = np.meshgrid(*(np.linspace(-1, 1, n) for n in spec.tile_shape[1:]), indexing="ij")
    return spec.focal_um / spec.spacing_um[0] * (v**2 + u**2) / 2


def rms(found, truth):
    return np.sqrt(np.mean((found - truth) ** 2))


def test_exact_where_the_surface_is():
    """The curvature of the tissue itself (a bowl, a tilt) does not count as the objective's."""
    spec = MosaicSpec(tiles=(2, 3), tile_shape=(9, 40, 31), focal_um=20, curvature_um=80, tilt=(0.05, -0.1))
    found = detect_focal_curvature(surface_depth(spec), (40, 31))
    assert rms(found.depth(), true_depth(spec)) < 1e-6
    assert found.rms < 1e-6
    assert found.tiles == 6


def test_cross_terms():
    v, u = np.meshgrid(np.linspace(-1, 1, 20), np.linspace(-1, 1, 30), indexing="ij")
    tile = 1.5 * v**2 - 0.7 * v * u + 0.2 * u**2
    y, x = np.mgrid[0:60, 0:90] / 50
    saddle = 3 * y * x - x**2
    found = detect_focal_curvature(50 + np.tile(tile, (3, 3)) + saddle, (20, 30))
    assert (found.vv, found.vu, found.uu) == pytest.approx((1.5, -0.7, 0.2), abs=1e-6)


@pytest.mark.parametrize(("looks", "focal_um"), [(4, 20.0), (1, 30.0), (4, -20.0)])
def test_a_mosaic(looks, focal_um):
    spec = MosaicSpec(tiles=(3, 3), tile_shape=(112, 72, 64), looks=looks, focal_um=focal_um)
    surface = find_tissue_interface(block(spec, (0, 0, 0), spec.shape), s_xy=9, depth_axis=0)
    found = detect_focal_curvature(surface, spec.tile_shape[1:])
    assert rms(found.depth(), true_depth(spec)) < 0.5
    assert np.ptp(true_depth(spec)) > 3  # else nothing would have been shown


@pytest.mark.parametrize("tiles", [2, 4])
def test_rough_tissue_without_curvature_is_left_almost_alone(tiles):
    """Bumps of the tissue differ from tile to tile: what they have in common by chance is not corrected in full."""
    rng = np.random.default_rng(tiles)
    v, u = np.meshgrid(np.linspace(-1, 1, 24), np.linspace(-1, 1, 24), indexing="ij")
    basis = np.stack([v**2, v * u, u**2])
    errors, chances = [], []
    for _ in range(20):
        bumps = rng.normal(0, 2, (tiles, tiles, 3))
        surface = 30 + np.tensordot(bumps, basis, 1).transpose(0, 2, 1, 3).reshape(tiles * 24, -1)
        errors.append(rms(detect_focal_curvature(surface, (24, 24)).depth(), 0))
        chances.append(rms(np.tensordot(bumps.mean(axis=(0, 1)), basis, 1), 0))
    assert np.sqrt(np.mean(np.square(errors))) < 0.8 * np.sqrt(np.mean(np.square(chances)))
    with_curvature = detect_focal_curvature(surface + np.tile(6 * u**2, (tiles, tiles)), (24, 24)).depth()
    assert rms(with_curvature, 6 * u**2) < 0.5 * rms(6 * u**2, 0)  # a clear curvature is corrected, noisy as it is


def test_outliers_and_what_is_not_known():
    spec = MosaicSpec(tiles=(3, 3), tile_shape=(9, 40, 40), focal_um=20)
    surface = surface_depth(spec)
    rng = np.random.default_rng(0)
    outliers = rng.random(surface.shape) < 0.1
    surface[outliers] += rng.uniform(20, 200, outliers.sum())
    surface[rng.random(surface.shape) < 0.1] = -1
    surface[rng.random(surface.shape) < 0.1] = np.nan
    surface[:40, :40] = -1
    found = detect_focal_curvature(np.pad(surface, ((0, 17), (0, 3)), constant_values=500), (40, 40))
    assert rms(found.depth(), true_depth(spec)) < 0.1
    assert found.tiles == 8


def test_fewer_voxels_of_a_large_map(monkeypatch):
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(9, 64, 64), focal_um=20)
    monkeypatch.setattr(focal, "_SAMPLES", 1000)
    assert rms(detect_focal_curvature(surface_depth(spec), (64, 64)).depth(), true_depth(spec)) < 1e-6


@pytest.mark.parametrize("interpolate", [False, True])
def test_a_corrected_mosaic_is_flat(interpolate):
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(112, 48, 48), focal_um=40, looks=16, curvature_um=0, tilt=(0, 0))
    vol = block(spec, (0, 0, 0), spec.shape)
    curvature = detect_focal_curvature(surface_depth(spec), (48, 48))
    flat = correct_focal_curvature(vol, curvature, interpolate=interpolate)
    before, after = (find_tissue_interface(one, s_xy=3, depth_axis=0) for one in (vol, flat))
    assert np.ptp(np.percentile(before, [5, 95])) > 4
    assert np.ptp(np.percentile(after, [5, 95])) <= 1
    middle = (slice(None), 24, 24)
    assert np.abs(find_tissue_interface(flat, 3, depth_axis=0)[middle[1:]] - before[middle[1:]]) <= 1


def test_each_a_line_by_its_place_in_its_tile():
    curvature = FocalCurvature(tile_shape=(5, 7), vv=2.0, vu=0.0, uu=1.0, rms=0.0, tiles=1)
    vol = np.random.default_rng(0).integers(1, 99, (12, 17, 16)).astype("u2")
    whole = correct_focal_curvature(vol, curvature)
    wrapped = correct_focal_curvature(vol, curvature, wrap=True)
    shifts = np.floor(curvature.depth() + 0.5).astype(int)
    for y, x in np.ndindex(17, 16):
        shift = shifts[y % 5, x % 7]
        expected = np.roll(vol[:, y, x], -shift)
        assert np.array_equal(wrapped[:, y, x], expected)
        expected[12 - shift :] = vol[-1, y, x]  # the last measured voxel again: no edge
        assert np.array_equal(whole[:, y, x], expected)
    part = correct_focal_curvature(vol[:, 4:11, 9:], curvature, origin=(4, 9))
    assert np.array_equal(part, whole[:, 4:11, 9:])
    assert (correct_focal_curvature(vol, curvature, fill_value=7)[-1, 0] == 7).all()


@pytest.mark.parametrize(
    ("surface", "tile_shape", "message"),
    [
        (np.ones(9), (3, 3), r"shape \(9,\)"),
        (np.ones((9, 9), complex), (3, 3), "complex128"),
        (np.ones((9, 9)), (2, 9), r"tile_shape=\(2, 9\)"),
        (np.ones((9, 9)), (9, 10), "no complete tile"),
        (np.full((9, 9), -1), (9, 9), "25% of every tile"),
    ],
)
def test_bad_input(surface, tile_shape, message):
    with pytest.raises(ValueError, match=message):
        detect_focal_curvature(surface, tile_shape)


@pytest.mark.gpu
@pytest.mark.parametrize("interpolate", [False, True])
def test_same_on_the_gpu(cupy, interpolate):
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(112, 48, 48), focal_um=30)
    vol = block(spec, (0, 0, 0), spec.shape)
    surface = find_tissue_interface(vol, s_xy=9, depth_axis=0)
    expected, found = (detect_focal_curvature(one, (48, 48)) for one in (surface, cupy.asarray(surface)))
    assert (found.vv, found.vu, found.uu) == pytest.approx((expected.vv, expected.vu, expected.uu), abs=1e-6)
    on_device = cupy.asarray(vol)
    flat = correct_focal_curvature(vol, expected, interpolate=interpolate)
    for one, device in [(on_device, None), (on_device, "cpu"), (vol, "cuda")]:
        got = correct_focal_curvature(one, expected, interpolate=interpolate, device=device)
        assert isinstance(got, type(one))
        assert np.allclose(cupy.asnumpy(got), flat, rtol=1e-5)
