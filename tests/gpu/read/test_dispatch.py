"""If this fails, the dispatcher asks for a GPU before it refuses what cannot be read."""

import contextlib
import sys

import numcodecs
import numpy as np
import pytest
import zarr

import linumpy
from linumpy.core import native
from linumpy.device import DEVICE_VARIABLE, why_no_cuda
from linumpy.errors import ChunkError, GpuUnavailableError, RegionError, SourceError
from linumpy.gpu import plan_zarr_read, read_zarr_to_gpu, release, zarr_to_dask
from linumpy.gpu.read import request as output
from linumpy.gpu.read.report import ReadReport
from linumpy.gpu.read.request import cast_dtype
from tests.support.gpu import reference


@pytest.fixture
def folder(tmp_path):
    array = zarr.create_array(tmp_path / "g/a", shape=(4, 5), chunks=(2, 5), dtype="u2", compressors=None)
    array[...] = np.arange(20).reshape(4, 5)
    zarr.open_group(tmp_path / "g", mode="a")
    return tmp_path


REFUSED = [
    (lambda read, folder: read(folder / "nowhere"), FileNotFoundError, r"there is no file or folder .*nowhere"),
    (lambda read, folder: read(folder / "empty"), SourceError, r"empty.* is neither a Zarr array nor a Zarr group"),
    (lambda read, folder: read(folder / "g"), SourceError, "g"),
    (lambda read, _: read(5), TypeError, "source is a int"),
    (lambda read, folder: read((zarr.storage.LocalStore(folder), "nothing")), SourceError, "nothing"),
    (lambda read, folder: read(folder / "g/a", level=1), ValueError, r"level=1, but .* is a single array"),
    (lambda read, folder: read(folder / "g/a", level="0"), TypeError, "level='0'"),
    (lambda read, folder: read(folder / "g/a", region=4), RegionError, "index 4 is out of bounds"),
]


@pytest.mark.parametrize("read", [read_zarr_to_gpu, plan_zarr_read])
@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_sources_levels_and_regions_that_do_not_fit(folder, read, call, error, message):
    (folder / "empty").mkdir()
    with pytest.raises(error, match=message):
        call(read, folder)


def test_every_way_to_name_an_array(folder):
    store = zarr.storage.LocalStore(folder)
    array = zarr.open_array(folder / "g/a", mode="r")
    sources = [folder / "g/a", str(folder / "g/a"), array, (store, "g/a"), array.store_path]
    sources += [zarr.storage.LocalStore(folder / "g/a"), f"file://{folder}/g/a"]
    for source in sources:
        plan = plan_zarr_read(source, region=(slice(1, 3), -1))
        assert plan.shape == (2,)
        assert plan.backend == "linumpy"
        assert plan.layout.root == str(folder / "g/a")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "gds"}, ValueError, "backend 'gds' is unknown: choose one of auto, linumpy, zarr-gpu, kvikio"),
        ({"scratch_bytes": 5}, ValueError, "scratch_bytes=5: at least 1048576"),
        *(
            ({"scratch_bytes": scratch}, TypeError, "scratch_bytes=.*: a whole number of bytes is needed")
            for scratch in ("512MB", 1.5, float("nan"), True, [2**24])
        ),
    ],
)
def test_options_that_do_not_fit(folder, options, error, message):
    with pytest.raises(error, match=message):
        read_zarr_to_gpu(folder / "g/a", **options)


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU here")
@pytest.mark.parametrize("backend", ["auto", "linumpy", "kvikio", "zarr-gpu"])
def test_without_a_gpu_it_says_what_is_missing(folder, backend):
    with pytest.raises(GpuUnavailableError) as caught:
        read_zarr_to_gpu(folder / "g/a", backend=backend)
    assert any(advice in str(caught.value) for advice in ("pip install", "nvidia-smi", "no NVIDIA driver"))


