// One sample of an image at a place between its voxels: orders 0, 1 and 3, SciPy's boundary modes.
//
// Definitions: SOURCE, COMPUTE (float, or double with WIDE 1), RANK (2 or 3), ORDER (0, 1, 3), MODE (below), INDEX (int or int64),
// and PAD: places are those of an image to which so many voxels were added before its first (and as many behind its last);
// the array with them is what is sampled, and called the image here.
//
// A place whose voxels all lie inside takes the short way (`Inside`); all others take SciPy's rules, in double
// precision, one voxel at a time (`sample_edge`). Axes are numbered 0, 1, 2 for Z, Y, X at both ranks.

#define CONSTANT 0
#define GRID_CONSTANT 1
#define NEAREST 2
#define REFLECT 3
#define MIRROR 4
#define WRAP 5
#define GRID_WRAP 6

#ifndef PAD
#define PAD 0
#endif

constexpr int FIRST_AXIS = 3 - RANK;
constexpr int TAPS = ORDER == 3 ? 4 : ORDER + 1;
// Voxels that a sample reads before and after the one at or below its place. Those before are counted from the place as
// it is given, so that a pad costs nothing.
constexpr int BEFORE = (ORDER == 3 ? 1 : 0) - PAD;
constexpr int AFTER = ORDER == 3 ? 2 : 1;
// Beyond this no double has a fraction left to interpolate with, and casts to integers are not safe.
constexpr double FARTHEST = 4503599627370496.0;

// An image, or a box of one: boundaries are those of the whole.
struct Image {
    int whole[3];  // voxels of the whole image
    int start[3];  // where the box starts in it
    int box[3];    // voxels of the box: the shape of the array
};

__device__ __forceinline__ float mix(float a, float b, float f, float g) { return __fmaf_rn(f, b, __fmul_rn(g, a)); }
__device__ __forceinline__ double mix(double a, double b, double f, double g) { return f * b + g * a; }

// Six times the weights of a cubic spline.
template <class C> __device__ __forceinline__ void cubic_weights(C x, C *w) {
    const C z = 1 - x, square = x * x;
    w[0] = z * z * z;
    w[3] = square * x;
    w[1] = 3 * w[3] - 6 * square + 4;
    w[2] = 6 - w[0] - w[1] - w[3];
}

// Where a place lies: the voxel at or below it, `BIAS` higher, and the fraction of a voxel beyond it. Only good where
// `is_inner` says so: other places may give any voxel, but none that passes for an inner one (see `limit`).
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
// `raised` is a place plus 1.5 × 2^20: a fixed-point number, the integer part in the upper word, 32 bits of fraction in
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

// First voxels for which all neighbours lie in the box: `voxel - BEFORE - start` below this. Fixed-point places are
// good below 2^19 voxels, floats below 2^22; what lies beyond takes the long way.
__device__ __forceinline__ unsigned limit(const Image &image, int axis) {
    const int last = image.box[axis] - (BEFORE + PAD) - AFTER;
    const int good = (1 << 19) - BEFORE - image.start[axis];
    return static_cast<unsigned>(max(0, min(last, WIDE ? last : good)));
}

