"""If this fails, the example that fits a network to a volume does not learn."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs/examples/fit_volume.py"


@pytest.mark.gpu
def test_the_example_learns(tmp_path):
    pytest.importorskip("torch")
    from linumpy.testing.synthetic import SIZES, write_mosaic

    write_mosaic(tmp_path / "mosaic.ome.zarr", SIZES["small"])
    spec = importlib.util.spec_from_file_location("fit_volume", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    errors = module.fit(str(tmp_path / "mosaic.ome.zarr"), 200, 2**14)
    assert sum(errors[-10:]) / 10 < 0.8 * sum(errors[:3]) / 3
