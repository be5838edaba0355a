"""If this fails, parts of a sample show other physical coordinates than its crop."""

import json
from dataclasses import replace

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy import stream
from linumpy.io.ome import open_image
from linumpy.write.writer import write_omezarr
from tests.support.budget import examples
from tests.support.stream_arrays import make_array

ROTATED = stream.Augment(rotation=180, scale=(0.8, 1.2), flip="zyx")


def coordinates(shape, spacing, origin, axis):
    """A volume whose voxels say where they lie along an axis of space, in µm."""
    at = origin[axis] + spacing[axis] * np.arange(shape[axis])
    return np.broadcast_to(at.reshape([-1 if n == axis else 1 for n in range(3)]), shape).astype("f8").copy()


def image_of(path, shape, spacing, origin, axis, levels=1):
    return str(write_omezarr(path, coordinates(shape, spacing, origin, axis), spacing, origin=origin, levels=levels))


def shown(settings_, sample):
    """The first row of each part."""
    with stream.Pipeline(settings_) as p:
        p.push(sample)
        batch = next(p.batches())
        found = {name: tensor.numpy()[0] for name, tensor in batch.tensors._asdict().items()}
        batch.release()
    return found


def config(**options):
    options = {"batch_size": 1, "host_buffer_bytes": 1 << 20, "device_buffer_bytes": 1 << 24, **options}
    return stream.Config(device="cpu", **options)


@st.composite
def two_images(draw):
    """An image, a part that covers it with room, a level and shape of the part, a crop of the image."""
    lengths = st.sampled_from([1.0, 2.5, 0.3, 8.0])
    spacing, other = (draw(st.tuples(lengths, lengths, lengths)) for _ in range(2))
    other = tuple(min(max(b, a / 3), a * 4) for a, b in zip(spacing, other, strict=True))
    origin = draw(st.tuples(*[st.floats(-50, 50)] * 3))
    level = draw(st.integers(0, 2))
    margin = [40 * a + 12 * b * 2**level for a, b in zip(spacing, other, strict=True)]
    begin = tuple(o - m * draw(st.floats(0.9, 1.1)) for o, m in zip(origin, margin, strict=True))
    reach = [o + 12 * s + m for o, s, m in zip(origin, spacing, margin, strict=True)]
    shape = tuple(4 * int((r - b) / s / 4 + 2) for r, b, s in zip(reach, begin, other, strict=True))
    crop = tuple((a, a + draw(st.integers(1, 5))) for a in draw(st.tuples(*[st.integers(0, 7)] * 3)))
    size = draw(st.none() | st.tuples(*[st.integers(1, 4)] * 3))
    return spacing, origin, other, begin, shape, level, crop, size


@settings(max_examples=examples(25))
@given(two_images(), st.booleans(), st.integers(0, 2))
def test_a_part_shows_the_coordinates_of_the_crop(tmp_path_factory, case, augmented, axis):
    """Its centre is exact under augmentation, and within half a voxel of its own without."""
    spacing, origin, other, begin, shape, level, crop, size = case
    folder = tmp_path_factory.mktemp("a")
    image = image_of(folder / "i.ome.zarr", (12, 12, 12), spacing, origin, axis)
    part = image_of(folder / "p.ome.zarr", shape, other, begin, axis, levels=3)
    parts = (stream.Part("other", part, level=level, shape=size),)
    options = {"augment": replace(ROTATED, scale=(0.8, 1.0)), "pad": "edge"} if augmented else {}
    found = shown(config(**options), stream.Sample(image, crop, parts=parts))["other"]
    centre = origin[axis] + spacing[axis] * (sum(crop[axis]) - 1) / 2
    step = other[axis] * 2**level
    allowed = 1e-4 * (1 + abs(centre)) if augmented else step / 2 * (1 + 1e-3)
    assert abs(found.mean() - centre) <= allowed
    extent = [(b - a) * s / (t * 2**level) for (a, b), s, t in zip(crop, spacing, other, strict=True)]
    assert found.shape == (size or tuple(max(1, int(e + 0.5 + 1e-9)) for e in extent))


