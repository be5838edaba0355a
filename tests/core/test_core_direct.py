"""If this fails, reads by GPUDirect Storage put wrong voxels on a device, or a file that changes is not noticed."""

import contextlib
import ctypes
import errno
import logging
import os
import random
import sys
import threading
import time
import types
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr

from linumpy.core import native
from linumpy.errors import ChunkError
from linumpy.gpu.read.engines import core_device, direct
from linumpy.gpu.read.engines.by_core import CoreEngine
from tests.support import budget
from tests.support.budget import matrix, some
from tests.support.gpu import core_devices
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values

pytestmark, device, driver = needs_stand_in, core_devices.device, core_devices.driver
KINDS, submit = core_devices.KINDS, core_devices.submit


def read_into_memory(record):
    """Do one read as GPUDirect Storage does it: past the core, into the memory of the slab."""
    descriptor = os.open(record.path, os.O_RDONLY)
    try:
        into = (ctypes.c_ubyte * record.nbytes).from_address(record.address)
        return os.preadv(descriptor, [into], record.offset)
    finally:
        os.close(descriptor)


class Storage:
    """What the core calls; notes each read, and how many slabs were read."""

    def __init__(self, read=read_into_memory):
        self.read, self.seen, self.slabs = read, [], 0
        self.callback = native.ReadDirect(self._carry_out)

    def _carry_out(self, records, count):
        self.slabs += 1
        for record in records[:count]:
            assert record.result < 0
            self.seen.append((record.path, record.offset, record.nbytes, record.address))
            record.result = self.read(record)


@contextlib.contextmanager
def direct_reader(made, callback):
    made.direct = types.SimpleNamespace(callback=callback, engine=str, close=lambda: None)
    reader = CoreEngine(4, made)
    made.give_memory(reader._core)
    made._held[0]._memory[:] = 0x5A
    try:
        yield reader
    finally:
        reader.close()


def make(folder, kind="raw", seed=1, shape=(30, 40, 50)):
    array = zarr.create_array(folder, shape=shape, chunks=(8, 12, 12), dtype="u2", fill_value=9, **KINDS[kind])
    values = np.random.default_rng(seed).integers(0, 50, array.shape).astype("u2")
    values[8:16, :12] = 9  # chunks that are not stored
    array[...] = values
    return array, values


def check(tickets, values, regions):
    for ticket, region in zip(tickets, regions, strict=True):
        np.testing.assert_array_equal(ticket.result(), values[region])


def repeated(tickets):
    return [ticket._job.report().reads_repeated for ticket in tickets]


REGIONS = [..., np.s_[3:9], np.s_[5:28, 11:13, 2:49], np.s_[9:11, 0:40, 0:1]]


