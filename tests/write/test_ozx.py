"""If this fails, an .ozx file is not what RFC-9 asks for, or a stopped run breaks one (oracles: zipfile, ngff-zarr)."""

import json
import os
import signal
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.ome import open_image
from linumpy.io.output import folders as packing
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import OmeZarrWriter, write_omezarr

VALUES = np.random.default_rng(2).integers(0, 60000, (20, 24, 100)).astype("u2")
OPTIONS = {"levels": 2, "chunks": (8, 8, 8)}


@pytest.fixture
def file(tmp_path):
    return write_omezarr(tmp_path / "x.ozx", VALUES, (1, 2, 3), **OPTIONS)


def test_it_is_what_rfc_9_asks_for(file, tmp_path):
    folder = write_omezarr(tmp_path / "x.ome.zarr", VALUES, (1, 2, 3), name="x.ozx", **OPTIONS)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        assert all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        assert json.loads(archive.comment) == {
            "ome": {"version": "0.5", "zipFile": {"centralDirectory": {"jsonFirst": True}}}
        }
        assert names[:3] == ["zarr.json", "0/zarr.json", "1/zarr.json"]
        assert not any(name.endswith("zarr.json") for name in names[3:])
        offsets = [entry.header_offset for entry in archive.infolist()]
        assert offsets == sorted(offsets)
        files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
        assert {name: archive.read(name) for name in names} == files
    assert b"PK\x06\x06" in file.read_bytes()[-300:]  # the end of ZIP64
    assert os.listdir(tmp_path) in (["x.ozx", "x.ome.zarr"], ["x.ome.zarr", "x.ozx"])


def test_others_read_it(file):
    assert np.array_equal(zarr.open_array(ZipStore(file, read_only=True), path="0", mode="r")[...], VALUES)
    assert np.array_equal(read_zarr(file, device="cpu"), VALUES)
    assert open_image(file).spacing == ((1, 2, 3), (2, 4, 6))
    ngff_zarr = pytest.importorskip("ngff_zarr")
    assert np.array_equal(np.asarray(ngff_zarr.from_ngff_zarr(str(file)).images[0].data), VALUES)
    assert ngff_zarr.read_ozx_version(str(file)) == "0.5"
    assert ngff_zarr.read_ozx_json_first(str(file))


def test_what_ngff_zarr_writes_is_read(tmp_path):
    ngff_zarr = pytest.importorskip("ngff_zarr")
    units = dict.fromkeys("zyx", "micrometer")
    image = ngff_zarr.to_ngff_image(VALUES, dims=list("zyx"), scale={"z": 1.0, "y": 2.0, "x": 3.0}, axes_units=units)
    path = str(tmp_path / "n.ozx")
    ngff_zarr.to_ngff_zarr(path, ngff_zarr.to_multiscales(image, [2], chunks=16), version="0.5")
    assert np.array_equal(read_zarr(path, device="cpu"), VALUES)
    assert open_image(path).spacing[0] == (1, 2, 3)


def test_the_same_image_gives_the_same_bytes(tmp_path):
    paths = (write_omezarr(tmp_path / name, VALUES, (1, 2, 3), name="x", **OPTIONS) for name in ("a.ozx", "b.ozx"))
    first, second = (path.read_bytes() for path in paths)
    assert first == second


@pytest.mark.parametrize("shards", [None, (16, 16, 16)])
def test_many_entries_and_shards(tmp_path, shards):
    path = write_omezarr(tmp_path / "x.ozx", VALUES, (1, 1, 1), chunks=(8, 8, 8), shards=shards)
    assert np.array_equal(read_zarr(path, device="cpu"), VALUES)


@pytest.mark.slow
def test_more_entries_than_a_zip_file_without_zip64_counts(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "zarr.json").write_text(json.dumps({"attributes": {"ome": {"version": "0.5"}}}))
    for number in range(66_000):
        (tmp_path / "f" / str(number)).write_bytes(b"%d" % number)
    with zipfile.ZipFile(packing.pack(tmp_path / "f", tmp_path / "x.ozx", durable=False)) as archive:
        assert len(archive.infolist()) == 66_001
        assert archive.read("65999") == b"65999"
    assert (tmp_path / "x.ozx").read_bytes().count(b"PK\x06\x06") == 1


