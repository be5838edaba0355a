"""If this fails, a converted image has other voxels or other metadata than its source."""

import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import obstore
import pytest
import tifffile
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import ZstdCodec
from zarr.storage import MemoryStore, ObjectStore

from linumpy import convert_zarr, open_image, read_zarr, read_zarr_to_gpu
from linumpy.errors import ChunkError, MetadataError, SourceError
from linumpy.io.carried import Carried
from linumpy.io.codecs import encoding_of
from linumpy.io.zarr_mode import read_on_host
from linumpy.resample.convert import conversion
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.new_image import create_labels_group
from linumpy.write.pyramid import halve
from linumpy.write.writer import write_omezarr
from scripts import linum_convert
from tests.support.budget import examples, first
from tests.support.object_server import serve

pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification"),
    pytest.mark.filterwarnings("ignore:Object at "),
]
HERE = {"device": "cpu"}
LABEL = Carried(image_label={"colors": [{"label-value": 1, "rgba": [255, 0, 0, 255]}]})
OMERO = {
    "channels": [
        {"label": name, "color": "FF0000", "window": {"start": 0, "end": 9, "min": 0, "max": 9}} for name in "ab"
    ]
}


def voxels(shape, dtype="u2", seed=1):
    rng = np.random.default_rng(seed)
    return rng.random(shape) < 0.5 if dtype == "bool" else rng.integers(0, 200, shape).astype(dtype)


def arrays_of(path):
    group = zarr.open_group(path, mode="r")
    return {name: one for name, one in group.members(max_depth=None) if isinstance(one, zarr.Array)}


def assert_copied(source, target):
    mine, theirs = arrays_of(target), arrays_of(source)
    assert mine.keys() == theirs.keys()
    for name, one in mine.items():
        assert one.dtype == theirs[name].dtype.newbyteorder("=")
        assert one[...].tobytes() == theirs[name][...].astype(one.dtype).tobytes()
        assert one.fill_value == theirs[name].fill_value


def image_with_labels(path, version="0.5", **options):
    data = voxels((2, 5, 9, 8))
    attributes = {"omero": OMERO} if version == "0.4" else {}
    options = {"axes": "czyx", "levels": 2, "origin": (1, 2, 3), "chunks": (1, 4, 4, 4)} | options
    write_omezarr(path, data, (5, 2, 3), ngff_version=version, name="brain 7", **options, attributes={"mine": [1, "µ"]})
    group = zarr.open_group(path, mode="r+")
    if version == "0.4":
        group.attrs.update(attributes)
    else:
        group.attrs["ome"] = {**group.attrs["ome"], "omero": OMERO}
    (path / "labels").mkdir()
    options = {"levels": 2, "ngff_version": version, "codec": "lz4", "carried": LABEL, "downsampling": "label"}
    write_omezarr(path / "labels/cells", voxels((5, 9, 8), "u4"), (5, 2, 3), **options)
    create_labels_group(path / "labels-made", ["cells"], version)
    for one in (path / "labels-made").iterdir():
        one.rename(path / "labels" / one.name)
    (path / "labels-made").rmdir()
    (path / "notes.txt").write_text("of the microscope")
    return data


@pytest.mark.parametrize(("old", "new"), list(itertools.product(["0.4", "0.5", "0.6"], repeat=2)))
def test_every_version_into_every_version(tmp_path, old, new):
    from ome_zarr_models import open_ome_zarr

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image_with_labels(tmp_path / "a", old)
        convert_zarr(tmp_path / "a", tmp_path / "b", ngff_version=new, codec="blosc:zstd:bit", **HERE)
    assert_copied(tmp_path / "a", tmp_path / "b")
    mine, theirs = open_image(tmp_path / "b"), open_image(tmp_path / "a")
    assert mine.version == new
    assert (mine.name, mine.axes, mine.spacing, mine.origin) == (
        str(mine.group.store_path), theirs.axes, theirs.spacing, theirs.origin
    )  # fmt: skip
    group = zarr.open_group(tmp_path / "b", mode="r")
    ome = group.attrs["ome"] if new != "0.4" else group.attrs
    assert ome["omero"]["channels"] == OMERO["channels"]
    assert ome["multiscales"][0]["name"] == "brain 7"
    assert group.attrs["mine"] == [1, "µ"]
    assert (group.metadata.zarr_format == 2) == (new == "0.4")
    labels = zarr.open_group(tmp_path / "b/labels", mode="r").attrs.asdict()
    assert labels.get("ome", labels)["labels"] == ["cells"]
    assert open_image(tmp_path / "b/labels/cells").version == new
    assert (tmp_path / "b/notes.txt").read_text() == "of the microscope"
    assert {str(encoding_of(one)) for one in arrays_of(tmp_path / "b").values()} == {"blosc:zstd:bit"}
    if new != "0.6":
        assert f"v0{new[-1]}.image" in type(open_ome_zarr(group)).__module__
    if old == new:
        assert group.attrs.asdict() == theirs.group.attrs.asdict()


@st.composite
def requests(draw):
    rank = draw(st.integers(2, 5))
    shape = tuple(draw(st.integers(1, 9)) for _ in range(rank))
    sizes = st.tuples(*[st.integers(1, 5)] * draw(st.integers(1, rank)))
    chunks = draw(st.none() | sizes)
    shards = tuple(c * draw(st.integers(1, 3)) for c in chunks) if chunks and draw(st.booleans()) else None
    return {
        "shape": shape,
        "dtype": draw(st.sampled_from(["bool", "u1", ">u2", "<i4", ">f4", "f8"])),
        "source": draw(st.sampled_from([2, 3])),
        "old": tuple(draw(st.integers(1, n)) for n in shape),
        "old_shards": draw(st.booleans()),
        "missing": draw(st.booleans()),
        "options": {"chunks": chunks, "shards": shards, "codec": draw(st.sampled_from([None, "none", "lz4", "zstd"]))},
        "memory": draw(st.sampled_from([1000, 2**30])),
    }


