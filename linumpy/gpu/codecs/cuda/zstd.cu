// Zstandard frames → literals and sequences (format: RFC 8878). zstd_execute.cu (many short frames) or zstd_cells.cu
// (few long frames) then executes the sequences, which gives the decoded bytes.
//
// A sequence is a run of literals, then a copy of decoded bytes (a match). As in all decoders here, finding the
// sequences of a stream is serial and takes one warp or lane; executing them is parallel: a team of warps, one thread
// for each byte.
//
// `zstd_frames`, one warp for each frame, walks the headers and stores the positions of blocks and tables.
// `zstd_entropy`, three warps for each zstd block, decodes the entropy of all blocks of all frames in parallel. One
// lane of the first warp follows the states of the FSE tables from sequence to sequence; the second warp reads the
// values of 32 sequences at a time and resolves repeated offsets by a scan; the third warp decodes the four Huffman
// streams of literals, one lane each.
//
// A repeated offset may refer to an offset of the previous block, which is unknown while blocks are decoded in
// parallel. Such an offset is stored as "the k-th last offset before the block, minus n", and resolved when the block
// is executed. Positions and sizes of intermediate data come from a pool; counters say how much of the pool is
// allocated.

#include "decode.cuh"
#include "zstd_records.cuh"
#include "zstd_format.cuh"
#include "zstd_sequences.cuh"
#include "zstd_huffman.cuh"

// Read the header of a frame, of `head` bytes; returns a status.
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
    if (!single && (p[5] >> 3) + 10 > MAX_WINDOW_BITS) return UNSUPPORTED;
    u32 id = 0;
    for (int k = 0; k < dictionary; ++k) id |= p[head + k];
    if (id) return UNSUPPORTED;
    head += dictionary;
    u64 content = 0;
    for (int k = 0; k < size; ++k) content |= static_cast<u64>(p[head + k]) << (8 * k);
    if (size == 2) content += 256;
    head += size;
    if (!size && (8ull + (p[5] & 7)) << ((p[5] >> 3) + 7) > MAX_STREAM_WINDOW) return UNSUPPORTED;
    if (size && content != static_cast<u64>(expected)) return WRONG_SIZE;
    frame.check.kind = flags & 4 ? XXH64 : NO_CHECK;
    return FINE;
}

