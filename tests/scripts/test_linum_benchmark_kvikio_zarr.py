"""If this fails, the benchmark's command line writes or refuses something else than it says."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

import linumpy
from linumpy.benchmark.cases import Entry, ready
from linumpy.benchmark.shared.read_paths import PATHS
from linumpy.benchmark.suites import reading
from linumpy.benchmark.suites.reading import SUITES

ROOT = Path(linumpy.__file__).parents[1]
SCRIPT = ROOT / "scripts/linum_benchmark_kvikio_zarr.py"
HOST = ["flat", "zarr-numpy", "tensorstore", "zarrs"]
SMALL = ["--shape", "20", "24", "28", "--chunks", "8", "8", "8", "--dtype", "uint16", "--runs", "2"]


@pytest.fixture
def main():
    """The script's ``main``, whatever the folder that the tests run in."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("linum_benchmark_kvikio_zarr", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *words: module.main([str(word) for word in words])


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda device_id=None: "no wool in this machine")
    monkeypatch.setattr("linumpy.benchmark.shared.read_paths.why_no_cuda", lambda: "no wool in this machine")
    monkeypatch.setattr("linumpy.benchmark.suites.reading.why_no_cuda", lambda: "no wool in this machine")
    monkeypatch.setattr("linumpy.benchmark.runner.why_no_cuda", lambda: "no wool in this machine")


