// How many samples fall into each box: a multinomial distribution, by halving. Of n samples as many fall into the lower
// half of a box as there are ones among n random bits.
#include "philox.cuh"
#include "boxes.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Ones among the first n bits of a node's stream, those that one of `workers` counts.
__device__ int64 ones(const Boxes &how, unsigned node, int64 n, int64 worker, int64 workers) {
    int64 sum = 0;
    for (int64 call = worker; call * 128 < n; call += workers) {
        const uint4 words =
            philox(static_cast<unsigned>(how.window), static_cast<unsigned>(how.window >> 32),
                   static_cast<unsigned>(USE_SPLIT) << USE_SHIFT | node, static_cast<unsigned>(call), how.key);
        const unsigned each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int64 left = n - call * 128 - k * 32;
            const unsigned mask = left >= 32 ? ~0u : left > 0 ? (1u << left) - 1 : 0;
            sum += __popc(each[k] & mask);
        }
    }
    return sum;
}

// Samples of a node of the tree `lower`, whose entries are samples in lower halves; and how many lie before it.
struct Node { int64 count, start; };
template <class T> __device__ Node node_of(const T *lower, int64 total, int level, unsigned number) {
    Node node = {total, 0};
    unsigned at = 1;
    for (int k = level - 1; k >= 0; --k) {
        const int64 first = static_cast<int64>(lower[at]);
        const unsigned bit = number >> k & 1;
        node.start += bit ? first : 0;
        node.count = bit ? node.count - first : first;
        at = 2 * at + bit;
    }
    return node;
}

__device__ __forceinline__ int64 sum_of_warp(int64 v) {
#pragma unroll
    for (int by = 16; by; by >>= 1) v += __shfl_xor_sync(0xffffffffu, v, by);
    return v;
}

// One level of the tree; lower: 2^top entries, 0 for those of this level on. blockIdx.y: the node in its level.
extern "C" __global__ void __launch_bounds__(THREADS) split(uint64 *__restrict__ lower, int level, const Boxes how) {
    const Node node = node_of(lower, how.total, level, blockIdx.y);
    const unsigned number = (1u << level) + blockIdx.y;
    const int64 worker = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    const int64 sum = sum_of_warp(ones(how, number, node.count, worker, static_cast<int64>(gridDim.x) * THREADS));
    if (threadIdx.x % 32 == 0 && sum) atomicAdd(lower + number, static_cast<uint64>(sum));
}

// The levels below `top`, in shared memory, and where the samples of each box begin: 2^levels + 1 entries.
extern "C" __global__ void __launch_bounds__(THREADS)
    split_rest(const uint64 *__restrict__ lower, int64 *__restrict__ starts, const Boxes how) {
    extern __shared__ __align__(16) int64 below[];
    const int rest = how.levels - how.top;
    const unsigned root = (1u << how.top) + blockIdx.x;
    const Node all = node_of(lower, how.total, how.top, blockIdx.x);
    for (int level = 0; level < rest; ++level) {
        for (unsigned k = threadIdx.x / 32; k < 1u << level; k += WARPS) {
            const Node node = node_of(below, all.count, level, k);
            const int64 sum = sum_of_warp(ones(how, (root << level) + k, node.count, threadIdx.x % 32, 32));
            if (threadIdx.x % 32 == 0) below[(1u << level) + k] = sum;
        }
        __syncthreads();
    }
    for (unsigned k = threadIdx.x; k < 1u << rest; k += THREADS)
        starts[(static_cast<int64>(blockIdx.x) << rest) + k] = all.start + node_of(below, all.count, rest, k).start;
    if (blockIdx.x == 0 && threadIdx.x == 0) starts[1ll << how.levels] = how.total;
}

// Coordinates of the samples begin to begin + count of the window, box after box.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw_boxes(float *__restrict__ coords, const int64 *__restrict__ starts, int64 begin, int64 count,
               const Boxes how) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= count) return;
    const int64 position = begin + i;
    int64 low = 0, high = 1ll << how.levels;  // the last box that begins at or before the position
    while (high - low > 1) {
        const int64 middle = (low + high) / 2;
        if (starts[middle] <= position) low = middle;
        else high = middle;
    }
    unsigned at[3];
    int halved[3];
    place_of(how, static_cast<int>(low), at, halved);
    const uint4 words = numbers(how.window, USE_BINNED, pair_of(position), how.key);
    const uint64 fields = fields_of(words, position >> 5 & 1);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis)
        coords[3 * i + 2 - axis] = coordinate(bits_in_box(fields, at[axis], halved[axis], axis));
}
