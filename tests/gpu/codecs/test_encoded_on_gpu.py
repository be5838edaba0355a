"""If this fails, a device reads encoded chunks wrong (oracle: zarr-python, numcodecs)."""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec
from zarr.codecs import numcodecs as v3

from linumpy.device import to_host
from linumpy.errors import ChunkError
from linumpy.gpu import kvikio_zarr, read_zarr_to_gpu, release
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.launches import DeviceLimits
from tests.support.gpu.decoders import DeviceDecoder
from tests.support.gpu.mutants import CHAINS, FRAMES, by_numcodecs, corpus, disagreements, plain
from tests.support.gpu.reference import peak_memory, use_own_readers
from tests.support.other_writers import LEFT_TO_ZARR, TENSORSTORE, old_stores, tensorstore_store
from tests.support.stores import encoded_cases, plain_values, random_values, same, stored, write

pytestmark = pytest.mark.gpu

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(folder, shape=(70, 90, 110), chunks=(16, 32, 48), dtype="u2", **options):
    stored(folder, plain_values(dtype, shape, 5), chunks, **options)
    return zarr.open_array(folder, mode="r")


@settings(inside_a_test, max_examples=80)
@given(
    case=encoded_cases(),
    values=st.sampled_from([plain_values, random_values]),
    slot=st.sampled_from([None, 2**18]),
    direct=st.booleans(),
    decode_on=st.sampled_from(["device", "device", "host", None]),
)
def check_same_bytes(case, values, slot, direct, decode_on):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        array = write(case, Path(folder) / "a", values(case.dtype, case.shape, case.seed))
        use_own_readers(patch, slab_nbytes=slot, decode_on=decode_on)
        patch.setattr(kvikio_zarr, "gds_mode", lambda _: (direct, "a test"))
        got = read_zarr_to_gpu(array, region=case.region, strict=True)
        assert same(to_host(got), array[case.region])


@pytest.mark.parametrize("part", range(5))  # processes share them
def test_same_bytes_as_zarr(part):
    hypothesis.seed(part)(check_same_bytes)()


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("nbytes", [64, 5000, 300000])
def test_broken_bytes_are_refused_or_decoded_as_numcodecs_does(name, nbytes):
    for seed in range(2 if nbytes > 2**16 else 4):
        refused, wrong = disagreements(DeviceDecoder, np.random.default_rng([seed, nbytes]), name, nbytes, 256)
        assert not wrong, [one[:40].hex() for one in wrong[:3]]
        assert refused > 40


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize(("nbytes", "count"), [(1, 3), (131072, 40), (3_000_001, 5)])
def test_whole_bytes_are_decoded(name, nbytes, count):
    chain, encode = CHAINS[name]
    if chain.shuffle and nbytes % chain.shuffle:
        nbytes -= nbytes % chain.shuffle
    rng = np.random.default_rng(nbytes)
    chunks = [plain(rng, nbytes) for _ in range(count)] if nbytes else []
    if chunks:
        decoded, status = DeviceDecoder(chain, nbytes).decode([encode(one) for one in chunks], skew=3)
        assert not status.any()
        assert decoded == chunks


@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("kib", [26, 64, 99, None])
def test_every_branch_of_a_decoder(name, kib):
    """With the rings of this device, and with those of devices that have less shared memory."""
    limits = DeviceLimits(processors=15, shared_nbytes=kib * 1024) if kib else None
    for chain, encoded, chunks in corpus(name):
        decoded, status = DeviceDecoder(chain, len(chunks[0]), limits).decode(encoded)
        assert not status.any()
        assert decoded == chunks


