// Bytes → LZ4 blocks. Format: lz4_Block_format.md of the LZ4 project.
//
// A sequence begins where the previous sequence ends, so the sequences of a stream cannot be found in parallel.
// Therefore a stream is cut into segments. A warp finds the matches of a segment in the segment itself and in some
// bytes before the segment, together at most 64 KiB, by a hash table of positions in shared memory. The warp writes its
// sequences to a slot with the capacity for the longest possible result.
//
// Search: each lane takes one of 32 consecutive positions, looks up the last position with the same hash of four bytes,
// and compares up to MAX_COMPARED bytes. The 32 positions are not in the table yet: lanes with the same hash find each
// other by a vote. The first match is used or, as in a lazy search, a longer match that begins up to AHEAD positions
// later. The whole warp compares bytes beyond MAX_COMPARED, 128 at a time. After several steps without a match,
// positions are skipped.
//
// `lz4_streams` encodes each of Blosc's streams as one complete segment. The segments of a longer stream are joined:
// the literals after the last match of a segment belong to the first sequence of the next segment that has a match.
// `lz4_segments` omits the token and the literals of that first sequence, `lz4_sizes` computes all offsets by prefix
// sums, and `lz4_join` writes the streams.

#include "encode.cuh"

constexpr u32 LAST_LITERALS = 5;  // a block ends with literals
constexpr u32 LAST_MATCH = 12;  // the last match begins at least this many bytes before the end
constexpr u32 MIN_MATCH = 4, MAX_COMPARED = 12, AHEAD = 3;
constexpr u32 FRAME_HEAD = 4;  // numcodecs' frame: the size of the chunk, then one LZ4 block

// A segment of a longer stream. `lead` literals precede the first match, `trail` literals follow the last match.
// `body`: bytes in the slot, the sequences without token and literals of the first sequence. All 0 if the segment has
// no match.
struct Segment {
    u32 lead, trail, body, match;  // match: length of the first match, as a token holds it
};
// Where the sequences of a segment go: offset in the stream, and offset in the chunk of the first literal.
struct Place { u32 target, literals; };

struct Output {
    u8 *to;
    u32 pos;
};

// Number of bytes after the token for a length of 15 or more.
__device__ inline u32 further_nbytes(u32 length) { return length < 15 ? 0 : (length - 15) / 255 + 1; }
__device__ inline void put_further(Output &out, u32 length) {
    const u32 n = further_nbytes(length);
    for (u32 i = lane_id(); i < n; i += LANES)
        out.to[out.pos + i] = static_cast<u8>(i + 1 < n ? 255 : length - 15 - 255 * (n - 1));
    out.pos += n;
}
__device__ inline u32 in_token(u32 length) { return length < 15 ? length : 15; }

__device__ inline void put_token(Output &out, u32 literals, u32 match) {
    if (lane_id() == 0) out.to[out.pos] = static_cast<u8>(in_token(literals) << 4 | match);
    ++out.pos;
    put_further(out, literals);
}

__device__ inline void put_literals(Output &out, const u8 *from, u32 n) {
    if (n > 4 * LANES) copy_bytes(out.to + out.pos, from, n, lane_id(), LANES);
    else
        for (u32 i = lane_id(); i < n; i += LANES) out.to[out.pos + i] = load_once(from + i);
    out.pos += n;
}

__device__ inline void put_match(Output &out, u32 offset, u32 length) {
    if (lane_id() < 2) out.to[out.pos + lane_id()] = static_cast<u8>(offset >> (8 * lane_id()));
    out.pos += 2;
    put_further(out, length - MIN_MATCH);
}

// Reads four bytes at any position, from two aligned words. Both words contain bytes of the source, since a match ends
// LAST_LITERALS before the end.
struct Source {
    const u32 *words;
    u32 skew;
    __device__ u32 operator[](u32 at) const {
        const u32 *word = words + ((at + skew) >> 2);
        return funnel(load_once(word), load_once(word + 1), 8 * ((at + skew) & 3));
    }
};

__device__ inline Source open_source(const u8 *from) {
    return {reinterpret_cast<const u32 *>(address_of(from) & ~3ull), static_cast<u32>(address_of(from) & 3)};
}

