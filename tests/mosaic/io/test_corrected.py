"""If this fails, mosaics whose intensities were corrected are wrong, or depend on how they are cut into boxes."""

import json

import numpy as np
import pytest
import zarr

from linumpy.correction.attenuation import Beam, attenuation, compensate, estimate_deep_light
from linumpy.correction.illumination import illumination_of, reduce_tile
from linumpy.errors import MetadataError
from linumpy.io.ome import open_image, read_omezarr
from linumpy.mosaic.attenuation import compensate_attenuation
from linumpy.mosaic.illumination import fix_illumination, read_fields
from linumpy.mosaic.intensities import normalize_intensities
from linumpy.mosaic.io.corrected import as_dtype
from linumpy.mosaic.options import AttenuationMethod, Normalization
from linumpy.testing import brain
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load, run_script

TILE = (10, 24, 20)
FAULTS = brain.Faults(vignette=0.8, attenuation_per_mm=3.0, rayleigh_um=150.0, focus_um=40.0)
SPEC = brain.BrainSpec(slices=1, tiles=(4, 5), tile_shape=TILE, dtype="uint16", radius=np.inf, faults=FAULTS)


@pytest.fixture(scope="module")
def grid():
    return brain.mosaic(SPEC, 0)


def write(path, grid, axes="zyx"):
    turned = np.moveaxis(grid, (0, 1, 2), [axes.index(name) for name in "zyx"])
    tile = {"linumpy": {"tile_shape": {"y": TILE[1], "x": TILE[2]}}}
    chunks = tuple({"z": 4, "y": 16, "x": 16}[name] for name in axes)
    return write_omezarr(path, turned, (10.0, 10.0, 10.0), axes=axes, chunks=chunks, attributes=tile)


def voxels(path, axes="zyx"):
    return np.moveaxis(zarr.open_group(path, mode="r")["0"][...], [axes.index(name) for name in "zyx"], (0, 1, 2))


@pytest.mark.parametrize(("axes", "tile_bytes"), [("zyx", 1), ("xzy", 2**30)])
def test_illumination(tmp_path, grid, axes, tile_bytes):
    source = write(tmp_path / "m.zarr", grid, axes)
    tiles = grid.reshape(10, 4, 24, 5, 20).transpose(1, 3, 0, 2, 4).reshape(20, *TILE)
    places = np.stack([np.zeros(20, int), *np.divmod(np.arange(20), 5)], axis=1)
    expected = illumination_of([reduce_tile(tile) for tile in tiles], TILE, places=places)
    read = []
    found = fix_illumination(source, tmp_path / "a.zarr", tile_bytes=tile_bytes, progress=read.append, levels=2)
    assert sum(read) == 2 * grid.nbytes
    lateral = (1, 2) if axes.index("y") < axes.index("x") else (2, 1)
    assert np.allclose(found.flat.transpose(0, *lateral), expected.flat, rtol=1e-3)
    truth = brain.truth_flat_field(SPEC)  # structures are as large as these tiles
    assert np.std(expected.flat / truth) < 0.7 * np.std(truth)
    even = voxels(tmp_path / "a.zarr", axes)
    assert even.dtype == np.uint16
    assert np.abs(even - np.rint(grid / np.tile(expected.flat, (1, 4, 5)))).max() <= 2 + 2e-3 * grid.max()
    assert open_image(tmp_path / "a.zarr").linumpy["tile_shape"] == {"y": 24, "x": 20}


