// Pure planning: regions → boxes of chunks. Opens no file and starts no thread.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.hpp"
#include "copy.hpp"
#include "zip.hpp"

namespace lc {

// Unwanted bytes that are read along with wanted ones rather than skipped by a read of their own: a read costs as much
// time as about this many bytes out of the page cache.
constexpr i64 READ_THROUGH = 256 * 1024;
// Longest read of a part of a raw chunk: it fits the processor's cache.
constexpr i64 MOST_READ = 4 << 20;

// How arrays of one geometry are stored, with what follows from the record.
struct Geometry : lc_geometry {
    explicit Geometry(const lc_geometry &record);
    bool sharded() const { return chunks_per_shard[0] > 0; }
    bool encoded() const { return chain.is_encoded; }

    i64 itemsize, chunk_nbytes;
    i64 chunk_strides[LC_MAX_RANK] = {};  // bytes between neighbours in a decoded chunk
    i64 per_object[LC_MAX_RANK] = {};     // chunks of a stored object along each axis
    i64 chunks_of_object = 1, index_nbytes = 0;
};

// One array; arrays with the same path and geometry are one, so that their jobs share chunks.
struct Array {
    std::shared_ptr<const Geometry> geometry;
    std::string prefix, separator, metadata;
    std::unique_ptr<const Archive> archive;  // null: stored objects are files, or lie in an object store
    i64 store = 0;  // number of the object store; 0: none
    // Of an array in an object store: the number of the wave that looked for its metadata last, and what it found.
    std::mutex mutex;
    i64 looked_in = 0;
    bool is_gone = false;

    // Names a stored object: its file or key, or the path of a ZIP file with the name of the entry behind it.
    std::string path(const i64 *object) const;
    // The file that holds it.
    std::string file(const i64 *object) const { return archive ? archive->path : path(object); }
};

// The regions of one call, and which of their chunks come next.
struct Regions {
    std::shared_ptr<const Geometry> geometry;
    Conversion conversion;
    u8 fill[16] = {};
    std::vector<std::shared_ptr<Array>> arrays;
    std::vector<i64> array, start, stop, strides, address;

    i64 count() const { return static_cast<i64>(array.size()); }
    // Chunks that a region touches, as a floating-point number: there may be very many.
    double chunk_count(i64 region) const;
};

// The part of one chunk that one region wants.
struct ChunkBox {
    i64 object[LC_MAX_RANK], chunk[LC_MAX_RANK];  // coordinates of the stored object and of the (inner) chunk
    i64 inner;                                    // number of the chunk in its shard, in C order
    i64 extent[LC_MAX_RANK];
    i64 source_offset;  // first byte in the decoded chunk
    u8 *target;
};

// Walks the chunks of one region, stored object by stored object.
class ChunkWalk {
public:
    ChunkWalk(const Regions &regions, i64 region);
    bool at_end() const { return at_end_; }
    ChunkBox box() const;
    void next();

private:
    void enter_object();
    const Regions *regions_;
    const Geometry *geometry_;
    const i64 *start_, *stop_;
    i64 region_;
    bool at_end_ = false;
    i64 first_object_[LC_MAX_RANK] = {}, last_object_[LC_MAX_RANK] = {}, object_[LC_MAX_RANK] = {};
    i64 first_[LC_MAX_RANK] = {}, last_[LC_MAX_RANK] = {}, chunk_[LC_MAX_RANK] = {};
};

// A part of a box of a raw chunk that one read takes: offsets beyond the first byte of the box.
struct Piece {
    i64 extent[LC_MAX_RANK];
    i64 source_offset, target_offset, nbytes;
};

// Bytes from the first to the last element of a box of a chunk.
i64 span_nbytes(const Geometry &geometry, const i64 *extent);
// Cut a box of a raw chunk into pieces whose bytes are at most `most`, without gaps worth a read of their own.
std::vector<Piece> cut_pieces(const Geometry &geometry, const i64 *extent, const i64 *target_strides, i64 most);

}  // namespace lc
