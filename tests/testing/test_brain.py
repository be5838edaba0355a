"""If this fails, a synthetic brain is not the volume and the faults that its spec and its truths say."""

import csv
import dataclasses
import time

import numpy as np
import pytest
from scipy.ndimage import affine_transform, map_coordinates

from linumpy.errors import RegionError
from linumpy.io.ome import open_image
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.slice_table import find_slices, read_shifts
from linumpy.testing import brain
from linumpy.testing.brain import USUAL_FAULTS, BrainSpec, Faults, reference, tile
from linumpy.testing.brain_files import write_brain
from linumpy.testing.brain_spec import ANATOMIES
from tests.support.budget import first, matrix

SPEC = BrainSpec(slices=3, tiles=(2, 3), tile_shape=(24, 40, 32), interval_um=150.0, seed=5)


def faulty(**faults):
    return dataclasses.replace(SPEC, faults=Faults(**faults))


def box(spec, number, row, column):
    first = (round(number * spec.interval_planes), row * spec.step[0], column * spec.step[1])
    return first, tuple(a + n for a, n in zip(first, spec.tile_shape, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), matrix(["waves", "lattice", "layers", "template"], ["float32", "uint16"]))
def test_without_faults_tiles_are_boxes_of_the_volume(dtype, kind):
    volume = kind == "template"
    spec = dataclasses.replace(SPEC, slices=2, dtype=dtype, coverage=0.7, agarose=0.1)
    if not volume:
        spec = dataclasses.replace(spec, anatomy=kind)
    else:
        array = np.random.default_rng(0).integers(0, 60000, spec.shape).astype("uint16")
        spec = dataclasses.replace(spec, volume=array)
    whole = reference(spec, (0, 0, 0), spec.shape)
    assert whole.dtype == dtype
    assert whole.std() > 0.1 * whole.mean()
    if volume:
        assert np.array_equal(whole, array)
    for number, row, column in np.ndindex(spec.slices, *spec.tiles):
        start, stop = box(spec, number, row, column)
        assert np.array_equal(reference(spec, start, stop), tile(spec, number, row, column))
        assert np.array_equal(whole[tuple(map(slice, start, stop))], tile(spec, number, row, column))


def test_tissues_of_two_classes_and_water_around():
    spec = dataclasses.replace(SPEC, radius=0.6, tiles=(6, 6))
    whole = reference(spec, (0, 0, 0), (8, *spec.shape[1:])) / spec.peak
    assert whole[:, 0].max() < 0.02
    # What remains without the structure is 1 in grey matter, 1.8 in white.
    plain = reference(dataclasses.replace(spec, white=1.0), (0, 0, 0), (8, *spec.shape[1:])) / spec.peak
    ratio = (whole / plain)[plain > 0.2]
    assert (ratio < 1.1).mean() > 0.1
    assert (ratio > 1.7).mean() > 0.1


@pytest.mark.parametrize(("seed", "share"), first([(1, 0.45), (4, 1.0), (0, 0.3), (2, 0.6), (3, 0.75)], 2))
def test_tissue_covers_its_share_of_a_slice_within_agarose(seed, share):
    spec = dataclasses.replace(SPEC, seed=seed, coverage=share, agarose=0.1, tiles=(6, 5), anatomy="lattice")
    # A radius makes all of it tissue, or agarose.
    whole, tissue, agarose = (
        reference(dataclasses.replace(spec, **of), (0, 0, 0), (10, *spec.shape[1:])).astype(float)
        for of in ({}, {"coverage": None, "radius": 9.0}, {"coverage": None, "radius": -9.0})
    )
    assert agarose.mean() == pytest.approx(0.1 * spec.peak, rel=0.1)
    assert agarose.std() < 0.2 * agarose.mean()
    inside = (whole - agarose) / (tissue - agarose) > 0.5
    assert inside[0].mean() == pytest.approx(share, abs=0.02)
    for row, column in ((0, 0), (2, 2), (5, 4)):
        (_, y, x), (_, below, right) = box(spec, 0, row, column)
        assert (brain.truth_tissue(spec, 0, row, column)[:10] == inside[:, y:below, x:right]).mean() > 0.999


