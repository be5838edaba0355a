"""If this fails, a script overwrites its source, or shows a traceback for a path that cannot be read."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from linumpy.errors import ChunkError, SourceError
from linumpy.io.open import open_source
from linumpy.io.output import checks
from linumpy.io.output.checks import check_apart
from linumpy.mosaic.io.tiles import read_box
from linumpy.write.writer import write_omezarr
from tests.support.budget import some
from tests.support.script_runs import ROOT, environment, help_of, kill_half_way, load, run_script

SCRIPTS = {
    "linum_aip": [],
    "linum_aip_png": [],
    "linum_resample": ["--resolution", "20"],
    "linum_resample_mosaic_grid": ["--resolution", "20", "--tile-shape", "16", "16"],
    "linum_find_tissue_interface": [],
    "linum_detect_focal_curvature": ["--tile-shape", "16", "16"],
}


def out_name(script):
    return "out.png" if script == "linum_aip_png" else "out"


def voxels():
    return np.random.default_rng(0).gamma(4, 50, (12, 40, 36)).astype("f4")


@pytest.fixture
def mosaic(tmp_path):
    return write_omezarr(tmp_path / "m.ome.zarr", voxels(), (5, 10, 10), chunks=(12, 16, 16), codec="none")


@pytest.fixture
def refused(capsys, monkeypatch):
    """Run a script that must say something in one line; returns it."""
    monkeypatch.setenv("LINUMPY_DEVICE", "cpu")

    def run(name, *words):
        assert load(name).main([*map(str, words)]) == 2
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.count("\n") == 1
        return errors

    return run


def whole(path):
    return np.array_equal(zarr.open_group(path, mode="r")["0"][...], voxels())


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_help_is_the_docstring(capsys, name):
    shown = help_of(name, capsys)
    assert load(name).__doc__.splitlines()[0] in shown
    for word in ("--device {auto,cuda,cpu}", "--overwrite", "--verbose", *SCRIPTS[name]):
        assert not word.startswith("--") or word in shown
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_output_is_replaced_only_when_asked(tmp_path, mosaic, refused, capsys, name):
    output, folder = tmp_path / out_name(name), tmp_path / "taken"
    folder.mkdir()
    (folder / "kept").touch()
    assert str(tmp_path / "none") in refused(name, tmp_path / "none", output, *SCRIPTS[name])
    words = [mosaic, output, *SCRIPTS[name]]
    assert load(name).main([*map(str, words)]) == 0
    before = output.stat().st_mtime_ns
    capsys.readouterr()
    assert f"{output.name} exists" in refused(name, *words)
    assert output.stat().st_mtime_ns == before
    assert load(name).main([*map(str, words), "--overwrite", "--quiet"]) == 0
    assert output.stat().st_mtime_ns > before
    assert capsys.readouterr() == ("", "")
    if name != "linum_aip_png":
        assert "not a Zarr folder" in refused(name, mosaic, folder, *SCRIPTS[name], "--overwrite")
    assert (folder / "kept").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_gpu_where_one_is_asked_for(tmp_path, mosaic, refused, monkeypatch, name):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = [mosaic, tmp_path / out_name(name), *SCRIPTS[name], "--device=cuda"]
    assert refused(name, *words) == f"{name.replace('_', '-')}: error: there is none\n"
    assert not words[1].exists()


# What SIGTERM unwinds is shared by all commands.
@pytest.mark.parametrize(
    ("name", "sent"),
    some(
        itertools.product((name for name in SCRIPTS if name != "linum_resample"), [signal.SIGKILL, signal.SIGTERM]),
        lambda name, sent: (name, sent) in [("linum_aip_png", signal.SIGTERM), ("linum_aip", signal.SIGKILL)],
    ),
)
def test_killed_half_way_nothing_looks_finished(tmp_path, mosaic, name, sent):
    words = [mosaic, tmp_path / out_name(name), *SCRIPTS[name], "--device=cpu"]
    if name == "linum_find_tissue_interface":
        words += ["--overlay", tmp_path / "s.png"]
    # Focal curvature is found in 4 columns, and then corrected in 9.
    after = 7 if name == "linum_detect_focal_curvature" else 2
    assert kill_half_way(name, words, after=after, sent=sent) != 0
    left = [file.name for file in tmp_path.iterdir() if file != mosaic]
    assert all(file.startswith(".") and ".part-" in file for file in left)
    assert left == [] or sent == signal.SIGKILL
    assert load(name).main([*map(str, words)]) == 0  # what is left is in nobody's way
    assert words[1].exists()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("where", ["itself", "link", "above", "part"])
def test_the_source_is_not_overwritten(tmp_path, mosaic, refused, name, where):
    zarr.open_group(tmp_path, mode="a")  # a group like that of a plate, which may be overwritten
    os.symlink(mosaic, tmp_path / "link.zarr")
    output = {"itself": mosaic, "link": tmp_path / "link.zarr", "above": tmp_path, "part": mosaic / "0"}[where]
    if name == "linum_aip_png":
        if where != "part":
            pytest.skip("a picture takes the place of no folder")
        output = mosaic / "0/zarr.png"
    said = refused(name, mosaic, output, *SCRIPTS[name], "--overwrite")
    assert "inside the source" in said if where == "part" else "would replace the source" in said
    assert whole(mosaic)


@pytest.mark.parametrize(("output", "second"), [("a.zarr", "a.zarr/a.png"), ("a.png/a", "a.png")])
def test_outputs_do_not_lie_in_each_other(tmp_path, mosaic, refused, output, second):
    before = sorted(tmp_path.iterdir())
    said = refused("linum_find_tissue_interface", mosaic, tmp_path / output, "--overlay", tmp_path / second)
    assert "would overlap" in said
    words = [mosaic, tmp_path / output, "--tile-shape", 16, 16, "--report", tmp_path / second]
    assert "would overlap" in refused("linum_detect_focal_curvature", *words)
    assert sorted(tmp_path.iterdir()) == before


def test_a_new_place_within_the_source_is_refused(tmp_path, mosaic, refused):
    for name, words in SCRIPTS.items():
        output = mosaic / ("new.png" if name == "linum_aip_png" else "new.zarr")
        assert f"{output} would lie inside the source" in refused(name, mosaic, output, *words)
    check_apart([tmp_path / "m.ome.zarr.new"], [mosaic, "s3://elsewhere/m.zarr"])


def test_a_name_says_what_is_written(tmp_path, mosaic, refused):
    """Neither a folder called .png nor PNG bytes called .jpg."""
    before = sorted(tmp_path.iterdir())
    for name, words in SCRIPTS.items():
        if name != "linum_aip_png":
            assert "y.png" in refused(name, mosaic, tmp_path / "y.png", *words)
            assert "y.csv" in refused(name, mosaic, tmp_path / "y.csv", *words)
    assert "linum-aip-png draws one" in refused("linum_aip", mosaic, tmp_path / "y.png")
    assert "ends in .png" in refused("linum_aip_png", mosaic, tmp_path / "y.jpg")
    assert "ends in .png" in refused("linum_aip_png", mosaic, tmp_path / "y")
    map_of = [mosaic, tmp_path / "y.zarr", "--overlay", tmp_path / "y.jpeg"]
    assert "ends in .png" in refused("linum_find_tissue_interface", *map_of)
    flat = [mosaic, tmp_path / "y.zarr", "--tile-shape", 16, 16, "--report", tmp_path / "y.jpeg"]
    assert "ends in .png" in refused("linum_detect_focal_curvature", *flat)
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_fit_is_refused_before_it_is_made(tmp_path, mosaic, refused, monkeypatch):
    fine = [mosaic, tmp_path / "y.zarr", "--resolution", "0.001", "--tile-shape", 16, 16]
    assert "iB are free" in refused("linum_resample_mosaic_grid", *fine)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=voxels().nbytes - 1))
    flat = [mosaic, tmp_path / "y.zarr", "--tile-shape", 16, 16]
    assert "iB are free" in refused("linum_detect_focal_curvature", *flat)
    assert sorted(tmp_path.iterdir()) == [mosaic]
    with pytest.raises(OSError, match="iB are free") as caught:
        write_omezarr(tmp_path / "y.zarr", voxels(), (5, 10, 10), codec="none")
    assert caught.value.errno == errno.ENOSPC
    write_omezarr(tmp_path / "y.zarr", voxels(), (5, 10, 10), compressors=ZstdCodec())  # nobody knows how small


def test_a_folder_that_is_not_there_has_no_gds(refused, tmp_path):
    assert f"--path {tmp_path}/nope" in refused("linum_gpu_info", "--path", tmp_path / "nope")


def test_a_stack_takes_no_place_of_a_slice_or_its_table(tmp_path, mosaic, refused):
    slices = tmp_path / "slices"
    slices.mkdir()
    for number in range(2):
        write_omezarr(slices / f"slice_z{number}.zarr", voxels(), (5, 10, 10))
    table = tmp_path / "shifts.csv"
    table.write_text("fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n")
    words = [slices, table, "--slicing-interval-mm", 0.03, "--overwrite"]
    name = "linum_stack_slices_motor"
    assert "replace the source" in refused(name, *words, slices / "slice_z1.zarr")
    assert "replace the source" in refused(name, *words, tmp_path / "s.zarr", "--decisions", table)
    assert "--min-correlation nan" in refused(name, *words, tmp_path / "s.zarr", "--min-correlation", "nan")
    assert "--max-deviation -1.0" in refused(name, *words, tmp_path / "s.zarr", "--max-deviation", "-1")
    assert whole(slices / "slice_z1.zarr")
    assert table.read_text().count("\n") == 2


@pytest.mark.parametrize("codec", [None, ZstdCodec(), GzipCodec(), BloscCodec()], ids=["raw", "zstd", "gzip", "blosc"])
@pytest.mark.parametrize("length", [0, 0.5])
def test_a_broken_chunk_is_named(tmp_path, refused, codec, length):
    path = write_omezarr(tmp_path / "m.zarr", voxels(), (5, 10, 10), chunks=(12, 16, 16), compressors=codec)
    chunk = path / "0/c/0/1/2"
    stored = chunk.read_bytes()
    chunk.write_bytes(stored[: int(len(stored) * length)])
    message = rf"{re.escape(str(chunk))} (cannot be (read|decoded)|has \d+ bytes, but)"
    for name, words in SCRIPTS.items():
        assert re.search(message, refused(name, path, tmp_path / out_name(name), *words))
    # linum-resample keeps the blocks that it has made for its next run.
    assert sorted(one.name for one in tmp_path.iterdir()) == [".out.unfinished", "m.zarr"]
    array = open_source(path)
    with pytest.raises(ChunkError, match=message):
        read_box(array, (slice(0, 12), slice(10, 40), slice(20, 36)), device="cpu")
    fine = slice(0, 12), slice(0, 16), slice(0, 36)
    assert np.array_equal(read_box(array, fine, device="cpu"), voxels()[fine])


def test_a_url_of_a_file_is_read(tmp_path, mosaic, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("linum_aip").main([f"file://{mosaic}", "a.zarr", "--device=cpu"]) == 0
    assert np.allclose(zarr.open_group("a.zarr", mode="r")["0"][...], voxels().mean(0))


def test_a_url_is_no_place_for_an_output(tmp_path, mosaic, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in SCRIPTS.items():
        assert "//bucket/" in refused(name, mosaic, f"https://bucket/{out_name(name)}", *words)
    assert sorted(tmp_path.iterdir()) == [mosaic]


def test_a_remote_store_that_cannot_be_opened(monkeypatch):
    async def fail(*words, **options):
        raise RuntimeError("no credentials")

    monkeypatch.setattr(zarr.storage.ObjectStore, "get", fail)
    with pytest.raises(SourceError, match="'s3://bucket/a' cannot be opened: RuntimeError: no credentials"):
        open_source("s3://bucket/a")


def test_what_cannot_be_printed_is_no_error(tmp_path):
    """In the closing line it would say that nothing was done."""
    source = write_omezarr(tmp_path / os.fsdecode("µ猫".encode() + b"\xff.zarr"), voxels(), (5, 10, 10))
    for number, more in enumerate([{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-8"}]):
        result = run_script("linum_aip", source, tmp_path / f"{number}.zarr", LINUMPY_DEVICE="cpu", **more)
        assert (result.returncode, result.stderr) == (0, "")
        assert (tmp_path / f"{number}.zarr").is_dir()
    assert run_script("linum_resample_mosaic_grid", "--help", PYTHONIOENCODING="ascii").returncode == 0


def test_a_closed_stderr_is_no_error(tmp_path, mosaic):
    words = [sys.executable, ROOT / "scripts/linum.py", "aip", mosaic, tmp_path / "a.zarr"]
    closed = ["sh", "-c", '"$@" 2>&-', "sh", *map(str, words)]
    assert subprocess.run(closed, stdout=subprocess.DEVNULL, check=False, env=environment()).returncode == 0
    assert (tmp_path / "a.zarr").is_dir()


def test_an_output_that_is_a_link_to_itself(tmp_path, mosaic, refused):
    (tmp_path / "loop").symlink_to("loop")
    for script in ("linum_resample", "linum_aip"):
        line = refused(script, mosaic, tmp_path / "loop", *SCRIPTS[script], "--overwrite")
        assert "loop is not a Zarr folder" in line


def test_voxels_that_are_too_small_are_refused_at_once(tmp_path, mosaic, refused):
    for script in ("linum_resample", "linum_resample_mosaic_grid"):
        tile = ["--tile-shape", "16", "16"] if script == "linum_resample_mosaic_grid" else []
        line = refused(script, mosaic, tmp_path / "out", "--resolution", "1e-320", *tile)
        assert "wanted spacing" in line
        assert "the number of voxels overflows" in line
