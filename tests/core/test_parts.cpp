// Planning, shard indexes, files, copies and the pool, each against an obvious reference.
#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <thread>
#include <tuple>

#include "check.hpp"
#include "codecs.hpp"
#include "copy.hpp"
#include "files.hpp"
#include "plan.hpp"
#include "pool.hpp"
#include "reader.hpp"
#include "shards.hpp"

using namespace lc;

namespace {

lc_geometry random_geometry(Random &random, i64 rank, i64 longest) {
    lc_geometry g{};
    g.rank = rank;
    g.dtype = draw(random, 0, 1) ? LC_U16 : LC_C128;
    const bool sharded = draw(random, 0, 1);
    for (i64 a = 0; a < rank; ++a) {
        g.chunk_shape[a] = draw(random, 1, longest);
        g.stored_axes[a] = a;
        g.chunks_per_shard[a] = sharded ? draw(random, 1, 3) : 0;
    }
    std::shuffle(g.stored_axes, g.stored_axes + rank, random);
    return g;
}

Regions one_region(const lc_geometry &g, const std::vector<i64> &start, const std::vector<i64> &stop) {
    Regions regions;
    regions.geometry = std::make_shared<const Geometry>(g);
    regions.array = {0};
    regions.start = start;
    regions.stop = stop;
    regions.strides.assign(start.size(), 0);
    regions.address = {1 << 20};
    return regions;
}

}  // namespace

// Boxes tile the region: each voxel is in one box, at the place in chunk and output that arithmetic says.
TEST(boxes_tile_regions) {
    Random random(1);
    for (int round = 0; round < 400; ++round) {
        const i64 rank = draw(random, 1, 4), longest = rank > 3 ? 3 : 6;
        const lc_geometry g = random_geometry(random, rank, longest);
        // Far from the origin, too, where products of coordinates leave 64 bits.
        const i64 origin = round % 3 ? 0 : (i64(1) << 62) - 1000;
        std::vector<i64> start, stop, extent, strides(static_cast<size_t>(rank), 1);
        i64 voxels = 1;
        for (i64 a = 0; a < rank; ++a) {
            start.push_back(origin + draw(random, 0, 20));
            extent.push_back(draw(random, round % 7 ? 1 : 0, 9));
            stop.push_back(start.back() + extent.back());
            voxels *= extent.back();
        }
        Regions regions = one_region(g, start, stop);
        for (i64 a = rank - 2; a >= 0; --a) strides[a] = strides[a + 1] * std::max<i64>(1, extent[a + 1]);
        regions.strides = strides;
        const Geometry &geometry = *regions.geometry;
        std::vector<int> seen(static_cast<size_t>(voxels), 0);
        std::set<std::vector<i64>> chunks;
        std::vector<i64> last_object;
        std::set<std::vector<i64>> objects;
        for (ChunkWalk walk(regions, 0); !walk.at_end(); walk.next()) {
            const ChunkBox box = walk.box();
            CHECK(chunks.insert({box.chunk, box.chunk + rank}).second);
            const std::vector<i64> object(box.object, box.object + rank);
            if (object != last_object) CHECK(objects.insert(object).second);  // object by object
            last_object = object;
            i64 inner = 0;
            std::vector<i64> low;
            i64 source = 0, place = 0;
            for (i64 a = 0; a < rank; ++a) {
                const i64 per = geometry.per_object[a];
                CHECK(box.object[a] == box.chunk[a] / per && box.extent[a] > 0);
                inner = inner * per + box.chunk[a] % per;
                low.push_back(std::max(start[a], box.chunk[a] * g.chunk_shape[a]));
                CHECK(low[a] + box.extent[a] == std::min(stop[a], (box.chunk[a] + 1) * g.chunk_shape[a]));
                source += (low[a] - box.chunk[a] * g.chunk_shape[a]) * geometry.chunk_strides[a];
                place += (low[a] - start[a]) * strides[a];
            }
            CHECK(box.inner == inner && box.source_offset == source);
            CHECK(reinterpret_cast<i64>(box.target) == (1 << 20) + place);
            i64 count = 1;
            for (i64 a = 0; a < rank; ++a) count *= box.extent[a];
            for (i64 k = 0; k < count; ++k) {
                i64 at = place, rest = k;
                for (i64 a = rank - 1; a >= 0; --a) {
                    at += rest % box.extent[a] * strides[a];
                    rest /= box.extent[a];
                }
                ++seen[static_cast<size_t>(at)];
            }
        }
        for (int times : seen) CHECK(times == 1);
        CHECK(static_cast<double>(chunks.size()) == regions.chunk_count(0));
    }
}

