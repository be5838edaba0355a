// The parts of the Zstandard format (RFC 8878) that the decoder reads: bit streams, FSE and Huffman tables.

constexpr u32 MAX_BLOCK = 128 * 1024;
constexpr int MAX_HUFFMAN_BITS = 11;

// Bits from the first byte on, lowest first: FSE table descriptions.
struct ForwardBits {
    const u8 *from;
    u32 nbits, pos;
    __device__ u32 peek(int n) const {  // bits behind the end are 0
        u32 value = 0;
        const u32 first = pos >> 3;
        for (u32 k = 0; k < 5; ++k) {
            if ((first + k) * 8 >= nbits) break;
            const u64 byte = from[first + k];
            value |= static_cast<u32>(byte << (8 * k) >> (pos & 7));
        }
        return value & ((1u << n) - 1);
    }
};

// Bits from the last byte back, highest first. The last byte's highest 1 marks the end.
struct BackwardBits {
    const u32 *word;  // below `next`
    u64 bits;         // at the top `have` bits, and whatever follows
    u32 next;         // the word below what `bits` holds, on its way before it is needed
    int have;
    int left;         // bits of the stream not yet taken; below 0 once too many are

    __device__ void refill() {  // 32 bits at least are then there
        if (have <= 32) {
            bits |= static_cast<u64>(next) << (32 - have);
            have += 32;
            next = load_once(word--);
        }
    }
    __device__ u32 top() const { return static_cast<u32>(bits >> 32); }
    __device__ u32 peek(int n) const { return shifted_right(top(), 32 - n); }  // n may be 0
    __device__ void skip(int n) {
        bits <<= n;
        have -= n;
        left -= n;
    }
    __device__ u32 take(int n) {
        const u32 value = peek(n);
        skip(n);
        return value;
    }
};

// Words are read whole and aligned, so up to 19 bytes before `from` are looked at, though never used. The arena has
// as many before its first stream.
__device__ inline bool open_backward(BackwardBits &b, const u8 *from, u32 nbytes) {
    if (nbytes == 0 || from[nbytes - 1] == 0) return false;
    const u64 last = reinterpret_cast<u64>(from) + nbytes - 1;
    const int whole = static_cast<int>(last & 3) + 1;  // bytes of the highest word that belong to the stream
    const u32 *word = reinterpret_cast<const u32 *>(last & ~3ull);
    b.bits = static_cast<u64>(*word) << (64 - 8 * whole);
    b.next = word[-1];
    b.word = word - 2;
    b.have = 8 * whole;
    b.left = static_cast<int>(8 * nbytes);
    b.skip(leading_zeros(static_cast<u32>(from[nbytes - 1])) - 24 + 1);
    b.refill();
    return true;
}

// One state of an FSE table, with what its symbol means folded in.
struct __align__(8) Cell {
    u32 base;       // value of the symbol without its extra bits; or the symbol itself
    u16 next;       // base of the next state
    u8 extra, bits; // extra bits of the symbol, bits of the next state
};

__device__ inline int highest_bit(u32 v) { return 31 - leading_zeros(v); }

// Read the probabilities of a table. `used` is the number of bytes they take. False where they cannot be.
__device__ inline bool read_counts(const u8 *from, u32 nbytes, int max_log, int max_symbol, short *counts, int &symbols,
                                   int &log, u32 &used) {
    ForwardBits in{from, nbytes * 8, 0};
    log = static_cast<int>(in.peek(4)) + 5;
    in.pos = 4;
    if (log > max_log) return false;
    int left = (1 << log) + 1;  // and one, as the format counts
    symbols = 0;
    while (left > 1) {
        if (symbols > max_symbol) return false;
        const int width = highest_bit(static_cast<u32>(left)) + 1;
        const u32 value = in.peek(width), low = value & ((1u << (width - 1)) - 1);
        const u32 threshold = (1u << width) - 1 - static_cast<u32>(left);
        u32 count;
        if (low < threshold) {
            in.pos += width - 1;
            count = low;
        } else {
            in.pos += width;
            count = value >= 1u << (width - 1) ? value - threshold : value;
        }
        const int probability = static_cast<int>(count) - 1;
        counts[symbols++] = static_cast<short>(probability);
        left -= probability < 0 ? 1 : probability;
        if (left < 1) return false;
        if (probability == 0) {
            for (u32 repeat = 3; repeat == 3;) {
                repeat = in.peek(2);
                in.pos += 2;
                for (u32 k = 0; k < repeat; ++k) {
                    if (symbols > max_symbol) return false;
                    counts[symbols++] = 0;
                }
                if (in.pos > in.nbits) return false;
            }
        }
        if (in.pos > in.nbits) return false;
    }
    used = (in.pos + 7) / 8;
    return used <= nbytes;
}

