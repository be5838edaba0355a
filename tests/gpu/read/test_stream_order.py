"""What runs on several streams, under every order that its events allow, against zarr-python.

The production slots, reader and writer run on :mod:`fake_cupy`, whose streams run late or early by chance.
"""

import dataclasses
import functools
import gc
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fake_cupy
import numcodecs
import numpy as np
import pytest
import reference
import zarr
from decoders import needs_compiler, start
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import cases, random_values, same, write

from linumpy import device as devices
from linumpy.errors import ChunkError
from linumpy.geometry import focal
from linumpy.gpu import kernels, kvikio_zarr, read_zarr_to_gpu, tables
from linumpy.gpu.oct import surface as interface
from linumpy.gpu.read import encoded_staging as encoded_slots
from linumpy.gpu.read import engines, scatter
from linumpy.gpu.read import locate as stored
from linumpy.gpu.read import slab_loop as reader
from linumpy.write.writer import OmeZarrWriter

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32 - 1)


@contextmanager
def fake_device(seed):
    """Put a device in CuPy's place."""
    device = fake_cupy.Device(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", device.cupy)
        patch.setitem(sys.modules, "cupyx", device.cupyx)
        patch.setattr(devices, "_cuda_started", False)
        patch.setattr(scatter, "load", device.load)
        patch.setattr(encoded_slots.decode, "start", lambda launches: [queue(device, one) for one in launches])
        patch.setattr(kvikio_zarr, "choose_engine", lambda *, direct, **_: _engine(device, direct=direct))
        yield device
        device.rest()
        assert not device.faults


def queue(device, one):
    device.stream.add(lambda: start([one]))


def _engine(device, *, direct):
    return reference.PreadEngine(lambda path: DeviceFile(path, device)) if direct else engines.PosixEngine(2)


class DeviceFile(reference.PreadFile):
    """What GPUDirect Storage does: bytes come into device memory at some time before the future is complete."""

    def __init__(self, path, device):
        super().__init__(path)
        self._device = device

    def pread(self, buffer, size, offset, task_size):
        future = super().pread(buffer.host, size, offset, task_size)
        if self._device.random.random() < 0.5:
            future.result()
        return future


def read(array, region, seed, **options):
    """Read by the production reader on a device."""
    with fake_device(seed) as device:
        return read_on(device, array, region, **options)


def read_on(device, array, region, **options):
    """Read into memory that earlier work still uses, and use it as soon as the reader returns."""
    job = reference.make_job(array, region, **options)
    with device.cupy.cuda.Stream(non_blocking=True):
        out = device.empty(job.plan.shape, job.request.dtype)
        out.fill(3)
        before = device.empty(out.shape, out.dtype)
        before[...] = out
        device.empty(2 * job.scratch_bytes + 2**16, np.uint8)  # let go at once: buffers are made where it was
        if out.size:
            kvikio_zarr._carry_out(job, out, timed=False)
        after = device.empty(out.shape, out.dtype)
        after[...] = out
        got = after.get()
        assert (before.get() == np.full((), 3, out.dtype)).all()
    if job.way is not None and job.way.slot is not None:
        assert not job.counts.by_host, "the host mended what the device was given too early"
    return got


@settings(inside_a_test, max_examples=40)
@given(
    case=cases(max_elements=400), straight=st.booleans(), missing=st.sampled_from([0, 2, 3]), seed=SEEDS,
    slab=st.sampled_from([None, 8192]), direct=st.booleans(),
)  # fmt: skip
def test_raw_chunks(case, straight, missing, seed, slab, direct):
    case = dataclasses.replace(case, missing=missing)
    if straight:  # chunks that are contiguous in the result
        shape, axes = case.shape, tuple(range(len(case.shape)))
        whole = {"chunks": (max(1, shape[0] // 4), *shape[1:]), "shards": None, "order": axes, "big_endian": False}
        case = dataclasses.replace(case, **whole, region=(Ellipsis,))
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a")
        for number in range(3):
            got = read(array, case.region, seed + number, slab_nbytes=slab, direct=direct)
            assert same(got, array[case.region])


#: Shape, chunk, dtype and fill value: arrays whose last chunk is missing and whose chunks need no scatter.
CASES = [(111, 85, "u1", 1), (247, 182, "u1", 77), (217, 142, "<u8", 1), (65, 40, "<f8", 3.5), (59, 30, "b1", True)]


def missing_last(folder, n, chunk, dtype, fill, **options):
    """An array whose last chunk was never written."""
    options = {"compressors": None, "filters": None, "zarr_format": 2} | options
    array = zarr.create_array(folder, shape=(n,), chunks=(chunk,), dtype=dtype, fill_value=fill, **options)
    whole = (n - 1) // chunk * chunk
    array[:whole] = random_values(dtype, (whole,), 1)
    return array


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("direct", [False, True])
def test_a_missing_last_chunk(tmp_path, case, direct):
    array = missing_last(tmp_path / "a", *case)
    assert not os.path.exists(tmp_path / "a/1")
    for seed in range(30):
        assert same(read(array, ..., seed, direct=direct), array[...]), seed


@pytest.mark.parametrize("region", [..., (..., slice(1, None))], ids=["straight", "by table"])
@pytest.mark.parametrize("direct", [False, True])
def test_many_slabs_through_a_few_buffers(tmp_path, region, direct):
    array = zarr.create_array(
        tmp_path / "a", shape=(60, 700), chunks=(2, 700), dtype="u1", compressors=None, fill_value=3
    )
    for row in range(0, 60, 2):
        if row % 14 != 12:
            array[row : row + 2] = random_values("u1", (2, 700), row)
    for seed in range(15):
        assert same(read(array, region, seed, slab_nbytes=8192, direct=direct), array[region]), seed


def encoded(folder):
    """An array of which some chunks have no file."""
    options = {"zarr_format": 2, "compressors": numcodecs.LZ4(), "fill_value": 9}
    array = zarr.create_array(folder, shape=(40, 400), chunks=(1, 400), dtype="u2", **options)
    for row in range(40):
        if row not in (3, 11, 19, 39):
            array[row] = random_values("u2", (400,), row)
    return array


@needs_compiler
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_encoded_chunks(tmp_path, decode_on, direct):
    array = encoded(tmp_path / "a")
    for seed in range(15):
        for region in (..., (slice(1, 4), slice(5, None))):
            options = {"decode_on": decode_on, "direct": direct, "slab_nbytes": [None, 2**14][seed % 2]}
            assert same(read(array, region, seed, **options), array[region]), seed


@needs_compiler
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", ["raw", "straight", "device", "host"])
def test_fill_values_come_after_what_was_read(tmp_path, monkeypatch, kind, direct):
    """Even where chunks are taken to be both stored and missing."""
    array = encoded(tmp_path / "a") if kind in ("device", "host") else raw(tmp_path / "a", chunks=(2, 60))
    region = (..., slice(1, None)) if kind == "raw" else ...
    real = stored.locate
    monkeypatch.setattr(reader, "locate", lambda job: ((spans, np.arange(len(job.pieces))) for spans, _ in real(job)))
    options = {"decode_on": kind} if kind in ("device", "host") else {}
    for seed in range(20):
        got = read(array, region, seed, direct=direct, **options)
        assert (got == 9).all(), seed


def raw(folder, chunks):
    array = zarr.create_array(folder, shape=(8, 60), chunks=chunks, dtype="u2", compressors=None, fill_value=9)
    array[...] = random_values("u2", (8, 60), 1)
    return array


def read_in_vain(array, region, seed, **options):
    """Read what cannot be read, and let all of it go before the device has come to rest."""
    message = None
    with fake_device(seed) as device:
        try:
            read_on(device, array, region, **options)
        except (ChunkError, MemoryError) as error:
            message = str(error)
        gc.collect()  # an error that came through a future refers to itself
        assert not device._pinned
    return message


@needs_compiler
@pytest.mark.parametrize("kind", ["raw", "straight", "direct", "device", "host"])
@pytest.mark.parametrize("fault", ["file", "kernel"])
def test_nothing_is_under_way_after_an_error(tmp_path, monkeypatch, kind, fault):
    """No copy reads pinned memory that was given back: CuPy gives it to the next who asks, at once."""
    options = {"decode_on": kind} if kind in ("device", "host") else {"direct": kind == "direct", "slab_nbytes": 8192}
    array = encoded(tmp_path / "a") if kind in ("device", "host") else raw(tmp_path / "a", chunks=(2, 60))
    if fault == "file":
        os.truncate(tmp_path / "a" / ("4.0" if "decode_on" in options else "c/3/0"), 3)
    elif kind == "straight":
        (tmp_path / "a/c/3/0").unlink()  # so that there is a kernel to start: that of the fill value
    region = ... if kind == "straight" else (..., slice(1, None))
    gc.freeze()  # a collection is fast then
    try:
        for seed in range(20):
            if fault == "kernel":
                monkeypatch.setattr(fake_cupy.Device, "load", fails_at(seed % 3 if kind == "host" else 0))
            assert read_in_vain(array, region, seed, **options)
    finally:
        gc.unfreeze()


def fails_at(number, real=fake_cupy.Device.load):
    """Fail to load a kernel, as a device without memory does."""
    calls = iter(range(10**6))

    def load(device, spec):
        if next(calls) >= number:
            raise MemoryError("no memory for a kernel")
        return real(device, spec)

    return load


@pytest.mark.parametrize("threads", [False, True])
def test_parts_of_a_chunk_on_several_streams(tmp_path, threads):
    """Chunks that regions have cut wait on the device; each part may come on a stream of its own."""
    values = random_values("u2", (12, 30), 4)
    parts = [slice(0, 3), slice(3, 5), slice(5, 9), slice(9, 12)]
    for seed in range(30):
        options = {"chunks": (5, 30), "buffer_bytes": 2**20, "overwrite": True, "axes": "yx"}
        with fake_device(seed) as device, OmeZarrWriter(tmp_path / "a", (12, 30), "u2", (1, 1), **options) as writer:

            def part(rows, device=device, writer=writer):
                with device.cupy.cuda.Stream(non_blocking=True):
                    block = device.full((rows.stop - rows.start, 30), 7, "u2")
                    block[...] = values[rows]
                    writer.write(rows, block)

            if threads:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(part, parts))
            else:
                for rows in parts:
                    part(rows)
        assert np.array_equal(zarr.open_array(tmp_path / "a/0")[...], values), seed


KEPT = {
    "interface": lambda: interface._uploaded_weights(2.0, 1, kernels.current_queue()),
    "resize": functools.cache(lambda: tables.upload([np.arange(50.0)], kernels.current_queue())),
    "focal": lambda: focal._shifts((4, 5), (3.0, 0.0, 1.0), True, kernels.current_queue()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_on_the_device_is_there_for_a_new_stream_of_the_same_number(name):
    """CUDA gives the number of a stream that is gone to a new one, which has not waited for its uploads."""
    for seed in range(20):
        caches = (interface._uploaded_weights, focal._shifts, KEPT["resize"])
        [cache.cache_clear() for cache in caches]
        with fake_device(seed) as device:
            first, second = (device.cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            second.ptr = first.ptr
            with first:
                kept = KEPT[name]()
            with second:
                assert KEPT[name]() is kept
                value = kept.get()
                array = value[0] if name == "resize" else value
                got = array.get()
            first.synchronize()
            assert np.array_equal(got, array.get()), seed
        [cache.cache_clear() for cache in caches]


# --- On a GPU.


#: Reads arrays over and over, while small blocks of memory come and go.
READS = """
import sys, time
import cupy, numpy, zarr
from linumpy.gpu import read_zarr_to_gpu

folder, count, seed, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
arrays = [zarr.open_array(f"{folder}/{number}", mode="r") for number in range(count)]
expected = [numpy.asarray(array[...]) for array in arrays]
rng, reads, wrong = numpy.random.default_rng(seed), 0, 0
for array in arrays:
    read_zarr_to_gpu(array, strict=True)  # kernels are compiled before the time starts
begin = time.monotonic()
while time.monotonic() - begin < seconds:
    for array, right in zip(arrays, expected):
        some = [cupy.full(int(rng.integers(1, 4000)), 0xAB, "u1") for _ in range(int(rng.integers(0, 6)))]
        del some
        got = read_zarr_to_gpu(array, strict=True).get()
        reads, wrong = reads + 1, wrong + (got.dtype != right.dtype or got.tobytes() != right.tobytes())
print(reads, wrong)
"""


@pytest.mark.gpu
def test_missing_chunks_while_other_processes_use_the_device(tmp_path):
    for number, case in enumerate(CASES):
        missing_last(tmp_path / str(number), *case)
    missing_last(tmp_path / str(len(CASES)), 5000, 700, "u2", 9, compressors=numcodecs.Zstd())
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", READS, str(tmp_path), str(len(CASES) + 1)]
    running = [subprocess.Popen([*command, str(seed), "6"], **options) for seed in range(7)]
    try:
        told = [process.communicate(timeout=120) for process in running]
    finally:
        [process.kill() for process in running]
    assert [process.returncode for process in running] == [0] * 7, [error[-500:] for _, error in told]
    counts = [tuple(map(int, out.split())) for out, _ in told]
    assert min(reads for reads, _ in counts) > 20
    assert sum(wrong for _, wrong in counts) == 0, counts


SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


@pytest.fixture
def late(cupy, monkeypatch):
    """Make streams that begin with a wait of some milliseconds, or none, by chance; returns what queues a wait."""
    kernel, real = cupy.RawKernel(SPIN, "spin"), cupy.cuda.Stream
    rng = np.random.default_rng(0)

    def wait(stream):
        with stream:
            kernel((1,), (1,), (np.int64(rng.choice([0, 10**6, 3 * 10**7])),))  # up to about 15 ms

    def make(**options):
        stream = real(**options)
        wait(stream)
        return stream

    make.null, make.ptds = real.null, real.ptds
    wait(real.null)  # compiled before it is needed
    monkeypatch.setattr(cupy.cuda, "Stream", make)
    return wait


ON_DEVICE = {
    "raw": {"case": (111, 85, "u1", 1)},
    "direct": {"case": (217, 142, "<u8", 1), "direct": True},
    "cast": {"case": (65, 40, "<f8", 3.5), "dtype": "f4"},
    "zstd": {"case": (5000, 700, "u2", 9), "compressors": numcodecs.Zstd(), "decode_on": "device"},
    "zstd-direct": {
        "case": (5000, 700, "u2", 9), "compressors": numcodecs.Zstd(), "decode_on": "device", "direct": True,
    },
    "zstd-host": {"case": (5000, 700, "u2", 9), "compressors": numcodecs.Zstd(), "decode_on": "host"},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_DEVICE)
def test_reads_on_streams_that_are_late(tmp_path, cupy, late, monkeypatch, name):
    options = dict(ON_DEVICE[name])
    case, dtype = options.pop("case"), options.pop("dtype", None)
    direct, decode_on = options.pop("direct", False), options.pop("decode_on", None)
    array = missing_last(tmp_path / "a", *case, **options)
    expected = np.asarray(array[...]).astype(dtype or case[2])
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (direct, "a test"))
    plan = functools.partial(kvikio_zarr.plan_transfer, decode_on=decode_on)
    monkeypatch.setattr(kvikio_zarr, "plan_transfer", plan)
    for number in range(20):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out = cupy.full(expected.shape, 1, expected.dtype)
            late(stream)
            before = out.copy()
            read_zarr_to_gpu(array, out=out, strict=True)
            after = out.copy()
            out.fill(0)
            assert after.get().tobytes() == expected.tobytes(), number
            assert (before.get() == np.ones((), expected.dtype)).all(), number


@pytest.mark.gpu
@pytest.mark.usefixtures("late")
def test_parts_of_a_chunk_on_streams_that_are_late(tmp_path, cupy):
    values = random_values("u2", (12, 30), 4)
    options = {"chunks": (5, 30), "buffer_bytes": 2**20, "overwrite": True, "axes": "yx"}
    for number in range(10):
        with OmeZarrWriter(tmp_path / "a", (12, 30), "u2", (1, 1), **options) as writer:
            for rows in (slice(0, 3), slice(3, 5), slice(5, 9), slice(9, 12)):
                with cupy.cuda.Stream(non_blocking=True):
                    writer.write(rows, cupy.asarray(values[rows]))
        assert np.array_equal(zarr.open_array(tmp_path / "a/0")[...], values), number
