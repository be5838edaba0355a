"""If this fails, attenuation coefficients are wrong, or intensities are compensated by too much or too little."""

import math
from dataclasses import astuple

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter1d

from linumpy.correction.attenuation import (
    Beam,
    DeepLight,
    attenuation,
    compensate,
    estimate_background,
    estimate_deep_light,
    estimate_end,
    tissue_of,
)
from linumpy.correction.beam import Profile, _cross_validated, block_profile, estimate_beam, from_surface, tissue_lines
from linumpy.device import to_host
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.options import AttenuationMethod
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


def profiles_of(slices, beam, *, tissue_seed=0, step=10.0, interval=20.0, noise=0.02, planes=60):
    """Four blocks of each slice, whose tissue has any brightness and attenuation along the depth of the brain."""
    rng = np.random.default_rng(tissue_seed)
    found = []
    for block in range(4):
        deep = int(planes + slices * interval + 1)
        bright = gaussian_filter1d(rng.normal(0, 1.5, deep), 8)
        through = -2e-3 * step * np.cumsum(rng.uniform(1.5, 2.5) * np.exp(0.5 * bright))
        for number in range(slices):
            surface = 4 + int(rng.integers(0, 6))
            z = np.arange(planes)
            brain_depth = np.clip(z - surface + number * interval, 0, None)
            logs = np.interp(brain_depth, np.arange(deep), bright + through) - np.interp(
                number * interval, np.arange(deep), through
            )
            logs += np.log(beam.factor(planes, step)) + rng.normal(0, noise, planes)
            found.append(
                Profile(number=number, block=block, logs=logs, first=surface + 2, stop=planes, surface=surface)
            )
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_beam_of_a_brain_is_told_from_any_tissue(seed):
    """Neighbours show the same tissue at two depths, so that neither its layers nor its attenuation matter."""
    rng = np.random.default_rng([9, seed])
    beam = Beam(rng.uniform(100, 400), rng.uniform(120, 300), rng.uniform(0, 0.6))
    found = estimate_beam(
        profiles_of(4, beam, tissue_seed=seed), 10.0, interval_um=200.0, falloff_per_mm=beam.falloff_per_mm
    )
    assert found.reason == ""
    assert found.pairs == 12
    assert abs(found.beam.focus_um - beam.focus_um) < 40
    assert abs(found.beam.rayleigh_um / beam.rayleigh_um - 1) < 0.25


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("interval_um", [200.0, None])
def test_no_beam_is_found_where_there_is_none(seed, interval_um):
    """Layers of the tissue bend its profiles, too, but in each slice at another depth."""
    found = estimate_beam(profiles_of(4, Beam(), tissue_seed=seed), 10.0, interval_um=interval_um)
    assert found.beam is None
    assert "attenuation" in found.reason


def test_light_begins_at_the_first_bright_plane():
    found = from_surface(np.array([np.nan, 1, np.inf, 10, 8, -2, np.nan, 4]), 0.5)
    assert found.tolist() == [False, False, False, True, True, False, False, True]
    assert not from_surface(np.array([np.nan, -1.0])).any()


def test_each_group_is_judged_by_the_beam_of_the_others():
    """The first column is no beam. The others' best beam is 2 for the first group, and none for the two others."""
    groups = np.array([[4.0, 1, 9], [4, 9, 1], [4, 9, 2]])
    assert _cross_validated(groups) == pytest.approx((-5 / 12, -1.0))


def test_a_beam_that_looks_like_an_attenuation_is_not_told():
    """Its logarithm is a straight line over the tissue: what is left of it is attenuation to everyone."""
    assert estimate_beam(profiles_of(4, Beam(-4000.0, 2000.0)), 10.0, interval_um=200.0).beam is None
    assert estimate_beam(profiles_of(1, Beam())[:1], 10.0).beam is None
    assert "eight planes" in estimate_beam([], 10.0).reason


