// Coordinates of random points. The native core (core/src/draw.cpp) compiles this source for the host, with blocks of one
// thread.
//
// Definitions: THREADS (of a block).
#include "philox.cuh"
#include "boxes.cuh"

struct Draw {
    uint64 first;  // number of the first sample
    int64 count;
    uint64 cells;  // number of entries of `ids` or `cumulative`
    Key key;
    int use;
    int strata_bits;  // binary logarithm of the strata along an axis
    int grid[3];  // cells of the grid of weights along z, y and x
};
static_assert(sizeof(Draw) == 56, "linumpy.sampling.coordinates.draws writes 56 bytes");

// Sobol's sequence in the order of Gray codes, for the low 32 bits of the index, shifted at random: each 2^32 points have
// another shift. These recurrences give the direction numbers of S. Joe and F. Kuo (2008) for three dimensions.
__device__ uint4 sobol(uint64 index, Key key) {
    const unsigned low = static_cast<unsigned>(index), gray = low ^ (low >> 1);
    uint4 words = numbers(index >> 32, USE_SOBOL, 0, key);
    unsigned x = 1u << 31, y = 1u << 31, z = 1u << 31, next_z = 3u << 30;
    for (int bit = 0; bit < 32; ++bit) {
        const unsigned mask = 0u - (gray >> bit & 1);
        words.x ^= mask & x;
        words.y ^= mask & y;
        words.z ^= mask & z;
        x >>= 1;
        y ^= y >> 1;
        const unsigned after = next_z ^ z ^ (z >> 2);
        z = next_z;
        next_z = after;
    }
    return words;
}

// A permutation of the integers below 2^bits; other words give another one. Multiplying by an odd number and
// exclusive-or with higher bits are both invertible.
__device__ unsigned shuffled(unsigned index, uint4 words, int bits) {
    const unsigned mask = (1u << bits) - 1, shift = (bits + 1) / 2;
    const unsigned keys[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int round = 0; round < 4; ++round) {
        index = (index * (keys[round] | 1) + (keys[round] >> 7)) & mask;
        index ^= index >> shift;
    }
    return index;
}

// Choose a cell of the grid of weights: from `ids`, cells of equal weight, or by cumulative weights up to 2^63.
__device__ uint64 chosen_cell(const Draw &method, const int64 *ids, const uint64 *cumulative, uint4 words) {
    if (ids) {
        const uint64 low = words.x * method.cells >> 32;
        return static_cast<uint64>(ids[words.y * method.cells + low >> 32]);
    }
    const uint64 weight = (static_cast<uint64>(words.x) << 32 | words.y) >> 1;
    uint64 begin = 0, end = method.cells;
    while (begin < end) {
        const uint64 middle = (begin + end) / 2;
        if (cumulative[middle] > weight) end = middle;
        else begin = middle + 1;
    }
    return begin;
}

// Where float32 rounds a coordinate to the upper border of its cell, which is part of the next cell, it becomes the
// next smaller number. Such a coordinate is never 0.
__device__ __forceinline__ float in_cell(unsigned cell, unsigned word, int cells) {
    const float coord = static_cast<float>((cell + (word + 0.5) * 2.3283064365386963e-10) / cells);
    return static_cast<double>(coord) * cells >= cell + 1.0 ? __int_as_float(__float_as_int(coord) - 1) : coord;
}

__device__ __forceinline__ void write_in_cell(float *at, uint64 cell, const uint4 &words, const Draw &method) {
    const uint64 row = cell / method.grid[2];
    at[0] = in_cell(static_cast<unsigned>(cell % method.grid[2]), words.x, method.grid[2]);
    at[1] = in_cell(static_cast<unsigned>(row % method.grid[1]), words.y, method.grid[1]);
    at[2] = in_cell(static_cast<unsigned>(row / method.grid[1]), words.z, method.grid[0]);
}

