// The steps of a task: open, stat, read, stat again; decode; copy.
#include <algorithm>

#include "execution.hpp"

namespace lc {
namespace {

// Wanted ranges of a file are read together across gaps of up to this many bytes: what is copied in the time of a read.
constexpr i64 GAP = 64 * 1024;
// On slow storage, gaps may have the bytes that one stream reads while a read waits, up to a maximum; of what is read
// together, at least half is wanted.
constexpr double STREAM_PER_SECOND = 2e8;
constexpr i64 MAX_GAP = 1 << 20;

}  // namespace

bool Execution::is_wanted(const WantedChunk &chunk) const {
    const WantedBox *first = &wave_.boxes[chunk.first_box];
    return std::any_of(first, first + chunk.boxes, [](const WantedBox &box) { return !box.job->is_abandoned(); });
}

void Execution::run() {
    enter_object();
    bool any_wanted = false;
    for (u32 n = 0; n < task_.chunks; ++n) {
        const u32 chunk = task_.first_chunk + n;
        if (is_wanted(wave_.chunks[chunk])) any_wanted = true;
        else finish(chunk, SKIPPED, 0);
    }
    if (!any_wanted) return;
    Failure failure;
    try {
        reserve_kept();
        if (!has(PENDING)) await_kept();
        if (has(PENDING)) read_object();
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
        if (state_[n] == PENDING || state_[n] == AWAITED) fail_chunk(task_.first_chunk + n, failure);
    if (thread_memory()) scratch().trim();
    seconds.copy += lap_.take();
}

void Execution::read_object() {
    locate();
    if (!object_.missing) read_found();
    if (object_.missing && is_remote()) check_metadata();
    for (u32 n = 0; object_.missing && n < task_.chunks; ++n)
        if (state_[n] == PENDING || state_[n] == AWAITED) fill(task_.first_chunk + n);
}

// Read chunks of an object that was located. Only this read shows whether a raw chunk in an object store is missing.
void Execution::read_found() {
    try {
        use_kept_chunks();
        read_all();
        if (!has(AWAITED)) return;
        await_kept();
        read_all();
    } catch (const FailedRead &error) {
        if (error.failure.code != LC_MISSING) throw;
        object_.missing = true;
    }
}

lc_error error_of(const Wave &wave, u32 object, u32 chunk, const Failure &failure, i64 offset, i64 nbytes) {
    lc_error error{};
    error.code = failure.code;
    error.number = failure.number;
    error.a = failure.a;
    error.b = failure.b;
    std::copy_n(wave.objects[object].coordinates, LC_MAX_RANK, error.object);
    std::copy_n(wave.chunks[chunk].coordinates, LC_MAX_RANK, error.chunk);
    error.offset = offset;
    error.nbytes = nbytes;
    failure.text.copy(error.text, sizeof error.text - 1);
    return error;
}

const u8 *Execution::read_exactly(i64 nbytes, i64 offset) {
    if (is_remote()) return fetch_exactly(nbytes, offset);
    u8 *to = scratch().stored.reserve(nbytes);
    read_stored(to, nbytes, offset);
    return to;
}

void Execution::read_stored(u8 *to, i64 nbytes, i64 offset) {
    if (!is_remote()) return read_checked(object_, object_.file, to, nbytes, offset);
    if (nbytes) std::memcpy(to, fetch_exactly(nbytes, offset), static_cast<size_t>(nbytes));
}

// After a read of slow storage: wait for other threads that compute, if they are as many as cores.
void Execution::await_turn() const {
    const Storage *storage = object_.file.storage();
    if (is_remote() || (storage && storage->is_slow())) Pool::shared().await_turn();
}

// The range from the first to the last wanted byte of a raw chunk; empty if all jobs that want it were abandoned.
StoredRange Execution::wanted_bytes(const WantedChunk &chunk) const {
    const WantedBox *first = &wave_.boxes[chunk.first_box];
    i64 begin = INT64_MAX, end = 0;
    for (const WantedBox *box = first; box != first + chunk.boxes; ++box) {
        if (box->job->is_abandoned()) continue;
        begin = std::min(begin, box->source_offset);
        end = std::max(end, box->source_offset + span_nbytes(geometry_, box->extent));
    }
    return {std::min(begin, end), std::max<i64>(0, end - begin)};
}

// Whether one read covers `nbytes` bytes of a raw chunk: they are few enough, and no gap in them exceeds READ_THROUGH.
// Gaps are shorter than the stride of the slowest axis.
bool Execution::is_read_at_once(i64 nbytes) const {
    return nbytes <= max_read_nbytes_ && geometry_.chunk_strides[geometry_.stored_axes[0]] <= READ_THROUGH;
}

// Longest gap in bytes across which wanted ranges of the object's file are read together.
i64 Execution::gap() const {
    const Storage *storage = object_.file.storage();
    if (!storage || !storage->is_slow()) return GAP;
    return std::clamp(static_cast<i64>(storage->wait() * STREAM_PER_SECOND), GAP, MAX_GAP);
}

// Read all stored chunks of the task. One read covers chunks that are close to each other in the file.
void Execution::read_all() {
    std::vector<Span> spans;
    spans.reserve(task_.chunks);
    for (u32 n = 0; n < task_.chunks; ++n) {
        if (state_[n] != PENDING) continue;
        const u32 chunk = task_.first_chunk + n;
        ChunkRange range{0, object_.range.nbytes};
        if (object_.index) range = (*object_.index)[static_cast<size_t>(wave_.chunks[chunk].inner)];
        if (range.offset < 0) {
            fill(chunk);
            continue;
        }
        if (reserves_first()) ++reader_.kept()->misses;
        if (geometry_.encoded() || slot_of(chunk)) {
            spans.push_back({chunk, range.offset, range.nbytes});
            continue;
        }
        const StoredRange wanted = wanted_bytes(wave_.chunks[chunk]);
        if (!wanted.nbytes) finish(chunk, SKIPPED, 0);
        else if (is_read_at_once(wanted.nbytes)) spans.push_back({chunk, range.offset + wanted.offset, wanted.nbytes});
        else read_pieces(chunk, range.offset);
    }
    std::sort(spans.begin(), spans.end(), [](const Span &a, const Span &b) { return a.offset < b.offset; });
    const i64 max_gap = is_remote() ? REMOTE_GAP : gap();
    for (size_t first = 0; first < spans.size();) {
        size_t last = first + 1;
        i64 end = spans[first].offset + spans[first].nbytes, wanted = spans[first].nbytes;
        for (; last < spans.size() && spans[last].offset - end <= max_gap; ++last) {
            const i64 new_end = std::max(end, spans[last].offset + spans[last].nbytes);
            if (new_end - spans[first].offset > max_read_nbytes_) break;
            wanted += spans[last].nbytes;
            if (spans[last].offset - end > GAP && new_end - spans[first].offset > 2 * wanted) break;
            // Kernels read raw elements in the slab, where elements must be aligned.
            const bool misplaced = (spans[last].offset - spans[first].offset) % geometry_.itemsize != 0;
            if (device_ && !geometry_.encoded() && misplaced) break;
            end = new_end;
        }
        read_group(&spans[first], last - first);
        first = last;
    }
}

// Read spans of neighbouring chunks by one read; decode the chunks, and copy their boxes to the outputs.
void Execution::read_group(const Span *spans, size_t count) {
    if (spans->nbytes > MAX_NBYTES) throw std::bad_alloc();
    if (device_) return stage_group(spans, count);
    if (count == 1 && !geometry_.encoded() && !slot_of(spans->chunk) && read_in_place(*spans)) return;
    i64 end = 0;
    for (size_t n = 0; n < count; ++n) end = std::max(end, spans[n].offset + spans[n].nbytes);
    const i64 nbytes = end - spans->offset;
    const i64 decoded = geometry_.encoded() ? geometry_.chunk_nbytes : 0;
    const i64 needed = nbytes + decoded + (decoded ? decode_scratch_nbytes(geometry_.chain, decoded) : 0);
    const MemoryGuard memory(is_remote() ? 0 : needed);
    const u8 *stored = read_exactly(nbytes, spans->offset);
    await_turn();
    seconds.read += lap_.take();
    for (size_t n = 0; n < count; ++n) {
        const Span &span = spans[n];
        const u8 *from = stored + (span.offset - spans->offset);
        if (!geometry_.encoded()) {
            const i64 base =
                object_.index ? (*object_.index)[static_cast<size_t>(wave_.chunks[span.chunk].inner)].offset : 0;
            if (KeptSlot *slot = slot_of(span.chunk); slot && span.nbytes == geometry_.chunk_nbytes) {
                std::memcpy(reader_.kept_memory(*slot), from, static_cast<size_t>(span.nbytes));
                keep(span.chunk);
            }
            copy_boxes(wave_, wave_.chunks[span.chunk], from, span.offset - base);
            finish(span.chunk, READ, span.nbytes);
            continue;
        }
        try {
            const WantedBox &box = *boxes(span.chunk);
            KeptSlot *const slot = slot_of(span.chunk);
            const bool in_place = !slot && wave_.chunks[span.chunk].boxes == 1 &&
                                  box.batch->regions.conversion.is_copy() &&
                                  std::equal(box.extent, box.extent + geometry_.rank, geometry_.chunk_shape) &&
                                  std::equal(geometry_.chunk_strides, geometry_.chunk_strides + geometry_.rank,
                                             layout_of(geometry_, box).target_strides);
            u8 *to = slot       ? reader_.kept_memory(*slot)
                     : in_place ? box.target
                                : scratch().decoded.reserve(geometry_.chunk_nbytes);
            decode_chunk(geometry_.chain, {from, static_cast<size_t>(span.nbytes)},
                         {to, static_cast<size_t>(geometry_.chunk_nbytes)}, scratch().decode);
            note_decoded(span.chunk);
            if (!in_place) copy_boxes(wave_, wave_.chunks[span.chunk], to, 0);
            if (slot) keep(span.chunk);
            seconds.copy += lap_.take();
            finish(span.chunk, READ, span.nbytes);
        } catch (const DecodeError &error) {
            fail_chunk(span.chunk, {LC_DECODE, 0, 0, 0, error.what()}, span.offset, span.nbytes);
        }
    }
    seconds.copy += lap_.take();
}

// Read a raw chunk directly into its output; false, without a read, if its layout in the output is not the stored one.
bool Execution::read_in_place(const Span &span) {
    const WantedBox &box = *boxes(span.chunk);
    if (wave_.chunks[span.chunk].boxes > 1 || !box.batch->regions.conversion.is_copy()) return false;
    const Box layout = layout_of(geometry_, box);
    i64 nbytes = geometry_.itemsize;
    for (i64 a = 0; a < geometry_.rank; ++a) {
        nbytes *= box.extent[a];
        if (box.extent[a] > 1 && layout.target_strides[a] != geometry_.chunk_strides[a]) return false;
    }
    if (nbytes != span.nbytes) return false;
    read_stored(box.target, nbytes, span.offset);
    seconds.read += lap_.take();
    finish(span.chunk, READ, nbytes);
    return true;
}

// Read a raw chunk piece by piece: it is too large to be read at once, or the gaps between its wanted bytes are long.
void Execution::read_pieces(u32 chunk, i64 offset) {
    const WantedBox *first = boxes(chunk);
    i64 total = 0;
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
        if (box->job->is_abandoned()) continue;
        if (device_) {
            total += stage_raw_pieces(*box, chunk, offset);
            continue;
        }
        Box layout = layout_of(geometry_, *box);
        for (const Piece &piece : cut_pieces(geometry_, box->extent, layout.target_strides, max_read_nbytes_)) {
            const u8 *stored = read_exactly(piece.nbytes, offset + box->source_offset + piece.source_offset);
            await_turn();
            seconds.read += lap_.take();
            std::copy(piece.extent, piece.extent + LC_MAX_RANK, layout.extent);
            copy_box(box->batch->regions.conversion, layout, stored, box->target + piece.target_offset);
            seconds.copy += lap_.take();
            total += piece.nbytes;
        }
    }
    finish(chunk, READ, total);
}

// Publish the slot of the host's cache that holds a decoded chunk; afterwards other tasks may read or replace it.
void Execution::keep(u32 chunk) {
    KeptSlot *const slot = take_slot(chunk);
    if (!slot) return;
    const auto lock = reader_.kept()->lock();
    reader_.kept()->publish(*slot);
    reader_.kept()->unpin(*slot);
}

Box layout_of(const Geometry &geometry, const WantedBox &box) {
    Box layout;
    layout.rank = geometry.rank;
    const i64 *strides = box.batch->regions.strides.data() + box.region * geometry.rank;
    std::copy(box.extent, box.extent + geometry.rank, layout.extent);
    std::copy(geometry.chunk_strides, geometry.chunk_strides + geometry.rank, layout.source_strides);
    std::copy(strides, strides + geometry.rank, layout.target_strides);
    return layout;
}

void copy_boxes(const Wave &wave, const WantedChunk &chunk, const u8 *decoded, i64 first_byte) {
    const Geometry &geometry = *wave.objects[chunk.object].array->geometry;
    const WantedBox *first = &wave.boxes[chunk.first_box];
    for (const WantedBox *box = first; box != first + chunk.boxes; ++box)
        if (!box->job->is_abandoned())
            copy_box(box->batch->regions.conversion, layout_of(geometry, *box),
                     decoded + (box->source_offset - first_byte), box->target);
}

// Set the boxes of a missing chunk to the fill value.
void Execution::fill(u32 chunk) {
    if (device_) return stage_fill(chunk);
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box)
        if (!box->job->is_abandoned())
            fill_box(dtype_nbytes(box->batch->regions.conversion.target), box->batch->regions.fill,
                     layout_of(geometry_, *box), box->target);
    finish(chunk, FILLED, 0);
}

