#include "reader.hpp"

#include "device.hpp"

#include <algorithm>

namespace lc {
namespace {

// Maximum number of boxes in a wave, and in the queue.
constexpr i64 WAVE_BOXES = 1 << 15, QUEUED_BOXES = 1 << 19;
// If the reader knows more arrays than this, it forgets those that no job reads.
constexpr size_t KNOWN_ARRAYS = 4096;
// Limits for work that a waiting thread carries out itself: boxes of a batch, decoded bytes of a chunk, and boxes of
// all batches. Meanwhile the thread does not handle interrupts.
constexpr i64 SMALL_BOXES = 16, SMALL_CHUNK_NBYTES = 2 << 20, HELPED_BOXES = 64;

std::chrono::duration<double> seconds_of(double seconds) { return std::chrono::duration<double>(seconds); }

// Make a batch with all but its arrays, for which the reader's lock is needed.
std::shared_ptr<Batch> batch_of(const lc_batch &record) {
    const auto geometry = std::make_shared<const Geometry>(*record.geometry);
    auto batch = std::make_shared<Batch>();
    Regions &regions = batch->regions;
    const size_t count = static_cast<size_t>(record.region_count), values = count * static_cast<size_t>(geometry->rank);
    regions.geometry = geometry;
    regions.conversion = {geometry->dtype, record.target, geometry->swapped != 0};
    std::copy(record.fill, record.fill + sizeof regions.fill, regions.fill);
    regions.array.assign(record.array, record.array + count);
    regions.start.assign(record.start, record.start + values);
    regions.stop.assign(record.stop, record.stop + values);
    regions.strides.assign(record.strides, record.strides + values);
    regions.address.assign(record.address, record.address + count);
    if (record.on_device) {
        batch->scatter = record.on_device->scatter;
        batch->decode = record.on_device->decode;
        batch->ready = record.on_device->ready;
        batch->timed = record.on_device->timed;
        batch->headers.resize(count);
        batch->memory = record.on_device->memory;
    }
    for (i64 n = 0; n < record.array_count; ++n) {
        const lc_array &array = record.arrays[n];
        if (array.look_count && batch->metadata_files.empty())
            batch->metadata_files.resize(static_cast<size_t>(record.array_count));
        for (const lc_look *file = array.looks; file != array.looks + array.look_count; ++file)
            batch->metadata_files[static_cast<size_t>(n)].push_back(
                {file->path, file->device, file->inode, file->nbytes, file->written, file->changed});
    }
    const auto is_remote = [](const lc_array &array) { return array.store != 0; };
    double boxes = 0;
    for (size_t n = 0; n < count; ++n) boxes += regions.chunk_count(static_cast<i64>(n));
    batch->queued_boxes = static_cast<i64>(std::min(boxes, static_cast<double>(WAVE_BOXES)));
    batch->is_small = batch->queued_boxes <= SMALL_BOXES && geometry->chunk_nbytes <= SMALL_CHUNK_NBYTES &&
                      std::none_of(record.arrays, record.arrays + record.array_count, is_remote);
    const i64 job_count = record.one_job ? 1 : record.region_count;
    for (i64 n = 0; n < job_count; ++n)
        batch->jobs.push_back(std::make_shared<Job>(record.one_job ? std::max<i64>(1, record.region_count) : 1));
    return batch;
}

}  // namespace

// Plans the queue of a reader. Created once per reader, so that scheduling needs no memory later.
class PlanWork : public OneStep {
public:
    explicit PlanWork(std::weak_ptr<Reader> reader) : reader_(std::move(reader)) {}
    void run(i64) noexcept override {
        if (const std::shared_ptr<Reader> reader = reader_.lock()) reader->plan();
    }

private:
    std::weak_ptr<Reader> reader_;
};

// The queue

Reader::Reader(i64 threads, i64 index_nbytes, const lc_device *device) : indexes(index_nbytes), threads_(threads) {
    active_.reserve(64);
    if (device) device_ = std::make_unique<Device>(*device, *this);
}

void Reader::keep_on_host(u8 *memory, i64 nbytes) {
    kept_memory_ = memory;
    kept_ = std::make_unique<KeptChunks>(nbytes);
}

KeptChunks *Reader::kept() const { return device_ ? device_->kept() : kept_.get(); }

// The reader's handle may be deleted while batches are queued. The jobs of these batches must end, too.
Reader::~Reader() {
    for (const auto &batch : queue_) abandon(*batch, LC_CANCELLED);
}

std::shared_ptr<Array> Reader::known_array(const lc_array &array, const std::shared_ptr<const Geometry> &geometry) {
    std::string key(reinterpret_cast<const char *>(static_cast<const lc_geometry *>(geometry.get())),
                    sizeof(lc_geometry));
    key.append(array.separator).append(1, '\0').append(array.prefix);
    if (array.store) key.append(1, '\0').append(reinterpret_cast<const char *>(&array.store), sizeof array.store);
    if (array.archive) {
        const i64 version[] = {array.archive->inode, array.archive->nbytes, array.archive->written};
        key.append(1, '\0').append(reinterpret_cast<const char *>(version), sizeof version);
    }
    std::weak_ptr<Array> &slot = arrays_[key];
    std::shared_ptr<Array> result = slot.lock();
    if (result) return result;
    result = std::make_shared<Array>(geometry, array.prefix, array.separator, array.metadata,
                                     array.archive ? std::make_unique<const Archive>(array, geometry->rank) : nullptr,
                                     array.store);
    slot = result;
    if (arrays_.size() > KNOWN_ARRAYS) std::erase_if(arrays_, [](const auto &item) { return item.second.expired(); });
    return result;
}

bool Reader::submit(const lc_batch &record, std::vector<std::shared_ptr<Job>> &jobs) {
    // All memory is allocated before the batch is queued: a call that fails must not leave a batch in the queue.
    const std::shared_ptr<Batch> batch = batch_of(record);
    if (device_ && device_->reads_directly()) batch->is_small = false;
    Pool::shared();
    jobs = batch->jobs;
    if (!record.region_count) {
        for (const auto &job : jobs) settle(*job, 1);
        return true;
    }
    int state = 0;
    {
        const std::lock_guard lock(mutex_);
        if (!closing_ && queued_boxes_ > QUEUED_BOXES) return false;
        for (i64 n = 0; n < record.array_count; ++n)
            batch->regions.arrays.push_back(known_array(record.arrays[n], batch->regions.geometry));
        if (!closing_) {
            if (!plan_work_) plan_work_ = std::make_shared<PlanWork>(weak_from_this());
            pool_ = &Pool::shared();
            batch->number = ++batches_;
            queue_.push_back(batch);
            queued_boxes_ += batch->queued_boxes;
            state = schedule_plan(batch->is_small);
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
    bool idle = false;
    {
        std::unique_lock lock(mutex_);
        const bool over = changed_.wait_for(lock, seconds_of(seconds), [&] {
            idle = !planning_ && !waves_ && queue_.empty() && (!device_ || device_->idle());
            return idle || Pool::shared().stopped();
        });
        if (!over) return false;
        idle = idle && closing_;
    }
    if (device_ && idle) device_->release();
    return true;
}

// End the jobs of regions that were not planned.
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

// Planning. `planning_` is true from `schedule_plan` until a thread has planned, so that only one thread plans at a
// time.

// Whether the queue is so small that a waiting thread may carry out all of it. Called with the lock held.
bool Reader::queue_is_small() const {
    return queued_boxes_ <= HELPED_BOXES &&
           std::all_of(queue_.begin(), queue_.end(), [](const auto &batch) { return batch->is_small; });
}

// Have a thread plan the queue if few tasks are unclaimed. `deferred`: the caller is likely to plan it itself. Returns
// 0 or an errno. Called with the lock held.
int Reader::schedule_plan(bool deferred) noexcept {
    if (planning_ || queue_.empty()) return 0;
    i64 waiting = 0;
    std::erase_if(active_, [&](const std::weak_ptr<Wave> &active) {
        const std::shared_ptr<Wave> wave = active.lock();
        waiting += wave ? std::max<i64>(0, wave->unclaimed()) : 0;
        return !wave;
    });
    if (waiting > WAITING_TASKS) return 0;
    plan_work_->arm();
    Pool &pool = Pool::shared();
    const int state = deferred && queue_is_small() ? pool.add_deferred(plan_work_) : pool.add(plan_work_, true);
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
    changed_.notify_all();
    flush_if_idle();
}

// Start slabs that are not full, unless other waves may still fill them: fewer slabs are faster.
void Reader::flush_if_idle() {
    if (!device_) return;
    {
        const std::lock_guard lock(mutex_);
        if (waves_ || planning_) return;
    }
    device_->flush_and_attend();
}

void Reader::help() noexcept {
    if (&Pool::shared() != pool_.load()) return;  // a forked child: the parent's pool, whose locks no thread releases
    std::shared_ptr<PlanWork> work;
    {
        const std::lock_guard lock(mutex_);
        if (!planning_ || !queue_is_small()) return;
        work = plan_work_;
    }
    if (!Pool::shared().begin_help(*work)) return;
    {
        const Device::ContextGuard guard(device_.get());
        plan(true);
    }
    Pool::shared().end_help();
}

// Plan a wave, and have the pool's threads carry it out. With `helping`, or if the wave has one task, this thread
// carries out its tasks.
void Reader::plan(bool helping) noexcept {
    const double begin = now();
    std::shared_ptr<Wave> wave = next_wave();
    std::list<std::shared_ptr<Batch>> left;
    const bool is_single_task = wave && wave->tasks.size() == 1;
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
            if (!is_single_task) Pool::shared().add(wave, false);
        }
        if (!wave || is_single_task) schedule_plan();
    }
    for (const auto &batch : left) abandon(*batch, LC_CANCELLED);
    changed_.notify_all();
    stats.plan_seconds.fetch_add(now() - begin);
    if (!wave) flush_if_idle();
    i64 step;
    while ((is_single_task || helping) && wave && wave->claim(step)) wave->run(step);
}

// Take boxes from the queue until a wave is full; null if there are none.
std::shared_ptr<Wave> Reader::next_wave() {
    std::vector<std::shared_ptr<Batch>> batches;
    std::shared_ptr<Wave> wave;
    try {
        planned_.clear();
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
            collect(*batch);
            if (batch->next_region < batch->regions.count()) break;
            const std::lock_guard lock(mutex_);
            if (!queue_.empty() && queue_.front() == batch) {
                queue_.pop_front();
                queued_boxes_ -= batch->queued_boxes;
            }
        }
        if (planned_.boxes.empty()) return nullptr;
        stats.boxes += static_cast<i64>(planned_.boxes.size());
        wave->arrange(planned_, threads_, kept());
        stats.tasks += static_cast<i64>(wave->tasks.size());
        return wave;
    } catch (const std::exception &) {  // no memory: all jobs of the batches that were to be planned fail
        lc_error error{};
        error.code = LC_MEMORY;
        std::shared_ptr<Batch> next;
        if (batches.empty()) {
            // No memory even for the list of batches: fail one batch at a time, so that planning ends.
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
        for (const WantedBox &box : planned_.boxes) settle(*box.job, 1);
        planned_.boxes.clear();
        return nullptr;
    }
}

// Check the metadata files of the arrays of a batch, once. Regions of an array that has changed are not read.
void Reader::check_metadata_files(Batch &batch) {
    if (batch.metadata_files.empty()) return;
    const auto are_current = [](const std::vector<FileState> &files) {
        return std::all_of(files.begin(), files.end(), [](const FileState &file) { return file.is_current(); });
    };
    std::vector<bool> changed;
    for (const std::vector<FileState> &files : batch.metadata_files) changed.push_back(!are_current(files));
    batch.changed.swap(changed);
    batch.metadata_files.clear();
}

// Take boxes from a batch until the wave is full or all regions of the batch are cut.
void Reader::collect(Batch &batch) {
    check_metadata_files(batch);
    lc_error changed{};
    changed.code = LC_CHANGED;
    Regions &regions = batch.regions;
    const auto has_capacity = [this] { return static_cast<i64>(planned_.boxes.size()) < WAVE_BOXES; };
    while (batch.next_region < regions.count() && has_capacity()) {
        Job &job = batch.job_of(batch.next_region);
        const size_t array = static_cast<size_t>(regions.array[static_cast<size_t>(batch.next_region)]);
        if (!batch.changed.empty() && batch.changed[array]) job.fail(changed);
        if (!batch.walk) batch.walk = std::make_unique<ChunkWalk>(regions, batch.next_region);
        ChunkWalk &walk = *batch.walk;
        for (; !walk.at_end() && has_capacity(); walk.next()) {
            if (job.is_abandoned()) break;
            const ChunkBox &chunk_box = planned_.chunk_boxes.emplace_back(walk.box());
            WantedBox &box = planned_.boxes.emplace_back(
                WantedBox{&batch, &job, chunk_box.target, batch.next_region, chunk_box.source_offset, {}, false});
            std::copy(chunk_box.extent, chunk_box.extent + LC_MAX_RANK, box.extent);
            job.expect(1);
        }
        if (!walk.at_end() && !job.is_abandoned()) return;
        batch.walk.reset();
        ++batch.next_region;
        settle(job, 1);
    }
}

}  // namespace lc
