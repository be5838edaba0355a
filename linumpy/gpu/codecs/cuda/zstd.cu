// Zstandard frames → bytes. Format: RFC 8878.
//
// Three kernels. `zstd_frames`, a thread a frame, walks the headers and notes where every block and its tables are.
// `zstd_entropy`, a block a block, undoes the entropy coding of all blocks at the same time, whichever frame they are
// from: one warp turns bits into sequences, the other turns Huffman codes into literals. `zstd_execute`, a team
// a frame, copies the bytes; only this has to go through a frame from its beginning to its end.
//
// An offset that repeats an earlier one may mean one from the block before, which is not known while blocks are decoded
// at the same time. Such an offset is written down as "the k-th of the block before, minus n" and looked up at the end.

#include "decode.cuh"
#include "execute.cuh"
#include "zstd_format.cuh"

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
    u32 last_offsets[3];
    u32 reserved;
};

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

__device__ inline u64 *block_sequences(const Block &block, const u8 *pool, i64 pool_nbytes) {
    const i64 at = pool_nbytes - 8 * (block.sequences_at + block.sequences);
    return reinterpret_cast<u64 *>(const_cast<u8 *>(pool) + at);
}

__device__ inline int parse_frame(const u8 *p, i64 nbytes, i64 expected, Frame &frame, i64 &head) {
    if (nbytes < 6) return TRUNCATED;
    const u32 magic = load32(p);
    if ((magic & 0xfffffff0u) == 0x184d2a50u) return UNSUPPORTED;  // a skippable frame
    if (magic != 0xfd2fb528u) return BAD_HEADER;
    const u32 flags = p[4];
    const bool single = flags & 32;
    if (flags & 8) return BAD_HEADER;
    const int dictionary = (flags & 3) == 3 ? 4 : flags & 3;
    const int sizes[4] = {single ? 1 : 0, 2, 4, 8};
    const int size = sizes[flags >> 6];
    head = 5 + (single ? 0 : 1);
    if (nbytes < head + dictionary + size) return TRUNCATED;
    if (!single && (p[5] >> 3) + 10 > MOST_WINDOW_BITS) return UNSUPPORTED;
    u32 id = 0;
    for (int k = 0; k < dictionary; ++k) id |= p[head + k];
    if (id) return UNSUPPORTED;
    head += dictionary;
    u64 content = 0;
    for (int k = 0; k < size; ++k) content |= static_cast<u64>(p[head + k]) << (8 * k);
    if (size == 2) content += 256;
    head += size;
    if (!size && (8ull + (p[5] & 7)) << ((p[5] >> 3) + 7) > MOST_STREAM_WINDOW) return UNSUPPORTED;
    if (size && content != static_cast<u64>(expected)) return WRONG_SIZE;
    frame.check.kind = flags & 4 ? XXH64 : NO_CHECK;
    return FINE;
}

// Walk the blocks of a frame. The first time they are counted, the second time written down.
__device__ inline int walk_blocks(const u8 *p, i64 nbytes, i64 at, Frame &frame, i64 origin, int chunk, Block *blocks) {
    frame.blocks = 0;
    for (bool last = false; !last;) {
        if (nbytes - at < 3) return TRUNCATED;
        const u32 head = load16(p + at) | static_cast<u32>(p[at + 2]) << 16;
        at += 3;
        last = head & 1;
        const u32 type = head >> 1 & 3, size = head >> 3;
        if (type == 3 || size > MAX_BLOCK) return BAD_HEADER;
        const i64 stored = type == REPEATED ? 1 : size;
        if (nbytes - at < stored) return TRUNCATED;
        if (blocks) {
            Block &block = blocks[frame.blocks];
            block.source = origin + at;
            block.type = static_cast<int>(type);
            block.nbytes = size;
            block.chunk = chunk;
            block.sequences = block.literals = 0;
            block.sequences_at = block.literals_at = 0;
        }
        ++frame.blocks;
        at += stored;
    }
    if (frame.check.kind) {
        if (nbytes - at < 4) return TRUNCATED;
        frame.check.expected = load32(p + at);
        at += 4;
    }
    return at == nbytes ? FINE : UNSUPPORTED;  // another frame may follow
}

