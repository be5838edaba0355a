#include "reader.hpp"

#include "device.hpp"

#include <algorithm>

namespace lc {
namespace {

// Boxes that are planned together, and that may be queued.
constexpr i64 WAVE_BOXES = 1 << 15, QUEUED_BOXES = 1 << 19;
// Arrays that are known before those that no job reads any more are forgotten.
constexpr size_t KNOWN_ARRAYS = 4096;
// Boxes of a batch, decoded bytes of their chunks, and boxes of all batches that a thread which waits carries out itself:
// an interrupt is handled behind them.
constexpr i64 SMALL_BOXES = 16, SMALL_CHUNK_NBYTES = 2 << 20, HELPED_BOXES = 64;

std::chrono::duration<double> seconds_of(double seconds) { return std::chrono::duration<double>(seconds); }

}  // namespace

// Made once a reader, so that no memory is needed later to go on with what is queued.
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
    if (array.store) key.append(1, '\0').append(reinterpret_cast<const char *>(&array.store), sizeof array.store);
    if (array.archive) {
        const i64 version[] = {array.archive->inode, array.archive->nbytes, array.archive->written};
        key.append(1, '\0').append(reinterpret_cast<const char *>(version), sizeof version);
    }
    std::weak_ptr<Array> &slot = arrays_[key];
    std::shared_ptr<Array> known = slot.lock();
    if (known) return known;
    known = std::make_shared<Array>(geometry, array.prefix, array.separator, array.metadata,
                                    array.archive ? std::make_unique<const Archive>(array, geometry->rank) : nullptr,
                                    array.store);
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
        batch->headers.resize(count);
        batch->memory = record.on_device->memory;
    }
    for (i64 n = 0; n < record.array_count; ++n) {
        const lc_array &array = record.arrays[n];
        if (array.look_count && batch->looks.empty()) batch->looks.resize(static_cast<size_t>(record.array_count));
        for (const lc_look *one = array.looks; one != array.looks + array.look_count; ++one)
            batch->looks[static_cast<size_t>(n)].push_back(
                {one->path, one->device, one->inode, one->nbytes, one->written, one->changed});
    }
    const auto is_remote = [](const lc_array &array) { return array.store != 0; };
    double boxes = 0;
    for (size_t n = 0; n < count; ++n) boxes += regions.chunk_count(static_cast<i64>(n));
    batch->queued_boxes = static_cast<i64>(std::min(boxes, static_cast<double>(WAVE_BOXES)));
    batch->is_small = batch->queued_boxes <= SMALL_BOXES && geometry->chunk_nbytes <= SMALL_CHUNK_NBYTES &&
                      !(device_ && device_->reads_directly()) &&
                      std::none_of(record.arrays, record.arrays + record.array_count, is_remote);
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
    ++stats.jobs;  // before the job is over, so that its caller finds it counted
    job.finish();
}

// Planning. `planning_` is true from here until a thread has planned, so that one thread at a time does.

// Whether a thread that waits may carry out all that is queued.
bool Reader::is_little() const {
    return queued_boxes_ <= HELPED_BOXES &&
           std::all_of(queue_.begin(), queue_.end(), [](const auto &batch) { return batch->is_small; });
}

