"""If this fails, `read_zarr` and `Reader(device="cpu")` give other voxels than zarr-python."""

import errno
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import linumpy
from linumpy.core import native
from linumpy.errors import ChunkError, UnsupportedLayoutError
from linumpy.gpu import Reader
from tests.support.gpu import reference
from tests.support.stores import (
    cases,
    encoded_cases,
    plain_values,
    random_values,
    regions,
    same,
    same_but_nan,
    stored,
    write,
)

KINDS = {
    "raw": {"compressors": None},
    "zstd": {},
    "shards": {"shards": (8, 12), "compressors": None},
    "zstd shards": {"shards": (8, 12)},
}


def make(folder, kind, shape=(18, 26), chunks=(4, 6)):
    return stored(folder, plain_values("u2", shape, 1), chunks, fill_value=3, **KINDS[kind])


@settings(deadline=None)
@given(case=cases() | encoded_cases(), data=st.data())
def test_it_reads_what_zarr_reads_without_zarr(case, data):
    folder = Path(tempfile.mkdtemp())
    try:
        array = write(case, folder / "a")
        region = data.draw(regions(case.shape))
        target = np.dtype(data.draw(st.sampled_from(["f8", "c16"])))
        found, report = linumpy.read_zarr(folder / "a", region=region, device="cpu", return_report=True)
        assert same(found, array[region])
        assert found.flags.c_contiguous
        backend = "zarr-python" if native.why_no_core() else "linumpy"
        assert (report.backend, report.bytes_decoded) == (backend, found.nbytes)
        assert report.fallback.startswith("host memory: asked for")
        assert ("no native core" in report.fallback) is (backend == "zarr-python")
        if array.dtype.kind != "c":
            assert same_but_nan(linumpy.read_zarr(array, region=region, device="cpu", dtype=target), found, target)
    finally:
        shutil.rmtree(folder)


def test_many_threads_read_at_the_same_time(tmp_path):
    arrays = {kind: make(tmp_path / kind, kind) for kind in KINDS}
    rng = np.random.default_rng(0)

    def read(number):
        kind = list(KINDS)[number % len(KINDS)]
        low, high = np.sort(rng.integers(0, 19, 2))
        return same(linumpy.read_zarr(arrays[kind], region=slice(low, high), device="cpu"), arrays[kind][low:high])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(100)))


@pytest.mark.needs_core
def test_what_the_reader_cannot_read_is_left_to_zarr_with_a_word(tmp_path, caplog):
    options = {"zarr_format": 2, "compressors": numcodecs.BZ2()}
    array = zarr.create_array(tmp_path / "a", shape=(9, 8), chunks=(4, 4), dtype=">i4", **options)
    array[...] = random_values("i4", (9, 8), 1)
    found, report = linumpy.read_zarr(array, device="cpu", region=np.s_[2:7, 3], return_report=True)
    assert same(found, array[2:7, 3])
    assert report.backend == "zarr-python"
    assert "host memory: asked for; zarr-python: codec 'bz2'" in report.fallback
    with pytest.raises(UnsupportedLayoutError, match=r"linumpy's reader cannot read .*codec 'bz2'"):
        linumpy.read_zarr(array, device="cpu", region=np.s_[2:7, 3], strict=True)
    known = make(tmp_path / "known", "zstd")
    assert same(linumpy.read_zarr(known, device="cpu", strict=True), known[:])
    (said,) = [one.message for one in caplog.records if one.name.startswith("linumpy")]
    assert "not by linumpy's reader: codec 'bz2'" in said
    dates = zarr.create_array(tmp_path / "d", shape=(5,), chunks=(2,), dtype="datetime64[s]")
    dates[...] = np.arange(5).astype("datetime64[s]")
    assert (linumpy.read_zarr(dates, device="cpu") == dates[...]).all()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_strings_of_any_length_are_one_clear_error(tmp_path, zarr_format):
    array = zarr.create_array(tmp_path / "s", shape=(3,), chunks=(2,), dtype=str, zarr_format=zarr_format)
    array[...] = np.array(["a", "bc", ""], object)
    for read in (linumpy.read_zarr, linumpy.read_zarr_to_gpu):
        with pytest.raises(TypeError, match=r"/s has dtype .*any length.* zarr\.open_array\('file.*/s'\)\[\.\.\.\]"):
            read(tmp_path / "s", **({"device": "cpu"} if read is linumpy.read_zarr else {}))
    with Reader(device="cpu") as reader, pytest.raises(TypeError, match=r"/s has dtype .*any length"):
        reader.submit(tmp_path / "s")


