"""If this fails, chunks that are kept, on the device or on the host, give wrong or old voxels, or are read again."""

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError
from linumpy.gpu.read.engines.by_core import CoreEngine
from linumpy.io.open import open_source
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu import core_devices as base
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.object_server import Faults, serve
from tests.support.stores import random_values

pytestmark, stand_in, driver = needs_stand_in, base.device, base.driver
SHAPE = (30, 40, 50)


@pytest.fixture(params=["device", "host"])
def device(request):
    """Gives a core device whose memory is the host's; None for outputs in host memory."""
    return request.getfixturevalue("stand_in") if request.param == "device" else None


class Keeping:
    """A reader that keeps chunks."""

    def __init__(self, device, nbytes, decode_on):
        self.made = None if device is None else device(decode_on, cache_bytes=nbytes)
        self.engine = CoreEngine(4, self.made, nbytes)

    def stats(self):
        return self.engine._core.stats()

    def submit(self, array, regions, dtype=None, timed=False):
        return base.submit(self.made, self.engine, array, regions, dtype, timed=timed)[0]

    def check(self, array, values, regions, dtype=None):
        """Read regions, and say how many chunks were found and how many were not."""
        before = self.stats()
        for ticket, region in zip(self.submit(array, regions, dtype), regions, strict=True):
            np.testing.assert_array_equal(ticket.result(), values[region])
        after = self.stats()
        return after.kept_hits - before.kept_hits, after.kept_misses - before.kept_misses


@contextlib.contextmanager
def keeping(device, nbytes, decode_on=None):
    reader = Keeping(device, nbytes, decode_on)
    try:
        yield reader
    finally:
        reader.engine.close()


def make(folder, kind="raw", seed=1, dtype="u2", chunks=(8, 12, 12), **options):
    array = zarr.create_array(
        folder, shape=SHAPE, chunks=chunks, dtype=dtype, fill_value=9, **base.KINDS[kind], **options
    )
    values = np.random.default_rng(seed).integers(0, 50, SHAPE).astype(dtype)
    values[8:16, :12] = 9  # chunks that are not stored
    array[...] = values
    return array, values


#: Chunks of such an array, and those that are stored.
CHUNKS, STORED = 4 * 4 * 5, 4 * 4 * 5 - 5


def crops(rng, count):
    corners = np.sort(rng.integers(0, (31, 41, 51), (2, count, 3)), axis=0)
    return [tuple(map(slice, a, b)) for a, b in corners.transpose(1, 0, 2)]


@pytest.mark.parametrize(("kind", "decode_on"), matrix(base.KINDS, ["device", "host"]))
def test_what_is_kept_is_not_read_again(tmp_path, device, kind, decode_on):
    array, values = make(tmp_path / "a", kind)
    rng = np.random.default_rng(3)
    with keeping(device, 2**20, decode_on) as reader:
        assert reader.check(array, values, [...]) == (0, STORED)
        assert reader.stats().kept_nbytes >= STORED * 8 * 12 * 12 * 2
        read = reader.stats()
        for dtype in (None, "f4", "u1"):
            hits, misses = reader.check(array, values, [..., *crops(rng, 20)], dtype)
            assert hits >= STORED
            assert misses == 0
        now = reader.stats()
        assert now.bytes_read == read.bytes_read
        if "shards" not in kind:  # shards that hold a chunk that is not stored are looked at
            assert now.files_opened == read.files_opened
        (ticket,) = reader.submit(array, [np.s_[:8]])
        report = (ticket.result(), ticket.report)[1]
        assert (report.bytes_read, report.chunks_read, report.chunks_decoded_by_host) == (0, 20, 0)


