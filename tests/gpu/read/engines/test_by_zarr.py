"""If this fails, arrays that the native core does not decode, or all where there is none, are read wrong or never."""

import gc
import os
import shutil
import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import numcodecs as numcodecs_v3

from linumpy.errors import ChunkError
from linumpy.gpu import Reader, read_zarr, release
from linumpy.gpu.read.engines import by_zarr
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.read.scatter import Conversion
from linumpy.io.layout import read_layout
from linumpy.io.zarr_mode import gpu_mode
from tests.support.gpu import fake_cupy
from tests.support.regions import into_rows

SHAPE, CHUNKS = (20, 30, 25), (8, 7, 9)


@pytest.fixture(autouse=True)
def no_shared_reader():
    """Whether there is a core is decided when a reader is made, and the threads of a shared reader stay."""
    release()
    yield
    release()


@pytest.fixture(params=["filter", "no core"])
def array(request, tmp_path, monkeypatch):
    """Gives an array that the core does not read, with its voxels."""
    if request.param == "no core":
        monkeypatch.setenv("LINUMPY_CORE", "0")
        made = zarr.create_array(tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype=">i2", fill_value=7)
    else:
        made = zarr.create_array(
            tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype=">i2", fill_value=7, zarr_format=2, order="F",
            filters=[numcodecs.Delta(">i2")], compressors=numcodecs.Zstd(),
        )  # fmt: skip
    values = np.random.default_rng(0).integers(-300, 300, SHAPE).astype("i2")
    values[8:16] = 7  # chunks that are not stored
    made[...] = values
    return tmp_path / "a", values


def chunk_file(path, index):
    """The file of a chunk, in either format."""
    found = path.joinpath("c", *map(str, index))
    return found if (path / "zarr.json").exists() else path / ".".join(map(str, index))


def test_random_regions_and_casts(array):
    path, values = array
    rng = np.random.default_rng(1)
    with Reader(device="cpu") as reader:
        for dtype in (None, "u1", "f4", "c8"):
            corners = np.sort(rng.integers(0, np.add(SHAPE, 1), (2, 8, 3)), axis=0)
            regions = [
                ...,
                np.s_[3, :, 4:9],
                np.s_[1, 2, 3],
                *(tuple(map(slice, a, b)) for a, b in corners.swapaxes(0, 1)),
            ]
            for region, ticket in zip(regions, reader.submit_many(path, regions, dtype=dtype), strict=True):
                found = ticket.result()
                np.testing.assert_array_equal(found, values[region].astype(dtype or "i2"), strict=True)
                assert ticket.report.engine == "zarr-python into host memory"
                assert ticket.report.fallback
                assert ticket.report.bytes_decoded == found.nbytes
        out = np.zeros((25, 60), "f8")[:, ::2]
        reader.submit(path, np.s_[:, :, 3], out=out.T[:, :20].T).result()
        np.testing.assert_array_equal(out[:20], values[:, :, 3])
        assert reader.stats().jobs == 4 * 11 + 1


def test_regions_into_rows(array):
    path, values = array
    out = np.full((4, 9, 9), 55, "f4")
    regions = np.array([[[0, 9], [2, 3], [5, 14]], [[11, 20], [29, 30], [20, 25]]])
    with Reader(device="cpu") as reader:
        layouts = [reader.layout_of(path)]
        kept = [True, False, True]
        reader.submit_regions(layouts, into_rows(regions, out, [3, 0], kept), "f4", out).result()
        reader.submit_regions(layouts, into_rows(regions[:0], out, [], kept), "f4", out).result()
    np.testing.assert_array_equal(out[3], values[0:9, 2, 5:14])
    np.testing.assert_array_equal(out[0, :, :5], values[11:20, 29, 20:25])
    assert (out[[1, 2]] == 55).all()
    assert (out[0, :, 5:] == 55).all()


