// Shift each A-line of a mosaic along depth by what its place in its tile says: one gather, each voxel written once.
//
// Compiled for SOURCE (type of a voxel; where nothing is computed, an unsigned integer of its size), LINEAR (0: whole
// shifts, 1: fractions, between two voxels, computed in ACC), WRAP (1: what leaves at one end comes in at the other)
// and DEPTH_LANE (1: memory runs along depth), never for a shape. Lateral axes are a (outer) and b. Strides are in
// elements.

#include "number.cuh"

constexpr int MARCH = 8;  // voxels of a thread; all are fetched before the first is stored

#if LINEAR
typedef float Shift;
template <class T> struct Stored {
    static __device__ T of(ACC v) { return static_cast<T>(rint(v)); }
};
template <> struct Stored<float> {
    static __device__ float of(ACC v) { return static_cast<float>(v); }
};
template <> struct Stored<double> {
    static __device__ double of(ACC v) { return static_cast<double>(v); }
};
template <> struct Stored<half_bits> {
    static __device__ half_bits of(ACC v) {
        half_bits h;
        const float f = static_cast<float>(v);
#ifdef __CUDA_ARCH__
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(f));
#else
        const _Float16 narrow = static_cast<_Float16>(f);
        h = reinterpret_cast<const half_bits &>(narrow);
#endif
        return h;
    }
};
__device__ inline ACC number(half_bits v) { return as_float(v); }
template <class T> __device__ inline ACC number(T v) { return static_cast<ACC>(v); }
#else
typedef int Shift;
#endif

__device__ inline int turned(int i, int n) {
    i %= n;
    return i < 0 ? i + n : i;
}

// The voxel of an A-line that a place asks for.
__device__ inline SOURCE fetch(const SOURCE *line, int64 stride, int z, int depth, Shift shift, SOURCE fill) {
#if LINEAR
    const float whole = floorf(shift), part = shift - whole;
    int i = z + static_cast<int>(whole), next = i + (part > 0.0f);
#else
    int i = z + shift;
#endif
#if WRAP
    i = turned(i, depth);
#else
    if (i < 0 || i >= depth) return fill;
#endif
#if LINEAR
#if WRAP
    next = turned(next, depth);
#else
    if (next >= depth) return fill;
#endif
    if (next == i) return line[i * stride];
    const ACC a = number(line[i * stride]), b = number(line[next * stride]);
    return Stored<SOURCE>::of(a + static_cast<ACC>(part) * (b - a));
#else
    return line[i * stride];
#endif
}

extern "C" __global__ void __launch_bounds__(256)
shift_along_depth(const SOURCE *__restrict__ vol, SOURCE *__restrict__ out, const Shift *__restrict__ shifts,
                  int64 from_a, int64 from_b, int64 from_z, int64 to_a, int64 to_b, int64 to_z, int size_b, int depth, int planes,
                  int tile_a, int tile_b, int shift_a, int shift_b, int first_a, int first_b, unsigned lanes,
                  unsigned blocks_lane, unsigned blocks_march, SOURCE fill) {
    unsigned rest = blockIdx.x;
    const int lane = static_cast<int>(rest % blocks_lane * lanes + threadIdx.x % lanes);
    rest /= blocks_lane;
    const int march = static_cast<int>(rest % blocks_march * (blockDim.x / lanes) + threadIdx.x / lanes) * MARCH;
    const int64 a = rest / blocks_march;
    const Shift *const row = shifts + (a + first_a) % tile_a * shift_a;
    SOURCE value[MARCH];
#if DEPTH_LANE
    if (lane >= planes || march >= size_b) return;
    const SOURCE *const line = vol + a * from_a + march * from_b;
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (march + j < size_b)
            value[j] = fetch(line + j * from_b, from_z, lane, depth, row[(march + j + first_b) % tile_b * shift_b], fill);
    SOURCE *const to = out + a * to_a + march * to_b + lane * to_z;
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (march + j < size_b) to[j * to_b] = value[j];
#else
    if (lane >= size_b || march >= planes) return;
    const SOURCE *const line = vol + a * from_a + lane * from_b;
    const Shift shift = row[(lane + first_b) % tile_b * shift_b];
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (march + j < planes) value[j] = fetch(line, from_z, march + j, depth, shift, fill);
    SOURCE *const to = out + a * to_a + lane * to_b + march * to_z;
#pragma unroll
    for (int j = 0; j < MARCH; ++j)
        if (march + j < planes) to[j * to_z] = value[j];
#endif
}
