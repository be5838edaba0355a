// The calls of the CUDA driver that the core makes, on host memory: a thread for each stream, late by chance, and kernels
// that the emulator compiled. A function's handle is the address of its `emulate_` function. Misuse that a device would
// answer with wrong voxels is noted as a failure: memory or events that are gone, calls without a context.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

using Emulated = const char *(*)(const unsigned *, unsigned, unsigned, unsigned, void **);
using Clock = std::chrono::steady_clock;

constexpr int NO_CONTEXT = 201, GONE = 400, NOT_READY = 600, INJECTED = 700;

std::mutex lock;
std::mutex one_kernel;  // the emulator runs one at a time
std::condition_variable changed;
std::string failure;
std::atomic<long> calls{0}, failing{0};
std::atomic<bool> checked{false};
std::minstd_rand numbers{1};
thread_local void *context = nullptr;

struct Function {
    int arguments = 0;  // 8 bytes each; negative where the last one has 4
    unsigned most_blocks = 0;  // 0: all
};
std::map<void *, Function> functions;

// An event: how often it was recorded, and how often that was reached.
struct Mark {
    long recorded = 0, reached = 0;
    bool timed = false, foreign = false;
    Clock::time_point at;
};
std::map<void *, std::shared_ptr<Mark>> events;  // by handle; work that is queued holds them, too
std::atomic<void (*)(void *, long)> on_wait{nullptr};

std::map<uintptr_t, size_t> device_memory, pinned_memory;

struct Queue {
    std::deque<std::function<void()>> work;
    bool ending = false, busy = false;
    std::thread thread;

    Queue() : thread([this] { run(); }) {}
    void run() {
        std::unique_lock held(lock);
        for (;;) {
            changed.wait(held, [this] { return ending || !work.empty(); });
            if (work.empty()) return;
            auto next = std::move(work.front());
            work.pop_front();
            busy = true;
            const auto late = std::chrono::microseconds(numbers() % 3 ? 0 : numbers() % 300);
            held.unlock();
            if (late.count()) std::this_thread::sleep_for(late);
            next();
            held.lock();
            busy = false;
            changed.notify_all();
        }
    }
};
std::atomic<long> streams{0};

void note(const char *text) {
    const std::lock_guard held(lock);
    if (failure.empty()) failure = text;
}

int call() {
    if (!context) {
        note("a thread without a context calls the driver");
        return NO_CONTEXT;
    }
    const long number = ++calls;
    const long from = failing;
    return from && (number == from || (from < 0 && number >= -from)) ? INJECTED : 0;
}

void add(void *stream, std::function<void()> work) {
    const std::lock_guard held(lock);
    static_cast<Queue *>(stream)->work.push_back(std::move(work));
    changed.notify_all();
}

std::shared_ptr<Mark> mark_of(void *event) {
    std::unique_lock held(lock);
    const auto found = events.find(event);
    if (found != events.end()) return found->second;
    held.unlock();
    note("an event is used that was destroyed");
    return nullptr;
}

void *new_event(bool timed, bool foreign) {
    auto mark = std::make_shared<Mark>();
    mark->timed = timed;
    mark->foreign = foreign;
    const std::lock_guard held(lock);
    static uintptr_t last = 0;  // no handle is given out twice, so that none is taken for another
    void *handle = reinterpret_cast<void *>(last += 16);
    events[handle] = std::move(mark);
    return handle;
}

// Bytes from an address to the end of what was allocated together.
size_t room(const std::map<uintptr_t, size_t> &memory, uintptr_t address) {
    const std::lock_guard held(lock);
    auto next = memory.upper_bound(address);
    if (next == memory.begin()) return 0;
    --next;
    return address < next->first + next->second ? next->first + next->second - address : 0;
}

void copy(uintptr_t to, const std::map<uintptr_t, size_t> &to_memory, uintptr_t from,
          const std::map<uintptr_t, size_t> &from_memory, size_t nbytes, void *stream) {
    const auto check = [=, &to_memory, &from_memory] {
        if (!checked) return true;
        if (room(to_memory, to) < nbytes) note("a copy writes to memory that is not there");
        else if (room(from_memory, from) < nbytes) note("a copy reads memory that is not there");
        else return true;
        return false;
    };
    check();
    add(stream, [=] {
        if (check()) std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), nbytes);
    });
}

