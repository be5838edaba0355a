"""If this fails, the script resamples wrong, or does not go on after a kill."""

import shutil
import signal

import numpy as np
import pytest
import zarr

from linumpy.gpu.interpolation import resample_volume
from linumpy.io.ome import open_image, read_omezarr
from linumpy.io.output import checks
from linumpy.write import new_image
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
from tests.support.script_runs import check_refused, kill_half_way, run_script

NAME, PROGRAM = "linum_resample", "linum-resample"
SPACING = (10.0, 6.0, 5.0)


def voxels(shape=(24, 41, 52)):
    return np.random.default_rng(0).integers(0, 60000, shape).astype("u2")


def values(path, level=0):
    return zarr.open_group(path, mode="r")[str(level)][...]


@pytest.fixture
def image(tmp_path):
    return write_omezarr(tmp_path / "m.ome.zarr", voxels(), SPACING, chunks=(8, 8, 8), levels=2, codec="none")


@pytest.mark.gpu
def test_several_gpus_by_their_numbers(image, main, tmp_path, capsys):
    for name, numbers in (("one", []), ("every", ["--devices", "all"]), ("listed", ["--devices", "0"])):
        assert main([str(image), str(tmp_path / name), "--resolution", "8", *numbers]) == 0, capsys.readouterr().err
        np.testing.assert_array_equal(values(tmp_path / name), values(tmp_path / "one"))


def test_a_run(image, tmp_path):
    out = tmp_path / "out.ome.zarr"
    done = run_script(NAME, image, out, "--resolution", 20, 13, 12, "--levels", 2, "--device=cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{image} -> {out} on CPU: ")
    array, spacing = read_omezarr(out)
    expected, reached = resample_volume(voxels(), SPACING, (20, 13, 12))
    np.testing.assert_allclose(spacing, reached)
    assert array.dtype == np.uint16
    assert np.array_equal(array[...], np.trunc(expected + 0.5).astype("u2"))
    assert len(open_image(out).levels) == 2
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.ome.zarr", "out.ome.zarr"]


def test_its_options_reach_the_library(main, image, tmp_path):
    def made(name, *words):
        assert main([str(image), str(tmp_path / name), "--resolution", "24", "--device=cpu", *words]) == 0
        return values(tmp_path / name)

    for name, words, options in (
        ("plain", ["--no-anti-aliasing"], {"anti_aliasing": False}),
        ("labels", ["--order", "0"], {"order": 0}),
        ("cubic", ["--order", "3"], {"order": 3}),
    ):
        expected, _ = resample_volume(voxels().astype("f8"), SPACING, 24, **options)
        assert np.abs(np.clip(expected, 0, 65535) - made(name, *words)).max() <= 0.51, name
    source = open_image(image)
    expected, _ = resample_volume(source.levels[1][...], source.spacing[1], 24)
    assert np.abs(expected - made("level", "--level", "1")).max() <= 0.51


