"""If this fails, `read_zarr_to_gpu` gives other voxels than zarr-python."""

import gc
import json
import os
import tempfile
import threading
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from linumpy.device import to_host
from linumpy.errors import ChunkError, DeviceMemoryError, UnsupportedLayoutError
from linumpy.gpu import gpu_zarr_context, kvikio_zarr, read_zarr_to_gpu, release
from linumpy.gpu.kvikio_zarr import read_zarr_via_kvikio
from linumpy.gpu.zarr_io import read_zarr_via_zarr_gpu
from tests.gpu.read.test_shared import threads_of_readers
from tests.support.gpu.reference import open_files, peak_memory, use_own_readers
from tests.support.stores import DTYPES, cases, random_values, same, same_but_nan, stored, write

pytestmark = pytest.mark.gpu

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(folder, shape=(70, 90, 110), chunks=(16, 32, 48), dtype="f4", **options):
    stored(folder, random_values(dtype, shape, 5), chunks, **({"compressors": None} | options))
    return zarr.open_array(folder, mode="r")


@inside_a_test
@given(case=cases(), slab=st.sampled_from([None, 8192, 20480]), direct=st.booleans())
def test_same_bytes_as_zarr(case, slab, direct):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        array = write(case, Path(folder) / "a")
        use_own_readers(patch, slab_nbytes=slab)
        patch.setattr(kvikio_zarr, "gds_mode", lambda _: (direct, "a test"))
        got = read_zarr_to_gpu(array, region=case.region, strict=True)
        assert same(to_host(got), array[case.region])


@inside_a_test
@given(case=cases(max_elements=500), target=st.sampled_from(DTYPES))
def test_same_casts_as_numpy(case, target):
    source, target = np.dtype(case.dtype), np.dtype(target)
    assume(source.kind != "c" or target.kind in "cb")
    values = None
    if source.kind in "fc" and target.kind in "iu":
        import dataclasses

        case = dataclasses.replace(case, fill=1.5)
        values = np.random.default_rng(case.seed).uniform(0, 100, case.shape).astype(source)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        array = write(case, Path(folder) / "a", values)
        got = to_host(read_zarr_to_gpu(array, region=case.region, dtype=target, strict=True))
        assert same_but_nan(got, array[case.region], target)


