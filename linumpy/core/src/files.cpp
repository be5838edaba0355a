#include "files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

namespace lc {

namespace faults {
Fault armed[KINDS];
}

int File::open(const std::string &path) {
    close();
    if (i64 number = faults::due(faults::OPEN)) return static_cast<int>(number);
    int descriptor;
    do descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (descriptor < 0 && errno == EINTR);
    if (descriptor < 0) return errno;
    descriptor_ = descriptor;
    return 0;
}

static Version version_of(const struct stat &status) {
    return {status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

int File::stat(Version &version, bool &is_regular) const {
    if (i64 number = faults::due(faults::FSTAT)) return static_cast<int>(number);
    struct stat status;
    if (::fstat(descriptor_, &status)) return errno;
    version = version_of(status);
    is_regular = S_ISREG(status.st_mode);
    return 0;
}

i64 File::read(void *to, i64 nbytes, i64 offset) const {
    constexpr i64 MAX_STEP = 1 << 30;  // Linux reads at most 2 GiB at a time
    i64 shorter = 0;
    if (i64 number = faults::due(faults::PREAD)) {
        if (number > 0) return -number;
        shorter = std::min(nbytes, -number);
    }
    i64 done = 0;
    while (done < nbytes - shorter) {
        const i64 step = std::min(MAX_STEP, nbytes - shorter - done);
        const ssize_t got =
            ::pread(descriptor_, static_cast<u8 *>(to) + done, static_cast<size_t>(step), offset + done);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) break;
        done += got;
    }
    return done;
}

void File::close() {
    if (descriptor_ < 0) return;
    faults::due(faults::CLOSE);  // Linux has closed the descriptor even where close reports an error
    ::close(descriptor_);
    descriptor_ = -1;
}

Version version_at(const std::string &path) {
    struct stat status;
    return faults::due(faults::FSTAT) || ::stat(path.c_str(), &status) ? Version{} : version_of(status);
}

bool is_missing(const std::string &path) {
    struct stat status;
    return ::lstat(path.c_str(), &status) && (errno == ENOENT || errno == ENOTDIR);
}

bool exists(const std::string &path) {
    struct stat status;
    return ::stat(path.c_str(), &status) == 0;
}

// Compares the ctime, too: a program that rewrites a file may keep inode and size, and restore the modification time.
bool FileState::is_current() const {
    struct stat status{};
    if (::stat(path.c_str(), &status)) return !inode && !nbytes && !changed;
    const auto nanoseconds = [](const timespec &time) { return i64{time.tv_sec} * 1'000'000'000 + time.tv_nsec; };
    return static_cast<i64>(status.st_dev) == device && static_cast<i64>(status.st_ino) == inode &&
           status.st_size == nbytes && nanoseconds(status.st_mtim) == written && nanoseconds(status.st_ctim) == changed;
}

}  // namespace lc
