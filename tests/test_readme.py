"""If this fails, a snippet of the README does not run as it stands."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from linumpy.device import DEVICE_VARIABLE, is_device_array, to_host
from linumpy.io.ome import open_image, read_omezarr
from linumpy.testing.synthetic import SIZES, MosaicSpec, surface_depth, write_mosaic
from tests.support.script_runs import load
from tests.support.stacks import consecutive_slices

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="the README is not installed with the package")


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_python(monkeypatch, folder, device, xarray=False):
    """Run the snippets without xarray, or those with it."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    Path("demo-out").mkdir()
    write_mosaic("demo-out/mosaic.ome.zarr", SIZES["small"])  # what ``make demo`` leaves
    names = {"__name__": "__main__"}
    for number, code in enumerate(one for one in snippets("python") if ("import xarray" in one) == xarray):
        exec(compile(code, f"README, snippet {number}", "exec"), names)
    return names


def check(names, folder):
    volume, report = names["volume"], names["report"]
    assert report.shape == volume.shape == SIZES["small"].shape
    source, spacing = read_omezarr(folder / "demo-out/mosaic.ome.zarr")
    written, _ = read_omezarr(folder / "isotropic.ome.zarr")
    np.testing.assert_array_equal(written[...], to_host(names["isotropic"]))
    error = to_host(names["surface"]) - surface_depth(SIZES["small"])
    assert np.nanmedian(np.abs(error)) < 0.25
    flat = open_image(folder / "flat.ome.zarr")
    assert (len(flat.levels), flat.spacing[0]) == (4, spacing)
    np.testing.assert_array_equal(flat.levels[0][...], source[...].clip(0, 2000))
    for crop, region in zip(names["crops"], (np.s_[0:32, 0:64, 0:64], np.s_[0:32, 32:96, 0:64]), strict=True):
        np.testing.assert_array_equal(crop, source[region])
    batch = np.stack([source[box] for box in names["boxes"]])
    np.testing.assert_allclose(names["mean"], batch.mean(dtype=np.float64), rtol=1e-4)


def test_the_python_snippets_run_without_a_gpu(tmp_path, monkeypatch):
    names = run_python(monkeypatch, tmp_path, "cpu")
    assert isinstance(names["volume"], np.ndarray)
    check(names, tmp_path)


def test_the_snippet_of_xarray_reads_the_section_that_it_names(tmp_path, monkeypatch):
    pytest.importorskip("xarray", reason="xarray is not installed: pip install xarray")
    names = run_python(monkeypatch, tmp_path, "cpu", xarray=True)
    source, spacing = read_omezarr(tmp_path / "demo-out/mosaic.ome.zarr")
    expected = source[round(100 / spacing[0])]
    np.testing.assert_array_equal(names["section"], expected)
    assert names["brightness"] == pytest.approx(expected.mean(dtype=np.float64), rel=1e-4)


def commands():
    """The lines of the README that run a command on an image."""
    lines = [line.partition("#")[0] for block in snippets("bash") for line in block.splitlines()]
    words = [shlex.split(line) for line in lines]
    return [one for one in words if one and one[0].startswith("linum-") and one[1:2] and one[1][0] != "-"]


def test_the_commands_run_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    spec = MosaicSpec(tiles=(2, 2), tile_shape=(64, 48, 48))
    write_mosaic("mosaic.ome.zarr", spec)
    write_mosaic("brain.ome.zarr", spec)
    Path("slices").mkdir()
    for number, one in enumerate(consecutive_slices(spec, 24)):
        write_mosaic(f"slices/slice_z{number:02}.ome.zarr", one)
    trimesh = pytest.importorskip("trimesh", reason="trimesh is not installed: pip install trimesh")
    trimesh.creation.box(bounds=[(0.1, 0.1, 0.1), (0.6, 0.5, 0.2)]).export("region.stl")  # mm
    heads = "fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm"
    (tmp_path / "shifts.csv").write_text(f"{heads}\n0,1,0,0,0,0\n")
    made = []
    for name, *words in commands():
        if "benchmark" in name:
            continue  # each has its own test
        assert load(name.replace("-", "_")).main(words) == 0, (name, words)
        made += [word for word in words[1:] if word.endswith((".ome.zarr", ".png"))]
    assert len(made) == 10
    for place in made:
        assert (tmp_path / place).exists()
        if place.endswith(".ome.zarr"):
            assert open_image(tmp_path / place).levels[0][...].any()


@pytest.mark.gpu
def test_the_python_snippets_run_on_a_gpu(tmp_path, monkeypatch):
    names = run_python(monkeypatch, tmp_path, "cuda")
    assert is_device_array(names["volume"])
    assert is_device_array(names["surface"])
    check(names, tmp_path)
