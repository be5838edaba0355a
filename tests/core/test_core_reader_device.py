"""If this fails, a reader on a device hangs, leaks or writes to memory of others when calls of the driver fail."""

import ctypes
import gc
import time

import numpy as np
import pytest
import zarr

from linumpy.gpu.read.reader import Reader
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu import reference, stand_in
from tests.support.gpu.core_devices import KINDS
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import same

pytestmark = needs_stand_in

SHAPE = (30, 40, 50)


def make(folder, kind, shape=SHAPE):
    """An array of which some chunks are not stored."""
    array = zarr.create_array(folder, shape=shape, chunks=(8, 12, 12), dtype="u2", fill_value=9, **KINDS[kind])
    values = np.random.default_rng(3).integers(0, 50, shape).astype("u2")
    values[8:16] = 9
    array[...] = values
    return array, values


@pytest.mark.parametrize(("kind", "decode_on"), matrix(["zstd shards", "raw"], ["device", "host"]))
def test_each_call_of_the_driver_fails_once(tmp_path, kind, decode_on):
    """An error of the jobs; then the same reader reads right, and in the end nothing of it is left."""
    array, values = make(tmp_path / "a", kind, (20, 12, 20))
    regions, number, failed = [..., np.s_[3:9]], 0, 0
    driver = stand_in.driver()
    while True:
        number += 1 if budget.SLOW else 3  # the slow run takes each call
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


def test_a_thread_that_waits_keeps_its_context(tmp_path):
    """It carries out small jobs itself; which device is current in it is the caller's affair."""
    array, values = make(tmp_path / "a", "zstd")
    library, now = stand_in.driver().library, ctypes.c_void_p()
    with reference.fake_device(3), Reader(0, 2**22) as reader:
        library.cuCtxSetCurrent(ctypes.c_void_p(7))
        try:
            for n in range(60):
                few = np.s_[n % 9 : n % 9 + 8, 3:20, 5:28]
                assert same(reader.submit(array, few).result().get(), values[few])
                library.cuCtxGetCurrent(ctypes.byref(now))
                assert now.value == 7
        finally:
            library.cuCtxSetCurrent(None)


def test_small_jobs_that_nobody_waits_for_are_read(tmp_path):
    array, values = make(tmp_path / "a", "raw")
    with reference.fake_device(4), Reader(0, 2**22) as reader:
        for n in range(30):
            few = np.s_[n % 9 : n % 9 + 8, 3:20, 5:28]
            assert same(reader.submit(array, few).result().get(), values[few])  # from now on a thread looks for more
            ticket, end = reader.submit(array, few), time.monotonic() + 20
            while not ticket.done() and time.monotonic() < end:
                time.sleep(1e-3)
            assert ticket.done()
            assert same(ticket.result().get(), values[few])


def test_closing_gives_everything_back(tmp_path):
    array, values = make(tmp_path / "a", "zstd")
    with reference.fake_device() as device:
        reader = Reader(0, 2**22)
        out = device.empty(SHAPE, "u2")
        before = device.given_out()
        assert same(reader.submit(array, out=out).result().get(), values)
        assert device.given_out() - before == reader.stats().device_bytes > 2**20
        assert device.driver.alive() > 0
        reader.close()
        assert device.driver.alive() == 0
        assert device.given_out() == before
        assert reader.stats().device_bytes == 0
