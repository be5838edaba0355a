// Sequences of the Zstandard format (RFC 8878): their three FSE tables and their bits. By two warps.
//
// The first bit of a sequence and its states depend on the previous sequence: this chain limits the speed of a block.
// One lane of the first warp follows the chain, with as few dependent instructions as possible, and stores the first
// bit and the states of the next 32 sequences. Meanwhile each lane of the second warp reads the values of one of the
// previous 32 sequences, and a scan over the lanes resolves repeated offsets.

#include "zstd_codes.cuh"

constexpr int MAX_STATES = 512;
constexpr u32 WINDOW = 512;      // words of the stream in shared memory; a power of two
constexpr u32 REACH = 96;        // maximum number of words that 32 sequences of at most 89 bits touch
constexpr u32 REPEATED_WORDS = 4;  // the first words of the window are repeated after its end, for reads across the end

// The position of a sequence: its first bit, and the cells of its states.
struct __align__(16) SequenceState { u32 at, cells[3]; };

struct SequenceTables {
    SequenceState states[2][LANES];  // one warp writes one half while the other warp reads the other half
    int good[2];  // whether the tables of a block are valid; blocks use the two alternately
    u32 cells[3][MAX_STATES];
    u32 window[WINDOW + REPEATED_WORDS];
    u32 lengths[36], matches[53];  // bases of both kinds of lengths
    Counts counts;
    Staged staged;
    int log[3];
};

// Copy the bases of lengths to shared memory. By the whole warp, once.
__device__ inline void set_bases(SequenceTables &t) {
    for (int s = lane_id(); s < 36; s += LANES) t.lengths[s] = LENGTH_BASE[s];
    for (int s = lane_id(); s < 53; s += LANES) t.matches[s] = MATCH_BASE[s];
    sync_warp();
}

__device__ inline int max_symbol(int kind) { return kind == LITERAL_LENGTH ? 35 : kind == OFFSET ? 31 : 52; }

// Read the description of a table at bit `pos` of the staged bytes, of which `nbytes` belong to the block, and advance
// `pos`; false if the description is invalid.
__device__ inline bool read_description(SequenceTables &t, u32 nbytes, u32 &pos, int mode, int kind, int &symbols,
                                        int &log) {
    if (mode == PREDEFINED) {
        symbols = predefined_symbols(kind);
        log = predefined_table_log(kind);
        const short *counts = predefined_counts(kind);
        for (int s = lane_id(); s < symbols; s += LANES) t.counts.of[s] = counts[s];
        return true;
    }
    if (mode == ONE_SYMBOL) {
        if (pos + 8 > 8 * nbytes) return false;
        log = 0;
        symbols = static_cast<int>(peek(t.staged, pos, 8));
        pos += 8;
        return symbols <= max_symbol(kind);
    }
    return read_counts(t.staged, nbytes, pos, max_log(kind), max_symbol(kind), t.counts, symbols, log);
}

// Make a table of cells, including the extra bits of the symbols. The caller synchronises before reading the table.
__device__ inline void make_table(SequenceTables &t, int kind, int symbols, int log) {
    if (lane_id() == 0) t.log[kind] = log;
    if (log > 0) build_cells(t.counts, symbols, log, t.cells[kind]);
    else if (lane_id() == 0) t.cells[kind][0] = static_cast<u32>(symbols) << SYMBOL;  // one symbol and no bits
    for (int s = lane_id(); s < 1 << log; s += LANES) {
        const u32 symbol = cell_symbol(t.cells[kind][s]);
        t.cells[kind][s] |= kind == OFFSET           ? symbol
                            : kind == LITERAL_LENGTH ? LENGTH_EXTRA[symbol]
                                                     : MATCH_EXTRA[symbol];
    }
}

// Make the tables of a block, which the block itself or earlier blocks describe. Returns the offset in the block's
// content after its own descriptions; 0 if a description is invalid.
__device__ inline u32 make_tables(SequenceTables &t, const u8 *arena, const Block *blocks, i64 number) {
    const Block &mine = blocks[number];
#pragma unroll 1
    for (int kind = 0; kind < 3; ++kind) {
        const Block &other = blocks[mine.table[kind]];
        if (&other == &mine) continue;
        // The descriptions before the wanted one must be read to find where it begins.
        const u32 nbytes = other.nbytes - other.tables_head;
        u32 pos = 0;
        int symbols = 0, log = 0;
        sync_warp();
        stage(t.staged, arena + other.source + other.tables_head, nbytes);
#pragma unroll 1
        for (int k = 0; k <= kind; ++k) {
            if (mode_of(other, k) != REPEAT && !read_description(t, nbytes, pos, mode_of(other, k), k, symbols, log))
                return 0;
            sync_warp();
        }
        make_table(t, kind, symbols, log);
    }
    const u32 nbytes = mine.nbytes - mine.tables_head;
    u32 pos = 0;
    stage(t.staged, arena + mine.source + mine.tables_head, nbytes);
#pragma unroll 1
    for (int kind = 0; kind < 3; ++kind) {
        if (mode_of(mine, kind) == REPEAT) continue;
        int symbols = 0, log = 0;
        if (!read_description(t, nbytes, pos, mode_of(mine, kind), kind, symbols, log)) return 0;
        sync_warp();
        make_table(t, kind, symbols, log);
    }
    const u32 begin = mine.tables_head + pos / 8;
    return begin < mine.nbytes ? begin : 0;
}

