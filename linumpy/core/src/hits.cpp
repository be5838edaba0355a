#include "hits.hpp"

#include <algorithm>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>

#include "execution.hpp"

namespace lc {
namespace {

// Maximum number of chunks to look up without releasing the lock of the kept chunks.
constexpr size_t LOOKUP_BATCH = 256;
// Maximum number of boxes and stored objects of a task: checking an object's version takes as long as several boxes.
constexpr u32 TASK_BOXES = 512, TASK_OBJECTS = 32;

// The current version of a stored object, checked once per wave.
Version version_of(StoredObject &object, const std::atomic<bool> &closing) {
    const std::lock_guard lock(object.mutex);
    const Array &array = *object.array;
    if (!object.version_checked)
        object.current_version = array.store ? version_in_store(array.store, array.path(object.coordinates), closing)
                                             : version_at(array.file(object.coordinates));
    object.version_checked = true;
    return object.current_version;
}

}  // namespace

// Look up all chunks in the cache, and move kept chunks to the front. The others stay in the order of stored objects.
void Wave::find_kept(KeptChunks &kept) {
    for (size_t first = 0; first < chunks.size(); first += LOOKUP_BATCH) {
        const auto lock = kept.lock();
        for (size_t n = first; n < std::min(chunks.size(), first + LOOKUP_BATCH); ++n) {
            chunks[n].slot = kept.find(*objects[chunks[n].object].array, chunks[n].coordinates);
            kept_ += chunks[n].slot != nullptr;
        }
    }
    if (!kept_) return;
    if (missed()) {
        std::vector<WantedChunk> sorted;
        sorted.reserve(chunks.size());
        const auto is_kept = [](const WantedChunk &chunk) { return chunk.slot != nullptr; };
        std::copy_if(chunks.begin(), chunks.end(), std::back_inserter(sorted), is_kept);
        std::copy_if(chunks.begin(), chunks.end(), std::back_inserter(sorted), std::not_fn(is_kept));
        chunks.swap(sorted);
    }
    count_chunks(static_cast<size_t>(kept_));
    cut_kept_tasks();
}

void Wave::cut_kept_tasks() {
    u32 task_objects = 0, task_boxes = 0;
    for (u32 n = 0; n < kept_; ++n) {
        const bool is_new_object = !n || chunks[n].object != chunks[n - 1].object;
        if (!n || task_boxes + chunks[n].boxes > TASK_BOXES || (is_new_object && task_objects == TASK_OBJECTS)) {
            tasks.push_back({Task::KEPT, n, 0});
            task_objects = task_boxes = 0;
        }
        // If a kept chunk is stale, this task reads it, so the task counts as a user of the object's open file.
        if (is_new_object || !task_objects) {
            objects[chunks[n].object].tasks_left.fetch_add(1, std::memory_order_relaxed);
            ++task_objects;
        }
        task_boxes += chunks[n].boxes;
        ++tasks.back().chunks;
    }
    kept_left_ = static_cast<i64>(tasks.size());
}

// Unpin the slots of chunks whose task never began.
Wave::~Wave() {
    if (std::none_of(chunks.begin(), chunks.end(), [](const WantedChunk &chunk) { return chunk.slot; })) return;
    KeptChunks &kept = *reader_->kept();
    const auto lock = kept.lock();
    for (const WantedChunk &chunk : chunks)
        if (chunk.slot) kept.unpin(*chunk.slot);
}

KeptRows::KeptRows(Wave &wave, Device &device, u32 chunks) : wave_(wave), device_(device) {
    use_.read.reserve(chunks);
    unread_.reserve(chunks);
}

KeptRows::~KeptRows() {
    if (use_.read.empty() && unread_.empty()) return;
    const auto lock = device_.kept()->lock();
    for (KeptSlot *slot : use_.read) device_.kept()->unpin(*slot);
    for (KeptSlot *slot : unread_) device_.kept()->unpin(*slot);
}

void KeptRows::add(const WantedChunk &chunk, KeptSlot &slot) {
    const auto is_wanted = [&](const WantedBox &box) { return !box.job->is_abandoned(); };
    const auto begin = wave_.boxes.begin() + chunk.first_box;
    (std::any_of(begin, begin + chunk.boxes, is_wanted) ? use_.read : unread_).push_back(&slot);
    for (WantedBox *box = &wave_.boxes[chunk.first_box], *end = box + chunk.boxes; box != end; ++box) {
        box->job->chunks.fetch_add(1, std::memory_order_relaxed);
        if (box->job->is_abandoned()) continue;
        if (static_cast<i64>(rows_.size()) == device_.max_rows()) {
            {
                const auto lock = device_.kept()->lock();
                device_.kept()->pin(slot);
            }
            commit();
            use_.read.push_back(&slot);
        }
        Row &row = rows_.emplace_back(
            Row{box->batch, box->job, box->target, box->region, slot.offset + box->source_offset, {}});
        std::copy(box->extent, box->extent + LC_MAX_RANK, row.extent);
        boxes_.push_back(box);
    }
}

void KeptRows::commit() {
    if (rows_.empty()) return;
    const Range range = device_.reserve(&KEPT_PLAN, 0, static_cast<i64>(rows_.size()));
    for (WantedBox *box : boxes_) box->staged = true;
    device_.commit(range, std::static_pointer_cast<Wave>(wave_.shared_from_this()), rows_, {}, use_);
    rows_.clear();
    boxes_.clear();
    use_.read.clear();
}

// Carry out a task of kept chunks. Chunks whose stored object has changed (stale) are read.
void Reader::execute_kept(Wave &wave, const Task &task) noexcept {
    std::vector<u32> stale;
    lc_error error{};
    try {
        stale.reserve(task.chunks);
        use_kept(wave, task, stale);
    } catch (const DriverError &failed) {
        error.code = LC_DEVICE;
        std::string(failed.what()).copy(error.text, sizeof error.text - 1);
    } catch (const std::exception &) {
        error.code = LC_MEMORY;
    }
    std::vector<u32>::const_iterator next = stale.begin();
    for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n) {
        const WantedChunk &chunk = wave.chunks[n];
        const bool is_stale = next != stale.end() && *next == n;
        next += is_stale;
        for (u32 k = 0; k < chunk.boxes; ++k) {
            const WantedBox &box = wave.boxes[chunk.first_box + k];
            if (box.staged) continue;
            if (error.code) box.job->fail(error);
            if (!is_stale) settle(*box.job, 1);
        }
    }
    for (u32 n : stale) {
        wave.objects[wave.chunks[n].object].tasks_left.fetch_add(1);
        execute(wave, {wave.chunks[n].object, n, 1});
    }
    for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n)
        if (n == task.first_chunk || wave.chunks[n].object != wave.chunks[n - 1].object)
            wave.objects[wave.chunks[n].object].end_task();
}

