// One file: opened, looked at, read, closed. The only part of the core that calls the file system.
#pragma once

#include <string>

#include "common.hpp"

namespace lc {

// What distinguishes a file from one that replaces it: inode, size, and time of the last write. Of an object in an object
// store: its size, and two words of a digest in place of inode and seconds.
struct Version {
    u64 inode = 0;
    i64 nbytes = -1, seconds = 0, nanoseconds = 0;
    bool operator==(const Version &) const = default;
};

class File {
public:
    File() = default;
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File() { close(); }

    // Open a file to read it. Returns 0 or an errno. A pipe is not waited for.
    int open(const std::string &path);
    bool is_open() const { return descriptor_ >= 0; }
    // Look at the open file; `is_regular` is false for folders and pipes. Returns 0 or an errno.
    int look(Version &version, bool &is_regular) const;
    // Read so many bytes, or up to the end of the file. Returns the bytes read, or a negative errno.
    i64 read(void *to, i64 nbytes, i64 offset) const;
    void close();

private:
    int descriptor_ = -1;
};

// Where a stored object lies: all of a file, or an entry of a ZIP file.
struct StoredRange {
    i64 offset = 0, nbytes = -1;  // less than 0: not stored
};

// The version of the file at a path now; that of no file where there is none.
Version version_at(const std::string &path);
// Whether nothing at all is stored at a path: a link to a missing file is something.
bool is_missing(const std::string &path);
bool exists(const std::string &path);

// A file by its path, as it was when somebody looked at it.
struct Look {
    std::string path;
    i64 device, inode, nbytes, written, changed;
    bool holds() const;
};

}  // namespace lc