def test_positions_and_transforms_say_where_a_tile_is_in_the_volume():
    spec = faulty(jitter=2.0, stage_degrees=1.0, rotation_degrees=3.0, translation=4.0, overlap_error=-0.1)
    assert (spec.step, spec.true_step) == ((30, 24), (34, 27))
    pad = 16
    whole = reference(spec, (0, -pad, -pad), (spec.shape[0], *(n + pad for n in spec.shape[1:])))
    for number, row, column in ((0, 1, 1), (2, 0, 2)):
        matrix = brain.truth_transform(spec, number)
        first = brain.truth_positions(spec, number)[row, column]
        offset = matrix[:2, :2] @ first + matrix[:2, 2] + pad
        made = tile(spec, number, row, column)
        for plane in (0, 11, 23):
            section = whole[round(number * spec.interval_planes) + plane]
            expected = affine_transform(section, matrix[:2, :2], offset, spec.tile_shape[1:], order=5)
            assert np.abs(made[plane] - expected).max() < 2e-3 * expected.max()
    nominal = np.stack(
        np.meshgrid(*(np.arange(n) * s for n, s in zip(spec.tiles, spec.true_step, strict=True)), indexing="ij"), -1
    )
    errors = brain.truth_positions(spec, 1) - nominal
    assert 0.1 < np.abs(errors).max() < 2.0 + 0.02 * nominal.max()
    assert np.array_equal(brain.truth_transform(spec, 0), np.eye(3))


def test_a_slice_is_deformed_smoothly_and_within_bounds():
    spec, pad = faulty(warp=1.5, rotation_degrees=2.0), 16
    whole = reference(spec, (0, -pad, -pad), (spec.shape[0], *(n + pad for n in spec.shape[1:])))
    y, x = np.mgrid[: spec.slice_shape[1], : spec.slice_shape[2]].astype(float)
    for number in range(3):
        field = brain.truth_deformation(spec, number, y, x)
        assert (np.abs(field).max() > 0.3) == (number > 0)
        assert np.abs(field).max() <= 1.5
        assert np.abs(np.gradient(field, axis=(1, 2))).max() < 0.2
    (first_y, first_x), points = brain.truth_positions(spec, 2)[1, 1], brain.truth_points(spec, 2, y, x)
    points = points[:, round(first_y) :, round(first_x) :][:, : spec.tile_shape[1], : spec.tile_shape[2]]
    rigid = np.einsum("ij,jyx->iyx", brain.truth_transform(spec, 2), np.stack([y, x, np.ones_like(y)]))[:2]
    assert np.allclose(brain.truth_points(spec, 2, y, x) - rigid, field)
    expected = map_coordinates(whole[round(2 * spec.interval_planes) + 5], points + pad, order=5)
    assert np.abs(tile(spec, 2, 1, 1)[5] - expected).max() < 2e-3 * expected.max()


def test_surfaces_are_where_water_ends():
    spec = dataclasses.replace(faulty(water_um=60.0, tilt=(0.05, -0.1), focal_um=25.0), agarose=0.2, radius=9.0)
    made, surface = tile(spec, 1, 1, 2), brain.truth_surface(spec, 1, 1, 2)
    planes = np.arange(spec.tile_shape[0])[:, None, None]
    assert np.ptp(surface) > 3
    assert (made[planes < surface] == spec.water * spec.peak).all()
    assert np.array_equal(brain.truth_tissue(spec, 1, 1, 2), planes >= surface)
    # Tissue begins with the plane at which the slice above was cut off, wherever the surface is.
    top = reference(spec, (0, 0, 0), spec.shape)
    y, x = np.mgrid[: spec.tile_shape[1], : spec.tile_shape[2]].astype(float)
    depth = planes + spec.interval_planes - surface
    places = np.broadcast_arrays(depth, y + spec.step[0], x + 2 * spec.step[1])
    expected = map_coordinates(top, places, order=3)
    below = planes >= surface
    assert np.abs(made - expected)[below].max() < 0.03 * top.max()


