// Resample axes of an image by tables of weights: out[i] = sum over the window of i of weight * in.
//
// Smoothing and linear interpolation are both linear and separable, so one table of weights for each axis does both.
// Each voxel of the result has a window of the image, with boundaries folded into it (linumpy/gpu/resize/tables.py).
// A group is OUTPUTS neighbours of the result along an axis, which a thread computes together. For an axis of tiles,
// windows jump at the borders of tiles; a group across a border reads the range that spans all its windows.
//
// - `planes` resamples X and Y at once. A thread marches down PACK (or one) columns of the image with the sums of
//   OUTPUTS rows of the result in registers, so that every row is loaded once, in its own dtype; the weights of these
//   rows are one load, the same for all lanes. The sums go to a tile in shared memory, with a gap every 32 columns so
//   that lanes that read every second or fourth column have no bank conflicts. From there the block resamples along X.
// - `along` is the same march along any other axis; neighbouring lanes take neighbours along the axes after it.
// - `along_x` resamples X from global memory if a tile would not fit shared memory (an axis shrunk a thousandfold).
//
// Every sum is in the order of the axis, so that the result does not depend on tiles and launches. Zero-weight NaNs
// must not propagate, but the neighbours of a group share rows: sums that are not finite are recomputed without the rows
// of weight 0.
//
// A window is [first, first + count). In mode grid-wrap it may leave the axis at either end, by less than the length of
// the axis, and continues at the other end.
//
// Definitions: SOURCE, TARGET, COMPUTE (float or double), CLAMP (1: a sum is clamped to the range of the voxels that its
// group reads; weights add up to 1, so only rounding can exceed this range). No sizes of images. For speed only: OUTPUTS, PACK (elements of one
// load), UNROLL (rows in flight), BLOCKS (of 256 threads, on a multiprocessor).
#include "number.cuh"
#include "elements.cuh"

struct Window { int first, count; };
// The rows of the image that OUTPUTS neighbours need, and the first row of their weights.
struct Group { int first, count, start; };

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

__device__ __forceinline__ int around(int i, int n) { return i < 0 ? i + n : i >= n ? i - n : i; }

template <class T> struct IsFloat { static constexpr bool value = false; };
template <> struct IsFloat<half_bits> { static constexpr bool value = true; };
template <> struct IsFloat<float> { static constexpr bool value = true; };
template <> struct IsFloat<double> { static constexpr bool value = true; };

__device__ __forceinline__ float lesser(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ float greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double lesser(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ double greater(double a, double b) { return fmax(a, b); }

// Minimum and maximum of numbers, NaN ignored.
struct Bounds {
    COMPUTE low, high;
    __device__ __forceinline__ void set() {
        low = infinity();
        high = -infinity();
    }
    __device__ __forceinline__ void add(COMPUTE v) {
        low = lesser(low, v);
        high = greater(high, v);
    }
    __device__ __forceinline__ COMPUTE hold(COMPUTE v) const { return v < low ? low : v > high ? high : v; }
};

template <int N>
__device__ __forceinline__ void read_row(const SOURCE *in, const COMPUTE *weights, COMPUTE (&values)[N],
                                         Pack<COMPUTE, OUTPUTS> &w) {
    const Pack<SOURCE, N> here = *reinterpret_cast<const Pack<SOURCE, N> *>(in);
    w = *reinterpret_cast<const Pack<COMPUTE, OUTPUTS> *>(weights);
#pragma unroll
    for (int c = 0; c < N; ++c) values[c] = Widen<COMPUTE, SOURCE>::of(here.v[c]);
}

template <int N> __device__ __forceinline__ void clear(COMPUTE (&sums)[OUTPUTS][N]) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j)
#pragma unroll
        for (int c = 0; c < N; ++c) sums[j][c] = 0;
}

template <int N> __device__ __forceinline__ void clamp(const Bounds (&bounds)[N], COMPUTE (&sums)[OUTPUTS][N]) {
#pragma unroll
    for (int j = 0; CLAMP && j < OUTPUTS; ++j)
#pragma unroll
        for (int c = 0; c < N; ++c) sums[j][c] = bounds[c].hold(sums[j][c]);
}