@settings(max_examples=examples(40))
@given(request=requests())
def test_any_array_of_a_group(request):
    shape, zarr_format, options = request["shape"], request["source"], dict(request["options"])
    old = request["old"]
    shards = tuple(2 * c for c in old) if request["old_shards"] and zarr_format == 3 else None
    if zarr_format == 2:
        options["shards"] = None
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.create_group(Path(folder) / "a", zarr_format=zarr_format, attributes={"about": {"a": 1}})
        dtype = request["dtype"] if zarr_format == 2 else np.dtype(request["dtype"]).newbyteorder("=")
        array = group.create_array(
            "x/y", shape=shape, chunks=old, shards=shards, dtype=dtype, fill_value=1, attributes={"of": "it"}
        )
        if not request["missing"]:
            array[...] = voxels(shape, request["dtype"])
        convert_zarr(Path(folder) / "a", Path(folder) / "b", memory_bytes=request["memory"], **options, **HERE)
        assert_copied(Path(folder) / "a", Path(folder) / "b")
        copy = zarr.open_array(Path(folder) / "b/x/y")
        assert np.array_equal(read_zarr(Path(folder) / "b/x/y", device="cpu"), array[...])
        assert copy.attrs.asdict() == {"of": "it"}
        assert zarr.open_group(Path(folder) / "b").attrs.asdict() == {"about": {"a": 1}}
        if options["chunks"] is not None:
            wanted = (1,) * (len(shape) - len(options["chunks"])) + options["chunks"]
            assert copy.chunks == (wanted if options["shards"] else tuple(map(min, wanted, shape)))
            assert (copy.shards is None) == (options["shards"] is None)
        else:
            assert (copy.chunks, copy.shards) == (array.chunks, array.shards)


def test_by_default_all_is_as_it_was(tmp_path):
    image_with_labels(tmp_path / "a", codec="zstd:small+crc32c", shards=(1, 8, 8, 8))
    convert_zarr(tmp_path / "a", tmp_path / "b", **HERE)
    assert_copied(tmp_path / "a", tmp_path / "b")
    for name, one in arrays_of(tmp_path / "b").items():
        assert one.metadata == arrays_of(tmp_path / "a")[name].metadata


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    data = image_with_labels(tmp_path / "a")
    options = {"chunks": (2, 2, 2), "memory_bytes": 1000, **HERE}
    seen = []

    def stop(nbytes):
        seen.append(nbytes)
        if len(seen) == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_zarr(tmp_path / "a", tmp_path / "b", progress=stop, **options)
    assert not (tmp_path / "b").exists()
    made, real = [], conversion.level_chunks

    def count(*arguments):
        chunks = real(*arguments)
        start = chunks.start
        monkeypatch.setattr(chunks, "start", lambda box, block: (made.append(box), start(box, block))[1])
        return chunks

    monkeypatch.setattr(conversion, "level_chunks", count)
    done = []
    convert_zarr(tmp_path / "a", tmp_path / "b", progress=done.append, **options)
    assert_copied(tmp_path / "a", tmp_path / "b")
    assert sum(done) == sum(one.nbytes for one in arrays_of(tmp_path / "a").values())
    assert len(done) - 33 <= len(made) <= len(done) - 30
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]
    assert np.array_equal(zarr.open_array(tmp_path / "b/0")[...], data)


