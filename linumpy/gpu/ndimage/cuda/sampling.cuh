// Sample an image of two or three axes between its voxels: orders 0 to 5, SciPy's boundary modes.
//
// Definitions: those of boundary.cuh, which is included before, SOURCE, COMPUTE (float, or double with WIDE 1), RANK (2
// or 3), INDEX (int or int64), and BATCH (1: a stack of images is sampled at the same points).
//
// The kernels are limited by traffic through the L2 cache, then by the number of loads in flight, then by arithmetic.
//
// - An inner point has all its neighbours inside the image (`Inside`), so that no boundary rule applies. Voxel and
//   fraction come from the bits of one addition (floats) or one fused multiply-add (affine maps: a fixed-point number
//   with 32 bits of fraction), so that no branch separates the loads of a thread's points. Small integers are converted
//   to floats in the mantissa.
// - All other points are marked, and computed at the end by SciPy's rules, with coordinates in double precision
//   (`sample_edge`).
// - A sample of order n reads n + 1 voxels along each axis: from the voxel below the point at odd orders, around the
//   nearest voxel at even ones.
// - A stack is sampled by one launch: a block finds its image by a division, and may sample several images at the same
//   points, which are then read and located once. Samples equal those of single images bit for bit.
//
// Axes are numbered 0, 1, 2 for Z, Y, X at both ranks.

constexpr int FIRST_AXIS = 3 - RANK;
// Voxels that a sample reads before and after the voxel at or below its point. PAD is subtracted from BEFORE, so that
// the pad need not be added to each point.
constexpr int BEFORE = ORDER / 2 - PAD;
constexpr int AFTER = ORDER / 2 + 1;

// An image, or a box of one: boundaries are those of the whole.
struct Image {
    int whole[3];  // voxels of the whole image
    int start[3];  // offset of the box in it
    int box[3];  // voxels of the box: the shape of the array
};

__device__ __forceinline__ float mix(float a, float b, float f, float g) { return __fmaf_rn(f, b, __fmul_rn(g, a)); }
__device__ __forceinline__ double mix(double a, double b, double f, double g) { return f * b + g * a; }

// The voxel at or below a point, plus `BIAS`, and the fraction beyond it. Valid only if `is_inner`: other points may
// give any voxel outside the range of `is_inner` (see `limit`).
template <class C, unsigned B> struct Located {
    static constexpr unsigned BIAS = B;
    unsigned voxel;
    C fraction;
};

// Adding 1.5 × 2^23, rounded down, leaves the integer part in the low bits: no conversion, all at full rate.
__device__ __forceinline__ Located<float, 0x4B400000> locate(float c, float) {
    const float r = __fadd_rd(c, 12582912.0f);
    return {static_cast<unsigned>(__float_as_int(r)), c - (r - 12582912.0f)};
}
// `raised` is a point plus 1.5 × 2^20: a fixed-point number, the integer part in the upper word, 32 bits of fraction in
// the lower one.
constexpr double RAISE = 1572864.0;
__device__ __forceinline__ Located<float, 0x41380000> locate_raised(double raised) {
    const unsigned fraction = static_cast<unsigned>(__double2loint(raised));
    return {static_cast<unsigned>(__double2hiint(raised)),
            __int_as_float(static_cast<int>(__funnelshift_r(fraction, 0x7Fu, 9))) - 1.0f};
}
__device__ __forceinline__ Located<float, 0x41380000> locate(double c, float) { return locate_raised(c + RAISE); }
__device__ __forceinline__ Located<double, 0> locate(double c, double) {
    const double down = floor(c);
    const bool sane = down >= -1.0 - PAD && down < 2147483647.0;
    return {static_cast<unsigned>(sane ? static_cast<int>(down) : BEFORE - 1), c - down};
}
__device__ __forceinline__ Located<double, 0> locate(float c, double) { return locate(static_cast<double>(c), 0.0); }

