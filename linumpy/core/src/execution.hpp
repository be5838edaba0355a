// One task, on the thread that carries it out: locate.cpp locates its stored object, execute.cpp reads into host
// memory, stage.cpp into slabs of a device.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "device.hpp"
#include "reader.hpp"
#include "remote.hpp"

namespace lc {

// Wanted ranges of an object in an object store are read together across gaps of up to this many bytes.
constexpr i64 REMOTE_GAP = 512 * 1024;
// Bytes of each buffer that a thread keeps for its next task, fewer if many threads wait for storage. A task that needs
// more memory acquires all of it from the limit of the process.
constexpr i64 SCRATCH_NBYTES = 16 << 20;

struct Scratch : ThreadMemory {
    Buffer stored, decoded;
    DecodeScratch decode;
    void trim() {
        const i64 kept = Pool::shared().share(SCRATCH_NBYTES);
        stored.trim(kept);
        decoded.trim(kept);
        decode.trim(kept);
    }
};

// Holds a part of the process's limit of memory for large chunks; nothing if a thread may keep `nbytes`.
class MemoryGuard {
public:
    explicit MemoryGuard(i64 nbytes) : nbytes_(nbytes > Pool::shared().share(SCRATCH_NBYTES) ? nbytes : 0) {
        if (nbytes_) Limit::memory().acquire(nbytes_);
    }
    ~MemoryGuard() {
        if (nbytes_) Limit::memory().release(nbytes_);
    }
    MemoryGuard(const MemoryGuard &) = delete;
    MemoryGuard &operator=(const MemoryGuard &) = delete;

private:
    i64 nbytes_;
};

// Thrown if a chunk or stored object cannot be read.
struct FailedRead { Failure failure; };

[[noreturn]] inline void fail(i64 code, i64 number = 0, i64 a = 0, i64 b = 0) {
    throw FailedRead{{code, number, a, b, {}}};
}

// Throw for a file that could not be opened.
[[noreturn]] inline void fail_open(int number) { fail(LC_OPEN, number, number == EMFILE ? max_open_files() : 0); }

// Throw if an open file has changed since its stored object was located.
void check_unchanged(const StoredObject &object, const File &file);
// Read exactly `nbytes` bytes of a stored object, and check after the read that its file is unchanged; throws
// FailedRead.
void read_checked(const StoredObject &object, const File &file, u8 *to, i64 nbytes, i64 offset);
// The error record of a chunk that failed. `offset`, `nbytes`: byte range in the stored object, if decoding failed.
lc_error error_of(const Wave &wave, u32 object, u32 chunk, const Failure &failure, i64 offset = 0, i64 nbytes = 0);

// Seconds since the last call of `take`.
class Lap {
public:
    double take() {
        const double then = last_;
        last_ = now();
        return last_ - then;
    }

private:
    double last_ = now();
};

struct Seconds { double read = 0, decode = 0, copy = 0; };

// The byte range of a stored object that is read for one chunk.
struct Span {
    u32 chunk;
    i64 offset, nbytes;
};

// One task of a wave, on the thread that carries it out.
class Execution {
public:
    Execution(Wave &wave, const Task &task, Reader &reader)
        : wave_(wave), task_(task), object_(wave.objects[task.object]), geometry_(*object_.array->geometry),
          reader_(reader), indexes_(reader.indexes), device_(reader.device()),
          max_read_nbytes_(device_ ? std::min(MAX_READ_NBYTES, device_->capacity(nullptr)) : MAX_READ_NBYTES),
          state_(task.chunks, PENDING) {}

    ~Execution();
    Execution(const Execution &) = delete;
    Execution &operator=(const Execution &) = delete;

    void run();
    i64 chunks_read() const { return std::count(state_.begin(), state_.end(), READ); }

    i64 bytes_read = 0, files_opened = 0, hedges = 0, decoded = 0;
    Seconds seconds;

private:
    enum State : u8 { PENDING, SKIPPED, READ, FILLED, KEPT, AWAITED, FAILED };

