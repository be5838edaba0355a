// Sample an image on the grid of an affine map, directly (`affine`) or through shared memory (`affine_brick`).
//
// A tile is the voxels of the output that a block of threads computes; its brick is the box of the image that the tile
// needs, in shared memory. The host finds the size of the brick by interval arithmetic. A thread fetches, for each
// eight columns of a row, only the planes that the inverse map needs, so that the corners of a rotated brick are not
// read. Rows of a brick are 8 more or less than a multiple of 32 apart, so that the 8 × 4 points of a warp have no bank
// conflicts if the map is near the identity. Maps whose brick would be too large (strong shrinking, a rotation by a
// right angle) are sampled directly. A point is the coordinates of an output voxel in the image. It depends on the
// voxel's index in the whole output alone, so that a part of the output (a block of it) has the same bits as in the
// whole output, for orders 0 and 1.
//
// Definitions: those of sampling.cuh, TARGET, TILE_X, THREADS (of a block), MARCH (voxels of a thread), TOGETHER
// (voxels that a thread computes at a time, with a brick), BLOCKS (at least as many on a multiprocessor), and WARP_X
// (lanes of a warp along x: 32 or 8) for `affine`, PITCH (of a row of the brick) for `affine_brick`. Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "boundary.cuh"
#include "sampling.cuh"

constexpr int TILE_Y = THREADS / TILE_X;

struct Affine {
    double matrix[3][3], shift[3];
    double outside;
    int begin[3];  // of the block in the whole output
    int shape[3];  // of the block
    Image image;
    // For bricks: the inverse of the matrix; 1 / the first column of the inverse, or 0 where that is about 0; and how
    // far from the tile, along each axis of the output, the inverse map may place the middle of eight columns that a
    // point of the tile needs (see `needed_planes`).
    float inverse[3][3], per[3], slack[3];
    int brick[3];  // voxels of a brick, at most
    int tiles[2];
    int aligned;  // whether four voxels of a row can be read at once
#if BATCH
    Batch batch;
#endif
};

// Computes the points of a thread's voxels, from their indices in the whole output.
struct Grid {
    double x, y, z;
    double fixed[3];  // the part of a point that is the same for all voxels of the march, as a fixed-point number

    __device__ __forceinline__ Grid(const Affine &how, int x0, int y0, int z0)
        : x(static_cast<double>(x0 + how.begin[2])), y(static_cast<double>(y0 + how.begin[1])),
          z(static_cast<double>(z0 + how.begin[0])) {
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) {
            fixed[a] = __fma_rn(how.matrix[a][2], x, how.shift[a] + RAISE);
            if (RANK == 3) fixed[a] = __fma_rn(how.matrix[a][1], y, fixed[a]);
        }
    }
    // In SciPy's order of operations; `k` voxels further along the slowest axis.
    __device__ __forceinline__ double exactly(const Affine &how, int a, int k) const {
        double c = how.shift[a];
        if (RANK == 3) c = __dadd_rn(c, __dmul_rn(z + k, how.matrix[a][0]));
        c = __dadd_rn(c, __dmul_rn(RANK == 3 ? y : y + k, how.matrix[a][1]));
        return __dadd_rn(c, __dmul_rn(x, how.matrix[a][2]));
    }
    template <class P> __device__ __forceinline__ void locate_all(const Affine &how, int k, P *at) const {
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) {
#if WIDE
            at[a] = locate(exactly(how, a, k), COMPUTE());
#else
            at[a] = locate_raised(__fma_rn(how.matrix[a][RANK == 3 ? 0 : 1], (RANK == 3 ? z : y) + k, fixed[a]));
#endif
        }
    }
};
typedef decltype(locate(0.0, COMPUTE())) Point;

#if ORDER == 0
// The index in the box of the voxel nearest to an inner point, `k` voxels further. The result is the same as by
// `locate_all`, since half a voxel is a whole number of steps of a fixed-point number.
__device__ __forceinline__ INDEX nearest_voxel(const Affine &how, const Grid &grid, const Inside<Point::BIAS> &inside,
                                               int k) {
    Point at[3];
#if WIDE
    grid.locate_all(how, k, at);
    return inside.first_voxel(at) + nearest_inside(at, inside.row, inside.plane);
#else
#pragma unroll
    for (int a = FIRST_AXIS; a < 3; ++a)
        at[a] = locate_raised(
            __fma_rn(how.matrix[a][RANK == 3 ? 0 : 1], (RANK == 3 ? grid.z : grid.y) + k, grid.fixed[a] + 0.5));
    return inside.first_voxel(at);
#endif
}
#endif

