// Locates a stored object in files: whether it exists, its version, and the byte ranges of its chunks; checked reads.
#include <algorithm>

#include "execution.hpp"

namespace lc {

Storage *Array::storage() {
    Storage *found = found_storage.load(std::memory_order_relaxed);
    if (found || store) return found;
    found = Storage::of_file(archive ? archive->path : metadata);
    found_storage.store(found, std::memory_order_relaxed);
    return found;
}

bool Array::is_slow() {
    const Storage *found = storage();
    return store || (found && found->is_slow());
}

// Locate the stored object. The first task of the object does this; the other tasks use the result, also an error.
void Execution::locate() {
    std::unique_lock lock(object_.mutex, std::try_to_lock);
    if (!lock) {  // another task reads the index of the shard
        const StorageWait wait(object_.array->is_slow());
        lock.lock();
    }
    if (!object_.located) find_object();
    if (object_.failure.code) throw FailedRead{object_.failure};
}

// Called with the object's lock held.
void Execution::find_object() noexcept {
    try {
        if (is_remote()) find_remote();
        else open_object(object_.array->file(object_.coordinates));
    } catch (FailedRead &error) {
        object_.failure = std::move(error.failure);
    } catch (const std::exception &) {
        object_.failure.code = LC_MEMORY;
        object_.failure.a = geometry_.chunk_nbytes;
    }
    object_.located = true;
}

void Execution::open_object(const std::string &path) {
    if (const int number = object_.file.open(path, object_.array->storage())) {
        if ((number != ENOENT && number != ENOTDIR) || !is_missing(path)) fail_open(number);
        if (!exists(object_.array->metadata)) fail(LC_GONE);
        object_.missing = true;
        return;
    }
    ++files_opened;
    for_jobs_of_object([](Job &job, i64 n) { job.files_opened += n; }, 1);
    bool is_regular = false;
    if (const int number = object_.file.locate(object_.version, is_regular)) fail(LC_READ, number);
    if (!is_regular) fail(LC_NOT_FILE);
    object_.range = {0, object_.version.nbytes};
    if (object_.array->archive && !find_entry(*object_.array->archive)) return;
    if (geometry_.sharded()) {
        const std::string name = object_.array->path(object_.coordinates);
        object_.index = indexes_.find(name, object_.version, geometry_);
        if (!object_.index) read_index(name);
    } else if (!geometry_.encoded() && object_.range.nbytes != geometry_.chunk_nbytes) {
        fail(LC_SIZE, 0, object_.range.nbytes, geometry_.chunk_nbytes);
    }
}

// Find the byte range of an object in a ZIP file; false if it is not stored.
bool Execution::find_entry(const Archive &archive) {
    if (!(object_.version == archive.version)) fail(LC_REPLACED, 0, archive.version.nbytes, object_.version.nbytes);
    const lc_entry *entry = archive.find(object_.coordinates);
    object_.missing = !entry;
    if (!entry) return false;
    const std::string name = object_.array->path(object_.coordinates).substr(archive.path.size() + 1);
    std::vector<u8> header(static_cast<size_t>(local_header_nbytes(name)));
    read_checked(object_, object_.file, header.data(), static_cast<i64>(header.size()), entry->header);
    try {
        object_.range = {parse_local_header(header, name, *entry, object_.version.nbytes), entry->nbytes};
    } catch (const std::runtime_error &error) {
        throw FailedRead{{LC_ENTRY, 0, 0, 0, error.what()}};
    }
    return true;
}

void Execution::read_index(const std::string &name) {
    const i64 size = object_.range.nbytes, nbytes = std::min(geometry_.index_nbytes, size);
    const MemoryGuard memory(nbytes);
    set_index(read_exactly(nbytes, geometry_.index_at_end ? size - nbytes : 0), nbytes);
    indexes_.keep(name, object_.version, geometry_, object_.index);
}

// Set the index of a shard from its stored bytes.
void Execution::set_index(const u8 *stored, i64 nbytes) {
    try {
        object_.index = parse_index(geometry_, stored, nbytes, object_.range.nbytes);
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception &error) {
        throw FailedRead{{LC_INDEX, 0, 0, 0, error.what()}};
    }
    for_jobs_of_object([](Job &job, i64 n) { job.bytes_read += n; }, nbytes);
}

void check_unchanged(const StoredObject &object, const File &file) {
    Version version;
    bool is_regular = false;
    if (const int number = file.stat(version, is_regular)) fail(LC_READ, number);
    if (!(version == object.version)) fail(LC_REPLACED, 0, object.version.nbytes, version.nbytes);
}

void read_checked(const StoredObject &object, const File &file, u8 *to, i64 nbytes, i64 offset) {
    const i64 got = file.read(to, nbytes, object.range.offset + offset);
    if (got < 0) fail(LC_READ, -got);
    check_unchanged(object, file);  // before the length is checked: bytes may be missing because the file was replaced
    if (got != nbytes) fail(LC_SHORT, 0, got, nbytes);
}

}  // namespace lc
