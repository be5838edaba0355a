// Shared by all parts of the core: short type names, memory, errors, and fault injection for tests.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "core.h"

namespace lc {

using i64 = int64_t;
using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

// Maximum bytes of a chunk, of the index of a shard, and of one read. No memory holds as many; sums of a few of them do
// not overflow.
constexpr i64 MAX_NBYTES = i64{1} << 60;

inline double now() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

// Poll a condition that is expected to hold soon, for about as long as waking a sleeping thread would take. Returns
// whether the condition holds.
template <class Condition> bool spin(const Condition &holds) {
    constexpr double SECONDS = 1e-4;
    if (holds()) return true;
    for (const double end = now() + SECONDS; now() < end;) {
        std::this_thread::yield();
        if (holds()) return true;
    }
    return false;
}

// Why a chunk, a stored object or a job failed.
struct Failure {
    i64 code = LC_OK, number = 0, a = 0, b = 0;
    std::string text;
};

// Tests make the nth next call of a kind fail; see lc_fail_next.
namespace faults {
enum Kind { OPEN, FSTAT, PREAD, CLOSE, THREAD, ALLOCATE, DELAY, KINDS };
struct Fault { std::atomic<i64> left{0}, number{0}; };
extern Fault armed[KINDS];

// The errno with which this call must fail; 0 if it must not fail. Counts the call.
inline i64 due(Kind kind) {
    Fault &fault = armed[kind];
    if (fault.left.load(std::memory_order_relaxed) <= 0) return 0;
    return fault.left.fetch_sub(1) == 1 ? fault.number.load() : 0;
}

// Sleep before a read of a file, where reads are to be delayed.
inline void delay() {
    Fault &fault = armed[DELAY];
    if (fault.left.load(std::memory_order_relaxed) <= 0 || fault.left.fetch_sub(1) <= 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(fault.number.load()));
}
}  // namespace faults

// Memory for stored or decoded bytes, aligned for vector instructions. If `reserve` allocates, the content is lost.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { release(); }

    u8 *reserve(i64 nbytes) {
        if (nbytes > nbytes_) {
            release();
            if (faults::due(faults::ALLOCATE)) throw std::bad_alloc();
            data_ = static_cast<u8 *>(::operator new(static_cast<size_t>(nbytes), std::align_val_t(64)));
            nbytes_ = nbytes;
        }
        return data_;
    }
    // Free the memory if it exceeds `max_nbytes`.
    void trim(i64 max_nbytes) {
        if (nbytes_ > max_nbytes) release();
    }
    u8 *data() const { return data_; }
    i64 nbytes() const { return nbytes_; }

private:
    void release() {
        ::operator delete(data_, std::align_val_t(64));
        data_ = nullptr;
        nbytes_ = 0;
    }
    u8 *data_ = nullptr;
    i64 nbytes_ = 0;
};

}  // namespace lc