// A region of 2^62 voxels along an axis is walked from its first chunk on, and its chunks are counted.
TEST(huge_regions) {
    lc_geometry g{};
    g.rank = 2;
    g.chunk_shape[0] = g.chunk_shape[1] = 64;
    g.stored_axes[1] = 1;
    const i64 huge = i64(1) << 62;
    Regions regions = one_region(g, {0, huge - 64}, {huge, huge});
    CHECK(regions.chunk_count(0) == std::ldexp(1.0, 56));
    ChunkWalk walk(regions, 0);
    for (i64 n = 0; n < 1000; ++n, walk.next()) {
        CHECK(!walk.at_end());
        CHECK(walk.box().chunk[0] == n && walk.box().chunk[1] == huge / 64 - 1);
    }
}

// Sizes that do not fit into 64 bits are refused, and coordinates near 2^63 do not overflow.
TEST(sizes_that_overflow) {
    const i64 huge = i64(1) << 62;
    const auto is_refused = [](i64 chunk, i64 more, i64 shard, i64 more_shard) {
        lc_geometry g{};
        g.rank = 2;
        g.stored_axes[1] = 1;
        g.dtype = LC_U16;
        g.chunk_shape[0] = chunk;
        g.chunk_shape[1] = more;
        g.chunks_per_shard[0] = shard;
        g.chunks_per_shard[1] = more_shard;
        try {
            const Geometry geometry(g);
            return false;
        } catch (const std::overflow_error &) {
            return true;
        }
    };
    CHECK(is_refused(huge, 1, 0, 0) && is_refused(i64(1) << 32, i64(1) << 32, 0, 0) && is_refused(0, 1, 0, 0));
    CHECK(is_refused(1, 1, i64(1) << 32, i64(1) << 32) && is_refused(1, 1, 3, 6148914691236517206));
    CHECK(is_refused(1, 1, i64(1) << 58, 1) && is_refused(1, 1, 1, -1) && !is_refused(1, 1, i64(1) << 56, 1));
    lc_geometry g{};
    g.rank = 1;
    g.chunk_shape[0] = 1 << 12;
    g.chunks_per_shard[0] = (i64(1) << 50) + 1;
    Regions regions = one_region(g, {INT64_MAX - 5000}, {INT64_MAX});
    i64 chunks = 0;
    for (ChunkWalk walk(regions, 0); !walk.at_end(); walk.next()) ++chunks;
    CHECK(chunks == 2);
}

// The last block of a Blosc frame may be shorter than an element: it is not shuffled, and needs no memory for that.
TEST(a_last_block_shorter_than_an_element) {
    std::vector<uint8_t> frame = {2, 1, 0x34, 4, 10, 0, 0, 0, 8, 0, 0, 0, 42, 0, 0, 0};  // bit shuffle, elements of 4
    for (uint8_t byte : {24, 0, 0, 0, 36, 0, 0, 0}) frame.push_back(byte);  // offsets of the blocks
    for (uint8_t byte : {8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 0, 0, 0, 9, 10}) frame.push_back(byte);
    lc_chain chain{};
    chain.is_encoded = 1;
    chain.compressor = LC_BLOSC;
    chain.inner = LC_LZ4;
    uint8_t decoded[10];
    char text[256];
    CHECK(lc_decode(&chain, frame.data(), static_cast<int64_t>(frame.size()), decoded, 10, text) == LC_OK);
    for (int n = 0; n < 10; ++n) CHECK(decoded[n] == n + 1);
}

TEST(pieces_tile_boxes) {
    Random random(2);
    for (int round = 0; round < 500; ++round) {
        const i64 rank = draw(random, 1, 3);
        lc_geometry record = random_geometry(random, rank, 12);
        if (round % 2) record.chunk_shape[draw(random, 0, rank - 1)] = draw(random, 40'000, 70'000);  // gaps to skip
        const Geometry geometry(record);
        i64 extent[LC_MAX_RANK], strides[LC_MAX_RANK], step = 7, voxels = 1;
        for (i64 a = 0; a < rank; ++a) {
            extent[a] = draw(random, 1, std::min<i64>(record.chunk_shape[a], 12));
            voxels *= extent[a];
        }
        for (i64 a = rank - 1; a >= 0; --a) {
            strides[a] = step;
            step *= extent[a];
        }
        const i64 most = draw(random, 1, 3) == 1 ? draw(random, 1, 64) : 4 << 20;
        std::set<std::pair<i64, i64>> wanted, found;
        const auto each = [&](const i64 *counts, i64 source, i64 target, auto add) {
            i64 count = 1;
            for (i64 a = 0; a < rank; ++a) count *= counts[a];
            for (i64 k = 0; k < count; ++k) {
                i64 from = source, to = target, rest = k;
                for (i64 a = rank - 1; a >= 0; --a) {
                    from += rest % counts[a] * geometry.chunk_strides[a];
                    to += rest % counts[a] * strides[a];
                    rest /= counts[a];
                }
                add(from, to);
            }
        };
        each(extent, 0, 0, [&](i64 from, i64 to) { wanted.insert({from, to}); });
        for (const Piece &piece : cut_pieces(geometry, extent, strides, most)) {
            CHECK(piece.nbytes <= std::max(most, geometry.itemsize));
            each(piece.extent, piece.source_offset, piece.target_offset, [&](i64 from, i64 to) {
                CHECK(found.insert({from, to}).second);
                CHECK(from + geometry.itemsize <= piece.source_offset + piece.nbytes);
            });
        }
        CHECK(found == wanted);
    }
}

