// The end of a slab: wait for it, add its times, have the host decode chunks that the device could not, publish kept
// chunks, and settle jobs.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "execution.hpp"

namespace lc {

// Record one of the timing events of a slab, if the slab is timed.
void Device::mark(Slab &slab, int number) {
    if (!slab.timed) return;
    if (!slab.marks[number]) slab.marks[number] = driver_.new_event(true);
    driver_.record(slab.marks[number], slab.stream);
}

// Add the device times of a slab that has ended to the totals, and to the jobs that have rows in it.
void Device::add_times(Slab &slab) {
    const auto nanoseconds = [&](int begin, int end) {
        return static_cast<i64>(1e9 * driver_.seconds_between(slab.marks[begin], slab.marks[end]));
    };
    const i64 decode = slab.decodes() ? nanoseconds(1, 2) : 0, scatter = nanoseconds(2, 3);
    copies_ += slab.copied_nbytes > 0;
    copied_nbytes_ += slab.copied_nbytes;
    copy_nanoseconds_ += nanoseconds(0, 1);
    slabs_decoded_ += slab.decodes();
    decoded_nbytes_ += slab.decodes() ? static_cast<i64>(slab.chunks.size()) * slab.plan->chunk_nbytes : 0;
    decode_nanoseconds_ += decode;
    scatter_nanoseconds_ += scatter;
    std::unordered_set<Job *> jobs;
    for (const Row &row : slab.rows)
        if (row.batch->timed && jobs.insert(row.job).second) {
            row.job->device_decode_nanoseconds += decode;
            row.job->device_scatter_nanoseconds += scatter;
        }
}

void Device::add_to(lc_stats &stats) const {
    const auto seconds = [](const std::atomic<i64> &nanoseconds) { return 1e-9 * static_cast<double>(nanoseconds); };
    stats.slabs = slabs_done_;
    stats.copies = copies_;
    stats.copied_nbytes = copied_nbytes_;
    stats.slabs_decoded = slabs_decoded_;
    stats.decoded_nbytes = decoded_nbytes_;
    stats.device_copy_seconds = seconds(copy_nanoseconds_);
    stats.device_decode_seconds = seconds(decode_nanoseconds_);
    stats.device_scatter_seconds = seconds(scatter_nanoseconds_);
}

// Decodes a chunk on the host after the device has failed to decode it.
class Retry : public OneStep {
public:
    Retry(Reader &reader, StagedChunk chunk, std::vector<u8> stored, std::vector<Row> rows)
        : reader_(reader), chunk_(std::move(chunk)), stored_(std::move(stored)), rows_(std::move(rows)) {}
    void run(i64) noexcept override {
        const std::shared_ptr<Reader> held = reader_.shared_from_this();
        reader_.decode_again(chunk_, stored_, rows_);
        chunk_.wave.reset();
        reader_.device()->flush();
        reader_.device()->end_background();
        reader_.note_progress();
    }

private:
    Reader &reader_;
    StagedChunk chunk_;
    std::vector<u8> stored_;
    std::vector<Row> rows_;
};

// Publish the chunks that a slab has copied to slots, and unpin its slots.
void Device::end_kept(Slab &slab) {
    if (slab.read.empty() && slab.filled.empty()) return;
    const auto lock = kept_->lock();
    for (KeptSlot *slot : slab.read) kept_->unpin(*slot);
    for (const KeptFill &fill : slab.filled) {
        const bool is_valid = slab.error.empty() && !fill.is_broken && (fill.chunk < 0 || !status_of(slab)[fill.chunk]);
        if (is_valid) kept_->publish(*fill.slot);
        else kept_->forget(*fill.slot);
        kept_->unpin(*fill.slot);
    }
}

// Settle the jobs of a slab that has ended, and reset the slab.
void Device::end(Slab &slab) {
    if (!slab.error.empty()) {
        lc_error error{};
        error.code = LC_DEVICE;
        slab.error.copy(error.text, sizeof error.text - 1);
        for (const Row &row : slab.rows) row.job->fail(error);
    }
    if (slab.timed && slab.error.empty()) {
        try {
            add_times(slab);
        } catch (const std::exception &) {  // a job does not fail because its times are missing
        }
    }
    ++slabs_done_;
    end_kept(slab);  // before jobs are over, so that their callers find the chunks kept
    std::vector<char> is_retried(slab.rows.size(), 0);
    for (size_t n = 0; slab.error.empty() && n < slab.chunks.size(); ++n) {
        StagedChunk &chunk = slab.chunks[n];
        if (!needs_host(slab, n)) continue;
        try {
            const u8 *from = slab.pinned + slab.plan->stored + chunk.source;
            std::vector<Row> rows(slab.rows.begin() + chunk.first_row,
                                  slab.rows.begin() + chunk.first_row + chunk.rows);
            for (Row &row : rows) row.source -= static_cast<i64>(n) * slab.plan->chunk_stride;
            auto retry =
                std::make_shared<Retry>(reader_, chunk, std::vector<u8>(from, from + chunk.nbytes), std::move(rows));
            begin_background();
            if (Pool::shared().add(std::move(retry), false)) {
                end_background();
                throw std::bad_alloc();
            }
            std::fill_n(is_retried.begin() + chunk.first_row, chunk.rows, 1);
        } catch (const std::exception &) {
            const lc_error error = error_of(*chunk.wave, chunk.object, chunk.chunk, {LC_MEMORY, 0, 0, 0, {}});
            for (u32 k = 0; k < chunk.rows; ++k) slab.rows[chunk.first_row + k].job->fail(error);
        }
    }
    decoding_ -= static_cast<i64>(slab.chunks.size());
    for (size_t n = 0, last; n < slab.rows.size(); n = last) {
        Job &job = *slab.rows[n].job;
        i64 parts = 0;
        for (last = n; last < slab.rows.size() && slab.rows[last].job == &job; ++last) parts += !is_retried[last];
        if (parts) reader_.settle(job, parts);
    }
    slab.rows.clear();
    slab.read.clear();
    slab.filled.clear();
    slab.chunks.clear();
    slab.reads.clear();
    slab.copies.clear();
    slab.waves.clear();
    slab.error.clear();
    slab.timed = false;
    slab.used = slab.weight = slab.copied_nbytes = slab.reserved_rows = slab.reserved_chunks = 0;
}

// Wait for a slab to end, with `briefly` only for a short time; returns whether the slab has ended, also with an error.
bool Device::await(Slab &slab, bool briefly) noexcept {
    if (!slab.error.empty()) return true;
    try {
        driver_.use_context(reinterpret_cast<void *>(record_.context));
        if (briefly && !driver_.await_briefly(slab.done)) return false;
        if (!briefly) driver_.await(slab.done);
        if (reads_directly()) copy_back(slab);
    } catch (const std::exception &error) {
        slab.error = error.what();
        finish_stream(slab);
    }
    return true;
}

// End a slab, and make the slab and its device memory available again.
void Device::complete(Slab *slab) {
    {
        const std::lock_guard lock(mutex_);
        return_memory(*slab);  // before jobs are over: the memory may belong to their batch
    }
    end(*slab);
    {
        const std::lock_guard lock(mutex_);
        slab->plan = nullptr;
        --busy_;
        free_.push_back(slab);
        freed_.notify_all();
    }
    start_some();
    reader_.note_progress();
}

// The device's thread: waits for slabs to end while no other thread does.
void Device::loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
        started_.wait(lock, [this] { return ending_ || (!attended_ && !in_flight_.empty()); });
        if (in_flight_.empty()) return;
        Slab *slab = in_flight_.front();
        in_flight_.pop_front();
        attended_ = true;
        lock.unlock();
        await(*slab, false);
        complete(slab);
        lock.lock();
        attended_ = false;
    }
}

void Device::flush_and_attend() {
    bool is_attended;
    {
        const std::lock_guard lock(mutex_);
        is_attended = std::exchange(attended_, true);
    }
    flush();
    if (is_attended) return;
    Slab *slab = nullptr;
    {
        const std::lock_guard lock(mutex_);
        if (!in_flight_.empty()) slab = in_flight_.front();
    }
    if (slab && await(*slab, true)) {
        {
            const std::lock_guard lock(mutex_);
            in_flight_.pop_front();
        }
        complete(slab);
    }
    {
        const std::lock_guard lock(mutex_);
        attended_ = false;
        if (in_flight_.empty()) return;
    }
    started_.notify_one();
}

Device::ContextGuard::ContextGuard(const Device *device) : device_(device) {
    if (device_) before_ = device_->driver_.context();
}

Device::ContextGuard::~ContextGuard() {
    if (device_) device_->driver_.restore_context(before_);
}

}  // namespace lc
