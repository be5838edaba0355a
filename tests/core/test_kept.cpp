// Slots of kept chunks: against a model, and by several threads.
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "check.hpp"
#include "kept.hpp"

using namespace lc;

namespace {

std::shared_ptr<const Array> array_of(i64 chunk_nbytes) {
    lc_geometry record{};
    record.rank = 3;
    record.dtype = LC_U8;
    for (int a = 0; a < 3; ++a) record.chunk_shape[a] = a ? 1 : chunk_nbytes, record.stored_axes[a] = a;
    return std::make_shared<Array>(std::make_shared<const Geometry>(record), "p", "/", "m");
}

struct Coordinates {
    i64 at[LC_MAX_RANK] = {};
    Coordinates(i64 a, i64 b, i64 c) : at{a, b, c} {}
};

KeptSlot *keep(KeptChunks &kept, const std::shared_ptr<const Array> &array, const Coordinates &one, i64 version = 1) {
    const auto lock = kept.lock();
    KeptSlot *slot = kept.reserve(array, one.at, {1, version, 0, 0});
    if (slot) {
        kept.publish(*slot);
        kept.unpin(*slot);
    }
    return slot;
}

bool is_kept(KeptChunks &kept, const Array &array, const Coordinates &one) {
    const auto lock = kept.lock();
    KeptSlot *slot = kept.find(array, one.at);
    if (slot) kept.unpin(*slot);
    return slot != nullptr;
}

}  // namespace

TEST(kept_chunks_are_found_until_they_are_evicted) {
    const auto array = array_of(1000);
    KeptChunks kept(4 * 1024);
    for (i64 n = 0; n < 4; ++n) CHECK(keep(kept, array, {n, 0, 0}));
    CHECK(kept.kept_nbytes() == 4 * 1024);
    for (i64 n = 0; n < 4; ++n) CHECK(is_kept(kept, *array, {n, 0, 0}));
    CHECK(is_kept(kept, *array, {0, 0, 0}));  // now 1 is the one that was not used for the longest time
    CHECK(keep(kept, array, {4, 0, 0}));
    CHECK(!is_kept(kept, *array, {1, 0, 0}));
    for (i64 n : {0, 2, 3, 4}) CHECK(is_kept(kept, *array, {n, 0, 0}));
    CHECK(!is_kept(kept, *array_of(1000), {0, 0, 0}));
    CHECK(array.use_count() == 1 + 4);
}

TEST(kept_chunks_that_are_filled_are_not_found_and_not_kept_twice) {
    const auto array = array_of(256);
    KeptChunks kept(1024);
    const Coordinates one{1, 2, 3};
    auto lock = kept.lock();
    KeptSlot *slot = kept.reserve(array, one.at, {1, 1, 0, 0});
    CHECK(slot && slot->nbytes == 256 && slot->offset == 0);
    CHECK(!kept.find(*array, one.at));
    CHECK(!kept.reserve(array, one.at, {1, 1, 0, 0}));
    CHECK(!kept.reserve(array, one.at, {2, 1, 0, 0}));
    kept.publish(*slot);
    CHECK(kept.find(*array, one.at) == slot);
    CHECK(!kept.reserve(array, one.at, {1, 1, 0, 0}));
    // Another version takes its place; whoever reads the old one keeps it until it is unpinned.
    KeptSlot *other = kept.reserve(array, one.at, {2, 1, 0, 0});
    CHECK(other && other != slot && !kept.find(*array, one.at));
    std::set<KeptSlot *> taken{slot, other};
    for (i64 n = 0; n < 2; ++n) CHECK(taken.insert(kept.reserve(array, Coordinates{9, 9, n}.at, {})).second);
    CHECK(!kept.reserve(array, Coordinates{9, 9, 9}.at, {}));
    kept.unpin(*slot);
    CHECK(!kept.reserve(array, Coordinates{9, 9, 9}.at, {}));
    kept.unpin(*slot);
    CHECK(kept.reserve(array, Coordinates{9, 9, 9}.at, {}) == slot);
    // A slab that failed.
    kept.forget(*other);
    CHECK(!kept.find(*array, one.at));
    kept.unpin(*other);
    CHECK(kept.reserve(array, one.at, {3, 1, 0, 0}) == other);
}

