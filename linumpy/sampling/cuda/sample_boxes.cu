// Samples of a volume, box by box: a block reads the voxels of a box into shared memory, once and in rows.
//
// Definitions: those of volume.cuh, with LAYOUT 0; FOURS (1: all rows of the volume begin at multiples of four voxels
// in memory); THREADS; BLOCKS (minimum number of resident blocks per multiprocessor).
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "boxes.cuh"
#include "volume.cuh"

// A lane makes four consecutive samples: two calls of the generator, and stores of 16 bytes.
constexpr int WARPS = THREADS / 32, EACH = 4, TILE = EACH * 32;
// Number of vectors of four voxels that a thread loads at the same time.
constexpr int BATCH = FOURS ? 8 : 4;

// A field (the random bits of a coordinate) in the low bits of the float 2^23 becomes a coordinate by one
// multiplication and addition, without rounding.
constexpr unsigned FIELD_RAISED = 0x4B000000;
constexpr float STEP = 5.9604644775390625e-8f;

struct Span { int first, count; };

// Voxels along an axis that the samples of a box may need, including repetitions of the volume's border: cells -1 and
// n - 1 lie half outside the volume.
__device__ __forceinline__ Span span_of(unsigned at, int halved, int n) {
    const float size = static_cast<float>(n);
    const int first = __float_as_int(raised_cell(coordinate(at << (24 - halved)), size)) - RAISED_BITS;
    const int last = __float_as_int(raised_cell(coordinate(((at + 1) << (24 - halved)) - 1), size)) - RAISED_BITS;
    return {first, last - first + 2};
}
__device__ __forceinline__ int clamped(int i, int n) { return max(0, min(i, n - 1)); }

struct alignas(4 * sizeof(SOURCE)) Four { SOURCE v[4]; };

// The voxels of a box: rows in shared memory begin at multiples of four voxels of the volume.
struct Tile {
    int first[3];  // first voxel along z, y and x
    int lines, vectors;  // rows in shared memory, and vectors of four voxels of each
    unsigned per_plane, per_line;  // reciprocals
    int rows;  // rows of a plane
    bool at_border;
};

// Quotients of numbers below 2^16 by a multiplication; the reciprocal 0 stands for a division by 1.
__device__ __forceinline__ unsigned reciprocal(unsigned by) { return by > 1 ? 0xffffffffu / by + 1 : 0; }
__device__ __forceinline__ unsigned quotient(unsigned v, unsigned reciprocal_of) {
    return reciprocal_of ? __umulhi(v, reciprocal_of) : v;
}

__device__ __forceinline__ Tile tile_of(const Span *span, const Volume &volume) {
    Tile tile;
    const int skipped = span[2].first & 3;
    tile.first[0] = span[0].first;
    tile.first[1] = span[1].first;
    tile.first[2] = span[2].first - skipped;
    tile.vectors = (skipped + span[2].count + 3) / 4;
    tile.rows = span[1].count;
    tile.lines = span[0].count * span[1].count;
    tile.per_line = reciprocal(tile.vectors);
    tile.per_plane = reciprocal(tile.rows);
    tile.at_border = tile.first[2] < 0 || tile.first[2] + 4 * tile.vectors > volume.dims[2];
#pragma unroll
    for (int a = 0; a < 2; ++a)
        tile.at_border = tile.at_border || span[a].first < 0 || span[a].first + span[a].count > volume.dims[a];
    return tile;
}

struct Position {
    INDEX row;
    int x;
};

template <bool BORDER>
__device__ __forceinline__ Position position_in(const Tile &tile, unsigned k, const Volume &volume) {
    const unsigned line = quotient(k, tile.per_line), plane = quotient(line, tile.per_plane);
    int z = tile.first[0] + plane, y = tile.first[1] + (line - plane * tile.rows);
    if (BORDER) {
        z = clamped(z, volume.dims[0]);
        y = clamped(y, volume.dims[1]);
    }
    const INDEX row = (static_cast<INDEX>(z) * volume.dims[1] + y) * volume.dims[2];
    return {row, tile.first[2] + 4 * static_cast<int>(k - line * tile.vectors)};
}

