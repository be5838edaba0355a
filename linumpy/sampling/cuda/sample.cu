// Values of a volume at given points, or at points that the kernel draws.
//
// Definitions: those of volume.cuh; TARGET (float, or int for labels), LABELS (1: values are the voxels, as integers),
// ORDER (of the spline: 0, 1 or 3; 3: the volume consists of coefficients), DRAW (1: the kernel draws the points and
// writes their coordinates), GRADIENT (1: it also writes derivatives along x, y and z), LONG (1: an axis has 2^22
// voxels or more), GROUPS (samples of a lane whose voxels are loaded at the same time), BLOCKS (minimum number of
// resident blocks per multiprocessor), AHEAD (1: the coordinates of the next tile are prefetched into the L2 cache).
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "volume.cuh"

#define FAST (ORDER == 1 && !LONG && !GRADIENT)

constexpr int THREADS = 256, WARPS = THREADS / 32;

#if ORDER == 0
// The voxel whose box holds the point.
__device__ __forceinline__ int nearest(float u, int n) {
    const float p = __fmaf_rd(u, static_cast<float>(n), 0.0f);
    return p > 0 ? static_cast<int>(fminf(p, static_cast<float>(n - 1))) : 0;
}
#elif ORDER == 3
__device__ __forceinline__ int mirrored(int i, int n) {
    if (static_cast<unsigned>(i) < static_cast<unsigned>(n)) return i;
    if (n == 1) return 0;
    const int period = 2 * n - 2;
    i = (i < 0 ? -i : i) % period;
    return i < n ? i : period - i;
}
struct Taps {
    int voxel[4];
    float w[4], slope[4];
};
__device__ __forceinline__ Taps taps_of(const Axis &at, int n) {
    const float t = at.f, s = 1 - t;
    Taps taps = {{},
                 {s * s * s / 6, (4 - 3 * t * t * (2 - t)) / 6, (4 - 3 * s * s * (2 - s)) / 6, t * t * t / 6},
                 {-s * s / 2, (3 * t * t - 4 * t) / 2, (4 * s - 3 * s * s) / 2, t * t / 2}};
#pragma unroll
    for (int k = 0; k < 4; ++k) taps.voxel[k] = mirrored(at.cell - 1 + k, n);
    return taps;
}
#endif

struct Result {
    float value, slope[3];  // derivatives along z, y and x, per voxel
};

#if ORDER == 1
__device__ __forceinline__ Result of_corners(const Corners &all, const Axis *at, const Volume &volume) {
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = as_value(all.v[k], volume);
    Result result = {trilinear(v, at), {0, 0, 0}};
#if GRADIENT
    const float x[4] = {v[1] - v[0], v[3] - v[2], v[5] - v[4], v[7] - v[6]};
    const float y[4] = {v[2] - v[0], v[3] - v[1], v[6] - v[4], v[7] - v[5]};
    const float z[4] = {v[4] - v[0], v[5] - v[1], v[6] - v[2], v[7] - v[3]};
    result.slope[2] = mix(mix(x[0], x[1], at[1].f), mix(x[2], x[3], at[1].f), at[0].f);
    result.slope[1] = mix(mix(y[0], y[1], at[2].f), mix(y[2], y[3], at[2].f), at[0].f);
    result.slope[0] = mix(mix(z[0], z[1], at[2].f), mix(z[2], z[3], at[2].f), at[1].f);
#endif
    return result;
}
#elif ORDER == 3
__device__ Result of_spline(const SOURCE *linear, const Axis *at, const Volume &volume) {
    const Taps z = taps_of(at[0], volume.dims[0]), y = taps_of(at[1], volume.dims[1]),
               x = taps_of(at[2], volume.dims[2]);
    Result result = {0, {0, 0, 0}};
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
        float plane = 0, along_y = 0, along_x = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const SOURCE *const row =
                linear + (static_cast<INDEX>(z.voxel[k]) * volume.dims[1] + y.voxel[j]) * volume.dims[2];
            float sum = 0, slope = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float v = as_value(row[x.voxel[i]], volume);
                sum = __fmaf_rn(x.w[i], v, sum);
                slope = __fmaf_rn(x.slope[i], v, slope);
            }
            plane = __fmaf_rn(y.w[j], sum, plane);
            along_y = __fmaf_rn(y.slope[j], sum, along_y);
            along_x = __fmaf_rn(y.w[j], slope, along_x);
        }
        result.value = __fmaf_rn(z.w[k], plane, result.value);
        result.slope[0] = __fmaf_rn(z.slope[k], plane, result.slope[0]);
        result.slope[1] = __fmaf_rn(z.w[k], along_y, result.slope[1]);
        result.slope[2] = __fmaf_rn(z.w[k], along_x, result.slope[2]);
    }
    return result;
}
#endif

#if ORDER == 1 && LAYOUT && !DRAW
// Whether the points of a warp follow each other along a row: they then share sectors of the volume itself.
__device__ __forceinline__ bool along_a_row(const Axis *at) {
    bool near = true;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        const int step = at[a].cell - __shfl_up_sync(0xffffffffu, at[a].cell, 1);
        near = near && step >= (a == 2 ? -4 : -1) && step <= (a == 2 ? 4 : 1);
    }
    return __popc(__ballot_sync(0xffffffffu, near)) >= 29;
}
#endif