// Whether a point is far enough outside to have the constant value, whatever the rounding. Includes points beyond the
// range of `locate`, if the image ends before that.
__device__ __forceinline__ bool is_far_outside(const Affine &how, const Point *at) {
    bool outside = false;
#pragma unroll
    for (int a = FIRST_AXIS; a < 3; ++a) {
        if (!WIDE && how.image.whole[a] >= 1 << 18) return false;
        const int voxel = static_cast<int>(at[a].voxel - Point::BIAS);
        outside = outside || voxel < -1 || voxel > how.image.whole[a];
    }
    return MODE == CONSTANT && outside;
}

__device__ __forceinline__ COMPUTE sample_by_rules(const SOURCE *__restrict__ data, const Affine &how, const Grid &grid,
                                                   const Point *at, int k) {
    if (is_far_outside(how, at)) return static_cast<COMPUTE>(how.outside);
    double c[3] = {0, 0, 0};
    for (int a = FIRST_AXIS; a < 3; ++a) c[a] = grid.exactly(how, a, k);
    return sample_edge(data, c[0], c[1], c[2], how.image, static_cast<COMPUTE>(how.outside));
}

#ifdef PITCH
#define WARP_X 8
#endif
// A thread's column and row in the tile.
__device__ __forceinline__ int column_in_tile() {
    return static_cast<int>(threadIdx.x % WARP_X + threadIdx.x / 32 % (TILE_X / WARP_X) * WARP_X);
}
__device__ __forceinline__ int row_in_tile() {
    return static_cast<int>(threadIdx.x % 32 / WARP_X + threadIdx.x / 32 / (TILE_X / WARP_X) * (32 / WARP_X));
}

#ifndef PITCH
// A thread computes MARCH voxels along the slowest axis. Their coordinates are monotonic: if the first and the last
// point are inner points, all are.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    affine(const SOURCE *__restrict__ data, TARGET *__restrict__ target, const Affine how) {
#if BATCH
    data += image_of_block(how.batch) * how.batch.image;
    target += image_of_block(how.batch) * how.batch.target;
#endif
    const Tile tile = TILE_OF_BLOCK(how);
    const int x = tile.x * TILE_X + column_in_tile();
    const int y = (tile.y * TILE_Y + row_in_tile()) * (RANK == 3 ? 1 : MARCH), z = RANK == 3 ? tile.z * MARCH : 0;
    if (x >= how.shape[2] || y >= how.shape[1]) return;

    const Inside<Point::BIAS> inside(how.image);
    const Grid grid(how, x, y, z);
    const int left = RANK == 3 ? how.shape[0] - z : how.shape[1] - y;
    const INDEX step = static_cast<INDEX>(RANK == 3 ? how.shape[1] : 1) * how.shape[2];
    TARGET *to = target + ((static_cast<int64>(z) * how.shape[1] + y) * how.shape[2] + x);
    Point ends[2][3];
    grid.locate_all(how, 0, ends[0]);
    grid.locate_all(how, MARCH - 1, ends[1]);
    if (left >= MARCH && inside.is_inner(ends[0]) && inside.is_inner(ends[1])) {
#if ORDER == 0
        if constexpr (AsItIs<SOURCE, TARGET>::value) {
#pragma unroll
            for (int k = 0; k < MARCH; ++k)
                AsItIs<SOURCE, TARGET>::copy(to + k * step, data[nearest_voxel(how, grid, inside, k)]);
            return;
        }
#endif
#pragma unroll
        for (int k = 0; k < MARCH; ++k) {
            Point at[3];
            grid.locate_all(how, k, at);
            const COMPUTE value = sum_inside(data + inside.first_voxel(at), at, inside.row, inside.plane);
            store(to + k * step, Narrow<TARGET, COMPUTE>::of(value));
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < MARCH && k < left; ++k) {
        Point at[3];
        grid.locate_all(how, k, at);
        const COMPUTE value = inside.is_inner(at)
                                  ? sum_inside(data + inside.first_voxel(at), at, inside.row, inside.plane)
                                  : sample_by_rules(data, how, grid, at, k);
        store(to + k * step, Narrow<TARGET, COMPUTE>::of(value));
    }
}
#else
constexpr int CHUNKS = PITCH / 4, ROWS = THREADS / CHUNKS;  // chunks of four voxels in a row; rows fetched at a time

