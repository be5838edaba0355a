// Find and write samples along rays, in one kernel.
//
// 1. A thread walks along its ray, and stores in shared memory runs of consecutive points in occupied voxels.
// 2. Each warp reserves its part of the output: by one atomic addition of rays and samples in one 64-bit word; or, with
//    ORDERED, in the order of the rays, by a prefix sum over blocks (decoupled look-back). Blocks are numbered in the
//    order in which they start, so that no block waits for a block that has not started. Sum and state are one word, so
//    that no fence is needed.
// 3. The warp writes the samples of its rays: a lane writes one sample, three lanes the three coordinates of a position,
//    so that stores are coalesced.
//
// A ray with more than MOST_RUNS runs repeats step 1 from the first run that did not fit. docs/rays.md explains why the
// samples are the same on the CPU, bit for bit.
//
// IMAGES: rays are drawn from images (else given). CONE: steps grow with t. ORDERED: in the order of the rays.
// WEIGHTED: images or pixels have distributions. LENGTHS: directions keep their original lengths. PER_SAMPLE: max_level
// and extra dimensions are also written for each sample.
#include "number.cuh"
#include "exact.cuh"
#include "camera.cuh"
#include "march.cuh"

constexpr unsigned ALL = 0xFFFFFFFFu;
// The host build (core/src/rays.cpp) has blocks and warps of one thread, which run one after another.
constexpr int WARP = THREADS < 32 ? THREADS : 32, WARPS = THREADS / WARP,
              STRIDE = THREADS + 1;  // padded, so that the runs of a ray are in different banks
constexpr int SAMPLE_BITS = 36;  // low bits of a word, for a number of samples; the other bits hold a number of rays
constexpr uint64 SAMPLES = (1ull << SAMPLE_BITS) - 1;
// State of a block in the two high bits (0: none, its aggregate, its inclusive prefix), then 26 bits for rays and 36 for
// samples.
constexpr uint64 AGGREGATE = 1ull << 62, INCLUSIVE = 2ull << 62, SUM = AGGREGATE - 1;

struct Batch {
    const Image *images;
    const float *image_cdf, *linear, *image_extra, *rays_in, *jitter;
    const uint2 *bits;
    float *positions, *directions, *dt;
    unsigned *ray_indices;
    float *rays;
    int *n_steps;
    int64 *base;
    float *max_level, *extra;
    int *image_indices;
    float *uv, *colors, *pdf, *sample_max_level, *sample_extra;
    // Words: rays and samples reserved; kept rays; samples of kept rays; dropped rays; ticket; then a word for each block.
    uint64 *counts;
    uint64 rng_state, rng_inc, image_shift;
    int64 max_samples;
    int n_rays, n_images, n_extra, max_steps, mips, snap, random_level, keep_empty;
    float box[6];  // low and high corner, in the grid's coordinates
    float per_box[3];  // 1 / the box's edges
    float centre[3], voxels_per_unit, near, dt_scale;
    Steps steps;
};
static_assert(sizeof(Batch) == BATCH_NBYTES, "the layout of BATCH in linumpy.rays.launch");

// The values that are written once for each ray.
struct Source {
    Vector origin, direction;  // of length 1
    float length, u, v, level, rgba[4], pdf[2];  // length: of the direction before normalisation
    int image;
};

__device__ inline int choose_image(const Batch &batch, int index) {
#if WEIGHTED
    if (batch.image_cdf) {
        // The multiples of the golden ratio modulo 1 are evenly distributed; a batch begins at a random multiple.
        const unsigned number = static_cast<unsigned>(index) * 2654435769u + static_cast<unsigned>(batch.image_shift);
        return first_above(batch.image_cdf, batch.n_images, as_unit_float(number));
    }
#endif
    return static_cast<int>(static_cast<uint64>(index) * batch.n_images / static_cast<unsigned>(batch.n_rays) %
                            batch.n_images);
}