def test_attenuation_and_its_estimates(tmp_path, grid):
    source = write(tmp_path / "m.zarr", grid)
    known = AttenuationMethod(focus_um=40.0, rayleigh_um=150.0, end_per_mm=3.0, background=2.0)
    used = compensate_attenuation(source, tmp_path / "a.zarr", known, tile_bytes=1)
    light = used.light
    expected = compensate(
        grid, 10.0, Beam(40.0, 150.0), deep=used.deep, background=2.0, scale=light.scale, max_gain=light.max_gain
    )
    expected = np.where(grid > 0, np.maximum(expected, 1), 0)  # 0 is not measured
    whole = estimate_deep_light(grid, 10.0, Beam(40.0, 150.0), end_per_mm=3.0, background=2.0)
    total = np.array([50e3, 70e3])
    assert np.allclose(used.deep.below(total), whole.below(total), rtol=0.25)  # of some columns
    assert np.array_equal(voxels(tmp_path / "a.zarr"), as_dtype(expected, np.dtype("u2")))
    used = compensate_attenuation(source, tmp_path / "mu.zarr", AttenuationMethod(end_per_mm=2.0), coefficients=True)
    mu = voxels(tmp_path / "mu.zarr")
    assert mu.dtype == np.float32
    light = used.light
    assert np.allclose(
        mu, attenuation(grid, 10.0, light.beam, deep=used.deep, background=light.background), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("per", ["plane", "slice"])
def test_normalised_in_one_pass_and_by_histograms(tmp_path, grid, per):
    source = write(tmp_path / "m.zarr", grid, "yzx")
    axis = (1, 2) if per == "plane" else None
    low, high = np.percentile(grid, (1, 99), axis=axis, keepdims=True)
    expected = np.clip((grid - low) / (high - low), 0, 1)
    for name, tile_bytes, near in (("once", 2**30, 1e-5), ("twice", 1, 0.01)):
        bounds = normalize_intensities(source, tmp_path / name, options=Normalization(per=per), tile_bytes=tile_bytes)
        assert np.allclose(bounds, np.broadcast_to(np.stack([low, high])[..., 0, 0], (2, 10)), rtol=near)
        assert np.allclose(voxels(tmp_path / name, "yzx"), expected, atol=2 * near)
        unclipped = Normalization(per=per, clip=False)
        normalize_intensities(source, tmp_path / name, options=unclipped, tile_bytes=tile_bytes, overwrite=True)
        assert np.allclose(voxels(tmp_path / name, "yzx").max(), ((grid - low) / (high - low)).max(), rtol=2 * near)


def test_voxels_of_other_types():
    values = np.array([-1.0, 0.4, 0.5, 1.5, 254.6, 300.0, np.nan, np.inf], "f4")
    assert as_dtype(values, np.dtype("u1")).tolist() == [0, 0, 0, 2, 255, 255, 0, 255]
    assert as_dtype(np.array([3e9, 5e9], "f4"), np.dtype("u4")).tolist() == [3_000_000_000, 4_294_967_295]
    assert as_dtype(values, np.dtype("f8")).dtype == np.float64
    with pytest.raises(TypeError, match="booleans"):
        as_dtype(values, np.dtype(bool))


def test_the_commands(tmp_path, grid):
    source = write(tmp_path / "m.ome.zarr", grid)
    done = run_script(
        "linum_fix_illumination", source, tmp_path / "even.zarr", "--report", tmp_path / "even.png", "--device=cpu"
    )
    assert done.returncode == 0, done.stderr
    assert "from 20 tiles" in done.stdout
    assert (tmp_path / "even.png").stat().st_size > 10_000
    compensation, normalise = load("linum_compensate_attenuation"), load("linum_normalize_intensities")
    words = ["--focus", "40", "--rayleigh", "150", "--end", "3", "--device=cpu"]
    assert compensation.main([str(tmp_path / "even.zarr"), str(tmp_path / "clear.zarr"), *words]) == 0
    options = ["--percentiles", "0", "100", "--per", "slice", "--device=cpu", "--codec", "gzip"]
    assert normalise.main([str(tmp_path / "clear.zarr"), str(tmp_path / "unit.zarr"), *options]) == 0
    unit, spacing = read_omezarr(tmp_path / "unit.zarr")
    assert (unit.shape, unit.dtype, spacing) == (grid.shape, np.float32, (10.0, 10.0, 10.0))
    assert (unit[...].min(), unit[...].max()) == (0, 1)
    assert "Gzip" in str(zarr.open_group(tmp_path / "unit.zarr", mode="r")["0"].compressors)
    assert normalise.main([str(source), str(tmp_path / "x"), "--percentiles", "9", "1", "--device=cpu"]) == 2
    assert not (tmp_path / "x").exists()


def test_fields_of_a_file_are_those_of_the_mosaics(tmp_path, grid):
    """What linum-estimate-illumination writes of two mosaics, linum-fix-illumination divides by."""
    sources = [write(tmp_path / f"m{k}.ome.zarr", grid) for k in range(2)]
    file, even = tmp_path / "fields.npz", tmp_path / "even.zarr"
    assert load("linum_estimate_illumination").main([*map(str, sources), str(file), "--force", "--device=cpu"]) == 0
    fields = read_fields(file)
    told = json.loads(file.with_suffix(".json").read_text())
    assert (told["tiles"], told["left_out"], told["warnings"]) == (40, "", [])
    assert told["gain_max"] == pytest.approx(1 / fields.flat.min())
    words = [str(sources[0]), str(even), "--fields", str(file), "--device=cpu"]
    assert load("linum_fix_illumination").main(words) == 0
    assert np.abs(voxels(even) - np.rint(grid / np.tile(fields.flat, (1, 4, 5)))).max() <= 1
    with pytest.raises(ValueError, match="do not fit the tiles"):
        fix_illumination(sources[0], tmp_path / "x.zarr", (12, 20), fields=fields)
    other = tmp_path / "other.npz"
    np.savez(other, flat=fields.flat)
    with pytest.raises(MetadataError, match="no fields"):
        read_fields(other)


def test_what_is_refused(tmp_path, grid):
    bare = write_omezarr(tmp_path / "m.zarr", grid, (1.0, 1.0, 1.0))
    with pytest.raises(MetadataError, match="tile_shape="):
        fix_illumination(bare, tmp_path / "a.zarr")
    with pytest.raises(ValueError, match="max_tiles"):
        fix_illumination(bare, tmp_path / "a.zarr", TILE[1:], max_tiles=0)
    with pytest.raises(ValueError, match="per='row'"):
        Normalization(per="row")
    with pytest.raises(ValueError, match="end_per_mm=-1"):
        compensate_attenuation(
            bare, tmp_path / "a.zarr", AttenuationMethod(focus_um=0.0, rayleigh_um=1.0, end_per_mm=-1.0)
        )
    assert not (tmp_path / "a.zarr").exists()


@pytest.mark.gpu
def test_on_a_device(tmp_path, grid):
    source = write(tmp_path / "m.zarr", grid)
    for name, run in {
        "even": fix_illumination, "clear": compensate_attenuation, "unit": normalize_intensities
    }.items():  # fmt: skip
        for device in ("cpu", "cuda"):
            run(source, tmp_path / f"{name}{device}.zarr", device=device)
        host, on_gpu = (voxels(tmp_path / f"{name}{device}.zarr").astype("f8") for device in ("cpu", "cuda"))
        assert np.abs(host - on_gpu).max() <= 2e-3 * host.max() + (name != "unit")
