"""If this fails, tiles of a slice are placed wrong, or a pair that should be rejected moves them."""

import itertools
import json

import numpy as np
import pytest
from scipy import ndimage

from linumpy.errors import SourceError
from linumpy.mosaic.options import Positions
from linumpy.mosaic.tile_positions import estimate_positions, project_structure
from linumpy.registration.position_files import read_positions, table_of, write_positions
from linumpy.registration.positions import AcquisitionModel, locate_tiles, solve_positions
from linumpy.registration.shift_evidence import MeasuredPairs
from linumpy.registration.shift_scores import refine_shifts, score_shifts
from linumpy.testing import brain
from linumpy.testing.brain import BrainSpec, Faults
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
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


@pytest.mark.parametrize("shape", [(96, 128), (128, 40)])
def test_shifts_are_refined_to_a_fraction_of_a_pixel(shape):
    rng = np.random.default_rng(1)
    image = scene(rng, *(np.array(shape) + 200))
    true = rng.uniform(-0.6, 0.6, (12, 2)) * np.array(shape)
    fixed = np.repeat(image[None, 100 : 100 + shape[0], 100 : 100 + shape[1]], len(true), 0)
    moving = np.array([seen(image, 100 + shift, shape) for shift in true])
    moving = 3 * moving + 0.3 * rng.normal(size=moving.shape) + 50  # another gain and offset
    smooth = [ndimage.gaussian_filter(side, (0, 1, 1)).astype(np.float32) for side in (fixed, moving)]
    shifts, deviations, correlation = refine_shifts(*smooth, np.rint(true))
    assert np.abs(shifts - true).max() < 0.1
    assert correlation.min() > 0.8
    assert 0.3 < np.median(np.abs(shifts - true) / deviations) < 3


def test_scores_are_those_of_the_overlap_at_each_shift():
    """Compared with the correlation of slices of the images, shift by shift."""
    rng = np.random.default_rng(2)
    fixed, moving = rng.normal(size=(2, 2, 20, 30)).astype(np.float32)
    moving[1, :15, :26] = fixed[1, 5:, 4:]
    sides = [(side, np.ones_like(side)) for side in (fixed, moving)]
    z, deviation, _ = score_shifts(*sides, (-6, -2), (7, 9))
    assert z.shape == (2, 14, 12)
    for k, y, x in [(0, -6, -2), (0, 7, 9), (0, 0, 0), (1, 3, -1), (1, 5, 4)]:
        a = fixed[k, max(y, 0) : 20 + min(y, 0), max(x, 0) : 30 + min(x, 0)]
        b = moving[k, max(-y, 0) : 20 - max(y, 0), max(-x, 0) : 30 - max(x, 0)]
        expected = np.arctanh(min((a * b).sum() / (1.05 * a.size), 0.999))
        assert z[k, y + 6, x + 2] == pytest.approx(expected, abs=1e-3)
    assert np.unravel_index(z[1].argmax(), (14, 12)) == (11, 6)
    # White noise: each pixel is a sample.
    assert np.sqrt(np.mean((z[0] / deviation[0]) ** 2)) == pytest.approx(1, abs=0.3)


