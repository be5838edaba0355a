"""If this fails, the native core puts wrong voxels on a device: its slabs, copies, launches and tables are wrong."""

import contextlib
import ctypes
import functools
import subprocess
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import decoders
import emulator
import fake_cupy
import numpy as np
import pytest
import zarr
from stores import random_values

from linumpy.core import native
from linumpy.errors import ChunkError
from linumpy.gpu.codecs import decode
from linumpy.gpu.read import core_device
from linumpy.gpu.read.by_core import CoreEngine
from linumpy.gpu.read.limits import limits_for
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import Ticket
from linumpy.io.layout import read_layout
from linumpy.io.source import open_source
from linumpy.plan.region import normalize_region

pytestmark = [
    pytest.mark.skipif(emulator.COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(native.why_no_core() is not None, reason=str(native.why_no_core())),
]


@functools.cache
def fake_driver(folder):
    made = folder / "fake_cuda.so"
    source = Path(__file__).with_name("fake_cuda.cpp")
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", made], check=True)
    loaded = ctypes.CDLL(str(made))
    loaded.fake_register.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loaded.fake_failure.restype = ctypes.c_char_p
    loaded.fake_calls.restype = ctypes.c_long
    loaded.fake_fail.argtypes = [ctypes.c_long]
    return loaded, str(made)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "driver"  # one for all modules: the core loads its driver once
    folder.mkdir(exist_ok=True)
    loaded, path = fake_driver(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LINUMPY_CUDA_DRIVER", path)
        yield loaded
        assert not loaded.fake_failure()


class Emulated:
    """A kernel of the emulator, as ``cupy.RawKernel`` gives its handle."""

    max_dynamic_shared_size_bytes = 2**20
    preferred_shared_memory_carveout = 0

    def __init__(self, driver, function, arguments):
        address = ctypes.cast(function, ctypes.c_void_p).value
        driver.fake_register(address, arguments)
        self.kernel, self._held = types.SimpleNamespace(ptr=address), function


def scatter_by_numpy(spec):
    """The scatter kernel in NumPy, as the stand-in for CuPy has it: its source has instructions of a GPU."""
    defines = dict(spec.defines)
    rank, unit = int(defines["RANK"]), int(defines.get("COPY_UNIT", 0))
    conversion = Conversion(np.dtype("u1"), np.dtype("u1"), False)
    if not unit:
        into = fake_cupy._DTYPES[defines["TARGET"]]
        conversion = Conversion(fake_cupy._DTYPES[defines["SOURCE"]], into, defines["SWAP"] == "true")

    def at(address):
        return np.ctypeslib.as_array((ctypes.c_ubyte * 2**30).from_address(int(address)))

    @ctypes.CFUNCTYPE(
        ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p)
    )
    def run(blocks, threads, shared, seed, values):
        source, headers, rows = (ctypes.c_uint64.from_address(values[n]).value for n in range(3))
        count = blocks[0] // ctypes.c_uint32.from_address(values[3]).value
        table = at(rows)[: 8 * count * (3 + rank)].view(np.int64).reshape(count, 3 + rank)
        words = 2 * rank + 2
        heads = at(headers)[: 8 * words * (int(table[:, 2].max()) + 1)].view(np.int64).reshape(-1, words)
        fake_cupy.copy_boxes(at, source, heads, table, rank, conversion, unit)
        return

    return run


@pytest.fixture
def device(driver, monkeypatch):
    """Gives a core device whose memory is the host's."""
    counts = {}

    def load(spec):
        if spec.name == "scatter":
            return Emulated(driver, scatter_by_numpy(spec), -4)
        return Emulated(driver, decoders.kernel(spec)._function, counts[spec.name])

    real = core_device.plan_launches

    def planned(*arguments):
        found = real(*arguments)
        counts.update({one.kernel: len(one.args) for one in found})
        return found

    monkeypatch.setattr(core_device, "plan_launches", planned)
    monkeypatch.setattr(core_device, "load", load)
    monkeypatch.setattr(core_device, "prepare", lambda specs: None)
    monkeypatch.setattr(decode, "limits_of", lambda _: decoders.BIG)
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Device=lambda number: None,
            driver=types.SimpleNamespace(ctxGetCurrent=lambda: 1),
            runtime=types.SimpleNamespace(free=lambda _: None, memGetInfo=lambda: (2**28, 2**28)),
            alloc=Memory,
            get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
        )
    )

    def make(decode_on=None, scratch=2**26, may_exceed=False):
        limits = limits_for(scratch, decode_on=decode_on, may_exceed=may_exceed)
        return core_device.CoreDevice(cupy, 0, limits)

    return make