def test_blocks_of_tissue_and_agarose():
    """Profiles are those of tissue alone, from below its deepest surface to where the background is as bright."""
    faults = brain.Faults(attenuation_per_mm=4.0, water_um=100.0, tilt=(0.0, 0.1), looks=8, dark=0.02)
    spec = brain.BrainSpec(slices=1, tiles=(1, 1), tile_shape=(60, 64, 64), radius=math.inf, faults=faults)
    volume = brain.tile(spec, 0, 0, 0)
    volume[:, :, :20] = 0.05 * spec.peak
    volume[3, ::5] = np.nan
    lines = volume.reshape(60, -1)
    chosen = tissue_lines(lines).reshape(64, 64)
    assert chosen[:, 20:].mean() > 0.95
    assert chosen[:, :20].mean() < 0.05
    surface = brain.truth_surface(spec, 0, 0, 0)[chosen]
    profile = block_profile(lines[:, chosen.ravel()], 7, 2, 80.0)
    assert (profile.number, profile.block) == (7, 2)
    assert abs(profile.surface - np.median(surface)) < 2
    assert profile.first >= np.percentile(surface, 85)
    light = np.exp(profile.logs)
    assert light[profile.stop - 1] > 30
    assert profile.stop < 60
    assert block_profile(lines[:8, :3], 0, 0, 0.0) is None
    assert not tissue_lines(np.zeros((9, 4))).any()
    assert tissue_lines(np.zeros((9, 0))).shape == (0,)


def test_what_tells_no_attenuation():
    """Too few planes, no light, or tissue that gets brighter with depth."""
    line = np.exp(-0.04 * np.arange(60, dtype="f4"))[:, None] * np.full((1, 50), 1000, "f4")
    assert tissue_of(line, 0.0).can_be_told
    assert tissue_of(line + np.float32(100), 100.0).can_be_told
    for dark, background in (
        (line[::-1], 0.0),
        (line[:1] + 0 * line, 0.0),
        (np.zeros((60, 9)), 0.0),
        (line[:7], 0.0),
        (line, 800.0),
    ):
        assert not tissue_of(dark, background).can_be_told


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
    assert estimate_deep_light(np.zeros((9, 4)), 10.0, end_per_mm=2.0) == DeepLight(level=0.0)


def test_the_attenuation_below_the_range_makes_all_depths_alike():
    rng = np.random.default_rng(2)
    optical = 0.02 * rng.gamma(4.0, 0.5, (60, 4000))  # 2 µ Δ, of a mean of 2 /mm at 10 µm
    reaching = np.exp(-(np.cumsum(optical, axis=0) - optical))
    light = reaching * -np.expm1(-optical) * BEAM.factor(60, 10.0)[:, None]
    volume = np.concatenate([np.full((9, 4000), 1e-4), light]).astype("f4")
    beam = Beam(BEAM.focus_um + 90, BEAM.rayleigh_um, 0.0)
    found = estimate_end([tissue_of(volume[:, :2000] * np.float32(1e4), 0.0)], 10.0, beam)
    even = compensate(volume, 10.0, beam, deep=estimate_deep_light(volume, 10.0, beam, end_per_mm=found))
    assert abs(even[55:65].mean() / even[15:25].mean() - 1) < 0.1
    # Of several slices the mean counts, and those that tell nothing do not.
    slices = [tissue_of(volume[:, k::2] * np.float32(k + 1), 0.0) for k in range(2)]
    assert math.isclose(estimate_end([*slices, tissue_of(volume[:5], 0.0)], 10.0, beam), found, rel_tol=0.1)
    assert estimate_end([tissue_of(part, 0.0) for part in (volume[:5], np.zeros((20, 3)))], 10.0) == 0


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
    with pytest.raises(ValueError, match="rayleigh_um"):
        Beam(0.0, 0.0)
    with pytest.raises(ValueError, match="max_gain"):
        compensate(volume, 1.0, max_gain=0.5)


@pytest.mark.parametrize("compute", [attenuation, compensate])
def test_what_has_no_attenuation(compute):
    light = np.ones((4, 2), "f4")
    for volume in (light[:0], light.astype("c8"), light[0, 0]):
        with pytest.raises(ValueError, match="no intensities"):
            compute(volume, 10.0)
    for spacing_um, end_per_mm in ((0.0, 0.0), (math.nan, 0.0), (10.0, -1.0), (10.0, math.inf)):
        with pytest.raises(ValueError, match="pass a spacing above 0"):
            compute(light, spacing_um, end_per_mm=end_per_mm)


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
    lines = volume.reshape(60, -1)
    host, device = (block_profile(one.asarray(lines), 0, 0, 5.0) for one in (np, xp))
    assert np.allclose(host.logs, device.logs, rtol=1e-3)
    assert (host.first, host.stop) == (device.first, device.stop)
    host, device = (tissue_of(one.asarray(lines), 5.0) for one in (np, xp))
    assert (host.first, host.stop) == (device.first, device.stop)
    assert isinstance(device.lines, xp.ndarray)
    assert math.isclose(host.at_surface(host.lines), device.at_surface(device.lines), rel_tol=1e-4)
    host, device = (estimate_end([part], 10.0, BEAM) for part in (host, device))
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
