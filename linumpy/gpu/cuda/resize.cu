// One axis of an image resampled by a table of weights: out[i] = sum over k < count[i] of weights[k, i] in[first[i] + k].
//
// The image is seen as (outer, n, inner), the result as (outer, m, inner); `along` is for axes other than the last, where
// threads lie along `inner`, `along_x` for the last, where they lie along the axis itself. The table, (taps, m), is read
// coalesced by the one and broadcast by the other. Sums run in one order, so a result does not depend on the launch.
//
// Definitions: SOURCE, TARGET, COMPUTE (float or double). No sizes.
#include "number.cuh"
#include "elements.cuh"

#define OUTPUTS 4

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

// Outputs of one thread are neighbours along the axis: what their windows share stays in the first-level cache.
template <int N>
__device__ __forceinline__ void column(const SOURCE *in, TARGET *out, const COMPUTE *weights, const int *first,
                                       const int *count, int start, int m, int64 inner) {
    const int stop = min(start + OUTPUTS, m);
    for (int i = start; i < stop; ++i) {
        COMPUTE sum[N];
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = 0;
        const SOURCE *from = in + first[i] * inner;
        const int taps = count[i];
#pragma unroll 4
        for (int k = 0; k < taps; ++k) {
            const COMPUTE w = weights[static_cast<int64>(k) * m + i];
            const Pack<SOURCE, N> here = *reinterpret_cast<const Pack<SOURCE, N> *>(from + k * inner);
#pragma unroll
            for (int j = 0; j < N; ++j) sum[j] += w * Widen<COMPUTE, SOURCE>::of(here.v[j]);
        }
        Pack<TARGET, N> result;
#pragma unroll
        for (int j = 0; j < N; ++j) result.v[j] = Narrow<TARGET, COMPUTE>::of(sum[j]);
        *reinterpret_cast<Pack<TARGET, N> *>(out + i * inner) = result;
    }
}

// `pack` is 4 where rows begin on four elements, else 1: an argument, since it depends on the shape.
extern "C" __global__ void __launch_bounds__(256) along(
    const SOURCE *in, TARGET *out, const COMPUTE *weights, const int *first, const int *count, int64 outer, int n,
    int m, int64 inner, int pack) {
    const int64 packs = inner / pack, groups = (m + OUTPUTS - 1) / OUTPUTS;
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= packs * groups * outer) return;
    const int64 rest = thread / packs, x = (thread - rest * packs) * pack;
    const int64 o = rest / groups;
    const int start = static_cast<int>(rest - o * groups) * OUTPUTS;
    in += o * n * inner + x;
    out += o * m * inner + x;
    if (pack == 4)
        column<4>(in, out, weights, first, count, start, m, inner);
    else
        column<1>(in, out, weights, first, count, start, m, inner);
}

extern "C" __global__ void __launch_bounds__(256) along_x(
    const SOURCE *in, TARGET *out, const COMPUTE *weights, const int *first, const int *count, int64 outer, int n,
    int m) {
    const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread >= outer * m) return;
    const int64 o = thread / m;
    const int i = static_cast<int>(thread - o * m), taps = count[i];
    const SOURCE *from = in + o * n + first[i];
    COMPUTE sum = 0;
#pragma unroll 4
    for (int k = 0; k < taps; ++k) sum += weights[static_cast<int64>(k) * m + i] * Widen<COMPUTE, SOURCE>::of(from[k]);
    out[thread] = Narrow<TARGET, COMPUTE>::of(sum);
}
