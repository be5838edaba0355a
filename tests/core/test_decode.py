"""If this fails, the host decodes chunks to other bytes than numcodecs, or takes more memory than a chunk needs."""

import errno
import gzip
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linumpy.core import native
from linumpy.plan.codecs import DecodeChain, read_chain
from tests.support.gpu.decoders import Decoder
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.mutants import FRAMES, HELLO, frame
from tests.support.oracles.decode_by_core import decode_chunk
from tests.support.oracles.decode_by_numcodecs import DecodeError
from tests.support.script_runs import environment

#: The core's number for calls that allocate; see lc_fail_next.
ALLOCATION = 5

CODECS = {
    "zstd": numcodecs.Zstd(3),
    "lz4": numcodecs.LZ4(),
    "gzip": numcodecs.GZip(5),
    "zlib": numcodecs.Zlib(6),
    "blosc": numcodecs.Blosc("lz4", 5, 1),
}


@pytest.fixture(autouse=True, params=[pytest.param("core", marks=pytest.mark.needs_core), "numcodecs"])
def decoder(request, monkeypatch):
    """Who decodes: the native core, and numcodecs where there is none."""
    if request.param == "numcodecs":
        monkeypatch.setenv(native.CORE_VARIABLE, "0")
    return request.param


def decoded(chain, stored, nbytes):
    """Decode; None where it is refused."""
    out = np.full(nbytes, 0xA5, np.uint8)
    try:
        decode_chunk(chain, stored, out)
    except DecodeError:
        return None
    return out.tobytes()


def by_numcodecs(codec, stored, nbytes):
    """Decode as zarr-python does, without a buffer; None where it raises or finds another number of bytes."""
    try:
        found = bytes(codec.decode(stored))
    except Exception:
        return None
    return found if len(found) == nbytes else None


@pytest.mark.parametrize("nbytes", [5, 10])
@pytest.mark.parametrize("name", FRAMES)
def test_unusual_zstd_frames_as_numcodecs(name, nbytes):
    assert decoded(DecodeChain("zstd"), FRAMES[name], nbytes) == by_numcodecs(CODECS["zstd"], FRAMES[name], nbytes)


def test_the_unusual_frames_are_both_taken_and_refused():
    found = [by_numcodecs(CODECS["zstd"], one, n) for one in FRAMES.values() for n in (5, 10)]
    assert 12 <= sum(one is not None for one in found) <= len(found) - 12


@needs_compiler
@pytest.mark.parametrize("nbytes", [5, 10])
def test_unusual_zstd_frames_on_the_device(nbytes):
    """What the device takes numcodecs takes, and the device leaves to the host no plain frame of unknown size."""
    got, status = Decoder(DecodeChain("zstd"), nbytes).decode([one or b"\0" for one in FRAMES.values()])
    for name, one, code in zip(FRAMES, got, status.tolist(), strict=True):
        if code == 0:
            assert bytes(one) == by_numcodecs(CODECS["zstd"], FRAMES[name], nbytes), name
    taken = {name for name, code in zip(FRAMES, status.tolist(), strict=True) if code == 0}
    if nbytes == 5:
        assert {"unknown size", "window of 128 MiB", "window of 256 MiB, known size", "repeated byte"} <= taken
        assert not {"window of 144 MiB", "window of 256 MiB", "window of 2 GiB"} & taken


@pytest.mark.parametrize("seed", range(4))
def test_streams_of_blosclz_in_frames_of_blosc(seed):
    """Of arrays whose metadata name another compressor; changed bytes are refused, or decoded as by numcodecs."""
    random, codec, compressed = np.random.default_rng(seed), CODECS["blosc"], 0
    for _ in range(40):
        period, nbytes = random.integers(1, 2000), int(random.integers(17, 100000))
        values = np.resize(random.integers(0, 256 >> random.integers(0, 7), period).astype(np.uint8), nbytes)
        level, shuffle, typesize = random.integers(1, 10), random.integers(0, 3), 2 ** random.integers(0, 4)
        writer = numcodecs.Blosc("blosclz", int(level), int(shuffle), 0, typesize=int(typesize))
        stored = bytearray(writer.encode(values))
        compressed += not stored[2] & 2
        assert decoded(DecodeChain("blosc", "lz4"), bytes(stored), nbytes) == values.tobytes()
        stored[int(random.integers(16, len(stored)))] ^= 1 << int(random.integers(0, 8))
        found = decoded(DecodeChain("blosc", "lz4"), bytes(stored), nbytes)
        assert found is None or found == by_numcodecs(codec, bytes(stored), nbytes)
    assert compressed > 10


def members(codec, parts):
    """Several frames, members or streams, one after another."""
    return b"".join(bytes(codec.encode(part)) for part in parts)


@given(
    name=st.sampled_from(sorted(CODECS)),
    parts=st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=3),
    behind=st.sampled_from([b"", b"\0\0\0\0", b"junk"]),
    cut=st.sampled_from([0, 0, 0, 1, 9]),
    off=st.sampled_from([0, 0, 0, -1, 1, 100]),
)
def test_as_strict_and_as_lenient_as_numcodecs(name, parts, behind, cut, off):
    """Members that follow each other, bytes behind them, cut-off ones, and chunks of another size."""
    if name in ("lz4", "blosc"):  # these headers are for one; numcodecs hands what follows to the library
        parts, behind = [b"".join(parts)], b""
    stored = members(CODECS[name], parts) + behind
    stored = stored[: len(stored) - cut]
    nbytes = max(1, sum(map(len, parts)) + off)
    if name == "blosc" and cut:  # numcodecs reads beyond the bytes there
        assert decoded(DecodeChain("blosc", "lz4"), stored, nbytes) is None
        return
    chain = DecodeChain(name, "lz4" if name == "blosc" else "")
    assert decoded(chain, stored, nbytes) == by_numcodecs(CODECS[name], stored, nbytes)


