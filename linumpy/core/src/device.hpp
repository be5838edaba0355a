// Slabs: filled by the pool's threads, then copied, decoded and scattered, each on its own stream.
//
// A slab is pinned host memory and a stream. There is at most one open slab of each kind (raw, kept chunks, or one
// decode plan). A thread reserves a range of the open slab, fills it, and commits the range with its rows. A full slab
// is sealed. The copies and kernels of a sealed slab are queued as soon as a slot of device memory is free. One thread
// at a time waits for slabs to end, in order, and settles their jobs.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "driver.hpp"
#include "kept.hpp"
#include "reader.hpp"

namespace lc {

// One box that the scatter kernel copies.
struct Row {
    Batch *batch;
    Job *job;
    u8 *target;
    i64 region, source;  // source: offset of the first byte in the raw, decoded or kept chunks; -1: fill value
    i64 extent[LC_MAX_RANK];
};

// Whether any job still wants one of these rows.
inline bool is_wanted(std::span<const Row> rows) {
    return std::any_of(rows.begin(), rows.end(), [](const Row &row) { return !row.job->is_abandoned(); });
}

// A stored chunk that the device decodes. If the device fails, the host decodes the chunk by the same record.
struct StagedChunk {
    std::shared_ptr<Wave> wave;
    u32 object, chunk;
    i64 offset, nbytes;  // in the stored object
    i64 source;  // offset in the slab's stored bytes
    u32 first_row, rows;  // rows of the slab that need the chunk
    KeptSlot *slot = nullptr;  // slot of the cache to fill; null: none
};

// Stored bytes that GPUDirect Storage reads into a slab when the slab starts, and the rows of the slab and the slots of
// the cache that need the bytes.
struct DirectRead {
    std::shared_ptr<Wave> wave;
    u32 object, chunk;  // the stored object, and the first chunk that is read
    i64 offset, nbytes;  // in the stored object
    i64 slab_offset = 0;  // in the slab's stored bytes
    u32 first_row = 0, rows = 0, first_fill = 0, fills = 0;
};

// A slot of the cache that a slab fills with a decoded chunk.
struct KeptFill {
    KeptSlot *slot;
    i64 source;  // as for Row
    i64 chunk;  // index of the chunk in `Slab::chunks`, which the device decodes; -1: the slab has the decoded chunk
    bool is_broken = false;  // the bytes of the chunk were not read
};

// Slots of the cache that a slab reads, and slots that it fills. All are pinned.
struct KeptUse {
    std::vector<KeptSlot *> read;
    std::vector<KeptFill> filled;
};

// The plan of slabs whose rows are copied from kept chunks: only tables are copied to the device.
inline constexpr lc_decode_plan KEPT_PLAN{};

// Size in bytes of each of the two records that the decoders have for a chunk, and number of counters before them.
inline constexpr i64 RECORD_NBYTES = 40, COUNTERS = 4;
// Padding in bytes before and after stored bytes: the decoders read whole words.
inline constexpr i64 MARGIN = 256;

struct Slab {
    const lc_decode_plan *plan = nullptr;  // null: raw chunks; KEPT_PLAN: kept chunks
    u8 *pinned = nullptr;  // stored bytes
    u8 *words = nullptr;  // pinned memory for tables, records and status
    i64 pinned_nbytes = 0;
    DevicePointer device = 0;  // device memory of the slab while it is in flight
    Stream stream = nullptr;
    Event done = nullptr;
    // Before the copy to the device, after it, after the decoders and after the scatter kernels; created when the slab
    // is first timed.
    Event marks[4] = {};
    bool timed = false;
    i64 copied_nbytes = 0;
    double opened = 0;  // time
    i64 used = 0, weight = 0;  // bytes of all reserved ranges, and the weights of their chunks
    i64 reserved_rows = 0, reserved_chunks = 0;
    i64 writers = 0;  // ranges that are reserved but not committed, and 1 while the slab is open
    std::vector<Row> rows;
    std::vector<StagedChunk> chunks;
    std::vector<DirectRead> reads;
    std::vector<std::pair<i64, i64>> copies;  // with GPUDirect Storage: ranges of stored bytes to copy to the device
    std::vector<KeptSlot *> read;  // slots of the cache that rows are copied from
    std::vector<KeptFill> filled;
    std::vector<std::shared_ptr<Wave>> waves;  // waves that the rows refer to
    std::string error;  // why the device failed; empty: it did not

