// Chunks → literals and sequences, the first step of the zstd encoder (format: RFC 8878).
//
// One warp for each segment, which is taken in windows of 32 positions, a lane for each. Every lane looks for the best
// match at its position, among
//   - the distance of the match before, which costs least to store (speckle: the voxel before, again and again);
//   - the distances 1, 2, 4 and 8, which a table filled window by window does not find;
//   - the last position before the window whose next 6 bytes have the same hash.
// Eight bytes are compared; what is equal beyond that is found by all lanes together, once a match is taken. A score
// weighs bytes against the bits that a distance costs. A lane gives way to the next one if that scores higher. The
// matches of a window are then taken from left to right, each by a few votes: only this is serial.
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
#define TABLE_LOG 12
#endif
#ifndef REACHED
#define REACHED 0
#endif
#ifndef MATCH_WARPS
#define MATCH_WARPS 2
#endif
constexpr u32 TAG_BITS = 14, TAG = (1u << TAG_BITS) - 1;  // the other bits hold SEGMENT + REACHED positions
static_assert(SEGMENT + REACHED < (1 << (32 - TAG_BITS)) && SEGMENT <= 65536, "positions fit a table");

struct Bytes8 { u32 low, high; };

// The bytes of a chunk that may be read: whole words of [first, end).
struct Source {
    const u8 *bytes, *first, *end;
    __device__ u32 byte(const u8 *p) const { return p < end ? load_once(p) : 0; }
    // Bytes from position `at` on, zeros behind the end.
    __device__ u32 four(u32 at) const {
        const u8 *p = bytes + at;
        const u32 shift = static_cast<u32>(reinterpret_cast<u64>(p) & 3);
        const u8 *aligned = p - shift;
        if (aligned < first || aligned + 8 > end) return byte(p) | byte(p + 1) << 8 | byte(p + 2) << 16 | byte(p + 3) << 24;
        const u32 *words = reinterpret_cast<const u32 *>(aligned);
        return funnel(load_once(words), load_once(words + 1), 8 * shift);
    }
    __device__ Bytes8 eight(u32 at) const {
        const u8 *p = bytes + at;
        const u32 shift = static_cast<u32>(reinterpret_cast<u64>(p) & 3);
        const u8 *aligned = p - shift;
        if (aligned < first || aligned + 12 > end) return {four(at), four(at + 4)};
        const u32 *words = reinterpret_cast<const u32 *>(aligned);
        const u32 middle = load_once(words + 1);
        return {funnel(load_once(words), middle, 8 * shift), funnel(middle, load_once(words + 2), 8 * shift)};
    }
};

__device__ inline u32 lowest_bit(u32 v) { return 31 - leading_zeros(v & (0 - v)); }  // of v > 0
__device__ inline u32 equal_bytes(u32 a, u32 b) { return a == b ? 4 : lowest_bit(a ^ b) / 8; }
__device__ inline u32 equal_bytes(Bytes8 a, Bytes8 b) {
    return a.low == b.low ? 4 + equal_bytes(a.high, b.high) : equal_bytes(a.low, b.low);
}

