#include "hits.hpp"

#include <algorithm>
#include <functional>
#include <utility>

#include "execution.hpp"

namespace lc {
namespace {

// Chunks that are looked up while the lock of the kept chunks is held.
constexpr size_t LOOKED_UP = 256;
// Boxes and stored objects of a task at most: a look at an object's version takes as long as several boxes.
constexpr u32 TASK_BOXES = 512, TASK_OBJECTS = 32;

// Which version of a stored object is there now; looked at once a wave.
Version version_of(StoredObject &object, const std::atomic<bool> &closing) {
    const std::lock_guard lock(object.mutex);
    const Array &array = *object.array;
    if (!object.looked)
        object.seen = array.store ? version_in_store(array.store, array.path(object.coordinates), closing)
                                  : version_at(array.file(object.coordinates));
    object.looked = true;
    return object.seen;
}

}  // namespace

// Look chunks up, and move those that are kept to the front; all others stay in the order of stored objects.
void Wave::find_kept(KeptChunks &kept) {
    for (size_t first = 0; first < chunks.size(); first += LOOKED_UP) {
        const auto lock = kept.lock();
        for (size_t n = first; n < std::min(chunks.size(), first + LOOKED_UP); ++n) {
            chunks[n].slot = kept.find(*objects[chunks[n].object].array, chunks[n].coordinates);
            kept_ += chunks[n].slot != nullptr;
        }
    }
    if (!kept_) return;
    if (missed()) {
        std::vector<WantedChunk> sorted;
        sorted.reserve(chunks.size());
        const auto is_kept = [](const WantedChunk &one) { return one.slot != nullptr; };
        std::copy_if(chunks.begin(), chunks.end(), std::back_inserter(sorted), is_kept);
        std::copy_if(chunks.begin(), chunks.end(), std::back_inserter(sorted), std::not_fn(is_kept));
        chunks.swap(sorted);
    }
    count_chunks(static_cast<size_t>(kept_));
    cut_kept();
}

void Wave::cut_kept() {
    u32 count = 0, wanted = 0;
    for (u32 n = 0; n < kept_; ++n) {
        const bool other = !n || chunks[n].object != chunks[n - 1].object;
        if (!n || wanted + chunks[n].boxes > TASK_BOXES || (other && count == TASK_OBJECTS)) {
            tasks.push_back({Task::KEPT, n, 0});
            count = wanted = 0;
        }
        // The file of a chunk that is not kept any more stays open until its task has read it.
        if (other || !count) objects[chunks[n].object].tasks_left.fetch_add(1, std::memory_order_relaxed), ++count;
        wanted += chunks[n].boxes;
        ++tasks.back().chunks;
    }
    kept_left_ = static_cast<i64>(tasks.size());
}

// Chunks whose task never began are still pinned.
Wave::~Wave() {
    if (std::none_of(chunks.begin(), chunks.end(), [](const WantedChunk &chunk) { return chunk.slot; })) return;
    KeptChunks &kept = *reader_->device()->kept();
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
    const auto is_wanted = [&](const WantedBox &box) { return !box.job->given_up(); };
    const auto begin = wave_.boxes.begin() + chunk.first_box;
    (std::any_of(begin, begin + chunk.boxes, is_wanted) ? use_.read : unread_).push_back(&slot);
    for (WantedBox *box = &wave_.boxes[chunk.first_box], *end = box + chunk.boxes; box != end; ++box) {
        box->job->chunks.fetch_add(1, std::memory_order_relaxed);
        if (box->job->given_up()) continue;
        if (static_cast<i64>(rows_.size()) == device_.most_rows()) {
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
        taken_.push_back(box);
    }
}

void KeptRows::commit() {
    if (rows_.empty()) return;
    const Range range = device_.reserve(&KEPT, 0, static_cast<i64>(rows_.size()));
    for (WantedBox *box : taken_) box->staged = true;
    device_.commit(range, std::static_pointer_cast<Wave>(wave_.shared_from_this()), rows_, {}, use_);
    rows_.clear();
    taken_.clear();
    use_.read.clear();
}

// Carry out a task of kept chunks; those whose stored object is another one now are read.
void Reader::execute_kept(Wave &wave, const Task &task) noexcept {
    std::vector<u32> stale;
    lc_error error{};
    try {
        stale.reserve(task.chunks);
        stage_kept(wave, task, stale);
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

void Reader::stage_kept(Wave &wave, const Task &task, std::vector<u32> &stale) {
    KeptChunks &kept = *device_->kept();
    KeptRows rows(wave, *device_, task.chunks);
    Version version;
    for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n) {
        WantedChunk &chunk = wave.chunks[n];
        if (n == task.first_chunk || chunk.object != wave.chunks[n - 1].object)
            version = version_of(wave.objects[chunk.object], closing_);
        if (chunk.slot->version == version) rows.add(chunk, *std::exchange(chunk.slot, nullptr));
        else stale.push_back(n);
    }
    rows.commit();
    kept.hits += static_cast<i64>(task.chunks) - static_cast<i64>(stale.size());
    if (stale.empty()) return;
    const auto lock = kept.lock();
    for (u32 n : stale) {
        KeptSlot &slot = *std::exchange(wave.chunks[n].slot, nullptr);
        kept.forget(slot);
        kept.unpin(slot);
    }
}

// What a task reads: pin chunks that were kept since they were looked up, and reserve slots for those that are read.
void Execution::look_for_kept() {
    KeptChunks *kept = device_ ? device_->kept() : nullptr;
    if (!kept || (is_remote() && !is_told(object_.version))) return;
    std::vector<std::pair<u32, KeptSlot *>> found;
    found.reserve(task_.chunks);
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
                found.emplace_back(n, slot);
                continue;
            }
            ++misses;
            if (slot) {
                kept->forget(*slot);
                kept->unpin(*slot);
            }
            const WantedBox &box = *boxes(task_.first_chunk + n);
            const Regions &regions = box.batch->regions;
            const auto &array = regions.arrays[static_cast<size_t>(regions.array[static_cast<size_t>(box.region)])];
            const lc_decode_plan *plan = geometry_.encoded() ? box.batch->decode : nullptr;
            const bool has_slab = !plan || plan->slots > 0;  // else it lies in memory of the batch's own
            if (has_slab && geometry_.chunk_nbytes <= device_->capacity(nullptr))
                slots_[n] = kept->reserve(array, chunk.coordinates, object_.version);
        }
    }
    kept->hits += static_cast<i64>(found.size());
    kept->misses += misses;
    size_t added = 0;
    try {
        while (added < found.size()) {
            const auto [n, slot] = found[added++];
            rows.add(wave_.chunks[task_.first_chunk + n], *slot);
        }
        rows.commit();
    } catch (...) {
        const auto lock = kept->lock();
        for (; added < found.size(); ++added) kept->unpin(*found[added].second);
        throw;
    }
    for (const auto &[n, slot] : found) state_[n] = KEPT;
}

Execution::~Execution() {
    if (std::all_of(slots_.begin(), slots_.end(), [](KeptSlot *slot) { return !slot; })) return;
    const auto lock = device_->kept()->lock();
    for (KeptSlot *slot : slots_)
        if (slot) {
            device_->kept()->forget(*slot);
            device_->kept()->unpin(*slot);
        }
}

}  // namespace lc