    bool decodes() const { return plan && plan != &KEPT_PLAN; }
    // Size of the stored bytes with padding; the other parts of the slab in device memory begin after it.
    i64 padded_stored_nbytes() const { return (used + 255) / 256 * 256; }
};

// A range of a slab that one thread fills, or that is read directly.
struct Range {
    Slab *slab = nullptr;
    u8 *memory = nullptr;
    i64 offset = 0, nbytes = 0;
    std::optional<DirectRead> read = {};  // the read that fills the range when the slab starts
};

// Estimate the bytes that a chunk takes in a slab in addition to its `stored` bytes, as linumpy.plan.decode.workspace.
inline i64 weight_of(const lc_decode_plan &plan, i64 stored) {
    const double of_stored = static_cast<double>(stored), of_decoded = static_cast<double>(plan.chunk_nbytes);
    const double pool = std::min({4.0 * of_stored, 2.75 * of_stored + 0.22 * of_decoded, 1.5 * of_decoded});
    return plan.each + (plan.has_pool ? std::max<i64>(0, static_cast<i64>(pool) + 256 - plan.reordered) : 0);
}

class Device {
public:
    Device(const lc_device &record, Reader &reader);
    ~Device();
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // Set the device memory: contiguous slots, and memory for kept chunks.
    void set_memory(DevicePointer slots, DevicePointer kept, i64 kept_nbytes);
    // Maximum length in bytes of a range of a slab; maximum number of rows in a slab.
    i64 capacity(const lc_decode_plan *plan) const { return plan ? plan->stored_nbytes : record_.pinned_nbytes; }
    i64 max_rows() const { return record_.rows; }
    // Whether stored bytes are read by GPUDirect Storage.
    bool reads_directly() const { return record_.direct != nullptr; }
    // Reserve a range of a slab, and wait until one is free; throws DriverError. The calling thread must not hold
    // another range. `offset`: offset in the file of the bytes to read.
    Range reserve(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks = 0, i64 weight = 0, i64 offset = 0);
    // Commit a filled range, with the rows that read it and the wave that they refer to; or give up the range.
    void commit(Range range, std::shared_ptr<Wave> wave, const std::vector<Row> &rows,
                std::vector<StagedChunk> chunks = {}, const KeptUse &kept = {});
    void cancel(Range range) { commit(range, nullptr, {}); }
    // Seal all open slabs, so that small jobs do not wait for full slabs.
    void flush();
    // As `flush`, on an idle thread. The thread then waits for the oldest slab in flight for a short time, so that the
    // device's thread need not be woken.
    void flush_and_attend();
    void flush_kept();  // seal the open slab of kept chunks
    void flush_old();  // seal the slabs that have been open for more than 2 ms
    bool start_sealed();
    // Restores the CUDA context of a caller's thread when it goes out of scope.
    class ContextGuard {
    public:
        explicit ContextGuard(const Device *device);
        ~ContextGuard();
        ContextGuard(const ContextGuard &) = delete;
        ContextGuard &operator=(const ContextGuard &) = delete;

    private:
        const Device *device_;
        void *before_ = nullptr;
    };
    // Free streams and pinned memory; nothing may be in flight, now or later.
    void release();
    // Whether nothing is in flight. May be called with or without the reader's lock.
    bool idle();
    void add_to(lc_stats &stats) const;
    // The cache of decoded chunks; null if none are kept.
    KeptChunks *kept() const { return kept_.get(); }
    i64 chunks_in_flight() const { return decoding_.load(); }
    // Count work in the pool that belongs to the device. While there is such work, `idle` is false.
    void begin_background() { ++background_; }
    void end_background() { --background_; }

private:
    Slab *take_open(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks, i64 weight);
    Slab *open_free(const lc_decode_plan *plan);
    void allocate(Slab &slab, i64 nbytes);
    void flush_before(double limit);
    void start(Slab *slab);
    void start_some();
    void start_in_pool();
    bool take_memory(Slab &slab);
    void return_memory(Slab &slab);
    i64 slots_of(const Slab &slab) const { return slab.decodes() ? slab.plan->slots : 1; }
    bool is_page_aligned(const lc_decode_plan *plan, i64 nbytes, i64 weight, i64 offset) const;
    void read_direct(Slab &slab);
    void copy_stored(Slab &slab, i64 nbytes);
    void copy_back(Slab &slab);
    const int32_t *status_of(const Slab &slab) const {
        return reinterpret_cast<const int32_t *>(slab.words + words_nbytes_ - 4 * record_.rows);
    }
    void queue(Slab &slab);
    void finish_stream(Slab &slab) noexcept;
    void mark(Slab &slab, int number);
    void add_times(Slab &slab);
    void write_scatter(Slab &slab, DevicePointer source, DevicePointer words);
    void launch_decoders(Slab &slab);
    bool await(Slab &slab, bool briefly) noexcept;
    void complete(Slab *slab);
    void loop();
    void end_kept(Slab &slab);
    // Whether the host must decode a chunk: the device failed to decode it, and a job still wants it.
    bool needs_host(const Slab &slab, size_t index) const {
        const StagedChunk &chunk = slab.chunks[index];
        return status_of(slab)[index] && is_wanted({slab.rows.data() + chunk.first_row, chunk.rows});
    }
    void end(Slab &slab);

    lc_device record_;
    // Sizes of the scatter tables of a slab, of its records for the decoders, and of all its words. The words also hold
    // zeros, which initialise the status of chunks on the device, and the status of chunks, copied from the device.
    i64 table_nbytes_, records_nbytes_, words_nbytes_;
    Reader &reader_;
    const Driver &driver_;
    std::mutex mutex_, starting_;
    std::condition_variable freed_, started_;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::vector<Slab *> free_;
    std::unordered_map<const lc_decode_plan *, Slab *> open_;
    std::deque<Slab *> sealed_, in_flight_;
    std::vector<DevicePointer> free_memory_;
    i64 page_offset_ = 0;  // offset of a slot from a page boundary, equal for all slots
    std::atomic<double> oldest_{0};  // when the oldest open slab was opened; 0 for none
    std::atomic<i64> decoding_{0}, background_{0}, slabs_done_{0};
    // Of timed slabs.
    std::atomic<i64> copies_{0}, copied_nbytes_{0}, slabs_decoded_{0}, decoded_nbytes_{0};
    std::atomic<i64> copy_nanoseconds_{0}, decode_nanoseconds_{0}, scatter_nanoseconds_{0};
    u64 slabs_begun_ = 0;
    std::unique_ptr<KeptChunks> kept_;
    DevicePointer kept_memory_ = 0;
    Batch keep_;  // batch of the rows that fill slots: one-dimensional bytes
    i64 busy_ = 0;  // slabs that are open, sealed or in flight
    bool ending_ = false;
    bool attended_ = false;  // whether a thread waits for a slab to end
    std::thread thread_;
};

}  // namespace lc
