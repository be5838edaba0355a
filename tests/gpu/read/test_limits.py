"""If this fails, reads take more files, memory or time than the process's limits allow."""

import contextlib
import os
import subprocess
import sys
import time
import tracemalloc

import google_crc32c
import numpy as np
import pytest
import zarr

from linumpy.errors import DeviceMemoryError
from linumpy.gpu import kvikio_zarr, plan_zarr_read
from linumpy.gpu.read import request as output
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.zarr_io import read_zarr_via_kvikio
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import plain_values, random_values, same

READ_IN_THREADS = """
import os, resource, sys, threading

import zarr
from linumpy.gpu import Reader

place, count = sys.argv[1], int(sys.argv[2])
region = (slice(None), slice(0, 10))
expected = zarr.open_array(place, mode="r")[region]
Reader("cpu").submit(place).result()  # what is imported on first use
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24,) * 2)
failures, wrong, ready = [], [], threading.Barrier(count)

def work():
    try:
        ready.wait()
        with Reader("cpu") as reader:
            for _ in range(5):
                wrong.append(not (reader.submit(place, region).result() == expected).all())
    except BaseException as error:
        failures.append(repr(error))

threads = [threading.Thread(target=work) for _ in range(count)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
print(len(wrong), sum(wrong), failures[:1])
"""


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (1, 60), "compressors": None},
        {"chunks": (1, 10), "compressors": None, "shards": (5, 60)},
        {"chunks": (1, 60), "compressors": "auto"},
    ],
    ids=["raw", "shards", "zstd"],
)
def test_reads_of_small_files_share_the_limit_of_open_files(tmp_path, options):
    """Few descriptors for a process whose readers read arrays of 100 files, or of 20 shards in many parts."""
    array = zarr.create_array(tmp_path / "a", shape=(100, 60), dtype="u2", **options)
    array[...] = random_values("u2", array.shape, 1)
    command = [sys.executable, "-c", READ_IN_THREADS, str(tmp_path / "a"), "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "60 0 []\n", done.stderr[-2000:]


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


@needs_stand_in[0]
@needs_stand_in[1]
def test_a_small_part_at_the_far_end_of_a_huge_array(tmp_path):
    """Places of chunks and bytes are counted from where the region begins: no number leaves 64 bits."""
    for name, shape, chunks in (("a", (2**62,), (1000,)), ("b", (2**40, 2**40), (3, 5)), ("c", (2**31,) * 4, (3,) * 4)):
        array = zarr.create_array(tmp_path / name, shape=shape, chunks=chunks, dtype="u2", compressors=None)
        region = tuple(slice(n - 9, n - 1) for n in shape)
        array[region] = values = plain_values("u2", (8,) * len(shape), 1)
        assert same(reference.read(array, region), values)


@needs_stand_in[0]
@needs_stand_in[1]
@pytest.mark.parametrize("sharded", [False, True])
def test_bytes_behind_four_gibibytes_of_a_file(tmp_path, sharded):
    """Of a sparse file: offsets have more than 32 bits."""
    size = 5 * 2**30
    options = {"chunks": (2**20,), "shards": (size,)} if sharded else {"chunks": (size,)}
    array = zarr.create_array(tmp_path / "a", shape=(size,), dtype="u1", compressors=None, **options)
    (tmp_path / "a/c").mkdir()
    values = random_values("u1", (3000,), 1)
    with open(tmp_path / "a/c/0", "wb") as file:
        file.truncate(size)
        file.seek(size - 4000)
        file.write(values.tobytes())
        if sharded:
            index = np.stack([np.arange(5 * 2**10) * 2**20, np.full(5 * 2**10, 2**20)], 1).astype("<u8").tobytes()
            file.seek(size)
            file.write(index + google_crc32c.value(index).to_bytes(4, "little"))
    region = slice(size - 4100, size - 900)
    expected = np.concatenate([np.zeros(100, "u1"), values, np.zeros(100, "u1")])
    with Reader("cpu") as reader:
        assert same(reader.submit(array, region).result(), expected)
    assert same(reference.read(array, region), expected)


FEW_INDEXES = """
import resource, sys
from linumpy.gpu import Reader

with Reader("cpu") as reader:
    layout = reader.layout_of(sys.argv[1])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = reader.submit(layout, (slice(None), 3)).result()
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    stats = reader.stats()
print(more < 2**10 * int(sys.argv[2]), not got.any(), stats.index_misses)
"""


@pytest.mark.needs_core
def test_few_indexes_of_shards_at_a_time_are_in_memory(tmp_path):
    """70 shards, each with an index of 4 MiB, of which a part of each is read."""
    zarr.create_array(tmp_path / "a", shape=(70 * 512, 512), chunks=(1, 1), shards=(512, 512), dtype="u1")
    index = b"\xff" * 16 * 512 * 512
    (tmp_path / "index").write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    for number in range(70):
        (tmp_path / f"a/c/{number}").mkdir(parents=True)
        os.link(tmp_path / "index", tmp_path / f"a/c/{number}/0")
    command = [sys.executable, "-c", FEW_INDEXES, str(tmp_path / "a"), "190"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "True True 70\n", done.stdout + done.stderr[-2000:]


@needs_stand_in[0]
@needs_stand_in[1]
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
