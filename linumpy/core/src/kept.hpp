// The cache of decoded chunks, on the device or in host memory. Pure bookkeeping of one address range: copies nothing, calls no driver.
//
// The range is cut into segments, and each segment into slots of one size. A slot is empty, is being filled, or holds a
// published chunk, which can be found. A slab in flight pins the slots that it reads or fills; a pinned slot is not
// reused for another chunk. The least recently used chunk is evicted. If chunks have several sizes, a segment of
// another size is freed and cut anew if all its chunks were last used before the least recently used chunk of the
// wanted size.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "files.hpp"
#include "plan.hpp"

namespace lc {

struct KeptSegment;

struct KeptSlot {
    i64 offset;  // from the beginning of the address range
    i64 nbytes;  // size of the chunk
    Version version;  // of the stored object that the chunk was read from

private:
    friend class KeptChunks;
    std::shared_ptr<const Array> array;  // null: empty
    i64 coordinates[LC_MAX_RANK];  // of the chunk
    u64 hash;
    u32 pins = 0;
    bool is_ready = false;  // whether the chunk is published
    bool is_listed = false;  // whether the slot is in the table of chunks
    u64 used = 0;  // when the slot was last used, in ticks of the clock
    KeptSegment *segment = nullptr;
    KeptSlot *newer = nullptr, *older = nullptr;  // neighbours in the list of its kind
};

class KeptChunks {
public:
    explicit KeptChunks(i64 nbytes);
    ~KeptChunks();
    KeptChunks(const KeptChunks &) = delete;
    KeptChunks &operator=(const KeptChunks &) = delete;

    // The calls below require this lock, which is taken once for many chunks.
    [[nodiscard]] std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

    // The slot of a published chunk, pinned; null if there is none.
    KeptSlot *find(const Array &array, const i64 *coordinates);
    // A slot to fill with a chunk, pinned; null if the chunk is kept or being read, or no slot is free.
    KeptSlot *reserve(const std::shared_ptr<const Array> &array, const i64 *coordinates, const Version &version);
    // Pin a pinned slot again.
    void pin(KeptSlot &slot) { ++slot.pins; }
    void unpin(KeptSlot &slot);
    // Publish the chunk of a slot that has been filled: `find` returns it from now on.
    void publish(KeptSlot &slot) {
        slot.is_ready = true;
        changed_.notify_all();
    }
    // Whether the chunk is published, or a slot was reserved for it.
    bool is_listed(const Array &array, const i64 *coordinates) const;
    // Wait, for 2 ms at most, until no slot is being filled with the chunk; returns whether that is so, and its slot as
    // `find` does.
    std::pair<bool, KeptSlot *> wait_filled(std::unique_lock<std::mutex> &lock, const Array &array,
                                            const i64 *coordinates);
    // Remove the chunk of a slot from the cache: `find` no longer returns it.
    void forget(KeptSlot &slot);

    i64 kept_nbytes() const { return kept_nbytes_.load(std::memory_order_relaxed); }
    std::atomic<i64> hits{0}, misses{0};

private:
    // A list of slots, newest first, linked through the slots.
    struct List {
        KeptSlot *newest = nullptr, *oldest = nullptr;
        void push(KeptSlot &slot);
        void remove(KeptSlot &slot);
    };
    // Slots of one size: empty slots, and unpinned slots that hold a chunk.
    struct Kind { List empty, unpinned; };
    friend struct KeptSegment;

    KeptSlot *look_up(const Array &array, const i64 *coordinates, u64 hash) const;
    void list(KeptSlot &slot);
    void unlist(KeptSlot &slot);
    void evict(KeptSlot &slot);
    KeptSlot *take(i64 slot_nbytes);
    bool cut_segment(i64 slot_nbytes, Kind &kind);
    std::list<KeptSegment>::iterator oldest_segment(const Kind &kind);
    void free_segment(std::list<KeptSegment>::iterator segment);
    void grow_table(size_t slots);

    std::mutex mutex_;
    std::condition_variable changed_;  // notified when a chunk is published or forgotten
    std::map<i64, i64> free_;  // offset → bytes of ranges outside of all segments
    std::list<KeptSegment> segments_;
    std::map<i64, Kind> kinds_;  // by slot size in bytes
    std::vector<KeptSlot *> table_;  // hash table of chunks: linear probing, at most half full
    size_t slots_ = 0;
    u64 clock_ = 0;  // advances by one at each use of a slot
    std::atomic<i64> kept_nbytes_{0};
};

}  // namespace lc
