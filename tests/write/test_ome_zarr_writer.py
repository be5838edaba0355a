"""If this fails, images written by regions are wrong, incomplete, or not read by others."""

import asyncio
import errno
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import ome_zarr.io
import ome_zarr.reader
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

import linumpy
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import gpu_mode
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write import chunk_file, levels, writer
from linumpy.write.chunks import OwnChunks, ZarrChunks
from linumpy.write.new_image import plan_image
from linumpy.write.pyramid import halve
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support.budget import examples, shown
from tests.support.stores import levels_of

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]
V3_CODECS = {"raw": None, "zstd": ZstdCodec(), "blosc": BloscCodec(), "gzip": [GzipCodec()]}
V2_CODECS = {"raw": None, "zstd": numcodecs.Zstd(), "blosc": numcodecs.Blosc(), "gzip": numcodecs.GZip()}


def values(shape, dtype="u2", seed=1):
    rng = np.random.default_rng(seed)
    return rng.random(shape) < 0.5 if dtype == "bool" else rng.integers(0, 120, shape).astype(dtype)


def assert_pyramid(path, finest, levels, downsampling="mean"):
    """`halve` is compared with one voxel after another in its own tests."""
    got = levels_of(path)
    assert len(got) == levels
    for one in got:
        assert one.shape == finest.shape
        assert np.array_equal(one, finest, equal_nan=finest.dtype.kind == "f")
        finest = halve(finest, downsampling)


def boxes_of(shape, step):
    starts = [range(0, n, s) for n, s in zip(shape, step, strict=True)]
    return [
        tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, step, shape, strict=True))
        for corner in itertools.product(*starts)
    ]


