// Literals of the zstd encoder (format: RFC 8878): a block's histogram → Huffman codes of at most 11 bits → four
// streams.
//
// Four warps for each block. All threads count the literals and rank the symbols by frequency. One lane builds the tree
// from the ranks by two queues, shortens codes that are too long, and describes the lengths (as nibbles, or by FSE).
// Then each warp writes a stream. The lengths of the streams are summed first, which gives their offsets, and shows
// whether compression pays off. A stream is written from the last literal to the first: each lane takes four literals,
// a running sum gives the offset of their bits, which are combined in shared memory and stored bytewise.
//
// Literals that do not shrink are stored uncompressed; equal literals are stored once. This kernel also detects blocks
// of equal bytes.

#include "decode.cuh"
#include "zstd_encode.cuh"
#include "zstd_fse.cuh"

constexpr u32 LITERAL_WARPS = 4, LITERAL_THREADS = LITERAL_WARPS * LANES, SYMBOLS = 256, MAX_BITS = 11;
constexpr u32 EACH = 4;  // literals of a lane at a time
constexpr u32 MIN_LITERALS = 32;  // with fewer literals, the description of a tree does not pay off
constexpr u32 LENGTH_SHIFT = 12;  // in the word of a code, the length is stored above the code, from this bit on
constexpr u32 TREE_NBYTES = 256;  // maximum of the description of a tree

struct LiteralCoder {
    u32 histogram[LITERAL_WARPS][SYMBOLS];
    u32 start[SEGMENTS + 1];  // first literal of each segment
    u32 leaf[SYMBOLS], node[SYMBOLS];  // frequencies of ranked symbols, and of inner nodes
    u16 order[SYMBOLS], leaf_parent[SYMBOLS], node_parent[SYMBOLS], codes[SYMBOLS];
    u8 depth[SYMBOLS], length[SYMBOLS], weights[SYMBOLS], tree[TREE_NBYTES];
    u32 words[LITERAL_WARPS][(EACH * LANES * MAX_BITS + 63) / 32 + 2];
    u32 stream_bits[LITERAL_WARPS];
    FseEncoder<64> fse;
    u32 weight_histogram[MAX_BITS + 2];
    u32 different, last, tree_nbytes, longest;  // number of symbols that occur, last of them; longest code
};

__device__ inline u32 warp_sum(u32 v) { return from_lane(running_sum(v), LANES - 1); }

// Literals of a block, read from the last one backwards.
struct LiteralsBackward {
    const u8 *literals;
    const u32 *start;
    u32 segment;
    __device__ u32 at(u32 i) {
        while (i < start[segment]) --segment;
        return literals[segment * SEGMENT + i - start[segment]];
    }
};

__device__ inline void count_literals(LiteralCoder &t, const u8 *literals) {
    for (u32 k = threadIdx.x; k < LITERAL_WARPS * SYMBOLS; k += LITERAL_THREADS)
        t.histogram[k / SYMBOLS][k % SYMBOLS] = 0;
    sync_block();
    for (u32 s = 0; s < SEGMENTS; ++s)
        for (u32 k = threadIdx.x; k < t.start[s + 1] - t.start[s]; k += LITERAL_THREADS)
            atomicAdd(&t.histogram[warp_id()][literals[s * SEGMENT + k]], 1u);
    sync_block();
    for (u32 k = threadIdx.x; k < SYMBOLS; k += LITERAL_THREADS)
        for (u32 w = 1; w < LITERAL_WARPS; ++w) t.histogram[0][k] += t.histogram[w][k];
    sync_block();
}

// Sort the symbols that occur by frequency.
__device__ inline void rank_symbols(LiteralCoder &t) {
    for (u32 s = threadIdx.x; s < SYMBOLS; s += LITERAL_THREADS) {
        const u32 mine = t.histogram[0][s];
        t.length[s] = 0;
        u32 rank = 0, different = 0, last = 0;
        for (u32 other = 0; other < SYMBOLS; ++other) {
            const u32 n = t.histogram[0][other];
            if (!n) continue;
            ++different;
            last = other;
            rank += n < mine || (n == mine && other < s);
        }
        if (mine) {
            t.order[rank] = static_cast<u16>(s);
            t.leaf[rank] = mine;
        }
        if (s == 0) {
            t.different = different;
            t.last = last;
        }
    }
    sync_block();
}