// Count a chunk that the host decoded, with the time since the last lap.
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

void Execution::finish(u32 chunk, State result, i64 nbytes) {
    state(chunk) = result;
    if (result == READ) bytes_read += nbytes;
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) {
        Job &job = *box->job;
        job.chunks.fetch_add(1, std::memory_order_relaxed);
        if (result == FILLED) job.filled.fetch_add(1, std::memory_order_relaxed);
        if (result == READ) job.bytes_read.fetch_add(nbytes, std::memory_order_relaxed);
    }
}

void Execution::fail_chunk(u32 chunk, const Failure &failure, i64 offset, i64 nbytes) {
    const lc_error error = error_of(wave_, task_.object, chunk, failure, offset, nbytes);
    const WantedBox *first = boxes(chunk);
    for (const WantedBox *box = first; box != first + wave_.chunks[chunk].boxes; ++box) box->job->fail(error);
    finish(chunk, FAILED, 0);
}

// Call `each(job, value)` once for each job that wants a chunk of the object.
void Execution::for_jobs_of_object(void (*each)(Job &, i64), i64 value) {
    std::vector<Job *> jobs;
    const u32 others = object_.chunks;  // without the task's chunks if these were kept on the device and are stale
    for (u32 n = 0; n < others + task_.chunks; ++n) {
        const u32 chunk = n < others ? object_.first_chunk + n : task_.first_chunk + n - others;
        for (u32 k = 0; k < wave_.chunks[chunk].boxes; ++k) {
            Job *job = boxes(chunk)[k].job;
            if (jobs.empty() || jobs.back() != job) jobs.push_back(job);
        }
    }
    std::sort(jobs.begin(), jobs.end());
    jobs.erase(std::unique(jobs.begin(), jobs.end()), jobs.end());
    for (Job *job : jobs) each(*job, value);
}

