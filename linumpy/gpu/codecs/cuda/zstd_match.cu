// Chunks → literals and sequences, the first step of the zstd encoder (format: RFC 8878).
//
// One warp for each segment, which is taken in windows of 32 positions, a lane for each. Every lane looks for the best
// match at its position, among
//   - the distance of the match before, which costs least to store (speckle: the voxel before, again and again);
//   - the distances 1, 2, 4 and 8, which a table filled window by window does not find;
//   - the last position before the window whose next 6 bytes have the same hash.
// A lane has the next 8 bytes of its position, and of those 32 before and behind. Which bytes equal those a short distance
// before is told by shuffles and two votes, as 64 bits, in which every lane counts the ones from its position on: no
// memory is read. A candidate of the table is compared over 8 bytes. What goes on beyond that is found by all lanes
// together, once a match is taken. A score weighs bytes against the bits that a distance costs: a new one, the more, the
// rarer new ones have been in the segment. A lane gives way to the next ones if these score higher. The matches of a
// window are then taken from left to right, each by a few votes: only this is serial.
//
// The table holds, for each hash, the highest position (by atomicMax, so that the result does not depend on the order
// of lanes) with further bits of its hash, by which most wrong candidates are known without a look at them.
//
// Segments know nothing of each other. A repeated offset is used only if the segment itself has set it, so it is right
// whatever came before, also if a block before is stored as it is. Matches end at the end of a segment, and may begin
// up to REACHED bytes before it, in the same chunk.

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
constexpr u32 TAG_BITS = 14, TAG = (1u << TAG_BITS) - 1;  // the other bits hold SEGMENT + REACHED positions
static_assert(SEGMENT + REACHED < (1 << (32 - TAG_BITS)) && SEGMENT <= 65536, "positions fit a table");

struct Bytes8 { u32 low, high; };
struct Words { u32 at[3]; };

