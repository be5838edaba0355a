"""Plan how chunks are encoded with LZ4 on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan` for numcodecs'
frames (the size of the chunk in four bytes, then one LZ4 block). :func:`plan_streams` plans single LZ4 blocks, each
encoded by one warp. A longer chunk is cut into segments, each encoded by one warp, which are joined to one LZ4 block.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch, grid_of

#: Bits of a hash; each warp has a table of 16-bit positions in shared memory.
_HASH_BITS = {"fast": 12, "small": 13}
#: Maximum bytes of a stream that one warp encodes: short streams keep more warps busy, long ones have more matches.
_STREAM_NBYTES = {"fast": 2**14, "small": 2**16}
#: Bytes of a segment, and bytes before the segment that its matches may refer to; together at most 2**16.
_SEGMENT_NBYTES, _HISTORY_NBYTES = ({"fast": 2**14, "small": 2**15},) * 2
#: Maximum size of a chunk that LZ4 allows, and size of the header of numcodecs' frame, in bytes.
_MAX_NBYTES = 0x7E000000
_HEADER_NBYTES = 4
#: Sizes of the records ``Segment`` and ``Place`` (where the sequences of a segment go) of lz4_encode.cu.
_SEGMENT_RECORD, _PLACE_RECORD = 16, 8


def stream_nbytes(preset: str) -> int:
    """Return the maximum length of a stream that one warp encodes."""
    return _STREAM_NBYTES[preset]


def slot_nbytes(nbytes: int) -> int:
    """Return the maximum size that `nbytes` bytes have when encoded, rounded up to a multiple of 16."""
    return -(-(nbytes + nbytes // 255 + 16) // 16) * 16


@dataclass(frozen=True)
class Slots:
    """Memory for encoded streams: slots of equal size, each with the capacity for the longest possible stream.

    - `stride`: bytes from one slot to the next.
    - `sizes`: size of each stream, as uint32.
    """

    first: Address
    stride: int
    sizes: Address


def plan_streams(
    streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch
) -> tuple[Slots, EncodeLaunch]:
    """Plan the encoding of contiguous streams: each becomes one LZ4 block.

    A stream that encoding would not shorten gets the size `nbytes`, and the content of its slot is undefined.

    Raises `ValueError`: a stream is longer than one warp encodes (:func:`stream_nbytes`).
    """
    if nbytes > stream_nbytes(preset):
        raise ValueError(f"a stream of {nbytes} bytes is longer than {stream_nbytes(preset)}")
    stride, hash_bits = slot_nbytes(nbytes), _HASH_BITS[preset]
    slots = Slots(scratch.take(count * stride), stride, scratch.take(4 * count))
    args = (streams, nbytes, count, hash_bits, slots.first, stride, slots.sizes)
    return slots, EncodeLaunch("lz4_encode", "lz4_streams", grid_of(count), 32, args, shared=2 << hash_bits)


def plan_lz4(count: int, nbytes: int, preset: str) -> EncodePlan:
    """Plan the encoding of chunks as numcodecs' LZ4 does.

    - `count`, `nbytes`: number of chunks, and bytes of each.
    - `preset`: ``"fast"`` or ``"small"``.

    Raises `ValueError`: a chunk is larger than LZ4 allows.
    """
    if nbytes > _MAX_NBYTES:
        raise ValueError(f"LZ4 takes at most {_MAX_NBYTES} bytes a chunk, not {nbytes}")
    segment_nbytes, history, hash_bits = _SEGMENT_NBYTES[preset], _HISTORY_NBYTES[preset], _HASH_BITS[preset]
    segment_count = -(-nbytes // segment_nbytes)  # of a chunk
    stride = slot_nbytes(min(nbytes, segment_nbytes))
    scratch = Scratch()
    slots = scratch.take(count * segment_count * stride)
    segments = scratch.take(count * segment_count * _SEGMENT_RECORD)
    places = scratch.take(count * (segment_count + 1) * _PLACE_RECORD)
    sizes = scratch.take(4 * count)
    chunks, arena, offsets = map(Address, ("chunks", "arena", "offsets"))
    shape = (nbytes, count, segment_nbytes, segment_count)
    search = (chunks, *shape, history, hash_bits, slots, stride, segments)
    sum_sizes = (segments, *shape, places, sizes)
    join = (chunks, *shape, slots, stride, segments, places, offsets, arena)
    launches = (
        EncodeLaunch("lz4_encode", "lz4_segments", grid_of(count * segment_count), 32, search, shared=2 << hash_bits),
        EncodeLaunch("lz4_encode", "lz4_sizes", grid_of(count), 32, sum_sizes),
        EncodeLaunch("encoded", "encoded_offsets", 1, 32, (sizes, count, offsets)),
        EncodeLaunch("lz4_encode", "lz4_join", grid_of(count * (segment_count + 1)), 128, join),
    )
    return EncodePlan(count * (_HEADER_NBYTES + nbytes + nbytes // 255 + 16), scratch.nbytes, launches)