@given(data=st.binary(min_size=8, max_size=4000), size=st.sampled_from([2, 4, 8]))
def test_round_trips_through_filters_and_checksums(data, size):
    data = data[: len(data) // 8 * 8]
    shuffled = bytes(numcodecs.Shuffle(size).encode(data))
    tailed = shuffled + struct.pack("<I", google_crc32c.value(shuffled))
    for name, codec in CODECS.items():
        chain = DecodeChain(name, "lz4" if name == "blosc" else "", decoded_checksum=True, shuffle=size)
        assert decoded(chain, bytes(codec.encode(tailed)), len(data)) == data
    for settings in (
        {"id": "delta", "dtype": "<i2", "astype": "<i4"},
        {"id": "delta", "dtype": "<u2"},
        {"id": "fixedscaleoffset", "dtype": "<f8", "astype": "<i4", "scale": 1, "offset": 0},
    ):
        values = np.frombuffer(data, np.uint8)[: len(data) // 8].astype(settings["dtype"])
        encoded = np.ascontiguousarray(numcodecs.get_codec(dict(settings)).encode(values)).tobytes()
        chain = read_chain([{**settings, "name": settings["id"]}, {"name": "zstd"}], values.nbytes)
        assert decoded(chain, CODECS["zstd"].encode(encoded), values.nbytes) == values.tobytes()


def test_an_element_that_does_not_divide_the_chunk_is_refused():
    with pytest.raises(DecodeError, match="elements of 7"):
        decode_chunk(DecodeChain("zstd", shuffle=7), CODECS["zstd"].encode(bytes(20)), np.empty(20, np.uint8))


def zeros(nbytes):
    """Stored bytes that decode to so many zeros, by each codec; the smallest that there are."""
    block = 2**17
    packed = gzip.compress(bytes(2**24), 9)
    compressor = zlib.compressobj(9)
    deflated = b"".join(compressor.compress(bytes(2**24)) for _ in range(nbytes // 2**24)) + compressor.flush()
    blosc = bytearray(numcodecs.Blosc("lz4", 9, 0).encode(bytes(4096)))
    blosc[4:8] = struct.pack("<I", nbytes)
    wide = bytearray(numcodecs.Blosc("lz4", 9, 0).encode(bytes(4096)))
    wide[8:12] = struct.pack("<I", nbytes)
    return {
        "zstd": frame(*[(1, block, b"\0")] * (nbytes // block), content=nbytes),
        "zstd of unknown size": frame(*[(1, block, b"\0")] * (nbytes // block)),
        "zstd in many frames": frame((1, block, b"\0"), content=block) * (nbytes // block),
        "gzip": packed * (nbytes // 2**24),
        "zlib": deflated,
        "lz4": struct.pack("<I", nbytes) + CODECS["lz4"].encode(bytes(nbytes // 4))[4:],
        "blosc": bytes(blosc),
        "blosc with a wide block": bytes(wide),
    }


BOMBS = """
import pathlib, re, sys
import numcodecs
import numpy as np
from tests.support.oracles.decode_by_core import decode_chunk
from tests.support.oracles.decode_by_numcodecs import DecodeError
from linumpy.plan.codecs import DecodeChain

CODECS = {one.codec_id: one for one in map(numcodecs.get_codec, map(dict, [[("id", n)] for n in sys.argv[2:]]))}

def peak():
    return int(re.search(r"VmPeak:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) // 1024

chains = lambda name: [
    DecodeChain(name, "lz4" if name == "blosc" else "", **more)
    for more in ({}, {"decoded_checksum": True}, {"shuffle": 2}, {"host_filter": '{"id": "delta", "dtype": "<u2"}'})
]
for name, codec in CODECS.items():  # what libraries and threads take for themselves
    decode_chunk(chains(name)[0], codec.encode(bytes(4096)), np.empty(4096, np.uint8))
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    stored, out = path.read_bytes(), np.empty(4096, np.uint8)
    for chain in chains(path.name.split()[0]):
        before = peak()
        try:
            decode_chunk(chain, stored, out)
        except DecodeError as error:
            print(path.name, "|", peak() - before, "|", error)
        else:
            print(path.name, "|", -1, "| no error")
"""


def test_no_stored_bytes_make_a_decoder_take_more_than_the_chunk_needs(tmp_path):
    """The peak of the process's memory is looked at, with what is reserved and not yet used."""
    nbytes = 2**26
    for name, stored in zeros(nbytes).items():
        (tmp_path / name).write_bytes(stored)
    ran = subprocess.run(
        [sys.executable, "-c", BOMBS, tmp_path, *CODECS], capture_output=True, text=True, check=True,
        env=environment() | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    rows = [line.split(" | ") for line in ran.stdout.splitlines()]
    assert len(rows) == 4 * len(zeros(2**24))
    for name, taken, error in rows:
        assert 0 <= int(taken) <= 16, f"{name}: {taken} MiB more, {error}"


def test_bombs_are_what_they_say():
    """Or the test above would prove nothing."""
    for name, stored in zeros(2**24).items():
        if name.startswith("blosc") or name == "lz4":  # headers that lie
            continue
        assert bytes(CODECS[name.split()[0]].decode(stored)) == bytes(2**24), name


def test_memory_that_is_not_there_is_no_broken_chunk(monkeypatch, decoder):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(numcodecs.Zstd, "decode", fail)
    if decoder == "core":
        native.library().quick.lc_fail_next(ALLOCATION, 1, errno.ENOMEM)
    with pytest.raises(MemoryError):
        decode_chunk(DecodeChain("zstd", shuffle=5), frame(HELLO, content=5), np.empty(5, np.uint8))
