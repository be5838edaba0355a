// Find the tissue surface: logarithm and lateral mean, then the derivative along depth and the voxel of its maximum.
//
// Two or three kernels, with the float32 means between them, for blocks of rows of at most 512 MiB of means. The memory
// order of the volume determines which. The profile of an A-line is its smoothed derivative along depth.
//
// - A lateral axis is contiguous (`mean_tile`, `steepest_columns`): a block loads the logarithms of a tile of 32 × 64
//   voxels and its rim into shared memory and sums along both axes there. Then a thread walks down each A-line, 8
//   voxels at a step, with the voxels of its Gaussian in registers.
// - Depth is contiguous (`mean_along`, `steepest_lines`): the mean along one lateral axis, with lanes along depth. Then
// a block computes the mean along the other axis of eight A-lines in shared memory, and a warp finds the maximum of the
// profile of each.
// - Smoothing over more voxels than a tile has room for, or A-lines that exceed shared memory: three kernels,
//   `mean_along` twice, then `steepest_columns`.
//
// For common window sizes surface_march.cu has faster kernels for the first two cases. Pairs of voxels above and
// below are subtracted before they are weighted, so that a constant A-line has a profile of exact zeros, as in SciPy.
//
// Voxels that are not positive have no logarithm. With LOG 1 their value is 0 (the logarithm of 1), so that the surface
// depends on the unit of intensity. With LOG 2 the kernels read their value from device memory: the caller's, or the
// output of `log_of_zero`, which is two standard deviations and 1 below the mean logarithm of the positive voxels of a
// sample on a regular grid, so that the surface is the same in every unit.
//
// Steep surfaces: a mean over s voxels spreads a step of slope m over m·s voxels of depth. Where no edge stands out,
// `look_again` takes a mean over 3 × 3 A-lines and a Gaussian twice as wide along depth. In a short A-line the profile
// is a poor estimate of the noise, so the edge must also be `min_contrast` times the noise of differences of
// neighbouring voxels. The surface of an A-line without an edge is 0 if the first smoothed voxel exceeds the mean of
// the line by `min_contrast` times the noise (tissue from the first voxel on, with attenuation); infinity if the
// variance of the smoothed voxels is four times that of noise; else NaN: no tissue.
//
// Compiled for SOURCE (type of a voxel), LOG (0: intensity itself, 1: its logarithm, 2: its logarithm, with a value
// from device memory for voxels without one), CUTTING (0, 1: the rule for cutting errors) and EDGE (0: the voxel of the
// largest derivative, 1: the depth of the edge), never for a shape. Strides are in elements. Lateral axes are called a
// (outer) and b (inner).
//
// A mean of s voxels covers s / 2 voxels before and s - 1 - s / 2 after its voxel. Eight neighbouring means share
// partial sums, from which nothing is subtracted: a running sum would drift, and one bright voxel would change all
// means after it.

#include "number.cuh"
#include "surface.cuh"
#include "profiles.cuh"

// Compute the sums of s values at GROUP neighbouring voxels; value(k) is the k-th of the s + GROUP - 1 values.
template <class Value> __device__ inline void window_sums(Value value, int s, float (&sum)[GROUP]) {
    if (s < GROUP) {
#pragma unroll
        for (int j = 0; j < GROUP; ++j) sum[j] = 0.0f;
        for (int k = 0; k < s + GROUP - 1; ++k) {
            const float v = value(k);
#pragma unroll
            for (int j = 0; j < GROUP; ++j)
                if (j <= k && k < j + s) sum[j] += v;
        }
        return;
    }
    // The values that all windows share, then the values before and after these.
    float before[GROUP - 1];
#pragma unroll
    for (int k = 0; k < GROUP - 1; ++k) before[k] = value(k);
    float total = 0.0f;
#pragma unroll 4
    for (int k = GROUP - 1; k < s; ++k) total += value(k);
#pragma unroll
    for (int j = GROUP - 1; j >= 0; --j) {
        if (j < GROUP - 1) total += before[j];
        sum[j] = total;
    }
    total = 0.0f;
#pragma unroll
    for (int j = 1; j < GROUP; ++j) {
        total += value(s - 1 + j);
        sum[j] += total;
    }
}