@st.composite
def requests(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.integers(1, 24)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    version = draw(st.sampled_from(["0.5", "0.4"]))
    sharded = version == "0.5" and draw(st.booleans())
    codecs = V3_CODECS if version == "0.5" else V2_CODECS
    options = {
        "chunks": chunks,
        "shards": tuple(c * draw(st.integers(1, 3)) for c in chunks) if sharded else None,
        "compressors": codecs[draw(st.sampled_from(["raw", "raw", "zstd", "blosc", "gzip"]))],
        "ngff_version": version,
        "levels": draw(st.integers(1, (max(shape) - 1).bit_length() + 1)),
        "downsampling": draw(st.sampled_from(["mean", "label", "nearest"])),
        "fill_value": draw(st.sampled_from([0, 1])),
    }
    return shape, draw(st.sampled_from(DTYPES)), options, draw(st.integers(0, 2**32 - 1))


def each_request():
    """Make a request of every dtype, and with it of every version, codec and layout."""
    for k, dtype in enumerate(DTYPES):
        version, codec = ("0.5", "0.4")[k // 4 % 2], list(V3_CODECS)[k % 4]
        options = {
            "chunks": (4, 3, 5),
            "shards": (4, 6, 10) if version == "0.5" and k % 3 else None,
            "compressors": (V3_CODECS if version == "0.5" else V2_CODECS)[codec],
            "ngff_version": version,
            "levels": 1 + k % 3,
            "downsampling": ("mean", "nearest")[k % 2],
            "fill_value": k // 2 % 2,
        }
        yield (9, 13, 11), dtype, options, k


def write_by_parts(path, request, monkeypatch, cut):
    """Write most of an image in regions of any order and size, some of it twice; returns what it must hold."""
    shape, dtype, options, seed = request
    rng = random.Random(seed)
    monkeypatch.setattr(writer, "STEP_BYTES", rng.choice([1, 300, 5000, 2**28]))
    monkeypatch.setattr("linumpy.write.chunks._PIECE_NBYTES", rng.choice([1, 40, 2**19]))
    expected = np.full(shape, options["fill_value"], dtype)
    stored = options["shards"] or tuple(map(min, options["chunks"], shape))
    step = [rng.randint(1, 12) if cut else s * rng.randint(1, 4) for s in stored]
    regions = boxes_of(shape, step)
    rng.shuffle(regions)
    regions = [*regions[: rng.randint(0, len(regions))], *regions[: rng.randint(0, 2)]]
    with OmeZarrWriter(
        path, shape, dtype, (1, 2, 3)[: len(shape)], buffer_bytes=2**20 if cut else 0, **options
    ) as target:
        for number, region in enumerate(regions):
            block = values([b.stop - b.start for b in region], dtype, seed + number)
            target[region] = block if rng.random() < 0.5 else np.asfortranarray(block)
            expected[region] = block
    return expected


@pytest.mark.parametrize("cut", [False, True])
@settings(max_examples=examples(60))
@given(request=requests())
@shown(request=list(each_request()))
def test_zarr_reads_what_was_written(cut, request):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        expected = write_by_parts(Path(folder) / "i", request, monkeypatch, cut)
        assert os.listdir(folder) == ["i"]
        assert_pyramid(Path(folder) / "i", expected, request[2]["levels"], request[2]["downsampling"])


@pytest.mark.parametrize(("version", "prefix"), [("0.5", "c/"), ("0.4", "")])
def test_raw_files_are_as_zarr_writes_them(tmp_path, version, prefix):
    data = values((10, 9, 7), "i2")
    options = {"chunks": (4, 4, 4), "fill_value": -3, "ngff_version": version, "codec": "none"}
    with OmeZarrWriter(tmp_path / "ours", data.shape, "i2", (1, 1, 1), **options) as ours:
        assert isinstance(ours._chunks[0], OwnChunks)
        ours[...] = data
    (theirs,) = plan_image(data.shape, "i2", (1, 1, 1), name="zarrs", **options).create(tmp_path / "zarrs")
    theirs[...] = data
    mine, others = ({f.relative_to(root): f for f in root.rglob("*") if f.is_file()} for root in tmp_path.iterdir())
    assert mine.keys() == others.keys()
    chunks = [f for f in mine if not f.name.startswith(("zarr.json", "."))]
    assert len(chunks) == 3 * 3 * 2
    assert Path(f"0/{prefix}2/2/1") in chunks
    assert all(mine[f].read_bytes() == others[f].read_bytes() for f in chunks)
    assert mine[chunks[0]].stat().st_size == 4 * 4 * 4 * 2


@pytest.mark.parametrize("version", ["0.5", "0.4"])
@pytest.mark.parametrize("shape", [(20, 31, 40), (9, 1, 30), (33, 20)])
def test_others_open_it(tmp_path, version, shape):
    from ome_zarr_models import open_ome_zarr

    data, rank = values(shape), len(shape)
    options = {"levels": 3, "chunks": (8, 8, 16)[:rank], "ngff_version": version, "origin": (1.0, -2.0, 3.0)[:rank]}
    with OmeZarrWriter(tmp_path / "i", shape, "u2", (5, 2, 3)[:rank], name="brain 7", **options) as target:
        target[...] = data
    model = open_ome_zarr(zarr.open_group(tmp_path / "i", mode="r"))
    assert f"v0{version[-1]}.image" in type(model).__module__
    multiscales = model.attributes.ome.multiscales if version == "0.5" else model.attributes.multiscales
    assert (multiscales[0].name, multiscales[0].type) == ("brain 7", "mean")
    (node,) = ome_zarr.reader.Reader(ome_zarr.io.parse_url(tmp_path / "i"))()
    expected = data
    for array in node.data:
        assert np.array_equal(np.asarray(array), expected)
        expected = halve(expected)
    assert [axis["name"] for axis in node.metadata["axes"]] == list("zyx"[-rank:])


@pytest.mark.parametrize("version", ["0.5", "0.4"])
@pytest.mark.parametrize("axes", ["tczyx", "czyx", "tyx", "cxyz"])
def test_times_and_channels(tmp_path, version, axes):
    """They come before space, in chunks of one by default, and no resolution has fewer of them."""
    from ome_zarr_models import open_ome_zarr

    leading = sum(name in "tc" for name in axes)
    shape = (3, 5)[-leading:] + (6, 9, 8)[: len(axes) - leading]
    data, sizes = values(shape), (5.0, 2.0, 3.0)[: len(axes) - leading]
    options = {"axes": axes, "ngff_version": version, "levels": 3, "origin": sizes, "attributes": {"linumpy": {"a": 1}}}
    with OmeZarrWriter(tmp_path / "i", shape, "u2", sizes, **options) as target:
        assert target.stored == (1,) * leading + shape[leading:]
        for number, part in enumerate(data):  # the first of the leading axes entry by entry
            target[number] = part
    open_ome_zarr(zarr.open_group(tmp_path / "i", mode="r"))
    (node,) = ome_zarr.reader.Reader(ome_zarr.io.parse_url(tmp_path / "i"))()
    kinds = [axis["type"] for axis in node.metadata["axes"]]
    assert kinds == [{"t": "time", "c": "channel"}.get(name, "space") for name in axes]
    expected = data
    for array in node.data:
        assert np.array_equal(np.asarray(array), expected)
        expected = np.stack([halve(one) for one in expected.reshape(-1, *expected.shape[leading:])])
        expected = expected.reshape(*shape[:leading], *expected.shape[1:])
    image = open_image(tmp_path / "i")
    assert image.spacing == (sizes, tuple(2 * s for s in sizes), tuple(4 * s for s in sizes))
    assert image.origin[:2] == (sizes, tuple(1.5 * s for s in sizes))
    assert image.linumpy == {"a": 1}


@pytest.mark.parametrize("version", ["0.4", "0.5", "0.6"])
def test_a_pyramid_says_how_it_was_made(tmp_path, version):
    """As the strict schemas of the specification demand it."""
    ngff_zarr = pytest.importorskip("ngff_zarr")
    pytest.importorskip("jsonschema")
    write_omezarr(tmp_path / "i", values((6, 1, 8)), (1, 1, 1), levels=2, ngff_version=version, downsampling="label")
    attributes = zarr.open_group(tmp_path / "i").attrs.asdict()
    ngff_zarr.validate(attributes, version=version, model="image", strict=True)
    image = attributes.get("ome", attributes)["multiscales"][0]
    assert image["type"] == "label"
    assert image["metadata"] == {
        "method": "linumpy.write.pyramid.halve", "version": linumpy.__version__, "args": [],
        "kwargs": {"downsampling": "label", "factors": [2, 1, 2]},
    }  # fmt: skip
    voxels = open_image(tmp_path / "i").levels
    assert np.array_equal(voxels[1][...], halve(voxels[0][...], **image["metadata"]["kwargs"]))
    resample_zarr(tmp_path / "i", tmp_path / "j", 0.7, levels=2, device="cpu")
    image = zarr.open_group(tmp_path / "j").attrs.asdict()
    assert image.get("ome", image)["multiscales"][0]["metadata"]["kwargs"]["downsampling"] == "mean"


def test_times_in_chunks_and_shards_of_several(tmp_path):
    data = values((5, 2, 8, 9, 10))
    options = {"axes": "tczyx", "chunks": (2, 1, 4, 4, 4), "shards": (4, 2, 8, 4, 8), "levels": 2}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), **options) as target:
        target[:4, :, :, :8] = data[:4, :, :, :8]
        target[:4, :, :, 8:] = data[:4, :, :, 8:]
        target[4:] = data[4:]
    assert np.array_equal(levels_of(tmp_path / "i")[0], data)
    expected = [[halve(volume) for volume in channels] for channels in data]
    assert np.array_equal(levels_of(tmp_path / "i")[1], np.array(expected))