def test_labels_of_another_spacing_and_of_a_cutting(tmp_path):
    """Of 20 µm, whose voxels are those of two planes; and cut out of an image, which begin at its plane 16."""
    planes = np.broadcast_to(np.arange(64, dtype="u2")[:, None, None], (64, 8, 8))
    image = write_omezarr(tmp_path / "i.ome.zarr", planes.copy(), (10, 10, 10))
    halves = np.broadcast_to(np.arange(32, dtype="u2")[:, None, None], (32, 4, 4)).copy()
    coarse = write_omezarr(tmp_path / "h.ome.zarr", halves, (20, 20, 20), origin=(5, 5, 5))
    cutting = write_omezarr(tmp_path / "c.ome.zarr", planes[16:48].copy(), (10, 10, 10), origin=(160, 0, 0))
    parts = [stream.Part("coarse", coarse, kind="labels"), stream.Part("cutting", cutting, kind="labels")]
    found = shown(config(), stream.Sample(image, np.s_[16:24, 0:8, 0:8], parts=parts))
    assert found["coarse"][:, 0, 0].tolist() == [8, 9, 10, 11]
    assert found["cutting"][:, 0, 0].tolist() == list(range(16, 24))
    with pytest.raises(stream.InvalidArgument, match="reaches out of"):
        shown(config(), stream.Sample(image, np.s_[8:16, 0:8, 0:8], parts=parts[1:]))


def test_levels_without_translations_lie_where_their_metadata_say(tmp_path):
    """Other writers leave translations out: then the first voxels of all levels have one centre."""
    path = tmp_path / "v.ome.zarr"
    write_omezarr(path, np.zeros((32, 8, 8), "u2"), (1, 1, 1), levels=2)
    document = json.loads((path / "zarr.json").read_text())
    for dataset in document["attributes"]["ome"]["multiscales"][0]["datasets"]:
        dataset["coordinateTransformations"] = dataset["coordinateTransformations"][:1]
    (path / "zarr.json").write_text(json.dumps(document))
    array = zarr.open_array(path / "1")
    array[...] = np.broadcast_to(np.arange(16)[:, None, None], (16, 4, 4))
    sample = stream.Sample(path, ((9, 12), (0, 8), (0, 8)), parts=(stream.Part("one", level=1, shape=(1, 4, 4)),))
    assert shown(config(), sample)["one"][0, 0, 0] == 5  # 10 / 2; with translations it would be 4.75
    augmented = shown(config(augment=stream.Augment(flip="x"), pad="edge"), sample)
    assert augmented["one"][0, 0, 0] == 5


def test_an_array_without_coordinates_has_those_of_the_image_if_it_has_its_shape(tmp_path):
    values = np.random.default_rng(0).integers(0, 999, (16, 12, 12)).astype("u2")
    image = write_omezarr(tmp_path / "i.ome.zarr", values, (10, 2, 2), origin=(100, 0, 0))
    same = make_array(tmp_path / "same", values)
    half = make_array(tmp_path / "half", values[::2, ::2, ::2])
    plain = make_array(tmp_path / "plain", values)
    crop = np.s_[4:8, 2:6, 3:9]

    def labels(path, **options):
        return (stream.Part("labels", path, kind="labels", **options),)

    for own in (image, plain):
        found = shown(config(dtype="stored"), stream.Sample(own, crop, parts=labels(same)))
        assert np.array_equal(found["labels"], values[crop])
    for own, lacks in ((image, r"Part\(spacing=…, origin=…\)"), (plain, r"Config\(spacing=…, origin=…\)")):
        with pytest.raises(stream.InvalidArgument, match=rf"\(8, 6, 6\).*no OME-Zarr metadata.*{lacks}") as caught:
            shown(config(), stream.Sample(own, crop, parts=labels(half)))
        assert str(half) in str(caught.value)
    told = labels(half, spacing=(20, 4, 4), origin=(100, 0, 0))
    found = shown(config(dtype="stored"), stream.Sample(image, crop, parts=told))
    assert np.array_equal(found["labels"], values[::2, ::2, ::2][2:4, 1:3, 2:5])
    # Config speaks of the image alone: of the labels it tells nothing.
    with pytest.raises(stream.InvalidArgument, match=r"Part\(spacing=…"):
        shown(config(spacing=(10, 2, 2), origin=(100, 0, 0)), stream.Sample(plain, crop, parts=labels(half)))
    found = shown(
        config(spacing=(10, 2, 2), origin=(100, 0, 0), dtype="stored"), stream.Sample(plain, crop, parts=told)
    )
    assert np.array_equal(found["labels"], values[::2, ::2, ::2][2:4, 1:3, 2:5])


