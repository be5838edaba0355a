// Records and functions that the kernels of the zstd encoder share.
//
// A chunk becomes a frame. The chunk is cut into zstd blocks of SEGMENTS segments of SEGMENT bytes each (powers of
// two). One warp finds the matches of a segment; each block has its own tables.

#include "zstd_records.cuh"

#ifndef SEGMENT
#define SEGMENT 16384
#endif
#ifndef SEGMENTS
#define SEGMENTS 4
#endif
constexpr u32 BLOCK_NBYTES = SEGMENT * SEGMENTS;
constexpr u32 MAX_SEQUENCES = SEGMENT / 4;  // of a segment

// Number of sequences of a segment, of all its literals, and of the literals after its last sequence (`tail`).
struct Segment { u32 sequences, literals, tail, unused; };

// A sequence in 64 bits: run of literals (17 bits), length of the match (17 bits), and the offset as the format stores
// it (30 bits): 1 to 3 for a repeated offset, else the distance plus 3.
__device__ inline u64 pack_sequence(u32 run, u32 match, u32 offset) {
    return run | static_cast<u64>(match) << 17 | static_cast<u64>(offset) << 34;
}
__device__ inline u32 run_of(u64 s) { return static_cast<u32>(s) & 0x1ffff; }
__device__ inline u32 match_of(u64 s) { return static_cast<u32>(s >> 17) & 0x1ffff; }
__device__ inline u32 offset_of(u64 s) { return static_cast<u32>(s >> 34); }

// How a block is stored (`type`: BlockType). `nbytes`: size without the header of three bytes.
struct EncodedBlock {
    u32 type, nbytes;
    u32 literals_nbytes;  // size of the literals section of a compressed block
    u32 unused;
    i64 at;  // offset in its frame
};

// The byte range of a chunk that a block encodes.
struct Extent { u32 begin, nbytes; };
__device__ inline Extent block_extent(i64 nbytes, i64 number_in_chunk) {
    const i64 begin = number_in_chunk * BLOCK_NBYTES, left = nbytes - begin;
    return {static_cast<u32>(begin), static_cast<u32>(left < BLOCK_NBYTES ? left : BLOCK_NBYTES)};
}

// The segment that holds item `i`; segment s begins with item start[s].
__device__ inline u32 segment_of(const u32 *start, u32 i) {
    u32 s = 0;
#pragma unroll
    for (u32 half = SEGMENTS / 2; half; half /= 2)
        if (start[s + half] <= i) s += half;
    return s;
}

// Put `n` bits at bit `at` of words in shared memory, where the bits must be zero. Several lanes may do so at the same
// time.
__device__ inline void put_bits(u32 *words, u32 at, u32 value, u32 n) {
    if (!n) return;
    const u64 bits = static_cast<u64>(value) << (at & 31);
    atomicAdd(words + at / 32, static_cast<u32>(bits));
    if ((at & 31) + n > 32) atomicAdd(words + at / 32 + 1, static_cast<u32>(bits >> 32));
}

// Write the first `nbytes` of words in shared memory. By a whole warp.
__device__ inline void store_bytes(u8 *to, const u32 *words, u32 nbytes) {
    for (u32 k = lane_id(); k < nbytes; k += LANES) to[k] = static_cast<u8>(words[k / 4] >> (8 * (k & 3)));
}

// Appends bits to bytes, by one lane.
struct BitWriter {
    u8 *to;
    u32 bits = 0, have = 0, nbytes = 0;
    __device__ void put(u32 value, u32 n) {  // n <= 16
        bits |= value << have;
        for (have += n; have >= 8; have -= 8) {
            to[nbytes++] = static_cast<u8>(bits);
            bits >>= 8;
        }
    }
    __device__ void finish() {
        if (have) to[nbytes++] = static_cast<u8>(bits);
        bits = have = 0;
    }
};
