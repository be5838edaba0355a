"""Plan how chunks are encoded as zstd frames on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan`. The kernels are
explained at the heads of their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch

#: Maximum size of a chunk: kernels count its bytes in 32 bits.
MAX_CHUNK_NBYTES = 2**31
#: Maximum size of the header of a frame, and size of the header of a block, in bytes.
_FRAME_HEAD, _BLOCK_HEAD = 10, 3
_SEGMENT_RECORD, _BLOCK_RECORD, _SEQUENCE = 16, 24, 8
_WARP, _LITERAL_THREADS, _COPY_THREADS, _SIZE_WARPS = 32, 128, 128, 4
#: Minimum size of a segment, also for smaller chunks.
_MIN_SEGMENT = 1024


@dataclass(frozen=True)
class Search:
    """Settings of the search for matches.

    Attributes
    ----------
    segment : int
        Bytes in which one warp finds matches; a power of two.
    segments : int
        Segments of a zstd block, which has its own tables; a power of two.
    reached : int
        Bytes before its segment that a match may refer to; a multiple of 32.
    table_log : int
        Binary logarithm of the number of entries of a warp's hash table, of 4 bytes each.
    warps : int
        Warps of a block of threads, which share its shared memory.
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
        own = (("REACHED", self.reached), ("TABLE_LOG", self.table_log), ("MATCH_WARPS", self.warps))
        return (*self.defines, *((name, str(value)) for name, value in own))


#: Settings of the presets, for chunks of at least one block.
PRESETS = {"fast": Search(2**14, 4, reached=2**14), "small": Search(2**14, 4, reached=2**15, table_log=13, warps=1)}


def search_of(nbytes: int, preset: str) -> Search:
    """Return the settings for chunks of `nbytes` bytes: small chunks get shorter blocks."""
    full = PRESETS[preset]
    block = full.block
    while block > full.segments * _MIN_SEGMENT and block // 2 >= nbytes:
        block //= 2
    return Search(block // full.segments, full.segments, full.reached, full.table_log, full.warps)


def plan_zstd(count: int, nbytes: int, preset: str = "fast", search: Search | None = None) -> EncodePlan:
    """Plan the launches that encode `count` chunks of `nbytes` bytes each.

    Parameters
    ----------
    count, nbytes, preset
        As for :func:`~linumpy.plan.encode.lz4.plan_lz4`.
    search : Search, optional
        Settings that replace those of the preset.
    """
    if not 0 <= nbytes <= MAX_CHUNK_NBYTES:
        raise ValueError(f"a chunk of {nbytes} bytes cannot be encoded on the device: at most {MAX_CHUNK_NBYTES} bytes")
    search = search or search_of(nbytes, preset)
    each = max(1, -(-nbytes // search.block))  # blocks of a frame
    blocks = count * each
    arena_nbytes = count * (_FRAME_HEAD + _BLOCK_HEAD * each + nbytes)
    scratch = Scratch()
    segments = scratch.take(_SEGMENT_RECORD * blocks * search.segments)
    records = scratch.take(_BLOCK_RECORD * blocks)
    sizes = scratch.take(4 * count)
    literals = scratch.take(blocks * search.block)
    sections = scratch.take(blocks * search.block)
    sequences = scratch.take(blocks * search.block // 4 * _SEQUENCE)
    chunks, arena, offsets = Address("chunks"), Address("arena"), Address("offsets")
    warps, defines = blocks * search.segments, search.defines
    match = (chunks, nbytes, each, warps, literals, sequences, segments)
    huffman = (chunks, nbytes, each, literals, segments, sections, records)
    code = (nbytes, each, sequences, segments, sections, records)
    pack = (chunks, nbytes, each, sections, records, offsets, arena)
    sum_sizes = EncodeLaunch("encoded", "encoded_offsets", 1, _WARP, (sizes, count, offsets))
    if not count:
        return EncodePlan(0, scratch.nbytes, (sum_sizes,))
    launches = (
        EncodeLaunch(
            "zstd_match", "zstd_match", -(-warps // search.warps), _WARP * search.warps, match, search.match_defines
        ),
        EncodeLaunch("zstd_literals", "zstd_literals", blocks, _LITERAL_THREADS, huffman, defines),
        EncodeLaunch("zstd_coder", "zstd_coder", blocks, _WARP, code, defines),
        EncodeLaunch(
            "zstd_pack", "zstd_sizes", -(-count // _SIZE_WARPS), _WARP * _SIZE_WARPS,
            (nbytes, each, count, records, sizes), defines,
            ),
            sum_sizes,
            EncodeLaunch("zstd_pack", "zstd_pack", blocks, _COPY_THREADS, pack, defines),
    )  # fmt: skip
    return EncodePlan(arena_nbytes, scratch.nbytes, launches)