@pytest.mark.parametrize("version", ["0.6", "0.5", "0.4"])
def test_ngff_zarr_opens_it(tmp_path, version):
    ngff_zarr = pytest.importorskip("ngff_zarr")
    data = values((20, 31, 40))
    options = {"levels": 3, "chunks": (8, 8, 16), "ngff_version": version, "origin": (1, 2, 3)}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (5, 2, 3), **options) as target:
        target[...] = data
    images = ngff_zarr.from_ngff_zarr(str(tmp_path / "i")).images
    for level, image in enumerate(images):
        assert np.array_equal(np.asarray(image.data), data)
        assert image.scale == dict(zip("zyx", (5 * 2**level, 2 * 2**level, 3 * 2**level), strict=True))
        centre = (2**level - 1) / 2
        assert image.translation == dict(zip("zyx", (1 + 5 * centre, 2 + 2 * centre, 3 + 3 * centre), strict=True))
        assert set(image.axes_units.values()) == {"micrometer"}
        data = halve(data)
    assert len(images) == 3


def test_big_endian_goes_through_zarr(tmp_path):
    """A file of another byte order is zarr's to make; of the block's, both are taken."""
    data = values((9, 9, 9))
    with OmeZarrWriter(tmp_path / "v2", data.shape, ">u2", (1, 1, 1), ngff_version="0.4", levels=2) as target:
        assert isinstance(target._chunks[0], ZarrChunks)
        target[...] = data
    assert zarr.open_array(tmp_path / "v2/0").dtype == ">u2"
    assert_pyramid(tmp_path / "v2", data, 2)
    with OmeZarrWriter(tmp_path / "swapped", data.shape, "u2", (1, 1, 1), chunks=(4, 4, 4), levels=2) as target:
        target[...] = data.astype(">u2")
    assert_pyramid(tmp_path / "swapped", data, 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compressors": ZstdCodec()},
        {"shards": (8, 8)},
        {"ngff_version": "0.4"},
        {"ngff_version": "0.4", "compressors": numcodecs.Zstd()},
    ],
)
def test_where_zarr_is_in_its_gpu_mode(tmp_path, options):
    """Whoever switched it on, and in whichever thread: the writer's arrays are in host memory. Needs no GPU to fail."""
    data = values((20, 20))
    with (
        gpu_mode(),
        OmeZarrWriter(tmp_path / "i", (20, 20), "u2", (1, 1), chunks=(4, 4), levels=3, **options) as target,
    ):
        for region in boxes_of((20, 20), (8, 8)):
            target[region] = data[region]
    assert_pyramid(tmp_path / "i", data, 3)