// What `is_inner` and `first_voxel` need of an image, found once a thread.
template <unsigned BIAS> struct Inside {
    unsigned origin[3], limits[3];  // of the first voxels that are inner ones, `BIAS` higher
    INDEX row, plane;
    unsigned corner;  // of what a product of biased voxels and steps is too much, modulo 2^32

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
    __device__ __forceinline__ bool is_empty() const {
        return !(limits[1] && limits[2] && (RANK == 2 || limits[0]));
    }
    // The first voxel that an inner place reads, in the box.
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

// Between two voxels along x. Small integers keep the bias that makes floats of them (see Widen) in their difference,
// which is exact.
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

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// The sum over the voxels around an inner place. `first` is the first voxel it reads, in the image or in a copy of a
// part of it: the sum is the same.
template <class VOXEL, class STEP, class P>
__device__ __forceinline__ COMPUTE sum_inside(const VOXEL *first, const P *at, STEP row, STEP plane) {
#define VALUE(p) Widen<COMPUTE, VOXEL>::of(*(p))
#define BETWEEN(p) Along<COMPUTE, VOXEL>::of(*(p), *((p) + 1), x, u)
#if ORDER == 0
    STEP step = at[2].fraction >= COMPUTE(0.5);
    if (at[1].fraction >= COMPUTE(0.5)) step += row;
    if (RANK == 3 && at[0].fraction >= COMPUTE(0.5)) step += plane;
    return VALUE(first + step);
#elif ORDER == 1
    const COMPUTE x = at[2].fraction, y = at[1].fraction, u = 1 - x, v = 1 - y;
    const COMPUTE near = mix(BETWEEN(first), BETWEEN(first + row), y, v);
    if (RANK == 2) return near;
    const VOXEL *third = first + plane;
    const COMPUTE far = mix(BETWEEN(third), BETWEEN(third + row), y, v);
    return mix(near, far, at[0].fraction, 1 - at[0].fraction);
#else
    COMPUTE x[4], y[4], z[4] = {1, 0, 0, 0};
    cubic_weights(at[2].fraction, x);
    cubic_weights(at[1].fraction, y);
    if (RANK == 3) cubic_weights(at[0].fraction, z);
    COMPUTE sum = 0;
#pragma unroll
    for (int k = 0; k < (RANK == 3 ? 4 : 1); ++k, first += plane) {
        COMPUTE flat = 0;
        const VOXEL *line = first;
#pragma unroll
        for (int j = 0; j < 4; ++j, line += row) {
            const COMPUTE near = fused(x[1], VALUE(line + 1), x[0] * VALUE(line));
            flat = fused(y[j], fused(x[3], VALUE(line + 3), fused(x[2], VALUE(line + 2), near)), flat);
        }
        sum = fused(z[k], flat, sum);
    }
    return sum * COMPUTE(RANK == 3 ? 1.0 / 216.0 : 1.0 / 36.0);
#endif
#undef VALUE
#undef BETWEEN
}

__device__ __forceinline__ int remainder_of(int64 i, int period) {
    const int r = static_cast<int>(i % period);
    return r < 0 ? r + period : r;
}

// A voxel's number, taken back into the image as the spline is continued; -1 for none. SciPy continues `constant` and
// `wrap` by mirroring: only the place itself is constant or wrapped there.
__device__ __forceinline__ int fold(int64 i, int n) {
    if (i >= 0 && i < n) return static_cast<int>(i);
    if (MODE == GRID_CONSTANT) return -1;
    if (MODE == NEAREST) return i < 0 ? 0 : n - 1;
    if (n == 1) return 0;
    if (MODE == GRID_WRAP) return remainder_of(i, n);
    if (MODE == REFLECT) {
        const int64 r = i % (2ll * n), m = r < 0 ? r + 2ll * n : r;
        return static_cast<int>(m < n ? m : 2ll * n - 1 - m);
    }
    const int64 r = i % (2ll * n - 2), m = r < 0 ? r + 2ll * n - 2 : r;
    return static_cast<int>(m < n ? m : 2ll * n - 2 - m);
}

// A place, taken back into the image as SciPy's map_coordinate does, quirks included; false where it is outside for
// good.
__device__ inline bool bring_inside(double &c, int n) {
    if (!(c >= 0 && c <= n - 1)) {
        if (MODE == CONSTANT || c != c) return false;
        if (MODE == NEAREST) {
            // A cubic spline goes on beyond the last voxel until all it is made of are that voxel.
            const double beyond = ORDER == 3 ? 4 : 0;
            c = c < 0 ? fmax(c, -beyond) : fmin(c, n - 1 + beyond);
            return true;
        }
        if (!(fabs(c) < FARTHEST)) return false;
        if (MODE == GRID_CONSTANT) return true;
        if (n == 1) {
            c = 0;
            return true;
        }
        const double period = MODE == MIRROR ? 2.0 * n - 2 : MODE == REFLECT ? 2.0 * n : MODE == WRAP ? n - 1.0 : n;
        if (c < 0) {
            const double turns = trunc(-c / period);
            if (MODE == MIRROR) {
                c = __dadd_rn(__dmul_rn(period, turns), c);
                c = c <= 1 - n ? c + period : -c;
            } else if (MODE == REFLECT) {
                if (c < -period) c = __dadd_rn(__dmul_rn(period, turns), c);
                c = c < -n ? c + period : (c > -1e-15 ? 1e-15 : -c) - 1;
            } else {
                c = __dadd_rn(c, __dmul_rn(period, turns + 1));
            }
        } else {
            c = __dadd_rn(c, -__dmul_rn(period, trunc(c / period)));
            if (MODE == MIRROR && c >= n) c = period - c;
            if (MODE == REFLECT && c >= n) c = period - c - 1;
        }
    }
    return c > -1.0 || MODE == GRID_CONSTANT;
}

// The weights of a place's voxels along an axis: those of `sum_inside`, cubic ones not yet divided by 6.
template <class C> __device__ __forceinline__ void weigh(double fraction, C *weight) {
    if (ORDER == 0) {
        weight[0] = 1;
    } else if (ORDER == 1) {
        weight[TAPS - 1] = static_cast<C>(fraction);
        weight[0] = static_cast<C>(1.0 - fraction);
    } else {
        cubic_weights(static_cast<C>(fraction), weight);
    }
}

// A sample by SciPy's rules, whatever the place: NaN and what lies beyond all bounds give `outside` in the constant
// modes and NaN in the others. Voxels beyond the box (there are none if the box was cut for its places) count as 0.
__device__ __noinline__ COMPUTE sample_edge(const SOURCE *__restrict__ data, double c0, double c1, double c2, Image image,
                                            COMPUTE outside) {
    const double place[3] = {c0, c1, c2};
    INDEX offset[3][TAPS] = {};  // of a voxel in the box; -1 for what is `outside`
    COMPUTE weight[3][ORDER == 3 ? 4 : TAPS];
    weight[0][0] = 1;
    INDEX step = 1;
#pragma unroll
    for (int a = 2; a >= FIRST_AXIS; --a) {
        double c = place[a] + PAD;
        if (!bring_inside(c, image.whole[a]))
            return MODE == CONSTANT || MODE == GRID_CONSTANT ? outside : static_cast<COMPUTE>(__int_as_float(0x7FC00000));
        const double down = floor(ORDER == 0 ? c + 0.5 : c);
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

// a / b, rounded as a division is, of 1 / b: where it is not finite, the plain product.
__device__ __forceinline__ double quotient(double a, double b, double inverse) {
    const double near = __dmul_rn(a, inverse), rest = __fma_rn(-near, b, a);
    return fabs(rest) <= 1.7976931348623157e308 ? __fma_rn(rest, inverse, near) : near;
}

// Tiles of a grid of blocks. A grid of three axes needs no division, but is short of blocks along two of them; where it
// is, `counts` holds the tiles along y and x, and the grid has one axis.
struct Tile { int z, y, x; };
__device__ __forceinline__ Tile tile_of_block(const int *counts) {
    if (!counts[1])
        return {static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.x)};
    const unsigned rest = blockIdx.x / counts[1];
    return {static_cast<int>(rest / counts[0]), static_cast<int>(rest % counts[0]),
            static_cast<int>(blockIdx.x % counts[1])};
}
