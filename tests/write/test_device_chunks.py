"""If this fails, raw chunks written from a device hold wrong bytes."""

import contextlib
import errno
import itertools
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numcodecs.checksum32 import CRC32C
from zarr.codecs import BloscCodec, ZstdCodec

from linumpy.write import device_chunks
from linumpy.write.device_chunks import cut_into_chunks, span_groups
from linumpy.write.pyramid import halve
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support.stores import levels_of

DTYPES = ["bool", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"]


def values(shape, dtype="u2", seed=1):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    return rng.random(shape) < 0.5 if dtype == "bool" else rng.normal(0, 100, shape).astype(dtype)


@st.composite
def blocks(draw):
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 12)) for _ in range(rank)]
    return shape, tuple(draw(st.integers(1, 7)) for _ in range(rank)), draw(st.sampled_from(["u1", "f4", ">u2"]))


@given(blocks(), st.booleans())
def test_chunks_are_cut_as_by_slices(block, transposed):
    shape, chunk, dtype = block
    data = values(shape, dtype.strip(">")).astype(dtype)
    data = np.asfortranarray(data) if transposed else data
    got = cut_into_chunks(data, chunk, 7)
    assert got.dtype == data.dtype.newbyteorder("=")
    assert got.flags.c_contiguous
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(shape, chunk, strict=True))):
        part = data[tuple(slice(i * c, i * c + c) for i, c in zip(index, chunk, strict=True))]
        expected = np.full(chunk, 7, got.dtype)
        expected[tuple(map(slice, part.shape))] = part
        assert np.array_equal(got[index], expected)


