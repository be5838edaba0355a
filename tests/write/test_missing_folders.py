"""If this fails, a typing error in an output path makes folders."""

import numpy as np
import pytest

from linumpy import OmeZarrWriter, resample_zarr
from linumpy.demo import run_demo
from linumpy.io.output.checks import check_target
from linumpy.io.output.files import check_picture, replacing
from linumpy.testing.synthetic import MosaicSpec, write_mosaic
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load

SPEC = MosaicSpec((2, 2), (32, 16, 16))


def write_file(path):
    with replacing(path):
        pass


FUNCTIONS = {
    "writer": lambda source, path: OmeZarrWriter(path, (4, 4), "u1", (1, 1)),
    "write_omezarr": lambda source, path: write_omezarr(path, np.ones((4, 4), "u1"), (1, 1)),
    "resample_zarr": lambda source, path: resample_zarr(source, path, 20.0, device="cpu"),
    "replacing": lambda source, path: write_file(path),
    "check_target": lambda source, path: check_target(path, overwrite=False),
    "check_picture": lambda source, path: check_picture(f"{path}.png", overwrite=True),
    "demo": lambda source, path: run_demo(path, device="cpu"),
}


@pytest.fixture
def mosaic(tmp_path):
    for number in range(2):
        write_mosaic(tmp_path / f"m_z{number}.ome.zarr", SPEC, chunks=(32, 16, 16))
    return tmp_path / "m_z0.ome.zarr"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("place", ["nosuch/x", "nosuch/dir/x", "file/x", "m_z0.ome.zarr/../nosuch/x"])
def test_functions(tmp_path, mosaic, name, place):
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    lacking = "file" if place == "file/x" else "nosuch"
    with pytest.raises(FileNotFoundError, match=rf"x.*: there is no folder .*/{lacking}: make it first, or choose"):
        FUNCTIONS[name](mosaic, tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


COMMANDS = {
    "linum_resample": ["{m}", "{x}", "--resolution", "20"],
    "linum_aip": ["{m}", "{x}"],
    "linum_aip_png": ["{m}", "{x}.png"],
    "linum_resample_mosaic_grid": ["{m}", "{x}", "--resolution", "20"],
    "linum_find_tissue_interface": ["{m}", "{x}"],
    "linum_detect_focal_curvature": ["{m}", "{x}"],
    "linum_stack_slices_motor": ["{f}", "{f}/s.csv", "{x}", "--slicing-interval-mm", "0.1"],
    "linum_fix_galvo_shift": ["{m}", "{x}"],
    "linum_register_pairwise": ["{f}", "{x}", "--slicing-interval-mm", "0.1"],
    "linum_demo": ["--device", "cpu", "--out", "{x}"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(tmp_path, mosaic, capsys, name):
    before = sorted(tmp_path.rglob("*"))
    words = [one.format(m=mosaic, f=tmp_path, x=tmp_path / "nosuch/dir/x") for one in COMMANDS[name]]
    assert load(name).main(words) == 2
    assert f"there is no folder {tmp_path}/nosuch: make it first, or choose another path" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bare_name_is_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_omezarr("a", np.ones((4, 4), "u1"), (1, 1))
    run_demo("demo", device="cpu")
    assert {one.name for one in tmp_path.iterdir()} == {"a", "demo"}