def test_times_channels_and_a_spacing_that_the_metadata_lacks(main, tmp_path):
    made = np.stack([voxels(), voxels() // 2])[None]
    source = write_omezarr(tmp_path / "m.ome.zarr", made, SPACING, axes="tczyx", chunks=(1, 1, 8, 8, 8))
    words = [str(source), "--resolution", "24", "--device=cpu", "--spacing", "20", "12", "10"]
    assert main([*words, str(tmp_path / "all")]) == 0
    assert main([*words, str(tmp_path / "one"), "--channel", "1"]) == 0
    for channel in range(2):
        expected, _ = resample_volume(made[0, channel], (20, 12, 10), 24)
        assert np.array_equal(values(tmp_path / "all")[channel], np.trunc(expected + 0.5).astype("u2"))
    assert np.array_equal(values(tmp_path / "one"), values(tmp_path / "all")[1])


@pytest.mark.parametrize("rank", [2, 3])
def test_an_array(main, image, tmp_path, capsys, rank):
    """With a spacing it is resampled as the image is; without, the one error comes before anything is written."""
    array = zarr.create_array(tmp_path / "a.zarr", data=voxels()[(0,) * (3 - rank)], chunks=(8,) * rank)
    before = sorted(one.name for one in tmp_path.iterdir())
    for wrong, message in [([], "pass --spacing"), (["--spacing", "10", "6", "5", "--time", "0"], "--time 0")]:
        assert main([str(tmp_path / "a.zarr"), str(tmp_path / "b"), "--resolution", "9", *wrong]) == 2
        assert message in capsys.readouterr().err
        assert sorted(one.name for one in tmp_path.iterdir()) == before
    words = ["--resolution", "9", "--device=cpu", "--spacing", "10", "6", "5"]
    assert main([str(tmp_path / "a.zarr"), str(tmp_path / "b"), *words]) == 0, capsys.readouterr().err
    expected, _ = resample_volume(array[...], SPACING[-rank:], 9.0)
    np.testing.assert_allclose(values(tmp_path / "b"), expected, atol=0.51)  # rounded to whole numbers
    assert f"{array.nbytes / 1024:.3g} KiB" in capsys.readouterr().out


def test_refusals(main, image, tmp_path, capsys):
    new, cpu = tmp_path / "x.zarr", "--device=cpu"
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "kept").touch()
    plain = zarr.create_array(tmp_path / "plain.zarr", shape=(4, 4), dtype="u2").store.root
    flags = write_omezarr(tmp_path / "b.zarr", np.zeros((8, 8, 8), "?"), (5, 5, 5))
    for words, message in [
        ([image, taken, "--resolution", 10, cpu], "exists"),
        ([image, taken, "--resolution", 10, "--overwrite", cpu], "not a Zarr folder"),
        ([image, image, "--resolution", 10, "--overwrite", cpu], "would replace the source"),
        ([image, image / "new.zarr", "--resolution", 10, cpu], "inside the source"),
        ([image, "https://bucket/x", "--resolution", 10, cpu], "https://bucket/x is no URL of a bucket"),
        ([tmp_path / "none", new, "--resolution", 10, cpu], "none"),
        ([plain, new, "--resolution", 10, cpu], "pass --spacing Z Y X in µm"),
        ([image, new, cpu], "--resolution"),
        ([image, new, "--resolution", "ten", cpu], "'ten'"),
        ([image, new, "--resolution", 0, cpu], "0.0"),
        ([image, new, "--resolution", "nan", cpu], "nan"),
        ([image, new, "--resolution", 10, 10, cpu], "3 axes"),
        ([image, new, "--resolution", 10, "--levels", 0, cpu], "--levels 0"),
        ([image, new, "--resolution", 10, "--level", 2, cpu], "no resolution level 2"),
        ([image, new, "--resolution", 10, "--order", 6, cpu], "--order 6"),
        ([image, new, "--resolution", 10, "--memory", 0, cpu], "--memory 0"),
        ([image, new, "--resolution", 10, "--memory", "nan", cpu], "--memory nan"),
        ([image, new, "--resolution", 10, "--memory", 1e-6, cpu], "or more --memory GIB"),
        ([image, new, "--resolution", 10, "--devices", "0;1"], "'0;1'"),
        ([image, new, "--resolution", 10, "--devices", "all", cpu], "--device cpu"),
        ([image, new, "--resolution", 10, "--devices", "0", "--cluster", "tcp://a:1"], "not together with"),
        ([flags, new, "--resolution", 10, cpu], "bool"),
        ([image, tmp_path / "x.png", "--resolution", 10, cpu], "x.png"),
    ]:
        check_refused(capsys, main, words, PROGRAM, message)
    assert [one.name for one in taken.iterdir()] == ["kept"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["b.zarr", "m.ome.zarr", "plain.zarr", "taken"]


def test_what_cannot_fit_is_refused_before_it_is_begun(main, image, tmp_path, capsys, monkeypatch):
    words = [image, tmp_path / "x", "--resolution", 0.01, "--device=cpu"]
    check_refused(capsys, main, words, PROGRAM, "iB are free")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    check_refused(capsys, main, [image, tmp_path / "x", "--resolution", 20], PROGRAM, "iB are free")
    assert [one.name for one in tmp_path.iterdir()] == ["m.ome.zarr"]


def test_without_a_gpu_it_says_so(main, image, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    words = [image, tmp_path / "x", "--resolution", 10, "--device=cuda"]
    check_refused(capsys, main, words, PROGRAM, "there is none")


def test_an_output_is_replaced_only_when_asked(main, image, tmp_path):
    out = tmp_path / "out"
    words = [str(image), str(out), "--device=cpu"]
    assert main([*words, "--resolution", "20"]) == 0
    assert main([*words, "--resolution", "12"]) == 2
    coarse = values(out).shape
    assert main([*words, "--resolution", "12", "--overwrite"]) == 0
    assert values(out).shape > coarse


@pytest.mark.parametrize("sent", first([signal.SIGKILL, signal.SIGTERM]))
def test_a_killed_run_goes_on_where_it_was(sent, main, image, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(new_image, "_CHUNK_NBYTES", 1024)
    out = tmp_path / "out"
    words = [image, out, "--resolution", 7, "--memory", 0.0003, "--device=cpu"]
    assert kill_half_way(NAME, words, after=3, sent=sent, chunk_nbytes=1024) != 0
    assert sorted(one.name for one in tmp_path.iterdir()) == [".out.unfinished", "m.ome.zarr"]
    check_refused(capsys, main, [*words, "--no-anti-aliasing"], PROGRAM, "differs in anti_aliasing")
    (begun,) = (tmp_path / ".out.unfinished").glob("image-*")
    first = begun / "0/c/0/0/0"
    before = first.stat().st_mtime_ns
    assert main([str(word) for word in words]) == 0
    assert (out / "0/c/0/0/0").stat().st_mtime_ns == before  # what was there is not made again
    expected, _ = resample_volume(voxels(), SPACING, 7)
    assert np.array_equal(values(out), np.trunc(expected + 0.5).astype("u2"))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.ome.zarr", "out"]


@pytest.mark.gpu
@pytest.mark.parametrize("order", [0, 1, 3])
def test_the_same_on_a_gpu(main, image, tmp_path, order):
    for name, device in (("gpu", "--device=cuda"), ("cpu", "--device=cpu")):
        words = [str(image), str(tmp_path / name), "--resolution", "13.7", "--order", str(order), device]
        assert main(words) == 0
    got, expected = values(tmp_path / "gpu").astype("f8"), values(tmp_path / "cpu")
    assert (np.abs(got - expected) > 1).mean() < (1e-3 if order == 0 else 1e-9)
