// Slabs on their way to a device: filled by the pool's threads, copied, decoded and scattered on a stream of their own.
//
// A slab is pinned host memory and a stream. Threads reserve a range of the open slab of a kind (raw, or one decode
// plan), fill it, and commit the rows that it serves. A full slab is sealed; where there is a slot of device memory for
// it, its copies and kernels are queued, else when another slab ends. One thread waits for the ends of slabs, in order,
// and settles their jobs.
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
    i64 region, source;  // first byte, from where raw or decoded chunks begin in the slab; -1: fill value
    i64 extent[LC_MAX_RANK];
};

bool is_wanted(std::span<const Row> rows);

// A stored chunk that the device decodes, with what the host needs to decode it instead.
struct StagedChunk {
    std::shared_ptr<Wave> wave;
    u32 object, chunk;
    i64 offset, nbytes;  // in the stored object
    i64 source;  // first byte in the slab's stored bytes
    u32 first_row, rows;
    KeptSlot *slot = nullptr;  // to fill
};

// Stored bytes that are read into a slab by GPUDirect Storage when it is started, and the rows and slots of
// kept chunks that need them.
struct DirectRead {
    std::shared_ptr<Wave> wave;
    u32 object, chunk;  // the first one of its chunks
    i64 offset, nbytes;  // in the stored object
    i64 slab_offset = 0;  // in the slab's stored bytes
    u32 first_row = 0, rows = 0, first_fill = 0, fills = 0;
};

// A slot that a slab fills with a decoded chunk.
struct KeptFill {
    KeptSlot *slot;
    i64 source;  // first byte, as that of a row
    i64 chunk;  // number of the chunk among those that the slab decodes; -1: decoded already
    bool is_broken = false;  // its bytes were not read
};

// Slots that a slab reads, a pin for each, and slots that it fills.
struct KeptUse {
    std::vector<KeptSlot *> read;
    std::vector<KeptFill> filled;
};

// Instead of a plan: rows of a slab are copied from chunks that are kept, and nothing is copied up but tables.
inline constexpr lc_decode_plan KEPT{};

// Bytes of the records that the decoders read of each chunk, and counters before them.
inline constexpr i64 RECORD_NBYTES = 40, COUNTERS = 4;
// Free bytes before and behind stored ones: the decoders look at whole words.
inline constexpr i64 MARGIN = 256;

struct Slab {
    const lc_decode_plan *plan = nullptr;  // null: raw; or KEPT
    u8 *pinned = nullptr, *words = nullptr;
    i64 pinned_nbytes = 0;
    DevicePointer device = 0;  // while it is under way
    Stream stream = nullptr;
    Event done = nullptr;
    // Before the copy up, behind it, behind the decoders and behind the scatter kernels; made for the first slab that is
    // timed.
    Event marks[4] = {};
    bool timed = false;
    i64 copied_nbytes = 0;
    double opened = 0;
    i64 used = 0, weight = 0, reserved_rows = 0, reserved_chunks = 0, writers = 0;
    std::vector<Row> rows;
    std::vector<StagedChunk> chunks;
    std::vector<DirectRead> reads;
    std::vector<std::pair<i64, i64>> copies;  // stored bytes that are copied up where others are read directly
    std::vector<KeptSlot *> read;
    std::vector<KeptFill> filled;
    std::vector<std::shared_ptr<Wave>> waves;
    std::string error;

    bool decodes() const { return plan && plan != &KEPT; }
    // Bytes by which what lies behind the stored ones is moved back.
    i64 stored_room() const { return (used + 255) / 256 * 256; }
};

// A range of a slab that one thread fills, or has read directly.
struct Range {
    Slab *slab = nullptr;
    u8 *memory = nullptr;
    i64 offset = 0, nbytes = 0;
    std::optional<DirectRead> read = {};
};

// Estimate the bytes that a chunk of a slab takes beyond its stored ones.
inline i64 weight_of(const lc_decode_plan &plan, i64 stored) {
    const double bytes = static_cast<double>(stored), whole = static_cast<double>(plan.chunk_nbytes);
    const double pool = std::min({4.0 * bytes, 2.75 * bytes + 0.22 * whole, 1.5 * whole});
    return plan.each + (plan.has_pool ? std::max<i64>(0, static_cast<i64>(pool) + 256 - plan.reordered) : 0);
}

class Device {
public:
    Device(const lc_device &record, Reader &reader);
    ~Device();
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;