def test_dtypes_of_the_result(folder, tmp_path):
    plan = plan_zarr_read(folder / "g/a")
    assert cast_dtype(plan.layout.dtype, None) == np.dtype("=u2")
    assert cast_dtype(plan.layout.dtype, ">f4") == np.dtype("=f4")
    with pytest.raises(TypeError, match=r"requested dtype datetime64"):
        cast_dtype(plan.layout.dtype, "datetime64[s]")
    zarr.create_array(tmp_path / "c", shape=(4,), chunks=(2,), dtype="c8", compressors=None)
    with pytest.raises(TypeError, match=r"dtype=float32 would drop the imaginary parts of complex64"):
        cast_dtype(plan_zarr_read(tmp_path / "c").layout.dtype, "f4")


@pytest.mark.parametrize(
    ("dtype", "stored", "message"),
    [
        ("U5", "u2", "requested dtype <U5"),
        ("O", "u2", "requested dtype object"),
        ("datetime64[s]", "u2", "requested dtype datetime64"),
        ("f4", "c8", "dtype=float32 would drop the imaginary parts"),
    ],
)
def test_what_a_gpu_does_not_cast_to_is_not_read_on_the_cpu(tmp_path, dtype, stored, message):
    """A script that works on a laptop works on the server; and no imaginary part is lost with a warning alone."""
    zarr.create_array(tmp_path / "a", shape=(4,), chunks=(2,), dtype=stored)
    with pytest.raises(TypeError, match=message):
        linumpy.read_zarr(tmp_path / "a", device="cpu", dtype=dtype)


def test_a_report_reads_well():
    report = ReadReport(
        source="file:///data/<a>.zarr", backend="zarr-gpu", gds="not used", engine="zarr-python into device memory",
        fallback="codec 'zstd': chunks are not raw", shape=(2, 3), dtype="uint16", bytes_decoded=2**30,
        plan_seconds=0.25, read_seconds=0.25,
    )  # fmt: skip
    text = str(report)
    assert "2.00 GiB/s" in text
    assert "codec 'zstd'" in text
    assert "2 × 3 uint16" in text
    assert "&lt;a&gt;" in report._repr_html_()
    with pytest.raises(AttributeError):
        report.backend = "kvikio"


@pytest.mark.needs_core
@pytest.mark.parametrize("options", [{}, {"backend": "linumpy"}, {"backend": "kvikio"}, {"scratch_bytes": 2**21}])
def test_the_report_names_the_reader_that_read(folder, monkeypatch, options):
    """Not kvikio, which need not even be installed: `engine` says what read the bytes."""
    monkeypatch.setitem(sys.modules, "kvikio", None)
    monkeypatch.setattr(output, "free_memory", lambda *_: 2**30)
    with reference.fake_device(), contextlib.ExitStack() as scope:
        scope.callback(release)
        found, report = read_zarr_to_gpu(folder / "g/a", return_report=True, **options)
        assert found.get().tolist() == np.arange(20).reshape(4, 5).tolist()
    assert (report.backend, report.fallback, report.bytes_read) == ("linumpy", "", 40)
    assert "kvikio" not in report.engine
    assert report.gds == "not used (kvikio is not installed, which only GPUDirect Storage needs)"


def test_broken_metadata_names_the_array(folder):
    (folder / "g/a/zarr.json").write_text("{")
    with pytest.raises(SourceError, match=r"the Zarr metadata of .*g/a' cannot be read"):
        plan_zarr_read(folder / "g/a")


def test_strings_are_left_to_zarr(tmp_path):
    zarr.create_array(tmp_path / "s", shape=(4,), chunks=(2,), dtype=str, compressors=None)
    assert plan_zarr_read(tmp_path / "s").backend == "zarr-host"
    assert plan_zarr_read(tmp_path / "s", level=np.int64(0)).layout.unsupported.startswith("dtype")


