"""If this fails, times of resampling are taken of wrong results, unnoticed."""

import sys
import types

import numpy as np
import pytest
from scipy import ndimage

from linumpy.benchmark.cases import CannotRunError, kernel_cases
from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.runner import Settings, failures
from linumpy.benchmark.suites.kernels.resampling import MAKERS
from linumpy.benchmark.suites.kernels.resampling import grid_sample as torch_grid_sample


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    case = MAKERS[name](np, 0.06)
    with case.entries[0].prepare() as ours, case.entries[1].prepare() as peer:
        result = ours.call()
        assert case.name == name
        assert ours.check(result) == ""
        assert ours.check(result + result.dtype.type(2)) != ""
        assert np.allclose(peer.call().astype("f8"), result, atol=1)
    assert [entry.role for entry in case.entries[:2]] == ["ours", "peer"]
    assert case.nbytes > 0


def grid_sample(volume, grid, mode, padding_mode, align_corners):
    """PyTorch's, from its documentation: coordinates from -1 to 1, the centres of the outermost voxels, x first."""
    assert (mode, padding_mode, align_corners) == ("bilinear", "zeros", True)
    assert volume.ndim == grid.ndim == 5
    assert volume.shape[:2] == (1, 1)
    assert grid.shape[-1] == 3
    coordinates = [(grid[0, ..., 2 - axis] + 1) / 2 * (n - 1) for axis, n in enumerate(volume.shape[2:])]
    return ndimage.map_coordinates(volume[0, 0], coordinates, order=1, mode="grid-constant")[None, None]


@pytest.fixture
def torch(monkeypatch):
    module = types.ModuleType("torch")
    module.from_dlpack = np.from_dlpack
    module.nn = types.SimpleNamespace(functional=types.SimpleNamespace(grid_sample=grid_sample))
    monkeypatch.setitem(sys.modules, "torch", module)


@pytest.mark.parametrize("name", ["map-linear-smooth", "map-linear-random"])
def test_torch_is_asked_for_the_same(torch, name):
    entry = MAKERS[name](np, 0.06).entries[2]
    assert entry.name == "torch"
    with entry.prepare() as other:
        result = other.call()
        assert other.check(result) == ""
        assert other.check(result + np.float32(5)) != ""
        assert other.check(result[..., ::-1].copy()) != ""


def test_coordinates_of_images_that_are_no_cubes(torch):
    rng = np.random.default_rng(0)
    image = rng.normal(size=(5, 7, 11)).astype("f4")
    coordinates = np.stack([rng.uniform(0, n - 1, (4, 6)) for n in image.shape]).astype("f4")
    seen = []
    with torch_grid_sample(image, coordinates, lambda got: seen.append(got) or "") as other:
        assert other.check(other.call()) == ""
    assert seen[0].shape == (4, 6)
    assert np.allclose(seen[0], ndimage.map_coordinates(image, coordinates, order=1), atol=1e-4)


def test_without_torch_there_is_no_figure(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CannotRunError, match="torch is not installed"):
        MAKERS["map-linear-smooth"](np, 0.06).entries[2].prepare().__enter__()
    entries = {name: [entry.name for entry in make(np, 0.03).entries] for name, make in MAKERS.items()}
    assert [name for name, keys in entries.items() if "torch" in keys] == ["map-linear-smooth", "map-linear-random"]
    assert all(("copy-as-many" in keys) == name.startswith("labels") for name, keys in entries.items())


def run_cases(folder, names, scale, xp=None):
    """Run cases; every entry is right, but for PyTorch's where that is not installed."""
    output = Output(folder / "out.json", folder / "out.png")
    copy, *results = run(kernel_cases({name: MAKERS[name] for name in names}, scale, xp=xp), Settings(2), output)
    assert copy.entries[0].rate > 0
    assert [one.case.name for one in results] == list(names)
    verdicts = {
        f"{one.case.name}/{entry.name}": (entry.verdict, entry.note)
        for one in results
        for entry in one.entries
        if entry.verdict != "ok" and (entry.name, entry.verdict) != ("torch", "cannot run")
    }
    assert verdicts == {}
    thirds = {one.case.name: one.entries[2].name for one in results if len(one.entries) > 2}
    assert {name for name, third in thirds.items() if third == "copy-as-many"} == {n for n in names if "labels" in n}
    by_torch = {"map-linear-smooth", "map-linear-random"}
    assert {name for name, third in thirds.items() if third == "torch"} == by_torch & set(names)
    assert failures(results) == 0
    assert output.json.stat().st_size > 0
    assert output.plot.stat().st_size > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MAKERS)
def test_a_case_on_a_device(tmp_path, name):
    run_cases(tmp_path, [name], 0.25)


@pytest.mark.slow
def test_all_cases_on_the_cpu(tmp_path):
    run_cases(tmp_path, MAKERS, 0.06, np)


def test_some_cases_on_the_cpu(tmp_path):
    """By the same lines as on a device, which the ordinary tests do not run; each case by itself is tested above."""
    run_cases(tmp_path, ["map-linear-smooth", next(name for name in MAKERS if "labels" in name)], 0.06, np)


def test_without_a_gpu_it_says_so(capsys):
    from linumpy.device import why_no_cuda

    if why_no_cuda() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as caught:
        main(["resampling"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
