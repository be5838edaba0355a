// Runs CUDA kernels on the CPU for tests without a GPU. Each thread of a block is a fiber; warps have 32 lanes. A fiber
// runs until it waits for others, and which one runs next is random, by a seed.
//
// Here is what kernels are compiled with; emulator.cpp is compiled once and linked to each of them.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __shared__ static __attribute__((section("emulated_shared")))
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#ifndef __restrict__
#define __restrict__ __restrict
#endif
#define NOT_CHECKED __attribute__((no_sanitize("thread", "undefined")))

struct dim3_ { unsigned x = 1, y = 1, z = 1; };
extern dim3_ threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };

// The shared memory that kernels declare lies in a section of its own, together with what a launch asks for.
constexpr size_t MOST_SHARED = 228 * 1024;
extern char dynamic_shared[MOST_SHARED];
extern char shared_begin[] __asm__("__start_emulated_shared") __attribute__((visibility("hidden")));
extern char shared_end[] __asm__("__stop_emulated_shared") __attribute__((visibility("hidden")));

namespace emulated {
constexpr unsigned MOST_THREADS = 1024, WARP = 32, WARPS = MOST_THREADS / WARP;
enum Collective { SYNC_WARP, SHUFFLE, VOTE, REDUCE, MATCH };
struct Exchange { uint64_t value[WARP], any; };  // values of all lanes, and their bits

extern void **arguments;
const char *run_grid(void (*kernel)(), const unsigned *blocks, unsigned threads, unsigned shared, unsigned seed, void **values);
// Wait for the other threads that take part in a barrier; returns whether any of their values holds.
bool wait(unsigned number, unsigned members, bool value);
// Wait for the other lanes; returns their values.
const Exchange &meet(Collective what, unsigned mask, uint64_t value);
// Note an access to shared memory, and fail if it races with another one, or reads what nobody wrote.
void check(const void *address, size_t n, bool writes, bool atomic);

NOT_CHECKED inline unsigned warp_size(unsigned warp) {
    const unsigned rest = blockDim.x - warp * WARP;
    return rest < WARP ? rest : WARP;
}
NOT_CHECKED inline bool is_shared(const void *address) {
    return static_cast<size_t>(static_cast<const char *>(address) - shared_begin) < static_cast<size_t>(shared_end - shared_begin);
}
template <class T> NOT_CHECKED T shuffle(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    uint64_t sent = 0;
    std::memcpy(&sent, &value, sizeof(T));
    const Exchange &all = meet(SHUFFLE, mask, sent);
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    T got;
    std::memcpy(&got, &all.value[from < warp_size(warp) ? from : lane], sizeof(T));
    return got;
}
inline void check_atomic(const void *address, size_t n) {
#ifdef CHECK_SHARED
    if (is_shared(address)) check(address, n, true, true);
#endif
}
}  // namespace emulated

inline void __syncthreads() { emulated::wait(0, blockDim.x, false); }
inline void __threadfence() {}  // blocks run one after another
inline bool __syncthreads_or(int p) { return emulated::wait(0, blockDim.x, p); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulated::meet(emulated::SYNC_WARP, mask, 0); }
template <class T> T __shfl_sync(unsigned mask, T v, int lane) { return emulated::shuffle(mask, v, lane); }
template <class T> T __shfl_xor_sync(unsigned mask, T v, int by) { return emulated::shuffle(mask, v, threadIdx.x % 32 ^ by); }
template <class T> T __shfl_up_sync(unsigned mask, T v, int by) { return emulated::shuffle(mask, v, threadIdx.x % 32 - by); }
template <class T> T __shfl_down_sync(unsigned mask, T v, int by) { return emulated::shuffle(mask, v, threadIdx.x % 32 + by); }
NOT_CHECKED inline unsigned __ballot_sync(unsigned mask, int p) {
    return static_cast<unsigned>(emulated::meet(emulated::VOTE, mask, static_cast<uint64_t>(p != 0) << threadIdx.x % 32).any);
}
NOT_CHECKED inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
    return static_cast<unsigned>(emulated::meet(emulated::REDUCE, mask, v).any);
}