@pytest.mark.parametrize("level", [1, 3, 19])
@pytest.mark.parametrize("count", [1, 300])
def test_many_frames_of_several_blocks(level, count):
    """Later blocks take tables, trees and offsets of those before; copies reach far behind the ring."""
    rng, nbytes = np.random.default_rng([level, count]), 2**19 + 77
    words = [rng.bytes(int(n)) for n in rng.integers(3, 40, 300)]
    far = rng.bytes(2**18)
    chunks = [
        b"".join(words[k] for k in rng.integers(0, 300, nbytes // 10)),
        far[: 2**17] + bytes(2**16) + far[::-1] + far,
        plain_values("u2", (nbytes // 2 + 1,), 5).tobytes(),
        rng.binomial(20, 0.3, nbytes).astype("u1").tobytes(),
    ]
    chunks = [(one * (nbytes // len(one) + 1))[:nbytes] for one in chunks]
    encoded = [numcodecs.Zstd(level).encode(one) for one in chunks]
    order = [k % len(chunks) for k in range(count)]
    decoded, status = DeviceDecoder(DecodeChain("zstd"), nbytes).decode([encoded[k] for k in order], skew=count % 4)
    assert not status.any()
    assert all(got == chunks[k] for got, k in zip(decoded, order, strict=True))


def test_kernels_are_compiled_side_by_side(monkeypatch, tmp_path, cupy):
    """In a process that finds none compiled, and again in one that finds them all; each kernel is one that runs."""
    program = """
import time
import cupy
cupy.zeros(3).sum()
from linumpy.gpu import kernels
from linumpy.gpu.codecs import decode
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode import launches, workspace
chain = DecodeChain("zstd")
space = workspace.plan_workspace(chain, chunks=1, stored_nbytes=1, decoded_nbytes=1, words_nbytes=0, pool_nbytes=0)
planned = launches.plan_launches(chain, space, 0, 0, 1, 1, launches.DeviceLimits(1, 2**16))
specs = [decode.kernel_spec(launch) for launch in planned]
begin = time.perf_counter()
kernels.prepare(specs)
print(time.perf_counter() - begin, *(kernels.load(one).num_regs for one in specs))
"""
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    seconds = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
        taken, *registers = done.stdout.split()
        assert len(registers) == 4
        assert all(int(one) > 8 for one in registers)
        seconds.append(float(taken))
    assert seconds[1] < seconds[0]


@pytest.mark.slow
def test_racecheck_finds_nothing():
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    groups = Path(__file__).with_name("test_zstd_groups_on_gpu.py")
    branches = f"{__file__}::test_every_branch_of_a_decoder", f"{groups}::test_every_branch"
    checked = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--require-gpu", "-k", "26 or 99 or 4096", *branches]
    done = subprocess.run([tool, "--tool", "racecheck", *checked], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "RACECHECK SUMMARY: 0 hazards displayed" in done.stdout, done.stdout[-3000:]


COMPRESSED = {
    "zstd": {"compressors": zarr.codecs.ZstdCodec(level=3)},
    "zstd-checksum": {"compressors": zarr.codecs.ZstdCodec(level=3, checksum=True)},
    "blosc-lz4": {"zarr_format": 2, "compressors": numcodecs.Blosc("lz4", 5, 1)},
    "blosc-zstd": {"zarr_format": 2, "compressors": numcodecs.Blosc("zstd", 5, 2)},
    "gzip": {"compressors": zarr.codecs.GzipCodec(level=5)},
    "lz4": {"zarr_format": 2, "compressors": numcodecs.LZ4()},
    "sharded": {"compressors": zarr.codecs.ZstdCodec(level=3), "shards": (64, 64, 64)},
    "crc32c": {"compressors": [zarr.codecs.ZstdCodec(level=3), zarr.codecs.Crc32cCodec()]},
}


@pytest.mark.parametrize("codec", sorted(COMPRESSED))
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_large_chunks_and_many_slabs(tmp_path, monkeypatch, codec, decode_on):
    array = make(tmp_path / "a", shape=(150, 200, 260), chunks=(32, 32, 64), **COMPRESSED[codec])
    use_own_readers(monkeypatch, decode_on=decode_on)
    for region in (None, (slice(3, -2), slice(17, 180), slice(1, -1)), (5,), (..., slice(100, 101))):
        expected = array[...] if region is None else array[region]
        for scratch in (2**21, None):
            got, report = read_zarr_to_gpu(array, region=region, scratch_bytes=scratch, strict=True, return_report=True)
            assert same(to_host(got), expected)
            assert report.scratch_bytes <= (scratch or 512 * 2**20)
            if scratch is None:  # a very small slot may be too small for what zstd needs
                assert (report.chunks_decoded_by_host > 0) == (decode_on == "host")
    assert ("on the device" in report.decoder) == (decode_on == "device")


def read_or_error(array):
    try:
        return read_zarr_to_gpu(array, strict=True), ""
    except ChunkError as error:
        return None, str(error)


@pytest.mark.parametrize("codec", ["zstd-checksum", "blosc-lz4", "gzip", "sharded", "crc32c", "lz4"])
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_a_broken_chunk_is_named_and_the_gpu_survives(tmp_path, monkeypatch, cupy, codec, decode_on):
    array = make(tmp_path / "a", shape=(70, 90, 130), chunks=(16, 32, 32), **COMPRESSED[codec])
    expected = array[...]
    use_own_readers(monkeypatch, decode_on=decode_on)
    files = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file() and path.name[0].isdigit())
    whole = files[0].read_bytes()
    read_or_error(array)  # the first read of a process opens the device
    rng = np.random.default_rng(3)
    for number in range(8):
        broken = bytearray(whole)
        at = int(rng.integers(min(500, len(whole) - 1)))
        if number < 3:
            del broken[at:]
        else:
            broken[at : at + 9] = rng.bytes(9)
        files[0].write_bytes(broken)
        pool = cupy.get_default_memory_pool()
        gc.collect()
        before = (len(os.listdir("/proc/self/fd")), pool.used_bytes())
        got, error = read_or_error(array)
        if error:
            assert str(files[0]) in error
        else:  # what numcodecs takes too is no error where no checksum tells
            assert codec not in ("zstd-checksum", "gzip", "crc32c")
            assert same(to_host(got), zarr.open_array(tmp_path / "a", mode="r")[...])
        del got
        gc.collect()
        assert (len(os.listdir("/proc/self/fd")), pool.used_bytes()) == before
    files[0].write_bytes(whole)
    assert same(to_host(read_zarr_to_gpu(array, strict=True)), expected)


def test_the_host_decodes_what_the_device_gives_up(tmp_path, monkeypatch):
    """Two zstd frames, one after another, are a chunk too; no encoder of zarr writes them."""
    array = make(tmp_path / "a", shape=(64, 64), chunks=(16, 64), compressors=zarr.codecs.ZstdCodec())
    file = tmp_path / "a/c/1/0"
    data = numcodecs.Zstd().decode(file.read_bytes())
    file.write_bytes(numcodecs.Zstd().encode(data[:1000]) + numcodecs.Zstd().encode(data[1000:]))
    use_own_readers(monkeypatch, decode_on="device")
    got, report = read_zarr_to_gpu(array, strict=True, return_report=True)
    assert same(to_host(got), array[...])
    assert report.chunks_decoded_by_host == 1
    assert "chunks decoded by the host: 1" in str(report)


def test_memory_is_bounded(tmp_path, cupy, monkeypatch):
    release()  # what earlier tests left
    array = make(tmp_path / "a", shape=(256, 256, 260), chunks=(64, 64, 64))
    pool = cupy.get_default_memory_pool()
    for decode_on in ("device", "host"):
        use_own_readers(monkeypatch, decode_on=decode_on)
        for scratch in (8 * 2**20, 64 * 2**20):
            pool.free_all_blocks()
            with peak_memory(cupy) as peak:
                got = read_zarr_to_gpu(array, scratch_bytes=scratch)
            assert got.nbytes < peak() <= got.nbytes + scratch
            del got


def test_ordered_on_the_current_stream(tmp_path, cupy):
    array = make(tmp_path / "a", shape=(64, 256, 256), chunks=(32, 64, 64))
    expected = array[...]
    for _ in range(5):
        with cupy.cuda.Stream(non_blocking=True):
            out = cupy.empty(array.shape, "u2")
            slow = cupy.zeros(2**24, "f4")
            for _ in range(40):
                cupy.sqrt(slow, out=slow)
            out.fill(3)  # still waiting when the read starts
            again = read_zarr_to_gpu(array, out=out, strict=True)
            assert same(to_host(again ^ cupy.uint16(1)), expected ^ np.uint16(1))


def test_stores_that_zarr_2_18_wrote(tmp_path):
    for name, folder, expected in old_stores(tmp_path):
        got, report = read_zarr_to_gpu(folder, return_report=True)
        assert same(to_host(got), expected), name
        assert (report.backend == "zarr-host") == (name in LEFT_TO_ZARR)


@pytest.mark.parametrize("name", sorted(TENSORSTORE))
def test_stores_that_tensorstore_wrote(tmp_path, monkeypatch, name):
    expected = tensorstore_store(name, tmp_path / "a")
    for decode_on in ("device", "host"):
        use_own_readers(monkeypatch, decode_on=decode_on)
        assert same(to_host(read_zarr_to_gpu(tmp_path / "a", strict=True)), expected)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("made", ["delta", "scale"])
def test_filters_of_zarr_v3(tmp_path, made, sharded):
    delta, scale = v3.Delta(dtype="<i4", astype="<i2"), v3.FixedScaleOffset(offset=20, scale=0.5, astype="<i2")
    chain = [delta if made == "delta" else scale, BytesCodec(), ZstdCodec()]
    chain = [ShardingCodec(chunk_shape=(8, 16), codecs=chain)] if sharded else chain
    chunks = (16, 32) if sharded else (8, 16)
    array = zarr.create(
        store=tmp_path / "a", shape=(23, 40), chunks=chunks, dtype="i4", codecs=chain, zarr_format=3, fill_value=3
    )
    array[:, :30] = np.random.default_rng(1).integers(0, 100, (23, 30))
    got, report = read_zarr_to_gpu(array, region=(slice(3, 20), slice(5, None)), strict=True, return_report=True)
    assert same(to_host(got), array[3:20, 5:])
    assert report.backend == "zarr-python"
    assert "filter" in report.fallback


@pytest.mark.parametrize("nbytes", [5, 10])
def test_unusual_zstd_frames_as_numcodecs(nbytes):
    """Frames of unknown size, of wide windows, several of them: taken as numcodecs takes them, or left to the host."""
    chain, stored = DecodeChain("zstd"), [one or b"\0" for one in FRAMES.values()]
    got, status = DeviceDecoder(chain, nbytes).decode(stored)
    codes = dict(zip(FRAMES, status.tolist(), strict=True))
    for name, one, decoded in zip(FRAMES, stored, got, strict=True):
        if codes[name] == 0:
            assert bytes(decoded) == by_numcodecs(chain, one, nbytes), name
    if nbytes == 5:
        assert codes["window of 128 MiB"] == 0
        assert codes["window of 256 MiB"] != 0


@pytest.mark.parametrize(("size", "chunk"), [(2, 48), (255, 2550), (2048, 6144), (2056, 6168), (4096, 8192), (7, 48)])
def test_shuffled_elements_of_any_size(tmp_path, size, chunk):
    values = np.random.default_rng(0).integers(0, 256, 3 * chunk).astype("u1")
    filters = [numcodecs.Shuffle(size if chunk % size == 0 else 1)]
    options = {"shape": values.shape, "chunks": (chunk,), "dtype": "u1", "zarr_format": 2}
    zarr.create_array(tmp_path / "a", filters=filters, compressors=numcodecs.LZ4(), **options)[...] = values
    document = json.loads((tmp_path / "a/.zarray").read_text())
    (tmp_path / "a/.zarray").write_text(json.dumps(document | {"filters": [{"id": "shuffle", "elementsize": size}]}))
    if chunk % size:
        with pytest.raises(ChunkError, match=r"cannot be read: Shuffle buffer .* multiple of elementsize"):
            read_zarr_to_gpu(tmp_path / "a")
        return
    got, report = read_zarr_to_gpu(tmp_path / "a", return_report=True)
    assert same(to_host(got), values)
    assert (report.backend == "zarr-host") == (size > 2048)


def test_the_shuffle_of_nczarr_is_undone(tmp_path):
    """Its elementsize 0 is the size of an item."""
    make(tmp_path / "a", zarr_format=2, filters=[numcodecs.Shuffle(2)], compressors=numcodecs.Zlib(1))
    document = json.loads((tmp_path / "a/.zarray").read_text())
    (tmp_path / "a/.zarray").write_text(
        json.dumps(document | {"filters": [{"id": "shuffle", "elementsize": 0}], "_nczarr_array": {}})
    )
    for options in ({"strict": True}, {"backend": "zarr-gpu"}):
        got = to_host(read_zarr_to_gpu(tmp_path / "a", **options))
        assert same(got, plain_values("u2", (70, 90, 110), 5))
