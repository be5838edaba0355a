#include "pool.hpp"

#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

namespace lc {
namespace {

// Threads that compute. On few cores, more threads than cores hide short waits, such as those of a local disk.
constexpr i64 MIN_THREADS = 8, MAX_THREADS = 32;
// Threads that wait for slow storage have open files: together at most this part of the files that may be open.
constexpr i64 DESCRIPTORS_DIVISOR = 4;
// Threads that the pool no longer needs end when they are idle, this time after the last wait for slow storage.
constexpr std::chrono::seconds KEPT_SURPLUS{2};
constexpr size_t STACK_NBYTES = 1 << 20;
// After a small job, one idle thread polls the queue: the interval, and the number of polls until it sleeps again.
constexpr std::chrono::microseconds POLL_INTERVAL{500};
constexpr i64 POLLS = 20;
constexpr std::chrono::milliseconds MAX_TURN_WAIT{20};
constexpr i64 MEMORY_DIVISOR = 4;  // the limit for large chunks is the machine's or container's memory divided by this

// Number of CPUs that the process may use.
i64 cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
}

i64 memory_nbytes() {
    i64 nbytes = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE);
    if (FILE *file = std::fopen("/sys/fs/cgroup/memory.max", "re")) {
        long long limit = 0;
        if (std::fscanf(file, "%lld", &limit) == 1 && limit > 0) nbytes = std::min<i64>(nbytes, limit);
        std::fclose(file);
    }
    return nbytes;
}

std::atomic<Pool *> shared_pool{nullptr};
std::atomic<i64> max_waits{256};
std::atomic<Limit *> shared_memory{nullptr};
// Memory of the caller's thread that helped last. Callers' threads keep no memory of their own, since nothing would
// free it when such a thread ends.
std::atomic<ThreadMemory *> spare_memory{nullptr};

}  // namespace

i64 max_open_files() {
    rlimit limit;
    return getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur > INT32_MAX ? INT32_MAX
                                                                          : static_cast<i64>(limit.rlim_cur);
}

ThreadMemory *&thread_memory() {
    static thread_local ThreadMemory *memory = nullptr;
    return memory;
}

Pool &Pool::shared() {
    return created_once(shared_pool, [] {
        const i64 waits = std::min(max_waits.load(), max_open_files() / DESCRIPTORS_DIVISOR);
        return new Pool(std::clamp(cores(), MIN_THREADS, MAX_THREADS), std::max<i64>(1, waits));
    });
}

void Pool::set_waits(i64 count) { max_waits.store(count); }

// The old pool is not deleted: threads of the parent may have held its lock.
void Pool::forget() { shared_pool.store(nullptr); }

void *Pool::enter(void *pool) {
    pthread_setname_np(pthread_self(), "linumpy-core");
    // A thread inherits the CPU affinity of the thread that starts it, which may be bound to the cores near a device.
    // The pool serves all devices, so its threads get the affinity of the process.
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
    // Python's main thread handles all signals.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const int state = pthread_create(&thread, &attributes, enter, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (!state) threads_.push_back(thread);
    size_ = static_cast<i64>(threads_.size());
    return state;
}

void Pool::put(std::shared_ptr<Work> work, bool first) {
    Work *const added = work.get();
    if (first) {
        added->next_ = std::move(first_);
        first_ = std::move(work);
        if (!last_) last_ = added;
    } else {
        (last_ ? last_->next_ : first_) = std::move(work);
        last_ = added;
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

int Pool::add_deferred(std::shared_ptr<Work> work) noexcept {
    {
        const std::lock_guard lock(mutex_);
        polls_left_ = POLLS;
        if (const int state = queue(std::move(work), true)) return state;
        if (polling_) return 0;
    }
    changed_.notify_one();
    return 0;
}

// Called with the lock held, which is released while the thread sleeps.
void Pool::sleep(std::unique_lock<std::mutex> &lock) {
    ++idle_;
    give_turn();
    if (is_surplus()) {
        changed_.wait_for(lock, KEPT_SURPLUS);
    } else if (polling_ || !polls_left_) {
        changed_.wait(lock);
    } else {
        polling_ = true;
        --polls_left_;
        changed_.wait_for(lock, POLL_INTERVAL);
        polling_ = false;
    }
    --idle_;
}

// Whether an idle thread must end. Called with the lock held.
bool Pool::is_surplus_now() const {
    return is_surplus() && std::chrono::steady_clock::now() - last_wait_ > KEPT_SURPLUS;
}

// Called with the lock held, by a thread that ends while the pool runs: nothing joins it.
void Pool::leave() {
    std::erase_if(threads_, [](pthread_t thread) { return pthread_equal(thread, pthread_self()); });
    pthread_detach(pthread_self());
    size_ = static_cast<i64>(threads_.size());
}

void Pool::loop() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        if (!first_ || working() > max_threads_) {
            if (is_surplus_now()) return leave();
            sleep(lock);
            continue;
        }
        std::shared_ptr<Work> work = take();
        i64 step;
        const bool claimed = work->claim(step);
        if (work->has_more()) put(work, false);
        // Each thread wakes two more, so that the thread that queues work does not have to wake all of them.
        const bool more = first_ != nullptr;
        if (more && may_start()) start_thread();
        const i64 wake = more ? std::clamp<i64>(max_threads_ - working(), 0, std::min<i64>(idle_, 2)) : 0;
        lock.unlock();
        for (i64 n = 0; n < wake; ++n) changed_.notify_one();
        if (claimed) work->run(step);
        work.reset();  // without the lock: the last reference to a wave frees all of it
        lock.lock();
    }
}

void Pool::begin_wait() noexcept {
    bool wake = false;
    {
        const std::lock_guard lock(mutex_);
        ++waiting_;
        last_wait_ = std::chrono::steady_clock::now();
        if (give_turn() || !first_ || stopping_) return;
        if (may_start()) start_thread();
        else wake = idle_ && working() < max_threads_;
    }
    if (wake) changed_.notify_one();
}

void Pool::end_wait() noexcept {
    const std::lock_guard lock(mutex_);
    --waiting_;
}

// Let a thread in `await_turn` compute if there are too few that do. Called with the lock held.
bool Pool::give_turn() noexcept {
    if (!turns_ || working() >= max_threads_) return false;
    turn_.notify_one();
    return true;
}

void Pool::await_turn() noexcept {
    std::unique_lock lock(mutex_);
    if (working() <= max_threads_) return;
    ++waiting_;
    ++turns_;
    turn_.wait_for(lock, MAX_TURN_WAIT, [this] { return working() < max_threads_ || stopping_; });
    --turns_;
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
    while (left) left = std::shared_ptr<Work>(std::move(left->next_));  // iteratively: destructors would recurse
}

void Pool::stop_shared() noexcept {
    if (Pool *pool = shared_pool.load()) pool->stop();
}

Limit &Limit::memory() {
    return created_once(shared_memory, [] { return new Limit(memory_nbytes() / MEMORY_DIVISOR); });
}

void Limit::forget() { shared_memory.store(nullptr); }

void Limit::acquire(i64 count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !held_ || count <= limit_ - held_; });
    held_ += count;
}

void Limit::change(i64 limit) {
    {
        const std::lock_guard lock(mutex_);
        if (limit_ == limit) return;
        limit_ = limit;
    }
    changed_.notify_all();
}

void Limit::release(i64 count) {
    {
        const std::lock_guard lock(mutex_);
        held_ -= count;
    }
    // A count of 1 lets one waiter proceed; with other counts it is unknown which waiters fit.
    count == 1 ? changed_.notify_one() : changed_.notify_all();
}

}  // namespace lc
