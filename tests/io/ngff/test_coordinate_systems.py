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
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr

ngff_zarr = pytest.importorskip("ngff_zarr", reason="ngff-zarr is not installed: pip install ngff-zarr")

ORIENTATION = {"type": "anatomical", "value": "left-to-right"}
SPACE = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]


def by_hand(folder, level, *, axes=SPACE, more=(), whole=(), output="physical", data=None):
    group = zarr.create_group(folder)
    group.create_array("s0", data=np.zeros((4, 5, 6), "u1") if data is None else data)
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


def by_dimension(*parts):
    inner = [{"inputAxes": a, "outputAxes": b, "transformation": one} for a, b, one in parts]
    return {"type": "byDimension", "transformations": inner}


UNCHANGED, FLIP = {"type": "identity"}, {"type": "scale", "scale": [-3]}
TURNED = {"type": "rotation", "rotation": [[1, 0, 0], [0, 0, -1], [0, 1, 0]]}
TO_ATLAS = {**TURNED, "input": {"name": "physical"}, "output": {"name": "atlas"}}
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
        (sequence(SCALE, {"type": "displacements", "path": "field"}), "of type 'displacements'"),
        ({"type": "byDimension", "transformations": []}, "of type 'byDimension'"),
        (
            by_dimension(([2], [0], {"type": "scale", "scale": [-3]}), ([0, 1], [2, 1], UNCHANGED)),
            "of type 'byDimension'",
        ),
        ({"type": "mapAxis", "mapAxis": [0, 2, 2]}, "of type 'mapAxis'"),
        ({"type": ["scale"]}, r"of type \['scale'\]"),
    ],
)
def test_levels_that_are_turned_have_voxels(tmp_path, transformation, named):
    """Only their spacing and origin are unknown."""
    group = by_hand(tmp_path / "i", transformation)
    image = open_image(tmp_path / "i")
    assert ([axis.name for axis in image.axes], image.levels[0].shape) == (["z", "y", "x"], (4, 5, 6))
    with pytest.raises(MetadataError, match=rf"/i: the coordinate transformation {named} is no .* pass spacing= in µm"):
        _ = image.spacing
    assert open_image(tmp_path / "i", spacing=(2, 3, 4)).spacing == ((2, 3, 4),)
    resample_zarr(tmp_path / "i", tmp_path / "o", 5.0, spacing=(2, 3, 4), device="cpu")
    with pytest.raises(MetadataError, match="is no positive scale and translation"):  # 0.5 cannot express it
        convert_zarr(tmp_path / "i", tmp_path / "p", ngff_version="0.5")
    ome = group.attrs["ome"]
    (level,) = ome["multiscales"][0]["datasets"]
    ome["multiscales"][0]["datasets"] = [level, level]
    group.attrs["ome"] = ome
    with pytest.raises(MetadataError, match="pass an array of one level, with its spacing="):
        _ = open_image(tmp_path / "i", spacing=(2, 3, 4)).spacing


@pytest.mark.parametrize(
    ("transformation", "order", "step", "first"),
    [
        ({"type": "mapAxis", "mapAxis": [1, 2, 0]}, "xzy", (1, 1, 1), (0, 0, 0)),
        (sequence(SCALE, {"type": "mapAxis", "mapAxis": [1, 2, 0]}, SHIFT), "xzy", (2, 3, 4), (7, 5, 6)),
        (
            by_dimension(
                ([2], [0], sequence({"type": "scale", "scale": [3]}, {"type": "translation", "translation": [9]})),
                ([0, 1], [2, 1], {"type": "scale", "scale": [5, 6]}),
            ),
            "xyz", (5, 6, 3), (0, 0, 9),
        ),
        ({"type": "affine", "affine": [[0, 2, 0, 1], [0, 0, 3, 2], [4, 0, 0, 3]]}, "xzy", (4, 2, 3), (3, 1, 2)),
    ],
)  # fmt: skip
def test_axes_are_in_the_order_of_the_arrays(tmp_path, transformation, order, step, first):
    group = by_hand(tmp_path / "i", transformation, more=[{"name": "atlas", "axes": SPACE}], whole=[TO_ATLAS])
    group["s0"][...] = voxels = np.random.default_rng(0).integers(1, 99, (4, 5, 6)).astype("u1")
    image = open_image(tmp_path / "i")
    assert "".join(axis.name for axis in image.axes) == order
    assert (image.spacing, image.origin) == ((step,), (first,))
    moved = write_omezarr(tmp_path / "like", np.zeros((4, 5, 6), "u1"), step, origin=first, axes=order)
    resample_zarr(tmp_path / "i", tmp_path / "o", like=moved, device="cpu")
    assert np.array_equal(open_image(tmp_path / "o").levels[0][...], voxels)
    for version in ("0.5", "0.6"):
        convert_zarr(tmp_path / "i", tmp_path / version, ngff_version=version)
        found = open_image(tmp_path / version)
        assert (found.axes, found.spacing, found.origin) == (image.axes, image.spacing, image.origin)
    ngff_zarr.from_ngff_zarr(tmp_path / "0.5")


