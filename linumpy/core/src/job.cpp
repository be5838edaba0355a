// Jobs: failing, cancelling, ending, and waiting for them.
#include "reader.hpp"

namespace lc {

void Job::fail(const lc_error &error) {
    const std::lock_guard lock(mutex_);
    if (error_.code || over_) return;
    error_ = error;
    failed_ = true;
}

bool Job::cancel() {
    int state = RUNNING;
    return state_.compare_exchange_strong(state, CANCELLING) || state == CANCELLING;
}

bool Job::end(i64 parts) { return left_.fetch_sub(parts) == parts; }

void Job::finish() {
    const bool cancelled = state_.exchange(OVER) == CANCELLING;
    {
        const std::lock_guard lock(mutex_);
        if (cancelled) {
            error_ = {};  // cancel() has returned true, whatever failed meanwhile
            error_.code = LC_CANCELLED;
        }
        end_ = now();
        over_.store(true, std::memory_order_release);
        // Under the lock: a waiting caller may drop the job as soon as it is over.
        ended_.notify_all();
    }
}

bool Job::wait(double seconds) {
    if (spin([this] { return is_over(); })) return true;
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return over_.load(); });
}

lc_error Job::error() const {
    const std::lock_guard lock(mutex_);
    return error_;
}

lc_report Job::report() const {
    const std::lock_guard lock(mutex_);
    const auto seconds = [](const std::atomic<i64> &nanoseconds) { return 1e-9 * static_cast<double>(nanoseconds); };
    return {chunks.load(),
            filled.load(),
            decoded.load(),
            bytes_read.load(),
            files_opened.load(),
            reads_repeated.load(),
            end_ - begin_,
            seconds(decode_nanoseconds),
            seconds(device_decode_nanoseconds),
            seconds(device_scatter_nanoseconds)};
}

}  // namespace lc
