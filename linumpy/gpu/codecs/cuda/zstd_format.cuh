// FSE tables of the Zstandard format (RFC 8878): their descriptions and states. By a whole warp.

constexpr u32 MAX_BLOCK = 128 * 1024;

__device__ inline int highest_bit(u32 v) { return 31 - leading_zeros(v); }

// A copy in shared memory of the next bytes of a stream, which describe a table, followed by zeros.
constexpr u32 STAGED = 256;
struct Staged { u32 words[STAGED / 4 + 2]; };

// Copy the first `nbytes` bytes of a description to shared memory, or as many as fit. By the whole warp.
__device__ inline void stage(Staged &to, const u8 *from, u32 nbytes) {
    for (u32 word = lane_id(); word < STAGED / 4 + 2; word += LANES) {
        u32 value = 0;
#pragma unroll
        for (u32 k = 0; k < 4; ++k)
            if (4 * word + k < nbytes) value |= static_cast<u32>(load_once(from + 4 * word + k)) << (8 * k);
        to.words[word] = value;
    }
    sync_warp();
}

// `n` < 32 bits from bit `pos` on; bit 0 is the lowest bit of the first byte.
__device__ inline u32 peek(const Staged &from, u32 pos, u32 n) {
    const u32 word = pos / 32 < STAGED / 4 ? pos / 32 : STAGED / 4;
    return funnel(from.words[word], from.words[word + 1], pos & 31) & ((1u << n) - 1);
}

// The description of a table.
struct Counts {
    short of[64];   // number of states of each symbol; -1: one state, at the end of the table
    u16 begin[64];  // number of states of all lower symbols
    u16 next[64];   // number of the symbol's next state
};

// Read the counts of a table, which the staged bytes describe from bit `pos` on; `nbytes` of the bytes belong to the
// stream. All lanes read the same bits, the first lane writes. Returns false if the description is invalid. `pos`
// advances to the next whole byte.
__device__ inline bool read_counts(const Staged &in, u32 nbytes, u32 &pos, int max_log, int max_symbol, Counts &counts,
                                   int &symbols, int &log) {
    const u32 nbits = 8 * nbytes;
    const bool writes = lane_id() == 0;
    log = static_cast<int>(peek(in, pos, 4)) + 5;
    pos += 4;
    if (log > max_log) return false;
    int left = (1 << log) + 1;  // one more, as defined by the format
    symbols = 0;
    while (left > 1) {
        if (symbols > max_symbol) return false;
        const int width = highest_bit(static_cast<u32>(left)) + 1;
        const u32 value = peek(in, pos, width), low = value & ((1u << (width - 1)) - 1);
        const u32 threshold = (1u << width) - 1 - static_cast<u32>(left);
        u32 count;
        if (low < threshold) {
            pos += width - 1;
            count = low;
        } else {
            pos += width;
            count = value >= 1u << (width - 1) ? value - threshold : value;
        }
        const int probability = static_cast<int>(count) - 1;
        if (writes) counts.of[symbols] = static_cast<short>(probability);
        ++symbols;
        left -= probability < 0 ? 1 : probability;
        if (left < 1) return false;
        if (probability == 0) {
            for (u32 repeat = 3; repeat == 3;) {
                repeat = peek(in, pos, 2);
                pos += 2;
                for (u32 k = 0; k < repeat; ++k) {
                    if (symbols > max_symbol) return false;
                    if (writes) counts.of[symbols] = 0;
                    ++symbols;
                }
                if (pos > nbits) return false;
            }
        }
        if (pos > nbits) return false;
    }
    pos = (pos + 7) / 8 * 8;
    return pos <= nbits;
}

// A cell, a state of an FSE table in a word: number of extra bits of the symbol (6 bits), number of bits to read for
// the next state (5), symbol (6), and from bit NEXT on the base of the next state. In the sum of three cells the first
// two fields do not overflow.
constexpr u32 BITS = 6, SYMBOL = 11, NEXT = 23;
__device__ inline u32 cell_extra(u32 cell) { return cell & 63; }
__device__ inline u32 cell_bits(u32 cell) { return cell >> BITS & 31; }
__device__ inline u32 cell_symbol(u32 cell) { return cell >> SYMBOL & 63; }
__device__ inline u32 cell_next(u32 cell) { return cell >> NEXT; }

// Make the cells of a table of 2^log states, at least 32, from its counts. By the whole warp.
__device__ inline void build_cells(Counts &counts, int symbols, int log, u32 *cells) {
    const u32 size = 1u << log, lane = lane_id(), below = (1u << lane) - 1;
    u32 placed[2], last = 0;
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
        const int s = static_cast<int>(2 * lane + k), count = s < symbols ? counts.of[s] : 0;
        placed[k] = count > 0 ? count : 0;
        last |= static_cast<u32>(count < 0) << k;
        counts.next[s] = static_cast<u16>(count < 0 ? 1 : count);
    }
    const u32 sum = running_sum(placed[0] + placed[1]);
    counts.begin[2 * lane] = static_cast<u16>(sum - placed[0] - placed[1]);
    counts.begin[2 * lane + 1] = static_cast<u16>(sum - placed[1]);
    // Symbols with count -1 get the last states of the table: the lowest symbol gets the very last state.
    const u32 first = vote(last & 1), second = vote(last & 2),
              rare = bits_set(first & below) + bits_set(second & below);
    if (last & 1) cells[size - 1 - rare] = 2 * lane << SYMBOL;
    if (last & 2) cells[size - 1 - rare - (last & 1)] = (2 * lane + 1) << SYMBOL;
    const u32 high = size - bits_set(first) - bits_set(second), step = (size >> 1) + (size >> 3) + 3;
    sync_warp();
    u32 before = 0;
    for (u32 k = lane; k < size; k += LANES) {
        const u32 state = k * step & (size - 1), used = vote(state < high), number = before + bits_set(used & below);
        before += bits_set(used);
        if (state >= high) continue;
        u32 symbol = 0;  // the last symbol that begins at `number` or before
#pragma unroll
        for (u32 half = 32; half; half /= 2)
            if (counts.begin[symbol + half] <= number) symbol += half;
        cells[state] = symbol << SYMBOL;
    }
    sync_warp();
    for (u32 state = lane; state < size; state += LANES) {
        const u32 symbol = cell_symbol(cells[state]), same = matching(symbol);
        const u32 begin = counts.next[symbol], number = begin + bits_set(same & below);
        sync_warp();
        if (same >> lane == 1) counts.next[symbol] = static_cast<u16>(number + 1);
        const u32 bits = log - highest_bit(number);
        cells[state] = bits << BITS | symbol << SYMBOL | ((number << bits) - size) << NEXT;
        sync_warp();
    }
}
