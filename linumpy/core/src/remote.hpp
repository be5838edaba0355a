// Requests to object stores, carried out by a function of the caller.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>

#include "common.hpp"
#include "core.h"
#include "files.hpp"

namespace lc {

struct Failure;

// The response to a request: bytes that are lent until this object is destroyed, and the version of the stored object.
class Fetched {
public:
    Fetched() = default;
    explicit Fetched(const lc_fetch &record)
        : data(reinterpret_cast<const u8 *>(record.address)), nbytes(record.got),
          version{static_cast<u64>(record.version[0]), record.size, record.version[1], 0}, loan_(record.loan) {}
    Fetched(Fetched &&other) noexcept { *this = std::move(other); }
    Fetched &operator=(Fetched &&other) noexcept {
        data = other.data;
        nbytes = other.nbytes;
        version = other.version;
        hedges = other.hedges;
        std::swap(loan_, other.loan_);
        return *this;
    }
    ~Fetched();

    const u8 *data = nullptr;
    i64 nbytes = -1;
    Version version;
    i64 hedges = 0;  // second requests that were sent because the first took long

private:
    i64 loan_ = 0;
};

void set_fetch(lc_fetch_object function);
void set_hedging(bool allowed);
// In a forked child: forget the requests of the parent.
void forget_requests();
// Wait for all requests in flight, also late ones of which the second request was faster, and end their threads.
void stop_requests() noexcept;

// Carry out one request; see lc_fetch. Waits while the maximum number of requests is in flight. Sends it again if the
// response breaks off or is late. Returns false, with the reason in `failure`, if the request failed or `is_cancelled`
// returned true before it began.
bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, i64 capacity, Fetched &fetched, Failure &failure,
           const std::function<bool()> &is_cancelled);
// The current version of an object; `Version{}` if there is none, or the store reports no version.
Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing);
// Whether the store reported a version.
inline bool is_known(const Version &version) { return version.inode || version.seconds; }

}  // namespace lc