struct alignas(sizeof(SOURCE) < 4 ? 4 * sizeof(SOURCE) : 16) Four { SOURCE voxel[4]; };
struct alignas(16) FourHeld { COMPUTE voxel[4]; };

// Copy four voxels into shared memory, asynchronously if they need no conversion: `wait_for_copies` waits for them.
__device__ __forceinline__ void copy_four(FourHeld *to, const float *from, float) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from));
#else
    *to = *reinterpret_cast<const FourHeld *>(from);
#endif
}
template <class S> __device__ __forceinline__ void copy_four(FourHeld *to, const S *from, COMPUTE) {
    const Four four = *reinterpret_cast<const Four *>(from);
    FourHeld held;
    for (int i = 0; i < 4; ++i) held.voxel[i] = Widen<COMPUTE, SOURCE>::of(four.voxel[i]);
    *to = held;
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

// The first voxel of a tile's brick, in the box and relative to the point of the tile's first voxel.
struct Corner {
    int first[3];
    float from_point[3];
};

// The planes of the brick in which any point of the tile needs any of eight columns of a row. Such a point is less than
// (ORDER + 1) / 2 voxels away from one of the columns along each axis, and the inverse map gives its voxel in the tile.
// The columns are eight because a memory transaction has 32 bytes: the threads that fetch them march through the planes
// together.
__device__ __forceinline__ void needed_planes(const Affine &how, const Corner &corner, int q, int column, int *begin,
                                              int *end) {
    const float z = corner.from_point[0], y = corner.from_point[1] + q;
    const float x = corner.from_point[2] + ((column & ~7) - corner.first[2] + 3.5f);
    constexpr int size[3] = {MARCH, TILE_Y, TILE_X};
    float low = 0, high = how.brick[0] - 1;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        const float *m = how.inverse[a];
        const float at = m[0] * z + m[1] * y + m[2] * x;  // the voxel's index in the first plane; m[0] more in each
        const float lower = -how.slack[a] - at, upper = size[a] - 1 + how.slack[a] - at;
        if (how.per[a] == 0) {
            if (lower > 0 || upper < 0) high = -1;
        } else {
            const float enter = lower * how.per[a], leave = upper * how.per[a];
            low = fmaxf(low, fminf(enter, leave));
            high = fminf(high, fmaxf(enter, leave));
        }
    }
    *begin = static_cast<int>(ceilf(low - 0.01f));
    *end = static_cast<int>(floorf(high + 0.01f)) + 1;
}

// Fetch the needed part of a brick into shared memory; voxels beyond the image are unused copies of its edge. A thread
// fetches four columns of a row, plane after plane.
__device__ __forceinline__ void fetch(const SOURCE *__restrict__ data, const Affine &how, const Corner &corner,
                                      COMPUTE *brick) {
    const int chunk = static_cast<int>(threadIdx.x % CHUNKS), row = static_cast<int>(threadIdx.x / CHUNKS);
    if (row >= ROWS || 4 * chunk >= how.brick[2]) return;
    const int *box = how.image.box, *first = corner.first, column = first[2] + 4 * chunk;
    const INDEX plane = static_cast<INDEX>(box[1]) * box[2];
    for (int q = row; q < how.brick[1]; q += ROWS) {
        const SOURCE *line = data + static_cast<INDEX>(min(max(first[1] + q, 0), box[1] - 1)) * box[2];
        int p, end;
        needed_planes(how, corner, q, column, &p, &end);
        COMPUTE *to = brick + ((p * how.brick[1] + q) * PITCH + 4 * chunk);
        if (how.aligned) {
            line += min(max(column, 0), box[2] - 4);
#pragma unroll 4
            for (; p < end; ++p, to += how.brick[1] * PITCH)
                copy_four(reinterpret_cast<FourHeld *>(to), line + min(max(first[0] + p, 0), box[0] - 1) * plane,
                          COMPUTE());
        } else {
            for (; p < end; ++p, to += how.brick[1] * PITCH) {
                const SOURCE *from = line + min(max(first[0] + p, 0), box[0] - 1) * plane;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    to[i] = Widen<COMPUTE, SOURCE>::of(from[min(max(column + i, 0), box[2] - 1)]);
            }
        }
    }
}

