"""Broken stored bytes: what an encoder wrote, with bits flipped, bytes changed, cut off, doubled or put in."""

import numcodecs
import numpy as np

from linumpy.io.decode import DecodeError, decode_chunk
from linumpy.plan.codecs import DecodeChain

#: Chains, each with an encoder of bytes.
CHAINS = {
    "zstd": (DecodeChain("zstd"), numcodecs.Zstd(3).encode),
    "zstd-checksum": (DecodeChain("zstd"), numcodecs.Zstd(1, checksum=True).encode),
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
