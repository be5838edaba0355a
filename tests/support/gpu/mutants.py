"""Stored bytes for the decoders: chosen ones, and broken ones, with bits flipped, bytes changed, cut off or put in.

And zstd frames that numcodecs does not write, but others do.
"""

import struct

import google_crc32c
import numcodecs
import numpy as np

from linumpy.plan.codecs import DecodeChain
from tests.support.oracles.decode_by_numcodecs import DecodeError, decode_chunk


def with_crc32c(data):
    return bytes(data) + google_crc32c.value(bytes(data)).to_bytes(4, "little")


#: Chains, each with an encoder of bytes.
CHAINS = {
    "zstd": (DecodeChain("zstd"), numcodecs.Zstd(3).encode),
    "zstd-checksum": (DecodeChain("zstd"), numcodecs.Zstd(1, checksum=True).encode),
    "crc32c-of-zstd": (DecodeChain("zstd", stored_checksum=True), lambda b: with_crc32c(numcodecs.Zstd(3).encode(b))),
    "zstd-of-crc32c": (DecodeChain("zstd", decoded_checksum=True), lambda b: numcodecs.Zstd(3).encode(with_crc32c(b))),
    "lz4": (DecodeChain("lz4"), numcodecs.LZ4().encode),
    "gzip": (DecodeChain("gzip"), numcodecs.GZip(5).encode),
    "zlib": (DecodeChain("zlib"), numcodecs.Zlib(6).encode),
    "shuffle-zstd": (
        DecodeChain("zstd", shuffle=2),
        lambda b: numcodecs.Zstd(3).encode(numcodecs.Shuffle(2).encode(b)),
    ),
    **{
        f"blosc-{name}-{shuffle}-{block}": (
            DecodeChain("blosc", {"lz4hc": "lz4"}.get(name, name)),
            numcodecs.Blosc(name, 5, shuffle, block, typesize=typesize).encode,
        )
        for name, shuffle, block, typesize in [
            ("lz4", 1, 0, 2),
            ("lz4", 2, 1000, 4),
            ("lz4hc", 0, 0, 8),
            ("zstd", 2, 0, 2),
            ("zstd", 1, 512, 3),
            ("zlib", 1, 2048, 2),
        ]
    },
}