@pytest.mark.parametrize("decode_on", ["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_read_past_the_host(tmp_path, device, kind, decode_on):
    array, values = make(tmp_path / "a", kind)
    made, storage = device(decode_on), Storage()
    with direct_reader(made, storage.callback) as reader:
        for dtype in (None, "f4"):
            tickets, _ = submit(made, reader, array, REGIONS, dtype, timed=True)
            check(tickets, values, REGIONS)
            assert repeated(tickets) == [0] * len(REGIONS)
        is_direct = "raw" in kind or decode_on == "device"
        assert bool(storage.seen) == is_direct
        assert (reader._core.stats().copied_nbytes == 0) == is_direct
        if is_direct:
            assert sum(nbytes for _, _, nbytes, _ in storage.seen) >= sum(
                ticket.report.bytes_read for ticket in tickets[:1]
            )


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd", "blosc"])
def test_chunks_that_are_larger_than_a_slab(tmp_path, device, kind):
    options = dict(KINDS[kind])
    if "shards" in options:
        options["shards"] = (1024, 1024, 3)
    array = zarr.create_array(tmp_path / "a", shape=(900, 600, 3), chunks=(512, 512, 3), dtype="u2", **options)
    array[...] = values = random_values("u2", array.shape, 1)
    made, storage = device(scratch=2**20), Storage()
    regions = [..., np.s_[5:9], np.s_[:, 7:8], *[np.s_[n : n + 300, n : n + 200, 1:2] for n in range(100)]]
    with direct_reader(made, storage.callback) as reader:
        tickets, _ = submit(made, reader, array, regions)
        check(tickets, values, regions)
    assert bool(storage.seen) == ("raw" in kind)


def test_pieces_and_long_reads_lie_as_in_their_files(tmp_path, device):
    """By whole pages; raw elements still where the kernels can read them."""
    made, storage = device("device"), Storage()
    with direct_reader(made, storage.callback) as reader:
        for name, options in {
            "pieces": {"chunks": (40, 512, 512), "compressors": None},
            "whole": {"chunks": (2, 256, 512), "compressors": None},
            "zstd": {"chunks": (5, 256, 512), "shards": (40, 512, 512), "compressors": zarr.codecs.ZstdCodec()},
        }.items():
            array = zarr.create_array(tmp_path / name, shape=(40, 512, 512), dtype="u1", **options)
            array[...] = values = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
            regions = [..., np.s_[1:39], np.s_[:, 3:500, 7:300]]
            tickets, _ = submit(made, reader, array, regions)
            check(tickets, values, regions)
    long = [(offset, address) for _, offset, nbytes, address in storage.seen if nbytes >= 2**16 and offset % 16 == 0]
    assert len(long) > 40
    assert {(address - offset) % 4096 for offset, address in long} == {0}
    assert len({offset % 4096 for offset, _ in long}) > 1


def test_raw_elements_lie_where_kernels_can_read_them(tmp_path, device):
    """Behind an index of 36 bytes no element of 8 lies in memory as in its file."""
    codecs = zarr.codecs.ShardingCodec(chunk_shape=(32, 512), codecs=[zarr.codecs.BytesCodec()], index_location="start")
    array = zarr.create_array(
        tmp_path / "a", shape=(64, 512), chunks=(64, 512), dtype="f8", serializer=codecs, compressors=None
    )
    array[...] = values = np.random.default_rng(0).random(array.shape)
    made, storage = device(), Storage()
    with direct_reader(made, storage.callback) as reader:
        tickets, _ = submit(made, reader, array, [..., np.s_[3:50, 7:300]])
        check(tickets, values, [..., np.s_[3:50, 7:300]])
    assert {offset % 8 for _, offset, _, _ in storage.seen} == {4}


def test_bytes_of_both_ways_share_a_slab(tmp_path, device):
    """Raw chunks that are read directly, and others that the host decodes."""
    raw, values = make(tmp_path / "raw")
    packed, others = make(tmp_path / "gzip", "gzip", seed=2)
    made, gate = device("host"), threading.Event()

    def late(record):
        gate.wait(10)
        return read_into_memory(record)

    storage = Storage(late)
    with direct_reader(made, storage.callback) as reader:
        first, _ = submit(made, reader, raw, REGIONS)
        second, _ = submit(made, reader, packed, REGIONS)
        third, _ = submit(made, reader, raw, REGIONS)
        gate.set()
        for tickets, expected in ((first, values), (second, others), (third, values)):
            check(tickets, expected, REGIONS)


def failing(seed):
    """Reads of which many fail, in each of three ways."""
    choice = random.Random(seed)

    def read(record):
        way = choice.randrange(6)
        if way == 0:
            ctypes.memset(record.address, 0x33, record.nbytes)
            return -errno.EIO
        if way == 1:
            return min(record.nbytes - 1, read_into_memory(record))
        if way == 2:
            raise OSError(errno.EIO, "a driver's error")
        return read_into_memory(record)

    return read


class Tolerant(Storage):
    """Notes no result where a read raises."""

    def _carry_out(self, records, count):
        def read(record):
            with contextlib.suppress(OSError):
                return self.again(record)
            return record.result

        self.again, self.read = getattr(self, "again", self.read), read
        super()._carry_out(records, count)


@pytest.mark.parametrize(
    "kind", some(["raw", "raw shards", "zstd", "zstd shards", "blosc"], lambda kind: "shards" in kind)
)
def test_reads_that_fail_are_repeated_through_the_host(tmp_path, device, kind):
    array, values = make(tmp_path / "a", kind)
    made, count = device("device"), 0
    for seed in range(4):
        with direct_reader(made, Tolerant(failing(seed)).callback) as reader:
            tickets, _ = submit(made, reader, array, REGIONS, timed=True)
            check(tickets, values, REGIONS)
            count += sum(repeated(tickets))
            assert (reader._core.stats().copied_nbytes > 0) == (sum(repeated(tickets)) > 0)
    assert count > 8


def test_a_function_that_raises_is_one_whose_reads_all_failed(tmp_path, device, monkeypatch):
    array, values = make(tmp_path / "a")
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: raised.append(one.exc_value))

    @native.ReadDirect
    def raising(records, count):
        raise KeyError("no result at all")

    made = device()
    with direct_reader(made, raising) as reader:
        tickets, _ = submit(made, reader, array, REGIONS)
        check(tickets, values, REGIONS)
        assert min(repeated(tickets)[:3]) > 0
    assert {type(one) for one in raised} == {KeyError}


def rename(path, content):
    path.with_name("new").write_bytes(content)
    path.with_name("new").replace(path)


def rewrite(path, content):
    path.write_bytes(content)


def shorten(path, content):
    os.truncate(path, 9)


def remove(path, content):
    path.unlink()


CHANGES = {
    rename: "was replaced while it was being read",
    rewrite: "was replaced while it was being read",
    shorten: r"was replaced while it was being read \(it had \d+ bytes, and has 9 now\)",
    remove: "cannot be opened: No such file or directory",
}


@pytest.mark.parametrize(("change", "kind", "fails"), matrix(CHANGES, ["raw", "zstd", "raw shards"], [False, True]))
def test_a_file_that_changes_before_it_is_read(tmp_path, device, kind, change, fails):
    words = CHANGES[change]
    array, values = make(tmp_path / "a", kind)
    path = tmp_path / "a/c/0/1/1"
    make(tmp_path / "b", kind, seed=7)
    content = (tmp_path / "b/c/0/1/1").read_bytes()

    def read(record):
        if record.path == os.fsencode(path) and path not in changed:
            changed.append(path)
            change(path, content)
        if fails and record.path == os.fsencode(path):
            return -errno.EIO
        try:
            return read_into_memory(record)
        except OSError as error:
            return -error.errno

    changed: list[Path] = []
    made = device("device")
    far = np.s_[24:30]
    with direct_reader(made, Storage(read).callback) as reader:
        tickets, _ = submit(made, reader, array, [np.s_[0:8], far])
        with pytest.raises(ChunkError, match=rf"(chunk|shard) \(0, 1, 1\) of .*c/0/1/1 {words}"):
            tickets[0].result()
        np.testing.assert_array_equal(tickets[1].result(), values[far])
        assert changed
        if change in (rename, rewrite):  # the next job reads the new file
            (again,), _ = submit(made, reader, array, [...])
            np.testing.assert_array_equal(again.result(), array[...])


def test_the_host_decodes_what_the_device_gives_up_or_says_why_not(tmp_path, device):
    array = zarr.create_array(
        tmp_path / "a", shape=(32, 16), chunks=(8, 16), dtype="u2", compressors=zarr.codecs.ZstdCodec()
    )
    array[...] = values = random_values("u2", (32, 16), 1)
    (tmp_path / "a/c/1/0").write_bytes(b"no zstd frame at all")
    # Of two frames, which the device leaves to the host: the second one holds nothing.
    content = (tmp_path / "a/c/2/0").read_bytes()
    (tmp_path / "a/c/2/0").write_bytes(content + b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip")
    made, storage = device("device"), Storage()
    with direct_reader(made, storage.callback) as reader:
        tickets, _ = submit(made, reader, array, [slice(0, 8), slice(8, 16), slice(16, 32)])
        with pytest.raises(ChunkError, match=r"chunk \(1, 0\) of .*c/1/0 cannot be decoded \(zstd\)"):
            tickets[1].result()
        np.testing.assert_array_equal(tickets[0].result(), values[:8])
        np.testing.assert_array_equal(tickets[2].result(), values[16:])
    assert len(storage.seen) == 4


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd"])
def test_only_chunks_that_were_read_are_kept(tmp_path, device, kind):
    array, values = make(tmp_path / "a", kind)
    broken = [True]

    def read(record):
        if record.path.endswith(b"a/c/0/1/1") and broken[0]:
            ctypes.memset(record.address, 0x11, record.nbytes)
            os.rename(record.path, record.path + b".away")
            broken[0] = False
            return record.nbytes
        try:
            return read_into_memory(record)
        except FileNotFoundError:  # it is away
            return -errno.ENOENT

    made = device("device", cache_bytes=2**22)
    with direct_reader(made, Storage(read).callback) as reader:
        tickets, _ = submit(made, reader, array, REGIONS)
        assert isinstance(tickets[0].exception(), ChunkError)
        (tmp_path / "a/c/0/1/1.away").rename(tmp_path / "a/c/0/1/1")  # of the same version as before
        for _ in range(3):
            tickets, _ = submit(made, reader, array, REGIONS)
            check(tickets, values, REGIONS)
        assert reader._core.stats().kept_hits > 0


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_chunks_of_cancelled_jobs_are_not_kept(tmp_path, device, kind):
    array, values = make(tmp_path / "a", kind)
    slow, _ = make(tmp_path / "first", kind, seed=2)
    gate, begun = threading.Event(), threading.Event()

    def read(record):
        if b"first" in record.path:
            begun.set()
            assert gate.wait(60)
        return read_into_memory(record)

    made = device("device", cache_bytes=2**22, scratch=2**20)
    with direct_reader(made, Storage(read).callback) as reader:
        # Slabs of another array take all device memory, so that what comes behind them is sealed and not begun.
        waiting, _ = submit(made, reader, slow, [...])
        assert begun.wait(60)
        tickets, _ = submit(made, reader, array, REGIONS)
        time.sleep(0.3)
        for ticket in tickets:
            ticket.cancel()
        gate.set()
        waiting[0].result()
        for ticket, region in zip(tickets, REGIONS, strict=True):
            if not isinstance(ticket.exception(), CancelledError):  # its slab was begun
                np.testing.assert_array_equal(ticket.result(), values[region])
        for _ in range(2):
            tickets, _ = submit(made, reader, array, REGIONS)
            check(tickets, values, REGIONS)


def test_slabs_are_read_at_the_same_time(tmp_path, device):
    """A slab that takes long to be read keeps no other from being started."""
    slow, values = make(tmp_path / "slow", "zstd")
    quick, others = make(tmp_path / "quick", "raw", seed=2)
    made, gate, begun = device("device"), threading.Event(), threading.Event()

    def read(record):
        if b"slow" in record.path:
            begun.set()
            assert gate.wait(30)
        return read_into_memory(record)

    with direct_reader(made, Storage(read).callback) as reader:
        one = [np.s_[16:24, 0:12, 0:12]]  # of one chunk: more would be in several slabs, and take all memory
        waiting, _ = submit(made, reader, slow, one)
        assert begun.wait(30)
        tickets, _ = submit(made, reader, quick, REGIONS)
        check(tickets, others, REGIONS)
        assert not waiting[0].done()
        gate.set()
        check(waiting, values, one)


def test_slabs_that_wait_for_memory_are_not_read_by_the_thread_that_settles_jobs(tmp_path, device):
    array = zarr.create_array(tmp_path / "a", shape=(64, 256, 256), chunks=(1, 256, 256), dtype="u1", compressors=None)
    array[...] = values = np.random.default_rng(0).integers(0, 255, array.shape, np.uint8)
    made, gate, calls = device(scratch=2**20), threading.Event(), []

    def carry_out(records, count):
        calls.append(count)
        assert len(calls) <= core_device.SLOTS or gate.wait(30)
        for record in records[:count]:
            record.result = read_into_memory(record)

    callback = native.ReadDirect(carry_out)
    with direct_reader(made, callback) as reader:
        tickets, _ = submit(made, reader, array, [np.s_[n : n + 1] for n in range(64)])
        for _ in range(1000):
            if len(calls) > core_device.SLOTS and sum(one.done() for one in tickets) == sum(calls[: core_device.SLOTS]):
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"{sum(one.done() for one in tickets)} jobs are over, of slabs of {calls}")
        gate.set()
        check(tickets, values, [np.s_[n : n + 1] for n in range(64)])


def test_jobs_are_cancelled_and_the_reader_closed_while_it_reads(tmp_path, device):
    array, values = make(tmp_path / "a", "zstd")
    made, gate, begun = device("device"), threading.Event(), threading.Event()

    def read(record):
        begun.set()
        assert gate.wait(30)
        return read_into_memory(record)

    with direct_reader(made, Storage(read).callback) as reader, ThreadPoolExecutor(1) as pool:
        tickets, _ = submit(made, reader, array, REGIONS)
        assert begun.wait(30)
        assert tickets[0].cancel()
        closing = pool.submit(reader.close)
        assert not closing.done()
        assert not tickets[0].done()  # its output may still be written to
        gate.set()
        closing.result(timeout=30)
        for ticket, region in zip(tickets, REGIONS, strict=True):
            if isinstance(ticket.exception(), CancelledError):
                continue
            np.testing.assert_array_equal(ticket.result(), values[region])
        assert isinstance(tickets[0].exception(), CancelledError)


@pytest.mark.parametrize("kind", ["raw", "zstd"])
def test_each_call_of_the_driver_fails_once(tmp_path, device, driver, kind):
    array, values = make(tmp_path / "a", kind, shape=(20, 12, 24))
    if kind == "zstd":  # what the device gives up is copied down
        (tmp_path / "a/c/0/0/1").write_bytes(b"no zstd frame at all")
    sound, made, failed, broken = np.s_[8:20], device("device"), 0, 0
    for number in range(1, 1000, 1 if budget.SLOW or kind == "raw" else 3):
        with direct_reader(made, Tolerant(failing(number)).callback) as reader:
            driver.fake_fail(number)
            tickets, _ = submit(made, reader, array, [sound, ...])
            errors = [ticket.exception() for ticket in tickets]
            happened = driver.fake_calls() >= number
            driver.fake_fail(0)
            for ticket, error, region in zip(tickets, errors, [sound, ...], strict=True):
                if error is None:
                    np.testing.assert_array_equal(ticket.result(), values[region])
                elif region is ... and isinstance(error, ChunkError):
                    broken += 1
                    assert "c/0/0/1 cannot be decoded" in str(error)
                else:
                    failed += 1
                    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
            assert kind == "raw" or errors[1] is not None
            (again,), _ = submit(made, reader, array, [sound])
            np.testing.assert_array_equal(again.result(), values[sound])
        if not happened:
            break
    assert failed > 5
    assert (broken > 0) == (kind == "zstd")


@pytest.mark.parametrize("fault", [0, 1, 2])  # open, fstat, pread
def test_each_call_of_the_system_fails_once(tmp_path, device, fault):
    array, values = make(tmp_path / "a", "raw shards")
    made, failed = device(), 0
    for number in range(1, 30):
        with direct_reader(made, Tolerant(failing(number)).callback) as reader:
            reader._core._library.quick.lc_fail_next(fault, number, errno.EIO)
            tickets, _ = submit(made, reader, array, REGIONS)
            errors = [ticket.exception() for ticket in tickets]
            reader._core._library.quick.lc_fail_next(fault, 0, 0)
            for ticket, error, region in zip(tickets, errors, REGIONS, strict=True):
                if error is None:
                    np.testing.assert_array_equal(ticket.result(), values[region])
                else:
                    failed += 1
                    assert "Input/output error" in str(error)
    assert failed > 5


# linumpy.gpu.read.engines.direct: what the core calls, on kvikio


class File:
    """What is needed of kvikio's ``CuFile``; reads of some files fail."""

    pool = ThreadPoolExecutor(2)
    open_files, most_open = 0, 0
    fails = staticmethod(lambda number: "")
    number = 0

    def __init__(self, path):
        File.number += 1
        self._how = self.fails(File.number)
        if self._how == "open":
            raise RuntimeError("cuFile error: 5011\nnvidia-fs driver error")
        self._descriptor = os.open(path, os.O_RDONLY)
        File.open_files += 1
        File.most_open = max(File.most_open, File.open_files)

    def pread(self, buffer, size, offset, task_size):
        assert len(buffer) == size
        assert task_size is None
        if self._how == "start":
            raise OSError(errno.EIO, "Input/output error")
        future = self.pool.submit(os.preadv, self._descriptor, [memoryview(buffer)], offset)
        future.get = future.result if self._how != "get" else lambda: self._refuse(future)
        return future

    def _refuse(self, future):
        future.result()
        raise RuntimeError("cuFile error: 5011\nnvidia-fs driver error")

    def close(self):
        os.close(self._descriptor)
        File.open_files -= 1


def stand_in_cupy(entered):
    class Device:
        def __init__(self, number):
            self.number = number

        def __enter__(self):
            entered.append(self.number)

        def __exit__(self, *_):
            pass

    def ndarray(shape, dtype, pointer):
        return np.ctypeslib.as_array((ctypes.c_ubyte * shape[0]).from_address(pointer)).view(dtype)

    cuda = types.SimpleNamespace(
        Device=Device,
        UnownedMemory=lambda address, nbytes, owner, number: address,
        MemoryPointer=lambda memory, offset: memory + offset,
    )
    return types.SimpleNamespace(cuda=cuda, ndarray=ndarray)


@pytest.fixture
def kvikio(monkeypatch):
    """Gives what makes reads of a device by a stand-in for kvikio, and what its settings were set to."""
    scopes, entered = [], []

    @contextlib.contextmanager
    def settings():
        scopes.append("set")
        yield
        scopes.append("put back")

    monkeypatch.setattr(direct, "transfer_settings", settings)
    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=File))
    monkeypatch.setattr(File, "number", 0)
    monkeypatch.setattr(File, "most_open", 0)

    def made(fails=lambda number: ""):
        monkeypatch.setattr(File, "fails", staticmethod(fails))
        return direct.DirectReads(stand_in_cupy(entered), 3)

    yield types.SimpleNamespace(reads=made, scopes=scopes, entered=entered)
    assert File.open_files == 0