_PROCESS = """
import sys
from linumpy import OmeZarrWriter, convert_zarr, read_zarr
source, target, way = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
try:
    if way == "convert":
        convert_zarr(source, target, chunks=(4, 4, 4), shards=(8, 8, 8), codec="zstd", device="cpu", memory_bytes=5000)
    else:
        data = read_zarr(source + "/0", device="cpu")
        options = {"axes": "czyx", "chunks": (1, 4, 4, 4), "codec": "lz4"}
        with OmeZarrWriter(target, data.shape, data.dtype, (5, 2, 3), **options) as writer:
            for number, channel in enumerate(data):
                writer[number] = channel
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("suffix", first(["", ".ozx"]))
def test_processes_at_the_same_time(tmp_path, suffix):
    """Conversions and writers into one path: one of them makes it whole, the others say why not; and beside it."""
    data = image_with_labels(tmp_path / "a")
    runs = []
    for target, way in [
        ("same", "convert"),
        ("same", "convert"),
        ("same", "write"),
        ("same", "write"),
        ("b", "convert"),
    ]:
        words = [sys.executable, "-W", "ignore", "-c", _PROCESS, tmp_path / "a", tmp_path / f"{target}{suffix}", way]
        runs.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert [run.stdout.readline() for run in runs] == ["ready\n"] * len(runs)
    for run in runs:
        print("go", file=run.stdin, flush=True)
    told = [run.communicate(timeout=60)[0].strip() for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs)
    assert told.count("") == 2, told
    assert told[-1] == ""
    assert set(told) <= {"", "FileExistsError", "ResumeError"}
    for target in ("same", "b"):
        assert np.array_equal(open_image(tmp_path / f"{target}{suffix}").levels[0][...], data)
    # What a conversion has made when a writer is faster stays, as after a kill.
    options = {"chunks": (4, 4, 4), "shards": (8, 8, 8), "codec": "zstd", "overwrite": True}
    convert_zarr(tmp_path / "a", tmp_path / f"same{suffix}", **options, **HERE)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", f"b{suffix}", f"same{suffix}"]


def test_a_source_that_changes_meanwhile(tmp_path):
    image_with_labels(tmp_path / "a")

    def change(_):
        zarr.open_array(tmp_path / "a/0")[0, 0, 0, 0] = np.random.default_rng().integers(60000)

    with pytest.raises(SourceError, match="was changed while it was converted"):
        convert_zarr(tmp_path / "a", tmp_path / "b", progress=change, **HERE)
    assert not (tmp_path / "b").exists()


def test_a_source_of_which_nothing_is_known(tmp_path):
    group = zarr.create_group(MemoryStore())
    group.create_array("x", data=(data := voxels((5, 6))), chunks=(2, 3))
    convert_zarr(group, tmp_path / "b", codec="zstd", **HERE)
    assert np.array_equal(zarr.open_array(tmp_path / "b/x")[...], data)


def test_arrays_and_packed_images(tmp_path):
    data = voxels((20, 21, 22), "f4")
    zarr.create_array(tmp_path / "x", data=data, chunks=(8, 8, 8), compressors=ZstdCodec(level=7))
    with pytest.raises(MetadataError, match="pass spacing="):
        convert_zarr(tmp_path / "x", tmp_path / "b", **HERE)
    convert_zarr(tmp_path / "x", tmp_path / "b.ozx", spacing=(5, 2, 3), levels=3, **HERE)
    convert_zarr(tmp_path / "b.ozx", tmp_path / "c", chunks=(4, 4, 4), **HERE)
    image = open_image(tmp_path / "c")
    assert image.spacing == tuple(tuple(2**k * s for s in (5.0, 2.0, 3.0)) for k in range(3))
    for array in image.levels:
        assert array.chunks == tuple(min(4, n) for n in array.shape)
        assert np.array_equal(array[...], data)
        data = halve(data)


def test_coarser_labels_are_labels(tmp_path, caplog):
    data = np.zeros((16, 32, 32), "u2")
    data[3:9, 5:21, 7:23], data[9:12, 5:21, 7:23] = 300, 9
    tifffile.imwrite(tmp_path / "masks.tif", data, photometric="minisblack")
    options = {"spacing": (4, 0.5, 0.5), "levels": 3, **HERE}
    convert_zarr(tmp_path / "masks.tif", tmp_path / "a", downsampling="label", **options)
    assert all(set(np.unique(level[...])) == {0, 9, 300} for level in open_image(tmp_path / "a").levels)
    assert not caplog.text
    arguments = ["--spacing", "4", "0.5", "0.5", "--levels", "3", "--device", "cpu", "--downsampling", "nearest"]
    assert linum_convert.main([str(tmp_path / "masks.tif"), str(tmp_path / "b"), *arguments]) == 0
    assert np.array_equal(open_image(tmp_path / "b").levels[2][...], data[::4, ::4, ::4])
    convert_zarr(tmp_path / "masks.tif", tmp_path / "c", **options)
    assert caplog.text.count("holds few values") == 1
    assert "pass downsampling='label' (--downsampling label)" in caplog.text
    caplog.clear()
    tifffile.imwrite(tmp_path / "image.tif", voxels((16, 32, 32)), photometric="minisblack")
    convert_zarr(tmp_path / "image.tif", tmp_path / "d", **options)
    assert "few values" not in caplog.text
    with pytest.raises(ValueError, match="is a group, which keeps its own"):
        convert_zarr(tmp_path / "d", tmp_path / "e", downsampling="label", **HERE)


def plate_with_tables(path, zarr_format):
    """Write a plate of one image with tables as anndata stores them, and other arrays that hold no voxels."""
    (path / "A/1").mkdir(parents=True)
    image_with_labels(path / "A/1/0", "0.4" if zarr_format == 2 else "0.5")
    plate = {
        "rows": [{"name": "A"}],
        "columns": [{"name": "1"}],
        "wells": [{"path": "A/1", "rowIndex": 0, "columnIndex": 0}],
    }
    root = zarr.open_group(
        path,
        zarr_format=zarr_format,
        attributes={"plate": plate} if zarr_format == 2 else {"ome": {"version": "0.5", "plate": plate}},
    )
    root.require_group("A").require_group("1")
    tables = root["A/1/0"].create_group("tables", attributes={"tables": ["regions"]})
    table = tables.create_group("regions", attributes={"encoding-type": "anndata"})
    names = table.create_array(
        "obs/name", shape=(3,), chunks=(2,), dtype=str, attributes={"encoding-type": "string-array"}
    )
    names[:] = np.array(["nerve", "", "vessel µ"], dtype=object)
    table.create_array("X", data=voxels((3, 6), "f4"), chunks=(2, 6))
    root.create_array("scalar", shape=(), dtype="i4")[...] = 7
    root.create_array("empty", shape=(0, 4), dtype="u2", attributes={"of": "nothing"})
    root.create_array("complex", data=voxels((4, 5), "c8"), chunks=(2, 5))
    return root


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("zarr_format", "version"), [(2, None), (2, "0.4"), (2, "0.5"), (3, None), (3, "0.6"), (3, "0.4")]
)
def test_arrays_that_hold_no_voxels(tmp_path, caplog, zarr_format, version):
    """Tables, scalars and empty arrays are copied beside the images, byte by byte in the same Zarr format."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plate_with_tables(tmp_path / "a", zarr_format)
        convert_zarr(tmp_path / "a", tmp_path / "b", ngff_version=version, chunks=(2, 2, 2), codec="zstd", **HERE)
        (record,) = caplog.records
        for name in ("obs/name", "regions/X", "scalar", "empty", "complex"):
            assert name in record.getMessage()
        mine, theirs = arrays_of(tmp_path / "b"), arrays_of(tmp_path / "a")
        assert mine.keys() == theirs.keys()
        for name, array in mine.items():
            assert np.array_equal(array[...], theirs[name][...]), name
            assert array.attrs.asdict() == theirs[name].attrs.asdict()
            assert array.metadata.zarr_format == {"0.4": 2, "0.5": 3, "0.6": 3}.get(version, zarr_format)
    assert mine["A/1/0/0"].chunks == (1, 2, 2, 2)
    if mine["scalar"].metadata.zarr_format == zarr_format:
        for name in ("A/1/0/tables/regions/obs/name", "A/1/0/tables/regions/X", "scalar", "empty", "complex"):
            files = [one.relative_to(tmp_path / "a") for one in (tmp_path / "a" / name).rglob("*") if one.is_file()]
            assert files
            for one in files:
                assert (tmp_path / "a" / one).read_bytes() == (tmp_path / "b" / one).read_bytes()


@pytest.mark.parametrize(("zarr_format", "attributes"), [(3, "0.4"), (2, "0.5")])
def test_the_zarr_format_is_the_source_s(tmp_path, zarr_format, attributes):
    """Whatever the version of NGFF that its attributes follow: early acquire-zarr wrote 0.4 in zarr v3, with shards."""
    group = zarr.create_group(tmp_path / "a", zarr_format=zarr_format)
    shards = (16, 16, 16) if zarr_format == 3 else None
    data = voxels((16, 17, 18))
    group.create_array("0", data=data, chunks=(4, 8, 8), shards=shards)
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    scale = [{"type": "scale", "scale": [1, 2, 3]}]
    image = {"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    group.attrs.update(
        {"multiscales": [{"version": "0.4", **image}]}
        if attributes == "0.4"
        else {"ome": {"version": "0.5", "multiscales": [image]}}
    )
    convert_zarr(tmp_path / "a", tmp_path / "b", codec="zstd", **HERE)
    made = zarr.open_group(tmp_path / "b", mode="r")
    assert (made.metadata.zarr_format, made["0"].shards, made["0"].chunks) == (zarr_format, shards, (4, 8, 8))
    assert made.attrs.asdict() == group.attrs.asdict()
    assert open_image(tmp_path / "b").spacing == open_image(tmp_path / "a").spacing
    resample_zarr(tmp_path / "a", tmp_path / "c", 2.0, **HERE)
    assert zarr.open_group(tmp_path / "c", mode="r").metadata.zarr_format == zarr_format
    for version, expected in (("0.4", 2), ("0.5", 3)):
        convert_zarr(tmp_path / "a", tmp_path / version, ngff_version=version, **HERE)
        assert zarr.open_group(tmp_path / version, mode="r").metadata.zarr_format == expected
        assert open_image(tmp_path / version).version == version
        assert np.array_equal(read_zarr(tmp_path / version, device="cpu"), data)


