// Place boxes of stored chunks in an array: crop, reorder axes, swap bytes and cast in one pass.
//
// Compiled for one rank and either one width of unit (COPY_UNIT: bytes are moved as they are) or one pair of element
// types (SOURCE, TARGET, SWAP), never for a shape.
//
// Both tables hold 64-bit integers. headers, for each output: RANK source strides, RANK target strides (in units), and two
// words whose first bytes hold the fill value as a target element. rows, for each box: offset of the first source unit
// (-1: fill), address of the first target unit, index of the header, and RANK extents. A box has fewer than 2^31 units;
// offsets may be larger.

typedef long long int64;

#include "casts.cuh"

__device__ inline unsigned char swapped(unsigned char v) { return v; }
__device__ inline unsigned short swapped(unsigned short v) { return __byte_perm(v, 0, 0x4401) & 0xffff; }
__device__ inline unsigned swapped(unsigned v) { return __byte_perm(v, 0, 0x0123); }
__device__ inline unsigned long long swapped(unsigned long long v) {
    unsigned low = static_cast<unsigned>(v), high = static_cast<unsigned>(v >> 32);
    return (static_cast<unsigned long long>(swapped(low)) << 32) | swapped(high);
}
template <int N> struct Word;
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned type; };
template <> struct Word<8> { typedef unsigned long long type; };

template <class T, bool SWAPPED> struct Read {
    static __device__ T at(const T *p) {
        if (!SWAPPED) return *p;
        typedef typename Word<sizeof(T)>::type word;
        word w = swapped(*reinterpret_cast<const word *>(p));
        return *reinterpret_cast<T *>(&w);
    }
};
template <class R, bool SWAPPED> struct Read<complex_of<R>, SWAPPED> {
    static __device__ complex_of<R> at(const complex_of<R> *p) {
        return complex_of<R>{Read<R, SWAPPED>::at(&p->re), Read<R, SWAPPED>::at(&p->im)};
    }
};

#ifdef COPY_UNIT
#if COPY_UNIT == 16
typedef uint4 SOURCE_T;
#else
typedef Word<COPY_UNIT>::type SOURCE_T;
#endif
typedef SOURCE_T TARGET_T;
__device__ inline TARGET_T fetch(const SOURCE_T *p) { return *p; }
#else
typedef SOURCE SOURCE_T;
typedef TARGET TARGET_T;
__device__ inline TARGET_T fetch(const SOURCE_T *p) {
    return Cast<TARGET_T, SOURCE_T>::of(Read<SOURCE_T, SWAP>::at(p));
}
#endif

// Units that a thread moves; all are fetched before the first is stored, so that their latencies overlap.
constexpr int PER_THREAD = 8;

constexpr int HEADER_WORDS = 2 * RANK + 2, ROW_WORDS = 3 + RANK;

extern "C" __global__ void scatter(const SOURCE_T *__restrict__ source, const int64 *__restrict__ headers,
                                   const int64 *__restrict__ rows, unsigned blocks_per_box) {
    const int64 *row = rows + static_cast<int64>(blockIdx.x / blocks_per_box) * ROW_WORDS;
    const int64 *header = headers + row[2] * HEADER_WORDS;
    const int64 *source_stride = header, *target_stride = header + RANK;
    const TARGET_T fill = *reinterpret_cast<const TARGET_T *>(header + 2 * RANK);
    TARGET_T *target = reinterpret_cast<TARGET_T *>(row[1]);
    const bool filling = row[0] < 0;

    unsigned extent[RANK], total = 1;
#pragma unroll
    for (int a = 0; a < RANK; ++a) total *= extent[a] = static_cast<unsigned>(row[3 + a]);

    const unsigned first = (blockIdx.x % blocks_per_box) * blockDim.x * PER_THREAD + threadIdx.x;
    TARGET_T value[PER_THREAD];
    int64 target_index[PER_THREAD];
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k) {
        unsigned rest = first + k * blockDim.x;
        target_index[k] = -1;
        if (rest >= total) continue;
        int64 from = row[0], to = 0;
#pragma unroll
        for (int a = RANK - 1; a > 0; --a) {
            const unsigned quotient = rest / extent[a], i = rest - quotient * extent[a];
            from += i * source_stride[a];
            to += i * target_stride[a];
            rest = quotient;
        }
        from += rest * source_stride[0];
        to += rest * target_stride[0];
        value[k] = filling ? fill : fetch(source + from);
        target_index[k] = to;
    }
#pragma unroll
    for (int k = 0; k < PER_THREAD; ++k)
        if (target_index[k] >= 0) target[target_index[k]] = value[k];
}
