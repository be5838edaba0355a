// Sequences of the zstd encoder (format: RFC 8878): codes of lengths and offsets → FSE tables of the block → one
// stream.
//
// One warp for each block. All lanes count the codes. Three lanes then make the three tables at the same time: a table
// of one symbol if only one occurs, else the format's predefined table or a table from the block's histogram, which
// must be described, whichever takes fewer bits. Sequences are written from the last to the first, 64 at a time. Three
// lanes follow the states of the three tables, which is the only serial part: a load of shared memory and a few
// instructions for each sequence. A running sum gives the offset of each sequence's bits; lanes combine the bits in
// shared memory.
//
// If the result is not shorter than the block's bytes, the block is stored uncompressed.

#include "decode.cuh"
#include "zstd_encode.cuh"
#include "zstd_codes.cuh"
#include "zstd_fse.cuh"

constexpr u32 KINDS = 3;  // of codes, each with a table: see Kind
constexpr u32 EACH = 2, TILE = EACH * LANES;  // sequences of a lane, and of the warp, at a time
constexpr u32 MAX_STATE_BITS = 9 + 9 + 8;
constexpr u32 MAX_SEQUENCE_BITS = MAX_STATE_BITS + 16 + 16 + 30;
constexpr u32 TABLE_NBYTES = 96;  // maximum of a described table: 53 counts of at most 10 bits, and runs of zeros
constexpr u32 NBITS_SHIFT = 12;  // in `written`, the number of bits is stored above the bits, from this bit on

struct SequenceCoder {
    FseEncoder<512> fse[KINDS];
    u32 histogram[KINDS][MAX_SYMBOLS];
    u32 start[SEGMENTS + 1];  // first sequence of each segment
    u32 pending[SEGMENTS];  // number of literals of earlier segments that belong to the first sequence of a segment
    u8 codes[KINDS][TILE];
    u16 written[KINDS][TILE];
    u8 described[KINDS][TABLE_NBYTES];
    u32 described_nbytes[KINDS], mode[KINDS], log[KINDS];
    u32 words[TILE * MAX_SEQUENCE_BITS / 32 + 4];
    u8 length_codes[64], match_codes[128], length_extra[36], match_extra[53];
};

// Make tables of the codes of short lengths. The code of a long length follows from the length's highest bit.
__device__ inline void list_codes(SequenceCoder &t) {
    for (u32 n = lane_id(); n < 64; n += LANES) {
        u32 code = 0;
        while (code < 24 && LENGTH_BASE[code + 1] <= n) ++code;
        t.length_codes[n] = static_cast<u8>(code);
    }
    for (u32 n = lane_id(); n < 128; n += LANES) {
        u32 code = 0;
        while (code < 42 && MATCH_BASE[code + 1] <= n + 3) ++code;
        t.match_codes[n] = static_cast<u8>(code);
    }
    for (u32 code = lane_id(); code < 36; code += LANES) t.length_extra[code] = LENGTH_EXTRA[code];
    for (u32 code = lane_id(); code < 53; code += LANES) t.match_extra[code] = MATCH_EXTRA[code];
}

struct Sequence { u32 run, match, offset; };
struct Codes { u32 of[KINDS]; };
__device__ inline Codes codes_of(const SequenceCoder &t, const Sequence &s) {
    const u32 match = s.match - 3;
    return {s.run < 64 ? t.length_codes[s.run] : top_bit(s.run) + 19, top_bit(s.offset),
            match < 128 ? t.match_codes[match] : top_bit(match) + 36};
}

__device__ inline Sequence load_sequence(const SequenceCoder &t, const u64 *sequences, u32 i) {
    const u32 s = segment_of(t.start, i), k = i - t.start[s];
    const u64 packed = sequences[static_cast<u64>(s) * MAX_SEQUENCES + k];
    return {run_of(packed) + (k ? 0 : t.pending[s]), match_of(packed), offset_of(packed)};
}

