// zlib and gzip streams → bytes. Formats: RFC 1950, 1951 and 1952.
//
// As in lz4.cu, one block of threads decodes a stream: one lane of the first warp decodes Huffman codes to sequences,
// one batch ahead of the team, which copies the bytes. Literals pass through a buffer in shared memory; the bytes of
// stored blocks are copied directly from the stream.

#include "decode.cuh"
#include "execute.cuh"

constexpr u32 BUFFER = 2048;  // literals of a batch
// Flag of literals of stored blocks. The other bits of their index are the offset in the stream.
constexpr u32 IN_STREAM = 0x80000000u;
constexpr int FAST_BITS = 10, MAX_BITS = 15, LENGTH_CODES = 288, DISTANCE_CODES = 32;

struct Batch {
    Sequence sequence[BATCH];
    u8 literals[BUFFER];
    int state;  // 0: more follow; 1: the last batch; -1: broken
};

// A Huffman code: short codes by table, longer ones by counting.
struct Code {
    u16 fast[1 << FAST_BITS];  // symbol << 4 | length; 0: a longer code, or none
    u16 symbol[LENGTH_CODES];
    u16 count[MAX_BITS + 1];
};

struct Tables {
    Code lengths, distances;
    u8 widths[LENGTH_CODES + DISTANCE_CODES];
};

// The bits of a stream from the first byte on, lowest bit first.
struct Bits {
    const u32 *word;
    u64 bits;  // the lowest `have` bits are valid
    u32 next;  // the word after `bits`, loaded before it is needed
    int have;
    i64 left;  // bits of the stream not yet taken; below 0 after its end

    __device__ void open(const u8 *from, i64 nbytes) {
        const u32 skew = static_cast<u32>(reinterpret_cast<u64>(from) & 3);
        word = reinterpret_cast<const u32 *>(from - skew);
        bits = *word++ >> (8 * skew);
        have = 32 - 8 * static_cast<int>(skew);
        left = 8 * nbytes;
        fetch();
        refill();
    }
    // A word is read only while bits of the stream are left. A word may end after the stream, since the arena has a
    // margin.
    __device__ void fetch() { next = left > have ? load_once(word++) : 0; }
    __device__ void refill() {
        if (have <= 32) {
            bits |= static_cast<u64>(next) << have;
            have += 32;
            fetch();
        }
    }
    __device__ u32 peek(int n) const { return static_cast<u32>(bits) & ((1u << n) - 1); }
    __device__ void skip(int n) {
        bits >>= n;
        have -= n;
        left -= n;
    }
    __device__ u32 take(int n) {
        const u32 value = peek(n);
        skip(n);
        refill();
        return value;
    }
};

enum Position { BEFORE_BLOCK, IN_CODES, IN_STORED, AT_END };

struct Reader {
    Bits in;
    const u8 *from;  // the deflate stream
    u32 nbytes;
    Position position;
    bool last;  // whether the current block is the last one
    u32 stored_at, stored_left;  // offset and number of the bytes of a stored block
};

__device__ inline u32 reversed(u32 code, int bits) {
    u32 r = 0;
    for (int k = 0; k < bits; ++k) r |= (code >> k & 1) << (bits - 1 - k);
    return r;
}

