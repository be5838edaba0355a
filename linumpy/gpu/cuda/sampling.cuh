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
constexpr int TAPS = ORDER + 1;
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

template <class C> __device__ __forceinline__ void cubic_weights(C x, C *w) {
    const C z = 1 - x;
    w[1] = (x * x * (x - 2) * 3 + 4) * C(1.0 / 6.0);
    w[2] = (z * z * (z - 2) * 3 + 4) * C(1.0 / 6.0);
    w[0] = z * z * z * C(1.0 / 6.0);
    w[3] = 1 - (w[0] + w[1] + w[2]);
}

// Where a place lies: the voxel at or below it, and the fraction of a voxel beyond that. Only good where `inside` says
// so: other places may give any voxel, but none that passes for an inner one (see `limit`).
struct PlaceF { int voxel; float fraction; };
struct PlaceD { int voxel; double fraction; };

// Adding 1.5 × 2^23, rounded down, leaves the integer part in the low bits: no conversion, all at full rate.
__device__ __forceinline__ PlaceF locate(float c, float) {
    const float r = __fadd_rd(c, 12582912.0f);
    return PlaceF{__float_as_int(r) - 0x4B400000, c - (r - 12582912.0f)};
}
// `raised` is a place plus 1.5 × 2^20: a fixed-point number, the integer part in the upper word, 32 bits of fraction in
// the lower one.
__device__ __forceinline__ PlaceF locate_raised(double raised) {
    const unsigned fraction = static_cast<unsigned>(__double2loint(raised));
    return PlaceF{__double2hiint(raised) - 0x41380000,
                  __int_as_float(static_cast<int>(__funnelshift_r(fraction, 0x7Fu, 9))) - 1.0f};
}
constexpr double RAISE = 1572864.0;
__device__ __forceinline__ PlaceF locate(double c, float) { return locate_raised(c + RAISE); }
__device__ __forceinline__ PlaceD locate(double c, double) {
    const double down = floor(c);
    const bool sane = down >= -1.0 - PAD && down < 2147483647.0;
    return PlaceD{sane ? static_cast<int>(down) : BEFORE - 1, c - down};
}
__device__ __forceinline__ PlaceD locate(float c, double) { return locate(static_cast<double>(c), 0.0); }

// First voxels for which all neighbours lie in the box: `voxel - BEFORE - start` below this. Fixed-point places are
// good below 2^19 voxels, floats below 2^22; what lies beyond takes the long way.
__device__ __forceinline__ unsigned limit(const Image &image, int axis) {
    const int last = image.box[axis] - (BEFORE + PAD) - AFTER;
    const int good = (1 << 19) - BEFORE - image.start[axis];
    return static_cast<unsigned>(max(0, min(last, WIDE ? last : good)));
}

// The sum over the voxels around an inner place. `first` is the first voxel it reads, in the image or in a copy of a
// part of it: the sum is the same.
template <class VOXEL, class STEP, class P>
__device__ __forceinline__ COMPUTE sum_inside(const VOXEL *first, const P *at, STEP row, STEP plane) {
#define VALUE(p) Widen<COMPUTE, VOXEL>::of(*(p))
#if ORDER == 0
    STEP step = at[2].fraction >= COMPUTE(0.5);
    if (at[1].fraction >= COMPUTE(0.5)) step += row;
    if (RANK == 3 && at[0].fraction >= COMPUTE(0.5)) step += plane;
    return VALUE(first + step);
#elif ORDER == 1
    const COMPUTE x = at[2].fraction, y = at[1].fraction, u = 1 - x, v = 1 - y;
    const VOXEL *second = first + row;
    const COMPUTE a = VALUE(first), b = VALUE(first + 1), c = VALUE(second), d = VALUE(second + 1);
    const COMPUTE near = mix(mix(a, b, x, u), mix(c, d, x, u), y, v);
    if (RANK == 2) return near;
    const VOXEL *third = first + plane, *fourth = third + row;
    const COMPUTE e = VALUE(third), f = VALUE(third + 1), g = VALUE(fourth), h = VALUE(fourth + 1);
    const COMPUTE far = mix(mix(e, f, x, u), mix(g, h, x, u), y, v);
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
            const COMPUTE a = VALUE(line), b = VALUE(line + 1), c = VALUE(line + 2), d = VALUE(line + 3);
            flat += y[j] * (x[0] * a + x[1] * b + (x[2] * c + x[3] * d));
        }
        sum += z[k] * flat;
    }
    return sum;
#endif
#undef VALUE
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

// A sample by SciPy's rules, whatever the place: NaN and what lies beyond all bounds give `outside` in the constant
// modes and NaN in the others. Voxels beyond the box (there are none if the box was cut for its places) count as 0.
__device__ __noinline__ COMPUTE sample_edge(const SOURCE *__restrict__ data, double c0, double c1, double c2, Image image,
                                            COMPUTE outside) {
    const double place[3] = {c0, c1, c2};
    int voxel[3][TAPS];
    COMPUTE weight[3][TAPS];
    for (int a = FIRST_AXIS; a < 3; ++a) {
        double c = place[a] + PAD;
        if (!bring_inside(c, image.whole[a]))
            return MODE == CONSTANT || MODE == GRID_CONSTANT ? outside : static_cast<COMPUTE>(__int_as_float(0x7FC00000));
        const double down = floor(ORDER == 0 ? c + 0.5 : c);
        const int64 first = static_cast<int64>(down) - (BEFORE + PAD);
        if (ORDER == 0) {
            weight[a][0] = 1;
        } else if (ORDER == 1) {
            weight[a][TAPS - 1] = static_cast<COMPUTE>(c - down);
            weight[a][0] = static_cast<COMPUTE>(1.0 - (c - down));
        } else {
            double exact[4];
            cubic_weights(c - down, exact);
            for (int k = 0; k < TAPS; ++k) weight[a][k] = static_cast<COMPUTE>(exact[k]);
        }
        for (int k = 0; k < TAPS; ++k) voxel[a][k] = fold(first + k, image.whole[a]);
    }
    COMPUTE sum = 0;
    for (int k = 0; k < (RANK == 3 ? TAPS : 1); ++k)
        for (int j = 0; j < TAPS; ++j)
            for (int i = 0; i < TAPS; ++i) {
                const int z = RANK == 3 ? voxel[0][k] : 0, y = voxel[1][j], x = voxel[2][i];
                COMPUTE value = outside;
                if (z >= 0 && y >= 0 && x >= 0) {
                    const int p = RANK == 3 ? z - image.start[0] : 0, q = y - image.start[1], r = x - image.start[2];
                    const bool held = (RANK == 2 || static_cast<unsigned>(p) < static_cast<unsigned>(image.box[0])) &&
                                      static_cast<unsigned>(q) < static_cast<unsigned>(image.box[1]) &&
                                      static_cast<unsigned>(r) < static_cast<unsigned>(image.box[2]);
                    const INDEX at = (static_cast<INDEX>(p) * image.box[1] + q) * image.box[2] + r;
                    value = held ? Widen<COMPUTE, SOURCE>::of(data[at]) : COMPUTE(0);
                }
                sum += (RANK == 3 ? weight[0][k] : COMPUTE(1)) * weight[1][j] * weight[2][i] * value;
            }
    return sum;
}