def illumination(rng, shape):
    """A vignette whose centre is not that of the tile, and a dark field."""
    y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    cy, cx = rng.uniform(-0.3, 0.3, 2)
    return 1 - 0.2 * ((y - cy) ** 2 + (x - cx) ** 2), 0.02 * (1 + 0.3 * x * y - 0.2 * y)


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.05])
@pytest.mark.parametrize("grid", [(1, 2), (3, 3)])
def test_tiles_of_plain_agarose_are_not_aligned_by_their_illumination(noise, grid):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        flat, dark = illumination(rng, (96, 96))
        dust = np.where(rng.random((96, 96)) > 0.998, 0.8, 1)
        agarose = 0.1 * (1 + noise * rng.normal(size=(*grid, 96, 96))) * (1 + rng.uniform(-0.1, 0.1, (*grid, 1, 1)))
        found = locate_tiles((agarose * flat * dust + dark).astype(np.float32), 0.2)
        assert {pair.rejected for pair in found.pairs} == {"no evidence"}
        assert max(pair.evidence for pair in found.pairs) < 0.5
        nominal = np.stack(np.meshgrid(*(77.0 * np.arange(n) for n in grid), indexing="ij"), -1)
        np.testing.assert_allclose(found.positions, nominal, atol=1e-6)
        assert len(found.warnings) == 1
        assert found.warnings[0].startswith(f"No pair of the {grid[0] * grid[1]} tiles shows common structure, so all")
        assert found.warnings[0].endswith("check the overlap and the shape of the tiles.")
        assert "nominal" in table_of(found)
        assert "camera" not in table_of(found)
        assert not found.by_pairs.any()


def test_tissue_among_agarose_is_placed_as_if_alone_and_agarose_by_the_grid():
    """Doing nothing is compared, too: the nominal grid, which is off by the overlap and the jitter."""
    rng = np.random.default_rng(8)
    tiles, true = tiles_of(rng, grid=(4, 5), shape=(72, 72), jitter=1.5)
    flat, dark = illumination(rng, (72, 72))
    background = np.zeros((4, 5), bool)
    background[:, 0] = background[0] = True
    tiles[background] = 0.3 * (1 + 0.02 * rng.normal(size=(int(background.sum()), 72, 72)))
    found = locate_tiles((tiles * flat + dark).astype(np.float32), 0.25)
    error, nothing = (
        np.sqrt((np.square(each - each.mean(0))).sum(axis=1).mean())
        for each in (
            (found.positions - true)[~background],
            (54.0 * np.stack(np.meshgrid(np.arange(4), np.arange(5), indexing="ij"), -1) - true)[~background],
        )
    )
    assert error < 0.3 < 1 < nothing
    np.testing.assert_array_equal(found.by_pairs, ~background)
    assert found.warnings[0].startswith("8 of 20 tiles are placed by the regular grid that the others show, because")
    assert found.warnings[0].endswith("Check the stitched slice there for seams.")
    assert np.linalg.norm(found.positions - found.positions[3, 4] - true + true[3, 4], axis=-1)[background].max() < 5


@pytest.mark.parametrize(("true_overlap", "told"), [(0.1, 0.3), (0.3, 0.2), (0.12, 0.2)])
def test_the_overlap_is_found_where_it_is_not_what_was_told(true_overlap, told):
    tiles, true = tiles_of(np.random.default_rng(9), grid=(3, 3), shape=(96, 96), overlap=true_overlap, jitter=1.0)
    assert np.abs(locate_tiles(tiles, told).positions - true).max() < 1


def test_tiles_that_do_not_overlap_are_refused():
    rng = np.random.default_rng(10)
    tiles = np.stack([[scene(rng, 80, 80) for _ in range(3)] for _ in range(2)]) + 4
    with pytest.raises(ValueError, match=r"overlap=0\.2: 7 of 7 pairs .* shape of the tiles is wrong"):
        locate_tiles(tiles, 0.2)
    with pytest.raises(ValueError, match="all 6 tiles are empty"):
        locate_tiles(0 * tiles, 0.2)


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


def test_pixels_that_are_not_finite_hardly_move_a_tile():
    tiles = tiles_of(np.random.default_rng(5))[0].copy()
    found = locate_tiles(tiles, 0.2)
    tiles[1, 1, 40:44, 50:54], tiles[0, 2, 3, 9] = np.nan, np.inf
    np.testing.assert_allclose(locate_tiles(tiles, 0.2).positions, found.positions, atol=0.1)