// Compute the sums of N columns for the OUTPUTS neighbours of a group.
template <int N>
__device__ __forceinline__ void march(const SOURCE *in, int64 stride, int n, Group group, const COMPUTE *table,
                                      COMPUTE (&sums)[OUTPUTS][N]) {
    const COMPUTE *weights = table + static_cast<int64>(group.start) * OUTPUTS;
    Pack<COMPUTE, OUTPUTS> w;
    COMPUTE values[N], finite = 0;
    Bounds bounds[N];
    clear(sums);
#pragma unroll
    for (int c = 0; CLAMP && c < N; ++c) bounds[c].set();
#pragma unroll UNROLL
    for (int k = 0; k < group.count; ++k) {
        read_row<N>(in + around(group.first + k, n) * stride, weights + k * OUTPUTS, values, w);
#pragma unroll
        for (int c = 0; CLAMP && c < N; ++c) bounds[c].add(values[c]);
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j)
#pragma unroll
            for (int c = 0; c < N; ++c) sums[j][c] += w.v[j] * values[c];
    }
    clamp(bounds, sums);
    if (!IsFloat<SOURCE>::value) return;
    // A row that is NaN or infinite spoils neighbours whose windows do not contain it, since 0 times it is NaN. Such
    // sums are rare, and are recomputed more slowly.
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j)
#pragma unroll
        for (int c = 0; c < N; ++c) finite += sums[j][c] * 0;
    if (finite == 0) return;
    clear(sums);
#pragma unroll 1
    for (int k = 0; k < group.count; ++k) {
        read_row<N>(in + around(group.first + k, n) * stride, weights + k * OUTPUTS, values, w);
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j)
            if (w.v[j] != 0)
#pragma unroll
                for (int c = 0; c < N; ++c) sums[j][c] += w.v[j] * values[c];
    }
    clamp(bounds, sums);
}

template <int N>
__device__ __forceinline__ void column(const SOURCE *in, TARGET *out, Group group, const COMPUTE *table, int start,
                                       int n, int m, int64 inner) {
    COMPUTE sums[OUTPUTS][N];
    march<N>(in, inner, n, group, table, sums);
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) {
        if (start + j >= m) return;
        Pack<TARGET, N> result;
#pragma unroll
        for (int c = 0; c < N; ++c) result.v[c] = Narrow<TARGET, COMPUTE>::of(sums[j][c]);
        *reinterpret_cast<Pack<TARGET, N> *>(out + (start + j) * inner) = result;
    }
}

// (outer, n, inner) -> (outer, m, inner). `packed`: rows begin at multiples of PACK elements; it depends on the shape.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    along(const SOURCE *__restrict__ in, TARGET *__restrict__ out, const Group *__restrict__ groups,
          const COMPUTE *__restrict__ table, int64 outer, int n, int m, int64 inner, int packed) {
    const int64 packs = packed ? inner / PACK : inner, count = (m + OUTPUTS - 1) / OUTPUTS;
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= packs * count * outer) return;
    const int64 row = thread / packs, x = (thread - row * packs) * (packed ? PACK : 1);
    const int64 o = row / count;
    const int g = static_cast<int>(row - o * count);
    in += o * n * inner + x;
    out += o * m * inner + x;
    if (packed) column<PACK>(in, out, groups[g], table, g * OUTPUTS, n, m, inner);
    else column<1>(in, out, groups[g], table, g * OUTPUTS, n, m, inner);
}

// A column's index in a row of the tile, with a gap every 32 columns.
__device__ __forceinline__ int in_tile(int column) { return column + (column >> 5); }

// Rows of the result by columns of the image, N columns a thread.
template <int N>
__device__ __forceinline__ void fill(COMPUTE *tile, const SOURCE *in, const Group *groups, int count,
                                     const COMPUTE *table, Window span, int ny, int nx, int pitch) {
    const int packs = span.count / N;
    for (int task = threadIdx.x; task < packs * count; task += blockDim.x) {
        const int g = task / packs, column = (task - g * packs) * N;
        COMPUTE sums[OUTPUTS][N];
        march<N>(in + around(span.first + column, nx), nx, ny, groups[g], table, sums);
        COMPUTE *row = tile + g * OUTPUTS * pitch;
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j, row += pitch)
#pragma unroll
            for (int c = 0; c < N; ++c) row[in_tile(column + c)] = sums[j][c];
    }
}

