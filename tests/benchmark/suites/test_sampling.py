"""If this fails, times of samplers are taken of wrong samples, unnoticed."""

import json

import numpy as np
import pytest

from linumpy.benchmark.cases import kernel_cases
from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.kernels.sampling import MAKERS, table
from linumpy.benchmark.suites.paging import Larger, paging_cases, volume_cases


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    case = MAKERS[name](np, 0.05)
    (ours,) = case.entries
    with ours.prepare() as one:
        coords, values = one.call()
        assert one.check((coords, values)) == ""
        assert one.check((coords, values + np.ptp(values) * np.float32(1e-5))) != ""
        if name.startswith("sample"):
            same = np.repeat(coords[:1], len(coords), 0), np.repeat(values[:, :1], len(coords), 1)
            assert "means" in one.check(same)
    assert case.name == name
    assert case.nbytes == 16 * len(coords)


def test_files_larger_than_memory(tmp_path):
    for case in volume_cases(Larger(tmp_path, 128, 64, 2**13), use_gpu=False):
        assert [entry.role for entry in case.entries] == ["ours", "peer"]
        for entry in case.entries:
            with entry.prepare() as one:
                coords, values = one.call()
                assert one.check((coords, values)) == ""
                assert one.check((coords, values + np.float32(1e-4))) != ""


def test_sizes(tmp_path, monkeypatch):
    volumes = []
    monkeypatch.setattr("linumpy.benchmark.suites.paging.volume_cases", lambda volume, use_gpu: volumes.append(volume))
    with paging_cases(gib=8, folder=tmp_path):
        assert volumes[0].shape == (4096, 1024, 1024)
        assert volumes[0].folder.parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_samples_a_second(capsys):
    results = run(kernel_cases(MAKERS, 0.05, ["sample-iid"], np), Settings(1))
    text = table(results)
    assert "sample-iid" in text
    assert " 16 " in text
    assert "linumpy" in text


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    with pytest.raises(SystemExit) as done:
        main(["sampling"])
    assert done.value.code == 2
    assert capsys.readouterr().err == "linum-benchmark sampling: error: there is none\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["sampling", "--help"], 0, "--scale"),
        (["sampling", "--only", "x"], 2, "'x'"),
        (["paging", "--help"], 0, "--gib"),
        (["paging", "--scale", "0.5"], 2, "--scale"),
        (["paging", "--gib", "-1"], 2, "a volume of -1.0 GiB"),
        (["paging", "--gib", "1", "--folder", "/nowhere"], 2, "there is no folder '/nowhere'"),
    ],
)
def test_help_and_bad_arguments(arguments, code, text, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    out = capsys.readouterr()
    assert done.value.code == code
    assert text in out.out + out.err


@pytest.mark.gpu
def test_all_cases_on_a_device(tmp_path):
    output = Output(tmp_path / "out.json")
    _, *results = run(kernel_cases(MAKERS, 0.25), Settings(2), output)
    assert [one.case.name for one in results] == list(MAKERS)
    for one in results:
        assert {entry.verdict for entry in one.entries} == {"ok"}, table((one,))
    assert len(json.loads(output.json.read_text())["cases"]) == len(results) + 1
