// Samples of a volume box after box: a block reads the voxels of a box into shared memory, once and in rows.
//
// Definitions: those of volume.cuh, with LAYOUT 0; FOURS (1: rows of the volume begin at multiples of four voxels, of
// the volume and of memory); THREADS, BLOCKS (of a multiprocessor, at least).
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "boxes.cuh"
#include "volume.cuh"

// A lane makes four samples that follow each other: two calls of the generator, and stores of 16 bytes.
constexpr int WARPS = THREADS / 32, EACH = 4, TILE = EACH * 32;
// Vectors of four voxels that a thread loads at the same time.
constexpr int BATCH = FOURS ? 8 : 4;

// A field in the low bits of 2^23 becomes a coordinate by one multiplication and addition, without rounding.
constexpr unsigned FIELD_RAISED = 0x4B000000;
constexpr float STEP = 5.9604644775390625e-8f;

struct Span { int first, count; };

// Voxels along an axis that the samples of a box may need, with those that repeat the volume's border: cells -1 and n - 1
// lie half outside of the volume.
__device__ __forceinline__ Span span_of(unsigned at, int halved, int n) {
    const float size = static_cast<float>(n);
    const int first = __float_as_int(raised_cell(coordinate(at << (24 - halved)), size)) - RAISED_BITS;
    const int last = __float_as_int(raised_cell(coordinate(((at + 1) << (24 - halved)) - 1), size)) - RAISED_BITS;
    return {first, last - first + 2};
}
__device__ __forceinline__ int clamped(int i, int n) { return max(0, min(i, n - 1)); }

struct alignas(4 * sizeof(SOURCE)) Four { SOURCE v[4]; };

// Where the voxels of a box are: rows in shared memory begin at multiples of four voxels of the volume.
struct Tile {
    int first[3];          // of the volume, along z, y and x
    int lines, vectors;    // rows in shared memory, and vectors of four voxels in each
    unsigned per_plane, per_line;  // for quotients
    int rows;              // in a plane
    bool at_border;
};

// A quotient of numbers below 2^16 by a multiplication; reciprocal 0 stands for a division by 1.
__device__ __forceinline__ unsigned reciprocal(unsigned by) { return by > 1 ? 0xffffffffu / by + 1 : 0; }
__device__ __forceinline__ unsigned quotient(unsigned v, unsigned reciprocal_of) {
    return reciprocal_of ? __umulhi(v, reciprocal_of) : v;
}

__device__ __forceinline__ Tile tile_of(const Span *span, const Volume &how) {
    Tile made;
    const int skipped = span[2].first & 3;
    made.first[0] = span[0].first;
    made.first[1] = span[1].first;
    made.first[2] = span[2].first - skipped;
    made.vectors = (skipped + span[2].count + 3) / 4;
    made.rows = span[1].count;
    made.lines = span[0].count * span[1].count;
    made.per_line = reciprocal(made.vectors);
    made.per_plane = reciprocal(made.rows);
    made.at_border = made.first[2] < 0 || made.first[2] + 4 * made.vectors > how.dims[2];
#pragma unroll
    for (int a = 0; a < 2; ++a)
        made.at_border = made.at_border || span[a].first < 0 || span[a].first + span[a].count > how.dims[a];
    return made;
}

struct Position {
    INDEX row;
    int x;
};

template <bool BORDER>
__device__ __forceinline__ Position position_in(const Tile &tile, unsigned k, const Volume &how) {
    const unsigned line = quotient(k, tile.per_line), plane = quotient(line, tile.per_plane);
    int z = tile.first[0] + plane, y = tile.first[1] + (line - plane * tile.rows);
    if (BORDER) {
        z = clamped(z, how.dims[0]);
        y = clamped(y, how.dims[1]);
    }
    const INDEX row = (static_cast<INDEX>(z) * how.dims[1] + y) * how.dims[2];
    return {row, tile.first[2] + 4 * static_cast<int>(k - line * tile.vectors)};
}

