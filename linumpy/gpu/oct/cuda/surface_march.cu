// Find the tissue surface by marching: a thread walks along an axis with the values of its window in registers, so that
// every voxel is read once and its logarithm taken once. For common window sizes; surface.cu has the general kernels.
//
// Compiled for SOURCE, LOG, CUTTING and EDGE as surface.cu, for S (voxels of the mean, 1 to 32), RADIUS (of the
// derivative, 1 to 16) and, for march_lines, THREADS (of a block, 256 or 512), never for a shape. Strides are in
// elements. Lateral axes are called a (outer) and b (inner).
//
// A march advances by eight rows (GROUP) at a time. The window of its first mean begins S - 1 rows before the window's
// last row: march_lines reads these rows first; the other kernels march over them without storing means.

#include "number.cuh"
#include "surface.cuh"

// The values of the windows of GROUP neighbouring means; the last GROUP values are new in each step.
struct Windows {
    float value[S + GROUP - 1];
    __device__ Windows() {
#pragma unroll
        for (int k = 0; k < S + GROUP - 1; ++k) value[k] = 0.0f;
    }
    __device__ void advance() {
#pragma unroll
        for (int k = 0; k < S - 1; ++k) value[k] = value[k + GROUP];
    }
    // Nothing is subtracted from sums: they do not drift, and equal values have equal sums.
    __device__ void sums(float (&sum)[GROUP]) const {
        if (S < GROUP) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                sum[j] = value[j];
#pragma unroll
                for (int k = 1; k < S; ++k) sum[j] += value[j + k];
            }
            return;
        }
        // The values that all windows share, then the values before and after these.
        float total = 0.0f;
#pragma unroll
        for (int k = GROUP - 1; k < S; ++k) total += value[k];
#pragma unroll
        for (int j = GROUP - 1; j >= 0; --j) {
            if (j < GROUP - 1) total += value[j];
            sum[j] = total;
        }
        total = 0.0f;
#pragma unroll
        for (int j = 1; j < GROUP; ++j) {
            total += value[S - 1 + j];
            sum[j] += total;
        }
    }
};

// Read GROUP values along an axis of n from i on; values beyond its ends are mirrored.
template <class T>
__device__ inline void fetch(const T *__restrict__ line, int64 stride, int i, int n, T (&value)[GROUP]) {
    if (i >= 0 && i + GROUP <= n) {
        const T *const from = line + i * stride;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) value[j] = from[j * stride];
    } else {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) value[j] = line[reflected(i + j, n) * stride];
    }
}

// Where depth is contiguous: compute the mean over S voxels along a, at all (b, z). A thread computes `segment` means.
extern "C" __global__ void __launch_bounds__(256)
    march_rows(const SOURCE *__restrict__ vol, float *__restrict__ mean, int64 stride_a, int64 stride_b, int64 stride_z,
               int size_a, int first_a, int count_a, int depth, int64 plane, unsigned blocks, int segment,
               const float *__restrict__ zero_written) {
    const float zero = zero_log(zero_written);
    const int64 i = static_cast<int64>(blockIdx.x % blocks) * blockDim.x + threadIdx.x;
    if (i >= plane) return;
    const int begin = static_cast<int>(blockIdx.x / blocks) * segment;
    const int rows = count_a - begin < segment ? count_a - begin : segment, last = rows + S - 1;
    const SOURCE *const line = vol + i / depth * stride_b + i % depth * stride_z;
    float *to = mean + static_cast<int64>(begin - (S - 1)) * plane + i;
    const float scale = 1.0f / S;
    int from = first_a + begin - S / 2;
    Windows windows;
    SOURCE next[GROUP];
    fetch(line, stride_a, from, size_a, next);
    for (int m = 0; m < last; m += GROUP, to += GROUP * plane) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) windows.value[S - 1 + j] = intensity(next[j], zero);
        if (m + GROUP < last) fetch(line, stride_a, from += GROUP, size_a, next);
        float sum[GROUP];
        windows.sums(sum);
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (static_cast<unsigned>(m + j - (S - 1)) < static_cast<unsigned>(rows)) to[j * plane] = sum[j] * scale;
        windows.advance();
    }
}

// Where b is contiguous: compute the mean over S x S voxels. A block takes STRIP columns of a plane and marches along
// a; sums along b are computed in shared memory, sums along a in registers.
constexpr int STRIP = 256, HALO = S - 1;
constexpr int TILE_PITCH = 292, SUMS_PITCH = 260;  // 4 more than a multiple of 32: rows of a quarter warp's accesses
struct alignas(16) Four { float at[4]; };

