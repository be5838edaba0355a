// Tasks whose outputs are on a device: stored or decoded bytes are written into ranges of slabs.
#include <algorithm>

#include "execution.hpp"

namespace lc {

Row Execution::row_of(const WantedBox &box, i64 source) const {
    Row row{box.batch, box.job, box.target, box.region, source, {}};
    std::copy(box.extent, box.extent + LC_MAX_RANK, row.extent);
    return row;
}

// Whether the device decodes these chunks: they fit a slab, and enough chunks are in flight for it to be faster than
// the host.
bool Execution::decodes_on_device(const Span *spans, size_t count) const {
    const lc_decode_plan *plan = wave_.boxes[wave_.chunks[spans->chunk].first_box].batch->decode;
    if (!plan || static_cast<i64>(count) > plan->chunks) return false;
    i64 end = 0;
    for (size_t n = 0; n < count; ++n) end = std::max(end, spans[n].offset + spans[n].nbytes);
    const i64 nbytes = end - spans->offset + 64;
    i64 weight = 0;
    for (size_t n = 0; n < count; ++n) weight += weight_of(*plan, spans[n].nbytes);
    if (nbytes > plan->stored_nbytes || nbytes + weight > plan->capacity) return false;
    for (size_t n = 0; n < count; ++n)
        if (spans[n].nbytes <= plan->checksum_nbytes) return false;
    return wave_.missed() + device_->chunks_in_flight() >= plan->device_from;
}

// Stage the spans of neighbouring chunks: by one read into a slab, or one by one if the host decodes them.
void Execution::stage_group(const Span *spans, size_t count) {
    i64 rows = 0;
    for (size_t n = 0; n < count; ++n)
        rows += wave_.chunks[spans[n].chunk].boxes + (slot_of(spans[n].chunk) != nullptr);
    if (count > 1 && (rows > device_->max_rows() || (geometry_.encoded() && !decodes_on_device(spans, count)))) {
        for (size_t n = 0; n < count; ++n) stage_group(spans + n, 1);
        return;
    }
    if (geometry_.encoded() && !decodes_on_device(spans, count)) {
        const i64 needed = spans->nbytes + decode_scratch_nbytes(geometry_.chain, geometry_.chunk_nbytes) +
                           (fits_slab(spans->chunk) ? 0 : geometry_.chunk_nbytes);
        const MemoryGuard memory(is_remote() ? 0 : needed);
        const u8 *stored = read_exactly(spans->nbytes, spans->offset);
        seconds.read += lap_.take();
        stage_decoded(*spans, stored);
        return;
    }
    const u32 max_boxes = static_cast<u32>(device_->max_rows()) - 1;  // one row may fill a slot
    for (u32 first = 0; first == 0 || (count == 1 && first < wave_.chunks[spans->chunk].boxes); first += max_boxes)
        stage_boxes(spans, count, first, max_boxes);
    for (size_t n = 0; n < count; ++n) finish(spans[n].chunk, READ, spans[n].nbytes);
}

// Read spans into a slab, and stage their boxes. For a single span: up to `max_boxes` boxes, from `first_box` on.
void Execution::stage_boxes(const Span *spans, size_t count, u32 first_box, u32 max_boxes) {
    i64 end = 0, row_count = 0, slots = 0;
    for (size_t n = 0; n < count; ++n) {
        end = std::max(end, spans[n].offset + spans[n].nbytes);
        row_count += wave_.chunks[spans[n].chunk].boxes;
        slots += slot_of(spans[n].chunk) != nullptr;
    }
    const lc_decode_plan *plan = geometry_.encoded() ? boxes(spans->chunk)->batch->decode : nullptr;
    const i64 nbytes = end - spans->offset;
    i64 weight = 0;
    for (size_t n = 0; plan && n < count; ++n) weight += weight_of(*plan, spans[n].nbytes);
    std::vector<Row> rows;
    std::vector<StagedChunk> chunks;
    KeptUse kept;
    rows.reserve(static_cast<size_t>(row_count));
    chunks.reserve(count);
    kept.filled.reserve(count);
    std::vector<WantedBox *> staged;
    staged.reserve(static_cast<size_t>(row_count));
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    // Fetch from the network before reserving a range: a slab would wait for the slowest request.
    const u8 *fetched = is_remote() ? read_exactly(nbytes, spans->offset) : nullptr;
    // Several spans have few enough rows to stage all of them.
    const i64 reserved = (count == 1 ? std::min<i64>(row_count, max_boxes) : row_count) + slots;
    Range range = device_->reserve(plan, nbytes, reserved, plan ? static_cast<i64>(count) : 0, weight, spans->offset);
    try {
        if (fetched) std::memcpy(range.memory, fetched, static_cast<size_t>(nbytes));
        else read_into(range, wave, spans->chunk, spans->offset);
    } catch (...) {
        device_->cancel(range);
        throw;
    }
    for (size_t n = 0; n < count; ++n) {
        const Span &span = spans[n];
        const WantedChunk &chunk = wave_.chunks[span.chunk];
        const i64 range_offset = span.offset - spans->offset;
        const i64 base = object_.index ? (*object_.index)[static_cast<size_t>(chunk.inner)].offset : 0;
        const u32 first_row = static_cast<u32>(rows.size());
        for (u32 k = first_box; k < std::min(chunk.boxes, first_box + max_boxes); ++k) {
            WantedBox &box = boxes(span.chunk)[k];
            if (box.job->is_abandoned()) continue;
            rows.push_back(row_of(box, plan ? box.source_offset
                                            : range.offset + range_offset + box.source_offset - (span.offset - base)));
            staged.push_back(&box);
        }
        if (plan)
            chunks.push_back({wave, task_.object, span.chunk, span.offset, span.nbytes, range.offset + range_offset,
                              first_row, static_cast<u32>(rows.size()) - first_row, take_slot(span.chunk)});
        else if (KeptSlot *slot = take_slot(span.chunk)) kept.filled.push_back({slot, range.offset + range_offset, -1});
    }
    for (WantedBox *box : staged) box->staged = true;
    device_->commit(range, wave, rows, std::move(chunks), kept);
    seconds.read += lap_.take();
}

// Read stored bytes into a range of a slab. With GPUDirect Storage, only record the read, which is made when the slab
// starts.
void Execution::read_into(Range &range, const std::shared_ptr<Wave> &wave, u32 chunk, i64 offset) {
    if (device_->reads_directly() && !is_remote()) {
        range.read = {wave, task_.object, chunk, offset, range.nbytes, range.offset};
        return;
    }
    read_stored(range.memory, range.nbytes, offset);
}

// Whether a decoded chunk and the rows of its boxes fit one slab.
bool Execution::fits_slab(u32 chunk) const {
    return geometry_.chunk_nbytes <= device_->capacity(nullptr) && wave_.chunks[chunk].boxes < device_->max_rows();
}

// Decode a chunk into a slab, on the host. A chunk that does not fit a slab is decoded into scratch memory, from which
// its boxes are copied into slabs.
void Execution::stage_decoded(const Span &span, const u8 *stored) {
    if (!fits_slab(span.chunk)) {
        if (!decode_whole(span, stored)) return;
    } else {
        std::vector<WantedBox *> staged;
        std::vector<Row> rows;
        for (u32 k = 0; k < wave_.chunks[span.chunk].boxes; ++k)
            if (WantedBox &box = boxes(span.chunk)[k]; !box.job->is_abandoned()) staged.push_back(&box);
        rows.reserve(staged.size());
        const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
        const i64 reserved = static_cast<i64>(staged.size()) + (slot_of(span.chunk) != nullptr);
        KeptUse kept;
        kept.filled.reserve(1);
        const Range range = device_->reserve(nullptr, geometry_.chunk_nbytes, reserved);
        try {
            decode_chunk(geometry_.chain, {stored, static_cast<size_t>(span.nbytes)},
                         {range.memory, static_cast<size_t>(geometry_.chunk_nbytes)}, scratch().decode);
        } catch (const DecodeError &error) {
            device_->cancel(range);
            fail_chunk(span.chunk, {LC_DECODE, 0, 0, 0, error.what()}, span.offset, span.nbytes);
            return;
        } catch (...) {
            device_->cancel(range);
            throw;
        }
        for (WantedBox *box : staged) {
            rows.push_back(row_of(*box, range.offset + box->source_offset));
            box->staged = true;
        }
        if (KeptSlot *slot = take_slot(span.chunk)) kept.filled.push_back({slot, range.offset, -1});
        device_->commit(range, wave, rows, {}, kept);
    }
    note_decoded(span.chunk);
    finish(span.chunk, READ, span.nbytes);
}

// Decode a chunk into scratch memory, and copy its boxes into slabs piece by piece. If the chunk is broken, fail its
// jobs and return false.
bool Execution::decode_whole(const Span &span, const u8 *stored) {
    u8 *const decoded = scratch().decoded.reserve(geometry_.chunk_nbytes);
    try {
        decode_chunk(geometry_.chain, {stored, static_cast<size_t>(span.nbytes)},
                     {decoded, static_cast<size_t>(geometry_.chunk_nbytes)}, scratch().decode);
    } catch (const DecodeError &error) {
        fail_chunk(span.chunk, {LC_DECODE, 0, 0, 0, error.what()}, span.offset, span.nbytes);
        return false;
    }
    for (u32 k = 0; k < wave_.chunks[span.chunk].boxes; ++k)
        if (const WantedBox &box = boxes(span.chunk)[k]; !box.job->is_abandoned())
            stage_pieces(box, 0, [&](Range &range, const Piece &piece) {
                std::memcpy(range.memory, decoded + box.source_offset + piece.source_offset,
                            static_cast<size_t>(piece.nbytes));
            });
    return true;
}

i64 Execution::stage_raw_pieces(const WantedBox &box, u32 chunk, i64 offset) {
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    const i64 first = offset + box.source_offset;
    return stage_pieces(box, first, [&](Range &range, const Piece &piece) {
        read_into(range, wave, chunk, first + piece.source_offset);
    });
}

// Load a box into slabs piece by piece. `offset`: offset of the box in the stored object. Returns the bytes of all
// pieces.
template <class Load> i64 Execution::stage_pieces(const WantedBox &box, i64 offset, const Load &load) {
    const std::vector<Piece> pieces =
        cut_pieces(geometry_, box.extent, layout_of(geometry_, box).target_strides, max_read_nbytes_);
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    box.job->expect(static_cast<i64>(pieces.size()));
    size_t done = 0;
    i64 total = 0;
    try {
        for (const Piece &piece : pieces) {
            Row row = row_of(box, 0);
            row.target += piece.target_offset;
            std::copy(piece.extent, piece.extent + LC_MAX_RANK, row.extent);
            Range range = device_->reserve(nullptr, piece.nbytes, 1, 0, 0, offset + piece.source_offset);
            try {
                load(range, piece);
                row.source = range.offset;
                device_->commit(range, wave, {row});
            } catch (...) {
                device_->cancel(range);
                throw;
            }
            ++done;
            total += piece.nbytes;
        }
    } catch (...) {
        reader_.settle(*box.job, static_cast<i64>(pieces.size() - done));
        throw;
    }
    return total;
}

void Execution::stage_fill(u32 chunk) {
    const u32 count = wave_.chunks[chunk].boxes, max_rows = static_cast<u32>(device_->max_rows());
    const std::shared_ptr<Wave> wave = std::static_pointer_cast<Wave>(wave_.shared_from_this());
    for (u32 first = 0; first < count; first += max_rows) {
        std::vector<Row> rows;
        std::vector<WantedBox *> staged;
        for (u32 k = first; k < std::min(count, first + max_rows); ++k)
            if (WantedBox &box = boxes(chunk)[k]; !box.job->is_abandoned()) {
                rows.push_back(row_of(box, -1));
                staged.push_back(&box);
            }
        const Range range = device_->reserve(nullptr, 0, static_cast<i64>(rows.size()));
        for (WantedBox *box : staged) box->staged = true;
        device_->commit(range, wave, rows);
    }
    finish(chunk, FILLED, 0);
}

// Decode on the host a chunk that the device could not decode, and stage its boxes. If the host cannot decode the
// chunk, either, its jobs fail with the host's error.
void Reader::decode_again(const StagedChunk &chunk, const std::vector<u8> &stored, std::vector<Row> &rows) noexcept {
    Failure failure;
    try {
        const Geometry &geometry = *rows.front().batch->regions.geometry;
        const Range range = device_->reserve(nullptr, geometry.chunk_nbytes, static_cast<i64>(rows.size()));
        try {
            DecodeScratch scratch;
            decode_chunk(geometry.chain, stored, {range.memory, static_cast<size_t>(geometry.chunk_nbytes)}, scratch);
        } catch (...) {
            device_->cancel(range);
            throw;
        }
        for (Row &row : rows) {
            row.job->decoded.fetch_add(1, std::memory_order_relaxed);
            row.source += range.offset;
        }
        device_->commit(range, chunk.wave, rows);
        return;
    } catch (const DecodeError &refused) {
        failure.code = LC_DECODE;
        failure.text = refused.what();
    } catch (const DriverError &failed) {
        failure.code = LC_DEVICE;
        failure.text = failed.what();
    } catch (const std::exception &) {
        failure.code = LC_MEMORY;
    }
    const lc_error error = error_of(*chunk.wave, chunk.object, chunk.chunk, failure, chunk.offset, chunk.nbytes);
    for (const Row &row : rows) {
        row.job->fail(error);
        settle(*row.job, 1);
    }
}

}  // namespace lc
