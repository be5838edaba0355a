"""If this fails, tiles of a slice are placed wrong, or a pair that should be rejected moves them."""

import json

import numpy as np
import pytest
from scipy import ndimage

from linumpy.errors import SourceError
from linumpy.mosaic.tile_positions import estimate_positions
from linumpy.registration.phase_correlation import find_shifts
from linumpy.registration.position_files import read_positions, table_of, write_positions
from linumpy.registration.positions import AcquisitionModel, locate_tiles, solve_positions
from linumpy.testing import brain
from linumpy.testing.brain import BrainSpec, Faults
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, load, run_script

NAME, PROGRAM = "linum_estimate_transform", "linum-estimate-transform"


def scene(rng, *shape):
    image = ndimage.gaussian_filter(rng.normal(size=shape), 3)
    return image / image.std()


def seen(image, corner, shape):
    """A part of a scene whose first pixel is at a fraction of one: by splines, which this package's search has not."""
    rows, columns = (np.arange(n) + c for n, c in zip(shape, corner, strict=True))
    return ndimage.map_coordinates(image, np.meshgrid(rows, columns, indexing="ij"), order=5)


def tiles_of(rng, grid=(3, 4), shape=(128, 144), overlap=0.2, jitter=3.0, noise=0.3, degrees=0.5):
    """Tiles (rows, columns, Y, X) with noise and a vignette, and their true positions."""
    angle = np.deg2rad(degrees)
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    nominal = np.stack(np.meshgrid(*map(np.arange, grid), indexing="ij"), -1) * np.round(
        np.array(shape) * (1 - overlap)
    )
    positions = nominal @ turn.T + rng.uniform(-jitter, jitter, (*grid, 2))
    image = scene(rng, *(np.array(grid) * shape + 40))
    y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    tiles = np.empty((*grid, *shape), np.float32)
    for place in np.ndindex(*grid):
        tiles[place] = (seen(image, positions[place] + 15, shape) + 4) * (1 - 0.1 * (y * y + x * x))
        tiles[place] += noise * rng.normal(size=shape)
    return tiles, positions - positions[0, 0]


@pytest.mark.parametrize(("shape", "reach"), [((96, 128), 60), ((128, 40), 20)])
def test_shifts_are_found_to_a_fraction_of_a_pixel_and_beyond_half_of_the_image(shape, reach):
    rng = np.random.default_rng(1)
    image = scene(rng, *(np.array(shape) + 200))
    true = rng.uniform(-1, 1, (12, 2)) * np.minimum(reach, 0.6 * np.array(shape))
    fixed = np.repeat(image[None, 100 : 100 + shape[0], 100 : 100 + shape[1]], len(true), 0)
    moving = np.array([seen(image, 100 + shift, shape) for shift in true])
    fixed = fixed + 0.1 * rng.normal(size=fixed.shape)
    moving = 3 * moving + 0.3 * rng.normal(size=moving.shape) + 50  # another gain and offset
    moving[0, 3, 5] = np.nan
    found = find_shifts(fixed, moving, min_overlap=0.2)
    assert np.abs(found.shifts - true).max() < 0.1
    assert found.confidence.min() > 0.8


def test_a_pair_alone_is_the_same_as_in_a_batch():
    rng = np.random.default_rng(2)
    fixed, moving = rng.normal(size=(2, 5, 40, 33))
    moving[:3] = np.roll(fixed[:3], (4, -6), (1, 2))
    batch = find_shifts(fixed, moving)
    alone = [find_shifts(fixed[k : k + 1], moving[k : k + 1]) for k in range(5)]
    np.testing.assert_allclose(batch.shifts, np.concatenate([one.shifts for one in alone]), atol=1e-4)
    np.testing.assert_allclose(batch.shifts[:3], np.tile([-4, 6], (3, 1)), atol=0.02)
    assert (batch.confidence[3:] < 0.5).all()


def test_no_contrast_is_no_confidence():
    flat = np.full((2, 16, 16), 7.7)
    found = find_shifts(flat, np.stack([np.zeros((16, 16)), np.random.default_rng(0).normal(size=(16, 16))]))
    assert not found.confidence.any()
    assert not found.shifts.any()


