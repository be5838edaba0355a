#include "reader.hpp"

#include "device.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace lc {
namespace {

// Boxes that are planned together, and that may be queued.
constexpr i64 WAVE_BOXES = 1 << 15, QUEUED_BOXES = 1 << 19;
// Arrays that are known before those that no job reads any more are forgotten.
constexpr size_t KNOWN_ARRAYS = 4096;
// Decoded bytes of a task, of shards.
constexpr i64 TASK_NBYTES = 2 << 20;
// Tasks that wait for a thread while further ones are planned.
constexpr i64 WAITING_TASKS = 16;

void add(std::atomic<double> &sum, double value) {
    double known = sum.load(std::memory_order_relaxed);
    while (!sum.compare_exchange_weak(known, known + value)) {
    }
}

std::chrono::duration<double> seconds_of(double seconds) { return std::chrono::duration<double>(seconds); }

}  // namespace

// Made once a reader, so that no memory is needed later to go on with what is queued.
class PlanWork : public Work {
public:
    explicit PlanWork(std::weak_ptr<Reader> reader) : reader_(std::move(reader)) {}
    void arm() { claimed_ = false; }
    bool claim(i64 &step) override {
        step = 0;
        return !claimed_.exchange(true);
    }
    bool has_more() const override { return !claimed_.load(); }
    void run(i64) noexcept override {
        if (const std::shared_ptr<Reader> reader = reader_.lock()) reader->plan();
    }

private:
    std::weak_ptr<Reader> reader_;
    std::atomic<bool> claimed_{true};
};

// Jobs

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
            error_ = {};  // whoever cancelled was told that the job ends so, whatever failed meanwhile
            error_.code = LC_CANCELLED;
        }
        end_ = now();
        over_.store(true, std::memory_order_release);
        // Under the lock: whoever waits may drop the job as soon as it is over.
        ended_.notify_all();
    }
}

