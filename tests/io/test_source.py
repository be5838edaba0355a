"""If this fails, paths, stores and metadata of other writers open another array, or none."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.buffer import cpu
from zarr.codecs import GzipCodec, ShardingCodec
from zarr.storage import LocalStore, MemoryStore, StorePath

import linumpy
from linumpy.errors import ChunkError, MetadataError, SourceError
from linumpy.gds import gds_verdict
from linumpy.gpu import Reader, plan_zarr_read, zarr_to_dask
from linumpy.io.layout import read_layout
from linumpy.io.ome import open_image, read_omezarr
from linumpy.io.open import open_source
from linumpy.io.source import describe_source, local_path, open_node
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support.budget import matrix
from tests.support.gpu import reference
from tests.support.gpu.emulator import needs_compiler
from tests.support.script_runs import load
from tests.support.stores import same

VALUES = np.arange(100, 130, dtype="u2").reshape(5, 6)
#: Each is a URL with a fragment, a query, parameters, a protocol or an escape for one of zarr 3.1 to 3.4.
NAMES = ["a#1", "what?", "semi;colon", "a::b", "c:d", "100%", "x%20y", "memory:", "[1]", "{b}", "back\\slash", " a "]


def write(folder, values=VALUES, chunks=(2, 4), zarr_format=3, **options):
    options = {"compressors": None, "fill_value": 0} | options
    array = zarr.create_array(
        LocalStore(folder), shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=zarr_format, **options
    )
    array[...] = values
    return Path(folder)


def edit(folder, **changes):
    """Change the metadata document of an array; ``None`` is JSON's null, ``...`` removes a key."""
    file = next(path for path in (folder / "zarr.json", folder / ".zarray") if path.exists())
    document = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))
    return folder


def both(source, **options):
    """Read by zarr in host memory, and by the device's reader; they must agree."""
    by_zarr = open_source(source)[...]
    assert same(reference.read(source, **options), by_zarr)
    return by_zarr


@pytest.mark.parametrize(("name", "zarr_format"), matrix(NAMES, [2, 3]))
def test_a_local_path_is_no_url(tmp_path, monkeypatch, name, zarr_format):
    folder = write(tmp_path / name, zarr_format=zarr_format)
    monkeypatch.chdir(tmp_path)
    for source in (str(folder), folder, Path(name), f"./{name}", f"file://{folder}", (LocalStore(folder), "")):
        assert same(open_source(source)[...], VALUES), source
    assert same(both(name), VALUES)
    assert describe_source(open_source(name)) == f"file://{folder}"
    assert gds_verdict(f"file://{folder}").folder == str(folder)


@pytest.mark.parametrize("name", ["a#1", "what?", "semi;colon", "a::b"])
def test_images_in_folders_of_any_name_are_written_and_read(tmp_path, monkeypatch, name):
    voxels = np.random.default_rng(0).integers(0, 9, (8, 12, 10)).astype("f4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINUMPY_DEVICE", "cpu")
    os.mkdir(name)
    write_omezarr(f"{name}/a", voxels, (5, 10, 10), levels=2)
    assert same(open_image(f"{name}/a").levels[0][...], voxels)
    assert same(zarr_to_dask(f"{name}/a", device="cpu").compute(), voxels)
    resample_zarr(f"{name}/a", f"{name}/b", (5, 10, 10), device="cpu", levels=2)
    assert same(read_omezarr(Path(name) / "b")[0][...], voxels)
    assert load("linum_aip").main([f"{name}/a", f"{name}/c"]) == 0
    assert np.allclose(read_omezarr(f"{name}/c")[0][...], voxels.mean(0))
    assert sorted(os.listdir(name)) == ["a", "b", "c"]


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    """Chunks that are not found read as the fill value."""
    write(tmp_path / "a")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    array, writer = open_source("a"), OmeZarrWriter("b", (5, 6), "u2", (1, 1))
    monkeypatch.chdir("elsewhere")
    assert same(array[...], VALUES)
    with writer:
        writer[...] = VALUES
    assert same(open_source(tmp_path / "b")[...], VALUES)
    assert os.listdir() == []


