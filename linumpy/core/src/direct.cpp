// Reads of a slab by GPUDirect Storage. The caller's function carries them out; system calls repeat reads that fail.
//
// Both open files again by path, because a slab may read from more files than a process may have open: the descriptor
// of a stored object is closed by then. Therefore the version of a file is compared by path after the reads. A
// descriptor might refer to another file than the one that was read.
#include <algorithm>
#include <unordered_set>

#include "execution.hpp"

namespace lc {
namespace {

StoredObject &object_of(const DirectRead &read) { return read.wave->objects[read.object]; }

// Throw if the file at a path differs from the version that was located.
void check_path(const StoredObject &object, const std::string &path) {
    if (version_at(path) == object.version) return;
    File file;
    if (const int number = file.open(path)) fail_open(number);
    check_unchanged(object, file);
}

// Read by system calls.
void read_by_system_calls(const DirectRead &read, const std::string &path, u8 *to) {
    File file;
    if (const int number = file.open(path)) fail_open(number);
    read_checked(object_of(read), file, to, read.nbytes, read.offset);
}

// Starts sealed slabs in a thread of the pool.
class StartWork : public OneStep {
public:
    explicit StartWork(Reader &reader) : reader_(reader) {}
    void run(i64) noexcept override {
        const std::shared_ptr<Reader> held = reader_.shared_from_this();
        reader_.device()->start_sealed();
        reader_.device()->end_background();
        reader_.note_progress();
    }

private:
    Reader &reader_;
};

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
        paths.push_back(object.array->file(object.coordinates));
        const i64 address = static_cast<i64>(slab.device) + stored + read.slab_offset;
        records.push_back({paths.back().c_str(), object.range.offset + read.offset, read.nbytes, address, -EIO});
    }
    record_.direct(records.data(), static_cast<i64>(records.size()));
    const StoredObject *unchanged = nullptr;
    for (size_t n = 0; n < records.size(); ++n) {
        const DirectRead &read = slab.reads[n];
        try {
            if (records[n].result != read.nbytes) {
                read_by_system_calls(read, paths[n], slab.pinned + stored + read.slab_offset);
                slab.copies.push_back({read.slab_offset, read.nbytes});
                std::unordered_set<Job *> jobs;
                for (const Row &row : rows_of(read))
                    if (jobs.insert(row.job).second) ++row.job->reads_repeated;
            } else if (unchanged != &object_of(read)) {
                check_path(object_of(read), paths[n]);
                unchanged = &object_of(read);
            }
        } catch (const FailedRead &error) {
            const lc_error error_record = error_of(*read.wave, read.object, read.chunk, error.failure);
            for (const Row &row : rows_of(read)) row.job->fail(error_record);
            break_slots(read);
        }
    }
    reader_.stats.read_seconds.fetch_add(now() - begin);
}

// Start sealed slabs in a thread of the pool.
void Device::start_in_pool() {
    {
        const std::lock_guard lock(mutex_);
        if (sealed_.empty()) return;
    }
    begin_background();
    try {
        if (!Pool::shared().add(std::make_shared<StartWork>(reader_), true)) return;
    } catch (const std::exception &) {  // no memory
    }
    end_background();
    start_sealed();
}

// Copy stored bytes to the device: all of them, or with GPUDirect Storage those that were not read directly.
void Device::copy_stored(Slab &slab, i64 nbytes) {
    if (!reads_directly()) {
        slab.copied_nbytes = slab.used;
        return driver_.copy_up(slab.device, slab.pinned, nbytes, slab.stream);
    }
    const i64 stored = slab.plan ? slab.plan->stored : 0;
    for (const auto &[offset, count] : slab.copies) {
        driver_.copy_up(slab.device + static_cast<DevicePointer>(stored + offset), slab.pinned + stored + offset, count,
                        slab.stream);
        slab.copied_nbytes += count;
    }
}

// Copy stored chunks that the device failed to decode back to the host.
void Device::copy_back(Slab &slab) {
    bool any = false;
    for (size_t n = 0; n < slab.chunks.size(); ++n) {
        const StagedChunk &chunk = slab.chunks[n];
        if (!needs_host(slab, n)) continue;
        const i64 offset = slab.plan->stored + chunk.source;
        driver_.copy_down(slab.pinned + offset, slab.device + static_cast<DevicePointer>(offset), chunk.nbytes,
                          slab.stream);
        any = true;
    }
    if (any) driver_.await_stream(slab.stream);
}

}  // namespace lc
