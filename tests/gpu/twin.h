// A GPU of one lane, for tests: the decoders' own source, compiled by a C++ compiler.
#pragma once
#include <cstdint>
#include <cstring>
#define HOST_TWIN
#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __restrict__
struct Dim { unsigned x, y, z; };
extern "C" { unsigned block_y = 0; }
struct BlockIdx { unsigned x = 0; unsigned &y = block_y; };
static Dim threadIdx{0, 0, 0}, blockDim{1, 1, 1}, gridDim{1, 1, 1};
static BlockIdx blockIdx;
struct alignas(16) uint4 { unsigned x, y, z, w; };
#define LANES 1
#define FULL 1u
static inline int lane_id() { return 0; }
static inline unsigned vote(bool p) { return p; }
template <class T> static inline T from_lane(T v, int) { return v; }
template <class T> static inline T from_below(T v, int) { return v; }
static inline void sync_warp() {}
static inline void sync_block() {}
static inline bool block_any(bool p) { return p; }
template <class T> static inline T load_once(const T *p) { return *p; }
static inline unsigned funnel(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<unsigned long long>(high) << 32) >> shift);
}
static inline unsigned shifted_right(unsigned v, unsigned by) { return by < 32 ? v >> by : 0; }
static inline unsigned shifted_left(unsigned v, unsigned by) { return by < 32 ? v << by : 0; }
#define RING_IN_SHARED(name) static __attribute__((aligned(16))) unsigned char name[1 << 18]
#define TEAM_WARPS 1
static inline unsigned remainder_of(unsigned a, unsigned b) { return a % b; }
static inline void sync_team() {}
static inline bool any_in_team(bool p) { return p; }
#define READER_WARP true
#define IN_TEAM true
#define TEAM_RANK 0
#define BEHIND_READER 1
#define FIRST_TASK true
#define SECOND_TASK true
static inline unsigned any_of(unsigned bits) { return bits; }
static inline int bits_set(unsigned v) { return __builtin_popcount(v); }
static inline int leading_zeros(unsigned v) { return v ? __builtin_clz(v) : 32; }
static inline void atomicCAS(int *p, int expected, int value) { if (*p == expected) *p = value; }
static inline unsigned long long atomicAdd(unsigned long long *p, unsigned long long n) { auto old = *p; *p += n; return old; }
static inline void atomicXor(unsigned *p, unsigned v) { *p ^= v; }
