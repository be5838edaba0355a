"""If this fails, benchmarks print other times than they took, or times of wrong results."""

import json
from unittest import mock

import numpy as np
import pytest
import zarr

from linumpy.benchmark import read, timing
from linumpy.benchmark.timing import Bench, CannotRunError, Suite, Work, run_suite
from linumpy.testing.stores import StoreSpec


@pytest.fixture
def clock(monkeypatch):
    """Calls take the seconds that they return, one after another."""
    monkeypatch.setattr(timing, "_wall_seconds", lambda call: call())


def rows(case):
    return {row.name: row for row in case.rows}


def test_medians_rates_and_shares(clock, capsys):
    ours, peer = iter([0.0, 9.0, 9.0, 1.0, 5.0, 2.0]), iter([0.0, 9.0, 9.0, 3.0, 3.0, 3.0])
    with Bench(runs=3, device="cpu").case("work", 8.0) as case:
        case.time("linumpy", lambda: next(ours), note=lambda: "well done")
        case.time("peer", lambda: next(peer), share=0.25)
    assert rows(case)["linumpy"].seconds == (1.0, 5.0, 2.0)
    assert rows(case)["linumpy"].median == 2.0
    assert rows(case)["peer"].seconds == (12.0, 12.0, 12.0)
    _, _, first, second = capsys.readouterr().out.strip().splitlines()
    assert first.split() == ["linumpy", "4", "2", "s", "1", "s", "5", "s", "well", "done"]
    assert second.split() == ["peer", "0.6667", "12", "s", "12", "s", "12", "s", "6"]


def test_slow_rows_are_timed_three_times_and_fast_ones_as_often_as_asked(clock):
    with Bench(runs=20, device="cpu").case("work", 1.0) as case:
        case.time("slow", lambda: 7.0)
        case.time("fast", lambda: 0.1)
        case.time("not warmed up", lambda: 7.0, warm_ups=0)
    assert {name: len(row.seconds) for name, row in rows(case).items()} == {"slow": 3, "fast": 20, "not warmed up": 20}


def test_runs_alternate_and_before_is_not_timed(clock):
    order = []

    def work(name):
        return Work(name=name, call=lambda: order.append(name) or 1.0, before=lambda: order.append("-"), warm_ups=0)

    with Bench(runs=2, device="cpu").case("work", 1.0) as case:
        case.time_in_turns(work("a"), work("b"))
    assert "".join(order) == "-a-b" * 3


def test_a_wrong_result_and_a_failing_peer_have_no_time(capsys):
    timed = mock.Mock()
    with Bench(runs=2, device="cpu").case("work", 1.0) as case:
        case.time("linumpy", timed, lambda result: "off by one")
        case.time("peer", lambda: 1 // 0)
        with case.attempt("other"):
            raise CannotRunError("it is not\ninstalled")
        case.time("right", lambda: 3, lambda result: "" if result == 3 else "no")
    assert timed.call_count == 1
    told = {name: (row.verdict, row.note, bool(row.seconds)) for name, row in rows(case).items()}
    assert told == {
        "linumpy": ("WRONG", "off by one", False),
        "peer": ("failed", "ZeroDivisionError: integer division or modulo by zero", False),
        "other": ("cannot run", "it is not installed", False),
        "right": ("ok", "", True),
    }
    assert "WRONG: off by one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "check", "code", "verdict"),
    [
        ("linumpy", lambda _: "", 0, "ok"),
        ("linumpy", lambda _: 1 // 0, 1, "failed"),
        ("peer", lambda _: 1 // 0, 0, "failed"),
        ("peer", lambda _: "off by one", 1, "WRONG"),
    ],
)
def test_the_exit_code_and_the_files(tmp_path, capsys, name, check, code, verdict):
    def run(bench, args):
        with bench.case("one", 2.0, unit="GiB", description="a case") as case:
            case.time(name, lambda: None, check)

    words = ["--runs", "2", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert run_suite("linum-benchmark one", Suite(run=run, help="One."), words) == code
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["command"].startswith("linum-benchmark one --runs 2 --json ")
    (row,) = content["cases"][0]["rows"]
    assert (row["verdict"], len(row["seconds"])) == (verdict, 2 if verdict == "ok" else 0)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert ("WRONG or failed" in capsys.readouterr().err) == bool(code)


def test_cold_runs_drop_the_files_before_each_run(clock, tmp_path, monkeypatch):
    file, dropped = tmp_path / "a", []
    file.write_bytes(b"x" * 100)
    drop = timing.drop_from_page_cache
    monkeypatch.setattr(timing, "drop_from_page_cache", lambda files: dropped.append(tuple(files)) or drop(files))
    with Bench(runs=3, device="cpu", cold=True).case("work", 1.0, files=[file]) as case:
        case.time("linumpy", lambda: 1.0, files=[file])
    assert dropped == [(file, file)] * 3


# ---- the arrays to read


@pytest.mark.parametrize(
    ("codec", "dtype", "shards", "zarr_format"),
    [("zstd", "uint16", (8, 8, 16), 3), ("blosc", "uint8", None, 2), ("none", "float32", None, 3)],
)
def test_a_store_is_what_it_is_called_and_differences_are_found(tmp_path, codec, dtype, shards, zarr_format):
    spec = StoreSpec(
        name="", shape=(20, 24, 28), chunks=(8, 8, 8), dtype=dtype, codec=codec, shards=shards, zarr_format=zarr_format
    )
    path = spec.make(tmp_path)
    array = zarr.open_array(path, mode="r")
    assert (array.shape, array.chunks, array.shards, array.dtype) == (spec.shape, spec.chunks, shards, dtype)
    voxels = array[...]
    assert voxels.std() > 0
    assert read.difference(path, voxels) == ""
    voxels[9, 3, 5] += 1
    assert read.difference(path, voxels).startswith("voxel (9, 3, 5) is ")
    with pytest.raises(FileExistsError, match="not overwritten"):
        spec.make(tmp_path)


def test_codecs_reach_the_ratio_that_was_asked_for(tmp_path):
    for ratio in (1.6, 3.0):
        spec = StoreSpec(name="", shape=(64, 64, 64), chunks=(32, 32, 32), codec="zstd", ratio=ratio)
        path = spec.make(tmp_path / str(ratio))
        stored = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        assert abs(2 * 64**3 / stored / ratio - 1) < 0.15


def test_a_generated_store_stays_and_an_array_is_timed_by_its_path(tmp_path, capsys):
    made = [
        "--generate",
        str(tmp_path / "made"),
        "--shape",
        "20",
        "24",
        "28",
        "--chunks",
        "8",
        "8",
        "8",
        "--codec",
        "zstd",
    ]
    shared = ["--device", "cpu", "--runs", "1", "--cold"]
    assert run_suite("linum-benchmark-kvikio-zarr", read.SUITE, [*made, *shared]) == 0
    (path,) = (tmp_path / "made").iterdir()
    before = np.asarray(zarr.open_array(path, mode="r")[...])
    assert (
        run_suite("linum-benchmark-kvikio-zarr", read.SUITE, [str(path), *shared, "--only", "flat", "zarr-numpy"]) == 0
    )
    out = capsys.readouterr().out
    assert "(20, 24, 28), chunks (8, 8, 8)" in out
    assert out.splitlines()[-2].startswith("zarr-numpy ")
    assert np.array_equal(zarr.open_array(path, mode="r")[...], before)
