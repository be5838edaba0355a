// Objects in an object store: requests, and what tasks do with them in place of opening and reading files.
//
// Every response says which version of the object it is of; another one than before is an error. The first request of an
// object is one that is needed anyway: the index of a shard, all of an encoded chunk, or the wanted bytes of a raw one,
// which is found to be missing, or of a wrong size, only then.
#include "remote.hpp"

#include <algorithm>
#include <array>
#include <mutex>

#include "execution.hpp"

namespace lc {
namespace {

std::atomic<lc_fetch_object> fetch_object{nullptr};
std::atomic<i64> most_requests{32};

// What all requests of the process share.
struct Requests {
    explicit Requests(i64 most) : limit(most) {}
    Limit limit;
    std::mutex mutex;
    i64 lent = 0, count = 0;  // loans that are not given back, and those that no call has told yet
    std::array<i64, 16> returned;
};

std::atomic<Requests *> shared_requests{nullptr};

Requests &requests() {
    return made_once(shared_requests, [] { return new Requests(most_requests.load()); });
}

// Call the caller's function, and tell it which loans were given back. One that is given back without a request waits for
// the next call, unless it is the last, or one of many.
void call(lc_fetch &record, i64 loan = 0) {
    std::array<i64, 16> returned;
    {
        Requests &shared = requests();
        const std::lock_guard lock(shared.mutex);
        if (loan) {
            shared.returned[static_cast<size_t>(shared.count++)] = loan;
            if (--shared.lent && shared.count < static_cast<i64>(returned.size())) return;
        }
        returned = shared.returned;
        record.returned_count = std::exchange(shared.count, 0);
    }
    record.returned = returned.data();
    fetch_object.load()(&record);
    if (!record.loan) return;
    const std::lock_guard lock(requests().mutex);
    ++requests().lent;
}

// In place of the size of an object that its store does not tell.
constexpr i64 UNKNOWN_NBYTES = INT64_MAX / 2;
// Bytes that an encoded chunk has at most, but for odd encoders.
i64 most_stored(i64 chunk_nbytes) { return chunk_nbytes + chunk_nbytes / 64 + 4096; }

}  // namespace

void set_fetch(lc_fetch_object function, i64 count) {
    fetch_object.store(function);
    most_requests.store(std::clamp<i64>(count, 1, Pool::MOST_WAITING));
}

void forget_requests() { shared_requests.store(nullptr); }

Fetched::~Fetched() {
    lc_fetch record{};
    if (loan_) call(record, loan_);
}

bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, i64 capacity, Fetched &fetched, Failure &failure,
           const std::function<bool()> &given_up) {
    lc_fetch record{};
    record.store = store;
    record.key = key.c_str();
    record.offset = offset;
    record.nbytes = nbytes;
    record.capacity = capacity;
    record.code = LC_REMOTE;
    if (fetch_object.load()) {
        Limit &limit = requests().limit;
        Pool &pool = Pool::shared();
        limit.acquire(1);
        pool.begin_wait();  // another thread works meanwhile
        if (given_up()) record.code = LC_CANCELLED;
        else call(record);
        pool.end_wait();
        limit.release(1);
    }
    fetched = Fetched(record);
    if (record.code == LC_OK) return true;
    failure.code = record.code;
    failure.text = record.text;
    return false;
}

Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing) {
    Fetched fetched;
    Failure failure;
    const bool found = fetch(store, key, 0, 0, 0, fetched, failure, [&] { return closing.load(); });
    return found && is_told(fetched.version) ? fetched.version : Version{};
}

// One request for the object, counted for the jobs that want it.
Fetched Execution::request(i64 offset, i64 nbytes, i64 capacity) {
    Fetched fetched;
    Failure failure;
    ++files_opened;
    for_jobs_of_object([](Job &job, i64 n) { job.files_opened += n; }, 1);
    if (!fetch(object_.array->store, object_.array->path(object_.coordinates), offset, nbytes, capacity, fetched,
               failure, [this] { return reader_.closing() || !anyone_wants(); }))
        throw FailedRead{failure};
    return fetched;
}

// Whether chunks of the object are wanted, by any task.
bool Execution::anyone_wants() const {
    const auto wanted = [this](const WantedChunk &chunk) { return is_wanted(chunk); };
    const auto first = wave_.chunks.begin() + task_.first_chunk, other = wave_.chunks.begin() + object_.first_chunk;
    return std::any_of(first, first + task_.chunks, wanted) || std::any_of(other, other + object_.chunks, wanted);
}