@pytest.fixture
def crossing(tmp_path, monkeypatch):
    """``here/..`` is ``far``, where ``here`` leads into; as text it would be the folder that ``here`` is in."""
    (tmp_path / "near").mkdir()
    (tmp_path / "far/inside").mkdir(parents=True)
    (tmp_path / "near/here").symlink_to(tmp_path / "far/inside")
    monkeypatch.chdir(tmp_path / "near")
    return tmp_path


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_dots_behind_a_link_are_those_of_the_file_system(crossing, zarr_format):
    write(crossing / "far/a", VALUES, zarr_format=zarr_format)
    write(crossing / "near/a", VALUES + 1, zarr_format=zarr_format)
    for source in ("here/../a", crossing / "near/here/../a", f"file://{crossing}/near/here/../a"):
        assert same(both(source), VALUES)
        layout = read_layout(open_source(source))
        assert os.path.samefile(layout.root, crossing / "far/a")
        assert os.path.samefile(local_path(open_source(source)), crossing / "far/a")
        assert same(zarr_to_dask(source, device="cpu").compute(), VALUES)
    assert same(reference.read(zarr.open_array("here/../a", mode="r")), VALUES)
    assert same(reference.read(zarr.open_group("here/..", mode="a", zarr_format=zarr_format)["a"]), VALUES)


@pytest.mark.parametrize("codec", [None, GzipCodec()], ids=["raw", "gzip"])
def test_outputs_behind_a_link_lie_in_one_place(crossing, codec):
    voxels = np.random.default_rng(0).integers(1, 9, (8, 12, 10)).astype("f4")
    near = sorted(os.listdir(crossing / "near"))
    write_omezarr("here/../a", voxels, (5, 10, 10), levels=2, compressors=codec)
    resample_zarr("here/../a", "here/../b", (5, 10, 10), device="cpu", compressors=codec, levels=2)
    assert load("linum_aip").main(["here/../a", "here/../c", "--device", "cpu"]) == 0
    assert load("linum_aip_png").main(["here/../a", "here/../d.png", "--device", "cpu"]) == 0
    for name in "ab":
        assert same(open_image(crossing / "far" / name).levels[0][...], voxels)
    assert np.allclose(open_image(crossing / "far/c").levels[0][...], voxels.mean(0))
    assert sorted(os.listdir(crossing / "near")) == near
    assert sorted(os.listdir(crossing / "far")) == ["a", "b", "c", "d.png", "inside"]
    with pytest.raises(ValueError, match="replace the source"):
        resample_zarr(crossing / "far/a", "here/../a", (5, 10, 10), device="cpu", overwrite=True)


def test_a_home_folder_is_not_written_to_by_its_abbreviation(crossing):
    """Only shells expand it: a folder called ``~`` would be made here."""
    write_omezarr("a", np.ones((4, 4), "u2"), (1, 1))
    for make in (lambda to: resample_zarr("a", to, 1.0), lambda to: write_omezarr(to, np.ones((4, 4)), (1, 1))):
        with pytest.raises(ValueError, match=r"'~/b' begins with '~'.*whole path"):
            make("~/b")
    assert load("linum_aip_png").main(["a", "~/b.png"]) == 2
    assert sorted(os.listdir()) == ["a", "here"]
    with pytest.raises(FileNotFoundError, match=r"'~/b'.*whole path"):
        open_source("~/b")
    (crossing / "near/~").mkdir()  # one that is really called so
    write_omezarr("~/b", np.ones((4, 4), "u2"), (1, 1))
    assert same(open_image("~/b").levels[0][...], np.ones((4, 4), "u2"))


def test_a_url_without_the_packages_for_it_names_them(monkeypatch):
    for package in ("obstore", "fsspec"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SourceError, match=r"'https://nowhere/a'.*fsspec.*pip install \"zarr\[remote\]\""):
        open_source("https://nowhere/a")


def test_a_target_that_ends_in_dots_is_the_folder_that_they_name(crossing, monkeypatch):
    voxels = np.ones((4, 4), "u2")
    write_omezarr("here/../a", voxels, (1, 1))
    (crossing / "near/within").symlink_to(crossing / "far/a/0")
    write_omezarr("within/..", voxels + 1, (1, 1), overwrite=True)
    assert same(open_image(crossing / "far/a").levels[0][...], voxels + 1)
    assert sorted(os.listdir(crossing / "far")) == ["a", "inside"]