@pytest.mark.parametrize("kind", ["mapAxis", "byDimension"])
def test_swapped_axes_are_swapped_back(tmp_path, kind):
    """By resampling: into a coordinate system, or onto the grid of an image with the usual order of axes."""
    swap = {"type": "mapAxis", "mapAxis": [1, 2, 0]}
    if kind == "byDimension":
        swap = by_dimension(([1], [0], UNCHANGED), ([2, 0], [1, 2], UNCHANGED))
    more = [{"name": "atlas", "axes": SPACE}]
    group = by_hand(tmp_path / "i", sequence(swap, SCALE, SHIFT), more=more, whole=[TO_ATLAS])
    group["s0"][...] = voxels = np.random.default_rng(0).integers(1, 99, (4, 5, 6)).astype("u1")
    by_hand(tmp_path / "j", sequence(SCALE, SHIFT), more=more, whole=[TO_ATLAS], data=voxels.transpose(1, 2, 0))
    like = write_omezarr(tmp_path / "like", np.zeros((6, 7, 8), "u1"), (1.5, 2, 4), origin=(5, 4, 6))
    for target, new, options in (
        ("a", 2.5, {"coordinate_system": "atlas"}),
        ("b", None, {"like": like}),
        ("c", None, {"like": tmp_path / "ja", "coordinate_system": "atlas"}),
    ):
        for source in "ij":
            resample_zarr(tmp_path / source, tmp_path / f"{source}{target}", new, device="cpu", **options)
        one, other = (open_image(tmp_path / f"{source}{target}") for source in "ij")
        assert (one.axes, one.spacing, one.origin) == (other.axes, other.spacing, other.origin)
        assert [axis.name for axis in one.axes] == ["z", "y", "x"]
        assert other.levels[0][...].any()
        assert np.array_equal(one.levels[0][...], other.levels[0][...])
    resample_zarr(like, tmp_path / "d", like=tmp_path / "i", device="cpu")
    assert [axis.name for axis in open_image(tmp_path / "d").axes] == ["x", "z", "y"]


def test_names_of_axes_are_whole_in_messages(tmp_path):
    by_hand(tmp_path / "i", SCALE, axes=[{**axis, "name": f"dim_{axis['name']}"} for axis in SPACE])
    like = write_omezarr(tmp_path / "like", np.zeros((6, 7, 8), "u1"), (1, 1, 1))
    for source, options in ((tmp_path / "i", {"transform_or_spacing": 2.0}), (like, {"like": tmp_path / "i"})):
        with pytest.raises(MetadataError, match="has the axes of space dim_z, dim_y, dim_x"):
            resample_zarr(source, tmp_path / "o", **options)


def test_images_of_spatialdata(tmp_path):
    """Version 0.4, with transformations to other coordinate systems, which do not move the levels."""
    axes = [{"name": "c", "type": "channel"}, *({"name": n, "type": "space", "unit": "micrometer"} for n in "yx")]
    systems = {"input": {"name": "cyx", "axes": axes}, "output": {"name": "global", "axes": axes}}
    matrix = [[1, 0, 0, 0], [0, 0.6, -0.8, 5], [0, 0.8, 0.6, 7]]
    for one in (
        {"type": "affine", "affine": matrix}, {"type": "scale", "scale": [1, 3, 3]}, {"type": "identity"},
        {"type": "mapAxis", "mapAxis": {"c": "c", "y": "x", "x": "y"}},
        sequence({"type": "scale", "scale": [1, 2, 2]}, {"type": "affine", "affine": matrix}),
        {"type": "byDimension", "transformations": []},
    ):  # fmt: skip
        group = zarr.create_group(tmp_path / "i", zarr_format=2, overwrite=True)
        group.create_array("0", data=np.ones((2, 5, 6), "u2"))
        level = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 0.5, 0.25]}]}
        multiscale = {"version": "0.4", "axes": axes, "datasets": [level]}
        group.attrs["multiscales"] = [{**multiscale, "coordinateTransformations": [{**one, **systems}]}]
        assert open_image(tmp_path / "i").spacing == ((0.5, 0.25),)
        convert_zarr(tmp_path / "i", tmp_path / "o", ngff_version="0.6", overwrite=True)
        assert open_image(tmp_path / "o").spacing == ((0.5, 0.25),)


@pytest.mark.parametrize(
    ("transformation", "message"),
    [
        ({"type": "sequence", "transformations": 5}, "of type 'sequence' has no list of transformations"),
        ({"type": "scale", "scale": [1, 2]}, "of type 'scale' has numbers of shape .2,., and points have 3"),
        ({"type": "affine", "affine": [[1, 0, 0], [0, 1, 0]]}, "of type 'affine' has numbers of shape .2, 3., and"),
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
