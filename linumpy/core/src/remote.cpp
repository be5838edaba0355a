// Objects in an object store: requests, and what tasks do with them in place of opening and reading files.
//
// Every response says which version of the object it is of; another one than before is an error. The first request of an
// object is one that is needed anyway: the index of a shard, all of an encoded chunk, or the wanted bytes of a raw one,
// which is found to be missing, or of a wrong size, only then.
#include "remote.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "execution.hpp"

namespace lc {
namespace {

std::atomic<lc_fetch_object> fetch_object{nullptr};
std::atomic<i64> most_requests{32};
// Requests that may begin.
class Requests {
public:
    explicit Requests(i64 most) : left_(most) {}
    void acquire() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return left_ > 0; });
        --left_;
    }
    void release() {
        {
            const std::lock_guard lock(mutex_);
            ++left_;
        }
        changed_.notify_one();
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    i64 left_;
};

std::atomic<Requests *> shared_requests{nullptr};

Requests &requests() {
    Requests *known = shared_requests.load();
    if (known) return *known;
    Requests *made = new Requests(most_requests.load());
    if (shared_requests.compare_exchange_strong(known, made)) return *made;
    delete made;
    return *known;
}

// Holds one of the requests that may be under way, and lets another thread of the pool work meanwhile.
class UnderWay {
public:
    UnderWay() : requests_(requests()), pool_(Pool::shared()) {
        requests_.acquire();
        pool_.begin_wait();
    }
    ~UnderWay() {
        pool_.end_wait();
        requests_.release();
    }
    UnderWay(const UnderWay &) = delete;
    UnderWay &operator=(const UnderWay &) = delete;

private:
    Requests &requests_;
    Pool &pool_;
};

// Bytes that an encoded chunk has at most, but for odd encoders.
i64 most_stored(i64 chunk_nbytes) { return chunk_nbytes + chunk_nbytes / 64 + 4096; }

}  // namespace

void set_fetch(lc_fetch_object function, i64 count) {
    fetch_object.store(function);
    most_requests.store(std::clamp<i64>(count, 1, Pool::MOST_WAITING));
}

void forget_requests() { shared_requests.store(nullptr); }

bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, u8 *to, i64 capacity, Fetched &fetched,
           Failure &failure, const std::atomic<bool> &closing) {
    lc_fetch record{};
    record.store = store;
    record.key = key.c_str();
    record.offset = offset;
    record.nbytes = nbytes;
    record.address = reinterpret_cast<i64>(to);
    record.capacity = capacity;
    record.code = LC_REMOTE;
    if (const lc_fetch_object call = fetch_object.load()) {
        const UnderWay under_way;
        if (closing) record.code = LC_CANCELLED;
        else call(&record);
    }
    fetched = {record.got, {static_cast<u64>(record.version[0]), record.size, record.version[1], 0}};
    if (record.code == LC_OK) return true;
    failure.code = record.code;
    failure.text = record.text;
    return false;
}

Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing) {
    Fetched fetched;
    Failure failure;
    const bool found = fetch(store, key, 0, 0, nullptr, 0, fetched, failure, closing);
    return found && is_told(fetched.version) ? fetched.version : Version{};
}

// One request for the object, counted for the jobs that want it.
Fetched Execution::request(i64 offset, i64 nbytes, u8 *to, i64 capacity) {
    Fetched fetched;
    Failure failure;
    ++files_opened;
    for_jobs_of_object([](Job &job, i64 n) { job.files_opened += n; }, 1);
    if (!fetch(object_.array->store, object_.array->path(object_.coordinates), offset, nbytes, to, capacity, fetched,
               failure, reader_.closing()))
        throw FailedRead{failure};
    return fetched;
}

