"""Batches of crops, timed: all ways read the same, what is wrong is not timed, and nothing is left behind."""

import json

import pytest

from linumpy.benchmark.command import Output, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites import stream
from linumpy.benchmark.suites.stream import StreamRequest, Workload, stream_cases
from scripts import linum_benchmark_stream as script

SMALL = Workload("small", (32, 32, 32), (8, 8, 16), (16, 16, 32), (6, 10, 12), 2, 3, 6, 3.0, 1.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(stream, "WORKLOADS", {"W1a": SMALL, "W2": SMALL})


def measure(folder, output=None, **options):
    request = StreamRequest(("W1a", "W2"), folder, buffers=2**-8, use_gpu=False, **options)
    with stream_cases(request) as (where, cases):
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


@pytest.mark.parametrize("name", ["stream", "zarr"])
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, name):
    if name == "stream":
        plain = stream.Pipeline.batches
        monkeypatch.setattr(stream.Pipeline, "batches", lambda self, n: iter(_spoilt(plain(self, n))))
    else:
        monkeypatch.setattr(stream, "_read_batches", lambda *arguments: _zeros(arguments[0]))
    result = measure(tmp_path)[0]
    entry = result.entry(name)
    assert entry.verdict == "WRONG"
    assert not entry.seconds


def _spoilt(batches):
    for batch in batches:
        batch.array[1, 2, 3, 4] ^= 0x4000
        yield batch


def _zeros(work):
    import numpy as np

    return np.zeros((work.load.batch, *work.load.crop), "u2")


def test_the_script(tmp_path, capsys):
    assert script.main(["--only", "W2", "--batches", "2", "--folder", str(tmp_path), "--buffers", "0.01"]) == 0
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
        script.main(words.split())
    assert said in capsys.readouterr().err
