// Apply one pole of a B-spline's filter along one axis. Orders 2 and 3 have one pole; orders 4 and 5 have two, which
// are applied one after the other.
//
// Definitions: SOURCE, TARGET (float or double), COMPUTE (float or double), INDEX (int or int64: of elements), BLOCK
// (voxels of a step: 8, 16 or 32), THREADS (of a block), RESIDENT (blocks of a multiprocessor, at least), POLE_VALUE,
// MEMORY (voxels after which the start of a recursion has no effect; a multiple of 8, and for `spline_rows` of BLOCK /
// 2) and SHORT (voxels of an axis that is filtered by a matrix). Never a shape.
//
// The filter is a recursion forwards, c[i] = (1 - z)(1 - 1/z) x[i] + z c[i-1], and one backwards, d[i] = z (d[i+1] -
// c[i]), of a pole z between -1 and 0 (M. Unser, Splines: a perfect fit for signal and image processing, IEEE Signal
// Processing Magazine 16(6), 1999). In the code c is -z times this c, so that a step is one fused multiplication and
// addition. The effect of the start decays: for order 3, |z|^16 < 1e-9 and |z|^32 < 1e-18. So a recursion may begin
// anywhere, from 0, K = MEMORY voxels early. Beyond the ends it reads voxels of the image, mapped by the mode, so that
// the ends need no formulas. With two poles this holds for each: the result of the first pole continues beyond the ends
// as the image does.
//
// A thread marches along a line with K + BLOCK values of c in registers. A step reads BLOCK voxels and, by the backward
// recursion from the newest value, writes the BLOCK voxels that are K older. Each voxel is read once, before it is
// written, so that lines may be filtered in place; the voxels near a line's far end, where the backward recursion
// starts, are read before any is written. Few lines are cut into segments, each with its own thread; in place,
// `spline_boundaries` first computes the values that segments need from each other.
//
// Short axes (up to SHORT voxels) are multiplied by SciPy's own filter as a matrix: SciPy's mode `reflect` is inexact
// on those, and this package gives SciPy's results. Where SciPy pads an image before it filters (`nearest`,
// `grid-constant`), the kernels read the pad without making it.
#include "number.cuh"
#include "elements.cuh"

#define MIRROR 0
#define REFLECT 1
#define WRAP 2

constexpr int K = MEMORY;
constexpr int WINDOW = K + BLOCK;
constexpr COMPUTE POLE = static_cast<COMPUTE>(POLE_VALUE);
constexpr COMPUTE GAIN = static_cast<COMPUTE>((1.0 - (POLE_VALUE)) * (1.0 - (POLE_VALUE)));

// The axis that is filtered: `size` voxels of an image, continued at both ends by `pad` voxels (fewer than K: they are
// read before the last voxel is written) that repeat the image's ends or are constant.
struct Axis {
    int size, pad, fold;
    bool constant;
    COMPUTE value;

    __device__ __forceinline__ int whole() const { return size + 2 * pad; }
    // Map a voxel from anywhere to [0, whole). Short code, because it is inlined for every voxel of a window.
    __device__ __forceinline__ int folded(int p) const {
        const int n = whole(), at_start = fold == WRAP ? n : fold == MIRROR ? 0 : -1;
        const int at_end = fold == WRAP ? -n : fold == MIRROR ? 2 * n - 2 : 2 * n - 1;
        while (static_cast<unsigned>(p) >= static_cast<unsigned>(n))
            p = (fold == WRAP ? p : -p) + (p < 0 ? at_start : at_end);
        return p;
    }
    __device__ __forceinline__ bool is_constant(int p) const {
        return constant && static_cast<unsigned>(p - pad) >= static_cast<unsigned>(size);
    }
    // The voxel of the image that gives voxel p of the axis with its padding.
    __device__ __forceinline__ int voxel(int p) const { return min(max(p - pad, 0), size - 1); }
};