// Compute code lengths from the ranks of at least two symbols. By one lane.
__device__ inline void build_tree(LiteralCoder &t) {
    const u32 n = t.different;
    u32 leaf = 0, node = 0;
    for (u32 k = 0; k + 1 < n; ++k) {
        u32 sum = 0;
        for (int both = 0; both < 2; ++both) {
            if (leaf < n && (node >= k || t.leaf[leaf] <= t.node[node])) {
                sum += t.leaf[leaf];
                t.leaf_parent[leaf++] = static_cast<u16>(k);
            } else {
                sum += t.node[node];
                t.node_parent[node++] = static_cast<u16>(k);
            }
        }
        t.node[k] = sum;
    }
    t.depth[n - 2] = 0;
    for (u32 k = n - 2; k-- > 0;) t.depth[k] = static_cast<u8>(t.depth[t.node_parent[k]] + 1);
    // Rarer symbols have longer codes. If codes that are too long are cut to MAX_BITS, all codes together take more
    // code space than there is. Then other codes are lengthened, those of the rarest symbols first, until all fit; if
    // space remains, codes are shortened again, those of the most frequent symbols first.
    u32 used = 0;
    for (u32 k = 0; k < n; ++k) {
        const u32 length = t.depth[t.leaf_parent[k]] + 1u, cut = length < MAX_BITS ? length : MAX_BITS;
        t.length[t.order[k]] = static_cast<u8>(cut);
        used += 1u << (MAX_BITS - cut);
    }
    constexpr u32 ALL = 1u << MAX_BITS;
    for (u32 k = 0; used > ALL;) {
        u8 &length = t.length[t.order[k]];
        if (length == MAX_BITS) ++k;
        else used -= 1u << (MAX_BITS - ++length);
    }
    while (used < ALL)
        for (u32 k = n; k-- > 0;) {
            u8 &length = t.length[t.order[k]];
            if (used + (1u << (MAX_BITS - length)) <= ALL) used += 1u << (MAX_BITS - length--);
        }
    t.longest = 0;
    for (u32 s = 0; s <= t.last; ++s)
        if (t.length[s] > t.longest) t.longest = t.length[s];
}

// Assign codes and weights. Codes of one length are consecutive in the order of symbols; longer codes come first.
__device__ inline void number_codes(LiteralCoder &t) {
    for (u32 s = threadIdx.x; s < SYMBOLS; s += LITERAL_THREADS) {
        const u32 mine = t.length[s];
        u32 number = 0, longer = 0;  // earlier codes of the same length; code space of longer codes
        for (u32 other = 0; other <= t.last; ++other) {
            const u32 length = t.length[other];
            number += length == mine && other < s;
            if (length > mine) longer += 1u << (MAX_BITS - length);
        }
        const u32 code = mine ? (longer >> (MAX_BITS - mine)) + number : 0;
        t.codes[s] = static_cast<u16>(mine << LENGTH_SHIFT | code);
        t.weights[s] = static_cast<u8>(mine ? t.longest + 1 - mine : 0);
    }
    sync_block();
}

// Encode the weights by two alternating FSE states. Returns the size of the description, 0 if there is none. By one
// lane.
__device__ inline u32 describe_by_fse(LiteralCoder &t, u8 *to) {
    const u32 n = t.last;
    u32 symbols = 0, different = 0;
    for (u32 w = 0; w < MAX_BITS + 2; ++w) t.weight_histogram[w] = 0;
    for (u32 s = 0; s < n; ++s) ++t.weight_histogram[t.weights[s]];
    for (u32 w = 0; w < MAX_BITS + 2; ++w)
        if (t.weight_histogram[w]) {
            symbols = w + 1;
            ++different;
        }
    if (n < 4 || different < 2) return 0;
    const u32 log = n >= 64 ? 6 : 5;
    share_states(t.weight_histogram, symbols, n, log, t.fse.counts);
    BitWriter out{to};
    describe(t.fse.counts, symbols, log, out);
    make_encoder(t.fse, symbols, log);
    u32 states[2];
    for (u32 s = n; s-- > 0;) {
        if (s + 2 >= n) {
            states[s & 1] = first_state(t.fse, t.weights[s]);
            continue;
        }
        u32 bits;
        const u32 state = states[s & 1];
        states[s & 1] = next_state(t.fse, state, t.weights[s], bits);
        out.put(state & ((1u << bits) - 1), bits);
    }
    out.put(states[1] & ((1u << log) - 1), log);
    out.put(states[0] & ((1u << log) - 1), log);
    out.put(1, 1);
    out.finish();
    return out.nbytes;
}