// Approximate binary logarithm, in units of 1/256.
__device__ inline u32 log2_of(u32 v) { return 256 * top_bit(v) + ((v << 8) >> top_bit(v)) - 256; }
// Approximate number of bits that the symbols of a histogram take with a table of `counts`.
__device__ inline u32 bits_of(const u32 *histogram, const short *counts, u32 symbols, u32 log) {
    u32 bits = 0;
    for (u32 s = 0; s < symbols; ++s)
        if (histogram[s]) bits += histogram[s] * (256 * log - log2_of(counts[s] < 0 ? 1 : counts[s])) >> 8;
    return bits;
}

// Choose and make the table of a kind of codes. By one lane for each kind.
__device__ inline void choose_table(SequenceCoder &t, u32 kind, u32 total) {
    const u32 *histogram = t.histogram[kind];
    FseEncoder<512> &fse = t.fse[kind];
    u32 symbols = 0, different = 0;
    for (u32 s = 0; s < MAX_SYMBOLS; ++s)
        if (histogram[s]) {
            symbols = s + 1;
            ++different;
        }
    t.described_nbytes[kind] = 0;
    if (different == 1) {
        t.mode[kind] = ONE_SYMBOL;
        t.described[kind][0] = static_cast<u8>(symbols - 1);
        t.described_nbytes[kind] = 1;
        fse.transitions[symbols - 1] = {0, 0};
        fse.states[0] = 0;
        t.log[kind] = 0;
        return;
    }
    const u32 maximum = max_log(kind), preferred = total > 4 ? top_bit(total - 1) - 2 : 0;
    u32 log = preferred < maximum ? preferred : maximum;
    const u32 minimum = top_bit(different - 1) + 1;
    if (log < minimum) log = minimum;
    if (log < 5) log = 5;
    const u32 predefined = predefined_symbols(kind), predefined_log = predefined_table_log(kind);
    const short *counts = predefined_counts(kind);
    share_states(histogram, symbols, total, log, fse.counts);
    BitWriter out{t.described[kind]};
    describe(fse.counts, symbols, log, out);
    if (symbols > predefined || 8 * out.nbytes + bits_of(histogram, fse.counts, symbols, log) <
                                    bits_of(histogram, counts, symbols, predefined_log)) {
        t.mode[kind] = DESCRIBED;
        t.described_nbytes[kind] = out.nbytes;
        make_encoder(fse, symbols, log);
        t.log[kind] = log;
        return;
    }
    t.mode[kind] = PREDEFINED;
    for (u32 s = 0; s < predefined; ++s) fse.counts[s] = counts[s];
    make_encoder(fse, predefined, predefined_log);
    t.log[kind] = predefined_log;
}

// Write the number of sequences, the modes and the tables; returns the number of bytes. By one lane.
__device__ inline u32 write_head(const SequenceCoder &t, u32 n, u8 *to) {
    u32 size = 1;
    if (n < 128) {
        to[0] = static_cast<u8>(n);
    } else if (n < 0x7f00) {
        to[0] = static_cast<u8>((n >> 8) + 128);
        to[size++] = static_cast<u8>(n);
    } else {
        to[0] = 255;
        to[size++] = static_cast<u8>(n - 0x7f00);
        to[size++] = static_cast<u8>((n - 0x7f00) >> 8);
    }
    to[size++] = static_cast<u8>(t.mode[LITERAL_LENGTH] << 6 | t.mode[OFFSET] << 4 | t.mode[MATCH_LENGTH] << 2);
    for (u32 kind = 0; kind < KINDS; ++kind)
        for (u32 k = 0; k < t.described_nbytes[kind]; ++k) to[size++] = t.described[kind][k];
    return size;
}

