// Weights and boundary modes of SciPy's splines, for every kernel that samples an image.
//
// Definitions: ORDER (0 to 5), MODE (one of the numbers below), and PAD: number of voxels that were added at either end
// of each axis. Here the image is the array with its padding.

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
// Mode CONSTANT moves points outside of the image by up to this distance in voxels to its edge; SciPy has no tolerance.
#ifndef ROUNDING
#define ROUNDING 0.0
#endif

constexpr int TAPS = ORDER + 1;
constexpr bool IS_EVEN = ORDER % 2 == 0;
// From here on doubles have no fraction to interpolate with, and casts to integers may overflow.
constexpr double FARTHEST = 4503599627370496.0;

__device__ __forceinline__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// Six times the weights of a cubic spline.
template <class C> __device__ __forceinline__ void cubic_weights(C x, C *w) {
    const C z = 1 - x, square = x * x;
    w[0] = z * z * z;
    w[3] = square * x;
    w[1] = 3 * w[3] - 6 * square + 4;
    w[2] = 6 - w[0] - w[1] - w[3];
}

// Weights of the TAPS voxels along an axis; their sum is WEIGHTS. `x` is the distance of a point from the voxel below
// it, or, for even orders, from the nearest voxel.
constexpr double WEIGHTS = ORDER == 3 ? 6.0 : 1.0;
template <class C> __device__ __forceinline__ void spline_weights(C x, C *w) {
    if constexpr (ORDER == 0) {
        w[0] = 1;
    } else if constexpr (ORDER == 1) {
        w[1] = x;
        w[0] = 1 - x;
    } else if constexpr (ORDER == 2) {
        const C below = C(0.5) - x, above = C(0.5) + x;
        w[0] = C(0.5) * below * below;
        w[1] = C(0.75) - x * x;
        w[2] = C(0.5) * above * above;
    } else if constexpr (ORDER == 3) {
        cubic_weights(x, w);
    } else if constexpr (ORDER == 4) {
        const C square = x * x, below = C(0.5) - x, above = C(0.5) + x, b = below * below, a = above * above;
        // 19/96 ± 11/24 x + x²/4 ∓ x³/6 - x⁴/6: the pieces on either side of the middle one.
        const C even = C(19.0 / 96) + square * (C(0.25) - square * C(1.0 / 6));
        const C odd = x * (C(11.0 / 24) - square * C(1.0 / 6));
        w[0] = b * b * C(1.0 / 24);
        w[1] = even - odd;
        w[2] = C(115.0 / 192) + square * (C(0.25) * square - C(0.625));
        w[3] = even + odd;
        w[4] = a * a * C(1.0 / 24);
    } else {
        const C z = 1 - x, x2 = x * x, z2 = z * z;
        // Pieces of a quintic spline at distances from 0 to 1, and from 1 to 2, the latter counted from 1.
        const auto near = [](C t) { return C(0.55) + t * t * (C(-0.5) + t * t * (C(0.25) - t * C(1.0 / 12))); };
        const auto next = [](C t) {
            const C rest = C(20.0 / 120) + t * (C(-20.0 / 120) + t * C(5.0 / 120));
            return C(26.0 / 120) + t * (C(-50.0 / 120) + t * (C(20.0 / 120) + t * rest));
        };
        w[0] = z2 * z2 * z * C(1.0 / 120);
        w[1] = next(x);
        w[2] = near(x);
        w[3] = near(z);
        w[4] = next(z);
        w[5] = x2 * x2 * x * C(1.0 / 120);
    }
}

// The same for a distance in double precision, which for order 1 is subtracted from 1 before it is rounded to C.
template <class C> __device__ __forceinline__ void weigh(double fraction, C *w) {
    if constexpr (ORDER == 1) {
        w[1] = static_cast<C>(fraction);
        w[0] = static_cast<C>(1.0 - fraction);
    } else {
        spline_weights(static_cast<C>(fraction), w);
    }
}

__device__ __forceinline__ int remainder_of(int64 i, int period) {
    const int r = static_cast<int>(i % period);
    return r < 0 ? r + period : r;
}

// Maps the index of a voxel into the image by the boundary mode; -1 for the constant value (GRID_CONSTANT). In the modes
// CONSTANT and WRAP, SciPy applies the mode to the point itself and mirrors the voxels around it.
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

// Maps a point into the image exactly as SciPy's map_coordinate does; false where the result is `cval`.
__device__ inline bool bring_inside(double &c, int n) {
    if (!(c >= 0 && c <= n - 1)) {
        if (MODE == CONSTANT && ROUNDING > 0 && c >= -ROUNDING && c <= n - 1 + ROUNDING) {
            c = c < 0 ? 0 : n - 1;
            return true;
        }
        if (MODE == CONSTANT || c != c) return false;
        if (MODE == NEAREST) {
            // Above order 1 a spline changes beyond the last voxel until all its taps fold to that voxel. At order 1
            // both taps fold to it at once: use the point halfway, where the weights of 1/2 sum without rounding, and
            // no weight of 0 turns an infinite voxel into NaN.
            const double beyond = ORDER > 1 ? 4 : ORDER == 1 ? 0.5 : 0;
            if (ORDER == 1) c = c < 0 ? -beyond : n - 1 + beyond;
            else c = c < 0 ? fmax(c, -beyond) : fmin(c, n - 1 + beyond);
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