// Copy chunks that are kept on the host to the outputs, and unpin their slots.
void Reader::copy_kept(Wave &wave, std::span<const std::pair<u32, KeptSlot *>> hits) {
    for (const auto &[n, slot] : hits) {
        const WantedChunk &chunk = wave.chunks[n];
        for (u32 k = 0; k < chunk.boxes; ++k)
            wave.boxes[chunk.first_box + k].job->chunks.fetch_add(1, std::memory_order_relaxed);
        copy_boxes(wave, chunk, kept_memory(*slot), 0);
    }
    const auto lock = kept_->lock();
    for (const auto &[n, slot] : hits) kept_->unpin(*slot);
}

// Use the kept chunks of a task, and list those whose stored object has changed.
void Reader::use_kept(Wave &wave, const Task &task, std::vector<u32> &stale) {
    KeptChunks &kept = *this->kept();
    std::optional<KeptRows> rows;
    std::vector<std::pair<u32, KeptSlot *>> hits;
    if (device_) rows.emplace(wave, *device_, task.chunks);
    else hits.reserve(task.chunks);
    Version version;
    for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n) {
        WantedChunk &chunk = wave.chunks[n];
        if (n == task.first_chunk || chunk.object != wave.chunks[n - 1].object)
            version = version_of(wave.objects[chunk.object], closing_);
        if (!(chunk.slot->version == version)) stale.push_back(n);
        else if (rows) rows->add(chunk, *std::exchange(chunk.slot, nullptr));
        else hits.emplace_back(n, std::exchange(chunk.slot, nullptr));
    }
    if (rows) rows->commit();
    else copy_kept(wave, hits);
    kept.hits += static_cast<i64>(task.chunks) - static_cast<i64>(stale.size());
    if (stale.empty()) return;
    const auto lock = kept.lock();
    for (u32 n : stale) {
        KeptSlot &slot = *std::exchange(wave.chunks[n].slot, nullptr);
        kept.forget(slot);
        kept.unpin(slot);
    }
}

// Whether slots are reserved before an object is located or requested, so that other tasks await its chunks. Chunks of
// files are read to a device twice rather than awaited, which would delay their batches.
bool Execution::reserves_first() const { return reader_.kept() && (!device_ || is_remote()); }

// Whether the chunk of a box can be kept: on a device, if a slab holds it decoded.
bool Execution::can_keep(const WantedBox &box) const {
    if (!device_) return true;
    const lc_decode_plan *plan = geometry_.encoded() ? box.batch->decode : nullptr;
    const bool has_slab = !plan || plan->slots > 0;  // else it is decoded in memory of the batch
    return has_slab && geometry_.chunk_nbytes <= device_->capacity(nullptr);
}