// All neighbours of a point lie in the box if `voxel - BEFORE - start` is below this. Fixed-point numbers are exact
// below 2^19 voxels, floats below 2^22; points beyond are computed by `sample_edge`.
__device__ __forceinline__ unsigned limit(const Image &image, int axis) {
    const int last = image.box[axis] - (BEFORE + PAD) - AFTER;
    const int good = (1 << 19) - BEFORE - image.start[axis];
    return static_cast<unsigned>(max(0, min(last, WIDE ? last : good)));
}

// Values for `is_inner` and `first_voxel`, computed once by each thread.
template <unsigned BIAS> struct Inside {
    unsigned origin[3], limits[3];  // lowest voxel of an inner point, plus BIAS, and the number of such voxels
    INDEX row, plane;
    unsigned corner;  // the excess of a product of biased voxels and steps, modulo 2^32

    __device__ __forceinline__ explicit Inside(const Image &image)
        : row(image.box[2]), plane(static_cast<INDEX>(image.box[1]) * image.box[2]), corner(0) {
        for (int a = FIRST_AXIS; a < 3; ++a) {
            origin[a] = BIAS + BEFORE + static_cast<unsigned>(image.start[a]);
            limits[a] = limit(image, a);
        }
        if (RANK == 3) corner = origin[0] * static_cast<unsigned>(plane);
        corner += origin[1] * static_cast<unsigned>(row) + origin[2];
    }
    template <class P> __device__ __forceinline__ bool is_inner(const P *at) const {
        bool inner = at[1].voxel - origin[1] < limits[1] && at[2].voxel - origin[2] < limits[2];
        if (RANK == 3) inner = inner && at[0].voxel - origin[0] < limits[0];
        return inner;
    }
    __device__ __forceinline__ bool is_empty() const { return !(limits[1] && limits[2] && (RANK == 2 || limits[0])); }
    // The first voxel that an inner point reads, in the box.
    template <class P> __device__ __forceinline__ INDEX first_voxel(const P *at) const {
        if (sizeof(INDEX) == 8) {
            INDEX first = static_cast<INDEX>(at[1].voxel - origin[1]) * row + (at[2].voxel - origin[2]);
            if (RANK == 3) first += static_cast<INDEX>(at[0].voxel - origin[0]) * plane;
            return first;
        }
        unsigned first = at[2].voxel - corner + at[1].voxel * static_cast<unsigned>(row);
        if (RANK == 3) first += at[0].voxel * static_cast<unsigned>(plane);
        return static_cast<INDEX>(static_cast<int>(first));
    }
};

// Interpolate between two voxels along x. The bias that converts small integers to floats (see Widen) cancels in their
// difference, which is exact.
template <class C, class S> struct Along {
    static __device__ __forceinline__ C of(S a, S b, C f, C g) {
        return mix(Widen<C, S>::of(a), Widen<C, S>::of(b), f, g);
    }
};
template <class S> struct AlongSmall {
    static __device__ __forceinline__ float of(S a, S b, float f, float) {
        return __fmaf_rn(f, Widen<float, S>::raised(b) - Widen<float, S>::raised(a), Widen<float, S>::of(a));
    }
};
template <> struct Along<float, unsigned char> : AlongSmall<unsigned char> {};
template <> struct Along<float, unsigned short> : AlongSmall<unsigned short> {};
template <> struct Along<float, short> : AlongSmall<short> {};

#if ORDER == 0
// Whether a voxel can be copied: a conversion to COMPUTE and back would not change it.
struct NotAsItIs {
    static constexpr bool value = false;
    template <class T, class S> static __device__ void copy(T *, S) {}
};
template <class S, class T> struct AsItIs : NotAsItIs {};
template <class T> struct AsItIs<T, T> {
    static constexpr bool value = true;
    static __device__ __forceinline__ void copy(T *to, T voxel) { store(to, voxel); }
};
template <> struct AsItIs<int64, int64> : NotAsItIs {};
template <> struct AsItIs<uint64, uint64> : NotAsItIs {};

// Offset of the voxel nearest to an inner point from the first one.
template <class STEP, class P> __device__ __forceinline__ STEP nearest_inside(const P *at, STEP row, STEP plane) {
    STEP step = at[2].fraction >= COMPUTE(0.5);
    if (at[1].fraction >= COMPUTE(0.5)) step += row;
    if (RANK == 3 && at[0].fraction >= COMPUTE(0.5)) step += plane;
    return step;
}
#endif

