#include "kept.hpp"

#include <algorithm>
#include <iterator>

namespace lc {
namespace {

constexpr i64 SEGMENT_NBYTES = 64 << 20;
// Slots begin where every unit of the scatter kernels may.
constexpr i64 SLOT_ALIGN = 256;
// Slots of all segments: their records take host memory.
constexpr size_t MOST_SLOTS = size_t(1) << 22;

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
    i64 pinned = 0;  // slots
    u64 used = 0;    // when one of its slots was used last
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
    for (size_t at = hash & mask; KeptSlot *slot = table_[at]; at = (at + 1) & mask)
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

KeptSlot *KeptChunks::reserve(const std::shared_ptr<const Array> &array, const i64 *coordinates,
                              const Version &version) {
    const u64 hash = hash_of(*array, coordinates);
    if (KeptSlot *known = look_up(*array, coordinates, hash)) {
        if (!known->is_ready || known->version == version) return nullptr;
        if (known->pins) forget(*known);
        else evict(*known);
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
}

void KeptChunks::evict(KeptSlot &slot) {
    Kind &kind = *slot.segment->kind;
    kind.unpinned.remove(slot);
    forget(slot);
    kind.empty.push(slot);
}

void KeptChunks::list(KeptSlot &slot) {
    const size_t mask = table_.size() - 1;
    size_t at = slot.hash & mask;
    while (table_[at]) at = (at + 1) & mask;
    table_[at] = &slot;
    slot.is_listed = true;
    kept_nbytes_ += slot.segment->slot_nbytes;
}

// Linear probing: entries behind the gap move up where they may.
void KeptChunks::unlist(KeptSlot &slot) {
    const size_t mask = table_.size() - 1;
    size_t gap = slot.hash & mask;
    while (table_[gap] != &slot) gap = (gap + 1) & mask;
    for (size_t at = (gap + 1) & mask; table_[at]; at = (at + 1) & mask)
        if (((at - table_[at]->hash) & mask) >= ((at - gap) & mask)) {
            table_[gap] = table_[at];
            gap = at;
        }
    table_[gap] = nullptr;
    slot.is_listed = false;
    kept_nbytes_ -= slot.segment->slot_nbytes;
}

// An empty slot, in no list any more; null where all are pinned.
KeptSlot *KeptChunks::take(i64 slot_nbytes) {
    try {
        Kind &kind = kinds_[slot_nbytes];
        while (!kind.empty.newest && !cut_segment(slot_nbytes, kind)) {
            KeptSlot *const slot = kind.unpinned.oldest;
            const auto segment = oldest_segment(kind);
            if (segment != segments_.end() && (!slot || segment->used < slot->used)) {
                give_back(segment);
            } else if (slot) {
                evict(*slot);
            } else {
                return nullptr;
            }
        }
        KeptSlot &slot = *kind.empty.newest;
        kind.empty.remove(slot);
        return &slot;
    } catch (const std::bad_alloc &) {  // jobs do not need the cache
        return nullptr;
    }
}

// Cut slots out of memory that no segment has; false where there is too little.
bool KeptChunks::cut_segment(i64 slot_nbytes, Kind &kind) {
    const auto found =
        std::find_if(free_.begin(), free_.end(), [=](const auto &one) { return one.second >= slot_nbytes; });
    if (found == free_.end() || slots_ >= MOST_SLOTS) return false;
    const auto [offset, nbytes] = *found;
    const i64 count = std::min(nbytes, std::max(SEGMENT_NBYTES, slot_nbytes)) / slot_nbytes;
    std::list<KeptSegment> made;
    KeptSegment &segment = made.emplace_back(KeptSegment{offset, slot_nbytes, &kind, {}});
    segment.slots.resize(static_cast<size_t>(count));
    grow_table(slots_ + segment.slots.size());
    if (nbytes > count * slot_nbytes) free_[offset + count * slot_nbytes] = nbytes - count * slot_nbytes;
    free_.erase(found);
    slots_ += segment.slots.size();
    segments_.splice(segments_.end(), made);
    for (i64 n = count - 1; n >= 0; --n) {  // the first one is taken first
        KeptSlot &slot = segment.slots[static_cast<size_t>(n)];
        slot.offset = offset + n * slot_nbytes;
        slot.segment = &segment;
        kind.empty.push(slot);
    }
    return true;
}

// The segment of another kind that was not used for the longest time, and has no pinned slot.
std::list<KeptSegment>::iterator KeptChunks::oldest_segment(const Kind &kind) {
    auto oldest = segments_.end();
    if (kinds_.size() < 2) return oldest;
    for (auto one = segments_.begin(); one != segments_.end(); ++one)
        if (one->kind != &kind && !one->pinned && (oldest == segments_.end() || one->used < oldest->used)) oldest = one;
    return oldest;
}

void KeptChunks::give_back(std::list<KeptSegment>::iterator segment) {
    auto at = free_.emplace(segment->offset, segment->slot_nbytes * static_cast<i64>(segment->slots.size())).first;
    for (KeptSlot &slot : segment->slots) {
        (slot.array ? segment->kind->unpinned : segment->kind->empty).remove(slot);
        forget(slot);
    }
    slots_ -= segment->slots.size();
    segments_.erase(segment);
    if (const auto next = std::next(at); next != free_.end() && at->first + at->second == next->first) {
        at->second += next->second;
        free_.erase(next);
    }
    if (at == free_.begin()) return;
    if (const auto before = std::prev(at); before->first + before->second == at->first) {
        before->second += at->second;
        free_.erase(at);
    }
}

void KeptChunks::grow_table(size_t slots) {
    size_t size = std::max<size_t>(64, table_.size());
    while (size < 2 * slots) size *= 2;
    if (size == table_.size()) return;
    std::vector<KeptSlot *> known(size, nullptr);
    known.swap(table_);
    for (KeptSlot *slot : known)
        if (slot) {
            size_t at = slot->hash & (size - 1);
            while (table_[at]) at = (at + 1) & (size - 1);
            table_[at] = slot;
        }
}

}  // namespace lc