TEST(shard_indexes) {
    Random random(3);
    for (int round = 0; round < 64; ++round) {
        lc_geometry g{};
        g.rank = 2;
        g.dtype = LC_U8;
        for (int a = 0; a < 2; ++a) g.chunk_shape[a] = 4, g.stored_axes[a] = a, g.chunks_per_shard[a] = 2;
        g.index_at_end = round & 1;
        g.index_big_endian = round >> 1 & 1;
        g.index_checksum = round >> 2 & 1;
        g.chain.is_encoded = round >> 3 & 1;
        const Geometry geometry(g);
        const u64 file = 1000, base = g.index_at_end ? 0 : static_cast<u64>(geometry.index_nbytes);
        std::vector<u64> words = {base, 16, ~u64(0), ~u64(0), base + 16, 16, base, 16};
        const auto stored = [&] {
            std::vector<u8> bytes(static_cast<size_t>(geometry.index_nbytes));
            for (size_t n = 0; n < 8; ++n)
                for (size_t k = 0; k < 8; ++k)
                    bytes[8 * n + k] = static_cast<u8>(words[n] >> 8 * (g.index_big_endian ? 7 - k : k));
            if (g.index_checksum) {
                const u32 sum = crc32c(bytes.data(), 64);
                for (size_t k = 0; k < 4; ++k) bytes[64 + k] = static_cast<u8>(sum >> 8 * k);
            }
            return bytes;
        };
        const auto refused = [&](const std::vector<u8> &bytes, u64 nbytes) {
            try {
                parse_index(geometry, bytes.data(), static_cast<i64>(bytes.size()), static_cast<i64>(nbytes));
                return std::string();
            } catch (const std::runtime_error &error) {
                return std::string(error.what());
            }
        };
        const auto good = stored();
        const auto index = parse_index(geometry, good.data(), static_cast<i64>(good.size()), 1000);
        for (size_t n = 0; n < 4; ++n) {
            CHECK((*index)[n].offset == (n == 1 ? -1 : static_cast<i64>(words[2 * n])));
            CHECK((*index)[n].nbytes == (n == 1 ? 0 : static_cast<i64>(words[2 * n + 1])));
        }
        CHECK(refused({good.begin(), good.end() - 1}, file).find("must have") != std::string::npos);
        if (g.index_checksum) {
            auto broken = good;
            broken[static_cast<size_t>(draw(random, 0, 67))] ^= 1;
            CHECK(refused(broken, file).find("checksum") != std::string::npos);
        }
        const u64 end = g.index_at_end ? file - static_cast<u64>(geometry.index_nbytes) : file;
        const std::vector<std::pair<u64, u64>> bad = {
            {end - 15, 16}, {end + 1, 16}, {~u64(0) - 3, 16}, {~u64(0), 16}, {u64(1) << 63, 16}};
        for (const auto &[offset, nbytes] : bad) {
            words[4] = offset, words[5] = nbytes;
            CHECK(refused(stored(), file).find("inner chunk (1, 0)") == 0);
        }
        if (base) {
            words[4] = base - 1, words[5] = 16;  // in the index itself
            CHECK(!refused(stored(), file).empty());
        }
        words[4] = end - 16, words[5] = 16;
        CHECK(refused(stored(), file).empty());
        words[4] = base, words[5] = 17;
        CHECK(refused(stored(), file).empty() == (g.chain.is_encoded != 0));
        words[4] = base, words[5] = ~u64(0);
        CHECK(!refused(stored(), file).empty());
        CHECK(!refused(good, 3).empty());  // the file is shorter than its index
    }
}