// How many bytes from `at` on equal those `distance` before, up to `most`. By the whole warp.
__device__ inline u32 equal_run(const Source &from, u32 at, u32 distance, u32 most) {
    for (u32 done = 0; done < most; done += 4 * LANES) {
        const u32 mine = done + 4 * lane_id();
        const u32 equal = mine < most ? equal_bytes(from.four(at + mine), from.four(at + mine - distance)) : 0;
        const u32 other = vote(equal < 4);
        if (other) {
            const u32 lane = lowest_bit(other), run = done + 4 * lane + from_lane(equal, lane);
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

// Bits that a match saves, about: a byte is 6 of literals.
#ifndef AHEAD
#define AHEAD 2
#endif
constexpr int BYTE_BITS = 6, SEQUENCE_BITS = 11, DISTANCE_BITS = 10;
__device__ inline int score_of(u32 nbytes, int distance_bits) {
    return BYTE_BITS * static_cast<int>(nbytes) - SEQUENCE_BITS - distance_bits;
}
__device__ inline int bits_of(u32 distance) { return DISTANCE_BITS + 31 - leading_zeros(distance + 3); }

struct Found {
    u32 nbytes = 0, distance = 0;
    int score = 0;
    __device__ void offer(u32 n, u32 from, int bits) {
        const int other = score_of(n, bits);
        if (n >= 3 && other > score) {
            nbytes = n;
            distance = from;
            score = other;
        }
    }
};

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
    const Source from{bytes, chunks, bytes + nbytes};
    literals += number * SEGMENT;
    sequences += number * MOST_SEQUENCES;
    for (u32 k = lane; k < 1u << TABLE_LOG; k += LANES) table[k] = 0;
    sync_warp();

    Repeats repeats;
    u32 taken = 0, run_of_literals = 0, cursor = begin;  // sequences, literals, the end of the last match
    for (u32 base = begin - (begin - origin + LANES - 1) / LANES * LANES; base < end; base += LANES) {
        if (base >= begin && cursor >= base + LANES) {  // all within a match
            base += (cursor - base) / LANES * LANES;
            if (base >= end) break;
        }
        const u32 p = base + lane;
        const bool inside = p < end;
        const Bytes8 mine = inside ? from.eight(p) : Bytes8{0, 0};
        const bool hashed = inside && p + 8 <= end;
        const u32 mixed = mine.low * 2654435761u + (mine.high & 0xffff) * 2246822519u;
        const u32 hash = mixed >> (32 - TABLE_LOG), tag = (mixed >> 3) & TAG;
        const u32 entry = hashed ? table[hash] : 0;
        sync_warp();
        if (hashed) atomicMax(table + hash, (p - origin + 1) << TAG_BITS | tag);
        sync_warp();
        if (REACHED && base < begin) continue;

        const u32 most = end - p;  // where `inside`
        Found found;
        if (entry && (entry & TAG) == tag) {
            const u32 distance = p - (origin + (entry >> TAG_BITS) - 1);
            u32 n = equal_bytes(mine, from.eight(p - distance));
            found.offer(n, distance, bits_of(distance));
        }
#pragma unroll
        for (u32 distance = 1; distance <= 8; distance *= 2)
            if (inside && p >= distance) {
                const u32 n = equal_bytes(mine, from.eight(p - distance));
                found.offer(n < most ? n : most, distance, bits_of(distance));
            }
        u32 covered = cursor > base ? (1u << (cursor - base)) - 1 : 0;
        for (bool look = true; look;) {
            look = false;
            Found best = found;
            if (repeats.first && inside) {
                const u32 n = equal_bytes(mine, from.eight(p - repeats.first));
                best.offer(n < most ? n : most, repeats.first, 0);
            }
            bool first_choice = best.score > 0;
#pragma unroll
            for (u32 ahead = 1; ahead <= AHEAD; ++ahead)
                first_choice &= __shfl_down_sync(FULL, best.score, ahead) <= best.score;  // of the last lanes: their own
            const u32 starts = vote(first_choice);
            while (cursor < base + LANES && taken < MOST_SEQUENCES) {
                const u32 left = starts & (FULL << (cursor > base ? cursor - base : 0));
                if (!left) break;
                const u32 first = lowest_bit(left), start = base + first;
                u32 n = from_lane(best.nbytes, first);
                const u32 distance = from_lane(best.distance, first);
                if (n == 8) n += equal_run(from, start + 8, distance, end - start - 8);
                const u32 run = start - cursor, before = repeats.first, stored = repeats.take(distance, run);
                if (lane == 0) sequences[taken] = pack_sequence(run, n, stored);
                ++taken;
                cursor = start + n;
                covered |= (n + first < LANES ? (1u << (n + first)) - 1 : FULL) & (FULL << first);
                if (repeats.first != before) {
                    look = true;
                    break;
                }
            }
        }
        const u32 left = vote(inside && !(covered >> lane & 1));
        if (left >> lane & 1) literals[run_of_literals + bits_set(left & below)] = static_cast<u8>(mine.low);
        run_of_literals += bits_set(left);
    }
    if (lane == 0) out[number] = {taken, run_of_literals, end - cursor, 0};
}