class FakeFile:
    """What the room needs of kvikio's ``CuFile``: threads that write from host memory; some fail."""

    open_files = most_open = 0
    pool = ThreadPoolExecutor(2)
    fails = ""

    def __init__(self, path, flags):
        assert flags == "w"
        self.path = str(path)
        if self._is("open"):
            raise RuntimeError("KvikIO failure at: file_utils.cpp:1: Too many open files")
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        FakeFile.open_files += 1
        FakeFile.most_open = max(FakeFile.most_open, FakeFile.open_files)

    def _is(self, way):
        return self.fails == way and self.path.endswith("3")

    def pwrite(self, buffer):
        assert buffer.flags.c_contiguous
        if self._is("submit"):
            raise RuntimeError("KvikIO failure")
        future = self.pool.submit(self._write, memoryview(buffer))
        return types.SimpleNamespace(get=future.result)

    def _write(self, data):
        if self._is("write"):
            raise RuntimeError("KvikIO failure at: posix_io.hpp:1: POSIX error on pwrite: No space left on device")
        if self._is("interrupt"):
            raise KeyboardInterrupt
        return os.pwrite(self._fd, data[: len(data) // 2] if self._is("short") else data, 0)

    def close(self):
        os.close(self._fd)
        FakeFile.open_files -= 1


@pytest.mark.parametrize("width", [1, 7, 64, 200])
@pytest.mark.parametrize("with_checksum", [False, True])
def test_spans_are_put_together_from_pieces(width, with_checksum):
    data = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    spans = [(0, 10), (10, 11), (30, 130), (150, 200)]
    pieces = ((begin, data[begin : begin + width]) for begin in range(0, 200, width))
    stored = b"".join(
        bytes(part) for group in span_groups(pieces, spans, with_checksum=with_checksum) for part in group
    )
    encode = CRC32C(location="end").encode if with_checksum else bytes
    assert stored == b"".join(bytes(encode(data[a:b])) for a, b in spans)


@pytest.fixture
def fake_kvikio(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=FakeFile))
    monkeypatch.setattr(device_chunks, "transfer_settings", contextlib.nullcontext)
    monkeypatch.setattr(FakeFile, "fails", "")
    monkeypatch.setattr(FakeFile, "most_open", 0)
    yield FakeFile
    assert FakeFile.open_files == 0


@pytest.mark.parametrize("fails", ["", "open", "submit", "write", "short"])
def test_what_kvikio_does_not_write_is_written_all_the_same(tmp_path, fake_kvikio, monkeypatch, caplog, fails):
    monkeypatch.setattr(fake_kvikio, "fails", fails)
    monkeypatch.setattr(device_chunks, "_MAX_OPEN_FILES", 4)
    rows = values((14, 1000), "u1")
    paths = [str(tmp_path / f"c{number}") for number in range(14)]
    device_chunks.write_rows(paths, rows)
    for path, row in zip(paths, rows, strict=True):
        with open(path, "rb") as file:
            assert file.read() == row.tobytes()
    assert fake_kvikio.most_open == 4
    assert [record.getMessage()[:31] for record in caplog.records] == ["kvikio did not write 1 chunks ("] * 2 * bool(
        fails
    )


def test_the_systems_error_is_told(tmp_path, fake_kvikio, monkeypatch):
    def full(path, parts):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(fake_kvikio, "fails", "write")
    monkeypatch.setattr(device_chunks, "write_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*c3'"):
        device_chunks.write_rows([str(tmp_path / f"c{number}") for number in range(6)], values((6, 10), "u1"))


def test_an_interrupt_waits_for_what_is_under_way(tmp_path, fake_kvikio, monkeypatch):
    monkeypatch.setattr(fake_kvikio, "fails", "interrupt")
    with pytest.raises(KeyboardInterrupt):
        device_chunks.write_rows([str(tmp_path / f"c{number}") for number in range(6)], values((6, 10), "u1"))


# --- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 9, 11), (8, 12, 6), (1, 30, 17), (33, 18), (5,)])
def test_halves_are_those_of_the_host(cupy, shape, dtype):
    data = values(shape, dtype)
    for how in ("mean", "label", "nearest"):
        got = halve(cupy.asarray(data), how)
        assert isinstance(got, cupy.ndarray)
        assert got.dtype == data.dtype
        assert got.get().tobytes() == halve(data, how).tobytes()


@pytest.mark.gpu
def test_halves_of_views_are_those_of_the_host(cupy):
    data = values((12, 9, 14), "i8")
    for view in (lambda x: x.transpose(2, 0, 1), lambda x: x[::2, ::-1, 1:]):
        assert np.array_equal(halve(view(cupy.asarray(data))).get(), halve(view(data)))


@pytest.mark.gpu
@given(blocks())
def test_chunks_are_cut_on_a_device_as_on_the_host(block):
    import cupy

    shape, chunk, dtype = block
    data = values(shape, dtype.strip(">"))
    assert np.array_equal(cut_into_chunks(cupy.asarray(data), chunk, 7).get(), cut_into_chunks(data, chunk, 7))


OPTIONS = [
    {},
    {"codec": "none"},
    {"codec": "none+crc32c", "chunks": (4, 8, 8), "shards": (8, 16, 16)},
    {"codec": "blosc:lz4:bit"},
    {"codec": "blosc:zstd:byte:small+crc32c", "chunks": (4, 8, 8), "shards": (8, 16, 16)},
    {"codec": "zstd", "ngff_version": "0.4"},
    {"codec": "lz4", "ngff_version": "0.4"},
    {"codec": "gzip"},
    {"compressors": ZstdCodec()},
    {"compressors": BloscCodec(), "downsampling": "nearest"},
    {"chunks": (4, 8, 8), "shards": (8, 16, 16)},
    {"ngff_version": "0.4"},
    {"ngff_version": "0.4", "compressors": numcodecs.Zstd()},
    {"dtype": ">u2"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [(64, 70, 81), (8, 16, 16), (16, 70, 81)])
def test_a_device_array_is_written_as_the_hosts(cupy, tmp_path, options, step):
    """Regions of any alignment: pyramids are made in one go, or read back."""
    data = values((40, 70, 81))
    options = {"chunks": (8, 16, 16), "levels": 4, "fill_value": 5, "dtype": "u2"} | options
    dtype = options.pop("dtype")
    with OmeZarrWriter(tmp_path / "host", data.shape, dtype, (1, 1, 1), **options) as target:
        target[...] = data
    on_device = cupy.asarray(data)
    with OmeZarrWriter(tmp_path / "device", data.shape, dtype, (1, 1, 1), **options) as target:
        for corner in itertools.product(*(range(0, n, s) for n, s in zip(data.shape, step, strict=True))):
            region = tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, step, data.shape, strict=True))
            target[region] = on_device[region]
    assert np.array_equal(levels_of(tmp_path / "device")[0], data)
    for mine, other in zip(levels_of(tmp_path / "device"), levels_of(tmp_path / "host"), strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_out_raw(cupy, tmp_path, dtype):
    data = values((9, 20, 30), dtype)
    write_omezarr(tmp_path / "i", cupy.asarray(data), (1, 1, 1), chunks=(4, 8, 16), levels=3, codec="none")
    for one in levels_of(tmp_path / "i"):
        assert one.tobytes() == data.tobytes()
        data = halve(data)


@pytest.mark.gpu
def test_regions_that_cut_chunks_on_a_device(cupy, tmp_path):
    data = values((24, 30, 40))
    options = {"chunks": (8, 8, 8), "levels": 3, "buffer_bytes": 2**22}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), **options) as target:
        for number, begin in enumerate(range(0, 30, 7)):  # from the device and the host by turns
            block = data[:, begin : begin + 7]
            target[:, begin : min(begin + 7, 30)] = cupy.asarray(block) if number % 2 else block
        target[3:5, 3:5] = cupy.asarray(data[3:5, 3:5])
    for one in levels_of(tmp_path / "i"):
        assert np.array_equal(one, data)
        data = halve(data)


