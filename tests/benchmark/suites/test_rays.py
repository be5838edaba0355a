"""If this fails, times of rays are taken of wrong samples, unnoticed."""

from dataclasses import replace

import numpy as np
import pytest

from linumpy.benchmark.cases import kernel_cases
from linumpy.benchmark.command import main, run
from linumpy.benchmark.runner import UNAVAILABLE, Settings
from linumpy.benchmark.suites.kernels.rays import MAKERS


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    case = MAKERS[name](np, 0.002)
    with case.entries[0].prepare() as one:
        result = one.call()
        assert one.check(result) == ""
        moved = result.positions.copy()
        moved[5] += 0.01
        assert "a position differs by 0.01" in one.check(replace(result, positions=moved))
        fewer = result.n_steps.copy()
        fewer[np.flatnonzero(fewer)[3]] -= 1
        assert "1 of " in one.check(replace(result, n_steps=fewer))
    assert case.name == name
    assert 20 < case.facts["samples"] / case.facts["rays"] < 96  # all fit
    assert case.nbytes > 0


def test_nerfacc_is_a_peer_where_it_can_be(capsys):
    cases = (replace(one, marks=()) for one in kernel_cases(MAKERS, 0.002, ("march",), np))
    _, result = run(cases, Settings(1))
    nerfacc = result.entry("nerfacc")
    assert nerfacc.verdict == UNAVAILABLE
    assert nerfacc.note
    assert "GiB/s is" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(SystemExit) as done:
        main(["rays"])
    assert done.value.code == 2
    assert capsys.readouterr().err == "linum-benchmark rays: error: there is none\n"


@pytest.mark.gpu
def test_all_cases_on_a_device():
    _, *results = run(kernel_cases(MAKERS, 0.1), Settings(2))
    assert [one.case.name for one in results] == list(MAKERS)
    assert all(one.ours.verdict == "ok" for one in results)