// Where b is contiguous: compute the mean over s x s voxels, tile by tile, through shared memory.
constexpr int TILE_A = 32, TILE_B = 64;
constexpr int CHUNKS = 4;  // of 32 columns; a tile with its halo has no more

extern "C" __global__ void __launch_bounds__(256)
    mean_tile(const SOURCE *__restrict__ vol, float *__restrict__ mean, int64 stride_a, int64 stride_b, int64 stride_z,
              int size_a, int size_b, int first_a, int count_a, unsigned tiles_a, unsigned tiles_b, int s,
              const float *__restrict__ zero_written) {
    const float zero = zero_log(zero_written);
    extern __shared__ float shared[];
    const int rows = TILE_A + s - 1, columns = TILE_B + s - 1, pitch = columns | 1;  // odd: no bank conflicts
    float *const tile = shared, *const sums = shared + rows * pitch;
    constexpr int SUMS_PITCH = TILE_B + 1;

    unsigned rest = blockIdx.x;
    const int b0 = static_cast<int>(rest % tiles_b) * TILE_B;
    rest /= tiles_b;
    const int a0 = static_cast<int>(rest % tiles_a) * TILE_A;
    const int64 z = rest / tiles_a;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;

    // A lane reads the same columns in every row; all of a row's voxels are fetched before the first is used.
    int64 offset[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) offset[c] = reflected(b0 - s / 2 + lane + 32 * c, size_b) * stride_b;
    const SOURCE *const plane = vol + z * stride_z;
#pragma unroll 2
    for (int row = warp; row < rows; row += warps) {
        const SOURCE *const line = plane + reflected(first_a + a0 - s / 2 + row, size_a) * stride_a;
        SOURCE voxel[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (lane + 32 * c < columns) voxel[c] = line[offset[c]];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (lane + 32 * c < columns) tile[row * pitch + lane + 32 * c] = intensity(voxel[c], zero);
    }
    __syncthreads();

    float sum[GROUP];
    for (int item = threadIdx.x; item < rows * (TILE_B / GROUP); item += blockDim.x) {
        const int group = item / rows, row = item - group * rows;
        const float *const from = tile + row * pitch + group * GROUP;
        window_sums([&](int k) { return from[k]; }, s, sum);
        float *const to = sums + row * SUMS_PITCH + group * GROUP;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) to[j] = sum[j];
    }
    __syncthreads();

    const float scale = 1.0f / (static_cast<float>(s) * static_cast<float>(s));
    for (int item = threadIdx.x; item < TILE_B * (TILE_A / GROUP); item += blockDim.x) {
        const int column = item % TILE_B, a = item / TILE_B * GROUP;
        const float *const from = sums + a * SUMS_PITCH + column;
        window_sums([&](int k) { return from[k * SUMS_PITCH]; }, s, sum);
        if (b0 + column >= size_b) continue;
        float *const to = mean + (z * count_a + a0 + a) * size_b + b0 + column;
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
            if (a0 + a + j < count_a) to[static_cast<int64>(j) * size_b] = sum[j] * scale;
    }
}

// Compute the mean over s voxels along one axis (m). Neighbouring threads take neighbours along another axis (i), then
// groups along m; the third axis is o.
extern "C" __global__ void __launch_bounds__(256)
    mean_along(const SOURCE *__restrict__ vol, float *__restrict__ mean, int64 stride_m, int64 stride_i, int64 stride_o,
               int64 to_m, int64 to_i, int64 to_o, int size_m, int first_m, int count_m, int size_i, unsigned lanes,
               unsigned blocks_i, unsigned blocks_m, int s, const float *__restrict__ zero_written) {
    const float zero = zero_log(zero_written);
    const int groups = blockDim.x / lanes;
    unsigned rest = blockIdx.x;
    const int m_block = static_cast<int>(rest % blocks_m);
    rest /= blocks_m;
    const int i = static_cast<int>(rest % blocks_i * lanes + threadIdx.x % lanes);
    const int64 o = rest / blocks_i;
    const int m0 = (m_block * groups + static_cast<int>(threadIdx.x / lanes)) * GROUP;
    if (i >= size_i || m0 >= count_m) return;

    const SOURCE *const line = vol + o * stride_o + i * stride_i;
    const int begin = first_m + m0 - s / 2;
    float sum[GROUP];
    if (begin >= 0 && begin + s + GROUP - 1 <= size_m) {
        const SOURCE *const from = line + begin * stride_m;
        window_sums([&](int k) { return intensity(from[k * stride_m], zero); }, s, sum);
    } else {
        const auto mirrored = [&](int k) { return intensity(line[reflected(begin + k, size_m) * stride_m], zero); };
        window_sums(mirrored, s, sum);
    }
    const float scale = 1.0f / static_cast<float>(s);
    float *const to = mean + o * to_o + i * to_i + m0 * to_m;
#pragma unroll
    for (int j = 0; j < GROUP; ++j)
        if (m0 + j < count_m) to[j * to_m] = sum[j] * scale;
}