// Spread symbols over the states. By one lane; `next` has room for a number a symbol.
__device__ inline bool build_cells(const short *counts, int symbols, int log, Cell *cells, u16 *next) {
    const u32 size = 1u << log;
    u32 high = size;
    for (int s = 0; s < symbols; ++s) {
        if (counts[s] == -1) {
            cells[--high].base = s;
            next[s] = 1;
        } else
            next[s] = counts[s];
    }
    const u32 step = (size >> 1) + (size >> 3) + 3;
    u32 at = 0;
    for (int s = 0; s < symbols; ++s)
        for (int k = 0; k < counts[s]; ++k) {
            cells[at].base = s;
            do at = (at + step) & (size - 1);
            while (at >= high);
        }
    if (at != 0) return false;
    for (u32 state = 0; state < size; ++state) {
        const u32 symbol = cells[state].base, number = next[symbol]++;
        const int bits = log - highest_bit(number);
        cells[state].bits = static_cast<u8>(bits);
        cells[state].next = static_cast<u16>((number << bits) - size);
        cells[state].extra = 0;
    }
    return true;
}

// Read the weights of a Huffman tree: 4 bits each, or through FSE by two states in turn.
__device__ inline bool read_weights(const u8 *from, u32 nbytes, u8 *weights, int &symbols, u32 &used, short *counts,
                                    Cell *cells, u16 *next) {
    if (nbytes == 0) return false;
    const u32 head = from[0];
    symbols = 0;
    if (head >= 128) {
        symbols = static_cast<int>(head) - 127;
        used = 1 + (symbols + 1) / 2;
        if (used > nbytes) return false;
        for (int s = 0; s < symbols; ++s) weights[s] = s & 1 ? from[1 + s / 2] & 15 : from[1 + s / 2] >> 4;
        return true;
    }
    used = 1 + head;
    if (used > nbytes) return false;
    int log, kinds;
    u32 table;
    if (!read_counts(from + 1, head, 6, 12, counts, kinds, log, table)) return false;
    if (!build_cells(counts, kinds, log, cells, next)) return false;
    BackwardBits in;
    if (!open_backward(in, from + 1 + table, head - table)) return false;
    u32 state[2];
    for (int k = 0; k < 2; ++k) {
        state[k] = in.take(log);
        in.refill();
    }
    if (in.left < 0) return false;
    // Ends where a next state would need bits that are not there: the other state's symbol is then the last.
    for (int k = 0; symbols < 255; k ^= 1) {
        const Cell cell = cells[state[k]];
        weights[symbols++] = static_cast<u8>(cell.base);
        if (in.left < cell.bits) {
            if (symbols >= 255) return false;
            weights[symbols++] = static_cast<u8>(cells[state[k ^ 1]].base);
            return true;
        }
        state[k] = cell.next + in.take(cell.bits);
        in.refill();
    }
    return false;
}

// Turn weights into a table of 2^bits entries: symbol, and its length in the high byte. By the whole warp; `first` has
// room for a number a weight.
__device__ inline bool build_huffman(u8 *weights, int symbols, u16 *table, int &bits, u32 *first) {
    u32 sum = 0, ones = 0;
    for (int s = lane_id(); s < symbols; s += LANES) {
        const u32 w = weights[s];
        ones += w == 1;
        sum += w > MAX_HUFFMAN_BITS ? 1u << 20 : w ? 1u << (w - 1) : 0;
    }
    sum = from_lane(running_sum(sum), LANES - 1);
    if (sum == 0 || sum >= 1u << MAX_HUFFMAN_BITS) return false;
    bits = highest_bit(sum) + 1;
    // The last weight is what is missing to a power of two.
    const u32 missing = (1u << bits) - sum;
    if (missing & (missing - 1)) return false;
    ones = from_lane(running_sum(ones), LANES - 1) + (missing == 1);
    if (ones < 2 || ones & 1) return false;  // the two longest codes differ in their last bit
    sync_warp();
    if (lane_id() == 0) {
        weights[symbols] = static_cast<u8>(highest_bit(missing) + 1);
        for (int w = 0; w <= MAX_HUFFMAN_BITS + 1; ++w) first[w] = 0;
        for (int s = 0; s <= symbols; ++s)
            if (weights[s]) first[weights[s] + 1] += 1u << (weights[s] - 1);
        for (int w = 1; w <= MAX_HUFFMAN_BITS + 1; ++w) first[w] += first[w - 1];  // where codes of a weight begin
        for (int s = 0; s <= symbols; ++s) {
            const int w = weights[s];
            if (w == 0) continue;
            const u16 entry = static_cast<u16>(s | (bits + 1 - w) << 8);
            const u32 n = 1u << (w - 1), at = first[w];
            first[w] += n;
            for (u32 k = 0; k < n; ++k) table[at + k] = entry;
        }
    }
    sync_warp();
    return true;
}