bool Job::wait(double seconds) {
    if (is_over()) return true;
    std::unique_lock lock(mutex_);
    return ended_.wait_for(lock, seconds_of(seconds), [this] { return over_.load(); });
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

// Waves

bool Wave::claim(i64 &step) {
    step = next_.fetch_add(1);
    if (step < static_cast<i64>(tasks.size())) return true;
    next_.store(static_cast<i64>(tasks.size()));
    return false;
}

void Wave::run(i64 step) noexcept {
    if (unclaimed() <= WAITING_TASKS) reader_->plan_ahead();
    reader_->execute(*this, tasks[static_cast<size_t>(step)]);
    if (left_.fetch_sub(1) == 1) reader_->end_wave();
}

// Number the boxes in the order of array, stored object and chunk.
std::vector<u32> Wave::order() const {
    std::vector<u32> rows(boxes.size());
    std::iota(rows.begin(), rows.end(), 0u);
    std::unordered_map<const Array *, i64> numbers;
    std::vector<i64> array(boxes.size());
    for (size_t n = 0; n < boxes.size(); ++n) {
        const Regions &regions = boxes[n].batch->regions;
        const Array *one =
            regions.arrays[static_cast<size_t>(regions.array[static_cast<size_t>(boxes[n].region)])].get();
        array[n] = n && boxes[n].batch == boxes[n - 1].batch && boxes[n].region == boxes[n - 1].region
                       ? array[n - 1]
                       : numbers.try_emplace(one, static_cast<i64>(numbers.size())).first->second;
    }
    const auto before = [&](u32 a, u32 b) {
        if (array[a] != array[b]) return array[a] < array[b];
        for (int axis = 0; axis < LC_MAX_RANK; ++axis)
            if (cuts[a].object[axis] != cuts[b].object[axis]) return cuts[a].object[axis] < cuts[b].object[axis];
        return cuts[a].inner < cuts[b].inner;
    };
    bool sorted = true;
    for (u32 n = 1; sorted && n < rows.size(); ++n) sorted = !before(n, n - 1);
    if (!sorted) std::stable_sort(rows.begin(), rows.end(), before);
    return rows;
}

void Wave::arrange(i64 threads) {
    const std::vector<u32> rows = order();
    std::vector<WantedBox> ordered;
    ordered.reserve(rows.size());
    chunks.reserve(rows.size());
    std::vector<u32> first_of_object;  // chunks
    std::vector<Array *> array_of_object;
    const ChunkBox *last = nullptr;
    for (u32 row : rows) {
        const WantedBox &box = boxes[row];
        const ChunkBox &cut = cuts[row];
        const Regions &regions = box.batch->regions;
        Array *array = regions.arrays[static_cast<size_t>(regions.array[static_cast<size_t>(box.region)])].get();
        const bool same_object =
            last && array == array_of_object.back() && std::equal(cut.object, cut.object + LC_MAX_RANK, last->object);
        if (!same_object) {
            first_of_object.push_back(static_cast<u32>(chunks.size()));
            array_of_object.push_back(array);
        }
        if (!same_object || cut.inner != last->inner) {
            WantedChunk chunk{cut.inner, {}, static_cast<u32>(ordered.size()), 0};
            std::copy(cut.chunk, cut.chunk + LC_MAX_RANK, chunk.coordinates);
            chunks.push_back(chunk);
        }
        ++chunks.back().boxes;
        ordered.push_back(box);
        last = &cut;
    }
    const size_t count = first_of_object.size();
    objects = std::make_unique<StoredObject[]>(count);
    const i64 even = std::max<i64>(1, static_cast<i64>(chunks.size()) / (4 * threads));
    for (size_t n = 0; n < count; ++n) {
        StoredObject &object = objects[n];
        object.array = array_of_object[n];
        object.first_chunk = first_of_object[n];
        object.chunks = (n + 1 < count ? first_of_object[n + 1] : static_cast<u32>(chunks.size())) - object.first_chunk;
        const ChunkBox &cut = cuts[rows[chunks[object.first_chunk].first_box]];
        std::copy(cut.object, cut.object + LC_MAX_RANK, object.coordinates);
        const i64 most = std::max<i64>(1, TASK_NBYTES / object.array->geometry->chunk_nbytes);
        const u32 step = static_cast<u32>(std::min(even, most));
        for (u32 first = 0; first < object.chunks; first += step) {
            tasks.push_back({static_cast<u32>(n), object.first_chunk + first, std::min(step, object.chunks - first)});
            object.tasks_left.fetch_add(1, std::memory_order_relaxed);
        }
    }
    boxes.swap(ordered);
    std::vector<ChunkBox>().swap(cuts);
    left_ = static_cast<i64>(tasks.size());
}

// The queue

Reader::Reader(i64 threads, i64 index_nbytes, const lc_device *device) : indexes(index_nbytes), threads_(threads) {
    active_.reserve(64);
    if (device) device_ = std::make_unique<Device>(*device, *this);
}

// A handle may be deleted while batches are queued: their jobs end, too.
Reader::~Reader() {
    for (const auto &batch : queue_) abandon(*batch, LC_CANCELLED);
}

void Reader::note_progress() {
    // With the lock: a waiter must not miss it between its look and its sleep.
    {
        const std::lock_guard lock(mutex_);
    }
    changed_.notify_all();
}

std::shared_ptr<Array> Reader::known_array(const lc_array &array, const std::shared_ptr<const Geometry> &geometry) {
    std::string key(reinterpret_cast<const char *>(static_cast<const lc_geometry *>(geometry.get())),
                    sizeof(lc_geometry));
    key.append(array.separator).append(1, '\0').append(array.prefix);
    std::weak_ptr<Array> &slot = arrays_[key];
    std::shared_ptr<Array> known = slot.lock();
    if (known) return known;
    known = std::make_shared<Array>(Array{geometry, array.prefix, array.separator, array.metadata});
    slot = known;
    if (arrays_.size() > KNOWN_ARRAYS) std::erase_if(arrays_, [](const auto &item) { return item.second.expired(); });
    return known;
}

bool Reader::submit(const lc_batch &record, std::vector<std::shared_ptr<Job>> &jobs) {
    const auto geometry = std::make_shared<const Geometry>(*record.geometry);
    auto batch = std::make_shared<Batch>();
    Regions &regions = batch->regions;
    const size_t count = static_cast<size_t>(record.region_count), cells = count * static_cast<size_t>(geometry->rank);
    regions.geometry = geometry;
    regions.conversion = {geometry->dtype, record.target, geometry->swapped != 0};
    std::copy(record.fill, record.fill + sizeof regions.fill, regions.fill);
    regions.array.assign(record.array, record.array + count);
    regions.start.assign(record.start, record.start + cells);
    regions.stop.assign(record.stop, record.stop + cells);
    regions.strides.assign(record.strides, record.strides + cells);
    regions.address.assign(record.address, record.address + count);
    if (record.on_device) {
        batch->scatter = record.on_device->scatter;
        batch->decode = record.on_device->decode;
        batch->ready = record.on_device->ready;
        batch->timed = record.on_device->timed;
        batch->memory = record.on_device->memory;
    }
    double boxes = 0;
    for (size_t n = 0; n < count; ++n) boxes += regions.chunk_count(static_cast<i64>(n));
    batch->queued_boxes = static_cast<i64>(std::min(boxes, static_cast<double>(WAVE_BOXES)));
    // All that needs memory comes before the batch is queued: a call that fails must leave nothing behind.
    Pool::shared();
    const i64 job_count = record.one_job ? 1 : record.region_count;
    for (i64 n = 0; n < job_count; ++n)
        batch->jobs.push_back(std::make_shared<Job>(record.one_job ? std::max<i64>(1, record.region_count) : 1));
    jobs = batch->jobs;
    if (!record.region_count) {
        for (const auto &job : jobs) settle(*job, 1);
        return true;
    }
    int state = 0;
    {
        const std::lock_guard lock(mutex_);
        if (!closing_ && queued_boxes_ > QUEUED_BOXES) return false;
        for (i64 n = 0; n < record.array_count; ++n) regions.arrays.push_back(known_array(record.arrays[n], geometry));
        if (!closing_) {
            if (!plan_work_) plan_work_ = std::make_shared<PlanWork>(weak_from_this());
            queue_.push_back(batch);
            queued_boxes_ += batch->queued_boxes;
            state = schedule_plan();
            if (state) {
                queue_.pop_back();
                queued_boxes_ -= batch->queued_boxes;
            }
        }
        if (!closing_ && !state) return true;
    }
    lc_error error{};
    error.code = state && state != ECANCELED ? LC_THREAD : LC_CLOSED;
    error.number = state;
    for (const auto &job : batch->jobs) job->fail(error);
    abandon(*batch, error.code);
    return true;
}

bool Reader::wait_capacity(double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds_of(seconds), [this] { return closing_ || queued_boxes_ <= QUEUED_BOXES; });
}