// Make a code from the widths of its symbols; false if the widths are invalid. `complete`: whether every bit pattern
// must be a code.
__device__ inline bool make_code(Code &code, const u8 *widths, int symbols, bool complete) {
    u16 next[MAX_BITS + 2], begin[MAX_BITS + 2];
    for (int k = 0; k <= MAX_BITS; ++k) code.count[k] = 0;
    for (int s = 0; s < symbols; ++s) ++code.count[widths[s]];
    const int used = symbols - code.count[0];
    code.count[0] = 0;
    int free_codes = 1;
    begin[1] = next[1] = 0;
    for (int k = 1; k <= MAX_BITS; ++k) {
        free_codes = 2 * free_codes - code.count[k];
        if (free_codes < 0) return false;
        begin[k + 1] = begin[k] + code.count[k];
        next[k + 1] = static_cast<u16>((next[k] + code.count[k]) << 1);
    }
    if (free_codes > 0 && (complete || used > 1)) return false;  // only a code of one symbol may be incomplete
    for (int k = 0; k < 1 << FAST_BITS; ++k) code.fast[k] = 0;
    for (int s = 0; s < symbols; ++s) {
        const int width = widths[s];
        if (width == 0) continue;
        code.symbol[begin[width]++] = static_cast<u16>(s);
        const u32 mine = next[width]++;
        if (width <= FAST_BITS)
            for (u32 k = reversed(mine, width); k < 1u << FAST_BITS; k += 1u << width)
                code.fast[k] = static_cast<u16>(s << 4 | width);
    }
    return true;
}

// Read the next symbol; -1 if the bits are no code.
__device__ inline int read_symbol(Bits &in, const Code &code) {
    const u32 entry = code.fast[in.peek(FAST_BITS)];
    if (entry) {
        in.skip(entry & 15);
        in.refill();
        return static_cast<int>(entry >> 4);
    }
    int value = 0, first = 0, index = 0;
    for (int width = 1; width <= MAX_BITS; ++width) {
        value |= static_cast<int>(in.bits >> (width - 1) & 1);
        const int count = code.count[width];
        if (value - count < first) {
            in.skip(width);
            in.refill();
            return code.symbol[index + value - first];
        }
        index += count;
        first = (first + count) << 1;
        value <<= 1;
    }
    return -1;
}

__constant__ u16 RUN_BASE[29] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
__constant__ u8 RUN_EXTRA[29] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
__constant__ u16 BACK_BASE[30] = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                  33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                  1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
__constant__ u8 BACK_EXTRA[30] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                  6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};
__constant__ u8 WIDTH_ORDER[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};

// Make the codes that the format predefines.
__device__ inline bool fixed_codes(Tables &t) {
    for (int s = 0; s < LENGTH_CODES; ++s) t.widths[s] = s < 144 ? 8 : s < 256 ? 9 : s < 280 ? 7 : 8;
    if (!make_code(t.lengths, t.widths, LENGTH_CODES, true)) return false;
    for (int s = 0; s < DISTANCE_CODES; ++s) t.widths[s] = 5;
    return make_code(t.distances, t.widths, DISTANCE_CODES, true);
}

// Read the codes that the block describes.
__device__ inline bool described_codes(Reader &r, Tables &t) {
    const int lengths = static_cast<int>(r.in.take(5)) + 257, distances = static_cast<int>(r.in.take(5)) + 1,
              widths = static_cast<int>(r.in.take(4)) + 4;
    if (lengths > 286 || distances > 30) return false;
    for (int k = 0; k < 19; ++k) t.widths[WIDTH_ORDER[k]] = static_cast<u8>(k < widths ? r.in.take(3) : 0);
    if (r.in.left < 0 || !make_code(t.distances, t.widths, 19, true)) return false;
    for (int n = 0; n < lengths + distances;) {
        const int symbol = read_symbol(r.in, t.distances);
        if (symbol < 0 || r.in.left < 0) return false;
        if (symbol < 16) {
            t.widths[n++] = static_cast<u8>(symbol);
            continue;
        }
        if (symbol == 16 && n == 0) return false;
        const u8 width = symbol == 16 ? t.widths[n - 1] : 0;
        int repeat = symbol == 16   ? 3 + static_cast<int>(r.in.take(2))
                     : symbol == 17 ? 3 + static_cast<int>(r.in.take(3))
                                    : 11 + static_cast<int>(r.in.take(7));
        if (n + repeat > lengths + distances) return false;
        while (repeat--) t.widths[n++] = width;
    }
    if (t.widths[256] == 0) return false;  // a block must be able to end
    return make_code(t.lengths, t.widths, lengths, false) &&
           make_code(t.distances, t.widths + lengths, distances, false);
}