// (outer, ny, nx) -> (outer, my, mx), in tiles of tile_groups * OUTPUTS rows and tile_width columns of the result.
// `spans` holds the columns of the image that each tile along X needs, whole packs of them where `packed`.
extern "C" __global__ void __launch_bounds__(256, BLOCKS)
    planes(const SOURCE *__restrict__ in, TARGET *__restrict__ out, const Group *__restrict__ groups,
           const COMPUTE *__restrict__ table_y, const Window *__restrict__ windows, const COMPUTE *__restrict__ table_x,
           const Window *__restrict__ spans, int ny, int my, int nx, int mx, int tile_width, int tile_groups, int pitch,
           int packed) {
    extern __shared__ COMPUTE tile[];
    const int across = (mx + tile_width - 1) / tile_width, all = (my + OUTPUTS - 1) / OUTPUTS;
    const int down = (all + tile_groups - 1) / tile_groups, block = static_cast<int>(blockIdx.x);
    const int number = block / across, tile_x = block - number * across;
    const int plane = number / down, first_group = (number - plane * down) * tile_groups;
    const int count = min(tile_groups, all - first_group);
    const Window span = spans[tile_x];
    in += static_cast<int64>(plane) * ny * nx;
    if (packed) fill<PACK>(tile, in, groups + first_group, count, table_y, span, ny, nx, pitch);
    else fill<1>(tile, in, groups + first_group, count, table_y, span, ny, nx, pitch);
    __syncthreads();

    const int x0 = tile_x * tile_width, width = min(tile_width, mx - x0);
    out += static_cast<int64>(plane) * my * mx + x0;
    for (int task = threadIdx.x; task < width * count; task += blockDim.x) {
        const int g = task / width, i = task - g * width, y0 = (first_group + g) * OUTPUTS;
        const Window window = windows[x0 + i];
        const COMPUTE *rows = tile + g * OUTPUTS * pitch, *weights = table_x + x0 + i;
        COMPUTE sums[OUTPUTS];
        Bounds bounds[OUTPUTS];
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) {
            sums[j] = 0;
            bounds[j].set();
        }
#pragma unroll UNROLL
        for (int k = 0; k < window.count; ++k) {
            const COMPUTE w = weights[static_cast<int64>(k) * mx];
            const COMPUTE *from = rows + in_tile(window.first - span.first + k);
#pragma unroll
            for (int j = 0; j < OUTPUTS; ++j) {
                const COMPUTE value = from[j * pitch];
                sums[j] += w * value;
                if (CLAMP) bounds[j].add(value);
            }
        }
#pragma unroll
        for (int j = 0; j < OUTPUTS; ++j) {
            const COMPUTE value = CLAMP ? bounds[j].hold(sums[j]) : sums[j];
            if (y0 + j < my) out[static_cast<int64>(y0 + j) * mx + i] = Narrow<TARGET, COMPUTE>::of(value);
        }
    }
}

// (outer, n) -> (outer, m), one thread for each element.
extern "C" __global__ void __launch_bounds__(256)
    along_x(const SOURCE *__restrict__ in, TARGET *__restrict__ out, const Window *__restrict__ windows,
            const COMPUTE *__restrict__ table, int64 outer, int n, int m) {
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= outer * m) return;
    const int64 o = thread / m;
    const int i = static_cast<int>(thread - o * m);
    const Window window = windows[i];
    in += o * n;
    COMPUTE sum = 0;
    Bounds bounds;
    bounds.set();
    for (int k = 0; k < window.count; ++k) {
        const COMPUTE w = table[static_cast<int64>(k) * m + i],
                      value = Widen<COMPUTE, SOURCE>::of(in[around(window.first + k, n)]);
        sum += w * value;
        if (CLAMP) bounds.add(value);
    }
    out[thread] = Narrow<TARGET, COMPUTE>::of(CLAMP ? bounds.hold(sum) : sum);
}
