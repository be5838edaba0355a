"""If this fails, long zstd frames, whose blocks are carried out side by side, decode wrong (oracle: numcodecs)."""

import functools

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy.errors import ChunkError
from linumpy.gpu import plan_zarr_read
from linumpy.gpu.read import reader
from linumpy.gpu.read.limits import Limits, placement_of
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.launches import DeviceLimits
from tests.support.budget import matrix
from tests.support.gpu import fake_cupy, reference
from tests.support.gpu.decoders import BIG, Decoder, kernel
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.mutants import FRAMES, by_numcodecs, disagreements, frame
from tests.support.stores import plain_values, same

ZSTD = DecodeChain("zstd")
BLOCK = 2**17
pytestmark = needs_compiler


def rows_that_copy(rng, nbytes, period):
    """Bytes that repeat those a period before but for a few, so that each block copies from the one before."""
    data = np.frombuffer(rng.bytes(period) * (nbytes // period + 1), np.uint8)[:nbytes].copy()
    data[rng.integers(0, nbytes, nbytes // 500)] = 7
    return data.tobytes()


def ugly(rng, nbytes):
    """Bytes of all kinds: noise, runs, words, slopes, copies of the last byte or from far away."""
    words = [rng.bytes(int(n)) for n in rng.integers(3, 60, 200)]
    far = rng.bytes(nbytes // 3)
    yield rng.bytes(nbytes)
    yield bytes(nbytes)
    yield plain_values("u2", (nbytes // 2 + 1,), 5).tobytes()[:nbytes]
    yield b"".join(words[k] for k in rng.integers(0, 200, nbytes // 3))[:nbytes]
    yield b"".join(bytes([k]) * n for k, n in rng.integers((0, 1), (256, 90000), (nbytes, 2)).tolist()[:300])[:nbytes]
    yield far + bytes(nbytes - 2 * len(far)) + far
    yield rng.gamma(4.0, 8.0, nbytes // 2 + 1).astype("u2").tobytes()[:nbytes]
    for period in (1, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 5):
        yield rows_that_copy(rng, nbytes, min(period, nbytes))


def load(seed):
    """Load kernels whose threads run in another order."""

    def one(spec):
        made = kernel(spec)
        made.seed = seed
        return made

    return one


@pytest.mark.parametrize(("nbytes", "group"), matrix([1, 4097, BLOCK, BLOCK + 50_001], [4096, BLOCK, 2**20]))
def test_bytes_of_all_kinds(nbytes, group):
    """Groups of no block, of one, of all; frames that begin in one group and end in another."""
    rng = np.random.default_rng(nbytes + group)
    chunks = [one.ljust(nbytes, b"?") for one in ugly(rng, nbytes)]
    for level in (1, 5, 19) if nbytes < BLOCK else (3,):
        encoded = [numcodecs.Zstd(level, checksum=level == 5).encode(one) for one in chunks]
        decoder = Decoder(ZSTD, nbytes, group_nbytes=group, load=load(level + nbytes))
        decoded, status = decoder.decode(encoded, skew=level % 4)
        assert not status.any()
        assert decoded == chunks


def test_offsets_that_are_longer_than_a_group():
    rng = np.random.default_rng(1)
    far = rng.bytes(2**18 + 77)
    chunk = far + rng.binomial(30, 0.2, 2**17).astype("u1").tobytes() + far[5:]
    encoded = numcodecs.Zstd(19).encode(chunk)
    assert len(encoded) < 0.6 * len(chunk)  # it has found them
    for group in (2**14, 2**20):
        decoded, status = Decoder(ZSTD, len(chunk), group_nbytes=group).decode([encoded])
        assert not status.any()
        assert decoded == [chunk]


def test_devices_of_one_processor():
    """Each block of the grid carries out many blocks of a frame."""
    rng = np.random.default_rng(2)
    chunks = [rows_that_copy(rng, 9 * BLOCK // 2, period) for period in (BLOCK // 2, 999)]
    decoder = Decoder(ZSTD, len(chunks[0]), group_nbytes=2**20, limits=DeviceLimits(1, BIG.shared_nbytes))
    decoded, status = decoder.decode([numcodecs.Zstd(3).encode(one) for one in chunks])
    assert not status.any()
    assert decoded == chunks


@pytest.mark.parametrize(
    ("name", "nbytes", "group"),
    matrix(
        ["zstd", "zstd-checksum", "shuffle-zstd", "crc32c-of-zstd", "zstd-of-crc32c"], [5000, 140000], [2**18, 4096]
    ),
)
def test_broken_bytes_are_refused_or_decoded_as_numcodecs_does(name, nbytes, group):
    """Whole frames beside broken ones are right: they share groups, and memory that broken ones leave as it was."""
    decoder = functools.partial(Decoder, group_nbytes=group)
    refused, wrong = disagreements(decoder, np.random.default_rng([nbytes, len(name), group]), name, nbytes, 60)
    assert not wrong, [one[:40].hex() for one in wrong[:3]]
    assert refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_more_broken_bytes(seed):
    rng = np.random.default_rng(seed)
    for nbytes in (64, 20000, 300000):
        group = nbytes // int(rng.choice([1, 3, 4, 15])) // 16 * 16
        decoder = functools.partial(Decoder, group_nbytes=max(16, group))
        _, wrong = disagreements(decoder, rng, "zstd", nbytes, 60)
        assert not wrong, [one[:40].hex() for one in wrong[:3]]


@pytest.mark.parametrize("nbytes", [5, 10])
def test_frames_as_other_libraries_write_them(nbytes):
    """The same are taken as where frames are carried out one by one."""
    stored = [one for one in FRAMES.values() if one]
    decoded, status = Decoder(ZSTD, nbytes, group_nbytes=16).decode(stored)
    _, expected = Decoder(ZSTD, nbytes).decode(stored)
    assert (status != 0).tolist() == (expected != 0).tolist()
    assert (status == 0).any() == (nbytes == 5)
    for one, got, code in zip(stored, decoded, status.tolist(), strict=True):
        assert code or got == by_numcodecs(ZSTD, one, nbytes)


def test_blocks_of_any_length():
    """Stored ones, repeated bytes, and ones of no bytes, which belong to no group; more than a warp places at once."""
    rng = np.random.default_rng(3)
    kinds = [(0, n, rng.bytes(n)) for n in (0, 1, 5, 300, BLOCK)] + [(1, n, b"x") for n in (0, 1, 70000)]
    blocks = [kinds[k] for k in rng.integers(0, len(kinds), 45)]
    chunk = b"".join(data if kind == 0 else data * n for kind, n, data in blocks)
    frames = [frame(*blocks), frame(*blocks, content=len(chunk)), frame(*blocks[:-1]), frame(*blocks, (0, 1, b"y"))]
    decoder = Decoder(ZSTD, len(chunk), group_nbytes=2**16)
    decoded, status = decoder.decode(frames)
    expected = [by_numcodecs(ZSTD, one, len(chunk)) for one in frames]
    assert [chunk, chunk, None, None] == expected
    assert [got if code == 0 else None for got, code in zip(decoded, status.tolist(), strict=True)] == expected


@pytest.mark.needs_core
@pytest.mark.parametrize(
    "region", [(), pytest.param((slice(900, 1030), slice(5, None)), marks=pytest.mark.slow)], ids=["all", "part"]
)
def test_a_read_of_long_chunks(tmp_path, region):
    """End to end, with default options: the device decodes a few long chunks, all their blocks side by side."""
    values = plain_values("u2", (1500, 1050), 4)
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=(1000, 1050), dtype="u2", fill_value=9)
    array[...] = values
    job = reference.make_job(array, region)
    assert same(reference.execute(job), array[region])
    way = placement_of(job.layout.chain, job.layout.chunk_nbytes, 2, Limits(job.scratch_bytes))
    assert "all blocks in parallel" in str(way)
    assert job.report.chunks_decoded_by_host == 0
    assert job.report.chunks_read == job.stats.chunks == 2
    if region:
        return
    file = tmp_path / "a/c/1/0"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ChunkError, match=r"chunk \(1, 0\) of .* cannot be decoded \(zstd\)"):
        reference.execute(reference.make_job(array))


@pytest.mark.needs_core
@pytest.mark.parametrize("free", [0, 2**23, 2**27])
@pytest.mark.parametrize("fails", [False, True])
def test_a_chunk_that_does_not_fit_the_scratch(tmp_path, monkeypatch, free, fails):
    """It gets more memory, if there is twice as much, and gives it back; else the host decodes it."""
    array = zarr.create_array(tmp_path / "a", shape=(1050, 1050), chunks=(1050, 1050), dtype="u2", fill_value=9)
    array[...] = plain_values("u2", array.shape, 2)
    monkeypatch.setattr(reader, "DEFAULT_SCRATCH_BYTES", 2**22)
    monkeypatch.setattr(fake_cupy.Device, "FREE_NBYTES", free)
    with reference.fake_device() as device:
        real, held = device.cupy.cuda.alloc, []

        def alloc(nbytes):
            held.append(nbytes)
            if fails and nbytes > 2**22:
                raise MemoryError
            return real(nbytes)

        device.cupy.cuda.alloc = alloc
        job = reference.make_job(array, scratch_bytes=2**22)
        assert same(job.run_on(device), array[...])
        assert device.given_out() < 2**22
    on_device = free == 2**27
    assert job.report.chunks_decoded_by_host == (fails or not on_device)
    assert (max(held) > 2**22) == on_device
    assert max(held) < 2**26


def test_a_plan_says_how_much_memory_a_long_chunk_needs(tmp_path):
    array = zarr.create_array(tmp_path / "a", shape=(2**30,), chunks=(2**30,), dtype="u1", fill_value=9)
    text = str(plan_zarr_read(array))
    assert "on the device, 1 slab of about 1 chunk at a time, all blocks in parallel, where 7.1 GiB of device" in text
    assert "else zstd, on the host, by 1 thread" in text
    array = zarr.create_array(tmp_path / "b", shape=(2**27,), chunks=(2**27,), dtype="u1", fill_value=9)
    assert "where" not in str(plan_zarr_read(array))
