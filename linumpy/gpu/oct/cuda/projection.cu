// Mean, standard deviation, minimum and maximum along one axis, in one pass.
//
// Compiled for SOURCE (type of an element), ACC (float, double), WANT (sum of 1: mean, 2: std, 4: min, 8: max), VEC
// (elements of one access: as many as alignment allows, 16 bytes at most) and ROWS (1: the axis is contiguous in
// memory), never for a shape.
//
// The array is (outer, n, inner). A block computes `lanes` vectors of outputs (with ROWS: `lanes` outputs), each by
// `segments` threads, which interleave along the axis; the states of these threads are merged at the end. For few
// outputs, several blocks share the axis, and `merge_partials` merges their results.

#include "number.cuh"
#include "stored.cuh"

constexpr int UNROLL = 8;  // accesses of a thread in flight

template <class T> struct Kind {
    typedef ACC Sum;
    static constexpr bool exact = false;
};
struct Exact {
    typedef int64 Sum;
    static constexpr bool exact = true;
};
template <> struct Kind<unsigned char> : Exact {};
template <> struct Kind<signed char> : Exact {};
template <> struct Kind<unsigned short> : Exact {};
template <> struct Kind<short> : Exact {};
template <> struct Kind<unsigned> : Exact {};
template <> struct Kind<int> : Exact {};
typedef Kind<SOURCE>::Sum Sum;  // sums of integers of up to 32 bits are exact
constexpr bool SHORT = Kind<SOURCE>::exact && sizeof(SOURCE) <= 2;
template <bool SHORT_ONE> struct Run { typedef Sum type; };
template <> struct Run<true> { typedef int type; };
constexpr int RUN = SHORT ? 1 << 15 : UNROLL;  // an int holds the sum of this many elements of 16 bits

template <class R> struct Summand {
    template <class T> static __device__ R of(T v) { return static_cast<R>(v); }
    static __device__ R of(half_bits v) { return static_cast<R>(as_float(v)); }
};

// Whether NumPy replaces m by the new value v; a NaN stays.
__device__ inline bool above(half_bits v, half_bits m) {
    const float f = as_float(v), g = as_float(m);
    return g == g && !(f <= g);
}
template <class T> __device__ inline bool above(T v, T m) { return m == m && !(v <= m); }
__device__ inline bool below(half_bits v, half_bits m) {
    const float f = as_float(v), g = as_float(m);
    return g == g && !(f >= g);
}
template <class T> __device__ inline bool below(T v, T m) { return m == m && !(v >= m); }

// Statistics of one output over the elements read so far. The sum of squares follows Welford's update (Technometrics 4,
// 1962) and the merge of Chan, Golub and LeVeque (1979), which stay accurate if the mean is much larger than the
// spread.
struct State {
    int64 count;
#if WANT & 1
    Sum sum;
#endif
#if WANT & 2
    ACC mean, squares;
#endif
#if WANT & 4
    SOURCE low;
#endif
#if WANT & 8
    SOURCE high;
#endif

    __device__ void clear() {
        count = 0;
#if WANT & 1
        sum = 0;
#endif
#if WANT & 2
        mean = squares = 0;
#endif
    }
    __device__ void add(SOURCE v, ACC reciprocal, bool first) {
#if WANT & 2
        const ACC f = number(v), difference = f - mean;
        mean += difference * reciprocal;
        squares += difference * (f - mean);
#endif
#if WANT & 4
        if (first || below(v, low)) low = v;
#endif
#if WANT & 8
        if (first || above(v, high)) high = v;
#endif
    }
    __device__ void merge(const State &other) {
        if (other.count == 0) return;
        if (count == 0) {
            *this = other;
            return;
        }
#if WANT & 1
        sum += other.sum;
#endif
#if WANT & 2
        const ACC all = static_cast<ACC>(count + other.count), difference = other.mean - mean;
        const ACC share = static_cast<ACC>(other.count) / all;
        squares += other.squares + difference * difference * static_cast<ACC>(count) * share;
        mean += difference * share;
#endif
#if WANT & 4
        if (below(other.low, low)) low = other.low;
#endif
#if WANT & 8
        if (above(other.high, high)) high = other.high;
#endif
        count += other.count;
    }
    __device__ void finish(int64 at, ACC *means, ACC *deviations, SOURCE *lows, SOURCE *highs) const {
#if WANT & 1
        if (Kind<SOURCE>::exact) means[at] = static_cast<ACC>(static_cast<double>(sum) / static_cast<double>(count));
        else means[at] = static_cast<ACC>(sum) / static_cast<ACC>(count);
#endif
#if WANT & 2
        deviations[at] = sqrt(squares / static_cast<ACC>(count));
#endif
#if WANT & 4
        lows[at] = low;
#endif
#if WANT & 8
        highs[at] = high;
#endif
    }
};
static_assert(sizeof(State) <= 48, "linumpy.gpu.oct.projection allocates 48 bytes for each");

struct alignas(VEC * sizeof(SOURCE)) Vector { SOURCE at[VEC]; };

// States of a thread that are merged between two barriers: as many as fit 64 bytes.
constexpr int CAPACITY = 64 / sizeof(State), OWN = ROWS ? 1 : VEC, BATCH = OWN < CAPACITY ? OWN : CAPACITY;

