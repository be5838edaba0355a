"""If this fails, reads and writes on the host break while the process is in zarr's GPU mode."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor, TimeoutError

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.buffer import cpu
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    VLenUTF8Codec,
    ZstdCodec,
)
from zarr.codecs import numcodecs as v3
from zarr.registry import register_buffer, register_ndbuffer

from linumpy.errors import ChunkError
from linumpy.gpu import zarr_to_dask
from linumpy.io import zarr_mode
from linumpy.io.zarr_mode import (
    gpu_mode,
    host_zarr_context,
    in_mode_of_caller,
    read_chunks_on_host,
    read_on_host,
    write_from_host,
)
from linumpy.mosaic.io.tiles import boxes, read_box
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.resample.blocks.overlap import work_through
from linumpy.resample.blocks.pipeline import BlockJob, make_blocks
from linumpy.write.writer import write_omezarr
from tests.support.stores import same

SECONDS = 20.0


class DeviceBuffer(cpu.Buffer):
    """Stands for zarr's GPU buffer: metadata may pass through it."""


class DeviceNDBuffer(cpu.NDBuffer):
    """Stands for zarr's GPU arrays: none may be made for a read or write in host memory."""

    def __init__(self, array):
        raise AssertionError("zarr made a device array")


register_buffer(DeviceBuffer, qualname="linumpy_tests.DeviceBuffer")
register_ndbuffer(DeviceNDBuffer, qualname="linumpy_tests.DeviceNDBuffer")
DEVICE = {"buffer": "linumpy_tests.DeviceBuffer", "ndbuffer": "linumpy_tests.DeviceNDBuffer"}


@pytest.fixture(autouse=True)
def device_mode(monkeypatch):
    """GPU mode without a GPU, and the configuration found afterwards as it was before."""
    monkeypatch.setattr(zarr.config, "enable_gpu", lambda: zarr.config.set(DEVICE))
    before = buffers()
    yield
    assert buffers() == before
    assert zarr_mode._mode._hosts == 0


def buffers():
    return zarr.config.get("buffer"), zarr.config.get("ndbuffer")


class Holder:
    """A thread that is in a context until it is let go."""

    def __init__(self, context):
        self.inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(context,), daemon=True)
        self._thread.start()

    def _run(self, context):
        with context():
            self.inside.set()
            self._leave.wait(SECONDS)

    def leave(self):
        self._leave.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()

    def __enter__(self):
        assert self.inside.wait(SECONDS)
        return self

    def __exit__(self, *_):
        self.leave()


def nested(**options):
    return ShardingCodec(chunk_shape=(8, 8), codecs=[ShardingCodec(chunk_shape=(4, 4), **options)])


def codecs(*between, last=(), dtype=None):
    return {"dtype": dtype or "f4", "codecs": [*between, BytesCodec(), *last]}


V3 = {
    "raw": codecs(),
    "big": {"dtype": "f4", "codecs": [BytesCodec(endian="big")]},
    "transpose": codecs(TransposeCodec(order=(1, 0))),
    "zstd": codecs(last=[ZstdCodec()]),
    "gzip-crc32c": codecs(last=[GzipCodec(), Crc32cCodec()]),
    "blosc": codecs(last=[BloscCodec(cname="blosclz")]),
    "shards": {"dtype": "f4", "codecs": [ShardingCodec(chunk_shape=(4, 4))]},
    "shards-bz2": {"dtype": "f4", "codecs": [ShardingCodec(chunk_shape=(4, 4), codecs=[BytesCodec(), v3.BZ2()])]},
    "nested-shards": {"dtype": "f4", "codecs": [nested()]},
    "shards-in-codecs": {
        "dtype": "f4",
        "codecs": [TransposeCodec(order=(1, 0)), ShardingCodec(chunk_shape=(4, 4)), Crc32cCodec()],
    },
    **{f"numcodecs-{one.__name__}": codecs(last=[one()]) for one in (v3.BZ2, v3.LZMA, v3.Zlib, v3.LZ4, v3.Zstd)},
    **{f"numcodecs-{one.__name__}": codecs(last=[one()]) for one in (v3.CRC32, v3.Adler32, v3.Fletcher32, v3.GZip)},
    "numcodecs-blosc-shuffle": codecs(last=[v3.Shuffle(elementsize=4), v3.Blosc(cname="blosclz")]),
    "delta": codecs(v3.Delta(dtype="<i4", astype="<i2"), dtype="i4"),
    "fixedscaleoffset": codecs(v3.FixedScaleOffset(offset=3, scale=2, dtype="<f4", astype="<i2")),
    "packbits": codecs(v3.PackBits(), dtype="bool"),
    "quantize": codecs(v3.Quantize(digits=2, dtype="<f4")),
    "bitround": codecs(v3.BitRound(keepbits=9)),
    "astype": codecs(v3.AsType(encode_dtype="<i4", decode_dtype="<f4")),
    "strings": {"dtype": str, "codecs": [VLenUTF8Codec()]},
}
V2 = {
    "v2-raw": {"dtype": "f4"},
    "v2-big-fortran": {"dtype": ">f4", "order": "F"},
    "v2-bz2": {"dtype": "f4", "compressor": numcodecs.BZ2()},
    "v2-filters": {"dtype": "i4", "compressor": numcodecs.Zstd(), "filters": [numcodecs.Delta("<i4")]},
}