def test_the_spacing_of_the_configuration_does_not_replace_that_of_metadata(tmp_path):
    """It stands for what metadata lack; an image that has a spacing keeps it."""
    image = image_of(tmp_path / "i.ome.zarr", (16, 16, 16), (10, 10, 10), (0, 0, 0), 0)
    part = image_of(tmp_path / "p.ome.zarr", (8, 8, 8), (20, 20, 20), (0, 0, 0), 0)
    sample = stream.Sample(image, ((4, 8),) * 3, parts=(stream.Part("labels", part, kind="labels"),))
    found = shown(config(spacing=(1, 1, 1)), sample)
    assert found["labels"].shape == (2, 2, 2)
    assert found["labels"][:, 0, 0].tolist() == [40, 60]  # around 55


def without_unit(path):
    document = json.loads((path / "zarr.json").read_text())
    for axis in document["attributes"]["ome"]["multiscales"][0]["axes"]:
        axis.pop("unit", None)
    (path / "zarr.json").write_text(json.dumps(document))
    return path


def test_an_image_without_units(tmp_path):
    """Its own levels lie to each other by their scales; another image needs the unit, or the caller's spacing."""
    ramp = coordinates((16, 16, 16), (4, 4, 4), (0, 0, 0), 0)
    path = without_unit(write_omezarr(tmp_path / "i.ome.zarr", ramp, (4, 4, 4), levels=2))
    sample = stream.Sample(path, ((4, 8),) * 3, parts=(stream.Part("coarse", level=1),))
    assert shown(config(), sample)["coarse"][:, 0, 0].tolist() == [18, 26]
    other = image_of(tmp_path / "o.ome.zarr", (8, 8, 8), (8, 8, 8), (2, 2, 2), 0)
    pair = stream.Sample(path, ((4, 8),) * 3, parts=(stream.Part("other", other),))
    with pytest.raises(stream.InvalidArgument, match=r"i\.ome\.zarr.*has no unit.*Config\(spacing=…"):
        shown(config(), pair)
    assert shown(config(spacing=(4, 4, 4)), pair)["other"][:, 0, 0].tolist() == [18, 26]


def test_axes_meet_by_their_names(tmp_path):
    values = np.random.default_rng(0).integers(0, 999, (2, 8, 9, 10)).astype("u2")
    image = write_omezarr(tmp_path / "i.ome.zarr", values, (1, 1, 1), axes="czyx")
    zyx = write_omezarr(tmp_path / "zyx.ome.zarr", values[0], (1, 1, 1), axes="zyx")
    czyx = write_omezarr(tmp_path / "czyx.ome.zarr", values[:1], (1, 1, 1), axes="czyx")
    plain = make_array(tmp_path / "plain", values[0])
    crop = np.s_[1:2, 2:5, 3:7, 4:9]
    parts = [stream.Part(f"p{n}", path, kind="labels") for n, path in enumerate((zyx, czyx, plain))]
    found = shown(config(dtype="stored"), stream.Sample(image, crop, parts=parts))
    assert np.array_equal(found["image"], values[crop])
    assert np.array_equal(found["p0"], values[0][crop[1:]])
    assert np.array_equal(found["p1"], values[0][crop[1:]][None])
    assert np.array_equal(found["p2"], values[0][crop[1:]])
    back = stream.Sample(zyx, crop[1:], parts=(stream.Part("channels", czyx),))
    assert np.array_equal(shown(config(dtype="stored"), back)["channels"], values[0][crop[1:]][None])
    with pytest.raises(stream.InvalidArgument, match=r"axis 'c' of .*i\.ome\.zarr has 2 entries, and .*no such axis"):
        shown(config(), stream.Sample(zyx, crop[1:], parts=(stream.Part("channels", image),)))


