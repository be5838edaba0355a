// Requests to object stores, which a function of the caller carries out.
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

// What a request has brought: bytes that are lent, until this ends.
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
        std::swap(loan_, other.loan_);
        return *this;
    }
    ~Fetched();

    const u8 *data = nullptr;
    i64 nbytes = -1;
    Version version;

private:
    i64 loan_ = 0;
};

void set_fetch(lc_fetch_object function, i64 requests);
// In a forked child: requests of the parent do not end here.
void forget_requests();

// Carry out one request; see lc_fetch. Waits while as many are under way as may be. Returns false where it failed, and
// where it is given up before it begins.
bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, i64 capacity, Fetched &fetched, Failure &failure,
           const std::function<bool()> &given_up);
// The version of an object now; that of no object where there is none, or where the store does not tell.
Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing);
// Whether a store tells one content of an object from another.
inline bool is_told(const Version &version) { return version.inode || version.seconds; }

}  // namespace lc
