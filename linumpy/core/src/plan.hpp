// Pure planning: regions → boxes of chunks, and boxes of raw chunks → pieces. Opens no file and starts no thread.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common.hpp"
#include "copy.hpp"
#include "zip.hpp"

namespace lc {

// A read of a raw chunk includes gaps between wanted bytes of up to this length; longer gaps are skipped. A further
// read takes about as long as copying this many bytes out of the page cache.
constexpr i64 READ_THROUGH = 256 * 1024;
// Maximum length in bytes of one read of raw chunks: the bytes stay in the processor's cache until they are copied.
constexpr i64 MAX_READ_NBYTES = 4 << 20;

// How arrays of one geometry are stored: the record, and values derived from it.
struct Geometry : lc_geometry {
    // Throws std::overflow_error if a chunk or the index of a shard has more than MAX_NBYTES bytes, or lengths below 1.
    explicit Geometry(const lc_geometry &record);
    bool sharded() const { return chunks_per_shard[0] > 0; }
    bool encoded() const { return chain.is_encoded; }

    i64 itemsize, chunk_nbytes;
    i64 chunk_strides[LC_MAX_RANK] = {};  // bytes between neighbours in a decoded chunk
    i64 per_object[LC_MAX_RANK] = {};     // chunks of a stored object along each axis
    i64 chunks_of_object, index_nbytes;
};

class Storage;

// One array. Batches that read an array of the same path, geometry, object store and ZIP file share this record, so
// that their jobs share chunks.
struct Array {
    std::shared_ptr<const Geometry> geometry;
    std::string prefix, separator, metadata;
    std::unique_ptr<const Archive> archive;  // ZIP file that holds the stored objects; null: none
    i64 store = 0;  // number of the object store; 0: none
    // For an array in an object store: the number of the last wave that requested its metadata, and whether these were
    // missing. Guarded by the mutex.
    std::mutex mutex;
    i64 checked_in = 0;
    bool is_gone = false;
    std::atomic<Storage *> found_storage{nullptr};

    // The storage of the array's files; null while no storage of the process is slow, and for an object store.
    Storage *storage();
    // Whether reads of the array wait so long that many are to be in flight.
    bool is_slow();
    // Path of a stored object: a file, a key, or the path of a ZIP file followed by '/' and the name of the entry.
    std::string path(const i64 *object) const;
    // Path of the file that holds a stored object.
    std::string file(const i64 *object) const { return archive ? archive->path : path(object); }
};

// The regions of one call, and how to convert their elements.
struct Regions {
    std::shared_ptr<const Geometry> geometry;
    Conversion conversion;
    u8 fill[16] = {};
    std::vector<std::shared_ptr<Array>> arrays;
    std::vector<i64> array, start, stop, strides, address;

    i64 count() const { return static_cast<i64>(array.size()); }
    // Number of chunks that a region touches; floating-point, since it may exceed 2^63.
    double chunk_count(i64 region) const;
};

// The part of one chunk that one region wants.
struct ChunkBox {
    i64 object[LC_MAX_RANK], chunk[LC_MAX_RANK];  // coordinates of the stored object and of the (inner) chunk
    i64 inner;  // number of the chunk in its shard, in C order
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

// A part of a box of a raw chunk that one read covers. Offsets are relative to the first byte of the box.
struct Piece {
    i64 extent[LC_MAX_RANK];
    i64 source_offset, target_offset, nbytes;
};

// Number of bytes from the first to the last element of a box of a chunk.
i64 span_nbytes(const Geometry &geometry, const i64 *extent);
// Cut a box of a raw chunk into pieces of at most `max_nbytes` bytes, without gaps longer than READ_THROUGH.
std::vector<Piece> cut_pieces(const Geometry &geometry, const i64 *extent, const i64 *target_strides, i64 max_nbytes);

}  // namespace lc