    // Its memory: `slabs` slots, one behind the other, and that for chunks that are kept.
    void give_memory(DevicePointer slots, DevicePointer kept, i64 kept_nbytes);
    // Bytes that one range may have; rows of a slab.
    i64 capacity(const lc_decode_plan *plan) const { return plan ? plan->stored_nbytes : record_.pinned_nbytes; }
    i64 most_rows() const { return record_.rows; }
    // Whether stored bytes are read by GPUDirect Storage.
    bool reads_directly() const { return record_.direct != nullptr; }
    // Wait for memory in a slab; throws DriverError. A thread must not hold another range meanwhile. `offset` is that of
    // the bytes in their file.
    Range reserve(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks = 0, i64 weight = 0, i64 offset = 0);
    // Hand over what a range holds, with the wave that its rows refer to; or give it up.
    void commit(Range range, std::shared_ptr<Wave> wave, const std::vector<Row> &rows,
                std::vector<StagedChunk> chunks = {}, const KeptUse &kept = {});
    void give_up(Range range) { commit(range, nullptr, {}); }
    // Start what is in open slabs, or in those that have been open for long: small jobs wait for no others to fill them.
    void flush();
    // The same, on a thread that has nothing else to do: it waits for them a short while in place of the device's thread,
    // which need not be woken then.
    void flush_and_attend();
    void flush_kept();
    void flush_old();
    bool start_sealed();
    // Leaves the context of a caller's thread as it was.
    class Current {
    public:
        explicit Current(const Device *device);
        ~Current();
        Current(const Current &) = delete;
        Current &operator=(const Current &) = delete;

    private:
        const Device *device_;
        void *before_ = nullptr;
    };
    // Give streams and pinned memory back: nothing is under way any more, and nothing will be.
    void release();
    // Whether nothing is under way; the lock of the reader is not needed.
    bool idle();
    void add_to(lc_stats &stats) const;
    // Chunks that are kept; null where none are.
    KeptChunks *kept() const { return kept_.get(); }
    i64 chunks_in_flight() const { return decoding_.load(); }
    void begin_retry() { ++retries_; }
    void end_retry() { --retries_; }

private:
    Slab *take_open(const lc_decode_plan *plan, i64 nbytes, i64 rows, i64 chunks, i64 weight);
    void allocate(Slab &slab, i64 nbytes);
    void flush_before(double limit);
    void start(Slab *slab);
    void start_some();
    void start_in_pool();
    bool take_memory(Slab &slab);
    void give_memory_back(Slab &slab);
    i64 slots_of(const Slab &slab) const { return slab.decodes() ? slab.plan->slots : 1; }
    bool keeps_pages(const lc_decode_plan *plan, i64 nbytes, i64 weight, i64 offset) const;
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
    bool needs_host(const Slab &slab, size_t chunk) const;
    void end(Slab &slab);

    lc_device record_;
    // Bytes of the parts of a slab's words: scatter tables, records of the decoders, and zeros and status of chunks.
    i64 table_nbytes_, records_nbytes_, words_nbytes_;
    Reader &reader_;
    const Driver &driver_;
    std::mutex mutex_, starting_;
    std::condition_variable freed_, started_;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::vector<Slab *> free_;
    std::unordered_map<const lc_decode_plan *, Slab *> open_;
    std::deque<Slab *> sealed_, under_way_;
    std::vector<DevicePointer> free_memory_;
    i64 first_byte_ = 0;  // of a slot in its page: slots are whole pages apart
    std::atomic<double> oldest_{0};  // when the oldest open slab was opened; 0 for none
    std::atomic<i64> decoding_{0}, retries_{0}, slabs_done_{0};
    // Of slabs that were timed.
    std::atomic<i64> copies_{0}, copied_nbytes_{0}, slabs_decoded_{0}, decoded_nbytes_{0};
    std::atomic<i64> copy_nanoseconds_{0}, decode_nanoseconds_{0}, scatter_nanoseconds_{0};
    u64 slabs_begun_ = 0;
    std::unique_ptr<KeptChunks> kept_;
    DevicePointer kept_at_ = 0;
    Batch keep_;  // of the rows that fill slots: bytes of one dimension
    i64 busy_ = 0;
    bool ending_ = false, attended_ = false;  // whether a thread waits for the end of a slab
    std::thread thread_;
};

}  // namespace lc