// Read the heads of the literals and sequences of a compressed block.
__device__ inline int parse_block(const u8 *p, Block &block) {
    if (block.nbytes < 2) return BAD_HEADER;
    const int type = p[0] & 3, format = p[0] >> 2 & 3;
    const int heads[2][4] = {{1, 2, 1, 3}, {3, 3, 4, 5}};
    const u32 head = heads[type >= NEW_TREE][format];
    if (block.nbytes < head) return TRUNCATED;
    u64 value = 0;
    for (u32 k = 0; k < head; ++k) value |= static_cast<u64>(p[k]) << (8 * k);
    if (type >= NEW_TREE) {
        const int bits = format < 2 ? 10 : format == 2 ? 14 : 18;
        block.literals = value >> 4 & ((1u << bits) - 1);
        block.literals_stored = value >> (4 + bits) & ((1u << bits) - 1);
        block.literals_streams = format == 0 ? 1 : 4;
    } else {
        block.literals = static_cast<u32>(value >> (format & 1 ? 4 : 3));
        block.literals_stored = type == ONE_LITERAL ? 1 : block.literals;
    }
    block.literals_type = type;
    block.literals_head = head;
    if (block.literals > MAX_BLOCK || block.literals_stored > block.nbytes - head) return BAD_HEADER;
    u32 at = head + block.literals_stored;
    if (at >= block.nbytes) return TRUNCATED;
    const u32 first = p[at++];
    const u32 more = first < 128 ? 0 : first < 255 ? 1 : 2;
    if (block.nbytes - at < more) return TRUNCATED;
    block.sequences = more == 0 ? first : more == 1 ? ((first - 128) << 8) + p[at] : load16(p + at) + 0x7f00;
    at += more;
    if (block.sequences == 0) return at == block.nbytes ? FINE : BAD_DATA;
    if (at >= block.nbytes) return TRUNCATED;
    block.modes = p[at++];
    if (block.modes & 3) return BAD_HEADER;
    block.tables_head = at;
    return FINE;
}

__device__ inline int mode_of(const Block &block, int kind) { return block.modes >> (6 - 2 * kind) & 3; }

// Note which blocks describe the tables that each block uses, and take room for what they decode to.
__device__ inline int plan_blocks(const u8 *arena, const Frame &frame, Block *blocks, u64 *counters, i64 pool_nbytes) {
    i64 tree = -1, table[3] = {-1, -1, -1};
    for (i64 number = frame.first_block; number < frame.first_block + frame.blocks; ++number) {
        Block &block = blocks[number];
        if (block.type != COMPRESSED) continue;
        const int state = parse_block(arena + block.source, block);
        if (state != FINE) return state;
        if (block.literals_type == NEW_TREE) tree = number;
        if (block.literals_type == OLD_TREE && tree < 0) return BAD_DATA;
        block.tree = tree;
        if (block.literals_type >= NEW_TREE) {
            block.literals_at = take_room(counters + LITERALS, block.literals);
            if (has_met(counters, pool_nbytes)) return NO_SPACE;
        }
        if (block.sequences == 0) continue;
        for (int kind = 0; kind < 3; ++kind) {
            if (mode_of(block, kind) != REPEAT) table[kind] = number;
            if (table[kind] < 0) return BAD_DATA;
            block.table[kind] = table[kind];
        }
        block.sequences_at = take_room(counters + SEQUENCES, block.sequences);
        if (has_met(counters, pool_nbytes)) return NO_SPACE;
    }
    return FINE;
}

extern "C" __global__ void zstd_frames(const u8 *__restrict__ arena, const Stream *__restrict__ streams,
                                       i64 stream_capacity, Frame *frames, Block *blocks, i64 block_capacity,
                                       u64 *counters, i64 pool_nbytes, Check *checks, int *status) {
    const i64 known = static_cast<i64>(counters[STREAMS]);
    const i64 n = known < stream_capacity ? known : stream_capacity;
    for (i64 number = blockIdx.x * static_cast<i64>(blockDim.x) + threadIdx.x; number < n;
         number += static_cast<i64>(gridDim.x) * blockDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != ZSTD) continue;
        const u8 *p = arena + stream.source;
        Frame frame{0, 0, {NO_CHECK, 0}, 0};
        i64 head = 0;
        int state = parse_frame(p, stream.source_nbytes, stream.target_nbytes, frame, head);
        if (state == FINE) state = walk_blocks(p, stream.source_nbytes, head, frame, 0, 0, nullptr);
        if (state == FINE) {
            frame.first_block = take_room(counters + BLOCKS, frame.blocks);
            if (frame.first_block + frame.blocks > block_capacity) {
                // Others may not look at room that nobody has written.
                for (i64 k = frame.first_block; k < block_capacity; ++k) blocks[k].type = RAW;
                state = NO_SPACE;
            }
        }
        if (state == FINE) {
            walk_blocks(p, stream.source_nbytes, head, frame, stream.source, stream.chunk, blocks + frame.first_block);
            state = plan_blocks(arena, frame, blocks, counters, pool_nbytes);
            if (state != FINE)
                for (int k = 0; k < frame.blocks; ++k) blocks[frame.first_block + k].type = RAW;
        }
        frames[number] = frame;
        checks[number] = frame.check;
        if (state != FINE) fail(status, stream.chunk, state);
    }
}

