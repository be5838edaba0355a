// Sample an image on a grid under an affine map, directly (`affine`) or through shared memory (`affine_brick`).
//
// Definitions: those of sampling.cuh, TARGET, TILE_X, THREADS (of a block), MARCH (voxels of a thread), BLOCKS (of a multiprocessor,
// at least), and WARP_X (lanes of a warp along x: 32 or 8) for `affine`, PITCH (of a row of the brick) for `affine_brick`.
// Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "sampling.cuh"

constexpr int TILE_Y = THREADS / TILE_X;

struct Affine {
    double matrix[3][3], shift[3];
    double outside;
    int begin[3];  // of the block in the whole output
    int shape[3];  // of the block
    Image image;
    int brick[3];  // voxels of a brick, at most
    int tiles[2];
    int aligned;  // whether four voxels of a row can be read at once
};

// The place of a voxel depends on its number in the whole output and on nothing else: not on where a block starts, nor
// on which thread makes it.
struct Grid {
    double x, y, z;
    double fixed[3];  // the part of a place that does not change on the march, as a fixed-point number

    __device__ __forceinline__ Grid(const Affine &how, int x0, int y0, int z0)
        : x(static_cast<double>(x0 + how.begin[2])), y(static_cast<double>(y0 + how.begin[1])),
          z(static_cast<double>(z0 + how.begin[0])) {
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) {
            fixed[a] = __fma_rn(how.matrix[a][2], x, how.shift[a] + RAISE);
            if (RANK == 3) fixed[a] = __fma_rn(how.matrix[a][1], y, fixed[a]);
        }
    }
    // In SciPy's order of operations, `k` voxels on along the slowest axis.
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
typedef decltype(locate(0.0, COMPUTE())) Place;

// Any voxel, inner or not.
__device__ __forceinline__ COMPUTE sample_anywhere(const SOURCE *__restrict__ data, const Affine &how, const Grid &grid,
                                                   const Inside<Place::BIAS> &inside, int k) {
    Place at[3];
    grid.locate_all(how, k, at);
    if (inside.is_inner(at)) return sum_inside(data + inside.first_voxel(at), at, inside.row, inside.plane);
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
// A thread makes MARCH voxels, one after another along the slowest axis. Places move one way on that march: where the
// first and the last are inner ones, so are all.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
affine(const SOURCE *__restrict__ data, TARGET *__restrict__ target, const Affine how) {
    const Tile tile = tile_of_block(how.tiles);
    const int x = tile.x * TILE_X + column_in_tile();
    const int y = (tile.y * TILE_Y + row_in_tile()) * (RANK == 3 ? 1 : MARCH), z = RANK == 3 ? tile.z * MARCH : 0;
    if (x >= how.shape[2] || y >= how.shape[1]) return;

    const Inside<Place::BIAS> inside(how.image);
    const Grid grid(how, x, y, z);
    const int left = RANK == 3 ? how.shape[0] - z : how.shape[1] - y;
    const INDEX step = static_cast<INDEX>(RANK == 3 ? how.shape[1] : 1) * how.shape[2];
    TARGET *to = target + ((static_cast<int64>(z) * how.shape[1] + y) * how.shape[2] + x);
    Place ends[2][3];
    grid.locate_all(how, 0, ends[0]);
    grid.locate_all(how, MARCH - 1, ends[1]);
    if (left >= MARCH && inside.is_inner(ends[0]) && inside.is_inner(ends[1])) {
#pragma unroll
        for (int k = 0; k < MARCH; ++k) {
            Place at[3];
            grid.locate_all(how, k, at);
            const COMPUTE value = sum_inside(data + inside.first_voxel(at), at, inside.row, inside.plane);
            store(to + k * step, Narrow<TARGET, COMPUTE>::of(value));
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < MARCH && k < left; ++k)
        store(to + k * step, Narrow<TARGET, COMPUTE>::of(sample_anywhere(data, how, grid, inside, k)));
}
#else
constexpr int CHUNKS = PITCH / 4, ROWS = THREADS / CHUNKS;  // of four voxels; rows brought at a time

struct alignas(sizeof(SOURCE) < 4 ? 4 * sizeof(SOURCE) : 16) Four { SOURCE voxel[4]; };
struct alignas(16) FourHeld { COMPUTE voxel[4]; };

// Copy four voxels into shared memory. Those that need no conversion are not waited for, see `arrived`.
__device__ __forceinline__ void bring(FourHeld *to, const float *from, float) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from));
#else
    *to = *reinterpret_cast<const FourHeld *>(from);
#endif
}
template <class S> __device__ __forceinline__ void bring(FourHeld *to, const S *from, COMPUTE) {
    const Four four = *reinterpret_cast<const Four *>(from);
    FourHeld held;
    for (int i = 0; i < 4; ++i) held.voxel[i] = Widen<COMPUTE, SOURCE>::of(four.voxel[i]);
    *to = held;
}
__device__ __forceinline__ void arrived() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
    __syncthreads();
}

