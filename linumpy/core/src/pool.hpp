// Threads that all readers of the process share.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>

#include "common.hpp"

namespace lc {

// Something that threads carry out a step at a time, several threads at once.
class Work {
public:
    virtual ~Work() = default;
    // Claim the next step; false where there is none left. Called with the pool's lock held: it must not wait.
    virtual bool claim(i64 &step) = 0;
    // Whether further steps can be claimed. Called with the pool's lock held.
    virtual bool has_more() const = 0;
    virtual void run(i64 step) noexcept = 0;

private:
    friend class Pool;
    std::shared_ptr<Work> next_;  // in the pool's queue; work is queued at most once, so that queueing takes no memory
};

// Work of one step; `arm` lets it be queued once more.
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

// What a thread of a pool keeps from step to step. It is no object with a destructor that belongs to the thread: to
// register one takes memory, and where there is none the C library aborts the process.
struct ThreadMemory { virtual ~ThreadMemory() = default; };
ThreadMemory *&thread_memory();

class Pool {
public:
    // Most threads that wait for the network at a time.
    static constexpr i64 MOST_WAITING = 256;
    explicit Pool(i64 threads) : most_(threads) { threads_.reserve(static_cast<size_t>(threads + MOST_WAITING)); }

    // Queue work; with `first` it goes before what is queued. Returns 0, or the errno of a thread that could not be
    // started where there is none at all: then nothing was queued.
    int add(std::shared_ptr<Work> work, bool first) noexcept;
    // The same for work that the calling thread is likely to take back by `begin_help`: no thread is woken for it where one
    // looks soon without that.
    int add_for_later(std::shared_ptr<Work> work) noexcept;
    // Take queued work of one step back for the calling thread, where it is the next and no thread has begun it; `stop`
    // waits for `end_help`, and so does the memory that the thread borrowed.
    bool begin_help(const Work &work) noexcept;
    void end_help() noexcept;
    // Around what waits for the network, on any thread: a further thread carries out steps meanwhile. At most
    // `MOST_WAITING` at a time.
    void begin_wait() noexcept;
    void end_wait() noexcept;
    // Finish the steps that are under way and end all threads; nothing runs afterwards.
    void stop() noexcept;
    bool stopped() const { return stopping_.load(); }
    // The pool of this process. In a forked child `forget` makes a new one: the child has none of its parent's threads.
    static Pool &shared();
    static void forget();
    static void stop_shared() noexcept;

private:
    static void *enter(void *pool);
    void loop();
    bool may_start() const { return !idle_ && static_cast<i64>(threads_.size()) - waiting_ < most_; }
    int start_thread();
    void put(std::shared_ptr<Work> work, bool first);
    std::shared_ptr<Work> take();
    int queue(std::shared_ptr<Work> work, bool first) noexcept;
    void sleep(std::unique_lock<std::mutex> &lock);
    std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<Work> first_;
    Work *last_ = nullptr;
    std::vector<pthread_t> threads_;
    i64 most_, idle_ = 0, waiting_ = 0, helping_ = 0;
    // Whether a thread looks for work from time to time, and how often it does before it sleeps until it is woken.
    bool looking_ = false;
    i64 looks_left_ = 0;
    std::atomic<bool> stopping_{false};
};

// What a slot points to, which the first that asks for it makes.
template <class T, class Make> T &made_once(std::atomic<T *> &slot, Make make) {
    T *known = slot.load();
    if (known) return *known;
    T *made = make();
    if (slot.compare_exchange_strong(known, made)) return *made;
    delete made;
    return *known;
}

// What threads of this process may hold together: bytes for large chunks, requests under way. One that asks for more than
// all is granted it while no other holds any.
class Limit {
public:
    explicit Limit(i64 most) : most_(most) {}
    void acquire(i64 count);
    void release(i64 count);
    static Limit &memory();
    static void forget();

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    i64 most_, held_ = 0;
};

}  // namespace lc