class Memory:
    """Device memory, as ``cupy.cuda.alloc`` gives it."""

    given_back = 0

    def __init__(self, nbytes):
        self._memory = np.empty(nbytes + 256, np.uint8)
        self.ptr = self._memory.ctypes.data + -self._memory.ctypes.data % 256

    def __del__(self):
        Memory.given_back += 1


@contextlib.contextmanager
def core_reader(made):
    engine = CoreEngine(4, made)
    yield engine
    engine.close()


def submit(made, reader, array, regions, dtype=None, timed=False):
    layout = read_layout(open_source(array))
    boxes = [normalize_region(one, layout.shape) for one in regions]
    target = np.dtype(dtype or layout.dtype)
    outs = [np.full([b - a for a, b in zip(box.start, box.stop, strict=True)], 77, target) for box in boxes]
    columns = Regions(
        np.zeros(len(boxes), np.int64),
        np.array([box.start for box in boxes], np.int64),
        np.array([box.stop for box in boxes], np.int64),
        np.array([out.strides for out in outs], np.int64),
        np.array([out.ctypes.data for out in outs], np.int64),
    )
    conversion = Conversion(layout.dtype, target, layout.swapped)
    event = types.SimpleNamespace(ptr=0)
    jobs = reader.submit([layout], conversion, columns, outs, event, timed=timed)
    return [Ticket(job, layout, conversion, reader, None) for job in jobs], boxes


KINDS = {
    "raw": {"compressors": None},
    "raw shards": {"compressors": None, "shards": (16, 24, 24)},
    "zstd": {"compressors": zarr.codecs.ZstdCodec(checksum=True)},
    "zstd shards": {"shards": (16, 24, 24), "compressors": zarr.codecs.ZstdCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec(cname="lz4", shuffle="bitshuffle")},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
}


@pytest.mark.parametrize("decode_on", ["device", "host"])
@pytest.mark.parametrize("kind", KINDS)
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
    array = zarr.create_array(tmp_path / "a", shape=(30, 40, 50), chunks=(8, 12, 12), dtype="u2", **KINDS[kind])
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


@pytest.mark.parametrize("kind", ["raw", "raw shards", "zstd", "blosc"])
def test_chunks_that_are_larger_than_a_slab(tmp_path, device, kind):
    options = dict(KINDS[kind])
    if "shards" in options:
        options["shards"] = (1024, 1024, 3)
    array = zarr.create_array(tmp_path / "a", shape=(900, 600, 3), chunks=(512, 512, 3), dtype="u2", **options)
    array[...] = values = random_values("u2", array.shape, 1)
    made = device(scratch=2**20)
    assert made.limits.device_nbytes < 512 * 512 * 3 * 2
    regions = [..., np.s_[5:9], np.s_[:, 7:8], *[np.s_[n : n + 300, n : n + 200, n % 3] for n in range(400)]]
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
        assert times.decoded == 1
        assert times.decoded_nbytes == 4 * 4 * 5 * 8 * 12 * 12 * 2
        assert 0 < times.copied_nbytes < times.decoded_nbytes
        assert 0 < report.decode_seconds == pytest.approx(times.decode_seconds)
        assert 0 < report.scatter_seconds == pytest.approx(times.scatter_seconds)
        assert report.scratch_bytes == made.limits.held_nbytes