// The bytes of a chunk. Words are read whole that have a byte of it; what is behind its end is never used.
struct Source {
    const u8 *bytes, *end;
    __device__ u32 shift(u32 at) const { return 8 * static_cast<u32>(reinterpret_cast<u64>(bytes + at) & 3); }
    // The words that hold `at` and the 7 bytes behind it; zeros behind the end.
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

__device__ inline u32 lowest_bit(u32 v) { return 31 - leading_zeros(v & (0 - v)); }  // of v > 0
__device__ inline u32 equal_bytes(u32 a, u32 b) { return a == b ? 4 : lowest_bit(a ^ b) / 8; }
__device__ inline u32 equal_bytes(Bytes8 a, Bytes8 b) {
    return a.low == b.low ? 4 + equal_bytes(a.high, b.high) : equal_bytes(a.low, b.low);
}

// How many bytes from `at` on equal those `distance` before, up to `most`. By the whole warp.
__device__ inline u32 equal_run(const Source &from, u32 at, u32 distance, u32 most) {
    for (u32 done = 0; done < most; done += 8 * LANES) {
        const u32 mine = done + 8 * lane_id();
        const u32 equal = mine < most ? equal_bytes(from.eight(at + mine), from.eight(at + mine - distance)) : 0;
        const u32 other = vote(equal < 8);
        if (other) {
            const u32 lane = lowest_bit(other), run = done + 8 * lane + from_lane(equal, lane);
            return run < most ? run : most;
        }
    }
    return most;
}

// The last three offsets, as a decoder knows them; 0: not known.
struct Repeats {
    u32 first = 0, second = 0, third = 0;
    // Take a match; returns its offset as it is stored.
    __device__ u32 take(u32 distance, u32 run) {
        const u32 a = run ? first : second, b = run ? second : third, c = run ? third : first - 1;
        const u32 stored = distance == a ? 1 : distance == b ? 2 : distance == c ? 3 : distance + 3;
        if (run && distance == first) return stored;
        if (distance != second || stored > 3) third = second;
        second = first;
        first = distance;
        return stored;
    }
};

// Bits that a match saves, about.
constexpr u32 AHEAD = 3;  // lanes that it looks ahead for a better score
constexpr int BYTE_BITS = 5, SEQUENCE_BITS = 8, DISTANCE_BITS = 2, RARE_BITS = 4;
constexpr u32 SOME = 16;
__device__ inline int score_of(u32 nbytes, int distance_bits) {
    return BYTE_BITS * static_cast<int>(nbytes) - SEQUENCE_BITS - distance_bits;
}
// `rare`: how many times fewer distances have been new so far than repeated, as a power of two: a rare code takes more.
__device__ inline int bits_of(u32 distance, int rare) {
    return DISTANCE_BITS + RARE_BITS * rare + 31 - leading_zeros(distance + 3);
}

constexpr u32 MOST_SCORED = 8;  // bytes: how long a match of the table is, is not known beyond that
constexpr u32 GOES_ON = 1u << 16;

struct Found {
    u32 nbytes = 0, distance = 0;  // with GOES_ON where it may be longer
    int score = 0;
    __device__ void offer(u32 n, bool goes_on, u32 from, int bits) {
        const int other = score_of(n < MOST_SCORED ? n : MOST_SCORED, bits);
        if (n >= 3 && other > score) {
            nbytes = n | (goes_on ? GOES_ON : 0);
            distance = from;
            score = other;
        }
    }
};

// Bytes of a window, of the one before and the one behind. Each lane has the 8 from its position on.
struct Windows {
    Source from;
    u32 base, end;  // the window's first position, the segment's end
    Bytes8 before, mine, next;
    Words later;  // of the window behind the next, as they were read: nothing waits for them until then
    // Lanes of all windows have the same shift.
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
    // Which bytes of this window and the next equal those `distance` before.
    __device__ u64 equal(u32 distance) const {
        const u32 p = base + lane_id();
        u32 here, there;  // what this window's byte and the next one's are compared with
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

// Ones of `mask` from this lane's bit on.
__device__ inline u32 ones_from_here(u64 mask) {
    const u64 others = ~(mask >> lane_id());
    const u32 low = static_cast<u32>(others), high = static_cast<u32>(others >> 32);
    return low ? lowest_bit(low) : high ? 32 + lowest_bit(high) : 64;
}
__device__ inline void offer_run(Found &found, u64 equal, u32 distance, int bits) {
    const u32 n = ones_from_here(equal);
    found.offer(n, lane_id() + n == 2 * LANES, distance, bits);
}

struct Hash { u32 at, tag; };
__device__ inline Hash hash_of(Bytes8 bytes) {  // of the first 6
    const u32 mixed = bytes.low * 2654435761u + (bytes.high & 0xffff) * 2246822519u;
    return {mixed >> (32 - TABLE_LOG), (mixed >> 3) & TAG};
}

constexpr u32 FAR = 4 * LANES;  // behind what is left out of the window's bytes, these are loaded anew

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
    sequences += number * MOST_SEQUENCES;
    for (u32 k = lane; k < 1u << TABLE_LOG; k += LANES) table[k] = 0;
    sync_warp();
    for (u32 p = origin + lane; p < begin; p += LANES) {
        const Hash hash = hash_of(w.from.eight(p));
        atomicMax(table + hash.at, (p - origin + 1) << TAG_BITS | hash.tag);
    }
    sync_warp();

    Repeats repeats;
    u32 taken = 0, taken_new = 0, run_of_literals = 0,
        cursor = begin;  // sequences, literals, the end of the last match
    for (w.begin(begin); w.base < end; w.advance()) {
        if (cursor >= w.base + FAR) {
            w.begin(w.base + (cursor - w.base) / LANES * LANES);
            if (w.base >= end) break;
        }
        const u32 base = w.base, p = base + lane;
        w.read_ahead();
        if (cursor >= base + LANES) continue;  // all within a match
        const bool hashed = p + 8 <= end;
        const Hash hash = hash_of(w.mine);
        const u32 entry = hashed ? table[hash.at] : 0;
        sync_warp();
        if (hashed) atomicMax(table + hash.at, (p - origin + 1) << TAG_BITS | hash.tag);
        sync_warp();

        const int rare = leading_zeros(taken_new + SOME) - leading_zeros(taken + SOME);
        Found found;
        if (entry && (entry & TAG) == hash.tag) {
            const u32 distance = p - (origin + (entry >> TAG_BITS) - 1);
            const u32 n = equal_bytes(w.mine, w.from.eight(p - distance));
            found.offer(n, n == 8, distance, bits_of(distance, rare));
        }
#pragma unroll
        for (u32 distance = 1; distance <= 8; distance *= 2)
            offer_run(found, w.equal(distance), distance, bits_of(distance, rare));
        u32 covered = cursor > base ? (1u << (cursor - base)) - 1 : 0;
        for (bool look = true; look;) {
            look = false;
            Found best = found;
            if (repeats.first) offer_run(best, w.equal(repeats.first), repeats.first, 0);
            bool first_choice = best.score > 0;
#pragma unroll
            for (u32 ahead = 1; ahead <= AHEAD; ++ahead)
                first_choice &=
                    __shfl_down_sync(FULL, best.score, ahead) <= best.score;  // of the last lanes: their own
            const u32 starts = vote(first_choice);
            while (cursor < base + LANES && taken < MOST_SEQUENCES) {
                const u32 left = starts & (FULL << (cursor > base ? cursor - base : 0));
                if (!left) break;
                const u32 first = lowest_bit(left), start = base + first;
                const u32 known = from_lane(best.nbytes, first), distance = from_lane(best.distance, first);
                u32 n = known & (GOES_ON - 1);
                if (known & GOES_ON) n += equal_run(w.from, start + n, distance, end - start - n);
                const u32 run = start - cursor, before = repeats.first, stored = repeats.take(distance, run);
                if (lane == 0) sequences[taken] = pack_sequence(run, n, stored);
                ++taken;
                taken_new += stored > 3;
                cursor = start + n;
                covered |= (n + first < LANES ? (1u << (n + first)) - 1 : FULL) & (FULL << first);
                if (repeats.first != before) {
                    look = true;
                    break;
                }
            }
        }
        const u32 left = vote(p < end && !(covered >> lane & 1));
        if (left >> lane & 1) literals[run_of_literals + bits_set(left & below)] = static_cast<u8>(w.mine.low);
        run_of_literals += bits_set(left);
    }
    if (lane == 0) out[number] = {taken, run_of_literals, end - cursor, 0};
}
