"""Plan how chunks are encoded with LZ4 on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan` for numcodecs'
frames (the size of the chunk in four bytes, then one LZ4 block). :func:`plan_streams` plans single LZ4 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch, grid_of

#: Bits of a hash; each warp has a table of 16-bit positions in shared memory.
_HASH_BITS = {"fast": 12, "small": 13}
#: Maximum bytes of a stream that one warp encodes: short streams keep more warps busy, long ones have more matches.
_STREAM_NBYTES = {"fast": 2**14, "small": 2**16}
#: Bytes of a segment of a longer stream, and bytes before it that its matches may refer to; together at most 2**16.
_SEGMENT_NBYTES, _HISTORY_NBYTES = ({"fast": 2**14, "small": 2**15},) * 2
#: Maximum size of a chunk that LZ4 allows, in bytes.
_MAX_NBYTES = 0x7E000000
_HEAD_NBYTES = 4
#: Sizes of the records ``Segment`` and ``Place`` of lz4_encode.cu.
_SEGMENT_RECORD, _PLACE_RECORD = 16, 8


def stream_nbytes(preset: str) -> int:
    """Return the maximum length of a stream that one warp encodes."""
    return _STREAM_NBYTES[preset]


def slot_nbytes(nbytes: int) -> int:
    """Return the maximum size of `nbytes` encoded bytes, rounded up to words of 16 bytes."""
    return -(-(nbytes + nbytes // 255 + 16) // 16) * 16


@dataclass(frozen=True)
class Slots:
    """Slots of encoded streams, each with the capacity for the longest one.

    Attributes
    ----------
    first : Address
        The first stream.
    stride : int
        Bytes from one stream to the next.
    sizes : Address
        Size of each stream, of 32 bits.
    """

    first: Address
    stride: int
    sizes: Address


def plan_streams(
    streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch
) -> tuple[Slots, EncodeLaunch]:
    """Plan the encoding of contiguous streams: each becomes one LZ4 block.

    A stream that encoding would not shorten gets the size `nbytes`, and its slot is undefined.
    """
    if nbytes > stream_nbytes(preset):
        raise ValueError(f"a stream of {nbytes} bytes is longer than {stream_nbytes(preset)}")
    stride, bits = slot_nbytes(nbytes), _HASH_BITS[preset]
    slots = Slots(scratch.take(count * stride), stride, scratch.take(4 * count))
    args = (streams, nbytes, count, bits, slots.first, stride, slots.sizes)
    return slots, EncodeLaunch("lz4_encode", "lz4_streams", grid_of(count), 32, args, shared=2 << bits)


def plan_lz4(count: int, nbytes: int, preset: str) -> EncodePlan:
    """Plan the encoding of chunks as numcodecs' LZ4 does.

    Parameters
    ----------
    count, nbytes : int
        Number of chunks, and bytes of each.
    preset : str
        ``"fast"`` or ``"small"``.

    Raises
    ------
    ValueError
        For chunks that are larger than LZ4 allows.
    """
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"LZ4 takes at most {_MAX_NBYTES} bytes a chunk, not {nbytes}")
    step, history, bits = _SEGMENT_NBYTES[preset], _HISTORY_NBYTES[preset], _HASH_BITS[preset]
    each, stride = -(-nbytes // step), slot_nbytes(min(nbytes, step))
    scratch = Scratch()
    slots, segments = scratch.take(count * each * stride), scratch.take(count * each * _SEGMENT_RECORD)
    offset_records, sizes = scratch.take(count * (each + 1) * _PLACE_RECORD), scratch.take(4 * count)
    chunks, arena, offsets = map(Address, ("chunks", "arena", "offsets"))
    search = (chunks, nbytes, count, step, each, history, bits, slots, stride, segments)
    sum_sizes = (segments, nbytes, count, step, each, offset_records, sizes)
    join = (chunks, nbytes, count, step, each, slots, stride, segments, offset_records, offsets, arena)
    launches = (
        EncodeLaunch("lz4_encode", "lz4_segments", grid_of(count * each), 32, search, shared=2 << bits),
        EncodeLaunch("lz4_encode", "lz4_sizes", grid_of(count), 32, sum_sizes),
        EncodeLaunch("encoded", "encoded_offsets", 1, 32, (sizes, count, offsets)),
        EncodeLaunch("lz4_encode", "lz4_join", grid_of(count * (each + 1)), 128, join),
    )
    return EncodePlan(count * (_HEAD_NBYTES + nbytes + nbytes // 255 + 16), scratch.nbytes, launches)