def test_times_and_channels_that_do_not_fit(tmp_path):
    """Other numbers of them belong together only where the metadata say that times are the same."""
    values = np.random.default_rng(0).integers(0, 99, (6, 4, 4)).astype("u1")

    def image(name, count, axes, step):
        path = write_omezarr(tmp_path / name, values[:count], (1, 1), axes=axes)
        document = json.loads((path / "zarr.json").read_text())
        (dataset,) = document["attributes"]["ome"]["multiscales"][0]["datasets"]
        dataset["coordinateTransformations"][0]["scale"][0] = step
        (path / "zarr.json").write_text(json.dumps(document))
        return path

    movie = image("movie", 6, "tyx", 30.0)
    crop = np.s_[2:4, 0:4, 0:4]
    for name, count, step, message in (
        ("beginning", 5, 30.0, None), ("every second", 3, 60.0, "axis 't' has 3 entries in .* and 6 in"),
        ("of another clock", 6, 1.0, None),
    ):  # fmt: skip
        sample = stream.Sample(movie, crop, parts=(stream.Part("p", image(name, count, "tyx", step), kind="labels"),))
        if message is None:
            assert np.array_equal(shown(config(), sample)["p"], values[crop])
        else:
            with pytest.raises(stream.InvalidArgument, match=message):
                shown(config(), sample)
    channels = stream.Sample(
        image("six", 6, "cyx", 1.0), crop, parts=(stream.Part("p", image("two", 2, "cyx", 1.0), kind="labels"),)
    )
    with pytest.raises(stream.InvalidArgument, match="axis 'c' has 2 entries"):
        shown(config(), channels)


def renamed_axes(path, names):
    document = json.loads((path / "zarr.json").read_text())
    for axis, name in zip(document["attributes"]["ome"]["multiscales"][0]["axes"], names, strict=True):
        axis["name"] = name
    (path / "zarr.json").write_text(json.dumps(document))
    return path


def test_axes_that_do_not_fit(tmp_path):
    values = np.zeros((8, 8, 8), "u1")
    image = write_omezarr(tmp_path / "i.ome.zarr", values, (1, 1, 1))
    turned = renamed_axes(write_omezarr(tmp_path / "t.ome.zarr", values, (1, 1, 1)), "xyz")
    assert [axis.name for axis in open_image(turned).axes] == ["x", "y", "z"]
    flat = make_array(tmp_path / "flat", values[0])
    crop = ((0, 4),) * 3
    for path, message in ((turned, "must come in the same order"), (flat, "has 2 axes without names")):
        with pytest.raises(stream.InvalidArgument, match=message):
            shown(config(), stream.Sample(image, crop, parts=(stream.Part("labels", path),)))


def test_an_axis_with_an_int_is_dropped_from_all_parts(tmp_path):
    values = np.random.default_rng(0).integers(0, 999, (8, 9, 10)).astype("u2")
    image = write_omezarr(tmp_path / "i.ome.zarr", values, (1, 1, 1))
    fine = write_omezarr(tmp_path / "f.ome.zarr", values.repeat(2, 0), (0.5, 1, 1), origin=(-0.25, 0, 0))
    parts = (stream.Part("fine", fine), stream.Part("thick", shape=(3, 4, 5)))
    sample = stream.Sample(image, np.s_[5, 2:6, 3:8], parts=parts)
    assert str(sample).endswith("[5, 2:6, 3:8]")
    for options in ({}, {"augment": stream.Augment(flip=""), "pad": "edge"}):
        found = shown(config(dtype="stored", **options), sample)
        assert np.array_equal(found["image"], values[5, 2:6, 3:8])
        assert np.array_equal(found["fine"], values[5, 2:6, 3:8])
        assert np.array_equal(found["thick"], values[4:7, 2:6, 3:8])