def test_what_is_not_written_is_fill_value_at_every_level(tmp_path):
    options = {"chunks": (4, 4), "levels": 3, "fill_value": np.nan}
    with OmeZarrWriter(tmp_path / "i", (20, 20), "f4", (1, 1), **options) as target:
        target[0:4, 4:8] = np.ones((4, 4), "f4")
    first, second, third = levels_of(tmp_path / "i")
    assert np.isnan(first).sum() == 400 - 16
    assert np.isnan(second).sum() == 100 - 4
    assert (third[0, 1], np.isnan(third).sum()) == (1, 24)
    # Nothing is made of nothing: a sparse image stays sparse.
    assert sorted(str(f.relative_to(tmp_path / "i/1")) for f in (tmp_path / "i/1/c").rglob("*") if f.is_file()) == [
        "c/0/0"
    ]


def test_progress_counts_the_finest_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "STEP_BYTES", 1000)
    data, seen = values((9, 20, 21)), []
    options = {"levels": 3, "chunks": (4, 4, 4), "buffer_bytes": 2**20, "progress": seen.append}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), **options) as target:
        target[:5] = data[:5]
        target[5:] = data[5:]
    assert sum(seen) == data.nbytes
    assert len(seen) > 4


@pytest.mark.parametrize("nbytes", [0, 2**8, 2**30])
def test_its_own_regions_are_whole(tmp_path, nbytes):
    data = values((9, 20, 21))
    made = []
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), chunks=(4, 4, 4), levels=3) as target:
        for region in target.regions(nbytes):
            target[region] = data[region]
            made.append(region)
        assert target.shape == data.shape
        assert target.dtype == "u2"
        assert target.stored == (4, 4, 4)
    assert_pyramid(tmp_path / "i", data, 3)
    assert len(made) == {0: 3 * 5 * 6, 2**8: 45, 2**30: 1}[nbytes]