// For outputs on a device: use chunks that have been kept since this wave was planned, and reserve slots of the cache for
// the chunks to read.
void Execution::use_kept_chunks() {
    KeptChunks *kept = device_ ? device_->kept() : nullptr;
    if (!kept || reserves_first()) return;
    std::vector<std::pair<u32, KeptSlot *>> hits;
    hits.reserve(task_.chunks);
    slots_.assign(task_.chunks, nullptr);
    KeptRows rows(wave_, *device_, task_.chunks);
    i64 misses = 0;
    {
        const auto lock = kept->lock();
        for (u32 n = 0; n < task_.chunks; ++n) {
            const WantedChunk &chunk = wave_.chunks[task_.first_chunk + n];
            if (state_[n] != PENDING ||
                (object_.index && (*object_.index)[static_cast<size_t>(chunk.inner)].offset < 0))
                continue;
            KeptSlot *slot = kept->find(*object_.array, chunk.coordinates);
            if (slot && slot->version == object_.version) {
                hits.emplace_back(n, slot);
                continue;
            }
            ++misses;
            if (slot) {
                kept->forget(*slot);
                kept->unpin(*slot);
            }
            const WantedBox &box = *boxes(task_.first_chunk + n);
            if (can_keep(box)) slots_[n] = kept->reserve(array_of(box), chunk.coordinates, object_.version);
        }
    }
    kept->hits += static_cast<i64>(hits.size());
    kept->misses += misses;
    size_t added = 0;
    try {
        while (added < hits.size()) {
            const auto [n, slot] = hits[added++];
            rows.add(wave_.chunks[task_.first_chunk + n], *slot);
        }
        rows.commit();
    } catch (...) {
        const auto lock = kept->lock();
        for (; added < hits.size(); ++added) kept->unpin(*hits[added].second);
        throw;
    }
    for (const auto &[n, slot] : hits) state_[n] = KEPT;
}

// Reserve slots of the cache for the chunks to read, before they are requested. A chunk for which another task has
// reserved a slot is awaited.
void Execution::reserve_kept() {
    if (!reserves_first()) return;
    KeptChunks *const kept = reader_.kept();
    slots_.assign(task_.chunks, nullptr);
    const auto lock = kept->lock();
    for (u32 n = 0; n < task_.chunks; ++n) {
        if (state_[n] != PENDING) continue;
        const u32 chunk = task_.first_chunk + n;
        const std::shared_ptr<Array> &array = array_of(*boxes(chunk));
        const i64 *coordinates = wave_.chunks[chunk].coordinates;
        if (kept->is_listed(*array, coordinates)) state_[n] = AWAITED;
        else if (can_keep(*boxes(chunk))) slots_[n] = kept->reserve(array, coordinates, {});
    }
}

// Copy the awaited chunks that other tasks have kept meanwhile; this task is to read the others.
void Execution::await_kept() {
    // Two tasks that wait for chunks of each other would never end.
    for (KeptSlot *&slot : slots_)
        if (slot) give_back(std::exchange(slot, nullptr));
    fetched_ = {};
    fetched_memory_.reset();
    KeptChunks &kept = *reader_.kept();
    const Version version = version_of(object_, reader_.closing());
    for (u32 n = 0; n < task_.chunks; ++n) {
        if (state_[n] != AWAITED) continue;
        const i64 *coordinates = wave_.chunks[task_.first_chunk + n].coordinates;
        KeptSlot *slot = nullptr;
        {
            const StorageWait wait(true);
            auto lock = kept.lock();
            for (bool is_over = false; !is_over;) {
                std::tie(is_over, slot) = kept.wait_filled(lock, *object_.array, coordinates);
                if (is_over || !device_) continue;
                lock.unlock();
                device_->flush();  // the chunk may be in an open slab
                lock.lock();
            }
            if (slot && !(slot->version == version)) {
                kept.forget(*slot);
                kept.unpin(*std::exchange(slot, nullptr));
            }
        }
        const std::pair<u32, KeptSlot *> hit{task_.first_chunk + n, slot};
        if (slot && device_) {
            KeptRows rows(wave_, *device_, 1);
            rows.add(wave_.chunks[hit.first], *slot);
            rows.commit();
        } else if (slot) {
            reader_.copy_kept(wave_, {&hit, 1});
        }
        state_[n] = slot ? KEPT : PENDING;  // after all that throws: the chunk then fails
        kept.hits += slot != nullptr;
    }
}

void Execution::give_back(KeptSlot *slot) {
    const auto lock = reader_.kept()->lock();
    reader_.kept()->forget(*slot);
    reader_.kept()->unpin(*slot);
}

// Give back the slots that were not filled.
Execution::~Execution() {
    for (KeptSlot *slot : slots_)
        if (slot) give_back(slot);
}

}  // namespace lc
