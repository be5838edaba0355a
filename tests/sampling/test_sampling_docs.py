"""If this fails, a snippet of docs/sampling.md does not run, or the example does not learn."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_snippets_run():
    names = {}
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / "sampling.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(found) == 3
    for code in found:
        exec(compile(code, "docs/sampling.md", "exec"), names)
    assert names["slopes"].shape == (1, 3, 500)
    assert names["values"].shape == (1, 1000)


@pytest.mark.gpu
def test_the_example_learns(tmp_path):
    pytest.importorskip("torch")
    from linumpy.testing.synthetic import SIZES, write_mosaic

    write_mosaic(tmp_path / "mosaic.ome.zarr", SIZES["small"])
    spec = importlib.util.spec_from_file_location("fit_volume", DOCS / "examples" / "fit_volume.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    errors = module.fit(str(tmp_path / "mosaic.ome.zarr"), 200, 2**14)
    assert sum(errors[-10:]) / 10 < 0.8 * sum(errors[:3]) / 3