def test_a_region_that_holds_coarser_chunks_is_not_read_again(tmp_path, monkeypatch):
    """Aligned regions leave nothing to be made at the end; others leave only what they share."""
    read, real = [], levels.read_back

    def count(array, box, **options):
        read.append((array.name, box))
        return real(array, box, **options)

    monkeypatch.setattr(levels, "read_back", count)
    data = values((32, 32))
    with OmeZarrWriter(tmp_path / "a", data.shape, "u2", (1, 1), chunks=(4, 4), levels=3) as target:
        for region in boxes_of(data.shape, (16, 16)):
            target[region] = data[region]
    assert read == []
    with OmeZarrWriter(tmp_path / "b", data.shape, "u2", (1, 1), chunks=(4, 4), levels=3) as target:
        for region in boxes_of(data.shape, (8, 8)):
            target[region] = data[region]
    assert {name for name, _ in read} == {"/1"}
    assert_pyramid(tmp_path / "a", data, 3)
    assert_pyramid(tmp_path / "b", data, 3)


# --- What is refused.


@pytest.mark.parametrize(
    ("region", "shape", "error", "message"),
    [
        (np.s_[0:5], (5, 20), ValueError, r"region \[0:5, 0:20\] cuts the chunk \[4:8, 0:6\]: write whole chunks"),
        (np.s_[0:4, 3:12], (4, 9), ValueError, r"region \[0:4, 3:12\] cuts the chunk \[0:4, 0:6\]"),
        (np.s_[8:10, 12:19], (2, 7), ValueError, r"region \[8:10, 12:19\] cuts the chunk \[8:10, 18:20\]"),
        (np.s_[0:4], (4, 19), ValueError, r"region \[0:4, 0:20\] has shape \(4, 20\), but the block has \(4, 19\)"),
        (np.s_[4:4], (0, 20), ValueError, r"region \[4:4, 0:20\] of an image of shape \(10, 20\) has no voxels"),
        (np.s_[0:12], (12, 20), IndexError, "out of bounds for axis 0"),
        (np.s_[0:8:2], (4, 20), IndexError, "steps of 1"),
        (np.s_[[0, 1]], (2, 20), TypeError, "a slice, an int or"),
    ],
)
def test_regions_that_do_not_fit(tmp_path, region, shape, error, message):
    with OmeZarrWriter(tmp_path / "i", (10, 20), "u2", (1, 1), chunks=(4, 6)) as target:
        with pytest.raises(error, match=message):
            target[region] = np.zeros(shape, "u2")
        target[8:10, 18:20] = np.ones((2, 2), "u2")  # a refusal does no harm
    assert levels_of(tmp_path / "i")[0].sum() == 4


