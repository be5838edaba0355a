"""If this fails, the native core puts wrong voxels on a device: its slabs, copies, launches and tables are wrong."""

import ctypes
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference
import stand_in
import zarr
from stand_in import needs_stand_in
from stores import random_values, same

from linumpy.errors import ChunkError
from linumpy.gpu.read import core_device
from linumpy.gpu.read.reader import Reader

pytestmark = needs_stand_in

KINDS = {
    "raw": {"compressors": None},
    "raw shards": {"compressors": None, "shards": (16, 24, 24)},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "zstd shards": {"shards": (16, 24, 24), "compressors": zarr.codecs.ZstdCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
}
SHAPE = (30, 40, 50)


def make(folder, kind, shape=SHAPE):
    """An array of which some chunks are not stored."""
    array = zarr.create_array(folder, shape=shape, chunks=(8, 12, 12), dtype="u2", fill_value=9, **KINDS[kind])
    values = np.random.default_rng(3).integers(0, 50, shape).astype("u2")
    values[8:16] = 9
    array[...] = values
    return array, values


@pytest.mark.parametrize("decode_on", ["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_regions(tmp_path, kind, decode_on):
    rng = np.random.default_rng(3)
    array, values = make(tmp_path / "a", kind)
    with reference.fake_device(1), Reader(0, 2**22, decode_on=decode_on) as reader:
        for dtype in (None, "f4"):
            corners = np.sort(rng.integers(0, (31, 41, 51), (2, 8, 3)), axis=0)
            regions = [..., *(tuple(map(slice, a, b)) for a, b in corners.transpose(1, 0, 2))]
            tickets = reader.submit_many(array, regions, dtype=dtype)
            for ticket, region in zip(tickets, regions, strict=True):
                assert same(ticket.result().get(), values[region].astype(dtype or "u2"))
            if "raw" not in kind:
                report = tickets[0].report
                assert report.chunks_decoded_by_host == (report.chunks_read if decode_on == "host" else 0)


def test_what_the_device_gives_up_the_host_decodes_or_names(tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(32, 16), chunks=(8, 16), dtype="u2", compressors=zarr.codecs.ZstdCodec()
    )
    array[...] = values = random_values("u2", (32, 16), 1)
    (tmp_path / "a/c/1/0").write_bytes(b"no zstd frame at all")
    with reference.fake_device(), Reader(0, decode_on="device") as reader:
        tickets = reader.submit_many(array, [slice(0, 8), slice(8, 16), slice(16, 32)])
        with pytest.raises(ChunkError, match=r"chunk \(1, 0\) of .*c/1/0 cannot be decoded \(zstd\)"):
            tickets[1].result()
        assert same(tickets[0].result().get(), values[:8])
        assert same(tickets[2].result().get(), values[16:])


def test_pieces_of_large_chunks_and_many_jobs_on_one(tmp_path):
    array = zarr.create_array(
        tmp_path / "a", shape=(9, 1100, 1100), chunks=(9, 1100, 1100), dtype="u1", compressors=None
    )
    array[...] = values = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
    regions = [
        np.s_[:, 5:9, 3:900],
        np.s_[...],
        np.s_[2:3],
        *[np.s_[0:2, k % 50 : k % 50 + 2, 0:3] for k in range(4500)],
    ]
    with reference.fake_device(), Reader(0, 2**26) as reader:
        for ticket, region in zip(reader.submit_many(array, regions), regions, strict=True):
            assert same(ticket.result().get(), values[region])


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd", "blosc"])
def test_chunks_that_are_larger_than_a_slab(tmp_path, kind):
    options = dict(KINDS[kind])
    if "shards" in options:
        options["shards"] = (1024, 1024, 3)
    array = zarr.create_array(tmp_path / "a", shape=(900, 600, 3), chunks=(512, 512, 3), dtype="u2", **options)
    array[...] = values = random_values("u2", array.shape, 1)
    regions = [..., np.s_[5:9], np.s_[:, 7:8], *[np.s_[n : n + 300, n : n + 200, n % 3] for n in range(400)]]
    with reference.fake_device(), Reader(0, 2**20) as reader:
        for ticket, region in zip(reader.submit_many(array, regions), regions, strict=True):
            assert same(ticket.result().get(), values[region])


@pytest.mark.parametrize("decode_on", ["device", "host"])
@pytest.mark.parametrize("kind", ["raw", "zstd shards"])
def test_each_call_of_the_driver_fails_once(tmp_path, kind, decode_on):
    """An error of the jobs; then the same reader reads right, and in the end nothing of it is left."""
    array, values = make(tmp_path / "a", kind, (20, 12, 20))
    regions, number, failed = [..., np.s_[3:9]], 0, 0
    driver = stand_in.driver()
    while True:
        number += 1
        with reference.fake_device(number):
            with Reader(0, 2**22, decode_on=decode_on) as reader:
                driver.fail(number)
                tickets = reader.submit_many(array, regions)
                errors = [ticket.exception() for ticket in tickets]
                happened = driver.calls() >= number
                driver.fail(0)
                for ticket, error, region in zip(tickets, errors, regions, strict=True):
                    if error is None:
                        assert same(ticket.result().get(), values[region])
                    else:
                        failed += 1
                        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
                assert same(reader.submit(array).result().get(), values)
            del reader, tickets, ticket
            gc.collect()
            assert driver.alive() == 0
        if not happened:
            break
    assert failed > 5
    assert number > 9


def test_threads_that_ask_for_the_same_kernels_get_the_same_records(tmp_path, monkeypatch):
    """The core points to them: one that is made a second time in place of the first would be freed in use."""
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(4, 4), dtype="u2", compressors=None)
    made, real = [], core_device.CoreDevice.on_device

    def on_device(*arguments):
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(core_device.CoreDevice, "on_device", on_device)
    with reference.fake_device(), Reader(0) as reader:
        loaded = core_device.load
        monkeypatch.setattr(core_device, "load", lambda spec: time.sleep(0.01) or loaded(spec))
        with ThreadPoolExecutor(8) as pool:
            for ticket in list(pool.map(lambda _: reader.submit(array), range(8))):
                assert same(ticket.result().get(), array[...])
    assert len(made) == 8
    assert len({ctypes.addressof(record.scatter.contents) for record in made}) == 1


def test_a_device_that_fails_for_good_ends_all_jobs(tmp_path):
    """As after an illegal access, when every call of the driver fails: nobody may wait for ever."""
    array, values = make(tmp_path / "a", "zstd")
    with reference.fake_device() as device:
        with Reader(0, 2**22) as reader:
            assert same(reader.submit(array).result().get(), values)
            device.driver.fail(-1)
            tickets = reader.submit_many(array, [slice(k, k + 8) for k in range(0, 24, 8)] * 20)
            for ticket in tickets:
                assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(ticket.exception())
        device.driver.fail(0)


def test_outputs_of_tickets_that_nobody_has_are_not_given_to_others(tmp_path):
    array, values = make(tmp_path / "a", "raw")
    with reference.fake_device(2) as device, Reader(0, 2**22) as reader:
        for n in range(30):
            dropped = reader.submit_many(array, [np.s_[n % 9 :], np.s_[3:9]])
            del dropped
            others = [device.full(SHAPE, 3, "u2") for _ in range(2)]  # of freed memory, maybe
            assert same(reader.submit(array, np.s_[n % 20 :]).result().get(), values[n % 20 :])
            assert all((other.get() == 3).all() for other in others)


def test_closing_gives_everything_back(tmp_path):
    array, values = make(tmp_path / "a", "zstd")
    with reference.fake_device() as device:
        reader = Reader(0, 2**22)
        before = device.given_out()
        out = device.empty(SHAPE, "u2")
        assert same(reader.submit(array, out=out).result().get(), values)
        reader.close()
        assert device.driver.alive() == 0
        assert before > 2**22 > device.given_out() - out.nbytes