int Reader::schedule_plan(bool for_later) noexcept {
    if (planning_ || queue_.empty()) return 0;
    i64 waiting = 0;
    std::erase_if(active_, [&](const std::weak_ptr<Wave> &one) {
        const std::shared_ptr<Wave> wave = one.lock();
        waiting += wave ? std::max<i64>(0, wave->unclaimed()) : 0;
        return !wave;
    });
    if (waiting > WAITING_TASKS) return 0;
    plan_work_->arm();
    Pool &pool = Pool::shared();
    const int state = for_later && is_little() ? pool.add_for_later(plan_work_) : pool.add(plan_work_, true);
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

// Start slabs that are not full, unless other waves go on filling them: fewer are carried out so.
void Reader::flush_if_idle() {
    if (!device_) return;
    {
        const std::lock_guard lock(mutex_);
        if (waves_ || planning_) return;
    }
    device_->flush_and_attend();
}

void Reader::help() noexcept {
    if (&Pool::shared() != pool_.load()) return;  // the pool of the parent process, whose locks no thread releases here
    std::shared_ptr<PlanWork> work;
    {
        const std::lock_guard lock(mutex_);
        if (!planning_ || !is_little()) return;
        work = plan_work_;
    }
    if (!Pool::shared().begin_help(*work)) return;
    {
        const Device::Current current(device_.get());
        plan(true);
    }
    Pool::shared().end_help();
}

void Reader::plan(bool helping) noexcept {
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
    for (const auto &batch : left) abandon(*batch, LC_CANCELLED);
    changed_.notify_all();
    stats.plan_seconds.fetch_add(now() - begin);
    if (!wave) flush_if_idle();
    i64 step;
    while ((alone || helping) && wave && wave->claim(step)) wave->run(step);
}

// Take boxes of what is queued until a wave is full; null where there are none.
std::shared_ptr<Wave> Reader::next_wave() {
    std::vector<std::shared_ptr<Batch>> batches;
    std::shared_ptr<Wave> wave;
    try {
        found_.clear();
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
        if (found_.boxes.empty()) return nullptr;
        stats.boxes += static_cast<i64>(found_.boxes.size());
        wave->arrange(found_, threads_, device_ ? device_->kept() : nullptr);
        stats.tasks += static_cast<i64>(wave->tasks.size());
        return wave;
    } catch (const std::exception &) {  // no memory: the jobs that were to be planned fail
        lc_error error{};
        error.code = LC_MEMORY;
        std::shared_ptr<Batch> next;
        if (batches.empty()) {
            // No memory for their list: one after another then, so that planning ends.
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
        for (const WantedBox &box : found_.boxes) settle(*box.job, 1);
        found_.boxes.clear();
        return nullptr;
    }
}

// Look at the metadata of the arrays of a batch once: regions of an array that was written anew are not read.
void Reader::look(Batch &batch) {
    if (batch.looks.empty()) return;
    const auto holds = [](const std::vector<Look> &looks) {
        return std::all_of(looks.begin(), looks.end(), [](const Look &one) { return one.holds(); });
    };
    std::vector<bool> changed;
    for (const std::vector<Look> &one : batch.looks) changed.push_back(!holds(one));
    batch.changed.swap(changed);
    batch.looks.clear();
}

void Reader::collect(Batch &batch) {
    look(batch);
    lc_error changed{};
    changed.code = LC_CHANGED;
    Regions &regions = batch.regions;
    const auto has_capacity = [this] { return static_cast<i64>(found_.boxes.size()) < WAVE_BOXES; };
    while (batch.next_region < regions.count() && has_capacity()) {
        Job &job = batch.job_of(batch.next_region);
        const size_t array = static_cast<size_t>(regions.array[static_cast<size_t>(batch.next_region)]);
        if (!batch.changed.empty() && batch.changed[array]) job.fail(changed);
        if (!batch.walk) batch.walk = std::make_unique<ChunkWalk>(regions, batch.next_region);
        ChunkWalk &walk = *batch.walk;
        for (; !walk.at_end() && has_capacity(); walk.next()) {
            if (job.given_up()) break;
            const ChunkBox &cut = found_.cuts.emplace_back(walk.box());
            WantedBox &box = found_.boxes.emplace_back(
                WantedBox{&batch, &job, cut.target, batch.next_region, cut.source_offset, {}, false});
            std::copy(cut.extent, cut.extent + LC_MAX_RANK, box.extent);
            job.expect(1);
        }
        if (!walk.at_end() && !job.given_up()) return;
        batch.walk.reset();
        ++batch.next_region;
        settle(job, 1);
    }
}

}  // namespace lc
