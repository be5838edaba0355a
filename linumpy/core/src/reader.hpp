// A reader: batches of regions → waves of stored objects → tasks of the pool's threads.
//
// A batch, the regions of one call, waits in the queue until a thread plans it. Planning cuts regions into boxes, one
// for each chunk that a region touches, and combines the boxes of the queue into a wave, in which each chunk is read
// once for all regions. A task reads some chunks of one stored object, decodes them, and copies their boxes to the
// outputs. To settle a box is to count it as done, whether it was written or failed. A job is over when its last box is
// settled.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "codecs.hpp"
#include "files.hpp"
#include "kept.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "shards.hpp"

namespace lc {

// One job of a caller. Python holds a handle; the core holds the job until it is over.
class Job {
public:
    explicit Job(i64 parts) : left_(parts), begin_(now()) {}

    // Whether the job has failed or is being cancelled: its outputs need not be written.
    bool is_abandoned() const { return failed_.load(std::memory_order_relaxed) || state_.load() == CANCELLING; }
    void fail(const lc_error &error);
    bool cancel();
    // `left_` counts the parts that the job waits for: boxes, and regions that are not planned yet. `expect` adds
    // boxes. `end` ends parts and returns whether they were the last ones: the caller must then call `finish`.
    void expect(i64 boxes) { left_.fetch_add(boxes, std::memory_order_relaxed); }
    bool end(i64 parts);
    void finish();
    bool is_over() const { return over_.load(std::memory_order_acquire); }
    bool wait(double seconds);
    lc_error error() const;
    lc_report report() const;

    std::atomic<i64> chunks{0}, filled{0}, decoded{0}, bytes_read{0}, files_opened{0}, decode_nanoseconds{0};
    std::atomic<i64> reads_repeated{0}, device_decode_nanoseconds{0}, device_scatter_nanoseconds{0};

private:
    enum State { RUNNING, CANCELLING, OVER };
    std::atomic<i64> left_;
    std::atomic<int> state_{RUNNING};
    std::atomic<bool> failed_{false}, over_{false};
    mutable std::mutex mutex_;
    std::condition_variable ended_;
    lc_error error_{};
    double begin_, end_ = 0;
};

// Number of an output (of one region) in the scatter tables of a slab, and whether the output's elements are contiguous
// along the last axis.
struct OutputHeader {
    u64 slab = 0;  // number of the slab
    u32 number = 0;
    bool is_contiguous = false;
};

// Regions of one call, until all their boxes are settled.
struct Batch {
    Regions regions;
    std::vector<std::shared_ptr<Job>> jobs;
    i64 number = 0;  // in the order of submission
    // For outputs on a device: scatter kernels, decode plan, and the event after which outputs may be written.
    const lc_scatter *scatter = nullptr;
    const lc_decode_plan *decode = nullptr;
    i64 ready = 0;
    // Metadata files of each array, until they are checked; `changed` then says which arrays have changed.
    std::vector<std::vector<FileState>> metadata_files;
    std::vector<bool> changed;
    bool timed = false;
    u64 slab = 0;  // number of the last slab that was queued with rows of this batch
    std::vector<OutputHeader> headers;  // of each region, in the last slab that was queued with rows of the region
    // Device memory of the batch for long chunks, and whether a slab uses the memory; guarded by the device's lock.
    i64 memory = 0;
    bool memory_is_used = false;
    i64 next_region = 0;  // the first region that is not planned completely
    std::unique_ptr<ChunkWalk> walk;  // position in that region; null: at the start
    i64 queued_boxes = 0;  // what the batch counts in the queue: its boxes, at most WAVE_BOXES
    bool is_small = false;  // a thread that waits for the batch may carry it out

