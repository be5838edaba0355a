#include "device.hpp"

#include <algorithm>
#include <unordered_set>

namespace lc {
namespace {

constexpr i64 HEADER_WORDS = 2 * LC_MAX_RANK + 2, ROW_WORDS = 3 + LC_MAX_RANK;
constexpr i64 ALIGN = 64, PAGE = 4096;
// Seconds that a slab stays open while tasks may still fill it.
constexpr double OPEN_SECONDS = 2e-3;

i64 aligned(i64 nbytes) { return (nbytes + ALIGN - 1) / ALIGN * ALIGN; }

}  // namespace

Device::Device(const lc_device &record, Reader &reader)
    : record_(record), table_nbytes_(8 * record.rows * (HEADER_WORDS + ROW_WORDS) + 4096),
      records_nbytes_(8 * COUNTERS + record.rows * (2 * RECORD_NBYTES + 8)),
      words_nbytes_(table_nbytes_ + records_nbytes_ + 2 * 4 * record.rows), reader_(reader), driver_(Driver::loaded()) {
    for (i64 n = 0; n < record.slabs; ++n) {
        slabs_.push_back(std::make_unique<Slab>());
        free_.push_back(slabs_.back().get());
    }
    thread_ = std::thread([this] { loop(); });
}

Device::~Device() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    started_.notify_all();
    thread_.join();
    release();
}

void Device::release() {
    const std::lock_guard lock(mutex_);
    try {
        driver_.use_context(reinterpret_cast<void *>(record_.context));
    } catch (const DriverError &) {
        return;  // the context was destroyed, and its memory with it
    }
    for (const auto &slab : slabs_) {
        if (slab->stream) driver_.delete_stream(slab->stream);
        if (slab->done) driver_.delete_event(slab->done);
        for (Event event : slab->marks)
            if (event) driver_.delete_event(event);
        if (slab->pinned) driver_.free_pinned(slab->pinned);
        if (slab->words) driver_.free_pinned(slab->words);
        *slab = {};
    }
}

void Device::set_memory(DevicePointer slots, DevicePointer kept, i64 kept_nbytes) {
    if (kept_nbytes > 0 && record_.keep) {
        kept_ = std::make_unique<KeptChunks>(kept_nbytes);
        kept_memory_ = kept;
        Regions &regions = keep_.regions;
        lc_geometry bytes{};
        bytes.rank = bytes.chunk_shape[0] = 1;
        bytes.dtype = LC_U8;
        regions.geometry = std::make_shared<const Geometry>(bytes);
        regions.conversion = {LC_U8, LC_U8, false};
        regions.strides = {1};
        keep_.headers.resize(1);
        keep_.scatter = record_.keep;
    }
    const std::lock_guard lock(mutex_);
    page_offset_ = static_cast<i64>(slots % PAGE);
    for (i64 n = record_.slots; n-- > 0;)
        free_memory_.push_back(slots + static_cast<DevicePointer>(n * record_.device_nbytes));
}

// Take device memory for a slab: one slot, all slots, or the memory of its batch. Returns whether the memory was free.
// Called with the lock held.
bool Device::take_memory(Slab &slab) {
    if (!slots_of(slab)) {
        if (slab.rows.empty()) return true;
        Batch &batch = *slab.rows.front().batch;
        if (batch.memory_is_used) return false;
        batch.memory_is_used = true;
        slab.device = static_cast<DevicePointer>(batch.memory);
        return true;
    }
    if (static_cast<i64>(free_memory_.size()) < slots_of(slab)) return false;
    if (slots_of(slab) > 1) std::sort(free_memory_.rbegin(), free_memory_.rend());
    slab.device = free_memory_.back();
    free_memory_.resize(free_memory_.size() - static_cast<size_t>(slots_of(slab)));
    return true;
}

void Device::return_memory(Slab &slab) {
    for (i64 n = slots_of(slab); n-- > 0;)
        free_memory_.push_back(slab.device + static_cast<DevicePointer>(n * record_.device_nbytes));
    if (!slots_of(slab) && !slab.rows.empty()) slab.rows.front().batch->memory_is_used = false;
    slab.device = 0;
}

