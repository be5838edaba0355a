// Literals of the Zstandard format (RFC 8878): Huffman trees and streams. By a whole warp.

constexpr int MAX_HUFFMAN_BITS = 11;

// Words of a stream, from the last one backwards.
struct StoredWords {
    const u32 *word;
    __device__ u32 next() { return load_once(word--); }
};

// As StoredWords, but from a window in shared memory, which other lanes fill.
constexpr u32 LITERAL_WINDOW = 64;
struct WindowWords {
    const u32 *window;
    u32 taken;
    __device__ u32 next() { return window[taken++ & (LITERAL_WINDOW - 1)]; }
};

// The bits of a stream from the last byte backwards, highest bit first. The highest 1 of the last byte marks where they
// begin.
template <class Words> struct BackwardBits {
    Words words;
    u64 bits;  // the highest `have` bits are valid
    u32 next;  // the word after `bits`, loaded in advance
    int have;
    int left;  // bits of the stream not yet taken; below 0 after its end

    __device__ void refill() {  // to at least 32 bits
        if (have <= 32) {
            bits |= static_cast<u64>(next) << (32 - have);
            have += 32;
            next = words.next();
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

__device__ inline const u32 *last_word(const u8 *from, u32 nbytes) {
    return reinterpret_cast<const u32 *>(reinterpret_cast<u64>(from + nbytes - 1) & ~3ull);
}

// Begin to read a stream of bits; false if the stream is empty or has no mark. Words are read whole and aligned, so up
// to 19 bytes before `from` are read, but never used. The arena has a margin before the first stream.
template <class Words>
__device__ inline bool open_backward(BackwardBits<Words> &b, Words words, const u8 *from, u32 nbytes) {
    if (nbytes == 0 || load_once(from + nbytes - 1) == 0) return false;
    const int whole = static_cast<int>(reinterpret_cast<u64>(from + nbytes - 1) & 3) + 1;  // bytes of its highest word
    b.words = words;
    b.bits = static_cast<u64>(b.words.next()) << (64 - 8 * whole);
    b.next = b.words.next();
    b.have = 8 * whole;
    b.left = static_cast<int>(8 * nbytes);
    b.skip(leading_zeros(static_cast<u32>(load_once(from + nbytes - 1))) - 24 + 1);
    b.refill();
    return true;
}

// The code table has two entries for each value of the next bits, as many bits as the longest code has. First entry: a
// symbol, and the length of its code in the high byte. Second entry: the next symbol, the length of both codes, and the
// flag TWO; or only the length of the first code, if the second code does not fit into the bits.
constexpr u16 TWO = 0x1000;

struct LiteralTables {
    __align__(4) u16 codes[2 << MAX_HUFFMAN_BITS];
    u32 cells[64];
    Counts counts;
    Staged staged;
    u8 weights[256];
    u32 window[4][LITERAL_WINDOW];  // one for each stream
};

// Decode weights by two alternating FSE states. By one lane; returns the number of weights, 0 if the stream is invalid.
__device__ inline int decode_weights(const u8 *from, u32 nbytes, const u32 *cells, int log, u8 *weights) {
    BackwardBits<StoredWords> in;
    if (nbytes == 0 || !open_backward(in, StoredWords{last_word(from, nbytes)}, from, nbytes)) return 0;
    u32 state[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        state[k] = in.take(log);
        in.refill();
    }
    if (in.left < 0) return 0;
    // The stream ends when a next state would need more bits than are left: the other state's symbol is then the last.
    for (int symbols = 0; symbols < 255;) {
        const u32 cell = cells[state[0]], bits = cell_bits(cell);
        weights[symbols++] = static_cast<u8>(cell_symbol(cell));
        if (in.left < static_cast<int>(bits)) {
            if (symbols >= 255) return 0;
            weights[symbols++] = static_cast<u8>(cell_symbol(cells[state[1]]));
            return symbols;
        }
        const u32 next = cell_next(cell) + in.take(bits);
        in.refill();
        state[0] = state[1];
        state[1] = next;
    }
    return 0;
}

// Read the weights of a Huffman tree, stored in 4 bits each or encoded by FSE; false if they are invalid. By the whole
// warp. `symbols`: number of weights; `used`: bytes of the description.
__device__ inline bool read_weights(LiteralTables &t, const u8 *from, u32 nbytes, int &symbols, u32 &used) {
    if (nbytes == 0) return false;
    const u32 head = load_once(from);
    if (head >= 128) {
        symbols = static_cast<int>(head) - 127;
        used = 1 + (symbols + 1) / 2;
        if (used > nbytes) return false;
        for (int s = lane_id(); s < symbols; s += LANES) {
            const u8 two = load_once(from + 1 + s / 2);
            t.weights[s] = s & 1 ? two & 15 : two >> 4;
        }
        return true;
    }
    used = 1 + head;
    if (used > nbytes) return false;
    stage(t.staged, from + 1, head);
    int log, kinds;
    u32 pos = 0;
    if (!read_counts(t.staged, head, pos, 6, 12, t.counts, kinds, log)) return false;
    sync_warp();
    build_cells(t.counts, kinds, log, t.cells);
    symbols = lane_id() == 0 ? decode_weights(from + 1 + pos / 8, head - pos / 8, t.cells, log, t.weights) : 0;
    symbols = from_lane(symbols, 0);
    return symbols > 0;
}

// Make a code table for `bits` bits from weights; false if they are invalid. By the whole warp; the caller synchronises
// before reading the table.
__device__ inline bool build_huffman(u8 *weights, int symbols, u16 *table, int &bits) {
    u32 sum = 0, ones = 0;
    for (int s = lane_id(); s < symbols; s += LANES) {
        const u32 w = weights[s];
        ones += w == 1;
        sum += w > MAX_HUFFMAN_BITS ? 1u << 20 : w ? 1u << (w - 1) : 0;
    }
    sum = from_lane(running_sum(sum), LANES - 1);
    if (sum == 0 || sum >= 1u << MAX_HUFFMAN_BITS) return false;
    bits = highest_bit(sum) + 1;
    // The last weight completes the sum to a power of two.
    const u32 missing = (1u << bits) - sum;
    if (missing & (missing - 1)) return false;
    ones = from_lane(running_sum(ones), LANES - 1) + (missing == 1);
    if (ones < 2 || ones & 1) return false;  // the two longest codes differ in their last bit
    if (lane_id() == 0) weights[symbols] = static_cast<u8>(highest_bit(missing) + 1);
    sync_warp();
    // Lane w finds the first code of weight w, after those of smaller weights.
    const u32 mine = lane_id();
    u32 taken = 0;
    for (int s = 0; s <= symbols; ++s) {
        const u32 w = weights[s];
        taken += w && w < mine ? 1u << (w - 1) : 0;
    }
    for (int s = 0; s <= symbols; ++s) {
        const u32 w = weights[s];
        if (w == 0) continue;
        const u16 entry = static_cast<u16>(s | (bits + 1 - w) << 8);
        const u32 n = 1u << (w - 1), at = from_lane(taken, w);
        for (u32 k = mine; k < n; k += LANES) table[2 * (at + k)] = entry;
        if (mine == w) taken += n;
    }
    sync_warp();
    const u32 size = 1u << bits;
#pragma unroll 4
    for (u32 k = mine; k < size; k += LANES) {
        const u32 length = table[2 * k] >> 8, second = table[2 * (k << length & (size - 1))],
                  both = length + (second >> 8);
        table[2 * k + 1] = static_cast<u16>(both <= bits ? (second & 255) | both << 8 | TWO : length << 8);
    }
    return true;
}

// One Huffman stream: eight lanes load the words of the stream into a window, and one of these lanes decodes it.
struct LiteralStream {
    const u8 *from;
    u32 nbytes;
    u8 *to;
    u32 literals;
};
constexpr u32 HELPERS = 8, WORDS_EACH = 2;  // lanes of a stream, and words that each lane fetches at a time
constexpr int STEPS = 8;  // between fills; a step is three lookups, which may take two words

struct Fetched {
    u32 filled;  // words written to the window so far
    u32 word[WORDS_EACH];  // the next words, loaded in advance
};

__device__ inline void fetch(Fetched &f, const LiteralStream &s) {
    const u32 *last = last_word(s.from, s.nbytes);
    const u32 words = static_cast<u32>(last - last_word(s.from, 1)) + 1;
#pragma unroll
    for (u32 k = 0; k < WORDS_EACH; ++k) {
        const u32 word = f.filled + k * HELPERS + lane_id() % HELPERS;
        f.word[k] = word < words ? load_once(last - word) : 0;
    }
}

__device__ inline void fill(Fetched &f, const LiteralStream &s, u32 *window) {
#pragma unroll
    for (u32 k = 0; k < WORDS_EACH; ++k)
        window[(f.filled + k * HELPERS + lane_id() % HELPERS) & (LITERAL_WINDOW - 1)] = f.word[k];
    f.filled += WORDS_EACH * HELPERS;
    fetch(f, s);
}

// Decode up to 6 * STEPS literals, as long as at least 6 are left. By one lane.
__device__ inline void decode_some(BackwardBits<WindowWords> &in, const u16 *codes, int bits, const LiteralStream &s,
                                   u32 &i) {
#pragma unroll 1
    for (int step = 0; step < STEPS && i + 6 <= s.literals && in.left >= 0; ++step) {
#pragma unroll
        for (int k = 0; k < 3; ++k) {
            if (k == 2 && in.have < MAX_HUFFMAN_BITS)
                in.refill();  // three lookups may take 33 bits, one more than a refill ensures
            const u32 at = in.peek(bits), code = *reinterpret_cast<const u32 *>(codes + 2 * at);
            s.to[i] = static_cast<u8>(code);
            s.to[i + 1] = static_cast<u8>(code >> 16);  // overwritten later if there is no second symbol
            i += 1 + (code >> 28);
            in.skip(code >> 24 & 15);
        }
        in.refill();
    }
}

// Decode the remaining literals one by one. By one lane.
__device__ inline void decode_last(BackwardBits<WindowWords> &in, const u16 *codes, int bits, const LiteralStream &s,
                                   u32 &i) {
    for (; i < s.literals && in.left >= 0; ++i) {
        const u32 code = codes[2 * in.peek(bits)];
        s.to[i] = static_cast<u8>(code);
        in.skip(code >> 8);
        in.refill();
    }
}

// Decode all streams of a block; false in a lane whose stream is invalid. By the whole warp; each lane passes the
// stream of its eight lanes, or an empty one.
__device__ inline bool decode_streams(LiteralTables &t, int bits, const LiteralStream &s) {
    u32 *window = t.window[lane_id() / HELPERS];
    const bool decodes = s.nbytes && lane_id() % HELPERS == 0;
    Fetched fetched{};
    if (s.nbytes) fetch(fetched, s);
    for (int k = 0; k < 3 && s.nbytes; ++k) fill(fetched, s, window);
    sync_warp();
    BackwardBits<WindowWords> in{};
    u32 i = 0;
    const bool open = decodes && open_backward(in, WindowWords{window, 0}, s.from, s.nbytes);
    while (vote(open && i + 6 <= s.literals && in.left >= 0)) {
        if (open) decode_some(in, t.codes, bits, s, i);
        const u32 taken = from_lane(in.words.taken, lane_id() & ~(HELPERS - 1));
        sync_warp();
        // The next round does not read the words that are overwritten: the window held enough words before.
        if (s.nbytes && fetched.filled - taken <= LITERAL_WINDOW - WORDS_EACH * HELPERS) fill(fetched, s, window);
    }
    if (open) decode_last(in, t.codes, bits, s, i);
    return !decodes || (open && in.left == 0);
}

// Decode the Huffman coded literals of a block into the pool; returns a status. By one warp.
__device__ inline int entropy_literals(LiteralTables &t, const u8 *arena, const Block *blocks, const Block &block,
                                       u8 *pool) {
    const Block &other = blocks[block.tree];
    u32 used = 0;
    int symbols = 0, bits = 0;
    const u8 *tree = arena + other.source + other.literals_head;
    if (!read_weights(t, tree, other.literals_stored, symbols, used)) return BAD_DATA;
    sync_warp();
    if (!build_huffman(t.weights, symbols, t.codes, bits)) return BAD_DATA;
    const u8 *from = arena + block.source + block.literals_head;
    u32 left = block.literals_stored;
    if (block.literals_type == NEW_TREE) {
        from += used;
        left -= used;
    }
    LiteralStream mine{from, left, pool + block.literals_at, block.literals};
    const u32 number = lane_id() / HELPERS;
    if (block.literals_streams == 1) {
        if (left == 0) return BAD_DATA;
        if (number) mine.nbytes = 0;
    } else {
        if (left < 10 || block.literals < 6) return BAD_DATA;
        const u32 part = (block.literals + 3) / 4;
        const u32 a = load16(from), b = load16(from + 2), c = load16(from + 4);
        if (6 + a + b + c > left) return BAD_DATA;
        const u32 d = left - 6 - a - b - c;
        if (a == 0 || b == 0 || c == 0 || d == 0) return BAD_DATA;
        mine.from += 6 + (number > 0 ? a : 0) + (number > 1 ? b : 0) + (number > 2 ? c : 0);
        mine.nbytes = number == 0 ? a : number == 1 ? b : number == 2 ? c : d;
        mine.to += number * part;
        mine.literals = number < 3 ? part : block.literals - 3 * part;
    }
    return vote(!decode_streams(t, bits, mine)) ? BAD_DATA : FINE;
}
