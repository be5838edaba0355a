// What a task does: open, look, read, look; decode; copy.
#include <algorithm>

#include "device.hpp"
#include "reader.hpp"

namespace lc {
namespace {

// Bytes between two wanted ranges of a file that are read along with them.
constexpr i64 GAP = 64 * 1024;
// Memory that a thread keeps for its next task, and above which tasks ask the gate of the process.
constexpr i64 KEPT_NBYTES = 16 << 20;

struct Scratch {
    Buffer stored, decoded;
    DecodeScratch decode;
    void trim() {
        stored.trim(KEPT_NBYTES);
        decoded.trim(KEPT_NBYTES);
        decode.trim(KEPT_NBYTES);
    }
};

class Gate {
public:
    explicit Gate(i64 nbytes) : nbytes_(nbytes > KEPT_NBYTES ? nbytes : 0) {
        if (nbytes_) MemoryGate::shared().acquire(nbytes_);
    }
    ~Gate() {
        if (nbytes_) MemoryGate::shared().release(nbytes_);
    }
    Gate(const Gate &) = delete;
    Gate &operator=(const Gate &) = delete;

private:
    i64 nbytes_;
};

struct FailedRead { Failure failure; };

[[noreturn]] void fail(i64 code, i64 number = 0, i64 a = 0, i64 b = 0) { throw FailedRead{{code, number, a, b, {}}}; }

// Seconds since the last look at a clock.
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

// Bytes of a file that are read for one chunk.
struct Span {
    u32 chunk;
    i64 offset, nbytes;
};

// One task of a wave, on the thread that carries it out.
class Execution {
public:
    Execution(Wave &wave, const Task &task, Reader &reader)
        : wave_(wave), task_(task), object_(wave.objects[task.object]), geometry_(*object_.array->geometry),
          reader_(reader), indexes_(reader.indexes), device_(reader.device()), state_(task.chunks, PENDING) {}

    void run();
    i64 chunks_read() const { return std::count(state_.begin(), state_.end(), READ); }

    i64 bytes_read = 0, files_opened = 0, decoded = 0;
    Seconds seconds;

private:
    enum State : u8 { PENDING, SKIPPED, READ, FILLED, FAILED };

    bool is_wanted(const WantedChunk &chunk) const;
    void locate();
    void open_object(const std::string &path);
    std::shared_ptr<const ShardIndex> read_index(const std::string &path);
    void check_unchanged() const;
    void read_all();
    void read_group(const Span *spans, size_t count);
    void read_pieces(u32 chunk, i64 offset);
    bool read_straight(const Span &span);
    void place(u32 chunk, const u8 *decoded, i64 first_byte);
    void fill(u32 chunk);
    void note_decoded(u32 chunk);
    void finish(u32 chunk, State state, i64 nbytes);
    void fail_chunk(u32 chunk, const Failure &failure, i64 offset = 0, i64 nbytes = 0);
    void stage_group(const Span *spans, size_t count);
    void stage_boxes(const Span *spans, size_t count, u32 first_box, u32 most);
    void stage_decoded(const Span &span, const u8 *stored);
    void stage_pieces(const WantedBox &box, i64 offset, i64 &total);
    void stage_fill(u32 chunk);
    bool decodes_on_device(const Span *spans, size_t count) const;
    Row row_of(const WantedBox &box, i64 source) const;
    void for_jobs_of_object(void (*each)(Job &, i64), i64 value);
    const u8 *read_exactly(i64 nbytes, i64 offset);
    Box layout_of(const WantedBox &box) const;
    WantedBox *boxes(u32 chunk) { return &wave_.boxes[wave_.chunks[chunk].first_box]; }
    State &state(u32 chunk) { return state_[chunk - task_.first_chunk]; }

    static Scratch &scratch() {
        thread_local Scratch memory;
        return memory;
    }

