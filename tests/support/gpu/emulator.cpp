// What all kernels under the emulator (emulator.h) share: fibers, barriers, and the check of shared memory.
//
// With CHECK_SHARED, every access to shared memory is checked as compute-sanitizer does: for races between threads that
// no barrier orders (shuffles and votes order no memory), for bytes that nobody has written, and for bytes behind the
// shared memory of the launch. The compiler's -fsanitize=thread reports the accesses; its functions are defined here.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "emulator.h"

dim3_ threadIdx, blockIdx, blockDim, gridDim;
__attribute__((section("emulated_shared"))) __align__(1024) char dynamic_shared[MOST_SHARED];

namespace emulated {
constexpr size_t STACK = 64 * 1024;

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
static Fiber fibers[MOST_THREADS];
static Fiber *running = nullptr;
static Fiber *ready[MOST_THREADS];
static unsigned ready_count = 0, alive = 0;
static jmp_buf scheduler;
static void (*body)() = nullptr;
void **arguments = nullptr;
static char failure[200];
static uint64_t random_state = 1;
static Barrier barriers[16], warp_barriers[WARPS];  // barrier 0 is the one of __syncthreads
static Collective collective_of[WARPS];
static Exchange exchanges[2][WARPS];

static uint64_t random_number() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
[[noreturn]] static void fail(const char *what, unsigned other = 0) {
    if (!*failure)
        std::snprintf(failure, sizeof failure, "%s (thread %u, block %u, other thread %u)", what, threadIdx.x, blockIdx.x, other);
    _longjmp(scheduler, 1);
}
static void give_way();
static void entry() {
    for (;;) {
        body();
        --alive;
        give_way();
    }
}
[[noreturn]] static void run_next() {
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
static void give_way() {
    if (_setjmp(running->context) == 0) run_next();
}

// What orders memory. A warp's epoch counts its barriers; seen[a][b] is the epoch of b up to which a has seen all of it.
static uint32_t epoch[WARPS], seen[WARPS][WARPS];

static void order_memory(const bool *members, unsigned warps) {
    uint32_t joined[WARPS] = {};
    for (unsigned w = 0; w < warps; ++w) {
        if (!members[w]) continue;
        ++epoch[w];
        for (unsigned v = 0; v < warps; ++v) joined[v] = std::max(joined[v], seen[w][v]);
    }
    for (unsigned w = 0; w < warps; ++w)
        for (unsigned v = 0; v < warps && members[w]; ++v) seen[w][v] = members[v] ? epoch[v] : joined[v];
}
static void release(Barrier &barrier) {
    for (unsigned k = 0; k + 1 < barrier.arrived; ++k) ready[ready_count++] = barrier.waiting[k];
    barrier.answer[barrier.generation++ & 1] = barrier.any;
    barrier.any = false;
    barrier.arrived = 0;
}

bool wait(unsigned number, unsigned members, bool value) {
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

const Exchange &meet(Collective what, unsigned mask, uint64_t value) {
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
// The last write of a byte of shared memory, and two of the threads that read it since.
struct Byte {
    uint32_t block, write_epoch, read_epoch[2];
    uint16_t writer, reader[2];  // thread + 1; 0: none
    bool atomic;
};
static Byte *bytes = nullptr;
static uint32_t block_number = 0;
static size_t dynamic_nbytes = 0;

static bool is_ordered(unsigned other, uint32_t when) {
    if (other == 0 || other - 1 == threadIdx.x) return true;
    const unsigned warp = (other - 1) / WARP, mine = threadIdx.x / WARP;
    return when < (warp == mine ? epoch[mine] : seen[mine][warp]);
}
void check(const void *address, size_t n, bool writes, bool atomic) {
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
static bool run_block(unsigned threads) {
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
const char *run_grid(void (*kernel)(), const unsigned *blocks, unsigned threads, unsigned shared,
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
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
#define ACCESS(n) \
    void __tsan_read##n(void *p) { if (emulated::is_shared(p)) emulated::check(p, n, false, false); } \
    void __tsan_write##n(void *p) { if (emulated::is_shared(p)) emulated::check(p, n, true, false); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void *p, size_t n) { if (emulated::is_shared(p)) emulated::check(p, n, false, false); }
void __tsan_write_range(void *p, size_t n) { if (emulated::is_shared(p)) emulated::check(p, n, true, false); }
}
#endif