def test_missing_tiles_and_tiles_without_contrast_take_the_regular_grid():
    rng = np.random.default_rng(4)
    tiles, true = tiles_of(rng, jitter=0.0)
    tiles[1, 1] = 0
    tiles[2, 3] = rng.normal(size=tiles.shape[2:])
    found = locate_tiles(tiles, 0.2)
    assert found.present.sum() == 11
    assert not found.present[1, 1]
    assert np.abs(found.positions - true).max() < 0.4
    assert {pair.rejected for pair in found.pairs if (2, 3) in (pair.fixed, pair.moving)} == {"no evidence"}
    assert not [pair for pair in found.pairs if (1, 1) in (pair.fixed, pair.moving)]


def pairs_of(rng, grid, jitter=2.0, spread=0.03):
    """Pairs of a grid, all of them of evidence, and true positions."""
    true = np.stack(np.meshgrid(np.arange(grid[0]) * 100.0, np.arange(grid[1]) * 120.0, indexing="ij"), -1)
    true += rng.uniform(-jitter, jitter, true.shape)
    true -= true[0, 0]
    pairs = [(p, (p[0] + a, p[1] + b)) for a, b in ((1, 0), (0, 1)) for p in np.ndindex(*grid)]
    fixed, moving = np.array([pair for pair in pairs if pair[1][0] < grid[0] and pair[1][1] < grid[1]]).swapaxes(0, 1)
    shifts = true[tuple(moving.T)] - true[tuple(fixed.T)] + rng.normal(0, spread, (len(fixed), 2))
    ones = np.ones(len(fixed))
    return MeasuredPairs(
        fixed=fixed,
        moving=moving,
        shifts=shifts,
        deviations=np.full(shifts.shape, spread),
        correlation=0.9 * ones,
        evidence=ones,
        structured=ones > 0,
    ), true


@pytest.mark.parametrize("seed", range(5))
def test_wrong_shifts_do_not_move_tiles(seed):
    """Other pairs agree with each other, whatever one wrong pair of great confidence says."""
    rng = np.random.default_rng(seed)
    grid = 5, 6
    measured, true = pairs_of(rng, grid)
    shifts = measured.shifts
    # Of the two pairs of a corner's tile nothing says which one is wrong.
    ends = np.stack([measured.fixed, measured.moving])
    inner = np.flatnonzero(((ends > 0) & (ends < [4, 5])).all(axis=(0, 2)))
    wrong: list[int] = []  # one at a tile: of two the others may not tell which is right
    for k in rng.permutation(inner):
        if not {tuple(end) for j in wrong for end in ends[:, j]} & {tuple(end) for end in ends[:, k]}:
            wrong.append(int(k))
    wrong = wrong[:4]
    shifts[wrong[:2]] += rng.uniform(1.5, 4, (2, 2)) * rng.choice([-1, 1], (2, 2))
    shifts[wrong[2:]] += 40
    nominal = AcquisitionModel((90.0, 0.0), (0.0, 110.0))
    found = solve_positions(np.ones(grid, bool), (120, 150), nominal, measured)
    assert np.abs(found.positions - true).max() < 0.25
    assert {k for k, pair in enumerate(found.pairs) if pair.rejected} == set(wrong)


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
    done = run_script(NAME, path, out, "--device", "cpu")
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
        check_refused(capsys, main, [*words, "--device", "cpu"], PROGRAM, message)
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
    with pytest.raises(ValueError, match="min_evidence=nan"):
        locate_tiles(np.zeros((1, 1, 8, 8)), 0.2, min_evidence=float("nan"))


@pytest.mark.parametrize("degrees", first([2.0, -1.0, 0.0, 0.3], 2))
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


