"""Plan how chunks are encoded as zstd frames on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan`. A chunk becomes
a frame of zstd blocks. A block is cut into segments; one warp finds the matches of a segment. The heads of the sources
explain the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch

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
    """Plan the launches that encode `count` chunks of `nbytes` bytes each.

    - `count`, `nbytes`, `preset`: as for :func:`~linumpy.plan.encode.lz4.plan_lz4`.
    - `search`: settings of the search; by default those of the preset.

    Raises `ValueError`: a chunk is longer than :data:`MAX_CHUNK_NBYTES`.
    """
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