// Bring a part of the image that begins at `first` into shared memory. Beyond the image lies its edge, which nobody
// looks at. A thread brings four columns of a row in plane after plane.
__device__ __forceinline__ void fetch(const SOURCE *__restrict__ data, const Affine &how, const int *first, COMPUTE *brick) {
    const int chunk = static_cast<int>(threadIdx.x % CHUNKS), row = static_cast<int>(threadIdx.x / CHUNKS);
    if (row >= ROWS || 4 * chunk >= how.brick[2]) return;
    const int *box = how.image.box, begin = first[2] + 4 * chunk;
    const INDEX plane = static_cast<INDEX>(box[1]) * box[2];
    for (int q = row; q < how.brick[1]; q += ROWS) {
        const SOURCE *line = data + static_cast<INDEX>(min(max(first[1] + q, 0), box[1] - 1)) * box[2];
        COMPUTE *to = brick + (q * PITCH + 4 * chunk);
        if (how.aligned) {
            line += min(max(begin, 0), box[2] - 4);
#pragma unroll 4
            for (int p = 0; p < how.brick[0]; ++p, to += how.brick[1] * PITCH)
                bring(reinterpret_cast<FourHeld *>(to), line + min(max(first[0] + p, 0), box[0] - 1) * plane, COMPUTE());
        } else {
            for (int p = 0; p < how.brick[0]; ++p, to += how.brick[1] * PITCH) {
                const SOURCE *from = line + min(max(first[0] + p, 0), box[0] - 1) * plane;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    to[i] = Widen<COMPUTE, SOURCE>::of(from[min(max(begin + i, 0), box[2] - 1)]);
            }
        }
    }
}

// Places of a tile, as they are computed, are this near to those of exact numbers.
constexpr double NEAR = 1e-6;

// As `affine` for three axes, with all voxels that a tile of the output needs brought into shared memory first. PITCH is 8
// more than a multiple of 32: the four rows of a warp's eight columns then lie in different banks, as far as the map is
// near to the identity.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
affine_brick(const SOURCE *__restrict__ data, TARGET *__restrict__ target, const Affine how) {
    extern __shared__ FourHeld fours[];
    COMPUTE *brick = fours->voxel;
    __shared__ int first[3];  // the brick's first voxel in the box: the least that a place of the tile needs
    const Image &image = how.image;
    const Tile tile = tile_of_block(how.tiles);
    const int x0 = tile.x * TILE_X, y0 = tile.y * TILE_Y, z0 = tile.z * MARCH;
    if (threadIdx.x < 3) {
        const int a = static_cast<int>(threadIdx.x);
        const double *m = how.matrix[a];
        double least = Grid(how, x0, y0, z0).exactly(how, a, 0) - NEAR;
        least += fmin(0.0, m[0] * (MARCH - 1)) + fmin(0.0, m[1] * (TILE_Y - 1)) + fmin(0.0, m[2] * (TILE_X - 1));
        const int down = static_cast<int>(floor(fmin(fmax(least, -1e9), 1e9))) - BEFORE - image.start[a];
        first[a] = a == 2 ? down & ~3 : down;
    }
    __syncthreads();
    fetch(data, how, first, brick);
    arrived();
    const int x = x0 + column_in_tile(), y = y0 + row_in_tile();
    if (x >= how.shape[2] || y >= how.shape[1]) return;

    const Inside<Place::BIAS> inside(image);
    const Grid grid(how, x, y, z0);
    const int left = how.shape[0] - z0;
    const INDEX step = static_cast<INDEX>(how.shape[1]) * how.shape[2];
    TARGET *to = target + ((static_cast<int64>(z0) * how.shape[1] + y) * how.shape[2] + x);
    // Where the brick begins, as `inside.origin`; and its last voxels that a place may begin at.
    unsigned begin[3], limits[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        begin[a] = inside.origin[a] + static_cast<unsigned>(first[a]);
        limits[a] = static_cast<unsigned>(how.brick[a] - BEFORE - AFTER);
    }
    const int plane = how.brick[1] * PITCH;
    Place ends[2][3];
    bool held = left >= MARCH;
#pragma unroll
    for (int end = 0; end < 2; ++end) {
        grid.locate_all(how, end ? MARCH - 1 : 0, ends[end]);
        held = held && inside.is_inner(ends[end]);
#pragma unroll
        for (int a = 0; a < 3; ++a) held = held && ends[end][a].voxel - begin[a] < limits[a];
    }
    if (held) {
#pragma unroll (ORDER == 3 ? 2 : 4)
        for (int k = 0; k < MARCH; ++k) {
            Place at[3];
            grid.locate_all(how, k, at);
            const int from = static_cast<int>(at[0].voxel - begin[0]) * plane +
                             static_cast<int>(at[1].voxel - begin[1]) * PITCH + static_cast<int>(at[2].voxel - begin[2]);
            const COMPUTE value = sum_inside(brick + from, at, PITCH, plane);
            store(to + k * step, Narrow<TARGET, COMPUTE>::of(value));
        }
        return;
    }
#pragma unroll 1
    for (int k = 0; k < MARCH && k < left; ++k)
        store(to + k * step, Narrow<TARGET, COMPUTE>::of(sample_anywhere(data, how, grid, inside, k)));
}
#endif
