#include "plan.hpp"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace lc {

// Multiply a size by a length; the product has at most MAX_NBYTES bytes.
static i64 checked_product(i64 nbytes, i64 length) {
    if (length < 1 || nbytes > MAX_NBYTES / length) throw std::overflow_error("too many bytes");
    return nbytes * length;
}

Geometry::Geometry(const lc_geometry &record) : lc_geometry(record), itemsize(dtype_nbytes(record.dtype)) {
    chunk_nbytes = itemsize;
    for (i64 n = rank - 1; n >= 0; --n) {
        chunk_strides[stored_axes[n]] = chunk_nbytes;
        chunk_nbytes = checked_product(chunk_nbytes, chunk_shape[stored_axes[n]]);
    }
    index_nbytes = 16;
    for (i64 a = 0; a < rank; ++a) {
        per_object[a] = sharded() ? chunks_per_shard[a] : 1;
        index_nbytes = checked_product(index_nbytes, per_object[a]);
    }
    chunks_of_object = index_nbytes / 16;
    index_nbytes = sharded() ? index_nbytes + (index_checksum ? 4 : 0) : 0;
}

std::string Array::path(const i64 *object) const {
    std::string text = prefix;
    char digits[24];
    for (i64 a = 0; a < geometry->rank; ++a) {
        if (a) text += separator;
        text.append(digits, std::to_chars(digits, digits + sizeof digits, object[a]).ptr);
    }
    return text;
}

double Regions::chunk_count(i64 region) const {
    double count = 1;
    for (i64 a = 0; a < geometry->rank; ++a) {
        const i64 size = geometry->chunk_shape[a], row = region * geometry->rank + a;
        if (stop[row] <= start[row]) return 0;
        count *= static_cast<double>((stop[row] - 1) / size - start[row] / size + 1);
    }
    return count;
}

ChunkWalk::ChunkWalk(const Regions &regions, i64 region)
    : regions_(&regions), geometry_(regions.geometry.get()), start_(regions.start.data() + region * geometry_->rank),
      stop_(regions.stop.data() + region * geometry_->rank), region_(region) {
    for (i64 a = 0; a < geometry_->rank; ++a) {
        if (stop_[a] <= start_[a]) {
            at_end_ = true;
            return;
        }
        first_object_[a] = object_[a] = start_[a] / geometry_->chunk_shape[a] / geometry_->per_object[a];
        last_object_[a] = (stop_[a] - 1) / geometry_->chunk_shape[a] / geometry_->per_object[a];
    }
    enter_object();
}

void ChunkWalk::enter_object() {
    for (i64 a = 0; a < geometry_->rank; ++a) {
        const i64 size = geometry_->chunk_shape[a], first = object_[a] * geometry_->per_object[a];
        first_[a] = chunk_[a] = std::max(start_[a] / size, first);
        last_[a] = first + std::min((stop_[a] - 1) / size - first, geometry_->per_object[a] - 1);
    }
}

// Advance an index in C order, last axis fastest; false at the end.
static bool advance(i64 rank, i64 *index, const i64 *first, const i64 *last) {
    for (i64 a = rank - 1; a >= 0; --a) {
        if (index[a] < last[a]) {
            ++index[a];
            return true;
        }
        index[a] = first[a];
    }
    return false;
}

void ChunkWalk::next() {
    if (advance(geometry_->rank, chunk_, first_, last_)) return;
    if (advance(geometry_->rank, object_, first_object_, last_object_)) enter_object();
    else at_end_ = true;
}

ChunkBox ChunkWalk::box() const {
    const i64 rank = geometry_->rank, *strides = regions_->strides.data() + region_ * rank;
    ChunkBox box{};
    i64 target_offset = 0;
    for (i64 a = 0; a < rank; ++a) {
        const i64 size = geometry_->chunk_shape[a], origin = chunk_[a] * size;
        const i64 begin = std::max<i64>(start_[a] - origin, 0), end = std::min(stop_[a] - origin, size);
        box.object[a] = object_[a];
        box.chunk[a] = chunk_[a];
        box.inner = box.inner * geometry_->per_object[a] + chunk_[a] % geometry_->per_object[a];
        box.extent[a] = end - begin;
        box.source_offset += begin * geometry_->chunk_strides[a];
        target_offset += (begin - (start_[a] - origin)) * strides[a];
    }
    box.target = reinterpret_cast<u8 *>(regions_->address[region_] + target_offset);
    return box;
}

i64 span_nbytes(const Geometry &geometry, const i64 *extent) {
    i64 nbytes = geometry.itemsize;
    for (i64 a = 0; a < geometry.rank; ++a) nbytes += (extent[a] - 1) * geometry.chunk_strides[a];
    return nbytes;
}

std::vector<Piece> cut_pieces(const Geometry &geometry, const i64 *extent, const i64 *target_strides, i64 max_nbytes) {
    const i64 rank = geometry.rank;
    i64 count[LC_MAX_RANK], stride[LC_MAX_RANK], span[LC_MAX_RANK + 1];  // in stored order, slowest axis first
    span[rank] = geometry.itemsize;
    for (i64 n = rank - 1; n >= 0; --n) {
        count[n] = extent[geometry.stored_axes[n]];
        stride[n] = geometry.chunk_strides[geometry.stored_axes[n]];
        span[n] = (count[n] - 1) * stride[n] + span[n + 1];
    }
    // A piece has one element along each axis before `split`, a run of elements along `split`, and all elements after
    // it.
    i64 split = 0;
    for (i64 n = 0; n + 1 < rank; ++n)
        if (count[n] > 1 && stride[n] - span[n + 1] > READ_THROUGH) split = n + 1;
    while (split + 1 < rank && span[split + 1] > max_nbytes) ++split;
    const i64 max_run = std::max<i64>(1, 1 + (max_nbytes - span[split + 1]) / stride[split]);
    const i64 runs = (count[split] + max_run - 1) / max_run, run = (count[split] + runs - 1) / runs;
    std::vector<Piece> pieces;
    i64 index[LC_MAX_RANK] = {}, first[LC_MAX_RANK] = {}, last[LC_MAX_RANK] = {};
    for (i64 n = 0; n < split; ++n) last[n] = count[n] - 1;
    do {
        for (i64 begin = 0; begin < count[split]; begin += run) {
            Piece piece{};
            const i64 length = std::min(run, count[split] - begin);
            for (i64 n = 0; n < rank; ++n) {
                const i64 axis = geometry.stored_axes[n], first_index = n < split ? index[n] : n == split ? begin : 0;
                piece.extent[axis] = n < split ? 1 : n == split ? length : count[n];
                piece.source_offset += first_index * stride[n];
                piece.target_offset += first_index * target_strides[axis];
            }
            piece.nbytes = (length - 1) * stride[split] + span[split + 1];
            pieces.push_back(piece);
        }
    } while (split && advance(split, index, first, last));
    return pieces;
}

}  // namespace lc