def test_positions_to_a_tenth_of_a_pixel():
    tiles, true = tiles_of(np.random.default_rng(3))
    found = locate_tiles(tiles, 0.2)
    error = np.abs(found.positions - true)
    assert np.sqrt((error**2).mean()) < 0.06
    assert error.max() < 0.15
    assert not [pair for pair in found.pairs if pair.rejected]
    angle = np.deg2rad(0.5)
    np.testing.assert_allclose(found.model.row, 102 * np.array([np.cos(angle), -np.sin(angle)]), atol=2.5)
    # The stage's overlap is a guess of the user: half as much and one and a half times as much do as well.
    for wrong in (0.13, 0.3):
        assert np.abs(locate_tiles(tiles, wrong).positions - true).max() < 0.2


def test_missing_tiles_and_tiles_without_contrast_take_the_regular_grid():
    rng = np.random.default_rng(4)
    tiles, true = tiles_of(rng, jitter=0.0)
    tiles[1, 1] = 0
    tiles[2, 3] = rng.normal(size=tiles.shape[2:])
    found = locate_tiles(tiles, 0.2)
    assert found.present.sum() == 11
    assert not found.present[1, 1]
    assert np.abs(found.positions - true).max() < 0.4
    assert {pair.rejected for pair in found.pairs if (2, 3) in (pair.fixed, pair.moving)} == {"low correlation"}
    assert not [pair for pair in found.pairs if (1, 1) in (pair.fixed, pair.moving)]


@pytest.mark.parametrize("seed", range(5))
def test_wrong_shifts_do_not_move_tiles(seed):
    """Other pairs agree with each other, whatever one wrong pair of great confidence says."""
    rng = np.random.default_rng(seed)
    grid = 5, 6
    true = np.stack(np.meshgrid(np.arange(5) * 100.0, np.arange(6) * 120.0, indexing="ij"), -1)
    true += rng.uniform(-2, 2, true.shape)
    true -= true[0, 0]
    places = [(i, j) for i, j in np.ndindex(*grid)]
    pairs = [(p, (p[0] + a, p[1] + b)) for a, b in ((1, 0), (0, 1)) for p in places]
    pairs = [(p, q) for p, q in pairs if q[0] < 5 and q[1] < 6]
    fixed, moving = (np.array(side) for side in zip(*pairs, strict=True))
    shifts = np.array([true[q] - true[p] for p, q in pairs]) + rng.normal(0, 0.03, (len(pairs), 2))
    # Of the two pairs of a corner's tile nothing says which one is wrong.
    inner = [k for k, pair in enumerate(pairs) if all(0 < p[0] < 4 and 0 < p[1] < 5 for p in pair)]
    wrong = rng.choice(inner, 4, replace=False)
    shifts[wrong[:2]] += rng.uniform(1.5, 4, (2, 2)) * rng.choice([-1, 1], (2, 2))
    shifts[wrong[2:]] += 40
    nominal = AcquisitionModel((90.0, 0.0), (0.0, 110.0))
    found = solve_positions(np.ones(grid, bool), (120, 150), nominal, fixed, moving, shifts, np.full(len(pairs), 0.9))
    assert np.abs(found.positions - true).max() < 0.25
    assert {k for k, pair in enumerate(found.pairs) if pair.rejected} == set(wrong.tolist())


def test_one_tile_and_one_row():
    tiles, true = tiles_of(np.random.default_rng(5), grid=(1, 3))
    assert np.abs(locate_tiles(tiles, 0.2).positions - true).max() < 0.15
    alone = locate_tiles(tiles[:, :1], 0.2)
    assert alone.positions.tolist() == [[[0, 0]]]
    assert alone.pairs == ()
    assert "1 × 1" in table_of(alone)


@pytest.mark.gpu
def test_the_device_finds_what_the_host_finds():
    import cupy

    tiles, _ = tiles_of(np.random.default_rng(6))
    tiles[0, 1] = 0
    host, device = locate_tiles(tiles, 0.2), locate_tiles(cupy.asarray(tiles), 0.2)
    np.testing.assert_allclose(device.positions, host.positions, atol=5e-3)
    assert [pair.rejected for pair in device.pairs] == [pair.rejected for pair in host.pairs]