void Reader::close() {
    std::list<std::shared_ptr<Batch>> left;
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        if (!planning_) {
            left.swap(queue_);
            queued_boxes_ = 0;
        }
    }
    for (const auto &batch : left) abandon(*batch, LC_CANCELLED);
    changed_.notify_all();
}

bool Reader::wait_closed(double seconds) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, seconds_of(seconds), [this] {
        if (Pool::shared().stopped()) return true;
        return !planning_ && !waves_ && queue_.empty() && (!device_ || device_->idle());
    });
}

// End the jobs whose regions were not planned.
void Reader::abandon(Batch &batch, i64 code) {
    lc_error error{};
    error.code = code;
    batch.walk.reset();
    for (; batch.next_region < batch.regions.count(); ++batch.next_region) {
        Job &job = batch.job_of(batch.next_region);
        job.fail(error);
        settle(job, 1);
    }
}

void Reader::settle(Job &job, i64 parts) {
    if (!job.end(parts)) return;
    ++stats.jobs;  // before the job is over: whoever waits for it finds it counted
    job.finish();
}

// Planning. `planning_` is true from here until a thread has planned, so that one thread at a time does.

int Reader::schedule_plan() noexcept {
    if (planning_ || queue_.empty()) return 0;
    i64 waiting = 0;
    std::erase_if(active_, [&](const std::weak_ptr<Wave> &one) {
        const std::shared_ptr<Wave> wave = one.lock();
        waiting += wave ? std::max<i64>(0, wave->unclaimed()) : 0;
        return !wave;
    });
    if (waiting > WAITING_TASKS) return 0;
    plan_work_->arm();
    const int state = Pool::shared().add(plan_work_, true);
    planning_ = !state;
    return state;
}

void Reader::plan_ahead() {
    const std::lock_guard lock(mutex_);
    schedule_plan();
}

void Reader::end_wave() {
    {
        const std::lock_guard lock(mutex_);
        --waves_;
        schedule_plan();
    }
    flush_if_idle();
    changed_.notify_all();
}