TEST(index_cache) {
    lc_geometry g{};
    g.rank = 1;
    g.chunk_shape[0] = 4;
    g.chunks_per_shard[0] = 8;
    const Geometry geometry(g);
    g.index_at_end = 1;
    const Geometry other(g);
    const auto index = std::make_shared<const ShardIndex>(8);
    IndexCache cache(8 * sizeof(ChunkRange) * 3);
    const Version one{1, 100, 5, 6};
    for (const char *path : {"a", "b", "c"}) cache.keep(path, one, geometry, index);
    CHECK(cache.find("a", one, geometry) == index);
    CHECK(!cache.find("a", one, other));
    for (Version v : {Version{2, 100, 5, 6}, Version{1, 101, 5, 6}, Version{1, 100, 4, 6}, Version{1, 100, 5, 7}})
        CHECK(!cache.find("a", v, geometry));
    cache.keep("d", one, geometry, index);  // "b" was not used for the longest time
    CHECK(!cache.find("b", one, geometry));
    for (const char *path : {"a", "c", "d"}) CHECK(cache.find(path, one, geometry));
    cache.keep("a", Version{2, 100, 5, 6}, geometry, index);
    CHECK(!cache.find("a", one, geometry) && cache.find("c", one, geometry) && cache.find("d", one, geometry));
    cache.keep("large", one, geometry, std::make_shared<const ShardIndex>(1000));
    CHECK(!cache.find("large", one, geometry) && cache.find("c", one, geometry));
}

TEST(files_and_their_errors) {
    Folder folder;
    write_file(folder.path / "f", "0123456789");
    const std::string path = (folder.path / "f").string();
    File file;
    CHECK(file.open((folder.path / "none").string()) == ENOENT && !file.is_open());
    CHECK(file.open(path) == 0);
    char text[20];
    CHECK(file.read(text, 4, 3) == 4 && !std::memcmp(text, "3456", 4));
    CHECK(file.read(text, 20, 3) == 7);
    CHECK(file.read(text, 20, 30) == 0);
    faults::armed[faults::PREAD].number = -3;
    faults::armed[faults::PREAD].left = 1;
    CHECK(file.read(text, 10, 0) == 7);
    faults::armed[faults::PREAD].number = EIO;
    faults::armed[faults::PREAD].left = 2;
    CHECK(file.read(text, 10, 0) == 10 && file.read(text, 10, 0) == -EIO && file.read(text, 10, 0) == 10);
    Version version;
    bool is_regular = false;
    CHECK(file.stat(version, is_regular) == 0 && is_regular && version.nbytes == 10);
    faults::armed[faults::FSTAT].number = EIO;
    faults::armed[faults::FSTAT].left = 1;
    CHECK(file.stat(version, is_regular) == EIO);
    CHECK(file.open(folder.path.string()) == 0 && file.stat(version, is_regular) == 0 && !is_regular);
    const std::string fifo = (folder.path / "pipe").string();
    CHECK(!mkfifo(fifo.c_str(), 0600));
    CHECK(file.open(fifo) == 0 && file.stat(version, is_regular) == 0 && !is_regular);  // not waited for
    CHECK(!symlink("nowhere", (folder.path / "link").c_str()));
    CHECK(!is_missing((folder.path / "link").string()) && !exists((folder.path / "link").string()));
    CHECK(is_missing((folder.path / "none").string()) && is_missing(path + "/x") && exists(path));
}

namespace {

using Wide = long double;

// A stored number as the widest C++ has it, by arithmetic alone.
Wide half_value(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    Wide value = exponent == 31
                     ? (mantissa ? std::numeric_limits<Wide>::quiet_NaN() : std::numeric_limits<Wide>::infinity())
                 : exponent ? std::ldexp(static_cast<Wide>(1024 + mantissa), exponent - 25)
                            : std::ldexp(static_cast<Wide>(mantissa), -24);
    return bits & 0x8000 ? -value : value;
}
Wide bfloat_value(uint16_t bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); }

template <class T> Wide read_as(const u8 *p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return static_cast<Wide>(value);
}
Wide value_of(i64 dtype, const u8 *p) {
    switch (dtype) {
        case LC_BOOL:
            return *p != 0;
        case LC_U8:
            return read_as<u8>(p);
        case LC_U16:
            return read_as<uint16_t>(p);
        case LC_U32:
            return read_as<u32>(p);
        case LC_U64:
            return read_as<u64>(p);
        case LC_I8:
            return read_as<int8_t>(p);
        case LC_I16:
            return read_as<int16_t>(p);
        case LC_I32:
            return read_as<int32_t>(p);
        case LC_I64:
            return read_as<i64>(p);
        case LC_F16:
            return half_value(static_cast<uint16_t>(p[0] | p[1] << 8));
        case LC_BFLOAT16:
            return bfloat_value(static_cast<uint16_t>(p[0] | p[1] << 8));
        case LC_F32:
        case LC_C64:
            return read_as<float>(p);
        default:
            return read_as<double>(p);
    }
}
bool is_float(i64 t) { return t >= LC_F16; }
bool is_complex(i64 t) { return t == LC_C64 || t == LC_C128; }
// The 16-bit float nearest to a finite number, of two the even one: by search.
uint16_t nearest(Wide value, bool is_bfloat) {
    const uint16_t infinity = is_bfloat ? 0x7f80 : 0x7c00, sign = std::signbit(value) ? 0x8000 : 0;
    const Wide magnitude = std::fabs(value);
    const auto number = [&](int bits) {
        if (bits < infinity)
            return is_bfloat ? bfloat_value(static_cast<uint16_t>(bits)) : half_value(static_cast<uint16_t>(bits));
        return is_bfloat ? std::ldexp(Wide(1), 128) : Wide(65536);  // where the next number would be
    };
    int low = 0, high = infinity;
    while (high - low > 1) (number((low + high) / 2) <= magnitude ? low : high) = (low + high) / 2;
    if (magnitude >= number(infinity)) low = infinity;
    else if (const Wide below = magnitude - number(low), above = number(high) - magnitude;
             above < below || (above == below && low & 1))
        low = high;
    return static_cast<uint16_t>(low | sign);
}
bool nan_bits(uint16_t bits, bool is_bfloat) { return (bits & 0x7fff) > (is_bfloat ? 0x7f80 : 0x7c00); }