// Ray `index`, in the world's units; false for a masked pixel or an invalid ray.
__device__ inline bool make_source(const Batch &batch, int index, Source &source, float &jitter) {
#if IMAGES
    Pcg32 rng = {batch.rng_state, batch.rng_inc};
    advance(rng, static_cast<uint64>(index) * NUMBERS_PER_RAY);
    float number[5];
    for (int n = 0; n < 5; ++n) number[n] = as_unit_float(next_number(rng));
    source.image = choose_image(batch, index);
    const Image &image = batch.images[source.image];
    int column, row;
    source.u = number[0], source.v = number[1], source.pdf[0] = 1.0f;
#if WEIGHTED
    if (batch.image_cdf)
        source.pdf[0] =
            probability_of(batch.image_cdf, batch.n_images, source.image) * static_cast<float>(batch.n_images);
#endif
    draw_pixel(image, batch.snap, source.u, source.v, column, row, source.pdf[1]);
    if (!read_pixel(image, batch.linear, column, row, source.rgba)) return false;
    world_ray(image, source.u, source.v, column, row, number[2], source.origin, source.direction, source.length);
    jitter = number[3];
    source.level = batch.random_level ? number[4] * 2.0f : 1.0f;  // half of the rays use all levels
    return true;
#else
    const float *const given = batch.rays_in + static_cast<int64>(index) * 6;
    source.origin = {given[0], given[1], given[2]};
    source.direction = {given[3], given[4], given[5]};
    jitter = batch.jitter ? batch.jitter[index] : 0.0f;
    return fabsf(source.origin.x) + fabsf(source.origin.y) + fabsf(source.origin.z) < 1e30f &&
           normalize(source.direction, source.length);
#endif
}

__device__ inline void to_grid(const Batch &batch, const Source &source, float jitter, Ray &ray) {
    const float per_unit = batch.voxels_per_unit, *const b = batch.box;
    ray.origin = {(source.origin.x - batch.centre[0]) * per_unit, (source.origin.y - batch.centre[1]) * per_unit,
                  (source.origin.z - batch.centre[2]) * per_unit};
    ray.direction = {source.direction.x * per_unit, source.direction.y * per_unit, source.direction.z * per_unit};
    enter_box(ray, batch.steps, {b[0], b[1], b[2]}, {b[3], b[4], b[5]}, batch.near, jitter);
}

// Progress of a ray with `count` samples: samples `done` to `kept` are in runs; `next` is the first point after these
// runs, or -1 at the end of the ray.
struct Progress { int count, done, kept, runs, next; };

// Find runs of points in occupied voxels, from point k on. A run is stored as the index of its first point and the number
// of samples before it. With `all`, count all samples of the ray, also those of runs that are not stored.
__device__ inline void find_runs(const Batch &batch, const Ray &ray, int k, bool all, unsigned *runs,
                                 Progress &progress) {
    Walk walk = begin_walk(ray, batch.steps);
    bool open = false, full = false;
    int count = progress.done;
    progress.runs = 0;
    progress.next = -1;
    while (k < ray.end && count < batch.max_steps) {
        int points;
        const bool occupied = look(ray, batch.steps, batch.bits, batch.mips, walk, k, points);
        if (occupied && !open && !full) {
            full = progress.runs == MOST_RUNS;
            if (full) {
                progress.kept = count;
                progress.next = k;
                if (!all) return;
            } else {
                runs[progress.runs++ * STRIDE] = static_cast<unsigned>(k) << 10 | static_cast<unsigned>(count);
            }
        }
        open = occupied;
        if (occupied) count = min(count + points, batch.max_steps);
        k += points;
    }
    if (!full) progress.kept = count;
    if (all) progress.count = count;
}

__device__ inline uint64 scanned(uint64 value, int lane) {
    for (int by = 1; by < WARP; by *= 2) {
        const uint64 other = __shfl_up_sync(ALL, value, by);
        if (lane >= by) value += other;
    }
    return value;
}

// The sum over all blocks before a block, computed by its first warp: decoupled look-back (Merrill and Garland, 2016),
// 32 blocks at a time. State and sum are one word, so no fence is needed.
__device__ inline uint64 sum_before(volatile uint64 *states, int block, int lane) {
    uint64 sum = 0;
    for (int last = block - 1; last >= 0;) {
        const int mine = last - lane;
        uint64 state = INCLUSIVE;
        if (mine >= 0) state = states[mine];
        const unsigned whole = __ballot_sync(ALL, state >> 63 != 0), ready = __ballot_sync(ALL, state >> 62 != 0);
        const int first = whole ? __popc((whole & (0u - whole)) - 1) : WARP;  // the nearest block with a prefix
        const unsigned needed = first == WARP ? ALL : (2u << first) - 1;
        if ((ready & needed) != needed) continue;
        state = lane <= first ? state & SUM : 0;
        for (int by = WARP / 2; by; by /= 2) state += __shfl_xor_sync(ALL, state, by);
        sum += state;
        if (first < WARP) break;
        last -= WARP;
    }
    return sum;
}

