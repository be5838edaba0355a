"""Plan the decoding of a slab on the device: where everything lies in the memory of a slot, and which kernels run.

In: a :class:`~linumpy.plan.codecs.DecodeChain` and the sizes of a slab. Out: :class:`Workspace`, the words that the
kernels read, and the list of :class:`Launch`. Pure: addresses are numbers, no kernel runs here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain

#: Free bytes before and behind the stored bytes: readers of whole words look that far beyond a stream.
MARGIN = 256
_ALIGN = 256
#: As in decode.cuh, zstd.cu and blosc.cu.
STREAM = np.dtype(
    [("source", "i8"), ("source_nbytes", "i8"), ("target", "i8"), ("target_nbytes", "i8"), ("chunk", "i4"), ("codec", "i4")]
)
ORDER = np.dtype(
    [("source", "i8"), ("target", "i8"), ("nbytes", "i8"), ("block_nbytes", "u4"), ("typesize", "u4"), ("mode", "i4"), ("chunk", "i4")]
)
_CHECK_NBYTES, _FRAME_NBYTES, _BLOCK_NBYTES = 8, 32, 128
_COUNTERS = 4
_CODES = {"": 1, "lz4": 2, "zstd": 3, "zlib": 4, "gzip": 5, "blosc": 0}
_BYTE_SHUFFLE = 1
_SMALLEST_RING = 2**13
#: Warps that copy bytes: of zstd, and where another warp reads sequences at the same time and sets the pace.
_TEAM, _READ_TEAM = 8, 2
#: Bytes of literals and sequences of zstd that a slot has room for, a decoded byte. Speckle, which hardly compresses,
#: was seen to need 1.45. A chunk that finds no room goes to the host.
_POOL = 1.6

#: What is wrong with a chunk, by the number that the kernels give it.
STATUS = {
    1: "its bytes end too early",
    2: "its header cannot be right",
    3: "it decodes to another size than a chunk has",
    4: "its bytes cannot be decoded",
    5: "its checksum is wrong",
    6: "it has features that the device does not decode",
    7: "it needs more room than a slot has",
}


@dataclass(frozen=True)
class Workspace:
    """Memory of one slot, as byte offsets from its beginning.

    Attributes
    ----------
    chunks : int
        Chunks that a slab may have.
    stored_nbytes, decoded_nbytes : int
        Room for stored and for decoded bytes.
    stored, words, decoded, unordered, pool, streams, checks, frames, blocks, orders, status : int
        Where each part begins. `decoded` holds chunks as the scatter reads them; `unordered` what streams decode to,
        the same place unless bytes are brought into order in between.
    streams_room, blocks_room : int
        How many of each there is room for.
    pool_nbytes : int
        Room for what is between the two steps of zstd.
    nbytes : int
        Of the whole slot.
    """

    chunks: int
    stored_nbytes: int
    decoded_nbytes: int
    stored: int
    words: int
    decoded: int
    unordered: int
    pool: int
    streams: int
    checks: int
    frames: int
    blocks: int
    orders: int
    status: int
    streams_room: int
    blocks_room: int
    pool_nbytes: int
    nbytes: int


def decoded_room(chain: DecodeChain, chunk_nbytes: int) -> int:
    """Bytes that one chunk takes in the buffers of decoded bytes."""
    return _up(chunk_nbytes + chain.tail)


def plan_workspace(
    chain: DecodeChain, *, chunks: int, stored_nbytes: int, decoded_nbytes: int, words_nbytes: int
) -> Workspace:
    """Lay out the memory of a slot.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    chunks : int
        Chunks that a slab may have.
    stored_nbytes, decoded_nbytes : int
        Stored bytes that a slab may have, and room for its decoded ones.
    words_nbytes : int
        Room for the table of the scatter.
    """
    blosc, zstd = chain.compressor == "blosc", chain.streams_by == "zstd"
    streams_room = decoded_nbytes // 512 + 16 * chunks if blosc else chunks
    blocks_room = decoded_nbytes // 16384 + 4 * chunks + (streams_room if blosc else 0) if zstd else 0
    pool_nbytes = _up(int(_POOL * decoded_nbytes) + 2**17) if zstd else 0
    end = 0

    def take(nbytes: int) -> int:
        nonlocal end
        begin, end = end, _up(end + nbytes)
        return begin

    stored = take(MARGIN + stored_nbytes + MARGIN) + MARGIN
    words = take(words_room(chunks) + words_nbytes)
    status = take(4 * chunks)
    streams = take(STREAM.itemsize * streams_room) if blosc else words + 8 * _COUNTERS
    checks = take(_CHECK_NBYTES * streams_room)
    frames = take(_FRAME_NBYTES * streams_room) if zstd else end
    blocks = take(_BLOCK_NBYTES * blocks_room)
    orders = take(ORDER.itemsize * chunks) if chain.is_reordered else end
    unordered = take(decoded_nbytes)
    pool = take(pool_nbytes)
    # The pool is of no more use once streams are decoded, and bytes come into order only then.
    decoded = unordered
    if chain.is_reordered:
        decoded = pool
        end = max(end, _up(decoded + decoded_nbytes))
    return Workspace(
        chunks, stored_nbytes, decoded_nbytes, stored, words, decoded, unordered, pool, streams, checks,
        frames, blocks, orders, status, streams_room, blocks_room, pool_nbytes, _up(end),
    )  # fmt: skip


def words_room(chunks: int) -> int:
    """Bytes of :func:`decode_words` for that many chunks."""
    return 8 * _COUNTERS + chunks * (STREAM.itemsize + 8 + ORDER.itemsize)


def decode_words(
    chain: DecodeChain, source: np.ndarray, nbytes: np.ndarray, place: np.ndarray, chunk_nbytes: int
) -> np.ndarray:
    """Write down the chunks of a slab as the kernels read them.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    source, nbytes : numpy.ndarray of int64, (n,)
        Stored bytes of each chunk in the slab.
    place : numpy.ndarray of int64, (n,)
        First byte of each in the buffer of decoded chunks.
    chunk_nbytes : int
        Decoded bytes of a chunk.

    Returns
    -------
    numpy.ndarray of uint8
        Counters, records of chunks, places, and orders where only a filter gives them.
    """
    n = len(source)
    counters = np.zeros(_COUNTERS, np.int64)
    counters[0] = 0 if chain.compressor == "blosc" else n  # Blosc's streams are counted on the device
    records = np.zeros(n, STREAM)
    records["source"], records["target"] = source, place
    records["source_nbytes"] = nbytes - (CHECKSUM_NBYTES if chain.stored_checksum else 0)
    records["target_nbytes"] = chunk_nbytes + chain.tail
    records["chunk"], records["codec"] = np.arange(n), _CODES[chain.compressor]
    orders = np.zeros(n, ORDER)
    if chain.shuffle:
        orders["source"] = orders["target"] = place
        orders["nbytes"] = orders["block_nbytes"] = chunk_nbytes
        orders["typesize"], orders["mode"], orders["chunk"] = chain.shuffle, _BYTE_SHUFFLE, np.arange(n)
    parts = [counters, records, np.asarray(place, np.int64), orders]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


@dataclass(frozen=True)
class Launch:
    """One kernel to run.

    Attributes
    ----------
    source, kernel : str
        File and name.
    grid : tuple of int
        Blocks.
    block : int
        Threads.
    shared : int
        Bytes of shared memory beyond what the kernel declares.
    team : int
        Warps that copy, which the kernel is compiled for; 0 where none do.
    args : tuple of int
        Addresses and counts, 64 bits each.
    """

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: int
    args: tuple[int, ...]
    shared: int = 0
    team: int = 0


#: Every kernel that decodes, with its team, for tests that compile them all.
KERNELS = (
    ("blosc", "blosc_frames", 0),
    ("blosc", "stored", 0),
    ("blosc", "unshuffle", 0),
    ("checksum", "check_crc32c", 0),
    ("checksum", "check_streams", 0),
    ("inflate", "inflate", _READ_TEAM),
    ("lz4", "lz4", _READ_TEAM),
    ("lz4", "lz4_heads", 0),
    ("zstd", "zstd_entropy", 0),
    ("zstd", "zstd_execute", _TEAM),
    ("zstd", "zstd_frames", 0),
)


def plan_launches(
    chain: DecodeChain, space: Workspace, base: int, chunks: int, chunk_nbytes: int, processors: int
) -> list[Launch]:
    """List the kernels that decode a slab, in their order.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    space : Workspace
        Memory of the slot.
    base : int
        Its address.
    chunks : int
        Chunks of this slab.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    processors : int
        Multiprocessors of the device.
    """
    stored, status = base + space.stored, base + space.status
    counters = base + space.words
    records = counters + 8 * _COUNTERS
    places = records + STREAM.itemsize * chunks
    host_orders = places + 8 * chunks
    streams, unordered = base + space.streams, base + space.unordered
    room = space.streams_room if chain.compressor == "blosc" else chunks
    most = min(room, 64 * processors)
    launches = []
    if chain.stored_checksum:
        launches.append(Launch("checksum", "check_crc32c", (chunks,), 128, (stored, records, chunks, 1, status)))
    orders = base + space.orders
    if chain.compressor == "blosc":
        args = (stored, records, chunks, places, streams, room, counters, orders, status)
        launches.append(Launch("blosc", "blosc_frames", (chunks,), 32, args))
    if chain.compressor in ("", "blosc"):
        args = (stored, unordered, streams, counters, room, status)
        launches.append(Launch("blosc", "stored", (most,), 256, args))
    launches += _stream_launches(chain, space, base, room, most, chunks, chunk_nbytes, processors)
    blosc = chain.compressor == "blosc"
    checked = base + space.decoded if blosc else unordered  # Blosc's own order is undone first, a filter's last
    check = [Launch("checksum", "check_crc32c", (chunks,), 128, (checked, records, chunks, 0, status))]
    tiles = max(1, min(256, chunk_nbytes // 4096))
    args = (unordered, base + space.decoded, orders if blosc else host_orders, status)
    order = [Launch("blosc", "unshuffle", (tiles, chunks), 256, args)] if chain.is_reordered else []
    check = check if chain.decoded_checksum else []
    return launches + (order + check if blosc else check + order)


def ring_nbytes(chain: DecodeChain, chunks: int, chunk_nbytes: int, processors: int) -> int:
    """Choose how many decoded bytes a stream keeps in shared memory: as many as leave room for all streams at a time.

    A multiprocessor has about 224 KiB, and three slabs are decoded at the same time. A ring longer than a chunk is of
    no use.
    """
    streams = 3 * chunks * (max(1, chunk_nbytes // 2**17) if chain.compressor == "blosc" else 1)
    each = -(-streams // processors)
    ring = 2**17 if each <= 1 else 2**16 if each <= 3 else 2**15
    while ring > _SMALLEST_RING and ring >= 2 * chunk_nbytes:
        ring //= 2
    return ring


def _stream_launches(
    chain: DecodeChain, space: Workspace, base: int, room: int, most: int, chunks: int, chunk_nbytes: int, processors: int
) -> list[Launch]:
    """List the kernels that decode streams."""
    stored, status, counters = base + space.stored, base + space.status, base + space.words
    streams, unordered, checks = base + space.streams, base + space.unordered, base + space.checks
    common = (stored, unordered, streams, counters, room)
    ring = ring_nbytes(chain, chunks, chunk_nbytes, processors)
    verify = Launch("checksum", "check_streams", (most,), 128, (unordered, streams, counters, room, checks, status))
    if chain.streams_by == "lz4":
        heads = Launch("lz4", "lz4_heads", (-(-chunks // 128),), 128, (stored, streams, chunks, status))
        lz4 = Launch("lz4", "lz4", (most,), 32 * (1 + _READ_TEAM), (*common, ring, status), ring, _READ_TEAM)
        return [lz4] if chain.compressor == "blosc" else [heads, lz4]
    if chain.streams_by == "inflate":
        return [Launch("inflate", "inflate", (most,), 32 * (1 + _READ_TEAM), (*common, ring, checks, status), ring, _READ_TEAM), verify]
    if chain.streams_by == "zstd":
        frames, blocks = base + space.frames, base + space.blocks
        args = (stored, streams, room, frames, blocks, space.blocks_room, counters, space.pool_nbytes, checks, status)
        pools = (counters, base + space.pool, space.pool_nbytes)
        return [
            Launch("zstd", "zstd_frames", (-(-room // 32),), 32, args),
            Launch("zstd", "zstd_entropy", (min(space.blocks_room, 2 * most + 4096),), 64, (stored, blocks, space.blocks_room, *pools, status)),
            Launch("zstd", "zstd_execute", (most,), 32 * _TEAM, (stored, unordered, streams, room, frames, blocks, *pools, ring, status), ring, _TEAM),
            verify,
        ]  # fmt: skip
    return []


def _up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