int allocate(void **memory, size_t nbytes, std::map<uintptr_t, size_t> &known) {
    if (int error = call()) return error;
    *memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    std::memset(*memory, 0xA5, std::min<size_t>(nbytes, 1 << 22));  // of slabs, which are larger, the first part
    const std::lock_guard held(lock);
    known[reinterpret_cast<uintptr_t>(*memory)] = nbytes;
    return 0;
}

int release(uintptr_t memory, std::map<uintptr_t, size_t> &known) {
    {
        const std::lock_guard held(lock);
        if (!known.erase(memory)) {
            if (failure.empty()) failure = "memory is freed twice";
            return GONE;
        }
    }
    std::free(reinterpret_cast<void *>(memory));
    return 0;
}

}  // namespace

extern "C" {

// For tests: what a kernel takes.
void fake_register(void *function, int arguments) {
    const std::lock_guard held(lock);
    functions[function].arguments = arguments;
}
// By how many blocks at most it is run.
void fake_few_blocks(void *function, unsigned most) {
    const std::lock_guard held(lock);
    functions[function].most_blocks = most;
}
// Whether all device memory that is used was named by `fake_memory` or allocated here.
void fake_check_memory(int check) { checked = check; }
const char *fake_failure() { return failure.c_str(); }
void fake_forget_failure() { failure.clear(); }
long fake_calls() { return calls; }
// Let a call fail, by its number from now on; where that is negative, all that follow, too.
void fake_fail(long number) {
    calls = 0;
    failing = number;
}
void fake_seed(unsigned seed) { numbers.seed(seed); }
// Streams, events and pieces of memory of the core that were not given back.
long fake_alive() {
    const std::lock_guard held(lock);
    long own = 0;
    for (const auto &[handle, mark] : events) own += !mark->foreign;
    return streams + own + static_cast<long>(pinned_memory.size());
}
// Device memory that somebody else allocated; 0 bytes where it is gone.
void fake_memory(unsigned long long address, size_t nbytes) {
    const std::lock_guard held(lock);
    if (!nbytes) {
        device_memory.erase(address);
        return;
    }
    // What lay there before is gone, whether or not somebody has said so.
    auto next = device_memory.lower_bound(address);
    if (next != device_memory.begin() && std::prev(next)->first + std::prev(next)->second > address) --next;
    while (next != device_memory.end() && next->first < address + nbytes) next = device_memory.erase(next);
    device_memory[address] = nbytes;
}
size_t fake_room(unsigned long long address) { return room(device_memory, address); }

// Events of streams that are somebody else's, who is told when work waits for one: of which handle, and which record.
void fake_on_wait(void (*function)(void *, long)) { on_wait = function; }
void *fake_event() { return new_event(false, true); }
long fake_event_recorded(void *event) {
    const auto mark = mark_of(event);
    const std::lock_guard held(lock);
    return mark ? ++mark->recorded : 0;
}
void fake_event_reached(void *event, long number) {
    const std::lock_guard held(lock);
    const auto found = events.find(event);
    if (found == events.end()) return;
    found->second->reached = std::max(found->second->reached, number);
    changed.notify_all();
}
void fake_event_free(void *event) {
    const std::lock_guard held(lock);
    const auto found = events.find(event);
    if (found == events.end()) return;
    found->second->reached = found->second->recorded;  // nothing that is queued waits for ever
    events.erase(found);
    changed.notify_all();
}

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char **name) {
    *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}
