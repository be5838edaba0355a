// Threads that all readers of the process share.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>

#include "common.hpp"

namespace lc {

// Work that is divided into steps, which several threads carry out at the same time.
class Work {
public:
    virtual ~Work() = default;
    // Claim the next step; false if there is none left. Called with the pool's lock held: it must not wait.
    virtual bool claim(i64 &step) = 0;
    // Whether further steps can be claimed. Called with the pool's lock held.
    virtual bool has_more() const = 0;
    virtual void run(i64 step) noexcept = 0;

private:
    friend class Pool;
    // The next work in the pool's queue. Work is queued at most once, so queueing allocates no memory.
    std::shared_ptr<Work> next_;
};

// Work of one step; after `arm` it can be queued again.
class OneStep : public Work {
public:
    bool claim(i64 &step) override {
        step = 0;
        return !claimed_.exchange(true);
    }
    bool has_more() const override { return !claimed_.load(); }
    void arm() { claimed_ = false; }

private:
    std::atomic<bool> claimed_{false};
};

// Memory that a thread of a pool keeps from step to step. It is not a thread_local object with a destructor:
// registering the destructor allocates memory, and the C library aborts the process if that fails.
struct ThreadMemory { virtual ~ThreadMemory() = default; };
ThreadMemory *&thread_memory();

// Number of files that this process may have open.
i64 max_open_files();

class Pool {
public:
    // `waits`: maximum number of threads that wait for storage while others work in their place.
    Pool(i64 threads, i64 waits) : max_threads_(threads), max_waits_(waits) {
        threads_.reserve(static_cast<size_t>(threads + waits));
    }

    // Queue work, before all other work if `first`. Returns 0, or an errno if the work was not queued: the pool has
    // been stopped, or no thread runs and none could be started.
    int add(std::shared_ptr<Work> work, bool first) noexcept;
    // As `add` with `first`, for work that the calling thread is likely to take back by `begin_help`: no thread is
    // woken while a thread polls the queue.
    int add_deferred(std::shared_ptr<Work> work) noexcept;
    // Take back queued work of one step for the calling thread, if the work is next in the queue; returns whether it
    // was. The thread borrows memory until `end_help`; `stop` waits for `end_help`.
    bool begin_help(const Work &work) noexcept;
    void end_help() noexcept;
    // Called on any thread before and after it waits for storage: meanwhile another thread carries out steps, so that as
    // many threads as before compute. If more than `waits` threads wait, no other thread begins.
    void begin_wait() noexcept;
    void end_wait() noexcept;
    // Called by a thread that has waited for storage and is about to compute: while enough threads compute, wait until
    // one of them waits or ends, for 20 ms at most. Reads that end at the same time would otherwise be computed
    // all at the same time, and no further read would begin before most of them were done.
    void await_turn() noexcept;
    // Finish the steps in progress and end all threads; nothing runs afterwards.
    void stop() noexcept;
    bool stopped() const { return stopping_.load(); }
    // The pool of this process. A forked child has none of the parent's threads: there `forget` makes `shared` create a
    // new pool.
    static Pool &shared();
    // Set the maximum number of waiting threads, before the pool is created.
    static void set_waits(i64 count);
    // The maximum number of waiting threads: as set, or what the limit of open files allows.
    i64 waits() const { return max_waits_; }
    // The part of `nbytes` that each thread may keep, so that all threads keep as much as without waiting ones.
    i64 share(i64 nbytes) const {
        return nbytes / std::max<i64>(1, size_.load(std::memory_order_relaxed) / max_threads_);
    }
    static void forget();
    static void stop_shared() noexcept;

private:
    static void *enter(void *pool);
    void loop();
    // Number of threads that compute or look for work. After waiting, more may compute than `max_threads_`.
    i64 working() const { return static_cast<i64>(threads_.size()) - idle_ - std::min(waiting_, max_waits_); }
    bool may_start() const { return !idle_ && working() < max_threads_; }
    bool give_turn() noexcept;
    bool is_surplus() const { return static_cast<i64>(threads_.size()) > max_threads_; }
    int start_thread();
    void put(std::shared_ptr<Work> work, bool first);
    std::shared_ptr<Work> take();
    int queue(std::shared_ptr<Work> work, bool first) noexcept;
    void sleep(std::unique_lock<std::mutex> &lock);
    bool is_surplus_now() const;
    void leave();
    std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<Work> first_;
    Work *last_ = nullptr;
    std::vector<pthread_t> threads_;
    i64 max_threads_, max_waits_, idle_ = 0, waiting_ = 0, helping_ = 0;
    std::condition_variable turn_;
    i64 turns_ = 0;  // number of threads in `await_turn`, which count as waiting ones
    std::chrono::steady_clock::time_point last_wait_{};
    // Whether a thread polls the queue, and how many polls remain before it sleeps until it is woken.
    bool polling_ = false;
    i64 polls_left_ = 0;
    std::atomic<i64> size_{0};  // number of threads
    std::atomic<bool> stopping_{false};
};

// Tells the pool, from construction to destruction, that this thread waits for storage. Without `is_slow` does nothing.
class StorageWait {
public:
    explicit StorageWait(bool is_slow) : pool_(is_slow ? &Pool::shared() : nullptr) {
        if (pool_) pool_->begin_wait();
    }
    ~StorageWait() {
        if (pool_) pool_->end_wait();
    }
    StorageWait(const StorageWait &) = delete;
    StorageWait &operator=(const StorageWait &) = delete;

private:
    Pool *const pool_;
};

// The object that a slot points to, created by the first caller.
template <class T, class Create> T &created_once(std::atomic<T *> &slot, Create create) {
    T *existing = slot.load();
    if (existing) return *existing;
    T *created = create();
    if (slot.compare_exchange_strong(existing, created)) return *created;
    delete created;
    return *existing;
}

// Limits a quantity that the threads of this process share: bytes for large chunks, or requests in flight. `acquire`
// waits; it grants more than the limit if nothing else is held.
class Limit {
public:
    explicit Limit(i64 limit) : limit_(limit) {}
    void acquire(i64 count);
    void release(i64 count);
    void change(i64 limit);
    static Limit &memory();
    static void forget();

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    i64 limit_, held_ = 0;
};

}  // namespace lc
