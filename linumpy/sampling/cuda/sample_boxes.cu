// Samples of a volume box after box: a block reads the voxels of a box into shared memory, once and in rows.
//
// Definitions: those of volume.cuh, with LAYOUT 0, and GROUPS (samples of a lane at a time, 2 or 4).
#include "number.cuh"
#include "elements.cuh"
#include "philox.cuh"
#include "boxes.cuh"
#include "volume.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = GROUPS * 32;
static_assert(GROUPS % 2 == 0, "samples 32 apart share a call of the generator");

// The cell of a point within 2^22 voxels of the first one, in the low bits of a float: adding 3 · 2^22 rounds down to a
// whole number, at four times the rate of a conversion. Cells -1 and n - 1 lie half outside of the volume.
constexpr float RAISED = 12582912.0f;
constexpr int RAISED_BITS = 0x4B400000;

__device__ __forceinline__ float raised_cell(float u, float n) { return __fadd_rd(__fmaf_rd(u, n, -0.5f), RAISED); }

struct Span { int first, count; };

// Voxels along an axis that the samples of a box may need, with those that repeat the volume's border.
__device__ __forceinline__ Span span_of(unsigned at, int halved, int n) {
    const float size = static_cast<float>(n);
    const int first = __float_as_int(raised_cell(coordinate(at << (24 - halved)), size)) - RAISED_BITS;
    const int last = __float_as_int(raised_cell(coordinate(((at + 1) << (24 - halved)) - 1), size)) - RAISED_BITS;
    return {first, last - first + 2};
}
__device__ __forceinline__ int clamped(int i, int n) { return max(0, min(i, n - 1)); }

// places: which box along z, y and x each one is. Samples begin to begin + how.count of the window are written, from the
// first element of coords and values on; first_box: the one of block 0. Parts of a box along the second axis of the grid.
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_boxes(const SOURCE *__restrict__ linear, float *__restrict__ coords, float *__restrict__ values,
                 const int64 *__restrict__ starts, const int4 *__restrict__ places, int first_box, int64 begin,
                 const Boxes boxes, const Volume how) {
    extern __shared__ __align__(16) float voxels[];
    __shared__ float4 staging[WARPS][GROUPS * 24];
    const int box = first_box + blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64 end = min(starts[box + 1], begin + how.count), first = max(starts[box], begin);
    const int64 step = static_cast<int64>(gridDim.y) * WARPS,
                tile = first / TILE + static_cast<int64>(blockIdx.y) * WARPS;
    if (tile * TILE >= end || first >= end) return;
    const int4 place = places[box];
    const unsigned at[3] = {static_cast<unsigned>(place.x), static_cast<unsigned>(place.y),
                            static_cast<unsigned>(place.z)};
    const int halved[3] = {place.w & 255, place.w >> 8 & 255, place.w >> 16};
    Span span[3];
#pragma unroll
    for (int a = 0; a < 3; ++a) span[a] = span_of(at[a], halved[a], how.dims[a]);
    const int row = span[2].count, plane = span[1].count * row, size = span[0].count * plane;
    // Quotients below 2^16 by a multiplication; no row is shorter than two voxels.
    const unsigned per_row = 0xffffffffu / row + 1, rows = span[1].count, per_plane = 0xffffffffu / rows + 1;
    bool at_border = false;
#pragma unroll
    for (int a = 0; a < 3; ++a)
        at_border = at_border || span[a].first < 0 || span[a].first + span[a].count > how.dims[a];
    for (int c = 0; c < how.channels; ++c) {
        const SOURCE *const channel = linear + c * how.voxels;
        if (c) __syncthreads();
#pragma unroll 4
        for (unsigned k = threadIdx.x; k < size; k += THREADS) {
            const unsigned line = __umulhi(k, per_row), plane_of = __umulhi(line, per_plane);
            int z = span[0].first + plane_of, y = span[1].first + (line - plane_of * rows),
                x = span[2].first + (k - line * row);
            if (at_border) {
                z = clamped(z, how.dims[0]);
                y = clamped(y, how.dims[1]);
                x = clamped(x, how.dims[2]);
            }
            voxels[k] = as_value(channel[(static_cast<INDEX>(z) * how.dims[1] + y) * how.dims[2] + x], how);
        }
        __syncthreads();
        for (int64 t = tile + warp; t * TILE < end; t += step) {
            float u[GROUPS][3];
#pragma unroll
            for (int k = 0; k < GROUPS; k += 2) {
                const uint4 words = numbers(boxes.window, USE_BINNED, pair_of(t * TILE + 32 * k + lane), boxes.key);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint64 fields = fields_of(words, half);
#pragma unroll
                    for (int a = 0; a < 3; ++a) u[k + half][a] = coordinate(bits_in_box(fields, at[a], halved[a], a));
                }
            }
            if (c == 0)
                write_coords<GROUPS>(coords, reinterpret_cast<float *>(staging[warp]), u, t * TILE - begin,
                                     first - begin, end - begin, how.aligned);
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int64 position = t * TILE + 32 * k + lane;
                Axis axes[3];
                int cell[3];
#pragma unroll
                for (int a = 0; a < 3; ++a) {
                    const float size = static_cast<float>(how.dims[a]), raised = raised_cell(u[k][a], size);
                    cell[a] = __float_as_int(raised) - RAISED_BITS - span[a].first;
                    axes[a].f = __fmaf_rn(u[k][a], size, -(raised - RAISED + 0.5f));
                }
                const float *const p = voxels + (cell[0] * plane + cell[1] * row + cell[2]), *const q = p + plane;
                const float v[8] = {p[0], p[1], p[row], p[row + 1], q[0], q[1], q[row], q[row + 1]};
                if (position >= first && position < end)
                    __stcs(values + c * how.count + position - begin, trilinear(v, axes));
            }
        }
    }
}
