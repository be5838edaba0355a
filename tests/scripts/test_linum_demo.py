"""If this fails, the demo does not run as people call it."""

import numpy as np
import pytest

from tests.support.script_runs import check_refused, help_of, load, run_script


def test_a_run(tmp_path):
    result = run_script("linum_demo", "--out", tmp_path / "o", "--device=cpu")
    assert result.returncode == 0, result.stderr
    assert "median absolute error" in result.stdout
    assert result.stderr == ""
    again = run_script("linum_demo", "--out", tmp_path / "o", "--device=cpu")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.count("\n") == 1
    assert "mosaic.ome.zarr exists: choose another path, or replace it with --overwrite" in again.stderr


@pytest.mark.parametrize("script", ["linum_demo", "linum_gpu_info", "linum_benchmark_kvikio_zarr"])
def test_help(script, capsys):
    assert "For example:" in help_of(script, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "huge"], "--size: invalid choice: 'huge'"),
        (["--what"], "unrecognized arguments: --what"),
        (["--seed", "3"], "--seed is of --pipeline"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    check_refused(capsys, load("linum_demo").main, ["--out", tmp_path / "o", *arguments], "linum-demo", message)
    assert not (tmp_path / "o").exists()


def test_no_device_is_told_in_one_line(tmp_path):
    # No device to be seen: so too on a machine that has one.
    result = run_script("linum_demo", "--out", tmp_path / "o", "--device=cuda", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert any(why in result.stderr for why in ("CUDA finds no device", "CuPy is not installed", "no NVIDIA driver"))
    assert not (tmp_path / "o").exists()


def test_the_device_of_the_environment(tmp_path):
    result = run_script("linum_demo", "--out", tmp_path / "o", LINUMPY_DEVICE="tpu")
    assert result.returncode == 2
    assert result.stderr == "linum-demo: error: LINUMPY_DEVICE='tpu' is unknown: set it to one of auto, cuda, cpu\n"


def test_gpu_info(tmp_path):
    result = run_script("linum_gpu_info", "--path", tmp_path)
    assert result.returncode == 0, result.stderr
    for part in ("device", "driver", "CuPy", "kvikio", "GDS", f"folder      {tmp_path}", "path  "):
        assert part in result.stdout


def test_seeds_draw_brains_of_each_kind_whose_surface_is_in_the_tiles():
    from linumpy.demo_brain import BRAINS, drawn_brain
    from linumpy.testing.brain import truth_surface

    for size, geometry in BRAINS.items():
        drawn = [drawn_brain(size, seed) for seed in range(9)]
        assert len({spec.faults for spec in drawn}) == 9
        assert [spec.coverage is None for spec in drawn] == [True, False, False] * 3
        assert [len(spec.faults.absent) for spec in drawn] == [0, 0, 1] * 3
        for spec in drawn:
            assert (spec.tile_shape, spec.faults.galvo) == (geometry.tile_shape, geometry.faults.galvo)
            last = tuple(n - 1 for n in spec.tiles)
            depths = [truth_surface(spec, 0, *place) for place in ((0, 0), (0, last[1]), (last[0], 0), last)]
            assert min(map(np.min, depths)) > 0
            assert max(map(np.max, depths)) < 0.4 * spec.tile_shape[0]