def test_it_is_replaced_on_request_alone(file, tmp_path):
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        write_omezarr(file, VALUES + 1, (1, 2, 3))
    assert file.read_bytes() == before
    write_omezarr(file, VALUES + 1, (1, 2, 3), overwrite=True)
    assert np.array_equal(read_zarr(file, device="cpu"), VALUES + 1)
    (tmp_path / "text.ozx").write_text("mine")
    with pytest.raises(FileExistsError, match="is not overwritten"):
        write_omezarr(tmp_path / "text.ozx", VALUES, (1, 2, 3), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["text.ozx", "x.ozx"]


def write_and_fail(path, fails, *, overwrite):
    with OmeZarrWriter(path, (8, 8, 8), "u1", (1, 1, 1), overwrite=overwrite) as writer:
        writer[...] = np.ones((8, 8, 8), "u1")
        if fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("where", ["write", "pack"])
def test_an_error_leaves_what_was_there(tmp_path, monkeypatch, overwrite, where):
    path, before = tmp_path / "x.ozx", None
    if overwrite:
        before = write_omezarr(path, VALUES, (1, 2, 3)).read_bytes()
    if where == "pack":
        monkeypatch.setattr(packing, "_use_zip64", lambda stream: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_and_fail(path, where == "write", overwrite=overwrite)
    assert os.listdir(tmp_path) == (["x.ozx"] if overwrite else [])
    assert (path.read_bytes() if overwrite else None) == before


KILLED = """
import os, signal, sys
import numpy as np
from linumpy.io.output import folders as pack
from linumpy.write.writer import write_omezarr
real, left = pack._add, [int(sys.argv[2])]
def add(*values):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*values)
pack._add = add
write_omezarr(sys.argv[1], np.ones((16, 16, 16), "u1"), (1, 1, 1), chunks=(8, 8, 8), overwrite=True)
"""


@pytest.mark.parametrize("nth", [1, 5])
def test_a_run_that_is_killed_while_it_packs_leaves_what_was_there(file, tmp_path, nth):
    before = file.read_bytes()
    assert subprocess.run([sys.executable, "-c", KILLED, file, str(nth)], check=False).returncode == -signal.SIGKILL
    assert file.read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2
    write_omezarr(file, VALUES + 1, (1, 2, 3), overwrite=True)
    assert np.array_equal(read_zarr(file, device="cpu"), VALUES + 1)
    assert os.listdir(tmp_path) == ["x.ozx"]


def test_it_holds_0_5_alone(tmp_path):
    with pytest.raises(ValueError, match=r"x\.ozx: an \.ozx file holds NGFF 0\.5"):
        write_omezarr(tmp_path / "x.ozx", VALUES, (1, 2, 3), ngff_version="0.4")
    with pytest.raises(ValueError, match=r"\.zip is the name of a file"):
        write_omezarr(tmp_path / "x.zip", VALUES, (1, 2, 3))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("ngff_version", ["0.5", "0.4"])
def test_a_volume_is_resampled_into_it(tmp_path, ngff_version):
    source = write_omezarr(tmp_path / "x.ome.zarr", VALUES, (1, 2, 3), ngff_version=ngff_version)
    resample_zarr(source, tmp_path / "y.ozx", 2.0, device="cpu")
    resample_zarr(source, tmp_path / "y.ome.zarr", 2.0, device="cpu")
    got, expected = (read_zarr(tmp_path / name, device="cpu") for name in ("y.ozx", "y.ome.zarr"))
    assert np.array_equal(got, expected)
    resample_zarr(tmp_path / "y.ozx", tmp_path / "z.ozx", 4.0, device="cpu")
    assert sorted(os.listdir(tmp_path)) == ["x.ome.zarr", "y.ome.zarr", "y.ozx", "z.ozx"]
    for source in (tmp_path / "y.ozx", tmp_path / "y.ozx" / "0"):
        with pytest.raises(ValueError, match="would replace the source"):
            resample_zarr(
                source,
                tmp_path / "y.ozx",
                2.0,
                device="cpu",
                overwrite=True,
                **({"spacing": (2, 2, 2)} if source.name == "0" else {}),
            )