    Wave &wave_;
    const Task &task_;
    StoredObject &object_;
    const Geometry &geometry_;
    Reader &reader_;
    IndexCache &indexes_;
    Device *device_;
    std::vector<State> state_;
    Lap lap_;
};

bool Execution::is_wanted(const WantedChunk &chunk) const {
    const WantedBox *first = &wave_.boxes[chunk.first_box];
    return std::any_of(first, first + chunk.boxes, [](const WantedBox &box) { return !box.job->given_up(); });
}

void Execution::run() {
    bool any = false;
    for (u32 n = 0; n < task_.chunks; ++n) {
        const u32 chunk = task_.first_chunk + n;
        if (is_wanted(wave_.chunks[chunk])) any = true;
        else finish(chunk, SKIPPED, 0);
    }
    if (!any) return;
    Failure failure;
    try {
        locate();
        if (object_.missing) {
            for (u32 n = 0; n < task_.chunks; ++n)
                if (state_[n] == PENDING) fill(task_.first_chunk + n);
        } else {
            read_all();
        }
    } catch (const FailedRead &error) {
        failure = error.failure;
    } catch (const std::bad_alloc &) {
        failure.code = LC_MEMORY;
        failure.a = geometry_.chunk_nbytes;
    } catch (const DriverError &error) {
        failure.code = LC_DEVICE;
        failure.text = error.what();
    } catch (const std::exception &error) {
        failure.code = LC_INTERNAL;
        failure.text = error.what();
    }
    for (u32 n = 0; n < task_.chunks; ++n)
        if (state_[n] == PENDING) fail_chunk(task_.first_chunk + n, failure);
    scratch().trim();
    seconds.copy += lap_.take();
}

// The stored object: whether it is there, which version it is, and where its chunks lie. Done by the first task of it;
// the others find what that one found.
void Execution::locate() {
    const std::lock_guard lock(object_.mutex);
    if (!object_.located) {
        const std::string path = object_.array->path(object_.coordinates);
        try {
            open_object(path);
        } catch (const FailedRead &error) {
            object_.failure = error.failure;
        }
        object_.located = true;
    }
    if (object_.failure.code) throw FailedRead{object_.failure};
}

void Execution::open_object(const std::string &path) {
    if (const int number = object_.file.open(path)) {
        if ((number != ENOENT && number != ENOTDIR) || !is_missing(path)) fail(LC_OPEN, number);
        if (!exists(object_.array->metadata)) fail(LC_GONE);
        object_.missing = true;
        return;
    }
    ++files_opened;
    for_jobs_of_object([](Job &job, i64 n) { job.files_opened += n; }, 1);
    bool is_regular = false;
    if (const int number = object_.file.look(object_.version, is_regular)) fail(LC_READ, number);
    if (!is_regular) fail(LC_NOT_FILE);
    if (geometry_.sharded()) {
        object_.index = indexes_.find(path, object_.version, geometry_);
        if (!object_.index) object_.index = read_index(path);
    } else if (!geometry_.encoded() && object_.version.nbytes != geometry_.chunk_nbytes) {
        fail(LC_SIZE, 0, object_.version.nbytes, geometry_.chunk_nbytes);
    }
}

std::shared_ptr<const ShardIndex> Execution::read_index(const std::string &path) {
    const i64 size = object_.version.nbytes, nbytes = std::min(geometry_.index_nbytes, size);
    const Gate gate(nbytes);
    const u8 *stored = read_exactly(nbytes, geometry_.index_at_end ? size - nbytes : 0);
    check_unchanged();
    std::shared_ptr<const ShardIndex> index;
    try {
        index = parse_index(geometry_, stored, nbytes, size);
    } catch (const std::bad_alloc &) {
        throw;
    } catch (const std::exception &error) {
        throw FailedRead{{LC_INDEX, 0, 0, 0, error.what()}};
    }
    for_jobs_of_object([](Job &job, i64 n) { job.bytes_read += n; }, nbytes);
    indexes_.keep(path, object_.version, geometry_, index);
    return index;
}

void Execution::check_unchanged() const {
    Version found;
    bool is_regular = false;
    if (const int number = object_.file.look(found, is_regular)) fail(LC_READ, number);
    if (!(found == object_.version)) fail(LC_REPLACED, 0, object_.version.nbytes, found.nbytes);
}

const u8 *Execution::read_exactly(i64 nbytes, i64 offset) {
    u8 *to = scratch().stored.reserve(nbytes);
    const i64 got = object_.file.read(to, nbytes, offset);
    if (got < 0) fail(LC_READ, -got);
    if (got != nbytes) {
        check_unchanged();  // a file that became shorter says more than the bytes that are missing
        fail(LC_SHORT, 0, got, nbytes);
    }
    return to;
}

// Read what is stored, chunks that lie side by side together.
void Execution::read_all() {
    std::vector<Span> spans;
    spans.reserve(task_.chunks);
    for (u32 n = 0; n < task_.chunks; ++n) {
        if (state_[n] != PENDING) continue;
        const u32 chunk = task_.first_chunk + n;
        ChunkRange range{0, object_.version.nbytes};
        if (object_.index) range = (*object_.index)[static_cast<size_t>(wave_.chunks[chunk].inner)];
        if (range.offset < 0) {
            fill(chunk);
            continue;
        }
        if (geometry_.encoded()) {
            spans.push_back({chunk, range.offset, range.nbytes});
            continue;
        }
        const WantedBox *first = boxes(chunk);
        i64 begin = INT64_MAX, end = 0;
        for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
            if (box->job->given_up()) continue;
            begin = std::min(begin, box->source_offset);
            end = std::max(end, box->source_offset + span_nbytes(geometry_, box->extent));
        }
        if (begin >= end) {
            finish(chunk, SKIPPED, 0);
            continue;
        }
        // The gap between two neighbours along the slowest axis is less than its stride.
        const bool whole = geometry_.chunk_strides[geometry_.stored_axes[0]] <= READ_THROUGH;
        if (whole && end - begin <= MOST_READ) spans.push_back({chunk, range.offset + begin, end - begin});
        else read_pieces(chunk, range.offset);
    }
    std::sort(spans.begin(), spans.end(), [](const Span &a, const Span &b) { return a.offset < b.offset; });
    for (size_t first = 0; first < spans.size();) {
        size_t last = first + 1;
        i64 end = spans[first].offset + spans[first].nbytes;
        for (; last < spans.size() && spans[last].offset - end <= GAP; ++last) {
            const i64 further = std::max(end, spans[last].offset + spans[last].nbytes);
            if (further - spans[first].offset > MOST_READ) break;
            // Kernels read elements where they lie in the slab.
            const bool misplaced = (spans[last].offset - spans[first].offset) % geometry_.itemsize != 0;
            if (device_ && !geometry_.encoded() && misplaced) break;
            end = further;
        }
        read_group(&spans[first], last - first);
        first = last;
    }
}

void Execution::read_group(const Span *spans, size_t count) {
    if (device_) return stage_group(spans, count);
    if (count == 1 && !geometry_.encoded() && read_straight(*spans)) return;
    i64 end = 0;
    for (size_t n = 0; n < count; ++n) end = std::max(end, spans[n].offset + spans[n].nbytes);
    const i64 nbytes = end - spans->offset;
    const i64 decoded = geometry_.encoded() ? geometry_.chunk_nbytes : 0;
    const Gate gate(nbytes + decoded + (decoded ? decode_scratch_nbytes(geometry_.chain, decoded) : 0));
    const u8 *stored = read_exactly(nbytes, spans->offset);
    check_unchanged();
    seconds.read += lap_.take();
    for (size_t n = 0; n < count; ++n) {
        const Span &span = spans[n];
        const u8 *from = stored + (span.offset - spans->offset);
        if (!geometry_.encoded()) {
            const i64 base =
                object_.index ? (*object_.index)[static_cast<size_t>(wave_.chunks[span.chunk].inner)].offset : 0;
            place(span.chunk, from, span.offset - base);
            finish(span.chunk, READ, span.nbytes);
            continue;
        }
        try {
            const WantedBox &box = *boxes(span.chunk);
            const bool straight = wave_.chunks[span.chunk].boxes == 1 && box.batch->regions.conversion.is_copy() &&
                                  std::equal(box.extent, box.extent + geometry_.rank, geometry_.chunk_shape) &&
                                  std::equal(geometry_.chunk_strides, geometry_.chunk_strides + geometry_.rank,
                                             layout_of(box).target_strides);
            u8 *to = straight ? box.target : scratch().decoded.reserve(geometry_.chunk_nbytes);
            decode_chunk(geometry_.chain, {from, static_cast<size_t>(span.nbytes)},
                         {to, static_cast<size_t>(geometry_.chunk_nbytes)}, scratch().decode);
            note_decoded(span.chunk);
            if (!straight) place(span.chunk, to, 0);
            seconds.copy += lap_.take();
            finish(span.chunk, READ, span.nbytes);
        } catch (const DecodeError &error) {
            fail_chunk(span.chunk, {LC_DECODE, 0, 0, 0, error.what()}, span.offset, span.nbytes);
        }
    }
    seconds.copy += lap_.take();
}

// Read a raw chunk that lies in its output as it is stored, without a copy in between.
bool Execution::read_straight(const Span &span) {
    const WantedBox &box = *boxes(span.chunk);
    if (wave_.chunks[span.chunk].boxes > 1 || !box.batch->regions.conversion.is_copy()) return false;
    const Box layout = layout_of(box);
    i64 nbytes = geometry_.itemsize;
    for (i64 a = 0; a < geometry_.rank; ++a) {
        nbytes *= box.extent[a];
        if (box.extent[a] > 1 && layout.target_strides[a] != geometry_.chunk_strides[a]) return false;
    }
    if (nbytes != span.nbytes) return false;
    const i64 got = object_.file.read(box.target, nbytes, span.offset);
    if (got < 0) fail(LC_READ, -got);
    check_unchanged();
    if (got != nbytes) fail(LC_SHORT, 0, got, nbytes);
    seconds.read += lap_.take();
    finish(span.chunk, READ, nbytes);
    return true;
}

// Read a raw chunk that is too large to be read whole, or of which little is wanted: piece by piece.
void Execution::read_pieces(u32 chunk, i64 offset) {
    const WantedBox *first = boxes(chunk);
    i64 total = 0;
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
        if (box->job->given_up()) continue;
        if (device_) {
            stage_pieces(*box, offset, total);
            continue;
        }
        Box layout = layout_of(*box);
        for (const Piece &piece : cut_pieces(geometry_, box->extent, layout.target_strides, MOST_READ)) {
            const u8 *stored = read_exactly(piece.nbytes, offset + box->source_offset + piece.source_offset);
            check_unchanged();
            seconds.read += lap_.take();
            std::copy(piece.extent, piece.extent + LC_MAX_RANK, layout.extent);
            copy_box(box->batch->regions.conversion, layout, stored, box->target + piece.target_offset);
            seconds.copy += lap_.take();
            total += piece.nbytes;
        }
    }
    finish(chunk, READ, total);
}

