// Allocations of C++ in the test binary, of which some fail.
#pragma once

#include <cstdint>

// Let `count` allocations fail, from the `nth` next one on (1: the next); count 0: none.
void fail_allocations(int64_t nth, int64_t count);
// Allocations that have failed since then.
int64_t failed_allocations();
// Whether allocations of this thread do not count: those of the test itself.
void spare_this_thread(bool spare);