@pytest.mark.parametrize("region", [None, (slice(1, 3), -1), (2, 4), (slice(2, 2), ...), (..., slice(1, 4))])
def test_read_zarr_reads_into_host_memory_without_a_gpu(folder, region, monkeypatch):
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    array = zarr.open_array(folder / "g/a", mode="r")
    expected = np.asarray(array[...] if region is None else array[region])
    found, report = linumpy.read_zarr(folder / "g/a", region=region, dtype=">f4", return_report=True)
    assert isinstance(found, np.ndarray)
    assert found.flags.c_contiguous
    assert (found.dtype, found.shape) == (np.dtype("=f4"), expected.shape)
    np.testing.assert_array_equal(found, expected)
    by_core = native.why_no_core() is None
    backend = "linumpy" if by_core else "zarr-python"
    assert (report.backend, report.shape, report.bytes_decoded) == (backend, expected.shape, found.nbytes)
    assert not by_core or report.bytes_read <= 40
    assert "not counted" not in str(report)
    assert "host memory: asked for" in str(report)


def test_read_zarr_keeps_the_bits_of_foreign_byte_order(tmp_path):
    stored = np.array([[-0.0, np.nan], [1.5, -np.inf]], ">f8")
    array = zarr.create_array(tmp_path / "a", shape=(2, 2), chunks=(1, 2), dtype=">f8")
    array[...] = stored
    found = linumpy.read_zarr(array, device="cpu")
    assert found.dtype == np.dtype("=f8")
    assert found.tobytes() == stored.astype("=f8").tobytes()


BROKEN = {
    "zstd": {},
    "gzip": {"compressors": zarr.codecs.GzipCodec()},
    "blosc": {"compressors": zarr.codecs.BloscCodec()},
    "crc32c": {"compressors": zarr.codecs.Crc32cCodec()},
    "raw": {"compressors": None},
    "shards": {"chunks": (2, 3), "shards": (4, 6)},
    "v2 zlib": {"zarr_format": 2, "compressors": numcodecs.Zlib(), "filters": None},
    "v2 lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4(), "filters": None},
    "v2 bz2": {"zarr_format": 2, "compressors": numcodecs.BZ2(), "filters": None},
}


@pytest.mark.parametrize("kept", [0, 5])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_chunk_is_named_on_the_cpu_too(tmp_path, kind, kept):
    """Codecs raise errors of many kinds; and of an empty shard zarr gives fill values."""
    array = zarr.create_array(tmp_path / "a", shape=(8, 12), dtype="u2", **({"chunks": (4, 6)} | BROKEN[kind]))
    array[...] = np.arange(96).reshape(8, 12)
    name = "1.1" if kind.startswith("v2") else "c/1/1"
    (tmp_path / "a" / name).write_bytes((tmp_path / "a" / name).read_bytes()[:kept])
    lazy = zarr_to_dask(tmp_path / "a", device="cpu")
    for read in (lambda: linumpy.read_zarr(tmp_path / "a", device="cpu"), lambda: lazy.compute(scheduler="sync")):
        with pytest.raises(ChunkError, match=f"/a/{name}[ :]"):
            read()
    region = np.s_[:4, 3]  # that does not touch it
    assert linumpy.read_zarr(tmp_path / "a", device="cpu", region=region).tolist() == [3, 15, 27, 39]


@pytest.mark.gpu
def test_read_zarr_reads_to_the_gpu_where_there_is_one(folder, cupy):
    found, report = linumpy.read_zarr(folder / "g/a", region=(slice(1, 3), -1), return_report=True)
    assert isinstance(found, cupy.ndarray)
    assert found.get().tolist() == [9, 14]
    assert (report.backend, report.fallback) == ("linumpy", "")
    assert isinstance(linumpy.read_zarr(folder / "g/a", device="cpu"), np.ndarray)


@pytest.mark.skipif(why_no_cuda() is None, reason="there is a GPU here")
def test_read_zarr_to_gpu_names_the_call_that_needs_none(folder):
    with pytest.raises(GpuUnavailableError, match=r"read_zarr_to_gpu needs a CUDA device: .*linumpy\.read_zarr"):
        read_zarr_to_gpu(folder / "g/a")
    with pytest.raises(GpuUnavailableError):
        linumpy.read_zarr(folder / "g/a", device="cuda")
    assert linumpy.read_zarr(folder / "g/a", device="auto").shape == (4, 5)
