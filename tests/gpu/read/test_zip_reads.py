"""If this fails, arrays in ZIP files are read wrongly, or damaged ones are not told (oracles: zarr-python, zipfile)."""

import contextlib
import ctypes
import os
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

from linumpy.errors import ChunkError
from linumpy.gpu.read.engines import direct as direct_reads
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.open import open_source
from tests.support import budget
from tests.support.gpu import reference
from tests.support.stores import cases, encoded_cases, same, write
from tests.support.zips import central_of, data_of, header_of, patch, zip_folder

VALUES = np.arange(20 * 24, dtype=np.uint16).reshape(20, 24)


@pytest.fixture
def folder(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=VALUES.shape, chunks=(5, 6), dtype="u2", compressors=None)
    array[...] = VALUES
    return tmp_path / "a"


@pytest.fixture
def file(folder, tmp_path):
    return zip_folder(folder, tmp_path / "a.zip")


def read(file, region=None, dtype=None):
    with Reader("cpu") as reader:
        ticket = reader.submit(file, region, dtype=dtype)
        return ticket.result(), ticket.report


@given(
    case=st.one_of(cases(), encoded_cases()),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
    force_zip64=st.booleans(),
    extra=st.sampled_from([b"", b"\xfe\xca\x03\x00abc"]),
    ahead=st.sampled_from([b"", b"#!/bin/sh\n"]),
    prefix=st.sampled_from(["", "deep/er/"]),
)
@settings(max_examples=budget.examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_array_is_read_as_from_its_folder(case, method, force_zip64, extra, ahead, prefix):
    with tempfile.TemporaryDirectory() as work:
        expected = np.asarray(write(case, Path(work, "a"))[case.region])
        packed = {"prefix": prefix, "force_zip64": force_zip64, "extra": extra, "ahead": ahead}
        file = zip_folder(Path(work, "a"), Path(work, "a.zip"), method, **packed)
        by_zarr = zarr.open_array(ZipStore(file, read_only=True), path=prefix.rstrip("/"), mode="r")[case.region]
        assert np.asarray(by_zarr).tobytes() == expected.tobytes()
        source = f"{file}/{prefix}".rstrip("/")
        got, report = read(source, case.region)
        assert same(got, expected)
        if report is not None and method == zipfile.ZIP_STORED and report.backend == "linumpy":
            assert report.engine.endswith(f"from entries of the ZIP file {file}")
        assert same(np.asarray(read_zarr(source, region=case.region, device="cpu")), expected)


@pytest.mark.needs_core
def test_stored_entries_are_read_by_the_core_and_deflated_ones_by_zarr(folder, file, tmp_path):
    _, report = read(file)
    assert (report.backend, report.files_opened, report.bytes_read) == ("linumpy", 16, VALUES.nbytes + 4 * 60 - 240)
    values, report = read(zip_folder(folder, tmp_path / "b.zip", zipfile.ZIP_DEFLATED))
    assert np.array_equal(values, VALUES)
    assert (report.backend, report.fallback) == ("zarr-python", "compressed entries of a ZIP file")


@pytest.mark.needs_core
def test_a_missing_entry_is_the_fill_value(folder, tmp_path):
    array = zarr.create_array(tmp_path / "f", shape=(20, 24), chunks=(5, 6), dtype="u2", compressors=None, fill_value=7)
    array[:10] = VALUES[:10]
    values, report = read(zip_folder(tmp_path / "f", tmp_path / "f.zip"))
    assert np.array_equal(values[:10], VALUES[:10])
    assert (values[10:] == 7).all()
    assert report.chunks_filled == 8


@pytest.mark.needs_core
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("shards", [None, (10, 12)])
@pytest.mark.parametrize("codec", [None, zarr.codecs.ZstdCodec()])
def test_a_device_reads_entries(tmp_path, monkeypatch, direct, shards, codec):
    monkeypatch.setattr(direct_reads, "kvikio_mode", lambda: ("cufile", ""))
    monkeypatch.setattr(direct_reads, "transfer_settings", contextlib.nullcontext)
    monkeypatch.setattr(
        direct_reads._Reads, "_view", lambda self, address, nbytes: (ctypes.c_ubyte * nbytes).from_address(address)
    )
    array = zarr.create_array(
        tmp_path / "a", shape=VALUES.shape, chunks=(5, 6), shards=shards, dtype="u2", compressors=codec
    )
    array[...] = VALUES
    file = zip_folder(tmp_path / "a", tmp_path / "a.zip", extra=b"\xfe\xca\x03\x00abc")
    region = (slice(3, 17), slice(2, 23))
    options = {"direct": True} if direct else {}
    job = reference.Job(str(file), region, **options)
    got = reference.execute(job, reference.PreadFile if direct else None)
    assert np.array_equal(got, VALUES[region])
    assert str(file) in job.report.engine


@pytest.mark.needs_core
def test_kept_chunks_are_read_again_where_the_file_is_another(folder, file):
    with reference.fake_device(1), Reader(0, cache_bytes=2**20) as reader:
        for _ in range(2):
            assert np.array_equal(reader.submit(str(file)).result().get(), VALUES)
        assert reader.stats().cache_hits
        zarr.open_array(folder, mode="r+")[...] = VALUES[::-1]
        os.replace(zip_folder(folder, f"{file}.new"), file)
        assert np.array_equal(reader.submit(str(file)).result().get(), VALUES[::-1])


def test_a_path_is_read_anew_where_the_file_is_another(folder, file):
    with Reader("cpu") as reader:
        assert np.array_equal(reader.submit(file).result(), VALUES)
        zarr.open_array(folder, mode="r+")[:5] = 0
        os.replace(zip_folder(folder, f"{file}.new", prefix=""), file)
        assert not reader.submit(file).result()[:5].any()


@pytest.mark.needs_core
def test_an_open_array_of_a_file_that_was_replaced_is_an_error(folder, file):
    array = open_source(file)
    zarr.open_array(folder, mode="r+")[:5] = 0
    os.replace(zip_folder(folder, f"{file}.new", prefix=""), file)
    for take in (lambda: array[...], lambda: read(array)):
        with pytest.raises(ChunkError, match=r"a\.zip was written anew since its directory was read: open it again"):
            take()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("at", "data", "says"),
    [
        (0, b"XXXX", "no local header"),
        (8, b"\x0c\x00", "its local header says that it is"),
        (6, b"\x01\x00", "its local header says that it is"),
        (30, b"d", "names another entry"),
    ],
)
def test_a_local_header_that_disagrees_with_the_directory_is_an_error(folder, tmp_path, method, at, data, says):
    file = zip_folder(folder, tmp_path / "a.zip", method)
    patch(file, header_of(file, "c/1/2") + at, data)
    with pytest.raises(ChunkError, match=says):
        read(file)
    assert np.array_equal(read(file, slice(0, 5))[0], VALUES[:5])