void Reader::execute(Wave &wave, const Task &task) noexcept {
    try {
        Execution execution(wave, task, *this);
        execution.run();
        stats.chunks += execution.chunks_read();
        stats.bytes_read += execution.bytes_read;
        stats.files_opened += execution.files_opened;
        stats.hedges += execution.hedges;
        stats.decoded += execution.decoded;
        stats.read_seconds.fetch_add(execution.seconds.read);
        stats.decode_seconds.fetch_add(execution.seconds.decode);
        stats.copy_seconds.fetch_add(execution.seconds.copy);
    } catch (...) {  // no memory even for the records of the task
        for (u32 n = 0; n < task.chunks; ++n) {
            const WantedChunk &chunk = wave.chunks[task.first_chunk + n];
            const lc_error error = error_of(wave, task.object, task.first_chunk + n, {LC_MEMORY, 0, 0, 0, {}});
            for (u32 k = 0; k < chunk.boxes; ++k) wave.boxes[chunk.first_box + k].job->fail(error);
        }
    }
    wave.objects[task.object].end_task();
    if (device_) device_->flush_old();
    // Last: a caller that waits for a job may free its output as soon as the job is settled.
    for (u32 n = 0; n < task.chunks; ++n) {
        const WantedChunk &chunk = wave.chunks[task.first_chunk + n];
        for (u32 k = 0; k < chunk.boxes; ++k)
            if (const WantedBox &box = wave.boxes[chunk.first_box + k]; !box.staged) settle(*box.job, 1);
    }
}

}  // namespace lc