// The last three offsets, which later sequences may repeat, as a function of earlier ones: each is an offset, or "the
// k-th earlier one, minus n".
struct LastOffsets { u32 of[3]; };
__device__ inline LastOffsets unchanged() { return {{UNRESOLVED, UNRESOLVED + (1u << 20), UNRESOLVED + (2u << 20)}}; }

// The last offsets after one sequence, by RFC 8878 section 3.1.1.5. The first of them is the sequence's own offset.
__device__ inline LastOffsets after_one(u32 value, bool no_literals) {
    const LastOffsets o = unchanged();
    if (value > 3) return {{value - 3, o.of[0], o.of[1]}};
    const u32 which = value - 1 + no_literals;
    if (which == 0) return o;
    return {{which == 1 ? o.of[1] : which == 2 ? o.of[2] : o.of[0] + 1, o.of[0], which == 1 ? o.of[2] : o.of[1]}};
}

// The last offsets after `before` and `then`, as a function of those before both.
__device__ inline LastOffsets composed(const LastOffsets &before, const LastOffsets &then) {
    return {{resolved(then.of[0], before.of), resolved(then.of[1], before.of), resolved(then.of[2], before.of)}};
}

// Composition over the sequences of this lane and all lanes below.
__device__ inline LastOffsets scanned(LastOffsets mine) {
#pragma unroll
    for (int by = 1; by < LANES; by *= 2) {
        LastOffsets below;
#pragma unroll
        for (int k = 0; k < 3; ++k) below.of[k] = from_below(mine.of[k], by);
        if (lane_id() >= by) mine = composed(below, mine);
    }
    return mine;
}

// A stream of bits, read from the last byte backwards, highest bit first, through a window in shared memory. Bits are
// counted from the top of the stream's last word.
struct BitStream {
    const u32 *last;  // word 0; word k is last[-k]
    u32 words, end;  // number of words; the bit after the last one
    u32 filled;  // words written to the window so far
    u32 next[3];  // the next words, three per lane, loaded in advance
};

__device__ inline void fetch(BitStream &s) {
#pragma unroll
    for (u32 k = 0; k < 3; ++k) {
        const u32 word = s.filled + k * LANES + lane_id();
        s.next[k] = word < s.words ? load_once(s.last - word) : 0;
    }
}

// Write the fetched words into the window, over words that both warps have read.
__device__ inline void fill(BitStream &s, u32 *window) {
#pragma unroll
    for (u32 k = 0; k < 3; ++k) {
        const u32 word = (s.filled + k * LANES + lane_id()) & (WINDOW - 1);
        window[word] = s.next[k];
        if (word < REPEATED_WORDS) window[WINDOW + word] = s.next[k];
    }
    s.filled += 3 * LANES;
    fetch(s);
    sync_warp();
}

// Begin to read a stream; returns the number of the first bit. The highest 1 of the last byte, which is not 0, precedes
// it.
__device__ inline u32 open_stream(BitStream &s, u32 *window, const u8 *from, u32 nbytes) {
    const u32 mark = load_once(from + nbytes - 1);
    const u64 begin = reinterpret_cast<u64>(from), last = begin + nbytes - 1;
    s.last = reinterpret_cast<const u32 *>(last & ~3ull);
    s.words = static_cast<u32>((last >> 2) - (begin >> 2)) + 1;
    s.end = static_cast<u32>((last & ~3ull) + 4 - begin) * 8;
    s.filled = 0;
    fetch(s);
    fill(s, window);
    fill(s, window);
    return 8 * static_cast<u32>(3 - (last & 3)) + leading_zeros(mark) - 24 + 1;
}

// 32 bits from bit `at` on, highest first.
__device__ inline u32 bits_at(const u32 *window, u32 at) {
    const u32 *word = window + (at / 32 & (WINDOW - 1));
    return funnel_left(word[1], word[0], at & 31);
}
__device__ inline u32 bits_at(const u32 *window, u32 at, u32 n) { return shifted_right(bits_at(window, at), 32 - n); }

// The states of the three tables, as byte offsets of their cells.
struct States { u32 of[3]; };
__device__ inline u32 cell_of(const u32 *cells, u32 state) {
    return *reinterpret_cast<const u32 *>(reinterpret_cast<const u8 *>(cells) + state);
}
// The next state: its lower bits are those of `word` from bit `shift` on; its base has zeros there.
__device__ inline u32 next_state(u32 cell, u32 word, u32 shift) {
    const u32 mask = (4u << cell_bits(cell)) - 4;
    return (word >> shift & mask) | cell >> (NEXT - 2);
}

