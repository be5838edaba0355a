// Sample an image at given points, or at displaced voxels.
//
// Points on a grid are sampled in tiles of 32 × 8 × MARCH, so that the voxels that one point reads are in the cache for
// its neighbours along all axes. A thread marches along the slowest axis; it loads the next coordinates while it
// samples. Points in a list are assumed to be scattered: the image is first copied into cells (of 4 × 2 × 4 voxels for
// voxels of 4 bytes), in which a point touches 1.4 times fewer cache lines; without memory for the copy, the image is
// sampled directly.
//
// Displaced voxels need no array of coordinates: a thread computes its voxel's index and reads the field once. A
// displacement in µm is divided by the voxel's size in double precision, correctly rounded; an error of one bit could
// move a voxel that is displaced exactly to the image's end to the outside.
//
// Definitions: those of sampling.cuh, TARGET, COORDINATE (float or double), FIELD (1: displacements in voxels, 2: in
// units, else 0), GRID (0: a list of points; 1: a grid of points of RANK axes), TILE_X, THREADS (of a block), MARCH
// (points of a thread), TOGETHER (points that a thread computes at a time), BLOCKS (at least as many on a
// multiprocessor), CELLS (1: there is a copy of the image in cells, for orders 0 and 1 and three axes), and with CELLS
// the definitions of cells.cuh. Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "boundary.cuh"
#include "sampling.cuh"
#if CELLS
#include "cells.cuh"

struct Cells {
    const SOURCE *first;
    INDEX row, plane;

    __device__ __forceinline__ Cells(const SOURCE *cells, const int *whole)
        : first(cells), row(cell_row(whole[2])), plane(cell_plane(whole[1], row)) {}

    // As `sum_inside`, and the same bits.
    template <class P> __device__ __forceinline__ COMPUTE sum(const P *at, const unsigned *voxel) const {
        const INDEX x = in_cells_x(voxel[2]), right = in_cells_x(voxel[2] + 1);
        const INDEX y = in_cells_y(voxel[1], row), below = in_cells_y(voxel[1] + 1, row);
        const INDEX z = in_cells_z(voxel[0], plane), behind = in_cells_z(voxel[0] + 1, plane);
#if ORDER == 0
        const INDEX q = (at[2].fraction >= COMPUTE(0.5) ? right : x) + (at[1].fraction >= COMPUTE(0.5) ? below : y);
        return Widen<COMPUTE, SOURCE>::of(first[(at[0].fraction >= COMPUTE(0.5) ? behind : z) + q]);
#else
        const COMPUTE f = at[2].fraction, g = at[1].fraction, u = 1 - f, v = 1 - g;
        const SOURCE *front = first + z, *back = first + behind;
        const COMPUTE near = mix(Along<COMPUTE, SOURCE>::of(front[y + x], front[y + right], f, u),
                                 Along<COMPUTE, SOURCE>::of(front[below + x], front[below + right], f, u), g, v);
        const COMPUTE far = mix(Along<COMPUTE, SOURCE>::of(back[y + x], back[y + right], f, u),
                                Along<COMPUTE, SOURCE>::of(back[below + x], back[below + right], f, u), g, v);
        return mix(near, far, at[0].fraction, 1 - at[0].fraction);
#endif
    }
};
#endif

constexpr int TILE_Y = THREADS / TILE_X;

struct Points {
    int64 count;
    double outside;
    double sizes[3], inverse[3];  // of a voxel in units of displacement, and 1 / size
    int whole[3];  // voxels of the image
    int grid[3];  // planes, rows and columns of points
    int tiles[2];
#if BATCH
    Batch batch;
#endif
};

#if FIELD
typedef double POSITION;
#else
typedef COORDINATE POSITION;
#endif

__device__ __forceinline__ POSITION coordinate_of(COORDINATE given, const Points &how, int axis, const int *voxel) {
#if FIELD == 2
    return __dadd_rn(static_cast<double>(voxel[axis]), quotient(given, how.sizes[axis], how.inverse[axis]));
#elif FIELD
    return __dadd_rn(static_cast<double>(voxel[axis]), static_cast<double>(given));
#else
    return given;
#endif
}

#if BATCH
// The images of a block.
struct Images {
    int64 image, target;
    int count;
};
__device__ __forceinline__ Images images_of_block(const Batch &batch, int64 *first) {
    *first = image_of_block(batch) * batch.together;
    return {batch.image, batch.target,
            static_cast<int>(min(static_cast<int64>(batch.together), batch.images - *first))};
}
// Sample all images of a block at one point by SciPy's rules.
__device__ __noinline__ void store_edge(const SOURCE *__restrict__ data, TARGET *__restrict__ target, double c0,
                                        double c1, double c2, Image image, COMPUTE outside, Images images) {
    Edge edge;
    const bool is_somewhere = edge.find(c0, c1, c2, image);
    for (int m = 0; m < images.count; ++m) {
        const COMPUTE value = is_somewhere ? edge.sum(data + m * images.image, outside) : nowhere(outside);
        store(target + m * images.target, Narrow<TARGET, COMPUTE>::of(value));
    }
}
#endif

