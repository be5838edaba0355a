"""If this fails, times of `resample_zarr` are taken of wrong results, or files are left behind."""

import dataclasses
import json
import re

import numpy as np
import pytest

from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.data import check_free, flush, write_tiles
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites import resample_zarr
from linumpy.benchmark.suites.resample_zarr import ZarrRequest, zarr_cases
from linumpy.io.ome import open_image
from linumpy.resample.blocks import pipeline
from tests.benchmark.made_up import result_of

SMALL = {"gib": 2**-9, "chunk": (32, 40, 24), "device_memory": 2**-7}


def measure(request, output=None, runs=2):
    with zarr_cases(request) as (folder, cases):
        (result,) = run(cases, Settings(runs), output, folder)
    return result


@pytest.mark.parametrize("use_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_small_run(tmp_path, capsys, use_gpu):
    (tmp_path / "work").mkdir()
    request = ZarrRequest(**SMALL, folder=tmp_path / "work", use_gpu=use_gpu)
    result = measure(request, Output(tmp_path / "out.json"))
    assert result.case.nbytes == 2 * 32 * 40 * 24 * np.prod(request.grid)
    assert result.verdict == "", [entry.note for entry in result.entries]
    assert [entry.name for entry in result.entries] == ["resample", "read", "write", "overlapped"]
    for entry in result.entries:
        assert entry.verdict == "ok", entry.note
        assert len(entry.seconds) == 2
        assert min(entry.seconds) > 0
    assert result.marks[0].got > 0
    peak = re.search(r"([\d.]+) (GiB|MiB|KiB) of device memory", result.ours.note)
    assert (peak is not None) == use_gpu
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    assert peak is None or 0 < float(peak[1]) * units[peak[2]] <= 1.01 * request.limit
    assert list((tmp_path / "work").iterdir()) == []
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert case["marks"][0]["got"] == result.marks[0].got
    assert case["device_memory"] == 2**23
    assert "on the GPU" in capsys.readouterr().out or not use_gpu


def test_it_is_made_in_blocks(tmp_path):
    request = ZarrRequest(2**-3, tmp_path, device_memory=0.2, chunk=(64, 128, 128), use_gpu=False)
    assert int(measure(request, runs=1).ours.note.split(" blocks")[0]) > 1


@pytest.mark.parametrize("number", [0, -1])
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, capsys, number):
    real, blocks = pipeline.make_box, []

    def spoilt(source, grid, block, cval, out):
        made = real(source, grid, block, cval, out)
        last = tuple(grid.output_shape)
        if (number == 0 and block.number == 0) or (number == -1 and block.stop == last):
            made[-1, -1, -1] += 2
            blocks.append(block)
        return made

    monkeypatch.setattr(pipeline, "make_box", spoilt)
    monkeypatch.setattr(resample_zarr, "_SIDE", 200)
    result = measure(ZarrRequest(**SMALL, folder=tmp_path, use_gpu=False))
    assert len(blocks) == 1
    assert "is wrong by" in result.ours.note
    assert (result.verdict, result.ours.seconds, result.marks[0].got) == ("WRONG", (), None)
    assert "WRONG: the box at" in capsys.readouterr().out


def test_tiles_are_a_tile_and_a_number(tmp_path):
    base = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    numbers = np.array([[[5, 6]], [[7, 9]], [[1, 0]]], np.uint16)
    array = open_image(write_tiles(tmp_path / "a", base, numbers, (1, 2, 3))).levels[0]
    assert array.shape == (6, 3, 8)
    assert array.chunks == base.shape
    assert np.array_equal(array[2:4, :, 4:], base + 9)
    assert open_image(tmp_path / "a").spacing[0] == (1, 2, 3)


def test_files_are_flushed_as_long_as_there_is_time(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("os.fdatasync", flushed.append)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert flush(tmp_path)
    assert len(flushed) == 3
    assert not flush(tmp_path, -1.0)
    assert len(flushed) == 3


def test_the_mark_is_reading_and_writing_at_once(tmp_path):
    with zarr_cases(ZarrRequest(**SMALL, folder=tmp_path, use_gpu=False)) as (_, cases):
        case = dataclasses.replace(next(cases), not_judged="")
    times = {"resample": 2.0, "read": 1.1, "write": 0.2, "overlapped": 1.41}
    assert result_of(case, times, Settings(3)).verdict == "met"
    assert result_of(case, times | {"resample": 2.1}, Settings(3)).verdict == "MISSED"


def test_volumes_are_about_cubic():
    assert ZarrRequest(32).grid == (8, 8, 16)
    assert ZarrRequest(1e-6).grid == (1, 1, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gib": 0}, ValueError, "0 GiB"),
        ({"gib": 1, "device_memory": 0}, ValueError, "device memory of 0 GiB"),
        ({"gib": 1, "folder": "no"}, FileNotFoundError, "no folder"),
    ],
)
def test_requests_that_cannot_be(tmp_path, options, error, message):
    if "folder" in options:
        options = options | {"folder": tmp_path / options["folder"]}
    with pytest.raises(error, match=message):
        ZarrRequest(**options)


def test_a_disk_that_is_too_small(tmp_path):
    with pytest.raises(ValueError, match="GiB free"):
        check_free(tmp_path, 2**60)
    with pytest.raises(ValueError, match="GiB free"):
        measure(ZarrRequest(2**19, tmp_path, use_gpu=False))
    assert list(tmp_path.iterdir()) == []


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = ["--gib", "0.001", "--folder", str(tmp_path), "--runs", "1", "--device_memory", "0.5"]
    assert main(["resample-zarr", *words]) == 0
    assert "on the CPU within 0.5 GiB" in " ".join(capsys.readouterr().out.split())
    for bad, message in (
        (["--gib", "-1"], "-1.0 GiB"),
        (["--device_memory", "0"], "device memory of 0.0 GiB"),
    ):
        with pytest.raises(SystemExit) as done:
            main(["resample-zarr", *bad])
        assert done.value.code == 2
        assert message in capsys.readouterr().err