extern "C" __global__ void __launch_bounds__(256)
    project(const SOURCE *__restrict__ vol, ACC *__restrict__ means, ACC *__restrict__ deviations,
            SOURCE *__restrict__ lows, SOURCE *__restrict__ highs, State *__restrict__ partials, int64 n, int64 inner,
            int64 vectors, int64 chunk, unsigned lanes, unsigned blocks, unsigned parts) {
    extern __shared__ State states[];
    const unsigned segments = blockDim.x / lanes;
    const unsigned lane = ROWS ? threadIdx.x / segments : threadIdx.x % lanes;
    const unsigned segment = ROWS ? threadIdx.x % segments : threadIdx.x / lanes;
    const unsigned part = blockIdx.x / blocks;
    const int64 vector = static_cast<int64>(blockIdx.x % blocks) * lanes + lane;

    State state[VEC];
    int64 count = 0;  // the same for all vector elements
#pragma unroll
    for (int v = 0; v < VEC; ++v) state[v].clear();
    if (vector < vectors) {
        // The axis in accesses, `step` elements apart; this block reads them from `begin` to before `end`.
        const int64 accesses = ROWS ? n / VEC : n, begin = part * chunk;
        const int64 end = begin + chunk < accesses ? begin + chunk : accesses;
        const int64 step = ROWS ? VEC : inner, per_row = inner / VEC;
        const SOURCE *const from =
            ROWS ? vol + vector * n : vol + vector / per_row * n * inner + vector % per_row * VEC;
        const int64 stride = step * segments;
        const SOURCE *at = from + (begin + segment) * step;
#if WANT & 1
        typename Run<SHORT>::type run[VEC];
        int summed = 0;
#pragma unroll
        for (int v = 0; v < VEC; ++v) run[v] = 0;
#endif
        for (int64 k = begin + segment; k < end; k += static_cast<int64>(UNROLL) * segments) {
            Vector loaded[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u, at += stride)
                if (k + u * segments < end) loaded[u] = *reinterpret_cast<const Vector *>(at);
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (k + u * segments >= end) continue;
#if WANT & 2
                const ACC reciprocal = ACC(1) / static_cast<ACC>(count + 1);
#else
                const ACC reciprocal = 0;
#endif
#pragma unroll
                for (int v = 0; v < VEC; ++v) {
#if WANT & 1
                    run[v] += Summand<typename Run<SHORT>::type>::of(loaded[u].at[v]);
#endif
                    state[v].add(loaded[u].at[v], reciprocal, count == 0);
                }
                ++count;
            }
#if WANT & 1
            summed += UNROLL;
            if (summed + UNROLL <= RUN && k + static_cast<int64>(UNROLL) * segments < end) continue;
            summed = 0;
#pragma unroll
            for (int v = 0; v < VEC; ++v) state[v].sum += run[v], run[v] = 0;
#endif
        }
    }
#pragma unroll
    for (int v = 0; v < VEC; ++v) state[v].count = count;
    if (ROWS) {
#pragma unroll
        for (int v = 1; v < VEC; ++v) state[0].merge(state[v]);
    }
    const int64 outputs = ROWS ? vectors : vectors * VEC;
#pragma unroll
    for (int v0 = 0; v0 < OWN; v0 += BATCH) {
        for (unsigned half = segments / 2; half > 0; half /= 2) {  // segments are a power of two
            if (segment >= half && segment < 2 * half) {
#pragma unroll
                for (int j = 0; j < BATCH && v0 + j < OWN; ++j) states[j * blockDim.x + threadIdx.x] = state[v0 + j];
            }
            __syncthreads();
            if (segment < half) {
                const unsigned other = threadIdx.x + half * (ROWS ? 1 : lanes);
#pragma unroll
                for (int j = 0; j < BATCH && v0 + j < OWN; ++j) state[v0 + j].merge(states[j * blockDim.x + other]);
            }
            __syncthreads();
        }
    }
    if (segment != 0 || vector >= vectors) return;
#pragma unroll
    for (int v = 0; v < OWN; ++v) {
        const int64 at = ROWS ? vector : vector * VEC + v;
        if (parts > 1) partials[part * outputs + at] = state[v];
        else state[v].finish(at, means, deviations, lows, highs);
    }
}

// A warp merges the parts of one output.
extern "C" __global__ void __launch_bounds__(256)
    merge_partials(const State *__restrict__ partials, ACC *__restrict__ means, ACC *__restrict__ deviations,
                   SOURCE *__restrict__ lows, SOURCE *__restrict__ highs, int64 outputs, unsigned parts) {
    extern __shared__ State states[];
    const int64 at = static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const unsigned lane = threadIdx.x % 32;
    State state;
    state.clear();
    if (at < outputs)
        for (unsigned part = lane; part < parts; part += 32) state.merge(partials[part * outputs + at]);
    for (unsigned half = 16; half > 0; half /= 2) {
        if (lane >= half && lane < 2 * half) states[threadIdx.x] = state;
        __syncthreads();
        if (lane < half) state.merge(states[threadIdx.x + half]);
        __syncthreads();
    }
    if (lane == 0 && at < outputs) state.finish(at, means, deviations, lows, highs);
}
