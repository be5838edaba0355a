"""The snippets of the README run as they stand, one after another, here and on a GPU unchanged."""

import re
from pathlib import Path

import numpy as np
import pytest

from linumpy.device import DEVICE_VARIABLE, is_device_array, to_host
from linumpy.io.ome import open_image, read_omezarr
from linumpy.io.synthetic import SIZES, surface_depth, write_mosaic

README = Path(__file__).parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="the README is not installed with the package")


def snippets(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run_python(monkeypatch, folder, device):
    monkeypatch.chdir(folder)
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    write_mosaic("demo-out/mosaic.ome.zarr", SIZES["small"])  # what ``make demo`` leaves
    names = {"__name__": "__main__"}
    for number, code in enumerate(snippets("python")):
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


def test_the_python_snippets_run_without_a_gpu(tmp_path, monkeypatch):
    names = run_python(monkeypatch, tmp_path, "cpu")
    assert isinstance(names["volume"], np.ndarray)
    check(names, tmp_path)


@pytest.mark.gpu
def test_the_python_snippets_run_on_a_gpu(tmp_path, monkeypatch):
    names = run_python(monkeypatch, tmp_path, "cuda")
    assert is_device_array(names["volume"])
    assert is_device_array(names["surface"])
    check(names, tmp_path)
