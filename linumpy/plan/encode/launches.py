"""Plan the encoding of chunks with LZ4 and zstd on the device, and the records of a planned encoding. Pure.

An :class:`EncodePlan` is for numcodecs' frames of LZ4 (the size of the chunk in four bytes, then one LZ4 block) or for
zstd frames. Addresses are names and offsets: :mod:`linumpy.gpu.codecs.encode` allocates the memory and launches the
kernels. The memory is four arrays: ``"chunks"`` (the input), ``"arena"`` (the packed encoded streams), ``"offsets"``
(of each stream in the arena, and the end of the last one, int64) and ``"scratch"``.

A chunk is cut into segments, in each of which one warp finds the matches. The heads of the sources explain the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Alignment of every part of the scratch, in bytes.
ALIGN = 256
#: Maximum number of blocks of a launch; with more tasks each block loops over several.
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Address:
    """An address: an offset in bytes within ``"chunks"``, ``"arena"``, ``"offsets"`` or ``"scratch"``."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class EncodeLaunch:
    """A launch of a kernel of :mod:`linumpy.gpu.codecs.cuda`; arguments have 64 bits each.

    - `source`: file name of the source without ``.cu``.
    - `shared`: dynamic shared memory, in bytes.
    """

    source: str
    kernel: str
    grid: int
    block: int
    args: tuple[Address | int, ...]
    defines: tuple[tuple[str, str], ...] = ()
    shared: int = 0


@dataclass(frozen=True)
class EncodePlan:
    """The launches, in order, and memory for a batch of chunks.

    - `arena_nbytes`: the maximum total size of the streams.
    - `scratch_nbytes`: size of the scratch, which can be freed when the launches have completed.
    """

    arena_nbytes: int
    scratch_nbytes: int
    launches: tuple[EncodeLaunch, ...]


def grid_of(tasks: int) -> int:
    """Return the number of blocks of a launch with `tasks` tasks."""
    return max(1, min(tasks, _MAX_BLOCKS))


def relocated(launches: tuple[EncodeLaunch, ...], addresses: Mapping[str, Address]) -> tuple[EncodeLaunch, ...]:
    """Return the launches of an inner codec with other addresses: each array begins at ``addresses[name of array]``."""

    def relocated_arg(arg: Address | int) -> Address | int:
        if isinstance(arg, int):
            return arg
        begin = addresses[arg.array]
        return Address(begin.array, begin.offset + arg.offset)

    return tuple(replace(launch, args=tuple(map(relocated_arg, launch.args))) for launch in launches)