Box Execution::layout_of(const WantedBox &box) const {
    Box layout;
    layout.rank = geometry_.rank;
    const i64 *strides = box.batch->regions.strides.data() + box.region * geometry_.rank;
    std::copy(box.extent, box.extent + geometry_.rank, layout.extent);
    std::copy(geometry_.chunk_strides, geometry_.chunk_strides + geometry_.rank, layout.source_strides);
    std::copy(strides, strides + geometry_.rank, layout.target_strides);
    return layout;
}

// Copy the boxes of a chunk, of which `decoded` holds the bytes from `first_byte` on.
void Execution::place(u32 chunk, const u8 *decoded, i64 first_byte) {
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box)
        if (!box->job->given_up())
            copy_box(box->batch->regions.conversion, layout_of(*box), decoded + (box->source_offset - first_byte),
                     box->target);
}

void Execution::fill(u32 chunk) {
    if (device_) return stage_fill(chunk);
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box)
        if (!box->job->given_up())
            fill_box(dtype_nbytes(box->batch->regions.conversion.target), box->batch->regions.fill, layout_of(*box),
                     box->target);
    finish(chunk, FILLED, 0);
}

// Count a chunk that the host decoded, and what that took since the last look at the clock.
void Execution::note_decoded(u32 chunk) {
    const double took = lap_.take();
    seconds.decode += took;
    ++decoded;
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
        box->job->decoded.fetch_add(1, std::memory_order_relaxed);
        box->job->decode_nanoseconds.fetch_add(static_cast<i64>(1e9 * took), std::memory_order_relaxed);
    }
}

