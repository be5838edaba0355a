// ZIP files that hold an array: the uncompressed entry of each stored object.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "common.hpp"
#include "core.h"
#include "files.hpp"

namespace lc {

// The state of a ZIP file when its directory was read, and the entries of one array.
struct Archive {
    Archive(const lc_array &array, i64 rank);
    // The entry of an object; null if it has none.
    const lc_entry *find(const i64 *object) const;

    std::string path;
    Version version;

private:
    i64 rank_, grid_[LC_MAX_RANK];
    std::vector<lc_entry> entries_;
};

// Size of the local header of an entry up to the end of its name.
i64 local_header_nbytes(const std::string &name);
// Offset in the file of the bytes of an entry, whose size the directory states. Throws std::runtime_error if the local
// header is missing, names another entry, says that the entry is compressed or encrypted, or states another size; or if
// the bytes would end after the end of the file.
i64 parse_local_header(std::span<const u8> header, const std::string &name, const lc_entry &entry, i64 file_nbytes);

}  // namespace lc