def test_light_is_lost_as_the_coefficients_say():
    """Vermeer's formula with the light of all voxels below, of which these have a known share, gives them back."""
    spec = faulty(attenuation_per_mm=3.0, water_um=30.0)
    made, mu = tile(spec, 0, 0, 1).astype(float), brain.truth_attenuation(spec, 0, 0, 1).astype(float)
    step_mm = spec.spacing_um[0] / 1e3
    passed = np.exp(-2 * step_mm * mu.sum(axis=0))
    behind = made[::-1].cumsum(axis=0)[::-1] - made + made.sum(axis=0) * passed / (1 - passed)
    assert np.allclose(np.log1p(made / behind) / (2 * step_mm), mu, rtol=1e-3)
    assert np.allclose(mu, reference_of_tile(spec) * 3.0 / spec.peak)


def reference_of_tile(spec):
    return tile(dataclasses.replace(spec, faults=dataclasses.replace(spec.faults, attenuation_per_mm=0.0)), 0, 0, 1)


def test_illumination_depth_speckle_and_galvo():
    clean = tile(SPEC, 1, 0, 0)
    spec = faulty(vignette=0.5, dark=0.02, focus_um=80.0, rayleigh_um=120.0, falloff_per_mm=2.0)
    flat, dark, axial = brain.truth_flat_field(spec), brain.truth_dark_field(spec), brain.truth_axial(spec)
    assert np.allclose(tile(spec, 1, 0, 0), clean * axial[:, None, None] * flat + dark, rtol=1e-5)
    assert np.allclose(flat.mean(axis=(1, 2)), 1, atol=1e-5)
    assert flat.min() < 0.8
    assert dark.mean() == pytest.approx(0.02 * spec.peak, rel=0.05)
    assert axial[8] == pytest.approx(np.exp(-(0.16**2)))
    ratio = tile(faulty(looks=4), 1, 0, 0) / clean
    assert ratio.std() == pytest.approx(0.5, rel=0.03)
    assert not np.array_equal(ratio, tile(faulty(looks=4), 1, 0, 1) / tile(SPEC, 1, 0, 1)), "each tile has its own"
    spec = dataclasses.replace(faulty(looks=4, agarose_looks=64), coverage=0.4, agarose=0.3)
    clean, tissue = tile(dataclasses.replace(spec, faults=Faults()), 1, 0, 0), brain.truth_tissue(spec, 1, 0, 0)
    ratio = tile(spec, 1, 0, 0) / clean
    assert ratio[clean < 0.32 * spec.peak].std() == pytest.approx(1 / 8, rel=0.15)
    assert ratio[tissue].std() == pytest.approx(0.5, rel=0.05)
    clean = tile(SPEC, 1, 0, 0)
    shifts = [brain.truth_galvo(faulty(galvo=9), number) for number in range(3)]
    assert any(shifts)
    assert np.array_equal(tile(faulty(galvo=9), 1, 0, 0), np.roll(clean, shifts[1], axis=2))


@pytest.mark.parametrize("centre", [(0.5, 0.0), (-0.4, 0.6), (0.0, -0.5)])
def test_illumination_is_brightest_where_it_is_centred_and_moves(centre):
    spec = faulty(vignette=1.0, vignette_centre=centre, vignette_drift=(0.0, 0.2))
    ratio = tile(spec, 0, 0, 0) / tile(SPEC, 0, 0, 0)
    for plane, drift in ((0, 0.0), (-1, 0.2)):
        at = np.unravel_index(ratio[plane].argmax(), spec.tile_shape[1:])
        place = [2 * k / (n - 1) - 1 for k, n in zip(at, spec.tile_shape[1:], strict=True)]
        assert place == pytest.approx([centre[0], centre[1] + drift], abs=0.05)


def test_missing_tiles_and_empty_slices_are_zeros():
    spec = faulty(missing=((1, 0, 2),), empty=(2,))
    recorded = [tile(spec, *place).any() for place in np.ndindex(3, 2, 3)]
    assert recorded == [place != (1, 0, 2) and place[0] != 2 for place in np.ndindex(3, 2, 3)]


@pytest.mark.parametrize("place", [(3, 0, 0), (0, -1, 0), (0, 0, 3)])
def test_a_tile_that_is_not_there(place):
    with pytest.raises(RegionError, match="there is no tile"):
        tile(SPEC, *place)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tiles", (0, 1)), ("overlap", 1.0), ("dtype", "int8"), ("overlap_error", 0.8), ("volume", np.ones(3))],
)
def test_what_no_brain_can_be(name, value):
    with pytest.raises(ValueError, match=name):
        faulty(**{name: value}) if name == "overlap_error" else dataclasses.replace(SPEC, **{name: value})