// Whether `to` holds what a cast of one element must give.
bool element_is_right(i64 source, i64 target, const u8 *from, const u8 *to) {
    if (source == target && source != LC_BOOL) return !std::memcmp(from, to, static_cast<size_t>(dtype_nbytes(source)));
    const i64 part = is_complex(source) ? dtype_nbytes(source) / 2 : 0;
    const Wide value = value_of(source, from), imaginary = part ? value_of(source, from + part) : 0;
    if (target == LC_BOOL) return source == LC_BOOL ? *to == *from : *to == (value != 0 || imaginary != 0);
    if (is_complex(target)) {
        const i64 size = dtype_nbytes(target) / 2;
        const auto same = [&](Wide wanted, const u8 *p) {
            const Wide found = value_of(target, p),
                       rounded = size == 4 ? Wide(static_cast<float>(wanted)) : Wide(static_cast<double>(wanted));
            return std::isnan(wanted) ? std::isnan(found) : found == rounded;
        };
        return same(value, to) && same(imaginary, to + size);
    }
    if (target == LC_F16 || target == LC_BFLOAT16) {
        // All but double pass through float on their way to a half; all do on their way to bfloat16.
        const bool is_bfloat = target == LC_BFLOAT16, direct = !is_bfloat && (source == LC_F64 || source == LC_C128);
        const Wide through = direct ? value : Wide(static_cast<float>(value));
        const uint16_t found = static_cast<uint16_t>(to[0] | to[1] << 8);
        return std::isnan(through) ? nan_bits(found, is_bfloat) : found == nearest(through, is_bfloat);
    }
    if (target == LC_F32 || target == LC_F64) {
        const Wide found = value_of(target, to),
                   wanted = target == LC_F32 ? Wide(static_cast<float>(value)) : Wide(static_cast<double>(value));
        return std::isnan(wanted) ? std::isnan(found) : found == wanted;
    }
    const int bits = static_cast<int>(8 * dtype_nbytes(target));
    const bool is_signed = target >= LC_I8;
    if (is_float(source)) {
        // Beyond the range of the integers: their nearest end, and 0 for NaN.
        const Wide top = std::ldexp(Wide(1), bits - is_signed), low = is_signed ? -top : Wide(0),
                   whole = std::trunc(value);
        if (std::isnan(value)) return value_of(target, to) == 0;
        return value_of(target, to) == std::min(std::max(whole, low), top - 1);
    }
    i64 wanted;  // the low bits of an integer
    if (value < 0) wanted = static_cast<i64>(value);
    else wanted = static_cast<i64>(static_cast<u64>(value));
    return !std::memcmp(&wanted, to, static_cast<size_t>(dtype_nbytes(target)));
}

}  // namespace

