// A reader: batches of regions → waves of stored objects → tasks of the pool's threads.
//
// A batch waits in the queue until a thread plans it. Planning brings what is queued together in a wave, in which each
// chunk is read once, for all regions that touch it. A task reads some chunks of one stored object, decodes them, and copies their
// boxes to the outputs. A job is over when its last box is settled.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "codecs.hpp"
#include "files.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "shards.hpp"

namespace lc {

// One job of a caller. Python holds a handle; the core holds it until it is over.
class Job {
public:
    explicit Job(i64 parts) : left_(parts), begin_(now()) {}

    bool given_up() const { return failed_.load(std::memory_order_relaxed) || state_.load() == CANCELLING; }
    void fail(const lc_error &error);
    bool cancel();
    // Boxes to come, and parts that have ended; `end` says whether these were the last, after which the job is finished.
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

// Number of an output in the scatter tables of one slab, and whether its elements are neighbours along the last axis.
struct OutputHeader {
    u64 slab = 0;
    u32 number = 0;
    bool neighbours = false;
};

// Regions of one call, in the queue.
struct Batch {
    Regions regions;
    std::vector<std::shared_ptr<Job>> jobs;
    i64 number = 0;  // in the order of submission
    // On a device: kernels, and the event behind which outputs may be written.
    const lc_scatter *scatter = nullptr;
    const lc_decode_plan *decode = nullptr;
    i64 ready = 0;
    // Files of the metadata of each array, until they were looked at; then which arrays were written anew.
    std::vector<std::vector<Look>> looks;
    std::vector<bool> changed;
    bool timed = false;
    // Of the slab whose tables are being written; one at a time is.
    u64 slab = 0;
    std::vector<OutputHeader> headers;
    // Device memory of its own for long chunks, and whether a slab uses it; the device's lock guards it.
    i64 memory = 0;
    bool memory_is_used = false;
    i64 next_region = 0;
    std::unique_ptr<ChunkWalk> walk;
    i64 queued_boxes = 0;
    bool is_small = false;  // a thread that waits for it may carry it out

    Job &job_of(i64 region) { return *jobs[jobs.size() == 1 ? 0 : static_cast<size_t>(region)]; }
};

struct KeptSlot;

struct WantedBox {
    Batch *batch;
    Job *job;
    u8 *target;
    i64 region, source_offset;
    i64 extent[LC_MAX_RANK];
    bool staged;  // a slab settles it
};

struct WantedChunk {
    i64 inner;
    i64 coordinates[LC_MAX_RANK];
    u32 first_box, boxes, object;
    KeptSlot *slot;  // that holds it, pinned; null where it is read
};

// A chunk file or a shard: opened once for all tasks that read it, and closed by the last.
struct StoredObject {
    Array *array;
    i64 coordinates[LC_MAX_RANK];
    u32 first_chunk, chunks;  // that are read
    std::atomic<i64> tasks_left{0};

    std::mutex mutex;
    bool located = false, missing = false;
    bool entered = false;  // whether a task has looked at its chunks before it was located
    File file;
    Version version;
    StoredRange range;
    std::shared_ptr<const ShardIndex> index;
    Failure failure;
    void end_task() {
        if (tasks_left.fetch_sub(1) != 1) return;
        file.close();
        index.reset();  // the cache bounds the memory of those that are kept
    }
    // For chunks that are kept: the version that is there now.
    bool looked = false;
    Version seen;
};

// Boxes of a wave as planning finds them, region by region; memory that the next wave uses again.
struct FoundBoxes {
    std::vector<WantedBox> boxes;
    std::vector<ChunkBox> cuts;  // one for each box
    std::vector<std::pair<u64, u32>> order;  // their numbers, sorted
    void clear() {
        boxes.clear();
        cuts.clear();
    }
};

// Tasks that wait for a thread while further ones are planned.
constexpr i64 WAITING_TASKS = 16;

// Chunks of one object that are read; or, without an object, chunks that are kept on the device.
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

class Wave : public Work, public std::enable_shared_from_this<Wave> {
public:
    Wave(std::shared_ptr<Reader> reader, std::vector<std::shared_ptr<Batch>> batches)
        : number(++last_number), reader_(std::move(reader)), batches_(std::move(batches)) {}
    ~Wave() override;
    // Bring boxes together: chunks, objects, tasks. Chunks that are kept come first.
    void arrange(FoundBoxes &found, i64 threads, KeptChunks *kept);
    // Chunks that are read.
    i64 missed() const { return static_cast<i64>(chunks.size()) - kept_; }
    bool claim(i64 &step) override;
    bool has_more() const override { return unclaimed() > 0; }
    void run(i64 step) noexcept override;
    i64 unclaimed() const { return static_cast<i64>(tasks.size()) - next_.load(); }

