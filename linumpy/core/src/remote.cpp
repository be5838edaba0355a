// Objects in an object store: requests, and how tasks use them instead of opening and reading files.
//
// A response states the size and version of the object, if the store reports them; a change between responses is an
// error. The first request for an object is one that is needed anyway: the index of a shard, or the bytes of its first
// chunks if the index is cached; a whole encoded chunk; the wanted bytes of a raw chunk. Only the response shows
// whether the object is missing or has a wrong size. If chunks are kept on a device, the version of a raw chunk is
// requested first.
#include "remote.hpp"

#include <algorithm>
#include <mutex>

#include "execution.hpp"

namespace lc {
namespace {

// Used as the size of an object if the store does not report it.
constexpr i64 UNKNOWN_NBYTES = INT64_MAX / 2;
// Expected maximum size of an encoded chunk. If an object is larger, it is requested again.
i64 max_stored_nbytes(i64 chunk_nbytes) { return chunk_nbytes + chunk_nbytes / 64 + 4096; }

}  // namespace

// Request bytes of the object, and count the request for all jobs that want chunks of the object.
Fetched Execution::request(i64 offset, i64 nbytes, i64 capacity) {
    Fetched fetched;
    Failure failure;
    ++files_opened;
    for_jobs_of_object([](Job &job, i64 n) { job.files_opened += n; }, 1);
    const bool is_answered = fetch(object_.array->store, object_.array->path(object_.coordinates), offset, nbytes,
                                   capacity, fetched, failure, [this] { return reader_.closing() || !anyone_wants(); });
    hedges += fetched.hedges;
    if (!is_answered) throw FailedRead{failure};
    return fetched;
}

// Whether any job still wants a chunk of the object.
bool Execution::anyone_wants() const {
    const auto wanted = [this](const WantedChunk &chunk) { return is_wanted(chunk); };
    const auto of_task = wave_.chunks.begin() + task_.first_chunk,
               of_object = wave_.chunks.begin() + object_.first_chunk;
    return std::any_of(of_task, of_task + task_.chunks, wanted) ||
           std::any_of(of_object, of_object + object_.chunks, wanted);
}

// Check whether the array of a missing chunk still exists: its metadata are requested once in each wave.
void Execution::check_metadata() {
    Array &array = *object_.array;
    const std::lock_guard lock(array.mutex);
    if (std::exchange(array.checked_in, wave_.number) != wave_.number) {
        Fetched fetched;
        Failure failure;
        fetch(array.store, array.metadata, 0, 0, 0, fetched, failure, [this] { return reader_.closing().load(); });
        array.is_gone = failure.code == LC_MISSING;
    }
    if (array.is_gone) fail(LC_GONE);
}

// Called before a task uses its chunks. The first task of a shard reads the index, and sorts the chunks of the shard by
// offset, so that one request fetches chunks that are contiguous, in whatever order they were written. The chunks are
// not sorted if a task has used them before.
void Execution::enter_object() noexcept {
    if (!is_remote() || !geometry_.sharded()) return;
    const std::lock_guard lock(object_.mutex);
    if (object_.located) return;
    if (!anyone_wants()) {
        object_.entered = true;
        return;
    }
    find_object();
    sort_chunks();
}

void Execution::sort_chunks() {
    if (!object_.index || object_.entered) return;
    const auto offset = [&](const WantedChunk &chunk) {
        return (*object_.index)[static_cast<size_t>(chunk.inner)].offset;
    };
    WantedChunk *const first = wave_.chunks.data() + object_.first_chunk;
    std::sort(first, first + object_.chunks,
              [&](const WantedChunk &a, const WantedChunk &b) { return offset(a) < offset(b); });
}

// Locate the object by fetching the index of a shard or a whole encoded chunk. For a raw chunk no request is made,
// unless chunks are kept on a device: then the version is requested first.
void Execution::find_remote() {
    try {
        if (geometry_.sharded()) {
            if (!try_kept_index()) fetch_index();
        } else if (geometry_.encoded()) {
            fetch_whole();
        } else {
            object_.range = {0, geometry_.chunk_nbytes};
            if (device_ && device_->kept()) object_.version = request(0, 0, 0).version;
        }
    } catch (const FailedRead &error) {
        if (error.failure.code != LC_MISSING) throw;
        object_.missing = true;
    }
}

std::string Execution::index_name() const {
    return std::to_string(object_.array->store) + ":" + object_.array->path(object_.coordinates);
}

void Execution::fetch_index() {
    const i64 nbytes = geometry_.index_nbytes;
    const MemoryGuard memory(nbytes);
    const Fetched fetched = request(geometry_.index_at_end ? -1 : 0, nbytes, nbytes);
    object_.version = fetched.version;
    object_.range = {0, fetched.version.nbytes < 0 ? UNKNOWN_NBYTES : fetched.version.nbytes};
    set_index(fetched.data, fetched.nbytes);
    if (is_known(object_.version)) indexes_.keep(index_name(), object_.version, geometry_, object_.index);
}

// Acquire memory for fetched bytes and for decoding them, within the limit of the process.
void Execution::begin_fetch(i64 nbytes) {
    fetched_ = {};
    fetched_memory_.reset();
    if (nbytes > MAX_NBYTES) throw std::bad_alloc();
    fetched_memory_.emplace(
        nbytes + (geometry_.encoded()
                      ? geometry_.chunk_nbytes + decode_scratch_nbytes(geometry_.chain, geometry_.chunk_nbytes)
                      : 0));
}

// Use the index that an earlier read has cached. The request for the first run of this task shows whether the object
// still has the version of the index. Returns false if it does not, or no index is cached.
bool Execution::try_kept_index() {
    const std::shared_ptr<const ShardIndex> index = indexes_.find_last(index_name(), geometry_, object_.version);
    if (index) {
        object_.index = index;
        object_.range = {0, object_.version.nbytes};
        sort_chunks();
        const auto [offset, nbytes] = first_run();
        try {
            begin_fetch(nbytes);
            fetched_ = request(offset, nbytes, nbytes);
            fetched_offset_ = offset;
            if (fetched_.version == object_.version && fetched_.nbytes == nbytes) return true;
        } catch (const FailedRead &) {  // the request for the index reports the reason, or succeeds
        }
        fetched_ = {};
        fetched_memory_.reset();
    }
    object_.index.reset();
    object_.version = {};
    return false;
}

// The first range that this task reads at once, of one or more chunks; empty if the task wants no stored chunk, or the
// first one is read in pieces.
StoredRange Execution::first_run() const {
    StoredRange run{0, 0};
    const auto lock = reader_.kept() ? reader_.kept()->lock() : std::unique_lock<std::mutex>();
    for (u32 n = 0; n < task_.chunks; ++n) {
        const WantedChunk &chunk = wave_.chunks[task_.first_chunk + n];
        const ChunkRange stored = (*object_.index)[static_cast<size_t>(chunk.inner)];
        if (stored.offset < 0 || !is_wanted(chunk)) continue;
        if (lock && reader_.kept()->is_listed(*object_.array, chunk.coordinates)) continue;  // kept, or to be awaited
        const bool is_whole = geometry_.encoded() || reader_.kept();
        const auto [first, nbytes] = is_whole ? StoredRange{0, stored.nbytes} : wanted_bytes(chunk);
        if (!is_whole && !is_read_at_once(nbytes)) break;
        const i64 offset = stored.offset + first, end = offset + nbytes;
        if (!run.nbytes) run = {offset, nbytes};
        else if (offset < run.offset || offset - run.offset - run.nbytes > REMOTE_GAP ||
                 end - run.offset > max_read_nbytes_)
            break;
        else run.nbytes = std::max(run.nbytes, end - run.offset);
    }
    return run;
}

// Fetch a whole encoded chunk, whose size is unknown before the first response.
void Execution::fetch_whole() {
    i64 capacity = max_stored_nbytes(geometry_.chunk_nbytes);
    for (;;) {
        begin_fetch(capacity);
        fetched_ = request(0, -1, capacity);
        if (fetched_.version.nbytes <= capacity) break;
        capacity = fetched_.version.nbytes;
    }
    fetched_offset_ = 0;
    object_.version = fetched_.version;
    object_.range = {0, fetched_.version.nbytes};
    if (fetched_.nbytes != object_.range.nbytes) fail(LC_SHORT, 0, fetched_.nbytes, object_.range.nbytes);
}

// Fetch exactly `nbytes` bytes of an object, which are valid until the next call. Throws FailedRead, also if the
// version differs from the version of earlier responses.
const u8 *Execution::fetch_exactly(i64 nbytes, i64 offset) {
    const i64 first = offset - fetched_offset_;
    if (first >= 0 && first + nbytes <= fetched_.nbytes) return fetched_.data + first;
    if (!nbytes) return nullptr;
    const bool whole = !offset && nbytes == object_.range.nbytes;
    begin_fetch(nbytes);
    try {
        fetched_ = request(offset, whole ? -1 : nbytes, nbytes);
    } catch (const FailedRead &error) {
        const i64 object_nbytes = object_.version.nbytes;
        if (error.failure.code == LC_MISSING && object_nbytes >= 0) fail(LC_REPLACED, 0, object_nbytes, 0);
        throw;
    }
    fetched_offset_ = offset;
    if (fetched_.version.nbytes >= 0) {
        if (object_.version.nbytes < 0) {
            object_.version = fetched_.version;  // a raw chunk, which only one task reads
        } else if (!(fetched_.version == object_.version)) {
            fail(LC_REPLACED, 0, object_.version.nbytes, fetched_.version.nbytes);
        }
        if (object_.version.nbytes != object_.range.nbytes)
            fail(LC_SIZE, 0, object_.version.nbytes, geometry_.chunk_nbytes);
    }
    if (fetched_.nbytes != nbytes) fail(LC_SHORT, 0, fetched_.nbytes, nbytes);
    return fetched_.data;
}

}  // namespace lc
