"""Plan how chunks are encoded as zstd frames on the device. Pure.

In: number and size of the chunks, and a preset. Out: :class:`~linumpy.plan.encode.launches.EncodePlan`. How the kernels
work stands at the head of their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from linumpy.plan.encode.launches import Address, EncodeLaunch, EncodePlan, Scratch

#: Maximum size of a chunk: kernels count its bytes in 32 bits.
MAX_CHUNK_NBYTES = 2**31
#: Header of a frame at most, and of a block.
_FRAME_HEAD, _BLOCK_HEAD = 10, 3
_SEGMENT_RECORD, _BLOCK_RECORD, _SEQUENCE = 16, 24, 8
_WARP, _LITERAL_THREADS, _COPY_THREADS, _SIZE_WARPS = 32, 128, 128, 4
#: Smallest segment; smaller chunks are one block of it all the same.
_LEAST_SEGMENT = 1024


@dataclass(frozen=True)
class Search:
    """How matches are searched for.

    Attributes
    ----------
    segment : int
        Bytes of which one warp finds the matches; a power of two.
    segments : int
        Segments of a zstd block, which has tables of its own; a power of two.
    reached : int
        Bytes before its segment that a match may begin in; a multiple of 32.
    table_log : int
        Logarithm of the entries of a warp's hash table, of 4 bytes each.
    warps : int
        Warps of a block of threads, which share its memory.
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
        """What the records of the kernels depend on."""
        return (("SEGMENT", str(self.segment)), ("SEGMENTS", str(self.segments)))

    @property
    def match_defines(self) -> tuple[tuple[str, str], ...]:
        """What the kernel that finds matches depends on."""
        own = (("REACHED", self.reached), ("TABLE_LOG", self.table_log), ("MATCH_WARPS", self.warps))
        return (*self.defines, *((name, str(value)) for name, value in own))


#: Settings of the presets, for chunks that are no smaller than a block.
PRESETS = {"fast": Search(2**14, 4, reached=2**14), "small": Search(2**14, 4, reached=2**15, table_log=13, warps=1)}


def search_of(nbytes: int, preset: str) -> Search:
    """Return the settings for chunks of `nbytes` bytes: with blocks no longer than these need."""
    full = PRESETS[preset]
    block = full.block
    while block > full.segments * _LEAST_SEGMENT and block // 2 >= nbytes:
        block //= 2
    return Search(block // full.segments, full.segments, full.reached, full.table_log, full.warps)


def plan_zstd(count: int, nbytes: int, preset: str = "fast", search: Search | None = None) -> EncodePlan:
    """Plan the launches that encode `count` chunks of `nbytes` bytes each.

    Parameters
    ----------
    count, nbytes : int
        Chunks, and bytes of each.
    preset : str
        ``"fast"`` or ``"small"``.
    search : Search, optional
        Other settings than the preset's.
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
    warps, block = blocks * search.segments, search.defines
    match = (chunks, nbytes, each, warps, literals, sequences, segments)
    huffman = (chunks, nbytes, each, literals, segments, sections, records)
    code = (nbytes, each, sequences, segments, sections, records)
    pack = (chunks, nbytes, each, sections, records, offsets, arena)
    add_up = EncodeLaunch("encoded", "encoded_offsets", 1, _WARP, (sizes, count, offsets))
    if not count:
        return EncodePlan(0, scratch.nbytes, (add_up,))
    launches = (
        EncodeLaunch(
            "zstd_match", "zstd_match", -(-warps // search.warps), _WARP * search.warps, match, search.match_defines
        ),
        EncodeLaunch("zstd_literals", "zstd_literals", blocks, _LITERAL_THREADS, huffman, block),
        EncodeLaunch("zstd_coder", "zstd_coder", blocks, _WARP, code, block),
        EncodeLaunch(
            "zstd_pack", "zstd_sizes", -(-count // _SIZE_WARPS), _WARP * _SIZE_WARPS,
            (nbytes, each, count, records, sizes), block,
        ),
        add_up,
        EncodeLaunch("zstd_pack", "zstd_pack", blocks, _COPY_THREADS, pack, block),
    )  # fmt: skip
    return EncodePlan(arena_nbytes, scratch.nbytes, launches)