def test_shards_are_what_regions_must_not_cut(tmp_path):
    options = {"chunks": (2, 3), "shards": (4, 6)}
    with (
        OmeZarrWriter(tmp_path / "i", (10, 20), "u2", (1, 1), **options) as target,
        pytest.raises(ValueError, match=r"cuts the shard \[0:4, 0:6\]: write whole shards of \(4, 6\)"),
    ):
        target[0:2] = np.zeros((2, 20), "u2")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"levels": 0}, ValueError, "levels=0"),
        ({"levels": 7}, ValueError, r"levels=7: an array of shape \(10, 20\) can have 1 to 6"),
        ({"ngff_version": "0.3"}, ValueError, "ngff_version='0.3': choose one of 0.6, 0.5, 0.4"),
        ({"downsampling": "max"}, ValueError, "downsampling='max': choose one of mean, label, nearest"),
        ({"fill_value": -1}, ValueError, "fill_value=-1 is no value of uint16"),
        ({"fill_value": 0.5}, ValueError, "fill_value=0.5 is no value of uint16"),
        ({"fill_value": np.nan}, ValueError, "fill_value=nan is no value of uint16"),
        ({"fill_value": "a"}, ValueError, "fill_value='a' is no value"),
        ({"fill_value": [1, 2]}, ValueError, r"fill_value=\[1, 2\] is no value"),
        (
            {"ngff_version": "0.4", "chunks": (4, 4), "shards": (8, 8)},
            ValueError,
            "NGFF 0.4 is zarr v2, which has none",
        ),
        ({"shape": (10, 0)}, ValueError, "has no voxels"),
        ({"shape": (10, -1)}, ValueError, "has no voxels"),
        ({"shape": (5,), "spacing": (1,)}, ValueError, "an image has two or three axes of space"),
        ({"dtype": "c8"}, TypeError, "no real numbers"),
        ({"dtype": np.longdouble}, TypeError, "no real numbers of 1 to 8 bytes"),
        ({"compressors": "brotli"}, (ValueError, TypeError), "takes codecs of zarr.codecs"),
        ({"compressors": numcodecs.Zstd()}, (ValueError, TypeError), "NGFF 0.5 takes codecs of zarr.codecs"),
        ({"compressors": ZstdCodec(), "ngff_version": "0.4"}, (ValueError, TypeError), "takes one of numcodecs"),
        ({"shape": 10}, TypeError, "shape=10: pass whole numbers"),
        ({"shape": (10.5, 20)}, TypeError, "pass whole numbers"),
        ({"chunks": 4}, TypeError, "chunks=4: pass whole numbers"),
        ({"chunks": (4.5, 4)}, TypeError, "pass whole numbers"),
        ({"chunks": (4, 4), "shards": (8.5, 8)}, TypeError, "pass whole numbers"),
        ({"levels": 2.0}, TypeError, "levels=2.0: pass a whole number"),
        ({"spacing": 5.0}, TypeError, "spacing=5.0: pass numbers in µm"),
        ({"spacing": "12"}, TypeError, "spacing='12': pass numbers in µm"),
        ({"spacing": None}, TypeError, "spacing=None: pass numbers in µm"),
        ({"origin": 1.0}, TypeError, "origin=1.0: pass numbers in µm"),
        ({"buffer_bytes": -1}, ValueError, "buffer_bytes=-1: pass a number of bytes"),
        ({"buffer_bytes": "1 GiB"}, ValueError, "buffer_bytes='1 GiB': pass a number of bytes"),
        ({"dtype": "f2", "fill_value": 1e9}, ValueError, "fill_value=1000000000.0 is no value of float16"),
        ({"shape": (2, 4, 4, 4)}, ValueError, "name them by axes=, such as 'tczyx'"),
        ({"attributes": {"ome": 1}}, ValueError, "NGFF reserves ome"),
        ({"axes": 5}, TypeError, "axes=5"),
        ({"axes": (0, 1, 2)}, TypeError, "axes="),
        ({"name": 1j}, TypeError, "name=1j"),
        ({"attributes": "a"}, TypeError, "attributes='a'"),
        ({"attributes": {"a": {1, 2}}}, TypeError, r"attributes=\{'a': \{1, 2\}\}: .* JSON"),
        ({"attributes": {"a": [1, b"b"]}}, TypeError, r"attributes=\{'a': .*: .* JSON"),
        ({"progress": 3}, TypeError, "progress=3: pass a function"),
        ({"ngff_version": ["0.5"]}, ValueError, "ngff_version="),
        ({"fill_value": 10**30}, ValueError, "fill_value="),
        ({"buffer_bytes": np.inf}, ValueError, "buffer_bytes=inf"),
        ({"compressors": {}}, ValueError, "compressors={}"),
    ],
)
def test_images_that_cannot_be(tmp_path, options, error, message):
    options = {"shape": (10, 20), "dtype": "u2", "spacing": (1, 1)} | options
    with pytest.raises(error, match=message), OmeZarrWriter(tmp_path / "i", **options):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_fill_value_is_rounded_to_the_floats_of_the_image(tmp_path):
    with OmeZarrWriter(tmp_path / "i", (4, 4), "f4", (1, 1), fill_value=0.1):
        pass
    assert (levels_of(tmp_path / "i")[0] == np.float32(0.1)).all()


@pytest.mark.parametrize("url", [Path("s3://bucket/i.zarr"), "file:///tmp/i.zarr", Path("https://host/i.zarr")])
def test_a_url_is_no_place(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"//.*i.zarr(: images are| is a URL: give a local path)"):
        OmeZarrWriter(url, (4, 4), "u2", (1, 1))
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_names_may_be(tmp_path):
    for name in ("l" * 255, "é" * 127):
        for overwrite in (False, True):
            with OmeZarrWriter(tmp_path / name, (4, 4), "u2", (1, 1), overwrite=overwrite) as target:
                target[...] = np.ones((4, 4), "u2")
        assert levels_of(tmp_path / name)[0].all()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_waited_in_a_block_that_failed_does_not_come_back(tmp_path):
    target = OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1), chunks=(2, 2), buffer_bytes=100)

    def fail():
        with target:
            target[0, :2] = np.full(2, 9, "u2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with target:
        target[2:] = np.ones((2, 4), "u2")
    assert levels_of(tmp_path / "i")[0].tolist() == [[0] * 4] * 2 + [[1] * 4] * 2


def test_a_writer_is_not_entered_twice(tmp_path):
    target = OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1))
    with target:
        target[...] = np.ones((4, 4), "u2")
        with pytest.raises(ValueError, match="this writer is already writing"), target:
            pass
    assert levels_of(tmp_path / "i")[0].all()
    assert [one.name for one in tmp_path.iterdir()] == ["i"]


