"""If this fails, a time or channel is read in another's place, or a unit is guessed."""

import json

import numpy as np
import ome_zarr.format
import ome_zarr.writer
import pytest
import zarr

from linumpy.errors import MetadataError, SourceError
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.ome import open_image, open_images, open_level, read_omezarr
from linumpy.io.volume import open_volumes
from linumpy.mosaic.io.tiles import read_box
from linumpy.write.writer import write_omezarr


def image_of(folder, shape=(2, 3, 6, 7, 8), axes="tczyx", **options):
    data = np.random.default_rng(0).integers(0, 60000, shape).astype("u2")
    space = sum(name in "zyx" for name in axes)
    write_omezarr(folder, data, (5.0, 2.0, 3.0)[:space], axes=axes, **options)
    return data


def change(folder, edit):
    """Edit the metadata of an image (NGFF 0.5)."""
    path = folder / "zarr.json"
    document = json.loads(path.read_text())
    edit(document["attributes"]["ome"]["multiscales"][0])
    path.write_text(json.dumps(document))


def bioformats2raw(folder, count, version, *, series=None):
    """What bioformats2raw makes: images in groups with numbers, and a group named OME."""
    group = zarr.create_group(folder, zarr_format=3 if version == "0.5" else 2)
    layout = {"bioformats2raw.layout": 3}
    group.update_attributes({"ome": {"version": "0.5", **layout}} if version == "0.5" else layout)
    described = group.create_group("OME")
    if series:
        described.update_attributes({"ome": {"series": series}} if version == "0.5" else {"series": series})
    return [image_of(folder / str(number), ngff_version=version) for number in range(count)]


@pytest.mark.parametrize("options", [{"chunks": (2, 2, 4, 4, 4)}, {"chunks": (1,) * 5, "shards": (2, 3, 6, 7, 8)}])
def test_every_time_and_channel(tmp_path, options):
    data = image_of(tmp_path / "i", origin=(1, 2, 3), **options)
    got = open_volumes(tmp_path / "i")
    assert (got.axes, got.leading, got.leading_shape) == ("zyx", "tc", (2, 3))
    assert (got.spacing, got.origin, got.nbytes) == ((5.0, 2.0, 3.0), (1.0, 2.0, 3.0), data.nbytes)
    assert list(got.volumes) == [(t, c) for t in range(2) for c in range(3)]
    box = (slice(1, 5), slice(0, 7), slice(3, 4))
    for entries, volume in got.volumes.items():
        assert np.array_equal(volume.read(), data[entries])
        assert np.array_equal(read_box(volume, box, device="cpu"), data[entries][box])
        assert (volume.shape, volume.nbytes) == ((6, 7, 8), data[0, 0].nbytes)
        assert volume.chunks == options["chunks"][2:]
        assert volume.shards == (options["shards"][2:] if "shards" in options else None)


@pytest.mark.gpu
def test_a_volume_on_the_gpu(cupy, tmp_path):
    data = image_of(tmp_path / "i", chunks=(2, 2, 4, 4, 4))
    box = (slice(1, 5), slice(0, 7), slice(3, 4))
    for entries, volume in open_volumes(tmp_path / "i").volumes.items():
        got = read_box(volume, box, device="cuda")
        assert isinstance(got, cupy.ndarray)
        assert np.array_equal(got.get(), data[entries][box])


@pytest.mark.parametrize(
    ("chosen", "leading", "part"),
    [
        ({"channel": 2}, "t", np.s_[:, 2]),
        ({"time": 0}, "c", np.s_[0]),
        ({"time": 1, "channel": np.int64(1)}, "", np.s_[1, 1]),
    ],
)
def test_what_is_chosen(tmp_path, chosen, leading, part):
    data = image_of(tmp_path / "i")
    got = open_volumes(tmp_path / "i", **chosen)
    assert got.leading == leading
    assert np.array_equal(np.array([one.read() for one in got.volumes.values()]).reshape(data[part].shape), data[part])


def test_single_entries_are_left_out_and_order_is_kept(tmp_path):
    data = image_of(tmp_path / "one", (1, 1, 6, 7, 8))
    assert open_volumes(tmp_path / "one").leading == ""
    assert np.array_equal(open_volumes(tmp_path / "one", time=0).only("").read(), data[0, 0])
    # Channels last, as some writers have them.
    data = image_of(tmp_path / "last", (4, 5, 6), "zyx")
    change(tmp_path / "last", lambda image: image["axes"].__setitem__(2, {"name": "c", "type": "channel"}))
    got = open_volumes(tmp_path / "last")
    assert (got.axes, got.leading, got.spacing) == ("zy", "c", (5.0, 2.0))
    assert np.array_equal(got.volumes[4,].read(), data[..., 4])