// Four voxels of a row, with those that repeat the border.
template <bool BORDER> __device__ __forceinline__ Four four_at(const SOURCE *channel, const Position &position,
                                                               const Volume &how) {
    const int n = how.dims[2];
#if FOURS
    const int x = BORDER ? max(0, min(position.x, n - 4)) : position.x;
    Four made = *reinterpret_cast<const Four *>(channel + (position.row + x));
    if (BORDER) {
        if (position.x < 0) made.v[3] = made.v[0];
        if (position.x >= n) made.v[0] = made.v[3];
    }
    return made;
#else
    Four made;
#pragma unroll
    for (int k = 0; k < 4; ++k) made.v[k] = channel[position.row + clamped(position.x + k, n)];
    return made;
#endif
}

template <class T> struct IsFloat { static constexpr bool YES = false; };
template <> struct IsFloat<float> { static constexpr bool YES = true; };
// Voxels that need no conversion are copied without passing through registers, so that all of these loads run at once.
constexpr bool COPIED = ASYNC && FOURS && !NORMALISE && IsFloat<SOURCE>::YES;

__device__ __forceinline__ void copy(float4 *to, const SOURCE *from) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(to))),
                 "l"(from));
#else
    *to = *reinterpret_cast<const float4 *>(from);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_four(float4 *to, const Four &four, const Volume &how) {
    *to =
        float4{as_value(four.v[0], how), as_value(four.v[1], how), as_value(four.v[2], how), as_value(four.v[3], how)};
}

template <bool BORDER>
__device__ __forceinline__ void fill(float4 *held, const Tile &tile, const SOURCE *channel, const Volume &how) {
    const int all = tile.lines * tile.vectors;
    if (COPIED) {
#pragma unroll 4
        for (int k = threadIdx.x; k < all; k += THREADS) {
            const Position position = position_in<BORDER>(tile, k, how);
            if (BORDER && (position.x < 0 || position.x >= how.dims[2]))
                store_four(held + k, four_at<true>(channel, position, how), how);
            else copy(held + k, channel + (position.row + position.x));
        }
        wait_for_copies();
        return;
    }
    for (int begin = threadIdx.x; begin < all; begin += BATCH * THREADS) {
        Four got[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            got[j] = four_at<BORDER>(channel, position_in<BORDER>(tile, min(begin + j * THREADS, all - 1), how), how);
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (begin + j * THREADS < all) store_four(held + begin + j * THREADS, got[j], how);
    }
}

// Samples of a box, as every thread of the block knows them.
struct Drawing {
    float base[3], size[3];  // z, y, x
    unsigned mask[3];
    unsigned origin, row, plane;  // strides, and what leads from raised cells to voxels in shared memory
};

__device__ __forceinline__ Drawing drawing_of(const unsigned *at, const int *halved, const Tile &tile,
                                              const Volume &how) {
    Drawing made;
    made.row = 4 * tile.vectors;
    made.plane = tile.rows * made.row;
    const unsigned stride[3] = {made.plane, made.row, 1};
    made.origin = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        // The field is raised by 2^23, which is 1/2 of the unit cube.
        made.base[a] = coordinate(at[a] << (24 - halved[a])) - 0.5f;
        made.size[a] = static_cast<float>(how.dims[a]);
        made.mask[a] = mask_of(halved[a]);
        made.origin -= static_cast<unsigned>(RAISED_BITS + tile.first[a]) * stride[a];
    }
    return made;
}

__device__ __forceinline__ float value_at(const float *voxels, const float *u, const Drawing &how) {
    Axis axes[3];
    unsigned raised[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        const float cell = raised_cell(u[a], how.size[a]);
        raised[a] = static_cast<unsigned>(__float_as_int(cell));
        axes[a].f = __fmaf_rn(u[a], how.size[a], -(cell - RAISED + 0.5f));
    }
    // Products of raised cells pass 2^32, and so does the origin: what is left is where the cell is.
    const unsigned cell = raised[0] * how.plane + (raised[1] * how.row + (raised[2] + how.origin));
    const float *const p = voxels + static_cast<int>(cell), *const q = p + how.plane;
    const float v[8] = {p[0], p[1], p[how.row], p[how.row + 1], q[0], q[1], q[how.row], q[how.row + 1]};
    return trilinear(v, axes);
}

