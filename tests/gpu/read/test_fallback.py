"""If this fails, the fallback gives other voxels than zarr-python, or is taken without a reason.

Each test runs on the CPU with a stand-in for CuPy, and marked ``gpu`` on a device; zarr-python on the host is the
oracle, bit for bit.
"""

import json

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs import numcodecs as v3

from linumpy.device import to_host
from linumpy.errors import DeviceMemoryError, UnsupportedLayoutError
from linumpy.gpu import kvikio_zarr as zarr_gpu
from linumpy.gpu import read_zarr_to_gpu, release
from linumpy.gpu.read import request as output
from linumpy.gpu.read.engines import by_zarr
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.layout import read_layout
from linumpy.plan.read import plan_read, why_not_gpu_mode
from linumpy.plan.region import normalize_region
from tests.support.gpu import reference
from tests.support.gpu.stand_in import needs_stand_in
from tests.support.stores import random_values, same

pytestmark = [
    pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning"),
    pytest.mark.filterwarnings("ignore:Creating a zarr.buffer.gpu"),
]

# ---- a device in host memory


@pytest.fixture
def fake_cuda(monkeypatch):
    from zarr.buffer import cpu, gpu

    release()
    with reference.fake_device(1) as device:
        monkeypatch.setattr(gpu, "NDBuffer", lambda array: cpu.NDBuffer(array.host))
        monkeypatch.setattr(gpu, "buffer_prototype", cpu.buffer_prototype)
        monkeypatch.setattr(output, "free_memory", lambda *_: 2**40)
        try:
            yield device.cupy
        finally:
            release()


CUDA = [pytest.param("fake_cuda", marks=needs_stand_in), pytest.param("cupy", marks=pytest.mark.gpu)]


@pytest.fixture(params=CUDA)
def cuda(request):
    """CuPy, or its stand-in in host memory."""
    return request.getfixturevalue(request.param)


# ---- arrays


