"""If this fails, slices are not registered and stacked from the command line as from Python."""

import json

import numpy as np
import pytest
import zarr

from linumpy.io.ome import open_image
from linumpy.mosaic.alignment.transforms import read_transforms
from linumpy.testing.brain import BrainSpec, Faults
from linumpy.testing.brain_files import write_brain
from tests.support.script_runs import load, record_bars

SPEC = BrainSpec(slices=3, tiles=(1, 1), tile_shape=(24, 64, 70), interval_um=160.0, faults=Faults(translation=3))
REGISTER, STACK = "linum_register_pairwise", "linum_stack_slices"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_brain(SPEC, tmp_path_factory.mktemp("b") / "brain")


def test_slices_become_a_stack(folder, tmp_path, capsys):
    slices, transforms, stack = folder / "mosaics", tmp_path / "t.json", tmp_path / "s.ome.zarr"
    words = [slices, transforms, "--slicing-interval-mm", "0.16", "--no-crop", "--shifts", folder / "shifts.csv"]
    assert load(REGISTER).main([*map(str, words), "--device=cpu", "--scene"]) == 0
    assert "fixed moving" in capsys.readouterr().out
    found = read_transforms(transforms)
    assert [one.number for one in found.slices] == [0, 1, 2]
    assert {(pair.fixed_id, pair.moving_id) for pair in found.pairs} == {(0, 1), (1, 2), (0, 2)}
    assert "scene" in json.loads((slices / "zarr.json").read_text())["attributes"]["ome"]
    words = [slices, transforms, stack, "--device=cpu", "--levels", "2", "--codec", "lz4"]
    assert load(STACK).main([str(word) for word in words]) == 0
    assert "on CPU" in capsys.readouterr().out
    group = zarr.open_group(stack, mode="r")
    assert group["0"].shape[0] == 56
    assert np.asarray(group["1"]).shape[0] == 28
    assert load(STACK).main([*map(str, words[:3]), "--resolution", "20", "--overwrite", "--device=cpu"]) == 0
    assert zarr.open_group(stack, mode="r")["0"].shape[0] == 28


def test_progress_is_shown_to_its_end(folder, tmp_path, capsys, monkeypatch):
    """Of commands that make no image: what they count adds up to the total; the rest is quiet."""
    bars, slices = record_bars(monkeypatch), folder / "mosaics"
    paths = sorted(slices.glob("slice*"))
    words = [slices, tmp_path / "t.json", "--slicing-interval-mm", "0.16", "--device=cpu", "-q"]
    assert load(REGISTER).main([*map(str, words)]) == 0
    assert load("linum_report").main([str(slices), str(tmp_path / "r.html"), "--device=cpu", "-q"]) == 0
    assert load("linum_estimate_beam").main([str(slices), str(tmp_path / "b.json"), "--device=cpu", "-q"]) == 0
    words = [*paths, tmp_path / "f.npz", "--tile-shape", "16", "14", "--max-tiles", "8", "--device=cpu", "-q"]
    assert load("linum_estimate_illumination").main([*map(str, words)]) == 0
    assert capsys.readouterr() == ("", "")
    nbytes = 8 * 24 * 16 * 14 * open_image(paths[0]).levels[0].dtype.itemsize
    assert {label: (total, unit) for label, (_, total, unit) in bars.items()} == {
        "surfaces": (3 * 2 * 2, "column"), "faces": (bars["faces"][1], "tile"), "pairs": (3, "pair"),
        "images": (3, "image"), "samples": (3, "slice"), "illumination": (nbytes, "B"),
    }  # fmt: skip
    assert all(count == total > 0 for count, total, _ in bars.values())


@pytest.mark.parametrize(("name", "words", "told"), [
    (REGISTER, ["{f}", "{t}/t.json", "--slicing-interval-mm", "-1"], "mm -1.0: pass a number above 0"),
    (REGISTER, ["{f}", "{t}/t.json", "--slicing-interval-mm", "160"], "pass millimetres"),
    (REGISTER, ["{t}", "{t}/t.json", "--slicing-interval-mm", "1"], "no slices"),
    (REGISTER, ["{f}", "{t}/no/t.json", "--slicing-interval-mm", "1"], "no"),
    (REGISTER, ["{f}", "{t}/t.json", "--slicing-interval-mm", "1", "--reach", "0"], "--reach"),
    (STACK, ["{f}", "{t}/t.json", "{t}/s.zarr"], "t.json"),
    (STACK, ["{f}", "{f}/slice_z00.ome.zarr/zarr.json", "{t}/s.zarr"], "linum-register-pairwise"),
    (STACK, ["{f}", "{t}/t.json", "{t}/s.zarr", "--resolution", "1", "2"], "one number, or three"),
])  # fmt: skip
def test_bad_input_is_one_line(folder, tmp_path, capsys, name, words, told):
    texts = [word.format(f=folder / "mosaics", t=tmp_path) for word in words]
    assert load(name).main([*texts, "--device=cpu"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "s.zarr").exists()