@pytest.mark.parametrize("source", ["f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("target", ["bool", "f2", pytest.param("f4", marks=pytest.mark.sanitize), "f8", "c8", "c16"])
def test_numbers_next_to_zero_stay_what_they_are(tmp_path, source, target):
    if source[0] == "c" and target[0] == "f":
        return
    values = np.array([1e-40, -3e-45, 1e-39, 6e-8, -6e-8, 0.0, -0.0, 1e-44, 1.5]).astype(source)
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=(4,), dtype=source, compressors=None)
    array[...] = values
    got = to_host(read_zarr_to_gpu(array, dtype=target, strict=True))
    assert got.tobytes() == values.astype(target).tobytes()


@settings(inside_a_test, max_examples=25)
@given(case=cases(max_elements=500))
def test_zarr_gpu_gives_the_same(case):
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a")
        assert same(to_host(read_zarr_via_zarr_gpu(array, region=case.region)), array[case.region])


@pytest.mark.parametrize("shards", [pytest.param(None, marks=pytest.mark.sanitize), (64, 64, 64)])
def test_large_chunks_and_many_slabs(tmp_path, shards):
    array = make(tmp_path / "a", shape=(150, 200, 260), chunks=(32, 32, 64), shards=shards, dtype="u2")
    for region in (None, (slice(3, -2), slice(17, 180), slice(1, -1)), (5,), (..., slice(100, 101))):
        expected = array[...] if region is None else array[region]
        assert same(to_host(read_zarr_to_gpu(array, region=region, scratch_bytes=2**20)), expected)
        assert same(to_host(read_zarr_to_gpu(array, region=region)), expected)


def test_one_chunk_larger_than_the_scratch(tmp_path):
    array = make(tmp_path / "a", shape=(40, 400, 300), chunks=(40, 400, 300))
    got, report = read_zarr_to_gpu(array, scratch_bytes=2**20, return_report=True)
    assert same(to_host(got), array[...])
    assert report.scratch_bytes <= 2**20


def test_memory_is_bounded(tmp_path, cupy):
    array = make(tmp_path / "a", shape=(256, 256, 260), chunks=(64, 64, 64))
    release()  # what earlier tests left
    peaks = []
    for scratch in (2 * 2**20, 64 * 2**20, None):
        cupy.get_default_memory_pool().free_all_blocks()
        with peak_memory(cupy) as peak:
            got = read_zarr_to_gpu(array, scratch_bytes=scratch)
        assert got.nbytes < peak() <= got.nbytes + (scratch or 512 * 2**20)
        peaks.append(peak())
        del got
    assert peaks[0] < peaks[1]


@pytest.mark.gpu_alone
def test_the_driver_sees_no_more_than_the_bound(tmp_path, cupy):
    array = make(tmp_path / "a", shape=(256, 256, 260), chunks=(64, 64, 64))
    read_zarr_to_gpu(array, region=0)  # contexts and kernels are loaded once and stay
    cupy.get_default_memory_pool().free_all_blocks()
    before = cupy.cuda.runtime.memGetInfo()[0]
    got = read_zarr_to_gpu(array, scratch_bytes=2**24)
    used = before - cupy.cuda.runtime.memGetInfo()[0]
    # The driver hands out whole blocks of 2 MiB, one of which holds what it keeps for the streams of a new reader.
    assert used <= got.nbytes + 2**24 + 2**22 + 2**21


def test_too_large_for_the_device_is_said_before_the_first_read(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(2**20, 2**20), chunks=(2**10, 2**10), dtype="f4", compressors=None)
    with pytest.raises(DeviceMemoryError, match=r"4398046511104.*region.*level.*dask") as caught:
        read_zarr_to_gpu(array)
    assert isinstance(caught.value, MemoryError)
    with pytest.raises(DeviceMemoryError, match=r"4398046511104"):
        read_zarr_to_gpu(array, backend="zarr-gpu")


def test_nothing_is_left_behind(tmp_path, cupy):
    array = make(tmp_path / "a")
    read_zarr_to_gpu(array)
    bad = zarr.open_array(tmp_path / "a", mode="r")
    os.truncate(tmp_path / "a/c/2/1/1", 11)
    for source, error in ((array, ChunkError), (bad, ChunkError)):
        gc.collect()
        pool = cupy.get_default_memory_pool()
        files, threads, used = set(open_files()), threads_of_readers(), pool.used_bytes()
        for _ in range(5):
            with pytest.raises(error, match=r"chunk \(2, 1, 1\) of .* has 11 bytes"):
                read_zarr_to_gpu(source)
        gc.collect()
        assert set(open_files()) <= files
        assert threads_of_readers() <= threads
        assert pool.used_bytes() == used


def test_kvikio_settings_are_put_back(tmp_path, monkeypatch):
    import kvikio.defaults as defaults

    array = make(tmp_path / "a")
    os.truncate(tmp_path / "a/c/0/0/0", 11)
    names = ("num_threads", "gds_threshold", "task_size", "bounce_buffer_size", "compat_mode")
    with defaults.set({"num_threads": 3, "gds_threshold": 12345}):
        before = [defaults.get(name) for name in names]
        read_zarr_to_gpu(array, region=(slice(20, None),))
        assert [defaults.get(name) for name in names] == before
        with pytest.raises(ChunkError):
            read_zarr_to_gpu(array)
        assert [defaults.get(name) for name in names] == before


def test_reads_in_several_threads(tmp_path, cupy):
    import kvikio.defaults as defaults

    before = defaults.get("num_threads")
    array = make(tmp_path / "a")
    expected, results = array[...], {}

    def read(number):
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(8):
                got = to_host(read_zarr_to_gpu(array, region=slice(number, None)))
                results[number] = same(got, expected[number:])
                if not results[number]:
                    return

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == dict.fromkeys(range(6), True)
    assert defaults.get("num_threads") == before


def test_ordered_on_the_current_stream(tmp_path, cupy):
    """Memory that earlier work on the stream still uses is not written too early, and later work sees the result."""
    array = make(tmp_path / "a", shape=(64, 256, 256), chunks=(32, 64, 64))
    expected = array[...]
    for _ in range(10):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            out = cupy.empty(array.shape, "f4")
            slow = cupy.zeros(2**24, "f4")
            for _ in range(40):
                cupy.sqrt(slow, out=slow)
            kept = out.copy()
            out.fill(3)  # still waiting when the read starts
            again = read_zarr_to_gpu(array, out=out)
            doubled = again.view("u4") ^ cupy.uint32(1)
            assert again is out
            assert same(to_host(doubled).view("f4"), (expected.view("u4") ^ 1).view("f4"))
            del kept


def test_out_and_dtype(tmp_path, cupy):
    array = make(tmp_path / "a", dtype="u2")
    out = cupy.empty((10, 90, 110), "f4")
    assert read_zarr_to_gpu(array, region=slice(10), out=out, dtype="f4") is out
    assert np.array_equal(to_host(out), array[:10].astype("f4"))
    with pytest.raises(ValueError, match=r"shape \(10, 90, 110\).*\(11, 90, 110\)"):
        read_zarr_to_gpu(array, region=slice(11), out=out)
    with pytest.raises(TypeError, match=r"float32.*float64"):
        read_zarr_to_gpu(array, region=slice(10), out=out, dtype="f8")
    with pytest.raises(TypeError, match=r"numpy\.ndarray"):
        read_zarr_to_gpu(array, out=np.empty(array.shape, "u2"))
    with pytest.raises(ValueError, match="C-contiguous"):
        read_zarr_to_gpu(array, region=slice(10), out=cupy.empty((110, 90, 10), "u2").T)


@pytest.mark.parametrize(
    ("options", "reason", "backend"),
    [
        ({"compressors": zarr.codecs.BloscCodec(cname="blosclz")}, "blosclz", "zarr-host"),
        ({"zarr_format": 2, "compressors": numcodecs.BZ2()}, "bz2", "zarr-host"),
        ({"shape": (), "chunks": ()}, "rank 0", "zarr-host"),
        ({"shape": (2,) * 7, "chunks": (1,) * 7}, "rank 7", "zarr-gpu"),
    ],
)
def test_what_is_not_decoded_here_falls_back_loudly(tmp_path, caplog, options, reason, backend):
    array = make(tmp_path / "a", **({"shape": (30, 40), "chunks": (16, 16)} | options))
    got, report = read_zarr_to_gpu(array, return_report=True)
    assert same(to_host(got), np.asarray(array[...]))
    assert report.backend == backend
    assert reason in report.fallback
    assert [reason in record.message for record in caplog.records if record.name.startswith("linumpy")] == [True]
    for refuse in (
        lambda: read_zarr_to_gpu(array, strict=True),
        lambda: read_zarr_to_gpu(array, backend="linumpy"),
        lambda: read_zarr_to_gpu(array, backend="kvikio"),
        lambda: read_zarr_via_kvikio(array),
    ):
        with pytest.raises(UnsupportedLayoutError, match=reason):
            refuse()


def test_a_store_in_memory():
    array = zarr.create_array(zarr.storage.MemoryStore(), shape=(9, 9), chunks=(4, 4), dtype="i2", compressors=None)
    array[...] = random_values("i2", (9, 9), 2)
    got, report = read_zarr_to_gpu(array, region=(slice(1, 8), 3), return_report=True)
    assert same(to_host(got), array[1:8, 3])
    assert report.backend == "linumpy"
    assert "MemoryStore" in report.engine


def test_broken_data_never_falls_back(tmp_path):
    array = make(tmp_path / "a")
    os.truncate(tmp_path / "a/c/0/0/0", 11)
    with pytest.raises(ChunkError, match=r"c/0/0/0 has 11 bytes"):
        read_zarr_to_gpu(array)


def test_report_counts(tmp_path):
    array = make(tmp_path / "a", fill_value=4)
    (tmp_path / "a/c/0/0/0").unlink()
    got, report = read_zarr_to_gpu(array, return_report=True)
    assert same(to_host(got), array[...])
    assert (report.backend, report.chunks_filled, report.chunks_read) == ("linumpy", 1, 5 * 3 * 3 - 1)
    assert report.files_opened == report.chunks_read
    assert report.bytes_decoded == got.nbytes
    assert report.scatter_seconds > 0
    assert any(word in report.gds for word in ("not GDS", "says gds_doctor.sh", "not used"))
    assert "iB/s" in str(report)
    assert "<table>" in report._repr_html_()


def test_gpu_zarr_context(tmp_path, cupy):
    make(tmp_path / "a")
    with gpu_zarr_context():
        inside = zarr.open_array(tmp_path / "a", mode="r")[:5]
    outside = zarr.open_array(tmp_path / "a", mode="r")[:5]
    assert isinstance(inside, cupy.ndarray)
    assert isinstance(outside, np.ndarray)
    assert same(to_host(inside), outside)


def test_empty_regions(tmp_path, cupy):
    array = make(tmp_path / "a")
    got, report = read_zarr_to_gpu(array, region=(slice(5, 5), 3), return_report=True)
    assert got.shape == (0, 110)
    assert isinstance(got, cupy.ndarray)
    assert (report.bytes_read, report.chunks_read, report.scratch_bytes) == (0, 0, 0)


@pytest.mark.parametrize("backend", ["kvikio", "zarr-gpu"])
def test_documents_of_other_writers(tmp_path, backend):
    """Bare names, and null for the fill value, which zarr-python refuses."""
    values = random_values("u1", (20, 30), 5)
    make(tmp_path / "a#1", shape=(20, 30), chunks=(10, 10), dtype="u1", fill_value=0)
    (tmp_path / "a#1/c/1/2").unlink()
    values[10:, 20:] = 0
    document = json.loads((tmp_path / "a#1/zarr.json").read_text())
    spelled = {"codecs": ["bytes"], "chunk_key_encoding": "default", "fill_value": None}
    (tmp_path / "a#1/zarr.json").write_text(json.dumps(document | spelled))
    got, report = read_zarr_to_gpu(str(tmp_path / "a#1"), backend=backend, return_report=True)
    assert same(to_host(got), values)
    assert report.backend == {"kvikio": "linumpy"}.get(backend, backend)


@pytest.mark.parametrize("backend", ["kvikio", "zarr-gpu"])
def test_dots_behind_a_link_are_those_of_the_file_system(tmp_path, backend):
    (tmp_path / "near").mkdir()
    (tmp_path / "far/inside").mkdir(parents=True)
    (tmp_path / "near/here").symlink_to(tmp_path / "far/inside")
    expected = make(tmp_path / "far/a")[...]
    make(tmp_path / "near/a", fill_value=1, shape=(7, 9, 11))
    assert same(to_host(read_zarr_to_gpu(tmp_path / "near/here/../a", backend=backend)), expected)