void Device::allocate(Slab &slab, i64 nbytes) {
    driver_.use_context(reinterpret_cast<void *>(record_.context));
    if (!slab.stream) slab.stream = driver_.new_stream();
    if (!slab.done) slab.done = driver_.new_event();
    if (!slab.words) slab.words = driver_.allocate_pinned(words_nbytes_);
    slab.rows.reserve(static_cast<size_t>(record_.rows));
    slab.read.reserve(static_cast<size_t>(record_.rows));
    slab.filled.reserve(static_cast<size_t>(record_.rows));
    if (slab.pinned && slab.pinned_nbytes < nbytes) {
        driver_.free_pinned(slab.pinned);
        slab.pinned = nullptr;
        slab.pinned_nbytes = 0;
    }
    if (slab.pinned) return;
    slab.pinned = driver_.allocate_pinned(nbytes + 2 * MARGIN);
    slab.pinned_nbytes = nbytes;
}

// The open slab of a kind, if it has capacity for the range; else null. Called with the lock held.
Slab *Device::take_open(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks, i64 weight) {
    const auto open = open_.find(plan);
    if (open == open_.end()) return nullptr;
    Slab *slab = open->second;
    const i64 max_chunks = plan ? std::min(plan->chunks, record_.rows) : record_.rows;
    if (plan && slab->used + nbytes + slab->weight + weight > plan->capacity) return nullptr;
    if (slab->used + nbytes <= capacity(plan) && slab->reserved_rows + rows <= record_.rows &&
        slab->reserved_chunks + chunks <= max_chunks)
        return slab;
    return nullptr;
}

// Take a free slab, and open it for a kind. Called with the lock held.
Slab *Device::open_free(const lc_decode_plan *plan) {
    Slab *slab = free_.back();
    free_.pop_back();
    ++busy_;
    slab->plan = plan;
    slab->writers = 1;
    slab->opened = now();
    open_[plan] = slab;
    if (oldest_ == 0) oldest_ = slab->opened;
    try {
        const i64 needed = std::max(record_.pinned_nbytes, capacity(plan));
        if (slab->pinned_nbytes < needed) allocate(*slab, needed);
    } catch (...) {
        open_.erase(plan);
        free_.push_back(slab);
        --busy_;
        freed_.notify_all();
        throw;
    }
    return slab;
}

// Whether a range begins in the slab at the same offset within a page as in the file. cuFile copies other ranges
// through memory of its own. Only for long reads by cuFile, since up to a page of the slab is lost.
bool Device::is_page_aligned(const lc_decode_plan *plan, i64 nbytes, i64 weight, i64 offset) const {
    if (!reads_directly() || nbytes < 16 * PAGE || nbytes + 2 * PAGE > capacity(plan)) return false;
    if (plan) return nbytes + 2 * PAGE + weight <= plan->capacity;
    return offset % 16 == 0;  // kernels read raw elements in the slab, where they must be aligned
}

Range Device::reserve(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks, i64 weight, i64 offset) {
    const i64 range_nbytes = nbytes;
    const bool by_page = is_page_aligned(plan, nbytes, weight, offset);
    nbytes = aligned(nbytes + (by_page ? PAGE : 0));
    if (nbytes > capacity(plan))
        throw DriverError("a range of " + std::to_string(nbytes) + " bytes is longer than a slab");
    std::unique_lock lock(mutex_);
    for (;;) {
        Slab *slab = take_open(plan, nbytes, rows, chunks, weight);
        if (!slab) {
            // Seal the open slab of this kind, which is full; if no slab is free, also the open slabs of other kinds.
            std::vector<Slab *> sealed;
            if (const auto open = open_.find(plan); open != open_.end()) {
                sealed.push_back(open->second);
                open_.erase(open);
            }
            if (free_.empty())
                for (auto &[kind, other] : open_) sealed.push_back(other);
            if (free_.empty()) open_.clear();
            std::erase_if(sealed, [](Slab *full) {
                --full->writers;  // an open slab counts as a writer, so that it does not start before it is sealed
                return full->writers > 0;
            });
            if (!sealed.empty()) {
                lock.unlock();
                for (Slab *full : sealed) start(full);
                lock.lock();
                continue;
            }
            if (free_.empty() && reads_directly()) {
                // All threads of the pool may wait here, so this thread starts sealed slabs, too.
                lock.unlock();
                const bool any_started = start_sealed();
                lock.lock();
                if (any_started || !free_.empty()) continue;
            }
            if (free_.empty()) {
                freed_.wait(lock);
                continue;
            }
            slab = open_free(plan);
        }
        ++slab->writers;
        const i64 base = plan ? plan->stored : 0;
        const i64 misalignment = offset - page_offset_ - base - slab->used;
        const i64 begin = slab->used + (by_page ? (misalignment % PAGE + PAGE) % PAGE : 0);
        const Range range{slab, slab->pinned + base + begin, begin, range_nbytes};
        slab->used += nbytes;
        slab->weight += weight;
        slab->reserved_rows += rows;
        slab->reserved_chunks += chunks;
        return range;
    }
}

