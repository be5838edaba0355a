"""If this fails, attenuation coefficients are wrong, or intensities are compensated by too much or too little."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from linumpy.correction.attenuation import (
    Beam,
    DeepLight,
    attenuation,
    compensate,
    depth_profiles,
    estimate_background,
    estimate_beam,
    estimate_deep_light,
    estimate_end,
)
from linumpy.device import to_host
from linumpy.mosaic.attenuation import AttenuationMethod, compensate_attenuation
from linumpy.testing import brain
from linumpy.write.writer import write_omezarr

FAULTS = brain.Faults(attenuation_per_mm=4.0, focus_um=150.0, rayleigh_um=250.0, falloff_per_mm=0.5)
SPEC = brain.BrainSpec(slices=1, tiles=(1, 1), tile_shape=(60, 24, 24), faults=FAULTS)
BEAM = Beam(150.0, 250.0, 0.5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.floats(0.5, 20.0))
def test_the_model_is_inverted_exactly(seed, planes, step):
    """Layers of any attenuation, with light from below: µ, and the reflectivity, are those that made the intensity."""
    rng = np.random.default_rng(seed)
    mu = rng.uniform(0.1, 10.0, (planes, 3))
    mu[-4:] = mu[-1]  # the end: I_end is a mean of planes of one attenuation
    optical = 2e-3 * step * mu
    reaching = np.exp(-(np.cumsum(optical, axis=0) - optical))
    light = reaching * -np.expm1(-optical)
    beam = Beam(40.0, 120.0, 1.0)
    volume = 1000 * light * beam.factor(planes, step)[:, None] + 5.0
    for line, true in enumerate(mu.T):
        options = {"end_per_mm": true[-1], "background": 5.0}
        clear = reaching[:, line] > 1e-3  # below, float32 has no digits left beside the background
        assert np.allclose(attenuation(volume[:, line], step, beam, **options)[clear], true[clear], rtol=5e-3)
        even = compensate(volume[:, line], step, beam, **options, max_gain=1e9)
        assert np.allclose(even[clear], 1000 * -np.expm1(-optical[clear, line]), rtol=5e-3)


def test_a_synthetic_brain():
    """Within 2 % of the truth; without the light from below or the beam the error is several times as large."""
    volume, truth = brain.tile(SPEC, 0, 0, 0), brain.truth_attenuation(SPEC, 0, 0, 0)
    upper, tissue = slice(0, 40), truth[:40] > 0.3
    end = float(np.mean(truth[-1]))

    def miss(found):
        return float(np.median(np.abs(found[upper] / truth[upper] - 1)[tissue]))

    right = miss(attenuation(volume, 10.0, BEAM, end_per_mm=end))
    assert right < 0.02
    assert miss(attenuation(volume, 10.0, BEAM)) > 2 * right
    assert miss(attenuation(volume, 10.0, end_per_mm=end)) > 10 * right
    even, reflectivity = compensate(volume, 10.0, BEAM, end_per_mm=end), brain.reference(SPEC, (0, 0, 0), (60, 24, 24))
    for planes in (slice(10, 20), slice(25, 35)):
        before, after = (np.median(part[planes] / reflectivity[planes]) for part in (volume, even))
        assert abs(after - 0.97) < 0.05, f"compensated planes {planes} have {after:.3f} of their reflectivity"
        assert before < 0.9


@pytest.mark.parametrize("falloff", [0.0, 0.7])
def test_the_beam_is_found_in_a_profile(falloff):
    z = np.arange(120) * 5.0
    rng = np.random.default_rng(0)
    tissue = np.exp(-2e-3 * 3.0 * z) * Beam(200.0, 100.0, falloff).factor(120, 5.0)
    profile = 500 * np.where(z < 50, 0.001, tissue) * rng.normal(1, 0.01, 120)
    found = estimate_beam(profile, 5.0, falloff_per_mm=falloff)
    assert abs(found.beam.focus_um - 200) < 5
    assert abs(found.beam.rayleigh_um / 100 - 1) < 0.05
    assert abs(found.attenuation_per_mm - 3) < 0.3
    assert found.rms < 0.02


def test_the_beam_under_a_tilted_surface():
    """The mean of all lines, part of them water, would tell of a beam half as long."""
    faults = brain.Faults(attenuation_per_mm=2.0, focus_um=200.0, rayleigh_um=250.0, water_um=120.0, tilt=(0.0, 0.2))
    spec = brain.BrainSpec(slices=1, tiles=(1, 1), tile_shape=(60, 96, 96), radius=math.inf, faults=faults)
    volume = brain.tile(spec, 0, 0, 0)
    volume[3, ::5] = np.nan
    profiles = depth_profiles(volume)
    surfaces = [int(np.argmax(p >= p.max() / 2)) for p in profiles.T]
    assert surfaces == sorted(surfaces)
    assert surfaces[-1] - surfaces[0] > 10
    found = estimate_beam(profiles, 10.0).beam
    assert abs(found.focus_um - 200) < 40
    assert abs(found.rayleigh_um / 250 - 1) < 0.2
    whole = estimate_beam(np.nanmean(volume, axis=(1, 2)), 10.0).beam
    assert abs(whole.rayleigh_um / 250 - 1) > 0.3
    assert np.isnan(depth_profiles(np.zeros((9, 4)))).all()


def test_a_profile_without_a_beam_or_without_light():
    flat = estimate_beam(np.exp(-0.01 * np.arange(50)), 10.0)
    assert flat.beam.factor(50, 10.0).min() > 0.9
    assert abs(flat.attenuation_per_mm - 0.5) < 0.1
    for profile in (np.zeros(50), np.full(50, np.nan), np.ones(3)):
        assert estimate_beam(profile, 10.0).beam == Beam()


def test_light_from_below_is_told_by_all_lines():
    """A plane far below is like the truth; by the last planes of each line it has their structure and their speckle."""
    faults = brain.Faults(attenuation_per_mm=2.0, looks=8)
    spec = brain.BrainSpec(slices=1, tiles=(1, 1), tile_shape=(48, 64, 64), radius=math.inf, faults=faults)
    volume, truth = brain.tile(spec, 0, 0, 0), brain.reference(spec, (0, 0, 0), (48, 64, 64))
    lit = truth_below(spec)
    end = 2.0 * float(truth[-4:].mean()) / spec.peak
    deep = estimate_deep_light(volume, 10.0, end_per_mm=end)
    assert 0.5 < deep.slope <= 1
    assert 0.8 < np.mean(deep.below(volume.sum(axis=0))) / np.mean(lit) < 1.25
    alike = [
        np.corrcoef(compensate(volume, 10.0, **how)[38:44].mean(axis=0).ravel(), truth[38:44].mean(axis=0).ravel())[
            0, 1
        ]
        for how in ({"end_per_mm": end}, {"deep": deep})
    ]
    assert alike[1] > alike[0] + 0.02, alike
    # Lines that are alike tell nothing of each other; water and what is not whole is left out.
    line = np.exp(-0.04 * np.arange(48, dtype="f4"))[:, None]
    even = estimate_deep_light(np.concatenate([np.repeat(line, 9, axis=1), line * [0.1]], axis=1), 10.0, end_per_mm=2.0)
    assert even.slope == 0
    assert math.isclose(even.level, line[-1, 0] / math.expm1(0.04), rel_tol=1e-3)
    assert estimate_deep_light(np.zeros((9, 4)), 10.0, end_per_mm=2.0) == DeepLight(0.0)


def test_the_attenuation_below_the_range_makes_all_depths_alike():
    rng = np.random.default_rng(2)
    optical = 0.02 * rng.gamma(4.0, 0.5, (60, 4000))  # 2 µ Δ, of a mean of 2 /mm at 10 µm
    reaching = np.exp(-(np.cumsum(optical, axis=0) - optical))
    light = reaching * -np.expm1(-optical) * BEAM.factor(60, 10.0)[:, None]
    volume = np.concatenate([np.full((9, 4000), 1e-4), light]).astype("f4")
    beam = Beam(BEAM.focus_um + 90, BEAM.rayleigh_um, 0.0)
    found = estimate_end(volume[:, :2000] * np.float32(1e4), 10.0, beam)
    even = compensate(volume, 10.0, beam, deep=estimate_deep_light(volume, 10.0, beam, end_per_mm=found))
    assert abs(even[55:65].mean() / even[15:25].mean() - 1) < 0.1
    assert estimate_end(volume[:5], 10.0) == estimate_end(np.zeros((20, 3)), 10.0) == 0


def truth_below(spec):
    """Return the light that reaches the end of the range of each line, of that at which it is backscattered."""
    scale = 2e-3 * spec.faults.attenuation_per_mm * spec.spacing_um[0] / spec.peak
    reached = np.exp(-scale * brain.reference(spec, (0, 0, 0), spec.tile_shape).sum(axis=0))
    return reached / scale


@pytest.mark.parametrize("dark", [0.0, 40.0, 120.0])
def test_the_background_is_told_by_speckle(dark):
    faults = brain.Faults(attenuation_per_mm=4.0, looks=8)
    spec = brain.BrainSpec(slices=1, tiles=(1, 1), tile_shape=(60, 64, 64), radius=math.inf, faults=faults)
    volume = brain.tile(spec, 0, 0, 0) + np.float32(dark)
    assert abs(estimate_background(volume) - dark) < 15
    volume[:, 5:9, 7], volume[:, 30] = np.nan, 0
    assert abs(estimate_background(volume) - dark) < 15
    for nothing in (volume[:4], np.zeros((40, 8)), np.full((40, 8), 7, "u2"), volume[..., :1]):
        assert estimate_background(nothing) == 0


def test_dark_and_unknown_voxels():
    volume = np.array([[4.0, 0.0, np.nan], [2.0, 0.0, 1.0], [np.inf, 0.0, -3.0], [1.0, 0.0, 0.5]], "f4")
    found, even = attenuation(volume, 10.0), compensate(volume, 10.0, max_gain=3.0)
    assert np.array_equal(np.isnan(found), [[0, 0, 1], [0, 0, 0], [1, 0, 0], [1, 0, 1]])  # no light below the last one
    assert np.array_equal(np.isnan(even), ~np.isfinite(volume))
    assert not found[:, 1].any()
    assert not even[:, 1].any()
    assert math.isclose(found[0, 0], math.log1p(4 / 3) / 0.02, rel_tol=1e-5)
    assert np.array_equal(even[[0, 1, 3], 0], np.array([4.0, 2 * 7 / 3, 1 * 3.0], "f4"))  # the last by the largest gain
    assert np.isfinite(attenuation(volume, 10.0, end_per_mm=1.0)[3]).all()
    for bad in ({"spacing_um": 0.0}, {"spacing_um": 1.0, "end_per_mm": -1.0}):
        with pytest.raises(ValueError, match="above 0"):
            attenuation(volume, **bad)
    with pytest.raises(ValueError, match="along depth"):
        attenuation(volume[:0], 1.0)
    with pytest.raises(ValueError, match="Rayleigh"):
        Beam(0.0, 0.0)
    with pytest.raises(ValueError, match="max_gain"):
        compensate(volume, 1.0, max_gain=0.5)


@pytest.mark.parametrize("dtype", ["u1", ">u2", "f4", "f8"])
def test_results_are_float32(dtype):
    """Of twice the bytes a column of a large mosaic would not fit into memory."""
    volume = np.full((6, 2, 2), 9, dtype)
    assert {attenuation(volume, 5.0).dtype, compensate(volume, 5.0).dtype} == {np.dtype("f4")}


def test_the_same_where_the_array_is(xp):
    volume = brain.tile(SPEC, 0, 0, 0)
    volume[5, 3, 3] = np.nan
    for function in (attenuation, compensate):
        host, device = (function(one.asarray(volume), 10.0, BEAM, end_per_mm=3.0) for one in (np, xp))
        assert isinstance(device, xp.ndarray)
        assert np.allclose(to_host(device), host, rtol=1e-4, atol=1e-4, equal_nan=True)
    host, device = (depth_profiles(one.asarray(volume)) for one in (np, xp))
    assert np.allclose(host, device, rtol=1e-3)
    host, device = (estimate_end(one.asarray(volume), 10.0, BEAM) for one in (np, xp))
    assert math.isclose(host, device, rel_tol=0.01)
    host, device = (estimate_deep_light(one.asarray(volume), 10.0, BEAM, end_per_mm=3.0) for one in (np, xp))
    assert np.allclose(astuple(host), astuple(device), rtol=1e-4)
    assert math.isclose(estimate_background(volume), estimate_background(xp.asarray(volume)), rel_tol=1e-3, abs_tol=1)
    by_all = (to_host(compensate(one.asarray(volume), 10.0, BEAM, deep=host)) for one in (np, xp))
    assert np.allclose(next(by_all), next(by_all), rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", ["u2", "f4"])
def test_voxels_as_dark_as_the_background_stay_measured(tmp_path, dtype):
    """Those that are 0 were not measured, and only those are 0 afterwards: stacking leaves them out."""
    voxels = np.random.default_rng(0).integers(101, 1000, (20, 16, 16)).astype(dtype)
    voxels[8:, :8], voxels[:, 12, 12] = 100, 0
    write_omezarr(tmp_path / "a", voxels, (5, 10, 10))
    method = AttenuationMethod(focus_um=100, rayleigh_um=300, end_per_mm=0, background=100)
    compensate_attenuation(tmp_path / "a", tmp_path / "b", method)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "b", mode="r")["0"][...] > 0, voxels > 0)