// Compute d for the BLOCK oldest voxels of a window. The segment ends `left` voxels after the window's first voxel,
// where d is `ending`.
template <bool AT_END>
__device__ __forceinline__ void recurse_back(const COMPUTE (&window)[WINDOW], int left, COMPUTE ending,
                                             COMPUTE (&coefficients)[BLOCK]) {
    COMPUTE d = 0;
#pragma unroll
    for (int k = WINDOW - 1; k >= 0; --k) {
        d = AT_END && k >= left ? ending : POLE * d + window[k];
        if (k < BLOCK) coefficients[k] = d;
    }
}
__device__ __forceinline__ void recurse(const COMPUTE (&window)[WINDOW], int left, COMPUTE ending,
                                        COMPUTE (&coefficients)[BLOCK]) {
    if (left >= WINDOW) recurse_back<false>(window, left, ending, coefficients);
    else recurse_back<true>(window, left, ending, coefficients);
}
__device__ __forceinline__ void advance(COMPUTE (&window)[WINDOW]) {
#pragma unroll
    for (int k = 0; k < K; ++k) window[k] = window[k + BLOCK];
}
// Compute d at the first voxel of a window, of which K values are filled.
__device__ __forceinline__ COMPUTE first_coefficient(const COMPUTE (&window)[WINDOW]) {
    COMPUTE d = 0;
#pragma unroll
    for (int k = K - 1; k >= 0; --k) d = POLE * d + window[k];
    return d;
}

struct Column {
    const SOURCE *from;
    INDEX step;

    __device__ __forceinline__ COMPUTE at(const Axis &axis, int p) const {
        if (axis.is_constant(p)) return axis.value;
        return Widen<COMPUTE, SOURCE>::of(from[static_cast<INDEX>(axis.voxel(p)) * step]);
    }
    // Fill the first K values of a window with c from voxel p on, and return c before p: `given`, if not null.
    __device__ __forceinline__ COMPUTE begin(const Axis &axis, int p, const COMPUTE *given,
                                             COMPUTE (&window)[WINDOW]) const {
        constexpr int BATCH = 8;  // unrolling all 2 K steps would be too much code
        COMPUTE c = 0, before = 0;
#pragma unroll 1
        for (int t = given ? 0 : -K; t < K; t += BATCH) {
            if (t == 0) c = before = given ? *given : c;
            COMPUTE x[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) x[j] = at(axis, axis.folded(p + t + j));
#pragma unroll
            for (int k = 0; k < K - BATCH; ++k) window[k] = window[k + BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) window[K - BATCH + j] = c = POLE * c + GAIN * x[j];
        }
        return before;
    }
    // Read BLOCK voxels from p on, none at `end` or beyond.
    __device__ __forceinline__ void take(const Axis &axis, int p, int end, COMPUTE (&window)[WINDOW]) const {
        COMPUTE x[BLOCK];
        const int i = p - axis.pad;
        if (i >= 0 && i + BLOCK <= axis.size && p + BLOCK <= end) {
            const SOURCE *const here = from + static_cast<INDEX>(i) * step;
            SOURCE raw[BLOCK];
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) raw[j] = here[j * step];
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) x[j] = Widen<COMPUTE, SOURCE>::of(raw[j]);
        } else {
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) x[j] = at(axis, min(p + j, end - 1));
        }
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) window[K + j] = POLE * window[K + j - 1] + GAIN * x[j];
    }
};

