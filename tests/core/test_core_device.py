"""If this fails, the native core puts wrong voxels on a device: its slabs, copies, launches and tables are wrong."""

import ctypes
import dataclasses
import functools
import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError
from linumpy.gpu.read.engines import core_device
from linumpy.gpu.read.report import ReaderStats
from linumpy.gpu.read.scatter import Conversion
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from tests.support.budget import some
from tests.support.gpu import core_devices
from tests.support.gpu.core_devices import KINDS, Memory, core_reader, submit
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values

pytestmark, device, driver = needs_stand_in, core_devices.device, core_devices.driver


@pytest.mark.parametrize(
    ("kind", "decode_on"),
    some(
        itertools.product(KINDS, ["device", "host"]),
        lambda kind, decode_on: kind == "zstd shards" or (decode_on == "device" and kind in ("raw", "zstd")),
    ),
)
def test_random_regions(tmp_path, device, kind, decode_on):
    rng = np.random.default_rng(3)
    array = zarr.create_array(
        tmp_path / "a", shape=(30, 40, 50), chunks=(8, 12, 12), dtype="u2", fill_value=9, **KINDS[kind]
    )
    values = rng.integers(0, 50, array.shape).astype("u2")
    values[8:16] = 9  # chunks that are not stored
    array[...] = values
    made = device(decode_on)
    with core_reader(made) as reader:
        for dtype in (None, "f4"):
            corners = np.sort(rng.integers(0, (31, 41, 51), (2, 8, 3)), axis=0)
            regions = [..., *(tuple(map(slice, a, b)) for a, b in corners.transpose(1, 0, 2))]
            tickets, _ = submit(made, reader, array, regions, dtype)
            for ticket, region in zip(tickets, regions, strict=True):
                np.testing.assert_array_equal(ticket.result(), values[region])
        if kind != "raw" and "raw" not in kind:
            assert (reader.stats(ReaderStats()).host_decode_seconds > 0) == (decode_on == "host")


def test_what_the_device_gives_up_the_host_decodes_or_names(tmp_path, device):
    array = zarr.create_array(
        tmp_path / "a", shape=(32, 16), chunks=(8, 16), dtype="u2", compressors=zarr.codecs.ZstdCodec()
    )
    array[...] = values = random_values("u2", (32, 16), 1)
    (tmp_path / "a/c/1/0").write_bytes(b"no zstd frame at all")
    made = device("device")
    with core_reader(made) as reader:
        tickets, _ = submit(made, reader, array, [slice(0, 8), slice(8, 16), slice(16, 32)])
        with pytest.raises(ChunkError, match=r"chunk \(1, 0\) of .*c/1/0 cannot be decoded \(zstd\)"):
            tickets[1].result()
        np.testing.assert_array_equal(tickets[0].result(), values[:8])
        np.testing.assert_array_equal(tickets[2].result(), values[16:])


def test_pieces_of_large_chunks_and_many_jobs_on_one(tmp_path, device):
    array = zarr.create_array(
        tmp_path / "a", shape=(9, 1100, 1100), chunks=(9, 1100, 1100), dtype="u1", compressors=None
    )
    array[...] = values = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
    made = device(scratch=2**26)
    with core_reader(made) as reader:
        regions = [
            np.s_[:, 5:9, 3:900],
            np.s_[...],
            np.s_[2:3],
            *[np.s_[0:2, k % 50 : k % 50 + 2, 0:3] for k in range(9000)],
        ]
        tickets, _ = submit(made, reader, array, regions)
        for ticket, region in zip(tickets, regions, strict=True):
            np.testing.assert_array_equal(ticket.result(), values[region])


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_each_call_of_the_driver_fails_once(tmp_path, device, driver, kind):
    array = zarr.create_array(tmp_path / "a", shape=(20, 12, 20), chunks=(8, 12, 12), dtype="u2", **KINDS[kind])
    array[...] = values = random_values("u2", array.shape, 1) % 50
    made = device("device")
    regions, number, failed = [..., np.s_[3:9]], 0, 0
    while True:
        number += 1
        with core_reader(made) as reader:
            driver.fake_fail(number)
            tickets, _ = submit(made, reader, array, regions)
            errors = [ticket.exception() for ticket in tickets]
            happened = driver.fake_calls() >= number
            driver.fake_fail(0)
            for ticket, error, region in zip(tickets, errors, regions, strict=True):
                if error is None:
                    np.testing.assert_array_equal(ticket.result(), values[region])
                else:
                    failed += 1
                    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
            (again, *_), _ = submit(made, reader, array, [...])
            np.testing.assert_array_equal(again.result(), values)
        if not happened:
            break
    assert failed > 5
    assert number > 9


def test_threads_that_ask_for_the_same_kernels_get_the_same_records(tmp_path, device, monkeypatch):
    """The core points to them: one that is made a second time in place of the first would be freed in use."""
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(4, 4), dtype="u2", compressors=None)
    layout, made = read_layout(open_source(array)), device()
    real = core_device.load
    monkeypatch.setattr(core_device, "load", lambda spec: time.sleep(0.01) or real(spec))
    conversion = Conversion(layout.dtype, layout.dtype, layout.swapped)
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda _: made.on_device(layout, conversion, 0), range(8)))
    assert len({ctypes.addressof(record.scatter.contents) for record in records}) == 1