// Follow the states of one table over the next `n` sequences, and return the last state. Without a `known` state the
// sequences are the first to be written, the last of the block. By one lane. Four sequences at a time: loads that do
// not depend on the state come first, stores last.
__device__ inline u32 follow_states(SequenceCoder &t, u32 kind, u32 n, u32 state, bool known) {
    const FseEncoder<512> &fse = t.fse[kind];
    const auto step = [&](Transition transition) {
        const u32 bits = (state + transition.bits) >> 16, word = (state & ((1u << bits) - 1)) | bits << NBITS_SHIFT;
        state = fse.states[static_cast<int>(state >> bits) + transition.state];
        return static_cast<u16>(word);
    };
    u32 k = 0;
    if (!known) {
        state = first_state(fse, t.codes[kind][0]);
        t.written[kind][k++] = 0;
    }
    while (k < n) {
        if (k % 4 || k + 4 > n) {
            t.written[kind][k] = step(fse.transitions[t.codes[kind][k]]);
            ++k;
            continue;
        }
        Transition transitions[4];
        u16 words[4];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) transitions[e] = fse.transitions[t.codes[kind][k + e]];
#pragma unroll
        for (u32 e = 0; e < 4; ++e) words[e] = step(transitions[e]);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) t.written[kind][k + e] = words[e];
        k += 4;
    }
    return state;
}

// The bits of a sequence: the bits of the states, and the extra bits of the codes. `_n`: number of bits.
struct SequenceBits {
    u32 states, states_n, lengths, lengths_n, offset, offset_n;
    __device__ u32 n() const { return states_n + lengths_n + offset_n; }
};
__device__ inline SequenceBits bits_of(const SequenceCoder &t, const Sequence &s, const Codes &codes, u32 k) {
    SequenceBits b{0, 0, 0, 0, 0, 0};
    constexpr Kind ORDER[KINDS] = {OFFSET, MATCH_LENGTH, LITERAL_LENGTH};
#pragma unroll
    for (u32 i = 0; i < KINDS; ++i) {
        const Kind kind = ORDER[i];
        const u32 word = t.written[kind][k];
        b.states |= (word & ((1u << NBITS_SHIFT) - 1)) << b.states_n;
        b.states_n += word >> NBITS_SHIFT;
    }
    const u32 run = t.length_extra[codes.of[LITERAL_LENGTH]], match = t.match_extra[codes.of[MATCH_LENGTH]];
    b.lengths = (s.run & ((1u << run) - 1)) | ((s.match - 3) & ((1u << match) - 1)) << run;
    b.lengths_n = run + match;
    b.offset_n = codes.of[OFFSET];
    b.offset = s.offset & ((1u << b.offset_n) - 1);
    return b;
}

// Write all sequences; returns the number of bytes, or 0 if it might exceed `capacity`. By the whole warp.
__device__ inline u32 write_sequences(SequenceCoder &t, const u64 *sequences, u32 n, u8 *to, u32 capacity) {
    const u32 lane = lane_id();
    u32 state = 0, done = 0, carried = 0, left_over = 0;
    for (u32 last = n; last > 0;) {
        const u32 count = last < TILE ? last : TILE;
        Sequence mine[EACH];
        Codes codes[EACH];
#pragma unroll
        for (u32 e = 0; e < EACH; ++e) {
            const u32 k = EACH * lane + e;
            if (k >= count) continue;
            mine[e] = load_sequence(t, sequences, last - 1 - k);
            codes[e] = codes_of(t, mine[e]);
            for (u32 kind = 0; kind < KINDS; ++kind) t.codes[kind][k] = static_cast<u8>(codes[e].of[kind]);
        }
        sync_warp();
        if (lane < KINDS) state = follow_states(t, lane, count, state, last < n);
        sync_warp();
        SequenceBits bits[EACH];
        u32 sum = 0;
#pragma unroll
        for (u32 e = 0; e < EACH; ++e) {
            const u32 k = EACH * lane + e;
            bits[e] = k < count ? bits_of(t, mine[e], codes[e], k) : SequenceBits{0, 0, 0, 0, 0, 0};
            sum += bits[e].n();
        }
        const u32 until = running_sum(sum), total = carried + from_lane(until, LANES - 1);
        u32 at = carried + until - sum;
        if (done + total / 8 + 8 > capacity) return 0;
        for (u32 k = lane; k < total / 32 + 2; k += LANES) t.words[k] = k ? 0 : left_over;
        sync_warp();
#pragma unroll
        for (u32 e = 0; e < EACH; ++e) {
            put_bits(t.words, at, bits[e].states, bits[e].states_n);
            put_bits(t.words, at + bits[e].states_n, bits[e].lengths, bits[e].lengths_n);
            put_bits(t.words, at + bits[e].states_n + bits[e].lengths_n, bits[e].offset, bits[e].offset_n);
            at += bits[e].n();
        }
        sync_warp();
        store_bytes(to + done, t.words, total / 8);
        done += total / 8;
        carried = total & 7;
        left_over = t.words[total / 32] >> (total & 24) & 0xff;  // words are overwritten only after two more barriers
        last -= count;
    }
    const u32 log = t.log[lane < KINDS ? lane : 0], final = state & ((1u << log) - 1);
    BitWriter out{to + done, left_over, carried};
    for (int kind = MATCH_LENGTH; kind >= LITERAL_LENGTH; --kind) {
        const u32 value = from_lane(final, kind), width = from_lane(log, kind);
        if (lane == 0) out.put(value, width);
    }
    if (lane == 0) {
        out.put(1, 1);
        out.finish();
    }
    return done + from_lane(out.nbytes, 0);
}

