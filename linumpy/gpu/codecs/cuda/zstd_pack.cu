// The zstd encoder's last step (format: RFC 8878): blocks → packed frames.
//
// `zstd_sizes`, one warp per frame, sums the sizes of the frame's blocks; `encoded_offsets` sums the sizes of the
// frames; `zstd_pack`, one block of threads per zstd block, writes the block's header and copies the block to its
// offset. The first block of a frame also writes the frame's header.
//
// A frame states the size of its content. A short frame is a "single segment": its window is the whole content. Longer
// frames state a window of 128 KiB, which exceeds the reach of matches: streaming readers limit the window.

#include "encode.cuh"
#include "zstd_encode.cuh"

constexpr i64 SINGLE = 8 << 20;  // maximum content of a single segment: the window that every decoder should support
constexpr u32 WINDOW_CODE = 7 << 3;  // 128 KiB, the longest block
constexpr u32 MAGIC = 0xfd2fb528u, SINGLE_SEGMENT = 32;

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

// Bytes of a block in the frame, including the block's header.
__device__ inline u32 stored_nbytes(const EncodedBlock &block) {
    return 3 + (block.type == REPEATED ? 1 : block.nbytes);
}

extern "C" __global__ void zstd_sizes(i64 nbytes, i64 blocks_each, i64 chunks, EncodedBlock *blocks, u32 *sizes) {
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
    if (lane_id() == 0) sizes[chunk] = static_cast<u32>(total);
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
    copy_bytes(to + 3, block.type == COMPRESSED ? sections + number * BLOCK_NBYTES : bytes, stored_nbytes(block) - 3,
               threadIdx.x, blockDim.x);
}