def test_axes_without_a_type_go_by_their_names(tmp_path):
    image_of(tmp_path / "i")
    change(tmp_path / "i", lambda image: [axis.pop("type") for axis in image["axes"][:2]])
    assert open_volumes(tmp_path / "i").leading == "tc"


def test_bad_choices(tmp_path):
    image_of(tmp_path / "i")
    image_of(tmp_path / "one", (6, 7, 8), "zyx")
    for chosen, message in [
        ({"channel": 3}, "channel=3: .* has 3 channels, numbered from 0"),
        ({"time": -1}, "time=-1: .* has 2 times"),
        ({"channel": True}, "channel=True"),
        ({"channel": "red"}, "channel='red'"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_volumes(tmp_path / "i", **chosen)
    with pytest.raises(ValueError, match=r"time=1: .* has one time, number 0"):
        open_volumes(tmp_path / "one", time=1)
    with pytest.raises(
        ValueError, match=r"2 times and 3 channels, but why not: choose by time= \(0 to 1\) and channel= \(0 to 2\)"
    ):
        open_volumes(tmp_path / "i").only("why not")
    change(tmp_path / "i", lambda image: image["axes"].__setitem__(1, {"name": "angle", "type": "array"}))
    with pytest.raises(MetadataError, match="axis 'angle' of type 'array' has 3 entries"):
        open_volumes(tmp_path / "i")


def test_spacing_by_the_names_of_axes(tmp_path):
    image_of(tmp_path / "i", (4, 5, 6), "yzx")
    change(tmp_path / "i", lambda image: [axis.pop("unit") for axis in image["axes"]])
    with pytest.raises(MetadataError, match="pass spacing= in µm"):
        _ = open_image(tmp_path / "i").spacing
    assert open_image(tmp_path / "i", spacing={"z": 9, "y": 2, "x": 1}).spacing == ((2.0, 9.0, 1.0),)
    with pytest.raises(ValueError, match=r"3 axes of space \(y, z, x\)"):
        open_image(tmp_path / "i", spacing={"z": 9, "y": 2})


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_the_one_image_of_bioformats2raw(tmp_path, version):
    (data,) = bioformats2raw(tmp_path / "b", 1, version)
    assert np.array_equal(open_image(tmp_path / "b").levels[0][...], data)
    assert np.array_equal(open_level(zarr.open_group(tmp_path / "b", mode="r"), 0)[...], data)
    assert read_omezarr(tmp_path / "b")[1] == (5.0, 2.0, 3.0)


def plate(folder, version):
    """Two wells, one with two fields of view; metadata as ome-zarr-py writes them."""
    fmt = {"0.4": ome_zarr.format.FormatV04(), "0.5": ome_zarr.format.FormatV05()}[version]
    root = zarr.open_group(folder, mode="w", zarr_format=fmt.zarr_format)
    ome_zarr.writer.write_plate_metadata(root, ["A", "B"], ["03"], ["A/03", "B/03"], fmt=fmt)
    data = {}
    for well, fields in (("A/03", ["0"]), ("B/03", ["0", "1"])):
        ome_zarr.writer.write_well_metadata(root.require_group(well), fields, fmt=fmt)
        for field in fields:
            data[f"{well}/{field}"] = np.full((4, 5, 6), len(data), "u1")
            write_omezarr(folder / well / field, data[f"{well}/{field}"], (5, 2, 3), ngff_version=version)
    return data


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_plates_and_wells_name_their_images(tmp_path, version):
    data = plate(tmp_path / "p.zarr", version)
    for path, kind, message in [
        ("p.zarr", "plate", r"such as .*/p\.zarr/A/03/0; it has the images 'A/03/0', 'B/03/0', 'B/03/1'$"),
        ("p.zarr/B/03", "well", r"such as .*/p\.zarr/B/03/0; it has the images '0', '1'$"),
    ]:
        for ask in (open_image, open_volumes, read_omezarr, lambda path: read_zarr(path, level=0, device="cpu")):
            with pytest.raises(SourceError, match=f"is a {kind}, not an image: open one of its images, {message}"):
                ask(tmp_path / path)
    for path, voxels in data.items():
        assert np.array_equal(open_image(tmp_path / "p.zarr" / path).levels[0][...], voxels)
        assert np.array_equal(open_image(f"{tmp_path}/p.zarr/{path}").levels[0][...], voxels)
    images = open_images(tmp_path / "p.zarr")
    assert (images.kind, list(images), len(images)) == ("a plate", list(data), 3)
    assert all(np.array_equal(images[path].levels[0][...], voxels) for path, voxels in data.items())
    assert np.array_equal(open_images(tmp_path / "p.zarr/B/03")["1"].levels[0][...], data["B/03/1"])
    for wrong in ("C/01/0", "", 5, "../p.zarr"):
        with pytest.raises(SourceError, match=r"no image .*: .* is a plate, .* 'A/03/0', 'B/03/0', 'B/03/1'$"):
            images[wrong]
    with pytest.raises(SourceError, match=r"is an image: open_image opens it$"):
        open_images(tmp_path / "p.zarr/B/03/0")
    empty = zarr.create_group(tmp_path / "empty")
    with pytest.raises(SourceError, match=r"empty has no metadata that names images$"):
        open_images(empty)
    empty.attrs["ome"] = {"version": "0.5", "plate": {"wells": [{"path": "A/1"}, 5]}}
    with pytest.raises(SourceError, match=r"is a plate, not an image: it has no images$"):
        open_image(tmp_path / "empty")


def test_a_plate_of_bioformats2raw_is_a_plate(tmp_path):
    """NGFF: the plate takes precedence. Here its row "1" is not an image "1"."""
    folder = tmp_path / "p.zarr"
    attributes = {"version": "0.5", "bioformats2raw.layout": 3, "plate": {"wells": [{"path": "1/1"}]}}
    zarr.create_group(folder, attributes={"ome": attributes})
    zarr.create_group(folder / "OME")
    zarr.create_group(folder / "1")
    zarr.create_group(folder / "1/1", attributes={"ome": {"version": "0.5", "well": {"images": [{"path": "0"}]}}})
    write_omezarr(folder / "1/1/0", np.full((4, 5, 6), 7, "u1"), (5, 2, 3))
    images = open_images(folder)
    assert (images.kind, list(images)) == ("a plate", ["1/1/0"])
    assert images["1/1/0"].spacing == ((5.0, 2.0, 3.0),)


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_several_images_of_bioformats2raw_are_named(tmp_path, version):
    bioformats2raw(tmp_path / "b", 2, version)
    for ask in (open_image, open_volumes, lambda path: open_level(zarr.open_group(path, mode="r"), 0)):
        with pytest.raises(
            SourceError, match=r"is a collection of bioformats2raw, .*, such as .*/b/0; it has the images '0', '1'$"
        ):
            ask(tmp_path / "b")
    assert open_image(tmp_path / "b/1").spacing == ((5.0, 2.0, 3.0),)
    bioformats2raw(tmp_path / "listed", 2, version, series=["1"])  # the list counts, not what lies there
    assert open_image(tmp_path / "listed").name.endswith("listed/1")
    bioformats2raw(tmp_path / "gone", 0, version, series=["0"])
    with pytest.raises(SourceError, match=r"'0': the metadata of .*gone name it, but no group is stored there"):
        open_images(tmp_path / "gone")["0"]
    with pytest.raises(SourceError, match="the image '0' that its metadata names does not exist"):
        open_image(tmp_path / "gone")
    bioformats2raw(tmp_path / "none", 0, version)
    with pytest.raises(SourceError, match="is a collection of bioformats2raw, not an image: it has no images"):
        open_image(tmp_path / "none")


def test_labels_and_scenes_name_their_images(tmp_path):
    ends = {"input": {"path": "a", "name": "physical"}, "output": {"path": "b/c", "name": "physical"}}
    scene = zarr.create_group(tmp_path / "s")
    scene.attrs["ome"] = {"version": "0.6", "scene": {"coordinateTransformations": [{"type": "identity", **ends}]}}
    labels = zarr.create_group(tmp_path / "labels", attributes={"ome": {"labels": ["cells", "x/y"]}})
    for group, kind, paths in ((scene, "a scene", ["a", "b/c"]), (labels, "a group of labels", ["cells", "x/y"])):
        for path in paths:
            zarr.create_group(group.store_path / path)
            write_omezarr(group.store.root / path, np.full((3, 4, 5), 7, "u1"), (1, 2, 3), overwrite=True)
        images = open_images(group.store.root)
        assert (images.kind, list(images)) == (kind, paths)
        assert images[paths[1]].spacing == ((1, 2, 3),)
        with pytest.raises(
            SourceError, match=f"is {kind}, not an image: .*; it has the images '{paths[0]}', '{paths[1]}'"
        ):
            open_image(group.store.root)