def test_the_host_decodes_until_the_kernels_are_compiled(tmp_path, device, monkeypatch):
    """Nobody waits for a compiler, unless the device was asked for; the kernels are used as soon as they are there."""
    array = zarr.create_array(tmp_path / "a", shape=(32, 16), chunks=(8, 16), dtype="u2", **KINDS["zstd"])
    array[...] = values = random_values("u2", (32, 16), 1)
    compiling = Future()
    monkeypatch.setattr(core_device, "prepare_beside", lambda specs: compiling)
    monkeypatch.setattr(core_device, "_LOAD_SECONDS", 0.01)
    made = device()
    monkeypatch.setattr(core_device, "placement_of", functools.partial(_placed_on_device, core_device.placement_of))
    with core_reader(made) as reader:
        for decoded_by_host in (4, 4, 0):
            if not decoded_by_host:
                compiling.set_result(None)
            before = reader.stats(ReaderStats()).chunks_decoded_by_host
            tickets, _ = submit(made, reader, array, [...], None)
            np.testing.assert_array_equal(tickets[0].result(), values)
            assert reader.stats(ReaderStats()).chunks_decoded_by_host - before == decoded_by_host


def test_a_kernel_that_does_not_compile_is_an_error(tmp_path, device, monkeypatch):
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(8, 8), dtype="u2", **KINDS["zstd"])
    compiling = Future()
    compiling.set_exception(RuntimeError("nvrtc: error"))
    monkeypatch.setattr(core_device, "prepare_beside", lambda specs: compiling)
    made = device("device")
    with core_reader(made) as reader, pytest.raises(RuntimeError, match="nvrtc: error"):
        submit(made, reader, array, [...], None)


def _placed_on_device(real, chain, chunk_nbytes, chunks, limits, *capacity):
    return real(chain, chunk_nbytes, chunks, dataclasses.replace(limits, decode_on="device"), *capacity)


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd", "blosc"])
def test_chunks_that_are_larger_than_a_slab(tmp_path, device, kind):
    options = dict(KINDS[kind])
    if "shards" in options:
        options["shards"] = (1024, 1024, 3)
    array = zarr.create_array(tmp_path / "a", shape=(900, 600, 3), chunks=(512, 512, 3), dtype="u2", **options)
    array[...] = values = random_values("u2", array.shape, 1)
    made = device(scratch=2**20)
    assert made.limits.device_nbytes < 512 * 512 * 3 * 2
    regions = [..., np.s_[5:9], np.s_[:, 7:8], *[np.s_[n : n + 300, n : n + 200, n % 3] for n in range(0, 400, 4)]]
    with core_reader(made) as reader:
        tickets, _ = submit(made, reader, array, [normal(one) for one in regions])
        for ticket, region in zip(tickets, regions, strict=True):
            np.testing.assert_array_equal(ticket.result(), values[normal(region)])


def test_long_zstd_chunks_get_memory_of_their_own(tmp_path, device):
    side, before = 1030, Memory.given_back
    array = zarr.create_array(
        tmp_path / "a", shape=(side, side), chunks=(side, side), dtype="u2", compressors=zarr.codecs.ZstdCodec()
    )
    array[...] = values = random_values("u2", array.shape, 1) % 50
    made = device(scratch=2**20, may_exceed=True)
    with core_reader(made) as reader:
        tickets, _ = submit(made, reader, array, [..., np.s_[7:9]])
        for ticket, region in zip(tickets, [..., np.s_[7:9]], strict=True):
            np.testing.assert_array_equal(ticket.result(), values[region])
        assert tickets[0].report.chunks_decoded_by_host == 0
        assert Memory.given_back == before + 1


def normal(region):
    """The region with all axes kept."""
    if not isinstance(region, tuple):
        return region
    return tuple(slice(one, one + 1) if isinstance(one, int) else one for one in region)


def test_times_of_the_device(tmp_path, device):
    array = zarr.create_array(tmp_path / "a", shape=(30, 40, 50), chunks=(8, 12, 12), dtype="u2", **KINDS["zstd"])
    array[...] = random_values("u2", array.shape, 1) % 50
    made = device("device")
    with core_reader(made) as reader:
        (ticket,), _ = submit(made, reader, array, [...])
        ticket.result()
        assert reader.stats(ReaderStats()).times.copies == 0
        (ticket,), _ = submit(made, reader, array, [...], timed=True)
        ticket.result()
        times, report = reader.stats(ReaderStats()).times, ticket.report
        assert 1 <= times.decoded <= 4 * 4 * 5  # slabs: a busy machine fills more of them, each with less
        assert times.decoded_nbytes == 4 * 4 * 5 * 8 * 12 * 12 * 2
        assert 0 < times.copied_nbytes < times.decoded_nbytes
        assert 0 < report.decode_seconds == pytest.approx(times.decode_seconds)
        assert 0 < report.scatter_seconds == pytest.approx(times.scatter_seconds)
        assert report.scratch_bytes == made.limits.held_nbytes