// Four voxels of a row; voxels beyond the border repeat it.
template <bool BORDER> __device__ __forceinline__ Four four_at(const SOURCE *channel, const Position &position,
                                                               const Volume &volume) {
    const int n = volume.dims[2];
#if FOURS
    const int x = BORDER ? max(0, min(position.x, n - 4)) : position.x;
    Four four = *reinterpret_cast<const Four *>(channel + (position.row + x));
    if (BORDER) {
        if (position.x < 0) four.v[3] = four.v[0];
        if (position.x >= n) four.v[0] = four.v[3];
    }
    return four;
#else
    Four four;
#pragma unroll
    for (int k = 0; k < 4; ++k) four.v[k] = channel[position.row + clamped(position.x + k, n)];
    return four;
#endif
}

template <class T> struct IsFloat { static constexpr bool YES = false; };
template <> struct IsFloat<float> { static constexpr bool YES = true; };
// Voxels that need no conversion are copied without registers, so that all of their loads run at the same time.
// Float voxels are copied without registers.
constexpr bool COPIED = FOURS && !NORMALISE && IsFloat<SOURCE>::YES;

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

__device__ __forceinline__ void store_four(float4 *to, const Four &four, const Volume &volume) {
    *to = float4{as_value(four.v[0], volume), as_value(four.v[1], volume), as_value(four.v[2], volume),
                 as_value(four.v[3], volume)};
}

template <bool BORDER>
__device__ __forceinline__ void fill(float4 *shared_tile, const Tile &tile, const SOURCE *channel,
                                     const Volume &volume) {
    const int all = tile.lines * tile.vectors;
    if (COPIED) {
#pragma unroll 4
        for (int k = threadIdx.x; k < all; k += THREADS) {
            const Position position = position_in<BORDER>(tile, k, volume);
            if (BORDER && (position.x < 0 || position.x >= volume.dims[2]))
                store_four(shared_tile + k, four_at<true>(channel, position, volume), volume);
            else copy(shared_tile + k, channel + (position.row + position.x));
        }
        wait_for_copies();
        return;
    }
    for (int begin = threadIdx.x; begin < all; begin += BATCH * THREADS) {
        Four four[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            four[j] =
                four_at<BORDER>(channel, position_in<BORDER>(tile, min(begin + j * THREADS, all - 1), volume), volume);
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (begin + j * THREADS < all) store_four(shared_tile + begin + j * THREADS, four[j], volume);
    }
}

// Parameters of a box's samples, the same for all threads of the block.
struct Drawing {
    float base[3], size[3];  // z, y, x
    unsigned mask[3];
    unsigned origin, row, plane;  // offset of raised cells; strides of rows and planes in shared memory
};

__device__ __forceinline__ Drawing drawing_of(const unsigned *at, const int *halved, const Tile &tile,
                                              const Volume &volume) {
    Drawing drawing;
    drawing.row = 4 * tile.vectors;
    drawing.plane = tile.rows * drawing.row;
    const unsigned stride[3] = {drawing.plane, drawing.row, 1};
    drawing.origin = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        // The field is raised by 2^23, which is half of the unit cube.
        drawing.base[a] = coordinate(at[a] << (24 - halved[a])) - 0.5f;
        drawing.size[a] = static_cast<float>(volume.dims[a]);
        drawing.mask[a] = mask_of(halved[a]);
        drawing.origin -= static_cast<unsigned>(RAISED_BITS + tile.first[a]) * stride[a];
    }
    return drawing;
}