// Find the maximum of each profile, one thread for each A-line. Fast if a lateral axis is contiguous.
constexpr int STEP = 8;

extern "C" __global__ void __launch_bounds__(256)
    steepest_columns(const float *__restrict__ mean, Depth *__restrict__ surface, float *__restrict__ contrast,
                     const float *__restrict__ weights, const float *__restrict__ smoothing, int radius, int odd,
                     Rule rule, int64 stride_a, int64 stride_b, int64 stride_z, int count_a, int size_b, int depth,
                     int64 to_a, int64 to_b) {
    extern __shared__ float shared[];
    for (int k = threadIdx.x; k <= radius; k += blockDim.x) {
        shared[k] = weights[k];
#if CUTTING
        shared[radius + 1 + k] = smoothing[k];
#endif
    }
    __syncthreads();
    const int64 line = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (line >= static_cast<int64>(count_a) * size_b) return;
    const int64 a = line / size_b, b = line - a * size_b;
    const float *const from = mean + a * stride_a + b * stride_b;
    Steepest steepest;
    float profile[STEP];
    for (int z = 0; z < depth; z += STEP) {
        const bool inside = z >= radius && z + STEP + radius <= depth;
        const auto straight = [&](int k) { return from[k * stride_z]; };
        const auto mirrored = [&](int k) { return from[reflected(k, depth) * stride_z]; };
        if (inside) profiles<STEP>(straight, shared, radius, odd, z, profile);
        else profiles<STEP>(mirrored, shared, radius, odd, z, profile);
#pragma unroll
        for (int d = 0; d < STEP; ++d)
            if (z + d < depth) steepest.add(profile[d], z + d);
#if CUTTING
        if (inside) profiles<STEP>(straight, shared + radius + 1, radius, false, z, profile);
        else profiles<STEP>(mirrored, shared + radius + 1, radius, false, z, profile);
#pragma unroll
        for (int d = 0; d < STEP; ++d)
            if (z + d < depth) steepest.add_level(profile[d], z + d);
#endif
    }
    surface[a * to_a + b * to_b] = steepest.surface(rule, depth);
#if EDGE
    contrast[a * to_a + b * to_b] = steepest.contrast(rule, depth);
#endif
}

