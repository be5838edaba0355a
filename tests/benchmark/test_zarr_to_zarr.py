"""``resample_zarr``, timed: the benchmark is right about what is right, and cleans up after itself."""

import json

import numpy as np
import pytest

from linumpy.benchmark import zarr_to_zarr
from linumpy.benchmark.volumes import check_room, flush, write_tiles
from linumpy.benchmark.zarr_to_zarr import HEADER, REACH_NBYTES, ZarrRequest, ZarrResult, row, run_zarr_to_zarr
from linumpy.io.ome import open_image
from linumpy.resample import pipeline as resample_blocks
from scripts import linum_benchmark_resampling as script

SMALL = {"gib": 2**-9, "chunk": (32, 40, 24), "runs": 2, "device_memory": 2**-7}


@pytest.mark.parametrize("use_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_small_run(tmp_path, capsys, use_gpu):
    (tmp_path / "work").mkdir()
    request = ZarrRequest(**SMALL, folder=tmp_path / "work", json=tmp_path / "out.json", use_gpu=use_gpu)
    result = run_zarr_to_zarr(request)
    assert result.wrong == ""
    assert result.nbytes == 8 * result.written_nbytes == 2 * 32 * 40 * 24 * np.prod(request.grid)
    assert result.verdict == ""
    for times in (result.read, result.write, result.overlapped, result.resample):
        assert len(times) == 2
        assert min(times) > 0
    assert result.ratio > 0
    assert result.ratio_to_slower > 0
    assert (result.peak is not None) == use_gpu
    assert result.peak is None or 0 < result.peak <= request.limit
    assert list((tmp_path / "work").iterdir()) == []
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["ratio"] == result.ratio
    assert document["device_memory"] == 2**23
    assert HEADER in capsys.readouterr().out


def test_it_is_made_in_blocks(tmp_path):
    request = ZarrRequest(2**-3, tmp_path, device_memory=0.2, runs=1, chunk=(64, 128, 128), use_gpu=False)
    assert run_zarr_to_zarr(request).blocks > 1


@pytest.mark.parametrize("number", [0, -1])
def test_what_is_wrong_is_not_timed(monkeypatch, tmp_path, capsys, number):
    real, blocks = resample_blocks.make_box, []

    def spoilt(source, grid, block, cval, out):
        made = real(source, grid, block, cval, out)
        last = tuple(grid.output_shape)
        if (number == 0 and block.number == 0) or (number == -1 and block.stop == last):
            made[-1, -1, -1] += 2
            blocks.append(block)
        return made

    monkeypatch.setattr(resample_blocks, "make_box", spoilt)
    monkeypatch.setattr(zarr_to_zarr, "_SIDE", 200)
    result = run_zarr_to_zarr(ZarrRequest(**SMALL, folder=tmp_path, use_gpu=False))
    assert len(blocks) == 1
    assert "is wrong by" in result.wrong
    assert (result.verdict, result.resample, result.ratio, result.ratio_to_slower) == ("WRONG", (), None, None)
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


def result(**changes):
    values = {"nbytes": REACH_NBYTES, "written_nbytes": 2**31, "blocks": 30, "peak": 2**31, "wrong": "", "judged": True}
    values |= {"read": (1.0, 4.0, 1.1), "write": (0.2,), "overlapped": (1.4,), "resample": (1.9, 2.0, 9.0)}
    return ZarrResult(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "met"),
        ({"resample": (2.1,)}, "MISSED"),
        ({"judged": False, "resample": (9.0,)}, ""),
        ({"wrong": "it differs", "resample": ()}, "WRONG"),
    ],
)
def test_verdicts(changes, verdict):
    one = result(**changes)
    assert one.verdict == verdict
    assert verdict in row(one)
    assert len(row(one)) <= len(HEADER.splitlines()[1]) + len("  MISSED")


def test_ratios():
    assert result().ratio == 0.7
    assert result().ratio_to_slower == 0.55


def test_volumes_are_about_cubic():
    assert ZarrRequest(32).grid == (8, 8, 16)
    assert ZarrRequest(1e-6).grid == (1, 1, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gib": 0}, ValueError, "0 GiB"),
        ({"gib": 1, "runs": 0}, ValueError, "runs=0"),
        ({"gib": 1, "device_memory": 0}, ValueError, "device_memory=0 GiB"),
        ({"gib": 1, "folder": "no"}, FileNotFoundError, "no folder"),
    ],
)
def test_requests_that_cannot_be(tmp_path, options, error, message):
    if "folder" in options:
        options = options | {"folder": tmp_path / options["folder"]}
    with pytest.raises(error, match=message):
        ZarrRequest(**options)


def test_a_folder_without_room(tmp_path):
    with pytest.raises(ValueError, match="GiB free"):
        check_room(tmp_path, 2**60)
    with pytest.raises(ValueError, match="GiB free"):
        run_zarr_to_zarr(ZarrRequest(2**19, tmp_path, use_gpu=False))
    assert list(tmp_path.iterdir()) == []


def test_the_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = ["--zarr", "0.001", "--folder", str(tmp_path), "--runs", "1", "--device_memory", "0.5"]
    assert script.main(words) == 0
    assert "on the CPU within 0.5 GiB; medians of 1 runs" in capsys.readouterr().out
    for bad, message in (
        (["--zarr", "-1"], "-1.0 GiB"),
        (["--zarr", "1", "--only", "affine-linear"], "do not go with"),
    ):
        with pytest.raises(SystemExit) as done:
            script.main(bad)
        assert done.value.code == 2
        assert message in capsys.readouterr().err