TEST(casts_of_all_pairs) {
    Random random(4);
    constexpr i64 COUNT = 600;
    for (i64 source = 0; source < LC_BFLOAT16; ++source)
        for (i64 target = 0; target <= LC_BFLOAT16; ++target)
            for (int swapped = 0; swapped < 2; ++swapped) {
                const i64 size = dtype_nbytes(source), part = is_complex(source) ? size / 2 : size,
                          out = dtype_nbytes(target);
                std::vector<u8> from(static_cast<size_t>(COUNT * size)), stored, to(static_cast<size_t>(COUNT * out));
                for (u8 &byte : from) byte = static_cast<u8>(random());
                for (i64 n = 0; n < COUNT; ++n) {
                    u8 *p = &from[static_cast<size_t>(n * size)];
                    if (source == LC_BOOL) *p &= 1;
                    // Small numbers, numbers between two halves, infinities and NaN beside any bits.
                    const double small = n % 5 ? static_cast<double>(draw(random, -70000, 70000)) / 16
                                               : static_cast<double>(draw(random, 0, 255));
                    for (i64 k = 0; k < size / part; ++k) {
                        if (source == LC_F32 || source == LC_C64) {
                            const float f = static_cast<float>(small);
                            if (n % 2) std::memcpy(p + 4 * k, &f, 4);
                        } else if (source == LC_F64 || source == LC_C128) {
                            if (n % 2) std::memcpy(p + 8 * k, &small, 8);
                        }
                    }
                    const double special[] = {INFINITY, -INFINITY, NAN, 65519.999, 65520, 0x1p-25, 0x1.8p-24, -0.0};
                    if (n < 8 && part == 8 && source >= LC_F64) std::memcpy(p, &special[n], 8);
                    if (const float f = static_cast<float>(special[n % 8]);
                        n < 8 && (source == LC_F32 || source == LC_C64))
                        std::memcpy(p, &f, 4);
                }
                stored = from;
                if (swapped)
                    for (size_t n = 0; n < stored.size(); n += static_cast<size_t>(part))
                        std::reverse(&stored[n], &stored[n] + part);
                Box box;
                box.rank = 1;
                box.extent[0] = COUNT;
                box.source_strides[0] = size;
                box.target_strides[0] = out;
                copy_box({source, target, swapped != 0}, box, stored.data(), to.data());
                for (i64 n = 0; n < COUNT; ++n)
                    if (!element_is_right(source, target, &from[static_cast<size_t>(n * size)],
                                          &to[static_cast<size_t>(n * out)])) {
                        std::fprintf(stderr, "from dtype %ld to %ld, element %ld: %.20Lg became %.20Lg\n", source,
                                     target, n, value_of(source, &from[static_cast<size_t>(n * size)]),
                                     value_of(target, &to[static_cast<size_t>(n * out)]));
                        CHECK(false);
                    }
            }
}

// Strides of any order, one-wide axes, padding: only the box is written.
TEST(boxes_are_copied_and_filled) {
    Random random(5);
    for (int round = 0; round < 2000; ++round) {
        const i64 target = draw(random, 0, 1) ? LC_U16 : draw(random, 0, 1) ? LC_F32 : LC_U8;
        Box box;
        box.rank = draw(random, 0, 4);
        i64 order[LC_MAX_RANK] = {0, 1, 2, 3, 4, 5}, from_step = 2, to_step = dtype_nbytes(target);
        for (i64 a = 0; a < box.rank; ++a) box.extent[a] = draw(random, round % 50 ? 1 : 0, 5);
        for (int memory = 0; memory < 2; ++memory) {
            std::shuffle(order, order + box.rank, random);
            for (i64 n = 0; n < box.rank; ++n) {
                i64 &step = memory ? to_step : from_step;
                (memory ? box.target_strides : box.source_strides)[order[n]] = step;
                step *= std::max<i64>(1, box.extent[order[n]]) + draw(random, 0, 1);
            }
        }
        std::vector<u8> from(static_cast<size_t>(from_step)), to(static_cast<size_t>(to_step), 0xa5);
        for (u8 &byte : from) byte = static_cast<u8>(random());
        std::vector<u8> wanted = to, filled = to, wanted_fill = to;
        const u8 value[16] = {1, 2, 3, 4};
        i64 count = 1;
        for (i64 a = 0; a < box.rank; ++a) count *= box.extent[a];
        for (i64 k = 0; k < count; ++k) {
            i64 at = 0, place = 0, rest = k;
            for (i64 a = box.rank - 1; a >= 0; --a) {
                at += rest % box.extent[a] * box.source_strides[a];
                place += rest % box.extent[a] * box.target_strides[a];
                rest /= box.extent[a];
            }
            uint16_t element;
            std::memcpy(&element, &from[static_cast<size_t>(at)], 2);
            const float f = element;
            const u8 byte = static_cast<u8>(element);
            if (target == LC_U16) std::memcpy(&wanted[static_cast<size_t>(place)], &element, 2);
            else if (target == LC_F32) std::memcpy(&wanted[static_cast<size_t>(place)], &f, 4);
            else wanted[static_cast<size_t>(place)] = byte;
            std::memcpy(&wanted_fill[static_cast<size_t>(place)], value, static_cast<size_t>(dtype_nbytes(target)));
        }
        copy_box({LC_U16, target, false}, box, from.data(), to.data());
        CHECK(to == wanted);
        fill_box(dtype_nbytes(target), value, box, filled.data());
        CHECK(filled == wanted_fill);
    }
}