void Device::commit(Range range, std::shared_ptr<Wave> wave, const std::vector<Row> &rows,
                    std::vector<StagedChunk> chunks, const KeptUse &kept) {
    Slab &slab = *range.slab;
    bool last;
    {
        const std::lock_guard lock(mutex_);
        const u32 first = static_cast<u32>(slab.rows.size()), first_fill = static_cast<u32>(slab.filled.size());
        slab.rows.insert(slab.rows.end(), rows.begin(), rows.end());
        for (StagedChunk &chunk : chunks) {
            chunk.first_row += first;
            // Chunks are decoded in the order of the commits, so the offset of a decoded chunk is known only now.
            const i64 decoded_offset = static_cast<i64>(slab.chunks.size()) * slab.plan->chunk_stride;
            for (u32 n = 0; n < chunk.rows; ++n) slab.rows[chunk.first_row + n].source += decoded_offset;
            if (chunk.slot) slab.filled.push_back({chunk.slot, decoded_offset, static_cast<i64>(slab.chunks.size())});
            slab.chunks.push_back(std::move(chunk));
        }
        slab.read.insert(slab.read.end(), kept.read.begin(), kept.read.end());
        slab.filled.insert(slab.filled.end(), kept.filled.begin(), kept.filled.end());
        if (range.read) {
            range.read->first_row = first;
            range.read->rows = static_cast<u32>(rows.size());
            range.read->first_fill = first_fill;
            range.read->fills = static_cast<u32>(slab.filled.size()) - first_fill;
            slab.reads.push_back(std::move(*range.read));
        } else if (reads_directly() && range.nbytes && wave) {
            slab.copies.push_back({range.offset, range.nbytes});
        }
        if (wave && (slab.waves.empty() || slab.waves.back() != wave)) slab.waves.push_back(std::move(wave));
        last = --slab.writers == 0;
    }
    if (last) start(&slab);
}

void Device::flush() { flush_before(now()); }

void Device::flush_old() {
    const double oldest = oldest_.load(std::memory_order_relaxed), limit = now() - OPEN_SECONDS;
    if (oldest != 0 && oldest < limit) flush_before(limit);
}

void Device::flush_before(double limit) {
    std::vector<Slab *> sealed;
    {
        const std::lock_guard lock(mutex_);
        double oldest = 0;
        std::erase_if(open_, [&](const auto &item) {
            Slab *slab = item.second;
            if (slab->opened > limit) {
                oldest = oldest == 0 ? slab->opened : std::min(oldest, slab->opened);
                return false;
            }
            if (--slab->writers == 0) sealed.push_back(slab);
            return true;
        });
        oldest_ = oldest;
    }
    for (Slab *slab : sealed) start(slab);
}

void Device::flush_kept() {
    Slab *sealed = nullptr;
    {
        const std::lock_guard lock(mutex_);
        const auto open = open_.find(&KEPT_PLAN);
        if (open == open_.end()) return;
        if (--open->second->writers == 0) sealed = open->second;
        open_.erase(open);
    }
    if (sealed) start(sealed);
}

bool Device::idle() {
    const std::lock_guard lock(mutex_);
    return !busy_ && !background_;
}

