"""The benchmark of resampling: its cases are right, and its checks notice what is wrong."""

import sys
import types

import matplotlib.image
import numpy as np
import pytest
from scipy import ndimage

from linumpy.benchmark import kernel_plot, torch_peer
from linumpy.benchmark.kernel_run import KernelRequest, KernelResult, make_cases, row, run
from linumpy.benchmark.resampling import MAKERS
from scripts import linum_benchmark_resampling as script


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    (case,) = make_cases(MAKERS, np, 0.06, (name,))
    result = case.ours()
    assert case.name == name
    assert case.check(result) == ""
    assert case.check(result + result.dtype.type(2)) != ""
    assert np.allclose(case.peer().astype("f8"), result, atol=1)
    assert case.nbytes > 0


def grid_sample(volume, grid, mode, padding_mode, align_corners):
    """PyTorch's, from its documentation: places from -1 to 1, the centres of the outermost voxels, x first."""
    assert (mode, padding_mode, align_corners) == ("bilinear", "zeros", True)
    assert volume.ndim == grid.ndim == 5
    assert volume.shape[:2] == (1, 1)
    assert grid.shape[-1] == 3
    places = [(grid[0, ..., 2 - axis] + 1) / 2 * (n - 1) for axis, n in enumerate(volume.shape[2:])]
    return ndimage.map_coordinates(volume[0, 0], places, order=1, mode="grid-constant")[None, None]


@pytest.fixture
def torch(monkeypatch):
    module = types.ModuleType("torch")
    module.from_dlpack = np.from_dlpack
    module.nn = types.SimpleNamespace(functional=types.SimpleNamespace(grid_sample=grid_sample))
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.parametrize("name", ["map-linear-smooth", "map-linear-random"])
def test_torch_is_asked_for_the_same(torch, name):
    (case,) = make_cases(MAKERS, np, 0.06, (name,))
    other = case.other()
    assert other.name == "torch"
    result = other.call()
    assert other.check(result) == ""
    assert other.check(result + np.float32(5)) != ""
    assert other.check(result[..., ::-1].copy()) != ""


def test_places_of_images_that_are_no_cubes(torch):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(5, 7, 11)).astype("f4")
    places = np.stack([rng.uniform(0, n - 1, (4, 6)) for n in image.shape]).astype("f4")
    seen = []
    other = torch_peer.grid_sample(image, places, lambda got: seen.append(got) or "")
    assert other.check(other.call()) == ""
    assert seen[0].shape == (4, 6)
    assert np.allclose(seen[0], ndimage.map_coordinates(image, places, order=1), atol=1e-4)


def test_without_torch_there_is_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (case,) = make_cases(MAKERS, np, 0.06, ("map-linear-smooth",))
    assert case.other() is None
    assert [name for name, make in MAKERS.items() if make(np, 0.03).other is not None] == [
        "map-linear-smooth",
        "map-linear-random",
    ]


def result(**changes):
    values = {"wrong": "", "ours_ms": (1.0, 2.0, 3.0), "peer_ms": (8.0,), "share_of_copy": 0.4, **changes}
    return KernelResult("map-linear-smooth", (4, 5, 6), "float32", 1.8, **values)


def test_another_package_in_the_table():
    assert row(result()).endswith("met")
    assert row(result(other="torch", other_ms=(5.0, 6.0, 7.0))).endswith("met  torch 6 ms, × 3.0")
    assert row(result(other="torch", other_wrong="off by 3")).endswith("met  torch: off by 3")


def test_the_plot_shows_all_that_have_times(tmp_path):
    results = [
        result(other="torch", other_ms=(5.0, 6.0, 7.0)),
        result(),
        KernelResult("x", (1,), "u1", None, "it differs"),
    ]
    assert [kernel_plot.bars(one) for one in results] == [
        [("linumpy", 2.0), ("CuPy", 8.0), ("torch", 6.0)],
        [("linumpy", 2.0), ("CuPy", 8.0)],
        [],
    ]
    kernel_plot.draw(results, "NVIDIA H200", tmp_path / "all.png")
    kernel_plot.draw(results[1:], "NVIDIA H200", tmp_path / "two.png")
    colours = {
        tuple(c) for c in (matplotlib.image.imread(tmp_path / "all.png") * 255).round().astype(int).reshape(-1, 4)
    }
    assert {(0, 0x72, 0xB2, 255), (0x99, 0x99, 0x99, 255), (0xE6, 0x9F, 0, 255)} <= colours
    heights = [matplotlib.image.imread(tmp_path / name).shape[0] for name in ("all.png", "two.png")]
    assert heights[0] > heights[1]


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        KernelRequest(plot=tmp_path / "no" / "out.png")
    with pytest.raises(ValueError, match="a plot is"):
        KernelRequest(plot=tmp_path / "out.doc")


@pytest.mark.gpu
@pytest.mark.gpu_alone
def test_all_cases_on_a_device(tmp_path):
    json, plot = tmp_path / "out.json", tmp_path / "out.png"
    results = run(KernelRequest(runs=2, scale=0.25, json=json, plot=plot), MAKERS)
    assert [one.name for one in results] == list(MAKERS)
    assert [one.wrong for one in results] == [""] * len(MAKERS)
    assert [one.other_wrong for one in results] == [""] * len(MAKERS)
    assert json.stat().st_size > 0
    assert plot.stat().st_size > 0


def test_without_a_gpu_it_says_so(capsys):
    from linumpy.device import why_no_cuda

    if why_no_cuda() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as caught:
        script.main([])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