// Number of equal bytes from `a` and `b` on, up to `limit`; the first `known` are known to be equal. By one lane.
__device__ inline u32 equal_bytes(const Source &source, u32 a, u32 b, u32 known, u32 limit) {
    while (known < limit) {
        // The last four bytes overlap the bytes before, so that no byte after `limit` is compared.
        const u32 at = known < limit - 4 ? known : limit - 4, differ = source[a + at] ^ source[b + at];
        if (differ) return at + zeros_below(differ) / 8;
        known = at + 4;
    }
    return limit;
}

// As `equal_bytes`, by the whole warp.
__device__ inline u32 equal_bytes_by_warp(const Source &source, u32 a, u32 b, u32 known, u32 limit) {
    for (; known < limit; known += 4 * LANES) {
        const u32 mine = known + 4 * lane_id(), at = mine < limit - 4 ? mine : limit - 4;
        const u32 differ = source[a + at] ^ source[b + at], any = vote(differ != 0);
        if (any) return from_lane(at + zeros_below(differ) / 8, static_cast<int>(zeros_below(any)));
    }
    return limit;
}

// A match at a lane's position, in one word: length + number of later lanes, number of later lanes, and position of the
// source. The greater of two words has the greater length minus start or, if these are equal, the earlier start. 0: no
// match.
__device__ inline u32 pack_match(u32 length, u32 from) {
    const u32 lanes_behind = LANES - 1 - lane_id();
    return (length + lanes_behind) << 21 | lanes_behind << 16 | from;
}
__device__ inline u32 lane_of(u32 match) { return LANES - 1 - (match >> 16 & 31); }
__device__ inline u32 length_of(u32 match) { return (match >> 21) - (match >> 16 & 31); }
__device__ inline u32 from_of(u32 match) { return match & 0xffff; }

__device__ inline u32 greater(u32 a, u32 b) { return a > b ? a : b; }

// The best match at this lane or up to AHEAD lanes after it.
__device__ inline u32 best_ahead(u32 match) {
    static_assert(AHEAD == 3, "two steps");
    const u32 of_two = greater(match, from_lane(match, lane_id() < LANES - 1 ? lane_id() + 1 : lane_id()));
    return greater(of_two, from_lane(of_two, lane_id() < LANES - 2 ? lane_id() + 2 : lane_id()));
}

// Enter this lane's position into the table, and return the last position before it with the same hash. 0 if there is
// none, which may also be a position: the caller compares bytes.
__device__ inline u32 enter(u16 *table, u32 hash_bits, u32 at, u32 value, bool mine) {
    const u32 hash = mine ? value * 2654435761u >> (32 - hash_bits) : ~static_cast<u32>(lane_id());
    const u32 same = matching(hash), below = same & ((1u << lane_id()) - 1);
    const int nearest = below ? LANES - 1 - leading_zeros(below) : lane_id();
    const u32 near_value = from_lane(value, nearest);
    u32 previous = mine ? table[hash] : 0;
    if (below && near_value == value) previous = at - lane_id() + nearest;
    sync_warp();
    if (mine && same >> lane_id() == 1) table[hash] = static_cast<u16>(at);
    sync_warp();
    return previous;
}

// Find the match at this lane's position, which must end before `end`; 0 if there is none.
__device__ inline u32 find_match(const Source &source, u32 base, u32 limit, u32 end, u16 *table, u32 hash_bits) {
    const u32 at = base + lane_id();
    const bool mine = at < limit;
    const u32 value = mine ? source[at] : 0, candidate = enter(table, hash_bits, at, value, mine);
    if (!mine || candidate >= at || source[candidate] != value) return 0;
    const u32 max_length = end - at < MAX_COMPARED ? end - at : MAX_COMPARED;
    return pack_match(equal_bytes(source, at, candidate, MIN_MATCH, max_length), candidate);
}

// Write a short sequence, the common case: the token holds both lengths, and one store by each lane writes all bytes.
__device__ inline void put_short(Output &out, const u8 *from, u32 literals, u32 offset, u32 length) {
    const u32 k = lane_id();
    u32 value = literals << 4 | (length - MIN_MATCH);
    if (k > literals) value = k == literals + 1 ? offset : offset >> 8;
    else if (k > 0) value = load_once(from + k - 1);
    if (k < literals + 3) out.to[out.pos + k] = static_cast<u8>(value);
    out.pos += literals + 3;
}

