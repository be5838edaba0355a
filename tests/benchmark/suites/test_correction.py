"""If this fails, times of corrections are taken of wrong results, unnoticed."""

import numpy as np
import pytest

from linumpy.benchmark.cases import kernel_cases
from linumpy.benchmark.command import Output, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.kernels.correction import MAKERS


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    ours, peer = MAKERS[name](np, 0.12).entries
    with ours.prepare() as one:
        result = one.call()
        assert one.check(result) == ""
        assert one.check(result * np.linspace(1, 2, result.shape[-1], dtype="f4")) != ""
    with peer.prepare() as other:
        other.call()


@pytest.mark.gpu
def test_all_cases_on_a_device(tmp_path):
    _, *results = run(kernel_cases(MAKERS, 0.25), Settings(2), Output(tmp_path / "out.json"))
    assert [entry.verdict for one in results for entry in one.entries] == ["ok"] * 2 * len(MAKERS)