// Write the shorter description of the tree to `t.tree`; `t.tree_nbytes` is 0 if there is none. By one lane.
__device__ inline void describe_tree(LiteralCoder &t) {
    const u32 n = t.last, nibbles = n <= 128 ? 1 + (n + 1) / 2 : TREE_NBYTES;
    const u32 packed = describe_by_fse(t, t.tree + 1);
    if (packed && packed < 128 && 1 + packed < nibbles) {
        t.tree[0] = static_cast<u8>(packed);
        t.tree_nbytes = 1 + packed;
    } else if (n <= 128) {
        t.tree[0] = static_cast<u8>(127 + n);
        for (u32 s = 0; s < n; s += 2)
            t.tree[1 + s / 2] = static_cast<u8>(t.weights[s] << 4 | (s + 1 < n ? t.weights[s + 1] : 0));
        t.tree_nbytes = nibbles;
    } else {
        t.tree_nbytes = 0;
    }
}

// Write the literals from `begin` to `end` as a stream. By a whole warp.
__device__ inline void write_stream(LiteralCoder &t, LiteralsBackward from, u32 begin, u32 end, u8 *to) {
    u32 *words = t.words[warp_id()];
    u32 carried = 0, left_over = 0;  // bits of the next byte
    for (u32 last = end; last > begin; last = last > begin + EACH * LANES ? last - EACH * LANES : begin) {
        u64 bits = 0;
        u32 n = 0;
        for (u32 k = 0; k < EACH; ++k) {
            const u32 back = EACH * lane_id() + k;
            if (back >= last - begin) break;
            const u32 word = t.codes[from.at(last - 1 - back)];
            bits |= static_cast<u64>(word & ((1u << LENGTH_SHIFT) - 1)) << n;
            n += word >> LENGTH_SHIFT;
        }
        const u32 sum = running_sum(n), total = carried + from_lane(sum, LANES - 1), at = carried + sum - n;
        for (u32 k = lane_id(); k < total / 32 + 2; k += LANES) words[k] = k ? 0 : left_over;
        sync_warp();
        put_bits(words, at, static_cast<u32>(bits), n < 32 ? n : 32);
        if (n > 32) put_bits(words, at + 32, static_cast<u32>(bits >> 32), n - 32);
        sync_warp();
        store_bytes(to, words, total / 8);
        to += total / 8;
        carried = total & 7;
        left_over = words[total / 32] >> (total & 24) & 0xff;
        sync_warp();
    }
    if (lane_id() == 0) *to = static_cast<u8>(left_over | 1u << carried);
}

// Headers of literals sections: with `n` raw or repeated literals, and with `n` literals in `nbytes` compressed bytes.
__device__ inline u32 raw_header_nbytes(u32 n) { return n < 32 ? 1 : n < 4096 ? 2 : 3; }
__device__ inline void write_raw_header(u8 *to, u32 type, u32 n) {
    const u32 size = raw_header_nbytes(n), head = type |
                                                  (size == 1   ? 0
                                                   : size == 2 ? 4
                                                               : 12) |
                                                  n << (size == 1 ? 3 : 4);
    for (u32 k = 0; k < size; ++k) to[k] = static_cast<u8>(head >> (8 * k));
}
__device__ inline u32 header_nbytes(u32 n) { return n < 1024 ? 3 : n < 16384 ? 4 : 5; }
__device__ inline void write_header(u8 *to, u32 n, u32 nbytes) {
    const u32 size = header_nbytes(n), format = n < SYMBOLS ? 0 : size - 2,
              width = size == 3   ? 10
                      : size == 4 ? 14
                                  : 18;
    const u64 head = 2 | format << 2 | n << 4 | static_cast<u64>(nbytes) << (4 + width);
    for (u32 k = 0; k < size; ++k) to[k] = static_cast<u8>(head >> (8 * k));
}

__device__ inline bool all_equal(const u8 *bytes, u32 nbytes) {
    bool other = false;
    for (u32 k = threadIdx.x; k < nbytes; k += LITERAL_THREADS) other |= bytes[k] != bytes[0];
    return !block_any(other);
}

