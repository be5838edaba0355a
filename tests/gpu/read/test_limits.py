"""What one process may use, however many reads are under way and however large an array is: files, memory, time."""

import contextlib
import functools
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import reference
import zarr
from stores import plain_values, random_values, same

from linumpy.errors import DeviceMemoryError
from linumpy.gpu import kvikio_zarr, plan_zarr_read
from linumpy.gpu.read import job as jobs
from linumpy.gpu.read import locate as stored
from linumpy.gpu.read import request as output
from linumpy.gpu.read.engines import PosixEngine
from linumpy.gpu.zarr_io import read_zarr_via_kvikio

READ_IN_THREADS = """
import os, resource, sys, threading, time

import numpy as np
import reference
import zarr
from linumpy.gpu.read import host_decode
from linumpy.gpu.read.engines import PosixEngine
from linumpy.io import posix_aio

place, decode_on, count = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
os.sched_getaffinity = lambda _: range(16)
region = (slice(None), slice(0, 10))
expected = zarr.open_array(place, mode="r")[region]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

# Storage takes its time at first, so that all threads have open what they may have open.
def slow(real, began=threading.local()):
    def call(*arguments, **options):
        if not hasattr(began, "reading"):
            began.reading = time.sleep(0.3)
        return real(*arguments, **options)
    return call

posix_aio.read_batch, host_decode._pread = slow(posix_aio.read_batch), slow(host_decode._pread)
class ManySlots(reference.NumpyHostSlots):
    def __init__(self, out, job, count):
        super().__init__(out, job, 32)

reference.NumpyHostSlots = ManySlots
failures, wrong, ready = [], [], threading.Barrier(count)

def work():
    try:
        job = reference.make_job(place, region, decode_on=decode_on)
        ready.wait()
        got = reference.execute(job, PosixEngine(16))
        wrong.append(not np.array_equal(got, expected))
    except BaseException as error:
        failures.append(str(error))

threads = [threading.Thread(target=work) for _ in range(count)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(len(wrong), sum(wrong), failures[:1])
"""


@pytest.mark.parametrize(
    ("options", "decode_on", "threads"),
    [
        ({"chunks": (1, 60), "compressors": None}, "", 12),
        ({"chunks": (1, 10), "compressors": None, "shards": (5, 60)}, "", 6),
        ({"chunks": (1, 60), "compressors": "auto"}, "device", 12),
        ({"chunks": (1, 60), "compressors": "auto"}, "host", 24),
    ],
    ids=["raw", "shards", "device", "host"],
)
def test_reads_of_small_files_share_the_limit_of_open_files(tmp_path, options, decode_on, threads):
    """256 files for a process whose threads read arrays of 100 files, or of 20 shards that are read in many parts."""
    array = zarr.create_array(tmp_path / "a", shape=(100, 60), dtype="u2", **options)
    array[...] = random_values("u2", array.shape, 1)
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", READ_IN_THREADS, str(tmp_path / "a"), decode_on, str(threads)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == f"{threads} 0 []\n", done.stderr[-2000:]


@contextlib.contextmanager
def at_most(seconds, mebibytes):
    """Check how long a block takes, and how much host memory at its peak."""
    tracemalloc.start()
    begin = time.process_time()
    try:
        yield
        assert time.process_time() - begin < seconds
        assert tracemalloc.get_traced_memory()[1] < mebibytes * 2**20
    finally:
        tracemalloc.stop()


HUGE = {
    "raw": {"shape": (2**14, 2**14, 2**15), "chunks": (64, 64, 64), "compressors": None},
    "encoded": {"shape": (2**14, 2**14, 2**15), "chunks": (64, 64, 64)},
    "shards": {"shape": (2**14, 2**14, 2**15), "chunks": (8, 8, 8), "shards": (64, 64, 64)},
    "one axis": {"shape": (2**62,), "chunks": (2**20,), "compressors": None},
    "one axis, shards": {"shape": (2**62,), "chunks": (2**10,), "shards": (2**30,)},
    "tiny chunks": {"shape": (2**40, 2**40), "chunks": (1, 1), "compressors": None},
    "thin chunks": {"shape": (2**31, 2**31), "chunks": (2**31, 2**20), "compressors": None},
}


