// Waves: boxes of several batches grouped by chunk, chunks grouped by stored object, and tasks.
#include <algorithm>

#include "device.hpp"
#include "reader.hpp"

namespace lc {
namespace {

// Maximum decoded bytes of a task on files, unless a single chunk has more.
constexpr i64 TASK_NBYTES = 2 << 20;
// For object stores, where each request costs a round trip: the preferred number of tasks of a wave, and the minimum
// and maximum of the decoded bytes of a task, if it has several chunks.
constexpr i64 REQUEST_TASKS = 128, MIN_REQUEST_NBYTES = 512 << 10, MAX_REQUEST_NBYTES = 4 << 20;
constexpr u32 INTERLEAVED_SHARDS = 32;  // shards on slow storage whose tasks are interleaved

// Sort the indexes of boxes by array, stored object and chunk. Coordinates are combined into one key in mixed radix. If
// the key overflows, the boxes of a chunk may not be adjacent; the chunk is then read more than once.
void sort_boxes(PlannedBoxes &planned) {
    constexpr size_t DIGITS = LC_MAX_RANK + 1;
    const auto digit = [](const ChunkBox &box, size_t n) { return n < LC_MAX_RANK ? box.object[n] : box.inner; };
    i64 minimum[DIGITS], maximum[DIGITS];
    for (size_t n = 0; n < DIGITS; ++n) minimum[n] = maximum[n] = digit(planned.chunk_boxes.front(), n);
    for (const ChunkBox &box : planned.chunk_boxes)
        for (size_t n = 0; n < DIGITS; ++n) {
            minimum[n] = std::min(minimum[n], digit(box, n));
            maximum[n] = std::max(maximum[n], digit(box, n));
        }
    std::unordered_map<const Array *, u64> numbers;
    const Array *last = nullptr;
    u64 array_number = 0;
    planned.order.resize(planned.boxes.size());
    for (size_t index = 0; index < planned.boxes.size(); ++index) {
        if (const Array *array = array_of(planned.boxes[index]).get(); array != last)
            array_number = numbers.try_emplace(last = array, numbers.size()).first->second;
        u64 key = array_number;
        for (size_t n = 0; n < DIGITS; ++n)
            key = key * static_cast<u64>(maximum[n] - minimum[n] + 1) +
                  static_cast<u64>(digit(planned.chunk_boxes[index], n) - minimum[n]);
        planned.order[index] = {key, static_cast<u32>(index)};
    }
    if (!std::is_sorted(planned.order.begin(), planned.order.end()))
        std::sort(planned.order.begin(), planned.order.end());
}

}  // namespace

bool Wave::claim(i64 &step) {
    step = next_.fetch_add(1);
    if (step < static_cast<i64>(tasks.size())) return true;
    next_.store(static_cast<i64>(tasks.size()));
    return false;
}

void Wave::run(i64 step) noexcept {
    if (unclaimed() <= WAITING_TASKS) reader_->plan_ahead();
    const Task &task = tasks[static_cast<size_t>(step)];
    if (task.object == Task::KEPT) {
        reader_->execute_kept(*this, task);
        if (kept_left_.fetch_sub(1) == 1 && reader_->device()) reader_->device()->flush_kept();
    } else {
        reader_->execute(*this, task);
    }
    if (left_.fetch_sub(1) == 1) reader_->end_wave();
}

void Wave::arrange(PlannedBoxes &planned, i64 threads, KeptChunks *kept) {
    sort_boxes(planned);
    group_boxes(planned);
    if (kept) find_kept(*kept);
    const size_t first = tasks.size();
    cut_tasks(threads);
    interleave_shards(first);
    if (batches_.size() > 1) sort_by_batch(first);
    left_ = static_cast<i64>(tasks.size());
}

void Wave::group_boxes(PlannedBoxes &planned) {
    boxes.reserve(planned.order.size());
    chunks.reserve(planned.order.size());
    std::vector<u32> first_of_object;  // index of the first planned box of each object
    const ChunkBox *last = nullptr;
    const Array *last_array = nullptr;
    for (const auto &[key, index] : planned.order) {
        const WantedBox &box = planned.boxes[index];
        const ChunkBox &chunk_box = planned.chunk_boxes[index];
        const Array *const array = array_of(box).get();
        const bool same_object =
            last && array == last_array && std::equal(chunk_box.object, chunk_box.object + LC_MAX_RANK, last->object);
        if (!same_object) first_of_object.push_back(index);
        if (!same_object || chunk_box.inner != last->inner) {
            WantedChunk &chunk = chunks.emplace_back(WantedChunk{chunk_box.inner,
                                                                 {},
                                                                 static_cast<u32>(boxes.size()),
                                                                 0,
                                                                 static_cast<u32>(first_of_object.size() - 1),
                                                                 nullptr});
            std::copy(chunk_box.chunk, chunk_box.chunk + LC_MAX_RANK, chunk.coordinates);
        }
        ++chunks.back().boxes;
        boxes.push_back(box);
        last = &chunk_box;
        last_array = array;
    }
    objects_ = first_of_object.size();
    objects = std::make_unique<StoredObject[]>(objects_);
    for (size_t n = 0; n < objects_; ++n) {
        objects[n].array = array_of(planned.boxes[first_of_object[n]]).get();
        const ChunkBox &chunk_box = planned.chunk_boxes[first_of_object[n]];
        std::copy(chunk_box.object, chunk_box.object + LC_MAX_RANK, objects[n].coordinates);
    }
    count_chunks(0);
}

// Set, for each object, the range of its chunks that are read: those from index `first` on. The chunks before are kept.
void Wave::count_chunks(size_t first) {
    for (size_t n = 0; n < objects_; ++n) objects[n].first_chunk = objects[n].chunks = 0;
    for (size_t n = chunks.size(); n-- > first;) {
        objects[chunks[n].object].first_chunk = static_cast<u32>(n);
        ++objects[chunks[n].object].chunks;
    }
}

// Sort tasks from `first` on by the number that `number_of` gives each.
template <class Number> void Wave::sort_tasks(size_t first, Number number_of) {
    std::vector<std::pair<i64, Task>> numbered;
    numbered.reserve(tasks.size() - first);
    for (size_t n = first; n < tasks.size(); ++n) numbered.emplace_back(number_of(tasks[n]), tasks[n]);
    std::stable_sort(numbered.begin(), numbered.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
    for (size_t n = first; n < tasks.size(); ++n) tasks[n] = numbered[n - first].second;
}

// Sort tasks by the first batch that wants one of their chunks: otherwise all batches would end with the wave.
void Wave::sort_by_batch(size_t first) {
    sort_tasks(first, [this](const Task &task) {
        i64 number = INT64_MAX;
        for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n)
            for (u32 k = chunks[n].first_box; k < chunks[n].first_box + chunks[n].boxes; ++k)
                number = std::min(number, boxes[k].batch->number);
        return number;
    });
}

// Interleave the tasks of shards on slow storage: the first task of a shard reads the index, and the other tasks of the
// shard wait for it.
void Wave::interleave_shards(size_t first) {
    const auto is_slow = [this](const Task &task) { return objects[task.object].array->is_slow(); };
    if (std::none_of(tasks.begin() + static_cast<i64>(first), tasks.end(), is_slow)) return;
    sort_tasks(first, [&](const Task &task) {
        const u32 chunk = is_slow(task) ? task.first_chunk - objects[task.object].first_chunk : 0;
        return i64{task.object / INTERLEAVED_SHARDS} << 32 | chunk;
    });
}

// Cut the chunks of each object into tasks.
void Wave::cut_tasks(i64 threads) {
    const i64 even_share = missed() / (4 * threads), request_share = missed() / REQUEST_TASKS;
    for (size_t n = 0; n < objects_; ++n) {
        StoredObject &object = objects[n];
        const i64 nbytes = object.array->geometry->chunk_nbytes;
        const i64 count = !object.array->store
                              ? std::min(even_share, TASK_NBYTES / nbytes)
                              : std::clamp(request_share, MIN_REQUEST_NBYTES / nbytes, MAX_REQUEST_NBYTES / nbytes);
        const u32 step = static_cast<u32>(std::max<i64>(1, count));
        for (u32 first = 0; first < object.chunks; first += step) {
            tasks.push_back({static_cast<u32>(n), object.first_chunk + first, std::min(step, object.chunks - first)});
            object.tasks_left.fetch_add(1, std::memory_order_relaxed);
        }
    }
}

}  // namespace lc
