// Arrays of uint16 in files, and jobs over them, whose outputs are compared with the voxels.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.hpp"

inline constexpr int RANK = 3;
inline constexpr uint8_t UNTOUCHED = 0xa5;
inline constexpr uint16_t FILL = 0x0101;
inline constexpr double LONG = 20;  // seconds after which a job hangs

// An array of uint16 in files, and its voxels.
struct Store {
    Folder folder;
    int64_t shape[RANK], chunk[RANK];
    lc_geometry geometry{};
    std::string prefix, metadata;
    int64_t number = 0;  // as that of an object store, whose keys are the paths of the files
    std::vector<uint16_t> voxels;

    Store(Random &random, bool sharded, int64_t longest = 40) {
        for (int a = 0; a < RANK; ++a) {
            shape[a] = draw(random, 1, longest);
            chunk[a] = draw(random, 1, 9);
            geometry.chunk_shape[a] = chunk[a];
            geometry.stored_axes[a] = a;
            geometry.chunks_per_shard[a] = sharded ? draw(random, 1, 3) : 0;
        }
        geometry.rank = RANK;
        geometry.dtype = LC_U16;
        geometry.index_at_end = draw(random, 0, 1);
        voxels.assign(static_cast<size_t>(shape[0] * shape[1] * shape[2]), FILL);
        metadata = (folder.path / "zarr.json").string();
        prefix = (folder.path / "c").string() + ".";
        write_file(metadata, "{}");
        write(random);
    }
    uint16_t &at(int64_t z, int64_t y, int64_t x) {
        return voxels[static_cast<size_t>((z * shape[1] + y) * shape[2] + x)];
    }
    std::string path(const int64_t *object) const {
        return prefix + std::to_string(object[0]) + "." + std::to_string(object[1]) + "." + std::to_string(object[2]);
    }
    std::string chunk_bytes(Random &random, const int64_t *number) {
        std::vector<uint16_t> values;
        for (int64_t z = 0; z < chunk[0]; ++z)
            for (int64_t y = 0; y < chunk[1]; ++y)
                for (int64_t x = 0; x < chunk[2]; ++x) {
                    const int64_t at_z = number[0] * chunk[0] + z, at_y = number[1] * chunk[1] + y,
                                  at_x = number[2] * chunk[2] + x;
                    values.push_back(static_cast<uint16_t>(random()));
                    if (at_z < shape[0] && at_y < shape[1] && at_x < shape[2]) at(at_z, at_y, at_x) = values.back();
                }
        return {reinterpret_cast<const char *>(values.data()), 2 * values.size()};
    }
    void write(Random &random) {
        int64_t per[RANK], objects[RANK], index[RANK];
        for (int a = 0; a < RANK; ++a) {
            per[a] = std::max<int64_t>(1, geometry.chunks_per_shard[a]);
            objects[a] = (shape[a] - 1) / (chunk[a] * per[a]) + 1;
        }
        const bool sharded = geometry.chunks_per_shard[0] > 0;
        for (index[0] = 0; index[0] < objects[0]; ++index[0])
            for (index[1] = 0; index[1] < objects[1]; ++index[1])
                for (index[2] = 0; index[2] < objects[2]; ++index[2]) {
                    if (draw(random, 0, 7) == 0) continue;  // missing
                    if (!sharded) {
                        write_file(path(index), chunk_bytes(random, index));
                        continue;
                    }
                    const int64_t count = per[0] * per[1] * per[2];
                    std::vector<uint64_t> ranges;
                    std::string body;
                    const size_t base = geometry.index_at_end ? 0 : static_cast<size_t>(16 * count);
                    for (int64_t n = 0; n < count; ++n) {
                        const int64_t inner[RANK] = {index[0] * per[0] + n / (per[1] * per[2]),
                                                     index[1] * per[1] + n / per[2] % per[1],
                                                     index[2] * per[2] + n % per[2]};
                        if (draw(random, 0, 5) == 0) {
                            ranges.insert(ranges.end(), {~uint64_t(0), ~uint64_t(0)});
                            continue;
                        }
                        const std::string bytes = chunk_bytes(random, inner);
                        ranges.insert(ranges.end(), {base + body.size(), bytes.size()});
                        body += bytes;
                    }
                    const std::string table(reinterpret_cast<const char *>(ranges.data()), 8 * ranges.size());
                    write_file(path(index), geometry.index_at_end ? body + table : table + body);
                }
    }
};