@pytest.mark.parametrize("kind", ["raw", "zstd", "zstd shards"])
def test_kvikio_reads_slabs(tmp_path, device, kvikio, caplog, kind):
    array, values = make(tmp_path / "a", kind)
    made, reads = device("device"), kvikio.reads()
    with direct_reader(made, reads.callback) as reader:
        for _ in range(3):
            tickets, _ = submit(made, reader, array, REGIONS)
            check(tickets, values, REGIONS)
            assert repeated(tickets) == [0] * len(REGIONS)
    assert not caplog.records
    assert set(kvikio.entered) == {3}
    assert 0 < File.most_open <= 4 * direct._OPEN_FILES
    assert reads.engine(0) == "kvikio CuFile.pread into device memory"
    assert kvikio.scopes == ["set"]
    reads.close()
    assert kvikio.scopes == ["set", "put back"]
    del reads
    assert kvikio.scopes == ["set", "put back"]


def test_settings_are_put_back_with_the_last_reference(tmp_path, device, kvikio):
    array, _ = make(tmp_path / "a")
    made, reads = device(), kvikio.reads()
    with direct_reader(made, reads.callback) as reader:
        submit(made, reader, array, [...])[0][0].result()
    del reads
    assert kvikio.scopes == ["set", "put back"]


@pytest.mark.parametrize(("how", "every"), matrix(["open", "start", "get"], [1, 3]))
def test_what_kvikio_fails_to_read_is_told_once(tmp_path, device, kvikio, caplog, how, every):
    array, values = make(tmp_path / "a", "zstd")
    made = device("device")
    reads = kvikio.reads(lambda number: how if number % every == 0 else "")
    with direct_reader(made, reads.callback) as reader:
        for _ in range(3):
            tickets, _ = submit(made, reader, array, REGIONS)
            check(tickets, values, REGIONS)
            assert repeated(tickets)[0] > 0
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "kvikio CuFile.pread into device memory failed" in said
    assert "which go through host memory without it" in said
    error = "OSError: " if how == "start" else "RuntimeError: cuFile error: 5011 nvidia-fs"
    assert f"failed reads through host memory: {error}" in reads.engine(1)
    assert reads.engine(0) == direct.ENGINE


def test_a_fault_of_the_file_is_not_told_as_one_of_kvikio(tmp_path, device, kvikio, caplog):
    array, _ = make(tmp_path / "a")
    made = device()

    def gone(number):
        (tmp_path / "a/c/0/0/0").unlink(missing_ok=True)
        return ""

    with direct_reader(made, kvikio.reads(gone).callback) as reader:
        (ticket,), _ = submit(made, reader, array, [np.s_[:8, :12, :12]])
        with pytest.raises(ChunkError, match=r"c/0/0/0 cannot be opened: No such file"):
            ticket.result()
    assert not caplog.records


def test_settings_that_cannot_be_had_leave_all_to_the_host(tmp_path, device, kvikio, monkeypatch, caplog):
    array, values = make(tmp_path / "a")

    def broken():
        raise RuntimeError("no defaults")

    monkeypatch.setattr(direct, "transfer_settings", broken)
    made, reads = device(), kvikio.reads()
    with direct_reader(made, reads.callback) as reader:
        tickets, _ = submit(made, reader, array, REGIONS)
        check(tickets, values, REGIONS)
        assert repeated(tickets)[0] > 0
    assert "RuntimeError: no defaults" in reads.engine(1)