extern "C" __global__ void __launch_bounds__(256)
    march_strip(const SOURCE *__restrict__ vol, float *__restrict__ mean, int64 stride_a, int64 stride_b,
                int64 stride_z, int size_a, int size_b, int first_a, int count_a, unsigned strips, unsigned segments,
                int segment, const float *__restrict__ zero_written) {
    const float zero = zero_log(zero_written);
    __shared__ Four tile_words[GROUP * TILE_PITCH / 4];
    __shared__ Four sums_words[GROUP * SUMS_PITCH / 4];
    float *const tile = tile_words[0].at, *const sums = sums_words[0].at;
    unsigned rest = blockIdx.x;
    const int b0 = static_cast<int>(rest % strips) * STRIP;
    rest /= strips;
    const int begin = static_cast<int>(rest % segments) * segment;
    const int64 z = rest / segments;
    const int t = static_cast<int>(threadIdx.x);
    const int rows = count_a - begin < segment ? count_a - begin : segment, last = rows + S - 1;

    // A thread fetches a column of GROUP rows, and one voxel beyond the strip.
    const SOURCE *const line = vol + z * stride_z + reflected(b0 - S / 2 + t, size_b) * stride_b;
    const int halo_row = HALO ? t / (HALO ? HALO : 1) : GROUP, halo_column = STRIP + t - halo_row * HALO;
    const bool has_halo = halo_row < GROUP;
    const SOURCE *const halo =
        vol + z * stride_z + (has_halo ? reflected(b0 - S / 2 + halo_column, size_b) * stride_b : 0);
    int from = first_a + begin - S / 2;
    SOURCE next[GROUP], beyond{};
    fetch(line, stride_a, from, size_a, next);
    if (has_halo) beyond = halo[reflected(from + halo_row, size_a) * stride_a];

    Windows down;
    const float scale = 1.0f / (S * S);
    const int row = t % GROUP, group = t / GROUP;
    float *to = mean + (z * count_a + begin - (S - 1)) * size_b + b0 + t;
    for (int m = 0; m < last; m += GROUP, to += static_cast<int64>(GROUP) * size_b) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) tile[j * TILE_PITCH + t] = intensity(next[j], zero);
        if (has_halo) tile[halo_row * TILE_PITCH + halo_column] = intensity(beyond, zero);
        __syncthreads();
        if (m + GROUP < last) {
            fetch(line, stride_a, from += GROUP, size_a, next);
            if (has_halo) beyond = halo[reflected(from + halo_row, size_a) * stride_a];
        }
        Windows along;
        float sum[GROUP];
        const Four *const here = reinterpret_cast<const Four *>(tile + row * TILE_PITCH + group * GROUP);
#pragma unroll
        for (int k = 0; k < (S + GROUP + 2) / 4; ++k) {
            const Four four = here[k];
#pragma unroll
            for (int q = 0; q < 4; ++q)
                if (4 * k + q < S + GROUP - 1) along.value[4 * k + q] = four.at[q];
        }
        along.sums(sum);
        Four *const there = reinterpret_cast<Four *>(sums + row * SUMS_PITCH + group * GROUP);
        there[0] = {sum[0], sum[1], sum[2], sum[3]};
        there[1] = {sum[4], sum[5], sum[6], sum[7]};
        __syncthreads();
#pragma unroll
        for (int j = 0; j < GROUP; ++j) down.value[S - 1 + j] = sums[j * SUMS_PITCH + t];
        down.sums(sum);
        if (b0 + t < size_b) {
#pragma unroll
            for (int j = 0; j < GROUP; ++j)
                if (static_cast<unsigned>(m + j - (S - 1)) < static_cast<unsigned>(rows))
                    to[static_cast<int64>(j) * size_b] = sum[j] * scale;
        }
        down.advance();
    }
}

// Compute the profile at GROUP neighbouring voxels of a line, from value[BEFORE] on. Pairs of voxels are added, or for
// an odd derivative subtracted, before they are weighted, so that a constant line gives exact zeros.
template <int BEFORE>
__device__ inline void profiles(const float (&value)[2 * BEFORE + GROUP], const float *weights, float sign,
                                float (&out)[GROUP]) {
#pragma unroll
    for (int d = 0; d < GROUP; ++d) out[d] = weights[0] * value[BEFORE + d];
#pragma unroll
    for (int k = 1; k <= RADIUS; ++k) {
#pragma unroll
        for (int d = 0; d < GROUP; ++d) out[d] += weights[k] * (value[BEFORE + d + k] + sign * value[BEFORE + d - k]);
    }
}

// The same at one voxel of a line in shared memory.
__device__ inline float profile_at(const float *here, const float *weights, float sign) {
    float out = weights[0] * here[0];
#pragma unroll
    for (int k = 1; k <= RADIUS; ++k) out += weights[k] * (here[k] + sign * here[-k]);
    return out;
}