@pytest.fixture
def fewer_chunks(monkeypatch):
    """The raw suite with a quarter of its chunks, and still more shards than one."""
    specs = (replace(spec, shape=(spec.shape[0] // 2, spec.shape[1] // 2, spec.shape[2])) for spec in SUITES["raw"])
    monkeypatch.setitem(SUITES, "raw", tuple(specs))


def run_script(*words, **environment):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def test_the_script_runs_by_itself_and_its_help_is_its_docstring():
    done = run_script("--help")
    assert done.returncode == 0
    assert "Time reading a Zarr array" in done.stdout
    options = "--generate --shape --chunks --shards --dtype --codec --runs --cold --warm --only --json --plot --suite"
    for word in [*options.split(), "--scale", *PATHS]:
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_a_store_is_made_timed_and_described(main, tmp_path, capsys, no_gpu):
    out = tmp_path / "out"
    out.mkdir()
    code = main("--generate", tmp_path / "made", *SMALL, "--codec", "zstd", "--cold",
                "--json", out / "a.json", "--plot", out / "a.png")  # fmt: skip
    assert code == 0
    text = capsys.readouterr().out
    assert "on the host only (no wool in this machine)" in text
    assert "20×24×28 uint16, chunks 8×8×8, codecs zstd" in text
    content = json.loads((out / "a.json").read_text())
    assert content["settings"]["cache"] == "cold"
    assert content["hardware"]["why_no_gpu"] == "no wool in this machine"
    assert "--codec zstd" in content["command"]
    (case,) = content["cases"]
    verdicts = {path["name"]: path["verdict"] for path in case["entries"]}
    assert list(verdicts) == list(PATHS)
    assert {verdicts[name] for name in HOST} <= {"ok", "cannot run"}  # a peer may be missing
    assert verdicts["flat"] == verdicts["zarr-numpy"] == "ok"
    assert all(verdicts[name] == "cannot run" for name in set(PATHS) - set(HOST))
    assert all(len(path["seconds"]) == 2 for path in case["entries"] if path["verdict"] == "ok")
    assert (out / "a.png").read_bytes().startswith(b"\x89PNG")
    (store,) = (tmp_path / "made").iterdir()  # the store stays, the flat file went
    assert zarr.open_array(store).shape == (20, 24, 28)


def test_an_array_that_is_there_is_timed_and_left_alone(main, tmp_path, capsys, no_gpu):
    data = np.arange(600, dtype="f4").reshape(20, 30)
    zarr.create_array(tmp_path / "a.zarr", shape=(20, 30), chunks=(7, 7), dtype="f4")[...] = data
    assert main(tmp_path / "a.zarr", "--runs", "1", "--only", "zarr-numpy", "flat") == 0
    text = capsys.readouterr().out
    assert "a.zarr" in text
    assert "zarr → NumPy" in text
    assert "tensorstore →" not in text
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "a.zarr")[...], data)
    assert [file.name for file in tmp_path.iterdir()] == ["a.zarr"]


def test_the_suite_runs_small_in_a_folder_that_goes_away(main, tmp_path, capsys, no_gpu, fewer_chunks, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main("--suite", "raw", "--scale", "0.0625", "--runs", "1", "--only", "flat", "zarr-numpy") == 0
    text = capsys.readouterr().out
    assert [spec.name in text for spec in SUITES["raw"]] == [True] * 4
    assert list(tmp_path.iterdir()) == []


def test_the_suite_can_stay_in_a_folder(main, tmp_path, no_gpu, fewer_chunks, monkeypatch):
    monkeypatch.setitem(SUITES, "raw", SUITES["raw"][:2])
    words = ("--suite", "raw", "--scale", "0.0625", "--runs", "1", "--only", "zarr-numpy", "--generate", tmp_path)
    assert main(*words) == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_a_wrong_result_ends_with_1_and_is_told(main, tmp_path, capsys, no_gpu, monkeypatch):
    def entries(stored, gpu):
        return (Entry("zarr-numpy", "a liar", ready(lambda: np.zeros(stored.shape, stored.dtype))),)

    monkeypatch.setattr(reading, "read_entries", entries)
    assert main("--generate", tmp_path / "made", *SMALL, "--json", tmp_path / "a.json") == 1
    told = capsys.readouterr()
    assert "a liar                        WRONG: voxel (0, 0, 0) is 0, not" in told.out
    assert "1 results were WRONG or failed" in told.err
    (path,) = json.loads((tmp_path / "a.json").read_text())["cases"][0]["entries"]
    assert (path["verdict"], path["seconds"]) == ("WRONG", [])


def made(tmp_path):
    zarr.create_array(tmp_path / "a.zarr", shape=(8,), chunks=(4,), dtype="f4")
    (tmp_path / "text").write_text("no array")
    return tmp_path


BAD = {
    "nothing": ([], "give one of ARRAY"),
    "two sources": (["{}/a.zarr", "--suite", "raw"], "give one of ARRAY"),
    "missing array": (["{}/nowhere.zarr"], "nowhere.zarr"),
    "no array": (["{}/text"], "text"),
    "shape without generate": (["{}/a.zarr", "--shape", "3"], "--shape goes with --generate"),
    "shape with suite": (["--suite", "raw", "--generate", "{}/x", "--dtype", "u2"], "--dtype goes with"),
    "scale without suite": (["{}/a.zarr", "--scale", "0.5"], "--scale goes with --suite"),
    "scale of 0": (["--suite", "raw", "--scale", "0"], "--scale 0"),
    "unknown path": (["{}/a.zarr", "--only", "magic"], "'magic'"),
    "no runs": (["{}/a.zarr", "--runs", "0"], "--runs 0"),
    "cold and warm": (["{}/a.zarr", "--cold", "--warm"], "not allowed with"),
    "json nowhere": (["{}/a.zarr", "--json", "{}/nowhere/a.json"], "no folder"),
    "plot of no kind": (["{}/a.zarr", "--plot", "{}/a.docx"], "a.docx"),
    "chunks of another rank": (["--generate", "{}/x", "--shape", "8", "8", "--chunks", "4"], "chunks (4,)"),
    "unknown dtype": (["--generate", "{}/x", "--dtype", "wool"], "'wool'"),
    "unknown codec": (["--generate", "{}/x", "--codec", "wool"], "'wool'"),
    "unknown option": (["--wool"], "--wool"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_refused_in_one_line(main, tmp_path, capsys, no_gpu, name):
    words, message = BAD[name]
    folder = made(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(*(word.format(folder) for word in words))
    told = capsys.readouterr()
    assert stop.value.code == 2
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.err.startswith("linum-benchmark-kvikio-zarr: error: ")
    assert told.out == ""
    assert sorted(file.name for file in folder.iterdir()) == ["a.zarr", "text"]


def test_no_store_is_overwritten_and_none_is_made_beside_one(main, tmp_path, capsys, no_gpu):
    last = SUITES["raw"][-1].scaled(0.0625)
    (tmp_path / last.file_name).mkdir()
    with pytest.raises(SystemExit) as stop:
        main("--suite", "raw", "--scale", "0.0625", "--generate", tmp_path)
    assert stop.value.code == 2
    assert last.file_name in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [last.file_name]


def test_an_error_has_no_traceback_in_a_process_of_its_own(tmp_path):
    done = run_script(tmp_path / "nowhere.zarr")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.gpu
@pytest.mark.gpu_alone
@pytest.mark.parametrize("cache", ["--warm", "--cold"])
def test_the_raw_suite_on_a_gpu_is_right_everywhere(main, tmp_path, capsys, fewer_chunks, cache):
    file, picture = tmp_path / "a.json", tmp_path / "a.png"
    assert main("--suite", "raw", "--scale", "0.0625", "--runs", "1", cache, "--json", file, "--plot", picture) == 0
    content = json.loads(file.read_text())
    assert content["hardware"]["gpu"]
    assert len(content["cases"]) == 4
    optional = {"tensorstore", "zarrs"}
    for case in content["cases"]:
        verdicts = {path["name"]: (path["verdict"], path["note"]) for path in case["entries"]}
        assert {
            name: verdict for name, verdict in verdicts.items() if verdict[0] != "ok" and name not in optional
        } == {}
        assert verdicts["linumpy-auto"][1].endswith("by linumpy")
    assert "GDS" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["zstd", "blosc"])
def test_compressed_stores_on_a_gpu_are_right_and_kvikio_says_why_not(main, tmp_path, codec):
    file = tmp_path / "a.json"
    assert main("--generate", tmp_path / "made", *SMALL, "--codec", codec, "--json", file) == 0
    (case,) = json.loads(file.read_text())["cases"]
    verdicts = {path["name"]: path["verdict"] for path in case["entries"]}
    assert {verdicts[name] for name in ("flat", "h2d", "linumpy-auto", "zarr-gpu", "zarr-numpy")} == {"ok"}
    assert set(verdicts.values()) <= {"ok", "cannot run"}


@pytest.mark.gpu
def test_a_gpu_path_that_reads_wrong_values_is_found(main, tmp_path, cupy, monkeypatch):
    def entries(stored, gpu):
        return (Entry("zarr-gpu", "a liar", ready(lambda: cupy.zeros(stored.shape, stored.dtype))),)

    monkeypatch.setattr(reading, "read_entries", entries)
    assert main("--generate", tmp_path / "made", *SMALL) == 1