#: Documents of zarr v3 as GDAL, zarrita.js and zarrs write them, for an array of uint8.
SPELLINGS = {
    "bare codec": {"codecs": ["bytes"]},
    "bare codecs": {"codecs": ["bytes", "crc32c"]},
    "null configuration": {"codecs": [{"name": "bytes", "configuration": None}]},
    "bare v2 keys": {"chunk_key_encoding": "v2"},
    "bare default keys": {"chunk_key_encoding": "default"},
    "null fill value": {"fill_value": None},
    "data type as object": {"data_type": {"name": "uint8"}},
    "data type with empty configuration": {"data_type": {"name": "uint8", "configuration": {}}},
    "all": {"codecs": ["bytes"], "chunk_key_encoding": "v2", "fill_value": None, "data_type": {"name": "uint8"}},
}


def spelled(folder, name, dtype="u1"):
    """An array of which one chunk is missing, and its document in another spelling; returns the values."""
    values = VALUES.astype(dtype)
    codecs = {"compressors": zarr.codecs.Crc32cCodec()} if name == "bare codecs" else {}
    keys = {"name": "v2", "separator": "."} if "v2" in str(SPELLINGS[name]) else {"name": "default", "separator": "/"}
    write(folder, values, chunk_key_encoding=keys, **codecs)
    (folder / ("1.1" if keys["name"] == "v2" else "c/1/1")).unlink()
    expected = values.copy()
    expected[2:4, 4:] = 0
    edit(folder, **SPELLINGS[name])
    return expected


@pytest.mark.parametrize("name", SPELLINGS)
def test_documents_whose_meaning_is_plain_are_read(tmp_path, name):
    expected = spelled(tmp_path / "a", name)
    before = (tmp_path / "a/zarr.json").read_bytes()
    assert same(both(tmp_path / "a"), expected)
    assert same(both((LocalStore(tmp_path), "a")), expected)
    assert same(zarr_to_dask(tmp_path / "a", device="cpu").compute(), expected)
    assert plan_zarr_read(tmp_path / "a").layout.unsupported is None
    assert (tmp_path / "a/zarr.json").read_bytes() == before


@pytest.mark.parametrize("consolidated", [False, True])
def test_such_documents_are_read_as_levels_of_an_image(tmp_path, consolidated):
    write_omezarr(tmp_path / "i", VALUES.astype("u1"), (1, 1), chunks=(2, 4))
    shutil.rmtree(tmp_path / "i/0")
    expected = spelled(tmp_path / "i/0", "all")
    if consolidated:
        level = json.loads((tmp_path / "i/0/zarr.json").read_text())
        edit(
            tmp_path / "i", consolidated_metadata={"kind": "inline", "must_understand": False, "metadata": {"0": level}}
        )
    assert same(read_omezarr(tmp_path / "i")[0][...], expected)
    assert same(open_source(tmp_path / "i")[...], expected)
    assert same(reference.read(tmp_path / "i"), expected)


@pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")
@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_consolidated_metadata_that_are_older_than_the_image(tmp_path, version):
    """The image has the level that was added and the shape that was changed after the metadata were consolidated."""
    values = np.arange(6 * 8 * 10, dtype="u2").reshape(6, 8, 10)
    write_omezarr(tmp_path / "i", values[:3], (4, 1, 1), ngff_version=version, chunks=(2, 4, 4))
    zarr.consolidate_metadata(tmp_path / "i")
    opened_before = zarr.open_group(tmp_path / "i", mode="r")
    assert opened_before.metadata.consolidated_metadata is not None
    group = zarr.open_group(tmp_path / "i", mode="r+", use_consolidated=False)
    group["0"].resize(values.shape)
    group["0"][...] = values
    levels = values, values[::2, ::2, ::2]
    group.create_array("1", data=levels[1])
    holder = group.attrs.asdict() if version == "0.4" else group.attrs["ome"]
    level = {"path": "1", "coordinateTransformations": [{"type": "scale", "scale": [8, 2, 2]}]}
    holder["multiscales"][0]["datasets"].append(level)
    group.attrs.update(holder if version == "0.4" else {"ome": holder})
    if version == "0.5":  # zarr-python leaves the older metadata of the members in the document
        written = json.loads((tmp_path / "i/zarr.json").read_text())
        assert written.get("consolidated_metadata") is None
        older = opened_before.metadata.to_dict()["consolidated_metadata"]
        (tmp_path / "i/zarr.json").write_text(json.dumps(written | {"consolidated_metadata": older}, default=str))
    in_memory = MemoryStore()
    for file in (file for file in (tmp_path / "i").rglob("*") if file.is_file()):
        in_memory._store_dict[str(file.relative_to(tmp_path / "i"))] = cpu.Buffer.from_bytes(file.read_bytes())
    for source in (tmp_path / "i", in_memory):
        image = open_image(open_node(source))
        assert all(same(level[...], wanted) for level, wanted in zip(image.levels, levels, strict=True))
        assert all(same(open_source(source, number)[...], wanted) for number, wanted in enumerate(levels))