    Job &job_of(i64 region) { return *jobs[jobs.size() == 1 ? 0 : static_cast<size_t>(region)]; }
};

struct KeptSlot;

// The part of one chunk that one region wants, in a wave.
struct WantedBox {
    Batch *batch;
    Job *job;
    u8 *target;
    i64 region, source_offset;
    i64 extent[LC_MAX_RANK];
    bool staged;  // whether a slab has a row for the box, and settles it when the slab ends
};

// The array of a box.
inline const std::shared_ptr<Array> &array_of(const WantedBox &box) {
    const Regions &regions = box.batch->regions;
    return regions.arrays[static_cast<size_t>(regions.array[static_cast<size_t>(box.region)])];
}

// A chunk of a wave, and the boxes that regions want of it.
struct WantedChunk {
    i64 inner;  // number of the chunk in its shard, in C order
    i64 coordinates[LC_MAX_RANK];
    u32 first_box, boxes, object;  // index of the first box, number of boxes, index of the stored object
    KeptSlot *slot;  // pinned slot that holds the chunk; null if it is read
};

// A chunk file or a shard: opened once for all tasks that read it, and closed by the last task.
struct StoredObject {
    Array *array;
    i64 coordinates[LC_MAX_RANK];
    u32 first_chunk, chunks;  // chunks to read
    std::atomic<i64> tasks_left{0};

    std::mutex mutex;
    bool located = false, missing = false;
    bool entered = false;  // whether a task has used the order of the chunks before the object was located
    File file;
    Version version;
    StoredRange range;
    std::shared_ptr<const ShardIndex> index;
    Failure failure;
    void end_task() {
        if (tasks_left.fetch_sub(1) != 1) return;
        file.close();
        index.reset();  // the index cache bounds the memory for indexes
    }
    // For kept chunks: whether the stored version was checked in this wave, and the version.
    bool version_checked = false;
    Version current_version;
};

// Boxes of the wave that is being planned, in the order of their regions; the next wave reuses the memory.
struct PlannedBoxes {
    std::vector<WantedBox> boxes;
    std::vector<ChunkBox> chunk_boxes;  // one for each box
    std::vector<std::pair<u64, u32>> order;  // sort key and index of each box, sorted
    void clear() {
        boxes.clear();
        chunk_boxes.clear();
    }
};

// The next wave is planned when at most this many tasks are unclaimed.
constexpr i64 WAITING_TASKS = 16;

// Chunks of one stored object to read; or, with object KEPT, chunks of any objects that are kept decoded.
struct Task {
    static constexpr u32 KEPT = UINT32_MAX;
    u32 object, first_chunk, chunks;
};

class Device;
class KeptChunks;
class PlanWork;
class Reader;
struct Row;
struct StagedChunk;

// Boxes that were planned together, and the tasks that read them.
class Wave : public Work, public std::enable_shared_from_this<Wave> {
public:
    Wave(std::shared_ptr<Reader> reader, std::vector<std::shared_ptr<Batch>> batches)
        : number(++last_number), reader_(std::move(reader)), batches_(std::move(batches)) {}
    ~Wave() override;
    // Group boxes by chunk and chunks by object, and create tasks. Kept chunks come first.
    void arrange(PlannedBoxes &planned, i64 threads, KeptChunks *kept);
    // Number of chunks to read.
    i64 missed() const { return static_cast<i64>(chunks.size()) - kept_; }
    bool claim(i64 &step) override;
    bool has_more() const override { return unclaimed() > 0; }
    void run(i64 step) noexcept override;
    i64 unclaimed() const { return static_cast<i64>(tasks.size()) - next_.load(); }

    std::vector<WantedBox> boxes;
    std::vector<WantedChunk> chunks;
    std::unique_ptr<StoredObject[]> objects;
    std::vector<Task> tasks;
    const i64 number;  // from 1 on, unique in the process

private:
    void group_boxes(PlannedBoxes &planned);
    void count_chunks(size_t first);
    void cut_tasks(i64 threads);
    template <class Number> void sort_tasks(size_t first, Number number_of);
    void sort_by_batch(size_t first);
    void interleave_shards(size_t first);
    void find_kept(KeptChunks &kept);
    void cut_kept_tasks();
    static inline std::atomic<i64> last_number{0};
    std::shared_ptr<Reader> reader_;
    std::vector<std::shared_ptr<Batch>> batches_;  // keeps alive what boxes point to
    std::atomic<i64> next_{0}, left_{0}, kept_left_{0};
    i64 kept_ = 0;  // number of kept chunks
    size_t objects_ = 0;  // number of stored objects
};

struct Stats {
    std::atomic<i64> jobs{0}, chunks{0}, boxes{0}, tasks{0}, bytes_read{0}, files_opened{0}, hedges{0}, decoded{0};
    std::atomic<double> plan_seconds{0}, read_seconds{0}, decode_seconds{0}, copy_seconds{0};
};

// The layout of a box in its decoded chunk and in its output.
Box layout_of(const Geometry &geometry, const WantedBox &box);
// Copy the boxes of a chunk to outputs in host memory. `decoded` has the bytes of the chunk from `first_byte` on.
void copy_boxes(const Wave &wave, const WantedChunk &chunk, const u8 *decoded, i64 first_byte);

class Reader : public std::enable_shared_from_this<Reader> {
public:
    Reader(i64 threads, i64 index_nbytes, const lc_device *device);
    ~Reader();

