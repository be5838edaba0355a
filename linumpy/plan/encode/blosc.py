"""Plan how chunks are encoded as Blosc 1 frames on the device. Pure.

In: number and size of the chunks, and an :class:`~linumpy.plan.encoding.Encoding`. Out:
:class:`~linumpy.plan.encode.launches.EncodePlan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linumpy.plan.encode import lz4
from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch, grid_of, relocated
from linumpy.plan.encoding import Encoding

#: Size of a frame's header, and maximum size of a chunk, in bytes.
_HEAD_NBYTES, _MAX_NBYTES = 16, 2**31 - 1 - 16
#: Flags of the header: the order of bytes, blocks that are not split, and in the upper bits the codec.
_SHUFFLES = {"none": 0, "byte": 1, "bit": 4}
_NOT_SPLIT = 16
_FORMATS = {"lz4": 1, "zstd": 4}
#: Readers split blocks if elements have at most 16 bytes and each stream has at least 128 bytes.
_MAX_SPLITS, _MIN_SPLIT_NBYTES = 16, 128
#: Bytes of a block with zstd inside, which is not split. Sorted bits get shorter blocks: their statistics vary more.
_ZSTD_BLOCKS, _ZSTD_BIT_BLOCK = {"fast": 2**17, "small": 2**18}, 2**16
#: Bytes of a tile of the shuffling kernel; rounded down to whole elements, a tile may be half as long.
_TILE_NBYTES = 2**14

#: Plans the encoding of (count, nbytes): number of streams, and bytes of each.
StreamPlanner = Callable[[int, int], EncodePlan]


@dataclass(frozen=True)
class Cut:
    """How a chunk is cut.

    Attributes
    ----------
    block : int
        Bytes of a whole block.
    splits : int
        Streams of a whole block. The rest of a chunk is a shorter block of one stream.
    whole, rest : int
        Number of whole blocks, and bytes of the rest, possibly 0.
    """

    block: int
    splits: int
    whole: int
    rest: int


def cut_chunk(nbytes: int, encoding: Encoding) -> Cut:
    """Cut a chunk into blocks of about equal size, which keeps the rest short: the rest is never split."""
    unit = 8 * encoding.itemsize  # C-Blosc sorts the bits of blocks of 8 elements
    if encoding.inner == "lz4":
        max_nbytes = lz4.stream_nbytes(encoding.preset) * (encoding.itemsize if encoding.itemsize <= _MAX_SPLITS else 1)
    else:
        max_nbytes = _ZSTD_BIT_BLOCK if encoding.shuffle == "bit" else _ZSTD_BLOCKS[encoding.preset]
    max_nbytes = max_nbytes // unit * unit
    block = nbytes // max(1, -(-nbytes // max_nbytes)) // unit * unit or nbytes or 1
    is_split = (
        encoding.inner == "lz4" and encoding.itemsize <= _MAX_SPLITS and block // encoding.itemsize >= _MIN_SPLIT_NBYTES
    )
    return Cut(block, encoding.itemsize if is_split else 1, nbytes // block, nbytes % block)


def plan_blosc(count: int, nbytes: int, encoding: Encoding, plan_zstd: StreamPlanner) -> EncodePlan:
    """Plan the encoding of chunks as Blosc does.

    Parameters
    ----------
    count, nbytes : int
        Number of chunks, and bytes of each.
    encoding : Encoding
        Inner codec, shuffle and settings.
    plan_zstd : callable
        Plans the encoding of streams by zstd, if that is the inner codec.

    Raises
    ------
    ValueError
        For chunks that are larger than Blosc allows, and elements of 0 or more than 255 bytes.
    """
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"Blosc takes at most {_MAX_NBYTES} bytes a chunk, not {nbytes}")
    if not 0 < encoding.itemsize < 256:
        raise ValueError(f"Blosc takes elements of 1 to 255 bytes, not of {encoding.itemsize}")
    cut, width = cut_chunk(nbytes, encoding), encoding.itemsize
    mode = _mode_of(nbytes, encoding)
    not_split = cut.splits == 1 and (width > 1 or encoding.inner != "lz4")
    flags = mode | (_NOT_SPLIT if not_split else 0) | _FORMATS[encoding.inner] << 5
    scratch, launches = Scratch(), list[EncodeLaunch]()
    chunks, arena, offsets = map(Address, ("chunks", "arena", "offsets"))
    whole = rest = chunks
    if mode or cut.rest:
        whole, rest = scratch.take(count * cut.whole * cut.block), scratch.take(count * cut.rest)
        tiles = -(-2 * cut.block // _TILE_NBYTES) * (cut.whole + 1)
        shuffle = (chunks, nbytes, count, cut.block, width, mode, whole, rest)
        launches.append(EncodeLaunch("blosc_encode", "shuffle", grid_of(count * tiles), 256, shuffle))
    encode = _lz4_streams if encoding.inner == "lz4" else _zstd_streams(plan_zstd)
    stream_count = count * cut.whole * cut.splits
    streams, encode_whole = encode(whole, cut.block // cut.splits, stream_count, encoding.preset, scratch)
    rests, encode_rest = encode(rest, cut.rest, count, encoding.preset, scratch)
    starts, sizes = scratch.take(4 * count * (cut.whole + 1)), scratch.take(4 * count)
    grid, cut_args = grid_of(count * max(1, cut.whole + (cut.rest > 0))), (nbytes, count, cut.block, cut.splits)
    write = (chunks, *cut_args, width, flags, whole, rest, *streams, *rests, starts, offsets, arena)
    launches += [
        *encode_whole,
        *encode_rest,
        EncodeLaunch("blosc_encode", "blosc_sizes", grid_of(count), 32, (*cut_args, *streams, *rests, starts, sizes)),
        EncodeLaunch("encoded", "encoded_offsets", 1, 32, (sizes, count, offsets)),
        EncodeLaunch("blosc_encode", "blosc_write", grid, 256, write),
    ]
    return EncodePlan(count * (nbytes + _HEAD_NBYTES), scratch.nbytes, tuple(launches))


def _mode_of(nbytes: int, encoding: Encoding) -> int:
    """Return the flag of the shuffle to apply.

    C-Blosc before 1.18, and C-Blosc2, lose the bytes after the last whole element of a block of sorted bits.
    """
    if encoding.shuffle == "byte" and encoding.itemsize == 1:
        return 0
    if encoding.shuffle == "bit" and nbytes % encoding.itemsize:
        return 0
    return _SHUFFLES[encoding.shuffle]


#: The kernels' record ``Encoded``: address of the first stream, offsets or 0, stride in bytes or 0, sizes or 0.
_Encoded = tuple[Address | int, Address | int, int, Address | int]
_NOT_ENCODED: _Encoded = (0, 0, 0, 0)
_Planned = tuple[_Encoded, tuple[EncodeLaunch, ...]]


def _lz4_streams(streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch) -> _Planned:
    """Plan LZ4 blocks. A rest that is too long for one warp (of a chunk of 128 MiB or more) is stored uncompressed."""
    if nbytes == 0 or count == 0 or nbytes > lz4.stream_nbytes(preset):
        return _NOT_ENCODED, ()
    slots, launch = lz4.plan_streams(streams, nbytes, count, preset, scratch)
    return (slots.first, 0, slots.stride, slots.sizes), (launch,)


def _zstd_streams(plan: StreamPlanner) -> Callable[[Address, int, int, str, Scratch], _Planned]:
    """Plan zstd frames."""

    def planned(streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch) -> _Planned:
        if nbytes == 0 or count == 0:
            return _NOT_ENCODED, ()
        inner = plan(count, nbytes)
        addresses = {
            "chunks": streams,
            "arena": scratch.take(inner.arena_nbytes),
            "offsets": scratch.take(8 * (count + 1)),
            "scratch": scratch.take(inner.scratch_nbytes),
        }
        return (addresses["arena"], addresses["offsets"], 0, 0), relocated(inner.launches, addresses)

    return planned