__device__ inline bool begin_block(Reader &r, Tables &t) {
    r.last = r.in.take(1);
    const u32 type = r.in.take(2);
    if (r.in.left < 0 || type == 3) return false;
    if (type == 0) {
        const u32 at = r.nbytes - static_cast<u32>(r.in.left >> 3);  // the next whole byte
        if (r.nbytes - at < 4) return false;
        const u32 size = load16(r.from + at);
        if ((size ^ 0xffff) != load16(r.from + at + 2) || size > r.nbytes - at - 4) return false;
        r.stored_at = at + 4;
        r.stored_left = size;
        r.in.open(r.from + at + 4 + size, r.nbytes - at - 4 - size);
        r.position = IN_STORED;
        return true;
    }
    r.position = IN_CODES;
    return type == 1 ? fixed_codes(t) : described_codes(r, t);
}

// Fill a batch with sequences, and return its state. By one lane.
__device__ inline int read_sequences(Reader &r, Tables &t, Batch &batch) {
    u32 literals = 0;
    for (int i = 0; i < BATCH;) {
        Sequence sequence{0, 0, 0, literals};
        if (r.position == BEFORE_BLOCK && !begin_block(r, t)) return -1;
        if (r.position == IN_STORED) {
            sequence.literals = r.stored_left;
            sequence.at = IN_STREAM | r.stored_at;
            if (sequence.literals) batch.sequence[i++] = sequence;
            r.position = r.last ? AT_END : BEFORE_BLOCK;
            if (r.last) return 1;
            continue;
        }
        for (bool open = true; open;) {
            const int symbol = read_symbol(r.in, t.lengths);
            if (symbol < 0 || symbol > 285 || r.in.left < 0) return -1;
            if (symbol < 256) {
                batch.literals[literals++] = static_cast<u8>(symbol);
                ++sequence.literals;
                open = literals < BUFFER;
            } else if (symbol == 256) {
                r.position = r.last ? AT_END : BEFORE_BLOCK;
                open = false;
            } else {
                sequence.match = RUN_BASE[symbol - 257] + r.in.take(RUN_EXTRA[symbol - 257]);
                const int distance = read_symbol(r.in, t.distances);
                if (distance < 0 || distance > 29) return -1;
                sequence.offset = BACK_BASE[distance] + r.in.take(BACK_EXTRA[distance]);
                if (r.in.left < 0) return -1;
                open = false;
            }
        }
        if (sequence.literals || sequence.match) batch.sequence[i++] = sequence;  // both are 0 at an end of a block
        if (r.position == AT_END) return 1;
        if (literals == BUFFER) return 0;
    }
    return 0;
}

// Size of the header, after which the deflate stream begins; 0 if the header is invalid or, for zlib, requires a preset
// dictionary.
__device__ inline u32 head_nbytes(const u8 *p, u32 nbytes, int codec) {
    if (codec == ZLIB) return nbytes >= 6 && (p[0] & 15) == 8 && (p[0] * 256u + p[1]) % 31 == 0 && !(p[1] & 32) ? 2 : 0;
    if (nbytes < 18 || p[0] != 31 || p[1] != 139 || p[2] != 8 || p[3] & 0xe0) return 0;
    u32 at = 10;
    if (p[3] & 4) at += 2 + load16(p + 10);
    for (int text = 8; text <= 16; text *= 2)
        if (p[3] & text) {
            while (at < nbytes && p[at]) ++at;
            ++at;
        }
    if (p[3] & 2) at += 2;
    return at + 8 < nbytes ? at : 0;
}

