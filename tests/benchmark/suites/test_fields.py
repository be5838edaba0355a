"""If this fails, times of fields are taken of wrong samples, or on other data than the table says."""

import numpy as np
import pytest

from linumpy.benchmark.runner import Settings, run_cases
from linumpy.benchmark.suites.kernels import fields


@pytest.mark.parametrize("name", list(fields.MAKERS))
def test_a_case_is_right(name, monkeypatch):
    monkeypatch.setattr(fields, "_CHECKED", 512)
    (result,) = run_cases([fields.MAKERS[name](np, 0.04)], Settings(1))
    assert result.ours.verdict == "ok"
    assert result.case.nbytes == 2**14 * 16


def test_wrong_values_are_noticed():
    made = fields.MAKERS["exastitch"](np, 0.04)
    entry = made.entries[0]
    with entry.prepare() as prepared:
        good = prepared.call().copy()
        assert prepared.check(good) == ""
        assert "values differ" in prepared.check(good + np.float32(0.1))


def test_the_data_are_what_the_cases_say():
    uniform, levels = fields._bricks(0.2, 1), fields._bricks(0.25, 3)
    assert uniform.domain[1].tolist() == [9 * 16] * 3
    widths = 1 / levels._records["cells"]
    assert sorted(set(widths.tolist())) == [1, 2, 4]
    assert fields._sparse(0.25).shape == (256, 256, 256)
    coords = np.random.default_rng(0).random((2000, 3), np.float32)
    for field in (uniform, levels, fields._mesh(0.1)):
        out = np.empty((1, len(coords)), np.float32)
        field.decode(coords, out)
        assert np.isfinite(out).mean() > 0.7
