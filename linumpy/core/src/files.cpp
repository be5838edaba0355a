#include "files.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "pool.hpp"

namespace lc {

namespace faults {
Fault armed[KINDS];
}

namespace {

std::array<Storage, 64> storages;  // the last one also for all devices for which there is no other
std::atomic<bool> any_slow{false};
std::atomic<i64> closed{0};  // number of files that were closed
// While no descriptor is free: the interval of attempts to open a file, the seconds after the last close of a file after
// which they end, and the seconds after which they end in any case.
constexpr std::chrono::milliseconds FULL_INTERVAL{5};
constexpr double FULL_SECONDS = 2, MAX_FULL_SECONDS = 30;

// Counts how often this thread slept, in a file system or elsewhere.
i64 sleeps() {
    rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) ? 0 : usage.ru_nvcsw;
}

}  // namespace

Storage &Storage::of(u64 device) {
    for (Storage &storage : storages) {
        u64 known = storage.device_.load(std::memory_order_relaxed);
        if (!known && storage.device_.compare_exchange_strong(known, device + 1)) return storage;
        if (known == device + 1) return storage;
    }
    return storages.back();
}

Storage *Storage::of_file(const std::string &path) {
    struct stat status;
    if (!any_slow.load(std::memory_order_relaxed) || ::stat(path.c_str(), &status)) return nullptr;
    return &of(status.st_dev);
}

// A moving average that rises faster than it falls. Two reads that wait make a storage slow, one does not.
void Storage::note(double seconds) {
    const double before = wait(), difference = seconds - before;
    double change = (difference > 0 ? 0.25 : 0.05) * difference;
    if (!is_slow()) change = std::min(change, 0.5 * SLOW_SECONDS);
    wait_.store(before + change, std::memory_order_relaxed);
    if (is_slow()) any_slow.store(true, std::memory_order_relaxed);
}

bool Storage::is_measured() {
    constexpr i64 FIRST = 64;
    static thread_local u32 count = 0;
    if (is_slow()) return true;
    if (measured_.load(std::memory_order_relaxed) < FIRST)
        return measured_.fetch_add(1, std::memory_order_relaxed) < FIRST;
    return ++count % 8 == 0;
}

int File::open_once(const std::string &path) {
    if (i64 number = faults::due(faults::OPEN)) return static_cast<int>(number);
    do descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    while (descriptor_ < 0 && errno == EINTR);
    return descriptor_ < 0 ? errno : 0;
}

int File::open(const std::string &path, Storage *storage) {
    close();
    {
        const StorageWait wait(storage && storage->is_slow());
        if (const int number = open_once(path); number != EMFILE && number != ENFILE) return number;
    }
    // Other reads close their files soon, unless others than the core hold the descriptors.
    const StorageWait wait(true);
    const double begin = now();
    i64 known = -1;
    for (double last_close = begin;;) {
        std::this_thread::sleep_for(FULL_INTERVAL);
        const int number = open_once(path);
        const double time = now();
        if (const i64 count = closed.load(std::memory_order_relaxed); count != std::exchange(known, count))
            last_close = time;
        const bool is_over = time - last_close > FULL_SECONDS || time - begin > MAX_FULL_SECONDS;
        if ((number != EMFILE && number != ENFILE) || is_over) return number;
    }
}

static Version version_of(const struct stat &status) {
    return {status.st_ino, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

static int describe(int descriptor, Version &version, bool &is_regular, u64 &device) {
    if (i64 number = faults::due(faults::FSTAT)) return static_cast<int>(number);
    struct stat status;
    if (::fstat(descriptor, &status)) return errno;
    version = version_of(status);
    is_regular = S_ISREG(status.st_mode);
    device = status.st_dev;
    return 0;
}

int File::stat(Version &version, bool &is_regular) const {
    u64 device;
    return describe(descriptor_, version, is_regular, device);
}

int File::locate(Version &version, bool &is_regular) {
    u64 device;
    if (const int number = describe(descriptor_, version, is_regular, device)) return number;
    storage_ = &Storage::of(device);
    return 0;
}

constexpr double COPIED_PER_SECOND = 1e9;

i64 File::read(void *to, i64 nbytes, i64 offset) const {
    constexpr i64 MAX_STEP = 1 << 30;  // Linux reads at most 2 GiB at a time
    i64 shorter = 0;
    if (i64 number = faults::due(faults::PREAD)) {
        if (number > 0) return -number;
        shorter = std::min(nbytes, -number);
    }
    const StorageWait wait(storage_ && storage_->is_slow());
    const bool is_measured = storage_ && storage_->is_measured();
    const double begin = is_measured ? now() : 0;
    const i64 slept = is_measured ? sleeps() : 0;
    faults::delay();
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
    if (is_measured) {
        // A thread that never slept waited for a core or copied, however long that took.
        const double seconds = now() - begin - static_cast<double>(done) / COPIED_PER_SECOND;
        storage_->note(sleeps() == slept ? 0 : std::max(0.0, seconds));
    }
    return done;
}

void File::close() {
    if (descriptor_ < 0) return;
    faults::due(faults::CLOSE);  // Linux has closed the descriptor even where close reports an error
    ::close(descriptor_);
    closed.fetch_add(1, std::memory_order_relaxed);
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