// Lines that are neighbours in memory: line l begins at (l / count) × in_a + (l % count) × in_b. Consecutive threads
// have consecutive lines, so that the reads of a warp are contiguous.
//
// states: null, or the output of `spline_boundaries`.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    spline_columns(const SOURCE *source, TARGET *target, const COMPUTE *states, int size, int pad, int fold,
                   int constant, double value, int segment, int segments, unsigned blocks, int64 lines, int64 count,
                   int64 in_a, int64 in_b, int64 in_step, int64 out_a, int64 out_b, int64 out_step) {
    const INDEX line = static_cast<INDEX>(blockIdx.x % blocks) * THREADS + static_cast<INDEX>(threadIdx.x);
    if (line >= lines) return;
    const Axis axis = {size, pad, fold, constant != 0, static_cast<COMPUTE>(value)};
    const int number = static_cast<int>(blockIdx.x / blocks);
    const int first = number * segment, end = min(axis.whole() - first, segment) + first;
    const INDEX a = line / static_cast<INDEX>(count), b = line - a * static_cast<INDEX>(count);
    const Column column = {source + a * in_a + b * in_b, static_cast<INDEX>(in_step)};
    const INDEX step = static_cast<INDEX>(out_step);
    TARGET *const to = target + a * out_a + b * out_b;

    COMPUTE window[WINDOW] = {}, coefficients[BLOCK], ending;
    if (states) {
        column.begin(axis, first, states + number * lines + line, window);
        ending = states[(segments + 1 + number) * lines + line];
    } else {
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {  // a loop, so that the code of `begin` is inlined once
            column.begin(axis, turn ? first : end, nullptr, window);
            if (!turn) ending = first_coefficient(window);
        }
    }
    for (int p = first; p < end; p += BLOCK) {
        column.take(axis, p + K, end, window);
        recurse(window, end - p, ending, coefficients);
        advance(window);
        TARGET *const here = to + static_cast<INDEX>(p) * step;
        if (p + BLOCK <= end) {
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) here[j * step] = static_cast<TARGET>(coefficients[j]);
        } else {
#pragma unroll
            for (int j = 0; j < BLOCK; ++j)
                if (p + j < end) here[j * step] = static_cast<TARGET>(coefficients[j]);
        }
    }
}

// Compute the values that the segments of a line need from each other: c before each segment, and d at its end.
//
// states: 2 × (segments + 1) × lines. Consecutive threads have consecutive lines.
extern "C" __global__ void __launch_bounds__(THREADS)
    spline_boundaries(const SOURCE *source, COMPUTE *states, int size, int pad, int fold, int constant, double value,
                      int segment, int segments, unsigned blocks, int64 lines, int64 count, int64 in_a, int64 in_b,
                      int64 in_step) {
    const INDEX line = static_cast<INDEX>(blockIdx.x % blocks) * THREADS + static_cast<INDEX>(threadIdx.x);
    if (line >= lines) return;
    const Axis axis = {size, pad, fold, constant != 0, static_cast<COMPUTE>(value)};
    const int number = static_cast<int>(blockIdx.x / blocks);
    const INDEX a = line / static_cast<INDEX>(count), b = line - a * static_cast<INDEX>(count);
    const Column column = {source + a * in_a + b * in_b, static_cast<INDEX>(in_step)};
    COMPUTE window[WINDOW] = {};
    const int p = number == segments ? axis.whole() : number * segment;
    states[number * lines + line] = column.begin(axis, p, nullptr, window);
    // The end of segment i is computed with the beginning of segment i + 1.
    if (number > 0) states[(segments + number) * lines + line] = first_coefficient(window);
}

// 32 rows of a warp, contiguous along the axis. A warp reads and writes along rows; each lane filters one row. Shared
// memory transposes between the two.
struct Rows {
    static constexpr int AT_ONCE = 32 / BLOCK;  // rows that one access of a warp reaches
    const SOURCE *from;
    INDEX pitch;
    int count;  // of rows: 32, fewer in the last warp
    COMPUTE (*tile)[BLOCK + 1];  // odd, so that lanes access different banks

    // Load BLOCK voxels of each row into the tile; `p`, in [0, whole), is the column of this lane's voxels.
    __device__ __forceinline__ void fetch(const Axis &axis, int p) const {
        const int lane = threadIdx.x % 32, column = lane % BLOCK, row = lane / BLOCK;
        const SOURCE *const here = from + axis.voxel(p);
        const bool is_constant = axis.is_constant(p);
        SOURCE raw[BLOCK];
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) raw[j] = here[static_cast<INDEX>(min(j * AT_ONCE + row, count - 1)) * pitch];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < BLOCK; ++j)
            tile[j * AT_ONCE + row][column] = is_constant ? axis.value : Widen<COMPUTE, SOURCE>::of(raw[j]);
        __syncwarp();
    }
    // As Column::begin; `given`, if not null, is c before voxel p.
    __device__ __forceinline__ void begin(const Axis &axis, int p, const COMPUTE *given,
                                          COMPUTE (&window)[WINDOW]) const {
        const int lane = threadIdx.x % 32;
        COMPUTE c = 0;
#pragma unroll
        for (int t = 0; t < 2 * K; t += BLOCK) {
            fetch(axis, axis.folded(p - K + t + lane % BLOCK));
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) {
                if (t + j == K && given) c = *given;
                c = POLE * c + GAIN * tile[lane][j];
                if (t + j >= K) window[t + j - K] = c;
            }
        }
    }
    __device__ __forceinline__ void take(const Axis &axis, int p, int end, COMPUTE (&window)[WINDOW]) const {
        const int lane = threadIdx.x % 32;
        fetch(axis, min(p + lane % BLOCK, end - 1));
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) window[K + j] = POLE * window[K + j - 1] + GAIN * tile[lane][j];
    }
};

