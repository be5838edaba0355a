// The calls of the CUDA driver that the core makes, on host memory: a thread for each stream, late by chance, and kernels
// that the emulator compiled. A function's handle is the address of its `emulate_` function.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

using Emulated = const char *(*)(const unsigned *, unsigned, unsigned, unsigned, void **);

std::mutex lock;
std::mutex one_kernel;  // the emulator runs one at a time
std::condition_variable changed;
std::map<void *, int> argument_counts;
std::string failure;
std::atomic<long> calls{0}, failing{0};
std::minstd_rand numbers{1};

struct Mark {  // an event: how often it was recorded, and how often that was reached
    long recorded = 0, reached = 0;
    std::chrono::steady_clock::time_point when;
};

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
            std::this_thread::sleep_for(late);
            next();
            held.lock();
            busy = false;
            changed.notify_all();
        }
    }
};

int call() {
    const long number = ++calls;
    return failing && number == failing ? 700 : 0;
}

void add(void *stream, std::function<void()> work) {
    const std::lock_guard held(lock);
    static_cast<Queue *>(stream)->work.push_back(std::move(work));
    changed.notify_all();
}

}  // namespace

extern "C" {

// The number of arguments of a kernel, 8 bytes each; negative where the last one has 4.
void fake_register(void *function, int arguments) { argument_counts[function] = arguments; }
const char *fake_failure() { return failure.c_str(); }
long fake_calls() { return calls; }
void fake_fail(long number) {
    calls = 0;
    failing = number;
}
void fake_seed(unsigned seed) { numbers.seed(seed); }

int cuInit(unsigned) { return 0; }
int cuGetErrorName(int, const char **name) {
    *name = "CUDA_ERROR_ILLEGAL_ADDRESS";
    return 0;
}
int cuCtxSetCurrent(void *) { return 0; }
int cuStreamCreate(void **stream, unsigned) {
    if (int error = call()) return error;
    *stream = new Queue;
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
    return 0;
}
int cuEventCreate(void **event, unsigned) {
    if (int error = call()) return error;
    *event = new Mark;
    return 0;
}
int cuEventDestroy_v2(void *event) {
    delete static_cast<Mark *>(event);
    return 0;
}
int cuEventRecord(void *event, void *stream) {
    if (int error = call()) return error;
    auto *mark = static_cast<Mark *>(event);
    long number;
    {
        const std::lock_guard held(lock);
        number = ++mark->recorded;
    }
    add(stream, [mark, number] {
        const std::lock_guard held(lock);
        mark->reached = number;
        mark->when = std::chrono::steady_clock::now();
        changed.notify_all();
    });
    return 0;
}
int cuEventSynchronize(void *event) {
    if (int error = call()) return error;
    auto *mark = static_cast<Mark *>(event);
    std::unique_lock held(lock);
    changed.wait(held, [&] { return mark->reached >= mark->recorded; });
    return 0;
}
int cuEventElapsedTime(float *milliseconds, void *begin, void *end) {
    if (int error = call()) return error;
    const std::lock_guard held(lock);
    const auto *first = static_cast<Mark *>(begin), *last = static_cast<Mark *>(end);
    if (first->reached < first->recorded || last->reached < last->recorded) return 600;
    *milliseconds = std::chrono::duration<float, std::milli>(last->when - first->when).count();
    return 0;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned) {
    if (int error = call()) return error;
    auto *mark = static_cast<Mark *>(event);
    add(stream, [mark] {
        std::unique_lock held(lock);
        changed.wait(held, [&] { return mark->reached >= mark->recorded; });
    });
    return 0;
}
int cuMemHostAlloc(void **memory, size_t nbytes, unsigned) {
    if (int error = call()) return error;
    *memory = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    std::memset(*memory, 0xA5, nbytes);
    return 0;
}
int cuMemFreeHost(void *memory) {
    std::free(memory);
    return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    add(stream, [=] { std::memcpy(reinterpret_cast<void *>(to), from, nbytes); });
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t nbytes, void *stream) {
    if (int error = call()) return error;
    add(stream, [=] { std::memcpy(to, reinterpret_cast<void *>(from), nbytes); });
    return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned block, unsigned, unsigned,
                   unsigned shared, void *stream, void **arguments, void **) {
    if (int error = call()) return error;
    const int count = argument_counts.at(function);
    std::vector<unsigned long long> values(static_cast<size_t>(std::abs(count)));
    for (size_t n = 0; n < values.size(); ++n)
        std::memcpy(&values[n], arguments[n], count < 0 && n + 1 == values.size() ? 4 : 8);
    add(stream, [=]() mutable {
        const unsigned blocks[3] = {x, y, z};
        std::vector<void *> pointers;
        for (auto &value : values) pointers.push_back(&value);
        std::unique_lock running(one_kernel);
        const char *why = reinterpret_cast<Emulated>(function)(blocks, block, shared, 1, pointers.data());
        running.unlock();
        const std::lock_guard held(lock);
        if (why && failure.empty()) failure = why;
    });
    return 0;
}
}
