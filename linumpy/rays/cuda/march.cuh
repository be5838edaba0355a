// Points along a ray, and which of them lie in occupied voxels.
//
// In the grid's coordinates voxels of mip 0 are cubes of edge 1, and the grid's centre is 0. The points of a ray are a
// fixed sequence t(0), t(1), …, each a function of its index alone; the samples are the points in occupied voxels, in
// order. Skipping points only saves time: all skipped points certainly lie in the voxel, or the empty block of voxels,
// that was tested, whatever the rounding.
struct Steps {
    float min_step, max_step, cone;      // a step is t * cone, clipped to min and max
    float t_grows, t_full;               // t at which steps begin to grow, and reach the maximum
    float s_grows, s_full;               // numbers of steps from t = 0 to t_grows and t_full
    float log_growth, inverse_log_growth;  // binary logarithm of 1 + cone
    float mip_scale;                     // voxels of mip 0 per unit of length
};

struct Ray {
    Vector origin, direction;  // in the grid's coordinates; direction per unit of t
    float start;               // t of the first point; with CONE, the number of steps from t = 0
    int end;                   // number of points inside the box
};

__device__ inline float step_at(const Steps &steps, float t) {
#if CONE
    return fminf(fmaxf(t * steps.cone, steps.min_step), steps.max_step);
#else
    return steps.min_step;
#endif
}

__device__ inline float point_at(const Steps &steps, float start, int k) {
#if CONE
    const float s = start + static_cast<float>(k);
    if (s < steps.s_grows) return s * steps.min_step;
    if (s < steps.s_full) return steps.t_grows * exact_exp2((s - steps.s_grows) * steps.log_growth);
    return steps.t_full + (s - steps.s_full) * steps.max_step;
#else
    return start + static_cast<float>(k) * steps.min_step;
#endif
}

// The number of steps from t = 0 to t.
__device__ inline float steps_until(const Steps &steps, float t) {
    if (t < steps.t_grows) return t / steps.min_step;
    if (t < steps.t_full) return steps.s_grows + exact_log2(t / steps.t_grows) * steps.inverse_log_growth;
    return steps.s_full + (t - steps.t_full) / steps.max_step;
}

__device__ inline bool crop(float o, float d, float low, float high, float &enter, float &leave) {
    if (d == 0.0f) return o >= low && o <= high;
    const float a = (low - o) / d, b = (high - o) / d;
    enter = fmaxf(enter, fminf(a, b));
    leave = fminf(leave, fmaxf(a, b));
    return true;
}

// Set the first point of a ray in the box, and the number of points. jitter, in [0, 1), shifts points by part of a step.
__device__ inline void enter_box(Ray &ray, const Steps &steps, const Vector &low, const Vector &high, float near,
                                 float jitter) {
    float enter = near, leave = 1e30f;
    ray.end = 0;
    const bool crosses = crop(ray.origin.x, ray.direction.x, low.x, high.x, enter, leave) &&
                         crop(ray.origin.y, ray.direction.y, low.y, high.y, enter, leave) &&
                         crop(ray.origin.z, ray.direction.z, low.z, high.z, enter, leave);
    if (!(crosses && enter < leave && leave < 1e30f)) return;
#if CONE
    ray.start = steps_until(steps, enter) + jitter;
    const float count = ceilf(steps_until(steps, leave) - ray.start);
#else
    ray.start = enter + jitter * steps.min_step;
    const float count = ceilf((leave - ray.start) / steps.min_step);
#endif
    int end = static_cast<int>(fminf(fmaxf(count, 0.0f), static_cast<float>(MOST_POINTS)));
    while (end > 0 && !(point_at(steps, ray.start, end - 1) < leave)) --end;
    while (end < MOST_POINTS && point_at(steps, ray.start, end) < leave) ++end;
    ray.end = end;
}

// The smallest integer m with x <= 2^m.
__device__ inline int ceil_log2(float x) {
    const int bits = __float_as_int(x);
    return (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0);
}

__device__ inline unsigned spread(unsigned v) {  // five bits, three apart
    v = (v | v << 8) & 0x100Fu;
    v = (v | v << 4) & 0x10C3u;
    return (v | v << 2) & 0x1249u;
}

// Relative bound of the rounding errors of positions on a ray; growing steps have larger errors.
constexpr float MARGIN = CONE ? 7.62939453125e-6f : 9.5367431640625e-7f;

// A ray's walk from voxel to voxel.
struct Walk {
    Vector inverse, beyond;  // 1 / direction; for a direction of 0 the inverse is 0, and `beyond` gives a far exit
    float margin;            // bound of the rounding errors of positions
    float per_step;          // 1 / the step, where all steps are equal
    unsigned cached;         // index of `word`, the word that was read last
    uint2 word;
};

