"""If this fails, metadata or labels of an image are lost or wrong after it was resampled."""

import logging
import os
from contextlib import suppress

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError, MetadataError, ResumeError, SourceError
from linumpy.io.carried import carried_from
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.ome import open_image
from linumpy.io.volume import select_volumes
from linumpy.resample.blocks import pipeline
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.new_image import create_labels_group
from linumpy.write.writer import OmeZarrWriter, write_omezarr

HERE = {"device": "cpu", "durable": False}
OMERO = {
    "channels": [
        {"label": name, "color": color, "active": True, "window": {"start": 0, "end": 2000, "min": 0, "max": 65535}}
        for name, color in (("DAPI", "0000FF"), ("GFP", "00FF00"))
    ],
    "rdefs": {"defaultT": 1, "defaultZ": 4, "model": "color"},
}
USER = {"user": {"note": "x", "list": [1, None]}, "sample": "mouse 12"}


def foreign_image(folder, version="0.5", unit="micrometer", step=4.0):
    """An image of t, c, z, y, x with all that NGFF lets it say, written by zarr-python alone."""
    group = zarr.open_group(folder, mode="w", zarr_format=3 if version == "0.5" else 2)
    voxels = np.random.default_rng(0).integers(0, 2000, (3, 2, 8, 16, 16)).astype("u2")
    group.create_array("0", data=voxels, chunks=(1, 1, 8, 16, 16))
    multiscale = {
        "name": "brain",
        "axes": [
            {"name": "t", "type": "time", "unit": "second"},
            {"name": "c", "type": "channel"},
            *({"name": name, "type": "space", "unit": unit} for name in "zyx"),
        ],
        "datasets": [
            {
                "path": "0",
                "coordinateTransformations": [
                    {"type": "scale", "scale": [30, 1, step, step / 4, step / 4]},
                    {"type": "translation", "translation": [5, 2, 3 * step, step, 0]},
                ],
            }
        ],
    }
    if version == "0.5":
        group.attrs["ome"] = {"version": "0.5", "multiscales": [multiscale], "omero": OMERO}
    else:
        group.attrs.update({"multiscales": [{"version": "0.4", **multiscale}], "omero": {"version": "0.4", **OMERO}})
    group.attrs.update(USER)
    return voxels


def said(folder):
    """What NGFF keeps, wherever a version has it, and what others wrote."""
    attributes = zarr.open_group(folder, mode="r").attrs.asdict()
    ome = attributes.get("ome", attributes)
    return ome, {key: value for key, value in attributes.items() if key in USER}


@pytest.mark.parametrize("version", ["0.5", "0.4"])
@pytest.mark.parametrize("unit", ["micrometer", "millimeter", "nanometer"])
def test_all_that_a_new_grid_leaves_true(tmp_path, version, unit):
    step = 4.0 / MICROMETERS[unit]  # 4 × 1 × 1 µm
    foreign_image(tmp_path / "a", version, unit, step)
    resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, levels=2, **HERE)
    ome, user = said(tmp_path / "b")
    multiscale = ome["multiscales"][0]
    assert user == USER
    assert (multiscale["name"], open_image(tmp_path / "b").version) == ("brain", version)
    assert [(axis["name"], axis["type"], axis.get("unit")) for axis in multiscale["axes"]] == [
        ("t", "time", "second"), ("c", "channel", None), *((name, "space", unit) for name in "zyx"),
    ]  # fmt: skip
    assert ome["omero"] == {**({"version": "0.4"} if version == "0.4" else {}), **OMERO, "rdefs": {
        "defaultT": 1, "model": "color",
    }}  # fmt: skip
    image = open_image(tmp_path / "b")
    for level in range(2):
        assert (image.scale[level][:2], image.translation[level][:2]) == ((30, 1), (5, 2))
        np.testing.assert_allclose(image.spacing[level], (2 * 2**level,) * 3)
    # The image begins at the same edge: (3 - 1/2) × 4, (1 - 1/8) × 4 and -1/8 × 4 µm.
    np.testing.assert_allclose(image.origin[0], (10 + 1, 3.5 + 1, -0.5 + 1))
    assert zarr.open_group(tmp_path / "b").metadata.zarr_format == (3 if version == "0.5" else 2)
    np.testing.assert_allclose(
        multiscale["datasets"][0]["coordinateTransformations"][0]["scale"][2:], [2 / MICROMETERS[unit]] * 3
    )


