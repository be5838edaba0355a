// Sample an image: at given places (`map_points`), or on a grid under an affine map (`affine`).
//
// Definitions: those of sampling.cuh, TARGET, and COORDINATE (float or double) with FIELD (0 or 1) for `map_points`,
// WARP_X (lanes of a warp along x: 32 or 8) for `affine`, BRICK (planes of a tile) for `affine_brick`. Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "sampling.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ Image image_of(int n0, int n1, int n2) {
    return Image{{n0, n1, n2}, {0, 0, 0}, {n0, n1, n2}};
}

#ifdef COORDINATE
#if FIELD
typedef double PLACE;
#else
typedef COORDINATE PLACE;
#endif

// Points of a thread. They lie a block apart, so that neighbouring lanes sample neighbouring points.
constexpr int POINTS = ORDER == 3 ? 2 : 4;

// coordinates: RANK × count. With FIELD they are displacements from the voxels of a grid (planes of rows × columns), in
// units of 1 / scale voxels.
extern "C" __global__ void __launch_bounds__(THREADS)
map_points(const SOURCE *__restrict__ data, const COORDINATE *__restrict__ coordinates, TARGET *__restrict__ target,
           int64 count, int channels, int n0, int n1, int n2, double outside, int rows, int columns, double scale0,
           double scale1, double scale2) {
    const Image image = image_of(n0, n1, n2);
    const unsigned limits[3] = {limit(image, 0), limit(image, 1), limit(image, 2)};
    const INDEX row = n2, plane = static_cast<INDEX>(n1) * n2;
    const COMPUTE cval = static_cast<COMPUTE>(outside);
    const int64 first = static_cast<int64>(blockIdx.x) * (THREADS * POINTS) + threadIdx.x;

    PLACE c[POINTS][3];
#pragma unroll
    for (int k = 0; k < POINTS; ++k) {
        const int64 p = first + k * THREADS;
        c[k][0] = 0;
        if (p >= count) continue;
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) c[k][a] = __ldcs(coordinates + (a - FIRST_AXIS) * count + p);
#if FIELD
        const INDEX q = static_cast<INDEX>(p), line = q / columns;
        const double grid[3] = {static_cast<double>(line / rows), static_cast<double>(line % rows),
                                static_cast<double>(q - line * columns)};
        const double scale[3] = {scale0, scale1, scale2};
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) c[k][a] = __dadd_rn(grid[a], __dmul_rn(c[k][a], scale[a]));
#endif
    }
    for (int channel = 0; channel < channels; ++channel) {
        const SOURCE *here = data + static_cast<int64>(channel) * n0 * plane;
        COMPUTE value[POINTS];
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
            if (first + k * THREADS >= count) continue;
            decltype(locate(PLACE(), COMPUTE())) at[3];
            bool inner = true;
#pragma unroll
            for (int a = FIRST_AXIS; a < 3; ++a) {
                at[a] = locate(c[k][a], COMPUTE());
                at[a].voxel -= BEFORE;
                inner = inner && static_cast<unsigned>(at[a].voxel) < limits[a];
            }
            if (inner) {
                const INDEX z = RANK == 3 ? at[0].voxel : 0;
                value[k] = sum_inside(here + ((z * n1 + at[1].voxel) * row + at[2].voxel), at, row, plane);
            } else {
                value[k] = sample_edge(here, c[k][0], c[k][1], c[k][2], image, cval);
            }
        }
#pragma unroll
        for (int k = 0; k < POINTS; ++k) {
            const int64 p = first + k * THREADS;
            if (p < count) store(target + channel * count + p, Narrow<TARGET, COMPUTE>::of(value[k]));
        }
    }
}
#endif

// Place of a voxel of the output along one axis, in SciPy's order of operations.
__device__ __forceinline__ double exactly(double m0, double m1, double m2, double shift, double z, double y, double x) {
    double c = RANK == 3 ? __dadd_rn(shift, __dmul_rn(z, m0)) : shift;
    c = __dadd_rn(c, __dmul_rn(y, m1));
    return __dadd_rn(c, __dmul_rn(x, m2));
}

#ifdef WARP_X
constexpr int TILE_X = 32, TILE_Y = 8, MARCH = ORDER == 3 ? 2 : 4;