def zip_folder(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for one in sorted(folder.rglob("*")):
            archive.write(one, one.relative_to(folder))
    return path


def test_files_that_are_not_of_zarr(tmp_path):
    """They are copied from folders, ZIP files and stores; those in hidden folders are not."""
    image_with_labels(tmp_path / "a")
    beside = {"notes.txt": b"of the microscope", "OME/METADATA.ome.xml": b"<OME/>" * 9, "labels/cells/empty": b""}
    for name, text in {**beside, ".git/config": b"mine", ".a.part-1-0/image/zarr.json": b"{}"}.items():
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(text)
    files = [one for one in (tmp_path / "a").rglob("*") if one.is_file()]
    store = ObjectStore(obstore.store.MemoryStore())
    for one in files:
        obstore.put(store.store, str(one.relative_to(tmp_path / "a")), one.read_bytes())
    for number, source in enumerate((tmp_path / "a", zip_folder(tmp_path / "a", tmp_path / "a.zip"), store)):
        convert_zarr(source, tmp_path / f"b{number}", chunks=(4, 4, 4), **HERE)
        assert_copied(tmp_path / "a", tmp_path / f"b{number}")
        found = {name: (tmp_path / f"b{number}" / name).read_bytes() for name in beside}
        assert found == beside
        assert not list((tmp_path / f"b{number}").glob(".*"))


@pytest.mark.parametrize(
    "member", ["notes//a.txt", "//a.txt", "/a.txt", "../a.txt", "labels/../../a.txt", "labels/./a.txt"]
)
def test_members_that_no_folder_can_hold(tmp_path, member):
    image_with_labels(tmp_path / "a")
    zip_folder(tmp_path / "a", tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "a") as archive:
        archive.writestr(member, "text")
    with pytest.raises(SourceError, match=rf"a\.zip has the member '{re.escape(member)}'"):
        convert_zarr(tmp_path / "a.zip", tmp_path / "b", **HERE)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "a.zip"]


@pytest.mark.needs_core
@pytest.mark.parametrize("member", ["0/c/0/0/0/0", "labels/cells/0/c/0/0/0", "notes.txt"])
@pytest.mark.parametrize("shards", [None, (2, 8, 8, 8)])
def test_members_of_a_zip_file_with_another_checksum(tmp_path, member, shards):
    """zipfile is the oracle; reading compares the checksums if it is asked to."""
    image_with_labels(tmp_path / "a", codec="none", shards=shards)
    zip_folder(tmp_path / "a", tmp_path / "a.zip")
    convert_zarr(tmp_path / "a.zip", tmp_path / "whole", chunks=(3, 3, 3), **HERE)
    assert_copied(tmp_path / "a", tmp_path / "whole")
    whole = bytearray((tmp_path / "a.zip").read_bytes())
    whole[whole.index((tmp_path / "a" / member).read_bytes()) + 7] ^= 0x40
    (tmp_path / "a.zip").write_bytes(whole)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert archive.testzip() == member
    with pytest.raises(ChunkError, match=f"{member} is broken"):
        convert_zarr(tmp_path / "a.zip", tmp_path / "b", chunks=(3, 3, 3), **HERE)
    assert not (tmp_path / "b").exists()
    if member.startswith("0/"):
        with pytest.raises(ChunkError, match=f"{member} is broken"):
            read_zarr_to_gpu(tmp_path / "a.zip", verify=True)
        region = (slice(0, 1), slice(1, 3), slice(2, 3), slice(1, 2))
        read_zarr(tmp_path / "a.zip", region=region, device="cpu")
        with pytest.raises(ChunkError, match=f"{member} is broken"):
            read_zarr(tmp_path / "a.zip", region=region, device="cpu", verify=True)
        other = (slice(0, 1), slice(None), slice(8, 9))
        data = read_zarr(tmp_path / "a.zip", region=other, device="cpu", verify=True)
        assert np.array_equal(data, read_zarr(tmp_path / "a", region=other, device="cpu", verify=True))


def test_metadata_that_another_version_lacks_are_named(tmp_path, caplog):
    image_with_labels(tmp_path / "a", "0.6")
    attributes = zarr.open_group(tmp_path / "a").attrs
    attributes["ome"] = attributes["ome"] | {"scene": {}}
    convert_zarr(tmp_path / "a", tmp_path / "b", ngff_version="0.5", **HERE)
    assert "'scene'" in caplog.text
    assert "scene" not in zarr.open_group(tmp_path / "b").attrs["ome"]


@pytest.mark.parametrize("version", first(["0.5", "0.4"]))
def test_a_server_that_lists_nothing(tmp_path, caplog, version):
    """Of such a server everything is copied that metadata name: levels, labels, wells, and groups between them."""
    folder = tmp_path / "served"
    folder.mkdir()
    image_with_labels(folder / "i", version)
    (folder / "i/notes.txt").unlink()  # nothing names it
    zarr_format = 2 if version == "0.4" else 3

    def group(path, ome, **more):
        attributes = {**more, **(ome if version == "0.4" else {"ome": {"version": version, **ome}})}
        zarr.create_group(folder / path, zarr_format=zarr_format, attributes=attributes)

    wells = [{"path": path} for path in ("1/1", "2/3", "../i")]
    group("plate", {"bioformats2raw.layout": 3, "plate": {"wells": wells}})
    group("plate/OME", {})
    (folder / "plate/OME/METADATA.ome.xml").write_text("<OME/>")
    for well in ("1/1", "2/3"):
        group(f"plate/{well[0]}", {}, row=well[0])
        group(f"plate/{well}", {"well": {"images": [{"path": "0"}]}})
        image_with_labels(folder / "plate" / well / "0", version)
        (folder / "plate" / well / "0/notes.txt").unlink()
    with serve(folder) as server:
        for name in ("i", "plate"):
            convert_zarr(f"{server.url}/{name}", tmp_path / f"{name}-copy", codec="zstd", **HERE)
            convert_zarr(folder / name, tmp_path / f"{name}-local", codec="zstd", **HERE)
            mine, local = ({one.relative_to(copy): one.read_bytes() for one in copy.rglob("*") if one.is_file()}
                           for copy in (tmp_path / f"{name}-copy", tmp_path / f"{name}-local"))  # fmt: skip
            assert mine == local
        assert not (tmp_path / "i").exists()  # nothing is copied that lies outside of the group
        assert "does not list it, so what its metadata name is copied" in caplog.text
        assert {method for method, *_ in server.requests} <= {"GET", "HEAD"}


@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_metadata_that_are_broken_in_a_member(tmp_path, version):
    """Nothing is left out: the error names the group or the array."""
    image_with_labels(tmp_path / "a", version)
    names = ("zarr.json", "zarr.json") if version == "0.5" else (".zgroup", ".zarray")
    for member, name in zip(("labels/cells", "labels/cells/0"), names, strict=True):
        path = tmp_path / "a" / member / name
        whole = path.read_bytes()
        for broken in (b"", b"{", b"{}", b"[]", b'{"zarr_format": 7, "node_type": "group"}', whole[:-20]):
            path.write_bytes(broken)
            with pytest.raises(SourceError, match=f"{member}'"):
                convert_zarr(tmp_path / "a", tmp_path / "b", **HERE)
        path.write_bytes(whole)
    for name in ("zarr.json", ".zgroup", ".zattrs"):  # a folder of no group, with an array in it
        (tmp_path / "a/labels" / name).unlink(missing_ok=True)
    with pytest.raises(SourceError, match="labels/cells' is not reached through the groups"):
        convert_zarr(tmp_path / "a", tmp_path / "b", **HERE)
    assert not [one for one in tmp_path.iterdir() if one.name != "a"]