// Where chunks are missing, whether their array is: its metadata are looked for once in each wave.
void Execution::check_metadata() {
    Array &array = *object_.array;
    const std::lock_guard lock(array.mutex);
    if (std::exchange(array.looked_in, wave_.number) != wave_.number) {
        Fetched fetched;
        Failure failure;
        fetch(array.store, array.metadata, 0, 0, 0, fetched, failure, [this] { return reader_.closing().load(); });
        array.is_gone = failure.code == LC_MISSING;
    }
    if (array.is_gone) fail(LC_GONE);
}

// Before a task looks at its chunks: those of a shard are sorted by where they lie in it when its index is read, so that
// a request brings what lies together in whatever order shards were written. No task may have looked at its chunks then.
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
    const Gate gate(nbytes);
    const Fetched fetched = request(geometry_.index_at_end ? -1 : 0, nbytes, nbytes);
    object_.version = fetched.version;
    object_.range = {0, fetched.version.nbytes < 0 ? UNKNOWN_NBYTES : fetched.version.nbytes};
    take_index(fetched.data, fetched.nbytes);
    if (is_told(object_.version)) indexes_.keep(index_name(), object_.version, geometry_, object_.index);
}

// Bytes that are fetched, and what decoding them takes besides, within the limit of the process.
void Execution::begin_fetch(i64 nbytes) {
    fetched_ = {};
    gate_.reset();
    gate_.emplace(nbytes + (geometry_.encoded() ? geometry_.chunk_nbytes +
                                                      decode_scratch_nbytes(geometry_.chain, geometry_.chunk_nbytes)
                                                : 0));
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
            begin_fetch(nbytes);
            fetched_ = request(offset, nbytes, nbytes);
            fetched_offset_ = offset;
            if (fetched_.version == object_.version && fetched_.nbytes == nbytes) return true;
        } catch (const FailedRead &) {  // the request for the index says why, or succeeds
        }
        fetched_ = {};
        gate_.reset();
    }
    object_.index.reset();
    object_.version = {};
    return false;
}

// What this task reads together first of its chunks; no bytes where there are none, or where the first is read in pieces.
StoredRange Execution::first_run() const {
    StoredRange run{0, 0};
    for (u32 n = 0; n < task_.chunks; ++n) {
        const WantedChunk &chunk = wave_.chunks[task_.first_chunk + n];
        const ChunkRange stored = (*object_.index)[static_cast<size_t>(chunk.inner)];
        if (stored.offset < 0 || !is_wanted(chunk)) continue;
        const bool is_whole = geometry_.encoded() || (device_ && device_->kept());
        const auto [first, nbytes] = is_whole ? StoredRange{0, stored.nbytes} : wanted_bytes(chunk);
        if (!is_whole && !is_read_at_once(nbytes)) break;
        const i64 offset = stored.offset + first, end = offset + nbytes;
        if (!run.nbytes) run = {offset, nbytes};
        else if (offset < run.offset || offset - run.offset - run.nbytes > REMOTE_GAP || end - run.offset > most_read_)
            break;
        else run.nbytes = std::max(run.nbytes, end - run.offset);
    }
    return run;
}

// Bring all of an object whose size is unknown.
void Execution::fetch_whole() {
    i64 capacity = most_stored(geometry_.chunk_nbytes);
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

// Bytes of an object, all of them, until the next call; its version is compared with that of other requests.
const u8 *Execution::fetch_exactly(i64 nbytes, i64 offset) {
    const i64 first = offset - fetched_offset_;
    if (first >= 0 && first + nbytes <= fetched_.nbytes) return fetched_.data + first;
    if (!nbytes) return nullptr;
    const bool whole = !offset && nbytes == object_.range.nbytes;
    begin_fetch(nbytes);
    try {
        fetched_ = request(offset, whole ? -1 : nbytes, nbytes);
    } catch (const FailedRead &error) {
        const i64 known = object_.version.nbytes;
        if (error.failure.code == LC_MISSING && known >= 0) fail(LC_REPLACED, 0, known, 0);
        throw;
    }
    fetched_offset_ = offset;
    if (fetched_.version.nbytes >= 0) {
        if (object_.version.nbytes < 0) {
            object_.version = fetched_.version;  // of a raw chunk, which one task reads
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
