// What both ways of finding the surface share. Included by name after number.cuh: see linumpy.gpu.kernels.
constexpr int GROUP = 8;

__device__ inline float intensity(SOURCE v) {
    const float f = as_float(v);
#if LOG
    return f > 0.0f ? __logf(f) : 0.0f;  // zero, negative and NaN voxels take part as nothing
#else
    return f;
#endif
}

// A voxel and its profile. The larger one is chosen; of equal ones the first.
struct Candidate { float value; int at; };
__device__ inline void choose(const Candidate &other, float &value, int &at) {
    if (other.value > value || (other.value == value && other.at < at)) value = other.value, at = other.at;
}

// The first voxel of the largest profile, and of the largest in size.
struct Steepest {
    float rise, change;
    int at_rise, at_change;
    __device__ Steepest() : rise(-infinity()), change(-infinity()), at_rise(0), at_change(0) {}
    __device__ void meet(float profile, int z) {
        if (profile > rise) rise = profile, at_rise = z;
#if CUTTING
        if (fabsf(profile) > change) change = fabsf(profile), at_change = z;
#endif
    }
    // What a warp has met.
    __device__ void agree() {
        for (int step = 16; step > 0; step /= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, rise, step);
            choose({other, __shfl_xor_sync(0xffffffffu, at_rise, step)}, rise, at_rise);
#if CUTTING
            const float change_there = __shfl_xor_sync(0xffffffffu, change, step);
            choose({change_there, __shfl_xor_sync(0xffffffffu, at_change, step)}, change, at_change);
#endif
        }
    }
    __device__ int surface(double half_s_z, int depth) const {
        int at = at_rise;
#if CUTTING
        if (at_change < at) at = at_change;
#endif
        const double below = ceil(at + half_s_z);
        return below < depth - 1 ? static_cast<int>(below) : depth - 1;
    }
};

// A place of each 8 is left out of use, so that lanes 8 voxels apart meet different banks.
__device__ inline int spread(int i) { return i + (i >> 3); }
