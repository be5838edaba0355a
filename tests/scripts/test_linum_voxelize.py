"""If this fails, linum-voxelize writes masks that do not lie in the image, in some order of its axes."""

import numpy as np
import pytest

from linumpy.io.ome import open_image
from linumpy.voxel.backends.operations import Backend
from linumpy.write.writer import write_omezarr
from tests.support.budget import first
from tests.support.script_runs import check_refused, load, record_bars, run_script

trimesh = pytest.importorskip("trimesh", reason="trimesh is not installed: pip install trimesh")

SIZES, SPACING, ORIGIN = {"z": 12, "y": 15, "x": 19}, {"z": 4.0, "y": 2.0, "x": 1.0}, {"z": 50.0, "y": -7.0, "x": 3.0}


def image(path, axes="zyx"):
    values = [[one[axis] for axis in axes] for one in (SIZES, SPACING, ORIGIN)]
    return write_omezarr(path, np.zeros(values[0], "u2"), values[1], axes=axes, origin=values[2])


@pytest.fixture
def mesh(tmp_path):
    made = trimesh.creation.icosphere(2, 9.0)
    made.apply_translation((11.0, 8.0, 72.0))
    made.export(tmp_path / "mesh.ply")
    return tmp_path / "mesh.ply"


def right(mesh):
    """The mask (Z, Y, X), by the vertices that the file holds."""
    found = trimesh.load_mesh(mesh)
    low = [ORIGIN[axis] - SPACING[axis] / 2 for axis in "xyz"]
    high = [a + SIZES[axis] * SPACING[axis] for a, axis in zip(low, "xyz", strict=True)]
    return Backend().voxelize_mesh(found.vertices, found.faces, (low, high), [SPACING[axis] for axis in "xyz"])


@pytest.mark.parametrize("axes", first(["yzx", "zyx", "xyz"]))
def test_a_run(mesh, tmp_path, axes):
    source, out = image(tmp_path / "i.ome.zarr", axes), tmp_path / "o.ome.zarr"
    done = run_script("linum_voxelize", mesh, source, out, "--unit", "um", "--label", "300", "--device=cpu")
    assert done.returncode == 0, done.stderr
    made = open_image(out)
    assert "".join(axis.name for axis in made.axes) == axes
    assert (made.spacing[0], made.origin[0]) == (open_image(source).spacing[0], open_image(source).origin[0])
    found = made.levels[0][...]
    assert found.dtype == np.uint16
    mask = right(mesh)
    assert mask.sum() * 8 == pytest.approx(4 / 3 * np.pi * 9**3, rel=0.1)
    assert np.array_equal(found.transpose([axes.index(axis) for axis in "zyx"]), 300 * mask.astype("u2"))
    lines = done.stdout.splitlines()
    assert lines[0] == f"320 triangles, watertight: {mask.sum()} voxels, {mask.sum() * 8 / 1e9:.4g} mm³"
    assert lines[1].startswith(f"{mesh} -> {out} on CPU: ")


def test_units_shifts_and_other_files(mesh, tmp_path, monkeypatch):
    """The same sphere in mm and elsewhere, as loose triangles of an .stl and as an .obj."""
    script, source = load("linum_voxelize"), image(tmp_path / "i.ome.zarr")
    expected, bars = right(mesh), record_bars(monkeypatch)
    found = trimesh.load_mesh(mesh)
    found.vertices = (found.vertices - (100, 200, -300)) / 1e3
    for kind in ("stl", "obj"):
        found.export(tmp_path / f"m.{kind}")
        words = [tmp_path / f"m.{kind}", source, tmp_path / f"{kind}.ome.zarr", "--unit", "mm", "--device=cpu"]
        assert script.main([*map(str, words), "--shift", "-300", "200", "100"]) == 0
        made = open_image(tmp_path / f"{kind}.ome.zarr").levels[0][...]
        assert made.dtype == np.uint8
        assert np.count_nonzero(made.astype(bool) != expected) <= 2  # float32 in a file, in mm
        assert bars["voxelizing"] == [SIZES["z"], SIZES["z"], "plane"]


