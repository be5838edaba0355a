// Runs CUDA kernels on the CPU, thread after thread, for tests without a GPU. A thread of a block is a fiber; it gives
// way where it waits for others.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#ifndef __restrict__
#define __restrict__ __restrict
#endif

struct dim3_ { unsigned x = 1, y = 1, z = 1; };
static dim3_ threadIdx, blockIdx, blockDim, gridDim;
static std::vector<char> shared_memory;

struct uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };

namespace emulated {
constexpr size_t STACK = 64 * 1024;
struct Barrier { int arrived = 0; long generation = 0; };
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool done = false;
    dim3_ thread;
};
static std::vector<std::unique_ptr<Fiber>> fibers;
static ucontext_t scheduler;
static Fiber *running = nullptr;
static std::function<void()> body;
static Barrier block_barrier, warp_barriers[32];
static uint64_t slots[32][32];
static int alive = 0;

inline void give_way() {
    Fiber *self = running;
    swapcontext(&self->context, &scheduler);
}
inline void wait(Barrier &barrier, int members) {
    const long generation = barrier.generation;
    if (++barrier.arrived == members) {
        barrier.arrived = 0;
        ++barrier.generation;
        return;
    }
    while (barrier.generation == generation) give_way();
}
inline int warp_size(int warp) { return std::min(32, static_cast<int>(blockDim.x) - warp * 32); }
static void entry() {
    body();
    running->done = true;
    --alive;
    give_way();
}
static bool run_block(unsigned threads) {
    while (fibers.size() < threads) fibers.emplace_back(new Fiber);
    block_barrier = Barrier();
    for (auto &barrier : warp_barriers) barrier = Barrier();
    alive = static_cast<int>(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fiber &fiber = *fibers[t];
        fiber.done = false;
        fiber.thread.x = t;
        fiber.thread.y = fiber.thread.z = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
    }
    long idle_rounds = 0;
    while (alive > 0) {
        const int before = alive;
        const long generation = block_barrier.generation;
        for (unsigned turn = 0; turn < threads; ++turn) {
            // Every other block from its last thread on: what lacks a barrier is wrong in one order or the other.
            Fiber &fiber = *fibers[blockIdx.x % 2 ? threads - 1 - turn : turn];
            if (fiber.done) continue;
            running = &fiber;
            threadIdx = fiber.thread;
            swapcontext(&scheduler, &fiber.context);
        }
        idle_rounds = before == alive && generation == block_barrier.generation ? idle_rounds + 1 : 0;
        if (idle_rounds > 1000) return false;  // some wait for others that are gone
    }
    return true;
}
template <class T> T exchange(T value, int from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    std::memcpy(&slots[warp][lane], &value, sizeof(T));
    wait(warp_barriers[warp], warp_size(warp));
    T got;
    std::memcpy(&got, &slots[warp][from >= 0 && from < warp_size(warp) ? from : lane], sizeof(T));
    wait(warp_barriers[warp], warp_size(warp));
    return got;
}
}  // namespace emulated

inline void __syncthreads() {
    emulated::wait(emulated::block_barrier, static_cast<int>(blockDim.x));
}
inline void __syncwarp(unsigned = 0xffffffffu) {
    emulated::wait(emulated::warp_barriers[threadIdx.x / 32], emulated::warp_size(threadIdx.x / 32));
}
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) { return emulated::exchange(v, (threadIdx.x % 32) ^ mask); }
template <class T> T __shfl_down_sync(unsigned, T v, int by) { return emulated::exchange(v, threadIdx.x % 32 + by); }
template <class T> T __shfl_sync(unsigned, T v, int lane) { return emulated::exchange(v, lane); }

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
inline float __fadd_rd(float a, float b) {  // of numbers whose sum a double holds
    const double exact = static_cast<double>(a) + b;
    const float near = static_cast<float>(exact);
    return near > exact ? std::nextafterf(near, -INFINITY) : near;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> void __stcs(T *p, T v) { *p = v; }
#define __noinline__
inline float __logf(float x) { return std::log(x); }
template <class T> T atomicAdd(T *p, T v) { T old = *p; *p = old + v; return old; }
template <class T> T __ldg(const T *p) { return *p; }
using std::max;
using std::min;
