"""If this fails, times of scripts are taken of wrong results, or files are left behind."""

import dataclasses
import json

import numpy as np
import pytest

from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.report import size
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites import scripts
from linumpy.benchmark.suites.scripts import REACH_NBYTES, SCRIPTS, EndToEndRequest, end_to_end_cases, not_judged
from tests.benchmark.made_up import result_of

SMALL = {"gib": 2**-11, "tile": (16, 20, 24), "tile_bytes": 2**17}


def measure(request, output=None):
    with end_to_end_cases(request) as (folder, cases):
        return run(cases, Settings(2), output, folder)


@pytest.mark.parametrize("use_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_small_run(tmp_path, capsys, use_gpu):
    (tmp_path / "work").mkdir()
    request = EndToEndRequest(**SMALL, folder=tmp_path / "work", use_gpu=use_gpu)
    results = measure(request, Output(tmp_path / "out.json"))
    assert [one.case.name for one in results] == list(SCRIPTS)
    rows, columns = request.tiles
    assert rows * columns >= 34
    for one in results:
        assert one.case.nbytes == 2 * 16 * 20 * 24 * rows * columns
        assert one.verdict == ""
        assert one.marks[0].got > 0
        steps = [] if one.case.name == "linum-stitch-3d" else ["compute", "serial"]
        assert [entry.name for entry in one.entries] == ["script", "read", "write", *steps]
        for entry in one.entries:
            assert entry.verdict == "ok", entry.note
            assert len(entry.seconds) == 2
            assert min(entry.seconds) > 0
    # float32 pixels, and an eighth of the voxels.
    assert [one.ours.note for one in results[:2]] == [f"{size(results[0].case.nbytes // 8)} written"] * 2
    # Steps of 16.25 and 19.25 voxels.
    stitched = 2 * 16 * (int((rows - 1) * 16.25) + 20) * (int((columns - 1) * 19.25) + 24)
    assert results[2].ours.note == f"{size(stitched)} written"
    assert list((tmp_path / "work").iterdir()) == []
    assert [one["name"] for one in json.loads((tmp_path / "out.json").read_text())["cases"]] == list(SCRIPTS)
    told = capsys.readouterr().out
    assert f"mosaic: {rows} × {columns} tiles of 16×20×24 uint16" in told
    assert "linum-resample-mosaic-grid" in told


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, name, capsys):
    from linumpy.mosaic import aip, grid, stitching

    module, function = {
        "linum-aip": (aip, "project"), "linum-resample-mosaic-grid": (grid, "resample_tiles"),
        "linum-stitch-3d": (stitching, "blend_tiles"),
    }[name]  # fmt: skip
    plain, calls = getattr(module, function), []

    def spoilt(tiles, *arguments):
        made = plain(tiles, *arguments)
        calls.append(1)
        if len(calls) == 3:
            made[(..., -1, -1) if name != "linum-stitch-3d" else ...] += 2  # some of its voxels lie between two tiles
        return made

    monkeypatch.setattr(module, function, spoilt)
    request = EndToEndRequest(**SMALL, folder=tmp_path, only=(name,), use_gpu=False)
    (result,) = measure(request)
    assert "is wrong by 2" in result.ours.note
    assert (result.verdict, result.ours.seconds, result.marks[0].got) == ("WRONG", (), None)
    assert "WRONG: the tile at" in capsys.readouterr().out


def test_the_mosaic_is_what_is_said(tmp_path):
    request = EndToEndRequest(**SMALL, use_gpu=False)
    path, base, numbers = scripts._make_mosaic(request, tmp_path)
    array = scripts.open_mosaic(path).array.array
    assert array.chunks == request.tile
    assert (array.dtype, numbers.shape) == (np.uint16, request.tiles)
    assert np.array_equal(array[:, 20:40, 48:72], base + numbers[1, 2])
    assert base.std() > 10


def test_the_mark_is_judged_on_a_gpu_and_for_large_mosaics():
    assert not_judged(False, REACH_NBYTES) == "no GPU"
    assert not_judged(True, REACH_NBYTES - 1) == "less than 16 GiB"
    assert not_judged(True, REACH_NBYTES) == ""


def test_the_mark_is_the_slower_of_reading_and_writing(tmp_path):
    with end_to_end_cases(EndToEndRequest(**SMALL, folder=tmp_path, only=("linum-aip",), use_gpu=False)) as (_, cases):
        (case,) = cases
    times = {"script": 2.5, "read": 1.1, "compute": 0.2, "write": 2.0, "serial": 4.0}
    judged = dataclasses.replace(case, not_judged="")
    assert result_of(judged, times, Settings(3)).verdict == "met"
    assert result_of(judged, times | {"script": 2.6}, Settings(3)).verdict == "MISSED"
    assert result_of(judged, times | {"read": 3.0, "script": 3.5}, Settings(3)).verdict == "met"
    assert result_of(case, times | {"script": 9.0}, Settings(3)).verdict == ""


def test_tiles_are_about_square():
    assert EndToEndRequest(16).tiles == (22, 24)
    assert EndToEndRequest(1e-6).tiles == (1, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gib": 0}, ValueError, "0 GiB"),
        ({"gib": 1, "only": ("mean-projection",)}, ValueError, "'mean-projection' is unknown"),
        ({"gib": 1, "folder": "no"}, FileNotFoundError, "no folder"),
    ],
)
def test_requests_that_cannot_be(tmp_path, options, error, message):
    if "folder" in options:
        options = options | {"folder": tmp_path / options["folder"]}
    with pytest.raises(error, match=message):
        EndToEndRequest(**options)


def test_a_disk_that_is_too_small(tmp_path):
    with pytest.raises(ValueError, match="GiB free"):
        measure(EndToEndRequest(2**19, tmp_path, use_gpu=False))
    assert list(tmp_path.iterdir()) == []


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = ["--gib", "0.001", "--folder", str(tmp_path), "--runs", "1", "--only", "linum-aip"]
    assert main(["scripts", *words]) == 0
    assert "on the CPU; in the page cache" in capsys.readouterr().out
    for bad, message in [
        (["--gib", "-1"], "-1.0 GiB"),
        (["--gib", "1", "--only", "mean-projection"], "'mean-projection'"),
        (["--gib", "1000000", "--runs", "0"], "--runs 0: "),  # said before anything is made
    ]:
        with pytest.raises(SystemExit) as done:
            main(["scripts", *bad])
        assert done.value.code == 2
        assert message in capsys.readouterr().err
