"""If this fails, a snippet of docs/reader.md does not run, or does something else than the page says."""

import re
from pathlib import Path

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError

PAGE = Path(__file__).parents[3] / "docs/reader.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not installed with the package")
def test_the_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    assert len(snippets) == 5
    for number, code in enumerate(snippets):
        exec(compile(code, f"reader.md, snippet {number}", "exec"), names)
        if number == 0:
            values = zarr.open_array("brain.zarr", mode="r")[...]  # before a later snippet breaks a chunk
    for crop, region in zip(names["crops"], names["regions"], strict=True):
        np.testing.assert_array_equal(crop, values[region])
    assert (names["stats"].boxes, names["stats"].chunks) == (4, 3)
    np.testing.assert_array_equal(names["stack"][0], values[:64, :64, :64])
    np.testing.assert_array_equal(names["stack"][1], values[64:, 64:, :64])
    assert isinstance(names["error"], ChunkError)
    assert "chunk (0, 0, 0)" in str(names["error"])
    assert "c/0/0/0" in str(names["error"])
    np.testing.assert_array_equal(names["rest"], values[32:])