def plain(rng, nbytes):
    """Bytes that compress."""
    kinds = [
        lambda: np.repeat(rng.integers(0, 200, nbytes // 10 + 1, np.uint16), 5).tobytes()[:nbytes],
        lambda: (np.cumsum(rng.integers(-3, 4, nbytes // 2 + 1)) + 900).astype("<u2").tobytes()[:nbytes],
        lambda: (b"the quick brown fox " * (nbytes // 20 + 1))[:nbytes],
        lambda: rng.integers(0, 5, nbytes, np.uint8).tobytes(),
        lambda: rng.bytes(nbytes),
    ]
    return kinds[rng.integers(len(kinds))]()


def mutant(rng, stored):
    """Break stored bytes in one to three places, often where the headers are."""
    data = bytearray(stored)
    for _ in range(rng.integers(1, 4)):
        if not data:
            break
        near = int(min(len(data), rng.choice([8, 32, 128, len(data)])))
        at = int(rng.integers(near))
        match rng.integers(6):
            case 0 | 1:
                data[at] ^= 1 << int(rng.integers(8))
            case 2:
                data[at] = int(rng.choice([0, 1, 127, 128, 255]))
            case 3:
                del data[int(rng.integers(len(data))) :]
            case 4:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
            case 5:
                data[at : at + 4] = rng.bytes(4)
    return bytes(data)


def by_numcodecs(chain, stored, nbytes):
    """Decode with the host's libraries; None where they refuse."""
    out = np.empty(nbytes, np.uint8)
    try:
        decode_chunk(chain, stored, out)
    except DecodeError:
        return None
    return out.tobytes()


def disagreements(decoder, rng, name, nbytes, count):
    """Decode mutants with a decoder of the device and with numcodecs.

    Returns
    -------
    refused : int
        Mutants that the device refused.
    wrong : list of bytes
        Mutants that it took, and made something else of than numcodecs does.
    """
    chain, encode = CHAINS[name]
    whole = [encode(plain(rng, nbytes)) for _ in range(8)]
    stored = [mutant(rng, whole[rng.integers(len(whole))]) for _ in range(count)]
    decoded, status = decoder(chain, nbytes).decode(stored, skew=int(rng.integers(4)))
    taken = [(one, got) for one, got, code in zip(stored, decoded, status.tolist(), strict=True) if code == 0]
    return count - len(taken), [one for one, got in taken if by_numcodecs(chain, one, nbytes) != got]


HELLO = (0, 5, b"hello")
SKIPPABLE = b"\x50\x2a\x4d\x18\x02\0\0\0ab"


def frame(*blocks, window=20, mantissa=0, content=None, single=False):
    """A zstd frame of blocks (type, size, bytes), by RFC 8878: type 0 is stored as it is, 1 repeats a byte."""
    flags = (0 if content is None else 3 << 6) | (32 if single else 0)
    out = struct.pack("<IB", 0xFD2FB528, flags)
    out += b"" if single else bytes([window - 10 << 3 | mantissa])
    out += b"" if content is None else struct.pack("<Q", content)
    for number, (kind, size, stored) in enumerate(blocks, 1):
        out += (size << 3 | kind << 1 | (number == len(blocks))).to_bytes(3, "little") + stored
    return out


#: Frames as other libraries than numcodecs write them, of 5 bytes or 10.
FRAMES = {
    "unknown size": frame(HELLO),
    "window of 128 MiB": frame(HELLO, window=27),
    "window of 128 MiB less 8": frame(HELLO, window=26, mantissa=7),
    "window of 144 MiB": frame(HELLO, window=27, mantissa=1),
    "window of 256 MiB": frame(HELLO, window=28),
    "window of 2 GiB": frame(HELLO, window=31),
    "window of 4 GiB": frame(HELLO, window=32),
    "window of 256 MiB, known size": frame(HELLO, window=28, content=5),
    "window of 4 GiB, known size": frame(HELLO, window=32, content=5),
    "single segment": frame(HELLO, content=5, single=True),
    "two of known size": frame(HELLO, content=5) * 2,
    "two of unknown size": frame(HELLO) * 2,
    "unknown, then known": frame(HELLO) + frame(HELLO, content=5),
    "unknown, then known of 256 MiB": frame(HELLO) + frame(HELLO, window=28, content=5),
    "known, then unknown of 256 MiB": frame(HELLO, content=5) + frame(HELLO, window=28),
    "skippable first": SKIPPABLE + frame(HELLO, content=5),
    "skippable last": frame(HELLO) + SKIPPABLE,
    "skippable alone": SKIPPABLE,
    "bytes behind": frame(HELLO, content=5) + b"x",
    "bytes behind, unknown": frame(HELLO) + b"x",
    "too long": frame(HELLO, HELLO, HELLO),
    "too short": frame((0, 4, b"hell")),
    "tells too little": frame(HELLO, HELLO, content=5),
    "tells too much": frame(HELLO, content=10),
    "cut off in a block": frame(HELLO)[:-1],
    "cut off in a header": frame(HELLO)[:7],
    "reserved block": frame((3, 5, b"hello")),
    "repeated byte": frame((1, 5, b"h")),
    "empty": b"",
    "four bytes": frame(HELLO)[:4],
}


def lz4_run(nbytes):
    """Lengths of 15 and more go on in bytes of 255 and a smaller one."""
    return b"" if nbytes < 15 else b"\xff" * ((nbytes - 15) // 255) + bytes([(nbytes - 15) % 255])


def lz4_of_long_and_short_runs(rng):
    """Sequences of which every other 64 end with a run too long for a batch, which the next ones copy from."""
    stored, nbytes = b"", 0
    for number in range(12 * 64 - 1):
        literals = rng.bytes(500 if number == 0 else int(rng.integers(4)))
        nbytes += len(literals)
        match = 9000 if number % 128 == 63 else int(rng.integers(4, 40))
        offset = int(rng.integers(1, min(nbytes, 60000 if number % 3 else 300) + 1))
        token = min(len(literals), 15) << 4 | min(match - 4, 15)
        stored += bytes([token]) + lz4_run(len(literals)) + literals + struct.pack("<H", offset) + lz4_run(match - 4)
        nbytes += match
    stored += bytes([15 << 4]) + lz4_run(20) + rng.bytes(20)
    return struct.pack("<I", nbytes + 20) + stored


def corpus(name):
    """Chunks that reach every branch of a decoder, encoded; with what they decode to."""
    chain, encode = CHAINS[name]
    rng = np.random.default_rng(5)
    far, few, runs = rng.bytes(30000), rng.binomial(9, 0.3, 70000).astype("u1"), lz4_of_long_and_short_runs(rng)
    decoded = bytes(numcodecs.LZ4().decode(runs))
    chunks = [far + b"z" * 9000 + far + far, few.tobytes(), b"ab" * 3000 + bytes(range(256)) * 300, decoded]
    chunks.append(rng.bytes(len(decoded)))
    nbytes = len(decoded) // 4 * 4
    chunks = [one[:nbytes].ljust(nbytes, b"?") for one in chunks]
    yield chain, [encode(one) for one in chunks], chunks
    if name == "lz4":
        yield chain, [runs] * 2, [decoded] * 2