def create(name, folder, shape=(19, 21)):
    if name in V2:
        return zarr.create(store=folder, shape=shape, chunks=(8, 8), zarr_format=2, fill_value=1, **V2[name])
    options = V3[name]
    fill = "none" if options["dtype"] is str else 1
    return zarr.create(store=folder, shape=shape, chunks=(16, 16), zarr_format=3, fill_value=fill, **options)


def values(dtype, shape=(19, 21)):
    counted = np.arange(int(np.prod(shape))).reshape(shape) % 101
    return np.array([[f"<{n}>" for n in row] for row in counted]) if dtype is str else counted.astype(dtype)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning", "ignore:.*Zarr V3 spec.*")
@pytest.mark.parametrize("name", [*V3, *V2])
def test_every_codec_works_in_host_memory_whoever_has_switched_on_the_gpu_mode(tmp_path, name):
    dtype = (V2 | V3)[name]["dtype"]
    array, data = create(name, tmp_path / "a"), values(dtype)
    box = (slice(2, 18), slice(1, None))
    array[box] = data[box]
    whole, part = array[...], array[3:17, 5]
    with zarr.config.set(DEVICE):
        got = [read_on_host(array), read_on_host(array, (slice(3, 17), 5))]
        other = create(name, tmp_path / "b")
        write_from_host(other, box, data[box])
        assert zarr.config.get("buffer") == DEVICE["buffer"]
    for one, expected in zip([*got, other[...]], [whole, part, whole], strict=True):
        assert one.dtype == expected.dtype
        assert np.array_equal(one, expected)
    assert isinstance(got[0], np.ndarray)


@pytest.mark.parametrize("version", [2, 3])
def test_single_elements(tmp_path, version):
    array = zarr.create_array(tmp_path / "a", shape=(3, 4), chunks=(2, 2), dtype="i4", zarr_format=version)
    array[...] = np.arange(12).reshape(3, 4)
    none = zarr.create_array(tmp_path / "b", shape=(), chunks=(), dtype="f8", zarr_format=version)
    none[...] = -0.0
    with zarr.config.set(DEVICE):
        assert same(read_on_host(array, (2, 1)), np.int32(9))
        assert same(read_on_host(none), np.float64(-0.0))


def read_by_worker(array):
    boxes_of = list(boxes(array.shape, (8, 8)))
    result = np.empty(array.shape, array.dtype.newbyteorder("="))

    def write(box, tile):
        result[box] = tile

    work_through(boxes_of, lambda box: read_box(array, box, "cpu"), lambda box, tile: tile, write)
    return result


def read_by_dask(array):
    pytest.importorskip("dask")
    return zarr_to_dask(array, device="cpu", chunks=-1).compute(scheduler="synchronous")