extern "C" __global__ void zstd_coder(i64 nbytes, i64 blocks_each, const u64 *sequences, const Segment *segments,
                                      u8 *sections, EncodedBlock *blocks) {
    __shared__ SequenceCoder t;
    const i64 number = blockIdx.x;
    EncodedBlock &block = blocks[number];
    if (block.type != COMPRESSED) return;
    const Extent extent = block_extent(nbytes, number % blocks_each);
    const u32 lane = lane_id(), literals_nbytes = block.literals_nbytes, capacity = extent.nbytes - literals_nbytes;
    u8 *to = sections + number * BLOCK_NBYTES + literals_nbytes;
    sequences += number * SEGMENTS * MAX_SEQUENCES;
    segments += number * SEGMENTS;
    if (lane == 0) {
        u32 pending = 0;
        t.start[0] = 0;
        for (u32 s = 0; s < SEGMENTS; ++s) {
            t.start[s + 1] = t.start[s] + segments[s].sequences;
            t.pending[s] = pending;
            pending = segments[s].sequences ? segments[s].tail : pending + segments[s].tail;
        }
    }
    for (u32 k = lane; k < KINDS * MAX_SYMBOLS; k += LANES) t.histogram[k / MAX_SYMBOLS][k % MAX_SYMBOLS] = 0;
    list_codes(t);
    sync_warp();
    const u32 n = t.start[SEGMENTS];
    if (n == 0) {
        if (lane == 0) {
            *to = 0;
            block.nbytes = literals_nbytes + 1;
        }
        return;
    }
    for (u32 i = lane; i < n; i += LANES) {
        const Codes codes = codes_of(t, load_sequence(t, sequences, i));
        for (u32 kind = 0; kind < KINDS; ++kind) atomicAdd(&t.histogram[kind][codes.of[kind]], 1u);
    }
    sync_warp();
    if (lane < KINDS) choose_table(t, lane, n);
    sync_warp();
    const u32 tables = t.described_nbytes[0] + t.described_nbytes[1] + t.described_nbytes[2];
    const u32 head = (n < 128 ? 2 : n < 0x7f00 ? 3 : 4) + tables;
    u32 written = 0;
    if (head < capacity) {
        if (lane == 0) write_head(t, n, to);
        written = write_sequences(t, sequences, n, to + head, capacity - head);
    }
    if (lane == 0) {
        if (written) block.nbytes = literals_nbytes + head + written;
        else block = {RAW, extent.nbytes, 0, 0, 0};
    }
}