def test_zarr_adds_nothing_to_what_was_removed(tmp_path, monkeypatch):
    """When one chunk fails zarr raises, and goes on with the others: they must not make the folder anew."""
    write = zarr.storage.LocalStore.set

    async def full(self, key, value):
        if key.endswith("c/0/0"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if "/c/" in key:
            await asyncio.sleep(0.3)
        await write(self, key, value)

    monkeypatch.setattr(zarr.storage.LocalStore, "set", full)
    target = OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), chunks=(2, 2), compressors=ZstdCodec())
    with pytest.raises(OSError, match="nothing is left"), target:
        target[...] = np.ones((8, 8), "u2")
    time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("codec", [None, ZstdCodec()])
def test_an_unfinished_folder_that_was_removed_is_missed(tmp_path, codec):
    """What is written after it makes a folder of the same name, which must not be taken for all of the image."""
    block = np.ones((4, 4), "u2")

    def write():
        with OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), chunks=(4, 4), compressors=codec) as target:
            target[:4, :4] = block
            (unfinished,) = tmp_path.iterdir()
            shutil.rmtree(unfinished)
            target[4:, :4] = block

    with pytest.raises(OSError, match="another process removed the unfinished folder"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_inside_its_block_only(tmp_path):
    target = OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"region \[0:4, 0:4\] cannot be written: write inside"):
            target[...] = np.ones((4, 4), "u2")
        if not (tmp_path / "i").exists():
            with target:
                pass


# --- Chunks that regions cut.


def test_cut_chunks_wait_for_their_rest(tmp_path):
    data = values((12, 12))
    options = {"chunks": (4, 4), "levels": 2, "buffer_bytes": 12 * 4 * 3}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), **options) as target:
        place = Path(target._chunks[0].array.store.root) / "0/c"
        for row in range(0, 12, 2):
            target[row : row + 2] = data[row : row + 2]
            assert len([f for f in place.rglob("*") if f.is_file()]) == 3 * ((row + 2) // 4)
    assert_pyramid(tmp_path / "i", data, 2)


def test_no_more_may_wait_than_is_allowed(tmp_path):
    data = values((12, 12))
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), chunks=(4, 4), buffer_bytes=150) as target:
        target[0:2] = data[0:2]
        with pytest.raises(ValueError, match=r"region \[6:10, 0:12\] cuts chunks, so that 432 bytes of incomplete"):
            target[6:10] = data[6:10]
        for row in (2, 4, 6, 8, 10):  # nothing was taken of what was refused
            target[row : row + 2] = data[row : row + 2]
    assert_pyramid(tmp_path / "i", data, 1)


def test_what_is_already_written_is_kept_when_it_is_cut_later(tmp_path):
    data = values((12, 12))
    expected = data.copy()
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), chunks=(4, 4), levels=3, buffer_bytes=2**20) as target:
        target[...] = data
        for _ in range(2):
            target[3:6, 1:9] = expected[3:6, 1:9] = expected[3:6, 1:9] + 1
        target[1:2, 1:2] = expected[1:2, 1:2] = np.array([[7]], "u2")
        target[0:4, 0:4] = expected[0:4, 0:4] = expected[0:4, 0:4] * 2  # whole, over what waited
    assert_pyramid(tmp_path / "i", expected, 3)


# --- Threads.