@pytest.fixture(scope="module")
def mosaic(tmp_path_factory):
    """A mosaic grid (X, Z, Y), not in the usual order, and true positions along its lateral axes."""
    tiles, true = tiles_of(np.random.default_rng(7), grid=(2, 3), shape=(80, 96))
    plane = tiles.transpose(0, 2, 1, 3).reshape(160, 288)
    volume = (plane[:, None] + np.arange(3)[:, None]).astype(np.float32)
    kept = {"linumpy": {"tile_shape": {"x": 80, "y": 96}}}
    path = tmp_path_factory.mktemp("positions") / "m.ome.zarr"
    write_omezarr(path, volume, (4, 5, 6), axes="xzy", chunks=(80, 3, 96), attributes=kept)
    return path, true


def test_a_run(mosaic, tmp_path):
    path, true = mosaic
    out = tmp_path / "p.json"
    done = run_script(NAME, path, out, "--no-use_gpu")
    assert done.returncode == 0, done.stderr
    assert "7 pairs, 0 rejected" in done.stdout
    found = read_positions(out, (80, 96))
    assert np.abs(found.positions - true).max() < 0.25
    assert json.loads(out.read_text())["spacing_um"] == [4, 6]
    np.testing.assert_array_equal(estimate_positions(path, tmp_path / "p.csv").positions, found.positions)
    table = read_positions(tmp_path / "p.csv", (80, 96))
    np.testing.assert_array_equal(table.positions, found.positions)
    np.testing.assert_array_equal(table.present, found.present)


def test_what_is_refused(mosaic, tmp_path, capsys):
    path, _ = mosaic
    main = load(NAME).main
    for words, message in [
        ([path, tmp_path / "p.txt"], ".json or .csv"),
        ([path, tmp_path / "p.json", "--overlap", "0.9"], "--overlap"),
        ([path, tmp_path / "p.json", "--overlap", "0.01"], "too few pixels"),
    ]:
        check_refused(capsys, main, [*words, "--no-use_gpu"], PROGRAM, message)
    found = locate_tiles(np.random.default_rng(0).normal(size=(1, 2, 40, 40)), 0.2)
    write_positions(tmp_path / "q.json", found, "m", (1, 1))
    with pytest.raises(SourceError, match="the mosaic's tiles have"):
        read_positions(tmp_path / "q.json", (40, 41))
    for text in ("", "row,column,y,x,present\n0,0,1,nan,1\n", "row,column,y,x\n0,0,1,1\n", "[1]"):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(SourceError, match=r"bad\.csv"):
            read_positions(tmp_path / "bad.csv", (40, 40))


def test_a_file_of_other_bytes_is_named(tmp_path):
    (tmp_path / "p.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match=r"p\.json"):
        read_positions(tmp_path / "p.json", (8, 8))
    with pytest.raises(ValueError, match="min_confidence=nan"):
        locate_tiles(np.zeros((1, 1, 8, 8)), 0.2, min_confidence=float("nan"))


@pytest.mark.parametrize("degrees", [-1.0, 0.0, 0.3, 2.0])
def test_a_camera_that_is_turned_against_the_stage_is_found_and_mended(degrees):
    """Tiles of known truth; the angle along rows and columns is the same, and tiles lie where they were."""
    spec = BrainSpec(
        slices=1, tiles=(4, 4), tile_shape=(16, 96, 96), radius=3.0, faults=Faults(stage_degrees=degrees, looks=20)
    )
    tiles = brain.mosaic(spec, 0).mean(axis=0).reshape(4, 96, 4, 96).transpose(0, 2, 1, 3)
    found = locate_tiles(tiles, spec.overlap)
    true = brain.truth_positions(spec, 0)
    assert np.abs(found.positions - found.positions[0, 0] - true + true[0, 0]).max() < 0.25
    np.testing.assert_allclose(found.model.degrees, degrees, atol=0.05)
    assert f"{found.model.degrees[0]:+.3f}° along rows" in table_of(found)


def test_axes_of_a_stage_that_are_not_at_right_angles():
    assert AcquisitionModel((100.0, 0.0), (-1.0, 50.0)).degrees == pytest.approx((0.0, np.degrees(np.arctan(0.02))))
    assert AcquisitionModel((0.0, 0.0), (0.0, 50.0)).degrees == (0.0, 0.0)