void Execution::finish(u32 chunk, State how, i64 nbytes) {
    state(chunk) = how;
    if (how == READ) bytes_read += nbytes;
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
        Job &job = *box->job;
        job.chunks.fetch_add(1, std::memory_order_relaxed);
        if (how == FILLED) job.filled.fetch_add(1, std::memory_order_relaxed);
        if (how == READ) job.bytes_read.fetch_add(nbytes, std::memory_order_relaxed);
    }
}

void Execution::fail_chunk(u32 chunk, const Failure &failure, i64 offset, i64 nbytes) {
    lc_error error{};
    error.code = failure.code;
    error.number = failure.number;
    error.a = failure.a;
    error.b = failure.b;
    std::copy(object_.coordinates, object_.coordinates + LC_MAX_RANK, error.object);
    std::copy(wave_.chunks[chunk].coordinates, wave_.chunks[chunk].coordinates + LC_MAX_RANK, error.chunk);
    error.has_chunk = failure.code == LC_DECODE;
    error.offset = offset;
    error.nbytes = nbytes;
    failure.text.copy(error.text, sizeof error.text - 1);
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) box->job->fail(error);
    finish(chunk, FAILED, 0);
}

// Call something once for each job that wants a chunk of the object.
void Execution::for_jobs_of_object(void (*each)(Job &, i64), i64 value) {
    std::vector<Job *> jobs;
    for (u32 n = 0; n < object_.chunks; ++n) {
        const u32 chunk = object_.first_chunk + n;
        for (u32 k = 0; k < wave_.chunks[chunk].boxes; ++k) {
            Job *job = boxes(chunk)[k].job;
            if (jobs.empty() || jobs.back() != job) jobs.push_back(job);
        }
    }
    std::sort(jobs.begin(), jobs.end());
    jobs.erase(std::unique(jobs.begin(), jobs.end()), jobs.end());
    for (Job *job : jobs) each(*job, value);
}