def random_array(folder, *, shape=(19, 21), chunks=(16, 16), dtype="f4", fill=1, values=None, zarr_format=3, **options):
    store = zarr.storage.MemoryStore() if folder is None else folder
    array = zarr.create(
        store=store, shape=shape, chunks=chunks, dtype=dtype, zarr_format=zarr_format, fill_value=fill, **options
    )
    written = tuple(slice(0, n - n // 3) for n in shape)  # so that the last chunks are missing, or partly fill value
    array[written] = (random_values(dtype, shape, 7) if values is None else values)[written]
    return zarr.open_array(store, mode="r")


def sharded(*codecs, **options):
    inner = ShardingCodec(chunk_shape=(4, 8), codecs=codecs or [BytesCodec()], **options)
    return {"codecs": [inner]}


def small(dtype, shape=(19, 21)):
    return np.random.default_rng(3).integers(0, 90, shape).astype(dtype)


BIG_INDEX = [BytesCodec(endian="big"), Crc32cCodec()]
NESTED = ShardingCodec(chunk_shape=(8, 8), codecs=[BytesCodec(), ZstdCodec()])
DELTA, SCALE = v3.Delta(dtype="<i4"), v3.FixedScaleOffset(offset=3, scale=0.5, dtype="<f8", astype="<i2")
NEGATIVE_ZERO = complex(-0.0, -0.0)

# What zarr's GPU mode gets wrong, or ends the process with, and what has codecs that work in host memory.
BY_HOST = {
    "shards-bz2": sharded(BytesCodec(), v3.BZ2()),
    "shards-blosclz": sharded(BytesCodec(), BloscCodec(cname="blosclz")),
    "shards-bz2-index-without-checksum": sharded(BytesCodec(), v3.BZ2(), index_codecs=[BytesCodec()]),
    "shards-raw": sharded(),
    "shards-big-endian-index": sharded(BytesCodec(), ZstdCodec(), index_codecs=BIG_INDEX),
    "shards-index-at-start": sharded(BytesCodec(), v3.LZMA(), index_location="start"),
    "shards-nested": {"codecs": [ShardingCodec(chunk_shape=(16, 16), codecs=[NESTED])], "chunks": (32, 32)},
    "shards-in-codecs": {"codecs": [TransposeCodec(order=(1, 0)), *sharded()["codecs"], Crc32cCodec()]},
    "zstd": {"codecs": [BytesCodec(), ZstdCodec()]},
    "gzip-crc32c": {"codecs": [BytesCodec(), GzipCodec(), Crc32cCodec()]},
    "transpose": {"codecs": [TransposeCodec(order=(1, 0)), BytesCodec()]},
    "big-endian": {"codecs": [BytesCodec(endian="big")]},
    "delta": {"codecs": [DELTA, BytesCodec(), v3.BZ2()], "dtype": "i4", "values": small("i4")},
    "fixedscaleoffset": {"codecs": [SCALE, BytesCodec(), v3.BZ2()], "dtype": "f8", "values": small("f8")},
    "packbits": {"codecs": [v3.PackBits(), BytesCodec()], "dtype": "bool"},
    "quantize": {"codecs": [v3.Quantize(digits=2, dtype="<f8"), BytesCodec()], "dtype": "f8", "values": small("f8")},
    "bitround": {"codecs": [v3.BitRound(keepbits=4), BytesCodec()], "values": small("f4")},
    "negative-zero": {"codecs": [BytesCodec()], "fill": -0.0},
    "negative-zero-f2": {"codecs": [BytesCodec()], "fill": -0.0, "dtype": "f2"},
    "negative-zero-complex": {"codecs": [BytesCodec()], "fill": NEGATIVE_ZERO, "dtype": "c8"},
    "negative-zero-imaginary": {"codecs": [BytesCodec()], "fill": complex(2.0, -0.0), "dtype": "c16"},
    "nan": {"codecs": [BytesCodec()], "fill": np.nan},
    "nan-with-a-payload": {"codecs": [BytesCodec()], "fill": np.array(0x7F812345, "u4").view("f4")[()]},
    "v2-raw": {"zarr_format": 2},
    "v2-big-endian-fortran": {"zarr_format": 2, "dtype": ">f4", "order": "F"},
    "v2-bz2": {"zarr_format": 2, "compressor": numcodecs.BZ2()},
    "v2-null-fill": {"zarr_format": 2, "fill": None, "compressor": numcodecs.LZMA()},
    "v2-packbits": {"zarr_format": 2, "dtype": "bool", "filters": [numcodecs.PackBits()]},
}
RAW = {"codecs": [BytesCodec()]}
# What zarr's GPU mode gets right: raw chunks of format 3 without shards, of every dtype.
IN_GPU_MODE = {
    **{dtype: {**RAW, "dtype": dtype} for dtype in ("bool", "i1", "u1", "i2", "u2", "f2")},
    **{dtype: {**RAW, "dtype": dtype} for dtype in ("i4", "u4", "f4", "i8", "u8", "f8", "c8", "c16")},
    "f4-fill-0": {**RAW, "fill": 0.0},
    "f4-fill-infinite": {**RAW, "fill": -np.inf},
    "c8-fill": {**RAW, "dtype": "c8", "fill": complex(1.5, -2.5)},
    "ragged": {**RAW, "chunks": (5, 4), "chunk_key_encoding": ("v2", ".")},
    "one-chunk": {**RAW, "chunks": (40, 30)},
    "rank-7": {**RAW, "shape": (2, 3, 2, 3, 2, 3, 2), "chunks": (1, 2, 2, 2, 1, 2, 2)},
}
REGIONS = {
    "all": ...,
    "box": (slice(3, 18), slice(1, -2)),
    "int-first": (17,),
    "int-last": (..., -1),
    "one-row": slice(4, 5),
}


def check(array, region, backend, **options):
    got, report = read_zarr_to_gpu(array, region=region, backend="zarr-gpu", return_report=True, **options)
    assert report.backend == backend, report.engine
    expected = array[region]
    assert same(to_host(got), expected if options.get("dtype") is None else expected.astype(options["dtype"]))
    return got, report


@pytest.mark.parametrize("name", BY_HOST)
def test_by_way_of_host_memory(tmp_path, cuda, name):
    array = random_array(tmp_path / "a", **BY_HOST[name])
    for region in (*REGIONS.values(), (3, 4), (18, 20), (slice(2, 2), slice(None))):
        got, report = check(array, region, "zarr-host")
        assert isinstance(got, cuda.ndarray)
        assert report.engine.startswith("zarr-python into host memory and one copy to the device: ")


@pytest.mark.parametrize("store", ["local", "memory"])
@pytest.mark.parametrize("name", IN_GPU_MODE)
def test_in_gpu_mode(tmp_path, cuda, name, store):
    array = random_array(tmp_path / "a" if store == "local" else None, **IN_GPU_MODE[name])
    for region in REGIONS.values() if array.ndim == 2 else [..., (1, ..., slice(1, None))]:
        check(array, region, "zarr-gpu")
    # Those that GPU mode does not give an array for.
    check(array, (1,) * array.ndim, "zarr-host")
    check(array, (-1,) * array.ndim, "zarr-host")
    check(array, slice(1, 1), "zarr-host")


@pytest.mark.parametrize("options", [RAW, {"zarr_format": 2}, {"codecs": [BytesCodec(), v3.BZ2()]}])
def test_no_axes(tmp_path, cuda, options):
    for dtype, value in (("f8", -0.0), ("u2", 7), (">i4", -9) if "zarr_format" in options else ("i4", -9)):
        array = random_array(tmp_path / dtype, shape=(), chunks=(), dtype=dtype, values=np.array(value), **options)
        for region in ((), ..., None):
            got, _ = read_zarr_to_gpu(array, region=region, return_report=True)
            assert same(to_host(got), array[...])
            assert got.shape == ()


@pytest.mark.parametrize("name", ["negative-zero", "v2-big-endian-fortran", "shards-bz2"])
@pytest.mark.parametrize("dtype", ["f8", "c8", "f2", "bool"])
def test_casts_are_those_of_numpy(tmp_path, cuda, name, dtype):
    array = random_array(tmp_path / "a", values=small("f4"), **BY_HOST[name])
    check(array, slice(2, 18), "zarr-host", dtype=dtype)
    check(array, (18, 20), "zarr-host", dtype=dtype)


def test_a_cast_of_raw_chunks_is_made_on_the_host(tmp_path, cuda):
    array = random_array(tmp_path / "a", dtype="u2", **RAW)
    _, report = check(array, slice(2, 18), "zarr-host", dtype="f4")
    assert report.engine.endswith("a cast to float32")


@pytest.mark.parametrize("name", ["v2-bz2", "shards-bz2", "negative-zero"])
def test_into_out(tmp_path, cuda, name):
    array = random_array(tmp_path / "a", **BY_HOST[name])
    out = cuda.empty((19, 11), "f4")
    got, _ = check(array, (slice(None), slice(5, 16)), "zarr-host", out=out)
    assert got is out


def test_into_out_in_gpu_mode(tmp_path, cuda):
    array = random_array(tmp_path / "a", **RAW)
    out = cuda.empty((19, 11), "f4")
    got, _ = check(array, (slice(None), slice(5, 16)), "zarr-gpu", out=out)
    assert got is out


@pytest.mark.gpu
@pytest.mark.parametrize("options", [RAW, {"zarr_format": 2}, BY_HOST["shards-bz2"]])
def test_on_a_second_device(tmp_path, cupy, options):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    array = random_array(tmp_path / "a", **options)
    with cupy.cuda.Device(1):
        got, _ = check(array, slice(3, 18), "zarr-host")
        assert got.device.id == 1
        assert cupy.cuda.Device().id == 1
        out = cupy.empty((19, 21), "f4")
    got, _ = check(array, ..., "zarr-host", out=out)
    assert (got is out, got.device.id) == (True, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [RAW, {"zarr_format": 2}])
def test_ordered_on_the_current_stream(tmp_path, cupy, options):
    array = random_array(tmp_path / "a", shape=(64, 256, 256), chunks=(32, 64, 64), **options)
    expected = array[...]
    for _ in range(5):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            out = cupy.empty(array.shape, "f4")
            slow = cupy.zeros(2**24, "f4")
            for _ in range(40):
                cupy.sqrt(slow, out=slow)
            out.fill(3)  # still waiting when the read starts
            got = read_zarr_to_gpu(array, out=out, backend="zarr-gpu")
            assert same(to_host(got.view("u4") ^ cupy.uint32(1)).view("f4"), (expected.view("u4") ^ 1).view("f4"))


@pytest.mark.parametrize("name", ["v2-bz2", "shards-bz2"])
def test_while_the_process_is_in_gpu_mode(tmp_path, cuda, name):
    from linumpy.io.zarr_mode import gpu_mode

    array = random_array(tmp_path / "a", **BY_HOST[name])
    expected = array[...]
    with gpu_mode():
        got = read_zarr_to_gpu(array, backend="zarr-gpu")
    assert same(to_host(got), expected)


@pytest.mark.parametrize("cuda", CUDA[:1], indirect=True)
def test_broken_chunks_in_gpu_mode_leave_nothing_running(tmp_path, cuda, monkeypatch):
    waited = []
    monkeypatch.setattr(zarr_gpu, "wait_for_zarr", lambda: waited.append(True))
    array = random_array(tmp_path / "a", **RAW)
    (tmp_path / "a/c/0/0").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"shape|size|reshape"):
        read_zarr_to_gpu(array, backend="zarr-gpu")
    assert waited == [True]


def test_the_log_and_the_report_say_which_way_and_why(tmp_path, cuda, caplog):
    cases = [
        (random_array(tmp_path / "b", **IN_GPU_MODE["rank-7"]), "zarr-gpu", "in its GPU mode, not", "rank 7"),
        (random_array(tmp_path / "a", **BY_HOST["v2-bz2"]), "zarr-host", "zarr-python, not", "bz2"),
    ]
    for array, backend, way, reason in cases:
        caplog.clear()
        _, report = read_zarr_to_gpu(array, return_report=True)
        assert report.backend == backend == plan_read(read_layout(array)).backend
        assert reason in report.fallback
        (message,) = [one.message for one in caplog.records if one.name.startswith("linumpy")]
        assert way in message
        assert reason in message


@pytest.mark.parametrize("cuda", CUDA[:1], indirect=True)
def test_what_does_not_fit_the_device_is_said_before_the_first_read(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(output, "free_memory", lambda *_: 1000)
    monkeypatch.setattr(by_zarr, "read_chunks_on_host", lambda *_: pytest.fail("read"))
    array = random_array(tmp_path / "a", zarr_format=2)
    with pytest.raises(DeviceMemoryError, match="1596 bytes"):
        read_zarr_to_gpu(array, backend="zarr-gpu")


@pytest.mark.parametrize("cuda", CUDA[:1], indirect=True)
def test_an_output_of_the_caller_needs_no_free_memory(tmp_path, cuda, monkeypatch):
    monkeypatch.setattr(output, "free_memory", lambda *_: 1000)
    array = random_array(tmp_path / "a", zarr_format=2)
    out = cuda.empty(array.shape, array.dtype)
    assert read_zarr_to_gpu(array, out=out, backend="zarr-gpu") is out
    assert same(out.get(), array[...])


# ---- which way, without a device


def reason_for(folder, region=..., cast=None, device=0, **options):
    layout = read_layout(random_array(folder, **options))
    dtype = None if cast is None else np.dtype(cast)
    return why_not_gpu_mode(layout, normalize_region(region, layout.shape), dtype, device)


def test_gpu_mode_is_taken_for_what_is_shown_to_be_right_and_nothing_else(tmp_path):
    for name, options in IN_GPU_MODE.items():
        assert reason_for(tmp_path / f"right-{name}", **options) is None, name
    for name, options in BY_HOST.items():
        assert reason_for(tmp_path / f"wrong-{name}", **options), name


def test_why_not_gpu_mode(tmp_path):
    reasons = {
        "zarr's codec of format 2": {"zarr_format": 2},
        "inner chunks may lie": sharded(),
        "codecs bytes + zstd": {"codecs": [BytesCodec(), ZstdCodec()]},
        "codecs numcodecs.packbits + bytes": BY_HOST["packbits"],
        "no foreign byte order": BY_HOST["big-endian"],
        "fill value of -0.0": BY_HOST["negative-zero"],
        "fill value of nan": BY_HOST["nan"],
        "fill value of (2-0j)": BY_HOST["negative-zero-imaginary"],
        "single elements": {**RAW, "region": (1, 2)},
        "the region is empty": {**RAW, "region": slice(3, 3)},
        "a cast to float64": {**RAW, "cast": "f8"},
        "on device 0": {**RAW, "device": 1},
    }
    for number, (reason, options) in enumerate(reasons.items()):
        assert reason in reason_for(tmp_path / str(number), **options)


def test_what_nobody_reads_is_named_and_no_chunk_is_blamed(tmp_path):
    """zarr-python raises a NotImplementedError without a text for an index of shards that is compressed."""
    array = zarr.create_array(
        tmp_path / "a", shape=(4, 4), shards=(4, 4), chunks=(2, 2), dtype="u1", compressors=None, fill_value=0
    )
    document = json.loads((tmp_path / "a/zarr.json").read_text())
    document["codecs"][0]["configuration"]["index_codecs"].append({"name": "gzip", "configuration": {"level": 1}})
    (tmp_path / "a/zarr.json").write_text(json.dumps(document))
    chunk = tmp_path / "a" / array.metadata.encode_chunk_key((0, 0))
    chunk.parent.mkdir(parents=True)
    chunk.write_bytes(bytes(64))
    with pytest.raises(UnsupportedLayoutError, match=r"/a: shard index encoded by .*gzip, which zarr-python"):
        read_zarr(tmp_path / "a", device="cpu")


def test_chunks_of_different_sizes_are_read_on_the_host(tmp_path):
    import dataclasses

    layout = read_layout(random_array(tmp_path / "a", **RAW))
    other = dataclasses.replace(layout, grid="rectilinear")
    assert why_not_gpu_mode(layout, normalize_region(..., layout.shape)) is None
    assert why_not_gpu_mode(other, normalize_region(..., layout.shape)) == "chunk grid 'rectilinear'"