    std::vector<WantedBox> boxes;
    std::vector<WantedChunk> chunks;
    std::unique_ptr<StoredObject[]> objects;
    std::vector<Task> tasks;
    const i64 number;  // from 1 on, of those of the process

private:
    void bring_together(FoundBoxes &found);
    void count_chunks(size_t first);
    void cut_read(i64 threads);
    template <class Number> void sort_tasks(size_t first, Number number_of);
    void put_first_batches_first(size_t first);
    void take_turns(size_t first);
    void find_kept(KeptChunks &kept);
    void cut_kept();
    static inline std::atomic<i64> last_number{0};
    std::shared_ptr<Reader> reader_;
    std::vector<std::shared_ptr<Batch>> batches_;  // boxes refer to them
    std::atomic<i64> next_{0}, left_{0}, kept_left_{0};
    i64 kept_ = 0;  // chunks
    size_t objects_ = 0;
};

struct Stats {
    std::atomic<i64> jobs{0}, chunks{0}, boxes{0}, tasks{0}, bytes_read{0}, files_opened{0}, decoded{0};
    std::atomic<double> plan_seconds{0}, read_seconds{0}, decode_seconds{0}, copy_seconds{0};
};

class Reader : public std::enable_shared_from_this<Reader> {
public:
    Reader(i64 threads, i64 index_nbytes, const lc_device *device);
    ~Reader();

    // Queue a batch; false where too much is queued.
    bool submit(const lc_batch &batch, std::vector<std::shared_ptr<Job>> &jobs);
    bool wait_capacity(double seconds);
    void close();
    bool wait_closed(double seconds);

    void plan(bool helping = false) noexcept;
    // Carry out what is queued on the calling thread, which waits for it, where it is little and no thread has begun it:
    // to wake a thread takes longer.
    void help() noexcept;
    void execute(Wave &wave, const Task &task) noexcept;
    void execute_kept(Wave &wave, const Task &task) noexcept;
    void stage_kept(Wave &wave, const Task &task, std::vector<u32> &stale);
    // Plan what is queued if there is little left to do; called when a task is begun.
    void plan_ahead();
    void end_wave();
    // Settle parts of a job.
    void settle(Job &job, i64 parts);
    // The device that outputs lie on; null for host memory.
    Device *device() const { return device_.get(); }
    void decode_again(const StagedChunk &chunk, const std::vector<u8> &stored, std::vector<Row> &rows) noexcept;
    void note_progress();
    // Requests to object stores that have not begun by then do not: each takes as long as the network wants.
    const std::atomic<bool> &closing() const { return closing_; }

    IndexCache indexes;
    Stats stats;

private:
    std::shared_ptr<Array> known_array(const lc_array &array, const std::shared_ptr<const Geometry> &geometry);
    std::shared_ptr<Wave> next_wave();
    void collect(Batch &batch);
    void look(Batch &batch);
    void abandon(Batch &batch, i64 code);
    bool is_little() const;
    int schedule_plan(bool for_later = false) noexcept;
    void flush_if_idle();

    std::mutex mutex_;
    std::condition_variable changed_;
    std::list<std::shared_ptr<Batch>> queue_;  // an empty one takes no memory
    std::vector<std::weak_ptr<Wave>> active_;
    std::shared_ptr<PlanWork> plan_work_;
    std::atomic<const Pool *> pool_{nullptr};  // that plans; a forked child has another one
    FoundBoxes found_;  // of the thread that plans
    std::unordered_map<std::string, std::weak_ptr<Array>> arrays_;
    i64 queued_boxes_ = 0, waves_ = 0, batches_ = 0, threads_;
    bool planning_ = false;
    std::atomic<bool> closing_{false};  // written with the lock held
    std::unique_ptr<Device> device_;
};

}  // namespace lc
