"""If this fails, a command loses metadata of its source that stay true."""

import numpy as np
import pytest
import zarr

from linumpy.io.ome import open_image
from linumpy.write.new_image import create_labels_group
from linumpy.write.writer import write_omezarr
from tests.support.script_runs import load

OMERO = {"channels": [{"label": name, "color": "00FF00", "window": {"start": 0, "end": 9}} for name in ("a", "b")]}
USER = {"sample": "mouse 12", "stage": {"x": 1.5}}
SHAPE = (16, 24, 27)
#: Commands, and what they need besides input and output.
COMMANDS = {
    "linum_aip": [],
    "linum_detect_focal_curvature": ["--s-xy", "1", "--tile-shape", "8", "9"],
    "linum_find_tissue_interface": ["--s-xy", "3"],
    "linum_resample": ["--resolution", "7", "9", "9"],
    "linum_resample_mosaic_grid": ["--resolution", "7", "9", "9", "--tile-shape", "8", "9"],
    "linum_stack_slices_motor": ["--slicing-interval-mm", "0.04", "--search-range-mm", "0.01"],
}
#: What each makes of t, z, y, x: t is kept where the output holds every time.
HOLD_ALL = ("linum_aip", "linum_resample_mosaic_grid", "linum_find_tissue_interface", "linum_resample")


def voxels():
    """Tissue from about the middle on, at two times."""
    rng = np.random.default_rng(1)
    surface = 6 + rng.integers(0, 3, (2, 1, *SHAPE[1:]))
    mean = np.where(np.arange(SHAPE[0])[:, None, None] >= surface, 3000, 30)
    return (mean * rng.gamma(20, 1 / 20, (2, *SHAPE))).astype("u2")


def foreign(folder, version, **more):
    """A mosaic in mm, of two times 30 s apart, with channels, a name, labels, and what others keep."""
    data = voxels()
    group = zarr.open_group(folder, mode="w", zarr_format=3 if version == "0.5" else 2)
    group.create_array("0", data=data, chunks=(1, 16, 8, 9))
    scale, translation = [30, 0.005, 0.01, 0.01], [5, 0.1, 0.2, 0.3]
    multiscale = {
        "name": "brain",
        "axes": [{"name": "t", "type": "time", "unit": "second"}]
        + [{"name": name, "type": "space", "unit": "millimeter"} for name in "zyx"],
        "datasets": [
            {
                "path": "0",
                "coordinateTransformations": [
                    {"type": "scale", "scale": scale},
                    {"type": "translation", "translation": translation},
                ],
            }
        ],
    }
    ngff = {"multiscales": [multiscale | ({"version": "0.4"} if version == "0.4" else {})], "omero": OMERO}
    group.attrs.update({"ome": {"version": "0.5", **ngff}} if version == "0.5" else ngff)
    group.attrs.update(USER | more)
    (folder / "labels").mkdir()
    write_omezarr(folder / "labels/cells", np.ones(SHAPE, "u1"), (5, 10, 10), ngff_version=version)
    create_labels_group(folder / "labels", ["cells"], version)


def words(name, folder):
    slices = name == "linum_stack_slices_motor"
    (folder / "shifts.csv").write_text(
        "fixed_id,moving_id,x_shift,y_shift,x_shift_mm,y_shift_mm\n0,1,0,0,0,0\n", encoding="utf-8"
    )
    source = [folder / "slices", folder / "shifts.csv"] if slices else [folder / "m"]
    chosen = [] if name in HOLD_ALL else ["--time", "1"]
    return [str(one) for one in (*source, folder / "out", *COMMANDS[name], "--device=cpu", *chosen)]


@pytest.mark.parametrize("version", ["0.5", "0.4"])
@pytest.mark.parametrize("name", COMMANDS)
def test_metadata_that_stay_true(tmp_path, name, version, caplog):
    if name == "linum_stack_slices_motor":
        for number in range(2):
            foreign(tmp_path / f"slices/slice_z{number}.zarr", version, number=number)
    else:
        foreign(tmp_path / "m", version)
    assert load(name).main(words(name, tmp_path)) == 0
    made = open_image(tmp_path / "out")
    attributes = made.group.attrs.asdict()
    ome = attributes["ome"] if version == "0.5" else attributes
    assert made.version == version
    assert {axis.unit for axis in made.axes if axis.type == "space"} == {"millimeter"}
    assert {key: attributes.get(key) for key in USER} == USER
    if name in HOLD_ALL:
        assert (made.axes[0].name, made.axes[0].unit) == ("t", "second")
        assert (made.scale[0][0], made.translation[0][0]) == (30, 5)
    if name not in ("linum_resample", "linum_resample_mosaic_grid"):
        first = 100 if made.axes[-3].name == "z" else None
        np.testing.assert_allclose(made.origin[0], [*([first] if first else []), 200, 300])
    assert (made.levels[0].ndim, ome["multiscales"][0]["name"]) == (
        {"linum_aip": 3, "linum_find_tissue_interface": 3}.get(name, 4 if name in HOLD_ALL else 3),
        "out" if name == "linum_stack_slices_motor" else "brain",
    )
    # Depth has no channels; slices have only what all of them say.
    assert ome.get("omero") == (None if name == "linum_find_tissue_interface" else OMERO)
    assert "number" not in attributes
    told = [one.getMessage() for one in caplog.records if "not carried over from" in one.getMessage()]
    if name == "linum_resample":
        assert told == []
        assert open_image(tmp_path / "out/labels/cells").levels[0].shape == made.levels[0].shape[1:]
    else:
        assert len(told) == 1
        assert "the labels cells" in told[0]
        assert ("omero" in told[0]) == (name == "linum_find_tissue_interface")
        assert ("the attribute 'number', in which they differ" in told[0]) == (name == "linum_stack_slices_motor")


def test_options_of_the_resampling(tmp_path, capsys):
    foreign(tmp_path / "m", "0.5")
    main = load("linum_resample").main
    more = ["--labels", "drop", "--ngff-version", "0.4"]
    assert main([*words("linum_resample", tmp_path), *more]) == 0
    assert open_image(tmp_path / "out").version == "0.4"
    assert not (tmp_path / "out/labels").exists()
    create_labels_group(tmp_path / "m/labels/more", ["cells", "gone"], "0.5")
    (tmp_path / "m/labels/zarr.json").write_bytes((tmp_path / "m/labels/more/zarr.json").read_bytes())
    assert main([*words("linum_resample", tmp_path), "--overwrite"]) == 2
    assert "labels 'gone', which do not exist: correct its metadata, or pass --labels 'drop'" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_labels_of_a_mesh_have_the_units_and_the_version_of_the_image(tmp_path, version):
    foreign(tmp_path / "m", version)
    corners = np.array([[x, y, z] for x in (352, 448) for y in (241, 399) for z in (111, 149)], float)
    trimesh = pytest.importorskip("trimesh")
    trimesh.Trimesh(corners).convex_hull.export(tmp_path / "mesh.stl")
    words = [tmp_path / "mesh.stl", tmp_path / "m", tmp_path / "out", "--unit", "um", "--device=cpu"]
    assert load("linum_voxelize").main([*map(str, words)]) == 0
    made = open_image(tmp_path / "out")
    assert (made.version, {axis.unit for axis in made.axes}) == (version, {"millimeter"})
    inside = np.argwhere(made.levels[0][...]) * made.spacing[0] + made.origin[0]
    np.testing.assert_allclose([inside.min(0), inside.max(0)], [(115, 250, 360), (145, 390, 440)])