def test_members_that_zarr_python_does_not_open(tmp_path):
    """Documents of GDAL's form are read as they are elsewhere; consolidated metadata may be older than the members."""
    image_with_labels(tmp_path / "a")
    zarr.consolidate_metadata(tmp_path / "a")
    data = zarr.open_group(tmp_path / "a").create_array("more", data=voxels((5, 6), "u1"), compressors=None)[...]
    document = json.loads((tmp_path / "a/more/zarr.json").read_bytes())
    (tmp_path / "a/more/zarr.json").write_text(json.dumps(document | {"codecs": ["bytes"], "fill_value": None}))
    convert_zarr(tmp_path / "a", tmp_path / "b", codec="zstd", **HERE)
    assert np.array_equal(zarr.open_array(tmp_path / "b/more")[...], data)


# --- TIFF.


@pytest.mark.parametrize(("shape", "axes", "ours"), [
    ((12, 20, 30), "ZYX", "zyx"), ((20, 30), "YX", "yx"), ((3, 20, 30), "CYX", "cyx"),
    ((2, 3, 4, 20, 30), "TCZYX", "tczyx"),
])  # fmt: skip
def test_a_file_of_pages(tmp_path, shape, axes, ours):
    data = voxels(shape)
    tifffile.imwrite(tmp_path / "a.ome.tif", data, metadata={"axes": axes}, photometric="minisblack", tile=(16, 16))
    space = ours.lstrip("tc")
    convert_zarr(tmp_path / "a.ome.tif", tmp_path / "b", spacing=(5, 2, 3), levels=2, memory_bytes=2000, **HERE)
    image = open_image(tmp_path / "b")
    assert "".join(axis.name for axis in image.axes) == ours
    assert image.spacing[0] == (5.0, 2.0, 3.0)[-len(space) :]
    assert np.array_equal(image.levels[0][...], data)
    assert np.array_equal(
        image.levels[1][...], halve(data, "mean", (1,) * (len(shape) - len(space)) + (2,) * len(space))
    )
    assert str(encoding_of(image.levels[0])) == "zstd"


TCZYX = voxels((2, 3, 5, 20, 30))
MICRONS = {"PhysicalSizeZ": 5, "PhysicalSizeY": 4, "PhysicalSizeX": 2}
NANOMETERS = {key: 1000 * size for key, size in MICRONS.items()} | {f"{key}Unit": "nm" for key in MICRONS}
TIMES = {"TimeIncrement": 500, "TimeIncrementUnit": "ms"}
IMAGEJ = {"imagej": True, "resolution": (1 / 2, 1 / 4)}


@pytest.mark.parametrize(
    ("stored", "options", "ours", "spacing"),
    [
        ("TZCYX", IMAGEJ | {"metadata": {"spacing": 5, "unit": "um", "finterval": 0.5}}, "tczyx", (5, 4, 2)),
        ("ZCYX", IMAGEJ | {"metadata": {"spacing": 5, "unit": "\\u00B5m"}}, "czyx", (5, 4, 2)),
        ("TZYX", IMAGEJ | {"metadata": {"spacing": 5, "unit": "micron"}}, "tzyx", (5, 4, 2)),
        ("CYX", IMAGEJ | {"metadata": {"unit": "mm"}}, "cyx", (4000, 2000)),
        ("ZYX", IMAGEJ | {"metadata": {"spacing": 5, "unit": "nm"}}, "zyx", (0.005, 0.004, 0.002)),
        ("ZYX", IMAGEJ | {"metadata": {"spacing": 1, "unit": "inch"}}, "zyx", (25400, 101600, 50800)),
        (
            "ZYX",
            {"imagej": True, "resolution": (5000, 2500), "resolutionunit": 3, "metadata": {"spacing": 0.001}},
            "zyx",
            (10, 4, 2),
        ),
        ("TZCYX", {"ome": True, "metadata": NANOMETERS | TIMES}, "tczyx", (5, 4, 2)),
        ("TCZYX", {"ome": True, "metadata": MICRONS}, "tczyx", (5, 4, 2)),
        ("CZYX", {"ome": True, "metadata": MICRONS | {"PhysicalSizeZUnit": "cm"}}, "czyx", (50000, 4, 2)),
        ("YX", {"resolution": (5000, 2500), "resolutionunit": "CENTIMETER"}, "yx", (4, 2)),
        ("YX", {"resolution": (2540, 1270), "resolutionunit": "INCH"}, "yx", (20, 10)),
    ],
)
def test_metadata_of_tiff(tmp_path, caplog, stored, options, ours, spacing):
    """Whatever the order of the planes and the units, the copy has t, c, z, y, x and µm."""
    data = TCZYX[tuple(slice(None) if axis in ours else 0 for axis in "tczyx")]
    pages = data.transpose([ours.index(axis.lower()) for axis in stored])
    if "metadata" in options:
        options = options | {"metadata": options["metadata"] | {"axes": stored}}
    tifffile.imwrite(tmp_path / "a.tif", np.ascontiguousarray(pages), photometric="minisblack", **options)
    convert_zarr(tmp_path / "a.tif", tmp_path / "b", memory_bytes=10000, **HERE)
    assert ("that of the resolution tags; give it if it is another" in caplog.text) == ("metadata" not in options)
    image = open_image(tmp_path / "b")
    assert "".join(axis.name for axis in image.axes) == ours
    assert np.allclose(image.spacing[0], spacing)
    assert np.array_equal(image.levels[0][...], data)
    if "finterval" in options.get("metadata", {}):
        assert (image.axes[0].unit, image.scale[0][0]) == ("second", 0.5)
    if "TimeIncrement" in options.get("metadata", {}):
        assert (image.axes[0].unit, image.scale[0][0]) == ("millisecond", 500)
    space = len(ours.lstrip("tc"))
    convert_zarr(tmp_path / "a.tif", tmp_path / "c", spacing=(7, 8, 9)[-space:], **HERE)
    assert open_image(tmp_path / "c").spacing[0] == (7.0, 8.0, 9.0)[-space:]
    assert "_ARRAY_DIMENSIONS" not in image.group.attrs


