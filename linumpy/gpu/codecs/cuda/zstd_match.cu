// Chunks → literals and sequences, the first step of the zstd encoder (format: RFC 8878).
//
// One warp for each segment, processed in windows of 32 positions, one lane each. Every lane selects the best match at
// its position among
//   - the distance of the previous match, which costs least to store (speckle: the previous voxel, again and again);
//   - the distances 1, 2, 4 and 8, which the table does not find, since it is filled window by window;
//   - the last position before the window whose next 6 bytes have the same hash, which a table gives.
// A lane holds the 8 bytes from its position on, and the 8 bytes from 32 positions before and after it. For a short
// distance, shuffles and two votes compare the bytes of this window and the next with the bytes at that distance
// before, without reading memory. They give 64 bits; every lane counts the ones from its position on. A candidate from
// the table is compared over 8 bytes. When a longer match is selected, all lanes together find its end. A score weighs
// the bytes of a match against the bits that its distance costs; a new distance costs more, the rarer new distances
// have been in the segment. A lane defers to the next lanes if they score higher. The matches of a window are then
// selected from left to right, each by a few votes: this is the only serial part.
//
// The table holds, for each hash, the highest position (by atomicMax, so that the result does not depend on the order
// of lanes) and further bits of the hash, which reject most wrong candidates without reading their bytes.
//
// Segments are independent. A repeated offset is used only if the segment itself has set the offset, so that it is
// valid whatever precedes the segment, also a block that is stored uncompressed. Matches end at the end of a segment;
// the bytes that they copy may begin up to REACHED bytes before the segment, in the same chunk.

#include "decode.cuh"
#include "zstd_encode.cuh"

#ifndef TABLE_LOG
#define TABLE_LOG 11
#endif
#ifndef REACHED
#define REACHED 16384
#endif
#ifndef MATCH_WARPS
#define MATCH_WARPS 4
#endif
// An entry of the table: a tag, TAG_BITS further bits of the hash; above it the position + 1, counted from the first
// byte that matches may reach.
constexpr u32 TAG_BITS = 14, TAG = (1u << TAG_BITS) - 1;
static_assert(SEGMENT + REACHED < (1 << (32 - TAG_BITS)) && SEGMENT <= 65536, "positions fit a table");

struct Bytes8 { u32 low, high; };
struct Words { u32 at[3]; };

// The bytes of a chunk. Reads aligned words that contain at least one byte of the chunk; bytes after its end are not
// used.
struct Source {
    const u8 *bytes, *end;
    __device__ u32 shift(u32 at) const { return 8 * static_cast<u32>(reinterpret_cast<u64>(bytes + at) & 3); }
    // The words that hold the 8 bytes from `at` on; zeros after the end.
    __device__ Words words(u32 at) const {
        const u8 *aligned = bytes + at - shift(at) / 8;
        Words w;
#pragma unroll
        for (int k = 0; k < 3; ++k)
            w.at[k] = aligned + 4 * k < end ? load_once(reinterpret_cast<const u32 *>(aligned) + k) : 0;
        return w;
    }
    __device__ static Bytes8 eight(const Words &w, u32 shift) {
        return {funnel(w.at[0], w.at[1], shift), funnel(w.at[1], w.at[2], shift)};
    }
    __device__ Bytes8 eight(u32 at) const { return eight(words(at), shift(at)); }
};

__device__ inline u32 lowest_bit(u32 v) { return 31 - leading_zeros(v & (0 - v)); }  // v > 0
__device__ inline u32 equal_bytes(u32 a, u32 b) { return a == b ? 4 : lowest_bit(a ^ b) / 8; }
__device__ inline u32 equal_bytes(Bytes8 a, Bytes8 b) {
    return a.low == b.low ? 4 + equal_bytes(a.high, b.high) : equal_bytes(a.low, b.low);
}

// Number of bytes from `at` on that equal the bytes `distance` before, up to `limit`. By the whole warp.
__device__ inline u32 equal_run(const Source &from, u32 at, u32 distance, u32 limit) {
    for (u32 done = 0; done < limit; done += 8 * LANES) {
        const u32 mine = done + 8 * lane_id();
        const u32 equal = mine < limit ? equal_bytes(from.eight(at + mine), from.eight(at + mine - distance)) : 0;
        const u32 other = vote(equal < 8);
        if (other) {
            const u32 lane = lowest_bit(other), run = done + 8 * lane + from_lane(equal, lane);
            return run < limit ? run : limit;
        }
    }
    return limit;
}

// The last three offsets, as the decoder keeps them; 0: not known.
struct Repeats {
    u32 first = 0, second = 0, third = 0;
    // Update with the distance of a match after a run of literals; returns the offset as the format stores it.
    __device__ u32 update(u32 distance, u32 run) {
        const u32 a = run ? first : second, b = run ? second : third, c = run ? third : first - 1;
        const u32 stored = distance == a ? 1 : distance == b ? 2 : distance == c ? 3 : distance + 3;
        if (run && distance == first) return stored;
        if (distance != second || stored > 3) third = second;
        second = first;
        first = distance;
        return stored;
    }
};