// Regions of one store, their outputs and jobs.
struct Jobs {
    Store *store;
    std::vector<int64_t> array, start, stop, strides, address;
    std::vector<std::vector<uint16_t>> outputs;
    std::vector<lc_job *> jobs;
    bool one_job;

    Jobs(Jobs &&) = default;
    Jobs(Store &store, Random &random, int64_t count, bool one_job = false) : store(&store), one_job(one_job) {
        for (int64_t n = 0; n < count; ++n) {
            int64_t extent[RANK];
            for (int a = 0; a < RANK; ++a) {
                start.push_back(draw(random, 0, store.shape[a] - 1));
                stop.push_back(draw(random, start.back(), store.shape[a]));
                extent[a] = stop.back() - start.back();
            }
            array.push_back(0);
            strides.insert(strides.end(), {2 * extent[1] * extent[2], 2 * extent[2], 2});
            outputs.emplace_back(static_cast<size_t>(extent[0] * extent[1] * extent[2]), UNTOUCHED * 0x0101);
            address.push_back(reinterpret_cast<int64_t>(outputs.back().data()));
        }
        jobs.assign(one_job ? 1 : static_cast<size_t>(count), nullptr);
    }
    ~Jobs() { lc_jobs_release(jobs.data(), static_cast<int64_t>(jobs.size())); }
    int64_t submit(lc_reader *reader) {
        lc_array record{store->prefix.c_str(), ".", store->metadata.c_str()};
        record.store = store->number;
        lc_batch batch{};
        batch.geometry = &store->geometry;
        batch.arrays = &record;
        batch.array_count = 1;
        batch.region_count = static_cast<int64_t>(array.size());
        batch.array = array.data();
        batch.start = start.data();
        batch.stop = stop.data();
        batch.strides = strides.data();
        batch.address = address.data();
        batch.target = LC_U16;
        std::memcpy(batch.fill, &FILL, 2);
        batch.one_job = one_job;
        return lc_submit(reader, &batch, jobs.data());
    }
    bool output_is_right(size_t n) const {
        const int64_t *low = &start[RANK * n], *high = &stop[RANK * n];
        size_t k = 0;
        for (int64_t z = low[0]; z < high[0]; ++z)
            for (int64_t y = low[1]; y < high[1]; ++y)
                for (int64_t x = low[2]; x < high[2]; ++x)
                    if (outputs[n][k++] != store->at(z, y, x)) return false;
        return true;
    }
    bool is_untouched() const {
        for (const auto &output : outputs)
            for (uint16_t value : output)
                if (value != UNTOUCHED * 0x0101) return false;
        return true;
    }
    // Wait for all; jobs without error have the right voxels. Returns the errors' codes.
    std::vector<int64_t> settle() {
        std::vector<int64_t> codes;
        for (size_t n = 0; n < jobs.size(); ++n) {
            CHECK(lc_wait_job(jobs[n], LONG) == 1);
            lc_error error;
            lc_job_error(jobs[n], &error);
            codes.push_back(error.code);
            if (error.code) continue;
            if (!one_job) CHECK(output_is_right(n));
            else
                for (size_t k = 0; k < outputs.size(); ++k) CHECK(output_is_right(k));
        }
        return codes;
    }
};

inline lc_reader *new_reader(int64_t threads = 4) {
    char text[256];
    return lc_reader_new(threads, 1 << 20, nullptr, text);
}

inline void close_reader(lc_reader *reader) {
    lc_reader_close(reader);
    CHECK(lc_wait_closed(reader, LONG) == 1);
    lc_reader_delete(reader);
}