@pytest.mark.parametrize("cut", [False, True])
def test_several_threads_write(tmp_path, cut):
    data = values((24, 30, 40))
    step = (5, 7, 9) if cut else (4, 8, 8)
    options = {"chunks": (4, 4, 4), "levels": 3, "buffer_bytes": 2**20 if cut else 0}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), **options) as target, ThreadPoolExecutor(8) as pool:
        regions = boxes_of(data.shape, step)
        random.Random(1).shuffle(regions)
        list(pool.map(lambda region: target.write(region, data[region]), regions))
    assert_pyramid(tmp_path / "i", data, 3)


def test_two_threads_in_one_chunk(tmp_path):
    data, refused = values((8, 8)), []

    def try_it(nbytes):
        with ThreadPoolExecutor(1) as pool:
            refused.append(pool.submit(target.write, np.s_[0:4], data[0:4]).exception())

    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), chunks=(4, 4), progress=try_it) as target:
        target[...] = data
    assert [type(one) for one in refused] == [ValueError]
    assert "region [0:4, 0:8] shares a chunk with one that is being written by another thread" in str(refused[0])
    assert_pyramid(tmp_path / "i", data, 1)


def test_the_end_waits_for_other_threads(tmp_path):
    data, begun = values((8, 8)), threading.Event()

    def slowly(nbytes):
        begun.set()
        time.sleep(0.2)

    with ThreadPoolExecutor(1) as pool:
        with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), chunks=(4, 4), progress=slowly) as target:
            future = pool.submit(target.write, ..., data)
            assert begun.wait(10)
        assert future.done()
    assert_pyramid(tmp_path / "i", data, 1)


# --- Complete, or not there.


def threads_of_writers():
    """Their threads; zarr-python starts others when it likes."""
    return {one for one in threading.enumerate() if one.name.startswith("linumpy")}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_inside_leaves_what_was_there(tmp_path, error, overwrite):
    data = values((8, 8))
    if overwrite:
        with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1)) as target:
            target[...] = data
    threads = threads_of_writers()

    def stop_half_way():
        with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1), chunks=(4, 4), overwrite=overwrite) as target:
            target[0:4] = data[0:4] + 1
            raise error

    with pytest.raises(error):
        stop_half_way()
    assert not threads_of_writers() - threads
    assert [f.name for f in tmp_path.iterdir()] == ["i"] * overwrite
    if overwrite:
        assert_pyramid(tmp_path / "i", data, 1)


def test_a_write_that_failed_cannot_be_passed_over(tmp_path, monkeypatch):
    def fail(path, parts):
        raise OSError(5, "Input/output error")

    def pass_over():
        with OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1)) as target:
            with monkeypatch.context() as patch:
                patch.setattr(chunk_file, "write_file", fail)
                with pytest.raises(OSError, match="Input/output"):
                    target[...] = values((8, 8))
            target[...] = values((8, 8))

    with pytest.raises(ValueError, match="i: a region was not written, and its error was ignored"):
        pass_over()
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_end_leaves_nothing(tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise OSError(28, os.strerror(28))

    def write():
        with OmeZarrWriter(tmp_path / "i", (8, 8), "u2", (1, 1), chunks=(4, 4), levels=2) as target:
            for region in boxes_of((8, 8), (4, 4)):
                target[region] = np.ones((4, 4), "u2")

    monkeypatch.setattr(levels, "read_back", fail)
    with pytest.raises(OSError, match="No space left on device; nothing is left of"):
        write()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("regions", "said"), [([], "4 of 4 chunks"), ([0], "3 of 4 chunks"), ([0, 1, 2, 3], "")])
def test_chunks_that_were_not_written_are_told(tmp_path, caplog, regions, said):
    with OmeZarrWriter(tmp_path / "a.zarr", (8, 8), "u2", (1, 1), chunks=(4, 4), fill_value=7) as writer:
        boxes = list(writer.regions(1))
        for number in regions:
            writer[boxes[number]] = np.ones((4, 4), "u2")
    told = [record.getMessage() for record in caplog.records if record.name == "linumpy.write.writer"]
    assert told == ([f"{tmp_path}/a.zarr: {said} were not written and hold the fill value 7"] if said else [])
    assert (zarr.open_group(tmp_path / "a.zarr", mode="r")["0"][...] == 7).sum() == 16 * (4 - len(regions))