def test_metadata_of_tiff_that_are_no_lengths(tmp_path):
    """Pixels are no unit, and the axis that has none is named; the caller's number for it is enough."""
    for name, metadata, absent in [
        ("pixels", {"spacing": 5, "unit": "pixel"}, "z, y, x"),
        ("no unit", {"spacing": 5}, "z, y, x"),
        ("no spacing", {"unit": "um"}, "z"),
        ("zero", {"unit": "um", "spacing": 0}, "z"),
    ]:
        options = IMAGEJ | {"metadata": metadata | {"axes": "ZYX"}}
        tifffile.imwrite(tmp_path / f"{name}.tif", TCZYX[0, 0], **options)
        with pytest.raises(MetadataError, match=f"spacing along {absent} that"):
            convert_zarr(tmp_path / f"{name}.tif", tmp_path / "b", **HERE)
    convert_zarr(tmp_path / "no spacing.tif", tmp_path / "b", spacing={"z": 3}, **HERE)
    assert open_image(tmp_path / "b").spacing[0] == (3.0, 4.0, 2.0)


def test_a_volume_of_one_plane(tmp_path):
    """A plane with a spacing along z stays a volume; the caller may replace its spacing along y and x alone."""
    options = IMAGEJ | {"metadata": {"spacing": 5, "unit": "um", "axes": "ZYX"}}
    tifffile.imwrite(tmp_path / "a.tif", TCZYX[0, 0, :1], **options)
    for spacing, expected in [(None, (5.0, 4.0, 2.0)), ((8, 9), (5.0, 8.0, 9.0)), ((7, 8, 9), (7.0, 8.0, 9.0))]:
        convert_zarr(tmp_path / "a.tif", tmp_path / "b", spacing=spacing, overwrite=True, **HERE)
        image = open_image(tmp_path / "b")
        assert (image.levels[0].shape, image.spacing[0]) == ((1, 20, 30), expected)


def test_channels_of_tiff(tmp_path):
    """Names and colours: of OME a signed number of RGBA, of ImageJ labels of planes and lookup tables."""
    from ome_zarr_models import open_ome_zarr

    channel = {"Name": ["DAPI", "GFP", "far red"], "Color": [65535, 16711935, -16776961]}
    metadata = {"axes": "ZCYX", "Channel": channel, **MICRONS}
    pages = np.ascontiguousarray(TCZYX[0].swapaxes(0, 1))
    tifffile.imwrite(tmp_path / "ome.tif", pages, ome=True, metadata=metadata, photometric="minisblack")
    ramp = np.arange(256, dtype="u1")
    tables = [np.stack([ramp * (k == axis) for k in range(3)]) for axis in (2, 1, 0)]
    metadata = {"axes": "ZCYX", "unit": "um", "spacing": 5, "LUTs": tables, "Labels": channel["Name"] * 5}
    metadata |= {"mode": "composite", "Ranges": (0.0, 100.0, 1.0, 200.0, 2.0, 300.0)}
    tifffile.imwrite(tmp_path / "imagej.tif", pages, metadata=metadata, **IMAGEJ)
    for name, windows in [("ome.tif", [(0, 65535)] * 3), ("imagej.tif", [(0, 100), (1, 200), (2, 300)])]:
        convert_zarr(tmp_path / name, tmp_path / f"{name}.zarr", **HERE)
        group = zarr.open_group(tmp_path / f"{name}.zarr", mode="r")
        assert open_ome_zarr(group).ome_attributes.omero is not None
        made = group.attrs["ome"]["omero"]["channels"]
        assert [one["label"] for one in made] == ["DAPI", "GFP", "far red"]
        assert [one["color"] for one in made] == ["0000FF", "00FF00", "FF0000"]
        assert [(one["window"]["start"], one["window"]["end"]) for one in made] == windows


def ome_set(folder, data, uuids, axis="Z"):
    """Write an OME-TIFF of one file for each plane along z, or each channel."""
    names = [f"p_Z{z}.ome.tif" for z in range(len(data))]
    planes = "".join(
        f'<TiffData First{axis}="{z}" IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{one}</UUID></TiffData>'
        for z, (name, one) in enumerate(zip(names, uuids, strict=True))
    )
    sizes = f'SizeZ="{len(data)}" SizeC="1"' if axis == "Z" else f'SizeZ="1" SizeC="{len(data)}"'
    count = 1 if axis == "Z" else len(data)
    channels = "".join(f'<Channel ID="Channel:0:{c}" SamplesPerPixel="1"/>' for c in range(count))
    for plane, name, one in zip(data, names, uuids, strict=True):
        xml = (
            '<?xml version="1.0" encoding="UTF-8"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
            f'UUID="urn:uuid:{one}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" '
            f'SizeX="{data.shape[2]}" SizeY="{data.shape[1]}" {sizes} SizeT="1" '
            'PhysicalSizeX="2" PhysicalSizeY="4" PhysicalSizeZ="5">'
            f"{channels}{planes}</Pixels></Image></OME>"
        )
        tifffile.imwrite(folder / name, plane, description=xml, metadata=None)
    return [folder / name for name in names]


def test_planes_of_tiff_that_are_missing(tmp_path, caplog):
    """A stopped acquisition, and a set of files of which some are gone: an error that names the planes, or zeros."""
    data = voxels((5, 16, 20)) + 1
    tifffile.imwrite(tmp_path / "few.ome.tif", data, metadata={"axes": "TYX"})
    whole = (tmp_path / "few.ome.tif").read_bytes()
    whole = whole.replace(b'SizeT="5"', b'SizeT="8"').replace(b'PlaneCount="5"', b'PlaneCount="8"')
    (tmp_path / "few.ome.tif").write_bytes(whole)
    files = ome_set(tmp_path, data, [f"00000000-0000-0000-0000-{z:012}" for z in range(5)])
    (tmp_path / "set").mkdir()
    ome_set(tmp_path / "set", data, [f"00000000-0000-0000-0000-{z:012}" for z in range(5)])
    for source in (files[0], tmp_path / "set"):
        convert_zarr(source, tmp_path / "whole", overwrite=True, **HERE)
        assert np.array_equal(open_image(tmp_path / "whole").levels[0][...], data)
        assert open_image(tmp_path / "whole").spacing[0] == (5.0, 4.0, 2.0)
    assert not caplog.records
    files[2].unlink()
    tifffile.imwrite(tmp_path / "shaped.tif", data, photometric="minisblack")
    whole = (tmp_path / "shaped.tif").read_bytes()
    (tmp_path / "shaped.tif").write_bytes(whole.replace(b'"shape": [5,', b'"shape": [7,'))
    with pytest.raises(SourceError, match=r"shaped\.tif is cut off or broken: it ends before the last of 7 planes"):
        convert_zarr(tmp_path / "shaped.tif", tmp_path / "b", spacing=(3, 2, 1), missing="fill", **HERE)
    for source, planes, count in [(tmp_path / "few.ome.tif", "t 5, t 6, t 7", 3), (files[0], "z 2", 1)]:
        caplog.clear()
        with pytest.raises(SourceError, match=rf"{source.name}: {count} of \d planes .*: {planes}\. .*missing='fill'"):
            convert_zarr(source, tmp_path / "b", spacing=(3, 2, 1), **HERE)
        assert not (tmp_path / "b").exists()
        assert sum("tifffile: " in record.message for record in caplog.records) == 1
        space = (3, 2, 1)[-2 if "t " in planes else -3 :]
        convert_zarr(source, tmp_path / "b", spacing=space, missing="fill", **HERE)
        made = open_image(tmp_path / "b").levels[0][...]
        lost = [int(word.split()[1]) for word in planes.split(", ")]
        assert not made[lost].any()
        there = [k for k in range(len(made)) if k not in lost]
        assert np.array_equal(made[there], data[[k for k in range(5) if k not in lost]])
        shutil.rmtree(tmp_path / "b")