__constant__ u32 LENGTH_BASE[36] = {0,  1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  11,   12,   13,   14,   15,    16,    18,
                                    20, 22, 24, 28, 32, 40, 48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
__constant__ u8 LENGTH_EXTRA[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  1,  1,
                                    1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ u32 MATCH_BASE[53] = {3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14,  15,  16,  17,   18,   19,   20,
                                   21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,  33,  34,  35,   37,   39,   41,
                                   43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
__constant__ u8 MATCH_EXTRA[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,
                                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,  1,  1,  1,
                                   2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
__constant__ short LENGTH_COUNTS[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2,
                                        2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
__constant__ short OFFSET_COUNTS[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1, 1, 1, 1, 1, 1,
                                        1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
__constant__ short MATCH_COUNTS[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                       1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

constexpr int MAX_STATES = 512;

struct SequenceTables {
    Cell cells[3][MAX_STATES];
    short counts[64];
    u16 next[64];
    int log[3];
    u32 begin;  // of the bits of the sequences, in the content
};

__device__ inline int max_log(int kind) { return kind == OFFSET ? 8 : 9; }
__device__ inline int max_symbol(int kind) { return kind == LITERAL_LENGTH ? 35 : kind == OFFSET ? 31 : 52; }

// Read the description of one table at `at` of a block's content, and move `at` behind it. By one lane.
__device__ inline bool read_description(const u8 *content, u32 nbytes, u32 &at, int mode, int kind, short *counts,
                                        int &symbols, int &log) {
    if (mode == PREDEFINED) {
        symbols = kind == LITERAL_LENGTH ? 36 : kind == OFFSET ? 29 : 53;
        log = kind == OFFSET ? 5 : 6;
        for (int s = 0; s < symbols; ++s)
            counts[s] = kind == LITERAL_LENGTH ? LENGTH_COUNTS[s] : kind == OFFSET ? OFFSET_COUNTS[s] : MATCH_COUNTS[s];
        return true;
    }
    if (mode == ONE_SYMBOL) {
        if (at >= nbytes) return false;
        log = 0;
        symbols = content[at++];
        return symbols <= max_symbol(kind);
    }
    u32 used = 0;
    if (!read_counts(content + at, nbytes - at, max_log(kind), max_symbol(kind), counts, symbols, log, used)) return false;
    at += used;
    return true;
}

__device__ inline bool make_table(SequenceTables &t, int kind, int symbols, int log) {
    t.log[kind] = log;
    if (log > 0) return build_cells(t.counts, symbols, log, t.cells[kind], t.next);
    t.cells[kind][0] = Cell{static_cast<u32>(symbols), 0, 0, 0};  // one symbol and no bits
    return true;
}

// Make the three tables of a block. By one lane.
__device__ inline bool make_tables(SequenceTables &t, const u8 *arena, const Block *blocks, i64 number) {
    for (int kind = 0; kind < 3; ++kind) {
        // Of the block that describes it, all descriptions before it must be read to find it.
        const Block &other = blocks[blocks[number].table[kind]];
        u32 at = other.tables_head;
        int symbols = 0, log = 0;
        for (int k = 0; k <= kind; ++k)
            if (mode_of(other, k) != REPEAT &&
                !read_description(arena + other.source, other.nbytes, at, mode_of(other, k), k, t.counts, symbols, log))
                return false;
        if (!make_table(t, kind, symbols, log)) return false;
    }
    const Block &mine = blocks[number];
    t.begin = mine.tables_head;
    for (int k = 0; k < 3; ++k) {
        int symbols, log;
        if (mode_of(mine, k) != REPEAT && mode_of(mine, k) != PREDEFINED &&
            !read_description(arena + mine.source, mine.nbytes, t.begin, mode_of(mine, k), k, t.counts, symbols, log))
            return false;
    }
    return t.begin < mine.nbytes;
}

// Put in each state what its symbol means. By the whole warp.
__device__ inline void fold_symbols(SequenceTables &t) {
    for (int kind = 0; kind < 3; ++kind)
        for (int s = lane_id(); s < 1 << t.log[kind]; s += LANES) {
            Cell &cell = t.cells[kind][s];
            const u32 symbol = cell.base;
            if (kind == OFFSET) {
                cell.base = 1u << symbol;
                cell.extra = static_cast<u8>(symbol);
            } else {
                cell.base = kind == LITERAL_LENGTH ? LENGTH_BASE[symbol] : MATCH_BASE[symbol];
                cell.extra = kind == LITERAL_LENGTH ? LENGTH_EXTRA[symbol] : MATCH_EXTRA[symbol];
            }
        }
}

// The three last offsets, by RFC 8878 section 3.1.1.5.
struct LastOffsets {
    u32 a, b, c;
    __device__ u32 use(u32 value, bool no_literals) {
        if (value > 3) {
            c = b;
            b = a;
            return a = value - 3;
        }
        const u32 which = value - 1 + no_literals;
        if (which == 0) return a;
        u32 offset = which == 1 ? b : which == 2 ? c : a >= NOT_YET ? a + 1 : a - 1;
        if (which >= 2) c = b;
        b = a;
        return a = offset;
    }
};

// Values of a sequence and bits of the next states, read in the order of the format.
struct Fields {
    u32 offset, match, literals, next[3];
};

__device__ inline u32 field(u32 word, u32 at, u32 n) { return shifted_right(shifted_left(word, at), 32 - n); }

// All from one word where it holds them, which is nearly always: no value then waits for the one before it.
__device__ inline Fields read_fields(BackwardBits &in, const Cell &l, const Cell &o, const Cell &m) {
    const u32 p1 = o.extra, p2 = p1 + m.extra, p3 = p2 + l.extra, p4 = p3 + l.bits, p5 = p4 + m.bits, p6 = p5 + o.bits;
    Fields f;
    u32 at = p3;
    if (p3 <= 32) {
        const u32 word = in.top();
        f.offset = field(word, 0, o.extra);
        f.match = field(word, p1, m.extra);
        f.literals = field(word, p2, l.extra);
    } else {
        f.offset = in.take(o.extra);
        in.refill();
        f.match = in.take(m.extra);
        f.literals = in.take(l.extra);
        at = 0;
    }
    if (p6 > 32) {
        in.skip(at);
        in.refill();
        at = 0;
    }
    const u32 word = in.top();
    f.next[LITERAL_LENGTH] = field(word, at, l.bits);
    f.next[MATCH_LENGTH] = field(word, at + p4 - p3, m.bits);
    f.next[OFFSET] = field(word, at + p5 - p3, o.bits);
    in.skip(at + p6 - p3);
    in.refill();
    return f;
}

// Turn the bits of a block into sequences. By one lane.
__device__ inline int decode_sequences(const SequenceTables &t, const u8 *content, Block &block, u64 *to) {
    BackwardBits in;
    if (!open_backward(in, content + t.begin, block.nbytes - t.begin)) return BAD_DATA;
    u32 at[3];
    for (int kind = 0; kind < 3; ++kind) {
        at[kind] = in.take(t.log[kind]);
        in.refill();
    }
    LastOffsets last{NOT_YET, NOT_YET + (1u << 20), NOT_YET + (2u << 20)};
    bool far = false;
    for (u32 rest = block.sequences; rest; --rest) {
        Cell l = t.cells[LITERAL_LENGTH][at[LITERAL_LENGTH]], o = t.cells[OFFSET][at[OFFSET]],
             m = t.cells[MATCH_LENGTH][at[MATCH_LENGTH]];
        if (rest == 1) l.bits = o.bits = m.bits = 0;  // no state follows the last
        const Fields f = read_fields(in, l, o, m);
        if (in.left < 0) return BAD_DATA;
        at[LITERAL_LENGTH] = l.next + f.next[LITERAL_LENGTH];
        at[MATCH_LENGTH] = m.next + f.next[MATCH_LENGTH];
        at[OFFSET] = o.next + f.next[OFFSET];
        const u32 value = o.base + f.offset, literals = l.base + f.literals;
        far |= value > NOT_YET;
        *to++ = packed(literals, m.base + f.match, last.use(value, literals == 0) & 0x0fffffff);
    }
    block.last_offsets[0] = last.a;
    block.last_offsets[1] = last.b;
    block.last_offsets[2] = last.c;
    return far ? UNSUPPORTED : in.left == 0 ? FINE : BAD_DATA;
}

struct LiteralTables {
    u16 codes[1 << MAX_HUFFMAN_BITS];
    Cell cells[64];
    short counts[16];
    u16 next[16];
    u32 first[MAX_HUFFMAN_BITS + 2];
    u8 weights[256];
};

// Decode one Huffman stream of `n` literals. By one lane.
__device__ inline bool decode_literals(const u16 *codes, int bits, const u8 *from, u32 nbytes, u8 *to, u32 n) {
    BackwardBits in;
    if (!open_backward(in, from, nbytes)) return false;
    u32 i = 0;
    for (; i + 3 <= n && in.left >= 0; i += 3) {
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            if (k == 2 && in.have < MAX_HUFFMAN_BITS) in.refill();  // 32 bits are there at least, and three may take 33
            const u32 code = codes[in.peek(bits)];
            to[i + k] = static_cast<u8>(code);
            in.skip(code >> 8);
        }
        in.refill();
    }
    for (; i < n && in.left >= 0; ++i) {
        const u32 code = codes[in.peek(bits)];
        to[i] = static_cast<u8>(code);
        in.skip(code >> 8);
        in.refill();
    }
    return in.left == 0;
}

// Decode the literals of a block. By one warp, four lanes of which have a stream each.
__device__ inline int entropy_literals(LiteralTables &t, const u8 *arena, const Block *blocks, const Block &block,
                                       u8 *pool) {
    const Block &other = blocks[block.tree];
    u32 used = 0;
    int symbols = 0, bits = 0, good = 1;
    if (lane_id() == 0)
        good = read_weights(arena + other.source + other.literals_head, other.literals_stored, t.weights, symbols, used,
                            t.counts, t.cells, t.next);
    sync_warp();
    good = from_lane(good, 0);
    symbols = from_lane(symbols, 0);
    used = from_lane(used, 0);
    if (!good || !build_huffman(t.weights, symbols, t.codes, bits, t.first)) return BAD_DATA;
    const u8 *from = arena + block.source + block.literals_head;
    u32 left = block.literals_stored;
    if (block.literals_type == NEW_TREE) {
        from += used;
        left -= used;
    }
    u8 *to = pool + block.literals_at;
    if (block.literals_streams == 1) {
        if (lane_id() == 0) good = decode_literals(t.codes, bits, from, left, to, block.literals);
    } else {
        if (left < 10 || block.literals < 6) return BAD_DATA;
        const u32 part = (block.literals + 3) / 4;
        const u32 a = load16(from), b = load16(from + 2), c = load16(from + 4);
        if (6 + a + b + c > left) return BAD_DATA;
        const u32 begin[4] = {6, 6 + a, 6 + a + b, 6 + a + b + c}, size[4] = {a, b, c, left - 6 - a - b - c};
        for (int k = lane_id(); k < 4; k += LANES)
            good &= decode_literals(t.codes, bits, from + begin[k], size[k], to + k * part,
                                    k < 3 ? part : block.literals - 3 * part);
    }
    return vote(!good) ? BAD_DATA : FINE;
}

extern "C" __global__ void __launch_bounds__(2 * LANES, 12)
    zstd_entropy(const u8 *__restrict__ arena, Block *blocks, i64 block_capacity, const u64 *__restrict__ counters,
                 u8 *pool, i64 pool_nbytes, int *status) {
    __shared__ SequenceTables sequences;
    __shared__ LiteralTables literals;
    const i64 known = static_cast<i64>(counters[BLOCKS]);
    const i64 n = known < block_capacity ? known : block_capacity;
    // A warp goes on to its next block without waiting for the other: they share nothing.
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        Block &block = blocks[number];
        if (block.type != COMPRESSED) continue;
        if (FIRST_TASK && block.sequences) {
            // Of the first lane, in a register: from shared memory the compiler lets all lanes load what one is writing.
            int state = FINE;
            if (lane_id() == 0) state = make_tables(sequences, arena, blocks, number) ? FINE : BAD_DATA;
            sync_warp();
            if (from_lane(state, 0) == FINE) {
                fold_symbols(sequences);
                sync_warp();
                if (lane_id() == 0)
                    state = decode_sequences(sequences, arena + block.source, block, block_sequences(block, pool, pool_nbytes));
            }
            if (lane_id() == 0 && state != FINE) fail(status, block.chunk, state);
            sync_warp();
        }
        if (SECOND_TASK && block.literals_type >= NEW_TREE) {
            const int state = entropy_literals(literals, arena, blocks, block, pool);
            if (lane_id() == 0 && state != FINE) fail(status, block.chunk, state);
            sync_warp();
        }
    }
}

// Literals in memory, or one that is repeated.
struct Literals {
    const u8 *from;
    u64 mask;
    __device__ u8 operator[](u64 i) const { return load_once(from + (i & mask)); }
};

__device__ inline u32 looked_up(u32 offset, const u32 *last) {
    if (offset < NOT_YET) return offset;
    const u32 back = offset & 0xfffff, k = offset >> 20 & 3, base = k == 0 ? last[0] : k == 1 ? last[1] : last[2];
    return base > back ? base - back : 0;  // 0 is no offset, and is found out
}

__device__ inline void fetch_two(u64 *word, const u64 *sequences, u32 at, u32 count) {
    word[0] = at < count ? sequences[at] : 0;
    word[1] = at + 1 < count ? sequences[at + 1] : 0;
}

__device__ inline bool execute_block(Sink &out, const Block &block, const u8 *arena, const u8 *pool, i64 pool_nbytes,
                                     u32 *last) {
    const u8 *content = arena + block.source;
    if (block.type != COMPRESSED) return put_literals(out, Literals{content, block.type == RAW ? ~0ull : 0}, 0, block.nbytes);
    const Literals literals{block.literals_type >= NEW_TREE ? pool + block.literals_at : content + block.literals_head,
                            block.literals_type == ONE_LITERAL ? 0 : ~0ull};
    const u64 *sequences = block_sequences(block, pool, pool_nbytes);
    const u32 mine_at = 2 * lane_id();
    u64 word[2];
    fetch_two(word, sequences, mine_at, block.sequences);
    u32 taken = 0;
    for (u32 i = 0; i < block.sequences; i += BATCH) {
        Sequence mine[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            mine[k].literals = word[k] & 0x3ffff;
            mine[k].match = word[k] >> 18 & 0x3ffff;
            mine[k].offset = looked_up(static_cast<u32>(word[k] >> 36), last);
        }
        fetch_two(word, sequences, i + BATCH + mine_at, block.sequences);  // on its way while this batch is copied
        const u32 sum = running_sum(mine[0].literals + mine[1].literals);
        mine[1].at = taken + sum - mine[1].literals;
        mine[0].at = mine[1].at - mine[0].literals;
        taken += from_lane(sum, LANES - 1);
        if (taken > block.literals) return false;
        if (!execute(out, literals, mine)) return false;
    }
    if (block.sequences) {
        const u32 a = looked_up(block.last_offsets[0], last), b = looked_up(block.last_offsets[1], last),
                  c = looked_up(block.last_offsets[2], last);
        last[0] = a;
        last[1] = b;
        last[2] = c;
    }
    return put_literals(out, literals, taken, block.literals - taken);
}

extern "C" __global__ void __launch_bounds__(TEAM, 3)
    zstd_execute(const u8 *__restrict__ arena, u8 *target, const Stream *__restrict__ streams, i64 stream_capacity,
                 const Frame *__restrict__ frames, const Block *__restrict__ blocks, const u64 *__restrict__ counters,
                 const u8 *pool, i64 pool_nbytes, i64 ring_size, int *status) {
    extern __shared__ __align__(16) u8 ring[];
    __shared__ Links links;
    const i64 known = static_cast<i64>(counters[STREAMS]);
    const i64 n = known < stream_capacity ? known : stream_capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        // Another stream of the chunk may fail meanwhile: all threads must see the same.
        if (stream.codec != ZSTD || any_in_team(status[stream.chunk] != FINE)) continue;
        const Frame frame = frames[number];
        Sink out = open_sink(ring, ring_size, links, threadIdx.x, target + stream.target, stream.target_nbytes);
        u32 last[3] = {1, 4, 8};
        bool good = true;
        for (int k = 0; k < frame.blocks && good; ++k)
            good = execute_block(out, blocks[frame.first_block + k], arena, pool, pool_nbytes, last);
        const bool whole = good && close_sink(out);
        if (!whole && out.rank == 0) fail(status, stream.chunk, good ? WRONG_SIZE : BAD_DATA);
    }
}