// Where b is contiguous: find the maximum of each profile of a smoothed volume, one thread for each A-line.
extern "C" __global__ void __launch_bounds__(128)
    march_columns(const float *__restrict__ mean, Depth *__restrict__ surface, float *__restrict__ contrast,
                  const float *__restrict__ given, const float *__restrict__ smoothing, int odd, Rule rule,
                  int64 stride_z, int count_a, int size_b, int depth, int64 to_a, int64 to_b) {
    const int64 line = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (line >= static_cast<int64>(count_a) * size_b) return;
    const float *const from = mean + line;
    float weights[RADIUS + 1], value[2 * RADIUS + GROUP], next[GROUP], profile[GROUP];
#pragma unroll
    for (int k = 0; k <= RADIUS; ++k) weights[k] = given[k];
#if CUTTING
    float level[RADIUS + 1];
#pragma unroll
    for (int k = 0; k <= RADIUS; ++k) level[k] = smoothing[k];
#endif
#pragma unroll
    for (int k = 0; k < 2 * RADIUS; ++k) value[k] = from[reflected(k - RADIUS, depth) * stride_z];
    const float sign = odd ? -1.0f : 1.0f;
    Steepest steepest;
    fetch(from, stride_z, RADIUS, depth, next);
    for (int z = 0; z < depth; z += GROUP) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) value[2 * RADIUS + j] = next[j];
        if (z + GROUP < depth) fetch(from, stride_z, z + GROUP + RADIUS, depth, next);
        profiles<RADIUS>(value, weights, sign, profile);
#pragma unroll
        for (int d = 0; d < GROUP; ++d)
            if (z + d < depth) steepest.add(profile[d], z + d);
#if CUTTING
        profiles<RADIUS>(value, level, 1.0f, profile);
#pragma unroll
        for (int d = 0; d < GROUP; ++d)
            if (z + d < depth) steepest.add_level(profile[d], z + d);
#endif
#pragma unroll
        for (int k = 0; k < 2 * RADIUS; ++k) value[k] = value[k + GROUP];
    }
    const int64 a = line / size_b, to = a * to_a + (line - a * size_b) * to_b;
    surface[to] = steepest.surface(rule, depth);
#if EDGE
    contrast[to] = steepest.contrast(rule, depth);
#endif
}

// Where depth is contiguous and has RADIUS + GROUP to THREADS voxels. A block marches along b, with a thread for each
// voxel of depth, until LINES smoothed lines lie in shared memory. Then each line is shared by WORKERS threads, each of
// which takes every WORKERS-th group of its voxels; at the end the maximum of the line is chosen from theirs.
constexpr int LINES = THREADS > 256 ? 16 : 32, WORKERS = THREADS / LINES;
constexpr int REACH = (RADIUS + 3) / 4 * 4;  // whole accesses of four
constexpr int MARGIN = 16;  // mirrored voxels before and after a line, at most
constexpr int PITCH = THREADS + 2 * MARGIN + 4;  // 4 more than a multiple of 32: eight lines' Fours fill all banks
constexpr int LINE_BLOCKS = (S + RADIUS < 24 ? 768 : 512) / THREADS;  // as registers allow