NOT_CHECKED inline unsigned __match_any_sync(unsigned mask, unsigned v) {
    const emulated::Exchange &all = emulated::meet(emulated::MATCH, mask, v);
    const unsigned lanes = emulated::warp_size(threadIdx.x / emulated::WARP);
    unsigned same = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) same |= static_cast<unsigned>(all.value[lane] == v) << lane;
    return same;
}

// Without the selectors that repeat a sign.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
    const uint64_t bytes = (static_cast<uint64_t>(high) << 32) | low;
    unsigned result = 0;
    for (unsigned k = 0; k < 4; ++k)
        result |= static_cast<unsigned>((bytes >> (8 * ((selectors >> (4 * k)) & 7))) & 0xff) << (8 * k);
    return result;
}

inline float __int_as_float(int bits) {
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline int __float_as_int(float f) {
    int bits;
    std::memcpy(&bits, &f, 4);
    return bits;
}
inline uint64_t double_bits(double d) {
    uint64_t bits;
    std::memcpy(&bits, &d, 8);
    return bits;
}
inline int __double2loint(double d) { return static_cast<int>(double_bits(d)); }
inline int __double2hiint(double d) { return static_cast<int>(double_bits(d) >> 32); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32) | low) >> (by & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (by & 31) >> 32);
}
// Shifts of 64 bits by at most 32.
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (by < 32 ? by : 32));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned by) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (by < 32 ? by : 32) >> 32);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __float2uint_rz(float v) { return static_cast<unsigned>(v); }
// As wrong as the GPU's may be: by two units of the last place, to either side.
inline float __fdividef(float a, float b) { return a / b * (1.0f + (static_cast<unsigned>(a) & 1 ? 2.4e-7f : -2.4e-7f)); }
inline float __fadd_rd(float a, float b) {  // of numbers whose sum a double holds
    const double exact = static_cast<double>(a) + b;
    const float near = static_cast<float>(exact);
    return near > exact ? std::nextafterf(near, -INFINITY) : near;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fmaf_rd(float a, float b, float c) {  // of numbers whose exact result a double holds
    const double exact = static_cast<double>(a) * b + c;
    const float near = static_cast<float>(exact);
    return near > exact ? std::nextafterf(near, -INFINITY) : near;
}
inline float __saturatef(float v) { return v > 0 ? v < 1 ? v : 1.0f : 0.0f; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> void __stcs(T *p, T v) { *p = v; }
#define __noinline__
inline float __logf(float x) { return std::log(x); }
template <class T, class F> NOT_CHECKED T atomic(T *p, F update) {
    emulated::check_atomic(p, sizeof(T));
    const T old = *p;
    *p = update(old);
    return old;
}
template <class T> T atomicAdd(T *p, T v) { return atomic(p, [v](T old) NOT_CHECKED { return static_cast<T>(old + v); }); }
inline unsigned atomicXor(unsigned *p, unsigned v) { return atomic(p, [v](unsigned old) NOT_CHECKED { return old ^ v; }); }
inline unsigned atomicMin(unsigned *p, unsigned v) { return atomic(p, [v](unsigned old) NOT_CHECKED { return old < v ? old : v; }); }
inline unsigned atomicMax(unsigned *p, unsigned v) { return atomic(p, [v](unsigned old) NOT_CHECKED { return old > v ? old : v; }); }
inline int atomicCAS(int *p, int expected, int v) { return atomic(p, [=](int old) NOT_CHECKED { return old == expected ? v : old; }); }
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> const T &max(const T &a, const T &b) { return a < b ? b : a; }
template <class T> const T &min(const T &a, const T &b) { return b < a ? b : a; }