// The score of a match: approximately the bits that the match saves.
constexpr u32 AHEAD = 3;  // following lanes to which a lane defers if they score higher
constexpr int BYTE_BITS = 5, SEQUENCE_BITS = 8, DISTANCE_BITS = 2, RARE_BITS = 4;
constexpr u32 PRIOR_COUNT = 16;  // added to both counts of sequences, whose ratio gives `rare`
__device__ inline int score_of(u32 nbytes, int distance_bits) {
    return BYTE_BITS * static_cast<int>(nbytes) - SEQUENCE_BITS - distance_bits;
}
// Approximate bits of a new distance. `rare`: binary logarithm of the number of all distances so far divided by the
// number of new ones; the rarer a code, the more bits it takes.
__device__ inline int bits_of(u32 distance, int rare) {
    return DISTANCE_BITS + RARE_BITS * rare + 31 - leading_zeros(distance + 3);
}

constexpr u32 MAX_SCORED = 8;  // bytes that count for the score: a candidate from the table is compared no further
constexpr u32 MAY_BE_LONGER = 1u << 16;

struct Match {
    u32 nbytes = 0, distance = 0;  // nbytes: with the flag MAY_BE_LONGER
    int score = 0;
    // Replace the match by a candidate if that scores higher.
    __device__ void offer(u32 n, bool may_be_longer, u32 from, int bits) {
        const int other = score_of(n < MAX_SCORED ? n : MAX_SCORED, bits);
        if (n >= 3 && other > score) {
            nbytes = n | (may_be_longer ? MAY_BE_LONGER : 0);
            distance = from;
            score = other;
        }
    }
};

// The bytes of a window, and of the windows before and after it. Each lane holds the 8 bytes from its position on.
struct Windows {
    Source from;
    u32 base, end;  // first position of the window, end of the segment
    Bytes8 before, mine, next;
    Words later;  // words of the window after the next, read ahead
    __device__ Bytes8 load(u32 at) const { return from.eight(at + lane_id()); }
    __device__ void read_ahead() { later = from.words(base + 2 * LANES + lane_id()); }
    __device__ void advance() {
        base += LANES;
        before = mine;
        mine = next;
        next = Source::eight(later, from.shift(base + lane_id()));
    }
    __device__ void begin(u32 at) {
        base = at;
        before = at ? load(at - LANES) : Bytes8{0, 0};
        mine = load(at);
        next = load(at + LANES);
    }
    // A bit for each byte of this window and the next: whether it equals the byte `distance` before.
    __device__ u64 equal(u32 distance) const {
        const u32 p = base + lane_id();
        u32 here, there;  // bytes to compare with this window's byte and the next window's
        if (distance <= LANES) {
            const u32 lane = (lane_id() - distance) & (LANES - 1);
            const u32 a = from_lane(before.low, lane), b = from_lane(mine.low, lane), c = from_lane(next.low, lane);
            const bool own = lane_id() >= distance;
            here = own ? b : a;
            there = own ? c : b;
        } else {
            here = p < end && p >= distance ? load_once(from.bytes + (p - distance)) : 0;
            there = p + LANES < end && p + LANES >= distance ? load_once(from.bytes + (p + LANES - distance)) : 0;
        }
        const u32 low = vote(p < end && p >= distance && ((here ^ mine.low) & 0xff) == 0);
        const u32 high = vote(p + LANES < end && p + LANES >= distance && ((there ^ next.low) & 0xff) == 0);
        return low | static_cast<u64>(high) << 32;
    }
};

// Number of consecutive ones in `mask` from this lane's bit on.
__device__ inline u32 ones_from_here(u64 mask) {
    const u64 others = ~(mask >> lane_id());
    const u32 low = static_cast<u32>(others), high = static_cast<u32>(others >> 32);
    return low ? lowest_bit(low) : high ? 32 + lowest_bit(high) : 64;
}
__device__ inline void offer_run(Match &match, u64 equal, u32 distance, int bits) {
    const u32 n = ones_from_here(equal);
    match.offer(n, lane_id() + n == 2 * LANES, distance, bits);
}

struct Hash { u32 at, tag; };
__device__ inline Hash hash_of(Bytes8 bytes) {  // of the first 6 bytes
    const u32 mixed = bytes.low * 2654435761u + (bytes.high & 0xffff) * 2246822519u;
    return {mixed >> (32 - TABLE_LOG), (mixed >> 3) & TAG};
}

// If a match ends this far after the begin of a window, the windows within the match are skipped.
constexpr u32 FAR = 4 * LANES;