def test_a_broken_chunk_is_named_and_fails_its_own_jobs(array):
    path, values = array
    chunk_file(path, (0, 1, 0)).write_bytes(b"no zstd frame")
    with Reader(device="cpu") as reader:
        broken, whole = reader.submit_many(path, [np.s_[:8], np.s_[8:]])
        with pytest.raises(ChunkError, match=str(chunk_file(path, (0, 1, 0)).relative_to(path))):
            broken.result()
        np.testing.assert_array_equal(whole.result(), values[8:])


def test_a_folder_that_is_gone_is_no_fill_value(array):
    path, _ = array
    with Reader(device="cpu") as reader:
        layout = reader.layout_of(path)
        shutil.rmtree(path)
        with pytest.raises(ChunkError, match="is the folder gone"):
            reader.submit(layout).result()


def test_nor_is_one_that_is_emptied_while_it_is_read(array, monkeypatch):
    path, _ = array
    real = by_zarr.read_chunks_on_host

    def read(*arguments):
        shutil.rmtree(path)
        path.mkdir()
        return real(*arguments)

    monkeypatch.setattr(by_zarr, "read_chunks_on_host", read)
    with Reader(device="cpu") as reader, pytest.raises(ChunkError, match="is the folder gone"):
        reader.submit(path).result()


@pytest.fixture
def held(monkeypatch):
    """Holds reads up until it is set."""
    go, real = threading.Event(), by_zarr.read_chunks_on_host
    began = threading.Semaphore(0)

    def read(*arguments):
        began.release()
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(by_zarr, "read_chunks_on_host", read)
    yield go, began
    go.set()


def test_what_is_cancelled_is_not_written(array, held):
    path, values = array
    go, began = held
    outs = [np.full(SHAPE, 55, "i2") for _ in range(by_zarr._THREADS + 3)]
    with Reader(device="cpu") as reader:
        tickets = reader.submit_many(path, [...] * len(outs), outs=outs)
        for _ in range(by_zarr._THREADS):
            began.acquire()
        assert not any(ticket.done() for ticket in tickets)
        assert tickets[0].cancel()
        assert tickets[-1].cancel()
        go.set()
        for ticket in (tickets[0], tickets[-1]):
            with pytest.raises(CancelledError):
                ticket.result()
        for ticket, out in zip(tickets[1:-1], outs[1:-1], strict=True):
            assert ticket.result() is out
            assert not ticket.cancel()
            np.testing.assert_array_equal(out, values)
    assert (outs[0] == 55).all()
    assert (outs[-1] == 55).all()


def test_close_waits_for_what_has_begun_and_cancels_the_rest(array, held):
    path, values = array
    go, began = held
    reader = Reader(device="cpu")
    tickets = reader.submit_many(path, [...] * (by_zarr._THREADS + 2))
    for _ in range(by_zarr._THREADS):
        began.acquire()
    threading.Timer(0.2, go.set).start()
    reader.close()
    assert all(ticket.done() for ticket in tickets)
    for ticket in tickets[: by_zarr._THREADS]:
        np.testing.assert_array_equal(ticket.result(), values)
    for ticket in tickets[by_zarr._THREADS :]:
        assert isinstance(ticket.exception(), CancelledError)
    with pytest.raises(RuntimeError, match="the reader is closed"):
        reader.submit(path).result()
    assert not [thread for thread in threading.enumerate() if thread.name == "linumpy zarr"]


def test_a_reader_that_nobody_holds_is_closed(array):
    path, values = array
    reader = Reader(device="cpu")
    ticket = reader.submit(path)
    gone = weakref.ref(reader)
    del reader
    np.testing.assert_array_equal(ticket.result(), values)
    del ticket
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "linumpy zarr"]


def test_a_caller_in_zarrs_gpu_mode_does_not_wait_for_itself(array):
    path, values = array
    with Reader(device="cpu") as reader:
        for _ in range(2):
            with gpu_mode():
                np.testing.assert_array_equal(reader.submit(path).result(), values)
            np.testing.assert_array_equal(reader.submit(path).result(), values)


