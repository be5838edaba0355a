#include "zip.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace lc {
namespace {

constexpr i64 HEADER_NBYTES = 30;
constexpr u64 SIGNATURE = 0x04034b50;
constexpr u64 UNKNOWN = 0xffffffff;  // instead of a size that a ZIP64 field states
constexpr u64 ENCRYPTED = 1, SIZES_FOLLOW = 8;  // bits of the flags

u64 number(std::span<const u8> bytes, size_t offset, size_t nbytes) {
    u64 value = 0;
    for (size_t n = nbytes; n > 0; --n) value = value << 8 | bytes[offset + n - 1];
    return value;
}

}  // namespace

Archive::Archive(const lc_array &array, i64 rank)
    : path(array.archive->path), rank_(rank), entries_(array.entries, array.entries + array.entry_count) {
    constexpr i64 SECOND = 1'000'000'000;
    const lc_look &look = *array.archive;
    version = {static_cast<u64>(look.inode), look.nbytes, look.written / SECOND, look.written % SECOND};
    std::copy_n(array.grid, LC_MAX_RANK, grid_);
}

const lc_entry *Archive::find(const i64 *object) const {
    i64 number = 0;
    for (i64 a = 0; a < rank_; ++a) number = number * grid_[a] + object[a];
    const auto before = [](const lc_entry &entry, i64 sought) { return entry.number < sought; };
    const auto entry = std::lower_bound(entries_.begin(), entries_.end(), number, before);
    return entry != entries_.end() && entry->number == number ? &*entry : nullptr;
}

i64 local_header_nbytes(const std::string &name) { return HEADER_NBYTES + static_cast<i64>(name.size()); }

i64 parse_local_header(std::span<const u8> header, const std::string &name, const lc_entry &entry, i64 file_nbytes) {
    const u64 flags = number(header, 6, 2), method = number(header, 8, 2);
    if (number(header, 0, 4) != SIGNATURE) throw std::runtime_error("no local header of the ZIP file is there");
    if (number(header, 26, 2) != name.size() || std::memcmp(header.data() + HEADER_NBYTES, name.data(), name.size()))
        throw std::runtime_error("the local header of the ZIP file names another entry");
    if (method || flags & ENCRYPTED)
        throw std::runtime_error(
            "its local header says that it is compressed or encrypted, and the directory does not");
    for (const size_t offset : {size_t{18}, size_t{22}}) {
        const u64 stated = number(header, offset, 4);
        if (!(flags & SIZES_FOLLOW) && stated != UNKNOWN && stated != static_cast<u64>(entry.nbytes))
            throw std::runtime_error("its local header states " + std::to_string(stated) +
                                     " bytes, and the directory " + std::to_string(entry.nbytes));
    }
    const i64 begin = entry.header + local_header_nbytes(name) + static_cast<i64>(number(header, 28, 2));
    if (begin > file_nbytes || entry.nbytes > file_nbytes - begin)
        throw std::runtime_error("it would reach behind the end of the ZIP file");
    return begin;
}

}  // namespace lc
