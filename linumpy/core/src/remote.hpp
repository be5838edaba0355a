// Requests to object stores, which a function of the caller carries out.
#pragma once

#include <atomic>
#include <string>

#include "common.hpp"
#include "core.h"
#include "files.hpp"

namespace lc {

struct Failure;

// What a request has brought.
struct Fetched {
    i64 nbytes;  // that were written
    Version version;
};

void set_fetch(lc_fetch_object function, i64 requests);
// In a forked child: requests of the parent do not end here.
void forget_requests();

// Carry out one request; see lc_fetch. Waits while as many are under way as may be. Returns false where it failed, and
// where the reader is closing before it begins.
bool fetch(i64 store, const std::string &key, i64 offset, i64 nbytes, u8 *to, i64 capacity, Fetched &fetched,
           Failure &failure, const std::atomic<bool> &closing);
// The version of an object now; that of no object where there is none, or where the store does not tell.
Version version_in_store(i64 store, const std::string &key, const std::atomic<bool> &closing);
// Whether a store tells one content of an object from another.
inline bool is_told(const Version &version) { return version.inode || version.seconds; }

}  // namespace lc