def test_an_open_mesh(mesh, tmp_path, caplog, capsys):
    script, source = load("linum_voxelize"), image(tmp_path / "i.ome.zarr")
    found = trimesh.load_mesh(mesh)
    found.update_faces(np.arange(len(found.faces)) > 0)
    found.export(tmp_path / "open.ply")
    counts = []
    for name, more in (("filled", []), ("shell", ["--no-fill-holes"])):
        words = [tmp_path / "open.ply", source, tmp_path / f"{name}.ome.zarr", "--unit", "um", "--device=cpu", *more]
        assert script.main(list(map(str, words))) == 0
        counts.append(np.count_nonzero(open_image(tmp_path / f"{name}.ome.zarr").levels[0][...]))
        assert "319 triangles, not watertight" in capsys.readouterr().out
    assert counts[0] > 1.3 * counts[1]
    assert "not watertight: 3 edges (0.62 %) are open" in caplog.text


def test_what_it_refuses(mesh, tmp_path, capsys):
    script, source, out = load("linum_voxelize"), image(tmp_path / "i.ome.zarr"), tmp_path / "o.ome.zarr"
    (tmp_path / "no.stl").write_text("this is no mesh")
    trimesh.PointCloud([[0, 0, 0]]).export(tmp_path / "points.ply")
    for words, message in [
        ([mesh, source, out], "does not give the unit of its coordinates: give --unit"),
        ([mesh, source, out, "--unit", "inch"], "invalid choice: 'inch'"),
        ([tmp_path / "x.stl", source, out, "--unit", "um"], "there is no file"),
        ([tmp_path / "no.stl", source, out, "--unit", "um"], "no.stl "),
        ([tmp_path / "points.ply", source, out, "--unit", "um"], "points.ply contains no triangles"),
        ([mesh, source, out, "--unit", "um", "--label", "0"], "--label 0: an integer from 1"),
        ([mesh, source, out, "--unit", "m"], "is it in µm"),
        ([mesh, source, source, "--unit", "um"], "i.ome.zarr"),
        ([mesh, source, source, "--unit", "um", "--overwrite"], "would replace the source"),
        ([mesh, source, source / "o.ome.zarr", "--unit", "um"], "would lie inside the source"),
        ([mesh, source, out, "--unit", "um", "--shift", "nan", "0", "0"], "--shift [nan, 0.0, 0.0]: pass three finite"),
    ]:
        check_refused(capsys, script.main, [*words, "--device=cpu"], "linum-voxelize", message)
    assert not out.exists()
    assert open_image(source).levels[0].dtype == np.uint16  # the image is there as it was


def test_a_mesh_beside_the_image(mesh, tmp_path, caplog):
    """An empty result may be right, but is more often a mistake of the unit or of the position."""
    script, source = load("linum_voxelize"), image(tmp_path / "i.ome.zarr")
    for shift, empty in (("1e6", True), ("0", False)):
        caplog.clear()
        words = [mesh, source, tmp_path / f"{shift}.ome.zarr", "--unit", "um", "--shift", shift, "0", "0"]
        assert script.main([*map(str, words), "--device=cpu"]) == 0
        assert ("are its unit and its position right?" in caplog.text) == empty


def test_slabs_are_whole_chunks(mesh, tmp_path, monkeypatch):
    """Of an image with more planes than rows, in as little memory as may be."""
    from linumpy.io.volume import open_volumes
    from linumpy.voxel.mesh_image import load_mesh, voxelize_onto_image

    monkeypatch.setattr("linumpy.voxel.mesh_image._SLAB_BYTES", 1)
    shape, spacing, origin = (300, 6, 7), (0.1, 3.0, 3.0), (60.0, 0.0, 2.0)
    path = write_omezarr(tmp_path / "i.ome.zarr", np.zeros(shape, "u1"), spacing, origin=origin)
    vertices, triangles = load_mesh(mesh, "um")
    voxelize_onto_image(vertices, triangles, open_volumes(path), tmp_path / "o.zarr", backend=Backend())
    low, steps = np.subtract(origin, np.divide(spacing, 2))[::-1], np.array(spacing[::-1])
    expected = Backend().voxelize_mesh(vertices, triangles, (low, low + steps * shape[::-1]), steps)
    assert expected.any()
    assert np.array_equal(open_image(tmp_path / "o.zarr").levels[0][...], expected)