// A thread makes MARCH voxels, one after another along the slowest axis. The place of a voxel depends on its number in
// the whole output and on nothing else: not on where a block starts, nor on which thread makes it.
extern "C" __global__ void __launch_bounds__(THREADS)
affine(const SOURCE *__restrict__ data, TARGET *__restrict__ target, double m00, double m01, double m02, double m10,
       double m11, double m12, double m20, double m21, double m22, double s0, double s1, double s2, int start0,
       int start1, int start2, int shape0, int shape1, int shape2, int whole0, int whole1, int whole2, int at0, int at1,
       int at2, int box0, int box1, int box2, int channels, double outside) {
    const Image image = {{whole0, whole1, whole2}, {at0, at1, at2}, {box0, box1, box2}};
    const unsigned limits[3] = {limit(image, 0), limit(image, 1), limit(image, 2)};
    const double m[3][3] = {{m00, m01, m02}, {m10, m11, m12}, {m20, m21, m22}}, shift[3] = {s0, s1, s2};
    const INDEX row = box2, plane = static_cast<INDEX>(box1) * box2;
    const COMPUTE cval = static_cast<COMPUTE>(outside);

    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    constexpr unsigned WARP_Y = 32 / WARP_X, WARPS_X = TILE_X / WARP_X;
    const unsigned in_x = lane % WARP_X + warp % WARPS_X * WARP_X, in_y = lane / WARP_X + warp / WARPS_X * WARP_Y;

    const unsigned tiles_x = (shape2 + TILE_X - 1u) / TILE_X;
    constexpr unsigned ROWS = RANK == 3 ? TILE_Y : TILE_Y * MARCH;
    const unsigned tiles_y = (shape1 + ROWS - 1) / ROWS;
    const unsigned tile_x = blockIdx.x % tiles_x, rest = blockIdx.x / tiles_x;
    const int x = static_cast<int>(tile_x * TILE_X + in_x), y = static_cast<int>(rest % tiles_y * ROWS + in_y);
    const int z = RANK == 3 ? static_cast<int>(rest / tiles_y * MARCH) : 0;
    if (x >= shape2 || y >= shape1) return;

    const double gx = static_cast<double>(x) + start2, gy = static_cast<double>(y) + start1;
    const double gz = static_cast<double>(z) + start0;
    double fixed[3];  // the part of a place that does not change on the march, as a fixed-point number
#pragma unroll
    for (int a = FIRST_AXIS; a < 3; ++a) {
        fixed[a] = __fma_rn(m[a][2], gx, shift[a] + RAISE);
        if (RANK == 3) fixed[a] = __fma_rn(m[a][1], gy, fixed[a]);
    }
#pragma unroll
    for (int k = 0; k < MARCH; ++k) {
        const int zk = RANK == 3 ? z + k : 0, yk = RANK == 3 ? y : y + k * TILE_Y;
        if (RANK == 3 ? zk >= shape0 : yk >= shape1) break;
        const double pz = gz + (RANK == 3 ? k : 0), py = gy + (RANK == 3 ? 0 : k * TILE_Y);
        decltype(locate(0.0, COMPUTE())) at[3];
        bool inner = true;
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) {
#if WIDE
            at[a] = locate(exactly(m[a][0], m[a][1], m[a][2], shift[a], pz, py, gx), COMPUTE());
#else
            at[a] = locate_raised(__fma_rn(RANK == 3 ? m[a][0] : m[a][1], RANK == 3 ? pz : py, fixed[a]));
#endif
            at[a].voxel -= BEFORE + image.start[a];
            inner = inner && static_cast<unsigned>(at[a].voxel) < limits[a];
        }
        double c[3] = {0, 0, 0};
        if (!inner)
            for (int a = FIRST_AXIS; a < 3; ++a) c[a] = exactly(m[a][0], m[a][1], m[a][2], shift[a], pz, py, gx);
        const int64 to = (static_cast<int64>(zk) * shape1 + yk) * shape2 + x;
        for (int channel = 0; channel < channels; ++channel) {
            const SOURCE *here = data + static_cast<int64>(channel) * box0 * plane;
            COMPUTE value;
            if (inner) {
                const INDEX vz = RANK == 3 ? at[0].voxel : 0;
                value = sum_inside(here + ((vz * box1 + at[1].voxel) * row + at[2].voxel), at, row, plane);
            } else {
                value = sample_edge(here, c[0], c[1], c[2], image, cval);
            }
            const int64 size = static_cast<int64>(shape0) * shape1 * shape2;
            store(target + channel * size + to, Narrow<TARGET, COMPUTE>::of(value));
        }
    }
}
#endif

#ifdef BRICK
constexpr int TILE_X = 32, TILE_Y = 8, TILE_Z = BRICK, FETCH = 8;

