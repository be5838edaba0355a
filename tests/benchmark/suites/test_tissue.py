"""If this fails, times of work on tissue are taken of wrong results, unnoticed."""

import importlib.util
import json

import numpy as np
import pytest

from linumpy.benchmark.cases import kernel_cases
from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.kernels.tissue import MAKERS

SCALE = 0.06
SIMPLE_ITK = importlib.util.find_spec("SimpleITK")


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    case = MAKERS[name](np, SCALE)
    ours, peer = case.entries
    with ours.prepare() as one:
        result = one.call()
        assert one.check(result) == ""
        spoilt = result.copy()
        spoilt[..., : max(1, spoilt.shape[-1] // 2)] = spoilt.max() + 3
        assert one.check(spoilt) != ""
    with peer.prepare() as other:
        other.call()
    assert case.name == name
    assert case.nbytes > 0
    assert 0 < peer.share <= 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(SystemExit) as done:
        main(["tissue"])
    assert done.value.code == 2
    assert capsys.readouterr().err == "linum-benchmark tissue: error: there is none\n"


def test_help_and_bad_arguments(capsys):
    for arguments, code, text in [
        (["--help"], 0, "--only"),
        (["--only", "x"], 2, "'x'"),
        (["--runs", "0"], 2, "--runs 0"),
    ]:
        with pytest.raises(SystemExit) as done:
            main(["tissue", *arguments])
        out = capsys.readouterr()
        assert done.value.code == code
        assert text in out.out + out.err


@pytest.mark.gpu
def test_all_cases_on_a_device(tmp_path, capsys):
    output = Output(tmp_path / "out.json")
    _, *results = run(kernel_cases(MAKERS, 0.25), Settings(2), output)
    assert [one.case.name for one in results] == list(MAKERS)
    for one in results:
        ours, *peers = (entry.verdict for entry in one.entries)
        assert ours == "ok", one.case.name
        assert all(verdict == "ok" or (verdict == "cannot run" and SIMPLE_ITK is None) for verdict in peers)
    assert len(json.loads(output.json.read_text())["cases"]) == 1 + len(MAKERS)
    assert "interface-depth-first" in capsys.readouterr().out