@pytest.mark.parametrize("text", ["", '{"metadata": {', "[]"])
def test_consolidated_metadata_that_are_broken(tmp_path, text):
    write_omezarr(tmp_path / "i", VALUES, (1, 1), ngff_version="0.4")
    (tmp_path / "i/.zmetadata").write_text(text)
    assert same(open_source(tmp_path / "i")[...], VALUES)
    assert same(open_image(tmp_path / "i").levels[0][...], VALUES)


def test_members_are_opened_read_only(tmp_path):
    store = MemoryStore()
    zarr.create_group(store).create_array("a", data=VALUES)
    with pytest.raises(ValueError, match="read-only"):
        open_node((store, "a"))[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        open_node(StorePath(LocalStore(write(tmp_path / "a").parent), "a"))[0, 0] = 1


@pytest.mark.parametrize("dtype", ["i1", "u2", "i8", "bool", "f2", "f4", "c8", "c16"])
def test_a_null_fill_value_is_zero(tmp_path, caplog, dtype):
    """Its writers read it as zero too. Where it may have been NaN, which JavaScript writes as null, that is said."""
    folder = write(tmp_path / "a", VALUES.astype(dtype), config={"write_empty_chunks": True})
    (folder / "c/0/0").unlink()
    expected = VALUES.astype(dtype)
    expected[:2, :4] = 0
    with caplog.at_level(logging.WARNING):
        assert same(both(edit(folder, fill_value=None)), expected)
    assert bool(caplog.records) == (np.dtype(dtype).kind in "fc")
    assert all("the fill value is null" in one.message for one in caplog.records)


def test_bare_codecs_within_shards(tmp_path):
    values = VALUES[:4].astype("u1")
    array = zarr.create_array(
        tmp_path / "a", shape=(4, 6), shards=(4, 6), chunks=(2, 3), dtype="u1", compressors=None, fill_value=0
    )
    array[...] = values
    document = json.loads((tmp_path / "a/zarr.json").read_text())
    shard = document["codecs"][0]
    shard["configuration"]["codecs"] = ["bytes"]
    shard["configuration"]["index_codecs"][1] = "crc32c"
    assert isinstance(ShardingCodec.from_dict(array.metadata.to_dict()["codecs"][0]), ShardingCodec)
    assert same(both(edit(tmp_path / "a", codecs=[shard])), values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"codecs": ["bytes"]}, "codec 'bytes' does not say which endian the elements of 'uint16' have"),
        ({"chunk_grid": "regular"}, "chunk_grid 'regular' does not say which chunk_shape"),
        ({"data_type": {"name": "r16"}, "fill_value": None}, "fill_value null, which has no meaning for data type"),
        ({"fill_value": 70000}, "fill_value 70000 is no value of uint16"),
        ({"fill_value": -1}, "fill_value -1 is no value of uint16"),
        ({"fill_value": ...}, "fill_value"),
        ({"codecs": ["bites"]}, "bites"),
    ],
)
def test_documents_that_mean_nothing_are_named(tmp_path, changes, message):
    folder = edit(write(tmp_path / "i/0"), **changes)
    write_image(tmp_path / "i", "0")
    for read in (open_source, plan_zarr_read, lambda source: read_omezarr(source.parent)):
        with pytest.raises(SourceError, match=r"i/0.* cannot be read: ") as raised:
            read(folder)
        assert message in str(raised.value)
        assert "Expected dict" not in str(raised.value)
    with pytest.raises(SourceError, match="cannot be read"):
        open_source((LocalStore(tmp_path), "i/0"))