// Write the sequences of the bytes from `first` to `n`; matches may also refer to the bytes before `first`. WHOLE:
// write a complete block and return its size, or return `n` if the block would not be shorter; it is then incomplete.
// Else: omit the first sequence's token and literals, and the literals after the last match, and describe the segment.
template <bool WHOLE>
__device__ u32 encode(const u8 *from, u32 first, u32 n, u8 *to, u16 *table, u32 hash_bits, Segment &segment) {
    for (u32 i = lane_id(); i < (2u << hash_bits) / 16; i += LANES) reinterpret_cast<uint4 *>(table)[i] = uint4{};
    sync_warp();
    const Source source = open_source(from);
    Output out{to, 0};
    u32 anchor = first, base = first, missed = 0;
    bool any = false;
    const u32 limit = n > LAST_MATCH ? n - LAST_MATCH + 1 : 0, end = n - LAST_LITERALS;
    for (u32 before = lane_id(); !WHOLE && before < first && first < limit; before += LANES)
        enter(table, hash_bits, before, source[before], true);
    while (base < limit) {
        const u32 mine = find_match(source, base, limit, end, table, hash_bits), best = best_ahead(mine);
        const u32 matches = vote(mine != 0);
        missed = matches ? 0 : missed + 1;
        for (u32 left = matches; left;) {
            const u32 match = from_lane(best, static_cast<int>(zeros_below(left)));
            const u32 at = base + lane_of(match), source_at = from_of(match), literals = at - anchor;
            u32 length = length_of(match);
            if (length == MAX_COMPARED) length = equal_bytes_by_warp(source, at, source_at, length, end - at);
            if ((WHOLE || any) && literals < 15 && length - MIN_MATCH < 15) {
                put_short(out, from + anchor, literals, at - source_at, length);
            } else {
                if (WHOLE || any) {
                    put_token(out, literals, in_token(length - MIN_MATCH));
                    put_literals(out, from + anchor, literals);
                } else {
                    segment.lead = literals;
                    segment.match = in_token(length - MIN_MATCH);
                }
                put_match(out, at - source_at, length);
            }
            any = true;
            anchor = at + length;
            left = anchor < base + LANES ? left & FULL << (anchor - base) : 0;
        }
        base += LANES * (1 + (missed < 12 ? missed / 4 : 3));
        if (base < anchor) base = anchor;
    }
    const u32 literals = n - anchor;
    if (!WHOLE) {
        segment.trail = literals;
        segment.body = out.pos;
        return n;
    }
    const u32 nbytes = out.pos + 1 + further_nbytes(literals) + literals;
    if (nbytes >= n) return n;
    put_token(out, literals, 0);
    put_literals(out, from + anchor, literals);
    return nbytes;
}

// Encode contiguous streams of `n` bytes as one block each. Blocks begin `stride` bytes apart. A size of `n` says that
// encoding does not shorten the stream; its block is then incomplete.
extern "C" __global__ void __launch_bounds__(LANES)
    lz4_streams(const u8 *__restrict__ streams, i64 n, i64 count, i64 hash_bits, u8 *__restrict__ slots, i64 stride,
                u32 *__restrict__ sizes) {
    extern __shared__ __align__(16) u16 table[];
    Segment unused;
    for (i64 number = blockIdx.x; number < count; number += gridDim.x) {
        const u32 size = encode<true>(streams + number * n, 0, static_cast<u32>(n), slots + number * stride, table,
                                      static_cast<u32>(hash_bits), unused);
        if (lane_id() == 0) sizes[number] = size;
    }
}

