"""If this fails, times of batches are taken of wrong crops, or files are left behind."""

import json
import threading
import time
from dataclasses import replace

import pytest
import zarr

from linumpy.benchmark.cases import Mark
from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites import stream
from linumpy.benchmark.suites.stream import CALLERS, Workload, stream_cases

SMALL = Workload("small", (32, 32, 32), (8, 8, 16), (16, 16, 32), (6, 10, 12), 2, 3, 6, 3.0, Mark(0.9))
AUGMENTED = replace(SMALL, variants=("cached", "augmented"))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(stream, "WORKLOADS", {"W1a": SMALL, "W2": AUGMENTED})


def measure(folder, output=None, **options):
    options = {"only": ("W1a", "W2"), **options}
    with stream_cases(folder=folder, buffers=2**-8, use_gpu=False, **options) as (where, cases):
        return run(cases, Settings(1), output, where)


@pytest.mark.parametrize("dtype", ["bf16", "stored"])
def test_a_small_run(tmp_path, capsys, dtype):
    (tmp_path / "work").mkdir()
    one, two = measure(tmp_path / "work", Output(tmp_path / "out.json"), dtype=dtype)
    assert one.case.nbytes == 2 * 6 * 10 * 12 * 3 * 6
    found = {entry.name: entry.verdict for entry in two.entries}
    assert found == dict.fromkeys(["stream", "cached", "augmented", "tensorstore", "zarr"], "ok")
    assert all(entry.seconds for entry in two.entries)
    assert one.verdict == ""  # not judged
    assert list((tmp_path / "work").iterdir()) == []
    assert len(json.loads((tmp_path / "out.json").read_text())["cases"]) == 2
    assert "bound by" in capsys.readouterr().out


def test_more_arrays_than_are_encoded_and_open(tmp_path, monkeypatch):
    """They are copies, beside the same workload of few arrays; each crop is checked where it was drawn."""
    many = replace(
        SMALL, arrays=9, encoded_arrays=2, open_arrays=3, variants=(), mark=Mark(0.8, ("W1a: small/stream",))
    )
    monkeypatch.setitem(stream.WORKLOADS, "M", many)
    configs, plain = [], stream.Config
    monkeypatch.setattr(stream, "Config", lambda **options: configs.append(plain(**options)) or configs[-1])
    few, result = measure(tmp_path, only=("W1a", "M"))
    assert [entry.verdict for entry in result.entries] == ["ok"] * 3
    assert "9 array(s)" in result.case.description[0]
    assert {config.n_zarrs_meta_cache for config in configs} == {64, 3}
    assert result.marks[0].got == pytest.approx(result.ours.rate / few.ours.rate)


def test_copied_arrays_hold_the_voxels_of_others(tmp_path):
    load = replace(SMALL, arrays=5, encoded_arrays=2)
    paths, crops = stream.make_arrays(load, tmp_path, 1.0, None)
    voxels = [zarr.open_array(path)[...] for path in paths]
    assert [bool((voxels[0] == other).all()) for other in voxels] == [True, False, True, False, True]
    assert {crop.uri for crop in crops} <= set(paths)
    assert len(set(paths)) == 5


@pytest.mark.parametrize("name", ["stream", "zarr"])
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, name):
    if name == "stream":
        plain = stream.Pipeline.batches
        monkeypatch.setattr(stream.Pipeline, "batches", lambda self, n: iter(_spoilt(plain(self, n))))
    else:
        monkeypatch.setattr(stream, "_read_batches", lambda *arguments: _zeros(arguments[0]))
    (result,) = measure(tmp_path, only=("W1a",))
    entry = result.entry(name)
    assert entry.verdict == "WRONG"
    assert not entry.seconds


def test_a_busy_caller(tmp_path, capsys):
    """Each case counts one batch; what is beside it is there, and gone at the end."""
    results = measure(tmp_path, Output(tmp_path / "out.json"), busy=True, only=("W1a",))
    assert [one.case.name for one in results] == [f"W1a, {caller.title}" for caller in CALLERS]
    nbytes = 2 * 6 * 10 * 12 * 3
    for caller, one in zip(CALLERS, results, strict=True):
        assert one.case.nbytes == nbytes
        names = ["stream", "tensorstore", "zarr"]
        assert {entry.name: entry.verdict for entry in one.entries} == dict.fromkeys(names, "ok")
        assert all(entry.median >= caller.step_seconds for entry in one.entries)
        (mark,) = one.marks
        assert mark.met is None  # not judged
        assert mark.mark.least == (caller.least or round(nbytes / 2**30 / caller.batch_seconds, 2))
    document = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [(case["step_seconds"], case["busy_threads"]) for case in document[:5]] == [
        (0, 0), (0.005, 0), (0.010, 0), (0, 1), (0, 2)
    ]  # fmt: skip
    assert "beside a busy thread" in capsys.readouterr().out


@pytest.mark.parametrize("caller", CALLERS, ids=lambda one: one.title)
def test_what_a_caller_does(caller):
    begin, count = time.perf_counter(), threading.active_count()
    with caller.busy():
        assert threading.active_count() == count + caller.threads
        caller.step()
    assert time.perf_counter() - begin >= caller.step_seconds
    assert threading.active_count() == count


def _spoilt(batches):
    for batch in batches:
        batch.array[1, 2, 3, 4] ^= 0x4000
        yield batch


def _zeros(work):
    import numpy as np

    return np.zeros((work.workload.batch, *work.workload.crop), "u2")


def test_the_script(tmp_path, capsys):
    assert main(["stream", "--only", "W2", "--batches", "2", "--folder", str(tmp_path), "--buffers", "0.01"]) == 0
    assert "linumpy.stream, augmented" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--scale 2", "--scale 2.0: a part"),
        ("--scale nan", "--scale nan: a part"),
        ("--batches 1", "--batches 1: 2 at least"),
        ("--lookahead 0", "--lookahead 0: 1 at least"),
        ("--buffers -1", "buffers of -1.0 GiB"),
        ("--buffers nan", "buffers of nan GiB"),
        ("--folder /nowhere", "there is no folder '/nowhere'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_arrays_are_made(words, said, capsys):
    with pytest.raises(SystemExit):
        main(["stream", *words.split()])
    assert said in capsys.readouterr().err