// The sum over the voxels around an inner point. `first` is the first voxel it reads, in the image or in a copy of a
// part of the image, which gives the same sum.
template <class VOXEL, class STEP, class P>
__device__ __forceinline__ COMPUTE sum_inside(const VOXEL *first, const P *at, STEP row, STEP plane) {
#define VALUE(p) Widen<COMPUTE, VOXEL>::of(*(p))
#define BETWEEN(p) Along<COMPUTE, VOXEL>::of(*(p), *((p) + 1), x, u)
#if ORDER == 0
    return VALUE(first + nearest_inside(at, row, plane));
#elif ORDER == 1
    const COMPUTE x = at[2].fraction, y = at[1].fraction, u = 1 - x, v = 1 - y;
    const COMPUTE near = mix(BETWEEN(first), BETWEEN(first + row), y, v);
    if (RANK == 2) return near;
    const VOXEL *third = first + plane;
    const COMPUTE far = mix(BETWEEN(third), BETWEEN(third + row), y, v);
    return mix(near, far, at[0].fraction, 1 - at[0].fraction);
#else
    COMPUTE x[TAPS], y[TAPS], z[TAPS] = {1};
    COMPUTE f[3] = {at[0].fraction, at[1].fraction, at[2].fraction};
    if (IS_EVEN) {  // counted from the nearest voxel
        const bool up_x = f[2] >= COMPUTE(0.5), up_y = f[1] >= COMPUTE(0.5), up_z = RANK == 3 && f[0] >= COMPUTE(0.5);
        f[2] -= up_x;
        f[1] -= up_y;
        f[0] -= up_z;
        first += (up_x ? STEP(1) : STEP(0)) + (up_y ? row : STEP(0)) + (up_z ? plane : STEP(0));
    }
    spline_weights(f[2], x);
    spline_weights(f[1], y);
    if (RANK == 3) spline_weights(f[0], z);
    COMPUTE sum = 0;
#pragma unroll
    for (int k = 0; k < (RANK == 3 ? TAPS : 1); ++k, first += plane) {
        COMPUTE flat = 0;
        const VOXEL *line = first;
#pragma unroll
        for (int j = 0; j < TAPS; ++j, line += row) {
            COMPUTE near = x[0] * VALUE(line);
#pragma unroll
            for (int i = 1; i < TAPS; ++i) near = fused(x[i], VALUE(line + i), near);
            flat = fused(y[j], near, flat);
        }
        sum = fused(z[k], flat, sum);
    }
    return ORDER == 3 ? sum * COMPUTE(RANK == 3 ? 1.0 / 216.0 : 1.0 / 36.0) : sum;
#endif
#undef VALUE
#undef BETWEEN
}

// Samples at any point, by SciPy's rules: NaN and infinite coordinates give `outside` in the constant modes and NaN in
// the others. Voxels beyond the box count as 0; a box that was planned for its points has no such voxels.
struct Edge {
    INDEX offset[3][TAPS];  // of a voxel in the box; -1 for the value `outside`
    COMPUTE weight[3][TAPS];

