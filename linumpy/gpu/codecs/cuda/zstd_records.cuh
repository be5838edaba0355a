// Records that the Zstandard (RFC 8878) kernels share: frames, blocks and sequences.

enum BlockType { RAW = 0, REPEATED = 1, COMPRESSED = 2 };
enum LiteralsType { RAW_LITERALS = 0, ONE_LITERAL = 1, NEW_TREE = 2, OLD_TREE = 3 };
enum Mode { PREDEFINED = 0, ONE_SYMBOL = 1, DESCRIBED = 2, REPEAT = 3 };
enum Kind { LITERAL_LENGTH = 0, OFFSET = 1, MATCH_LENGTH = 2 };

struct Frame {
    i64 first_block;  // index of the first block's record
    int blocks;  // 0 if the frame is broken
    Check check;
    int reserved;
};

struct Block {
    i64 source;            // first byte of the content, in the arena
    i64 literals_at;       // offset in the pool of the decoded literals, if they are Huffman coded
    i64 sequences_at;      // number of sequences in the pool after the block's sequences
    int chunk, type;
    u32 nbytes;            // size of the content; of a repeated byte, the number of repetitions
    int literals_type;
    u32 literals, literals_stored, literals_head;  // number of literals, their stored bytes, bytes of their header
    int literals_streams;
    u32 sequences, tables_head;  // number of sequences, and offset of the descriptions of tables in the content
    int modes;
    i64 tree, table[3];    // blocks that describe the tables in use; -1: none
    u32 last_offsets[3];  // after the block, as a function of those before it; zstd_offsets sets those before the block
    u32 decoded;  // decoded size
    // Set by zstd_offsets: offset in the frame of the block, and of the frame's first block in the same group.
    u32 begin, kept;
};
static_assert(sizeof(Block) == 128, "as in plan/decode/workspace.py");

// The blocks that begin in the same part of the decoded bytes, as a range of the list of blocks (`order`).
struct Group { u32 first, end; };
constexpr u32 NO_BLOCK = ~0u;  // an entry of the list without a block: an empty one, or one of a broken frame

__device__ inline int mode_of(const Block &block, int kind) { return block.modes >> (6 - 2 * kind) & 3; }

// Counters by which kernels allocate records and parts of the pool.
enum Counter { STREAMS = 0, BLOCKS = 1, LITERALS = 2, SEQUENCES = 3 };
__device__ inline i64 allocate(u64 *counter, u64 n) { return static_cast<i64>(atomicAdd(counter, n)); }

// Literals are allocated from the beginning of the pool and sequences from its end, until they meet.
__device__ inline bool is_pool_full(u64 *counters, i64 pool_nbytes) {
    const u64 literals = atomicAdd(counters + LITERALS, 0ull), sequences = atomicAdd(counters + SEQUENCES, 0ull);
    return literals + 8 * sequences > static_cast<u64>(pool_nbytes);
}

constexpr int MAX_WINDOW_BITS = 31;  // as in the reference decoder
// For frames of unknown size, which numcodecs decodes as streams: the limit of the reference decoder for streams.
constexpr u64 MAX_STREAM_WINDOW = (1ull << 27) + 1;

// A sequence in 64 bits: literals (18 bits), match (18), offset (28). An unresolved offset is UNRESOLVED + (k << 20) +
// n: the k-th last offset before the block (k from 0), minus n.
constexpr u32 UNRESOLVED = 0x0f000000;
__device__ inline u64 packed(u32 literals, u32 match, u32 offset) {
    return literals | static_cast<u64>(match) << 18 | static_cast<u64>(offset) << 36;
}

// Resolve an offset by the three last offsets before the block, which may be unresolved themselves.
__device__ inline u32 resolved(u32 offset, const u32 *last) {
    if (offset < UNRESOLVED) return offset;
    const u32 back = offset & 0xfffff, k = offset >> 20 & 3, base = k == 0 ? last[0] : k == 1 ? last[1] : last[2];
    if (base >= UNRESOLVED) return base + back;
    return base > back ? base - back : 0;  // 0 is invalid, which the copy detects
}

__device__ inline u64 *block_sequences(const Block &block, const u8 *pool, i64 pool_nbytes) {
    const i64 at = pool_nbytes - 8 * (block.sequences_at + block.sequences);
    return reinterpret_cast<u64 *>(const_cast<u8 *>(pool) + at);
}
