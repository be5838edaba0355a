// Packing of encoded streams: offsets from sizes, and copies from slots of equal length.

#include "encode.cuh"

// Compute offsets[0 … count] from the sizes. By one warp, which takes a few nanoseconds per stream.
extern "C" __global__ void __launch_bounds__(LANES)
    encoded_offsets(const u32 *__restrict__ sizes, i64 count, i64 *__restrict__ offsets) {
    i64 begin = 0;
    for (i64 first = 0; first < count; first += LANES) {
        const i64 number = first + lane_id();
        const i64 size = number < count ? sizes[number] : 0;
        i64 sum = size;
        for (int by = 1; by < LANES; by *= 2) {
            const i64 other = from_below(sum, by);
            if (lane_id() >= by) sum += other;
        }
        if (number < count) offsets[number] = begin + sum - size;
        begin += from_lane(sum, LANES - 1);
    }
    if (lane_id() == 0) offsets[count] = begin;
}

// Copy each stream from its slot to its offset. By `pieces` blocks of threads for each stream.
extern "C" __global__ void __launch_bounds__(256)
    encoded_pack(const u8 *__restrict__ slots, i64 stride, const i64 *__restrict__ offsets, i64 count, i64 pieces,
                 u8 *__restrict__ arena) {
    for (i64 task = blockIdx.x; task < count * pieces; task += gridDim.x) {
        const i64 number = task / pieces, piece = task % pieces;
        const i64 begin = offsets[number], size = offsets[number + 1] - begin;
        const i64 step = (size / pieces + 16) & ~15ll, offset = piece * step;
        if (offset >= size) continue;
        copy_bytes(arena + begin + offset, slots + number * stride + offset,
                   size - offset < step ? size - offset : step, threadIdx.x, blockDim.x);
    }
}
