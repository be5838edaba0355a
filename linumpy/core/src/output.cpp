// Writes files and lists folders without Python's lock. A Python thread that writes many small files would wait for the
// lock after each system call; the waits would take longer than the calls.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "codecs.hpp"
#include "core.h"
#include "files.hpp"

namespace lc {

static int open_new(const std::string &path) {
    if (i64 number = faults::due(faults::OPEN)) {
        errno = static_cast<int>(number);
        return -1;
    }
    int descriptor;
    do descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    while (descriptor < 0 && errno == EINTR);
    return descriptor;
}

static int write_all(int descriptor, iovec *parts, int count) {
    while (count) {
        ssize_t written = ::writev(descriptor, parts, count);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        for (; count && static_cast<size_t>(written) >= parts->iov_len; ++parts, --count)
            written -= static_cast<ssize_t>(parts->iov_len);
        if (count) {
            parts->iov_base = static_cast<u8 *>(parts->iov_base) + written;
            parts->iov_len -= static_cast<size_t>(written);
        }
    }
    return 0;
}

static int write_file(const std::string &path, u8 *data, i64 nbytes, bool with_checksum) {
    const int descriptor = open_new(path);
    if (descriptor < 0) return errno;
    u8 stored[4] = {};
    iovec parts[2] = {{data, static_cast<size_t>(nbytes)}, {stored, 4}};
    if (with_checksum) {
        const u32 value = crc32c(data, static_cast<size_t>(nbytes));
        for (int n = 0; n < 4; ++n) stored[n] = static_cast<u8>(value >> 8 * n);
    }
    const int code = write_all(descriptor, parts, with_checksum ? 2 : 1);
    return ::close(descriptor) && !code && errno != EINTR ? errno : code;
}

static int write_files(const lc_output &output, i64 &number) {
    const std::string suffix = output.suffix;
    for (number = 0; number < output.count; ++number) {
        const std::string path = output.paths[number];
        const i64 begin = output.bounds[2 * number], end = output.bounds[2 * number + 1];
        u8 *data = static_cast<u8 *>(output.base) + begin;
        if (const int code = write_file(path + suffix, data, end - begin, output.with_checksum)) return code;
        if (!suffix.empty() && ::rename((path + suffix).c_str(), path.c_str())) return errno;
    }
    return 0;
}

struct FolderEntry {
    std::string name;
    bool is_folder;
};

// Append a line for each file below a folder, sorted by name: properties that change when the file is rewritten.
// Returns 0 or an errno.
static int list_files(const std::string &folder, const std::string &prefix, std::string &text) {
    DIR *handle = ::opendir(folder.c_str());
    if (!handle) return errno;
    std::vector<FolderEntry> entries;
    errno = 0;
    while (const dirent *entry = ::readdir(handle)) {
        const std::string name = entry->d_name;
        if (name == "." || name == "..") continue;
        bool is_folder = entry->d_type == DT_DIR;
        struct stat status;
        if (entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN)
            is_folder = !::stat((folder + "/" + name).c_str(), &status) && S_ISDIR(status.st_mode);
        entries.push_back({name, is_folder});
        errno = 0;
    }
    const int code = errno;
    ::closedir(handle);
    if (code) return code;
    std::sort(entries.begin(), entries.end(),
              [](const FolderEntry &a, const FolderEntry &b) { return a.name < b.name; });
    for (const auto &[name, is_folder] : entries) {
        if (is_folder) {
            if (const int error = list_files(folder + "/" + name, prefix + name + "/", text)) return error;
            continue;
        }
        struct stat status;
        if (name.rfind(".nfs", 0) == 0) continue;  // on NFS: a removed file that is still open
        if (::stat((folder + "/" + name).c_str(), &status)) {
            if (errno == ENOENT) continue;  // removed meanwhile
            return errno;
        }
        const i64 nanoseconds = status.st_mtim.tv_sec * 1'000'000'000LL + status.st_mtim.tv_nsec;
        text += prefix + name;
        text += '\0';
        text +=
            std::to_string(status.st_size) + ' ' + std::to_string(nanoseconds) + ' ' + std::to_string(status.st_ino);
        text += '\n';
    }
    return 0;
}

}  // namespace lc

extern "C" {

int64_t lc_write_files(const lc_output *output, int64_t *number) {
    try {
        return lc::write_files(*output, *number);
    } catch (const std::bad_alloc &) {
        return ENOMEM;
    }
}

int64_t lc_list_files(const char *folder, char **text, int64_t *nbytes) {
    try {
        std::string list;
        if (const int code = lc::list_files(folder, "", list)) return code;
        *text = static_cast<char *>(std::malloc(list.size() + 1));
        if (!*text) return ENOMEM;
        std::memcpy(*text, list.data(), list.size());
        *nbytes = static_cast<int64_t>(list.size());
        return 0;
    } catch (const std::bad_alloc &) {
        return ENOMEM;
    }
}

void lc_free(void *memory) { std::free(memory); }

}  // extern "C"
