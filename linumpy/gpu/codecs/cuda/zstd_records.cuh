// Records that the kernels of Zstandard (RFC 8878) share: frames, blocks and sequences.

enum BlockType { RAW = 0, REPEATED = 1, COMPRESSED = 2 };
enum LiteralsType { RAW_LITERALS = 0, ONE_LITERAL = 1, NEW_TREE = 2, OLD_TREE = 3 };
enum Mode { PREDEFINED = 0, ONE_SYMBOL = 1, DESCRIBED = 2, REPEAT = 3 };
enum Kind { LITERAL_LENGTH = 0, OFFSET = 1, MATCH_LENGTH = 2 };

struct Frame {
    i64 first_block;
    int blocks;
    Check check;
    int reserved;
};

struct Block {
    i64 source;            // first byte of the content, in the arena
    i64 literals_at;       // byte of the pool, where they are Huffman coded
    i64 sequences_at;      // sequences of other blocks behind these in the pool
    int chunk, type;
    u32 nbytes;            // of the content; of a repeated byte, how often
    int literals_type;
    u32 literals, literals_stored, literals_head;  // literals, their stored bytes, and the header before those
    int literals_streams;
    u32 sequences, tables_head;  // sequences, and where in the content the descriptions of tables begin
    int modes;
    i64 tree, table[3];    // blocks that describe the tables in use; -1: none
    u32 last_offsets[3];   // behind the block, as a function of those before it; zstd_offsets: those before it
    u32 decoded;           // bytes that it decodes to
    u32 begin, kept;       // by zstd_offsets: its first byte in the frame, and that of the first block of its group
};
static_assert(sizeof(Block) == 128, "as in plan/decode/workspace.py");

// Blocks that begin in the same part of the decoded bytes, as a range of the list `order`.
struct Group { u32 first, end; };
constexpr u32 NO_BLOCK = ~0u;  // in that list: a block of no bytes, or of a frame that is broken

__device__ inline int mode_of(const Block &block, int kind) { return block.modes >> (6 - 2 * kind) & 3; }

// Counters that kernels take room from.
enum Counter { STREAMS = 0, BLOCKS = 1, LITERALS = 2, SEQUENCES = 3 };
__device__ inline i64 take_room(u64 *counter, u64 n) { return static_cast<i64>(atomicAdd(counter, n)); }

// Literals are taken from the beginning of the pool and sequences from its end, until they meet.
__device__ inline bool has_met(u64 *counters, i64 pool_nbytes) {
    const u64 literals = atomicAdd(counters + LITERALS, 0ull), sequences = atomicAdd(counters + SEQUENCES, 0ull);
    return literals + 8 * sequences > static_cast<u64>(pool_nbytes);
}

constexpr int MOST_WINDOW_BITS = 31;  // as of the reference decoder
// Of a frame of unknown size: numcodecs decodes it as a stream, for which the reference decoder has this limit.
constexpr u64 MOST_STREAM_WINDOW = (1ull << 27) + 1;

// A sequence in 64 bits: 18 of literals, 18 of match, 28 of offset.
constexpr u32 NOT_YET = 0x0f000000;  // from here on: NOT_YET + (k << 20) + n, the k-th last offset minus n
__device__ inline u64 packed(u32 literals, u32 match, u32 offset) {
    return literals | static_cast<u64>(match) << 18 | static_cast<u64>(offset) << 36;
}

__device__ inline u32 looked_up(u32 offset, const u32 *last) {
    if (offset < NOT_YET) return offset;
    const u32 back = offset & 0xfffff, k = offset >> 20 & 3, base = k == 0 ? last[0] : k == 1 ? last[1] : last[2];
    if (base >= NOT_YET) return base + back;
    return base > back ? base - back : 0;  // 0 is no offset, and is found out
}

__device__ inline u64 *block_sequences(const Block &block, const u8 *pool, i64 pool_nbytes) {
    const i64 at = pool_nbytes - 8 * (block.sequences_at + block.sequences);
    return reinterpret_cast<u64 *>(const_cast<u8 *>(pool) + at);
}