// Before a task looks at its chunks: those of a shard are sorted by where they lie in it when its index is read, so that
// a request brings what lies together in whatever order shards were written. No task may have looked at its chunks then.
void Execution::enter_object() noexcept {
    if (!is_remote() || !geometry_.sharded()) return;
    const std::lock_guard lock(object_.mutex);
    if (object_.located) return;
    bool any = false;
    for (u32 n = 0; n < task_.chunks && !any; ++n) any = is_wanted(wave_.chunks[task_.first_chunk + n]);
    for (u32 n = 0; n < object_.chunks && !any; ++n) any = is_wanted(wave_.chunks[object_.first_chunk + n]);
    if (!any) {
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

// Find the object, with the index of a shard or with all of an encoded chunk. Raw chunks need not be found, but where
// chunks are kept their version is wanted first.
void Execution::find_remote() {
    try {
        if (geometry_.sharded()) {
            if (!take_kept_index()) fetch_index();
        } else if (geometry_.encoded()) {
            fetch_whole();
        } else {
            object_.range = {0, geometry_.chunk_nbytes};
            if (device_ && device_->kept()) object_.version = request(0, 0, nullptr, 0).version;
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
    const Gate gate(nbytes);
    u8 *stored = scratch().stored.reserve(nbytes);
    const Fetched fetched = request(geometry_.index_at_end ? -1 : 0, nbytes, stored, nbytes);
    object_.version = fetched.version;
    object_.range = {0, fetched.version.nbytes};
    take_index(stored, fetched.nbytes);
    if (is_told(object_.version)) indexes_.keep(index_name(), object_.version, geometry_, object_.index);
}

// Take the index that an earlier read has kept, where a request for what this task reads first says that the object is
// still of its version; false where it is not, or there is none.
bool Execution::take_kept_index() {
    const std::shared_ptr<const ShardIndex> known = indexes_.find_last(index_name(), geometry_, object_.version);
    if (known) {
        object_.index = known;
        object_.range = {0, object_.version.nbytes};
        sort_chunks();
        const auto [offset, nbytes] = first_run();
        try {
            gate_.emplace(nbytes + geometry_.chunk_nbytes);
            const Fetched fetched = request(offset, nbytes, scratch().stored.reserve(nbytes), nbytes);
            if (fetched.version == object_.version && fetched.nbytes == nbytes) {
                fetched_offset_ = offset;
                fetched_nbytes_ = nbytes;
                return true;
            }
        } catch (const FailedRead &) {  // the request for the index says why, or succeeds
        }
        gate_.reset();
    }
    object_.index.reset();
    object_.version = {};
    return false;
}

// Encoded chunks of this task that are read together first; no bytes where there are none, or where chunks are raw, of
// which parts may be read.
StoredRange Execution::first_run() const {
    StoredRange run{0, 0};
    for (u32 n = 0; geometry_.encoded() && n < task_.chunks; ++n) {
        const WantedChunk &chunk = wave_.chunks[task_.first_chunk + n];
        const auto [offset, nbytes] = (*object_.index)[static_cast<size_t>(chunk.inner)];
        if (offset < 0 || !is_wanted(chunk)) continue;
        const i64 end = offset + nbytes;
        if (!run.nbytes) run = {offset, nbytes};
        else if (offset < run.offset || offset - run.offset - run.nbytes > REMOTE_GAP || end - run.offset > most_read_)
            break;
        else run.nbytes = std::max(run.nbytes, end - run.offset);
    }
    return run;
}

// Bring all of an object whose size is unknown into the thread's memory.
void Execution::fetch_whole() {
    i64 capacity = most_stored(geometry_.chunk_nbytes);
    const i64 decoding = geometry_.chunk_nbytes + decode_scratch_nbytes(geometry_.chain, geometry_.chunk_nbytes);
    Fetched fetched;
    for (;;) {
        gate_.reset();
        gate_.emplace(capacity + decoding);
        fetched = request(0, -1, scratch().stored.reserve(capacity), capacity);
        if (fetched.version.nbytes <= capacity) break;
        capacity = fetched.version.nbytes;
    }
    object_.version = fetched.version;
    object_.range = {0, fetched.version.nbytes};
    if (fetched.nbytes != object_.range.nbytes) fail(LC_SHORT, 0, fetched.nbytes, object_.range.nbytes);
    fetched_offset_ = 0;
    fetched_nbytes_ = fetched.nbytes;
}

// Read bytes of an object, all of them, and compare its version with that of other requests.
void Execution::fetch_checked(u8 *to, i64 nbytes, i64 offset) {
    if (!nbytes) return;
    const bool whole = !offset && nbytes == object_.range.nbytes;
    Fetched fetched;
    try {
        fetched = request(offset, whole ? -1 : nbytes, to, nbytes);
    } catch (const FailedRead &error) {
        const i64 known = object_.version.nbytes;
        if (error.failure.code == LC_MISSING && known >= 0) fail(LC_REPLACED, 0, known, 0);
        throw;
    }
    if (object_.version.nbytes < 0) {
        object_.version = fetched.version;  // of a raw chunk, which one task reads
    } else if (!(fetched.version == object_.version)) {
        fail(LC_REPLACED, 0, object_.version.nbytes, fetched.version.nbytes);
    }
    if (object_.version.nbytes != object_.range.nbytes)
        fail(LC_SIZE, 0, object_.version.nbytes, geometry_.chunk_nbytes);
    if (fetched.nbytes != nbytes) fail(LC_SHORT, 0, fetched.nbytes, nbytes);
}

}  // namespace lc