def write_image(folder, path, zarr_format=3):
    """Metadata of NGFF beside arrays that are there."""
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    scale = [{"type": "scale", "scale": [1, 1]}]
    image = {"axes": axes, "datasets": [{"path": path, "coordinateTransformations": scale}]}
    group = zarr.open_group(LocalStore(folder), mode="a", zarr_format=zarr_format)
    group.attrs.put(
        {"ome": {"version": "0.5", "multiscales": [image]}} if zarr_format == 3 else {"multiscales": [image]}
    )


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4), r"chunks of \(0, 4\) hold no elements"),
        ((2, 2**63), rf"chunks of \(2, {2**63}\) uint16 have more than 2\*\*60 bytes"),
        ((2**31, 2**31), rf"chunks of \({2**31}, {2**31}\) uint16 have more than"),
    ],
)
def test_chunks_that_cannot_be_are_named(tmp_path, zarr_format, sizes, message):
    folder = write(tmp_path / "i/0", zarr_format=zarr_format)
    if zarr_format == 2:
        edit(folder, chunks=list(sizes))
    else:
        edit(folder, chunk_grid={"name": "regular", "configuration": {"chunk_shape": list(sizes)}})
    write_image(tmp_path / "i", "0", zarr_format)
    plain = zarr.open_array(folder, mode="r")
    if plain.chunks == (1, 4):
        with pytest.raises(ChunkError, match="i/0"):
            reference.read(folder)  # zarr from 3.2 on takes chunks of 0 for chunks of 1
        return
    for read in (
        lambda: open_source(folder),
        lambda: plan_zarr_read(folder),
        lambda: plan_zarr_read(plain),
        lambda: read_layout(plain),
        lambda: read_omezarr(tmp_path / "i"),
    ):
        with pytest.raises(MetadataError, match=rf"i/0: {message}"):
            read()


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("shard", "inner", "message"),
    [
        # The numbers of inner chunks are 0, 2 and 2 modulo 2**64, so a wrapped index has 0 or 2 entries.
        ((2**32, 2**32), (1, 1), "have more than"),
        ((3, 6148914691236517206), (1, 1), "have more than"),
        ((2, 2**58), (1, 1), "have an index of more than"),
    ],
)
def test_shards_that_cannot_be_are_named(tmp_path, shard, inner, message):
    folder = write(tmp_path / "a", zarr_format=3, chunks=inner, shards=(4, 6))
    codecs = json.loads((folder / "zarr.json").read_text())["codecs"]
    edit(folder, chunk_grid={"name": "regular", "configuration": {"chunk_shape": list(shard)}}, codecs=codecs)
    (folder / "c/0/0").write_bytes(bytes(4))
    plain = zarr.open_array(folder, mode="r")
    for read in (lambda: plan_zarr_read(folder), lambda: read_layout(plain)):
        with pytest.raises(MetadataError, match=rf"a: (chunks|shards) of .* {message} 2\*\*60 bytes"):
            read()
    with linumpy.accelerate(), pytest.raises((ValueError, MemoryError)) as raised:  # zarr's
        zarr.open_array(folder, mode="r")[1:3, 0:2]
    assert any("2**60 bytes" in note for note in raised.value.__notes__)