def test_missing_is_for_tiff(tmp_path):
    image_with_labels(tmp_path / "a")
    for value, message in (("fill", "is for TIFF files"), ("zero", "choose one of error, fill")):
        with pytest.raises(ValueError, match=message):
            convert_zarr(tmp_path / "a", tmp_path / "b", missing=value, **HERE)


def test_a_folder_of_pages(tmp_path, caplog):
    data = voxels((12, 9, 8))
    (tmp_path / "pages").mkdir()
    for number, page in enumerate(data):
        tifffile.imwrite(tmp_path / f"pages/page{number}.tif", page)
    convert_zarr(tmp_path / "pages", tmp_path / "b", spacing=(5, 2, 3), chunks=(4, 4, 4), codec="lz4", **HERE)
    assert np.array_equal(open_image(tmp_path / "b").levels[0][...], data)
    assert not caplog.records
    (tmp_path / "pages/page5.tif").unlink()
    convert_zarr(tmp_path / "pages", tmp_path / "d", spacing=(5, 2, 3), **HERE)
    assert np.array_equal(open_image(tmp_path / "d").levels[0][...], np.delete(data, 5, axis=0))
    (record,) = caplog.records
    assert "1 numbers are missing in the names of the files, the first is 5" in record.getMessage()
    tifffile.imwrite(tmp_path / "pages/page3.tif", data[0, :5])
    with pytest.raises(SourceError, match=r"page3\.tif has shape \(5, 8\)"):
        convert_zarr(tmp_path / "pages", tmp_path / "c", spacing=(5, 2, 3), **HERE)


@pytest.mark.parametrize("axis", "ZC")
def test_a_folder_of_more_than_an_ome_tiff_set(tmp_path, axis):
    """Each file of a set describes all of it: taken as pages, the files of two sets would be copies of their sets."""
    data, options = voxels((3, 9, 8)), {"spacing": (5, 2, 3), **HERE}
    for folder in ("two", "page"):
        (tmp_path / folder).mkdir()
        ome_set(tmp_path / folder, data, [f"00000000-0000-0000-0000-{z:012}" for z in range(3)], axis)
    for file in sorted((tmp_path / "two").iterdir()):
        whole = file.read_bytes().replace(b"p_Z", b"q_Z").replace(b"0000-0000-0000", b"0000-0000-0001")
        file.with_name(file.name.replace("p_Z", "q_Z")).write_bytes(whole)
    tifffile.imwrite(tmp_path / "page/q.tif", data[0])
    for folder, count in (("two", 6), ("page", 4)):
        message = rf"p_Z1\.ome\.tif belongs to an OME-TIFF set of 3 files, .* holds {count}"
        with pytest.raises(SourceError, match=message):
            convert_zarr(tmp_path / folder, tmp_path / "c", **options)


def test_hidden_files_are_no_pages(tmp_path):
    """macOS leaves a file ._NAME beside each file on a share."""
    data, options = voxels((3, 9, 8)), {"spacing": (5, 2, 3), **HERE}
    (tmp_path / "pages").mkdir()
    for number, page in enumerate(data):
        tifffile.imwrite(tmp_path / f"pages/s{number}.tif", page)
        (tmp_path / f"pages/._s{number}.tif").write_bytes(b"\x00\x05\x16\x07" + bytes(80))
    convert_zarr(tmp_path / "pages", tmp_path / "b", **options)
    assert np.array_equal(open_image(tmp_path / "b").levels[0][...], data)
    (tmp_path / "pages/s1.tif").write_text("no TIFF")
    with pytest.raises(SourceError, match=r"pages/s1\.tif cannot be read as TIFF"):
        convert_zarr(tmp_path / "pages", tmp_path / "c", **options)


def test_tiff_that_is_no_stack(tmp_path):
    tifffile.imwrite(tmp_path / "rgb.tif", voxels((9, 8, 3), "u1"), photometric="rgb")
    (tmp_path / "text.tif").write_text("no TIFF")
    (tmp_path / "empty").mkdir()
    options = {"spacing": (5, 2, 3), **HERE}
    for name, error, message in [
        ("rgb.tif", MetadataError, "has the axes YXS"),
        ("text.tif", SourceError, "cannot be read as TIFF"),
        ("none.tif", FileNotFoundError, "does not exist"),
        ("empty", SourceError, "empty"),
    ]:
        with pytest.raises(error, match=message):
            convert_zarr(tmp_path / name, tmp_path / "b", **options)
    tifffile.imwrite(tmp_path / "a.tif", voxels((5, 9, 8)))
    with pytest.raises(MetadataError, match=r"pass spacing= in µm"):
        convert_zarr(tmp_path / "a.tif", tmp_path / "b", **HERE)
    assert not (tmp_path / "b").exists()


