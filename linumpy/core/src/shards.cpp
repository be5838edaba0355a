#include "shards.hpp"

#include <bit>
#include <cinttypes>
#include <cstdio>
#include <stdexcept>

#include "codecs.hpp"

namespace lc {
namespace {

template <class... Args> [[noreturn]] void refuse_index(const char *format, Args... args) {
    char text[256];
    std::snprintf(text, sizeof text, format, args...);
    throw std::runtime_error(text);
}

u64 word(const u8 *p, bool big_endian) {
    u64 value;
    std::memcpy(&value, p, 8);
    const bool swap = big_endian != (std::endian::native == std::endian::big);
    return swap ? __builtin_bswap64(value) : value;
}

// Coordinates of an inner chunk in its shard, as Python writes a tuple, for messages.
std::string inner_name(const Geometry &geometry, i64 number) {
    i64 index[LC_MAX_RANK];
    for (i64 a = geometry.rank - 1; a >= 0; --a) {
        index[a] = number % geometry.per_object[a];
        number /= geometry.per_object[a];
    }
    std::string text = "(";
    for (i64 a = 0; a < geometry.rank; ++a) text += (a ? ", " : "") + std::to_string(index[a]);
    return text + (geometry.rank == 1 ? ",)" : ")");
}

void check_range(const Geometry &geometry, i64 number, u64 offset, u64 nbytes, u64 file_nbytes) {
    const u64 index_nbytes = static_cast<u64>(geometry.index_nbytes);
    const u64 first = geometry.index_at_end ? 0 : index_nbytes;
    const u64 end = !geometry.index_at_end ? file_nbytes : file_nbytes < index_nbytes ? 0 : file_nbytes - index_nbytes;
    // The comparisons avoid the sum of offset and length, which may overflow.
    if (offset >= first && offset <= end && nbytes <= end - offset) return;
    const std::string name = inner_name(geometry, number);
    const double range_end = static_cast<double>(offset) + static_cast<double>(nbytes);
    if (range_end < 1.8e19)
        refuse_index("inner chunk %s lies at bytes %" PRIu64 " to %" PRIu64 ", but the file has %" PRIu64 ", %" PRIu64
                     " of them for the index",
                     name.c_str(), offset, offset + nbytes, file_nbytes, index_nbytes);
    refuse_index("inner chunk %s lies at bytes %" PRIu64 " and %" PRIu64 " more, but the file has %" PRIu64 ", %" PRIu64
                 " of them for the index",
                 name.c_str(), offset, nbytes, file_nbytes, index_nbytes);
}

// The metadata on which the meaning of an index depends, as a key.
std::string kind_of(const Geometry &geometry) {
    i64 words[LC_MAX_RANK + 4] = {};
    for (i64 a = 0; a < geometry.rank; ++a) words[a] = geometry.per_object[a];
    words[LC_MAX_RANK] = geometry.index_at_end;
    words[LC_MAX_RANK + 1] = geometry.index_big_endian;
    words[LC_MAX_RANK + 2] = geometry.index_checksum;
    words[LC_MAX_RANK + 3] = geometry.encoded() ? -1 : geometry.chunk_nbytes;
    return std::string(reinterpret_cast<const char *>(words), sizeof words);
}

i64 nbytes_of(const ShardIndex &index) { return static_cast<i64>(index.size() * sizeof(ChunkRange)); }

}  // namespace

std::shared_ptr<const ShardIndex> parse_index(const Geometry &geometry, const u8 *stored, i64 nbytes, i64 file_nbytes) {
    if (nbytes != geometry.index_nbytes)
        refuse_index("the shard index has %" PRIi64 " bytes and must have %" PRIi64, nbytes, geometry.index_nbytes);
    const i64 count = geometry.chunks_of_object;
    if (geometry.index_checksum) {
        u32 checksum = 0;
        for (int k = 3; k >= 0; --k) checksum = checksum << 8 | stored[16 * count + k];
        const u32 computed = crc32c(stored, static_cast<size_t>(16 * count));
        if (checksum != computed)
            refuse_index("the checksum of the shard index is %#010x and must be %#010x", checksum, computed);
    }
    auto index = std::make_shared<ShardIndex>(static_cast<size_t>(count));
    for (i64 n = 0; n < count; ++n) {
        const u64 offset = word(stored + 16 * n, geometry.index_big_endian);
        const u64 size = word(stored + 16 * n + 8, geometry.index_big_endian);
        if (offset == ~u64(0) && size == ~u64(0)) continue;
        if (!geometry.encoded() && size != static_cast<u64>(geometry.chunk_nbytes))
            refuse_index("inner chunk %s has %" PRIu64 " bytes and must have %" PRIi64, inner_name(geometry, n).c_str(),
                         size, geometry.chunk_nbytes);
        check_range(geometry, n, offset, size, static_cast<u64>(file_nbytes));
        (*index)[static_cast<size_t>(n)] = {static_cast<i64>(offset), static_cast<i64>(size)};
    }
    return index;
}

std::shared_ptr<const ShardIndex> IndexCache::find(const std::string &path, const Version &version,
                                                   const Geometry &geometry) {
    const std::lock_guard lock(mutex_);
    const auto entry = by_path_.find(path);
    if (entry == by_path_.end() || !(entry->second->version == version) || entry->second->kind != kind_of(geometry)) {
        ++misses_;
        return nullptr;
    }
    ++hits_;
    entries_.splice(entries_.begin(), entries_, entry->second);
    return entry->second->index;
}

std::shared_ptr<const ShardIndex> IndexCache::find_last(const std::string &path, const Geometry &geometry,
                                                        Version &version) {
    {
        const std::lock_guard lock(mutex_);
        if (const auto entry = by_path_.find(path); entry != by_path_.end()) version = entry->second->version;
    }
    return find(path, version, geometry);
}

void IndexCache::keep(const std::string &path, const Version &version, const Geometry &geometry,
                      std::shared_ptr<const ShardIndex> index) {
    const i64 nbytes = nbytes_of(*index);
    const std::lock_guard lock(mutex_);
    if (const auto entry = by_path_.find(path); entry != by_path_.end()) {
        held_nbytes_ -= nbytes_of(*entry->second->index);
        entries_.erase(entry->second);
        by_path_.erase(entry);
    }
    if (nbytes > capacity_) return;
    entries_.push_front({path, version, kind_of(geometry), std::move(index)});
    try {
        by_path_[path] = entries_.begin();
    } catch (...) {
        entries_.pop_front();
        throw;
    }
    held_nbytes_ += nbytes;
    while (held_nbytes_ > capacity_) {
        held_nbytes_ -= nbytes_of(*entries_.back().index);
        by_path_.erase(entries_.back().path);
        entries_.pop_back();
    }
}

}  // namespace lc