// Reserve `value`, and return the sum of all values that were reserved before. `sums` is shared memory for the sum of
// each warp, needed with ORDERED.
__device__ inline uint64 reserve(const Batch &batch, uint64 value, int block, uint64 *sums) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const uint64 inclusive = scanned(value, lane), total = __shfl_sync(ALL, inclusive, WARP - 1);
    uint64 before = 0;
#if ORDERED
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    if (warp == 0) {
        const uint64 of_warp = lane < WARPS ? sums[lane] : 0, up_to = scanned(of_warp, lane);
        const uint64 of_block = __shfl_sync(ALL, up_to, WARP - 1);
        volatile uint64 *const states = batch.counts + HEAD_WORDS;
        if (lane == 0) states[block] = of_block | (block ? AGGREGATE : INCLUSIVE);
        const uint64 earlier = sum_before(states, block, lane);
        if (lane == 0 && block) states[block] = (earlier + of_block) | INCLUSIVE;
        __syncwarp();
        if (lane < WARPS) sums[lane] = earlier + up_to - of_warp;
    }
    __syncthreads();
    before = sums[warp];
#else
    if (lane == 0 && total) before = atomicAdd(batch.counts, total);
    before = __shfl_sync(ALL, before, 0);
#endif
    return before + inclusive - value;
}

__device__ inline void write_ray(const Batch &batch, const Source &source, int index, int64 slot, int64 base,
                                 int count) {
    batch.n_steps[slot] = count;
    batch.base[slot] = base;
#if IMAGES
    batch.ray_indices[slot] = static_cast<unsigned>(index);
    float *const ray = batch.rays + slot * 6;
    ray[0] = source.origin.x, ray[1] = source.origin.y, ray[2] = source.origin.z;
    const float length = LENGTHS ? source.length : 1.0f;
    ray[3] = source.direction.x * length, ray[4] = source.direction.y * length, ray[5] = source.direction.z * length;
    batch.max_level[slot] = source.level;
    batch.image_indices[slot] = source.image;
    batch.uv[slot * 2] = source.u, batch.uv[slot * 2 + 1] = source.v;
    batch.pdf[slot * 2] = source.pdf[0], batch.pdf[slot * 2 + 1] = source.pdf[1];
    for (int c = 0; c < 4; ++c) batch.colors[slot * 4 + c] = source.rgba[c];
    for (int e = 0; e < batch.n_extra; ++e)
        batch.extra[slot * batch.n_extra + e] = batch.image_extra[static_cast<int64>(source.image) * batch.n_extra + e];
#endif
}

__device__ inline float pick(const Vector &v, int axis) { return axis == 0 ? v.x : axis == 1 ? v.y : v.z; }
__device__ inline Vector broadcast(const Vector &v, int lane) {
    return {__shfl_sync(ALL, v.x, lane), __shfl_sync(ALL, v.y, lane), __shfl_sync(ALL, v.z, lane)};
}

// Write max_level and extra dimensions of a ray for each of `here` samples.
__device__ inline void write_per_sample(const Batch &batch, int64 first, int here, float level, int image) {
    if (!batch.sample_max_level) return;
    const int lane = threadIdx.x % WARP;
    if (lane < here) batch.sample_max_level[first + lane] = level;
    const float *const values = batch.image_extra + static_cast<int64>(image) * batch.n_extra;
    float *const out = batch.sample_extra + first * batch.n_extra;
    for (int word = lane; word < here * batch.n_extra; word += WARP) out[word] = values[word % batch.n_extra];
}