int cuCtxGetCurrent(void **now) {
    *now = context;
    return 0;
}
int cuCtxSetCurrent(void *other) {
    context = other;
    return 0;
}
int cuStreamCreate(void **stream, unsigned) {
    if (int error = call()) return error;
    *stream = new Queue;
    ++streams;
    return 0;
}
int cuStreamSynchronize(void *stream) {
    std::unique_lock held(lock);
    auto *queue = static_cast<Queue *>(stream);
    changed.wait(held, [&] { return queue->work.empty() && !queue->busy; });
    return 0;
}
int cuStreamDestroy_v2(void *stream) {
    auto *queue = static_cast<Queue *>(stream);
    {
        const std::lock_guard held(lock);
        queue->ending = true;
        changed.notify_all();
    }
    queue->thread.join();
    delete queue;
    --streams;
    return 0;
}
int cuEventCreate(void **event, unsigned flags) {
    if (int error = call()) return error;
    *event = new_event(!(flags & 2), false);
    return 0;
}
int cuEventDestroy_v2(void *event) {
    if (!mark_of(event)) return GONE;
    const std::lock_guard held(lock);
    events.erase(event);
    return 0;
}
int cuEventRecord(void *event, void *stream) {
    if (int error = call()) return error;
    const auto mark = mark_of(event);
    if (!mark) return GONE;
    long number;
    {
        const std::lock_guard held(lock);
        number = ++mark->recorded;
    }
    add(stream, [mark, number] {
        const std::lock_guard held(lock);
        mark->reached = number;
        mark->at = Clock::now();
        changed.notify_all();
    });
    return 0;
}
int cuEventQuery(void *event) {
    if (int error = call()) return error;
    const auto mark = mark_of(event);
    const std::lock_guard held(lock);
    return !mark ? GONE : mark->reached >= mark->recorded ? 0 : NOT_READY;
}
int cuEventSynchronize(void *event) {
    if (int error = call()) return error;
    const auto mark = mark_of(event);
    if (!mark) return GONE;
    std::unique_lock held(lock);
    changed.wait(held, [&] { return mark->reached >= mark->recorded; });
    return 0;
}
int cuEventElapsedTime(float *milliseconds, void *first, void *last) {
    if (int error = call()) return error;
    const auto a = mark_of(first), b = mark_of(last);
    const std::lock_guard held(lock);
    if (!a || !b || !a->timed || !b->timed || !a->recorded || !b->recorded) return GONE;
    if (a->reached < a->recorded || b->reached < b->recorded) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(b->at - a->at).count();
    return 0;
}
int cuEventElapsedTime_v2(float *milliseconds, void *first, void *last) {
    return cuEventElapsedTime(milliseconds, first, last);
}
int cuStreamWaitEvent(void *stream, void *event, unsigned) {
    if (int error = call()) return error;
    const auto mark = mark_of(event);
    if (!mark) return GONE;
    long number;
    {
        const std::lock_guard held(lock);
        number = mark->recorded;  // a later record is not waited for
    }
    add(stream, [mark, number, event] {
        std::unique_lock held(lock);
        if (mark->foreign && mark->reached < number) {
            held.unlock();
            if (const auto tell = on_wait.load()) tell(event, number);
            held.lock();
        }
        changed.wait(held, [&] { return mark->reached >= number; });
    });
    return 0;
}
int cuMemHostAlloc(void **memory, size_t nbytes, unsigned) { return allocate(memory, nbytes, pinned_memory); }
int cuMemFreeHost(void *memory) { return release(reinterpret_cast<uintptr_t>(memory), pinned_memory); }
int cuMemAlloc_v2(unsigned long long *memory, size_t nbytes) {
    return allocate(reinterpret_cast<void **>(memory), nbytes, device_memory);
}
int cuMemFree_v2(unsigned long long memory) { return release(memory, device_memory); }
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    copy(to, device_memory, reinterpret_cast<uintptr_t>(from), pinned_memory, nbytes, stream);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    copy(reinterpret_cast<uintptr_t>(to), pinned_memory, from, device_memory, nbytes, stream);
    return 0;
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    copy(to, device_memory, from, device_memory, nbytes, stream);
    return 0;
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    add(stream, [=] {
        if (checked && room(device_memory, to) < nbytes) note("memory is set that is not there");
        else std::memset(reinterpret_cast<void *>(to), value, nbytes);
    });
    return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned, unsigned,
                   unsigned shared, void *stream, void **arguments, void **) {
    if (int error = call()) return error;
    Function known;
    {
        const std::lock_guard held(lock);
        known = functions.at(function);
    }
    std::vector<unsigned long long> values(static_cast<size_t>(std::abs(known.arguments)));
    for (size_t n = 0; n < values.size(); ++n)
        std::memcpy(&values[n], arguments[n], known.arguments < 0 && n + 1 == values.size() ? 4 : 8);
    if (known.most_blocks) x = std::min(x, known.most_blocks);
    add(stream, [=]() mutable {
        const unsigned blocks[3] = {x, y, z};
        std::vector<void *> pointers;
        for (auto &value : values) pointers.push_back(&value);
        std::unique_lock running(one_kernel);
        const char *why = reinterpret_cast<Emulated>(function)(blocks, block, shared, 1, pointers.data());
        running.unlock();
        if (why) note(why);
    });
    return 0;
}
}