@pytest.mark.needs_core
def test_random_numbers_of_shapes_and_chunks(tmp_path):
    """A layout has sizes that 64-bit numbers count, and its far end is read; or the metadata are refused."""
    random = np.random.default_rng(5)
    numbers = [-1, 0, 1, 2, 3, 5, 2**31, 2**32, 2**53, 2**59, 2**60, 2**61, 2**62 + 1, 6148914691236517206]
    numbers += [2**63 - 1, 2**63, 2**64, 2**64 + 1]
    folder = write(tmp_path / "a", np.zeros((4, 6), "u2"), chunks=(2, 3), shards=(4, 6))
    document = json.loads((folder / "zarr.json").read_text())
    shutil.rmtree(folder / "c", ignore_errors=True)
    outcomes, reader = set(), Reader(device="cpu")
    for _ in range(300):
        shape, outer, inner = ([numbers[n] for n in random.integers(0, len(numbers), 2)] for _ in range(3))
        codecs = json.loads(json.dumps(document["codecs"]))
        codecs[0]["configuration"]["chunk_shape"] = inner
        grid = {"name": "regular", "configuration": {"chunk_shape": outer}}
        codecs = codecs if random.random() < 0.6 else codecs[0]["configuration"]["codecs"]
        edit(folder, shape=shape, chunk_grid=grid, codecs=codecs)
        try:
            plain = zarr.open_array(folder, mode="r")
        except Exception:
            continue
        try:
            layout = read_layout(plain)
        except MetadataError:
            outcomes.add("refused")
            continue
        outcomes.add("read")
        assert layout.chunk_nbytes <= 2**60
        assert layout.shard is None or layout.shard.index_nbytes <= 2**60 + 4
        region = tuple(slice(max(0, n - 2), n) for n in shape)
        assert not reader.submit(layout, region).result().any()
    reader.close()
    assert outcomes == {"refused", "read"}


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_shape_that_cannot_be_is_named(tmp_path, zarr_format):
    folder = edit(write(tmp_path / "a", zarr_format=zarr_format), shape=[2**63, 6])
    with pytest.raises(MetadataError, match=rf"a: the shape \({2**63}, 6\) is beyond 64-bit numbers"):
        plan_zarr_read(folder)


def test_an_inner_chunk_of_nothing_is_named(tmp_path):
    folder = write(tmp_path / "a", zarr_format=3, chunks=(2, 3), shards=(4, 6))
    codecs = json.loads((folder / "zarr.json").read_text())["codecs"]
    codecs[0]["configuration"]["chunk_shape"] = [0, 3]
    with pytest.raises((SourceError, MetadataError), match=r"/a.*(chunk|0)"):
        plan_zarr_read(edit(folder, codecs=codecs))


def test_chunks_of_nothing_along_an_axis_of_nothing_are_fine(tmp_path):
    folder = edit(write(tmp_path / "a", np.empty((0, 6), "u2"), chunks=(1, 4), zarr_format=2), chunks=[0, 4])
    assert plan_zarr_read(folder).shape == (0, 6)
    assert reference.read(folder).shape == (0, 6)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("path", ["../b", "..", "0/../../b", "./../b", "..\\b", "."])
def test_a_level_does_not_leave_its_image(tmp_path, path, zarr_format):
    write(tmp_path / "b", zarr_format=zarr_format)
    write(tmp_path / "a/0", zarr_format=zarr_format)
    write_image(tmp_path / "a", path, zarr_format)
    for read in (open_source, read_omezarr, plan_zarr_read, lambda source: open_source(zarr.open_group(source))):
        with pytest.raises(MetadataError, match="may not leave the image") as raised:
            read(tmp_path / "a")
        assert str(tmp_path / "a") in str(raised.value)
        assert repr(path) in str(raised.value)


def test_a_path_in_a_store_does_not_leave_it(tmp_path):
    write(tmp_path / "b")
    write(tmp_path / "a/0")
    with pytest.raises(SourceError, match=r"'\.\./b' is no path in"):
        open_source((LocalStore(tmp_path / "a"), "../b"))


@pytest.mark.parametrize(
    ("compressor", "written", "decode_on"),
    matrix([None, numcodecs.Zlib(1), numcodecs.Zstd(1), numcodecs.BZ2(1)], [0, "0", "2"], ["host", "device"]),
)
def test_the_shuffle_of_nczarr_is_undone(tmp_path, compressor, written, decode_on):
    """Its elementsize 0 is the size of an item, and it wrote numbers as strings."""
    folder = write(tmp_path / "a", zarr_format=2, filters=[numcodecs.Shuffle(2)], compressors=compressor)
    edit(folder, filters=[{"id": "shuffle", "elementsize": written}])
    if written == 0:
        edit(folder, _nczarr_array={"dimrefs": ["/y", "/x"], "storage": "chunked"})
    for source in (folder, zarr.open_array(folder, mode="r")):
        assert same(open_source(source)[...], VALUES)
        assert same(open_source(source).with_config({"write_empty_chunks": True})[1:3], VALUES[1:3])
        if not isinstance(compressor, numcodecs.BZ2):
            assert same(reference.read(source, decode_on=decode_on), VALUES)
    write_image(tmp_path / "i", "0", 2)
    shutil.copytree(folder, tmp_path / "i/0")
    assert same(read_omezarr(tmp_path / "i")[0][...], VALUES)
    assert same(zarr_to_dask(folder, device="cpu").compute(), VALUES)


