#include "pool.hpp"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace lc {
namespace {

// Threads mostly wait for storage, so that there are some even on few cores; more than a few dozen gain nothing.
constexpr i64 FEWEST_THREADS = 8, MOST_THREADS = 32;
constexpr size_t STACK_NBYTES = 1 << 20;
// After a small job, one idle thread polls the queue: the interval, and how often until it sleeps again.
constexpr std::chrono::microseconds LOOK_AFTER{500};
constexpr i64 LOOKS = 20;
constexpr i64 MEMORY_PART = 4;  // of the machine's memory

i64 cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
}

i64 memory_nbytes() {
    i64 most = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    if (FILE *file = std::fopen("/sys/fs/cgroup/memory.max", "re")) {
        long long limit = 0;
        if (std::fscanf(file, "%lld", &limit) == 1 && limit > 0) most = std::min<i64>(most, limit);
        std::fclose(file);
    }
    return most;
}

std::atomic<Pool *> shared_pool{nullptr};
std::atomic<MemoryGate *> shared_gate{nullptr};
// Memory of the caller that helped last: threads of callers keep none, since nothing frees it when they end.
std::atomic<ThreadMemory *> spare_memory{nullptr};

template <class T, class Make> T &made_once(std::atomic<T *> &slot, Make make) {
    T *known = slot.load();
    if (known) return *known;
    T *made = make();
    if (slot.compare_exchange_strong(known, made)) return *made;
    delete made;
    return *known;
}

}  // namespace

ThreadMemory *&thread_memory() {
    static thread_local ThreadMemory *memory = nullptr;
    return memory;
}

Pool &Pool::shared() {
    return made_once(shared_pool, [] { return new Pool(std::clamp(cores(), FEWEST_THREADS, MOST_THREADS)); });
}

// The old one is not deleted: threads that do not exist here may have held its lock.
void Pool::forget() { shared_pool.store(nullptr); }

void *Pool::enter(void *pool) {
    pthread_setname_np(pthread_self(), "linumpy-core");
    // A thread inherits the cores of the one that starts it, which may be bound to those near a device; the pool serves
    // all devices, and gets the cores of the process.
    cpu_set_t cores;
    if (!sched_getaffinity(getpid(), sizeof cores, &cores)) sched_setaffinity(0, sizeof cores, &cores);
    static_cast<Pool *>(pool)->loop();
    delete thread_memory();
    return nullptr;
}

int Pool::start_thread() {
    if (i64 number = faults::due(faults::THREAD)) return static_cast<int>(number);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_NBYTES);
    // Signals are for Python's main thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int state = pthread_create(&thread, &attributes, enter, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!state) threads_.push_back(thread);
    return state;
}

void Pool::put(std::shared_ptr<Work> work, bool first) {
    Work *const one = work.get();
    if (first) {
        one->next_ = std::move(first_);
        first_ = std::move(work);
        if (!last_) last_ = one;
    } else {
        (last_ ? last_->next_ : first_) = std::move(work);
        last_ = one;
    }
}

std::shared_ptr<Work> Pool::take() {
    std::shared_ptr<Work> work = std::move(first_);
    first_ = std::move(work->next_);
    if (!first_) last_ = nullptr;
    return work;
}

// Called with the lock held.
int Pool::queue(std::shared_ptr<Work> work, bool first) noexcept {
    if (stopping_) return ECANCELED;
    const int state = may_start() ? start_thread() : 0;
    if (state && threads_.empty()) return state;
    put(std::move(work), first);
    return 0;
}

int Pool::add(std::shared_ptr<Work> work, bool first) noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (const int state = queue(std::move(work), first)) return state;
    }
    changed_.notify_one();
    return 0;
}

int Pool::add_for_later(std::shared_ptr<Work> work) noexcept {
    {
        const std::lock_guard lock(mutex_);
        looks_left_ = LOOKS;
        if (const int state = queue(std::move(work), true)) return state;
        if (looking_) return 0;
    }
    changed_.notify_one();
    return 0;
}

// Called with the lock held, which it gives back meanwhile.
void Pool::sleep(std::unique_lock<std::mutex> &lock) {
    ++idle_;
    if (looking_ || !looks_left_) {
        changed_.wait(lock);
    } else {
        looking_ = true;
        --looks_left_;
        changed_.wait_for(lock, LOOK_AFTER);
        looking_ = false;
    }
    --idle_;
}

void Pool::loop() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (!first_) {
            sleep(lock);
            continue;
        }
        std::shared_ptr<Work> work = take();
        i64 step;
        const bool claimed = work->claim(step);
        if (work->has_more()) put(work, false);
        // Each thread wakes two more: who queues work does not wait for all of them to be woken.
        const bool more = first_ != nullptr;
        if (more && may_start()) start_thread();
        const i64 wake = more ? std::min<i64>(idle_, 2) : 0;
        lock.unlock();
        for (i64 n = 0; n < wake; ++n) changed_.notify_one();
        if (claimed) work->run(step);
        work.reset();  // not under the lock: the last reference to a wave frees all of it
        lock.lock();
    }
}

void Pool::begin_wait() noexcept {
    const std::lock_guard lock(mutex_);
    ++waiting_;
    if (first_ && !stopping_ && may_start()) start_thread();
}

void Pool::end_wait() noexcept {
    const std::lock_guard lock(mutex_);
    --waiting_;
}

bool Pool::begin_help(const Work &work) noexcept {
    const std::lock_guard lock(mutex_);
    i64 step;
    if (stopping_ || first_.get() != &work || !take()->claim(step)) return false;
    ++helping_;
    thread_memory() = spare_memory.exchange(nullptr);
    return true;
}

void Pool::end_help() noexcept {
    delete spare_memory.exchange(std::exchange(thread_memory(), nullptr));
    {
        const std::lock_guard lock(mutex_);
        if (--helping_ || !stopping_) return;
    }
    changed_.notify_all();
}

void Pool::stop() noexcept {
    std::vector<pthread_t> threads;
    std::shared_ptr<Work> left;
    {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        threads.swap(threads_);
        left = std::move(first_);
        last_ = nullptr;
        changed_.notify_all();
        changed_.wait(lock, [this] { return !helping_; });
    }
    for (pthread_t thread : threads) pthread_join(thread, nullptr);
    while (left) left = std::shared_ptr<Work>(std::move(left->next_));  // one by one: no recursion
}

void Pool::stop_shared() noexcept {
    if (Pool *pool = shared_pool.load()) pool->stop();
}

MemoryGate &MemoryGate::shared() {
    return made_once(shared_gate, [] { return new MemoryGate(memory_nbytes() / MEMORY_PART); });
}

void MemoryGate::forget() { shared_gate.store(nullptr); }

void MemoryGate::acquire(i64 nbytes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !held_ || held_ + nbytes <= most_; });
    held_ += nbytes;
}

void MemoryGate::release(i64 nbytes) {
    {
        const std::lock_guard lock(mutex_);
        held_ -= nbytes;
    }
    changed_.notify_all();
}

}  // namespace lc
