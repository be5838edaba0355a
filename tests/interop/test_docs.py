"""If this fails, a snippet of docs/interop.md does not run as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

from linumpy.device import DEVICE_VARIABLE
from linumpy.write.writer import write_omezarr

PAGE = Path(__file__).parents[2] / "docs/interop.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not installed with the package")


def snippets():
    if not PAGE.exists():
        return []
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", snippets(), ids=range(len(snippets())))
def test_a_snippet_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    values = np.random.default_rng(0).integers(0, 60_000, (48, 96, 100)).astype("u2")
    write_omezarr("brain.ome.zarr", values, (10, 5, 5), chunks=(16, 32, 32), levels=3)
    names = {"__name__": "__main__"}
    exec(compile(code, "docs/interop.md", "exec"), names)
    if "accelerate" in code:
        np.testing.assert_array_equal(names["crop"], values[10:40, 20:84, 20:84])