def test_batches_that_want_the_same_chunks_read_them_once(tmp_path):
    """On the host a task awaits the chunks that another one reads."""
    array, values = make(tmp_path / "a", "zstd")
    for _ in range(5):
        with keeping(None, 2**20) as reader:
            regions = [..., np.s_[3:20], np.s_[:, 5:30, 7:]]
            tickets = [one for _ in range(8) for one in reader.submit(array, regions)]
            for number, ticket in enumerate(tickets):
                np.testing.assert_array_equal(ticket.result(), values[regions[number % 3]])
            assert reader.stats().decoded == STORED


@pytest.mark.parametrize("kind", ["raw", "zstd", "zstd shards"])
def test_batches_that_want_the_same_chunks_of_a_server_request_them_once(tmp_path, device, kind):
    """On a device, too: a request costs more than the wait for a chunk that another task reads."""
    _, values = make(tmp_path / "a", kind)
    with serve(tmp_path) as server:
        server.faults = Faults(seconds=0.02)
        array, regions = open_source(f"{server.url}/a"), [..., np.s_[3:20], np.s_[:, 5:30, 7:]]
        with keeping(device, 2**20, "device") as reader:
            tickets = [one for _ in range(6) for one in reader.submit(array, regions)]
            for number, ticket in enumerate(tickets):
                np.testing.assert_array_equal(ticket.result(), values[regions[number % 3]])
            assert reader.stats().chunks == STORED
            asked = [path for method, path, *_ in server.requests if method == "GET" and "/c/" in path]
            stored = [path for path in asked if (tmp_path / path[1:]).exists()]  # missing chunks are not kept
            assert kind == "zstd shards" or len(set(stored)) == len(stored) == STORED


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("kind", ["raw", "zstd shards"])
def test_a_cache_smaller_than_the_array(tmp_path, device, kind, big_endian):
    """Right voxels while chunks are evicted; what was used last stays."""
    array, values = make(tmp_path / "a", kind, dtype=">u2" if big_endian else "<u2")
    rng, room = np.random.default_rng(4), 2304 + 256
    with keeping(device, 20 * room) as reader:
        for dtype in (None, "f4", None, "i8"):
            regions = [crop for n in range(4) for crop in crops(rng, 4)]
            reader.check(array, values, regions, dtype)
            assert 0 < reader.stats().kept_nbytes <= 20 * room
        assert reader.check(array, values, [np.s_[:8, :24, :36]])[0] <= 6
        assert reader.check(array, values, [np.s_[:8, :24, :36]]) == (6, 0)
        reader.check(array, values, [np.s_[16:24, :24, :36]])
        assert reader.check(array, values, [np.s_[:8, :24, :36]]) == (6, 0)
        assert reader.stats().kept_hits > 18


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd", "blosc"])
def test_a_file_that_was_replaced(tmp_path, device, kind):
    array, values = make(tmp_path / "a", kind)
    with keeping(device, 2**20) as reader:
        reader.check(array, values, [...])
        for seed in (2, 3):
            values = np.random.default_rng(seed).integers(0, 50, SHAPE).astype("u2")
            array[...] = values
            hits, misses = reader.check(array, values, [..., np.s_[3:20]])
            assert (hits, misses) == (0, CHUNKS)
            assert reader.check(array, values, [..., np.s_[3:20]]) == (CHUNKS, 0)


def test_one_chunk_of_many_that_was_replaced_or_removed(tmp_path, device):
    array, values = make(tmp_path / "a")
    with keeping(device, 2**20) as reader:
        reader.check(array, values, [...])
        array[:8, 12:24, 12:24] = values[:8, 12:24, 12:24] = 49
        (tmp_path / "a/c/3/1/1").unlink()
        values[24:, 12:24, 12:24] = 9
        assert reader.check(array, values, [...]) == (STORED - 2, 1)
        assert reader.check(array, values, [...]) == (STORED - 1, 0)


def test_a_shard_in_which_a_chunk_came_to_be_stored(tmp_path, device):
    array, values = make(tmp_path / "a", "raw shards")
    with keeping(device, 2**20) as reader:
        reader.check(array, values, [...])
        array[8:16, :12, :12] = values[8:16, :12, :12] = 3
        reader.check(array, values, [...])
        hits, misses = reader.check(array, values, [...])
        assert (hits, misses) == (STORED + 1, 0)