// Sum the bits of the streams, one for each warp; returns the size of the section without its header.
__device__ inline u32 measure_streams(LiteralCoder &t, LiteralsBackward from, u32 begin, u32 end, u32 streams) {
    u32 bits = 0;
    for (u32 k = lane_id(); k < end - begin; k += LANES) bits += t.codes[from.at(end - 1 - k)] >> LENGTH_SHIFT;
    bits = warp_sum(bits);
    if (lane_id() == 0) t.stream_bits[warp_id()] = bits;
    sync_block();
    u32 nbytes = t.tree_nbytes + (streams > 1 ? 6 : 0);
    for (u32 s = 0; s < streams; ++s) nbytes += t.stream_bits[s] / 8 + 1;
    return nbytes;
}

extern "C" __global__ void zstd_literals(const u8 *chunks, i64 nbytes, i64 blocks_each, const u8 *literals,
                                         const Segment *segments, u8 *sections, EncodedBlock *blocks) {
    __shared__ LiteralCoder t;
    const i64 number = blockIdx.x;
    const Extent extent = block_extent(nbytes, number % blocks_each);
    const bool writes = threadIdx.x == 0;
    EncodedBlock &block = blocks[number];
    literals += number * BLOCK_NBYTES;
    u8 *to = sections + number * BLOCK_NBYTES;
    if (writes) {
        t.start[0] = 0;
        for (u32 s = 0; s < SEGMENTS; ++s) t.start[s + 1] = t.start[s] + segments[number * SEGMENTS + s].literals;
    }
    sync_block();
    const u32 n = t.start[SEGMENTS];
    count_literals(t, literals);
    rank_symbols(t);
    if (t.different == 1 && all_equal(chunks + number / blocks_each * nbytes + extent.begin, extent.nbytes)) {
        if (writes) block = {REPEATED, extent.nbytes, 0, 0, 0};
        return;
    }
    const u32 streams = n < SYMBOLS ? 1 : LITERAL_WARPS, part = (n + streams - 1) / streams;
    u32 begin = warp_id() * part, end = begin + part < n && streams > 1 ? begin + part : n;
    if (warp_id() >= streams) begin = end = 0;
    const LiteralsBackward from{literals, t.start, segment_of(t.start, end ? end - 1 : 0)};
    u32 section = 0;  // size of a compressed section without its header
    if (t.different > 1 && n >= MIN_LITERALS) {
        if (writes) build_tree(t);
        sync_block();
        number_codes(t);
        if (writes) describe_tree(t);
        sync_block();
        if (t.tree_nbytes) section = measure_streams(t, from, begin, end, streams);
    }
    const bool shrinks = section && header_nbytes(n) + section + n / 64 < n;
    const bool repeated = n > 1 && t.different == 1;
    const u32 head = shrinks ? header_nbytes(n) : raw_header_nbytes(n), stored = shrinks ? section : repeated ? 1 : n;
    if (head + stored + 1 >= extent.nbytes) {  // no bytes are left for sequences
        if (writes) block = {RAW, extent.nbytes, 0, 0, 0};
        return;
    }
    if (writes) {
        block = {COMPRESSED, 0, head + stored, 0, 0};
        if (shrinks) write_header(to, n, section);
        else write_raw_header(to, repeated ? 1 : 0, n);
        if (repeated) to[head] = static_cast<u8>(t.order[0]);
    }
    to += head;
    if (!shrinks) {
        for (u32 k = threadIdx.x; k < n && !repeated; k += LITERAL_THREADS) {
            const u32 s = segment_of(t.start, k);
            to[k] = literals[s * SEGMENT + k - t.start[s]];
        }
        return;
    }
    for (u32 k = threadIdx.x; k < t.tree_nbytes; k += LITERAL_THREADS) to[k] = t.tree[k];
    to += t.tree_nbytes;
    if (streams > 1) {
        if (threadIdx.x < 3) {
            const u32 size = t.stream_bits[threadIdx.x] / 8 + 1;
            to[2 * threadIdx.x] = static_cast<u8>(size);
            to[2 * threadIdx.x + 1] = static_cast<u8>(size >> 8);
        }
        to += 6;
    }
    for (u32 s = 0; s < warp_id(); ++s) to += t.stream_bits[s] / 8 + 1;
    if (begin < end) write_stream(t, from, begin, end, to);
}