def test_tiff_that_is_cut_off_or_broken(tmp_path):
    """No page is left out, and the error names the file; also of a file that ends in its header or its metadata."""
    data, options = voxels((6, 40, 50)), {"spacing": (5, 2, 3), **HERE}
    tifffile.imwrite(tmp_path / "ome.tif", data, ome=True, metadata={"axes": "CYX"})
    whole = (tmp_path / "ome.tif").read_bytes()
    for length in (0, 3, 6, 9, 200, len(whole) - 1):  # the description of OME-XML is at the end
        (tmp_path / "ome.tif").write_bytes(whole[:length])
        with pytest.raises(SourceError, match=r"ome\.tif"):
            convert_zarr(tmp_path / "ome.tif", tmp_path / "b", **options)
    (tmp_path / "pages").mkdir()
    for number, page in enumerate(data):
        tifffile.imwrite(tmp_path / f"pages/p{number}.tif", page, compression="zlib" if number % 2 else None)
    tifffile.imwrite(tmp_path / "zlib.tif", data, compression="zlib", tile=(16, 16))
    tifffile.imwrite(tmp_path / "raw.tif", data)
    for name, source in [("raw.tif", "raw.tif"), ("zlib.tif", "zlib.tif"), ("pages/p2.tif", "pages"),
                         ("pages/p3.tif", "pages")]:  # fmt: skip
        whole = (tmp_path / name).read_bytes()
        for broken in (whole[: len(whole) // 3], whole[: len(whole) // 2] + b"\xaa" * 200, whole[: -len(whole) // 20]):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(SourceError, match=name):
                convert_zarr(tmp_path / source, tmp_path / "b", **options)
            assert not (tmp_path / "b").exists()
        (tmp_path / name).write_bytes(whole)
        convert_zarr(tmp_path / source, tmp_path / "b", overwrite=True, **options)
        assert np.array_equal(open_image(tmp_path / "b").levels[0][...], data)
        shutil.rmtree(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunks": (4,) * 5}, ValueError, "has 4 axes"),
        ({"chunks": (0, 4)}, ValueError, "a size from 1 on"),
        ({"chunks": (4, 4)}, ValueError, r"chunks=\(4, 4\): .*/0 has 3 axes of space, each of which takes a size"),
        ({"chunks": (4, 4, 4), "shards": (8, 8)}, ValueError, r"shards=\(8, 8\): .*/0 has 3 axes of space"),
        ({"chunks": (4, 4, 4), "shards": (8, 6, 8)}, ValueError, "no whole numbers of chunks"),
        ({"shards": (8, 8, 8), "ngff_version": "0.4"}, ValueError, "zarr v2, which has none"),
        ({"codec": "zst"}, ValueError, "codec='zst': choose one of"),
        ({"codec": "zstd+crc32c", "ngff_version": "0.4"}, ValueError, "zarr v2 stores no checksum"),
        ({"ngff_version": "0.3"}, ValueError, "choose one of 0.6, 0.5, 0.4"),
        ({"spacing": (1, 1, 1)}, ValueError, "is a group, which keeps its own"),
        ({"levels": 2}, ValueError, "is a group, which keeps its own"),
        ({"memory_bytes": 0}, ValueError, "memory_bytes=0"),
    ],
)
def test_what_does_not_fit(tmp_path, options, error, message):
    image_with_labels(tmp_path / "a")
    with pytest.raises(error, match=message):
        convert_zarr(tmp_path / "a", tmp_path / "b", **options, **HERE)
    assert [one.name for one in tmp_path.iterdir()] == ["a"]


def test_targets_and_sources_that_are_refused(tmp_path):
    image_with_labels(tmp_path / "a")
    for target in ("a", "a/b"):
        with pytest.raises(ValueError, match="source"):
            convert_zarr(tmp_path / "a", tmp_path / target, overwrite=True, **HERE)
    with pytest.raises(FileNotFoundError):
        convert_zarr(tmp_path / "nothing", tmp_path / "b", **HERE)
    zarr.create_group(tmp_path / "empty")
    with pytest.raises(SourceError, match="holds no arrays"):
        convert_zarr(tmp_path / "empty", tmp_path / "b", **HERE)
    zarr.create_group(tmp_path / "s").create_array("x", shape=(3,), dtype="c8")
    with pytest.raises(SourceError, match="arrays of bool, integers and floats"):
        convert_zarr(tmp_path / "s", tmp_path / "b", **HERE)
    convert_zarr(tmp_path / "a", tmp_path / "b", **HERE)
    with pytest.raises(FileExistsError):
        convert_zarr(tmp_path / "a", tmp_path / "b", **HERE)


# --- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["none", "zstd", "blosc:lz4:bit", "lz4", "gzip"])
@pytest.mark.parametrize("shards", [None, (64, 64, 64)])
def test_on_a_device(cupy, tmp_path, codec, shards):
    data = np.random.default_rng(1).gamma(4, 900, (130, 150, 140)).astype("u2")
    write_omezarr(tmp_path / "a", data, (5, 2, 3), chunks=(40, 50, 60), levels=2, codec="blosc:zstd:bit")
    options = {"chunks": (32, 32, 32), "shards": shards, "codec": codec, "device": "cuda"}
    convert_zarr(tmp_path / "a", tmp_path / "b", memory_bytes=256 * 2**20, **options)
    assert_copied(tmp_path / "a", tmp_path / "b")
    convert_zarr(tmp_path / "b", tmp_path / "c", device="cuda", ngff_version="0.6")
    assert_copied(tmp_path / "a", tmp_path / "c")
    assert read_on_host(zarr.open_array(tmp_path / "c/1")).shape == halve(data).shape


def test_what_would_be_lost_is_refused(tmp_path):
    """Pages of a second series, axes in another order, no image in an .ozx file; attributes and fill value stay."""
    with tifffile.TiffWriter(tmp_path / "mix.tif") as file:
        file.write(np.zeros((33, 45), "u2"))
        file.write(np.zeros((5, 45), "u2"))
    with pytest.raises(SourceError, match="holds 2 series of pages"):
        convert_zarr(tmp_path / "mix.tif", tmp_path / "b", spacing=(1, 1), **HERE)
    options = {"shape": (7, 9, 8), "dtype": "u2", "chunks": (4, 4, 4), "fill_value": 9, "attributes": {"who": "me"}}
    zarr.create_array(tmp_path / "xyz", dimension_names=("x", "y", "z"), **options)
    with pytest.raises(MetadataError, match="has the dimensions x, y, z"):
        convert_zarr(tmp_path / "xyz", tmp_path / "b", spacing=(1, 2, 3), **HERE)
    array = zarr.create_array(tmp_path / "zyx", dimension_names=("z", "y", "x"), **options)
    array[:4] = 3
    for wrong, error in (
        ({"chunks": ()}, ValueError),
        ({"chunks": (2.5, 3, 3)}, TypeError),
        ({"chunks": (3, 3)}, ValueError),
        ({"spacing": (1,) * 4}, ValueError),
    ):
        with pytest.raises(error, match=next(iter(wrong))):
            convert_zarr(tmp_path / "zyx", tmp_path / "b", **{"spacing": (1, 2, 3), **wrong}, **HERE)
    zarr.create_group(tmp_path / "g").create_array("a", shape=(4,), dtype="u2")
    with pytest.raises(SourceError, match="is no OME-Zarr image"):
        convert_zarr(tmp_path / "g", tmp_path / "g.ozx", **HERE)
    assert not [one for one in tmp_path.iterdir() if one.name.startswith((".", "b", "g.ozx"))]
    convert_zarr(tmp_path / "zyx", tmp_path / "c", spacing=(1, 2, 3), **HERE)
    made = zarr.open_group(tmp_path / "c")
    assert made.attrs["who"] == "me"
    assert made["0"].fill_value == 9
    assert np.array_equal(made["0"][...], array[...])
