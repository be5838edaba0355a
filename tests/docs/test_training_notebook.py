"""If this fails, the notebook on training does not run, or does not learn.

The 3-D U-Net in it needs PyTorch, which the test environment does not install; where PyTorch is there, it is what runs.
"""

import json
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from linumpy.device import DEVICE_VARIABLE

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/training.ipynb"
pytestmark = pytest.mark.skipif(not NOTEBOOK.exists(), reason="the notebooks are not installed with the package")


def code_cells():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_learns_where_the_tissue_is(monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    before = matplotlib.get_backend()
    pyplot.switch_backend("agg")
    names = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells()):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
            names["SECONDS"] = 1.5
        assert len(pyplot.get_fignums()) == 3
    finally:
        pyplot.close("all")
        pyplot.switch_backend(before)
    losses = names["losses"]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert 0.5 < names["dice"] <= 1
    assert all(set(np.unique(mask)) <= {0, 1} for _, mask in names["shown"])
    assert not Path(names["folder"].name).exists()


def test_what_is_saved_is_a_clean_run_with_pictures():
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "Dice coefficient" in printed
    assert "/tmp" not in printed
    assert NOTEBOOK.stat().st_size < 2**21