@pytest.mark.parametrize("damage", [b"no zstd frame at all", None])
def test_a_broken_chunk_is_not_kept(tmp_path, device, damage):
    array, values = make(tmp_path / "a", "zstd")
    broken = tmp_path / "a/c/2/1/1"
    whole = broken.read_bytes()
    damaged = damage or whole[:-2] + bytes([whole[-2] ^ 255]) + whole[-1:]  # the checksum of the decoded bytes
    broken.write_bytes(damaged)
    with keeping(device, 2**20, "device") as reader:
        for _ in range(3):
            before = reader.stats()
            good, bad = reader.submit(array, [np.s_[:16], np.s_[16:24, 12:24, 12:24]])
            np.testing.assert_array_equal(good.result(), values[:16])
            with pytest.raises(ChunkError, match=r"chunk \(2, 1, 1\) of .*c/2/1/1 cannot be decoded"):
                bad.result()
        assert reader.stats().kept_misses - before.kept_misses == 1
        broken.write_bytes(whole)
        reader.check(array, values, [...])
        assert reader.check(array, values, [...]) == (STORED, 0)


def test_arrays_of_different_chunks_and_paths(tmp_path, device):
    """Slots of several sizes; those of arrays that are not read any more make place."""
    arrays = [
        make(tmp_path / "a"),
        make(tmp_path / "b", "zstd", 2),
        make(tmp_path / "c", "zstd shards", 3, "u1"),
        make(tmp_path / "d", "raw", 4, "f8"),
        make(tmp_path / "e", "raw", 5, "u1", (7, 9, 11)),  # 693 bytes: whole units of one byte
        make(tmp_path / "f", "raw", 6, "u2", (30, 40, 50)),
    ]
    rng = np.random.default_rng(5)
    with keeping(device, 2**18) as reader:
        for _ in range(3):
            for array, values in arrays:
                reader.check(array, values, crops(rng, 6))
                again = crops(rng, 1) * 3
                reader.check(array, values, again, "f4")
        for array, values in arrays[::-1]:
            region = [np.s_[:7, :9, :11]]
            reader.check(array, values, region)
            hits, misses = reader.check(array, values, region)
            assert (hits > 0, misses) == (True, 0)


def test_a_chunk_larger_than_all_memory_is_read_all_the_same(tmp_path, device):
    array, values = make(tmp_path / "a", "raw", 6, "u2", (30, 40, 50))
    with keeping(device, 2**16) as reader:
        for _ in range(2):
            assert reader.check(array, values, [..., np.s_[2:9]]) == (0, 1)
        assert reader.stats().kept_nbytes == 0


def test_very_many_boxes_of_one_chunk(tmp_path, device):
    array, values = make(tmp_path / "a", "raw", 6, "u2", (30, 40, 50))
    regions = [np.s_[k % 20 : k % 20 + 2, k % 30 : k % 30 + 3, 4:9] for k in range(5000)]
    with keeping(device, 2**20) as reader:
        assert reader.check(array, values, regions) == (0, 1)
        assert reader.check(array, values, regions) == (1, 0)


