"""Plan the encoding of chunks on the device by the requested codec, among them Blosc 1 frames. Pure.

Errors: ``NotImplementedError`` for a codec without a kernel, ``ValueError`` for a chunk that is larger than the codec
allows, or elements of a size that Blosc does not allow.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from linumpy.plan.codecs import Encoding
from linumpy.plan.encode.launches import (
    Address,
    EncodeLaunch,
    EncodePlan,
    Scratch,
    grid_of,
    plan_lz4,
    plan_streams,
    plan_zstd,
    relocated,
    stream_nbytes,
)

#: Size of a frame's header, and maximum size of a chunk, in bytes.
_HEADER_NBYTES, _MAX_NBYTES = 16, 2**31 - 1 - 16
#: Flags of the header: the shuffle, blocks that are not split, and in the upper three bits the inner codec.
_SHUFFLE_FLAGS = {"none": 0, "byte": 1, "bit": 4}
_NOT_SPLIT_FLAG = 16
_CODEC_NUMBERS = {"lz4": 1, "zstd": 4}
#: Readers expect split blocks if elements have at most 16 bytes and each stream has at least 128 bytes.
_MAX_SPLITS, _MIN_SPLIT_NBYTES = 16, 128
#: Bytes of a block with zstd inside, which is not split. Blocks are shorter with the bit shuffle, after which the
#: statistics of the bytes vary more.
_ZSTD_BLOCK_NBYTES, _ZSTD_BIT_BLOCK_NBYTES = {"fast": 2**17, "small": 2**18}, 2**16
#: Maximum bytes of a tile of the shuffling kernel. Rounded down to whole elements, a tile may be half as long.
_TILE_NBYTES = 2**14


@dataclass(frozen=True)
class Cut:
    """How a chunk is cut: bytes, streams and number of whole blocks, and bytes of the rest, a block of one stream."""

    block: int
    splits: int
    whole: int
    rest: int


def cut_chunk(nbytes: int, encoding: Encoding) -> Cut:
    """Plan how a chunk is cut: into blocks of about equal size, so that the rest, which is never split, is short."""
    unit = 8 * encoding.itemsize  # C-Blosc shuffles the bits of blocks of a multiple of 8 elements
    if encoding.inner == "lz4":
        max_nbytes = stream_nbytes(encoding.preset) * (encoding.itemsize if encoding.itemsize <= _MAX_SPLITS else 1)
    else:
        max_nbytes = _ZSTD_BIT_BLOCK_NBYTES if encoding.shuffle == "bit" else _ZSTD_BLOCK_NBYTES[encoding.preset]
    max_nbytes = max_nbytes // unit * unit
    block = nbytes // max(1, -(-nbytes // max_nbytes)) // unit * unit or nbytes or 1
    is_split = (
        encoding.inner == "lz4" and encoding.itemsize <= _MAX_SPLITS and block // encoding.itemsize >= _MIN_SPLIT_NBYTES
    )
    return Cut(block, encoding.itemsize if is_split else 1, nbytes // block, nbytes % block)


def plan_blosc(count: int, nbytes: int, encoding: Encoding) -> EncodePlan:
    """Plan the encoding of chunks as Blosc does."""
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"Blosc takes at most {_MAX_NBYTES} bytes a chunk, not {nbytes}")
    if not 0 < encoding.itemsize < 256:
        raise ValueError(f"Blosc takes elements of 1 to 255 bytes, not of {encoding.itemsize}")
    cut, itemsize = cut_chunk(nbytes, encoding), encoding.itemsize
    shuffle_flag = _shuffle_flag(nbytes, encoding)
    not_split = cut.splits == 1 and (itemsize > 1 or encoding.inner != "lz4")
    flags = shuffle_flag | (_NOT_SPLIT_FLAG if not_split else 0) | _CODEC_NUMBERS[encoding.inner] << 5
    scratch, launches = Scratch(), list[EncodeLaunch]()
    chunks, arena, offsets = map(Address, ("chunks", "arena", "offsets"))
    whole_bytes = rest_bytes = chunks  # what the inner codec encodes: whole blocks of all chunks, and their rests
    if shuffle_flag or cut.rest:
        whole_bytes, rest_bytes = scratch.take(count * cut.whole * cut.block), scratch.take(count * cut.rest)
        tiles = -(-2 * cut.block // _TILE_NBYTES) * (cut.whole + 1)
        shuffle = (chunks, nbytes, count, cut.block, itemsize, shuffle_flag, whole_bytes, rest_bytes)
        launches.append(EncodeLaunch("blosc_encode", "shuffle", grid_of(count * tiles), 256, shuffle))
    plan_streams = _plan_lz4_streams if encoding.inner == "lz4" else _plan_zstd_streams
    stream_count = count * cut.whole * cut.splits
    streams, encode_whole = plan_streams(whole_bytes, cut.block // cut.splits, stream_count, encoding.preset, scratch)
    rests, encode_rest = plan_streams(rest_bytes, cut.rest, count, encoding.preset, scratch)
    starts, sizes = scratch.take(4 * count * (cut.whole + 1)), scratch.take(4 * count)
    grid, cut_args = grid_of(count * max(1, cut.whole + (cut.rest > 0))), (nbytes, count, cut.block, cut.splits)
    write = (chunks, *cut_args, itemsize, flags, whole_bytes, rest_bytes, *streams, *rests, starts, offsets, arena)
    launches += [
        *encode_whole,
        *encode_rest,
        EncodeLaunch("blosc_encode", "blosc_sizes", grid_of(count), 32, (*cut_args, *streams, *rests, starts, sizes)),
        EncodeLaunch("encoded", "encoded_offsets", 1, 32, (sizes, count, offsets)),
        EncodeLaunch("blosc_encode", "blosc_write", grid, 256, write),
    ]
    return EncodePlan(count * (nbytes + _HEADER_NBYTES), scratch.nbytes, tuple(launches))


def _shuffle_flag(nbytes: int, encoding: Encoding) -> int:
    """Return the header's flag of the shuffle to apply; 0 for none.

    Bits are not shuffled if a chunk ends within an element: C-Blosc before 1.18, and C-Blosc2, lose its last bytes.
    """
    if encoding.shuffle == "byte" and encoding.itemsize == 1:
        return 0
    if encoding.shuffle == "bit" and nbytes % encoding.itemsize:
        return 0
    return _SHUFFLE_FLAGS[encoding.shuffle]


class _EncodedStreams(NamedTuple):
    """Where encoded streams will be: the record ``Encoded`` of blosc_encode.cu.

    Streams are either packed, with `offsets`, or in slots, with `stride` in bytes and `sizes`. All numbers are 0 if no
    stream is encoded: the frames then hold the streams uncompressed.
    """

    first: Address | int = 0
    offsets: Address | int = 0
    stride: int = 0
    sizes: Address | int = 0


_PlannedStreams = tuple[_EncodedStreams, tuple[EncodeLaunch, ...]]


def _plan_lz4_streams(streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch) -> _PlannedStreams:
    """Plan the encoding of streams as LZ4 blocks; streams too long for one warp, in huge chunks, stay as they are."""
    if nbytes == 0 or count == 0 or nbytes > stream_nbytes(preset):
        return _EncodedStreams(), ()
    slots, launch = plan_streams(streams, nbytes, count, preset, scratch)
    return _EncodedStreams(slots.first, 0, slots.stride, slots.sizes), (launch,)


def _plan_zstd_streams(streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch) -> _PlannedStreams:
    """Plan the encoding of streams as zstd frames."""
    if nbytes == 0 or count == 0:
        return _EncodedStreams(), ()
    inner = plan_zstd(count, nbytes, preset)
    addresses = {
        "chunks": streams,
        "arena": scratch.take(inner.arena_nbytes),
        "offsets": scratch.take(8 * (count + 1)),
        "scratch": scratch.take(inner.scratch_nbytes),
    }
    return _EncodedStreams(addresses["arena"], addresses["offsets"]), relocated(inner.launches, addresses)


@functools.lru_cache(maxsize=256)
def plan_encoding(count: int, nbytes: int, encoding: Encoding) -> EncodePlan:
    """Plan the encoding of `count` chunks of `nbytes` bytes, without a checksum, which the writer appends."""
    if encoding.checksum:
        raise NotImplementedError("checksums are appended when chunks are written, not by an encoder")
    if encoding.compressor == "lz4":
        return plan_lz4(count, nbytes, encoding.preset)
    if encoding.compressor == "zstd":
        return plan_zstd(count, nbytes, encoding.preset)
    if encoding.compressor == "blosc":
        return plan_blosc(count, nbytes, encoding)
    raise NotImplementedError(encoding.compressor)
