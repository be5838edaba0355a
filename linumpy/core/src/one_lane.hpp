// What CUDA sources need to be compiled as host code in which a launch is a loop over blocks of one thread.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "copy.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#ifndef __restrict__
#define __restrict__ __restrict
#endif

namespace one_lane {
using std::max;
using std::min;

struct Index { unsigned x; };
constexpr Index threadIdx{0};
thread_local inline Index blockIdx{0};

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

inline void __syncwarp() {}
template <class T> T __shfl_sync(unsigned, T value, int) { return value; }
template <class T> T __shfl_up_sync(unsigned, T value, int) { return value; }
template <class T> T __shfl_xor_sync(unsigned, T value, int) { return value; }
inline unsigned __ballot_sync(unsigned, bool value) { return value; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, int by) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> by);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
template <class T> T atomicAdd(T *at, T value) {
    const T before = *at;
    *at += value;
    return before;
}
inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
}  // namespace one_lane
