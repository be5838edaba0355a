// Shift each A-line of a mosaic along depth, by an amount that depends on its position in the tile: one gather, which
// writes each voxel once.
//
// Compiled for SOURCE (type of a voxel; for whole shifts an unsigned integer of its size), ACC (float, double: type of
// computation), LINEAR (0: whole shifts, 1: fractions, interpolated between two voxels), BEYOND (value of voxels beyond
// an A-line, 0: the fill value, 1: the A-line is periodic, 2: its nearest voxel), DEPTH_LANE (1: depth is contiguous in
// memory, and neighbouring threads take neighbours along depth) and VEC (neighbouring A-lines of a thread, stored with
// one access; 1 for fractions and where depth is contiguous), never for a shape. Lateral axes are a (outer in memory)
// and b (inner). Strides are in elements.

#include "number.cuh"
#include "stored.cuh"

constexpr int MARCH = 8;  // voxels of a thread; all are fetched before the first is stored
constexpr int FAR = 1 << 30;  // beyond any volume: the limit of shifts, and the shift for NaN

#if LINEAR
typedef float Shift;
#else
typedef int Shift;
#endif

__device__ inline Shift bounded(Shift shift) {
    return !(shift <= static_cast<Shift>(FAR)) ? FAR : shift < -static_cast<Shift>(FAR) ? -FAR : shift;
}

__device__ inline int wrapped(int i, int n) {
    if (static_cast<unsigned>(i) < static_cast<unsigned>(n)) return i;
    i %= n;
    return i < 0 ? i + n : i;
}

__device__ inline int clamped(int i, int n) { return i < 0 ? 0 : i < n ? i : n - 1; }

__device__ inline SOURCE mixed(SOURCE first, SOURCE second, float part) {
#if LINEAR
    const ACC a = number(first), b = number(second);
    return part > 0.0f ? Stored<SOURCE>::of(a + static_cast<ACC>(part) * (b - a)) : first;
#else
    return first;
#endif
}

// Return the whole voxels of a shift; its fraction is written to `part`.
__device__ inline int split(Shift shift, float &part) {
#if LINEAR
    const float whole = floorf(shift);
    part = shift - whole;
    return static_cast<int>(whole);
#else
    part = 0.0f;
    return shift;
#endif
}

#if DEPTH_LANE
// Compute the voxel of the result at depth z.
__device__ inline SOURCE fetch(const SOURCE *line, int64 stride, int z, int depth, Shift shift, SOURCE fill) {
    float part;
    int i = z + split(shift, part), next = i + (part > 0.0f);
#if BEYOND == 1
    i = wrapped(i, depth), next = wrapped(next, depth);
#elif BEYOND == 2
    i = clamped(i, depth), next = clamped(next, depth);
#else
    if (i < 0 || next >= depth) return fill;
#endif
    const SOURCE first = line[i * stride];
    return next == i ? first : mixed(first, line[next * stride], part);
}
#else
struct alignas(VEC * sizeof(SOURCE)) Pack { SOURCE at[VEC]; };

// Read `count` voxels from voxel i on along an A-line; a Unit may hold several A-lines with the same shift.
template <int N, class Unit>
__device__ inline void fetch_line(const SOURCE *line, int64 stride, int i, int depth, int count, Unit fill,
                                  Unit (&value)[N]) {
#if BEYOND == 2
#pragma unroll
    for (int j = 0; j < N; ++j)
        value[j] = j < count ? *reinterpret_cast<const Unit *>(line + clamped(i + j, depth) * stride) : fill;
    return;
#endif
#if BEYOND == 1
    i = wrapped(i, depth);
#endif
    const SOURCE *from = line + i * stride;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        value[j] = fill;
        if (j < count && static_cast<unsigned>(i + j) < static_cast<unsigned>(depth))
            value[j] = *reinterpret_cast<const Unit *>(from + j * stride);
#if BEYOND == 1
        if (i + j + 1 == depth) i -= depth, from -= depth * stride;
#endif
    }
}
#endif

extern "C" __global__ void __launch_bounds__(256)
    shift_along_depth(const SOURCE *__restrict__ vol, SOURCE *__restrict__ out, const Shift *__restrict__ shifts,
                      int64 from_a, int64 from_b, int64 from_z, int64 to_a, int64 to_b, int64 to_z, int size_b,
                      int depth, int planes, int tile_a, int tile_b, int shift_a, int shift_b, int first_a, int first_b,
                      unsigned lanes, unsigned blocks_lane, unsigned blocks_march, SOURCE fill) {
    unsigned rest = blockIdx.x;
    const int lane = static_cast<int>(rest % blocks_lane * lanes + threadIdx.x % lanes);
    rest /= blocks_lane;
    const int march = static_cast<int>(rest % blocks_march * (blockDim.x / lanes) + threadIdx.x / lanes) * MARCH;
    const unsigned a = rest / blocks_march;
    const Shift *const row = shifts + static_cast<int64>((a + first_a) % tile_a) * shift_a;
#if DEPTH_LANE
    if (lane >= planes || march >= size_b) return;
    const SOURCE *const line = vol + a * from_a + march * from_b;
    SOURCE value[MARCH];
    unsigned column = static_cast<unsigned>(march + first_b) % tile_b;
#pragma unroll
    for (int j = 0; j < MARCH; ++j) {
        if (march + j < size_b)
            value[j] = fetch(line + j * from_b, from_z, lane, depth, bounded(row[column * shift_b]), fill);
        column = column + 1 == tile_b ? 0 : column + 1;
    }
    SOURCE *const to = out + a * to_a + march * to_b + lane * to_z;
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (march + j < size_b) to[j * to_b] = value[j];
#else
    const int b = lane * VEC;
    if (b >= size_b || march >= planes) return;
    const SOURCE *const line = vol + a * from_a + b * from_b;
    Pack value[MARCH], empty;
    Shift shift[VEC];
    bool alike = true;
    unsigned column = static_cast<unsigned>(b + first_b) % tile_b;
#pragma unroll
    for (int v = 0; v < VEC; ++v) {
        shift[v] = bounded(row[column * shift_b]);
        alike = alike && shift[v] == shift[0];
        column = column + 1 == tile_b ? 0 : column + 1;
        empty.at[v] = fill;
    }
    float part;
    const int count = planes - march < MARCH ? planes - march : MARCH;
#if LINEAR
    static_assert(VEC == 1, "fractions are computed for one A-line after another");
    SOURCE voxels[MARCH + 1];
    const int first = march + split(shift[0], part);
    fetch_line(line, from_z, first, depth, count + (part > 0.0f), fill, voxels);
#pragma unroll
    for (int j = 0; j < MARCH; ++j) {
        const bool inside = BEYOND == 1 || (first + j >= 0 && first + j + (part > 0.0f) < depth);
        value[j].at[0] = inside ? mixed(voxels[j], voxels[j + 1], part) : BEYOND == 2 ? voxels[j] : fill;
    }
#else
    if (alike) {
        fetch_line(line, from_z, march + split(shift[0], part), depth, count, empty, value);
    } else {
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            SOURCE voxels[MARCH];
            fetch_line(line + v * from_b, from_z, march + split(shift[v], part), depth, count, fill, voxels);
#pragma unroll
            for (int j = 0; j < MARCH; ++j) value[j].at[v] = voxels[j];
        }
    }
#endif
    SOURCE *const to = out + a * to_a + b * to_b + march * to_z;
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (j < count) *reinterpret_cast<Pack *>(to + j * to_z) = value[j];
#endif
}
