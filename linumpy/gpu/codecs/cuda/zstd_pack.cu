// The zstd encoder's last step (format: RFC 8878): blocks → frames, packed one behind another.
//
// A warp for each frame sums the sizes of its blocks; one block of threads sums those of all frames; a block of threads
// for each zstd block copies it to where it belongs, with its header, and the frame's before the first one.
//
// A frame says how long its content is. Short ones are a single segment; longer ones have a window, no longer than
// matches reach, which readers that decode piece by piece limit.

#include "decode.cuh"
#include "zstd_encode.cuh"

constexpr i64 SINGLE = 8 << 20;  // the window that every decoder is to support, at least
constexpr u32 WINDOW_CODE = 7 << 3;  // 128 KiB, the longest block
constexpr u32 MAGIC = 0xfd2fb528u, SINGLE_SEGMENT = 32, COPY_THREADS = 128, SUM_THREADS = 1024;

__device__ inline u32 size_code(i64 nbytes) { return nbytes < 256 ? 0 : nbytes < 65536 + 256 ? 1 : 2; }
__device__ inline u32 frame_head(i64 nbytes) { return nbytes <= SINGLE ? 5 + (1u << size_code(nbytes)) : 10; }
__device__ inline void write_frame_head(u8 *to, i64 nbytes) {
    const u32 code = size_code(nbytes);
    const u32 size = static_cast<u32>(nbytes) - (code == 1 ? 256 : 0);
    for (u32 k = 0; k < 4; ++k) to[k] = static_cast<u8>(MAGIC >> (8 * k));
    to[4] = static_cast<u8>(code << 6 | (nbytes <= SINGLE ? SINGLE_SEGMENT : 0));
    to += 5;
    if (nbytes > SINGLE) *to++ = static_cast<u8>(WINDOW_CODE);
    for (u32 k = 0; k < 1u << code; ++k) to[k] = static_cast<u8>(size >> (8 * k));
}

__device__ inline u32 stored_nbytes(const EncodedBlock &block) { return 3 + (block.type == REPEATED ? 1 : block.nbytes); }

extern "C" __global__ void zstd_sizes(i64 nbytes, i64 blocks_each, i64 chunks, EncodedBlock *blocks, i64 *sizes) {
    const i64 chunk = static_cast<i64>(blockIdx.x) * (blockDim.x / LANES) + warp_id();
    if (chunk >= chunks) return;
    blocks += chunk * blocks_each;
    i64 total = frame_head(nbytes);
    for (i64 base = 0; base < blocks_each; base += LANES) {
        const i64 k = base + lane_id();
        const u32 mine = k < blocks_each ? stored_nbytes(blocks[k]) : 0, until = running_sum(mine);
        if (k < blocks_each) blocks[k].at = total + until - mine;
        total += from_lane(until, LANES - 1);
    }
    if (lane_id() == 0) sizes[chunk] = total;
}

// Sums of all sizes before each. By one block.
extern "C" __global__ void zstd_offsets(const i64 *sizes, i64 chunks, i64 *offsets) {
    __shared__ i64 sums[SUM_THREADS / LANES];
    i64 before = 0;
    for (i64 base = 0; base < chunks; base += SUM_THREADS) {
        const i64 k = base + threadIdx.x, mine = k < chunks ? sizes[k] : 0;
        i64 until = mine;
        for (int by = 1; by < LANES; by *= 2) {
            const i64 other = from_below(until, by);
            if (lane_id() >= by) until += other;
        }
        if (lane_id() == LANES - 1) sums[warp_id()] = until;
        sync_block();
        i64 all = 0;
        for (int w = 0; w < SUM_THREADS / LANES; ++w) {
            if (w < warp_id()) until += sums[w];
            all += sums[w];
        }
        if (k < chunks) offsets[k] = before + until - mine;
        before += all;
        sync_block();
    }
    if (threadIdx.x == 0) offsets[chunks] = before;
}

// Words of the target, aligned, from bytes of the source.
__device__ inline void copy_bytes(u8 *to, const u8 *from, u32 nbytes) {
    const u32 ahead = static_cast<u32>(-reinterpret_cast<u64>(to) & 3), head = ahead < nbytes ? ahead : nbytes;
    const u32 words = (nbytes - head) / 4;
    for (u32 k = threadIdx.x; k < head; k += COPY_THREADS) to[k] = from[k];
    for (u32 k = threadIdx.x; k < words; k += COPY_THREADS)
        reinterpret_cast<u32 *>(to + head)[k] = load32(from + head + 4 * k);
    for (u32 k = head + 4 * words + threadIdx.x; k < nbytes; k += COPY_THREADS) to[k] = from[k];
}

extern "C" __global__ void zstd_pack(const u8 *chunks, i64 nbytes, i64 blocks_each, const u8 *sections,
                                     const EncodedBlock *blocks, const i64 *offsets, u8 *arena) {
    const i64 number = blockIdx.x, chunk = number / blocks_each, in_chunk = number % blocks_each;
    const EncodedBlock block = blocks[number];
    const Extent extent = block_extent(nbytes, in_chunk);
    const u8 *bytes = chunks + chunk * nbytes + extent.begin;
    u8 *to = arena + offsets[chunk];
    if (in_chunk == 0 && threadIdx.x == 0) write_frame_head(to, nbytes);
    to += block.at;
    if (threadIdx.x == 0) {
        const u32 head = (in_chunk == blocks_each - 1) | block.type << 1 | block.nbytes << 3;
        for (u32 k = 0; k < 3; ++k) to[k] = static_cast<u8>(head >> (8 * k));
    }
    copy_bytes(to + 3, block.type == COMPRESSED ? sections + number * BLOCK_NBYTES : bytes, stored_nbytes(block) - 3);
}
