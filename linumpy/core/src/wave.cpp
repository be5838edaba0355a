// What is read at the same time: boxes of several batches by chunk, chunks by stored object, and tasks.
#include <algorithm>

#include "device.hpp"
#include "reader.hpp"

namespace lc {
namespace {

// Decoded bytes of a task, of shards.
constexpr i64 TASK_NBYTES = 2 << 20;
// The same of a task that takes requests, each of which costs a round trip: so many tasks, unless they had less or more.
constexpr i64 REQUEST_TASKS = 128, LEAST_REQUEST_NBYTES = 512 << 10, MOST_REQUEST_NBYTES = 4 << 20;
constexpr u32 TURNS = 32;  // shards of an object store whose tasks take turns

Array *array_of(const WantedBox &box) {
    const Regions &regions = box.batch->regions;
    return regions.arrays[static_cast<size_t>(regions.array[static_cast<size_t>(box.region)])].get();
}

// Sort the numbers of boxes by array, stored object and chunk. Coordinates become one number, of as many digits as there
// are of each; where it overflows, boxes of a chunk may be apart, and the chunk is read twice.
void sort_boxes(FoundBoxes &found) {
    constexpr size_t DIGITS = LC_MAX_RANK + 1;
    const auto digit = [](const ChunkBox &cut, size_t n) { return n < LC_MAX_RANK ? cut.object[n] : cut.inner; };
    i64 least[DIGITS], most[DIGITS];
    for (size_t n = 0; n < DIGITS; ++n) least[n] = most[n] = digit(found.cuts.front(), n);
    for (const ChunkBox &cut : found.cuts)
        for (size_t n = 0; n < DIGITS; ++n) {
            least[n] = std::min(least[n], digit(cut, n));
            most[n] = std::max(most[n], digit(cut, n));
        }
    std::unordered_map<const Array *, u64> numbers;
    const Array *last = nullptr;
    u64 array = 0;
    found.order.resize(found.boxes.size());
    for (size_t row = 0; row < found.boxes.size(); ++row) {
        if (const Array *one = array_of(found.boxes[row]); one != last)
            array = numbers.try_emplace(last = one, numbers.size()).first->second;
        u64 key = array;
        for (size_t n = 0; n < DIGITS; ++n)
            key =
                key * static_cast<u64>(most[n] - least[n] + 1) + static_cast<u64>(digit(found.cuts[row], n) - least[n]);
        found.order[row] = {key, static_cast<u32>(row)};
    }
    if (!std::is_sorted(found.order.begin(), found.order.end())) std::sort(found.order.begin(), found.order.end());
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
        if (kept_left_.fetch_sub(1) == 1) reader_->device()->flush_kept();
    } else {
        reader_->execute(*this, task);
    }
    if (left_.fetch_sub(1) == 1) reader_->end_wave();
}

void Wave::arrange(FoundBoxes &found, i64 threads, KeptChunks *kept) {
    sort_boxes(found);
    bring_together(found);
    if (kept) find_kept(*kept);
    const size_t first = tasks.size();
    cut_read(threads);
    take_turns(first);
    if (batches_.size() > 1) put_first_batches_first(first);
    left_ = static_cast<i64>(tasks.size());
}

void Wave::bring_together(FoundBoxes &found) {
    boxes.reserve(found.order.size());
    chunks.reserve(found.order.size());
    std::vector<u32> first_of_object;  // boxes, as they were found
    const ChunkBox *last = nullptr;
    const Array *array = nullptr;
    for (const auto &[key, row] : found.order) {
        const WantedBox &box = found.boxes[row];
        const ChunkBox &cut = found.cuts[row];
        const Array *const one = array_of(box);
        const bool same_object = last && one == array && std::equal(cut.object, cut.object + LC_MAX_RANK, last->object);
        if (!same_object) first_of_object.push_back(row);
        if (!same_object || cut.inner != last->inner) {
            WantedChunk &chunk = chunks.emplace_back(WantedChunk{cut.inner,
                                                                 {},
                                                                 static_cast<u32>(boxes.size()),
                                                                 0,
                                                                 static_cast<u32>(first_of_object.size() - 1),
                                                                 nullptr});
            std::copy(cut.chunk, cut.chunk + LC_MAX_RANK, chunk.coordinates);
        }
        ++chunks.back().boxes;
        boxes.push_back(box);
        last = &cut;
        array = one;
    }
    objects_ = first_of_object.size();
    objects = std::make_unique<StoredObject[]>(objects_);
    for (size_t n = 0; n < objects_; ++n) {
        objects[n].array = array_of(found.boxes[first_of_object[n]]);
        const ChunkBox &cut = found.cuts[first_of_object[n]];
        std::copy(cut.object, cut.object + LC_MAX_RANK, objects[n].coordinates);
    }
    count_chunks(0);
}

// Which chunks of each object are read: those from `first` on.
void Wave::count_chunks(size_t first) {
    for (size_t n = 0; n < objects_; ++n) objects[n].first_chunk = objects[n].chunks = 0;
    for (size_t n = chunks.size(); n-- > first;) {
        objects[chunks[n].object].first_chunk = static_cast<u32>(n);
        ++objects[chunks[n].object].chunks;
    }
}

// Sort tasks from `first` on by a number of each.
template <class Number> void Wave::sort_tasks(size_t first, Number number_of) {
    std::vector<std::pair<i64, Task>> numbered;
    numbered.reserve(tasks.size() - first);
    for (size_t n = first; n < tasks.size(); ++n) numbered.emplace_back(number_of(tasks[n]), tasks[n]);
    std::stable_sort(numbered.begin(), numbered.end(), [](const auto &a, const auto &b) { return a.first < b.first; });
    for (size_t n = first; n < tasks.size(); ++n) tasks[n] = numbered[n - first].second;
}

// By the first batch that wants one of their chunks: a wave of several batches would else end all of them at its end.
void Wave::put_first_batches_first(size_t first) {
    sort_tasks(first, [this](const Task &task) {
        i64 number = INT64_MAX;
        for (u32 n = task.first_chunk; n < task.first_chunk + task.chunks; ++n)
            for (u32 k = chunks[n].first_box; k < chunks[n].first_box + chunks[n].boxes; ++k)
                number = std::min(number, boxes[k].batch->number);
        return number;
    });
}

// Shards in an object store take turns: the first task of each brings its index, and all others of it wait for that.
void Wave::take_turns(size_t first) {
    const auto is_remote = [this](const Task &task) { return objects[task.object].array->store != 0; };
    if (std::none_of(tasks.begin() + static_cast<i64>(first), tasks.end(), is_remote)) return;
    sort_tasks(first, [&](const Task &task) {
        const u32 behind = is_remote(task) ? task.first_chunk - objects[task.object].first_chunk : 0;
        return i64{task.object / TURNS} << 32 | behind;
    });
}

void Wave::cut_read(i64 threads) {
    const i64 even = missed() / (4 * threads), even_requests = missed() / REQUEST_TASKS;
    for (size_t n = 0; n < objects_; ++n) {
        StoredObject &object = objects[n];
        const i64 nbytes = object.array->geometry->chunk_nbytes;
        const i64 count = !object.array->store
                              ? std::min(even, TASK_NBYTES / nbytes)
                              : std::clamp(even_requests, LEAST_REQUEST_NBYTES / nbytes, MOST_REQUEST_NBYTES / nbytes);
        const u32 step = static_cast<u32>(std::max<i64>(1, count));
        for (u32 first = 0; first < object.chunks; first += step) {
            tasks.push_back({static_cast<u32>(n), object.first_chunk + first, std::min(step, object.chunks - first)});
            object.tasks_left.fetch_add(1, std::memory_order_relaxed);
        }
    }
}

}  // namespace lc
