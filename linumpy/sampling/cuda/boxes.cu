// Count the samples of each box, a multinomial distribution. Boxes are the leaves of a binary tree of halvings: of n samples of a node as many fall into the lower half as there are ones among n random
// bits. As linumpy.sampling.coordinates.boxes does on the host.
#include "philox.cuh"
#include "boxes.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Ones among the first n random bits of a node: the part that this one of `workers` counts.
__device__ int64 ones(const Boxes &boxes, unsigned node, int64 n, int64 worker, int64 workers) {
    int64 sum = 0;
    for (int64 call = worker; call * 128 < n; call += workers) {
        const uint4 words =
            philox(static_cast<unsigned>(boxes.window), static_cast<unsigned>(boxes.window >> 32),
                   static_cast<unsigned>(USE_SPLIT) << USE_SHIFT | node, static_cast<unsigned>(call), boxes.key);
        const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int64 n_bits = n - call * 128 - k * 32;
            const unsigned mask = n_bits >= 32 ? ~0u : n_bits > 0 ? (1u << n_bits) - 1 : 0;
            sum += __popc(word[k] & mask);
        }
    }
    return sum;
}

// Number of samples of a node, and number of samples before the node, in a tree whose entries are the counts of lower
// halves. `lower` reads an entry; `number` is the node's number in its level.
struct Node { int64 count, start; };
template <class Lower> __device__ Node walk(Lower lower, int64 total, int level, unsigned number) {
    Node node = {total, 0};
    for (int k = 0; k < level; ++k) {
        const int64 first = lower(k, (1u << k) + (number >> (level - k)));
        const unsigned bit = number >> (level - 1 - k) & 1;
        node.start += bit ? first : 0;
        node.count = bit ? node.count - first : first;
    }
    return node;
}

// The same by a warp: each lane reads the entry of one level.
__device__ Node node_of(const volatile uint64 *lower, int64 total, int level, unsigned number) {
    const int lane = threadIdx.x % 32;
    const int64 mine = lane < level ? static_cast<int64>(lower[(1u << lane) + (number >> (level - lane))]) : 0;
    return walk([=](int k, unsigned) { return __shfl_sync(0xffffffffu, mine, k); }, total, level, number);
}

__device__ __forceinline__ int64 sum_of_warp(int64 v) {
#pragma unroll
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(0xffffffffu, v, by);
    return v;
}

// Count the levels below node `number` of level `top` in shared memory, and write the first sample of each box.
__device__ void split_in_block(const Node &all, unsigned number, int64 *__restrict__ starts, const Boxes &boxes) {
    extern __shared__ __align__(16) int64 below[];
    const auto in_shared = [=](int, unsigned at) { return below[at]; };
    const int levels = boxes.levels - boxes.top;
    const unsigned root = (1u << boxes.top) + number;
    for (int level = 0; level < levels; ++level) {
        for (unsigned k = threadIdx.x / 32; k < 1u << level; k += WARPS) {
            const Node node = walk(in_shared, all.count, level, k);
            const int64 sum = sum_of_warp(ones(boxes, (root << level) + k, node.count, threadIdx.x % 32, 32));
            if (threadIdx.x % 32 == 0) below[(1u << level) + k] = sum;
        }
        __syncthreads();
    }
    for (unsigned k = threadIdx.x; k < 1u << levels; k += THREADS)
        starts[(static_cast<int64>(number) << levels) + k] = all.start + walk(in_shared, all.count, levels, k).start;
    if (number == 0 && threadIdx.x == 0) starts[1ll << boxes.levels] = boxes.total;
}

// Count all levels in one launch. Blocks are numbered in the order in which they start: `per_level` blocks split each
// of the first `top` levels, then one block splits each node of level `top`. A block waits for the blocks of the level
// above. These have started before it, so there is no deadlock, whatever else runs on the device.
//
// state: zeros. Entry 0 is the next block's number; then the tree, 2^top - 1 entries; then the number of blocks that
// have ended at each level. starts: 2^levels + 1 entries, the first sample of each box and the number of all samples.
extern "C" __global__ void __launch_bounds__(THREADS)
    split(uint64 *state, int64 *__restrict__ starts, int per_level, const Boxes boxes) {
    __shared__ unsigned taken;
    volatile uint64 *const done = state + (1u << boxes.top);
    if (threadIdx.x == 0) {
        taken = static_cast<unsigned>(atomicAdd(state, static_cast<uint64>(1)));
        const int above = min(static_cast<int>(taken / per_level), boxes.top) - 1;
        while (above >= 0 && done[above] < static_cast<uint64>(per_level)) {
        }
        __threadfence();
    }
    __syncthreads();
    const int level = min(static_cast<int>(taken / per_level), boxes.top);
    const unsigned rank = taken - static_cast<unsigned>(level) * per_level;
    const unsigned number = level < boxes.top ? rank & ((1u << level) - 1) : rank;
    const Node node = node_of(state, boxes.total, level, number);
    if (level == boxes.top) {
        split_in_block(node, number, starts, boxes);
        return;
    }
    const int64 worker = static_cast<int64>(rank >> level) * THREADS + threadIdx.x;
    const unsigned entry = (1u << level) + number;
    const int64 workers = static_cast<int64>(per_level >> level) * THREADS;
    const int64 sum = sum_of_warp(ones(boxes, entry, node.count, worker, workers));
    if (threadIdx.x % 32 == 0 && sum) {
        atomicAdd(state + entry, static_cast<uint64>(sum));
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(state + (1u << boxes.top) + level, static_cast<uint64>(1));
}
