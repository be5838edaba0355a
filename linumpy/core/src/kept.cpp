#include "kept.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>

namespace lc {
namespace {

constexpr i64 SEGMENT_NBYTES = 64 << 20;
// Alignment of slots, sufficient for every unit of the scatter kernels.
constexpr i64 SLOT_ALIGN = 256;
// Maximum number of slots in all segments: their records take host memory.
constexpr size_t MAX_SLOTS = size_t(1) << 22;

u64 hash_of(const Array &array, const i64 *coordinates) {
    u64 hash = reinterpret_cast<u64>(&array) >> 4;
    for (i64 a = 0; a < array.geometry->rank; ++a) {
        hash = (hash ^ static_cast<u64>(coordinates[a])) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 29;
    }
    return hash;
}

}  // namespace

struct KeptSegment {
    i64 offset, slot_nbytes;
    KeptChunks::Kind *kind;
    std::vector<KeptSlot> slots;
    i64 pinned = 0;  // number of pinned slots
    u64 used = 0;    // when one of its slots was last used, in ticks of the clock
};

KeptChunks::KeptChunks(i64 nbytes) {
    if (nbytes > 0) free_[0] = nbytes;
}

KeptChunks::~KeptChunks() = default;

void KeptChunks::List::push(KeptSlot &slot) {
    slot.newer = nullptr;
    slot.older = newest;
    (newest ? newest->newer : oldest) = &slot;
    newest = &slot;
}

void KeptChunks::List::remove(KeptSlot &slot) {
    (slot.newer ? slot.newer->older : newest) = slot.older;
    (slot.older ? slot.older->newer : oldest) = slot.newer;
}

KeptSlot *KeptChunks::look_up(const Array &array, const i64 *coordinates, u64 hash) const {
    if (table_.empty()) return nullptr;
    const size_t mask = table_.size() - 1;
    for (size_t entry = hash & mask; KeptSlot *slot = table_[entry]; entry = (entry + 1) & mask)
        if (slot->hash == hash && slot->array.get() == &array &&
            std::equal(coordinates, coordinates + array.geometry->rank, slot->coordinates))
            return slot;
    return nullptr;
}

KeptSlot *KeptChunks::find(const Array &array, const i64 *coordinates) {
    KeptSlot *slot = look_up(array, coordinates, hash_of(array, coordinates));
    if (!slot || !slot->is_ready) return nullptr;
    if (!slot->pins++) {
        slot->segment->kind->unpinned.remove(*slot);
        ++slot->segment->pinned;
    }
    return slot;
}

bool KeptChunks::is_listed(const Array &array, const i64 *coordinates) const {
    return look_up(array, coordinates, hash_of(array, coordinates)) != nullptr;
}

std::pair<bool, KeptSlot *> KeptChunks::wait_filled(std::unique_lock<std::mutex> &lock, const Array &array,
                                                    const i64 *coordinates) {
    KeptSlot *found = nullptr;
    const bool is_over = changed_.wait_for(lock, std::chrono::milliseconds(2), [&] {
        return (found = find(array, coordinates)) || !is_listed(array, coordinates);
    });
    return {is_over, found};
}

KeptSlot *KeptChunks::reserve(const std::shared_ptr<const Array> &array, const i64 *coordinates,
                              const Version &version) {
    const u64 hash = hash_of(*array, coordinates);
    if (KeptSlot *existing = look_up(*array, coordinates, hash)) {
        if (!existing->is_ready || existing->version == version) return nullptr;
        if (existing->pins) forget(*existing);
        else evict(*existing);
    }
    KeptSlot *slot = take((array->geometry->chunk_nbytes + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN);
    if (!slot) return nullptr;
    slot->array = array;
    std::copy(coordinates, coordinates + array->geometry->rank, slot->coordinates);
    slot->hash = hash;
    slot->version = version;
    slot->nbytes = array->geometry->chunk_nbytes;
    slot->pins = 1;
    ++slot->segment->pinned;
    list(*slot);
    return slot;
}

void KeptChunks::unpin(KeptSlot &slot) {
    slot.used = slot.segment->used = ++clock_;
    if (--slot.pins) return;
    --slot.segment->pinned;
    Kind &kind = *slot.segment->kind;
    if (slot.is_listed && slot.is_ready) return kind.unpinned.push(slot);
    forget(slot);
    kind.empty.push(slot);
}

void KeptChunks::forget(KeptSlot &slot) {
    if (slot.is_listed) unlist(slot);
    slot.is_ready = false;
    slot.array.reset();
    changed_.notify_all();
}

void KeptChunks::evict(KeptSlot &slot) {
    Kind &kind = *slot.segment->kind;
    kind.unpinned.remove(slot);
    forget(slot);
    kind.empty.push(slot);
}

void KeptChunks::list(KeptSlot &slot) {
    const size_t mask = table_.size() - 1;
    size_t entry = slot.hash & mask;
    while (table_[entry]) entry = (entry + 1) & mask;
    table_[entry] = &slot;
    slot.is_listed = true;
    kept_nbytes_ += slot.segment->slot_nbytes;
}

// Remove a slot from the table by linear probing: entries after the gap move into the gap, unless that would put them
// before the position that their hash gives.
void KeptChunks::unlist(KeptSlot &slot) {
    const size_t mask = table_.size() - 1;
    size_t gap = slot.hash & mask;
    while (table_[gap] != &slot) gap = (gap + 1) & mask;
    for (size_t entry = (gap + 1) & mask; table_[entry]; entry = (entry + 1) & mask)
        if (((entry - table_[entry]->hash) & mask) >= ((entry - gap) & mask)) {
            table_[gap] = table_[entry];
            gap = entry;
        }
    table_[gap] = nullptr;
    slot.is_listed = false;
    kept_nbytes_ -= slot.segment->slot_nbytes;
}

// Take an empty slot out of its list, after evicting a chunk if necessary; null if all slots are pinned.
KeptSlot *KeptChunks::take(i64 slot_nbytes) {
    try {
        Kind &kind = kinds_[slot_nbytes];
        while (!kind.empty.newest && !cut_segment(slot_nbytes, kind)) {
            KeptSlot *const slot = kind.unpinned.oldest;
            const auto segment = oldest_segment(kind);
            if (segment != segments_.end() && (!slot || segment->used < slot->used)) {
                free_segment(segment);
            } else if (slot) {
                evict(*slot);
            } else {
                return nullptr;
            }
        }
        KeptSlot &slot = *kind.empty.newest;
        kind.empty.remove(slot);
        return &slot;
    } catch (const std::bad_alloc &) {  // the chunk is then not kept
        return nullptr;
    }
}

// Cut a segment of slots out of free memory; false if there is too little memory, or there are too many slots.
bool KeptChunks::cut_segment(i64 slot_nbytes, Kind &kind) {
    const auto range =
        std::find_if(free_.begin(), free_.end(), [=](const auto &item) { return item.second >= slot_nbytes; });
    if (range == free_.end() || slots_ >= MAX_SLOTS) return false;
    const auto [offset, nbytes] = *range;
    const i64 count = std::min(nbytes, std::max(SEGMENT_NBYTES, slot_nbytes)) / slot_nbytes;
    std::list<KeptSegment> created;
    KeptSegment &segment = created.emplace_back(KeptSegment{offset, slot_nbytes, &kind, {}});
    segment.slots.resize(static_cast<size_t>(count));
    grow_table(slots_ + segment.slots.size());
    if (nbytes > count * slot_nbytes) free_[offset + count * slot_nbytes] = nbytes - count * slot_nbytes;
    free_.erase(range);
    slots_ += segment.slots.size();
    segments_.splice(segments_.end(), created);
    for (i64 n = count - 1; n >= 0; --n) {  // backwards: the first slot is then taken first
        KeptSlot &slot = segment.slots[static_cast<size_t>(n)];
        slot.offset = offset + n * slot_nbytes;
        slot.segment = &segment;
        kind.empty.push(slot);
    }
    return true;
}

// The least recently used segment of another kind without pinned slots.
std::list<KeptSegment>::iterator KeptChunks::oldest_segment(const Kind &kind) {
    auto oldest = segments_.end();
    if (kinds_.size() < 2) return oldest;
    for (auto segment = segments_.begin(); segment != segments_.end(); ++segment)
        if (segment->kind != &kind && !segment->pinned && (oldest == segments_.end() || segment->used < oldest->used))
            oldest = segment;
    return oldest;
}

void KeptChunks::free_segment(std::list<KeptSegment>::iterator segment) {
    auto range = free_.emplace(segment->offset, segment->slot_nbytes * static_cast<i64>(segment->slots.size())).first;
    for (KeptSlot &slot : segment->slots) {
        (slot.array ? segment->kind->unpinned : segment->kind->empty).remove(slot);
        forget(slot);
    }
    slots_ -= segment->slots.size();
    segments_.erase(segment);
    if (const auto next = std::next(range); next != free_.end() && range->first + range->second == next->first) {
        range->second += next->second;
        free_.erase(next);
    }
    if (range == free_.begin()) return;
    if (const auto previous = std::prev(range); previous->first + previous->second == range->first) {
        previous->second += range->second;
        free_.erase(range);
    }
}

void KeptChunks::grow_table(size_t slots) {
    size_t size = std::max<size_t>(64, table_.size());
    while (size < 2 * slots) size *= 2;
    if (size == table_.size()) return;
    std::vector<KeptSlot *> old_table(size, nullptr);
    old_table.swap(table_);
    for (KeptSlot *slot : old_table)
        if (slot) {
            size_t entry = slot->hash & (size - 1);
            while (table_[entry]) entry = (entry + 1) & (size - 1);
            table_[entry] = slot;
        }
}

}  // namespace lc