// Write the coordinates of samples `first` to `first` + `count` of a stream.
extern "C" __global__ void __launch_bounds__(THREADS) draw(float *__restrict__ coords, const int64 *__restrict__ ids,
                                                           const uint64 *__restrict__ cumulative, const Draw method) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= method.count) return;
    const uint64 index = method.first + i;
    float *const at = coords + 3 * i;
    uint4 words = method.use == USE_SOBOL ? sobol(index, method.key) : numbers(index, method.use, 0, method.key);
    if (method.use == USE_WEIGHTED) {
        const uint64 cell = chosen_cell(method, ids, cumulative, numbers(index, USE_CELL, 0, method.key));
        write_in_cell(at, cell, words, method);
        return;
    }
    unsigned bits[3] = {words.x >> 8, words.y >> 8, words.z >> 8};
    if (method.use == USE_STRATIFIED) {
        const int b = method.strata_bits;
        const unsigned within = static_cast<unsigned>(index & ((1ull << 3 * b) - 1));
        const unsigned stratum = shuffled(within, numbers(index >> 3 * b, USE_STRATA, 0, method.key), 3 * b);
#pragma unroll
        for (int axis = 0; axis < 3; ++axis)
            bits[axis] = bits[axis] >> b | (stratum >> axis * b & ((1u << b) - 1)) << (24 - b);
    }
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) at[axis] = coordinate(bits[axis]);
}

// Words of a sample of a window; the third word of the counter holds the highest of the position's 33 bits.
__device__ uint4 numbers_at(int64 position, unsigned use, const Boxes &window) {
    const uint64 bits = static_cast<uint64>(position);
    return philox(static_cast<unsigned>(window.window), static_cast<unsigned>(window.window >> 32),
                  use << USE_SHIFT | static_cast<unsigned>(bits >> 32), static_cast<unsigned>(bits), window.key);
}

// Write the coordinates of the samples of a window by weights, from `begin` on. Cells lie along a line of length 2^63, sorted by boxes. The line has 2^levels
// equal parts, whose first samples are `starts`.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw_in_parts(float *__restrict__ coords, const int64 *__restrict__ ids, const uint64 *__restrict__ cumulative,
                  const int64 *__restrict__ starts, int64 begin, const Draw method, const Boxes window) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= method.count) return;
    const int64 position = begin + i;
    const uint64 part = static_cast<uint64>(box_of(position, starts, window.levels));
    const uint4 random = numbers_at(position, USE_BINNED_CELL, window);
    const uint64 along =
        part << (63 - window.levels) | (static_cast<uint64>(random.x) << 32 | random.y) >> (1 + window.levels);
    const unsigned high = static_cast<unsigned>(along >> 31), low = static_cast<unsigned>(along << 1);
    // Cells of equal weight are chosen by a fraction y + x / 2^32 of the list, others by 64 bits, x the highest.
    const uint4 fraction = cumulative ? uint4{high, low, 0, 0} : uint4{low, high, 0, 0};
    const uint64 entry = chosen_cell(method, cumulative ? nullptr : ids, cumulative, fraction);
    const uint64 cell = cumulative ? static_cast<uint64>(ids[entry]) : entry;
    const uint4 words = numbers_at(position, USE_BINNED_POINT, window);
    write_in_cell(coords + 3 * i, cell, words, method);
}

// Write the coordinates of samples `begin` to `begin` + `count` of the window, which are sorted by box.
extern "C" __global__ void __launch_bounds__(THREADS)
    draw_boxes(float *__restrict__ coords, const int64 *__restrict__ starts, int64 begin, int64 count,
               const Boxes boxes) {
    const int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= count) return;
    const int64 position = begin + i;
    unsigned at[3];
    int halved[3];
    indices_of(boxes, static_cast<int>(box_of(position, starts, boxes.levels)), at, halved);
    const uint4 words = numbers(boxes.window, USE_BINNED, call_of(position), boxes.key);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis)
        coords[3 * i + 2 - axis] = coordinate(bits_in_box(field_of(words, position & 1, axis), at[axis], halved[axis]));
}