@pytest.fixture
def small_device(monkeypatch):
    """As if there were a device with 80 GiB, up to the first allocation."""
    monkeypatch.setattr(kvikio_zarr, "require_kvikio", lambda: None)
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (False, "a test"))
    monkeypatch.setattr(output, "require_cuda", lambda: None)
    monkeypatch.setattr(output, "device_of", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(output, "free_memory", lambda: 80 * 2**30)


@pytest.mark.parametrize("kind", HUGE)
def test_what_does_not_fit_is_refused_before_it_is_planned(tmp_path, small_device, kind):
    array = zarr.create_array(tmp_path / "a", dtype="u1", **HUGE[kind])
    message = f"{array.size} bytes .* but {80 * 2**30} bytes of device memory are free. Read a part of it"
    with at_most(1, 4), pytest.raises(DeviceMemoryError, match=message):
        read_zarr_via_kvikio(array)


@pytest.mark.parametrize("kind", HUGE)
def test_a_plan_of_an_array_of_any_size_is_printed_at_once(tmp_path, kind):
    array = zarr.create_array(tmp_path / "a", dtype="u1", **HUGE[kind])
    chunks = np.prod([-(-n // c) for n, c in zip(array.shape, array.chunks, strict=True)], dtype=object)
    with at_most(1, 4):
        text = str(plan_zarr_read(array))
    assert f"{chunks:,} chunk" in text
    if array.shards:
        assert f" in {array.size // np.prod(array.shards):,} shards" in text
    with at_most(1, 4):
        assert "1 chunk" in str(plan_zarr_read(array, region=(slice(-7, -6),) * array.ndim))


def test_a_small_part_at_the_far_end_of_a_huge_array(tmp_path):
    """Places of chunks and bytes are counted from where the region begins: no number leaves 64 bits."""
    for name, shape, chunks in (("a", (2**62,), (1000,)), ("b", (2**40, 2**40), (3, 5)), ("c", (2**31,) * 4, (3,) * 4)):
        array = zarr.create_array(tmp_path / name, shape=shape, chunks=chunks, dtype="u2", compressors=None)
        region = tuple(slice(n - 9, n - 1) for n in shape)
        array[region] = values = plain_values("u2", (8,) * len(shape), 1)
        assert same(reference.read(array, region), values)


@pytest.mark.parametrize(
    ("options", "decode_on"),
    [
        ({"chunks": (3, 5, 7), "compressors": None}, None),
        ({"chunks": (40, 30, 20), "compressors": None}, None),
        ({"chunks": (3, 5, 7), "shards": (6, 10, 14), "compressors": None}, None),
        ({"chunks": (3, 5, 7), "shards": (6, 10, 14)}, "device"),
        ({"chunks": (3, 5, 7), "shards": (6, 10, 14)}, "host"),
        ({"chunks": (3, 5, 7)}, "device"),
        ({"chunks": (3, 5, 7)}, "host"),
    ],
    ids=["raw", "one raw chunk", "raw shards", "shards, device", "shards, host", "device", "host"],
)
@pytest.mark.parametrize("region", [(), (slice(2, 35), 11, slice(3, 19))], ids=["all", "part"])
@pytest.mark.parametrize("most", [6, 50])
def test_the_jobs_of_one_read_fill_its_result(tmp_path, monkeypatch, options, decode_on, region, most):
    array = zarr.create_array(tmp_path / "a", shape=(40, 30, 20), dtype="u2", fill_value=7, **options)
    array[:20] = plain_values("u2", (20, 30, 20), 1)  # the rest is not stored
    monkeypatch.setattr(jobs, "_BATCH_PIECES", most)
    plan = reference.make_plan(array, region)
    request = output.ReadRequest(plan, plan.layout.dtype, None, output.DEFAULT_SCRATCH_BYTES)
    transfer = jobs.plan_transfer(request, direct=False, decode_on=decode_on)
    out, pieces = np.full(plan.nbytes, 0x5A, np.uint8), 0
    per_object = np.prod(plan.chunks_per_object)
    for job in transfer.jobs():
        assert len(job.pieces) <= max(most, per_object * transfer.count.most)
        assert job.scratch_bytes <= transfer.scratch_bytes
        pieces += len(job.pieces)
        reference.execute_into(job, out)
    assert pieces == transfer.count.pieces
    assert same(out.view("u2").reshape(plan.shape), array[region])


def test_the_report_of_a_read_of_several_jobs_counts_all_of_them(tmp_path, monkeypatch, small_device):
    array = zarr.create_array(tmp_path / "a", shape=(40, 40), chunks=(4, 4), dtype="u2", compressors=None)
    array[:20] = random_values("u2", (20, 40), 1)
    read = []
    monkeypatch.setattr(output, "allocate", lambda request: np.empty(request.plan.shape, request.dtype))
    monkeypatch.setattr(kvikio_zarr, "choose_engine", lambda **options: PosixEngine(2))
    monkeypatch.setattr(jobs.Job, "slots", lambda job, out, timed: read.append(job) or TimedSlots(out, job))
    whole, one = read_zarr_via_kvikio(array, return_report=True)
    assert len(read) == 1
    monkeypatch.setattr(jobs, "_BATCH_PIECES", 30)
    parts, several = read_zarr_via_kvikio(array, return_report=True)
    assert len(read) == 1 + 4
    assert same(whole, array[...])
    assert same(parts, array[...])
    assert several.scatter_seconds == 4 * one.scatter_seconds
    for name in ("bytes_read", "bytes_decoded", "chunks_read", "chunks_filled", "files_opened", "engine", "decoder"):
        assert getattr(several, name) == getattr(one, name), name
    assert (one.chunks_read, one.chunks_filled, one.files_opened, one.bytes_read) == (50, 50, 50, 1600)


class TimedSlots(reference.NumpySlots):
    def __init__(self, out, job):
        super().__init__(out, job, direct=False)

    def scatter_seconds(self):
        return 0.25


def test_one_index_of_a_shard_at_a_time_is_in_memory(tmp_path):
    """70 shards, each with an index of 4 MiB, of which a part of each is read."""
    array = zarr.create_array(tmp_path / "a", shape=(70 * 512, 512), chunks=(1, 1), shards=(512, 512), dtype="u1")
    index = b"\xff" * 16 * 512 * 512
    (tmp_path / "index").write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    for number in range(70):
        (tmp_path / f"a/c/{number}").mkdir(parents=True)
        os.link(tmp_path / "index", tmp_path / f"a/c/{number}/0")
    job = reference.make_job(array, (slice(None), 3))
    with at_most(20, 48):
        missing = np.concatenate([rows for _, rows in stored.locate(job)])
    assert (np.sort(missing) == np.arange(70 * 512)).all()


def test_a_shard_much_shorter_than_its_index_is_no_lack_of_memory(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(2**44,), chunks=(1,), shards=(2**44,), dtype="u1")
    (tmp_path / "a/c").mkdir()
    (tmp_path / "a/c/0").write_bytes(b"short")
    with pytest.raises(OSError, match=rf"has 5 bytes and must have {2**48 + 4}"):
        reference.read(array, slice(0, 5))


READ_ON_GPU_IN_THREADS = """
import resource, sys, threading

import zarr
from linumpy.device import to_host
from linumpy.gpu import read_zarr_to_gpu

places = sys.argv[1:]
expected = [zarr.open_array(place, mode="r")[...] for place in places]
read_zarr_to_gpu(places[0])  # contexts and kernels are loaded once, and their files stay open
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
failures, wrong, ready = [], [], threading.Barrier(8)

def work(place, values):
    ready.wait()
    try:
        for _ in range(3):
            wrong.append(not (to_host(read_zarr_to_gpu(place, strict=True)) == values).all())
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=work, args=(places[k % 4], expected[k % 4])) for k in range(8)]
[thread.start() for thread in threads]
[thread.join(90) for thread in threads]
print(len(wrong), sum(wrong), failures[:1])
"""


@pytest.mark.gpu
def test_reads_to_the_device_share_the_limit_of_open_files(tmp_path):
    for name, options in enumerate(
        ({"compressors": None}, {}, {"compressors": None, "shards": (4, 60)}, {"shards": (4, 60)})
    ):
        array = zarr.create_array(tmp_path / str(name), shape=(2000, 60), chunks=(1, 60), dtype="u2", **options)
        array[...] = random_values("u2", array.shape, name)
    command = [sys.executable, "-c", READ_ON_GPU_IN_THREADS, *(str(tmp_path / name) for name in "0123")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "24 0 []\n", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("shards", [None, (6, 10, 14)])
@pytest.mark.parametrize("decode_on", ["raw", "device", "host"])
def test_the_jobs_of_one_read_fill_its_result_on_the_device(tmp_path, monkeypatch, direct, shards, decode_on):
    from linumpy.device import to_host

    options = {"compressors": None} if decode_on == "raw" else {}
    array = zarr.create_array(
        tmp_path / "a", shape=(40, 30, 20), chunks=(3, 5, 7), shards=shards, dtype="u2", fill_value=7, **options
    )
    array[:20] = plain_values("u2", (20, 30, 20), 1)
    if decode_on != "raw":
        planned = functools.partial(jobs.plan_transfer, decode_on=decode_on)
        monkeypatch.setattr(kvikio_zarr, "plan_transfer", planned)
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (direct, "a test"))
    whole, one = read_zarr_via_kvikio(array, return_report=True)
    monkeypatch.setattr(jobs, "_BATCH_PIECES", 11)
    parts, several = read_zarr_via_kvikio(array, return_report=True)
    assert same(to_host(whole), array[...])
    assert same(to_host(parts), array[...])
    for name in ("bytes_decoded", "chunks_read", "chunks_filled", "chunks_decoded_by_host"):
        assert getattr(several, name) == getattr(one, name), name
