"""If this fails, images of NGFF 0.6 (RFC-5) are placed wrong (oracles: ngff-zarr, and NumPy on the transformations)."""

import importlib.util
import json

import numpy as np
import pytest
import zarr
from ome_zarr_models import open_ome_zarr

from linumpy.errors import MetadataError
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.carried import Carried
from linumpy.io.ome import level_transforms, open_image
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr

ngff_zarr = pytest.importorskip("ngff_zarr", reason="ngff-zarr is not installed: pip install ngff-zarr")

ORIENTATION = {"type": "anatomical", "value": "left-to-right"}
SPACE = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]


def by_hand(folder, level, *, axes=SPACE, more=(), whole=(), output="physical"):
    group = zarr.create_group(folder)
    group.create_array("s0", shape=(4, 5, 6), dtype="u1")
    named = {"input": {"path": "s0"}, "output": {"name": output}, **level}
    multiscale = {
        "coordinateSystems": [{"name": "physical", "axes": axes}, *more],
        "datasets": [{"path": "s0", "coordinateTransformations": [named]}],
        "coordinateTransformations": list(whole),
    }
    group.attrs["ome"] = {"version": "0.6", "multiscales": [multiscale]}
    return group


def affine(diagonal, shift):
    return {"type": "affine", "affine": np.column_stack([np.diag(diagonal), shift]).tolist()}


def sequence(*transformations):
    return {"type": "sequence", "transformations": list(transformations)}


SCALE = {"type": "scale", "scale": [2.0, 3.0, 4.0]}
SHIFT = {"type": "translation", "translation": [5.0, 6.0, 7.0]}


def test_images_written_by_ngff_zarr(tmp_path):
    values = np.arange(2 * 8 * 10 * 12, dtype="u2").reshape(2, 8, 10, 12)
    image = ngff_zarr.to_ngff_image(
        values,
        dims=("c", "z", "y", "x"),
        scale={"c": 1, "z": 2.0, "y": 0.5, "x": 500},
        translation={"c": 0, "z": 1.0, "y": 2.0, "x": 3000},
        axes_units={"z": "micrometer", "y": "micrometer", "x": "nanometer"},
    )
    multiscales = ngff_zarr.to_multiscales(image, scale_factors=[2])
    ngff_zarr.to_ngff_zarr(tmp_path / "i", multiscales, version="0.6")
    assert "axes" not in json.loads((tmp_path / "i/zarr.json").read_text())["attributes"]["ome"]["multiscales"][0]
    found = open_image(tmp_path / "i")
    assert found.version == "0.6"
    assert [(axis.name, axis.type) for axis in found.axes] == [
        ("c", "channel"), ("z", "space"), ("y", "space"), ("x", "space")
    ]  # fmt: skip
    for level, written in enumerate(multiscales.images):
        assert found.scale[level] == tuple(written.scale[axis] for axis in "czyx")
        assert found.translation[level] == tuple(written.translation[axis] for axis in "czyx")
        assert np.array_equal(read_zarr(tmp_path / "i", level=level, device="cpu"), written.data.compute())
    assert found.spacing == (pytest.approx((2, 0.5, 0.5)), pytest.approx((4, 1, 1)))
    assert found.origin[0] == pytest.approx((1, 2, 3))
    axes, scales, translations = level_transforms(found.group)
    assert (axes, scales, translations) == (found.axes, found.scale, found.translation)


@pytest.mark.parametrize(
    ("transformation", "step", "first"),
    [
        ({"type": "identity"}, (1, 1, 1), (0, 0, 0)),
        (SCALE, (2, 3, 4), (0, 0, 0)),
        (SHIFT, (1, 1, 1), (5, 6, 7)),
        (sequence(SCALE, SHIFT), (2, 3, 4), (5, 6, 7)),
        (sequence(SHIFT, SCALE), (2, 3, 4), (10, 18, 28)),
        (sequence(sequence(SCALE, {"type": "identity"}), sequence(SHIFT)), (2, 3, 4), (5, 6, 7)),
        (affine((2, 3, 4), (5, 6, 7)), (2, 3, 4), (5, 6, 7)),
        (sequence(SHIFT, affine((2, 3, 4), (1, 1, 1))), (2, 3, 4), (11, 19, 29)),
        ({"type": "rotation", "rotation": np.eye(3).tolist()}, (1, 1, 1), (0, 0, 0)),
    ],
)
def test_transformations_along_the_axes(tmp_path, transformation, step, first):
    by_hand(tmp_path / "i", transformation)
    image = open_image(tmp_path / "i")
    assert (image.scale, image.translation) == ((step,), (first,))
    assert (image.spacing, image.origin) == ((step,), (first,))


