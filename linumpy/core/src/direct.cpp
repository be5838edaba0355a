// Reads of a slab by GPUDirect Storage: the caller's function carries them out, plain system calls those that it fails.
//
// Files are opened by their paths once more, there and here. So versions are compared by path behind the reads, not by
// the descriptor of the stored object, which need not be that of the file that was read, and is closed meanwhile: a slab
// may have more files than a process may have open.
#include <algorithm>
#include <unordered_set>

#include "execution.hpp"

namespace lc {
namespace {

StoredObject &object_of(const DirectRead &read) { return read.wave->objects[read.object]; }

void check_version(const StoredObject &object, const Version &found) {
    if (!(found == object.version)) fail(LC_REPLACED, 0, object.version.nbytes, found.nbytes);
}

// Compare the file at a path with the version that was located.
void check_path(const StoredObject &object, const std::string &path) {
    if (version_at(path) == object.version) return;
    File file;
    Version found;
    bool is_regular = false;
    if (const int number = file.open(path)) fail(LC_OPEN, number);
    if (const int number = file.look(found, is_regular)) fail(LC_READ, number);
    check_version(object, found);
}

// Read by plain system calls.
void read_plainly(const DirectRead &read, const std::string &path, u8 *to) {
    const StoredObject &object = object_of(read);
    File file;
    Version found;
    bool is_regular = false;
    if (const int number = file.open(path)) fail(LC_OPEN, number);
    const i64 got = file.read(to, read.nbytes, read.offset);
    if (got < 0) fail(LC_READ, -got);
    if (const int number = file.look(found, is_regular)) fail(LC_READ, number);
    check_version(object, found);
    if (got != read.nbytes) fail(LC_SHORT, 0, got, read.nbytes);
}

// Starts sealed slabs in a thread of the pool.
class StartWork : public Work {
public:
    explicit StartWork(Reader &reader) : reader_(reader) {}
    bool claim(i64 &step) override {
        step = 0;
        return !claimed_.exchange(true);
    }
    bool has_more() const override { return !claimed_.load(); }
    void run(i64) noexcept override {
        const std::shared_ptr<Reader> held = reader_.shared_from_this();
        reader_.device()->start_sealed();
        reader_.device()->end_retry();
        reader_.note_progress();
    }

private:
    Reader &reader_;
    std::atomic<bool> claimed_{false};
};

lc_error error_of(const DirectRead &read, const Failure &failure) {
    lc_error error{};
    error.code = failure.code;
    error.number = failure.number;
    error.a = failure.a;
    error.b = failure.b;
    std::copy_n(object_of(read).coordinates, LC_MAX_RANK, error.object);
    std::copy_n(read.wave->chunks[read.chunk].coordinates, LC_MAX_RANK, error.chunk);
    return error;
}

}  // namespace

void Device::read_direct(Slab &slab) {
    const auto rows_of = [&](const DirectRead &read) {
        return std::span<Row>(slab.rows).subspan(read.first_row, read.rows);
    };
    const auto break_slots = [&](const DirectRead &read) {
        for (u32 n = 0; n < read.fills; ++n) slab.filled[read.first_fill + n].is_broken = true;
    };
    std::erase_if(slab.reads, [&](const DirectRead &read) {
        if (is_wanted(rows_of(read))) return false;
        break_slots(read);
        return true;
    });
    if (slab.reads.empty()) return;
    const double begin = now();
    const i64 stored = slab.plan ? slab.plan->stored : 0;
    std::vector<std::string> paths;
    std::vector<lc_direct_read> records;
    paths.reserve(slab.reads.size());
    records.reserve(slab.reads.size());
    for (const DirectRead &read : slab.reads) {
        const StoredObject &object = object_of(read);
        paths.push_back(object.array->path(object.coordinates));
        const i64 address = static_cast<i64>(slab.device) + stored + read.place;
        records.push_back({paths.back().c_str(), read.offset, read.nbytes, address, -EIO});
    }
    record_.direct(records.data(), static_cast<i64>(records.size()));
    const StoredObject *unchanged = nullptr;
    for (size_t n = 0; n < records.size(); ++n) {
        const DirectRead &read = slab.reads[n];
        try {
            if (records[n].result != read.nbytes) {
                read_plainly(read, paths[n], slab.pinned + stored + read.place);
                slab.copies.push_back({read.place, read.nbytes});
                std::unordered_set<Job *> jobs;
                for (const Row &row : rows_of(read))
                    if (jobs.insert(row.job).second) ++row.job->reads_repeated;
            } else if (unchanged != &object_of(read)) {
                check_path(object_of(read), paths[n]);
                unchanged = &object_of(read);
            }
        } catch (const FailedRead &error) {
            for (const Row &row : rows_of(read)) row.job->fail(error_of(read, error.failure));
            break_slots(read);
        }
    }
    reader_.stats.read_seconds.fetch_add(now() - begin);
}

// Start sealed slabs in another thread.
void Device::start_in_pool() {
    {
        const std::lock_guard lock(mutex_);
        if (sealed_.empty()) return;
    }
    begin_retry();
    try {
        if (!Pool::shared().add(std::make_shared<StartWork>(reader_), true)) return;
    } catch (const std::exception &) {  // no memory
    }
    end_retry();
    start_sealed();
}

// Copy stored bytes up: all, or what passed through pinned memory where the others were read into the slab.
void Device::copy_stored(Slab &slab, i64 nbytes) {
    if (!reads_directly()) {
        slab.copied_nbytes = slab.used;
        return driver_.copy_up(slab.device, slab.pinned, nbytes, slab.stream);
    }
    const i64 stored = slab.plan ? slab.plan->stored : 0;
    for (const auto &[place, count] : slab.copies) {
        driver_.copy_up(slab.device + static_cast<DevicePointer>(stored + place), slab.pinned + stored + place, count,
                        slab.stream);
        slab.copied_nbytes += count;
    }
}

// Copy down what the device gave up, for the host to decode.
void Device::copy_back(Slab &slab) {
    bool any = false;
    for (size_t n = 0; n < slab.chunks.size(); ++n) {
        const StagedChunk &chunk = slab.chunks[n];
        if (!status_of(slab)[n] || !is_wanted({slab.rows.data() + chunk.first_row, chunk.rows})) continue;
        const i64 place = slab.plan->stored + chunk.source;
        driver_.copy_down(slab.pinned + place, slab.device + static_cast<DevicePointer>(place), chunk.nbytes,
                          slab.stream);
        any = true;
    }
    if (any) driver_.await_stream(slab.stream);
}

}  // namespace lc