def test_a_version_that_is_asked_for(tmp_path):
    for source, wanted in (("0.5", "0.4"), ("0.4", "0.5")):
        foreign_image(tmp_path / "a", source)
        resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, ngff_version=wanted, overwrite=True, **HERE)
        assert open_image(tmp_path / "b").version == wanted
        ome, user = said(tmp_path / "b")
        assert ome["omero"]["channels"] == OMERO["channels"]
        assert user == USER
    shards = {"chunks": (2, 2, 2), "shards": (4, 4, 4)}
    foreign_image(tmp_path / "a", "0.4")
    with pytest.raises(ValueError, match=r"shards=.*leave them out, or pass ngff_version='0\.5'"):
        resample_zarr(tmp_path / "a", tmp_path / "c", 2.0, **shards, **HERE)
    resample_zarr(tmp_path / "a", tmp_path / "c", 2.0, **shards, ngff_version="0.5", **HERE)


def test_one_time_and_one_channel(tmp_path, caplog):
    foreign_image(tmp_path / "a")
    resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, channel=1, **HERE)
    ome, _ = said(tmp_path / "b")
    assert [one["label"] for one in ome["omero"]["channels"]] == ["GFP"]
    assert open_image(tmp_path / "b").scale[0][0] == 30
    caplog.clear()
    resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, time=2, overwrite=True, **HERE)
    ome, _ = said(tmp_path / "b")
    assert len(ome["omero"]["channels"]) == 2
    assert "defaultT" not in ome["omero"]["rdefs"]
    (told,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "the axis t (scale 30, translation 5, second)" in told


def test_what_is_dropped_is_told_once(tmp_path, caplog):
    foreign_image(tmp_path / "a")
    group = zarr.open_group(tmp_path / "a")
    group.create_group("tables")
    ome = group.attrs["ome"]
    ome["multiscales"][0]["metadata"] = {"method": "mean", "laser": "red"}
    ome["multiscales"].append({"name": "second", "datasets": []})
    group.attrs["ome"] = ome | {"_creator": "somebody"}
    group.attrs["linumpy"] = {"tile_shape": {"y": 8, "x": 8}}
    group["0"].attrs["gain"] = 3
    resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, **HERE)
    (told,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    for what in (
        "the group 'tables'", "'metadata' of the multiscale image", "the multiscale image 1", "'_creator' below 'ome'",
        "linumpy's 'tile_shape'", "attribute 'gain' of array 0", "omero's defaultZ",
    ):  # fmt: skip
        assert what in told


def labelled(folder, shape=(12, 14, 10), version="0.5", **options):
    """An image of 10 × 6 × 5 µm that begins at (100, 50, 0) µm."""
    voxels = np.random.default_rng(1).integers(0, 60000, shape).astype("u2")
    place = {"origin": (100, 50, 0), "ngff_version": version, "chunks": (5, 4, 4), "overwrite": True}
    write_omezarr(folder, voxels, (10.0, 6.0, 5.0), **place, **options)
    return voxels


def label(folder, name, voxels, spacing=(10.0, 6.0, 5.0), origin=(100, 50, 0), version="0.5", **options):
    """Put labels into an image, as NGFF wants them."""
    options = {"axes": "zyx", "chunks": (1,) * (voxels.ndim - 3) + (4, 5, 3), "ngff_version": version} | options
    colors = {"colors": [{"label-value": 1, "rgba": [255, 0, 0, 255]}], "source": {"image": "../../"}}
    (folder / "labels").mkdir(exist_ok=True)
    with OmeZarrWriter(
        folder / "labels" / name, voxels.shape, voxels.dtype, spacing, origin=origin, downsampling="label", **options
    ) as writer:
        writer[...] = voxels
    group = zarr.open_group(folder / "labels" / name)
    if version == "0.5":
        group.attrs["ome"] = group.attrs["ome"] | {"image-label": colors}
    else:
        group.attrs["image-label"] = colors
    names = sorted(one.name for one in (folder / "labels").iterdir() if one.is_dir())
    for old in ("zarr.json", ".zgroup", ".zattrs"):
        (folder / "labels" / old).unlink(missing_ok=True)
    create_labels_group(folder / "labels", names, version)
    return colors


def labelled_cells(folder):
    """An image with labels on its grid; the labels are returned."""
    labelled(folder)
    cells = np.random.default_rng(2).integers(0, 9, (12, 14, 10)).astype("u4")
    label(folder, "cells", cells)
    return cells


def nearest(image, labels, voxels):
    """For each voxel of an image the label at its centre, by µm; 0 where there is none. No rounding lies at an edge."""
    axes = []
    for axis, n in enumerate(image.levels[0].shape):
        at = image.origin[0][axis] + np.arange(n) * image.spacing[0][axis]
        axes.append(np.floor((at - labels.origin[0][axis]) / labels.spacing[0][axis] + 0.5).astype(int))
    index = np.meshgrid(*axes, indexing="ij")
    inside = np.logical_and.reduce([(one >= 0) & (one < n) for one, n in zip(index, voxels.shape, strict=True)])
    clipped = [np.clip(one, 0, n - 1) for one, n in zip(index, voxels.shape, strict=True)]
    return np.where(inside, voxels[tuple(clipped)], 0)


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_labels_of_the_image_grid(tmp_path, version):
    labelled(tmp_path / "a", version=version)
    cells = np.random.default_rng(2).integers(0, 9, (12, 14, 10)).astype("u4")
    colors = label(tmp_path / "a", "cells", cells, version=version, levels=2)
    label(tmp_path / "a", "nuclei", cells.astype("u1"), version=version)
    resample_zarr(tmp_path / "a", tmp_path / "b", (15.0, 4.2, 6.25), levels=2, **HERE)
    resample_zarr(tmp_path / "a/labels/cells", tmp_path / "alone", (15.0, 4.2, 6.25), order=0, levels=2, **HERE)
    image, alone = open_image(tmp_path / "b"), open_image(tmp_path / "alone")
    listed = zarr.open_group(tmp_path / "b/labels").attrs.asdict()
    assert listed.get("ome", listed)["labels"] == ["cells", "nuclei"]
    for name, dtype in (("cells", "u4"), ("nuclei", "u1")):
        found = open_image(tmp_path / "b/labels" / name)
        assert (found.spacing, found.origin, found.version) == (image.spacing, image.origin, version)
        for level in (0, 1):
            assert found.levels[level].dtype == dtype
            assert np.array_equal(found.levels[level][...], alone.levels[level][...])
        ome, _ = said(tmp_path / "b/labels" / name)
        assert ome["image-label"] == colors
        assert ome["multiscales"][0]["name"] == name
        assert np.array_equal(found.levels[0][...], nearest(found, open_image(tmp_path / "a/labels" / name), cells))


def test_a_label_image_is_not_averaged(tmp_path, caplog):
    """By default, which also holds for coarser resolutions; order 1 is an explicit choice."""
    labelled(tmp_path / "a")
    cells = np.random.default_rng(2).choice([0, 9, 300], (12, 14, 10)).astype("u2")
    label(tmp_path / "a", "cells", cells)
    for target, options in (("b", {}), ("c", {"like": tmp_path / "a", "levels": 3}), ("d", {"order": 1})):
        new = () if "like" in options else ((15.0, 4.2, 6.25),)
        resample_zarr(tmp_path / "a/labels/cells", tmp_path / target, *new, **{"levels": 2} | options, **HERE)
        ome, _ = said(tmp_path / target)
        kept = all(set(np.unique(level[...])) <= {0, 9, 300} for level in open_image(tmp_path / target).levels)
        by = ome["multiscales"][0]["type"]
        assert (kept, "image-label" in ome, by) == (target != "d", target != "d", "mean" if target == "d" else "label")
    assert "few values" not in caplog.text
    assert caplog.text.count("'image-label' of NGFF") == 1  # of the one whose labels are averaged
    write_omezarr(tmp_path / "e", cells, (1, 1, 1))
    resample_zarr(tmp_path / "e", tmp_path / "f", 2.0, **HERE)
    assert caplog.text.count("holds few values") == 1
    assert "pass order=0 (--order 0)" in caplog.text
    (tmp_path / "e/0/c/0/0/0").write_bytes(b"broken")
    with pytest.raises(ChunkError, match="c/0/0/0"):
        resample_zarr(tmp_path / "e", tmp_path / "g", 2.0, **HERE)


@pytest.mark.parametrize("seed", range(8))
def test_labels_of_another_grid_meet_the_image_in_micrometers(tmp_path, seed):
    generator = np.random.default_rng(seed)
    labelled(tmp_path / "a")
    # Coarser or finer, a part of the image or beyond it; sizes of which no multiple is one of the image's.
    shape = tuple(generator.integers(1, 9, 3).tolist())
    spacing = tuple((np.array([10.0, 6.0, 5.0]) * generator.choice([0.531, 1.013, 2.117, 3.309], 3)).tolist())
    origin = tuple((np.array([100, 50, 0]) + generator.uniform(-20, 40, 3)).tolist())
    cells = generator.integers(1, 9, shape).astype("i2")
    label(tmp_path / "a", "cells", cells, spacing, origin, chunks=shape)
    resample_zarr(tmp_path / "a", tmp_path / "b", tuple(generator.uniform(3, 25, 3).tolist()), **HERE)
    found = open_image(tmp_path / "b/labels/cells")
    assert np.array_equal(found.levels[0][...], nearest(found, open_image(tmp_path / "a/labels/cells"), cells))
    assert found.levels[0].shape == open_image(tmp_path / "b").levels[0].shape


def test_labels_that_are_written_meanwhile_give_no_result(tmp_path):
    labelled_cells(tmp_path / "a")
    chunk = next(one for one in (tmp_path / "a/labels/cells/0/c").rglob("*") if one.is_file())
    with pytest.raises(SourceError, match="cells/0 was changed while it was resampled"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 15.0, progress=lambda _: os.utime(chunk, (1, 1)), **HERE)
    assert not (tmp_path / "b").exists()


def test_labels_under_a_matrix(tmp_path):
    labelled(tmp_path / "a")
    cells = np.random.default_rng(4).integers(1, 9, (12, 14, 10)).astype("u2")
    half = cells[::2, ::2, ::2]  # coarser by two, so its first centre lies half a voxel further
    label(tmp_path / "a", "cells", cells)
    label(tmp_path / "a", "half", half, (20, 12, 10), (105, 53, 2.5))
    matrix = np.array([[0.9013, 0.1307, 0, 0.3119], [-0.2101, 1.1093, 0.0717, 1.2011], [0, 0.1127, 0.8713, -0.4003]])
    resample_zarr(tmp_path / "a", tmp_path / "b", matrix, **HERE)
    out = np.stack(np.meshgrid(*map(np.arange, cells.shape), indexing="ij"), -1)
    at = out @ matrix[:, :3].T + matrix[:, 3]
    # Outside of the outermost centres the image is cval, and labels of its grid are 0.
    index = np.floor(at + 0.5).astype(int)
    inside = ((at >= 0) & (at <= np.array(cells.shape) - 1)).all(-1)
    expected = np.where(inside, cells[tuple(np.moveaxis(np.clip(index, 0, np.array(cells.shape) - 1), -1, 0))], 0)
    assert np.array_equal(open_image(tmp_path / "b/labels/cells").levels[0][...], expected)
    index = np.floor((at - 0.5) / 2 + 0.5).astype(int)
    inside = ((index >= 0) & (index < np.array(half.shape))).all(-1)
    expected = np.where(inside, half[tuple(np.moveaxis(np.clip(index, 0, np.array(half.shape) - 1), -1, 0))], 0)
    assert np.array_equal(open_image(tmp_path / "b/labels/half").levels[0][...], expected)


def test_labels_of_the_chosen_time_and_channel_and_level(tmp_path):
    shape = (3, 2, 8, 12, 10)
    voxels = np.random.default_rng(5).integers(0, 60000, shape).astype("u2")
    write_omezarr(tmp_path / "a", voxels, (10, 6, 5), axes="tczyx", levels=2)
    moving = np.random.default_rng(6).integers(0, 5, (3, 8, 12, 10)).astype("u1")
    still = np.random.default_rng(7).integers(0, 5, (1, 1, 8, 12, 10)).astype("u1")
    label(tmp_path / "a", "moving", moving, origin=None, axes="tzyx", levels=2)
    label(tmp_path / "a", "still", still, origin=None, axes="tczyx")
    resample_zarr(tmp_path / "a", tmp_path / "b", (10, 6, 5), time=2, channel=1, **HERE)
    assert np.array_equal(open_image(tmp_path / "b/labels/moving").levels[0][...], moving[2])
    assert np.array_equal(open_image(tmp_path / "b/labels/still").levels[0][...], still[0, 0])
    resample_zarr(tmp_path / "a", tmp_path / "c", (20, 12, 10), level=1, **HERE)
    found = open_image(tmp_path / "c/labels/moving")
    assert [axis.name for axis in found.axes] == list("tzyx")
    assert np.array_equal(found.levels[0][...], open_image(tmp_path / "a/labels/moving").levels[1][...])


def test_labels_of_other_times_are_not_chosen_by_number(tmp_path):
    voxels = np.random.default_rng(5).integers(0, 60000, (3, 8, 12, 10)).astype("u2")
    write_omezarr(tmp_path / "a", voxels, (10, 6, 5), axes="tzyx")
    label(tmp_path / "a", "cells", voxels[:2], origin=None, axes="tzyx")
    with pytest.raises(
        MetadataError, match=r"time=1 is chosen of 3 of .*, and the labels .*cells have 2: .*labels='drop'"
    ):
        resample_zarr(tmp_path / "a", tmp_path / "b", 7.0, time=1, **HERE)
    resample_zarr(tmp_path / "a", tmp_path / "b", (10, 6, 5), **HERE)
    assert np.array_equal(open_image(tmp_path / "b/labels/cells").levels[0][...], voxels[:2])


@pytest.mark.parametrize("step", [0.1, 0.65, 1 / 3])
def test_finer_labels_are_taken_on_one_side_all_along(tmp_path, step):
    """Each voxel of the image ends between two of the labels, and rounding does not choose between them."""
    fine = np.arange(2 * 300, dtype="u2").reshape(1, 1, -1)
    write_omezarr(tmp_path / "a", np.zeros((1, 1, 300), "u1"), (1, 1, 2 * step), origin=(0, 0, 7 * step))
    label(tmp_path / "a", "fine", fine, (1, 1, step), (0, 0, 6.5 * step), chunks=(1, 1, 600))
    resample_zarr(tmp_path / "a", tmp_path / "b", (1, 1, 2 * step), **HERE)
    assert np.array_equal(open_image(tmp_path / "b/labels/fine").levels[0][0, 0], fine[0, 0, 1::2])


def test_labels_without_a_place_of_their_own(tmp_path):
    """Those of the image's shape are taken to lie where it does; where others lie is not guessed."""
    labelled(tmp_path / "a", levels=2)
    cells = np.random.default_rng(2).integers(0, 9, (12, 14, 10)).astype("u4")
    label(tmp_path / "a", "cells", cells, levels=2)
    group = zarr.open_group(tmp_path / "a/labels/cells")
    ome = group.attrs["ome"]
    for axis in ome["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    group.attrs["ome"] = ome
    resample_zarr(tmp_path / "a", tmp_path / "b", (10.0, 6.0, 5.0), **HERE)
    assert np.array_equal(open_image(tmp_path / "b/labels/cells").levels[0][...], cells)
    resample_zarr(tmp_path / "a", tmp_path / "half", (20.0, 12.0, 10.0), level=1, **HERE)
    coarse = open_image(tmp_path / "a/labels/cells", spacing=(10, 6, 5)).levels[1][...]
    assert np.array_equal(open_image(tmp_path / "half/labels/cells").levels[0][...], coarse)
    label(tmp_path / "a", "cells", cells[:-1], overwrite=True, levels=2)
    group = zarr.open_group(tmp_path / "a/labels/cells")
    group.attrs["ome"] = ome
    with pytest.raises(MetadataError, match=r"position of the labels 'cells' .* is unknown .*labels='drop'"):
        resample_zarr(tmp_path / "a", tmp_path / "c", 7.0, **HERE)
    resample_zarr(tmp_path / "a", tmp_path / "c", 7.0, labels="drop", **HERE)
    assert not (tmp_path / "c/labels").exists()
    with pytest.raises(ValueError, match="labels='keep': choose one of resample, drop"):
        resample_zarr(tmp_path / "a", tmp_path / "d", 7.0, labels="keep", **HERE)


def test_a_spacing_of_the_callers_is_that_of_labels_too(tmp_path):
    cells = labelled_cells(tmp_path / "a")
    resample_zarr(tmp_path / "a", tmp_path / "b", (20, 12, 10), spacing=(20, 12, 10), **HERE)
    found = open_image(tmp_path / "b/labels/cells")
    assert found.spacing == ((20, 12, 10),)
    assert np.array_equal(found.levels[0][...], cells)
    label(tmp_path / "a", "half", cells[::2, ::2, ::2], (20, 12, 10))
    with pytest.raises(MetadataError, match=r"spacing=\(20, 12, 10\) is for .*, and not for its labels 'half'"):
        resample_zarr(tmp_path / "a", tmp_path / "c", (20, 12, 10), spacing=(20, 12, 10), **HERE)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["gone"], r"lists the labels 'gone', which do not exist: correct its metadata, or pass labels="),
        (["../.."], r"lists the labels '\.\./\.\.', which is no path inside it"),
        (["plane"], r"the labels 'plane' .* have the axes of space y, x, and the image has z, y, x"),
    ],
)
def test_labels_that_cannot_be(tmp_path, names, message):
    labelled(tmp_path / "a")
    (tmp_path / "a/labels").mkdir()
    write_omezarr(tmp_path / "a/labels/plane", np.ones((4, 4), "u1"), (6, 5))
    create_labels_group(tmp_path / "a/labels", names, "0.5")
    with pytest.raises(MetadataError, match=message):
        resample_zarr(tmp_path / "a", tmp_path / "b", 7.0, **HERE)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a"]


