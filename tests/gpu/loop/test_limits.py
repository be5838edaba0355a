"""What one process may use, however many reads are under way and however large an array is: files, memory, time."""

import contextlib
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
from decoders import needs_compiler
from linumpy.gpu.loop import jobs, loop
from linumpy.gpu.loop.jobs import Regions, Request
from linumpy.gpu.loop.locate import IndexCache, locate
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.read.survey import with_survey
from linumpy.gpu.staging.scatter import Conversion
from linumpy.io.reads import posix_aio
from linumpy.io.reads.file_reads import ReadEngine
from stores import plain_values, random_values, same

from linumpy.errors import DeviceMemoryError
from linumpy.gpu import kvikio_zarr, plan_zarr_read
from linumpy.gpu.read import request as output
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.zarr_io import read_zarr_via_kvikio
from linumpy.io.layout import read_layout
from linumpy.plan.read.plan import plan_read

READ_IN_THREADS = """
import os, resource, sys, threading, time

import numpy as np
import reference
import zarr
from linumpy.gpu.loop import carrier, jobs, loop
from linumpy.gpu.staging import engines
from linumpy.gpu.read.reader import Reader

place, decode_on, count = sys.argv[1], sys.argv[2] or None, int(sys.argv[3])
os.sched_getaffinity = lambda _: range(16)
region = (slice(None), slice(0, 10))
expected = zarr.open_array(place, mode="r")[region]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

# Storage takes its time at first, so that all readers hold what they may hold.
def slow(real, began=threading.local()):
    def call(*arguments):
        if not hasattr(began, "reading"):
            began.reading = time.sleep(0.3)
        return real(*arguments)
    return call

engines.ReadEngine = reference.SmallEngine
carrier.Carrier.complete = slow(carrier.Carrier.complete)
failures, wrong, ready = [], [], threading.Barrier(count)

def work():
    try:
        ready.wait()
        with Reader(0, decode_on=decode_on) as reader:
            got = reader.submit(place, region).result().get()
        wrong.append(not np.array_equal(got, expected))
    except BaseException as error:
        failures.append(repr(error))

with reference.fake_device():
    threads = [threading.Thread(target=work) for _ in range(count)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
print(len(wrong), sum(wrong), failures[:1])
"""


