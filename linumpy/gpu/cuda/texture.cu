// Sample an image linearly by the texture unit, from a copy of it in a CUDA array. A fraction of a voxel is rounded to 1/256.
//
// Definitions: those of sampling.cuh (COMPUTE float, WIDE 0, ORDER 1, PAD 0), TARGET, PLACES (0: a list; 1: a grid that is
// displaced, in voxels; 2: the same in units; 3: the grid of an affine map), COORDINATE (float or double), TILE_X, THREADS
// (of a block), MARCH (places of a thread). Never a shape.
#include "number.cuh"
#include "elements.cuh"
#include "sampling.cuh"

#define LIST 0
#define AFFINE 3

constexpr int TILE_Y = THREADS / TILE_X;

struct Textured {
    int64 count;
    double outside;
    double matrix[3][3];  // of an affine map; of units, the first row holds their sizes and the second one 1 / size
    double shift[3];
    int whole[3];  // voxels of the image
    int grid[3];   // planes, rows and columns of places
    int tiles[2];
};

#if PLACES == LIST
typedef COORDINATE PLACE;
#else
typedef double PLACE;
#endif

// Integers are read as parts of their largest number.
template <class S> struct Read { static constexpr float largest = 1.0f; };
template <> struct Read<unsigned char> { static constexpr float largest = 255.0f; };
template <> struct Read<unsigned short> { static constexpr float largest = 65535.0f; };

// To the nearest 1/256, for places from 0 to 2^14: what the unit makes of a place is then known. Adding 1.5 × 2^15, or
// 1.5 × 2^44 in double precision, leaves no bits below that.
__device__ __forceinline__ float to_256th(float c) { return c + 49152.0f - 49152.0f; }
__device__ __forceinline__ float to_256th(double c) { return static_cast<float>(c + 26388279066624.0 - 26388279066624.0); }

__device__ __forceinline__ float sample_texture(cudaTextureObject_t texture, const PLACE *c) {
    const float x = to_256th(c[2]) + 0.5f, y = to_256th(c[1]) + 0.5f;
#if RANK == 3
    return tex3D<float>(texture, x, y, to_256th(c[0]) + 0.5f) * Read<SOURCE>::largest;
#else
    return tex2D<float>(texture, x, y) * Read<SOURCE>::largest;
#endif
}

__device__ __forceinline__ bool is_within(const PLACE *c, const Textured &how) {
    bool within = true;
#pragma unroll
    for (int a = FIRST_AXIS; a < 3; ++a) within = within && c[a] >= 0 && c[a] <= static_cast<PLACE>(how.whole[a] - 1);
    return within;
}

// A place along an axis, by the rules of points.cu and affine.cu; `given` is what is listed for it.
__device__ __forceinline__ PLACE place_of(const Textured &how, int a, COORDINATE given, const int *voxel) {
#if PLACES == LIST
    return given;
#elif PLACES == AFFINE
    const double *m = how.matrix[a];
    double c = how.shift[a];
#pragma unroll
    for (int b = FIRST_AXIS; b < 3; ++b) c = __dadd_rn(c, __dmul_rn(m[b], voxel[b]));
    return c;
#elif PLACES == 1
    return __dadd_rn(static_cast<double>(voxel[a]), static_cast<double>(given));
#else
    return __dadd_rn(static_cast<double>(voxel[a]), quotient(given, how.matrix[0][a], how.matrix[1][a]));
#endif
}

// Places within the image are given to the texture unit, all of a thread at once; the others take SciPy's rules.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_by_texture(cudaTextureObject_t texture, const SOURCE *__restrict__ data, const COORDINATE *__restrict__ coordinates,
                  TARGET *__restrict__ target, const Textured how) {
#if PLACES == LIST
    const INDEX begin = static_cast<INDEX>(blockIdx.x) * (THREADS * MARCH) + threadIdx.x, step = THREADS;
    if (begin >= how.count) return;
    const int left = static_cast<int>(min((how.count - begin + THREADS - 1) / THREADS, static_cast<int64>(MARCH)));
#define VOXEL_OF_PLACE(i) const int *const voxel = nullptr
#else
    const Tile tile = tile_of_block(how.tiles);
    const int x = tile.x * TILE_X + static_cast<int>(threadIdx.x % TILE_X);
    const int y = tile.y * (RANK == 3 ? TILE_Y : TILE_Y * MARCH) + static_cast<int>(threadIdx.x / TILE_X);
    const int z = RANK == 3 ? tile.z * MARCH : 0;
    if (x >= how.grid[2] || y >= how.grid[1]) return;
    const INDEX begin = (static_cast<INDEX>(z) * how.grid[1] + y) * how.grid[2] + x;
    const INDEX step = static_cast<INDEX>(RANK == 3 ? how.grid[1] : TILE_Y) * how.grid[2];
    const int left = min(RANK == 3 ? how.grid[0] - z : (how.grid[1] - y + TILE_Y - 1) / TILE_Y, MARCH);
#define VOXEL_OF_PLACE(i) const int voxel[3] = {RANK == 3 ? z + (i) : 0, RANK == 3 ? y : y + (i) * TILE_Y, x}
#endif
    const auto find = [&](int i, PLACE *c) {
        VOXEL_OF_PLACE(i);
        c[0] = 0;
#pragma unroll
        for (int a = FIRST_AXIS; a < 3; ++a) {
            COORDINATE given = 0;
            if (PLACES != AFFINE) given = __ldcs(coordinates + (a - FIRST_AXIS) * how.count + (begin + i * step));
            c[a] = place_of(how, a, given, voxel);
        }
    };
    unsigned others = 0;
    float values[MARCH];
#pragma unroll
    for (int i = 0; i < MARCH; ++i) {
        PLACE c[3];
        find(i < left ? i : 0, c);
        const bool within = is_within(c, how);
        if (!within) {
            others |= 1u << i;
            c[0] = c[1] = c[2] = 0;
        }
        values[i] = sample_texture(texture, c);
    }
#pragma unroll
    for (int i = 0; i < MARCH; ++i)
        if (i < left && !(others >> i & 1)) store(target + (begin + i * step), Narrow<TARGET, float>::of(values[i]));
#pragma unroll 1
    for (int i = 0; i < left && others >> i; ++i) {
        if (!(others >> i & 1)) continue;
        PLACE c[3];
        find(i, c);
        const Image image = {{how.whole[0], how.whole[1], how.whole[2]}, {0, 0, 0}, {how.whole[0], how.whole[1], how.whole[2]}};
        const float value = sample_edge(data, c[0], c[1], c[2], image, static_cast<float>(how.outside));
        store(target + (begin + i * step), Narrow<TARGET, float>::of(value));
    }
}
