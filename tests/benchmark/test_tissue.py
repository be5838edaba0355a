"""The benchmark of tissue work: its cases are right, and its checks notice what is wrong."""

import json

import numpy as np
import pytest

from linumpy.benchmark.kernel_run import HEADER, KernelRequest, KernelResult, make_cases, row, run, wrong_results
from linumpy.benchmark.tissue import MAKERS
from scripts import linum_benchmark_tissue as script

SCALE = 0.06


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    (case,) = make_cases(MAKERS, np, SCALE, (name,))
    result = case.ours()
    assert case.name == name
    assert case.check(result) == ""
    spoilt = result.copy()
    spoilt[..., : max(1, spoilt.shape[-1] // 2)] = spoilt.max() + 3
    assert case.check(spoilt) != ""
    assert case.nbytes > 0
    assert 0 < case.peer_share <= 1
    case.peer()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"runs": 0}, ValueError, "runs=0"),
        ({"scale": 2.0}, ValueError, "scale=2.0"),
    ],
)
def test_requests_that_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        KernelRequest(**options)


def test_a_case_that_is_not_known():
    with pytest.raises(ValueError, match="'nothing' is unknown"):
        list(make_cases(MAKERS, np, SCALE, ("nothing",)))


def test_there_must_be_a_folder_for_the_json(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        KernelRequest(json=tmp_path / "no" / "out.json")


def result(**changes):
    values = {"reach": 10.0, "wrong": "", "ours_ms": (1.0, 2.0, 3.0), "peer_ms": (40.0,), "share_of_copy": 0.4}
    return KernelResult("focal-float32", (4, 5, 6), "float32", **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"peer_ms": (19.0,)}, "MISSED"),
        ({"reach": None}, ""),
        ({"reach": None, "copy_reach": 0.5}, "MISSED"),
        ({"reach": None, "copy_reach": 0.4}, "met"),
        ({"copy_reach": 0.5}, "MISSED"),
        ({"wrong": "it differs"}, "WRONG"),
    ],
)
def test_verdicts(changes, verdict):
    one = result(**changes)
    assert one.verdict == verdict
    assert (verdict or "focal-float32") in row(one)
    assert wrong_results([one, result()]) == (verdict == "WRONG")
    assert len(row(one)) <= 122 + len("  MISSED")
    assert "linumpy" in HEADER


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(SystemExit) as done:
        script.main([])
    assert done.value.code == 2
    assert capsys.readouterr().err == "linum-benchmark-tissue: error: there is none\n"


def test_help_and_bad_arguments(capsys):
    for arguments, code, text in [
        (["--help"], 0, "--only"),
        (["--only", "x"], 2, "'x'"),
        (["--runs", "0"], 2, "runs=0"),
    ]:
        with pytest.raises(SystemExit) as done:
            script.main(arguments)
        out = capsys.readouterr()
        assert done.value.code == code
        assert text in out.out + out.err


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_all_cases_on_a_device(tmp_path, capsys):
    results = run(KernelRequest(runs=2, scale=0.25, json=tmp_path / "out.json"), MAKERS)
    assert [one.name for one in results] == list(MAKERS)
    assert [one.wrong for one in results] == [""] * len(MAKERS)
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == len(MAKERS)
    assert "interface-depth-first" in capsys.readouterr().out
