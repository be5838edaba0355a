"""If this fails, raw arrays are read wrong, or errors do not name what is at fault (oracle: zarr-python)."""

import dataclasses
import os
import shutil
import struct
import tempfile
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import tensorstore as ts
import zarr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import DTYPES, cases, random_values, same, same_but_nan, write

pytestmark = needs_stand_in
inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def nothing_stays_open():
    before = open_chunks()
    yield
    assert open_chunks() == before


def open_chunks():
    """Descriptors of files below the folder for temporary ones."""
    links = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    return sorted(
        os.readlink(one) for one in links if os.path.exists(one) and tempfile.gettempdir() in os.readlink(one)
    )


@inside_a_test
@given(case=cases(max_elements=500), target=st.sampled_from(DTYPES))
def test_same_casts_as_numpy(case, target):
    source, target = np.dtype(case.dtype), np.dtype(target)
    assume(source.kind != "c" or target.kind in "cb")
    if source.kind in "fc" and target.kind in "iu":
        # What does not fit is undefined in C, in CUDA and so in NumPy.
        case = dataclasses.replace(case, fill=1.5)
        values = np.random.default_rng(case.seed).uniform(0, 100, case.shape).astype(source)
    else:
        values = random_values(source, case.shape, case.seed)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        array = write(case, Path(folder) / "a", values)
        assert same_but_nan(reference.read(array, case.region, dtype=target), array[case.region], target)


TENSORSTORE = {
    "zarr2": lambda separator: {"driver": "zarr", "metadata": {"compressor": None, "dimension_separator": separator}},
    "zarr3": lambda separator: {
        "driver": "zarr3",
        "metadata": {
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "big"}}],
        },
    },
    "zarr3-sharded": lambda separator: {
        "driver": "zarr3",
        "metadata": {
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 16, 32]}},
            "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [4, 8, 16],
                        "codecs": [
                            {"name": "transpose", "configuration": {"order": [2, 0, 1]}},
                            {"name": "bytes", "configuration": {"endian": "little"}},
                        ],
                        "index_location": "start",
                    },
                }
            ],
        },
    },
}


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("kind", TENSORSTORE)
def test_stores_written_by_tensorstore(tmp_path, kind, separator):
    values = random_values("u2", (19, 33, 45), 3)
    spec = TENSORSTORE[kind](separator) | {"kvstore": {"driver": "file", "path": str(tmp_path / "a")}}
    if kind != "zarr3-sharded":
        spec["metadata"]["chunks" if kind == "zarr2" else "chunk_grid"] = (
            [8, 16, 16] if kind == "zarr2" else {"name": "regular", "configuration": {"chunk_shape": [8, 16, 16]}}
        )
    stored = ts.open(spec, create=True, dtype=ts.uint16, shape=values.shape).result()
    stored[...] = values
    assert same(reference.read(tmp_path / "a"), values)
    assert same(reference.read(tmp_path / "a", (slice(3, 18), -4, slice(7, 40))), values[3:18, -4, 7:40])


def raw(folder, shape=(10, 12), chunks=(4, 5), **options):
    array = zarr.create_array(folder, shape=shape, chunks=chunks, dtype="u2", compressors=None, fill_value=7, **options)
    array[...] = random_values("u2", shape, 1)
    return array


@pytest.mark.parametrize("there", [(0,), (1,), (0, 2), (1, 2), ()])
def test_chunks_of_two_tasks_of_which_some_are_missing(tmp_path, there):
    """As many tasks as there are chunks, but not one for each."""
    shape = (3 if len(there) == 2 else 2, 2**21)
    array = zarr.create_array(
        tmp_path / "a", shape=shape, chunks=(1, 2**21), dtype="u1", compressors=None, fill_value=7
    )
    for row in there:
        array[row] = random_values("u1", shape[1:], row)
    job = reference.make_job(tmp_path / "a")
    assert same(reference.execute(job), array[...])
    assert job.report.chunks_filled == shape[0] - len(there)


