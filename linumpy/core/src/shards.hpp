// Indexes of shards: the byte range of each inner chunk; the `sharding_indexed` codec of Zarr 3.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common.hpp"
#include "files.hpp"
#include "plan.hpp"

namespace lc {

struct ChunkRange {
    i64 offset = -1, nbytes = 0;  // offset -1: not stored
};
using ShardIndex = std::vector<ChunkRange>;

// Parse and check the stored bytes of a shard's index; throws std::runtime_error with the reason if it is invalid.
std::shared_ptr<const ShardIndex> parse_index(const Geometry &geometry, const u8 *stored, i64 nbytes, i64 file_nbytes);

// Cache of shard indexes. An index is valid while the version of its file or object is the same, for arrays whose
// metadata describe shards in the same way. The least recently used index is evicted.
class IndexCache {
public:
    explicit IndexCache(i64 nbytes) : capacity_(nbytes) {}
    std::shared_ptr<const ShardIndex> find(const std::string &path, const Version &version, const Geometry &geometry);
    // The index that was kept last for a path, of any version; `version` is set to the version of the index.
    std::shared_ptr<const ShardIndex> find_last(const std::string &path, const Geometry &geometry, Version &version);
    void keep(const std::string &path, const Version &version, const Geometry &geometry,
              std::shared_ptr<const ShardIndex> index);
    i64 hits() const { return hits_.load(); }
    i64 misses() const { return misses_.load(); }

private:
    struct Entry {
        std::string path;
        Version version;
        std::string kind;  // key of the metadata that describe the shard
        std::shared_ptr<const ShardIndex> index;
    };
    std::mutex mutex_;
    std::list<Entry> entries_;  // most recently used first
    std::unordered_map<std::string, std::list<Entry>::iterator> by_path_;
    i64 capacity_, held_nbytes_ = 0;
    std::atomic<i64> hits_{0}, misses_{0};
};

}  // namespace lc
