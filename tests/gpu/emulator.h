// Runs CUDA kernels on the CPU for tests without a GPU. Each thread of a block is a fiber; warps have 32 lanes. A fiber
// runs until it waits for others, and which one runs next is random, by a seed.
//
// With CHECK_SHARED, every access to shared memory is checked as compute-sanitizer does: for races between threads that
// no barrier orders (shuffles and votes order no memory), for bytes that nobody has written, and for bytes behind the
// shared memory of the launch. The compiler's -fsanitize=thread reports the accesses; its functions are defined here.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
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
static dim3_ threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct float4 { float x, y, z, w; };

// The shared memory that kernels declare lies in a section of its own, together with what a launch asks for.
constexpr size_t MOST_SHARED = 228 * 1024;
__shared__ __align__(1024) char dynamic_shared[MOST_SHARED];
extern char shared_begin[] __asm__("__start_emulated_shared") __attribute__((visibility("hidden")));
extern char shared_end[] __asm__("__stop_emulated_shared") __attribute__((visibility("hidden")));

namespace emulated {
constexpr size_t STACK = 64 * 1024;
constexpr unsigned MOST_THREADS = 1024, WARP = 32, WARPS = MOST_THREADS / WARP;

struct Fiber {
    jmp_buf context;
    std::unique_ptr<char[]> stack;
    unsigned thread;
    unsigned exchanges = 0;  // collectives of its warp that it took part in
    bool started = false;
};
struct Barrier {
    unsigned arrived = 0, generation = 0;
    bool any = false, answer[2];
    Fiber *waiting[MOST_THREADS];
};
enum Collective { SYNC_WARP, SHUFFLE, VOTE, REDUCE, MATCH };

static Fiber fibers[MOST_THREADS];
static Fiber *running = nullptr;
static Fiber *ready[MOST_THREADS];
static unsigned ready_count = 0, alive = 0;
static jmp_buf scheduler;
static void (*body)() = nullptr;
static void **arguments = nullptr;
static char failure[200];
static uint64_t random_state = 1;
static Barrier barriers[16], warp_barriers[WARPS];  // barrier 0 is the one of __syncthreads
static Collective collective_of[WARPS];
struct Exchange { uint64_t value[WARP], any; };  // values of all lanes, and their bits
static Exchange exchanges[2][WARPS];

NOT_CHECKED static uint64_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
[[noreturn]] NOT_CHECKED static void fail(const char *what, unsigned other = 0) {
    if (!*failure)
        std::snprintf(failure, sizeof failure, "%s (thread %u, block %u, other thread %u)", what, threadIdx.x, blockIdx.x, other);
    _longjmp(scheduler, 1);
}
NOT_CHECKED static void give_way();
NOT_CHECKED static void entry() {
    for (;;) {
        body();
        --alive;
        give_way();
    }
}
[[noreturn]] NOT_CHECKED static void run_next() {
    if (ready_count == 0) _longjmp(scheduler, 1);
    const unsigned pick = random_number() % ready_count;
    running = ready[pick];
    ready[pick] = ready[--ready_count];
    threadIdx.x = running->thread;
    if (running->started) _longjmp(running->context, 1);
    running->started = true;
    if (!running->stack) running->stack.reset(new char[STACK]);
    ucontext_t fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = running->stack.get();
    fresh.uc_stack.ss_size = STACK;
    fresh.uc_link = nullptr;
    makecontext(&fresh, entry, 0);
    setcontext(&fresh);
    __builtin_unreachable();
}
NOT_CHECKED static void give_way() {
    if (_setjmp(running->context) == 0) run_next();
}

// What orders memory. A warp's epoch counts its barriers; seen[a][b] is the epoch of b up to which a has seen all of it.
static uint32_t epoch[WARPS], seen[WARPS][WARPS];

NOT_CHECKED static void order_memory(const bool *members, unsigned warps) {
    uint32_t joined[WARPS] = {};
    for (unsigned w = 0; w < warps; ++w) {
        if (!members[w]) continue;
        ++epoch[w];
        for (unsigned v = 0; v < warps; ++v) joined[v] = std::max(joined[v], seen[w][v]);
    }
    for (unsigned w = 0; w < warps; ++w)
        for (unsigned v = 0; v < warps && members[w]; ++v) seen[w][v] = members[v] ? epoch[v] : joined[v];
}
NOT_CHECKED static void release(Barrier &barrier) {
    for (unsigned k = 0; k + 1 < barrier.arrived; ++k) ready[ready_count++] = barrier.waiting[k];
    barrier.answer[barrier.generation++ & 1] = barrier.any;
    barrier.any = false;
    barrier.arrived = 0;
}
NOT_CHECKED static unsigned warp_size(unsigned warp) {
    const unsigned rest = blockDim.x - warp * WARP;
    return rest < WARP ? rest : WARP;
}

NOT_CHECKED static bool wait(unsigned number, unsigned members, bool value) {
    Barrier &barrier = barriers[number];
    const unsigned generation = barrier.generation;
    barrier.any |= value;
    barrier.waiting[barrier.arrived++] = running;
    if (barrier.arrived < members) {
        give_way();
        return barrier.answer[generation & 1];
    }
    bool warps[WARPS] = {};
    unsigned lanes = 0;
    for (unsigned k = 0; k < members; ++k) {
        const unsigned warp = barrier.waiting[k]->thread / WARP;
        lanes += warps[warp] ? 0 : warp_size(warp);
        warps[warp] = true;
    }
    if (lanes != members) fail("a barrier is passed by parts of warps");
    order_memory(warps, WARPS);
    release(barrier);
    return barrier.answer[generation & 1];
}

// Wait for the other lanes; returns their values.
NOT_CHECKED static const Exchange &meet(Collective what, unsigned mask, uint64_t value) {
    const unsigned warp = running->thread / WARP, lane = running->thread % WARP, parity = running->exchanges++ & 1;
    if (mask != 0xffffffffu) fail("a collective of a part of a warp");
    Barrier &barrier = warp_barriers[warp];
    if (barrier.arrived && collective_of[warp] != what) fail("lanes of a warp meet in different collectives");
    collective_of[warp] = what;
    Exchange &exchange = exchanges[parity][warp];
    exchange.value[lane] = value;
    exchange.any = barrier.arrived ? exchange.any | value : value;
    barrier.waiting[barrier.arrived++] = running;
    if (barrier.arrived < warp_size(warp)) {
        give_way();
    } else {
        if (what == SYNC_WARP) ++epoch[warp];
        release(barrier);
    }
    return exchange;
}
template <class T> NOT_CHECKED T shuffle(unsigned mask, T value, unsigned from) {
    static_assert(sizeof(T) <= 8);
    uint64_t sent = 0;
    std::memcpy(&sent, &value, sizeof(T));
    const Exchange &all = meet(SHUFFLE, mask, sent);
    const unsigned warp = running->thread / WARP, lane = running->thread % WARP;
    T got;
    std::memcpy(&got, &all.value[from < warp_size(warp) ? from : lane], sizeof(T));
    return got;
}

// The last write of a byte of shared memory, and two of the threads that read it since.
struct Byte {
    uint32_t block, write_epoch, read_epoch[2];
    uint16_t writer, reader[2];  // thread + 1; 0: none
    bool atomic;
};
static Byte *bytes = nullptr;
static uint32_t block_number = 0;
static size_t dynamic_nbytes = 0;

NOT_CHECKED static bool is_ordered(unsigned other, uint32_t when) {
    if (other == 0 || other - 1 == threadIdx.x) return true;
    const unsigned warp = (other - 1) / WARP, mine = threadIdx.x / WARP;
    return when < (warp == mine ? epoch[mine] : seen[mine][warp]);
}
NOT_CHECKED static bool is_shared(const void *address) {
    return static_cast<size_t>(static_cast<const char *>(address) - shared_begin) < static_cast<size_t>(shared_end - shared_begin);
}
NOT_CHECKED static void check(const void *address, size_t n, bool writes, bool atomic) {
    if (!running) return;
    const size_t at = static_cast<const char *>(address) - shared_begin;
    const size_t in_dynamic = static_cast<const char *>(address) - dynamic_shared;
    if (in_dynamic < MOST_SHARED && in_dynamic + n > dynamic_nbytes) fail("shared memory behind what the launch has");
    const unsigned me = threadIdx.x + 1;
    const uint32_t now = epoch[threadIdx.x / WARP];
    for (size_t k = at; k < at + n; ++k) {
        Byte &byte = bytes[k];
        if (byte.block != block_number) byte = Byte{block_number, 0, {0, 0}, 0, {0, 0}, false};
        if (!(atomic && byte.atomic) && !is_ordered(byte.writer, byte.write_epoch))
            fail(writes ? "race: two writes of shared memory" : "race: shared memory is read while it is written", byte.writer - 1);
        if (writes) {
            for (int r = 0; r < 2; ++r)
                if (!is_ordered(byte.reader[r], byte.read_epoch[r]))
                    fail("race: shared memory is written while it is read", byte.reader[r] - 1);
            byte.writer = static_cast<uint16_t>(me);
            byte.write_epoch = now;
            byte.atomic = atomic;
            byte.reader[0] = byte.reader[1] = 0;
            continue;
        }
        if (byte.writer == 0) fail("shared memory is read that nobody wrote");
        const int r = byte.reader[0] == me || is_ordered(byte.reader[0], byte.read_epoch[0]) ? 0 : 1;
        byte.reader[r] = static_cast<uint16_t>(me);
        byte.read_epoch[r] = now;
    }
}
inline void check_atomic(const void *address, size_t n) {
#ifdef CHECK_SHARED
    if (is_shared(address)) check(address, n, true, true);
#endif
}

NOT_CHECKED static bool run_block(unsigned threads) {
    ++block_number;
    char *const behind = dynamic_shared + MOST_SHARED;
    std::memset(shared_begin, 0xA5, dynamic_shared + dynamic_nbytes - shared_begin);
    std::memset(behind, 0xA5, shared_end - behind);
    std::memset(epoch, 0, sizeof epoch);
    std::memset(seen, 0, sizeof seen);
    for (auto &barrier : barriers) barrier.arrived = 0;
    for (auto &barrier : warp_barriers) barrier.arrived = 0;
    alive = ready_count = threads;
    for (unsigned t = 0; t < threads; ++t) {
        fibers[t].thread = t;
        fibers[t].exchanges = 0;
        ready[t] = &fibers[t];
    }
    if (_setjmp(scheduler) == 0) run_next();
    running = nullptr;
    if (!*failure && alive) std::snprintf(failure, sizeof failure, "threads wait for others that are gone");
    if (!*failure) return true;
    for (auto &fiber : fibers) fiber.started = false;
    return false;
}
NOT_CHECKED static const char *run_grid(void (*kernel)(), const unsigned *blocks, unsigned threads, unsigned shared,
                                        unsigned seed, void **values) {
    body = kernel;
    arguments = values;
    dynamic_nbytes = shared;
    random_state = seed * 0x9e3779b97f4a7c15ull | 1;
    *failure = 0;
    if (!bytes) bytes = static_cast<Byte *>(std::calloc(shared_end - shared_begin, sizeof(Byte)));
    gridDim = {blocks[0], blocks[1], blocks[2]};
    blockDim.x = threads;
    for (blockIdx.z = 0; blockIdx.z < blocks[2]; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < blocks[1]; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < blocks[0]; ++blockIdx.x)
                if (!run_block(threads)) return failure;
    return nullptr;
}
}  // namespace emulated

#ifdef CHECK_SHARED
extern "C" {
NOT_CHECKED void __tsan_init() {}
NOT_CHECKED void __tsan_func_entry(void *) {}
NOT_CHECKED void __tsan_func_exit() {}
#define ACCESS(n) \
    NOT_CHECKED void __tsan_read##n(void *p) { if (emulated::is_shared(p)) emulated::check(p, n, false, false); } \
    NOT_CHECKED void __tsan_write##n(void *p) { if (emulated::is_shared(p)) emulated::check(p, n, true, false); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
NOT_CHECKED void __tsan_read_range(void *p, size_t n) { if (emulated::is_shared(p)) emulated::check(p, n, false, false); }
NOT_CHECKED void __tsan_write_range(void *p, size_t n) { if (emulated::is_shared(p)) emulated::check(p, n, true, false); }
}
#endif

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
    const unsigned lanes = emulated::warp_size(emulated::running->thread / emulated::WARP);
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
using std::max;
using std::min;