// Encode `each` segments of `step` bytes of every chunk; chunks of `n` bytes are contiguous. Matches may also refer to
// up to `history` bytes before a segment.
extern "C" __global__ void __launch_bounds__(LANES)
    lz4_segments(const u8 *__restrict__ chunks, i64 n, i64 count, i64 step, i64 each, i64 history, i64 hash_bits,
                 u8 *__restrict__ slots, i64 stride, Segment *__restrict__ segments) {
    extern __shared__ __align__(16) u16 table[];
    for (i64 number = blockIdx.x; number < count * each; number += gridDim.x) {
        const i64 begin = number % each * step, left = n - begin;
        // The format requires only the last match of a chunk to begin LAST_MATCH bytes before the end. All segments
        // keep this distance from their ends: it costs little, and allows the last segment to be shorter than
        // LAST_MATCH.
        const u32 size = static_cast<u32>(left < step ? left : step);
        Segment segment{};
        const i64 known = begin < history ? begin : history;
        encode<false>(chunks + number / each * n + begin - known, static_cast<u32>(known),
                      static_cast<u32>(known) + size, slots + number * stride, table, static_cast<u32>(hash_bits),
                      segment);
        if (segment.body == 0) segment.trail = 0;
        if (lane_id() == 0) segments[number] = segment;
    }
}

// Maximum of the values of this lane and all lanes below.
__device__ inline u32 running_max(u32 v) {
#pragma unroll
    for (int by = 1; by < LANES; by *= 2) {
        const u32 other = from_below(v, by);
        if (lane_id() >= by && other > v) v = other;
    }
    return v;
}

// Compute the offsets of the segments of each chunk, and the size of its stream. Each chunk has one more `Place`, for
// the literals after all matches.
extern "C" __global__ void __launch_bounds__(LANES)
    lz4_sizes(const Segment *__restrict__ segments, i64 n, i64 count, i64 step, i64 each, Place *__restrict__ places,
              u32 *__restrict__ sizes) {
    for (i64 chunk = blockIdx.x; chunk < count; chunk += gridDim.x) {
        u32 covered = 0, target = FRAME_HEAD;  // end of the matches so far, and of the stream so far
        for (i64 first = 0; first < each; first += LANES) {
            const i64 number = first + lane_id();
            const bool mine = number < each;
            const Segment segment = mine ? segments[chunk * each + number] : Segment{};
            const u32 begin = static_cast<u32>(mine ? number * step : 0);
            const u32 size = static_cast<u32>(!mine ? 0 : n - begin < step ? n - begin : step);
            u32 reach = running_max(segment.body ? begin + size - segment.trail : 0);
            if (reach < covered) reach = covered;
            u32 before = from_below(reach, 1);
            if (lane_id() == 0) before = covered;
            const u32 literals = begin + segment.lead - before;
            const u32 nbytes = segment.body ? 1 + further_nbytes(literals) + literals + segment.body : 0;
            const u32 sum = running_sum(nbytes);
            if (mine) places[chunk * (each + 1) + number] = Place{target + sum - nbytes, before};
            target += from_lane(sum, LANES - 1);
            covered = from_lane(reach, LANES - 1);
        }
        if (lane_id() == 0) {
            const u32 literals = static_cast<u32>(n) - covered;
            places[chunk * (each + 1) + each] = Place{target, covered};
            sizes[chunk] = target + 1 + further_nbytes(literals) + literals;
        }
    }
}

// Write the frames of all chunks: one block of threads for each `Place`.
extern "C" __global__ void __launch_bounds__(128)
    lz4_join(const u8 *__restrict__ chunks, i64 n, i64 count, i64 step, i64 each, const u8 *__restrict__ slots,
             i64 stride, const Segment *__restrict__ segments, const Place *__restrict__ places,
             const i64 *__restrict__ offsets, u8 *__restrict__ arena) {
    for (i64 task = blockIdx.x; task < count * (each + 1); task += gridDim.x) {
        const i64 chunk = task / (each + 1), number = task % (each + 1);
        const bool is_last = number == each;
        const Place place = places[task];
        u8 *frame = arena + offsets[chunk];
        if (is_last && threadIdx.x == 0) store32(frame, static_cast<u32>(n));
        const Segment segment = is_last ? Segment{} : segments[chunk * each + number];
        if (!is_last && segment.body == 0) continue;
        const u32 literals = static_cast<u32>(is_last ? n : number * step + segment.lead) - place.literals;
        Output out{frame + place.target, 0};
        if (warp_id() == 0) put_token(out, literals, segment.match);
        u8 *to = frame + place.target + 1 + further_nbytes(literals);
        copy_bytes(to, chunks + chunk * n + place.literals, literals, threadIdx.x, blockDim.x);
        copy_bytes(to + literals, slots + (chunk * each + number) * stride, segment.body, threadIdx.x, blockDim.x);
    }
}
