"""If this fails, a notebook does not run from top to bottom, or does not find the truth."""

import base64
import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from linumpy.device import DEVICE_VARIABLE, is_device_array

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/quickstart.ipynb"
FIELD = NOTEBOOK.with_name("radiance_field.ipynb")
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="the notebooks are not installed with the package")


def code_cells(notebook=NOTEBOOK):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def run_all(notebook=NOTEBOOK):
    """Run the code cells one after another, as a kernel does; returns the names that they leave."""
    from matplotlib import pyplot

    before = matplotlib.get_backend()
    pyplot.switch_backend("agg")
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(notebook)):
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
        names["figures"] = [pyplot.figure(number) for number in pyplot.get_fignums()]
        for picture in names["figures"]:
            picture.canvas.draw()
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)
    return names


def check(names):
    assert np.nanmedian(np.abs(names["found"] - names["truth"])) < 0.25
    assert abs(np.nanmedian(names["found"] - names["truth"])) < 0.1
    assert names["isotropic"].shape == (56, 192, 192)
    assert len(names["figures"]) == 4
    for steps in names["timed"].values():
        assert list(steps) == ["read", "resample", "surface"]
        assert all(seconds > 0 for seconds in steps.values())
    assert names["written_spacing"] == (10.0, 10.0)
    assert not Path(names["folder"].name).exists()


def test_it_runs_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    names = run_all()
    check(names)
    assert isinstance(names["surface"], np.ndarray)
    assert list(names["timed"]) == ["cpu"]
    assert "working on cpu" in capsys.readouterr().out


@pytest.mark.gpu
def test_it_runs_on_a_gpu_unchanged(monkeypatch, cupy):
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    crossed, asnumpy = [], cupy.asnumpy

    def counted(array, *arguments, **options):
        crossed.append(array.ndim)
        return asnumpy(array, *arguments, **options)

    monkeypatch.setattr(cupy, "asnumpy", counted)
    names = run_all()
    check(names)
    assert all(is_device_array(names[name]) for name in ("volume", "isotropic", "surface", "depth_um"))
    assert list(names["timed"]) == ["cpu", "cuda:0"]
    assert 3 not in crossed  # pictures and maps came to the host, volumes did not


def check_field(names):
    """Of the batches, and of a picture that the field was not fitted to."""
    assert np.mean(names["psnr"][-10:]) > 33
    assert names["unseen"] > 33
    assert names["per_ray"][-1] < 0.9 * names["per_ray"][0]
    assert len(names["figures"]) == 4
    water = names["truth"][..., 3] == 0
    assert float(names["fitted"][..., 3][water].mean()) < 0.6
    assert float(names["fitted"][..., 3][~water].mean()) > 3


@pytest.mark.slow
def test_a_field_is_fitted_on_the_cpu(monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    check_field(run_all(FIELD))


@pytest.mark.gpu
def test_a_field_is_fitted_on_a_gpu(monkeypatch, cupy):
    monkeypatch.setenv(DEVICE_VARIABLE, "cuda")
    names = run_all(FIELD)
    check_field(names)
    assert is_device_array(names["fitted"])


@pytest.mark.parametrize("notebook", [NOTEBOOK, FIELD], ids=lambda one: one.stem)
def test_what_is_saved_is_a_clean_run_with_pictures(notebook):
    cells = code_cells(notebook)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data"}
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} == {"stdout"}
    pictures = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(pictures) == 4
    assert all(base64.b64decode(one).startswith(b"\x89PNG") for one in pictures)
    assert notebook.stat().st_size < 2**21
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "/tmp" not in printed
    assert "/home" not in printed