@pytest.mark.parametrize(
    ("transformation", "named"),
    [
        (
            {"type": "rotation", "rotation": [[1, 0, 0], [0, 0, -1], [0, 1, 0]], "name": "tilt"},
            "'tilt' of type 'rotation'",
        ),
        ({"type": "rotation", "path": "somewhere"}, "of type 'rotation'"),
        ({"type": "affine", "affine": [[1, 0.1, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]}, "of type 'affine'"),
        (affine((1, 1, -1), (0, 0, 0)), "of type 'affine'"),
        (affine((1, 1, 0), (0, 0, 0)), "of type 'affine'"),
        ({"type": "affine", "affine": [[1, 0, 0], [0, 1, 0]]}, "of type 'affine'"),
        (sequence(SCALE, {"type": "displacements", "path": "field"}), "of type 'displacements'"),
        ({"type": "byDimension", "transformations": []}, "of type 'byDimension'"),
        ({"type": "mapAxis", "mapAxis": [0, 2, 1]}, "of type 'mapAxis'"),
        ({"type": ["scale"]}, r"of type \['scale'\]"),
    ],
)
def test_transformations_that_are_not_read(tmp_path, transformation, named):
    by_hand(tmp_path / "i", transformation)
    with pytest.raises(MetadataError, match=rf"/i: the coordinate transformation {named} is no .* levels"):
        open_image(tmp_path / "i")
    assert read_zarr(tmp_path / "i", level=0, device="cpu").shape == (4, 5, 6)  # voxels need none


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        ({"type": "sequence", "transformations": 5}, "is no sequence"),
        ({"type": "scale", "scale": [1, 2]}, r"scale \[1, 2\] has 2 numbers"),
        ({"type": "scale", "scale": [1, 2, -3]}, "is not positive"),
        ({"type": "identity", "output": {"name": "atlas"}}, "to the coordinate systems 'atlas'; one of 'physical' is"),
        ({"type": "identity", "output": None}, "to the coordinate systems None; one of 'physical' is needed"),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path, transformation, message):
    by_hand(tmp_path / "i", transformation)
    with pytest.raises(MetadataError, match=message):
        open_image(tmp_path / "i")


def test_one_transformation_a_level(tmp_path):
    group = by_hand(tmp_path / "i", SCALE)
    ome = group.attrs["ome"]
    for wrong in ([], [SCALE, SCALE]):
        ome["multiscales"][0]["datasets"][0]["coordinateTransformations"] = wrong
        group.attrs["ome"] = ome
        with pytest.raises(MetadataError, match=rf"level 's0' has {len(wrong)} coordinate transformations"):
            open_image(group)
    ome["multiscales"][0]["coordinateSystems"] = ["physical"]
    group.attrs["ome"] = ome
    with pytest.raises(MetadataError, match="no list of names and axes"):
        open_image(group)


@pytest.mark.parametrize("as_text", [False, True])
def test_array_coordinates_lead_to_those_of_space(tmp_path, as_text):
    """The example of the specification; its drafts name systems by a text, 0.6 by an object."""

    def system(name):
        return name if as_text else {"name": name}

    array = {"name": "array", "axes": [{"name": f"dim_{n}", "type": "array"} for n in range(3)]}
    to_space = {**sequence(SCALE, SHIFT), "input": system("array"), "output": system("physical")}
    level = {"type": "identity", "output": system("array")}
    by_hand(tmp_path / "i", level, more=[array], whole=[to_space])
    image = open_image(tmp_path / "i")
    assert [axis.name for axis in image.axes] == ["z", "y", "x"]
    assert (image.spacing, image.origin) == (((2, 3, 4),), ((5, 6, 7),))
    by_hand(tmp_path / "none", level, more=[array])
    with pytest.raises(MetadataError, match="none of the axes dim_0, dim_1, dim_2 is of type space"):
        open_image(tmp_path / "none")


def test_other_coordinate_systems_do_not_move_the_image(tmp_path):
    atlas = {"name": "atlas", "axes": SPACE}
    turned = {"type": "rotation", "rotation": [[1, 0, 0], [0, 0, -1], [0, 1, 0]]}
    to_atlas = {**turned, "input": {"name": "physical"}, "output": {"name": "atlas"}}
    by_hand(tmp_path / "i", SCALE, more=[atlas], whole=[to_atlas])
    image = open_image(tmp_path / "i")
    assert (image.spacing, image.origin) == (((2, 3, 4),), ((0, 0, 0),))


def checked(folder):
    """Read an image by ngff-zarr, which checks metadata by the schemas of the specification if it has jsonschema."""
    return ngff_zarr.from_ngff_zarr(folder, validate=importlib.util.find_spec("jsonschema") is not None)