@pytest.mark.parametrize("change", [-1, 1, -40], ids=["short", "long", "empty"])
def test_a_chunk_of_the_wrong_length_is_an_error(tmp_path, change):
    raw(tmp_path / "a")
    file = tmp_path / "a/c/1/2"
    os.truncate(file, 40 + change)
    with pytest.raises(ChunkError, match=rf"chunk \(1, 2\) of .*c/1/2 has {40 + change} bytes.* has 40"):
        reference.read(tmp_path / "a")
    # A region that does not touch it is read all the same.
    assert same(reference.read(tmp_path / "a", slice(0, 4)), zarr.open_array(tmp_path / "a")[:4])


def test_a_folder_in_place_of_a_chunk_is_an_error(tmp_path):
    raw(tmp_path / "a")
    (tmp_path / "a/c/1/2").unlink()
    (tmp_path / "a/c/1/2").mkdir()
    with pytest.raises(ChunkError, match=r"chunk \(1, 2\)"):
        reference.read(tmp_path / "a")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["chunk", "shard"])
def test_a_pipe_in_place_of_a_chunk_is_not_waited_for(tmp_path, kind):
    (raw if kind == "chunk" else sharded)(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    os.mkfifo(tmp_path / "a/c/1/1")
    with pytest.raises(ChunkError, match=rf"{kind} \(1, 1\)"):
        reference.read(tmp_path / "a")


def sharded(folder, **options):
    return raw(folder, shape=(12, 20), chunks=(2, 5), shards=(6, 10), **options)


def index_of(file):
    data = bytearray(file.read_bytes())
    return data, len(data) - 16 * 6 - 4


def write_index(file, data, begin):
    data[-4:] = struct.pack("<I", google_crc32c.value(bytes(data[begin:-4])))
    file.write_bytes(data)


def test_a_shard_index_with_a_wrong_checksum_is_an_error(tmp_path):
    sharded(tmp_path / "a")
    file = tmp_path / "a/c/1/1"
    data, begin = index_of(file)
    data[begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChunkError, match=r"shard \(1, 1\) of .*c/1/1: the checksum of the shard index"):
        reference.read(tmp_path / "a")


@pytest.mark.parametrize(
    ("offset", "nbytes", "message"),
    [
        (10**6, 20, "inner chunk (1, 0) lies at bytes 1000000 to 1000020, but the file has"),
        (2**63 + 5, 20, "inner chunk (1, 0) lies at bytes"),
        (2**64 - 2, 20, "inner chunk (1, 0) lies at bytes"),
        (0, 19, "inner chunk (1, 0) has 19 bytes and must have 20"),
        (0, 2**64 - 1, "inner chunk (1, 0) has 18446744073709551615 bytes"),
        (2**64 - 1, 20, "inner chunk (1, 0) lies at bytes"),
    ],
)
def test_ranges_of_a_shard_that_cannot_be_are_errors(tmp_path, offset, nbytes, message):
    sharded(tmp_path / "a")
    file = tmp_path / "a/c/0/1"
    data, begin = index_of(file)
    data[begin + 32 : begin + 48] = struct.pack("<QQ", offset, nbytes)
    write_index(file, data, begin)
    with pytest.raises(ChunkError) as caught:
        reference.read(tmp_path / "a")
    assert message in str(caught.value)
    assert "shard (0, 1)" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 3, 50, 99])
def test_a_shard_shorter_than_its_index_is_an_error(tmp_path, keep):
    sharded(tmp_path / "a")
    os.truncate(tmp_path / "a/c/0/0", keep)
    with pytest.raises(ChunkError, match=rf"the shard index has {keep} bytes and must have 100"):
        reference.read(tmp_path / "a")


def test_a_flipped_bit_anywhere_in_a_shard_index_is_noticed(tmp_path):
    """By one reader, which must not keep any of these indexes."""
    array = sharded(tmp_path / "a")
    file, expected = tmp_path / "a/c/0/0", array[...]
    good, begin = index_of(file)
    with reference.fake_device(), Reader(0) as reader:
        for bit in range(8 * begin, 8 * len(good)):
            bad = bytearray(good)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
            with pytest.raises(ChunkError, match=r"shard \(0, 0\)"):
                reader.submit(array, (slice(0, 2), slice(0, 5))).result()
        file.write_bytes(good)
        assert same(reader.submit(array).result().get(), expected)


def test_only_the_touched_inner_chunks_are_read(tmp_path):
    sharded(tmp_path / "a")
    job = reference.make_job(tmp_path / "a", (slice(2, 4), slice(5, 10)))
    reference.execute(job)
    assert job.report.files_opened == 1  # for the index and the data
    assert job.report.bytes_read == 100 + 20