def contents(folder):
    return {str(one.relative_to(folder)): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


def test_a_run_that_stops_anywhere_goes_on_with_labels_and_metadata(tmp_path, monkeypatch):
    labelled(tmp_path / "a")
    zarr.open_group(tmp_path / "a").attrs.update(USER)
    cells = np.random.default_rng(2).integers(0, 9, (12, 14, 10)).astype("u4")
    label(tmp_path / "a", "cells", cells)
    label(tmp_path / "a", "parts", cells[:5, :6], origin=(110, 56, 0))
    real, made = pipeline.write_block, []
    options = {"chunks": (4, 4, 10), "levels": 2, **HERE}
    resample_zarr(tmp_path / "a", tmp_path / "whole", (14.0, 5.0, 7.0), **options)
    expected = contents(tmp_path / "whole")

    def write_two(chunks, block, data, entries):
        if len(made) == 2:
            raise OSError("the disk is gone")
        made.append(block.number)
        return real(chunks, block, data, entries)

    monkeypatch.setattr(pipeline, "write_block", write_two)
    options["memory_bytes"] = 17_000  # several blocks for each
    runs = 0
    while not (tmp_path / "b").exists():
        made.clear()
        with suppress(OSError):
            resample_zarr(tmp_path / "a", tmp_path / "b", (14.0, 5.0, 7.0), **options)
        assert made, "a run that makes nothing ends never"
        runs += 1
    assert runs > 3  # each of the three images has several blocks
    assert contents(tmp_path / "b") == expected
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b", "whole"]


def test_a_stopped_run_is_gone_on_with_only_for_the_same_labels(tmp_path, monkeypatch, caplog):
    cells = labelled_cells(tmp_path / "a")
    real = pipeline.make_blocks

    def stop_at_labels(job, blocks, done):
        if "labels" in str(job.target):
            raise OSError("the disk is gone")
        real(job, blocks, done)

    monkeypatch.setattr(pipeline, "make_blocks", stop_at_labels)
    monkeypatch.setattr("linumpy.resample.resample_zarr.make_blocks", stop_at_labels)
    with pytest.raises(OSError, match="gone"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 7.0, **HERE)
    with pytest.raises(ResumeError, match=r"differs in .*labels/cells"):
        resample_zarr(tmp_path / "a", tmp_path / "b", 7.0, labels="drop", **HERE)
    monkeypatch.undo()
    label(tmp_path / "a", "cells", cells + 1, overwrite=True)
    caplog.clear()
    resample_zarr(tmp_path / "a", tmp_path / "b", 7.0, **HERE)
    assert "made from another data of labels/cells" in caplog.text
    found = open_image(tmp_path / "b/labels/cells")
    assert np.array_equal(found.levels[0][...], nearest(found, open_image(tmp_path / "a/labels/cells"), cells + 1))


def test_labels_on_the_workers_of_dask(tmp_path):
    distributed = pytest.importorskip("distributed")
    labelled_cells(tmp_path / "a")
    options = {"chunks": (4, 4, 10), "levels": 2, **HERE}
    resample_zarr(tmp_path / "a", tmp_path / "alone", (14.0, 5.0, 7.0), **options)
    workers = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**workers) as cluster, distributed.Client(cluster) as client:
        resample_zarr(tmp_path / "a", tmp_path / "b", (14.0, 5.0, 7.0), distributed=client, **options)
    assert contents(tmp_path / "b") == contents(tmp_path / "alone")