// On a device: ranges of slabs in place of scratch memory

Row Execution::row_of(const WantedBox &box, i64 source) const {
    Row row{box.batch, box.job, box.target, box.region, source, {}};
    std::copy(box.extent, box.extent + LC_MAX_RANK, row.extent);
    return row;
}

// Few chunks at a time the host decodes sooner than the device.
bool Execution::decodes_on_device(const Span *spans, size_t count) const {
    const lc_decode_plan *plan = wave_.boxes[wave_.chunks[spans->chunk].first_box].batch->decode;
    if (!plan || static_cast<i64>(count) > plan->chunks) return false;
    i64 end = 0;
    for (size_t n = 0; n < count; ++n) end = std::max(end, spans[n].offset + spans[n].nbytes);
    if (end - spans->offset + 64 > plan->stored_nbytes) return false;
    for (size_t n = 0; n < count; ++n)
        if (spans[n].nbytes <= plan->checksum_nbytes) return false;
    return static_cast<i64>(wave_.chunks.size()) + device_->chunks_in_flight() >= plan->device_from;
}

void Execution::stage_group(const Span *spans, size_t count) {
    i64 rows = 0;
    for (size_t n = 0; n < count; ++n) rows += wave_.chunks[spans[n].chunk].boxes;
    if (count > 1 && (rows > Device::MOST_ROWS || (geometry_.encoded() && !decodes_on_device(spans, count)))) {
        for (size_t n = 0; n < count; ++n) stage_group(spans + n, 1);
        return;
    }
    if (geometry_.encoded() && !decodes_on_device(spans, count)) {
        const Gate gate(spans->nbytes + decode_scratch_nbytes(geometry_.chain, geometry_.chunk_nbytes));
        const u8 *stored = read_exactly(spans->nbytes, spans->offset);
        check_unchanged();
        seconds.read += lap_.take();
        stage_decoded(*spans, stored);
        return;
    }
    const u32 most = static_cast<u32>(Device::MOST_ROWS);
    for (u32 first = 0; first == 0 || (count == 1 && first < wave_.chunks[spans->chunk].boxes); first += most)
        stage_boxes(spans, count, first, most);
    for (size_t n = 0; n < count; ++n) finish(spans[n].chunk, READ, spans[n].nbytes);
}