// Bound of the rounding errors of the points of a tile.
constexpr double NEAR = 1e-6;

// As `affine` for three axes, but first all voxels that a tile of the output needs are fetched into shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    affine_brick(const SOURCE *__restrict__ data, TARGET *__restrict__ target, const Affine how) {
#if BATCH
    data += image_of_block(how.batch) * how.batch.image;
    target += image_of_block(how.batch) * how.batch.target;
#endif
    extern __shared__ FourHeld fours[];
    COMPUTE *brick = fours->voxel;
    __shared__ Corner shared_corner;
    const Image &image = how.image;
    const Tile tile = TILE_OF_BLOCK(how);
    const int x0 = tile.x * TILE_X, y0 = tile.y * TILE_Y, z0 = tile.z * MARCH;
    if (threadIdx.x < 3) {  // the first voxel that any point of the tile needs
        const int a = static_cast<int>(threadIdx.x);
        const double *m = how.matrix[a], point = Grid(how, x0, y0, z0).exactly(how, a, 0) - image.start[a];
        const double lowest = point - NEAR + fmin(0.0, m[0] * (MARCH - 1)) + fmin(0.0, m[1] * (TILE_Y - 1)) +
                              fmin(0.0, m[2] * (TILE_X - 1));
        const int down = static_cast<int>(floor(fmin(fmax(lowest, -1e9), 1e9))) - BEFORE;
        shared_corner.first[a] = a == 2 ? down & ~3 : down;
        shared_corner.from_point[a] = static_cast<float>(shared_corner.first[a] - point);
    }
    __syncthreads();
    // A copy in registers: shared memory would be read again after every store to the brick.
    const Corner corner = shared_corner;
    bool any = true;  // whether any voxel of the brick lies in the box
#pragma unroll
    for (int a = 0; a < 3; ++a) any = any && corner.first[a] < image.box[a] && corner.first[a] + how.brick[a] > 0;
    if (any) fetch(data, how, corner, brick);
    wait_for_copies();
    const int x = x0 + column_in_tile(), y = y0 + row_in_tile();
    if (x >= how.shape[2] || y >= how.shape[1]) return;

    const Inside<Point::BIAS> inside(image);
    const Grid grid(how, x, y, z0);
    const int left = how.shape[0] - z0;
    const INDEX step = static_cast<INDEX>(how.shape[1]) * how.shape[2];
    TARGET *to = target + ((static_cast<int64>(z0) * how.shape[1] + y) * how.shape[2] + x);
    // The brick's first voxel, biased as `inside.origin`; and the range of first voxels of points.
    unsigned begin[3], limits[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        begin[a] = inside.origin[a] + static_cast<unsigned>(corner.first[a]);
        limits[a] = static_cast<unsigned>(how.brick[a] - BEFORE - AFTER);
    }
    const int plane = how.brick[1] * PITCH;
    const auto is_in_brick = [&](const Point *at) {
        bool held = inside.is_inner(at);
#pragma unroll
        for (int a = 0; a < 3; ++a) held = held && at[a].voxel - begin[a] < limits[a];
        return held;
    };
    const auto sum = [&](const Point *at) {
        const int from = static_cast<int>(at[0].voxel - begin[0]) * plane +
                         static_cast<int>(at[1].voxel - begin[1]) * PITCH + static_cast<int>(at[2].voxel - begin[2]);
        return sum_inside(brick + from, at, PITCH, plane);
    };
    Point ends[2][3];
    grid.locate_all(how, 0, ends[0]);
    grid.locate_all(how, MARCH - 1, ends[1]);
    if (left >= MARCH && is_in_brick(ends[0]) && is_in_brick(ends[1])) {
#pragma unroll(TOGETHER)
        for (int k = 0; k < MARCH; ++k) {
            Point at[3];
            grid.locate_all(how, k, at);
            store(to + k * step, Narrow<TARGET, COMPUTE>::of(sum(at)));
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < MARCH && k < left; ++k) {
        Point at[3];
        grid.locate_all(how, k, at);
        const COMPUTE value = is_in_brick(at) ? sum(at) : sample_by_rules(data, how, grid, at, k);
        store(to + k * step, Narrow<TARGET, COMPUTE>::of(value));
    }
}
#endif