// Where depth is contiguous: a block computes the mean along b of GROUP A-lines at the same a, and a warp finds the
// maximum of the profile of each.
extern "C" __global__ void __launch_bounds__(128)
    steepest_lines(const float *__restrict__ mean, Depth *__restrict__ surface, float *__restrict__ contrast,
                   const float *__restrict__ weights, const float *__restrict__ smoothing, int radius, int odd,
                   Rule rule, int size_b, int depth, unsigned groups, int64 to_a, int64 to_b, int s) {
    extern __shared__ float shared[];
    const int padded = (depth + STEP - 1) / STEP * STEP + 2 * radius, pitch = spread(padded) + 1;
    float *const lines = shared + 2 * (radius + 1);
    for (int k = threadIdx.x; k <= radius; k += blockDim.x) {
        shared[k] = weights[k];
#if CUTTING
        shared[radius + 1 + k] = smoothing[k];
#endif
    }

    const int64 a = blockIdx.x / groups;
    const int b0 = static_cast<int>(blockIdx.x % groups) * GROUP;
    const float *const from = mean + a * size_b * depth;
    const float scale = 1.0f / static_cast<float>(s);
    const int begin = b0 - s / 2;
    const bool inside = begin >= 0 && begin + s + GROUP - 1 <= size_b;
    float sum[GROUP];
    for (int z = threadIdx.x; z < depth; z += blockDim.x) {
        const float *const here = from + z;
        const float *const there = here + static_cast<int64>(begin) * depth;
        if (inside) window_sums([&](int k) { return there[static_cast<int64>(k) * depth]; }, s, sum);
        else window_sums([&](int k) { return here[static_cast<int64>(reflected(begin + k, size_b)) * depth]; }, s, sum);
#pragma unroll
        for (int j = 0; j < GROUP; ++j) lines[j * pitch + spread(radius + z)] = sum[j] * scale;
    }
    __syncthreads();
    const int outside = padded - depth;
    for (int item = threadIdx.x; item < outside * GROUP; item += blockDim.x) {
        const int j = item / outside, k = item - j * outside, at = k < radius ? k : depth + k;
        lines[j * pitch + spread(at)] = lines[j * pitch + spread(radius + reflected(at - radius, depth))];
    }
    __syncthreads();

    const int lane = threadIdx.x & 31;
    for (int j = threadIdx.x >> 5; j < GROUP && b0 + j < size_b; j += blockDim.x >> 5) {
        const float *const line = lines + j * pitch;
        Steepest steepest;
        float profile[STEP];
        for (int z = lane * STEP; z < depth; z += 32 * STEP) {
            profiles<STEP>([&](int k) { return line[spread(radius + k)]; }, shared, radius, odd, z, profile);
#pragma unroll
            for (int d = 0; d < STEP; ++d)
                if (z + d < depth) steepest.add(profile[d], z + d);
#if CUTTING
            const float *const level = shared + radius + 1;
            profiles<STEP>([&](int k) { return line[spread(radius + k)]; }, level, radius, false, z, profile);
#pragma unroll
            for (int d = 0; d < STEP; ++d)
                if (z + d < depth) steepest.add_level(profile[d], z + d);
#endif
        }
        steepest.merge_lanes();
        if (lane == 0) {
#if EDGE
            float beside[1];
            if (steepest.at_rise > 0 && steepest.at_rise < depth - 1) {
                const auto value = [&](int k) { return line[spread(radius + k)]; };
                profiles<1>(value, shared, radius, odd, steepest.at_rise - 1, beside);
                steepest.before = beside[0];
                profiles<1>(value, shared, radius, odd, steepest.at_rise + 1, beside);
                steepest.after = beside[0];
            }
            contrast[a * to_a + (b0 + j) * to_b] = steepest.contrast(rule, depth);
#endif
            surface[a * to_a + (b0 + j) * to_b] = steepest.surface(rule, depth);
        }
    }
}

// Compute the value for voxels without a logarithm: two standard deviations and 1 below the mean logarithm of the
// positive voxels of a sample on a regular grid. One block.
constexpr int SAMPLE_THREADS = 1024;

__device__ inline int64 sampled(int i, int n, int size) { return (2 * static_cast<int64>(i) + 1) * size / (2 * n); }

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)
    log_of_zero(const SOURCE *__restrict__ vol, float *__restrict__ zero_written, int64 stride_a, int64 stride_b,
                int64 stride_z, int size_a, int size_b, int depth) {
    __shared__ double sums[3][SAMPLE_THREADS];
    const int n_a = size_a < 32 ? size_a : 32, n_b = size_b < 32 ? size_b : 32, n_z = depth < 16 ? depth : 16;
    double count = 0.0, sum = 0.0, squares = 0.0;
    for (int k = threadIdx.x; k < n_a * n_b * n_z; k += SAMPLE_THREADS) {
        const int64 z = sampled(k % n_z, n_z, depth), b = sampled(k / n_z % n_b, n_b, size_b);
        const float f = as_float(vol[sampled(k / (n_z * n_b), n_a, size_a) * stride_a + b * stride_b + z * stride_z]);
        if (!(f > 0.0f && f < infinity())) continue;
        const double value = logf(f);
        count += 1.0, sum += value, squares += value * value;
    }
    sums[0][threadIdx.x] = count, sums[1][threadIdx.x] = sum, sums[2][threadIdx.x] = squares;
    for (int half = SAMPLE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half)
            for (int k = 0; k < 3; ++k) sums[k][threadIdx.x] += sums[k][threadIdx.x + half];
    }
    if (threadIdx.x) return;
    const double n = sums[0][0] > 0.0 ? sums[0][0] : 1.0, mean = sums[1][0] / n,
                 variance = sums[2][0] / n - mean * mean;
    *zero_written = sums[0][0] > 0.0 ? static_cast<float>(mean - 2.0 * sqrt(fmax(variance, 0.0)) - 1.0) : 0.0f;
}