@pytest.mark.needs_core
def test_a_size_that_disagrees_is_an_error(file):
    patch(file, header_of(file, "c/1/2") + 18, struct.pack("<2L", 59, 59))
    with pytest.raises(ChunkError, match="states 59 bytes, and the directory 60"):
        read(file)


def test_a_local_header_that_moves_the_bytes_behind_the_end_is_an_error(file):
    patch(file, header_of(file, "zarr.json") + 28, b"\xff\xff")
    patch(file, header_of(file, "c/3/3") + 28, b"\xff\xff")
    with Reader("cpu") as reader, pytest.raises(ChunkError):
        reader.submit(f"{file}", None).result()


@pytest.mark.needs_core
def test_a_crc_counts_where_zarr_reads_entries(folder, file, tmp_path):
    """The core compares no CRC-32 of an entry: of files there is none either."""
    patch(file, data_of(file, "c/0/0"), b"\xff\xff")
    values, _ = read(file)
    assert values[0, 0] == 0xFFFF
    assert np.array_equal(values.ravel()[1:], VALUES.ravel()[1:])
    deflated = zip_folder(folder, tmp_path / "d.zip", zipfile.ZIP_DEFLATED)
    patch(deflated, central_of(deflated, "c/0/0") + 16, b"\x00\x00\x00\x01")
    with pytest.raises(ChunkError, match="CRC-32"):
        read(deflated)


@pytest.mark.needs_core
def test_an_entry_of_a_wrong_size_is_an_error(folder, tmp_path):
    with open(folder / "c/0/0", "ab") as chunk:
        chunk.write(b"12")
    with pytest.raises(ChunkError, match="has 62 bytes, but a raw chunk"):
        read(zip_folder(folder, tmp_path / "a.zip"))


def test_a_removed_file_is_an_error(file):
    with Reader("cpu") as reader:
        array = open_source(file)
        reader.submit(array).result()
        os.remove(file)
        with pytest.raises(ChunkError, match=r"is the file gone\?"):
            reader.submit(array).result()


def test_without_the_core_zarr_reads(file, monkeypatch):
    monkeypatch.setenv("LINUMPY_CORE", "0")
    values, report = read(file)
    assert np.array_equal(values, VALUES)
    assert report.backend == "zarr-python"