@pytest.mark.parametrize("axes", ["zyx", "tczyx", "cyx"])
def test_what_is_written_is_read_by_ngff_zarr(tmp_path, axes):
    rank = sum(axis in "zyx" for axis in axes)
    values = np.arange(np.prod((2, 3, 8, 10, 12)[-len(axes) :]), dtype="u2").reshape((2, 3, 8, 10, 12)[-len(axes) :])
    spacing, origin = (5.0, 0.5, 2.0)[-rank:], (1.0, -2.0, 3.0)[-rank:]
    orientations = {"x": ORIENTATION}
    write_omezarr(
        tmp_path / "i", values, spacing, axes=axes, origin=origin, levels=2, ngff_version="0.6",
        carried=Carried(orientations=orientations, units={"y": "nanometer"}),
    )  # fmt: skip
    found = checked(tmp_path / "i")
    ome = zarr.open_group(tmp_path / "i", mode="r").attrs["ome"]
    assert ome["version"] == "0.6"
    assert "axes" not in ome["multiscales"][0]
    ours = open_image(tmp_path / "i")
    assert (ours.version, [axis.name for axis in ours.axes]) == ("0.6", list(axes))
    assert ours.spacing[0] == pytest.approx(spacing)
    assert ours.axes[-1].orientation == ORIENTATION
    for level, image in enumerate(found.images):
        assert list(image.dims) == list(axes)
        assert tuple(image.scale[axis] for axis in axes) == ours.scale[level]
        assert tuple(image.translation[axis] for axis in axes) == ours.translation[level]
        assert np.array_equal(image.data.compute(), read_zarr(tmp_path / "i", level=level, device="cpu"))
    assert found.images[0].axes_units["y"] == "nanometer"
    assert found.images[0].axes_orientations["x"].value.value == "left-to-right"
    assert len(found.images) == 2


def test_resampled_images_keep_their_systems(tmp_path, caplog):
    """Those in which it can say where it lies: of arrays beside the source, and in NGFF 0.5, it cannot."""
    turned = {"type": "rotation", "rotation": [[1, 0, 0], [0, 0, -1], [0, 1, 0]]}
    warped = {"type": "bijection", "forward": {"type": "displacements", "path": "f"}, "inverse": {"type": "identity"}}
    physical, atlas, warp = {"name": "physical"}, {"name": "atlas"}, {"name": "warp"}
    whole = [
        {**turned, "input": physical, "output": atlas, "name": "to atlas"},
        {**warped, "input": physical, "output": warp},
    ]
    axes = [*SPACE[:2], {**SPACE[2], "orientation": ORIENTATION}]
    more = [{**atlas, "axes": SPACE}, {**warp, "axes": SPACE}]
    by_hand(tmp_path / "i", sequence(SCALE, SHIFT), axes=axes, more=more, whole=whole)

    def dropped(target, *arguments, **options):
        caplog.clear()
        resample_zarr(tmp_path / "i", tmp_path / target, *arguments, device="cpu", **options)
        (warning,) = [record.getMessage() for record in caplog.records if "not carried over" in record.getMessage()]
        return warning.split(": ", 2)[2]

    assert dropped("o", (4, 3, 2)) == "the coordinate system 'warp'"
    found = checked(tmp_path / "o")
    (multiscale,) = zarr.open_group(tmp_path / "o", mode="r").attrs["ome"]["multiscales"]
    assert multiscale["coordinateTransformations"] == whole[:1]
    assert multiscale["coordinateSystems"] == [{"name": "physical", "axes": axes}, more[0]]
    image = open_image(tmp_path / "o")
    assert (image.version, image.spacing) == ("0.6", ((4, 3, 2),))
    assert image.origin[0] == pytest.approx((5 - 1 + 2, 6, 7 - 2 + 1))  # the edges stay where they are
    assert (found.images[0].scale, found.images[0].translation) == ({"z": 4, "y": 3, "x": 2}, {"z": 6, "y": 6, "x": 6})
    resample_zarr(tmp_path / "o", tmp_path / "o.ozx", 4.0, ngff_version="0.6", device="cpu")
    assert checked(str(tmp_path / "o.ozx")).images[0].scale == {"z": 4, "y": 3.75, "x": 4}
    lost = ["the coordinate system 'warp'", "the orientations of the axes x", "the coordinate system 'atlas'"]
    assert dropped("p", (4, 3, 2), ngff_version="0.5").split("; ") == lost[::2]
    assert dropped("q", np.diag([1, 1, -1]), ngff_version="0.5").split("; ") == [lost[0], lost[2], lost[1]]
    open_ome_zarr(zarr.open_group(tmp_path / "p", mode="r"))  # a validator of 0.5
    assert [axis.orientation for axis in open_image(tmp_path / "p").axes] == [None, None, ORIENTATION]


@pytest.mark.parametrize(("matrix", "kept"), [(np.diag([1, 2, 1]), True), (np.diag([1, 1, -1]), False)])
def test_orientations_are_kept_while_axes_are(tmp_path, caplog, matrix, kept):
    by_hand(tmp_path / "i", SCALE, axes=[*SPACE[:2], {**SPACE[2], "orientation": ORIENTATION}])
    resample_zarr(tmp_path / "i", tmp_path / "o", matrix, device="cpu", ngff_version="0.5")
    assert open_image(tmp_path / "o").axes[2].orientation == (ORIENTATION if kept else None)
    assert ("the orientations of the axes x" in caplog.text) != kept