def test_projections_of_tissue_that_takes_all_light():
    """If this fails, tiles of deep tissue are compared by speckle: the mean along depth no longer shows the sample."""
    rng = np.random.default_rng(7)
    structure = ndimage.gaussian_filter(rng.standard_normal((60, 90, 90)), 2)
    reflectivity = np.exp(0.5 * structure / structure.std())
    light = np.exp(-0.15 * (np.cumsum(reflectivity, axis=0) - 0.5 * reflectivity))
    views = [reflectivity * light * rng.gamma(4, 0.25, light.shape) * 1000 for _ in range(2)]
    truth = np.log(reflectivity[:8].mean(axis=0))

    def similarity(images):
        return np.corrcoef(*(image.ravel() for image in images))[0, 1]

    shown = [project_structure(view.astype(np.uint16), None, 0) for view in views]
    assert similarity([view.mean(axis=0) for view in views]) < 0.2
    assert similarity(shown) > 0.9
    assert abs(similarity([shown[0], truth])) > 0.7


def test_voxels_that_do_not_count_leave_the_projection_as_it_is():
    rng = np.random.default_rng(8)
    column = rng.gamma(4, 0.25, (20, 6, 5)).astype(np.float32)
    column[:, 2, 3] = 0
    holes = column.copy()
    holes[4:7, 1, 1] = np.nan
    plain, holed = (project_structure(voxels, None, 0) for voxels in (column, holes))
    assert np.isnan(plain[2, 3])
    assert np.isfinite(np.delete(plain.ravel(), 2 * 5 + 3)).all()
    np.testing.assert_array_equal(holed != plain, (np.arange(30).reshape(6, 5) == 6) | np.isnan(plain))
    np.testing.assert_allclose(
        holed[1, 1], project_structure(np.delete(column, range(4, 7), 0), None, 0)[1, 1], rtol=1e-5
    )
    huge = column.astype(np.float32)
    huge[:, 2, 2] = 3e38
    with np.errstate(all="raise"):
        shown = project_structure(huge, None, 0)
    assert np.array_equal(np.argwhere(np.isnan(shown)), np.argwhere(np.isnan(plain) | (huge[0] == huge[0, 2, 2])))
    doubled = project_structure(2 * column, None, 0)
    np.testing.assert_allclose(doubled, plain + np.float32(0.3 * np.log(2)), rtol=1e-4)
    swapped = project_structure(column.transpose(1, 0, 2), None, 1)
    np.testing.assert_allclose(swapped, plain, rtol=1e-5)


def test_noise_in_tiny_tiles_is_accepted_in_less_than_a_percent_of_pairs():
    """Overlaps have few independent samples, so chance scores high; earlier 6 % of these pairs were accepted."""
    accepted = pairs = 0
    for size, overlap, seed in itertools.product((20, 24, 32), (0.2, 0.3), range(6)):
        rng = np.random.default_rng([size, round(10 * overlap), seed])
        found = locate_tiles(rng.normal(1, 0.1, (3, 3, size, size)).astype(np.float32), overlap)
        accepted += sum(not pair.rejected for pair in found.pairs)
        pairs += len(found.pairs)
    assert accepted <= 0.01 * pairs


@pytest.mark.parametrize(("size", "noise", "least"), [(48, 0.3, 48), (72, 0.3, 48), (72, 1.0, 47)])
def test_texture_in_small_tiles_is_still_accepted(size, noise, least):
    """As many right pairs as without the tighter evidence for noise."""
    right = 0
    for seed in range(4):
        rng = np.random.default_rng([seed, size, 3, 3, 5])
        tiles, true = tiles_of(rng, grid=(3, 3), shape=(size, size), jitter=1.0, noise=noise)
        for pair in locate_tiles(tiles, 0.2).pairs:
            error = np.linalg.norm(np.array(pair.shift) - (true[pair.moving] - true[pair.fixed]))
            right += not pair.rejected and error < 1
    assert right >= least


@pytest.mark.parametrize("option", [{"overlap": 0.7}, {"overlap": "0.2"}, {"min_evidence": -0.1}])
def test_options_are_refused(option):
    (name,) = option
    with pytest.raises(ValueError, match=f"^{name}="):
        Positions(**option)