@pytest.mark.parametrize("kind", ["raw", pytest.param("zstd", marks=pytest.mark.slow)])
def test_threads_that_evict_each_others_chunks(tmp_path, device, driver, kind):
    """Streams are late by chance: a slot that is read or filled must not be given to another chunk."""
    arrays = [make(tmp_path / name, kind, seed) for seed, name in enumerate("abc")]
    stop = threading.Event()
    with keeping(device, 25 * 2560, "device") as reader:

        def read(seed):
            rng = np.random.default_rng(seed)
            for _ in range(12):
                if stop.is_set():
                    return
                array, values = arrays[rng.integers(3)]
                regions = crops(rng, 3)
                dtype = [None, "f4"][rng.integers(2)]
                for ticket, region in zip(reader.submit(array, regions, dtype), regions, strict=True):
                    if rng.random() < 0.1:
                        ticket.cancel()
                        continue
                    np.testing.assert_array_equal(ticket.result(), values[region])

        with ThreadPoolExecutor(8) as pool:
            try:
                list(pool.map(read, range(8)))
            finally:
                stop.set()
        stats = reader.stats()
        # How many are hits depends on which thread runs first: at times fewer than 50.
        assert stats.kept_hits > 0
        assert stats.kept_misses > 200
        # Nothing stays pinned: all of the memory can still be filled anew.
        array, values = arrays[0]
        reader.check(array, values, [np.s_[:8, :36, :36]])
        assert reader.check(array, values, [np.s_[:8, :36, :36]]) == (9, 0)


def test_files_that_are_written_while_they_are_read(tmp_path, device):
    """Each chunk is one of the values that were written, all of it."""
    path, writing = tmp_path / "a/c/0/0/0", True
    array = zarr.create_array(tmp_path / "a", shape=(8, 8, 8), chunks=(8, 8, 8), dtype="u1", compressors=None)
    array[...] = 1

    def write():
        number = 0
        while writing:
            number = number % 200 + 1
            (tmp_path / "new").write_bytes(bytes([number]) * 512)
            os.replace(tmp_path / "new", path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with keeping(device, 2**16) as reader:
            for _ in range(40):
                (ticket,) = reader.submit(array, [...])
                if ticket.exception() is None:
                    values = ticket.result()
                    assert values.min() == values.max() > 0
            writing = False
            writer.join()
            reader.check(array, array[...], [...])
            assert reader.check(array, array[...], [...]) == (1, 0)
    finally:
        writing = False
        writer.join()


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_each_call_of_the_driver_fails_once(tmp_path, stand_in, driver, kind):
    """While chunks are brought into their slots, and while they are copied from there."""
    array = zarr.create_array(tmp_path / "a", shape=(16, 24, 24), chunks=(8, 12, 12), dtype="u2", **base.KINDS[kind])
    array[...] = values = random_values("u2", array.shape, 1) % 50
    number, failed = 0, 0
    while True:
        number += 1 if budget.SLOW else max(3, number // 8)  # the slow run takes each call
        with keeping(stand_in, 2**16, "device") as reader:
            driver.fake_fail(number)
            for _ in range(2):
                (ticket,) = reader.submit(array, [...])
                if ticket.exception() is None:
                    np.testing.assert_array_equal(ticket.result(), values)
                else:
                    failed += 1
                    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(ticket.exception())
            happened = driver.fake_calls() >= number
            driver.fake_fail(0)
            reader.check(array, values, [...])
            assert reader.check(array, values, [np.s_[3:], np.s_[:, 5:7]]) == (8, 0)
        if not happened:
            break
    assert failed > 5
    assert number > 12


@pytest.mark.parametrize("count", [1, 15])
def test_a_reader_that_is_closed_with_batches_under_way(tmp_path, device, count):
    array, values = make(tmp_path / "a", "zstd")
    for _ in range(5 if budget.SLOW else 2):
        with keeping(device, 2**18) as reader:
            reader.check(array, values, [np.s_[:8]])
            tickets = [one for _ in range(count) for one in reader.submit(array, [..., np.s_[3:20]], "f4")]
        for ticket in tickets:
            assert ticket.done()
            if ticket.exception() is None:
                assert ticket.result().shape in (SHAPE, (17, 40, 50))


def test_kept_chunks_take_part_in_times(tmp_path, stand_in):
    array, values = make(tmp_path / "a")
    with keeping(stand_in, 2**20) as reader:
        reader.check(array, values, [np.s_[:8]])
        (ticket,) = reader.submit(array, [np.s_[:8]], timed=True)
        ticket.result()
        assert ticket._job.report().device_scatter_seconds > 0
        assert reader.stats().copies == 0
