"""If this fails, a benchmark does not run, or times a wrong result without a word."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from benchmarks import __main__ as command
from linumpy.benchmark import timing
from tests.support.budget import some

#: Options of a small run on the CPU.
SMALL = {
    "read": ["--suite", "raw", "--scale", "0.06", "--only", "flat", "linumpy-auto", "tensorstore", "zarr-gpu"],
    "regions": ["--scale", "0.1", "--only", "zstd shards"],
    "stream": ["--scale", "0.06", "--batches", "2", "--only", "F", "W2"],
    "remote": ["--scale", "0.06", "--only", "zstd shards", "--latency", "1"],
    "latency": ["--scale", "0.06", "--only", "zstd shards", "--latency", "0"],
    "verify": ["--scale", "0.06", "--only", "zstd shards"],
    "write": ["--scale", "0.1"],
    "resampling": ["--scale", "0.03"],
    "tissue": ["--scale", "0.06"],
    "correction": ["--scale", "0.06"],
    "scripts": ["--scale", "0.125", "--gib", "0.4"],
    "pipeline": ["--only", "read"],
    "sampling": ["--scale", "0.06"],
    "paging": ["--scale", "0.02"],
    "rays": ["--scale", "0.01"],
    "voxel": ["--scale", "0.06"],
    "fields": ["--scale", "0.06"],
}


def spoilt(result):
    """Return a result with other values in its first half; None if it is not made of arrays."""
    if isinstance(result, tuple):
        return (*result[:-1], spoilt(result[-1]))
    if dataclasses.is_dataclass(result) and hasattr(result, "positions"):  # samples along rays
        return dataclasses.replace(result, positions=spoilt(result.positions))
    if not isinstance(result, np.ndarray) or result.ndim == 0:
        return None
    out = result.copy()
    half = out[..., : max(1, out.shape[-1] // 2)]
    if out.dtype.kind == "f":
        half[...] = np.nanmax(out) + 3
    else:
        half[...] = ~half if out.dtype == bool else half + np.iinfo(out.dtype).max // 3
    return out


@pytest.fixture
def unnoticed(monkeypatch):
    """Names of rows whose check takes a spoilt result for a right one."""
    found, timed = [], timing.Case._check

    def check(case, work):
        def noticed(result):
            wrong, other = work.check(result), spoilt(result)
            if other is not None and not work.check(other):
                found.append(f"{case.name}: {work.name}")
            return wrong

        return timed(case, dataclasses.replace(work, check=work.check and noticed, warm_ups=0))

    monkeypatch.setattr(timing.Case, "_check", check)
    return found


@pytest.mark.parametrize(
    "name", some(command.MODULES, lambda name: name not in ("remote", "pipeline", "paging", "correction"))
)
def test_a_suite_checks_and_times_every_case(tmp_path, capsys, unnoticed, name):
    if name == "voxel":
        pytest.importorskip("warp", reason="voxel operations need Warp")
    file = tmp_path / "out.json"
    words = [name, *SMALL[name], "--device", "cpu", "--runs", "1", "--json", file, "--folder", tmp_path]
    assert command.main(list(map(str, words))) == 0, capsys.readouterr()
    cases = json.loads(file.read_text())["cases"]
    assert (len(cases) > 0, unnoticed) == (True, [])
    for case in cases:
        ours = [row for row in case["rows"] if row["name"].startswith("linumpy") and row["name"] != "linumpy-kvikio"]
        assert ours, case["name"]
        assert all(row["verdict"] == "ok" and row["median"] > 0 for row in ours), ours
        assert not [row for row in case["rows"] if row["verdict"] not in ("ok", "cannot run")], case["name"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("words", [["--help"], ["read", "--help"], ["tissue", "--version"]])
def test_help(capsys, words):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: linum-benchmark ", "linum-benchmark tissue "))


def test_what_is_refused_in_one_line(capsys, tmp_path):
    for words, text in [
        (["tissue", "--device", "cpu", "--runs", "0"], "--runs 0"),
        (["tissue", "--device", "cpu", "--scale", "2"], "--scale 2"),
        (["tissue", "--only", "x"], "'x'"),
        (["nothing"], "'nothing'"),
        ([], "SUITE"),
        (["read"], "--generate"),
        (["read", str(tmp_path), "--dtype", "uint8"], "--generate"),
        (["read", "--suite", "raw", "--folder", str(tmp_path / "none")], "there is no folder"),
        (["read", str(tmp_path / "no.zarr")], "no.zarr"),
    ]:
        with contextlib.suppress(SystemExit):
            assert command.main(words) == 2, words
        error = capsys.readouterr().err
        assert text in error
        assert error.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resampling", "tissue", "sampling", "rays", "read", "regions", "write"])
def test_a_suite_on_a_device(name):
    assert command.main([name, *SMALL[name], "--scale", "0.2", "--runs", "1", "--device", "cuda"]) == 0
