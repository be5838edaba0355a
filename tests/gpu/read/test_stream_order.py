"""If this fails, a result is used before it is there: an order of streams that no event gives is relied on.

The production reader and writer run on :mod:`fake_cupy`, whose streams run late or early by chance.
"""

import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linumpy.errors import ChunkError
from linumpy.geometry import focal
from linumpy.gpu import kernels, kvikio_zarr, read_zarr_to_gpu
from linumpy.gpu.oct import surface_kernels
from linumpy.gpu.read.reader import Reader
from linumpy.write.writer import OmeZarrWriter
from tests.support import budget
from tests.support.budget import first
from tests.support.gpu import reference
from tests.support.gpu.reference import fake_device, use_own_readers
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import cases, random_values, same, write

pytestmark = needs_stand_in
inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
SEEDS = st.integers(0, 2**32 - 1)


def read(array, region, seed, **options):
    """Read by the production reader on a device of its own."""
    job = reference.make_job(array, region, seed=seed, **options)
    got = reference.execute(job)
    if options.get("decode_on") == "device":
        assert not job.report.chunks_decoded_by_host, "the host mended what the device was given too early"
    return got


@settings(inside_a_test, max_examples=budget.examples(60))
@given(
    case=cases(max_elements=400), copied=st.booleans(), missing=st.sampled_from([0, 2, 3]), seed=SEEDS,
    scratch=st.sampled_from(reference.SCRATCHES),
)  # fmt: skip
def test_raw_chunks(case, copied, missing, seed, scratch):
    case = dataclasses.replace(case, missing=missing)
    if copied:  # chunks that are contiguous in the result
        shape, axes = case.shape, tuple(range(len(case.shape)))
        whole = {"chunks": (max(1, shape[0] // 4), *shape[1:]), "shards": None, "order": axes, "big_endian": False}
        case = dataclasses.replace(case, **whole, region=(Ellipsis,))
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a")
        for number in range(3):
            assert same(read(array, case.region, seed + number, scratch_bytes=scratch), array[case.region])


#: Shape, chunk, dtype and fill value: arrays whose last chunk is missing and whose chunks need no scatter.
CASES = [(111, 85, "u1", 1), (247, 182, "u1", 77), (217, 142, "<u8", 1), (65, 40, "<f8", 3.5), (59, 30, "b1", True)]


def missing_last(folder, n, chunk, dtype, fill, **options):
    """An array whose last chunk was never written."""
    options = {"compressors": None, "filters": None, "zarr_format": 2} | options
    array = zarr.create_array(folder, shape=(n,), chunks=(chunk,), dtype=dtype, fill_value=fill, **options)
    whole = (n - 1) // chunk * chunk
    array[:whole] = random_values(dtype, (whole,), 1)
    return array


@pytest.mark.parametrize("case", first([(case,) for case in CASES], 2))
def test_a_missing_last_chunk(tmp_path, case):
    array = missing_last(tmp_path / "a", *case)
    assert not os.path.exists(tmp_path / "a/1")
    for seed in range(30):
        assert same(read(array, ..., seed), array[...]), seed


@pytest.mark.parametrize(
    "region", [pytest.param(..., marks=pytest.mark.slow), (..., slice(1, None))], ids=["whole", "part"]
)
def test_many_slabs(tmp_path, region):
    """Each slab is used again, while earlier work may still read it."""
    array = zarr.create_array(
        tmp_path / "a", shape=(120, 2**18), chunks=(2, 2**18), dtype="u1", compressors=None, fill_value=3
    )
    for row in range(0, 120, 2):
        if row % 14 != 12:
            array[row : row + 2] = random_values("u1", (2, 2**18), row)
    for seed in range(3):
        assert same(read(array, region, seed, scratch_bytes=reference.SCRATCHES[0]), array[region]), seed


def encoded(folder):
    """An array of which some chunks have no file."""
    options = {"zarr_format": 2, "compressors": numcodecs.LZ4(), "fill_value": 9}
    array = zarr.create_array(folder, shape=(40, 400), chunks=(1, 400), dtype="u2", **options)
    for row in range(40):
        if row not in (3, 11, 19, 39):
            array[row] = random_values("u2", (400,), row)
    return array


@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_encoded_chunks(tmp_path, decode_on):
    array = encoded(tmp_path / "a")
    for seed in range(budget.examples(15)):
        for region in (..., (slice(1, 4), slice(5, None))):
            scratch = reference.SCRATCHES[seed % len(reference.SCRATCHES)]
            got = read(array, region, seed, decode_on=decode_on, scratch_bytes=scratch)
            assert same(got, array[region]), seed


def test_what_the_host_mends_comes_after_what_the_device_wrote(tmp_path):
    """Two zstd frames, one after another, are left to the host by the device, which scatters something all the same."""
    array = zarr.create_array(tmp_path / "a", shape=(12, 400), chunks=(1, 400), dtype="u2")
    array[...] = expected = random_values("u2", (12, 400), 1)
    for row in (2, 7):
        data = expected[row].tobytes()
        (tmp_path / f"a/c/{row}/0").write_bytes(b"".join(numcodecs.Zstd().encode(one) for one in (data[:9], data[9:])))
    for seed in range(budget.examples(18)):
        job = reference.make_job(array, seed=seed, decode_on="device")
        assert same(reference.execute(job), expected), seed
        assert job.report.chunks_decoded_by_host == 2


def raw(folder, chunks):
    array = zarr.create_array(folder, shape=(8, 60), chunks=chunks, dtype="u2", compressors=None, fill_value=9)
    array[...] = random_values("u2", (8, 60), 1)
    return array


def used_again(device, out):
    """Use the output of a job that is over for something else: nothing else writes to it."""
    out.fill(9)
    device.rest()
    time.sleep(0.002)  # longer than a stream is late
    assert (out.host == 9).all()


@pytest.mark.parametrize("kind", ["raw", "device", "host"])
def test_nothing_is_under_way_after_an_error(tmp_path, kind):
    """A region whose last chunk is broken: what of it has been queued writes to the output no more."""
    array = raw(tmp_path / "a", chunks=(2, 60)) if kind == "raw" else encoded(tmp_path / "a")
    os.truncate(tmp_path / "a" / ("c/3/0" if kind == "raw" else "38.0"), 3)
    options = {} if kind == "raw" else {"decode_on": kind}
    for seed in range(budget.examples(30)):
        with fake_device(seed) as device, device.cupy.cuda.Stream(non_blocking=True), Reader(0, **options) as reader:
            out = device.full(array.shape, 7, "u2")
            assert isinstance(reader.submit(array, out=out).exception(), ChunkError)
            used_again(device, out)


@pytest.mark.parametrize("call", range(1, 40, 3))
def test_the_output_of_a_job_that_the_device_failed_is_written_no_more(tmp_path, call):
    """Calls of the driver fail one after another: some kernels of a slab have started when the next one cannot be."""
    arrays = []
    for number, dtype in enumerate(("u2", "f4")):
        array = zarr.create_array(tmp_path / str(number), shape=(40, 60), chunks=(2, 60), dtype=dtype, compressors=None)
        array[...] = np.ones((), dtype)
        arrays.append(array)
    with fake_device(call) as device, Reader(0) as reader, device.cupy.cuda.Stream(non_blocking=True):
        outs = [device.full((40, 60), 7, array.dtype) for array in arrays]
        device.driver.fail(call)
        tickets = reader.submit_many(arrays, [..., ...], outs=outs)
        for ticket, out, array in zip(tickets, outs, arrays, strict=True):
            if ticket.exception() is not None:
                used_again(device, out)
            else:
                assert same(ticket.result().get(), array[...])
        device.driver.fail(0)


@pytest.mark.parametrize("threads", [False, True])
def test_parts_of_a_chunk_on_several_streams(tmp_path, threads):
    """Chunks that regions have cut wait on the device; each part may come on a stream of its own."""
    values = random_values("u2", (12, 30), 4)
    parts = [slice(0, 3), slice(3, 5), slice(5, 9), slice(9, 12)]
    for seed in range(30):
        options = {"chunks": (5, 30), "buffer_bytes": 2**20, "overwrite": True, "axes": "yx", "codec": "none"}
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
    "interface": lambda: surface_kernels._uploaded_weights(2.0, 1, kernels.current_queue()),
    "resize": functools.cache(lambda: kernels.upload([np.arange(50.0)], kernels.current_queue())),
    "focal": lambda: focal._shifts((4, 5), (3.0, 0.0, 1.0), True, kernels.current_queue()),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_on_the_device_is_there_for_a_new_stream_of_the_same_number(name):
    """CUDA gives the number of a stream that is gone to a new one, which has not waited for its uploads."""
    for seed in range(20):
        caches = (surface_kernels._uploaded_weights, focal._shifts, KEPT["resize"])
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
    use_own_readers(monkeypatch, decode_on=decode_on)
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