    bool is_wanted(const WantedChunk &chunk) const;
    void locate();
    void use_kept_chunks();
    bool reserves_first() const;
    bool can_keep(const WantedBox &box) const;
    void reserve_kept();
    void await_kept();
    void give_back(KeptSlot *slot);
    bool has(State wanted) const { return std::find(state_.begin(), state_.end(), wanted) != state_.end(); }
    void open_object(const std::string &path);
    void enter_object() noexcept;
    void find_object() noexcept;
    void sort_chunks();
    std::string index_name() const;
    void fetch_index();
    bool try_kept_index();
    StoredRange first_run() const;
    void find_remote();
    void fetch_whole();
    Fetched request(i64 offset, i64 nbytes, i64 capacity);
    bool anyone_wants() const;
    void check_metadata();
    void begin_fetch(i64 nbytes);
    const u8 *fetch_exactly(i64 nbytes, i64 offset);
    StoredRange wanted_bytes(const WantedChunk &chunk) const;
    bool is_read_at_once(i64 nbytes) const;
    i64 gap() const;
    void await_turn() const;
    bool is_remote() const { return object_.array->store != 0; }
    void read_stored(u8 *to, i64 nbytes, i64 offset);
    bool find_entry(const Archive &archive);
    void read_index(const std::string &name);
    void set_index(const u8 *stored, i64 nbytes);
    void read_object();
    void read_found();
    void read_all();
    void read_group(const Span *spans, size_t count);
    void read_pieces(u32 chunk, i64 offset);
    bool read_in_place(const Span &span);
    void keep(u32 chunk);
    void fill(u32 chunk);
    void note_decoded(u32 chunk);
    void finish(u32 chunk, State state, i64 nbytes);
    void fail_chunk(u32 chunk, const Failure &failure, i64 offset = 0, i64 nbytes = 0);
    void stage_group(const Span *spans, size_t count);
    void stage_boxes(const Span *spans, size_t count, u32 first_box, u32 max_boxes);
    void stage_decoded(const Span &span, const u8 *stored);
    void read_into(Range &range, const std::shared_ptr<Wave> &wave, u32 chunk, i64 offset);
    template <class Load> i64 stage_pieces(const WantedBox &box, i64 offset, const Load &load);
    i64 stage_raw_pieces(const WantedBox &box, u32 chunk, i64 offset);
    bool decode_whole(const Span &span, const u8 *stored);
    bool fits_slab(u32 chunk) const;
    void stage_fill(u32 chunk);
    bool decodes_on_device(const Span *spans, size_t count) const;
    Row row_of(const WantedBox &box, i64 source) const;
    void for_jobs_of_object(void (*each)(Job &, i64), i64 value);
    const u8 *read_exactly(i64 nbytes, i64 offset);
    WantedBox *boxes(u32 chunk) { return &wave_.boxes[wave_.chunks[chunk].first_box]; }
    State &state(u32 chunk) { return state_[chunk - task_.first_chunk]; }

    // The slot of the cache that was reserved for a chunk; null for none.
    KeptSlot *slot_of(u32 chunk) const { return slots_.empty() ? nullptr : slots_[chunk - task_.first_chunk]; }
    // Hand over the slot of a chunk to what fills it; null also if the version of its object is not known.
    KeptSlot *take_slot(u32 chunk) {
        if (!slot_of(chunk) || (is_remote() && !is_known(object_.version))) return nullptr;
        KeptSlot *const slot = std::exchange(slots_[chunk - task_.first_chunk], nullptr);
        slot->version = object_.version;
        return slot;
    }

    static Scratch &scratch() {
        ThreadMemory *&memory = thread_memory();
        if (!memory) memory = new Scratch;
        return static_cast<Scratch &>(*memory);
    }

    Wave &wave_;
    const Task &task_;
    StoredObject &object_;
    const Geometry &geometry_;
    Reader &reader_;
    IndexCache &indexes_;
    Device *device_;
    i64 max_read_nbytes_;
    // The bytes that were fetched last from an object store, and their offset in the object.
    i64 fetched_offset_ = 0;
    std::optional<MemoryGuard> fetched_memory_;
    Fetched fetched_;
    std::vector<State> state_;
    std::vector<KeptSlot *> slots_;  // slot of the cache to fill with each chunk; empty if no chunks are kept
    Lap lap_;
};

}  // namespace lc
