"""If this fails, the script finds a wrong surface, or a killed one leaves something that looks finished."""

import re

import numpy as np
import pytest
import zarr

from linumpy.io.ome import open_image, read_omezarr
from linumpy.testing.synthetic import MosaicSpec, surface_depth, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import check_refused, run_script

NAME, PROGRAM = "linum_find_tissue_interface", "linum-find-tissue-interface"
SPEC = MosaicSpec(tiles=(2, 3), tile_shape=(80, 40, 48), spacing_um=(4.0, 9.0, 11.0), water_um=100.0, looks=8)


@pytest.fixture
def mosaic(tmp_path):
    return write_mosaic(tmp_path / "mosaic.ome.zarr", SPEC, chunks=(32, 40, 48))


def test_a_run(mosaic, tmp_path):
    out, picture = tmp_path / "new" / "surface.ome.zarr", tmp_path / "pictures" / "surface.png"
    for folder in (out.parent, picture.parent):
        done = run_script(NAME, mosaic, out, "--overlay", picture, "--device=cpu")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"there is no folder {folder}: make it first, or choose another path" in done.stderr
        assert not folder.exists()
        folder.mkdir()
    done = run_script(NAME, mosaic, out, "--overlay", picture, "--s-xy", 9, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{mosaic} -> {out} on CPU: ")
    assert re.search(r"iB/s; .* stored in .*, ratio [\d.]+$", line)
    depth, spacing = read_omezarr(out)
    image = open_image(out)
    assert (depth.dtype, spacing) == (np.float32, (9.0, 11.0))
    assert [(axis.name, axis.unit) for axis in image.axes] == [("y", "micrometer"), ("x", "micrometer")]
    found = depth[...] / 4.0
    np.testing.assert_array_equal(found, np.rint(found))
    assert np.median(np.abs(found - surface_depth(SPEC))) <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mosaic.ome.zarr", "new", "pictures"]


def test_options_reach_the_method(main, mosaic, tmp_path, capsys):
    maps = []
    for number, words in enumerate([[], ["--no-log"], ["--s-z", "6"], ["--s-xy", "3"], ["--detect-cutting-errors"]]):
        assert main([str(mosaic), str(tmp_path / f"{number}.zarr"), "--device=cpu", *words]) == 0
        maps.append(zarr.open_group(tmp_path / f"{number}.zarr", mode="r")["0"][...])
    assert all(not np.array_equal(maps[0], one) for one in maps[1:4])


def test_another_level(main, tmp_path, capsys):
    volume = np.zeros((16, 8, 8), "f4")
    volume[10:] = 100
    source = write_omezarr(tmp_path / "m.zarr", volume, (5, 10, 10), levels=2)
    assert main([str(source), str(tmp_path / "s.zarr"), "--level", "1", "--device=cpu", "--s-xy", "1"]) == 0
    depth, spacing = read_omezarr(tmp_path / "s.zarr")
    assert (depth.shape, spacing) == ((4, 4), (20.0, 20.0))
    assert open_image(tmp_path / "s.zarr").origin[0] == (5.0, 5.0)
    assert (depth[...] == 10.0 * round(float(depth[0, 0]) / 10)).all()


def test_an_output_is_kept_unless_it_may_go(main, mosaic, tmp_path, capsys):
    out, picture = tmp_path / "s.zarr", tmp_path / "s.png"
    picture.write_text("mine")
    words = [mosaic, out, "--overlay", picture, "--device=cpu"]
    check_refused(capsys, main, words, PROGRAM, "s.png exists: choose another path, or replace it with --overwrite")
    assert not out.exists()
    assert picture.read_text() == "mine"
    assert main([*map(str, words), "--overwrite"]) == 0
    capsys.readouterr()
    before = (out / "zarr.json").stat().st_mtime_ns
    check_refused(capsys, main, words, PROGRAM, "s.zarr exists")
    assert (out / "zarr.json").stat().st_mtime_ns == before
    assert main([*map(str, words), "--overwrite"]) == 0
    assert (out / "zarr.json").stat().st_mtime_ns > before


def made(folder):
    write_mosaic(folder / "mosaic.zarr", MosaicSpec(tiles=(1, 1), tile_shape=(24, 8, 8)))
    write_omezarr(folder / "flat.zarr", np.zeros((4, 4)), (1, 1))
    zarr.create_array(folder / "bare.zarr", shape=(4, 4, 4), dtype="f4")
    (folder / "text").write_text("no image")
    (folder / "taken").mkdir()
    (folder / "taken.png").mkdir()
    return folder


BAD = {
    "no arguments": ([], "required: INPUT, OUTPUT"),
    "no output": (["{}/mosaic.zarr"], "required: OUTPUT"),
    "unknown option": (["{}/mosaic.zarr", "{}/o", "--wool"], "--wool"),
    "missing": (["{}/nowhere.zarr", "{}/o"], "nowhere.zarr"),
    "no zarr": (["{}/text", "{}/o"], "text"),
    "no image": (["{}/bare.zarr", "{}/o"], "not an OME-Zarr image"),
    "two axes": (["{}/flat.zarr", "{}/o"], "axes y, x; z, y and x of space are needed"),
    "no such level": (["{}/mosaic.zarr", "{}/o", "--level", "3"], "no resolution level 3"),
    "no mean": (["{}/mosaic.zarr", "{}/o", "--s-xy", "0"], "--s-xy 0"),
    "negative mean": (["{}/mosaic.zarr", "{}/o", "--s-xy", "-3"], "--s-xy -3"),
    "no Gaussian": (["{}/mosaic.zarr", "{}/o", "--s-z", "-1"], "--s-z -1.0"),
    "a Gaussian wider than the volume": (["{}/mosaic.zarr", "{}/o", "--s-z", "1e9"], "wider than the 24 voxels"),
    "no definition": (["{}/mosaic.zarr", "{}/o", "--definition", "wool"], "'wool'"),
    "no contrast": (["{}/mosaic.zarr", "{}/o", "--definition", "edge", "--min-contrast", "-1"], "--min-contrast -1"),
    "no number": (["{}/mosaic.zarr", "{}/o", "--s-z", "wool"], "'wool'"),
    "a folder that is no zarr": (["{}/mosaic.zarr", "{}/taken", "--overwrite"], "not a Zarr folder"),
    "a picture that is a folder": (
        ["{}/mosaic.zarr", "{}/o", "--overlay", "{}/taken.png", "--overwrite"],
        "is a folder",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused_is_refused_in_one_line(main, tmp_path, capsys, name):
    words, message = BAD[name]
    folder = made(tmp_path)
    before = sorted(folder.rglob("*"))
    check_refused(capsys, main, [word.format(folder) for word in words], PROGRAM, message)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu(main, mosaic, tmp_path, capsys):
    assert main([str(mosaic), str(tmp_path / "g.zarr"), "--device=cuda", "--overlay", str(tmp_path / "g.png")]) == 0
    assert " on GPU: " in capsys.readouterr().out
    assert main([str(mosaic), str(tmp_path / "c.zarr"), "--device=cpu"]) == 0
    on_gpu, on_cpu = (zarr.open_group(tmp_path / name, mode="r")["0"][...] / 4.0 for name in ("g.zarr", "c.zarr"))
    assert (on_gpu == on_cpu).mean() > 0.999
    assert np.abs(on_gpu - on_cpu).max() <= 1