def test_thin_regions_read_little(tmp_path):
    raw(tmp_path / "a", shape=(16, 256, 1024), chunks=(16, 256, 1024))
    job = reference.make_job(tmp_path / "a", (slice(None), 5))
    assert same(reference.execute(job), zarr.open_array(tmp_path / "a")[:, 5])
    assert job.report.bytes_read == 16 * 1024 * 2
    plane = reference.make_job(tmp_path / "a", 7)
    reference.execute(plane)
    assert plane.report.bytes_read == 256 * 1024 * 2


@pytest.mark.parametrize("where", ["c/0/0", "c/1/2", "c/2/2"])
def test_a_read_that_is_too_short_names_its_chunk(tmp_path, where):
    """Chunks of one file are a task each; the fault comes to the only one that is read."""
    raw(tmp_path / "a")
    place = [int(one) for one in where.split("/")[1:]]
    region = tuple(slice(n * size, n * size + 1) for n, size in zip(place, (4, 5), strict=True))
    with reference.failing_call("pread", 1, -1), pytest.raises(ChunkError, match=rf"{where}: \d+ of \d+ bytes"):
        reference.read(tmp_path / "a", region)


def test_an_array_that_has_gone_is_no_fill_value(tmp_path):
    for make in (raw, sharded):
        array = make(tmp_path / make.__name__)
        shutil.rmtree(tmp_path / make.__name__)
        with pytest.raises(ChunkError, match=r"are missing, and so is .*zarr\.json"):
            reference.read(array)


def test_a_relative_path_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw("a")
    job = reference.make_job("a")
    expected = zarr.open_array("a")[...]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(reference.execute(job), expected)


@pytest.mark.parametrize("kind", ["chunk", "shard"])
def test_a_link_to_nothing_is_an_error(tmp_path, kind):
    (raw if kind == "chunk" else sharded)(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    (tmp_path / "a/c/1/1").symlink_to(tmp_path / "gone")
    with pytest.raises(ChunkError, match=rf"{kind} \(1, 1\).*cannot be opened"):
        reference.read(tmp_path / "a")


@pytest.mark.parametrize("location", ["start", "end"])
def test_a_range_over_the_index_is_an_error(tmp_path, location):
    from zarr.codecs import BytesCodec, ShardingCodec

    codec = ShardingCodec(chunk_shape=(2,), codecs=[BytesCodec()], index_codecs=[BytesCodec()], index_location=location)
    array = zarr.create(store=tmp_path / "a", shape=(8,), chunks=(8,), dtype="u8", codecs=[codec], zarr_format=3)
    array[...] = np.arange(1, 9)
    assert same(reference.read(tmp_path / "a"), array[...])
    file = tmp_path / "a/c/0"
    data = bytearray(file.read_bytes())
    begin = 0 if location == "start" else len(data) - 64
    data[begin : begin + 8] = struct.pack("<Q", begin)
    file.write_bytes(data)
    with pytest.raises(ChunkError, match="inner chunk"):
        reference.read(tmp_path / "a")


def test_the_report_counts_files_that_were_opened(tmp_path):
    array = raw(tmp_path / "a")
    (tmp_path / "a/c/1/1").unlink()
    job = reference.make_job(array)
    assert same(reference.execute(job), array[...])
    assert (job.report.chunks_read, job.report.chunks_filled, job.report.files_opened) == (8, 1, 8)
    assert job.report.scratch_bytes > 0
    empty = reference.make_job(array, slice(3, 3))
    assert reference.execute(empty).shape == (0, 12)
    assert (empty.report.bytes_read, empty.report.chunks_read, empty.report.scratch_bytes) == (0, 0, 0)


@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_the_report_says_where_chunks_were_decoded(tmp_path, decode_on):
    array = zarr.create_array(tmp_path / "a", shape=(10, 12), chunks=(4, 5), dtype="u2")
    array[...] = random_values("u2", (10, 12), 1)
    job = reference.make_job(array, decode_on=decode_on)
    assert same(reference.execute(job), array[...])
    assert job.report.decoder == f"zstd, on the {decode_on}"
    assert job.report.chunks_decoded_by_host == (9 if decode_on == "host" else 0)