#if !DRAW
__device__ __forceinline__ void read_coords(const float *coords, int64 begin, int64 count, float (*u)[3]) {
#pragma unroll
    for (int k = 0; k < GROUPS; ++k) {
        const int64 i = begin + 32 * k + threadIdx.x % 32;
        const float *const point = coords + 3 * (i < count ? i : count - 1);
#pragma unroll
        for (int a = 0; a < 3; ++a) u[k][a] = point[2 - a];
    }
}

__device__ __forceinline__ void prefetch_coords(const float *coords, int64 begin, int64 count) {
    constexpr int LINE = 32;  // floats
    const int64 at = 3 * begin + threadIdx.x % 32 * LINE;
#ifdef __CUDA_ARCH__
    if (threadIdx.x % 32 < GROUPS * 96 / LINE && at < 3 * count)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(coords + at));
#endif
}
#endif

// Each warp makes `march` tiles of GROUPS × 32 samples. The tiles of the warps of a block alternate, so that a warp
// finds rows in the cache that other warps have loaded.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sample(const SOURCE *__restrict__ linear, const SOURCE *__restrict__ packed, float *__restrict__ coords,
           TARGET *__restrict__ values, float *__restrict__ gradient, const Volume volume) {
#if DRAW
    __shared__ float4 staging[WARPS][GROUPS * 24];
#endif
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 first = (static_cast<int64>(blockIdx.x) * volume.march * WARPS + warp) * (GROUPS * 32);
#pragma unroll 1
    for (int m = 0; m < volume.march; ++m) {
        const int64 begin = first + static_cast<int64>(m) * (WARPS * GROUPS * 32);
        if (begin >= volume.count) return;
        float u[GROUPS][3];  // z, y, x
#if DRAW
#pragma unroll
        for (int k = 0; k < GROUPS; ++k) {
            const uint4 words = numbers(volume.first + begin + 32 * k + lane, USE_IID, 0, volume.key);
            u[k][0] = coordinate(words.z >> 8);
            u[k][1] = coordinate(words.y >> 8);
            u[k][2] = coordinate(words.x >> 8);
        }
#else
        read_coords(coords, begin, volume.count, u);
#if AHEAD
        if (m + 1 < volume.march) prefetch_coords(coords, begin + WARPS * GROUPS * 32, volume.count);
#endif
#endif
#if DRAW
        write_coords<GROUPS>(coords, reinterpret_cast<float *>(staging[warp]), u, begin, 0, volume.count,
                             volume.aligned);
#endif
#if ORDER == 0
        for (int c = 0; c < volume.channels; ++c)
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int64 i = begin + 32 * k + lane;
                const INDEX z = nearest(u[k][0], volume.dims[0]), y = nearest(u[k][1], volume.dims[1]);
                const SOURCE v = linear[c * volume.voxels + (z * volume.dims[1] + y) * volume.dims[2] +
                                        nearest(u[k][2], volume.dims[2])];
                if (i >= volume.count) continue;
#if LABELS
                store(values + c * volume.count + i, static_cast<TARGET>(v));
#else
                // The value of a point that is not finite is NaN.
                const float nan_or_0 = (u[k][0] - u[k][0]) + (u[k][1] - u[k][1]) + (u[k][2] - u[k][2]);
                store(values + c * volume.count + i, as_value(v, volume) + nan_or_0);
#endif
            }
#else
        Axis at[GROUPS][3];
#pragma unroll
        for (int k = 0; k < GROUPS; ++k)
#pragma unroll
            for (int a = 0; a < 3; ++a)
                at[k][a] = FAST ? along_linear(u[k][a], volume.dims[a]) : along(u[k][a], volume.dims[a]);
#if FAST && !DRAW
#pragma unroll
        for (int k = 0; k < GROUPS; ++k) at[k][0].f += nan_or_zero(u[k]);
#endif
#if ORDER == 1
#if LAYOUT && !DRAW
        const bool rows = along_a_row(at[0]);
#endif
        for (int c = 0; c < volume.channels; ++c) {
            Corners corners[GROUPS];
#if LAYOUT && !DRAW
            if (rows) {
#pragma unroll
                for (int k = 0; k < GROUPS; ++k) corners[k] = in_rows(linear + c * volume.voxels, at[k], volume);
            } else
#endif
            {
#pragma unroll
                for (int k = 0; k < GROUPS; ++k)
#if LAYOUT
                    corners[k] = in_layout(packed + c * volume.packed, at[k], volume);
#else
                    corners[k] = in_rows(linear + c * volume.voxels, at[k], volume);
#endif
            }
#else
        for (int c = 0; c < volume.channels; ++c) {
#endif
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int64 i = begin + 32 * k + lane;
#if ORDER == 1
                const Result result = of_corners(corners[k], at[k], volume);
#else
                const Result result = of_spline(linear + c * volume.voxels, at[k], volume);
#endif
                if (i >= volume.count) continue;
                store(values + c * volume.count + i, result.value);
#if GRADIENT
#pragma unroll
                for (int a = 0; a < 3; ++a)
                    store(gradient + (3 * c + a) * volume.count + i,
                          at[k][2 - a].inside ? result.slope[2 - a] * static_cast<float>(volume.dims[2 - a])
                                              : at[k][2 - a].f);
#endif
            }
        }
#endif
    }
}
