"""If this fails, tiles stay rotated, or are rotated where they were right."""

from dataclasses import replace

import numpy as np
import pytest
import zarr

from linumpy.mosaic.galvo import detect_galvo_shift, fix_galvo_shift
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.options import Galvo
from linumpy.testing.brain import USUAL_FAULTS, BrainSpec, mosaic, tile, truth_galvo
from linumpy.testing.brain_files import write_brain
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load

SPEC = BrainSpec(slices=2, tiles=(2, 3), tile_shape=(16, 40, 44), faults=replace(USUAL_FAULTS, galvo=20))


@pytest.mark.parametrize("seed", range(6))
def test_the_seam_is_found(seed):
    """With vignetting, speckle, curvature and all else that a microscope does."""
    spec = replace(SPEC, seed=seed, tile_shape=(30, 40, 44))
    for number in range(2):
        tiles = np.stack([tile(spec, number, r, c).mean(axis=0) for r in range(2) for c in range(3)])
        found = detect_galvo_shift(tiles)
        assert found.columns == truth_galvo(spec, number) % 44
        assert found.contrast > 2  # 1.5 is asked for: 2.1 to 4.8 over 40 slices


@pytest.mark.parametrize("seed", range(4))
def test_tiles_as_they_should_be_are_left_alone(seed):
    """Borders of tissue, vignetting and speckle are no seam."""
    spec = replace(SPEC, seed=seed, tile_shape=(30, 40, 44), faults=replace(SPEC.faults, galvo=0))
    for number in range(2):
        tiles = np.stack([tile(spec, number, r, c).mean(axis=0) for r in range(2) for c in range(3)])
        found = detect_galvo_shift(tiles)
        assert found.columns == 0 or found.contrast < 1.5


def test_nothing_is_found_where_there_is_nothing():
    rng = np.random.default_rng(0)
    assert detect_galvo_shift(rng.standard_normal((4, 50, 60))).contrast < 1.5
    assert detect_galvo_shift(np.zeros((4, 8, 8))).columns == 0
    assert detect_galvo_shift(np.full((1, 8, 8), np.nan)).contrast == 0


@pytest.mark.filterwarnings("error")
def test_infinite_pixels_take_no_part():
    tiles = np.stack([tile(SPEC, 0, 0, column).mean(axis=0) for column in range(3)])
    odd = tiles.copy()
    odd[1, :4, 10], odd[1, 4:8, 10] = np.inf, -np.inf
    assert detect_galvo_shift(odd).columns == detect_galvo_shift(tiles).columns == truth_galvo(SPEC, 0) % 44


def test_a_mosaic_is_mended(tmp_path, capsys):
    folder = write_brain(SPEC, tmp_path / "brain") / "mosaics"
    straight = mosaic(replace(SPEC, faults=replace(SPEC.faults, galvo=0)), 1)
    assert (straight != mosaic(SPEC, 1)).any()
    source = folder / "slice_z01.ome.zarr"
    for name, tile_bytes in (("a", 1), ("b", 2**28)):
        found = fix_galvo_shift(source, tmp_path / name, tile_bytes=tile_bytes)
        assert found.columns == truth_galvo(SPEC, 1) % 44
        np.testing.assert_array_equal(zarr.open_group(tmp_path / name, mode="r")["0"][...], straight)
    assert open_mosaic(tmp_path / "a").tile_shape == (40, 44)
    assert load("linum_fix_galvo_shift").main([str(tmp_path / "a"), str(tmp_path / "c"), "--device=cpu"]) == 0
    assert "rotated by 0 columns" in capsys.readouterr().out
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "c", mode="r")["0"][...], straight)
    assert load("linum_fix_galvo_shift").main([str(source), str(tmp_path / "d"), "--columns", "3", "--device=cpu"]) == 0
    turned = zarr.open_group(tmp_path / "d", mode="r")["0"][...]
    np.testing.assert_array_equal(turned[..., :44], np.roll(mosaic(SPEC, 1)[..., :44], -3, axis=-1))


def test_one_of_several_channels_is_mended_as_asked(tmp_path, capsys):
    rotated = mosaic(SPEC, 1)
    pair = np.stack([rotated[..., ::-1], rotated])
    attributes = {"linumpy": {"tile_shape": {"y": 40, "x": 44}}}
    write_omezarr(tmp_path / "pair", pair, (3.0, 5.0, 5.0), axes="czyx", chunks=(1, 16, 40, 44), attributes=attributes)
    main = load("linum_fix_galvo_shift").main
    words = [str(tmp_path / "pair"), str(tmp_path / "out"), "--device=cpu"]
    assert main(words) == 2
    assert "--channel" in capsys.readouterr().err
    assert main([*words, "--channel", "1"]) == 0
    straight = mosaic(replace(SPEC, faults=replace(SPEC.faults, galvo=0)), 1)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "out", mode="r")["0"][...], straight)


def test_a_contrast_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="min_contrast"):
        Galvo(min_contrast=float("nan"))


def test_an_incomplete_last_tile_is_rotated_within_its_width(tmp_path):
    voxels = np.random.default_rng(0).random((3, 4, 11)).astype("f4")
    source = write_omezarr(tmp_path / "m.zarr", voxels, (10, 10, 10))
    fix_galvo_shift(source, tmp_path / "o.zarr", Galvo(columns=2), tile_shape=(4, 8))
    found = zarr.open_group(tmp_path / "o.zarr", mode="r")["0"][...]
    expected = [np.roll(part, -2, axis=2) for part in (voxels[..., :8], voxels[..., 8:])]
    np.testing.assert_array_equal(found, np.concatenate(expected, axis=2))


@pytest.mark.gpu
def test_the_device_mends_the_same(tmp_path):
    import cupy

    tiles = np.random.default_rng(1).normal(0, 1, (3, 9, 30)).cumsum(axis=2)
    both = detect_galvo_shift(cupy.asarray(tiles)), detect_galvo_shift(tiles)
    assert both[0].columns == both[1].columns
    assert both[0].contrast == pytest.approx(both[1].contrast, rel=1e-9)  # sums in another order
    source = write_brain(SPEC, tmp_path / "brain") / "mosaics" / "slice_z01.ome.zarr"
    for tile_bytes in (1, 2**28):
        found = [
            fix_galvo_shift(source, tmp_path / f"{tile_bytes}{device}", device=device, tile_bytes=tile_bytes)
            for device in ("cpu", "cuda")
        ]
        assert found[0].columns == found[1].columns == truth_galvo(SPEC, 1) % 44
        assert found[1].contrast == pytest.approx(found[0].contrast, rel=1e-4)
        host, device = (zarr.open_group(tmp_path / f"{tile_bytes}{g}", mode="r")["0"][...] for g in ("cpu", "cuda"))
        np.testing.assert_array_equal(device, host)