__device__ __forceinline__ float value_at(const float *voxels, const float *u, const Drawing &drawing) {
    Axis axes[3];
    unsigned raised[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) {
        const float cell = raised_cell(u[a], drawing.size[a]);
        raised[a] = static_cast<unsigned>(__float_as_int(cell));
        axes[a].f = __fmaf_rn(u[a], drawing.size[a], -(cell - RAISED + 0.5f));
    }
    // The products of raised cells and the origin wrap around 2^32; their sum is the offset of the cell.
    const unsigned cell = raised[0] * drawing.plane + (raised[1] * drawing.row + (raised[2] + drawing.origin));
    const float *const p = voxels + static_cast<int>(cell), *const q = p + drawing.plane;
    const float v[8] = {p[0], p[1], p[drawing.row], p[drawing.row + 1], q[0], q[1], q[drawing.row], q[drawing.row + 1]};
    return trilinear(v, axes);
}

// Lanes write rows of 48 bytes through shared memory: direct stores would fill half of each sector.
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

// Write samples `begin` to `begin` + volume.count of the window to coords and values. box_indices: for each box the
// indices along z, y and x, and the halvings of these axes, a byte each. blockIdx.x is the box; the blocks along y
// share the samples of a box.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sample_boxes(const SOURCE *__restrict__ linear, float *__restrict__ coords, float *__restrict__ values,
                 const int64 *__restrict__ starts, const int4 *__restrict__ box_indices, int64 begin, const Boxes boxes,
                 const Volume volume) {
    extern __shared__ __align__(16) float voxels[];
    __shared__ float4 staging[WARPS][3 * 32];
    const int box = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int4 in_grid = box_indices[box];
    const int64 end = min(starts[box + 1], begin + volume.count), first = max(starts[box], begin);
    const int64 step = static_cast<int64>(gridDim.y) * WARPS,
                first_tile = first / TILE + static_cast<int64>(blockIdx.y) * WARPS;
    if (first_tile * TILE >= end || first >= end) return;
    const unsigned at[3] = {static_cast<unsigned>(in_grid.x), static_cast<unsigned>(in_grid.y),
                            static_cast<unsigned>(in_grid.z)};
    const int halved[3] = {in_grid.w & 255, in_grid.w >> 8 & 255, in_grid.w >> 16};
    Span span[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) span[a] = span_of(at[a], halved[a], volume.dims[a]);
    const Tile tile = tile_of(span, volume);
    const Drawing drawing = drawing_of(at, halved, tile, volume);
    for (int c = 0; c < volume.channels; ++c) {
        float *const out = values + c * volume.count;
        const bool aligned_coords = ((reinterpret_cast<uint64>(coords) - 12 * static_cast<uint64>(begin)) & 15) == 0;
        const bool aligned = ((reinterpret_cast<uint64>(out) - 4 * static_cast<uint64>(begin)) & 15) == 0;
        if (c) __syncthreads();
        float4 *const target = reinterpret_cast<float4 *>(voxels);
        if (tile.at_border) fill<true>(target, tile, linear + c * volume.voxels, volume);
        else fill<false>(target, tile, linear + c * volume.voxels, volume);
        __syncthreads();
#pragma unroll 1
        for (int64 t = first_tile + warp; t * TILE < end; t += step) {
            const int64 position = t * TILE + EACH * lane, out_index = position - begin;
            const bool whole = t * TILE >= first && (t + 1) * TILE <= end;
            float u[EACH][3], value[EACH];
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
            for (int k = 0; k < EACH; ++k) value[k] = value_at(voxels, u[k], drawing);
            if (whole && aligned)
                __stcs(reinterpret_cast<float4 *>(out + out_index), float4{value[0], value[1], value[2], value[3]});
            if (whole && aligned && (aligned_coords || c)) continue;
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                if (position + k < first || position + k >= end) continue;
                if (!(whole && aligned)) __stcs(out + out_index + k, value[k]);
#pragma unroll
                for (int a = 0; a < 3; ++a)
                    if (c == 0 && !(whole && aligned_coords)) __stcs(coords + 3 * (out_index + k) + a, u[k][2 - a]);
            }
        }
    }
}