class Scratch:
    """Allocates aligned, consecutive parts of the scratch."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Address:
        """Return the address of a new part."""
        offset, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // ALIGN) * ALIGN
        return Address("scratch", offset)


#: Bits of a hash; each warp has a table of 16-bit positions in shared memory.
_HASH_BITS = {"fast": 12, "small": 13}
#: Maximum bytes of a stream that one warp encodes: short streams keep more warps busy, long ones have more matches.
_STREAM_NBYTES = {"fast": 2**14, "small": 2**16}
#: Bytes of a segment, and bytes before the segment that its matches may refer to; together at most 2**16.
_SEGMENT_NBYTES, _HISTORY_NBYTES = ({"fast": 2**14, "small": 2**15},) * 2
#: Maximum size of a chunk that LZ4 allows, and size of the header of numcodecs' frame, in bytes.
_LZ4_MAX_NBYTES = 0x7E000000
_LZ4_HEADER_NBYTES = 4
#: Sizes of the records ``Segment`` and ``Place`` (where the sequences of a segment go) of lz4_encode.cu.
_LZ4_SEGMENT_RECORD, _PLACE_RECORD = 16, 8


def stream_nbytes(preset: str) -> int:
    """Return the maximum length of a stream that one warp encodes."""
    return _STREAM_NBYTES[preset]


def slot_nbytes(nbytes: int) -> int:
    """Return the maximum size that `nbytes` bytes have when encoded, rounded up to a multiple of 16."""
    return -(-(nbytes + nbytes // 255 + 16) // 16) * 16


@dataclass(frozen=True)
class Slots:
    """Slots of equal size, `stride`, for encoded streams of any length up to it; `sizes` are uint32."""

    first: Address
    stride: int
    sizes: Address


def plan_streams(
    streams: Address, nbytes: int, count: int, preset: str, scratch: Scratch
) -> tuple[Slots, EncodeLaunch]:
    """Plan the encoding of contiguous streams, of at most :func:`stream_nbytes`: each becomes one LZ4 block.

    A stream that encoding would not shorten gets the size `nbytes`, and the content of its slot is undefined.
    """
    stride, hash_bits = slot_nbytes(nbytes), _HASH_BITS[preset]
    slots = Slots(scratch.take(count * stride), stride, scratch.take(4 * count))
    args = (streams, nbytes, count, hash_bits, slots.first, stride, slots.sizes)
    return slots, EncodeLaunch("lz4_encode", "lz4_streams", grid_of(count), 32, args, shared=2 << hash_bits)


def plan_lz4(count: int, nbytes: int, preset: str) -> EncodePlan:
    """Plan the encoding of chunks as numcodecs' LZ4 does."""
    if nbytes > _LZ4_MAX_NBYTES:
        raise ValueError(f"LZ4 takes at most {_LZ4_MAX_NBYTES} bytes a chunk, not {nbytes}")
    segment_nbytes, history, hash_bits = _SEGMENT_NBYTES[preset], _HISTORY_NBYTES[preset], _HASH_BITS[preset]
    segment_count = -(-nbytes // segment_nbytes)  # of a chunk
    stride = slot_nbytes(min(nbytes, segment_nbytes))
    scratch = Scratch()
    slots = scratch.take(count * segment_count * stride)
    segments = scratch.take(count * segment_count * _LZ4_SEGMENT_RECORD)
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
    return EncodePlan(count * (_LZ4_HEADER_NBYTES + nbytes + nbytes // 255 + 16), scratch.nbytes, launches)


#: Maximum size of a chunk: kernels count its bytes in 32 bits.
MAX_CHUNK_NBYTES = 2**31
#: Maximum size of the header of a frame, and size of the header of a block, in bytes.
_MAX_FRAME_HEADER_NBYTES, _BLOCK_HEADER_NBYTES = 10, 3
#: Sizes of the records `Segment` and `EncodedBlock` of zstd_encode.cuh, and of a packed sequence, in bytes.
_SEGMENT_RECORD, _BLOCK_RECORD, _SEQUENCE_NBYTES = 16, 24, 8
_WARP, _LITERAL_THREADS, _COPY_THREADS, _SIZE_WARPS = 32, 128, 128, 4
#: Minimum size of a segment in bytes, even if a chunk is smaller.
_MIN_SEGMENT_NBYTES = 1024


@dataclass(frozen=True)
class Search:
    """Settings of the search for matches.

    - `segment`: bytes in which one warp finds matches; a power of two.
    - `segments`: segments of a zstd block; a power of two. Each block has its own entropy tables.
    - `reached`: bytes before a segment that the matches of the segment may refer to; a multiple of 32.
    - `table_log`: binary logarithm of the number of entries of a warp's hash table; an entry has 4 bytes.
    - `warps`: warps of a block of threads; each has a hash table in the block's shared memory.
    """

    segment: int
    segments: int
    reached: int = 0
    table_log: int = 11
    warps: int = 4

    @property
    def block(self) -> int:
        """Bytes of a zstd block."""
        return self.segment * self.segments

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Definitions that the records of all kernels depend on."""
        return (("SEGMENT", str(self.segment)), ("SEGMENTS", str(self.segments)))

    @property
    def match_defines(self) -> tuple[tuple[str, str], ...]:
        """Definitions of the kernel that finds matches."""
        settings = (("REACHED", self.reached), ("TABLE_LOG", self.table_log), ("MATCH_WARPS", self.warps))
        return (*self.defines, *((name, str(value)) for name, value in settings))


#: Settings of the presets, for chunks that are at least as long as one block.
PRESETS = {"fast": Search(2**14, 4, reached=2**14), "small": Search(2**14, 4, reached=2**15, table_log=13, warps=1)}


def search_of(nbytes: int, preset: str) -> Search:
    """Return the settings for chunks of `nbytes` bytes: small chunks get shorter blocks."""
    search = PRESETS[preset]
    block = search.block
    while block > search.segments * _MIN_SEGMENT_NBYTES and block // 2 >= nbytes:
        block //= 2
    return replace(search, segment=block // search.segments)


def plan_zstd(count: int, nbytes: int, preset: str = "fast", search: Search | None = None) -> EncodePlan:
    """Plan the launches that encode `count` chunks of `nbytes` bytes each, by default with the preset's search."""
    if not 0 <= nbytes <= MAX_CHUNK_NBYTES:
        raise ValueError(f"a chunk of {nbytes} bytes cannot be encoded on the device: at most {MAX_CHUNK_NBYTES} bytes")
    search = search or search_of(nbytes, preset)
    frame_blocks = max(1, -(-nbytes // search.block))
    blocks = count * frame_blocks
    arena_nbytes = count * (_MAX_FRAME_HEADER_NBYTES + _BLOCK_HEADER_NBYTES * frame_blocks + nbytes)
    scratch = Scratch()
    segments = scratch.take(_SEGMENT_RECORD * blocks * search.segments)
    records = scratch.take(_BLOCK_RECORD * blocks)
    sizes = scratch.take(4 * count)
    literals = scratch.take(blocks * search.block)
    sections = scratch.take(blocks * search.block)
    sequences = scratch.take(blocks * search.block // 4 * _SEQUENCE_NBYTES)
    chunks, arena, offsets = Address("chunks"), Address("arena"), Address("offsets")
    warps, defines = blocks * search.segments, search.defines
    matcher_args = (chunks, nbytes, frame_blocks, warps, literals, sequences, segments)
    literals_args = (chunks, nbytes, frame_blocks, literals, segments, sections, records)
    coder_args = (nbytes, frame_blocks, sequences, segments, sections, records)
    pack_args = (chunks, nbytes, frame_blocks, sections, records, offsets, arena)
    sum_sizes = EncodeLaunch("encoded", "encoded_offsets", 1, _WARP, (sizes, count, offsets))
    if not count:
        return EncodePlan(0, scratch.nbytes, (sum_sizes,))
    launches = (
        EncodeLaunch(
            "zstd_match", "zstd_match", -(-warps // search.warps), _WARP * search.warps, matcher_args,
            search.match_defines,
        ),
        EncodeLaunch("zstd_literals", "zstd_literals", blocks, _LITERAL_THREADS, literals_args, defines),
        EncodeLaunch("zstd_coder", "zstd_coder", blocks, _WARP, coder_args, defines),
        EncodeLaunch(
            "zstd_pack", "zstd_sizes", -(-count // _SIZE_WARPS), _WARP * _SIZE_WARPS,
            (nbytes, frame_blocks, count, records, sizes), defines,
            ),
            sum_sizes,
            EncodeLaunch("zstd_pack", "zstd_pack", blocks, _COPY_THREADS, pack_args, defines),
    )  # fmt: skip
    return EncodePlan(arena_nbytes, scratch.nbytes, launches)