void Device::start(Slab *slab) {
    decoding_ += static_cast<i64>(slab->chunks.size());
    {
        const std::lock_guard lock(mutex_);
        sealed_.push_back(slab);
    }
    start_some();
}

// Start sealed slabs: with direct reads, which take long, in a thread of the pool, so that neither the task that seals
// a slab nor the thread that waits for slabs is delayed.
void Device::start_some() {
    if (reads_directly()) start_in_pool();
    else start_sealed();
}

// Start sealed slabs while there is device memory for them; returns whether any was started. Several threads may read
// slabs at the same time; one thread at a time queues copies and kernels, so that slabs end approximately in order.
bool Device::start_sealed() {
    for (bool any_started = false;; any_started = true) {
        Slab *slab;
        {
            const std::lock_guard lock(mutex_);
            if (sealed_.empty() || !take_memory(*sealed_.front())) return any_started;
            slab = sealed_.front();
            sealed_.pop_front();
        }
        std::unique_lock lock(starting_, std::defer_lock);
        const size_t rows = slab->rows.size();
        try {
            driver_.use_context(reinterpret_cast<void *>(record_.context));
            read_direct(*slab);
            lock.lock();
            queue(*slab);
        } catch (const std::exception &error) {
            slab->error = error.what();
            finish_stream(*slab);
        }
        slab->rows.resize(rows);  // `queue` has appended rows that fill slots, which belong to no job
        {
            const std::lock_guard also(mutex_);
            in_flight_.push_back(slab);
            if (attended_) continue;
        }
        started_.notify_one();
    }
}

// Wait for the stream of a slab after an error: queued kernels may still write to outputs and read the slab.
void Device::finish_stream(Slab &slab) noexcept {
    try {
        driver_.await_stream(slab.stream);
    } catch (const std::exception &) {  // the device has failed permanently, so no kernel runs any more
    }
}

// Queue the copies and kernels of a slab on its stream.
void Device::queue(Slab &slab) {
    if (!slab.rows.empty() || !slab.filled.empty()) {
        ++slabs_begun_;
        std::unordered_set<i64> ready;
        slab.timed = record_.timed;
        for (const Row &row : slab.rows) {
            if (row.batch->slab == slabs_begun_) continue;
            row.batch->slab = slabs_begun_;
            slab.timed = slab.timed || row.batch->timed;
            if (row.batch->ready && ready.insert(row.batch->ready).second)
                driver_.wait(slab.stream, reinterpret_cast<Event>(row.batch->ready));
        }
        for (const KeptFill &fill : slab.filled)
            slab.rows.push_back({&keep_,
                                 nullptr,
                                 reinterpret_cast<u8 *>(kept_memory_) + fill.slot->offset,
                                 0,
                                 fill.source,
                                 {fill.slot->nbytes}});
        const DevicePointer table =
            slab.device + static_cast<DevicePointer>((slab.decodes() ? slab.plan->slab_nbytes : record_.device_nbytes) -
                                                     table_nbytes_);
        mark(slab, 0);
        if (slab.plan == &KEPT_PLAN) {
            mark(slab, 1);
            mark(slab, 2);
            write_scatter(slab, kept_memory_, table);
            mark(slab, 3);
        } else if (slab.decodes()) {
            const lc_decode_layout &layout = slab.plan->layouts[slab.chunks.size()];
            const DevicePointer parts = slab.device + static_cast<DevicePointer>(slab.padded_stored_nbytes());
            launch_decoders(slab);
            mark(slab, 2);
            write_scatter(slab, parts + static_cast<DevicePointer>(layout.decoded), table);
            mark(slab, 3);
            driver_.copy_down(slab.words + words_nbytes_ - 4 * record_.rows,
                              parts + static_cast<DevicePointer>(layout.status),
                              4 * static_cast<i64>(slab.chunks.size()), slab.stream);
        } else {
            copy_stored(slab, slab.used);
            mark(slab, 1);
            mark(slab, 2);
            write_scatter(slab, slab.device, table);
            mark(slab, 3);
        }
    }
    driver_.record(slab.done, slab.stream);
}

}  // namespace lc