// Read spans into a slab; of a single one the boxes from `first_box` on, `most` at most.
void Execution::stage_boxes(const Span *spans, size_t count, u32 first_box, u32 most) {
    i64 end = 0, row_count = 0;
    for (size_t n = 0; n < count; ++n) {
        end = std::max(end, spans[n].offset + spans[n].nbytes);
        row_count += wave_.chunks[spans[n].chunk].boxes;
    }
    const lc_decode_plan *plan = geometry_.encoded() ? boxes(spans->chunk)->batch->decode : nullptr;
    const i64 nbytes = end - spans->offset;
    std::vector<Row> rows;
    std::vector<StagedChunk> chunks;
    rows.reserve(static_cast<size_t>(row_count));
    chunks.reserve(count);
    std::vector<WantedBox *> taken;
    taken.reserve(static_cast<size_t>(row_count));
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    const Range range =
        device_->reserve(plan, nbytes, std::min<i64>(row_count, most), plan ? static_cast<i64>(count) : 0);
    try {
        const i64 got = object_.file.read(range.memory, nbytes, spans->offset);
        if (got < 0) fail(LC_READ, -got);
        check_unchanged();
        if (got != nbytes) fail(LC_SHORT, 0, got, nbytes);
    } catch (...) {
        device_->give_up(range);
        throw;
    }
    for (size_t n = 0; n < count; ++n) {
        const Span &span = spans[n];
        const WantedChunk &chunk = wave_.chunks[span.chunk];
        const i64 at = span.offset - spans->offset;
        const i64 base = object_.index ? (*object_.index)[static_cast<size_t>(chunk.inner)].offset : 0;
        const u32 first_row = static_cast<u32>(rows.size());
        for (u32 k = first_box; k < std::min(chunk.boxes, first_box + most); ++k) {
            WantedBox &box = boxes(span.chunk)[k];
            if (box.job->given_up()) continue;
            rows.push_back(
                row_of(box, plan ? box.source_offset : range.offset + at + box.source_offset - (span.offset - base)));
            taken.push_back(&box);
        }
        if (plan)
            chunks.push_back({wave, task_.object, span.chunk, span.offset, span.nbytes, range.offset + at, first_row,
                              static_cast<u32>(rows.size()) - first_row});
    }
    for (WantedBox *box : taken) box->staged = true;
    device_->commit(range, wave, rows, std::move(chunks));
    seconds.read += lap_.take();
}

// Decode a chunk into a slab.
void Execution::stage_decoded(const Span &span, const u8 *stored) {
    const WantedChunk &chunk = wave_.chunks[span.chunk];
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    const u32 most = static_cast<u32>(Device::MOST_ROWS);
    for (u32 first = 0; first < chunk.boxes; first += most) {
        std::vector<Row> rows;
        std::vector<WantedBox *> taken;
        for (u32 k = first; k < std::min(chunk.boxes, first + most); ++k)
            if (WantedBox &box = boxes(span.chunk)[k]; !box.job->given_up()) taken.push_back(&box);
        rows.reserve(taken.size());
        const Range range = device_->reserve(nullptr, geometry_.chunk_nbytes, static_cast<i64>(taken.size()), 0);
        try {
            decode_chunk(geometry_.chain, {stored, static_cast<size_t>(span.nbytes)},
                         {range.memory, static_cast<size_t>(geometry_.chunk_nbytes)}, scratch().decode);
        } catch (const DecodeError &error) {
            device_->give_up(range);
            fail_chunk(span.chunk, {LC_DECODE, 0, 0, 0, error.what()}, span.offset, span.nbytes);
            return;
        } catch (...) {
            device_->give_up(range);
            throw;
        }
        for (WantedBox *box : taken) {
            rows.push_back(row_of(*box, range.offset + box->source_offset));
            box->staged = true;
        }
        device_->commit(range, wave, rows);
    }
    note_decoded(span.chunk);
    finish(span.chunk, READ, span.nbytes);
}

void Execution::stage_pieces(const WantedBox &box, i64 offset, i64 &total) {
    const std::vector<Piece> pieces = cut_pieces(geometry_, box.extent, layout_of(box).target_strides, MOST_READ);
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    box.job->expect(static_cast<i64>(pieces.size()));
    size_t done = 0;
    try {
        for (const Piece &piece : pieces) {
            const Range range = device_->reserve(nullptr, piece.nbytes, 1, 0);
            try {
                const i64 got =
                    object_.file.read(range.memory, piece.nbytes, offset + box.source_offset + piece.source_offset);
                if (got < 0) fail(LC_READ, -got);
                check_unchanged();
                if (got != piece.nbytes) fail(LC_SHORT, 0, got, piece.nbytes);
                Row row = row_of(box, range.offset);
                row.target += piece.target_offset;
                std::copy(piece.extent, piece.extent + LC_MAX_RANK, row.extent);
                device_->commit(range, wave, {row});
            } catch (...) {
                device_->give_up(range);
                throw;
            }
            ++done;
            total += piece.nbytes;
        }
    } catch (...) {
        reader_.settle(*box.job, static_cast<i64>(pieces.size() - done));
        throw;
    }
}