// Read the checksum after the last block; returns a status. UNSUPPORTED if more bytes follow, such as another gzip
// member: the host decodes such streams.
__device__ inline int read_end(Reader &r, int codec, u32 decoded, Check &check) {
    const u8 *p = r.from + (r.nbytes - static_cast<u32>(r.in.left >> 3));
    const u32 n = static_cast<u32>(r.in.left >> 3), trailer_nbytes = codec == ZLIB ? 4 : 8;
    if (n < trailer_nbytes) return TRUNCATED;
    if (n > trailer_nbytes) return UNSUPPORTED;
    check.kind = codec == ZLIB ? ADLER32 : CRC32;
    check.expected = codec == GZIP ? load32(p) : static_cast<u32>(p[0]) << 24 | p[1] << 16 | p[2] << 8 | p[3];
    return codec == GZIP && load32(p + 4) != decoded ? WRONG_SIZE : FINE;
}

struct BufferOrStream {
    const u8 *buffer, *stream;
    __device__ u8 operator[](u64 i) const { return i & IN_STREAM ? stream[i & ~IN_STREAM] : buffer[i]; }
};

extern "C" __global__ void __launch_bounds__(BEHIND_READER, 4)
    inflate(const u8 *__restrict__ arena, u8 *target, const Stream *__restrict__ streams, const i64 *__restrict__ count,
            i64 capacity, i64 ring_size, Check *checks, int *status) {
    extern __shared__ __align__(16) u8 ring[];
    __shared__ Links links;
    __shared__ Tables tables;
    __shared__ Batch batches[2];
    const bool reads = READER_WARP, copies = IN_TEAM;
    const i64 n = *count < capacity ? *count : capacity;
    for (i64 number = blockIdx.x; number < n; number += gridDim.x) {
        const Stream stream = streams[number];
        if (stream.codec != ZLIB && stream.codec != GZIP) continue;
        const u8 *from = arena + stream.source;
        const bool too_long = stream.source_nbytes >= IN_STREAM || stream.target_nbytes >= IN_STREAM;
        const u32 head = too_long ? 0 : head_nbytes(from, static_cast<u32>(stream.source_nbytes), stream.codec);
        if (head == 0) {
            if (threadIdx.x == 0) fail(status, stream.chunk, too_long ? UNSUPPORTED : BAD_HEADER);
            continue;
        }
        Reader r{};
        r.from = from + head;
        r.nbytes = static_cast<u32>(stream.source_nbytes) - head;
        r.position = BEFORE_BLOCK;
        r.in.open(r.from, r.nbytes);
        Sink out = open_sink(ring, ring_size, links, TEAM_RANK, target + stream.target, stream.target_nbytes);
        bool good = true;
        for (int round = 0, last = -1;; ++round) {
            if (copies && round > 0) {
                const Batch &batch = batches[(round - 1) & 1];
                const BufferOrStream literals{batch.literals, r.from};
                good = batch.state >= 0 && execute(out, literals, batch.sequence + 2 * lane_id());
            }
            if (last >= 0 && round > last) break;
            if (reads) {
                Batch &batch = batches[round & 1];
                for (int i = lane_id(); i < BATCH; i += LANES) batch.sequence[i] = Sequence{0, 0, 0, 0};
                sync_warp();
                if (lane_id() == 0) batch.state = read_sequences(r, tables, batch);
                sync_warp();
            }
            if (block_any(!good)) break;
            if (last < 0 && batches[round & 1].state != 0) last = round;
        }
        if (copies) {
            const bool whole = good && close_sink(out);
            if (!whole && out.rank == 0) fail(status, stream.chunk, good ? WRONG_SIZE : BAD_DATA);
        }
        if (reads && lane_id() == 0 && r.position == AT_END) {
            Check check{NO_CHECK, 0};
            const int state = read_end(r, stream.codec, static_cast<u32>(stream.target_nbytes), check);
            checks[number] = check;
            if (state != FINE) fail(status, stream.chunk, state);
        }
        sync_block();
    }
}