@pytest.mark.parametrize(("version", "said_to_be"), [("0.4", "0.5"), ("0.4", "0.6"), ("0.5", "0.4")])
def test_the_version_of_a_target_is_one_for_the_zarr_format_of_its_source(tmp_path, version, said_to_be):
    foreign_image(tmp_path / "a", version)
    group = zarr.open_group(tmp_path / "a")
    if version == "0.5":
        group.attrs["ome"] = {**group.attrs["ome"], "version": said_to_be}
    else:
        group.attrs["multiscales"] = [{**group.attrs["multiscales"][0], "version": said_to_be}]
    assert carried_from(select_volumes(open_image(tmp_path / "a"))).ngff_version == version


def test_a_unit_that_is_no_text_is_not_carried(tmp_path):
    foreign_image(tmp_path / "a")
    group = zarr.open_group(tmp_path / "a")
    ome = group.attrs["ome"]
    ome["multiscales"][0]["axes"][0]["unit"] = ome["multiscales"][0]["axes"][2]["unit"] = ["odd"]
    ome["multiscales"][0]["axes"][3]["orientation"] = "left-to-right"  # an object in RFC-4
    group.attrs["ome"] = ome
    resample_zarr(tmp_path / "a", tmp_path / "b", 2.0, spacing=(4, 1, 1), **HERE)
    assert [axis.unit for axis in open_image(tmp_path / "b").axes] == [None, None, *["micrometer"] * 3]


@pytest.mark.gpu
def test_labels_on_a_device(tmp_path, cupy):
    cells = labelled_cells(tmp_path / "a")
    label(tmp_path / "a", "part", cells[:5, :6, :7].astype("i2"), (20.3, 12.1, 4.9), (93, 58, 7))
    for number, wanted in enumerate(
        [(14.3, 5.1, 7.7), np.array([[0.91, 0.13, 0], [-0.21, 1.1, 0.07], [0, 0.11, 0.87]])]
    ):
        made = []
        for device in ("cpu", "cuda"):
            target = tmp_path / f"{device}{number}"
            resample_zarr(tmp_path / "a", target, wanted, levels=2, device=device, durable=False, codec="none")
            made.append({name: one for name, one in contents(target / "labels").items() if "/c/" in name})
        assert made[0] == made[1]
        assert made[0]
