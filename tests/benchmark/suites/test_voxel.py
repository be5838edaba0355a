"""If this fails, times of voxel operations are taken of wrong results, unnoticed."""

import importlib.util

import numpy as np
import pytest

from linumpy.benchmark.cases import CannotRunError, kernel_cases
from linumpy.benchmark.command import Output, main, run
from linumpy.benchmark.runner import Settings
from linumpy.benchmark.suites.kernels import voxel
from linumpy.benchmark.suites.kernels.voxel import MAKERS, sphere_mesh
from linumpy.voxel.grid import make_grid
from linumpy.voxel.mesh import ORIENTED, make_mesh

needs_warp = pytest.mark.skipif(
    importlib.util.find_spec("warp") is None, reason="Warp is not installed: pip install warp-lang"
)


@needs_warp
@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    case = MAKERS[name](np, 0.09)
    for entry in case.entries:
        with entry.prepare() as one:
            if one.before is not None:
                one.before()
            result = one.call()
            if entry.role == "ours":
                assert one.check(result) == ""
                assert result.any()
                assert not result.all()
                assert one.check(~result) != ""
        assert 0 < entry.share <= 1
    assert [entry.name for entry in case.entries][-1] == "scipy"
    assert case.marks


@pytest.mark.parametrize("triangles", [100, 5000])
def test_the_sphere_is_closed(triangles):
    points, faces = sphere_mesh(np, triangles, 3.0, 5.0)
    assert 0.5 * triangles < len(faces) < 1.5 * triangles
    assert np.allclose(np.linalg.norm(points - 5, axis=1), 3)
    assert make_mesh(np, points, faces, make_grid((1, 1, 1), (0, 0, 0), 0.01)).kind == ORIENTED
    a, b, c = (points[faces[:, corner]] - 5 for corner in range(3))
    assert (np.einsum("ij,ij->i", a, np.cross(b, c)) > 0).all()


def test_without_warp_a_case_says_so(monkeypatch):
    monkeypatch.setattr(voxel, "why_no_warp", lambda: "Warp is not here")
    with pytest.raises(CannotRunError, match="Warp is not here"):
        MAKERS["boolean"](np, 0.1)


def test_help_and_bad_arguments(capsys, monkeypatch):
    monkeypatch.setattr("linumpy.device.why_no_cuda", lambda *_: "there is none")
    for arguments, code, text in [
        (["--help"], 0, "--only"),
        (["--only", "x"], 2, "'x'"),
        (["--runs", "0"], 2, "--runs 0"),
        ([], 2, "linum-benchmark voxel: error: there is none"),
    ]:
        with pytest.raises(SystemExit) as done:
            main(["voxel", *arguments])
        out = capsys.readouterr()
        assert done.value.code == code
        assert text in out.out + out.err


@pytest.mark.gpu
@needs_warp
def test_all_cases_on_a_device(tmp_path):
    _, *results = run(kernel_cases(MAKERS, 0.25), Settings(2), Output(tmp_path / "out.json"))
    assert len(results) == len(MAKERS)
    assert all(one.ours.verdict == "ok" for one in results), [one.ours.note for one in results]