// Write the samples that the runs of the warp's rays hold.
__device__ inline void write_samples(const Batch &batch, const Source &source, const Ray &mine,
                                     const Progress &progress, int64 base, const Vector &looked,
                                     const unsigned *runs_of_warp) {
    const int lane = threadIdx.x % WARP;
    int axis[3];
    float low[3], per_box[3];
    for (int m = 0; m < 3; ++m) {
        axis[m] = (WARP * m + lane) % 3;
        low[m] = batch.box[axis[m]];
        per_box[m] = batch.per_box[axis[m]];
    }
    for (int from = 0; from < WARP; ++from) {
        const int done = __shfl_sync(ALL, progress.done, from), kept = __shfl_sync(ALL, progress.kept, from);
        if (done >= kept) continue;
        const Vector o = broadcast(mine.origin, from), d = broadcast(mine.direction, from),
                     side = broadcast(looked, from);
        const float start = __shfl_sync(ALL, mine.start, from);
        const int64 first = __shfl_sync(ALL, base, from);
        const int count = __shfl_sync(ALL, progress.runs, from);
#if PER_SAMPLE
        const float level = __shfl_sync(ALL, source.level, from);
        const int image = __shfl_sync(ALL, source.image, from);
#endif
        const unsigned *const runs = runs_of_warp + from;
        for (int begin = done; begin < kept; begin += WARP) {
            const int n = begin + lane, here = min(kept - begin, WARP);
            int run = 0, beyond = count;  // the last run that begins at or before sample n
            while (beyond - run > 1) {
                const int middle = (run + beyond) >> 1;
                if (static_cast<int>(runs[middle * STRIDE] & 1023u) <= n) run = middle;
                else beyond = middle;
            }
            const unsigned key = runs[run * STRIDE];
            const float t =
                point_at(batch.steps, start, static_cast<int>(key >> 10) + n - static_cast<int>(key & 1023u));
            if (lane < here) batch.dt[first + n] = step_at(batch.steps, t) * batch.dt_scale;
#if PER_SAMPLE
            write_per_sample(batch, first + begin, here, level, image);
#endif
            float *const positions = batch.positions + (first + begin) * 3, *const directions =
                                                                                batch.directions + (first + begin) * 3;
#pragma unroll
            for (int m = 0; m < 3; ++m) {
                const int word = WARP * m + lane;
                const float at = __shfl_sync(ALL, t, word / 3);
                const float position = pick(o, axis[m]) + at * pick(d, axis[m]);
                if (word >= here * 3) continue;
                positions[word] = fminf(fmaxf((position - low[m]) * per_box[m], 0.0f), 1.0f);
                directions[word] = pick(side, axis[m]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) trace(Batch batch) {
    __shared__ unsigned all_runs[MOST_RUNS * STRIDE];
    unsigned *const runs = all_runs + threadIdx.x;
    uint64 *sums = nullptr;
    int block = static_cast<int>(blockIdx.x);
#if ORDERED
    // Blocks are numbered in the order in which they start: no block waits for a block that has not started.
    __shared__ uint64 sums_of_warps[WARPS];
    __shared__ int ticket;
    sums = sums_of_warps;
    if (threadIdx.x == 0) ticket = static_cast<int>(atomicAdd(batch.counts + 4, static_cast<uint64>(1)));
    __syncthreads();
    block = ticket;
#endif
    const int64 index = static_cast<int64>(block) * THREADS + threadIdx.x;
    const bool exists = index < batch.n_rays;
    Source source = {};
    Ray ray = {};
    Progress progress = {0, 0, 0, 0, -1};
    float jitter = 0.0f;
    bool valid = exists && make_source(batch, static_cast<int>(index), source, jitter);
    if (valid) {
        to_grid(batch, source, jitter, ray);
        if (ray.end > 0) find_runs(batch, ray, 0, true, runs, progress);
    }
    if (IMAGES) valid = valid && (progress.count > 0 || batch.keep_empty);
    else valid = exists;
    const uint64 before =
        reserve(batch, valid ? 1ull << SAMPLE_BITS | static_cast<uint64>(progress.count) : 0, block, sums);
    const int64 base = static_cast<int64>(before & SAMPLES),
                slot = IMAGES ? static_cast<int64>(before >> SAMPLE_BITS) : index;
    const bool fits = valid && base + progress.count <= batch.max_samples;
    const unsigned kept = __ballot_sync(ALL, fits), dropped = __ballot_sync(ALL, valid && !fits);
    const int sum =
        static_cast<int>(__shfl_sync(ALL, scanned(fits ? progress.count : 0, threadIdx.x % WARP), WARP - 1));
    if (threadIdx.x % WARP == 0) {
        if (kept) atomicAdd(batch.counts + 1, static_cast<uint64>(__popc(kept)));
        if (sum) atomicAdd(batch.counts + 2, static_cast<uint64>(sum));
        if (dropped) atomicAdd(batch.counts + 3, static_cast<uint64>(__popc(dropped)));
    }
    if (fits) write_ray(batch, source, static_cast<int>(index), slot, base, progress.count);
    else progress = {0, 0, 0, 0, -1};
    const Vector looked = {(source.direction.x + 1.0f) * 0.5f, (source.direction.y + 1.0f) * 0.5f,
                           (source.direction.z + 1.0f) * 0.5f};
    for (;;) {
        __syncwarp();
        write_samples(batch, source, ray, progress, base, looked, all_runs + threadIdx.x / WARP * WARP);
        __syncwarp();
        const bool more = progress.next >= 0;
        if (!__ballot_sync(ALL, more)) break;
        const int next = progress.next;
        progress.done = progress.kept;
        progress.next = -1;
        if (more) find_runs(batch, ray, next, false, runs, progress);
    }
}
