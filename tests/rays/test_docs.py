"""If this fails, the snippet of docs/rays.md does not run as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs/rays.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not installed with the package")
def test_the_snippet_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(code, PAGE.name, "exec"), names)
    samples = names["samples"]
    assert samples.n_rays > 500
    # A field of density 1: opacity follows from the length of each ray inside the box.
    lengths = np.bincount(np.repeat(np.arange(len(samples.n_steps)), samples.n_steps), samples.dt)
    assert np.allclose(names["rgba"][:, 3], 1 - np.exp(-lengths), atol=1e-5)
    assert 0 < names["loss"] < 1