__device__ inline Walk begin_walk(const Ray &ray, const Steps &steps) {
    const Vector o = ray.origin, d = ray.direction;
    Walk walk;
    walk.inverse = {d.x != 0.0f ? 1.0f / d.x : 0.0f, d.y != 0.0f ? 1.0f / d.y : 0.0f, d.z != 0.0f ? 1.0f / d.z : 0.0f};
    walk.beyond = {d.x != 0.0f ? 0.0f : 1e30f, d.y != 0.0f ? 0.0f : 1e30f, d.z != 0.0f ? 0.0f : 1e30f};
    const float last = point_at(steps, ray.start, ray.end);
    const float reach = fmaxf(fabsf(d.x), fmaxf(fabsf(d.y), fabsf(d.z))) * last;
    walk.margin = (fmaxf(fabsf(o.x), fmaxf(fabsf(o.y), fabsf(o.z))) + reach) * MARGIN;
    walk.per_step = 1.0f / steps.min_step;
    walk.cached = 0xFFFFFFFFu;
    return walk;
}

__device__ inline float exit_of(float o, float d, float inverse, float beyond, float low, float edge, float margin) {
    const float bound = d > 0.0f ? low + edge - margin : low + margin;
    return (bound - o) * inverse + beyond;
}

// Test whether the voxel of point k is occupied. `count` gets the number of points from k on that certainly lie in the
// same voxel, or in the same empty block.
__device__ inline bool look(const Ray &ray, const Steps &steps, const uint2 *bits, int mips, Walk &walk, int k,
                            int &count) {
    const float t = point_at(steps, ray.start, k), step = step_at(steps, t);
    const float x = ray.origin.x + t * ray.direction.x, y = ray.origin.y + t * ray.direction.y;
    const float z = ray.origin.z + t * ray.direction.z;
    const float farthest = fmaxf(fabsf(x), fmaxf(fabsf(y), fabsf(z))) * 0.015625f;
    int mip = max(ceil_log2(step * steps.mip_scale), ceil_log2(farthest));
    mip = min(max(mip, 0), mips - 1);
    const float scale = __int_as_float((127 - mip) << 23);  // 2^-mip
    const int i = static_cast<int>(fminf(fmaxf(floorf(x * scale) + 64.0f, 0.0f), 127.0f));
    const int j = static_cast<int>(fminf(fmaxf(floorf(y * scale) + 64.0f, 0.0f), 127.0f));
    const int m = static_cast<int>(fminf(fmaxf(floorf(z * scale) + 64.0f, 0.0f), 127.0f));
    const unsigned at =
        static_cast<unsigned>(mip) * 32768u + (spread(i >> 2) | spread(j >> 2) << 1 | spread(m >> 2) << 2);
    if (at != walk.cached) walk.cached = at, walk.word = bits[at];
    // A word holds a block of 4³ voxels, a byte a block of 2³.
    const unsigned half = m & 2 ? walk.word.y : walk.word.x;
    const unsigned byte = half >> ((i & 2) << 2 | (j & 2) << 3) & 255u;
    const bool occupied = byte >> (i & 1 | (j & 1) << 1 | (m & 1) << 2) & 1u;
    const int edge = byte ? 1 : walk.word.x | walk.word.y ? 2 : 4;
    const float size = __int_as_float((127 + mip) << 23), length = static_cast<float>(edge) * size;
    const float low_x = static_cast<float>((i & -edge) - 64) * size,
                low_y = static_cast<float>((j & -edge) - 64) * size;
    const float low_z = static_cast<float>((m & -edge) - 64) * size;
    float leave = exit_of(ray.origin.x, ray.direction.x, walk.inverse.x, walk.beyond.x, low_x, length, walk.margin);
    leave =
        fminf(leave, exit_of(ray.origin.y, ray.direction.y, walk.inverse.y, walk.beyond.y, low_y, length, walk.margin));
    leave =
        fminf(leave, exit_of(ray.origin.z, ray.direction.z, walk.inverse.z, walk.beyond.z, low_z, length, walk.margin));
#if CONE
    // Beyond this t, steps are so long that a coarser mip is used.
    if (mip < mips - 1) leave = fminf(leave, size / (steps.mip_scale * steps.cone) * 0.99999f);
    const float ahead = (leave - t) / step_at(steps, leave) * 0.9999f;
#else
    const float ahead = (leave - t) * walk.per_step;
#endif
    count = 1 + static_cast<int>(fminf(fmaxf(floorf(ahead), 0.0f), static_cast<float>(ray.end - 1 - k)));
    return occupied;
}
