// One file: open, stat, read, close. All reads of files by the core go through this class.
#pragma once

#include <string>

#include "common.hpp"

namespace lc {

// Version of a file: inode, size, and time of the last modification. For an object in an object store: the size, and
// two words of a digest in place of inode and seconds.
struct Version {
    u64 inode = 0;
    i64 nbytes = -1, seconds = 0, nanoseconds = 0;
    bool operator==(const Version &) const = default;
};

// The storage that holds the files of one device number: how long reads of it wait.
class Storage {
public:
    // The storage of a device number; it lives as long as the process.
    static Storage &of(u64 device);
    // The storage of the file at a path; null if no storage of the process is slow, or there is no file.
    static Storage *of_file(const std::string &path);
    // Whether reads wait so long that more threads than cores should read.
    bool is_slow() const { return wait() >= SLOW_SECONDS; }
    // Typical seconds that a read waits, in addition to its copying.
    double wait() const { return wait_.load(std::memory_order_relaxed); }
    // Note how long one read waited.
    void note(double seconds);
    // Whether the next read of this thread must be measured: all at first and of slow storage, else a part.
    bool is_measured();

private:
    static constexpr double SLOW_SECONDS = 3e-4;
    std::atomic<u64> device_{0};  // device number + 1; 0: not in use
    std::atomic<double> wait_{0};
    std::atomic<i64> measured_{0};
};

class File {
public:
    File() = default;
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    ~File() { close(); }

    // Open a file for reading. Returns 0 or an errno. Does not block on a pipe. While no descriptor is free, waits some
    // seconds for other reads to close their files. `storage`: where the file is, if known.
    int open(const std::string &path, Storage *storage = nullptr);
    bool is_open() const { return descriptor_ >= 0; }
    // Get the version of the open file; `is_regular` is false for folders and pipes. Returns 0 or an errno.
    int stat(Version &version, bool &is_regular) const;
    // As `stat`, and find the storage, before the file is read.
    int locate(Version &version, bool &is_regular);
    // Read `nbytes` bytes, or up to the end of the file. Returns the number of bytes read, or a negative errno.
    i64 read(void *to, i64 nbytes, i64 offset) const;
    void close();
    Storage *storage() const { return storage_; }

private:
    int open_once(const std::string &path);
    Storage *storage_ = nullptr;
    int descriptor_ = -1;
};

// Byte range of a stored object in its file: all of it, or an entry of a ZIP file.
struct StoredRange {
    i64 offset = 0, nbytes = -1;  // nbytes below 0: not stored, or not located yet
};

// The current version of the file at a path; `Version{}` if there is none.
Version version_at(const std::string &path);
// Whether nothing exists at a path, not even a link to a missing file.
bool is_missing(const std::string &path);
bool exists(const std::string &path);

// The recorded state of a file: a copy of lc_look.
struct FileState {
    std::string path;
    i64 device, inode, nbytes, written, changed;
    // Whether the file at the path is still in this state.
    bool is_current() const;
};

}  // namespace lc
