"""Whole scripts, timed: the benchmark is right about what is right, and cleans up after itself."""

import json

import numpy as np
import pytest

from linumpy.benchmark import end_to_end
from linumpy.benchmark.end_to_end import (
    CASES,
    HEADER,
    REACH_NBYTES,
    EndToEndRequest,
    EndToEndResult,
    row,
    run_end_to_end,
)
from scripts import linum_benchmark_tissue as script

SMALL = {"gib": 2**-11, "tile": (16, 20, 24), "runs": 2, "tile_bytes": 2**17}


@pytest.mark.parametrize("use_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_small_run(tmp_path, capsys, use_gpu):
    (tmp_path / "work").mkdir()
    request = EndToEndRequest(**SMALL, folder=tmp_path / "work", json=tmp_path / "out.json", use_gpu=use_gpu)
    results = run_end_to_end(request)
    assert [one.name for one in results] == list(CASES)
    assert [one.wrong for one in results] == ["", ""]
    rows, columns = request.tiles
    assert rows * columns >= 34
    for one in results:
        assert one.nbytes == 2 * 16 * 20 * 24 * rows * columns
        assert one.verdict == ""
        assert one.ratio > 0
        for times in (one.read, one.compute, one.write, one.serial, one.script):
            assert len(times) == 2
            assert min(times) > 0
    # float32 pixels, and an eighth of the voxels.
    assert [one.written_nbytes for one in results] == [results[0].nbytes // 8, results[1].nbytes // 8]
    assert list((tmp_path / "work").iterdir()) == []
    assert [one["name"] for one in json.loads((tmp_path / "out.json").read_text())["results"]] == list(CASES)
    told = capsys.readouterr().out
    assert HEADER in told
    assert "linum-resample-mosaic-grid" in told


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, name, capsys):
    from linumpy.mosaic import aip, grid

    room, function = {"linum-aip": (aip, "project"), "linum-resample-mosaic-grid": (grid, "resample_tiles")}[name]
    plain, calls = getattr(room, function), []

    def spoilt(tiles, *arguments):
        made = plain(tiles, *arguments)
        calls.append(1)
        if len(calls) == 3:
            made[..., -1, -1] += 2
        return made

    monkeypatch.setattr(room, function, spoilt)
    request = EndToEndRequest(**SMALL, folder=tmp_path, only=(name,), use_gpu=False)
    (result,) = run_end_to_end(request)
    assert "is wrong by 2" in result.wrong
    assert (result.verdict, result.script, result.ratio) == ("WRONG", (), None)
    assert "WRONG: the tile at" in capsys.readouterr().out


def test_the_mosaic_is_what_is_said(tmp_path):
    request = EndToEndRequest(**SMALL, use_gpu=False)
    path, base, numbers = end_to_end._make_mosaic(request, tmp_path)
    array = end_to_end.open_mosaic(path).array.array
    assert array.chunks == request.tile
    assert (array.dtype, numbers.shape) == (np.uint16, request.tiles)
    assert np.array_equal(array[:, 20:40, 48:72], base + numbers[1, 2])
    assert base.std() > 10


def result(**changes):
    values = {"wrong": "", "judged": True, "read": (1.0, 4.0, 1.1), "compute": (0.2,), "write": (2.0,)}
    values |= {"serial": (4.0,), "script": (2.4, 2.5, 9.0)}
    return EndToEndResult("linum-aip", REACH_NBYTES, 2**30, **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"script": (2.6,)}, "MISSED"),
        ({"read": (3.0,), "script": (3.5,)}, "met"),
        ({"judged": False, "script": (9.0,)}, ""),
        ({"wrong": "it differs", "script": ()}, "WRONG"),
    ],
)
def test_verdicts(changes, verdict):
    one = result(**changes)
    assert one.verdict == verdict
    assert verdict in row(one)
    assert len(row(one)) <= len(HEADER.splitlines()[1]) + len("  MISSED")


def test_tiles_are_about_square():
    assert EndToEndRequest(16).tiles == (22, 24)
    assert EndToEndRequest(1e-6).tiles == (1, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gib": 0}, ValueError, "0 GiB"),
        ({"gib": 1, "runs": 0}, ValueError, "runs=0"),
        ({"gib": 1, "only": ("mean-projection",)}, ValueError, "'mean-projection' is unknown from end to end"),
        ({"gib": 1, "folder": "no"}, FileNotFoundError, "no folder"),
    ],
)
def test_requests_that_cannot_be(tmp_path, options, error, message):
    if "folder" in options:
        options = options | {"folder": tmp_path / options["folder"]}
    with pytest.raises(error, match=message):
        EndToEndRequest(**options)


def test_a_folder_without_room(tmp_path):
    with pytest.raises(ValueError, match="GiB free"):
        run_end_to_end(EndToEndRequest(2**19, tmp_path, use_gpu=False))
    assert list(tmp_path.iterdir()) == []


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = ["--end-to-end", "0.001", "--folder", str(tmp_path), "--runs", "1", "--only", "linum-aip"]
    assert script.main(words) == 0
    assert "on the CPU; medians of 1 runs" in capsys.readouterr().out
    with pytest.raises(SystemExit) as done:
        script.main(["--end-to-end", "-1"])
    assert done.value.code == 2
    assert "-1.0 GiB" in capsys.readouterr().err