namespace {

struct Counted : Work {
    explicit Counted(i64 steps) : steps(steps), times(new std::atomic<int>[static_cast<size_t>(steps)]()) {}
    bool claim(i64 &step) override { return (step = next++) < steps; }
    bool has_more() const override { return next < steps; }
    void run(i64 step) noexcept override {
        const i64 now_running = ++running;
        for (i64 known = most_running;
             now_running > known && !most_running.compare_exchange_weak(known, now_running);) {
        }
        if (slow) usleep(500);
        ++times[static_cast<size_t>(step)];
        --running;
        ++done;
    }
    i64 steps, next = 0;
    bool slow = false;
    std::unique_ptr<std::atomic<int>[]> times;
    std::atomic<i64> done{0};
    static inline std::atomic<i64> running{0}, most_running{0};
};

void wait_for(const std::function<bool()> &what) {
    for (int n = 0; n < 20'000 && !what(); ++n) usleep(1000);
    CHECK(what());
}

}  // namespace

TEST(pool_runs_all_once) {
    for (i64 threads : {1, 3, 8}) {
        Counted::most_running = 0;
        Pool pool(threads, 4);
        std::vector<std::shared_ptr<Counted>> all;
        for (int n = 0; n < 200; ++n) {
            all.push_back(std::make_shared<Counted>(n % 17));
            all.back()->slow = n % 5 == 0;
            if (all.back()->steps) CHECK(pool.add(all.back(), n % 2) == 0);
        }
        for (const auto &work : all) {
            wait_for([&] { return work->done == work->steps; });
            for (i64 k = 0; k < work->steps; ++k) CHECK(work->times[static_cast<size_t>(k)] == 1);
        }
        CHECK(Counted::most_running <= threads);
        pool.stop();
        CHECK(pool.add(all.back(), false) == ECANCELED);
        for (const auto &work : all) CHECK(work.use_count() == 1);
    }
}

TEST(pool_stops_with_work_left) {
    Pool pool(4, 4);
    std::vector<std::shared_ptr<Counted>> all;
    for (int n = 0; n < 20'000; ++n) {
        all.push_back(std::make_shared<Counted>(3));
        all.back()->slow = true;
        CHECK(pool.add(all.back(), n % 2) == 0);
    }
    pool.stop();
    CHECK(Counted::running == 0);
    for (const auto &work : all) CHECK(work.use_count() == 1);
    pool.stop();
}

TEST(pool_goes_on_without_new_threads) {
    Pool pool(4, 4);
    const auto fail = [](i64 nth) {
        faults::armed[faults::THREAD].number = EAGAIN;
        faults::armed[faults::THREAD].left = nth;
    };
    auto first = std::make_shared<Counted>(5), second = std::make_shared<Counted>(100);
    fail(1);
    CHECK(pool.add(first, false) == EAGAIN);
    CHECK(first.use_count() == 1);
    CHECK(pool.add(first, false) == 0);
    wait_for([&] { return first->done == 5; });
    second->slow = true;
    fail(1);
    CHECK(pool.add(second, false) == 0);
    wait_for([&] { return second->done == 100; });
    pool.stop();
}

TEST(pool_gives_work_back_to_who_waits_for_it) {
    struct Once : OneStep {
        void run(i64) noexcept override { ++done; }
        std::atomic<i64> done{0};
    };
    Pool pool(2, 4);
    int helped = 0;
    for (int n = 0; n < 300; ++n) {
        const auto work = std::make_shared<Once>();
        CHECK(pool.add_deferred(work) == 0);
        if (n % 3 && pool.begin_help(*work)) {
            CHECK(!pool.begin_help(*work));
            work->run(0);
            pool.end_help();
            ++helped;
        }
        wait_for([&] { return work->done == 1; });  // by a thread of the pool where nobody took it
    }
    CHECK(helped > 0);
    // The pool stops behind the threads that help.
    bool helps = false;
    auto work = std::make_shared<Once>();
    for (int n = 0; n < 1000 && !helps; ++n) {
        wait_for([&] { return work.use_count() == 1; });
        work->arm();
        CHECK(pool.add_deferred(work) == 0);
        helps = pool.begin_help(*work);
    }
    CHECK(helps);
    std::atomic<bool> stopped{false};
    std::thread stopper([&] {
        pool.stop();
        stopped = true;
    });
    usleep(20'000);
    CHECK(!stopped);
    pool.end_help();
    stopper.join();
    CHECK(stopped && !pool.begin_help(*work));
}

// Threads whose reads end at the same time compute one after another, unless those that compute wait for others.
TEST(pool_has_threads_compute_in_turns) {
    struct Turns : Counted {
        using Counted::Counted;
        void run(i64 step) noexcept override {
            pool->begin_wait();
            ++waiting;
            while (waiting < steps) usleep(100);
            pool->end_wait();
            pool->await_turn();
            crowded += ++computing > 2;
            ++computed;
            if (stuck)
                for (int n = 0; n < 20'000 && computed < 3; ++n) usleep(500);
            else usleep(200);
            --computing;
            Counted::run(step);
        }
        Pool *pool = nullptr;
        bool stuck = false;
        std::atomic<i64> waiting{0}, computing{0}, computed{0}, crowded{0};
    };
    const auto crowded = [](bool stuck) {
        Pool pool(2, 62);
        const auto work = std::make_shared<Turns>(64);
        work->pool = &pool;
        work->stuck = stuck;
        const auto begin = std::chrono::steady_clock::now();
        CHECK(pool.add(work, false) == 0);
        wait_for([&] { return work->done == work->steps; });
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
        pool.stop();
        return work->crowded.load();
    };
    crowded(true);
    // A thread that the system holds up loses its turn: on a busy machine that may be so once, or twice.
    int attempts = 1;
    while (crowded(false) >= 32) CHECK(++attempts < 8);
}

// Threads that wait for storage have others work in their place, up to a limit, and these end when no longer needed.
TEST(pool_works_while_threads_wait) {
    struct Waits : Counted {
        using Counted::Counted;
        void run(i64 step) noexcept override {
            pool->begin_wait();
            ++waiting;
            for (int n = 0; n < 10'000 && waiting < all.load(); ++n) usleep(500);
            pool->end_wait();
            Counted::run(step);
        }
        Pool *pool = nullptr;
        std::atomic<i64> all{0};
        std::atomic<i64> waiting{0};
    };
    for (const auto &[waits, steps] : {std::pair<i64, i64>{62, 64}, {6, 8}}) {
        Pool pool(2, waits);
        const auto work = std::make_shared<Waits>(steps);
        work->pool = &pool;
        work->all = steps;
        CHECK(pool.add(work, false) == 0);
        wait_for([&] { return work->done == steps; });
        CHECK(work->waiting == steps && pool.share(steps) == steps / (steps / 2));
        const auto more = std::make_shared<Waits>(steps + 1);  // one more than may be in flight
        more->pool = &pool;
        more->all = steps + 1;
        CHECK(pool.add(more, false) == 0);
        wait_for([&] { return more->waiting == steps; });
        usleep(50'000);
        CHECK(more->waiting == steps);
        more->all = 0;
        wait_for([&] { return more->done == steps + 1; });
        Counted::most_running = 0;
        const auto fast = std::make_shared<Counted>(2000);
        fast->slow = true;
        CHECK(pool.add(fast, false) == 0);
        wait_for([&] { return fast->done == 2000; });
        CHECK(Counted::most_running <= 2);
        wait_for([&] { return pool.share(1000) == 1000; });
        pool.stop();
    }
}

// Reads that sleep make a storage slow, and reads that only take long do not: the machine may be busy.
TEST(storage_is_slow_where_reads_wait) {
    Storage &storage = Storage::of(12345);
    CHECK(&storage == &Storage::of(12345) && &storage != &Storage::of(12346) && !storage.is_slow());
    for (int n = 0; n < 4; ++n) storage.note(0.01);
    CHECK(storage.is_slow() && storage.is_measured());
    for (int n = 0; n < 3; ++n) storage.note(0);
    CHECK(storage.is_slow());
    for (int n = 0; n < 200; ++n) storage.note(0);
    CHECK(!storage.is_slow());
    for (int n = 0; n < 300; ++n) storage.note(n % 10 ? 0 : 0.0005);
    CHECK(!storage.is_slow());
}

TEST(limit) {
    Limit gate(100);
    std::atomic<i64> held{0};
    std::vector<std::thread> threads;
    for (int n = 0; n < 6; ++n)
        threads.emplace_back([&, n] {
            Random random(static_cast<uint64_t>(n));
            for (int round = 0; round < 200; ++round) {
                const i64 nbytes = draw(random, 1, n ? 60 : 300);
                gate.acquire(nbytes);
                const i64 now_held = held += nbytes;
                CHECK(now_held <= 100 || now_held == nbytes);
                held -= nbytes;
                gate.release(nbytes);
            }
        });
    for (auto &thread : threads) thread.join();
}

TEST(cancelled_means_cancelled) {
    lc_error error{};
    error.code = LC_OPEN;
    Job failed(1), both(1), late(1);
    failed.fail(error);
    const auto over = [](Job &job) {
        const bool last = job.end(1);
        job.finish();
        return last && job.is_over();
    };
    CHECK(over(failed) && failed.error().code == LC_OPEN && !failed.cancel());
    both.fail(error);
    CHECK(both.cancel() && over(both) && both.error().code == LC_CANCELLED);
    CHECK(late.cancel());
    late.fail(error);
    CHECK(over(late) && late.error().code == LC_CANCELLED && !late.cancel());
}