// Iterate over the blocks of a frame: the first call, without `blocks`, counts the blocks, the second call stores their
// records. Returns a status. By a whole warp; all lanes read the same bytes.
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
        if (blocks && lane_id() == frame.blocks % LANES) {
            Block &block = blocks[frame.blocks];
            block.source = origin + at;
            block.type = static_cast<int>(type);
            block.nbytes = block.decoded = size;
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

// Read the headers of the literals and sequences of a compressed block; returns a status.
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

// The index of the last block for which `p` holds, of the blocks of this lane and of all lanes below; `before` if there
// is none. `first`: the block of lane 0.
__device__ inline i64 last_with(bool p, i64 first, i64 before) {
    const u32 lanes = vote(p) & ((2u << lane_id()) - 1);
    return lanes ? first + highest_bit(lanes) : before;
}

// Allocate `mine` units for the block of each lane of this warp. Returns the offset of this lane's part.
__device__ inline i64 allocate_by_lane(u64 *counter, u32 mine) {
    const u32 sum = running_sum(mine);
    i64 begin = 0;
    if (lane_id() == LANES - 1) begin = allocate(counter, sum);
    return from_lane(begin, LANES - 1) + sum - mine;
}

// Find the blocks that describe the tables that each block uses, and allocate memory for the block's literals and
// sequences. By a whole warp, one block per lane. Returns the status of the first block that is not FINE.
__device__ inline int plan_blocks(const u8 *arena, const Frame &frame, Block *blocks, u64 *counters, i64 pool_nbytes) {
    i64 tree = -1, table[3] = {-1, -1, -1};
    const i64 end = frame.first_block + frame.blocks;
    for (i64 first = frame.first_block; first < end; first += LANES) {
        const i64 number = first + lane_id();
        const bool coded = number < end && blocks[number].type == COMPRESSED;
        Block block{};
        if (coded) block = blocks[number];
        int state = coded ? parse_block(arena + block.source, block) : FINE;
        const bool huffman = coded && state == FINE && block.literals_type >= NEW_TREE;
        tree = block.tree = last_with(huffman && block.literals_type == NEW_TREE, first, tree);
        if (huffman && tree < 0) state = BAD_DATA;
        const bool sequences = coded && state == FINE && block.sequences;
        for (int kind = 0; kind < 3; ++kind) {
            table[kind] = last_with(sequences && mode_of(block, kind) != REPEAT, first, table[kind]);
            block.table[kind] = table[kind];
            if (sequences && table[kind] < 0) state = BAD_DATA;
            table[kind] = from_lane(table[kind], LANES - 1);
        }
        tree = from_lane(tree, LANES - 1);
        if (const u32 wrong = vote(state != FINE)) return from_lane(state, highest_bit(wrong & (0u - wrong)));
        block.literals_at = allocate_by_lane(counters + LITERALS, huffman ? block.literals : 0);
        block.sequences_at = allocate_by_lane(counters + SEQUENCES, sequences ? block.sequences : 0);
        if (vote(lane_id() == 0 && is_pool_full(counters, pool_nbytes))) return NO_SPACE;
        block.decoded = block.literals;  // `unpack_sequences` adds the bytes that the sequences copy
        if (coded) blocks[number] = block;
    }
    return FINE;
}

// Walk the headers of all frames. One warp per frame. `groups`: the groups of zstd_cells.cu, which are initialised
// here.
extern "C" __global__ void zstd_frames(const u8 *__restrict__ arena, const Stream *__restrict__ streams,
                                       i64 stream_capacity, Frame *frames, Block *blocks, i64 block_capacity,
                                       u64 *counters, i64 pool_nbytes, Check *checks, Group *groups, i64 group_count,
                                       int *status) {
    for (i64 k = blockIdx.x * static_cast<i64>(LANES) + lane_id(); k < group_count; k += gridDim.x * LANES)
        groups[k] = Group{NO_BLOCK, 0};
    const i64 known = static_cast<i64>(counters[STREAMS]);
    const i64 n = known < stream_capacity ? known : stream_capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != ZSTD) continue;
        const u8 *p = arena + stream.source;
        Frame frame{0, 0, {NO_CHECK, 0}, 0};
        i64 head = 0;
        int state = parse_frame(p, stream.source_nbytes, stream.target_nbytes, frame, head);
        if (state == FINE) state = walk_blocks(p, stream.source_nbytes, head, frame, 0, 0, nullptr);
        if (state == FINE) {
            if (lane_id() == 0) frame.first_block = allocate(counters + BLOCKS, frame.blocks);
            frame.first_block = from_lane(frame.first_block, 0);
            if (frame.first_block + frame.blocks > block_capacity) {
                // Later kernels must not read uninitialised records of blocks.
                for (i64 k = frame.first_block + lane_id(); k < block_capacity; k += LANES) blocks[k].type = RAW;
                state = NO_SPACE;
            }
        }
        if (state == FINE) {
            Block *mine = blocks + frame.first_block;
            walk_blocks(p, stream.source_nbytes, head, frame, stream.source, stream.chunk, mine);
            sync_warp();
            state = plan_blocks(arena, frame, blocks, counters, pool_nbytes);
            sync_warp();
            if (state != FINE)
                for (int k = lane_id(); k < frame.blocks; k += LANES) mine[k].type = RAW;
        }
        if (state != FINE) frame.blocks = 0;
        if (lane_id() == 0) {
            frames[number] = frame;
            checks[number] = frame.check;
            if (state != FINE) fail(status, stream.chunk, state);
        }
    }
}

// The tasks of a block's warps.
enum Task { WALK = 0, UNPACK = 1, LITERALS_TASK = 2 };

// Decode the literals and sequences of all compressed blocks into the pool.
extern "C" __global__ void __launch_bounds__(3 * LANES, 10)
    zstd_entropy(const u8 *__restrict__ arena, Block *blocks, i64 block_capacity, const u64 *__restrict__ counters,
                 u8 *pool, i64 pool_nbytes, int *status) {
    __shared__ SequenceTables sequences;
    __shared__ LiteralTables literals;
    const i64 known = static_cast<i64>(counters[BLOCKS]);
    const i64 n = known < block_capacity ? known : block_capacity;
    const int task = warp_id();
    if (task == UNPACK) set_bases(sequences);
    int turn = 0;
    // The third warp continues with the next block without waiting for the other two warps, with which it shares no
    // data.
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        Block &block = blocks[number];
        if (block.type != COMPRESSED) continue;
        const u8 *content = arena + block.source;
        int state = FINE;
        if (task == WALK && block.sequences) {
            const u32 begin = make_tables(sequences, arena, blocks, number);
            const bool good = begin && load_once(content + block.nbytes - 1);
            if (lane_id() == 0) sequences.good[turn] = good;
            sync_pair();
            state = good ? walk_sequences(sequences, content + begin, block.nbytes - begin, block.sequences) : BAD_DATA;
            turn ^= 1;
        } else if (task == UNPACK && block.sequences) {
            sync_pair();
            if (sequences.good[turn])
                state = unpack_sequences(sequences, block, block_sequences(block, pool, pool_nbytes));
            turn ^= 1;
        } else if (task == LITERALS_TASK && block.literals_type >= NEW_TREE) {
            state = entropy_literals(literals, arena, blocks, block, pool);
        }
        if (lane_id() == 0 && state != FINE) fail(status, block.chunk, state);
        sync_warp();
    }
}