def read_by_blocks(array):
    """Moves the array to another one, block by block: reads it, and writes what zarr encodes."""
    options = {"chunks": (8, 8), "dtype": array.dtype.newbyteorder("="), "compressors": ZstdCodec()}
    with zarr.config.set({"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}):
        target = zarr.create_array(f"{array.store.root}-moved", shape=array.shape, shards=(16, 16), **options)
    grid = AffineGrid(array.shape, array.shape, ((1.0, 0.0), (0.0, 1.0)), (0.0, 0.0), 0, "nearest")
    job = BlockJob(array, str(target.store.root), ResamplePlan(grid, (16, 16)), 0.0, "cpu", None)
    make_blocks(job, job.plan, lambda block: None)
    return read_on_host(target)


def read_by_writer(array):
    write_omezarr(f"{array.store.root}-image", read_on_host(array), (1.0, 1.0), chunks=(8, 8), shards=(16, 16))
    return read_on_host(zarr.open_array(f"{array.store.root}-image/0", mode="r"))


def source(folder, name):
    array = create(name, folder)
    array[...] = values((V2 | V3)[name]["dtype"])
    return array


USERS = [read_on_host, read_by_worker, read_by_dask, read_by_blocks, read_by_writer]


@pytest.mark.parametrize("use", USERS)
@pytest.mark.parametrize("name", ["v2-bz2", "shards", "zstd"])
def test_users_of_zarr_that_are_in_gpu_mode_themselves(tmp_path, use, name):
    """Their threads read and write for a caller who holds GPU mode, and would wait for its end for ever."""
    array = source(tmp_path / "a", name)
    expected = array[...]
    with ThreadPoolExecutor(1) as pool:

        def call():
            with gpu_mode():
                got = use(array)
                assert zarr.config.get("ndbuffer") == DEVICE["ndbuffer"]
            return got

        assert same(pool.submit(call).result(SECONDS), expected)


@pytest.mark.parametrize(
    ("use", "name"), [(read_on_host, "v2-bz2"), (read_on_host, "shards"), (read_by_worker, "v2-bz2")]
)
def test_what_needs_the_configuration_waits_for_the_end_of_gpu_mode(tmp_path, name, use):
    array, raw = source(tmp_path / "a", name), source(tmp_path / "b", "raw")
    expected = array[...]
    with ThreadPoolExecutor(1) as pool, Holder(gpu_mode):
        reading = pool.submit(use, array)
        with pytest.raises(TimeoutError):
            reading.result(0.1)
        # What does not need it goes on meanwhile.
        assert same(read_on_host(raw), values("f4"))
    assert same(reading.result(SECONDS), expected)


def test_reads_of_several_threads_go_on_at_the_same_time(tmp_path):
    array = source(tmp_path / "a", "v2-bz2")
    with Holder(host_zarr_context), Holder(host_zarr_context), ThreadPoolExecutor(1) as pool:
        assert same(pool.submit(read_on_host, array).result(SECONDS), values("f4"))


def test_gpu_mode_waits_for_reads_and_comes_before_later_ones():
    with Holder(host_zarr_context) as reader:
        waiting = Holder(gpu_mode)
        assert not waiting.inside.wait(0.1)
        later = Holder(host_zarr_context)
        assert not later.inside.wait(0.1)
        reader.leave()
        assert waiting.inside.wait(SECONDS)
        assert not later.inside.wait(0.1)
        waiting.leave()
        assert later.inside.wait(SECONDS)
        later.leave()


def test_one_thread_at_a_time_has_gpu_mode():
    with Holder(gpu_mode):
        other = Holder(gpu_mode)
        assert not other.inside.wait(0.1)
    assert other.inside.wait(SECONDS)
    other.leave()


def test_nested_in_one_thread():
    with ThreadPoolExecutor(1) as pool:

        def call():
            seen = []
            with gpu_mode(), gpu_mode():
                with host_zarr_context(), host_zarr_context():
                    seen.append(buffers())
                seen.append(buffers())
            with host_zarr_context(), host_zarr_context():
                seen.append(buffers())
            return seen

        host = "zarr.buffer.cpu.Buffer", "zarr.buffer.cpu.NDBuffer"
        assert pool.submit(call).result(SECONDS) == [host, tuple(DEVICE.values()), host]


def test_gpu_mode_within_a_host_read_is_refused_as_two_such_threads_would_wait_for_each_other():
    with (
        host_zarr_context(),
        pytest.raises(RuntimeError, match="cannot begin within a read or write of host memory"),
        gpu_mode(),
    ):
        pass
    with gpu_mode():
        assert buffers() == tuple(DEVICE.values())


def test_a_nested_read_does_not_wait_for_who_waits_for_gpu_mode():
    with ThreadPoolExecutor(1) as pool:
        entered, go_on = threading.Event(), threading.Event()

        def call():
            with host_zarr_context():
                entered.set()
                go_on.wait(SECONDS)
                with host_zarr_context():
                    return True

        reading = pool.submit(call)
        assert entered.wait(SECONDS)
        waiting = Holder(gpu_mode)
        assert not waiting.inside.wait(0.1)
        go_on.set()
        assert reading.result(SECONDS)
        assert waiting.inside.wait(SECONDS)
        waiting.leave()


def test_threads_of_a_caller_wait_again_when_it_has_left_gpu_mode():
    with gpu_mode():
        pool = ThreadPoolExecutor(1, initializer=in_mode_of_caller())
        assert pool.submit(_enter_host).result(SECONDS)
    with Holder(gpu_mode):
        late = pool.submit(_enter_host)
        with pytest.raises(TimeoutError):
            late.result(0.1)
    assert late.result(SECONDS)
    pool.shutdown()


def _enter_host():
    with host_zarr_context():
        return buffers() != tuple(DEVICE.values())


def test_a_long_wait_is_told(monkeypatch, caplog):
    monkeypatch.setattr(zarr_mode, "_WARN_SECONDS", 0.05)
    with ThreadPoolExecutor(1) as pool, Holder(gpu_mode) as holder:
        waiting = pool.submit(_enter_host)
        for _ in range(200):
            if caplog.records:
                break
            threading.Event().wait(0.05)
        holder.leave()
        assert waiting.result(SECONDS)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "in host memory waits for thread 'Thread-" in record.message


def test_what_others_set_during_a_host_read_stays():
    """zarr was in host mode when the read began, so that there is nothing to put back."""
    with zarr.config.set({"buffer": zarr.config.get("buffer"), "ndbuffer": zarr.config.get("ndbuffer")}):
        with host_zarr_context():
            zarr.config.set(DEVICE)
        assert buffers() == tuple(DEVICE.values())


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_blosc_chunk_that_is_cut_off_is_an_error(tmp_path, zarr_format):
    """numcodecs does not look at how long it is, and decodes what lies behind it in memory."""
    values = np.random.default_rng(0).normal(size=(4, 64))
    codec = numcodecs.Blosc("lz4") if zarr_format == 2 else BloscCodec(cname="lz4")
    array = zarr.create_array(tmp_path, data=values, chunks=(2, 64), compressors=codec, zarr_format=zarr_format)
    np.testing.assert_array_equal(read_chunks_on_host(array, ()), values)
    (chunk,) = (file for file in tmp_path.rglob("*") if file.relative_to(tmp_path).as_posix() in ("1.0", "c/1/0"))
    stored = chunk.read_bytes()
    for count in (len(stored) - 1, 7):
        chunk.write_bytes(stored[:count])
        with pytest.raises(ChunkError, match=rf"1.0 cannot be read: it has {count} bytes"):
            read_chunks_on_host(array, (slice(1, 3),))
        np.testing.assert_array_equal(read_chunks_on_host(array, (slice(0, 2),)), values[:2])
    chunk.unlink()
    np.testing.assert_array_equal(read_chunks_on_host(array, (3,)), np.zeros(64))


def test_a_shard_that_is_an_empty_file_is_an_error(tmp_path):
    """zarr-python takes it for a shard that was never written."""
    array = zarr.create_array(tmp_path, data=np.ones((4, 8), "u2"), chunks=(2, 4), shards=(2, 8))
    (tmp_path / "c/1/0").write_bytes(b"")
    with pytest.raises(ChunkError, match=r"c/1/0 is an empty file, without the index of a shard"):
        read_chunks_on_host(array, (slice(1, 3), slice(0, 8)))
    np.testing.assert_array_equal(read_chunks_on_host(array, (slice(0, 2), slice(0, 8))), np.ones((2, 8)))