@needs_compiler
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
    """256 files for a process whose readers read arrays of 100 files, or of 20 shards that are read in many parts."""
    array = zarr.create_array(tmp_path / "a", shape=(100, 60), dtype="u2", **options)
    array[...] = random_values("u2", array.shape, 1)
    tests = os.pathsep.join(str(Path(__file__).parents[2] / one) for one in (".", "gpu", "gpu/codecs"))
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
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (False, "a test"))
    monkeypatch.setattr(output, "require_cuda", lambda: None)
    monkeypatch.setattr(output, "device_of", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(output, "free_memory", lambda *_: 80 * 2**30)


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
@needs_compiler
def test_the_requests_of_one_read_fill_its_result(tmp_path, monkeypatch, options, decode_on, region, most):
    array = zarr.create_array(tmp_path / "a", shape=(40, 30, 20), dtype="u2", fill_value=7, **options)
    array[:20] = plain_values("u2", (20, 30, 20), 1)  # the rest is not stored
    requests, real = [], jobs.Jobs._request

    def note(self, *arguments):
        requests.append(real(self, *arguments))
        return requests[-1]

    monkeypatch.setattr(jobs, "REQUEST_BOXES", most)
    monkeypatch.setattr(jobs.Jobs, "_request", note)
    job = reference.make_job(array, region, decode_on=decode_on)
    assert same(reference.execute(job), array[region])
    per_object = int(np.prod(job.plan.chunks_per_object))
    assert all(request.count <= max(most, per_object) for request in requests)
    assert sum(request.count for request in requests) == job.plan.chunk_count == job.stats.boxes
    assert (job.plan.chunk_count > most) == (len(requests) > 1) or per_object > most


@pytest.mark.parametrize("wave", [2**17, 1], ids=["together", "one by one"])
@pytest.mark.parametrize("shards", [None, (8, 8)])
def test_the_report_of_a_read_of_several_requests_counts_all_of_them(tmp_path, monkeypatch, shards, wave):
    array = zarr.create_array(
        tmp_path / "a", shape=(40, 40), chunks=(4, 4), shards=shards, dtype="u2", compressors=None
    )
    array[:24] = random_values("u2", (24, 40), 1)

    def read():
        with reference.fake_device() as device, Reader(0) as one:
            device.cupy.cuda.get_elapsed_time = lambda first, last: 250.0
            ticket = one.submit_layout(one.layout_of(array), timed=True)
            assert same(ticket.result().get(), array[...])
            return ticket.report, one.stats()

    whole, stats = read()
    assert stats.jobs == 1
    monkeypatch.setattr(jobs, "REQUEST_BOXES", 30)
    monkeypatch.setattr(loop, "WAVE_BOXES", wave)
    several, stats = read()
    assert stats.jobs == 1
    for name in ("bytes_read", "bytes_decoded", "chunks_read", "chunks_filled", "files_opened", "engine", "decoder"):
        assert getattr(several, name) == getattr(whole, name), name
    assert (whole.chunks_read, whole.chunks_filled) == (60, 40)
    assert whole.bytes_read == 60 * 32 + (0 if shards is None else 15 * 68)
    assert whole.files_opened == (60 if shards is None else 15 + 15)
    assert several.scatter_seconds == 0.25 * stats.slabs


def test_few_indexes_of_shards_at_a_time_are_in_memory(tmp_path):
    """70 shards, each with an index of 4 MiB, of which a part of each is read."""
    array = zarr.create_array(tmp_path / "a", shape=(70 * 512, 512), chunks=(1, 1), shards=(512, 512), dtype="u1")
    index = b"\xff" * 16 * 512 * 512
    (tmp_path / "index").write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    for number in range(70):
        (tmp_path / f"a/c/{number}").mkdir(parents=True)
        os.link(tmp_path / "index", tmp_path / f"a/c/{number}/0")
    start, stop = np.array([[0, 3]]), np.array([[70 * 512, 4]])
    layout = read_layout(array)
    conversion = Conversion(layout.dtype, layout.dtype, layout.swapped)
    ticket = Ticket(None, "a", lambda *_: None, None)
    regions = Regions(np.zeros(1, np.int64), start, stop, np.ones((1, 2), np.int64), np.zeros(1, np.int64))
    part = Part([Request([layout], conversion, regions, None, 70 * 512, None, [ticket])])
    engine, cache = ReadEngine(2), IndexCache(2**24)
    with contextlib.closing(engine), at_most(20, 64):
        missing = np.concatenate([found.missing for found in locate(part, engine, cache)])
    assert (np.sort(missing) == np.arange(70 * 512)).all()
    assert cache.misses == 70


def test_a_survey_leaves_the_number_of_reading_threads_as_it_is(tmp_path, monkeypatch):
    """The C library takes the number once: one of a survey would be that of all later reads."""
    asked = []
    monkeypatch.setattr(posix_aio, "set_threads", asked.append)
    array = zarr.create_array(tmp_path / "a", shape=(8,), chunks=(4,), dtype="u1")
    array[:] = 1
    assert with_survey(plan_read(read_layout(array), None)).survey.reads == 2
    ReadEngine().close()
    assert len(set(asked)) == 1


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
from linumpy.gpu import read_zarr_to_gpu, release

places = sys.argv[1:]
expected = [zarr.open_array(place, mode="r")[...] for place in places]
read_zarr_to_gpu(places[0])  # contexts and kernels are loaded once, and their files stay open
release()  # a reader keeps its share of the open files for a moment after a read, and here the limit changes
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
def test_the_requests_of_one_read_fill_its_result_on_the_device(tmp_path, monkeypatch, direct, shards, decode_on):
    from linumpy.device import to_host

    options = {"compressors": None} if decode_on == "raw" else {}
    array = zarr.create_array(
        tmp_path / "a", shape=(40, 30, 20), chunks=(3, 5, 7), shards=shards, dtype="u2", fill_value=7, **options
    )
    array[:20] = plain_values("u2", (20, 30, 20), 1)
    if decode_on != "raw":
        reference.use_own_readers(monkeypatch, decode_on=decode_on)
    monkeypatch.setattr(kvikio_zarr, "gds_mode", lambda _: (direct, "a test"))
    whole, one = read_zarr_via_kvikio(array, return_report=True)
    monkeypatch.setattr(jobs, "REQUEST_BOXES", 11)
    parts, several = read_zarr_via_kvikio(array, return_report=True)
    assert same(to_host(whole), array[...])
    assert same(to_host(parts), array[...])
    for name in ("bytes_decoded", "chunks_read", "chunks_filled", "chunks_decoded_by_host"):
        assert getattr(several, name) == getattr(one, name), name


WITHOUT_DESCRIPTORS = """
import os, resource, sys

from linumpy.gpu import Reader

with Reader(device="cpu") as reader:
    expected = reader.submit(sys.argv[1]).result().copy()
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    errors = [type(reader.submit(sys.argv[1]).exception()).__name__ for _ in range(2)]
    [os.close(one) for one in held]
    print(errors, (reader.submit(sys.argv[1]).result() == expected).all())
"""


@pytest.mark.parametrize("compressors", [None, "auto"])
def test_a_reader_outlives_a_time_without_descriptors(tmp_path, compressors):
    """In a process of its own: what is imported on first use must not be imported just then."""
    array = zarr.create_array(tmp_path / "a", shape=(200, 60), chunks=(1, 60), dtype="u2", compressors=compressors)
    array[...] = random_values("u2", array.shape, 1)
    command = [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "['ChunkError', 'ChunkError'] True\n", done.stderr[-2000:]