def test_drawn_brains_are_of_their_kind():
    drawn = {kind: [brain.draw_brain(seed, kind) for seed in range(12)] for kind in ("full", "partial", "severe")}
    assert drawn["partial"][3] == brain.draw_brain(3, "partial")
    for kind, specs in drawn.items():
        assert len({spec.faults for spec in specs}) == len(specs)
        assert {spec.anatomy for spec in specs} == {"waves", "lattice", "layers"}
        for spec in specs:
            assert (spec.coverage is None) == (kind == "full")
            surfaces = [brain.truth_surface(spec, 1, *place) for place in np.ndindex(spec.tiles)]
            assert 0 < np.min(surfaces) < np.max(surfaces) < 0.6 * spec.tile_shape[0]
            assert len(spec.faults.absent) == (kind == "severe")
            assert not {0, spec.slices - 1} & set(spec.faults.absent)
    covered = [spec.coverage for spec in drawn["partial"]]
    assert 0.4 <= min(covered) < max(covered) <= 0.7
    assert brain.draw_brain(0, "severe", scale=2).tile_shape == (80, 128, 128)
    with pytest.raises(ValueError, match="full, partial, severe"):
        brain.draw_brain(0, "usual")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("volume", "kind"),
    [(True, {}), *((False, {"anatomy": name, "coverage": 0.6, "agarose": 0.1}) for name in ANATOMIES)],
)
def test_the_device_makes_the_same_tiles(volume, kind):
    array = np.random.default_rng(0).random(SPEC.shape).astype("f4") if volume else None
    for looks in (0, 8):
        faults = dataclasses.replace(USUAL_FAULTS, looks=looks, warp=1.0, agarose_looks=4 * looks)
        spec = dataclasses.replace(SPEC, faults=faults, volume=array, **({} if volume else kind))
        here, there = tile(spec, 1, 1, 0), tile(spec, 1, 1, 0, device="cuda").get()
        if not looks:
            assert np.allclose(here, there, rtol=1e-4, atol=1e-4 * here.max())
        assert there.mean() == pytest.approx(here.mean(), rel=0.01)


def test_written_as_the_commands_read_it(tmp_path):
    spec = BrainSpec(faults=USUAL_FAULTS)
    absent = dataclasses.replace(spec, faults=Faults(absent=(1,)), tiles=(1, 1))
    assert list(find_slices(write_brain(absent, tmp_path / "absent") / "mosaics")) == [0, 2, 3]
    assert absent.nbytes == 3 * spec.nbytes // 16
    begin = time.process_time()
    assert write_brain(spec, tmp_path / "brain") == tmp_path / "brain"
    assert time.process_time() - begin < 10, "2 s on a quiet machine"
    slices = find_slices(tmp_path / "brain" / "mosaics")
    assert list(slices) == [0, 1, 2, 3]
    image = open_mosaic(slices[2])
    assert (image.tile_shape, image.spacing) == ((48, 48), spec.spacing_um)
    voxels = open_image(slices[2]).levels[0][...]
    assert np.array_equal(voxels, brain.mosaic(spec, 2))
    assert np.array_equal(voxels[:, 48:, :48], tile(spec, 2, 1, 0))
    with (tmp_path / "brain" / "shifts.csv").open() as file:
        rows = list(csv.DictReader(file))
    for number, (shift, row) in enumerate(zip(read_shifts(tmp_path / "brain" / "shifts.csv"), rows, strict=True), 1):
        assert (shift.fixed_id, shift.moving_id) == (number - 1, number)
        assert (shift.y_mm * 100, shift.x_mm * 100) == pytest.approx(brain.truth_shift(spec, number))
        middle = (np.array(spec.slice_shape[1:]) - 1) / 2
        below, above = (brain.truth_transform(spec, k)[:2] @ [*middle, 1] for k in (number, number - 1))
        assert np.abs([float(row["y_shift"]), float(row["x_shift"])] - (below - above)).max() < 0.5