@pytest.mark.gpu
def test_raw_chunks_leave_through_kvikio(cupy, tmp_path, monkeypatch):
    """Where cuFile may take them, no array is copied to the host by CuPy, neither for the image nor for its pyramid."""
    import kvikio

    opened, real = [], kvikio.CuFile

    def count(path, flags="r"):
        opened.append((str(path), flags))
        return real(path, flags)

    monkeypatch.setattr(kvikio, "CuFile", count)
    monkeypatch.setattr("linumpy.write.device_chunks.kvikio_mode", lambda: ("cufile", "said so"))
    monkeypatch.setattr("linumpy.write.device_chunks.pinned_copies", lambda *_: pytest.fail("copied to the host"))
    monkeypatch.setattr("linumpy.write.device_chunks.to_host", lambda x: pytest.fail("kvikio did not write a chunk"))
    data = values((64, 64, 64), "f4")
    with OmeZarrWriter(
        tmp_path / "i", data.shape, "f4", (1, 1, 1), chunks=(16, 16, 16), levels=3, codec="none"
    ) as target:
        for z in range(0, 64, 16):
            target[z : z + 16] = cupy.asarray(data[z : z + 16])
    assert len({path for path, flags in opened if flags == "w"}) == 64 + 8 + 1
    for one in levels_of(tmp_path / "i"):
        assert np.array_equal(one, data)
        data = halve(data)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["compat", "none"])
@pytest.mark.parametrize("landing", [1, 3000, 2**26])
def test_without_cufile_they_land_in_pinned_memory(cupy, tmp_path, monkeypatch, mode, landing):
    monkeypatch.setattr("linumpy.write.device_chunks.kvikio_mode", lambda: (mode, "said so"))
    monkeypatch.setattr("linumpy.write.device_chunks.write_rows", lambda *_: pytest.fail("kvikio was asked"))
    monkeypatch.setattr("linumpy.write.device_chunks._PINNED_NBYTES", landing)
    data = values((20, 30, 40))
    write_omezarr(tmp_path / "i", cupy.asarray(data), (1, 1, 1), chunks=(8, 8, 8), levels=3, codec="none")
    for one in levels_of(tmp_path / "i"):
        assert np.array_equal(one, data)
        data = halve(data)


@pytest.mark.gpu
def test_a_block_is_taken_when_its_stream_has_made_it(cupy, tmp_path):
    """What is computed on a stream of one's own, right before, is what is written."""
    data = values((64, 256, 256), "f4")
    stream = cupy.cuda.Stream(non_blocking=True)
    with OmeZarrWriter(tmp_path / "i", data.shape, "f4", (1, 1, 1), chunks=(32, 64, 64), levels=2) as target, stream:
        block = cupy.asarray(data)
        for _ in range(50):
            block = block + 1
        target[...] = block
    expected = data
    for _ in range(50):
        expected = expected + np.float32(1)
    assert np.array_equal(levels_of(tmp_path / "i")[0], expected)
    assert np.array_equal(levels_of(tmp_path / "i")[1], halve(expected))


@pytest.mark.gpu
def test_a_full_disk_on_a_device(cupy, tmp_path):
    """A process that may not write files of more than 64 KiB."""
    import subprocess

    code = (
        "import resource, shutil, sys, cupy; from linumpy.write.writer import write_omezarr\n"
        "array = cupy.random.random((64, 64, 64), dtype='f4')\n"
        "shutil.rmtree(write_omezarr(sys.argv[1], array, (1, 1, 1)))\n"  # all kernels are in CuPy's cache now
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))\n"
        "write_omezarr(sys.argv[1], array, (1, 1, 1))\n"
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "i"], capture_output=True, text=True)
    assert result.returncode == 1
    told = f"OSError: [Errno 27] File too large; nothing is left of: '{tmp_path}/i'"
    assert told in result.stderr.splitlines()
    assert list(tmp_path.iterdir()) == []