extern "C" __global__ void zstd_match(const u8 *chunks, i64 nbytes, i64 blocks_each, i64 segments, u8 *literals,
                                      u64 *sequences, Segment *out) {
    __shared__ u32 tables[MATCH_WARPS][1 << TABLE_LOG];
    const i64 number = static_cast<i64>(blockIdx.x) * MATCH_WARPS + warp_id();
    if (number >= segments) return;
    u32 *table = tables[warp_id()];
    const u32 lane = lane_id(), below = (1u << lane) - 1;
    const i64 block = number / SEGMENTS, chunk = block / blocks_each;
    const i64 at = (block % blocks_each * SEGMENTS + number % SEGMENTS) * SEGMENT;
    const u32 begin = static_cast<u32>(at < nbytes ? at : nbytes);
    const u32 end = static_cast<u32>(at + SEGMENT < nbytes ? at + SEGMENT : nbytes);
    const u32 origin = begin > REACHED ? begin - REACHED : 0;
    const u8 *bytes = chunks + chunk * nbytes;
    Windows w{{bytes, bytes + nbytes}, begin, end};
    literals += number * SEGMENT;
    sequences += number * MAX_SEQUENCES;
    for (u32 k = lane; k < 1u << TABLE_LOG; k += LANES) table[k] = 0;
    sync_warp();
    for (u32 p = origin + lane; p < begin; p += LANES) {
        const Hash hash = hash_of(w.from.eight(p));
        atomicMax(table + hash.at, (p - origin + 1) << TAG_BITS | hash.tag);
    }
    sync_warp();

    Repeats repeats;
    u32 taken = 0, taken_new = 0, literal_count = 0;  // sequences, those with a new distance, literals
    u32 cursor = begin;  // end of the last match
    for (w.begin(begin); w.base < end; w.advance()) {
        if (cursor >= w.base + FAR) {
            w.begin(w.base + (cursor - w.base) / LANES * LANES);
            if (w.base >= end) break;
        }
        const u32 base = w.base, p = base + lane;
        w.read_ahead();
        if (cursor >= base + LANES) continue;  // the window lies within a match
        const bool hashed = p + 8 <= end;
        const Hash hash = hash_of(w.mine);
        const u32 entry = hashed ? table[hash.at] : 0;
        sync_warp();
        if (hashed) atomicMax(table + hash.at, (p - origin + 1) << TAG_BITS | hash.tag);
        sync_warp();

        const int rare = leading_zeros(taken_new + PRIOR_COUNT) - leading_zeros(taken + PRIOR_COUNT);
        Match match;
        if (entry && (entry & TAG) == hash.tag) {
            const u32 distance = p - (origin + (entry >> TAG_BITS) - 1);
            const u32 n = equal_bytes(w.mine, w.from.eight(p - distance));
            match.offer(n, n == 8, distance, bits_of(distance, rare));
        }
#pragma unroll
        for (u32 distance = 1; distance <= 8; distance *= 2)
            offer_run(match, w.equal(distance), distance, bits_of(distance, rare));
        u32 covered = cursor > base ? (1u << (cursor - base)) - 1 : 0;
        for (bool again = true; again;) {
            again = false;
            Match best = match;
            if (repeats.first) offer_run(best, w.equal(repeats.first), repeats.first, 0);
            bool first_choice = best.score > 0;
#pragma unroll
            for (u32 ahead = 1; ahead <= AHEAD; ++ahead)
                first_choice &=
                    __shfl_down_sync(FULL, best.score, ahead) <= best.score;  // the last lanes get their own score
            const u32 starts = vote(first_choice);
            while (cursor < base + LANES && taken < MAX_SEQUENCES) {
                const u32 left = starts & (FULL << (cursor > base ? cursor - base : 0));
                if (!left) break;
                const u32 first = lowest_bit(left), start = base + first;
                const u32 known = from_lane(best.nbytes, first), distance = from_lane(best.distance, first);
                u32 n = known & (MAY_BE_LONGER - 1);
                if (known & MAY_BE_LONGER) n += equal_run(w.from, start + n, distance, end - start - n);
                const u32 run = start - cursor, before = repeats.first, stored = repeats.update(distance, run);
                if (lane == 0) sequences[taken] = pack_sequence(run, n, stored);
                ++taken;
                taken_new += stored > 3;
                cursor = start + n;
                covered |= (n + first < LANES ? (1u << (n + first)) - 1 : FULL) & (FULL << first);
                if (repeats.first != before) {
                    again = true;
                    break;
                }
            }
        }
        const u32 left = vote(p < end && !(covered >> lane & 1));
        if (left >> lane & 1) literals[literal_count + bits_set(left & below)] = static_cast<u8>(w.mine.low);
        literal_count += bits_set(left);
    }
    if (lane == 0) out[number] = {taken, literal_count, end - cursor, 0};
}