// Start slabs that are not full, unless other waves go on filling them: fewer are carried out so.
void Reader::flush_if_idle() {
    if (!device_) return;
    {
        const std::lock_guard lock(mutex_);
        if (waves_ || planning_) return;
    }
    device_->flush();
}

void Reader::plan() noexcept {
    const double begin = now();
    std::shared_ptr<Wave> wave = next_wave();
    std::list<std::shared_ptr<Batch>> left;
    const bool alone = wave && wave->tasks.size() == 1;
    {
        const std::lock_guard lock(mutex_);
        planning_ = false;
        if (closing_) {
            left.swap(queue_);
            queued_boxes_ = 0;
        }
        if (wave) {
            ++waves_;
            if (active_.size() < active_.capacity()) active_.push_back(wave);
            if (!alone) Pool::shared().add(wave, false);
        }
        if (!wave || alone) schedule_plan();
    }
    if (!wave) flush_if_idle();
    for (const auto &batch : left) abandon(*batch, LC_CANCELLED);
    changed_.notify_all();
    add(stats.plan_seconds, now() - begin);
    i64 step;
    if (alone && wave->claim(step)) wave->run(step);
}

// Take boxes of what is queued until a wave is full; null where there are none.
std::shared_ptr<Wave> Reader::next_wave() {
    std::vector<std::shared_ptr<Batch>> batches;
    std::shared_ptr<Wave> wave;
    try {
        std::vector<WantedBox> boxes;
        {
            const std::lock_guard lock(mutex_);
            i64 expected = 0;
            for (const auto &batch : queue_) {
                if (expected >= WAVE_BOXES) break;
                batches.push_back(batch);
                expected += batch->queued_boxes;
            }
        }
        wave = std::make_shared<Wave>(shared_from_this(), batches);
        for (const auto &batch : batches) {
            collect(*batch, *wave);
            if (batch->next_region < batch->regions.count()) break;
            const std::lock_guard lock(mutex_);
            if (!queue_.empty() && queue_.front() == batch) {
                queue_.pop_front();
                queued_boxes_ -= batch->queued_boxes;
            }
        }
        if (wave->boxes.empty()) return nullptr;
        stats.boxes += static_cast<i64>(wave->boxes.size());
        wave->arrange(threads_);
        stats.tasks += static_cast<i64>(wave->tasks.size());
        return wave;
    } catch (const std::exception &) {  // no memory: the jobs that were to be planned fail
        lc_error error{};
        error.code = LC_MEMORY;
        std::shared_ptr<Batch> next;
        if (batches.empty()) {
            // Not even room for their list: one after another then, so that planning comes to an end.
            const std::lock_guard lock(mutex_);
            if (!queue_.empty()) next = queue_.front();
        }
        for (size_t n = 0; n < batches.size() || next; ++n) {
            const std::shared_ptr<Batch> batch = next ? std::move(next) : batches[n];
            for (const auto &job : batch->jobs) job->fail(error);
            abandon(*batch, LC_MEMORY);
            const std::lock_guard lock(mutex_);
            if (std::erase(queue_, batch)) queued_boxes_ -= batch->queued_boxes;
        }
        if (wave)
            for (const WantedBox &box : wave->boxes) settle(*box.job, 1);
        return nullptr;
    }
}

void Reader::collect(Batch &batch, Wave &wave) {
    Regions &regions = batch.regions;
    while (batch.next_region < regions.count() && static_cast<i64>(wave.boxes.size()) < WAVE_BOXES) {
        Job &job = batch.job_of(batch.next_region);
        if (!batch.walk) batch.walk = std::make_unique<ChunkWalk>(regions, batch.next_region);
        ChunkWalk &walk = *batch.walk;
        for (; !walk.at_end() && static_cast<i64>(wave.boxes.size()) < WAVE_BOXES; walk.next()) {
            if (job.given_up()) break;
            const ChunkBox cut = walk.box();
            WantedBox box{&batch, &job, cut.target, batch.next_region, cut.source_offset, {}, false};
            std::copy(cut.extent, cut.extent + LC_MAX_RANK, box.extent);
            wave.cuts.push_back(cut);
            job.expect(1);
            try {
                wave.boxes.push_back(box);
            } catch (...) {
                job.end(1);
                throw;
            }
        }
        if (!walk.at_end() && !job.given_up()) return;
        batch.walk.reset();
        ++batch.next_region;
        settle(job, 1);
    }
}

}  // namespace lc