    // Queue a batch; false if the queue is full.
    bool submit(const lc_batch &batch, std::vector<std::shared_ptr<Job>> &jobs);
    bool wait_capacity(double seconds);
    void close();
    bool wait_closed(double seconds);

    void plan(bool helping = false) noexcept;
    // If the queue is small and no thread has begun it, carry it out on the calling thread, which waits for a job
    // anyway: waking another thread takes longer.
    void help() noexcept;
    void execute(Wave &wave, const Task &task) noexcept;
    void execute_kept(Wave &wave, const Task &task) noexcept;
    void use_kept(Wave &wave, const Task &task, std::vector<u32> &stale);
    void copy_kept(Wave &wave, std::span<const std::pair<u32, KeptSlot *>> hits);
    // Plan the queue if few tasks are left; called when a task begins.
    void plan_ahead();
    void end_wave();
    // End parts of a job, and finish the job if they were the last ones.
    void settle(Job &job, i64 parts) {
        if (!job.end(parts)) return;
        ++stats.jobs;  // before the job is over, so that its caller finds it counted
        job.finish();
    }
    // The device of the outputs; null for host memory.
    Device *device() const { return device_.get(); }
    // Give a reader of host memory a cache of decoded chunks in this memory, before the first batch.
    void keep_on_host(u8 *memory, i64 nbytes);
    // The cache of decoded chunks; null if none are kept.
    KeptChunks *kept() const;
    // The memory of a chunk that is kept on the host.
    u8 *kept_memory(const KeptSlot &slot) const { return kept_memory_ + slot.offset; }
    void decode_again(const StagedChunk &chunk, const std::vector<u8> &stored, std::vector<Row> &rows) noexcept;
    // Wake threads that wait for capacity, or until nothing is in flight.
    void note_progress() {
        // With the lock: a waiter must not miss the notification between checking its condition and sleeping.
        {
            const std::lock_guard lock(mutex_);
        }
        changed_.notify_all();
    }
    // Whether the reader is being closed. Then no further requests to object stores begin: they may take arbitrarily
    // long.
    const std::atomic<bool> &closing() const { return closing_; }

    IndexCache indexes;
    Stats stats;

private:
    std::shared_ptr<Array> known_array(const lc_array &array, const std::shared_ptr<const Geometry> &geometry);
    std::shared_ptr<Wave> next_wave();
    void collect(Batch &batch);
    void check_metadata_files(Batch &batch);
    void abandon(Batch &batch, i64 code);
    bool queue_is_small() const;
    int schedule_plan(bool deferred = false) noexcept;
    void flush_if_idle();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::list<std::shared_ptr<Batch>> queue_;  // a list, because constructing an empty list allocates no memory
    std::vector<std::weak_ptr<Wave>> active_;
    std::shared_ptr<PlanWork> plan_work_;
    std::atomic<const Pool *> pool_{nullptr};  // the pool that plans; a forked child has another one
    PlannedBoxes planned_;  // used by the planning thread
    std::unordered_map<std::string, std::weak_ptr<Array>> arrays_;
    i64 queued_boxes_ = 0, waves_ = 0, batches_ = 0, threads_;
    bool planning_ = false;
    std::atomic<bool> closing_{false};  // written with the lock held
    std::unique_ptr<Device> device_;
    std::unique_ptr<KeptChunks> kept_;  // on the host
    u8 *kept_memory_ = nullptr;
};

}  // namespace lc