# Files as disks and networks give them


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("date", [10**19, 2**63 - 1, -(10**18), 0])
def test_any_date_of_a_file_is_read(tmp_path, kind, date):
    """Nanoseconds since 1970 leave 63 bits in 2262."""
    array = make(tmp_path / "a", kind)
    chunks = sorted(path for path in (tmp_path / "a/c").rglob("*") if path.is_file())
    os.utime(chunks[1], ns=(date, date))
    if os.stat(chunks[1]).st_mtime_ns != date:
        pytest.skip("this file system has no such dates")
    assert same(linumpy.read_zarr(tmp_path / "a", device="cpu"), array[...])
    with Reader(device="cpu") as reader:
        tickets = reader.submit_many([tmp_path / "a"] * 20, [np.s_[n % 18, :] for n in range(20)])
        assert all(same(ticket.result(), array[n % 18, :]) for n, ticket in enumerate(tickets))


@pytest.mark.needs_core
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_file_that_is_lost_in_a_batch_fails_its_own_chunk(tmp_path, kind, nth):
    array = make(tmp_path / "a", kind)
    expected = array[...]
    size = array.shards or array.chunks
    grid = [(y, x) for y in range(0, 18, size[0]) for x in range(0, 26, size[1])]
    boxes = [np.s_[y : min(18, y + size[0]), x : min(26, x + size[1])] for y, x in grid]
    with Reader(device="cpu") as reader:
        with reference.failing_call("fstat", nth, errno.ESTALE):
            tickets = reader.submit_many(tmp_path / "a", boxes)
            errors = [ticket.exception() for ticket in tickets]
        ((corner, error),) = ((corner, error) for corner, error in zip(grid, errors, strict=True) if error)
        assert isinstance(error, ChunkError)
        path = "/".join(str(a // b) for a, b in zip(corner, size, strict=True))
        assert f"/a/c/{path} cannot be read: {os.strerror(errno.ESTALE)}" in str(error)
        assert all(same(t.result(), expected[b]) for t, b, e in zip(tickets, boxes, errors, strict=True) if not e)
        assert same(reader.submit(tmp_path / "a").result(), expected)  # it is not kept as it was


# What is told of a read


@pytest.mark.needs_core
@pytest.mark.parametrize("scratch", [2**20, 2**26])
@pytest.mark.parametrize("kind", ["zstd", "zstd shards"])
@pytest.mark.parametrize(("shape", "chunks"), [((18, 26), (4, 6)), ((18, 26), (9, 13)), ((2000, 1000), (2000, 1000))])
def test_chunks_that_the_host_decodes_are_counted_and_timed(tmp_path, kind, shape, chunks, scratch):
    """Many at once, few by themselves, and one that no slab holds."""
    options = {} if kind == "zstd" else {"shards": chunks}
    array = zarr.create_array(tmp_path / "a", shape=shape, chunks=chunks, dtype="u2", **options)
    array[...] = plain_values("u2", shape, 1)
    files = [path.stat().st_size for path in (tmp_path / "a/c").rglob("*") if path.is_file()]
    index = 0 if kind == "zstd" else 20 * len(files)  # offset, size and checksum of one chunk
    with Reader(device="cpu", scratch_bytes=scratch) as reader:
        for times in (1, 2):
            ticket = reader.submit(array)
            assert same(ticket.result(), array[...])
            stats = reader.stats()
            assert stats.bytes_read == times * (sum(files) - index)
            assert stats.chunks_decoded_by_host == times * len(files)
        assert 0 < ticket.report.host_decode_seconds < stats.host_decode_seconds
        assert ticket.report.bytes_read in (sum(files), sum(files) - index)
        assert "in threads of the host" in str(ticket.report)
        assert ticket.report.chunks_decoded_by_host == len(files)


def test_raw_chunks_take_no_time_to_decode(tmp_path):
    array = make(tmp_path / "a", "raw")
    with Reader(device="cpu") as reader:
        ticket = reader.submit(array)
        ticket.result()
        assert (reader.stats().host_decode_seconds, reader.stats().chunks_decoded_by_host) == (0, 0)
        assert ticket.report.host_decode_seconds == 0
        assert "decode" not in str(ticket.report)


@pytest.mark.needs_core
def test_an_encoded_chunk_that_no_slab_holds_is_decoded_once(tmp_path):
    """However many boxes it is cut into, and however many regions want parts of it."""
    values = plain_values("u2", (1500, 1000), 1)
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=values.shape, dtype="u2")
    array[...] = values
    nbytes = (tmp_path / "a/c/0/0").stat().st_size
    wanted = [np.s_[:, 3:50], np.s_[700:, :], np.s_[10, 20:30], np.s_[:, :], np.s_[1499:, 999:]]
    with Reader(device="cpu", scratch_bytes=2**20) as reader:
        tickets = reader.submit_many(array, [one for one in wanted if one != np.s_[10, 20:30]])
        alone = reader.submit(array, wanted[2])
        for ticket, region in zip([*tickets, alone], [wanted[0], wanted[1], *wanted[3:], wanted[2]], strict=True):
            assert same(ticket.result(), values[region])
            assert ticket.report.bytes_read == nbytes
            assert ticket.report.chunks_decoded_by_host == 1
        assert reader.stats().chunks_decoded_by_host <= 2