// Lanes write rows of 48 bytes through shared memory: their stores would fill half of each sector that they touch.
__device__ __forceinline__ void write_whole(float *coords, float4 *staged, const float (*u)[3]) {
    const int lane = threadIdx.x % 32;
    staged[3 * lane] = float4{u[0][2], u[0][1], u[0][0], u[1][2]};
    staged[3 * lane + 1] = float4{u[1][1], u[1][0], u[2][2], u[2][1]};
    staged[3 * lane + 2] = float4{u[2][0], u[3][2], u[3][1], u[3][0]};
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 3; ++k) __stcs(reinterpret_cast<float4 *>(coords) + 32 * k + lane, staged[32 * k + lane]);
    __syncwarp();
}

// box_indices: which box along z, y and x each one is. Samples begin to begin + how.count of the window are written, from the
// first element of coords and values on; first_box: the one of block 0. Parts of a box along the second axis of the grid.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sample_boxes(const SOURCE *__restrict__ linear, float *__restrict__ coords, float *__restrict__ values,
                 const int64 *__restrict__ starts, const int4 *__restrict__ box_indices, int first_box, int64 begin,
                 const Boxes boxes, const Volume how) {
    extern __shared__ __align__(16) float voxels[];
    __shared__ float4 staging[WARPS][3 * 32];
    const int box = first_box + blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int4 in_grid = box_indices[box];
    const int64 end = min(starts[box + 1], begin + how.count), first = max(starts[box], begin);
    const int64 step = static_cast<int64>(gridDim.y) * WARPS,
                tile = first / TILE + static_cast<int64>(blockIdx.y) * WARPS;
    if (tile * TILE >= end || first >= end) return;
    const unsigned at[3] = {static_cast<unsigned>(in_grid.x), static_cast<unsigned>(in_grid.y),
                            static_cast<unsigned>(in_grid.z)};
    const int halved[3] = {in_grid.w & 255, in_grid.w >> 8 & 255, in_grid.w >> 16};
    Span span[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) span[a] = span_of(at[a], halved[a], how.dims[a]);
    const Tile held = tile_of(span, how);
    const Drawing drawing = drawing_of(at, halved, held, how);
    for (int c = 0; c < how.channels; ++c) {
        float *const out = values + c * how.count;
        const bool aligned_coords = ((reinterpret_cast<uint64>(coords) - 12 * static_cast<uint64>(begin)) & 15) == 0;
        const bool aligned = ((reinterpret_cast<uint64>(out) - 4 * static_cast<uint64>(begin)) & 15) == 0;
        if (c) __syncthreads();
        float4 *const target = reinterpret_cast<float4 *>(voxels);
        if (held.at_border) fill<true>(target, held, linear + c * how.voxels, how);
        else fill<false>(target, held, linear + c * how.voxels, how);
        __syncthreads();
#pragma unroll 1
        for (int64 t = tile + warp; t * TILE < end; t += step) {
            const int64 position = t * TILE + EACH * lane, out_index = position - begin;
            const bool whole = t * TILE >= first && (t + 1) * TILE <= end;
            float u[EACH][3], made[EACH];
#pragma unroll
            for (int k = 0; k < EACH; k += 2) {
                const uint4 words = numbers(boxes.window, USE_BINNED, call_of(position) + k / 2, boxes.key);
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int a = 0; a < 3; ++a) {
                        const unsigned bits = (field_of(words, half, a) & drawing.mask[a]) | FIELD_RAISED;
                        u[k + half][a] = __fmaf_rn(__int_as_float(static_cast<int>(bits)), STEP, drawing.base[a]);
                    }
            }
            if (c == 0 && whole && aligned_coords) write_whole(coords + 3 * (t * TILE - begin), staging[warp], u);
#pragma unroll
            for (int k = 0; k < EACH; ++k) made[k] = value_at(voxels, u[k], drawing);
            if (whole && aligned)
                __stcs(reinterpret_cast<float4 *>(out + out_index), float4{made[0], made[1], made[2], made[3]});
            if (whole && aligned && (aligned_coords || c)) continue;
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (position + k < first || position + k >= end) continue;
                if (!(whole && aligned)) __stcs(out + out_index + k, made[k]);
#pragma unroll
                for (int a = 0; a < 3; ++a)
                    if (c == 0 && !(whole && aligned_coords)) __stcs(coords + 3 * (out_index + k) + a, u[k][2 - a]);
            }
        }
    }
}