// As `spline_columns`, for rows that are contiguous in memory.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    spline_rows(const SOURCE *source, TARGET *target, const COMPUTE *states, int size, int pad, int fold, int constant,
                double value, int segment, int segments, unsigned blocks, int64 lines, int64 in_pitch,
                int64 out_pitch) {
    __shared__ COMPUTE tiles[THREADS / 32][32][BLOCK + 1];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 top = (static_cast<int64>(blockIdx.x % blocks) * (THREADS / 32) + warp) * 32;
    if (top >= lines) return;
    const Axis axis = {size, pad, fold, constant != 0, static_cast<COMPUTE>(value)};
    const int number = static_cast<int>(blockIdx.x / blocks);
    const int first = number * segment, end = min(axis.whole() - first, segment) + first;
    const Rows rows = {source + top * in_pitch, static_cast<INDEX>(in_pitch),
                       static_cast<int>(min(lines - top, static_cast<int64>(32))), tiles[warp]};
    const INDEX pitch = static_cast<INDEX>(out_pitch);
    TARGET *to = target + top * out_pitch;

    COMPUTE window[WINDOW] = {}, coefficients[BLOCK], ending;
    if (states) {
        const COMPUTE *const mine = states + top + min(lane, rows.count - 1);
        ending = mine[(segments + 1 + number) * lines];
        rows.begin(axis, first, mine + number * lines, window);
    } else {
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            rows.begin(axis, turn ? first : end, nullptr, window);
            if (!turn) ending = first_coefficient(window);
        }
    }
    const int column = lane % BLOCK, row = lane / BLOCK;
    for (int p = first; p < end; p += BLOCK) {
        rows.take(axis, p + K, end, window);
        recurse(window, end - p, ending, coefficients);
        advance(window);
#pragma unroll
        for (int j = 0; j < BLOCK; ++j) rows.tile[lane][j] = coefficients[j];
        __syncwarp();
        if (p + column < end) {
            TARGET *const here = to + p + column;
#pragma unroll
            for (int j = 0; j < BLOCK; ++j) {
                const int i = j * Rows::AT_ONCE + row;
                if (i < rows.count) here[static_cast<INDEX>(i) * pitch] = static_cast<TARGET>(rows.tile[i][column]);
            }
        }
    }
}

// Filter axes of up to SHORT voxels by the matrix of the filter. Lines are as in `spline_columns`.
extern "C" __global__ void __launch_bounds__(THREADS)
    spline_short(const SOURCE *source, TARGET *target, const double *matrix, int size, int64 lines, int64 count,
                 int64 in_a, int64 in_b, int64 in_step, int64 out_a, int64 out_b, int64 out_step) {
    const INDEX line = static_cast<INDEX>(blockIdx.x) * THREADS + static_cast<INDEX>(threadIdx.x);
    if (line >= lines) return;
    const INDEX a = line / static_cast<INDEX>(count), b = line - a * static_cast<INDEX>(count);
    const SOURCE *const from = source + a * in_a + b * in_b;
    TARGET *const to = target + a * out_a + b * out_b;
    COMPUTE x[SHORT];
#pragma unroll
    for (int k = 0; k < SHORT; ++k) x[k] = k < size ? Widen<COMPUTE, SOURCE>::of(from[k * in_step]) : COMPUTE(0);
    for (int i = 0; i < size; ++i) {
        COMPUTE sum = 0;
#pragma unroll
        for (int k = 0; k < SHORT; ++k)
            if (k < size) sum += static_cast<COMPUTE>(matrix[i * size + k]) * x[k];
        to[i * out_step] = static_cast<TARGET>(sum);
    }
}