def test_an_interrupt_ends_the_wait_and_not_the_job(array, held):
    path, values = array
    go, _ = held
    with Reader(device="cpu") as reader:
        ticket = reader.submit(path)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ticket.result()
        assert time.monotonic() - begin < 5
        go.set()
        np.testing.assert_array_equal(ticket.result(), values)


def test_a_job_of_the_parent_is_refused_in_a_child(array, held):
    path, _ = array
    go, _ = held
    with Reader(device="cpu") as reader:
        ticket = reader.submit(path)
        if (child := os.fork()) == 0:
            try:
                ticket.result()
            except RuntimeError as error:
                os._exit(0 if "parent of this process" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
        ticket.result()


@pytest.mark.parametrize("seed", range(8))
def test_on_a_device_the_copy_waits_for_the_caller_and_is_over_with_the_job(array, seed):
    path, values = array
    device = fake_cupy.Device(seed)
    engine = by_zarr.ZarrEngine(device.cupy, 0)
    layout = read_layout(zarr.open_array(path))
    conversion = Conversion(layout.dtype, np.dtype("f4"), layout.swapped)
    whole, planes = device.cupy.full(SHAPE, 55, "f4"), device.cupy.full((SHAPE[2], SHAPE[1]), 55, "f4")
    ready = device.stream.record()
    start, stop = np.array([[0, 0, 0], [3, 0, 0]]), np.array([SHAPE, [4, *SHAPE[1:]]])
    strides = np.array([whole.strides, (0, *planes.strides[::-1])])
    addresses = np.array([whole.data.ptr, planes.data.ptr])
    regions = Regions(np.zeros(2, np.int64), start, stop, strides, addresses)
    jobs = engine.submit([layout], conversion, regions, [whole, planes], ready)
    jobs.wait()
    assert not jobs.failed()
    np.testing.assert_array_equal(whole.host, values)  # not synchronized: the job has waited
    np.testing.assert_array_equal(planes.host.T, values[3])
    device.default_stream.synchronize()  # what the caller had queued before comes before the copy
    np.testing.assert_array_equal(whole.host, values)
    np.testing.assert_array_equal(planes.host.T, values[3])
    engine.close()
    device.end()


def test_reports_say_that_there_is_no_core(tmp_path, monkeypatch):
    monkeypatch.setenv("LINUMPY_CORE", "0")
    zarr.create_array(tmp_path / "a", shape=(9,), chunks=(3,), dtype="u1")[...] = 5
    found, report = read_zarr(tmp_path / "a", device="cpu", return_report=True)
    assert (found == 5).all()
    assert report.backend == "zarr-python"
    assert "no native core: LINUMPY_CORE=0 switches the native core off" in report.fallback


@pytest.mark.skipif(not hasattr(zarr.codecs, "ScaleOffset"), reason="this zarr-python has no scale_offset")
@pytest.mark.parametrize("name", ["scale_offset", "cast_value"])
def test_array_codecs_of_zarr_v3(tmp_path, name):
    """A Reader has zarr-python decode them, whatever is behind them, and the report says so."""
    filters = [zarr.codecs.ScaleOffset(offset=1, scale=100)]
    if name == "cast_value":
        pytest.importorskip("cast_value_rs")
        filters.append(zarr.codecs.CastValue(data_type="int16", out_of_range="clamp"))
    for number, behind in enumerate((None, numcodecs_v3.LZ4(), zarr.codecs.ZstdCodec())):
        path = tmp_path / str(number)
        array = zarr.create_array(
            path, shape=SHAPE, chunks=CHUNKS, dtype="f4", filters=filters, compressors=behind, fill_value=2.5
        )
        array[:9] = np.random.default_rng(0).uniform(-9, 9, (9, *SHAPE[1:]))
        with Reader(device="cpu") as reader:
            ticket = reader.submit(path, np.s_[3:, 4, 5:9])
            assert np.array_equal(ticket.result(), array[3:, 4, 5:9])
            assert name in ticket.report.decoder
            assert ticket.report.backend == "zarr-python"