#if EDGE
// The second pass, one thread for each A-line; threads of A-lines with a clear edge return at once.
extern "C" __global__ void __launch_bounds__(256)
    look_again(const SOURCE *__restrict__ vol, float *scratch, float *__restrict__ surface,
               float *__restrict__ contrast, const float *__restrict__ weights, const float *__restrict__ smoothing,
               int radius, Rule rule, float wide_s_z, const float *__restrict__ zero_written, int64 stride_a,
               int64 stride_b, int64 stride_z, int64 line_a, int64 line_b, int64 line_z, int size_a, int first_a,
               int count_a, int size_b, int depth, int64 to_a, int64 to_b, int s) {
    const int64 line = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (line >= static_cast<int64>(count_a) * size_b) return;
    const int a = static_cast<int>(line / size_b), b = static_cast<int>(line % size_b);
    const int64 to = a * to_a + b * to_b;
    const float first_contrast = contrast[to];
    if (first_contrast > 0.0f && first_contrast >= rule.min_contrast) return;

    // The mean overwrites that of the first pass: no other thread reads this line any more.
    float *const mean = scratch + a * line_a + b * line_b;
    float last = __int_as_float(0x7fc00000), steps = 0.0f;
    const float zero = zero_log(zero_written), scale = 1.0f / static_cast<float>(s * s);
    for (int z = 0; z < depth; ++z) {
        float sum = 0.0f;
        for (int i = 0; i < s; ++i) {
            const SOURCE *const row = vol + reflected(first_a + a - s / 2 + i, size_a) * stride_a + z * stride_z;
            for (int j = 0; j < s; ++j) sum += intensity(row[reflected(b - s / 2 + j, size_b) * stride_b], zero);
        }
        const float here = mean[z * line_z] = sum * scale, step = here - last;
        if (fabsf(step) < infinity()) steps += step * step;
        last = here;
    }

    Steepest steepest;
    float profile[STEP], smooth[STEP], slopes = 0.0f, top = 0.0f, sum = 0.0f, squares = 0.0f;
    const auto mirrored = [&](int k) { return mean[reflected(k, depth) * line_z]; };
    for (int z = 0; z < depth; z += STEP) {
        profiles<STEP>(mirrored, weights, radius, true, z, profile);
        profiles<STEP>(mirrored, smoothing, radius, false, z, smooth);
        if (z == 0) top = smooth[0];
#pragma unroll
        for (int d = 0; d < STEP; ++d) {
            if (z + d >= depth) break;
            steepest.add(profile[d], z + d);
            steepest.add_level(smooth[d], z + d);
            const float above = smooth[d] - top;
            if (profile[d] == profile[d]) slopes += profile[d];
            if (fabsf(above) < infinity()) sum += above, squares += above * above;
        }
    }
    // Standard deviation of the profile of white noise; in the smoothed line it is `ratio` times as large.
    const float n = static_cast<float>(depth), ratio = 1.41421356f * wide_s_z;
    const float noise = 0.37556624f / (wide_s_z * sqrtf(wide_s_z)) * sqrtf(steps / (2.0f * n));
    // In a short line too little of the profile remains to estimate noise from it: use the voxels, too.
    float clear = steepest.contrast(rule, depth);
    if (noise > 0.0f && steepest.rise / noise < clear) clear = steepest.rise / noise;
    if (!(clear < infinity())) clear = 0.0f;
    const float trend = slopes / n, energy = steepest.energy;
    const float bends = fmaxf(sqrtf(fmaxf(energy / n - trend * trend, energy * 1e-6f / n)), noise);
    const float fall = bends > 0.0f ? -(sum / n) / (ratio * bends) : 0.0f;
    float at = __int_as_float(0x7fc00000), strength = fmaxf(first_contrast, clear);
    if (clear > 0.0f && clear >= rule.min_contrast) {
        at = steepest.position(rule, depth), strength = clear;
    } else if (fall > 0.0f && fall >= rule.min_contrast) {
        at = 0.0f, strength = fall;
    } else if (squares - sum / n * sum > STRUCTURE * ratio * ratio * fmaxf(energy, n * noise * noise)) {
        at = infinity();
    }
    surface[to] = at, contrast[to] = strength;
}
#endif