extern "C" __global__ void __launch_bounds__(THREADS, LINE_BLOCKS)
    march_lines(const float *__restrict__ mean, Depth *__restrict__ surface, float *__restrict__ contrast,
                const float *__restrict__ given, const float *__restrict__ smoothing, int odd, Rule rule, int size_b,
                int depth, unsigned segments, int segment, int64 to_a, int64 to_b) {
    __shared__ Four lines_words[LINES * PITCH / 4];
    __shared__ Four weights_words[MARGIN / 4 + 1];
    __shared__ Candidate rises[THREADS];
#if CUTTING
    __shared__ Candidate levels[THREADS];
    __shared__ Four level_words[MARGIN / 4 + 1];
#endif
#if EDGE
    __shared__ float energies[THREADS];
#endif
    float *const smooth = lines_words[0].at;
    const int t = static_cast<int>(threadIdx.x), line = t % LINES, worker = t / LINES;
    const int64 a = blockIdx.x / segments;
    const int begin = static_cast<int>(blockIdx.x % segments) * segment;
    const int lines = size_b - begin < segment ? size_b - begin : segment;
    const bool inside = t < depth;
    // Mirror images of this voxel, beyond either end.
    const bool above = t < RADIUS, below = inside && t >= depth - RADIUS;
    const float *const column = mean + a * size_b * depth + t;
    const float sign = odd ? -1.0f : 1.0f;
    // The weights include the division of the mean by S.
    if (t < 4 * (MARGIN / 4 + 1)) {
        weights_words[0].at[t] = t <= RADIUS ? given[t] * (1.0f / S) : 0.0f;
#if CUTTING
        level_words[0].at[t] = t <= RADIUS ? smoothing[t] * (1.0f / S) : 0.0f;
#endif
    }

    Windows windows;
    float next[GROUP], sum[GROUP];
    int from = begin - S / 2;
    if (inside) {
#pragma unroll
        for (int k = 0; k < S - 1; ++k) {
            const int64 row = reflected(from + k, size_b);
            windows.value[k] = column[row * depth];
        }
        fetch(column, depth, from += S - 1, size_b, next);
    }
    for (int m = 0; m < lines; m += LINES) {
        if (inside) {
#pragma unroll
            for (int g = 0; g < LINES; g += GROUP) {
#pragma unroll
                for (int j = 0; j < GROUP; ++j) windows.value[S - 1 + j] = next[j], next[j] = 0.0f;
                if (m + g + GROUP < lines) fetch(column, depth, from += GROUP, size_b, next);
                windows.sums(sum);
                windows.advance();
                float *const here = smooth + g * PITCH + MARGIN;
#pragma unroll
                for (int j = 0; j < GROUP; ++j) here[j * PITCH + t] = sum[j];
                if (above) {
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) here[j * PITCH - 1 - t] = sum[j];
                }
                if (below) {
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) here[j * PITCH + 2 * depth - 1 - t] = sum[j];
                }
            }
        }
        __syncthreads();
        Steepest steepest;
        // The last warps have the least to smooth: they take the first voxels.
        for (int z = (WORKERS - 1 - worker) * GROUP; z < depth; z += WORKERS * GROUP) {
            float value[2 * REACH + GROUP], weights[RADIUS + 4], profile[GROUP];
            const Four *const here = lines_words + (line * PITCH + MARGIN + z - REACH) / 4;
#pragma unroll
            for (int k = 0; k < 2 * REACH + GROUP; k += 4) {
                const Four four = here[k / 4];
#pragma unroll
                for (int q = 0; q < 4; ++q) value[k + q] = four.at[q];
            }
#pragma unroll
            for (int k = 0; k <= RADIUS; k += 4) {
                const Four four = weights_words[k / 4];
#pragma unroll
                for (int q = 0; q < 4; ++q) weights[k + q] = four.at[q];
            }
            profiles<REACH>(value, weights, sign, profile);
            if (z + GROUP > depth) {
#pragma unroll
                for (int d = 1; d < GROUP; ++d)
                    if (z + d >= depth) profile[d] = __int_as_float(0x7fffffff);  // NaN is never the largest
            }
#pragma unroll
            for (int d = 0; d < GROUP; ++d) steepest.add(profile[d], z + d);
#if CUTTING
#pragma unroll
            for (int k = 0; k <= RADIUS; k += 4) {
                const Four four = level_words[k / 4];
#pragma unroll
                for (int q = 0; q < 4; ++q) weights[k + q] = four.at[q];
            }
            profiles<REACH>(value, weights, 1.0f, profile);
#pragma unroll
            for (int d = 0; d < GROUP; ++d)
                if (z + d < depth) steepest.add_level(profile[d], z + d);
#endif
        }
        rises[t] = {steepest.rise, steepest.at_rise};
#if CUTTING
        levels[t] = {steepest.level, steepest.at_level};
#endif
#if EDGE
        energies[t] = steepest.energy;
#endif
        __syncthreads();
        // All threads have read the lines: they may be overwritten while the last threads choose.
        if (worker == WORKERS - 1 && m + line < lines) {
            for (int w = 0; w < WORKERS - 1; ++w) {
                choose(rises[w * LINES + line], steepest.rise, steepest.at_rise);
#if CUTTING
                choose(levels[w * LINES + line], steepest.level, steepest.at_level);
#endif
#if EDGE
                steepest.energy += energies[w * LINES + line];
#endif
            }
            const int64 to = a * to_a + (begin + m + line) * to_b;
#if EDGE
            const float *const here = smooth + line * PITCH + MARGIN;
            if (steepest.at_rise > 0 && steepest.at_rise < depth - 1) {
                steepest.before = profile_at(here + steepest.at_rise - 1, weights_words[0].at, sign);
                steepest.after = profile_at(here + steepest.at_rise + 1, weights_words[0].at, sign);
            }
            contrast[to] = steepest.contrast(rule, depth);
#endif
            surface[to] = steepest.surface(rule, depth);
        }
#if EDGE
        __syncthreads();  // the last threads have read the lines again
#endif
    }
}