def test_the_shuffle_of_nczarr_with_its_key_among_the_attributes(tmp_path):
    folder = write(tmp_path / "a", zarr_format=2, filters=[numcodecs.Shuffle(2)], compressors=None)
    edit(folder, filters=[{"id": "shuffle", "elementsize": 0}])
    (folder / ".zattrs").write_text('{"_NCZARR_ARRAY": {"storage": "chunked"}}')
    assert same(reference.read(folder), VALUES)


@pytest.mark.parametrize(
    "codecs",
    [
        {"filters": [numcodecs.Shuffle(0)], "compressors": None},
        {"filters": [numcodecs.Shuffle(0)], "compressors": numcodecs.Zstd()},
        {"compressors": numcodecs.Shuffle(0)},
    ],
)
def test_a_shuffle_of_elements_of_0_bytes_is_none(tmp_path, codecs):
    """So numcodecs has it; only the NetCDF library means the item size."""
    folder = write(tmp_path / "a", zarr_format=2, **codecs)
    plain = zarr.open_array(folder, mode="r")
    assert same(plain[...], VALUES)
    assert read_layout(plain).unsupported is None
    assert same(both(folder), VALUES)
    with linumpy.accelerate():
        assert same(zarr.open_array(folder, mode="r")[...], VALUES)


@pytest.mark.parametrize("changes", [{"fill_value": ...}, {"fill_value": [7]}])
def test_fill_values_of_nczarr(tmp_path, changes):
    folder = write(tmp_path / "a", zarr_format=2)
    (folder / "0.0").unlink()
    expected = VALUES.copy()
    expected[:2, :4] = 0 if changes["fill_value"] is ... else 7
    assert same(both(edit(folder, **changes)), expected)


@needs_compiler
@pytest.mark.parametrize(
    ("sizes", "compressor"),
    matrix(
        [
            *[(1, 48), (2, 48), (3, 48), (24, 48), (255, 2550), (2048, 6144), (2049, 6147), (2056, 6168), (4096, 8192)],
            *[(7, 48), (96, 48), (5000, 48), (2**40, 48), (-1, 48), (1.5, 48), ("two", 48)],
        ],
        [None, numcodecs.LZ4()],
    ),
)
def test_shuffled_elements_of_any_size(tmp_path, compressor, sizes):
    """The device makes of it what zarr does, or leaves it to zarr, which raises where it is no size."""
    size, chunk = sizes
    values = np.random.default_rng(0).integers(0, 256, 3 * chunk).astype("u1")
    regular = isinstance(size, int) and size > 1 and chunk % size == 0
    filters = [numcodecs.Shuffle(size if regular else 1)]
    folder = write(tmp_path / "a", values, (chunk,), 2, filters=filters, compressors=compressor)
    edit(folder, filters=[{"id": "shuffle", "elementsize": size}])
    layout = read_layout(open_source(folder))
    if layout.unsupported is None:
        assert same(reference.read(folder, decode_on="device"), values)
        assert size in (1, -1) or (regular and size <= 2048)
    elif regular:
        assert size > 2048
        assert f"{size} bytes: the device takes up to 2048" in layout.unsupported
        assert same(open_source(folder)[...], values)
    else:
        assert f"{size!r} bytes" in layout.unsupported
        with pytest.raises((ValueError, TypeError)):
            open_source(folder)[...]


def test_a_store_that_is_not_local(tmp_path):
    """Documents are repaired wherever they lie."""
    spelled(tmp_path / "a", "all")
    store = MemoryStore()
    folder = tmp_path / "a"
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    for key, path in files.items():
        zarr.core.sync.sync(store.set(key, zarr.buffer.cpu.Buffer.from_bytes(path.read_bytes())))
    array = open_source(store)
    assert same(array[...], open_source(folder)[...])
    assert read_layout(array).unsupported is None