// The 96 bits from bit `at` on, of which a sequence and its next states need 89 at most.
struct Ahead { u32 first, second, third; };
__device__ inline Ahead ahead(const u32 *window, u32 at) {
    const u32 *word = window + (at / 32 & (WINDOW - 1));
    const u32 a = word[0], b = word[1], c = word[2], d = word[3];
    return {funnel_left(b, a, at), funnel_left(c, b, at), funnel_left(d, c, at)};
}

// Find the next `count` sequences, from bit `at` on; returns the bit after them. By one lane. The loads of the next
// three cells overlap all instructions that do not depend on them; there is no branch.
__device__ inline u32 walk(SequenceTables &t, SequenceState *found, States &state, u32 at, u32 count) {
    Ahead bits = ahead(t.window, at);
    for (u32 k = 0; k < count; ++k) {
        const u32 l = cell_of(t.cells[LITERAL_LENGTH], state.of[LITERAL_LENGTH]);
        const u32 o = cell_of(t.cells[OFFSET], state.of[OFFSET]);
        const u32 m = cell_of(t.cells[MATCH_LENGTH], state.of[MATCH_LENGTH]);
        found[k] = SequenceState{at, {l, o, m}};
        const u32 sum = l + o + m, extra = cell_extra(sum);
        const u32 word =
            extra < 32 ? funnel_left(bits.second, bits.first, extra) : funnel_left(bits.third, bits.second, extra);
        // The states' bits come in this order, highest first; shifting by two bits less gives byte offsets.
        const u32 first = 30 - cell_bits(l), second = first - cell_bits(m);
        state.of[LITERAL_LENGTH] = next_state(l, word, first);
        state.of[MATCH_LENGTH] = next_state(m, word, second);
        state.of[OFFSET] = next_state(o, word, second - cell_bits(o));
        at += extra + cell_bits(sum);
        bits = ahead(t.window, at);
    }
    return at;
}

// Find all sequences of a block; returns a status. By the first warp, in step with `unpack_sequences`.
__device__ inline int walk_sequences(SequenceTables &t, const u8 *from, u32 nbytes, u32 all) {
    BitStream stream;
    u32 at = open_stream(stream, t.window, from, nbytes);
    States state{};
    constexpr int ORDER[3] = {LITERAL_LENGTH, OFFSET, MATCH_LENGTH};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        const u32 log = t.log[ORDER[k]];
        state.of[ORDER[k]] = 4 * bits_at(t.window, at, log);
        at += log;
    }
    for (u32 done = 0; done < all; done += LANES) {
        const u32 count = all - done < LANES ? all - done : LANES;
        SequenceState *found = t.states[done / LANES & 1];
        if (lane_id() == 0) at = walk(t, found, state, at, count);
        at = from_lane(at, 0);
        sync_pair();
        if (done + LANES >= all) {  // no state follows the last sequence
            const SequenceState last = found[count - 1];
            at -= cell_bits(last.cells[0] + last.cells[1] + last.cells[2]);
        }
        if (stream.filled - at / 32 < REACH) fill(stream, t.window);
    }
    return at == stream.end ? FINE : BAD_DATA;
}

// Read the values of the sequences that `walk_sequences` finds, and store them in the pool; returns a status. By the
// second warp.
__device__ inline int unpack_sequences(SequenceTables &t, Block &block, u64 *to) {
    LastOffsets last = unchanged();
    bool far = false;
    u64 copied = 0;
    const u32 all = block.sequences;
    for (u32 done = 0; done < all; done += LANES) {
        const u32 sequence = done + lane_id();
        LastOffsets mine = unchanged();
        u32 literals = 0, match = 0;
        sync_pair();
        if (sequence < all) {
            const SequenceState found = t.states[done / LANES & 1][lane_id()];
            const u32 l = found.cells[LITERAL_LENGTH], o = found.cells[OFFSET], m = found.cells[MATCH_LENGTH];
            const u32 match_at = found.at + cell_extra(o), literals_at = match_at + cell_extra(m);
            const u32 value = (1u << cell_symbol(o)) + bits_at(t.window, found.at, cell_extra(o));
            match = t.matches[cell_symbol(m)] + bits_at(t.window, match_at, cell_extra(m));
            literals = t.lengths[cell_symbol(l)] + bits_at(t.window, literals_at, cell_extra(l));
            far |= value > UNRESOLVED;
            copied += match;
            mine = after_one(value, literals == 0);
        }
        const LastOffsets now = composed(last, scanned(mine));
        if (sequence < all) to[sequence] = packed(literals, match, now.of[0] & 0x0fffffff);
#pragma unroll
        for (int k = 0; k < 3; ++k) last.of[k] = from_lane(now.of[k], LANES - 1);
    }
#pragma unroll
    for (int by = LANES / 2; by; by /= 2) copied += from_lane(copied, lane_id() ^ by);
    if (lane_id() == 0) {
        for (int k = 0; k < 3; ++k) block.last_offsets[k] = last.of[k];
        block.decoded = copied > MAX_BLOCK ? ~0u : block.literals + static_cast<u32>(copied);
    }
    return vote(far) ? UNSUPPORTED : FINE;
}
