// Shared by surface.cu and surface_march.cu. Include after number.cuh; linumpy.gpu.kernels inserts headers by name.
// The profile of an A-line is its smoothed derivative along depth.
constexpr int GROUP = 8;  // neighbouring means that a thread computes together

// The value for voxels without a logarithm (not positive): 0 with LOG 1; with LOG 2 the caller's value, or the output
// of `log_of_zero`.
__device__ inline float zero_log(const float *written) { return LOG == 2 ? *written : 0.0f; }

__device__ inline float intensity(SOURCE v, float zero) {
    const float f = as_float(v);
#if LOG
    return f > 0.0f ? __logf(f) : zero;
#else
    return f;
#endif
}

// The value of a profile and its voxel. The larger value is chosen; of equal values the first.
struct Candidate {
    float value;
    int at;
};
__device__ inline void choose(const Candidate &other, float &value, int &at) {
    if (other.value > value || (other.value == value && other.at < at)) value = other.value, at = other.at;
}

// The output for each A-line: a voxel, or with EDGE a depth between voxels, NaN without an edge.
#if EDGE
typedef float Depth;
constexpr float STRUCTURE = 4.0f;  // minimum variance of a line that is not noise, relative to that of noise
#else
typedef int Depth;
#endif

// Parameters of the surface.
struct Rule {
    double half_s_z;  // added to the voxel of the profile's maximum, without EDGE
    float width;  // voxels over which a step's profile has the energy of its peak: s_z times the root of pi
    float min_contrast;  // of an edge
};

// The first voxel with the largest value of an A-line's profile; with CUTTING also the first voxel with the largest
// absolute value of the smoothed A-line.
struct Steepest {
    float rise;
    int at_rise;
#if CUTTING
    float level;
    int at_level;
#endif
#if EDGE
    float energy, before, after, last;
#endif
    __device__ Steepest() : rise(-infinity()), at_rise(0) {
#if CUTTING
        level = -infinity(), at_level = 0;
#endif
#if EDGE
        energy = before = after = last = 0.0f;
#endif
    }
    __device__ void add(float profile, int z) {
#if EDGE
        // Correct for voxels added in order; kernels that jump along a line set `before` and `after` at the end.
        if (z == at_rise + 1) after = profile;
        if (profile > rise) before = last;
        last = profile;
        if (profile == profile) energy += profile * profile;
#endif
        if (profile > rise) rise = profile, at_rise = z;
    }
    __device__ void add_level(float smooth, int z) {
#if CUTTING
        if (fabsf(smooth) > level) level = fabsf(smooth), at_level = z;
#endif
    }
    // Merge the results of the lanes of a warp.
    __device__ void merge_lanes() {
        for (int step = 16; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, rise, step);
            choose({other, __shfl_xor_sync(0xffffffffu, at_rise, step)}, rise, at_rise);
#if CUTTING
            const float level_there = __shfl_xor_sync(0xffffffffu, level, step);
            choose({level_there, __shfl_xor_sync(0xffffffffu, at_level, step)}, level, at_level);
#endif
#if EDGE
            energy += __shfl_xor_sync(0xffffffffu, energy, step);
#endif
        }
    }
    // The profile's maximum over the root mean square of the rest of the profile: without the energy of an ideal step.
    // The divisor is at least a quarter of the root mean square of the whole profile, so that an ideal step has a
    // finite contrast.
    __device__ float contrast(const Rule &rule, int depth) const {
#if EDGE
        if (!(rise > 0.0f)) return 0.0f;
        const float rest = (energy - rise * rise * rule.width) / fmaxf(depth - rule.width, 1.0f);
        return rise / sqrtf(fmaxf(rest, energy / (16.0f * depth)));
#else
        return 0.0f;
#endif
    }
    __device__ Depth surface(const Rule &rule, int depth) const {
#if EDGE
        const float clear = contrast(rule, depth);
        if (!(clear > 0.0f && clear >= rule.min_contrast)) return __int_as_float(0x7fc00000);
#endif
        return position(rule, depth);
    }
    // The surface by the profile's maximum, whatever its contrast.
    __device__ Depth position(const Rule &rule, int depth) const {
#if EDGE
        float at = static_cast<float>(at_rise);
        const float bend = before - 2.0f * rise + after;
        // The vertex of the parabola through three profiles; at an end one of them would be that of a mirrored voxel.
        if (at_rise > 0 && at_rise < depth - 1 && bend < 0.0f) at += 0.5f * (before - after) / bend;
#else
        const double below = ceil(at_rise + rule.half_s_z);
        int at = below < depth - 1 ? static_cast<int>(below) : depth - 1;
#endif
#if CUTTING
        if (at_level < at) at = static_cast<Depth>(at_level);
#endif
        return at;
    }
};

// One unused word after each 8, so that lanes 8 voxels apart access different banks.
__device__ inline int spread(int i) { return i + (i >> 3); }