void Execution::stage_fill(u32 chunk) {
    const u32 count = wave_.chunks[chunk].boxes, most = static_cast<u32>(Device::MOST_ROWS);
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    for (u32 first = 0; first < count; first += most) {
        std::vector<Row> rows;
        std::vector<WantedBox *> taken;
        for (u32 k = first; k < std::min(count, first + most); ++k)
            if (WantedBox &box = boxes(chunk)[k]; !box.job->given_up()) {
                rows.push_back(row_of(box, -1));
                taken.push_back(&box);
            }
        const Range range = device_->reserve(nullptr, 0, static_cast<i64>(rows.size()), 0);
        for (WantedBox *box : taken) box->staged = true;
        device_->commit(range, wave, rows);
    }
    finish(chunk, FILLED, 0);
}

}  // namespace

// Decode on the host a chunk that the device gave up, and copy its boxes; or say why nobody can.
void Reader::decode_again(const StagedChunk &chunk, const std::vector<u8> &stored, std::vector<Row> &rows) noexcept {
    lc_error error{};
    try {
        const Geometry &geometry = *rows.front().batch->regions.geometry;
        const Range range = device_->reserve(nullptr, geometry.chunk_nbytes, static_cast<i64>(rows.size()), 0);
        try {
            DecodeScratch scratch;
            decode_chunk(geometry.chain, stored, {range.memory, static_cast<size_t>(geometry.chunk_nbytes)}, scratch);
        } catch (...) {
            device_->give_up(range);
            throw;
        }
        for (Row &row : rows) {
            row.job->decoded.fetch_add(1, std::memory_order_relaxed);
            row.source += range.offset;
        }
        device_->commit(range, chunk.wave, rows);
        return;
    } catch (const DecodeError &refused) {
        error.code = LC_DECODE;
        std::string(refused.what()).copy(error.text, sizeof error.text - 1);
    } catch (const DriverError &failed) {
        error.code = LC_DEVICE;
        std::string(failed.what()).copy(error.text, sizeof error.text - 1);
    } catch (const std::exception &) {
        error.code = LC_MEMORY;
    }
    const StoredObject &object = chunk.wave->objects[chunk.object];
    std::copy(object.coordinates, object.coordinates + LC_MAX_RANK, error.object);
    const WantedChunk &wanted = chunk.wave->chunks[chunk.chunk];
    std::copy(wanted.coordinates, wanted.coordinates + LC_MAX_RANK, error.chunk);
    error.has_chunk = 1;
    error.offset = chunk.offset;
    error.nbytes = chunk.nbytes;
    for (const Row &row : rows) {
        row.job->fail(error);
        settle(*row.job, 1);
    }
}

void Reader::execute(Wave &wave, const Task &task) noexcept {
    const auto add = [](std::atomic<double> &sum, double value) {
        double known = sum.load(std::memory_order_relaxed);
        while (!sum.compare_exchange_weak(known, known + value)) {
        }
    };
    try {
        Execution execution(wave, task, *this);
        execution.run();
        stats.chunks += execution.chunks_read();
        stats.bytes_read += execution.bytes_read;
        stats.files_opened += execution.files_opened;
        stats.decoded += execution.decoded;
        add(stats.read_seconds, execution.seconds.read);
        add(stats.decode_seconds, execution.seconds.decode);
        add(stats.copy_seconds, execution.seconds.copy);
    } catch (...) {  // no memory even for the records of the task
        lc_error error{};
        error.code = LC_MEMORY;
        for (u32 n = 0; n < task.chunks; ++n) {
            const WantedChunk &chunk = wave.chunks[task.first_chunk + n];
            std::copy(wave.objects[task.object].coordinates, wave.objects[task.object].coordinates + LC_MAX_RANK,
                      error.object);
            std::copy(chunk.coordinates, chunk.coordinates + LC_MAX_RANK, error.chunk);
            for (u32 k = 0; k < chunk.boxes; ++k) wave.boxes[chunk.first_box + k].job->fail(error);
        }
    }
    if (StoredObject &object = wave.objects[task.object]; object.tasks_left.fetch_sub(1) == 1) object.file.close();
    // Last: whoever waits for a job may free its output now.
    for (u32 n = 0; n < task.chunks; ++n) {
        const WantedChunk &chunk = wave.chunks[task.first_chunk + n];
        for (u32 k = 0; k < chunk.boxes; ++k)
            if (const WantedBox &box = wave.boxes[chunk.first_box + k]; !box.staged) settle(*box.job, 1);
    }
}

}  // namespace lc