// coordinates: RANK × count. Threads of a block sample neighbours in space (a grid) or in the list, for the cache. A
// thread computes MARCH points, TOGETHER at a time; the coordinates of the next are loaded while it waits for voxels.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    map_points(const SOURCE *__restrict__ data, const COORDINATE *__restrict__ coordinates, TARGET *__restrict__ target,
               const SOURCE *__restrict__ cells, const Points how) {
    const Image image = {
        {how.whole[0], how.whole[1], how.whole[2]}, {0, 0, 0}, {how.whole[0], how.whole[1], how.whole[2]}};
    typedef decltype(locate(POSITION(), COMPUTE())) Point;
    const Inside<Point::BIAS> inside(image);
    static_assert(MARCH <= 32 && MARCH % TOGETHER == 0, "a bit for each");
#if BATCH
    int64 first_image;
    const Images images = images_of_block(how.batch, &first_image);
    data += first_image * how.batch.image;
    target += first_image * how.batch.target;
#endif
#if GRID
    const Tile tile = TILE_OF_BLOCK(how);
    const int x = tile.x * TILE_X + static_cast<int>(threadIdx.x % TILE_X);
    const int y = tile.y * (RANK == 3 ? TILE_Y : TILE_Y * MARCH) + static_cast<int>(threadIdx.x / TILE_X);
    const int z = RANK == 3 ? tile.z * MARCH : 0;
    if (x >= how.grid[2] || y >= how.grid[1]) return;
    const INDEX begin = (static_cast<INDEX>(z) * how.grid[1] + y) * how.grid[2] + x;
    const INDEX step = static_cast<INDEX>(RANK == 3 ? how.grid[1] : TILE_Y) * how.grid[2];
    const int left = min(RANK == 3 ? how.grid[0] - z : (how.grid[1] - y + TILE_Y - 1) / TILE_Y, MARCH);
#define VOXEL_OF_POINT(i) const int voxel[3] = {RANK == 3 ? z + (i) : 0, RANK == 3 ? y : y + (i) * TILE_Y, x}
#else
    const INDEX begin = static_cast<INDEX>(BLOCK_IN_IMAGE(how)) * (THREADS * MARCH) + threadIdx.x, step = THREADS;
    if (begin >= how.count) return;
    const int left = static_cast<int>(min((how.count - begin + THREADS - 1) / THREADS, static_cast<int64>(MARCH)));
#define VOXEL_OF_POINT(i) const int *const voxel = nullptr
#endif
    COORDINATE next[TOGETHER][3];
    const auto fetch = [&](int i) {
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k)
#pragma unroll
            for (int a = FIRST_AXIS; a < 3; ++a)
                next[k][a] =
                    __ldcs(coordinates + (a - FIRST_AXIS) * how.count + (begin + (i + k < left ? i + k : i) * step));
    };
    // First compute all points as if they were inner points, so that all loads are in flight at once. Other points read
    // any voxels of the image, and are computed again at the end, by SciPy's rules.
    unsigned others = 0;
    if (inside.is_empty()) {
        others = ~0u;
    } else {
        fetch(0);
#pragma unroll 1
        for (int i = 0; i < left; i += TOGETHER) {
            COORDINATE given[TOGETHER][3];
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k)
#pragma unroll
                for (int a = FIRST_AXIS; a < 3; ++a) given[k][a] = next[k][a];
            if (i + TOGETHER < left) fetch(i + TOGETHER);
#if BATCH
            Point at[TOGETHER][3];
            INDEX first[TOGETHER];
            bool inner[TOGETHER];
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) {
                VOXEL_OF_POINT(i + k);
#pragma unroll
                for (int a = FIRST_AXIS; a < 3; ++a)
                    at[k][a] = locate(coordinate_of(given[k][a], how, a, voxel), COMPUTE());
                inner[k] = inside.is_inner(at[k]);
                first[k] = inner[k] ? inside.first_voxel(at[k]) : 0;
                if (!inner[k]) others |= 1u << (i + k);
            }
            for (int m = 0; m < images.count; ++m) {
                const SOURCE *const source = data + m * images.image;
                TARGET *const to = target + m * images.target;
#pragma unroll
                for (int k = 0; k < TOGETHER; ++k) {
                    const COMPUTE value = sum_inside(source + first[k], at[k], inside.row, inside.plane);
                    if (inner[k] && i + k < left)
                        store(to + (begin + (i + k) * step), Narrow<TARGET, COMPUTE>::of(value));
                }
            }
#else
#pragma unroll
            for (int k = 0; k < TOGETHER; ++k) {
                VOXEL_OF_POINT(i + k);
                Point at[3];
#pragma unroll
                for (int a = FIRST_AXIS; a < 3; ++a)
                    at[a] = locate(coordinate_of(given[k][a], how, a, voxel), COMPUTE());
                const bool inner = inside.is_inner(at);
#if CELLS
                unsigned first[3];
#pragma unroll
                for (int a = 0; a < 3; ++a) first[a] = inner ? at[a].voxel - inside.origin[a] : 0;
                const COMPUTE value = Cells(cells, how.whole).sum(at, first);
#else
                const COMPUTE value =
                    sum_inside(data + (inner ? inside.first_voxel(at) : 0), at, inside.row, inside.plane);
#endif
                if (!inner) others |= 1u << (i + k);
                if (inner && i + k < left) store(target + (begin + (i + k) * step), Narrow<TARGET, COMPUTE>::of(value));
            }
#endif
        }
    }
#pragma unroll 1
    for (int i = 0; i < left && others >> i; ++i) {
        if (!(others >> i & 1)) continue;
        const INDEX p = begin + i * step;
        VOXEL_OF_POINT(i);
        POSITION c[3] = {0, 0, 0};
        for (int a = FIRST_AXIS; a < 3; ++a)
            c[a] = coordinate_of(coordinates[(a - FIRST_AXIS) * how.count + p], how, a, voxel);
#if BATCH
        store_edge(data, target + p, c[0], c[1], c[2], image, static_cast<COMPUTE>(how.outside), images);
#else
        const COMPUTE value = sample_edge(data, c[0], c[1], c[2], image, static_cast<COMPUTE>(how.outside));
        store(target + p, Narrow<TARGET, COMPUTE>::of(value));
#endif
    }
}
