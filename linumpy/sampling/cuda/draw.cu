// Coordinates of random points, as linumpy.sampling.coordinates.draws makes them on the host: the same bits.
#include "philox.cuh"
#include "boxes.cuh"

constexpr int THREADS = 256;

struct Draw {
    uint64 first;       // number of the first sample
    int64 count;
    uint64 cells;       // entries of `ids` or `cumulative`
    Key key;
    int use;
    int strata_bits;    // binary logarithm of the strata along an axis
    int grid[3];        // cells of the grid of weights along z, y and x
};
static_assert(sizeof(Draw) == 56, "linumpy.sampling.coordinates.draws writes 56 bytes");

// As `generator.sobol`, for the low 32 bits of the index; a random shift for each 2^32 points.
__device__ uint4 sobol(uint64 index, Key key) {
    const unsigned low = static_cast<unsigned>(index), gray = low ^ (low >> 1);
    uint4 words = numbers(index >> 32, USE_SOBOL, 0, key);
    unsigned x = 1u << 31, y = 1u << 31, z = 1u << 31, before = 3u << 30;
    for (int bit = 0; bit < 32; ++bit) {
        const unsigned taken = 0u - (gray >> bit & 1);
        words.x ^= taken & x;
        words.y ^= taken & y;
        words.z ^= taken & z;
        x >>= 1;
        y ^= y >> 1;
        const unsigned after = before ^ z ^ (z >> 2);
        z = before;
        before = after;
    }
    return words;
}

__device__ unsigned shuffled(unsigned index, uint4 words, int bits) {
    const unsigned mask = (1u << bits) - 1, by = (bits + 1) / 2;
    const unsigned keys[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int round = 0; round < 4; ++round) {
        index = (index * (keys[round] | 1) + (keys[round] >> 7)) & mask;
        index ^= index >> by;
    }
    return index;
}

// A cell of the grid of weights: one of the list, all alike, or by the cumulative weights, of which the last is 2^63.
__device__ uint64 chosen_cell(const Draw &how, const int64 *ids, const uint64 *cumulative, uint4 words) {
    if (ids) {
        const uint64 low = words.x * how.cells >> 32;
        return static_cast<uint64>(ids[words.y * how.cells + low >> 32]);
    }
    const uint64 wanted = (static_cast<uint64>(words.x) << 32 | words.y) >> 1;
    uint64 begin = 0, end = how.cells;
    while (begin < end) {
        const uint64 middle = (begin + end) / 2;
        if (cumulative[middle] > wanted) end = middle;
        else begin = middle + 1;
    }
    return begin;
}

// float32 rounds some coordinates of a cell to its upper border, which is part of the next cell: those become the
// number below. No such coordinate is 0, whose bits have none below.
__device__ __forceinline__ float in_cell(unsigned cell, unsigned word, int cells) {
    const float made = static_cast<float>((cell + (word + 0.5) * 2.3283064365386963e-10) / cells);
    return static_cast<double>(made) * cells >= cell + 1.0 ? __int_as_float(__float_as_int(made) - 1) : made;
}

extern "C" __global__ void __launch_bounds__(THREADS) draw(float *__restrict__ coords, const int64 *__restrict__ ids,
                                                           const uint64 *__restrict__ cumulative, const Draw how) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= how.count) return;
    const uint64 index = how.first + i;
    float *const at = coords + 3 * i;
    uint4 words = how.use == USE_SOBOL ? sobol(index, how.key) : numbers(index, how.use, 0, how.key);
    if (how.use == USE_WEIGHTED) {
        const uint64 cell = chosen_cell(how, ids, cumulative, numbers(index, USE_CELL, 0, how.key));
        const uint64 row = cell / how.grid[2];
        at[0] = in_cell(static_cast<unsigned>(cell % how.grid[2]), words.x, how.grid[2]);
        at[1] = in_cell(static_cast<unsigned>(row % how.grid[1]), words.y, how.grid[1]);
        at[2] = in_cell(static_cast<unsigned>(row / how.grid[1]), words.z, how.grid[0]);
        return;
    }
    unsigned bits[3] = {words.x >> 8, words.y >> 8, words.z >> 8};
    if (how.use == USE_STRATIFIED) {
        const int b = how.strata_bits;
        const unsigned within = static_cast<unsigned>(index & ((1ull << 3 * b) - 1));
        const unsigned stratum = shuffled(within, numbers(index >> 3 * b, USE_STRATA, 0, how.key), 3 * b);
#pragma unroll
        for (int axis = 0; axis < 3; ++axis)
            bits[axis] = bits[axis] >> b | (stratum >> axis * b & ((1u << b) - 1)) << (24 - b);
    }
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) at[axis] = coordinate(bits[axis]);
}

// Words of a sample of a window: its position has 33 bits, of which the third word of the counter holds the highest.
__device__ uint4 numbers_at(int64 position, unsigned use, const Boxes &window) {
    const uint64 at = static_cast<uint64>(position);
    return philox(static_cast<unsigned>(window.window), static_cast<unsigned>(window.window >> 32),
                  use << USE_SHIFT | static_cast<unsigned>(at >> 32), static_cast<unsigned>(at), window.key);
}

// Coordinates of the samples of a window by weights, from `begin` on, as linumpy.sampling.coordinates.weighted makes
// them. Cells lie along a line of length 2^63, in the order of boxes; the line has 2^levels parts, whose samples begin
// at `starts`.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw_in_parts(float *__restrict__ coords, const int64 *__restrict__ ids, const uint64 *__restrict__ cumulative,
                  const int64 *__restrict__ starts, int64 begin, const Draw how, const Boxes window) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= how.count) return;
    const int64 position = begin + i;
    const uint64 part = static_cast<uint64>(box_of(position, starts, window.levels));
    const uint4 random = numbers_at(position, USE_BINNED_CELL, window);
    const uint64 along =
        part << (63 - window.levels) | (static_cast<uint64>(random.x) << 32 | random.y) >> (1 + window.levels);
    const unsigned high = static_cast<unsigned>(along >> 31), low = static_cast<unsigned>(along << 1);
    // Equal cells are chosen by a fraction y + x / 2^32 of the list, others by 64 bits of which x holds the highest.
    const uint4 fraction = cumulative ? uint4{high, low, 0, 0} : uint4{low, high, 0, 0};
    const uint64 found = chosen_cell(how, cumulative ? nullptr : ids, cumulative, fraction);
    const uint64 cell = cumulative ? static_cast<uint64>(ids[found]) : found, row = cell / how.grid[2];
    const uint4 words = numbers_at(position, USE_BINNED_POINT, window);
    float *const at = coords + 3 * i;
    at[0] = in_cell(static_cast<unsigned>(cell % how.grid[2]), words.x, how.grid[2]);
    at[1] = in_cell(static_cast<unsigned>(row % how.grid[1]), words.y, how.grid[1]);
    at[2] = in_cell(static_cast<unsigned>(row / how.grid[1]), words.z, how.grid[0]);
}