// As `affine` for three axes, with all voxels that a tile of the output needs brought into shared memory first. A row of
// the brick is a multiple of 32 voxels long, so that lanes whose places lie in different rows find different banks.
extern "C" __global__ void __launch_bounds__(THREADS)
affine_brick(const SOURCE *__restrict__ data, TARGET *__restrict__ target, double m00, double m01, double m02, double m10,
             double m11, double m12, double m20, double m21, double m22, double s0, double s1, double s2, int start0,
             int start1, int start2, int shape0, int shape1, int shape2, int whole0, int whole1, int whole2, int at0,
             int at1, int at2, int box0, int box1, int box2, int brick0, int brick1, int brick2, int pitch,
             double outside) {
    extern __shared__ COMPUTE brick[];
    const Image image = {{whole0, whole1, whole2}, {at0, at1, at2}, {box0, box1, box2}};
    const unsigned limits[3] = {limit(image, 0), limit(image, 1), limit(image, 2)};
    const double m[3][3] = {{m00, m01, m02}, {m10, m11, m12}, {m20, m21, m22}}, shift[3] = {s0, s1, s2};
    const int size[3] = {brick0, brick1, brick2};
    const INDEX row = box2, plane = static_cast<INDEX>(box1) * box2;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned tiles_x = (shape2 + TILE_X - 1u) / TILE_X, tiles_y = (shape1 + TILE_Y - 1u) / TILE_Y;
    const unsigned rest = blockIdx.x / tiles_x;
    const int x0 = static_cast<int>(blockIdx.x % tiles_x * TILE_X), y0 = static_cast<int>(rest % tiles_y * TILE_Y);
    const int z0 = static_cast<int>(rest / tiles_y * TILE_Z);
    const double gx = static_cast<double>(x0 + lane) + start2, gy = static_cast<double>(y0 + warp) + start1;

    // The brick's first voxel, in the box: one below the least place of the tile.
    int first[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        double least = shift[a] + m[a][0] * (z0 + start0) + m[a][1] * (y0 + start1) + m[a][2] * (x0 + start2);
        least += fmin(0.0, m[a][0] * (TILE_Z - 1)) + fmin(0.0, m[a][1] * (TILE_Y - 1)) + fmin(0.0, m[a][2] * (TILE_X - 1));
        const double down = floor(fmin(fmax(least, -1e9), 1e9)) - 1 - BEFORE;
        first[a] = static_cast<int>(down) - image.start[a];
    }
    // Many loads at a time: what counts here is how long the first of them takes. Counts are small enough that a
    // product with the reciprocal, half a unit further, divides them exactly.
    const float per_row = 1.0f / brick2, per_plane = 1.0f / brick1;
    const int total = brick0 * brick1 * brick2;
    for (int begin = threadIdx.x; begin < total; begin += FETCH * THREADS) {
        SOURCE fetched[FETCH];
        int to[FETCH];
#pragma unroll
        for (int k = 0; k < FETCH; ++k) {
            const int i = min(begin + k * THREADS, total - 1);
            const int line = static_cast<int>((i + 0.5f) * per_row), x = i - line * brick2;
            const int p = static_cast<int>((line + 0.5f) * per_plane), q = line - p * brick1;
            const int z = min(max(first[0] + p, 0), box0 - 1), y = min(max(first[1] + q, 0), box1 - 1);
            fetched[k] = data[(static_cast<INDEX>(z) * box1 + y) * row + min(max(first[2] + x, 0), box2 - 1)];
            to[k] = line * pitch + x;
        }
#pragma unroll
        for (int k = 0; k < FETCH; ++k) brick[to[k]] = Widen<COMPUTE, SOURCE>::of(fetched[k]);
    }
    __syncthreads();
    if (x0 + lane >= shape2 || y0 + warp >= shape1) return;

    double fixed[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) fixed[a] = __fma_rn(m[a][1], gy, __fma_rn(m[a][2], gx, shift[a] + RAISE));
    const COMPUTE cval = static_cast<COMPUTE>(outside);
#pragma unroll 2
    for (int k = 0; k < TILE_Z && z0 + k < shape0; ++k) {
        const double gz = static_cast<double>(z0 + k) + start0;
        decltype(locate(0.0, COMPUTE())) at[3];
        bool inner = true, held = true;
        int in_brick[3];
#pragma unroll
        for (int a = 0; a < 3; ++a) {
#if WIDE
            at[a] = locate(exactly(m[a][0], m[a][1], m[a][2], shift[a], gz, gy, gx), COMPUTE());
#else
            at[a] = locate_raised(__fma_rn(m[a][0], gz, fixed[a]));
#endif
            at[a].voxel -= BEFORE + image.start[a];
            inner = inner && static_cast<unsigned>(at[a].voxel) < limits[a];
            in_brick[a] = at[a].voxel - first[a];
            held = held && in_brick[a] >= 0 && in_brick[a] + BEFORE + AFTER < size[a];
        }
        COMPUTE value;
        if (inner && held) {
            value = sum_inside(brick + (in_brick[0] * brick1 + in_brick[1]) * pitch + in_brick[2], at, pitch, brick1 * pitch);
        } else if (inner) {
            const INDEX z = at[0].voxel;
            value = sum_inside(data + ((z * box1 + at[1].voxel) * row + at[2].voxel), at, row, plane);
        } else {
            double c[3];
            for (int a = 0; a < 3; ++a) c[a] = exactly(m[a][0], m[a][1], m[a][2], shift[a], gz, gy, gx);
            value = sample_edge(data, c[0], c[1], c[2], image, cval);
        }
        store(target + (static_cast<int64>(z0 + k) * shape1 + y0 + warp) * shape2 + x0 + lane,
              Narrow<TARGET, COMPUTE>::of(value));
    }
}
#endif
