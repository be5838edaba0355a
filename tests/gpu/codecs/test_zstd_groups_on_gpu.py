"""If this fails, a device decodes long zstd frames wrong (oracle: numcodecs)."""

import functools
import time

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy.gpu import read_zarr_to_gpu
from linumpy.gpu.read.reader import Reader
from linumpy.plan.codecs import DecodeChain
from tests.support.gpu.decoders import DeviceDecoder
from tests.support.gpu.mutants import corpus, disagreements
from tests.support.gpu.reference import use_own_readers

pytestmark = pytest.mark.gpu

NAMES = ["zstd", "zstd-checksum", "crc32c-of-zstd", "zstd-of-crc32c", "shuffle-zstd"]
MIB = 2**20


def speckle(nbytes, seed=0):
    return np.random.default_rng(seed).gamma(4.0, 8.0, nbytes // 2).astype("u2").tobytes()


def repeated(nbytes, period):
    """Bytes that repeat those a period before, but for a few."""
    rng = np.random.default_rng(period)
    data = np.frombuffer(rng.bytes(period) * (nbytes // period + 1), np.uint8)[:nbytes].copy()
    data[rng.integers(0, nbytes, nbytes // 3000)] = 7
    return data.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [4096, 2**17, 2**22])
def test_every_branch(name, group):
    for chain, encoded, chunks in corpus(name):
        decoded, status = DeviceDecoder(chain, len(chunks[0]), group_nbytes=group).decode(encoded)
        assert not status.any()
        assert decoded == chunks


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("group", [2**20, 2**23, 2**25])
def test_long_frames(level, group):
    """Copies by way of many blocks, from one group or several before; again and again, as threads happen to run."""
    nbytes = 20 * MIB + 1002
    far = np.random.default_rng(1).bytes(MIB)
    chunks = [
        speckle(nbytes),
        bytes(nbytes),
        repeated(nbytes, 1000),
        repeated(nbytes, 2**17 + 3),
        (far + speckle(MIB // 2)) * (nbytes // MIB + 1),
    ]
    chunks = [one[:nbytes] for one in chunks]
    encoded = [numcodecs.Zstd(level).encode(one) for one in chunks]
    decoder = DeviceDecoder(DecodeChain("zstd"), nbytes, group_nbytes=group)
    for turn in range(3):
        decoded, status = decoder.decode(encoded, skew=turn)
        assert not status.any()
        assert decoded == chunks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nbytes", [5000, 300_000])
def test_broken_bytes_are_refused_or_decoded_as_numcodecs_does(name, nbytes):
    rng = np.random.default_rng([nbytes, len(name)])
    for group in (4096, 2**18):
        decoder = functools.partial(DeviceDecoder, group_nbytes=group)
        refused, wrong = disagreements(decoder, rng, name, nbytes, 300)
        assert not wrong, [one[:40].hex() for one in wrong[:3]]
        assert refused > 10


@pytest.mark.parametrize("side", [1024, 4096, 8192, 12288])
def test_reads_of_long_chunks(tmp_path, cupy, side):
    """Of 2, 32, 128 and 288 MiB, the last of which does not fit the scratch; with default options."""
    values = np.frombuffer(speckle(2 * side * side), "u2").reshape(side, side)
    array = zarr.create_array(
        tmp_path / "a", shape=(side + 5, side), chunks=values.shape, dtype="u2", compressors=zarr.codecs.ZstdCodec()
    )
    array[:side], array[side:] = values, values[:5]
    expected = cupy.asarray(array[...])
    for _ in range(3):
        got, report = read_zarr_to_gpu(array, strict=True, return_report=True)
        assert (got == expected).all()
        assert report.chunks_decoded_by_host == 0
        assert report.chunks_read == 2


@pytest.mark.parametrize("codec", [zarr.codecs.GzipCodec(level=1), zarr.codecs.ZstdCodec(level=1)])
@pytest.mark.parametrize("side", [2896, 6144])
def test_long_chunks_that_the_host_decodes(tmp_path, monkeypatch, cupy, codec, side):
    """Of 16 and of 72 MiB, which are larger than a slab."""
    use_own_readers(monkeypatch, decode_on="host")
    values = np.frombuffer(speckle(2 * side * side), "u2").reshape(side, side)
    array = zarr.create_array(
        tmp_path / "a", shape=(6 * side, side), chunks=values.shape, dtype="u2", compressors=codec
    )
    for row in range(6):
        array[row * side : (row + 1) * side] = np.roll(values, row)
    got, report = read_zarr_to_gpu(array, strict=True, return_report=True)
    assert report.chunks_decoded_by_host == 6
    for row in range(6):
        assert (got[row * side : (row + 1) * side] == cupy.asarray(np.roll(values, row))).all()


def test_memory_beyond_the_scratch_is_given_back(tmp_path, cupy):
    array = zarr.create_array(tmp_path / "a", shape=(144 * MIB,), chunks=(144 * MIB,), dtype="u2", fill_value=0)
    array[:] = np.frombuffer(speckle(2 * 16 * MIB), "u2")[np.arange(144 * MIB) % (16 * MIB)]
    expected = cupy.asarray(array[:])
    with Reader() as reader:
        assert (reader.submit(array).result() == expected).all()
        for _ in range(100):
            if reader.device_bytes <= 512 * MIB:
                break
            time.sleep(0.05)
        assert reader.device_bytes <= 512 * MIB
        assert (reader.submit(array, (slice(5, 99),)).result() == expected[5:99]).all()
    with Reader(scratch_bytes=2**28) as reader:  # what was asked for is kept
        assert (reader.submit(array).result() == expected).all()
        assert reader.device_bytes <= 2**28