    // Find the voxels and weights of a point; false for a point without any, whose sample is `nowhere`.
    __device__ __forceinline__ bool find(double c0, double c1, double c2, const Image &image) {
        const double point[3] = {c0, c1, c2};
        for (auto &axis : offset)
            for (INDEX &tap : axis) tap = 0;
        weight[0][0] = 1;
        INDEX step = 1;
#pragma unroll
        for (int a = 2; a >= FIRST_AXIS; --a) {
            double c = point[a] + PAD;
            if (!bring_inside(c, image.whole[a])) return false;
            const double down = floor(IS_EVEN ? c + 0.5 : c);
            weigh(c - down, weight[a]);
            const int64 first = static_cast<int64>(down) - (BEFORE + PAD);
#pragma unroll
            for (int k = 0; k < TAPS; ++k) {
                const int voxel = fold(first + k, image.whole[a]);
                const bool held = static_cast<unsigned>(voxel - image.start[a]) < static_cast<unsigned>(image.box[a]);
                offset[a][k] = voxel < 0 ? -1 : held ? (voxel - image.start[a]) * step : 0;
                if (voxel >= 0 && !held) weight[a][k] = 0;
            }
            step *= image.box[a];
        }
        return true;
    }
    __device__ __forceinline__ COMPUTE sum(const SOURCE *__restrict__ data, COMPUTE outside) const {
        COMPUTE sum = 0;
#pragma unroll
        for (int k = 0; k < (RANK == 3 ? TAPS : 1); ++k) {
            COMPUTE flat = 0;
#pragma unroll
            for (int j = 0; j < TAPS; ++j) {
                COMPUTE line = 0;
#pragma unroll
                for (int i = 0; i < TAPS; ++i) {
                    const INDEX z = offset[0][k], y = offset[1][j], x = offset[2][i];
                    const bool there = MODE != GRID_CONSTANT || (z | y | x) >= 0;
                    line = fused(weight[2][i], there ? Widen<COMPUTE, SOURCE>::of(data[z + y + x]) : outside, line);
                }
                flat = fused(weight[1][j], line, flat);
            }
            sum = fused(weight[0][k], flat, sum);
        }
        return ORDER == 3 ? sum * COMPUTE(RANK == 3 ? 1.0 / 216.0 : 1.0 / 36.0) : sum;
    }
};

__device__ __forceinline__ COMPUTE nowhere(COMPUTE outside) {
    return MODE == CONSTANT || MODE == GRID_CONSTANT ? outside : static_cast<COMPUTE>(__int_as_float(0x7FC00000));
}

__device__ __noinline__ COMPUTE sample_edge(const SOURCE *__restrict__ data, double c0, double c1, double c2,
                                            Image image, COMPUTE outside) {
    Edge edge;
    return edge.find(c0, c1, c2, image) ? edge.sum(data, outside) : nowhere(outside);
}

// a / b from a and 1 / b, correctly rounded; the plain product if the remainder is not finite.
__device__ __forceinline__ double quotient(double a, double b, double inverse) {
    const double near = __dmul_rn(a, inverse), remainder = __fma_rn(-near, b, a);
    return fabs(remainder) <= 1.7976931348623157e308 ? __fma_rn(remainder, inverse, near) : near;
}

// The tile of a block of threads, by its indices. A launch of three axes needs no division, but CUDA limits the number
// of blocks along two of them. For more blocks the launch has one axis, and `counts` holds the number of tiles along y
// and x; otherwise it holds zeros.
struct Tile { int z, y, x; };
#if BATCH
// The blocks of a stack are numbered along one axis, image after image. A block may sample several images at the same
// points.
struct Batch {
    int64 image, target;  // elements of an image, and of its samples
    int blocks;  // blocks of threads of an image
    int images, together;  // images of the stack, and images that a block samples
};
__device__ __forceinline__ Tile tile_of_block(const int *counts, const Batch &batch) {
    const unsigned number = blockIdx.x % static_cast<unsigned>(batch.blocks), row = number / counts[1];
    return {static_cast<int>(row / counts[0]), static_cast<int>(row % counts[0]), static_cast<int>(number % counts[1])};
}
__device__ __forceinline__ int64 image_of_block(const Batch &batch) {
    return blockIdx.x / static_cast<unsigned>(batch.blocks);
}
#define TILE_OF_BLOCK(how) tile_of_block((how).tiles, (how).batch)
#define BLOCK_IN_IMAGE(how) (blockIdx.x % static_cast<unsigned>((how).batch.blocks))
#else
#define TILE_OF_BLOCK(how) tile_of_block((how).tiles)
#define BLOCK_IN_IMAGE(how) blockIdx.x
#endif
__device__ __forceinline__ Tile tile_of_block(const int *counts) {
    if (!counts[1]) return {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
    const unsigned row = blockIdx.x / counts[1];
    return {static_cast<int>(row / counts[0]), static_cast<int>(row % counts[0]),
            static_cast<int>(blockIdx.x % counts[1])};
}