TEST(kept_chunks_of_several_sizes) {
    const auto small = array_of(1 << 10), middle = array_of(3000), large = array_of(40 << 20);
    KeptChunks kept(100 << 20);
    CHECK(keep(kept, large, {0, 0, 0}) && keep(kept, large, {1, 0, 0}));
    CHECK(keep(kept, large, {2, 0, 0}) && !is_kept(kept, *large, {0, 0, 0}));
    CHECK(keep(kept, small, {0, 0, 0}) && is_kept(kept, *large, {2, 0, 0}));
    // Chunks of other sizes that are used less make place, a segment at a time.
    for (i64 n = 0; n < 40000; ++n) CHECK(keep(kept, middle, {n, 0, 0}));
    CHECK(!is_kept(kept, *large, {1, 0, 0}) && !is_kept(kept, *large, {2, 0, 0}));
    CHECK(kept.kept_nbytes() > 95 << 20);
    CHECK(keep(kept, large, {3, 0, 0}) && keep(kept, large, {4, 0, 0}));
    CHECK(is_kept(kept, *large, {3, 0, 0}) && is_kept(kept, *large, {4, 0, 0}));
    KeptChunks little(2000);
    CHECK(!keep(little, middle, {0, 0, 0}) && keep(little, small, {0, 0, 0}));
    KeptChunks none(0);
    CHECK(!keep(none, small, {0, 0, 0}) && !is_kept(none, *small, {0, 0, 0}));
}

// What is found is what was kept; slots that are in use at the same time do not overlap.
TEST(kept_chunks_against_a_model) {
    Random random(7);
    std::vector<std::shared_ptr<const Array>> arrays;
    for (i64 nbytes : {200, 256, 3000, 70000}) arrays.push_back(array_of(nbytes));
    KeptChunks kept(300 << 10);
    struct Held {
        KeptSlot *slot;
        size_t array;
        i64 key, version;
        bool filling;
    };
    std::vector<Held> held;
    std::map<std::pair<size_t, i64>, i64> versions;  // of chunks that may be found
    i64 found = 0, reserved = 0, refused = 0;
    for (int step = 0; step < 200000; ++step) {
        const auto lock = kept.lock();
        const size_t number = static_cast<size_t>(draw(random, 0, 3));
        const i64 key = draw(random, 0, 60), version = draw(random, 0, 20) ? 1 : step;
        const Coordinates at{key / 8, key % 8, key % 3};
        const auto &array = arrays[number];
        const int what = static_cast<int>(draw(random, 0, 2));
        if (what == 2 && !held.empty()) {
            std::swap(held[static_cast<size_t>(draw(random, 0, static_cast<i64>(held.size()) - 1))], held.back());
            const Held one = held.back();
            held.pop_back();
            if (one.filling && draw(random, 0, 3)) {
                kept.publish(*one.slot);
                versions[{one.array, one.key}] = one.version;
            } else if (one.filling) {
                kept.forget(*one.slot);
            }
            kept.unpin(*one.slot);
            continue;
        }
        if (held.size() > 40) continue;
        if (what) {
            KeptSlot *slot = kept.find(*array, at.at);
            if (!slot) continue;
            ++found;
            CHECK(versions.count({number, key}) && versions[{number, key}] == slot->version.nbytes);
            held.push_back({slot, number, key, slot->version.nbytes, false});
        } else {
            KeptSlot *slot = kept.reserve(array, at.at, {1, version, 0, 0});
            ++(slot ? reserved : refused);
            if (!slot) continue;
            versions.erase({number, key});
            held.push_back({slot, number, key, version, true});
        }
        const KeptSlot *slot = held.back().slot;
        CHECK(slot->nbytes == array->geometry->chunk_nbytes);
        CHECK(slot->offset % 256 == 0 && slot->offset >= 0 && slot->offset + slot->nbytes <= 300 << 10);
        for (const Held &one : held)
            if (one.slot != slot)
                CHECK(one.slot->offset + one.slot->nbytes <= slot->offset ||
                      slot->offset + slot->nbytes <= one.slot->offset);
    }
    CHECK(found > 5000 && reserved > 5000 && refused > 1000);
}

// Several threads fill slots with what only this chunk has, and check what they find.
TEST(kept_chunks_by_several_threads) {
    const auto array = array_of(512);
    KeptChunks kept(16 * 512);
    std::vector<std::atomic<i64>> memory(16);
    std::atomic<i64> hits{0};
    const auto work = [&](unsigned seed) {
        Random random(seed);
        for (int step = 0; step < 3000; ++step) {
            const Coordinates at{draw(random, 0, 39), 0, 0};
            KeptSlot *slot, *filled = nullptr;
            {
                const auto lock = kept.lock();
                slot = kept.find(*array, at.at);
                if (!slot) filled = kept.reserve(array, at.at, {});
            }
            if (slot) CHECK(memory[static_cast<size_t>(slot->offset / 512)] == at.at[0]);
            if (filled) memory[static_cast<size_t>(filled->offset / 512)] = at.at[0];
            hits += slot != nullptr;
            if (step % 3 == 0) std::this_thread::yield();
            if (slot) CHECK(memory[static_cast<size_t>(slot->offset / 512)] == at.at[0]);
            const auto lock = kept.lock();
            if (filled) kept.publish(*filled);
            if (slot || filled) kept.unpin(slot ? *slot : *filled);
        }
    };
    std::vector<std::thread> threads;
    for (unsigned n = 0; n < 6; ++n) threads.emplace_back(work, n);
    for (std::thread &one : threads) one.join();
    CHECK(hits > 1000);
}
